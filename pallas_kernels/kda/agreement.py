"""Measures how far an implementation is from the reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import api


def relative_rms(x: Any, expected: Any) -> float:
  """rms(x - expected) / rms(expected), in float64; NaN if x holds any.

  Where all that is expected is 0, it is rms(x).
  """
  x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
  scale = np.sqrt(np.mean(expected**2))
  error = np.sqrt(np.mean((x - expected) ** 2))
  return float(error / scale) if scale > 0 else float(error)


@functools.cache
def _program(implementation, options, compiler_options):
  """The jitted program of `run_with_gradients`."""

  def run(inputs, cotangents, indices):
    def call(inputs):
      return api.kda(
        **inputs,
        **indices,
        **dict(options),
        return_final_state=True,
        implementation=implementation,
      )

    outputs, pull = jax.vjp(call, inputs)
    (gradients,) = pull(cotangents)
    return outputs, gradients

  return jax.jit(run, compiler_options=dict(compiler_options))


def run_with_gradients(
  inputs: dict[str, jax.Array],
  cotangents: tuple[jax.Array, jax.Array],
  indices: dict[str, jax.Array],
  implementation: str,
  options: tuple[tuple[str, Any], ...] = (),
  compiler_options: tuple[tuple[str, Any], ...] = (),
) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
  """Outputs, final state and the gradients of all inputs.

  Args:
    inputs: floating-point arguments of `kda` by name.
    cotangents: gradients of the outputs and of the final states.
    indices: segment_ids or cu_seqlens, or empty.
    implementation: name of the implementation.
    options: further keyword arguments of `kda`, as sorted pairs.
    compiler_options: options of the XLA compiler, as pairs.
  """
  program = _program(implementation, options, compiler_options)
  return program(inputs, cotangents, indices)


def compare_with_reference(
  inputs: dict[str, jax.Array],
  implementation: str,
  *,
  reference_inputs: dict[str, jax.Array] | None = None,
  segment_ids: jax.Array | None = None,
  cu_seqlens: jax.Array | None = None,
  seed: int = 0,
  compiler_options: tuple[tuple[str, Any], ...] = (),
  **options: Any,
) -> dict[str, float]:
  """Errors of outputs, final state and all gradients against the reference.

  The reference runs in float32 on the values that the implementation gets, so
  rounding of the inputs is no part of the error; rounding of results is.

  Args:
    inputs: floating-point arguments of `kda` by name.
    implementation: name of the implementation.
    reference_inputs: what the reference gets instead of the inputs.
    segment_ids: int32 [B, T] or None.
    cu_seqlens: int32 [N + 1] or None.
    seed: of the random gradients of outputs and states.
    compiler_options: options of the XLA compiler, as pairs.
    **options: further keyword arguments of `kda`.

  Returns:
    Relative rms error by name: 'o', 'final' and each input's gradient.
  """
  indices = {'segment_ids': segment_ids, 'cu_seqlens': cu_seqlens}
  indices = {k: v for k, v in indices.items() if v is not None}
  options = tuple(sorted(options.items()))
  if reference_inputs is None:
    reference_inputs = inputs
  exact = {k: v.astype(jnp.float32) for k, v in reference_inputs.items()}

  v = inputs['v']
  batch, _, heads, num_values = v.shape
  states = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
  state_shape = (states, heads, inputs['q'].shape[-1], num_values)
  if ('state_layout', 'vk') in options:
    state_shape = (*state_shape[:2], *state_shape[:1:-1])
  keys = jax.random.split(jax.random.key(seed))
  d_o = jax.random.normal(keys[0], v.shape, jnp.float32).astype(v.dtype)
  d_final = jax.random.normal(keys[1], state_shape, jnp.float32)

  (o, final), gradients = run_with_gradients(
    inputs,
    (d_o, d_final),
    indices,
    implementation,
    options,
    compiler_options,
  )
  (expected_o, expected_final), expected = run_with_gradients(
    exact,
    (d_o.astype(jnp.float32), d_final),
    indices,
    'reference',
    options,
    compiler_options,
  )
  errors = {
    name: relative_rms(gradients[name], expected[name]) for name in inputs
  }
  errors['o'] = relative_rms(o, expected_o)
  errors['final'] = relative_rms(final, expected_final)
  return errors
