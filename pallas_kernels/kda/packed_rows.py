"""Rows of bfloat16 kept in pairs, as the 32-bit words that registers hold.

A store of some lanes of a bfloat16 reference is split by the compiler into
halves of 8 rows, each rounded on its own. The same store of words is one
instruction, where turning rows into words is free: not on TPU v5. References
of other dtypes are read and written as they are.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

WORD = jnp.uint32


def shape_of(
  rows: int, lanes: int, dtype, words: bool
) -> tuple[tuple[int, int], jnp.dtype]:
  """Shape and dtype of a reference for rows of a dtype.

  Args:
    rows: an even number.
    lanes: of a row.
    dtype: of the rows.
    words: whether to keep bfloat16 as words.
  """
  if words and dtype == jnp.bfloat16:
    return (rows // 2, lanes), WORD
  return (rows, lanes), dtype


def store(ref, row: int, x: jax.Array, lanes: slice) -> None:
  """Stores lanes of x [rows, all lanes] from a row on; rows are even."""
  rows = x.shape[0]
  if ref.dtype == WORD:
    row, rows, x = row // 2, rows // 2, pltpu.bitcast(x, WORD)
  ref[row : row + rows, lanes] = x[:, lanes]


def load(ref, rows: slice | None = None) -> jax.Array:
  """Rows of a reference, all if None."""
  if ref.dtype != WORD:
    return ref[...] if rows is None else ref[rows]
  words = ref[...] if rows is None else ref[rows.start // 2 : rows.stop // 2]
  return pltpu.bitcast(words, jnp.bfloat16)
