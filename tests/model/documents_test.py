"""What a token may depend on: its document's past, and nothing else."""

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
  LocalAttentionConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
)

SMALL = runpy.run_path(
  str(pathlib.Path(__file__).parents[1] / 'small_model.py')
)

B, T, D = 2, 20, 16
# Two documents and padding; tokens are numbered, so that a row of the
# embedding stands for one position.
LENGTHS = (9, 7)
SEGMENTS_T = np.repeat([1, 2, 0], [*LENGTHS, T - sum(LENGTHS)]).astype(np.int32)
BALANCE = BalanceConfig(num_bins=20)
MODEL = ModelConfig(
  vocab_size=T + 1,
  d_model=D,
  num_layers=3,
  mixers=('kda', 'mla', 'local'),
  final_mixer='',
  dense_hidden=16,
  attn_res_block=2,
  mtp_layers=1,
  init_std=0.4,
  dtype='float32',
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
  local=LocalAttentionConfig(num_heads=2, head_dim=6, window=4),
  moe=MoeConfig(num_experts=4, top_k=2, latent_dim=8, expert_hidden=8),
)


def views():
  return SMALL['views'](MODEL, BALANCE)


@functools.cache
def random_params():
  return SMALL['random_params'](MODEL, BALANCE, 0.3)


@functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)
def pull(params, tokens, targets, segments, cotangents):
  """Both outputs, statistics, and the gradient along the cotangents."""

  def outputs(params):
    out = Decoder(MODEL, BALANCE, 'layer').apply(
      {'params': params}, tokens, targets, segments, views()
    )
    return (out.hidden_BTD, out.mtp_hidden_BTD), out.stats

  out, pullback, stats = jax.vjp(outputs, params, has_aux=True)
  (grads,) = pullback((cotangents[0], cotangents[1]))
  return out, stats, grads


def packed_batch():
  """One packed row and one of padding alone."""
  tokens = np.stack([np.arange(T), np.full(T, T)]).astype(np.int32)
  targets = np.minimum(tokens + 1, T).astype(np.int32)
  segments = np.stack([SEGMENTS_T, np.zeros(T, np.int32)])
  return tokens, targets, segments


def separate_batch():
  """The same documents, each at the start of a row of its own."""
  batch = [np.full((B, T), T, np.int32) for _ in range(2)]
  segments = np.zeros((B, T), np.int32)
  start = 0
  for row, length in enumerate(LENGTHS):
    for array, packed in zip(batch, packed_batch()):
      array[row, :length] = packed[0, start : start + length]
    segments[row, :length] = 1
    start += length
  return *batch, segments


def separated(array_BTD):
  """Rows of the packed batch where `separate_batch` has them."""
  array = np.zeros_like(array_BTD)
  start = 0
  for row, length in enumerate(LENGTHS):
    array[row, :length] = array_BTD[0, start : start + length]
    start += length
  return array


def random_cotangents():
  """Random at real tokens, zero at padding."""
  rng = np.random.default_rng(0)
  cotangents = rng.normal(size=(2, B, T, D)).astype(np.float32)
  return cotangents * (packed_batch()[2] > 0)[None, ..., None]


def assert_trees_close(got, want):
  paths = jax.tree_util.tree_leaves_with_path(want)
  for (path, b), a in zip(paths, jax.tree.leaves(got), strict=True):
    np.testing.assert_allclose(
      a, b, atol=3e-5 * max(np.abs(b).max(), 1e-2), err_msg=str(path)
    )


class DocumentsTest(absltest.TestCase):
  def test_packed_documents_equal_separate_ones(self):
    cotangents = random_cotangents()
    out, stats, grads = pull(random_params(), *packed_batch(), cotangents)
    apart, apart_stats, apart_grads = pull(
      random_params(),
      *separate_batch(),
      np.stack([separated(c) for c in cotangents]),
    )
    for packed, alone in zip(out, apart):
      for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(
          separated(packed)[row, :length], alone[row, :length], atol=1e-5
        )
    np.testing.assert_array_equal(stats.load_E, apart_stats.load_E)
    self.assertEqual(int(stats.tokens[0, 0]), sum(LENGTHS))
    assert_trees_close(grads, apart_grads)
    self.assertGreater(np.abs(grads['mtp']['mtp_proj']).max(), 1e-2)

  def test_padding_has_no_influence(self):
    tokens, targets, segments = packed_batch()
    cotangents = random_cotangents()
    out, stats, grads = pull(
      random_params(), tokens, targets, segments, cotangents
    )
    noise = np.random.default_rng(2).integers(0, T, (2, B, T))
    is_real = segments > 0
    changed = [
      np.where(is_real, old, new).astype(np.int32)
      for old, new in zip((tokens, targets), noise)
    ]
    other, other_stats, other_grads = pull(
      random_params(), *changed, segments, cotangents
    )
    for a, b in zip(out, other):
      np.testing.assert_array_equal(a[is_real], b[is_real])
    jax.tree.map(np.testing.assert_array_equal, stats, other_stats)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
      grads,
      other_grads,
    )

  def test_all_padding_is_finite(self):
    tokens, targets, _ = packed_batch()
    cotangents = np.ones((2, B, T, D), np.float32)
    out, stats, grads = pull(
      random_params(), tokens, targets, np.zeros((B, T), np.int32), cotangents
    )
    for leaf in jax.tree.leaves((out, grads)):
      self.assertTrue(np.all(np.isfinite(leaf)))
    self.assertEqual(int(stats.tokens.sum()), 0)
    self.assertEqual(int(stats.load_E.sum()), 0)
    self.assertEqual(int(stats.histogram_EW.sum()), 0)

  def test_causality_by_gradient(self):
    """Output t moves with embedding u of its document's past only.

    The prediction of the token after next also knows the next token.
    """
    tokens, targets, segments = packed_batch()
    index = np.arange(T)
    same = SEGMENTS_T[:, None] == SEGMENTS_T[None]
    for output, ahead in ((0, 0), (1, 1)):
      want = same & (index[None] <= index[:, None] + ahead)
      if ahead:
        # The next token of a document's last one lies in the next document;
        # the loss leaves that prediction out.
        want |= index[None] == index[:, None] + 1
      for t in range(sum(LENGTHS)):
        cotangents = np.zeros((2, B, T, D), np.float32)
        cotangents[output, 0, t] = np.linspace(-1, 2, D)
        _, _, grads = pull(
          random_params(), tokens, targets, segments, cotangents
        )
        moved = np.abs(grads['table'][:T]).max(1)
        np.testing.assert_array_equal(moved > 0, want[t], f'output {t}')


if __name__ == '__main__':
  absltest.main()
