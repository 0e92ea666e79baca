"""A stage that does not fit is rejected before it runs."""

import dataclasses
import os

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from hybrid_moe import memory_plan
from hybrid_moe.checks import ConfigError
from hybrid_moe.memory_plan import MemoryPlanError, MemoryReport
from hybrid_moe.run_config import MemoryConfig


class _Device:
  device_kind = 'Accelerator 1'
  platform = 'accelerator'

  def __init__(self, stats):
    self._stats = stats

  def memory_stats(self):
    return self._stats


def _report(peak, available=1000):
  return MemoryReport(
    stage='64k',
    available=available,
    arguments=600,
    temporaries=peak - 600,
    outputs=500,
    aliased=500,
    code=0,
    peak=peak,
  )


class MemoryPlanTest(chex.TestCase):
  def test_report_of_a_compiled_program(self):
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    step = jax.jit(lambda a, b: (a + b @ b, b.sum()), donate_argnums=0)
    compiled = step.lower(x, x).compile()
    report = MemoryReport.from_compiled('8k', compiled, available=10 * 2**20)
    self.assertEqual(report.arguments, 2 * 256 * 256 * 4)
    self.assertEqual(report.aliased, 256 * 256 * 4)
    self.assertGreaterEqual(report.peak, report.arguments)
    self.assertAlmostEqual(report.headroom, 1 - report.peak / (10 * 2**20))

  def test_enough_headroom_passes_and_too_little_says_what_to_change(self):
    config = MemoryConfig(headroom=0.3)
    memory_plan.check(_report(700), config)
    with self.assertRaisesRegex(
      MemoryPlanError,
      r"headroom=0\.3: stage '64k' needs 800 B of a device's 1000 B.*"
      r'leaves 20% free; accepted is a peak of 700 B.*'
      r'micro_batches.*remat.*more devices',
    ):
      memory_plan.check(_report(800), config)
    memory_plan.check(_report(800), MemoryConfig(headroom=0.1))
    self.assertTrue(issubclass(MemoryPlanError, ConfigError))

  def test_stage_larger_than_the_device(self):
    with self.assertRaisesRegex(MemoryPlanError, 'leaves -50% free'):
      memory_plan.check(_report(1500), MemoryConfig(headroom=0.0))

  def test_device_memory(self):
    ask = memory_plan.device_memory_bytes
    self.assertEqual(ask(MemoryConfig(device_gib=1.5), None), 3 * 2**29)
    device = _Device({'bytes_limit': 4096})
    self.assertEqual(ask(MemoryConfig(), device), 4096)
    total = memory_plan.host_memory_bytes()
    self.assertEqual(ask(MemoryConfig(), jax.devices()[0]), total // 8)
    with self.assertRaisesRegex(MemoryPlanError, 'device_gib=0.0.*Accelera'):
      ask(MemoryConfig(), _Device(None))

  def test_a_container_has_less_than_its_machine(self):
    machine = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    ask = memory_plan.host_memory_bytes
    files = [self.create_tempfile(content=t) for t in ('max\n', '4096\n')]
    self.assertEqual(ask([files[0].full_path, 'none']), machine)
    self.assertEqual(ask([f.full_path for f in files]), 4096)

  def test_the_larger_of_two_programs_beside_one_state(self):
    step = _report(800)
    evaluate = dataclasses.replace(
      step, arguments=100, temporaries=150, outputs=0, aliased=0, peak=250
    )
    self.assertEqual(step.beside(evaluate), step)
    larger = dataclasses.replace(evaluate, temporaries=250, peak=350)
    both = step.beside(larger)
    self.assertEqual((both.arguments, both.temporaries), (600, 250))
    self.assertEqual(both.peak, 850)

  @parameterized.parameters(
    (0, '0 B'),
    (1023, '1023 B'),
    (1536, '1.5 KiB'),
    (141 * 2**30, '141.0 GiB'),
    (3 * 2**40, '3.0 TiB'),
    (-2048, '-2.0 KiB'),
  )
  def test_format_bytes(self, num_bytes, expected):
    self.assertEqual(memory_plan.format_bytes(num_bytes), expected)


if __name__ == '__main__':
  absltest.main()
