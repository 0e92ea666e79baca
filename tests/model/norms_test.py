"""RMSNorm."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from hybrid_moe.model import norms


class NormsTest(absltest.TestCase):
  def test_matches_definition(self):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5, 7)).astype(np.float32)
    scale_D = rng.normal(size=7).astype(np.float32)
    want = scale_D * x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(norms.rms_norm(x, scale_D, 0.1), want, rtol=2e-6)

  def test_bfloat16_is_normed_in_float32(self):
    # The square of 2e20 overflows neither: bfloat16 has float32's range, but
    # the mean of 512 squares would lose its last digits.
    x = jnp.asarray(
      np.random.default_rng(0).normal(size=(4, 512)), jnp.bfloat16
    )
    y = norms.rms_norm(x, jnp.ones(512), 1e-5)
    self.assertEqual(y.dtype, jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    # One rounding: half of the spacing of bfloat16, 2^-8.
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8)

  def test_zero_input_has_finite_gradient(self):
    grad = jax.grad(lambda x: jnp.sum(norms.rms_norm(x, jnp.ones(4), 1e-5)))(
      jnp.zeros((2, 4))
    )
    np.testing.assert_allclose(grad, np.full((2, 4), 1e-5**-0.5), rtol=1e-5)

  def test_scale_starts_at_one(self):
    params = norms.RmsNorm(1e-5).init(jax.random.key(0), jnp.ones((1, 1, 6)))
    np.testing.assert_array_equal(params['params']['scale'], np.ones(6))


if __name__ == '__main__':
  absltest.main()
