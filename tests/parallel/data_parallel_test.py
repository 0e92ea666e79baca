"""A training step on eight devices against one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import NamedSharding

from hybrid_moe import sharding
from hybrid_moe.config import ExperimentConfig, MeshConfig, StageConfig
from hybrid_moe.mesh import make_mesh
from hybrid_moe.model_config import (
  KdaConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
)
from hybrid_moe.run_config import OptimConfig
from hybrid_moe.train_state import abstract_state, init_state
from hybrid_moe.train_step import train_step

ROWS, T, U = 16, 12, 32
CONFIG = ExperimentConfig(
  model=ModelConfig(
    vocab_size=U,
    d_model=16,
    num_layers=2,
    mixers=('kda', 'mla'),
    final_mixer='',
    dense_hidden=16,
    attn_res_block=1,
    init_std=0.2,
    dtype='float32',
    # One head: a dimension of one must not be mistaken for the batch.
    kda=KdaConfig(
      num_heads=1,
      key_dim=32,
      value_dim=32,
      gate_rank=4,
      implementation='reference',
    ),
    mla=MlaConfig(
      num_heads=2,
      q_lora_rank=8,
      kv_lora_rank=8,
      head_dim=6,
      shared_key_dim=4,
      value_dim=6,
    ),
    moe=MoeConfig(num_experts=8, top_k=2, latent_dim=8, expert_hidden=8),
  ),
  stages=(StageConfig('s', T, ROWS, 1.0, micro_batches=2),),
  total_tokens=ROWS * T * 100,
  stage_share_range=(1.0, 1.0),
  # Without clipping the momentum after one step is the gradient.
  optim=OptimConfig(clip_norm=0.0),
)


# Rows of several chunks with the operator that runs by default.
CHUNKED = dataclasses.replace(
  CONFIG,
  model=dataclasses.replace(
    CONFIG.model,
    num_layers=1,
    mixers=('kda',),
    dense_layers=1,
    attn_res_block=0,
    kda=dataclasses.replace(CONFIG.model.kda, implementation='chunked_xla'),
  ),
  stages=(StageConfig('s', 72, ROWS, 1.0, micro_batches=2),),
  total_tokens=ROWS * 72 * 100,
)


def make_batch(config):
  tokens_in_row = config.stages[0].seq_len
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, U, (2, ROWS // 2, tokens_in_row + 1))
  tokens = tokens.astype(np.int32)
  segments = np.ones((2, ROWS // 2, tokens_in_row), np.int32)
  segments[:, :, 7:] = 2
  # Whole rows of padding: shards see different numbers of targets.
  segments[0, 2:4] = 0
  return {
    'tokens': tokens[..., :-1],
    'targets': tokens[..., 1:],
    'segment_ids': segments,
    'loss_mask': segments > 0,
  }


@functools.cache
def start_state(config):
  return jax.device_get(init_state(config, jax.random.key(0)))


@functools.cache
def run(config, num_devices):
  """The first step from the same state on so many devices."""
  mesh = make_mesh(MeshConfig(), jax.devices()[:num_devices])
  places = jax.tree.map(
    lambda leaf: leaf.sharding, abstract_state(config, mesh)
  )
  state = jax.device_put(start_state(config), places)
  batch = jax.device_put(
    make_batch(config), NamedSharding(mesh, sharding.MICRO_ABT)
  )
  step = functools.partial(
    train_step, config, 'layer', lambda _: jnp.float32(0.01)
  )
  with jax.set_mesh(mesh):
    after, metrics = jax.jit(
      step, compiler_options={'xla_backend_optimization_level': 0}
    )(state, batch)
  return jax.device_get((after, metrics)), after


class DataParallelTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('two_mixers', CONFIG, ('loss', 'grad_norm', 'max_logit')),
    ('kda_in_chunks', CHUNKED, ('loss', 'grad_norm')),
  )
  def test_eight_devices_equal_one(self, config, names):
    (one, one_metrics), _ = run(config, 1)
    (eight, eight_metrics), _ = run(config, 8)
    for name in names:
      np.testing.assert_allclose(
        eight_metrics[name], one_metrics[name], rtol=1e-5, err_msg=name
      )
    # Gradients: Muon's momentum, AdamW's moments.
    pairs = zip(
      jax.tree_util.tree_leaves_with_path(one.opt_state),
      jax.tree.leaves(eight.opt_state),
      strict=True,
    )
    for (path, want), got in pairs:
      np.testing.assert_allclose(
        got,
        want,
        atol=1e-4 * max(np.abs(want).max(), 1e-4),
        err_msg=str(path),
      )
    for name in ('table', 'head'):
      moved = np.abs(one.params[name] - start_state(config).params[name])
      self.assertGreater(moved.max(), 1e-3)

  def test_counts_are_bitwise_equal(self):
    (one, one_metrics), _ = run(CONFIG, 1)
    (eight, eight_metrics), _ = run(CONFIG, 8)
    np.testing.assert_array_equal(
      one_metrics['load_LE'], eight_metrics['load_LE']
    )
    self.assertEqual(int(one_metrics['tokens']), int(eight_metrics['tokens']))
    # The bias is solved from pooled integer counts.
    self.assertGreater(np.abs(one.balance.bias_LE).max(), 1e-3)
    jax.tree.map(np.testing.assert_array_equal, one.balance, eight.balance)

  def test_state_keeps_its_place(self):
    """What goes in comes out where it was, so that it can be donated."""
    _, after = run(CONFIG, 8)
    mesh = make_mesh(MeshConfig())
    for (path, want), got in zip(
      jax.tree_util.tree_leaves_with_path(abstract_state(CONFIG, mesh)),
      jax.tree.leaves(after),
      strict=True,
    ):
      self.assertTrue(
        got.sharding.is_equivalent_to(want.sharding, got.ndim), path
      )
      self.assertEqual(got.dtype, want.dtype)


if __name__ == '__main__':
  absltest.main()
