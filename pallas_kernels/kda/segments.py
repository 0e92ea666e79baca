"""Document boundaries: inside rows, and of sequences laid back to back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def count_documents(segment_ids_BT: jax.Array) -> jax.Array:
  """Numbers the documents of each row from 0.

  The number rises at a real token whose id differs from that of the real token
  before it. Padding carries the number on, so a document that is interrupted by
  padding stays one document.

  Args:
    segment_ids_BT: int32, 0 for padding, positive for documents.

  Returns:
    int32 [B, T], never falling along a row.
  """
  tokens = segment_ids_BT.shape[1]
  index_BT = jax.lax.broadcasted_iota(jnp.int32, segment_ids_BT.shape, 1)
  real_BT = segment_ids_BT > 0
  last_BT = jax.lax.cummax(jnp.where(real_BT, index_BT, -1), axis=1)
  before_BT = jnp.pad(last_BT, ((0, 0), (1, 0)), constant_values=-1)
  before_BT = before_BT[:, :tokens]
  id_BT = jnp.take_along_axis(segment_ids_BT, jnp.maximum(before_BT, 0), axis=1)
  changes_BT = real_BT & (before_BT >= 0) & (id_BT != segment_ids_BT)
  return jnp.cumsum(changes_BT, axis=1, dtype=jnp.int32)


class Relayout(NamedTuple):
  """Sequences of one row moved so that each starts on a chunk boundary.

  Attributes:
    source_P: int32, for every place of the new row the token it holds.
    valid_1P: bool, whether the place holds a token.
    place_T: int32, for every token its place in the new row.
    held_1T: bool, whether the token belongs to any sequence.
    sequence_N: int32, the sequence of each chunk.
    first_N: bool, whether the chunk is its sequence's first.
    empty_S: bool, whether the sequence has no tokens.
  """

  source_P: jax.Array
  valid_1P: jax.Array
  place_T: jax.Array
  held_1T: jax.Array
  sequence_N: jax.Array
  first_N: jax.Array
  empty_S: jax.Array


def sequence_of_token(cu_seqlens: jax.Array, index_T: jax.Array) -> jax.Array:
  """The sequence that holds each token; the nearest one outside all."""
  found_T = jnp.searchsorted(cu_seqlens, index_T, side='right') - 1
  return jnp.clip(found_T, 0, cu_seqlens.shape[0] - 2).astype(jnp.int32)


def align_sequences(
  cu_seqlens: jax.Array, num_tokens: int, chunk: int, num_chunks: int
) -> Relayout:
  """Plans the relayout of back-to-back sequences to chunk boundaries.

  Args:
    cu_seqlens: int32 [S + 1], bounds of S sequences in a row of tokens.
    num_tokens: length of the row.
    chunk: tokens a chunk.
    num_chunks: chunks of the new row, at least num_tokens // chunk + S.

  Returns:
    The index arrays of the move. Chunks past the last sequence repeat it and
    hold no tokens.
  """
  start_S, length_S = cu_seqlens[:-1], jnp.diff(cu_seqlens)
  chunks_S = (length_S + chunk - 1) // chunk
  end_S = jnp.cumsum(chunks_S)
  begin_S = end_S - chunks_S
  index_N = jnp.minimum(
    jnp.arange(num_chunks, dtype=jnp.int32), jnp.maximum(end_S[-1] - 1, 0)
  )
  sequence_N = jnp.searchsorted(end_S, index_N, side='right')
  sequence_N = jnp.minimum(sequence_N, start_S.shape[0] - 1).astype(jnp.int32)
  index_N = jnp.arange(num_chunks, dtype=jnp.int32)
  offset_N = (index_N - begin_S[sequence_N]) * chunk
  offset_NC = offset_N[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
  valid_NC = offset_NC < length_S[sequence_N][:, None]
  source_NC = start_S[sequence_N][:, None] + offset_NC
  token_T = jnp.arange(num_tokens, dtype=jnp.int32)
  owner_T = sequence_of_token(cu_seqlens, token_T)
  place_T = begin_S[owner_T] * chunk + token_T - start_S[owner_T]
  held_T = (token_T >= cu_seqlens[0]) & (token_T < cu_seqlens[-1])
  return Relayout(
    source_P=jnp.clip(source_NC, 0, num_tokens - 1).reshape(-1),
    valid_1P=valid_NC.reshape(1, -1),
    place_T=jnp.clip(place_T, 0, num_chunks * chunk - 1),
    held_1T=held_T[None],
    sequence_N=sequence_N,
    first_N=index_N == begin_S[sequence_N],
    empty_S=length_S == 0,
  )


class ChunkPlan(NamedTuple):
  """What the chunked form needs to know of documents, chunk by chunk.

  Attributes:
    valid_BT: bool, False for padding, or None.
    document_BT: int32 document numbers, or None for one document a row.
    entry_BN: int32, the document of the state that enters each chunk, or None.
    sequence_N: int32, the sequence of each chunk when sequences share a row,
      or None.
    first_N: bool, whether the chunk is its sequence's first, or None.
  """

  valid_BT: jax.Array | None
  document_BT: jax.Array | None
  entry_BN: jax.Array | None
  sequence_N: jax.Array | None
  first_N: jax.Array | None


def plan_documents(
  valid_BT: jax.Array | None,
  document_BT: jax.Array | None,
  batch: int,
  tokens: int,
  padded: int,
  chunk: int,
) -> ChunkPlan:
  """Extends rows to whole chunks and finds each chunk's entry document.

  Args:
    valid_BT: bool, or None when every token is real.
    document_BT: int32 from `count_documents`, or None.
    batch: number of rows.
    tokens: length of the rows.
    padded: length to extend them to, whole chunks.
    chunk: tokens a chunk.
  """
  extra = ((0, 0), (0, padded - tokens))
  if padded != tokens and valid_BT is None:
    valid_BT = jnp.ones((batch, tokens), bool)
  if valid_BT is not None:
    valid_BT = jnp.pad(valid_BT, extra)
  entry_BN = None
  if document_BT is not None:
    tail = jnp.broadcast_to(document_BT[:, -1:], (batch, padded - tokens))
    document_BT = jnp.concatenate([document_BT, tail], axis=1)
    last_BN = document_BT[:, chunk - 1 :: chunk]
    entry_BN = jnp.pad(last_BN, ((0, 0), (1, 0)))[:, :-1]
  return ChunkPlan(valid_BT, document_BT, entry_BN, None, None)
