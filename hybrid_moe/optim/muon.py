"""Muon: momentum, orthogonalised matrix by matrix.

`optax.contrib.scale_by_muon` is not used. It merges all batch dims into one
and leaves the rest to the compiler: under a sharded expert dim that gathers
every expert on every device, which then all do the same work, and under a
sharded matrix dim it gathers in each iteration. Here batch dims stay apart and
each tensor is laid out once, so that whole matrices are spread over the mesh.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hybrid_moe.optim.roles import Layout, role_of

# Quintic whose slope at 0 is steep: five iterations take singular values
# between 1e-3 and 1 to about 0.7..1.2 (Jordan, Muon, 2024).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-8
# Root mean square of AdamW's updates, which Muon's are scaled to
# (arXiv 2502.16982, section 2.2).
_UPDATE_RMS = 0.2


def muon_direction(
  momentum: float, newton_schulz_steps: int
) -> optax.GradientTransformation:
  """Nesterov momentum, orthogonalised and scaled; without rate and decay.

  M <- momentum * M + G; the update is 0.2 sqrt(max(rows, columns)) times the
  orthogonalised G + momentum * M, each matrix of a tensor by itself as
  `roles.ROLES` reads it. Source: arXiv 2502.16982, equations 1 to 4; per head:
  Kimi K3 report (arXiv 2607.24653), section 2.5.

  Args:
    momentum: decay of the momentum, in [0, 1).
    newton_schulz_steps: iterations of the orthogonalisation.

  Returns:
    A transformation whose only state is the momentum, in the parameters' dtype
    and sharding.
  """

  def orthogonalize(updates: Any, params: Any = None) -> Any:
    del params
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: _orthogonalize_leaf(
        leaf, role_of(path, leaf.ndim).layout, newton_schulz_steps
      ),
      updates,
    )

  return optax.named_chain(
    ('momentum', optax.trace(decay=momentum, nesterov=True)),
    ('orthogonalize', optax.stateless(orthogonalize)),
  )


def orthogonalize_matrix(x: jax.Array, steps: int) -> jax.Array:
  """Moves the singular values of matrices towards 1 (Newton-Schulz).

  Args:
    x: [..., rows, columns], float. Batch dims may be sharded, and so may the
      longer matrix dim; the shorter may not.
    steps: iterations.

  Returns:
    Array like `x`; a zero matrix stays zero.
  """
  rows, columns = x.shape[-2:]
  # Of a square matrix either side may be the sharded one.
  rows_sharded = jax.typeof(x).sharding.spec[-2] is not None
  transposed = rows > columns or (rows == columns and rows_sharded)
  x = x.mT if transposed else x
  spec = jax.typeof(x).sharding.spec
  # A product along a sharded dim must name its result's layout.
  gram_spec = jax.P(*spec[:-2], None, None) if spec[-1] is not None else None
  c1, c3, c5 = _COEFFICIENTS
  norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
  x = x / (norm + _EPS)

  def iterate(_, x):
    # Not `jnp.matmul`, which drops batch dims of one and then disagrees with
    # the layout asked for.
    gram = jnp.einsum('...ik,...jk->...ij', x, x, out_sharding=gram_spec)
    return c1 * x + jnp.matmul(c3 * gram + c5 * jnp.matmul(gram, gram), x)

  # Unrolled, a model of many matrices takes half as long again to compile.
  x = jax.lax.fori_loop(0, steps, iterate, x)
  return x.mT if transposed else x


def _orthogonalize_leaf(
  leaf: jax.Array, layout: Layout, steps: int
) -> jax.Array:
  trailing_batch, rows, columns = (
    tuple(axis + leaf.ndim for axis in axes) for axes in layout.axes()
  )
  batch = (*range(leaf.ndim - layout.rank), *trailing_batch)
  sizes = [math.prod(leaf.shape[a] for a in axes) for axes in (rows, columns)]

  spec = jax.typeof(leaf).sharding.spec
  work_spec = matrix_spec(leaf, batch, rows, columns)
  x = leaf if work_spec == spec else jax.reshard(leaf, work_spec)
  order = (*batch, *rows, *columns)
  x = x.transpose(order)
  unmerged = x.shape
  x = x.reshape(*(leaf.shape[a] for a in batch), *sizes)
  x = orthogonalize_matrix(x, steps)
  x = _UPDATE_RMS * math.sqrt(max(sizes)) * x
  x = x.reshape(unmerged)
  x = x.transpose([order.index(axis) for axis in range(leaf.ndim)])
  return x if work_spec == spec else jax.reshard(x, spec)


def matrix_spec(
  leaf: jax.Array,
  batch: tuple[int, ...],
  rows: tuple[int, ...],
  columns: tuple[int, ...],
) -> jax.P:
  """Layout in which a sharded tensor's matrices are orthogonalised.

  A mesh axis on a batch dim stays. One on a matrix dim goes to the first batch
  dim that it divides, so that devices take whole matrices; failing that, to
  the longer side of the matrix, which costs one sum of the short side's square
  an iteration; failing that, the tensor is gathered. One over which the tensor
  is replicated also goes to a batch dim if it can, so that devices share the
  work instead of repeating it.

  Args:
    leaf: the tensor; its type carries shape, sharding and mesh.
    batch: its batch axes.
    rows: axes that form the matrices' rows.
    columns: axes that form the matrices' columns.

  Returns:
    A spec with an entry for every dim.
  """
  sharding = jax.typeof(leaf).sharding
  mesh_sizes = sharding.mesh.shape
  names = [_axis_names(entry) for entry in sharding.spec]
  sizes = [math.prod(leaf.shape[a] for a in axes) for axes in (rows, columns)]
  # Of merged dims only the first can carry a mesh axis through the merge.
  longer = [
    axes[0] for axes, size in zip((rows, columns), sizes) if size == max(sizes)
  ]
  used = {name for entry in names for name in entry}
  choices = []
  for axis in (*rows, *columns):
    choices += [(name, (*batch, *longer)) for name in names[axis]]
    names[axis] = []
  choices += [
    (name, batch)
    for name in sharding.mesh.explicit_axes
    if name not in used and mesh_sizes[name] > 1
  ]
  for name, axes in choices:
    for axis in axes:
      shards = math.prod(mesh_sizes[n] for n in (*names[axis], name))
      if leaf.shape[axis] % shards == 0:
        names[axis].append(name)
        break
  # A lone name and a tuple of one are different entries; keep what was there.
  return jax.P(
    *(
      entry if _axis_names(entry) == new else _entry(new)
      for entry, new in zip(sharding.spec, names)
    )
  )


def _axis_names(entry: Any) -> list[str]:
  if entry is None:
    return []
  return list(entry) if isinstance(entry, tuple) else [entry]


def _entry(names: list[str]) -> Any:
  if not names:
    return None
  return names[0] if len(names) == 1 else tuple(names)
