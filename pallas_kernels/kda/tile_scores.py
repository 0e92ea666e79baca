"""Scores of a chunk by unified tiles, for a log decay bounded by -5.

Diagonal and off-diagonal tiles of 16 rows are one strip product: the rows of
tile I, anchored at its first row, against all columns up to its last, in the
same anchor. The anchor is the first row and no later one, so that a gate cannot
change an output before it by a single bit. Kimi K3 report (arXiv 2607.24653)
section 2.1.1 for the bound that makes the diagonal tile a plain product.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import chunk_operands, products

# Centres the exponent range of rows (exp(-75) to 1) and of columns
# (1 to exp(75)) on 1, so that neither small entries flush to zero nor large
# ones overflow. A power of two, hence exact, and the two sides cancel.
REBALANCE = 2.0**54


class TileDecay(NamedTuple):
  """Cumulative log decay, split so that no part is a difference of large sums.

  Attributes:
    inner: [..., n, t, K], from the tile's first row, where it is 0.
    step: [..., n - 1, K], from a tile's first row to the next one's.
    entry: [..., n, K], from the chunk's entry to the tile's first row.
    exit: [..., n, K], from the tile's first row to the chunk's last.
  """

  inner: jax.Array
  step: jax.Array
  entry: jax.Array
  exit: jax.Array


def running_sums(x: jax.Array) -> list[jax.Array]:
  """Inclusive running sums over axis -2, as a list of slices [..., K]."""
  sums = [x[..., 0, :]]
  for i in range(1, x.shape[-2]):
    sums.append(sums[-1] + x[..., i, :])
  return sums


def split_tiles(x: jax.Array, tile: int) -> jax.Array:
  """[..., C, K] to [..., n, t, K]."""
  return x.reshape(*x.shape[:-2], x.shape[-2] // tile, tile, x.shape[-1])


def join_tiles(x: jax.Array) -> jax.Array:
  """[..., n, t, K] to [..., C, K]."""
  return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def accumulate_decay(g: jax.Array, tile: int) -> TileDecay:
  """Sums the log decay of a chunk.

  Args:
    g: float32 log decay [..., C, K].
    tile: rows of a tile.
  """
  rows = split_tiles(g, tile)
  first = rows[..., 0, :]
  inner = jnp.cumsum(rows[..., 1:, :], axis=-2)
  inner = jnp.concatenate([jnp.zeros_like(rows[..., :1, :]), inner], axis=-2)
  last = inner[..., -1, :]
  step = last[..., :-1, :] + first[..., 1:, :]
  entry = running_sums(jnp.concatenate([first[..., :1, :], step], axis=-2))
  backwards = jnp.concatenate([last[..., -1:, :], step[..., ::-1, :]], axis=-2)
  exit_ = running_sums(backwards)[::-1]
  return TileDecay(
    inner, step, jnp.stack(entry, axis=-2), jnp.stack(exit_, axis=-2)
  )


class TileFactors(NamedTuple):
  """Scaled views of a chunk in tiles [..., n, t, K], kept for the backward.

  Attributes:
    grow: exp(inner), rebalanced; scales rows.
    shrink: 1 / grow; scales columns.
    q_rows: q * grow.
    k_rows: k * grow.
    k_columns: k * shrink.
    entry: [..., n, 1, K], turns rows into views anchored at the chunk's entry.
    exit: [..., n, 1, K], turns columns into views anchored at its last row.
    step: [..., n - 1, 1, K], moves columns from a tile's anchor to the next.
    left: for each tile its q_rows over its k_rows [..., 2 t, K], rounded.
    prefix: for each tile I the columns up to its last in its anchor
      [..., t (I + 1), K], rounded.
  """

  grow: jax.Array
  shrink: jax.Array
  q_rows: jax.Array
  k_rows: jax.Array
  k_columns: jax.Array
  entry: jax.Array
  exit: jax.Array
  step: jax.Array
  left: list[jax.Array]
  prefix: list[jax.Array]


def tile_operands(
  q: jax.Array, k: jax.Array, g: jax.Array, tile: int, dtype
) -> tuple[chunk_operands.ChunkOperands, TileFactors]:
  """Builds a chunk's operands before the selects.

  Args:
    q: float32 scaled queries [..., C, K].
    k: float32 keys [..., C, K].
    g: float32 log decay [..., C, K], at least -5.
    tile: rows of a tile.
    dtype: operand dtype of the score products.

  Returns:
    The operands, and the scaled views that the backward reuses.
  """
  chunk = q.shape[-2]
  decay = accumulate_decay(g, tile)
  grow = jnp.exp(decay.inner) * REBALANCE
  shrink = 1.0 / grow
  q_rows = split_tiles(q, tile) * grow
  k_rows = split_tiles(k, tile) * grow
  k_columns = split_tiles(k, tile) * shrink
  step = jnp.exp(decay.step)[..., None, :]
  entry = jnp.exp(decay.entry)[..., None, :] * (1 / REBALANCE)
  exit_ = jnp.exp(decay.exit)[..., None, :] * REBALANCE

  lefts, prefixes, strips = [], [], []
  prefix = None
  for i in range(chunk // tile):
    columns = k_columns[..., i, :, :]
    if prefix is None:
      prefix = columns
    else:
      moved = prefix * step[..., i - 1, :, :]
      prefix = jnp.concatenate([moved, columns], axis=-2)
    left = jnp.concatenate([q_rows[..., i, :, :], k_rows[..., i, :, :]], -2)
    lefts.append(left.astype(dtype))
    prefixes.append(prefix.astype(dtype))
    strip = products.dot('...ik,...jk->...ij', lefts[i], prefixes[i], dtype)
    unused = chunk - strip.shape[-1]
    strips.append(jnp.pad(strip, [(0, 0)] * (strip.ndim - 1) + [(0, unused)]))
  operands = chunk_operands.ChunkOperands(
    kk=jnp.concatenate([s[..., tile:, :] for s in strips], axis=-2),
    qk=jnp.concatenate([s[..., :tile, :] for s in strips], axis=-2),
    q_entry=join_tiles(q_rows * entry),
    k_entry=join_tiles(k_rows * entry),
    k_exit=join_tiles(k_columns * exit_),
    decay=jnp.exp(decay.entry[..., -1, :] + decay.inner[..., -1, -1, :]),
  )
  factors = TileFactors(
    grow,
    shrink,
    q_rows,
    k_rows,
    k_columns,
    entry,
    exit_,
    step,
    lefts,
    prefixes,
  )
  return operands, factors


def tile_operands_bwd(
  q: jax.Array,
  k: jax.Array,
  factors: TileFactors,
  operands: chunk_operands.ChunkOperands,
  grads: chunk_operands.ChunkOperands,
  diagonal: jax.Array,
  pair: jax.Array | None,
  dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradient of `tile_operands`.

  The gradient of the log decay is a difference of nearly equal sums: each pair
  (i, j) adds to row i what it takes from row j. Both copies are made from the
  same rounded operands, so that their errors cancel in the reverse sum. The
  diagonal of qk does not decay and is kept out of that sum.

  Args:
    q: as in the forward.
    k: as in the forward.
    factors: from the forward.
    operands: the forward's operands after the selects.
    grads: gradients of the operands after the selects; the diagonal of grads.qk
      is not read, grads.decay is the gradient of decay times decay.
    diagonal: float32 [..., C], the diagonal of the gradient of qk.
    pair: bool [..., C, C], tokens of one document, or None.
    dtype: operand dtype of the products.

  Returns:
    Gradients of q, k and g, float32 [..., C, K].
  """
  chunk = q.shape[-2]
  tile = factors.grow.shape[-2]
  strict = chunk_operands.lower_mask(chunk, -1)
  d_qk = chunk_operands.keep(strict, grads.qk).astype(dtype)
  d_kk = grads.kk.astype(dtype)

  d_q_rows, d_k_rows, d_columns, row_sums = [], [], [], []
  column_sums = jnp.zeros_like(k)
  d_prefix = None
  for i in reversed(range(chunk // tile)):
    rows, end = slice(i * tile, (i + 1) * tile), (i + 1) * tile
    left = factors.left[i].astype(dtype)
    prefix = factors.prefix[i].astype(dtype)
    strip = jnp.concatenate([d_qk[..., rows, :end], d_kk[..., rows, :end]], -2)
    d_left = products.dot('...ij,...jk->...ik', strip, prefix, dtype)
    d_own = products.dot('...ij,...ik->...jk', strip, left, dtype)
    paired = left.astype(jnp.float32) * d_left
    row_sums.append(paired[..., :tile, :] + paired[..., tile:, :])
    paired = prefix.astype(jnp.float32) * d_own
    unused = [(0, 0)] * (paired.ndim - 2) + [(0, chunk - end), (0, 0)]
    column_sums += jnp.pad(paired, unused)
    d_q_rows.append(d_left[..., :tile, :])
    d_k_rows.append(d_left[..., tile:, :])
    if d_prefix is not None:
      d_own += d_prefix[..., :end, :] * factors.step[..., i, :, :]
    d_prefix = d_own
    d_columns.append(d_own[..., rows, :])

  def stack(tiles):
    return jnp.stack(tiles[::-1], axis=-3)

  d_q_state = split_tiles(grads.q_entry, tile) * factors.entry
  d_k_state = split_tiles(grads.k_entry, tile) * factors.entry
  d_k_write = split_tiles(grads.k_exit, tile) * factors.exit
  d_q = join_tiles((stack(d_q_rows) + d_q_state) * factors.grow)
  d_k = join_tiles(
    (stack(d_k_rows) + d_k_state) * factors.grow
    + (stack(d_columns) + d_k_write) * factors.shrink
  )
  d_q += diagonal[..., None] * k
  d_k += diagonal[..., None] * q

  d_total = join_tiles(stack(row_sums)) - column_sums
  d_total += operands.q_entry * grads.q_entry
  d_total += operands.k_entry * grads.k_entry
  # A write at row j decays by the gates of all rows after it, so its term goes
  # to those rows directly; adding it at the last row and taking it away at row
  # j would leave the rounding of the difference.
  d_write = operands.k_exit * grads.k_exit
  ones = jnp.ones_like(grads.qk)
  later = chunk_operands.keep(chunk_operands.lower_mask(chunk).T, ones)
  if pair is not None:
    later = chunk_operands.keep(pair, later)
  sums = jnp.concatenate([later, chunk_operands.keep(strict, ones)], axis=-1)
  terms = jnp.concatenate([d_total, d_write], axis=-2)
  d_g = products.dot('...ij,...jk->...ik', sums, terms, jnp.float32)
  return d_q, d_k, d_g + grads.decay[..., None, :]
