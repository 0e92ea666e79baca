"""Named argument shapes for tests, ahead-of-time compiles and benchmarks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


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
  '8k_h64': ArgSpec(1, 8192, 64, 64, 128, 128, 'bfloat16'),
  '8k_h96': ArgSpec(1, 8192, 96, 96, 128, 128, 'bfloat16'),
  '64k': ArgSpec(1, 65_536, 32, 32, 128, 128, 'bfloat16'),
  '256k': ArgSpec(1, 262_144, 16, 16, 128, 128, 'bfloat16'),
  '1m': ArgSpec(1, 1_048_576, 4, 4, 128, 128, 'bfloat16'),
}


def _shapes(spec: ArgSpec) -> dict[str, tuple[tuple[int, ...], float, str]]:
  """Shape, standard deviation and dtype of each array argument."""
  rows = (spec.batch, spec.tokens)
  keys = (*rows, spec.heads, spec.key_dim)
  gates = (*rows, spec.value_heads, spec.key_dim)
  values = (*rows, spec.value_heads, spec.value_dim)
  state = (spec.batch, spec.value_heads, spec.key_dim, spec.value_dim)
  return {
    'q': (keys, 1.0, spec.dtype),
    'k': (keys, 1.0, spec.dtype),
    'v': (values, 1.0, spec.dtype),
    'g': (gates, 2.0, spec.dtype),
    'beta': (values[:-1], 2.0, spec.dtype),
    'A_log': ((spec.value_heads,), 0.3, 'float32'),
    'dt_bias': ((spec.value_heads, spec.key_dim), 0.3, 'float32'),
    'h0': (state, 0.3, 'float32'),
  }


def make_inputs(spec: ArgSpec, seed: int = 0) -> dict[str, jax.Array]:
  """Random array arguments of `kda`, by name.

  Gate and beta logits have a deviation of 2, so that decays and write strengths
  cover their whole range; all else is normal, with 0.3 for the parameters.

  Args:
    spec: the shape.
    seed: of the random numbers.

  Returns:
    q, k, v, g and beta in the spec's dtype, and A_log, dt_bias and h0 in
    float32.
  """
  rng = np.random.default_rng(seed)
  inputs = {}
  for name, (shape, deviation, dtype) in _shapes(spec).items():
    values = rng.standard_normal(shape, np.float32) * np.float32(deviation)
    inputs[name] = jnp.asarray(values.astype(jnp.dtype(dtype)))
  return inputs


def draw_inputs(spec: ArgSpec, seed: int = 0) -> dict[str, jax.Array]:
  """As `make_inputs` from other numbers, drawn on the default device."""

  @jax.jit
  def draw(key):
    shapes = _shapes(spec)
    keys = jax.random.split(key, len(shapes))
    return {
      name: deviation * jax.random.normal(k, shape, jnp.dtype(dtype))
      for k, (name, (shape, deviation, dtype)) in zip(keys, shapes.items())
    }

  return draw(jax.random.key(seed))


def abstract_inputs(spec: ArgSpec) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and dtypes of `make_inputs`, without making the arrays."""
  return {
    name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    for name, (shape, _, dtype) in _shapes(spec).items()
  }
