"""Lays tokens out in whole chunks and takes results back to the caller."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import operands, segments, varying

_TOKEN_ARRAYS = ('q_BTHK', 'k_BTHK', 'v_BTHV', 'g_BTHK', 'beta_BTH')


class Layout(NamedTuple):
  """A call in whole chunks.

  Attributes:
    arrays: the arrays, rows being whole chunks; h0 is not None for sequences.
    plan: what is known of each chunk.
    restore: (outputs, final states) in chunks -> those of the caller.
  """

  arrays: operands.Operands
  plan: segments.ChunkPlan
  restore: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def count_chunks(
  arrays: operands.Operands, packing: operands.Packing, chunk: int
) -> int:
  """Chunks that a row needs at least.

  Every sequence may leave one chunk partly empty; the bound is static.
  """
  tokens = arrays.v_BTHV.shape[1]
  if packing.cu_seqlens is None:
    return -(-tokens // chunk)
  return tokens // chunk + packing.cu_seqlens.shape[0] - 1


def map_tokens(fn: Callable, arrays: operands.Operands) -> operands.Operands:
  """Applies a function to the arrays that run along tokens."""
  return arrays._replace(
    **{name: fn(getattr(arrays, name)) for name in _TOKEN_ARRAYS}
  )


def lay_out(
  arrays: operands.Operands,
  packing: operands.Packing,
  chunk: int,
  chunks: int,
) -> Layout:
  """Brings rows to a number of chunks.

  Args:
    arrays: arrays of the caller.
    packing: documents, padding and sequences of the caller.
    chunk: tokens a chunk.
    chunks: chunks a row, at least `count_chunks`.
  """
  if packing.cu_seqlens is not None:
    return _lay_out_sequences(arrays, packing.cu_seqlens, chunk, chunks)
  batch, tokens = arrays.v_BTHV.shape[:2]
  padded = chunks * chunk
  plan = segments.plan_documents(
    packing.valid_BT, packing.document_BT, batch, tokens, padded, chunk
  )
  if padded != tokens:

    def pad(x):
      extra = [(0, 0), (0, padded - tokens)] + [(0, 0)] * (x.ndim - 2)
      return jnp.pad(x, extra)

    arrays = map_tokens(pad, arrays)
  return Layout(arrays, plan, lambda o, final: (o[:, :tokens], final))


def _lay_out_sequences(arrays, cu_seqlens, chunk, chunks) -> Layout:
  """Starts each of several sequences in one row on a chunk boundary."""
  _, tokens, _, num_values = arrays.v_BTHV.shape
  sequences = cu_seqlens.shape[0] - 1
  moved = segments.align_sequences(cu_seqlens, tokens, chunk, chunks)
  h0_SHKV = arrays.h0_BHKV
  if h0_SHKV is None:
    h0_SHKV = varying.zero_state(arrays.g_BTHK, num_values)
    h0_SHKV = jnp.repeat(h0_SHKV, sequences, axis=0)
  arrays = map_tokens(lambda x: jnp.take(x, moved.source_P, axis=1), arrays)
  plan = segments.ChunkPlan(
    moved.valid_1P, None, None, moved.sequence_N, moved.first_N
  )

  def restore(o_1PHV, final_SHKV):
    o_1THV = jnp.take(o_1PHV, moved.place_T, axis=1)
    o_1THV = jnp.where(moved.held_1T[..., None, None], o_1THV, 0)
    empty = moved.empty_S[:, None, None, None]
    return o_1THV, jnp.where(empty, h0_SHKV, final_SHKV)

  return Layout(arrays._replace(h0_BHKV=h0_SHKV), plan, restore)
