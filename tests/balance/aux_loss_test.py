"""The auxiliary loss that balancing without one is compared with."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from hybrid_moe.balance import quantile


def random_scores():
  return jax.nn.sigmoid(jax.random.normal(jax.random.key(0), (64, 8)))


class AuxLossTest(absltest.TestCase):
  def test_is_one_at_perfect_balance(self):
    loss = quantile.aux_loss(
      jnp.full((32, 8), 0.3), jnp.full((8,), 4), jnp.ones((32,), bool)
    )
    np.testing.assert_allclose(loss, 1.0, rtol=1e-6)

  def test_gradient_lowers_scores_of_loaded_experts(self):
    scores_NE = random_scores()
    mask_N = jnp.arange(64) < 60
    load_E = jnp.array([100, 60, 40, 20, 10, 5, 3, 2])
    grad_NE = jax.grad(quantile.aux_loss)(scores_NE, load_E, mask_N)
    self.assertGreater(float(jnp.min(grad_NE[:60, 0])), 0.0)
    self.assertLess(float(jnp.max(grad_NE[:60, 7])), 0.0)
    np.testing.assert_array_equal(grad_NE[60:], jnp.zeros((4, 8)))

  def test_shards_average_to_the_whole(self):
    scores_NE = random_scores()
    mask_N = jnp.arange(64) < 48
    load_E = jnp.array([100, 60, 40, 20, 10, 5, 3, 2])
    whole = quantile.aux_loss(scores_NE, load_E, mask_N)
    parts = [
      quantile.aux_loss(scores_NE[s], load_E, mask_N[s])
      for s in (slice(0, 32), slice(32, 64))
    ]
    np.testing.assert_allclose(
      whole, (32 * parts[0] + 16 * parts[1]) / 48, rtol=1e-5
    )


if __name__ == '__main__':
  absltest.main()
