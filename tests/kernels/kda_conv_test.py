"""The short convolution inside KDA's kernels for TPU, forward and backward."""

import functools
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
  mosaic_tpu_conv,
  mosaic_tpu_op,
  operands,
  tile,
)

_interpreter = runpy.run_path(
  pathlib.Path(__file__).with_name('tpu_interpreter.py')
)
interpreted, discharged = (
  _interpreter['interpreted'],
  _interpreter['discharged'],
)

QUICK = (('xla_backend_optimization_level', 0),)
TOKEN_ARRAYS = ('q', 'k', 'v', 'g', 'beta')
# Two whole chunks of the interpreter and part of a third.
TOKENS = 150
# Documents end at every place about the edges of a tile (16) and of a chunk
# (64), some of one or two tokens; 0 is padding, also inside a document.
PATTERNS = [
  *([e, 30, 17, 1, 2, TOKENS - 50 - e] for e in (13, 14, 15, 16, 17, 18)),
  *([10, e - 10, 2, 60, TOKENS - 62 - e] for e in (61, 62, 63, 64, 65, 66)),
]
GAPS = ((0, 2), (15, 17), (40, 41), (62, 65), (100, 130))


def make_inputs(tokens, heads=1, value_heads=1, taps=4, dtype='float32'):
  spec = arg_specs.ArgSpec(1, tokens, heads, value_heads, 64, 128, dtype)
  inputs = arg_specs.make_inputs(spec)
  rng = np.random.default_rng(1)
  for name in 'qkv':
    shape = (taps, *inputs[name].shape[2:])
    inputs[f'{name}_conv'] = jnp.asarray(rng.normal(size=shape), jnp.float32)
  return inputs


def make_segments(lengths, gaps=()):
  ids = np.repeat(np.arange(len(lengths)) + 1, lengths)
  for start, stop in gaps:
    ids[start:stop] = 0
  return jnp.asarray(ids[None], jnp.int32)


def fill_padding(inputs, ids, value):
  padding = ids == 0
  return {
    name: jnp.where(jax.lax.expand_dims(padding, range(2, x.ndim)), value, x)
    if name in TOKEN_ARRAYS
    else x
    for name, x in inputs.items()
  }


def compare(inputs, runner=discharged, **kwargs):
  """Errors of outputs and gradients against the reference."""
  with runner():
    return agreement.compare_with_reference(
      inputs, 'mosaic_tpu', compiler_options=QUICK, **kwargs
    )


@functools.cache
def forward_program(implementation, narrow=False):
  del narrow  # A call is traced under its setting.
  return jax.jit(
    lambda x, ids: kda(**x, segment_ids=ids, implementation=implementation),
    compiler_options=dict(QUICK),
  )


