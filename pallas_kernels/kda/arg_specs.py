"""Named argument shapes for tests, ahead-of-time compiles and benchmarks."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ArgSpec:
  """Shape of one call of `kda`.

  Attributes:
    batch: rows.
    tokens: tokens a row.
    heads: heads of q and k.
    value_heads: heads of v, g and beta.
    key_dim: channels of q, k and g.
    value_dim: channels of v.
    dtype: name of the dtype of q, k, v, g and beta.
  """

  batch: int
  tokens: int
  heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  dtype: str = 'float32'


SPECS = {
  'tiny': ArgSpec(2, 150, 2, 4, 64, 32),
  'odd': ArgSpec(1, 1000, 3, 3, 100, 60),
  'cpu': ArgSpec(1, 4096, 4, 4, 128, 128),
  '8k': ArgSpec(1, 8192, 32, 32, 128, 128, 'bfloat16'),
  '64k': ArgSpec(1, 65_536, 32, 32, 128, 128, 'bfloat16'),
  '256k': ArgSpec(1, 262_144, 16, 16, 128, 128, 'bfloat16'),
  '1m': ArgSpec(1, 1_048_576, 4, 4, 128, 128, 'bfloat16'),
}


def make_inputs(spec: ArgSpec, seed: int = 0) -> dict[str, jax.Array]:
  """Random array arguments of `kda`, by name.

  Gate and beta logits are N(0, 2), so that decays and write strengths cover
  their whole range; everything else is N(0, 1), the parameters N(0, 0.3).

  Args:
    spec: the shape.
    seed: of the random numbers.

  Returns:
    q, k, v, g and beta in the spec's dtype, and A_log, dt_bias and h0 in
    float32.
  """
  tokens = (spec.batch, spec.tokens)
  keys = (*tokens, spec.heads, spec.key_dim)
  shapes = {
    'q': (keys, 1.0),
    'k': (keys, 1.0),
    'v': ((*tokens, spec.value_heads, spec.value_dim), 1.0),
    'g': ((*tokens, spec.value_heads, spec.key_dim), 2.0),
    'beta': ((*tokens, spec.value_heads), 2.0),
    'A_log': ((spec.value_heads,), 0.3),
    'dt_bias': ((spec.value_heads, spec.key_dim), 0.3),
    'h0': (
      (spec.batch, spec.value_heads, spec.key_dim, spec.value_dim),
      0.3,
    ),
  }
  inputs = {}
  for i, (name, (shape, deviation)) in enumerate(shapes.items()):
    key = jax.random.fold_in(jax.random.key(seed), i)
    parameter = name in ('A_log', 'dt_bias', 'h0')
    dtype = jnp.float32 if parameter else jnp.dtype(spec.dtype)
    values = deviation * jax.random.normal(key, shape, jnp.float32)
    inputs[name] = values.astype(dtype)
  return inputs


def abstract_inputs(spec: ArgSpec) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and dtypes of `make_inputs`, without making the arrays."""
  return jax.eval_shape(lambda: make_inputs(spec))
