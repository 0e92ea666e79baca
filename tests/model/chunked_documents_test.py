"""Rows of several chunks through the decoder, with the default KDA."""

import functools
import pathlib
import runpy

import jax
import numpy as np
from absl.testing import absltest

from hybrid_moe.model.decoder import Decoder
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

# Two and a half chunks of 64. Documents end in the second chunk and in the
# third, and padding follows.
T, D = 160, 16
LENGTHS = (71, 78)
STARTS = (0, 71)
SEGMENTS_T = np.repeat([1, 2, 0], [*LENGTHS, T - sum(LENGTHS)]).astype(np.int32)
BALANCE = BalanceConfig(num_bins=20)
MODEL = ModelConfig(
  # A row of the embedding for each position.
  vocab_size=T,
  d_model=D,
  num_layers=2,
  mixers=('kda', 'mla'),
  final_mixer='',
  dense_hidden=16,
  attn_res_block=1,
  init_std=0.4,
  dtype='float32',
  kda=KdaConfig(num_heads=1, key_dim=32, value_dim=32, gate_rank=4),
  mla=MlaConfig(
    num_heads=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    head_dim=6,
    shared_key_dim=4,
    value_dim=6,
  ),
  moe=MoeConfig(num_experts=4, top_k=2, latent_dim=8, expert_hidden=8),
)


def views():
  return SMALL['views'](MODEL, BALANCE)


@functools.cache
def random_params():
  # A slow decay, so that the state of a document outlasts a chunk.
  return SMALL['random_params'](MODEL, BALANCE, 0.3, dt_bias=-7.0)


@functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)
def pull(tokens_BT, segments_BT, cotangent_BTD):
  """Outputs, and the gradient along the cotangent."""

  def outputs(params):
    out = Decoder(MODEL, BALANCE, 'layer').apply(
      {'params': params}, tokens_BT, tokens_BT, segments_BT, views()
    )
    return out.hidden_BTD

  out_BTD, pullback = jax.vjp(outputs, random_params())
  return out_BTD, pullback(cotangent_BTD)[0]


def packed_batch():
  """One packed row and one of padding alone."""
  tokens_BT = np.stack([np.arange(T)] * 2).astype(np.int32)
  return tokens_BT, np.stack([SEGMENTS_T, np.zeros(T, np.int32)])


def separated(array_BT):
  """Documents of the packed batch, each at the start of a row of its own."""
  array = np.zeros_like(array_BT)
  for row, (start, length) in enumerate(zip(STARTS, LENGTHS)):
    array[row, :length] = array_BT[0, start : start + length]
  return array


class ChunkedDocumentsTest(absltest.TestCase):
  def test_packed_documents_equal_separate_ones(self):
    tokens_BT, segments_BT = packed_batch()
    cotangent = np.random.default_rng(0).normal(size=(2, T, D))
    cotangent = cotangent.astype(np.float32) * (segments_BT > 0)[..., None]
    out, grads = pull(tokens_BT, segments_BT, cotangent)
    alone, alone_grads = pull(
      separated(tokens_BT),
      (separated(segments_BT) > 0).astype(np.int32),
      separated(cotangent),
    )
    for row, length in enumerate(LENGTHS):
      np.testing.assert_allclose(
        separated(out)[row, :length], alone[row, :length], atol=2e-5
      )
    paths = jax.tree_util.tree_leaves_with_path(alone_grads)
    for (path, want), got in zip(paths, jax.tree.leaves(grads), strict=True):
      np.testing.assert_allclose(
        got, want, atol=1e-4 * max(np.abs(want).max(), 1e-2), err_msg=str(path)
      )

  def test_causality_by_gradient(self):
    """Output t moves with every token of its document's past, and no other."""
    tokens_BT, segments_BT = packed_batch()
    index = np.arange(T)
    for t in (0, 63, 64, 70, 71, 72, 127, 128, 148):
      cotangent = np.zeros((2, T, D), np.float32)
      cotangent[0, t] = np.linspace(-1, 2, D)
      _, grads = pull(tokens_BT, segments_BT, cotangent)
      moved = np.abs(grads['table']).max(1)
      want = (SEGMENTS_T == SEGMENTS_T[t]) & (index <= t)
      np.testing.assert_array_equal(moved > 0, want, f'output {t}')


if __name__ == '__main__':
  absltest.main()
