"""One site of the attention residuals."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from hybrid_moe.model.attention_residual import MixBlocks, mix_blocks

S, B, T, D = 3, 2, 4, 6
EPS = 1e-5


class MixBlocksTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.sources = list(rng.normal(size=(S, B, T, D)).astype(np.float32))
    self.query_D, self.scale_D = rng.normal(size=(2, D)).astype(np.float32)

  def test_matches_equation(self):
    got = mix_blocks(self.sources, self.query_D, self.scale_D, EPS)
    v = np.asarray(self.sources, np.float64)
    rms = np.sqrt((v**2).mean(-1, keepdims=True) + EPS)
    score = (self.scale_D * v / rms) @ self.query_D
    weight = np.exp(score) / np.exp(score).sum(0)
    # The mixture is of the sources as they are, not normed.
    want = (weight[..., None] * v).sum(0)
    np.testing.assert_allclose(got, want, atol=1e-5)

  def test_zero_query_is_the_mean(self):
    got = mix_blocks(self.sources, jnp.zeros(D), self.scale_D, EPS)
    np.testing.assert_allclose(got, np.mean(self.sources, 0), atol=1e-6)

  def test_missing_sources_are_not_seen(self):
    valid_S = jnp.array([True, False, True])
    self.sources[1][:] = 1e30
    got = mix_blocks(self.sources, self.query_D, self.scale_D, EPS, valid_S)
    want = mix_blocks(self.sources[::2], self.query_D, self.scale_D, EPS)
    np.testing.assert_allclose(got, want, rtol=1e-6)

  def test_gradient_with_missing_sources(self):
    valid_S = jnp.array([True, True, False])

    def total(sources, query_D):
      mixed = mix_blocks(sources, query_D, self.scale_D, EPS, valid_S)
      return jnp.sum(jnp.sin(mixed))

    self.sources[2][:] = 0
    by_source, by_query = jax.grad(total, argnums=(0, 1))(
      self.sources, self.query_D
    )
    np.testing.assert_array_equal(by_source[2], np.zeros((B, T, D)))
    self.assertTrue(np.all(np.isfinite(by_query)))
    self.assertGreater(np.abs(by_query).max(), 1e-3)

  def test_single_source_is_passed_through(self):
    got = mix_blocks(self.sources[:1], self.query_D, self.scale_D, EPS)
    self.assertIs(got, self.sources[0])

  def test_bfloat16_is_mixed_in_float32(self):
    low = [jnp.asarray(s, jnp.bfloat16) for s in self.sources]
    got = mix_blocks(low, self.query_D, self.scale_D, EPS)
    self.assertEqual(got.dtype, jnp.bfloat16)
    high = [s.astype(jnp.float32) for s in low]
    want = mix_blocks(high, self.query_D, self.scale_D, EPS)
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))

  def test_starts_from_a_zero_query(self):
    params = MixBlocks(EPS).init(jax.random.key(0), self.sources)['params']
    np.testing.assert_array_equal(params['query'], np.zeros(D))
    np.testing.assert_array_equal(params['scale'], np.ones(D))


if __name__ == '__main__':
  absltest.main()
