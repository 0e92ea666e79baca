"""Learning rates at the boundaries of stages."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.checks import ConfigError
from hybrid_moe.optim.schedule import build_schedule
from hybrid_moe.run_config import OptimConfig


class ScheduleTest(parameterized.TestCase):
  def test_staged_values(self):
    optim = OptimConfig(peak_lr=1.0, warmup_fraction=0.1)
    first, second = build_schedule(optim, (100, 50))
    # Ten steps of warm-up, the last at the peak; the stage's last step is at
    # its final rate.
    np.testing.assert_allclose(
      first(jnp.array([0, 4, 9, 99])), [0.1, 0.5, 1.0, 0.1], rtol=1e-5
    )
    # Five steps from the first stage's final rate to a fifth of its peak.
    np.testing.assert_allclose(
      second(jnp.array([0, 3, 4, 49])), [0.12, 0.18, 0.2, 0.02], rtol=1e-5
    )
    # Half of the way the cosine is at the middle.
    optim = OptimConfig(peak_lr=1.0, final_lr_fraction=0.2)
    (only,) = build_schedule(optim, (101,))
    np.testing.assert_allclose(only(50), 0.6, rtol=1e-5)

  def test_each_peak_is_a_fifth_of_the_previous(self):
    schedules = build_schedule(OptimConfig(), (40, 30, 20, 10))
    peaks = [
      float(jnp.max(schedule(jnp.arange(steps))))
      for schedule, steps in zip(schedules, (40, 30, 20, 10))
    ]
    np.testing.assert_allclose(peaks[0], 2e-3, rtol=1e-6)
    np.testing.assert_allclose(np.divide(peaks[1:], peaks[:-1]), 0.2, rtol=1e-5)

  def test_warm_up_is_one_percent_and_at_least_one_step(self):
    for steps, warmup in ((1000, 10), (2900, 29), (50, 1)):
      (schedule,) = build_schedule(OptimConfig(peak_lr=1.0), (steps,))
      rates = schedule(jnp.arange(steps))
      self.assertEqual(int(jnp.argmax(rates)), warmup - 1)
      np.testing.assert_allclose(
        rates[:warmup], np.arange(1, warmup + 1) / warmup, rtol=1e-5
      )

  @parameterized.parameters('staged', 'cosine')
  def test_a_prolonged_stage_stays_at_its_last_rate(self, kind):
    optim = OptimConfig(schedule=kind)
    for schedule, steps in zip(build_schedule(optim, (40, 20)), (40, 20)):
      held = schedule(jnp.array([steps - 1, steps, steps + 500]))
      np.testing.assert_array_equal(held, jnp.full((3,), held[0]))

  def test_cosine_runs_through_all_stages(self):
    optim = OptimConfig(schedule='cosine', peak_lr=1.0, warmup_fraction=0.1)
    stages = build_schedule(optim, (40, 30, 30))
    (whole,) = build_schedule(optim, (100,))
    pieces = [s(jnp.arange(n)) for s, n in zip(stages, (40, 30, 30))]
    np.testing.assert_allclose(
      np.concatenate(pieces), whole(jnp.arange(100)), rtol=1e-6
    )
    np.testing.assert_allclose(pieces[2][-1], 0.1, rtol=1e-5)

  def test_traces_with_an_integer_step(self):
    schedule = build_schedule(OptimConfig(), (40,))[0]
    rate = jax.jit(schedule)(jnp.int32(7))
    self.assertEqual(rate.dtype, jnp.float32)
    self.assertEqual(rate.shape, ())
    np.testing.assert_allclose(rate, schedule(7), rtol=1e-6)

  def test_stages_of_one_step(self):
    rates = [s(0) for s in build_schedule(OptimConfig(peak_lr=1.0), (1, 1))]
    np.testing.assert_allclose(rates, [1.0, 0.2], rtol=1e-6)

  @parameterized.parameters(((),), ((10, 0),))
  def test_rejects_empty_stages(self, stage_steps):
    with self.assertRaisesRegex(ConfigError, 'stage_steps'):
      build_schedule(OptimConfig(), stage_steps)


if __name__ == '__main__':
  absltest.main()
