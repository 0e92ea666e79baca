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


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """x rounded to bfloat16, and the rest of it."""
  rounded = x.astype(jnp.bfloat16)
  return rounded, (x - rounded.astype(jnp.float32)).astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class ProductDtypes:
  """Operand dtypes by the role of a product.

  Attributes:
    scores: scores of queries and keys against keys.
    score_grads: gradients of q, k and g through the scores.
    state: reads and updates of the state, and their gradients.
    inverse: block merges of the triangular inverse.
    solve: the triangular inverse times a right-hand side.
    output: scores times values inside the chunk, and their gradients.
  """

  scores: jnp.dtype
  score_grads: jnp.dtype
  state: jnp.dtype
  inverse: jnp.dtype
  solve: jnp.dtype
  output: jnp.dtype


def choose_dtypes(precision: str, dtype) -> ProductDtypes:
  """Operand dtypes for a precision and the dtype of q, k and v.

  Repeated keys with weak decay make V - K~ S and T R small differences of
  large terms. Rounding there costs whole digits of the gradients of beta and v,
  rounding of the scores does not.

  Args:
    precision: 'fast' rounds every operand to bfloat16; 'default' only those of
      the scores and of gradients through them; 'high' only those of the
      gradients; 'highest' none.
    dtype: dtype of q, k and v. With float32 no operand is ever rounded.
  """
  level = PRECISIONS.index(precision)
  if dtype == jnp.float32:
    level = PRECISIONS.index('highest')

  def exact_from(first: str):
    exact = level >= PRECISIONS.index(first)
    return jnp.dtype(jnp.float32 if exact else jnp.bfloat16)

  return ProductDtypes(
    scores=exact_from('high'),
    score_grads=exact_from('highest'),
    state=exact_from('default'),
    inverse=exact_from('default'),
    solve=exact_from('default'),
    output=exact_from('default'),
  )
