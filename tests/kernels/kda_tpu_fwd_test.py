"""KDA's forward kernel for TPU: tiers, head counts, cores and compilers."""

import functools
import itertools
import pathlib
import runpy
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.kda import (
  agreement,
  arg_specs,
  kda,
  kernel_weave,
  mosaic_tpu_fwd,
  mosaic_tpu_op,
  mosaic_tpu_views,
  operands,
  tile,
)

interpreted = runpy.run_path(
  pathlib.Path(__file__).with_name('tpu_interpreter.py')
)['interpreted']

QUICK = {'xla_backend_optimization_level': 0}


@functools.cache
def make_call(implementation, options, interpreter):
  """A jitted call, compiled once for each shape."""
  del interpreter  # A call is traced under one set of its settings.
  return jax.jit(
    lambda x: kda(
      **x,
      implementation=implementation,
      return_final_state=True,
      **dict(options),
    ),
    compiler_options=QUICK,
  )


def run(inputs, options=(), implementation='mosaic_tpu', **interpreter):
  """Outputs and final state."""
  call = make_call(implementation, options, tuple(interpreter.items()))
  with interpreted(implementation, **interpreter):
    return jax.block_until_ready(call(inputs))


def errors_of(inputs, options=(), **interpreter):
  """Errors of outputs and final state against the reference."""
  outputs = run(inputs, options, **interpreter)
  exact = {name: x.astype(jnp.float32) for name, x in inputs.items()}
  expected = run(exact, options, 'reference')
  return [agreement.relative_rms(x, y) for x, y in zip(outputs, expected)]


def hard_inputs(heads=1, tokens=256):
  """Positive, hence correlated keys with little decay."""
  spec = arg_specs.ArgSpec(1, tokens, heads, heads, 128, 128, 'bfloat16')
  inputs = arg_specs.make_inputs(spec)
  rng = np.random.default_rng(0)
  for name in ('q', 'k'):
    inputs[name] = jnp.asarray(rng.random(inputs[name].shape), jnp.bfloat16)
  inputs['g'] = inputs['g'] / 2 - 6
  return inputs


class KernelTest(parameterized.TestCase):
  @parameterized.parameters(
    # A pair and one alone, two pairs of shared keys, and heads that share keys
    # over several grid steps.
    (3, 3, 3),
    (2, 4, 4),
    (1, 4, 2),
  )
  def test_head_counts(self, heads, value_heads, step_heads):
    spec = arg_specs.ArgSpec(1, 70, heads, value_heads, 128, 128, 'bfloat16')
    inputs = arg_specs.make_inputs(spec)
    for error in errors_of(inputs, heads=step_heads):
      self.assertLess(error, 5e-3)

  @parameterized.parameters(
    ('fast', 2e-2), ('default', 7e-3), ('high', 2.5e-3), ('highest', 2e-3)
  )
  def test_tiers_on_hard_inputs(self, precision, bound):
    options = (('precision', precision),)
    o_error, final_error = errors_of(hard_inputs(), options, chunk=128)
    self.assertLess(o_error, bound)
    # Outputs are rounded to bfloat16, the state is not.
    limit = {'high': 1.5e-3, 'highest': 1e-5}.get(precision, bound)
    self.assertLess(final_error, limit)

  def test_beta_up_to_two_refines_the_solve(self):
    options = (('allow_neg_eigval', True),)
    for error in errors_of(hard_inputs(), options):
      self.assertLess(error, 3e-3)

  def test_a_later_gate_changes_nothing_before_it(self):
    # Chunks of 128 and a pair of heads, one of which has its tiles reversed.
    spec = arg_specs.ArgSpec(1, 256, 2, 2, 128, 128, 'bfloat16')
    inputs = arg_specs.make_inputs(spec)
    before = np.asarray(run(inputs, chunk=128)[0], np.float32)
    for first in (21, 127, 200):
      later = (jnp.arange(256) >= first)[None, :, None, None]
      changed = {**inputs, 'g': jnp.where(later, -9, inputs['g'])}
      after = np.asarray(run(changed, chunk=128)[0], np.float32)
      np.testing.assert_array_equal(after[:, :first], before[:, :first])

  def test_two_cores_share_rows_and_heads_but_no_chunks(self):
    spec = arg_specs.ArgSpec(2, 192, 2, 2, 128, 128, 'bfloat16')
    inputs = arg_specs.make_inputs(spec)
    expected = run(inputs, heads=1)
    actual = run(inputs, heads=1, cores=2)
    for x, y in zip(actual, expected):
      np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

  def test_narrow_arithmetic(self):
    spec = arg_specs.ArgSpec(1, 130, 2, 2, 128, 128, 'bfloat16')
    inputs = arg_specs.make_inputs(spec)
    with mock.patch.object(tile, 'is_narrow', lambda _: True):
      # Three heads at most, to be traced apart from other tests' calls.
      for error in errors_of(inputs, heads=3):
        self.assertLess(error, 5e-3)


