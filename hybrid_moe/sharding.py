"""Every PartitionSpec of the project, named by role and dims.

Rows of a batch are split over `data`. So is every matrix (fully sharded data
parallelism), along the first of its model width, experts, latent width or rank
that divides; it is gathered where it is used, and its gradient and optimiser
state keep its own sharding.
Outside a mesh all of this is the identity, so that single-device tests and
notebooks need no mesh.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from hybrid_moe import mesh as mesh_lib

# The mesh axis that a parameter's dimension is split over, by its letter.
_PARAMETER_AXIS = {letter: mesh_lib.DATA for letter in 'DEZR'}

TOKENS_BT = PartitionSpec(mesh_lib.DATA, None)
ACT_BTD = PartitionSpec(mesh_lib.DATA, None, None)
MICRO_ABT = PartitionSpec(None, mesh_lib.DATA, None)
ROWS_B = PartitionSpec(mesh_lib.DATA)
REPLICATED = PartitionSpec()


def has_mesh() -> bool:
  """Whether a mesh is set."""
  return not jax.sharding.get_abstract_mesh().empty


def num_batch_shards() -> int:
  """Parts into which the rows of a batch are split."""
  abstract_mesh = jax.sharding.get_abstract_mesh()
  return 1 if abstract_mesh.empty else abstract_mesh.shape[mesh_lib.DATA]


def parameter(dims: str, shape: tuple[int, ...]) -> PartitionSpec | None:
  """Spec of a parameter with one letter a dimension (`'DHK'`).

  An axis splits the first dimension that it may split and that it divides.
  None outside a mesh.
  """
  abstract_mesh = jax.sharding.get_abstract_mesh()
  if abstract_mesh.empty:
    return None
  axes: list[str | None] = []
  for letter, size in zip(dims, shape, strict=True):
    axis = _PARAMETER_AXIS.get(letter)
    free = axis is not None and axis not in axes
    divides = free and size % abstract_mesh.shape[axis] == 0
    axes.append(axis if divides else None)
  return PartitionSpec(*axes)


def born_sharded(
  initializer: Callable[..., jax.Array], dims: str, shape: tuple[int, ...]
) -> Callable[..., jax.Array]:
  """Makes an initializer place its parameter where it belongs."""
  spec = parameter(dims, shape)

  def initialize(key, shape, dtype):
    value = initializer(key, shape, dtype)
    return value if spec is None else jax.sharding.reshard(value, spec)

  return initialize


def gather(w: jax.Array) -> jax.Array:
  """A parameter whole on every device, for use in a matrix product."""
  return constrain(w, REPLICATED)


def constrain(x: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Moves `x` to `spec`; the identity outside a mesh."""
  return jax.sharding.reshard(x, spec) if has_mesh() else x


def spec_of(x: jax.Array) -> PartitionSpec | None:
  """Spec of an array that is being traced; None outside a mesh."""
  return jax.typeof(x).sharding.spec if has_mesh() else None


def reshape_rows(x: jax.Array, *dims: int) -> jax.Array:
  """`x` [B, T, ...] as [B, T, *dims], still split over `data` along B.

  Among dimensions of size one, a plain reshape forgets which one was split.
  """
  shape = (*x.shape[:2], *dims)
  if not has_mesh():
    return x.reshape(shape)
  return jax.lax.reshape(x, shape, out_sharding=ROWS_B)


def look_up(table_UD: jax.Array, ids_BT: jax.Array) -> jax.Array:
  """Rows of a replicated table, sharded as the ids are: [B, T, D]."""
  if not has_mesh():
    return table_UD[ids_BT]
  return table_UD.at[ids_BT].get(out_sharding=ACT_BTD)
