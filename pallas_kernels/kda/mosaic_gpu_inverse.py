"""The triangular inverse of a chunk's scores, in KDA's kernels for Hopper.

Diagonal tiles by forward substitution in float32, then blocks joined in pairs
by bfloat16 products: [[A, 0], [N, D]]^-1 = [[A^-1, 0], [-D^-1 N A^-1, D^-1]].
Both stay accurate where keys repeat, unlike a series of powers.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu_arrays import (
  BY_TILE_COLUMN,
  CHUNK,
  IN_EVERY_WARP,
  ROWS_BY_COLUMNS,
  TILE,
  TILES,
  accumulate,
  add_product,
  iota,
  load,
  repeat,
  rows_of,
  spread,
  wait_for,
  zeros,
)

# Floats a row that keep a warp's accesses in different banks.
ROW_FLOATS = TILE + 2


def _invert_tiles(s, settings) -> jax.Array:
  """Transposed inverses of the diagonal tiles, float32 [4, 16, 16].

  Forward substitution on the columns of the identity, all tiles at once.
  """
  shape = (TILES, TILE, TILE)
  column, row = (iota(shape, d, BY_TILE_COLUMN) for d in (1, 2))
  x = jnp.where(column == row, 1.0, 0.0)
  by_row = BY_TILE_COLUMN.reduce(1)
  if settings.documents:
    documents = load(s.documents, layout=by_row, optimized=False)
  done = []
  for m in range(TILE - 1):
    left = TILE - 1 - m
    done.append(lax.slice(x, (0, 0, 0), (TILES, TILE, 1)))
    x = lax.slice(x, (0, 0, 1), (TILES, TILE, left + 1))
    factors = load(
      s.diagonal,
      (m, slice(None), pl.ds(m + 1, left)),
      layout=by_row,
      optimized=False,
    )
    if settings.documents:
      own = lax.slice(documents, (0, m), (TILES, m + 1))
      others = lax.slice(documents, (0, m + 1), (TILES, TILE))
      same = others == repeat(own, left, axis=1)
      factors = jnp.where(same, factors, 0.0)
    factors = spread(factors, x.shape, (0, 2), BY_TILE_COLUMN)
    x = x - factors * repeat(done[-1], left, axis=2)
  return jnp.concatenate([*done, x], axis=2)


def invert(s, lower: jax.Array, settings) -> jax.Array:
  """Transposed inverse of I + L, float32 [64, 64].

  Args:
    s: shared memory.
    lower: transposed L, zero where L is.
    settings: static settings.
  """
  bf16, square = jnp.bfloat16, (CHUNK, CHUNK)
  s.inverses[:, :, pl.ds(0, TILE)] = _invert_tiles(s, settings)
  s.merged[...] = zeros(square, bf16)
  plgpu.commit_smem()
  for i in range(TILES):
    block = load(
      s.inverses,
      (i, slice(None), pl.ds(0, TILE)),
      layout=IN_EVERY_WARP,
      optimized=False,
    )
    s.merged[rows_of(i), rows_of(i)] = block.astype(bf16)
  plgpu.commit_smem()
  x = load(s.merged, layout=ROWS_BY_COLUMNS).astype(jnp.float32)
  row, lane = iota(square, 0), iota(square, 1)

  def multiply(left):
    def run(total):
      add_product(total, left.astype(bf16), s.merged)
      return wait_for(total)

    product = accumulate(run, square, interpreted=settings.interpreted)
    plgpu.commit_smem()
    return product

  for size in (TILE, 2 * TILE):
    # Blocks of an enlarged pair: x - x N x, where N couples the two.
    pair = row // (2 * size) == lane // (2 * size)
    coupling = jnp.where(pair & (row // size != lane // size), lower, 0.0)
    if size > TILE:
      s.merged[...] = x.astype(bf16)
      plgpu.commit_smem()
    product = multiply(coupling)
    s.merged[...] = product.astype(bf16)
    plgpu.commit_smem()
    x = x - multiply(x)
  return x
