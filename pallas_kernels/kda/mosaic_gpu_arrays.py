"""Register layouts, shared memory and products of KDA's kernels for Hopper.

A Pallas thread here is a warpgroup: 128 threads that hold arrays in registers
together, each array in an explicit layout.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

_Tiling, _Replicated = fragmented_array.Tiling, fragmented_array.Replicated

# Tokens a chunk, the rows of one matrix instruction; tokens a tile.
CHUNK = 64
TILE = 16
TILES = CHUNK // TILE
# Channels that 128 threads hold, one each.
CHANNELS = 128

ROWS_BY_COLUMNS = plgpu.Layout.WGMMA
# [n, 128]: a thread owns a channel, so that sums along tokens stay in it.
BY_CHANNEL = plgpu.Layout.TILED(
  _Tiling(((1, CHANNELS), (32,), (1,))),
  warp_dims=(-3,),
  lane_dims=(-2,),
  vector_dim=-1,
)
# [4, 16, n]: a warp owns a tile and a thread one of its columns.
BY_TILE_COLUMN = plgpu.Layout.TILED(
  _Tiling(((TILES, TILE, 1),)),
  warp_dims=(-3,),
  lane_dims=(-2, _Replicated(2)),
  vector_dim=-1,
)
# [16, 16], the same in all warps.
IN_EVERY_WARP = plgpu.Layout.TILED(
  _Tiling(((TILE, 8), (8, 8), (2,))),
  warp_dims=(_Replicated(4),),
  lane_dims=(-3, -2),
  vector_dim=-1,
)


def swizzled(shape: tuple[int, ...], dtype=jnp.bfloat16, swizzle: int = 128):
  """Shared memory in tiles, without conflicts between banks.

  Args:
    shape: the last axis in whole rows of the swizzle.
    dtype: bfloat16 for operands of matrix instructions.
    swizzle: bytes of a row; 32 lets single tiles of 16 columns be written.
  """
  transforms = (
    plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
    plgpu.SwizzleTransform(swizzle),
  )
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def rows_of(tile: int):
  """Rows of a tile."""
  return pl.ds(tile * TILE, TILE)


def load(ref, index=None, *, layout, optimized: bool = True) -> jax.Array:
  """Loads what an index selects into a layout."""
  ref = ref if index is None else ref.at[index]
  return plgpu.load(ref, layout=layout, optimized=optimized)


def spread(x: jax.Array, shape: tuple[int, ...], dims, layout) -> jax.Array:
  """`broadcast_in_dim` into a layout."""
  return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, dims), layout)


def repeat(x: jax.Array, times: int, axis: int = 0) -> jax.Array:
  """Repeats an array of size 1 along an axis that registers run along."""
  return jnp.concatenate([x] * times, axis=axis) if times > 1 else x


def iota(shape: tuple[int, ...], dim: int, layout=ROWS_BY_COLUMNS) -> jax.Array:
  """int32 numbers along an axis."""
  return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=layout)


def zeros(shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
  """Zeros in the layout of accumulators."""
  return plgpu.layout_cast(jnp.zeros(shape, dtype), ROWS_BY_COLUMNS)


class _InterpretedSum:
  """An accumulator where interpretation has no operands in registers."""

  def __init__(self, shape: tuple[int, ...]):
    self.value = jnp.zeros(shape, jnp.float32)


def add_product(total: Any, left: Any, right: Any) -> None:
  """Starts total += left @ right in the matrix unit.

  Args:
    total: an accumulator of `accumulate`.
    left: bfloat16 [m, k] in registers or in shared memory.
    right: bfloat16 [k, n] in shared memory.
  """
  if not isinstance(total, _InterpretedSum):
    plgpu.wgmma(total, left, right)
    return
  left, right = (
    x if isinstance(x, jax.Array) else x[...] for x in (left, right)
  )
  total.value += jnp.dot(left, right, preferred_element_type=jnp.float32)
  # The matrix unit reads as copies do, not as loads do.
  plgpu.commit_smem()


def wait_for(total: Any, in_flight: int = 0) -> jax.Array:
  """The sum, once all but the last few products are done."""
  if isinstance(total, _InterpretedSum):
    return total.value
  return plgpu.wgmma_accumulator_load(total, wait_n=in_flight)


def accumulate(
  body: Callable, *shapes: tuple[int, int], interpreted: bool
) -> Any:
  """Runs a body on float32 accumulators that start at 0."""
  if interpreted:
    return body(*map(_InterpretedSum, shapes))
  return pl.run_scoped(body, *[plgpu.ACC(x, jnp.float32) for x in shapes])


def compiler_params():
  """Settings of all kernels: barriers are where the kernels put them."""
  return plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
  )
