"""When a stage hands over to a longer context."""

import json
import math

from absl.testing import absltest, parameterized

from hybrid_moe import extension
from hybrid_moe.extension import Stability
from hybrid_moe.run_config import ExtensionConfig

NAN = math.nan


def after(*evaluations):
  stability = Stability()
  for losses in evaluations:
    stability.add(losses)
  return stability


class ExtensionTest(parameterized.TestCase):
  @parameterized.parameters(
    # Nothing measured, or only once: nothing is worse than its best.
    ((), []),
    (([3.0, 4.0],), []),
    # Falling, and risen within the tolerance of 0.1.
    (([3.0, 4.0], [2.5, 4.1]), []),
    # Risen by more, in the second bucket.
    (([3.0, 4.0], [2.5, 4.11]), [1]),
    # The best counts, not the evaluation before.
    (([3.0], [2.0], [2.05], [2.11]), [0]),
    # Recovered.
    (([3.0], [3.5], [2.9]), []),
    # A loss that became nan or infinite is unstable.
    (([3.0, 4.0], [NAN, math.inf]), [0, 1]),
    # A bucket that never had targets is not; one that got them later may be.
    (([NAN, 3.0], [NAN, 3.0]), []),
    (([NAN], [3.0], [3.2]), [0]),
  )
  def test_unstable_buckets(self, evaluations, want):
    self.assertEqual(after(*evaluations).unstable_buckets(0.1), want)

  def test_best_survives_nan(self):
    self.assertEqual(after([3.0], [NAN], [2.0], [NAN]).best, [2.0])

  def test_json_round_trip(self):
    stability = after([3.0, NAN], [3.5, NAN])
    text = json.dumps(stability.to_json(), allow_nan=False)
    again = Stability.from_json(json.loads(text))
    self.assertEqual(again.to_json(), stability.to_json())
    self.assertTrue(math.isnan(again.best[1]))
    self.assertEqual(again.unstable_buckets(0.1), [0])

  def test_planned_steps(self):
    config = ExtensionConfig(piece_share=0.25)
    steps = [extension.planned_steps(config, 100, p) for p in range(3)]
    self.assertEqual(steps, [100, 125, 150])
    # A short stage still goes on by a whole step.
    self.assertEqual(extension.planned_steps(config, 1, 2), 3)

  def test_prolongs_on_evidence_only_and_not_for_ever(self):
    unstable, stable = after([1.0], [2.0]), after([2.0], [1.0])
    config = ExtensionConfig(on_evidence=True, max_pieces=2)
    self.assertTrue(extension.should_prolong(config, unstable, 0))
    self.assertTrue(extension.should_prolong(config, unstable, 1))
    self.assertFalse(extension.should_prolong(config, unstable, 2))
    self.assertFalse(extension.should_prolong(config, stable, 0))
    off = ExtensionConfig(on_evidence=False)
    self.assertFalse(extension.should_prolong(off, unstable, 0))


if __name__ == '__main__':
  absltest.main()
