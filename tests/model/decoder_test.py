"""The decoder's structure: residual forms, the loop, rematerialisation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.balance.state import init_balance, router_view
from hybrid_moe.config import REMAT_POLICIES
from hybrid_moe.model.decoder import LOOP, Decoder, head_matrix
from hybrid_moe.model_config import (
  BalanceConfig,
  KdaConfig,
  LocalAttentionConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
)

B, T, U = 2, 10, 24
BALANCE = BalanceConfig(num_bins=20)
MODEL = ModelConfig(
  vocab_size=U,
  d_model=16,
  num_layers=5,
  mixers=('local', 'mla'),
  final_mixer='',
  dense_hidden=16,
  attn_res_block=2,
  init_std=0.3,
  dtype='float32',
  scan_blocks=False,
  mla=MlaConfig(
    num_heads=2,
    q_lora_rank=8,
    kv_lora_rank=8,
    head_dim=6,
    shared_key_dim=4,
    value_dim=6,
  ),
  local=LocalAttentionConfig(num_heads=2, head_dim=6, window=4),
  moe=MoeConfig(num_experts=4, top_k=2, latent_dim=8, expert_hidden=8),
)
# A mean of n sources is 1/n of their sum, which the norms that follow take
# away up to their constant.
BLOCKS = dataclasses.replace(MODEL, norm_eps=1e-12)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, U, (B, T)).astype(np.int32)
TARGETS = RNG.integers(0, U, (B, T)).astype(np.int32)
SEGMENTS = np.array([[1] * 6 + [2] * 4, [1] * 8 + [0] * 2], np.int32)
COTANGENTS = RNG.normal(size=(2, B, T, MODEL.d_model)).astype(np.float32)


def views_of(model):
  state = init_balance(BALANCE, model.num_moe_layers, model.moe.num_experts)
  return router_view(BALANCE, state)


@functools.cache
def random_params(model, seed=1):
  """Parameters of which none is at its initial value."""
  shapes = jax.eval_shape(
    lambda: Decoder(model, BALANCE).init(
      jax.random.key(0), TOKENS, TARGETS, SEGMENTS, views_of(model)
    )
  )
  rng = np.random.default_rng(seed)
  return jax.tree_util.tree_map_with_path(
    lambda path, p: (
      (path[-1].key == 'scale') + 0.3 * rng.normal(size=p.shape)
    ).astype(np.float32),
    shapes['params'],
  )


@functools.partial(
  jax.jit,
  static_argnums=(0, 1),
  compiler_options={'xla_backend_optimization_level': 0},
)
def run(model, remat, params):
  """The decoder's output and a gradient with respect to the parameters."""

  def objective(params):
    out = Decoder(model, BALANCE, remat).apply(
      {'params': params}, TOKENS, TARGETS, SEGMENTS, views_of(model)
    )
    total = jnp.sum(out.hidden_BTD * COTANGENTS[0])
    if out.mtp_hidden_BTD is not None:
      total += jnp.sum(out.mtp_hidden_BTD * COTANGENTS[1])
    return total, out

  (_, out), grads = jax.value_and_grad(objective, has_aux=True)(params)
  return out, grads


def assert_trees_close(got, want, tolerance):
  """Every leaf within `tolerance` of its own largest entry."""
  paths = jax.tree_util.tree_leaves_with_path(want)
  for (path, b), a in zip(paths, jax.tree.leaves(got), strict=True):
    np.testing.assert_allclose(
      a, b, atol=tolerance * max(np.abs(b).max(), 1e-3), err_msg=str(path)
    )


class ResidualTest(parameterized.TestCase):
  def test_zero_queries_are_the_pre_norm_network(self):
    stream = dataclasses.replace(BLOCKS, attn_res_block=0)
    params = random_params(BLOCKS)
    zero = jax.tree_util.tree_map_with_path(
      lambda path, p: p * 0 if path[-1].key == 'query' else p, params
    )

    def drop_sites(tree):
      return {
        k: drop_sites(v) if isinstance(v, dict) else v
        for k, v in tree.items()
        if not k.endswith('_residual')
      }

    plain = drop_sites(zero)
    shapes = jax.tree.map(jnp.shape, random_params(stream))
    self.assertEqual(jax.tree.map(jnp.shape, plain), shapes)
    want, want_grads = run(stream, 'none', plain)
    got, got_grads = run(BLOCKS, 'none', zero)
    np.testing.assert_allclose(got.hidden_BTD, want.hidden_BTD, atol=2e-5)
    np.testing.assert_array_equal(got.stats.load_E, want.stats.load_E)
    assert_trees_close(drop_sites(got_grads), want_grads, 1e-4)
    # The queries themselves are not stuck at zero, and they matter.
    site = got_grads['output_residual']['query']
    self.assertGreater(np.abs(site).max(), 1e-3)
    other, _ = run(BLOCKS, 'none', params)
    self.assertGreater(np.abs(other.hidden_BTD - want.hidden_BTD).max(), 0.05)

  def test_first_site_has_nothing_to_mix(self):
    _, grads = run(BLOCKS, 'none', random_params(BLOCKS))
    first = grads['block_0']['layer_0']['mixer_residual']
    np.testing.assert_array_equal(first['query'], np.zeros(MODEL.d_model))
    second = grads['block_0']['layer_0']['ffn_residual']
    self.assertGreater(np.abs(second['query']).max(), 1e-4)


class LoopTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('block_residuals', 1),
    ('residual_stream', 0),
  )
  def test_loop_equals_unrolled(self, attn_res_block):
    # One dense layer, two equal ones, and one of another kind.
    unrolled = dataclasses.replace(
      MODEL,
      num_layers=4,
      mixers=('local',),
      final_mixer='mla',
      attn_res_block=attn_res_block,
      mtp_layers=1,
    )
    looped = dataclasses.replace(unrolled, scan_blocks=True)
    params = random_params(unrolled)
    stacked = {k: v for k, v in params.items() if k[:5] != 'block'}
    stacked['block_0'], stacked['block_3'] = (
      params['block_0'],
      params['block_3'],
    )
    stacked[LOOP] = {
      'block': jax.tree.map(
        lambda *p: np.stack(p), params['block_1'], params['block_2']
      )
    }
    want, want_grads = run(unrolled, 'none', params)
    got, got_grads = run(looped, 'none', stacked)
    np.testing.assert_allclose(got.hidden_BTD, want.hidden_BTD, atol=1e-5)
    np.testing.assert_allclose(
      got.mtp_hidden_BTD, want.mtp_hidden_BTD, atol=1e-5
    )
    # Statistics come in the order of the layers.
    np.testing.assert_array_equal(
      got.stats.histogram_EW, want.stats.histogram_EW
    )
    self.assertEqual(got.stats.load_E.shape, (4, 1, 4))
    for i in range(2):
      assert_trees_close(
        jax.tree.map(lambda g, i=i: g[i], got_grads[LOOP]['block']),
        want_grads[f'block_{i + 1}'],
        1e-4,
      )
    for name in ('block_0', 'block_3', 'mtp', 'table', 'final_norm'):
      assert_trees_close(got_grads[name], want_grads[name], 1e-4)
    self.assertEqual(
      set(got.max_logits),
      {('block_3', 'layer_0', 'mixer'), ('mtp', 'layer', 'mixer')},
    )

  def test_largest_scores_of_looped_layers_are_stacked(self):
    looped = dataclasses.replace(
      MODEL,
      num_layers=2,
      mixers=('mla',),
      dense_layers=0,
      attn_res_block=1,
      scan_blocks=True,
    )
    out, _ = run(looped, 'none', random_params(looped))
    ((path, top),) = out.max_logits.items()
    self.assertEqual(path, (LOOP, 'block', 'layer_0', 'mixer'))
    self.assertEqual(top.shape, (2, 2))
    self.assertIn(path[2], random_params(looped)[LOOP]['block'])
    self.assertGreater(np.min(np.abs(top[0] - top[1])), 0)


class DecoderTest(parameterized.TestCase):
  def test_remat_policies_give_equal_gradients(self):
    model = dataclasses.replace(MODEL, num_layers=2)
    params = random_params(model)
    want, want_grads = run(model, 'none', params)
    for remat in REMAT_POLICIES[1:]:
      got, got_grads = run(model, remat, params)
      np.testing.assert_allclose(got.hidden_BTD, want.hidden_BTD, atol=1e-5)
      # Counted once, not again when the backward pass recomputes.
      np.testing.assert_array_equal(got.stats.tokens, want.stats.tokens)
      assert_trees_close(got_grads, want_grads, 2e-5)

  @parameterized.parameters(
    # The operator's forward again, and its backward.
    ('layer', 2),
    ('layer_save_mixer', 1),
  )
  def test_a_saved_mixer_does_not_run_again(self, remat, want_scans):
    model = dataclasses.replace(
      MODEL,
      num_layers=1,
      mixers=('kda',),
      dense_layers=1,
      attn_res_block=0,
      kda=KdaConfig(
        num_heads=1,
        key_dim=32,
        value_dim=32,
        gate_rank=4,
        implementation='chunked_xla',
      ),
    )

    def objective(params):
      out = Decoder(model, BALANCE, remat).apply(
        {'params': params}, TOKENS, TARGETS, SEGMENTS, views_of(model)
      )
      return jnp.sum(out.hidden_BTD * COTANGENTS[0])

    program = jax.make_jaxpr(jax.grad(objective))(random_params(model))
    # What the backward pass does with a layer is one equation of its own.
    (backward,) = [e for e in program.eqns if 'prevent_cse' in e.params]
    # Scans that carry a state of the operator, or its gradient.
    scans = [
      e
      for e in backward.params['jaxpr'].eqns
      if e.primitive.name == 'scan'
      and e.outvars[0].aval.shape == (B, 1, 32, 32)
    ]
    self.assertLen(scans, want_scans)

  def test_without_routed_layers(self):
    model = dataclasses.replace(
      MODEL, num_layers=2, dense_layers=2, mixers=('local',), scan_blocks=True
    )
    out, _ = run(model, 'none', random_params(model))
    self.assertIsNone(out.stats)
    self.assertEqual(out.max_logits, {})
    self.assertTrue(np.all(np.isfinite(out.hidden_BTD)))

  def test_head_is_rounded_to_the_compute_dtype(self):
    params = random_params(MODEL)
    np.testing.assert_array_equal(
      head_matrix(params, 'bfloat16'),
      params['head'].astype(jnp.bfloat16).astype(jnp.float32),
    )
    np.testing.assert_array_equal(
      head_matrix(params, 'float32'), params['head']
    )


if __name__ == '__main__':
  absltest.main()
