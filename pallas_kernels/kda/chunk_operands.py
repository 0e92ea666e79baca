"""What a chunk's state recurrence reads, and the selects that bound it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ChunkOperands(NamedTuple):
  """Decayed scores and views of a chunk; leading axes are [N, B, H].

  G is the cumulative log decay from the chunk's entry, last its last row.

  Attributes:
    kk: scores of keys against earlier keys [..., C, C], strictly lower:
      sum_d k_id k_jd exp(G_id - G_jd).
    qk: scores of queries against keys [..., C, C], lower with the diagonal.
    q_entry: q exp(G) [..., C, K], reads the state at entry.
    k_entry: k exp(G) [..., C, K], reads the state at entry.
    k_exit: k exp(G_last - G) [..., C, K], writes the state at exit.
    decay: exp(G_last) [..., K].
  """

  kk: jax.Array
  qk: jax.Array
  q_entry: jax.Array
  k_entry: jax.Array
  k_exit: jax.Array
  decay: jax.Array


class ChunkMasks(NamedTuple):
  """Where documents let tokens and states meet; leading axes are [N, B, 1].

  Attributes:
    pair: bool [..., C, C], both tokens are of one document.
    entry: bool [..., C, 1], the token is of the document of the entry state.
    exit: bool [..., C, 1], the token is of the chunk's last document.
    carry: bool [..., 1], the chunk holds no document boundary.
  """

  pair: jax.Array
  entry: jax.Array
  exit: jax.Array
  carry: jax.Array


def make_masks(document_NBC: jax.Array, entry_NB: jax.Array) -> ChunkMasks:
  """Masks from document numbers and the number of each entry state.

  Args:
    document_NBC: int32 [N, B, C].
    entry_NB: int32 [N, B].
  """
  document = document_NBC[:, :, None]
  entry = entry_NB[:, :, None, None]
  last = document[..., -1:]
  return ChunkMasks(
    pair=document[..., :, None] == document[..., None, :],
    entry=(document == entry)[..., None],
    exit=(document == last)[..., None],
    carry=last == entry,
  )


def lower_mask(size: int, offset: int = 0) -> jax.Array:
  """bool [C, C], true where column <= row + offset."""
  return jnp.tril(jnp.ones((size, size), bool), offset)


def keep(mask: jax.Array, x: jax.Array) -> jax.Array:
  """Zeroes x where the mask, of its rank or of its last axes, is False."""
  mask = jax.lax.expand_dims(mask, range(x.ndim - mask.ndim))
  return jnp.where(mask, x, 0.0)


def select(operands: ChunkOperands, masks: ChunkMasks | None) -> ChunkOperands:
  """Zeroes what causality and documents forbid; its own transpose.

  A select and never a product: above the diagonal a tile's scores may be as
  large as exp(75), and zero times such an overflow would be NaN.
  """
  size = operands.kk.shape[-1]
  operands = operands._replace(
    kk=keep(lower_mask(size, -1), operands.kk),
    qk=keep(lower_mask(size), operands.qk),
  )
  if masks is None:
    return operands
  return ChunkOperands(
    kk=keep(masks.pair, operands.kk),
    qk=keep(masks.pair, operands.qk),
    q_entry=keep(masks.entry, operands.q_entry),
    k_entry=keep(masks.entry, operands.k_entry),
    k_exit=keep(masks.exit, operands.k_exit),
    decay=keep(masks.carry, operands.decay),
  )
