"""Gated latent attention against loops over heads, and its absorbed form."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.model import gated_mla
from hybrid_moe.model_config import MlaConfig
from hybrid_moe.presets import TINY

B, T, D = 2, 10, 20
SEGMENTS = np.array([[1] * 4 + [2] * 6, [1] * 7 + [0] * 3], np.int32)

jit = functools.partial(
  jax.jit,
  static_argnums=0,
  compiler_options={'xla_backend_optimization_level': 0},
)


def make_config(dtype='float32', **mla):
  fields = dict(
    num_heads=3,
    q_lora_rank=7,
    kv_lora_rank=9,
    head_dim=6,
    shared_key_dim=4,
    value_dim=5,
  )
  return dataclasses.replace(
    TINY, d_model=D, dtype=dtype, mla=MlaConfig(**{**fields, **mla})
  )


def random_params(config, std=0.4):
  layer = gated_mla.GatedMla(config)
  x_BTD = jnp.zeros((B, T, D), config.dtype)
  shapes = jax.eval_shape(layer.init, jax.random.key(0), x_BTD, SEGMENTS)
  rng = np.random.default_rng(1)
  return jax.tree_util.tree_map_with_path(
    lambda path, p: (
      (path[-1].key == 'scale') + std * rng.normal(size=p.shape)
    ).astype(np.float32),
    shapes['params'],
  )


@jit
def apply(config, params, x_BTD, segment_ids_BT):
  layer = gated_mla.GatedMla(config)
  return layer.apply({'params': params}, x_BTD, segment_ids_BT)


def rms_norm(x, scale, eps):
  return scale * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def oracle(config, params, x_BTD, segments, absorbed=False):
  """Output and each head's largest score, one token and head at a time."""
  m, eps = config.mla, config.latent_norm_eps
  p = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
  out = np.zeros(x_BTD.shape)
  top = np.full(m.num_heads, -np.inf)
  for b in range(len(x_BTD)):
    x = np.asarray(x_BTD[b], np.float64)
    if m.q_lora_rank:
      q = rms_norm(x @ p['q_down'], p['q_norm']['scale'], eps)
      q = np.einsum('tr,rhk->thk', q, p['q_up'])
    else:
      q = np.einsum('td,dhk->thk', x, p['q_proj'])
    down = x @ p['kv_down']
    latent = rms_norm(down[:, : m.kv_lora_rank], p['kv_norm']['scale'], eps)
    shared = down[:, m.kv_lora_rank :]
    for h in range(m.num_heads):
      key_up = p['kv_up'][:, h, : m.head_dim]
      value_up = p['kv_up'][:, h, m.head_dim :]
      for t in range(len(x)):
        seen = [u for u in range(t + 1) if segments[b, u] == segments[b, t]]
        own, common = q[t, h, : m.head_dim], q[t, h, m.head_dim :]
        if absorbed:
          scores = latent[seen] @ (key_up @ own) + shared[seen] @ common
        else:
          scores = (latent[seen] @ key_up) @ own + shared[seen] @ common
        scores = scores / np.sqrt(m.head_dim + m.shared_key_dim)
        if segments[b, t] > 0:
          top[h] = max(top[h], scores.max())
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        if absorbed:
          o = (weights @ latent[seen]) @ value_up
        else:
          o = weights @ (latent[seen] @ value_up)
        if m.output_gate:
          o = o / (1 + np.exp(-(x[t] @ p['g_proj'][:, h])))
        out[b, t] += o @ p['o_proj'][h]
  return out, top


class GatedMlaTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)

  @parameterized.named_parameters(
    ('latent_queries', {}),
    ('direct_queries', dict(q_lora_rank=0)),
    ('no_gate', dict(output_gate=False)),
  )
  def test_matches_equations(self, mla):
    config = make_config(**mla)
    params = random_params(config)
    got, top = apply(config, params, self.x_BTD, SEGMENTS)
    want, want_top = oracle(config, params, self.x_BTD, SEGMENTS)
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())
    np.testing.assert_allclose(top, want_top, rtol=1e-5)

  def test_equals_absorbed_form(self):
    """What a decoder computes from the cached latents alone."""
    config = make_config()
    params = random_params(config)
    got, _ = apply(config, params, self.x_BTD, SEGMENTS)
    want, _ = oracle(config, params, self.x_BTD, SEGMENTS, absorbed=True)
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())

  def test_has_no_positions(self):
    """The order of a document's earlier tokens does not matter to its last."""
    config = make_config()
    params = random_params(config)
    order = np.array([2, 0, 3, 1, 5, 8, 6, 4, 7, 9])
    segments = np.array([[1] * 4 + [2] * 6] * B, np.int32)
    base, _ = apply(config, params, self.x_BTD, segments)
    moved, _ = apply(config, params, self.x_BTD[:, order], segments)
    np.testing.assert_allclose(moved[:, -1], base[:, -1], atol=1e-5)
    self.assertGreater(np.abs(moved[:, 3] - base[:, 3]).max(), 1e-2)

  def test_gate_multiplies_unrounded_attention(self):
    """In bfloat16 the attention output meets the gate in float32."""
    config = make_config('bfloat16')
    params = random_params(config)
    results = {}

    def record(owner, name):
      original = getattr(owner, name)

      def call(*args, **kwargs):
        result = original(*args, **kwargs)
        results[name] = (args, result)
        return result

      return mock.patch.object(owner, name, call)

    x_BTD = jnp.asarray(self.x_BTD, jnp.bfloat16)
    layer = gated_mla.GatedMla(config)
    with (
      record(gated_mla, 'softmax_attention'),
      record(gated_mla, 'merge_heads'),
      record(jax.nn, 'sigmoid'),
    ):
      y_BTD, top_H = layer.apply({'params': params}, x_BTD, SEGMENTS)
    attention_BTHV = results['softmax_attention'][1][0]
    gate_BTHV = results['sigmoid'][1]
    gated_BTHV = results['merge_heads'][0][0]
    # Rounded once, after the product; rounded before it, it would differ.
    once = (gate_BTHV * attention_BTHV).astype(jnp.bfloat16)
    rounded = attention_BTHV.astype(jnp.bfloat16).astype(jnp.float32)
    twice = (gate_BTHV * rounded).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gated_BTHV, once)
    self.assertTrue(np.any(once != twice))
    self.assertEqual(y_BTD.dtype, jnp.bfloat16)
    self.assertEqual(top_H.dtype, jnp.float32)
    want, _ = oracle(config, params, x_BTD, SEGMENTS)
    np.testing.assert_allclose(
      np.asarray(y_BTD, np.float64), want, atol=0.05 * np.abs(want).max()
    )

  def test_expand_keys(self):
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(1, 3, 4)).astype(np.float32)
    shared = rng.normal(size=(1, 3, 2)).astype(np.float32)
    up_RHX = rng.normal(size=(4, 2, 7)).astype(np.float32)
    k_BTHK, v_BTHV = gated_mla.expand_keys(latent, shared, up_RHX, 5)
    full = np.einsum('btr,rhx->bthx', latent, up_RHX)
    np.testing.assert_allclose(k_BTHK[..., :5], full[..., :5], rtol=1e-5)
    np.testing.assert_allclose(v_BTHV, full[..., 5:], rtol=1e-5)
    for head in range(2):
      np.testing.assert_array_equal(k_BTHK[:, :, head, 5:], shared)


if __name__ == '__main__':
  absltest.main()
