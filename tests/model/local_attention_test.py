"""The sliding-window layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from hybrid_moe.model.local_attention import LocalAttention
from hybrid_moe.model_config import LocalAttentionConfig
from hybrid_moe.presets import TINY

B, T, D, WINDOW = 1, 11, 12, 4
CONFIG = dataclasses.replace(
  TINY,
  d_model=D,
  init_std=0.5,
  local=LocalAttentionConfig(num_heads=2, head_dim=6, window=WINDOW),
)


class LocalAttentionTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
    self.segments = np.array([[1] * 5 + [2] * 6], np.int32)
    self.layer = LocalAttention(CONFIG)
    self.params = self.layer.init(jax.random.key(0), self.x_BTD, self.segments)[
      'params'
    ]

  def apply(self, x_BTD):
    return self.layer.apply({'params': self.params}, x_BTD, self.segments)

  def test_matches_naive(self):
    p = jax.tree.map(lambda w: np.asarray(w, np.float64), self.params)
    x, want = self.x_BTD[0].astype(np.float64), np.zeros((T, D))
    for h in range(2):
      q, k, v = (x @ p[f'{n}_proj'][:, h] for n in 'qkv')
      for t in range(T):
        seen = [
          u
          for u in range(max(0, t - WINDOW + 1), t + 1)
          if self.segments[0, u] == self.segments[0, t]
        ]
        scores = k[seen] @ q[t] / np.sqrt(6)
        weights = np.exp(scores - scores.max())
        o = weights / weights.sum() @ v[seen]
        want[t] += o @ p['o_proj'][h]
    np.testing.assert_allclose(self.apply(self.x_BTD)[0], want, atol=1e-5)

  def test_reach_by_gradient(self):
    """Output t depends on inputs t - window + 1 to t of its document."""
    jacobian = jax.jacrev(lambda x: jnp.sum(self.apply(x), axis=(0, 2)))
    reach = np.abs(jacobian(self.x_BTD)).max((1, 3)) > 0
    rows, columns = np.arange(T)[:, None], np.arange(T)[None]
    want = (columns <= rows) & (columns > rows - WINDOW)
    want &= self.segments[0][:, None] == self.segments[0][None]
    np.testing.assert_array_equal(reach, want)


if __name__ == '__main__':
  absltest.main()
