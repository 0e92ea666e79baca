"""The chunked form as an operator: whole chunks in, the caller's layout out."""

import jax
import jax.numpy as jnp

from pallas_kernels import target
from pallas_kernels.kda import (
  chunked_xla,
  chunked_xla_bwd,
  custom_vjp,
  operands,
  segments,
  tile,
  varying,
)

_chunked = custom_vjp.join(
  chunked_xla.kda_forward, chunked_xla_bwd.kda_backward
)

_TOKEN_ARRAYS = ('q_BTHK', 'k_BTHK', 'v_BTHV', 'g_BTHK', 'beta_BTH')


def _map_tokens(fn, arrays: operands.Operands) -> operands.Operands:
  """Applies a function to the arrays that run along tokens."""
  return arrays._replace(
    **{name: fn(getattr(arrays, name)) for name in _TOKEN_ARRAYS}
  )


def kda_chunked_xla(
  arrays: operands.Operands,
  packing: operands.Packing,
  config: operands.KdaConfig,
) -> tuple[jax.Array, jax.Array]:
  """Runs KDA in chunks; arguments and results as `kda_reference`."""
  batch, tokens, heads, value_dim = arrays.v_BTHV.shape
  tiles = tile.choose_tiles(
    target.target_platform(), arrays.q_BTHK.shape[-1], value_dim
  )
  if packing.cu_seqlens is not None:
    return _run_sequences(arrays, packing.cu_seqlens, config, tiles)
  blocks, chunks = tiles.split_tokens(tokens, batch * heads)
  padded = blocks * chunks * tiles.chunk
  plan = segments.plan_documents(
    packing.valid_BT, packing.document_BT, batch, tokens, padded, tiles.chunk
  )
  if padded != tokens:

    def pad(x):
      extra = [(0, 0), (0, padded - tokens)] + [(0, 0)] * (x.ndim - 2)
      return jnp.pad(x, extra)

    arrays = _map_tokens(pad, arrays)
  settings = chunked_xla.ChunkedConfig(config, tiles, blocks, chunks)
  o_BTHV, final_BHKV = _run(settings, arrays, plan)
  return o_BTHV[:, :tokens], final_BHKV


def _run_sequences(arrays, cu_seqlens, config, tiles):
  """Runs sequences laid back to back in one row."""
  _, tokens, heads, num_values = arrays.v_BTHV.shape
  sequences = cu_seqlens.shape[0] - 1
  # Every sequence may leave one chunk partly empty; the bound is static.
  most = (tokens // tiles.chunk + sequences) * tiles.chunk
  blocks, chunks = tiles.split_tokens(most, heads)
  moved = segments.align_sequences(
    cu_seqlens, tokens, tiles.chunk, blocks * chunks
  )
  h0_SHKV = arrays.h0_BHKV
  if h0_SHKV is None:
    h0_SHKV = varying.zero_state(arrays.g_BTHK, num_values)
    h0_SHKV = jnp.repeat(h0_SHKV, sequences, axis=0)
  arrays = _map_tokens(lambda x: jnp.take(x, moved.source_P, axis=1), arrays)
  plan = segments.ChunkPlan(
    moved.valid_1P, None, None, moved.sequence_N, moved.first_N
  )
  settings = chunked_xla.ChunkedConfig(config, tiles, blocks, chunks)
  o_1PHV, final_SHKV = _run(settings, arrays._replace(h0_BHKV=h0_SHKV), plan)
  o_1THV = jnp.take(o_1PHV, moved.place_T, axis=1)
  o_1THV = jnp.where(moved.held_1T[..., None, None], o_1THV, 0)
  empty = moved.empty_S[:, None, None, None]
  return o_1THV, jnp.where(empty, h0_SHKV, final_SHKV)


def _run(settings, arrays, plan):
  axes = varying.varying_axes((arrays, plan))
  return _chunked(
    settings,
    varying.vary_over(arrays, axes),
    varying.vary_over(plan, axes),
  )
