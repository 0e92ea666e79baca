"""Bad steps are found and undone; roll-backs survive kills."""

import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hybrid_moe import health
from hybrid_moe.health import RollbackError, RollbackLedger
from hybrid_moe.run_config import HealthConfig

_CONFIG = HealthConfig(spike_nats=1.0, warmup_steps=3, max_rollbacks=2)


@jax.jit
def _judge(state, loss, grad_norm):
  return health.judge(_CONFIG, state, loss, grad_norm)


def _run(losses, state=None, grad_norm=1.0):
  """Verdicts on a series of losses, and the health after it."""
  state = health.init_health() if state is None else state
  verdicts = []
  for loss in losses:
    is_bad, state = _judge(state, jnp.float32(loss), jnp.float32(grad_norm))
    verdicts.append(bool(is_bad))
  return verdicts, state


class JudgeTest(chex.TestCase):
  @parameterized.parameters(
    (np.nan, 1.0), (np.inf, 1.0), (2.0, np.nan), (2.0, np.inf)
  )
  def test_not_finite_is_bad_from_the_first_step(self, loss, grad_norm):
    verdicts, state = _run([loss], grad_norm=grad_norm)
    self.assertEqual(verdicts, [True])
    self.assertEqual(float(state.loss_mean), 0.0)
    self.assertEqual(int(state.good_steps), 0)

  def test_spike_is_bad_after_the_warm_up_alone(self):
    verdicts, _ = _run([5.0, 50.0, 5.0])
    self.assertEqual(verdicts, [False, False, False])
    verdicts, state = _run([5.0, 5.0, 5.0, 5.9, 6.5, 5.0])
    self.assertEqual(verdicts, [False, False, False, False, True, False])
    self.assertEqual(int(state.good_steps), 5)

  def test_mean_is_unbiased_from_the_first_step(self):
    _, state = _run([4.0, 4.0])
    weight = 1 - health.LOSS_MEAN_DECAY**2
    self.assertAlmostEqual(float(state.loss_mean) / weight, 4.0, places=5)

  def test_bad_steps_are_counted_and_do_not_enter_the_mean(self):
    _, before = _run([3.0] * 4)
    verdicts, after = _run([np.nan, 9.0, np.inf], before)
    self.assertEqual(verdicts, [True] * 3)
    self.assertEqual(float(after.loss_mean), float(before.loss_mean))
    self.assertEqual(int(after.skipped_in_a_row), 3)
    verdicts, after = _run([3.0], after)
    self.assertEqual(verdicts, [False])
    self.assertEqual(int(after.skipped_in_a_row), 0)
    self.assertEqual(int(after.skipped_total), 3)

  def test_restarted_mean_accepts_another_level_and_keeps_the_counts(self):
    _, state = _run([2.0] * 5 + [np.nan])
    self.assertEqual(_run([6.0], state)[0], [True])
    state = jax.jit(health.restart_mean)(state)
    verdicts, state = _run([6.0, 6.0, 6.0, 6.0, 9.0], state)
    self.assertEqual(verdicts, [False] * 4 + [True])
    self.assertEqual(int(state.skipped_total), 2)

  @parameterized.parameters(True, False)
  def test_select_keeps_or_takes_every_leaf_bit_for_bit(self, is_bad):
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec('data'))
    replicated = NamedSharding(mesh, PartitionSpec())

    def tree(value, count):
      w = jax.device_put(np.full(16, value, np.float32), sharding)
      n = jax.device_put(np.int32(count), replicated)
      return {'w': w, 'n': n, 'key': jax.random.key(count)}

    old, new = tree(1.0, 1), tree(np.nan, 2)
    with jax.set_mesh(mesh):
      got = jax.jit(health.select)(
        jax.device_put(np.bool_(is_bad), replicated), old, new
      )
    want = old if is_bad else new
    np.testing.assert_array_equal(got['w'], want['w'])
    self.assertEqual(got['w'].sharding, sharding)
    self.assertEqual(int(got['n']), int(want['n']))
    self.assertEqual(got['key'], want['key'])


class LedgerTest(chex.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = self.create_tempdir().full_path

  def _open(self):
    return RollbackLedger(self._dir, _CONFIG)

  def test_a_run_killed_after_a_roll_back_continues_where_it_would_have(self):
    ledger = self._open()
    self.assertEqual(ledger.position_after(10, default=100), 100)
    ledger.record(10, 130, 'loss was nan', skipped=3, write=True)
    self.assertEqual(ledger.position_after(10, default=100), 130)
    # Killed here: the same checkpoint, in a new process.
    again = self._open()
    self.assertEqual(again.position_after(10, default=100), 130)
    self.assertEqual(again.position_after(20, default=230), 230)
    self.assertEqual(
      again.entries,
      [
        {
          'restored_step': 10,
          'data_position': 130,
          'reason': 'loss was nan',
          'skipped': 3,
        }
      ],
    )

  def test_the_latest_roll_back_to_a_step_counts(self):
    ledger = self._open()
    ledger.record(10, 130, 'spike', skipped=3, write=True)
    ledger.record(10, 160, 'spike', skipped=3, write=True)
    self.assertEqual(self._open().position_after(10, default=100), 160)
    self.assertEqual(self._open().skipped, 6)
    # Saved anew after a roll-back to an earlier step.
    self.assertEqual(self._open().position_after(10, default=190), 190)

  def test_too_many_roll_backs_are_an_error(self):
    self._open().record(10, 130, 'spike', skipped=3, write=True)
    self._open().record(10, 160, 'spike', skipped=3, write=True)
    with self.assertRaisesRegex(
      RollbackError, 'max_rollbacks=2.*step 10: spike'
    ):
      self._open().record(10, 190, 'spike', skipped=3, write=True)
    self.assertLen(self._open().entries, 2)

  def test_other_processes_do_not_write(self):
    self._open().record(10, 130, 'spike', skipped=3, write=False)
    self.assertEmpty(list(pathlib.Path(self._dir).iterdir()))

  @parameterized.parameters('', '{"rollbacks": [{}]}', '[]')
  def test_a_file_that_is_no_ledger_is_an_error(self, text):
    path = pathlib.Path(self._dir) / 'rollbacks.json'
    path.write_text(text)
    with self.assertRaisesRegex(RollbackError, str(path)):
      self._open()


if __name__ == '__main__':
  absltest.main()