class FusedTest(parameterized.TestCase):
  def check(self, errors, bound=1e-5):
    for name, error in errors.items():
      # Gradients of the gate are differences of nearly equal sums; its
      # parameters take their sums over all tokens.
      limit = {'g': 5e-5, 'A_log': 1e-4, 'dt_bias': 1e-4}.get(name, bound)
      self.assertLess(error, limit, f'{name}: {errors}')

  def test_documents_that_end_at_any_place(self):
    inputs = make_inputs(TOKENS)
    for lengths in PATTERNS:
      with self.subTest(str(lengths)):
        self.check(compare(inputs, segment_ids=make_segments(lengths)))

  def test_padding_holds_anything_and_takes_no_gradient(self):
    inputs = make_inputs(TOKENS)
    for lengths in ([TOKENS], *PATTERNS[::3]):
      with self.subTest(str(lengths)):
        ids = make_segments(lengths, GAPS)
        self.check(
          compare(
            fill_padding(inputs, ids, jnp.nan),
            reference_inputs=fill_padding(inputs, ids, 0),
            segment_ids=ids,
          )
        )
    with discharged():
      _, gradients = agreement.run_with_gradients(
        fill_padding(inputs, ids, jnp.nan),
        (inputs['v'], inputs['h0']),
        {'segment_ids': ids},
        'mosaic_tpu',
        compiler_options=QUICK,
      )
    for name in TOKEN_ARRAYS:
      np.testing.assert_array_equal(gradients[name][ids == 0], 0.0, name)

  @parameterized.parameters(1, 9)
  def test_rows_that_end_inside_a_chunk(self, taps):
    self.check(compare(make_inputs(100, taps=taps)))

  def test_bfloat16_rows_of_whole_chunks(self):
    errors = compare(make_inputs(192, 2, 2, dtype='bfloat16'))
    bounds = dict.fromkeys(errors, 8e-3)
    # Here the gradient of A_log is a thousandth of the sum of its parts.
    bounds |= {'g': 2e-2, 'beta': 2e-2, 'A_log': 6e-2}
    for name, error in errors.items():
      self.assertLess(error, bounds[name], f'{name}: {errors}')

  def test_sequences_of_all_lengths(self):
    inputs = make_inputs(TOKENS)
    lengths = (0, 1, 2, 0, 64, 3, 70)
    bounds = jnp.asarray(np.cumsum((2, *lengths)), jnp.int32)
    h0 = [inputs['h0'] * (i + 1) for i in range(len(lengths))]
    inputs['h0'] = jnp.concatenate(h0)
    self.check(compare(inputs, cu_seqlens=bounds))

  def test_value_heads_that_share_keys_are_convolved_before(self):
    self.check(compare(make_inputs(40, 1, 2)))

  def test_on_memory_that_nobody_wrote(self):
    inputs = make_inputs(TOKENS, 2, 2, dtype='bfloat16')
    ids = make_segments(PATTERNS[1], ((100, 130),))
    errors = compare(
      fill_padding(inputs, ids, jnp.nan),
      interpreted,
      reference_inputs=fill_padding(inputs, ids, 0),
      segment_ids=ids,
    )
    for name, error in errors.items():
      self.assertLess(error, 2e-2, f'{name}: {errors}')

  def test_rows_without_padding_on_memory_that_nobody_wrote(self):
    inputs = make_inputs(128, dtype='bfloat16')
    for name, error in compare(inputs, interpreted).items():
      self.assertLess(error, 2e-2, name)

  def test_a_later_token_changes_nothing_before_it(self):
    inputs, ids = make_inputs(TOKENS), make_segments((70, 80))
    run = forward_program('mosaic_tpu')
    with discharged():
      before = np.asarray(run(inputs, ids))
      for first in (1, 17, 64, 127):
        later = (jnp.arange(TOKENS) >= first)[None, :, None, None]
        for name in 'qkv':
          changed = {**inputs, name: jnp.where(later, -9, inputs[name])}
          after = np.asarray(run(changed, ids))
          np.testing.assert_array_equal(after[:, :first], before[:, :first])
          self.assertGreater(np.abs(after - before).max(), 0.0)

  def test_narrow_arithmetic(self):
    inputs, ids = make_inputs(TOKENS, dtype='bfloat16'), make_segments([TOKENS])
    exact = {name: x.astype(jnp.float32) for name, x in inputs.items()}
    expected = forward_program('reference')(exact, ids)
    with mock.patch.object(tile, 'is_narrow', lambda _: True), discharged():
      o = forward_program('mosaic_tpu', True)(inputs, ids)
    self.assertLess(agreement.relative_rms(o, expected), 5e-3)


class PlanTest(parameterized.TestCase):
  def count(self, heads, value_heads, taps):
    inputs = make_inputs(20, heads, value_heads, taps)
    conv = [inputs.pop(f'{name}_conv') for name in 'qkv']
    arrays = operands.Operands(*inputs.values(), operands.ConvTaps(*conv))
    return mosaic_tpu_op.count_fused_taps(arrays)

  def test_what_is_fused(self):
    self.assertEqual(self.count(2, 2, 4), 4)
    self.assertEqual(self.count(2, 2, 9), 9)
    # More rows than are kept, and heads that would be convolved repeatedly.
    self.assertEqual(self.count(2, 2, 10), 0)
    self.assertEqual(self.count(1, 2, 4), 0)

  def test_neighbours(self):
    real = jnp.asarray([[1, 1, 0, 1, 1]], bool)
    document = jnp.asarray([[0, 0, 0, 0, 1]], jnp.int32)
    lags, aheads = mosaic_tpu_conv.mark_neighbours(real, document, 4)
    np.testing.assert_array_equal(lags, [[1, 0b11, 0, 0b1101, 1]])
    np.testing.assert_array_equal(aheads, [[0b1011, 0b101, 0, 1, 1]])
    # More taps than tokens.
    lags, _ = mosaic_tpu_conv.mark_neighbours(real[:, :1], document[:, :1], 4)
    np.testing.assert_array_equal(lags, [[1]])


if __name__ == '__main__':
  absltest.main()
