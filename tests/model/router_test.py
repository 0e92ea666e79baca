"""Routing: biased choice, raw weights."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from hybrid_moe.model import router

N, E, S = 50, 9, 3


class RouterTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.scores_NE = rng.uniform(size=(N, E)).astype(np.float32)
    self.bias_E = rng.normal(size=E).astype(np.float32)

  def test_choice_is_biased_and_weights_are_raw(self):
    routes = router.route(self.scores_NE, self.bias_E, S, 2.5)
    biased = self.scores_NE + self.bias_E
    order = np.argsort(-biased, axis=1)
    np.testing.assert_array_equal(routes.ids_NS, order[:, :S])
    chosen = np.take_along_axis(self.scores_NE, order[:, :S], 1)
    np.testing.assert_allclose(
      routes.weight_NS, 2.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-6
    )
    np.testing.assert_allclose(
      routes.cutoff_N, np.sort(biased, axis=1)[:, -S - 1], rtol=1e-6
    )
    # The bias matters to the choice.
    plain = router.route(self.scores_NE, jnp.zeros(E), S, 2.5)
    self.assertTrue(np.any(plain.ids_NS != routes.ids_NS))

  def test_gradient_reaches_scores_of_chosen_experts_only(self):
    def objective(scores_NE, bias_E):
      routes = router.route(scores_NE, bias_E, S, 1.0)
      values = jnp.arange(S, dtype=jnp.float32)[None] * routes.weight_NS
      return jnp.sum(values) + jnp.sum(routes.cutoff_N)

    by_score, by_bias = jax.grad(objective, argnums=(0, 1))(
      self.scores_NE, self.bias_E
    )
    ids = np.asarray(router.route(self.scores_NE, self.bias_E, S, 1.0).ids_NS)
    chosen = np.zeros((N, E), bool)
    np.put_along_axis(chosen, ids, True, 1)
    np.testing.assert_array_equal(np.asarray(by_score) != 0, chosen)
    np.testing.assert_array_equal(by_bias, np.zeros(E))

  def test_scores_that_underflow_have_finite_gradients(self):
    # exp(-45) is about 3e-20: its square is no float32. At -200 it is 0.
    for logit in (-30.0, -45.0, -60.0, -200.0):

      def objective(logits_NE):
        scores_NE = jax.nn.sigmoid(logits_NE)
        weight_NS = router.route(scores_NE, jnp.zeros(E), S, 1.0).weight_NS
        return 1e4 * jnp.sum(jnp.arange(S, dtype=jnp.float32)[None] * weight_NS)

      value, grad = jax.value_and_grad(objective)(jnp.full((4, E), logit))
      self.assertBetween(float(value), 0.0, 4.001e4 * sum(range(S)))
      self.assertTrue(np.all(np.isfinite(grad)), logit)

  def test_scores_are_float32_from_float32_operands(self):
    rng = np.random.default_rng(0)
    x_BTD = jnp.asarray(rng.normal(size=(2, 3, 64)), jnp.bfloat16)
    w_DE = rng.normal(size=(64, E)).astype(np.float32)
    scores_BTE = router.router_scores(x_BTD, w_DE)
    self.assertEqual(scores_BTE.dtype, jnp.float32)
    logits = np.asarray(x_BTD, np.float64) @ w_DE.astype(np.float64)
    # bfloat16 weights would be off by some 1e-2.
    np.testing.assert_allclose(scores_BTE, 1 / (1 + np.exp(-logits)), atol=1e-5)


if __name__ == '__main__':
  absltest.main()
