"""The initial state: what it depends on and where it lives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax.sharding import PartitionSpec

from hybrid_moe import train_state
from hybrid_moe.config import ExperimentConfig, MeshConfig, StageConfig
from hybrid_moe.mesh import make_mesh
from hybrid_moe.model.decoder import LOOP
from hybrid_moe.model_config import (
  LocalAttentionConfig,
  ModelConfig,
  MoeConfig,
)

MODEL = ModelConfig(
  vocab_size=24,
  d_model=16,
  num_layers=3,
  mixers=('local',),
  final_mixer='',
  dense_hidden=16,
  attn_res_block=1,
  dtype='float32',
  local=LocalAttentionConfig(num_heads=2, head_dim=8, window=4),
  moe=MoeConfig(num_experts=4, top_k=2, latent_dim=8, expert_hidden=8),
)
CONFIG = ExperimentConfig(
  model=MODEL,
  stages=(StageConfig('s', 16, 8, 1.0),),
  total_tokens=16 * 8,
  stage_share_range=(1.0, 1.0),
)


@functools.cache
def plain_state():
  return train_state.init_state(CONFIG, jax.random.key(0))


@functools.cache
def sharded_state():
  with jax.set_mesh(make_mesh(MeshConfig())):
    return train_state.init_state(CONFIG, jax.random.key(0))


def leaves(tree):
  return jax.tree_util.tree_leaves_with_path(tree)


class TrainStateTest(absltest.TestCase):
  def test_devices_do_not_change_the_parameters(self):
    state = sharded_state()
    # Slices of an array may be vectorised another way: the last bit differs.
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=3e-7),
      state,
      plain_state(),
    )
    # Born sharded: no device ever held the whole of a matrix.
    gate = state.params['block_0']['layer_0']['ffn']['w_gate']
    self.assertEqual(gate.sharding.spec, PartitionSpec('data', None))
    self.assertEqual(gate.addressable_shards[0].data.shape, (2, 16))

  def test_lengths_do_not_change_the_parameters(self):
    longer = dataclasses.replace(
      CONFIG,
      stages=(StageConfig('other', 64, 4, 1.0),),
      total_tokens=64 * 4,
    )
    params = train_state.init_params(longer, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, plain_state().params)

  def test_parameters_differ_from_each_other_and_by_key(self):
    params = plain_state().params
    other = train_state.init_params(CONFIG, jax.random.key(1))
    seen = {}
    for (path, leaf), (_, fresh) in zip(leaves(params), leaves(other)):
      if path[-1].key in ('scale', 'query', 'A_log'):
        continue
      self.assertTrue(np.any(leaf != fresh), path)
      seen.setdefault(leaf.shape, []).append(np.asarray(leaf))
    for shape, values in seen.items():
      for i, value in enumerate(values):
        for earlier in values[:i]:
          self.assertTrue(np.any(value != earlier), shape)
    # Entries of a stack are drawn apart.
    stacked = params[LOOP]['block']['layer_0']['ffn']['router']
    self.assertEqual(stacked.shape, (2, 16, 4))
    self.assertTrue(np.any(stacked[0] != stacked[1]))

  def test_matrices_have_the_configured_deviation(self):
    params = plain_state().params
    table = np.asarray(params['table'])
    self.assertAlmostEqual(table.std(), MODEL.init_std, delta=0.003)
    self.assertAlmostEqual(table.mean(), 0.0, delta=0.003)

  def test_state_starts_at_zero_in_its_dtypes(self):
    state = plain_state()
    self.assertEqual((int(state.step), int(state.stage_step)), (0, 0))
    for leaf in jax.tree.leaves(state.params):
      self.assertEqual(leaf.dtype, jnp.float32)
    for leaf in jax.tree.leaves((state.opt_state, state.balance, state.health)):
      self.assertFalse(np.any(leaf))
    self.assertEqual(state.balance.bias_LE.shape, (2, 4))

  def test_abstract_state_is_the_state(self):
    """One tree serves compilation and restoring: it must fit exactly."""
    abstract = train_state.abstract_state(CONFIG, make_mesh(MeshConfig()))
    for (path, want), (_, got) in zip(
      leaves(abstract), leaves(sharded_state()), strict=True
    ):
      self.assertEqual((got.shape, got.dtype), (want.shape, want.dtype), path)
      self.assertTrue(
        got.sharding.is_equivalent_to(want.sharding, got.ndim), path
      )

  def test_optimiser_state_is_sharded_as_its_parameters(self):
    abstract = train_state.abstract_state(CONFIG, make_mesh(MeshConfig()))
    specs = {
      tuple(str(entry) for entry in path): leaf.sharding.spec
      for path, leaf in leaves(abstract.params)
    }
    compared = 0
    for path, leaf in leaves(abstract.opt_state):
      names = tuple(str(entry) for entry in path)
      for name, spec in specs.items():
        if names[-len(name) :] == name and leaf.ndim:
          self.assertEqual(leaf.sharding.spec, spec, path)
          compared += 'data' in spec
    # Momentum of matrices, and two moments of both embeddings.
    self.assertGreater(compared, 10)


if __name__ == '__main__':
  absltest.main()
