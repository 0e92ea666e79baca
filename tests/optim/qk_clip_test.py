"""QK-clip against logits computed again from the scaled weights."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.optim.qk_clip import apply_qk_clip, qk_clip

HEADS, HEAD_DIM, SHARED, VALUE, RANK, TOKENS = 3, 8, 4, 6, 10, 20
TAU = 5.0


def make_layer(query='q_up'):
  keys = jax.random.split(jax.random.key(0), 3)
  return {
    query: jax.random.normal(keys[0], (RANK, HEADS, HEAD_DIM + SHARED)),
    'kv_up': jax.random.normal(keys[1], (RANK, HEADS, HEAD_DIM + VALUE)),
    'kv_down': jax.random.normal(keys[2], (RANK, RANK + SHARED)),
  }


@jax.jit
def max_logits(layer):
  """Largest logit of each head, heads far apart in scale."""
  x_TR, latent_TR, shared_TK = (
    jax.random.normal(key, (TOKENS, width))
    for key, width in zip(
      jax.random.split(jax.random.key(1), 3), (RANK, RANK, SHARED)
    )
  )
  query = layer['q_up'] if 'q_up' in layer else layer['q_proj']
  q_THK = jnp.einsum('tr,rhk->thk', x_TR, query)
  k_THK = jnp.einsum('tr,rhk->thk', latent_TR, layer['kv_up'])[..., :HEAD_DIM]
  logits_HTT = jnp.einsum('thk,shk->hts', q_THK[..., :HEAD_DIM], k_THK)
  logits_HTT += jnp.einsum('thk,sk->hts', q_THK[..., HEAD_DIM:], shared_TK)
  scale_H = jnp.array([1.0, 0.1, 0.01])
  return jnp.max(logits_HTT, axis=(1, 2)) * scale_H


class QkClipTest(parameterized.TestCase):
  @parameterized.parameters('q_up', 'q_proj')
  def test_largest_logit_comes_down_to_the_threshold(self, query):
    layer = make_layer(query)
    before = max_logits(layer)
    self.assertGreater(float(before[0]), TAU)
    self.assertGreater(float(before[1]), TAU)
    self.assertLess(float(before[2]), TAU)
    clipped = jax.jit(qk_clip, static_argnums=(2, 3))(
      layer, before, TAU, HEAD_DIM
    )
    np.testing.assert_allclose(
      max_logits(clipped), [TAU, TAU, float(before[2])], rtol=1e-4
    )
    # The head below the threshold, the values and the shared key are as
    # they were.
    np.testing.assert_array_equal(clipped[query][:, 2], layer[query][:, 2])
    np.testing.assert_array_equal(
      clipped['kv_up'][..., HEAD_DIM:], layer['kv_up'][..., HEAD_DIM:]
    )
    np.testing.assert_array_equal(clipped['kv_down'], layer['kv_down'])

  @parameterized.parameters(TAU, 1.0, -3.0, np.inf, -np.inf, np.nan)
  def test_leaves_the_weights(self, value):
    layer = make_layer()
    clipped = qk_clip(layer, jnp.full((HEADS,), value), TAU, HEAD_DIM)
    jax.tree.map(np.testing.assert_array_equal, clipped, layer)

  def test_stacked_layers_equal_separate_ones(self):
    layer = make_layer()
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), layer)
    logits = jnp.array([[10.0, 1.0, 20.0], [6.0, 50.0, 4.0]])
    got = qk_clip(stacked, logits, TAU, HEAD_DIM)
    for i in range(2):
      one = jax.tree.map(lambda x, i=i: x[i], stacked)
      want = qk_clip(one, logits[i], TAU, HEAD_DIM)
      jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(lambda x, i=i: x[i], got),
        want,
      )

  def test_tree_changes_only_at_the_paths(self):
    layer = make_layer()
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), layer)
    params = {
      'layer_00': {'mixer': layer},
      'blocks': {'layer_3': {'mixer': stacked, 'norm': {'scale': jnp.ones(4)}}},
    }
    logits = jnp.full((2, HEADS), 4 * TAU)
    path = ('blocks', 'layer_3', 'mixer')
    got = apply_qk_clip(params, {path: logits}, TAU, HEAD_DIM)
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(params))
    self.assertIs(got['layer_00'], params['layer_00'])
    changed = got['blocks']['layer_3']['mixer']
    np.testing.assert_allclose(
      changed['q_up'][..., :HEAD_DIM], stacked['q_up'][..., :HEAD_DIM] / 2
    )
    np.testing.assert_allclose(
      changed['q_up'][..., HEAD_DIM:], stacked['q_up'][..., HEAD_DIM:] / 4
    )
    self.assertIs(apply_qk_clip(params, {path: logits}, 0.0, HEAD_DIM), params)

  def test_keeps_the_sharding(self):
    mesh = jax.make_mesh((2,), ('data',), devices=jax.devices()[:2])
    layer = make_layer()
    logits = jnp.full((HEADS,), 4 * TAU)
    want = qk_clip(layer, logits, TAU, HEAD_DIM)
    with jax.set_mesh(mesh):
      sharded = jax.device_put(layer, jax.NamedSharding(mesh, jax.P('data')))
      logits = jax.device_put(logits, jax.NamedSharding(mesh, jax.P()))
      got = jax.jit(qk_clip, static_argnums=(2, 3))(
        sharded, logits, TAU, HEAD_DIM
      )
      for name, leaf in got.items():
        self.assertTrue(
          leaf.sharding.is_equivalent_to(sharded[name].sharding, leaf.ndim)
        )
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want
    )

  def test_rejects_what_is_no_mla_layer(self):
    layer = make_layer()
    del layer['kv_up']
    with self.assertRaisesRegex(ValueError, 'kv_up'):
      qk_clip(layer, jnp.ones((HEADS,)), TAU, HEAD_DIM)
    with self.assertRaisesRegex(ValueError, 'max_logit_H'):
      qk_clip(make_layer(), jnp.ones((HEADS + 1,)), TAU, HEAD_DIM)
    with self.assertRaisesRegex(ValueError, 'layer_9'):
      apply_qk_clip(
        {'layer_0': {'mixer': make_layer()}},
        {('layer_9', 'mixer'): jnp.ones((HEADS,))},
        TAU,
        HEAD_DIM,
      )


if __name__ == '__main__':
  absltest.main()
