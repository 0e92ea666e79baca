"""Means over batches, and what has no targets."""

import math
import types

import numpy as np
from absl.testing import absltest

from hybrid_moe import metrics
from hybrid_moe.evaluation import evaluate


def _evaluate(parts):
  """Evaluates batches of which each part is its own sums."""
  program = types.SimpleNamespace(
    stage=types.SimpleNamespace(seq_len=128),
    put_eval_batches=lambda batch: batch,
    evaluate=lambda params, balance, part: part,
  )
  state = types.SimpleNamespace(params=None, balance=None)
  return evaluate(program, state, parts, ['text'])


def _sums(nll, counts):
  return {
    'nll_by_position': np.float32(nll),
    'count_by_position': np.int32(counts),
    'nll_by_source': np.float32([sum(nll)]),
    'count_by_source': np.int32([sum(counts)]),
  }


class EvaluationTest(absltest.TestCase):
  def test_means_are_over_targets(self):
    values = _evaluate(
      [[_sums([6.0, 0.0], [2, 0])], [_sums([3.0, 0.0], [4, 0])]]
    )
    self.assertEqual(values[metrics.LOSS], 1.5)
    self.assertEqual(values[metrics.BY_SOURCE], {'text': 1.5})
    by_position = values[metrics.BY_POSITION]
    self.assertEqual(by_position[metrics.EDGES], [0, 64, 128])
    self.assertEqual(by_position[metrics.LOSS][0], 1.5)
    self.assertTrue(math.isnan(by_position[metrics.LOSS][1]))

  def test_no_targets_have_no_loss(self):
    values = _evaluate([[_sums([0.0, 0.0], [0, 0])]])
    self.assertTrue(math.isnan(values[metrics.LOSS]))


if __name__ == '__main__':
  absltest.main()
