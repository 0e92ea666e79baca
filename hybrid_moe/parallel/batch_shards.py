"""Runs a function once for each shard of the batch.

Token mixers and experts see whole rows, so that over the `data` axis they are
local computations. Wrapped here they are ordinary single-device code: sorts,
scans and kernels that the sharding rules of single operations do not cover.
"""

from collections.abc import Callable
from typing import Any

import jax

from hybrid_moe import mesh as mesh_lib
from hybrid_moe import sharding


def map_batch_shards(
  function: Callable[..., Any], batched: Any, replicated: Any
) -> Any:
  """Applies `function(batched, replicated)` to each shard of the batch.

  Args:
    function: local computation. Every array that it returns is split over
      `data` along its first dimension: rows of the batch, or a leading
      dimension of one that counts the shards.
    batched: pytree of arrays [B, ...], split over `data` along B.
    replicated: pytree of arrays that every shard sees whole; their gradients
      are summed over the shards.

  Returns:
    What `function` returns, with first dimensions joined over the shards.
  """
  if not sharding.has_mesh():
    return function(batched, replicated)

  def run(batched, replicated):
    # Marked as varying, their gradients are summed over the shards.
    replicated = jax.lax.pcast(replicated, mesh_lib.DATA, to='varying')
    return function(batched, replicated)

  return jax.shard_map(
    run,
    in_specs=(sharding.ROWS_B, sharding.REPLICATED),
    out_specs=sharding.ROWS_B,
    check_vma=True,
  )(batched, replicated)
