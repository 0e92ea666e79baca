"""Inverse of a unit lower triangular matrix, stable for repeated keys.

Forward substitution inside 16 x 16 blocks and then block merges, each of which
uses inverses that are already accurate. Series in powers of L, exact on paper
because L is nilpotent, lose all digits once keys repeat and decay is weak.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kda import products, varying


def invert_blocks(lower: jax.Array) -> jax.Array:
  """(I + L)^-1 by forward substitution, for all blocks at once.

  Args:
    lower: float32 [..., t, t], strictly lower triangular.

  Returns:
    float32 [..., t, t].
  """
  size = lower.shape[-1]
  # Blocks go last, so that every step works on long contiguous runs.
  columns = jnp.moveaxis(lower, (-1, -2), (0, 1))
  eye = jax.lax.expand_dims(jnp.eye(size), range(2, columns.ndim))

  def step(j, rows):
    # Row j is final here; the rows below take it away. Column j of L is zero
    # down to its diagonal, so that the rows above stay as they are.
    column = jax.lax.dynamic_index_in_dim(columns, j, keepdims=False)
    row = jax.lax.dynamic_index_in_dim(rows, j, keepdims=True)
    return rows - column[:, None] * row

  rows = jnp.zeros_like(columns) + eye
  rows = varying.vary_over(rows, varying.varying_axes(columns))
  rows = jax.lax.fori_loop(0, size - 1, step, rows)
  return jnp.moveaxis(rows, (0, 1), (-2, -1))


def merge_blocks(lower: jax.Array, inverse: jax.Array, dtype) -> jax.Array:
  """Joins neighbouring inverted diagonal blocks in pairs.

  [[A, 0], [N, D]]^-1 = [[A^-1, 0], [-D^-1 N A^-1, D^-1]].

  Args:
    lower: float32 [..., C, C], strictly lower triangular.
    inverse: float32 [..., m, b, b], inverses of the m = C / b diagonal blocks
      of I + L.
    dtype: operand dtype of the products.

  Returns:
    float32 [..., m / 2, 2 b, 2 b].
  """
  count, size = inverse.shape[-3], inverse.shape[-1]
  below = jnp.stack(
    [
      lower[..., (i + 1) * size : (i + 2) * size, i * size : (i + 1) * size]
      for i in range(0, count, 2)
    ],
    axis=-3,
  )
  first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
  corner = products.dot('...ij,...jk->...ik', second, below, dtype)
  corner = -products.dot('...ij,...jk->...ik', corner, first, dtype)
  top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
  bottom = jnp.concatenate([corner, second], axis=-1)
  return jnp.concatenate([top, bottom], axis=-2)


def invert_unit_lower(
  lower: jax.Array, block: int, dtype=jnp.float32
) -> jax.Array:
  """(I + L)^-1 of a strictly lower triangular L.

  Args:
    lower: float32 [..., C, C], strictly lower triangular; C is the block size
      times a power of two.
    block: size up to which forward substitution is used.
    dtype: operand dtype of the block merges.

  Returns:
    float32 [..., C, C], unit lower triangular.
  """
  diagonal = jnp.stack(
    [
      lower[..., i : i + block, i : i + block]
      for i in range(0, lower.shape[-1], block)
    ],
    axis=-3,
  )
  inverse = invert_blocks(diagonal)
  while inverse.shape[-3] > 1:
    inverse = merge_blocks(lower, inverse, dtype)
  return inverse[..., 0, :, :]
