"""The short convolution in front of KDA, in plain jnp."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.kda import arg_specs, kda, operands, short_conv

conv = jax.jit(short_conv.short_conv)
convolve = jax.jit(short_conv.convolve, static_argnames='merge_heads')


def silu(x):
  return x / (1 + np.exp(-x))


class ShortConvTest(parameterized.TestCase):
  def test_first_tap_is_the_token_itself(self):
    x_BTHD = jnp.arange(1.0, 6.0).reshape(1, 5, 1, 1)
    taps_CHD = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    y_BTHD = conv(x_BTHD, taps_CHD)
    want = [1, 2 + 10, 3 + 20 + 100, 4 + 30 + 200, 5 + 40 + 300]
    np.testing.assert_allclose(y_BTHD[0, :, 0, 0], silu(np.array(want, float)))

  def test_resets_at_documents(self):
    rng = np.random.default_rng(0)
    x_BTHD = rng.normal(size=(1, 9, 2, 3)).astype(np.float32)
    taps_CHD = rng.normal(size=(4, 2, 3)).astype(np.float32)
    document_BT = np.array([[0, 0, 0, 0, 1, 1, 2, 2, 2]], np.int32)
    packed = conv(x_BTHD, taps_CHD, None, document_BT)
    for first, end in ((0, 4), (4, 6), (6, 9)):
      alone = conv(x_BTHD[:, first:end], taps_CHD)
      np.testing.assert_allclose(packed[:, first:end], alone, rtol=1e-6)

  def test_padding_counts_as_a_place_and_holds_nothing(self):
    x_BTHD = jnp.array([1.0, np.nan, 3.0]).reshape(1, 3, 1, 1)
    taps_CHD = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    valid_BT = jnp.array([[True, False, True]])

    def run(x_BTHD, taps_CHD):
      y_BTHD = conv(x_BTHD, taps_CHD, valid_BT, jnp.zeros((1, 3), jnp.int32))
      return jnp.sum(y_BTHD[0, 2]), y_BTHD[0, :, 0, 0]

    (_, y_T), (d_x, d_taps) = jax.value_and_grad(run, (0, 1), has_aux=True)(
      x_BTHD, taps_CHD
    )
    np.testing.assert_allclose(y_T, silu(np.array([1.0, 10.0, 103.0])))
    np.testing.assert_allclose(d_x[0, :, 0, 0], [100, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(d_taps[:, 0, 0], [3, 0, 1], rtol=1e-6)

  def test_shorter_than_the_taps(self):
    y_BTHD = conv(jnp.ones((1, 2, 1, 1)), jnp.ones((4, 1, 1)))
    np.testing.assert_allclose(y_BTHD[0, :, 0, 0], silu(np.array([1.0, 2.0])))

  def test_keeps_dtype_and_sums_in_float32(self):
    x_BTHD = jnp.full((1, 3, 1, 1), 1.0, jnp.bfloat16)
    # 256 + 1 is 256 in bfloat16.
    taps_CHD = jnp.array([256.0, 1.0, 1.0]).reshape(3, 1, 1)
    y_BTHD = conv(x_BTHD, taps_CHD)
    self.assertEqual(y_BTHD.dtype, jnp.bfloat16)
    self.assertEqual(float(y_BTHD[0, 2, 0, 0]), 258.0)


class ConvolveTest(parameterized.TestCase):
  def make_arrays(self, tokens):
    spec = arg_specs.ArgSpec(1, tokens, 1, 2, 32, 32)
    inputs = arg_specs.make_inputs(spec)
    rng = np.random.default_rng(0)

    def taps(heads):
      return jnp.asarray(rng.normal(size=(4, heads, 32)), jnp.float32)

    conv = operands.ConvTaps(taps(1), taps(1), taps(2))
    return inputs, operands.Operands(*inputs.values(), conv)

  def test_sequences_of_a_row_do_not_see_each_other(self):
    _, arrays = self.make_arrays(20)
    bounds = jnp.array([2, 3, 3, 5, 17], jnp.int32)
    packed = convolve(arrays, operands.Packing(None, None, bounds))
    self.assertIsNone(packed.conv)
    for first, end in ((2, 3), (3, 5), (5, 17)):
      alone = conv(arrays.v_BTHV[:, first:end], arrays.conv.v_CHV)
      np.testing.assert_allclose(packed.v_BTHV[:, first:end], alone, rtol=1e-5)

  def test_merging_heads_changes_nothing(self):
    _, arrays = self.make_arrays(20)
    ids = jnp.asarray([[0] * 3 + [1] * 8 + [2] * 9], jnp.int32)
    packing = operands.Packing(ids > 0, ids, None)
    apart = convolve(arrays, packing)
    merged = convolve(arrays, packing, merge_heads=True)
    for x, y in zip(apart[:3], merged[:3]):
      np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)

  @parameterized.parameters('reference', 'chunked_xla')
  def test_the_operator_convolves(self, implementation):
    inputs, arrays = self.make_arrays(20)
    taps = arrays.conv
    ids = jnp.asarray([[1] * 7 + [2] * 13], jnp.int32)
    after = convolve(arrays, operands.Packing(None, ids, None))
    convolved = dict(q=after.q_BTHK, k=after.k_BTHK, v=after.v_BTHV)

    @jax.jit
    def run(inputs, convs):
      return kda(
        **inputs, **convs, segment_ids=ids, implementation=implementation
      )

    convs = dict(q_conv=taps.q_CHK, k_conv=taps.k_CHK, v_conv=taps.v_CHV)
    np.testing.assert_allclose(
      run(inputs, convs), run(inputs | convolved, {}), rtol=1e-5, atol=1e-5
    )


if __name__ == '__main__':
  absltest.main()
