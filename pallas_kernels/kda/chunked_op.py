"""The chunked form as an operator: whole chunks in, the caller's layout out."""

import jax

from pallas_kernels import target
from pallas_kernels.kda import (
  chunk_layout,
  chunked_xla,
  chunked_xla_bwd,
  custom_vjp,
  operands,
  tile,
  varying,
)

_chunked = custom_vjp.join(
  chunked_xla.kda_forward, chunked_xla_bwd.kda_backward
)


def kda_chunked_xla(
  arrays: operands.Operands,
  packing: operands.Packing,
  config: operands.KdaConfig,
) -> tuple[jax.Array, jax.Array]:
  """Runs KDA in chunks; arguments and results as `kda_reference`."""
  batch, _, heads, value_dim = arrays.v_BTHV.shape
  tiles = tile.choose_tiles(
    target.target_platform(), arrays.q_BTHK.shape[-1], value_dim
  )
  needed = chunk_layout.count_chunks(arrays, packing, tiles.chunk)
  blocks, chunks = tiles.split_tokens(needed * tiles.chunk, batch * heads)
  layout = chunk_layout.lay_out(arrays, packing, tiles.chunk, blocks * chunks)
  settings = chunked_xla.ChunkedConfig(config, tiles, blocks, chunks)
  axes = varying.varying_axes((layout.arrays, layout.plan))
  outputs = _chunked(
    settings,
    varying.vary_over(layout.arrays, axes),
    varying.vary_over(layout.plan, axes),
  )
  return layout.restore(*outputs)