class SettingsTest(parameterized.TestCase):
  def settings(self, **changes):
    config = operands.KdaConfig(-5.0, 1.0, True, True, False, True, 'default')
    return mosaic_tpu_fwd.TpuConfig(config, 128, 8, **changes)

  def choose(self, spec, **changes):
    arguments = dict(arg_specs.abstract_inputs(spec))
    arrays = operands.Operands(*arguments.values())
    config = dict(
      lower_bound=-5.0,
      scale=1.0,
      qk_l2norm=True,
      beta_sigmoid=True,
      allow_neg_eigval=False,
      gate_in_kernel=True,
      precision='default',
    )
    config = operands.KdaConfig(**{**config, **changes})
    packing = operands.Packing(None, None, None)
    return mosaic_tpu_op.choose_settings(arrays, packing, config)

  @parameterized.parameters(
    (32, 32, 128, 8),
    (32, 64, 128, 8),
    (1, 12, 128, 6),
    (3, 9, 128, 3),
    (7, 7, 128, 7),
    (11, 11, 128, 1),
    (8, 8, 256, 8),
  )
  def test_heads_a_step(self, heads, value_heads, width, expected):
    spec = arg_specs.ArgSpec(1, 512, heads, value_heads, width, width)
    low = arg_specs.ArgSpec(*list(vars(spec).values())[:-1], 'bfloat16')
    settings = self.choose(low)
    self.assertEqual((settings.chunk, settings.heads), (128, expected))
    self.assertFalse(settings.packed)
    exact = self.choose(spec)
    self.assertLessEqual(exact.heads, expected)
    self.assertTrue(exact.exact)

  def test_levels_and_padding(self):
    spec = arg_specs.ArgSpec(1, 60, 2, 2, 64, 64, 'bfloat16')
    self.assertEqual(self.choose(spec).level, mosaic_tpu_fwd.DEFAULT)
    refined = self.choose(spec, allow_neg_eigval=True)
    self.assertEqual(refined.level, mosaic_tpu_fwd.HIGH)
    fast = self.choose(spec, allow_neg_eigval=True, precision='fast')
    self.assertEqual(fast.level, mosaic_tpu_fwd.FAST)
    self.assertEqual(self.choose(spec).chunk, 64)
    self.assertTrue(self.choose(spec).packed)

  def test_tuned_tiles_are_settings(self):
    for entry in tile._tuned_tiles():
      order = {
        name: tuple(x) if isinstance(x, list) else x
        for name, x in entry['order'].items()
      }
      mosaic_tpu_fwd.WeaveConfig(**order)
      self.assertLen(entry['dims'], 2)
      self.assertIn(entry['chunk'], (64, 128))
      self.assertLessEqual(entry['heads'], 8)

  def test_vmem_counts_whole_tiles(self):
    self.assertEqual(tile.padded_bytes((3, 9, 130), jnp.float32), 3 * 16 * 1024)
    self.assertEqual(tile.padded_bytes((9, 8), jnp.bfloat16), 16 * 256)
    self.assertEqual(tile.padded_bytes((8,), jnp.float32), 8 * 512)

  def test_parts_of_the_stack_fill_it(self):
    for level, rows in ((0, 256), (1, 384), (2, 768), (3, 256)):
      parts = mosaic_tpu_views.stack_rows(self.settings(level=level), 128)
      self.assertEqual(parts[0].start, 0)
      for before, after in itertools.pairwise(parts):
        self.assertEqual(before.stop, after.start)
      self.assertEqual(parts[-1].stop, rows)

  def test_sums_matrix(self):
    rng = np.random.default_rng(0)
    x = rng.random((128, 3))
    sums = mosaic_tpu_views.sums_matrix(128) @ x
    total = np.cumsum(x, 0)
    first = total[::16]
    inner = total - np.repeat(first, 16, axis=0)
    np.testing.assert_allclose(sums[:128], inner, atol=1e-12)
    np.testing.assert_allclose(sums[128:136], first)
    np.testing.assert_allclose(sums[137:144], np.diff(first, axis=0))
    np.testing.assert_array_equal(sums[136], 0)


class WeaveTest(absltest.TestCase):
  def stage(self, name, count, log):
    for i in range(count):
      log.append((name, i))
      yield

  def test_stages_take_turns_until_all_have_ended(self):
    log = []
    stages = [self.stage(name, n, log) for name, n in (('a', 1), ('b', 3))]
    self.assertLen(list(kernel_weave.take_turns(stages)), 4)
    expected = [('a', 0), ('b', 0), ('b', 1), ('b', 2)]
    self.assertEqual(log, expected)

  def test_pieces_run_when_they_are_due(self):
    log = []
    kernel_weave.weave(
      kernel_weave.Stream(self.stage(name, 2, log), 2, start, end)
      for name, start, end in (('late', 0.5, 1.5), ('early', 0.0, 1.0))
    )
    self.assertEqual(
      log, [('early', 0), ('late', 0), ('early', 1), ('late', 1)]
    )


if __name__ == '__main__':
  absltest.main()
