"""Keeps mesh-axis types consistent inside `shard_map(check_vma=True)`."""

from typing import Any

import jax
import jax.numpy as jnp


def varying_axes(tree: Any) -> frozenset:
  """Mesh axes over which any array of the tree varies between shards."""
  types = [jax.typeof(x) for x in jax.tree.leaves(tree)]
  return frozenset().union(*(t.manual_axis_type.varying for t in types))


def vary_over(tree: Any, axes: frozenset) -> Any:
  """Marks every array of the tree as varying over all of the axes.

  The transpose of the cast is the sum over the axes that it adds, which turns
  a shard's gradient of a replicated parameter into the whole gradient.
  """

  def cast(x):
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to='varying') if missing else x

  return jax.tree.map(cast, tree)


def struct_like(x: jax.Array, shape: tuple[int, ...], dtype):
  """Shape and dtype of a kernel's result that varies as an array does."""
  return jax.ShapeDtypeStruct(
    shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type
  )


def zero_state(g_BTHK: jax.Array, num_values: int) -> jax.Array:
  """float32 zeros [B, HV, K, V], varying and sharded as the gates are."""
  zeros = jnp.zeros_like(g_BTHK[:, 0, :, :, None], jnp.float32)
  zeros = jnp.broadcast_to(zeros, (*zeros.shape[:-1], num_values))
  return vary_over(zeros, varying_axes(g_BTHK))
