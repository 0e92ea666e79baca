"""The short convolution."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.model.short_conv import short_conv

conv = jax.jit(short_conv)


def silu(x):
  return x / (1 + np.exp(-x))


class ShortConvTest(parameterized.TestCase):
  def test_first_tap_is_the_token_itself(self):
    x_BTD = jnp.arange(1.0, 6.0).reshape(1, 5, 1)
    w_CD = jnp.array([[1.0], [10.0], [100.0]])
    y_BTD = conv(x_BTD, w_CD, jnp.ones((1, 5), jnp.int32))
    want = [1, 2 + 10, 3 + 20 + 100, 4 + 30 + 200, 5 + 40 + 300]
    np.testing.assert_allclose(y_BTD[0, :, 0], silu(np.array(want, float)))

  def test_resets_at_documents(self):
    rng = np.random.default_rng(0)
    x_BTD = rng.normal(size=(1, 9, 3)).astype(np.float32)
    w_CD = rng.normal(size=(4, 3)).astype(np.float32)
    segments = np.array([[1, 1, 1, 1, 2, 2, 3, 3, 3]], np.int32)
    packed = conv(x_BTD, w_CD, segments)
    for first, end in ((0, 4), (4, 6), (6, 9)):
      alone = conv(
        x_BTD[:, first:end], w_CD, np.ones((1, end - first), np.int32)
      )
      np.testing.assert_allclose(packed[:, first:end], alone, rtol=1e-6)

  def test_shorter_than_the_taps(self):
    w_CD = jnp.ones((4, 1))
    y_BTD = conv(jnp.ones((1, 2, 1)), w_CD, jnp.ones((1, 2), jnp.int32))
    np.testing.assert_allclose(y_BTD[0, :, 0], silu(np.array([1.0, 2.0])))

  def test_keeps_dtype_and_sums_in_float32(self):
    x_BTD = jnp.full((1, 3, 1), 1.0, jnp.bfloat16)
    # 256 + 1 is 256 in bfloat16.
    w_CD = jnp.array([[256.0], [1.0], [1.0]])
    y_BTD = conv(x_BTD, w_CD, jnp.ones((1, 3), jnp.int32))
    self.assertEqual(y_BTD.dtype, jnp.bfloat16)
    self.assertEqual(float(y_BTD[0, 2, 0]), 258.0)


if __name__ == '__main__':
  absltest.main()
