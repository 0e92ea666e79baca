"""SiTU-GLU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.model.situ_glu import SituGlu, situ
from hybrid_moe.presets import TINY

GATE_CAP, UP_CAP = 4.0, 25.0
POINTS = np.linspace(-40.0, 40.0, 321).astype(np.float32)


def sigmoid(x):
  return 1 / (1 + np.exp(-x.astype(np.float64)))


class SituGluTest(parameterized.TestCase):
  def test_gate_branch_bounds(self):
    gate = np.linspace(-60, 60, 4001).astype(np.float32)
    # The up branch at tanh(1) * cap, divided out again.
    up = np.full_like(gate, 1.0)
    y = np.asarray(situ(gate, up, GATE_CAP, 0.0))
    self.assertGreater(y.min(), -0.28)
    self.assertLess(y.min(), -0.25)
    self.assertLessEqual(y.max(), GATE_CAP)
    self.assertGreater(y.max(), 0.999 * GATE_CAP)

  def test_product_is_bounded(self):
    big = jnp.float32(1e30)
    for sign in (-1, 1):
      y = situ(big, sign * big, GATE_CAP, UP_CAP)
      self.assertAlmostEqual(float(y), sign * GATE_CAP * UP_CAP, places=3)

  def test_sigmoid_sees_the_uncapped_gate(self):
    y = situ(jnp.float32(8.0), jnp.float32(1.0), GATE_CAP, 0.0)
    want = GATE_CAP * np.tanh(2.0) * sigmoid(np.array(8.0))
    self.assertAlmostEqual(float(y), float(want), places=5)

  def test_derivatives(self):
    by_gate, by_up = jax.vmap(
      jax.grad(lambda a, b: situ(a, b, GATE_CAP, UP_CAP), argnums=(0, 1))
    )(POINTS, POINTS[::-1].copy())
    a, b = POINTS.astype(np.float64), POINTS[::-1].astype(np.float64)
    s, capped = sigmoid(a), GATE_CAP * np.tanh(a / GATE_CAP)
    d_gate = s / np.cosh(a / GATE_CAP) ** 2 + capped * s * (1 - s)
    np.testing.assert_allclose(
      by_gate, d_gate * UP_CAP * np.tanh(b / UP_CAP), atol=2e-5
    )
    np.testing.assert_allclose(
      by_up, capped * s / np.cosh(b / UP_CAP) ** 2, atol=2e-6
    )

  def test_equals_swiglu_to_first_order_at_zero(self):
    def slope(gate_cap, up_cap):
      def line(t):
        return situ(t, jnp.float32(1e-3) + t, gate_cap, up_cap)

      return jax.grad(line)(jnp.float32(0.0))

    self.assertAlmostEqual(
      float(slope(GATE_CAP, UP_CAP)), float(slope(0.0, 0.0)), places=9
    )

  def test_caps_of_zero_are_swiglu(self):
    up = POINTS[::-1].copy()
    y = situ(POINTS, up, 0.0, 0.0)
    np.testing.assert_allclose(y, POINTS * sigmoid(POINTS) * up, rtol=1e-5)

  def test_bfloat16_is_computed_in_float32(self):
    gate = jnp.asarray(POINTS, jnp.bfloat16)
    y = situ(gate, gate, GATE_CAP, UP_CAP)
    self.assertEqual(y.dtype, jnp.bfloat16)
    exact = situ(gate.astype(jnp.float32), gate.astype(jnp.float32), 4.0, 25.0)
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))

  def test_layer(self):
    layer = SituGlu(dataclasses.replace(TINY, d_model=6, init_std=1.0), 10)
    x_BTD = np.random.default_rng(0).normal(size=(1, 3, 6)).astype(np.float32)
    params = layer.init(jax.random.key(0), x_BTD)['params']
    p = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    a, b = x_BTD @ p['w_gate'], x_BTD @ p['w_up']
    hidden = 4 * np.tanh(a / 4) * sigmoid(a) * 25 * np.tanh(b / 25)
    np.testing.assert_allclose(
      layer.apply({'params': params}, x_BTD), hidden @ p['w_down'], rtol=1e-4
    )


if __name__ == '__main__':
  absltest.main()
