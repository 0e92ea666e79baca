"""Matrix products of the chunked form and the precision of each."""

import dataclasses

import jax
import jax.numpy as jnp

PRECISIONS = ('fast', 'default', 'high', 'highest')


def dot(subscripts: str, a: jax.Array, b: jax.Array, dtype) -> jax.Array:
  """Product of operands rounded to a dtype, summed in float32.

  Args:
    subscripts: as for `jnp.einsum`.
    a: left operand.
    b: right operand.
    dtype: bfloat16, or float32 for a product without any reduced precision.

  Returns:
    float32.
  """
  return jnp.einsum(
    subscripts,
    a.astype(dtype),
    b.astype(dtype),
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


@dataclasses.dataclass(frozen=True)
class ProductDtypes:
  """Operand dtypes by the role of a product.

  Attributes:
    scores: scores of queries and keys against keys, and their gradients.
    state: reads and updates of the state, and their gradients.
    inverse: block merges of the triangular inverse.
    solve: the triangular inverse times a right-hand side.
    output: scores times values inside the chunk.
  """

  scores: jnp.dtype
  state: jnp.dtype
  inverse: jnp.dtype
  solve: jnp.dtype
  output: jnp.dtype


def choose_dtypes(precision: str, dtype) -> ProductDtypes:
  """Operand dtypes for a precision and the dtype of q, k and v.

  Args:
    precision: 'fast' rounds every operand to bfloat16; 'default' keeps the
      product of scores and values in float32; 'high' also the inverse and its
      products, needed when beta may exceed 1; 'highest' everything.
    dtype: dtype of q, k and v. With float32 no operand is ever rounded.
  """
  level = PRECISIONS.index(precision)
  if dtype == jnp.float32:
    level = PRECISIONS.index('highest')

  def from_level(first: int):
    return jnp.dtype(jnp.float32 if level >= first else jnp.bfloat16)

  return ProductDtypes(
    scores=from_level(3),
    state=from_level(3),
    inverse=from_level(2),
    solve=from_level(2),
    output=from_level(1),
  )
