"""Inputs and weights at which a careless network stops being finite."""

import functools
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from hybrid_moe import loss
from hybrid_moe.model.decoder import Decoder, head_matrix
from hybrid_moe.model_config import (
  BalanceConfig,
  KdaConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
)

SMALL = runpy.run_path(
  str(pathlib.Path(__file__).parents[1] / 'small_model.py')
)

B, T, U = 2, 512, 16
BALANCE = BalanceConfig(num_bins=20)
MODEL = ModelConfig(
  vocab_size=U,
  d_model=16,
  num_layers=2,
  mixers=('kda', 'mla'),
  final_mixer='',
  dense_hidden=16,
  attn_res_block=1,
  dtype='bfloat16',
  kda=KdaConfig(
    num_heads=1,
    key_dim=32,
    value_dim=32,
    gate_rank=4,
    implementation='chunked_xla',
  ),
  mla=MlaConfig(
    num_heads=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    head_dim=8,
    shared_key_dim=8,
    value_dim=8,
  ),
  moe=MoeConfig(num_experts=4, top_k=2, latent_dim=8, expert_hidden=8),
)


def views():
  return SMALL['views'](MODEL, BALANCE)


@functools.cache
def random_params():
  return SMALL['random_params'](MODEL, BALANCE, 0.1)


@functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)
def loss_and_gradient(params, tokens, targets, segments):
  def objective(params):
    out = Decoder(MODEL, BALANCE, 'layer').apply(
      {'params': params}, tokens, targets, segments, views()
    )
    head_DU = head_matrix(params, MODEL.dtype)
    losses = loss.token_losses(out.hidden_BTD, head_DU, targets)
    mask_BT = segments > 0
    nll = jnp.sum(jnp.where(mask_BT, losses.nll_BT, 0.0))
    return nll / jnp.maximum(jnp.sum(mask_BT), 1), out.stats

  return jax.value_and_grad(objective, has_aux=True)(params)


def random_tokens():
  return np.random.default_rng(0).integers(0, U, (B, T)).astype(np.int32)


class ExtremesTest(absltest.TestCase):
  def check(self, params, tokens, segments):
    targets = np.roll(tokens, -1, axis=1)
    (value, stats), grads = loss_and_gradient(params, tokens, targets, segments)
    self.assertTrue(np.isfinite(value))
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
      self.assertTrue(np.all(np.isfinite(leaf)), path)
    self.assertEqual(int(stats.load_E.sum()), 2 * int((segments > 0).sum()))
    return float(value), grads

  def test_ordinary_input(self):
    ones = np.ones((B, T), np.int32)
    value, grads = self.check(random_params(), random_tokens(), ones)
    self.assertAlmostEqual(value, np.log(U), delta=1.0)
    # Every parameter that is used learns something.
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
      names = [entry.key for entry in path]
      if names[:3] == ['block_0', 'layer_0', 'mixer_residual']:
        # It has one source, nothing to choose from.
        continue
      self.assertGreater(np.abs(leaf).max(), 0, path)

  def test_one_token_repeated(self):
    ones = np.ones((B, T), np.int32)
    value, _ = self.check(random_params(), np.full((B, T), 7, np.int32), ones)
    self.assertLess(value, 2 * np.log(U))

  def test_a_row_of_padding(self):
    segments = np.ones((B, T), np.int32)
    segments[1] = 0
    self.check(random_params(), random_tokens(), segments)

  def test_documents_of_one_token(self):
    segments = np.tile(np.arange(1, T + 1, dtype=np.int32), (B, 1))
    self.check(random_params(), random_tokens(), segments)

  def test_huge_weights(self):
    huge = jax.tree.map(lambda p: p * 100, random_params())
    ones = np.ones((B, T), np.int32)
    self.check(huge, random_tokens(), ones)
    self.check(huge, np.full((B, T), 7, np.int32), ones)

  def test_zero_weights(self):
    zero = jax.tree.map(np.zeros_like, random_params())
    ones = np.ones((B, T), np.int32)
    value, _ = self.check(zero, random_tokens(), ones)
    self.assertAlmostEqual(value, np.log(U), places=4)


if __name__ == '__main__':
  absltest.main()
