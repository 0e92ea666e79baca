"""Checks of the public operator's arguments, all before any tracing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import target
from pallas_kernels.kda import operands, products, tile, varying

HEAD_DIMS = (32, 256)
FLOATS = (jnp.bfloat16, jnp.float32)


def check_choice(name: str, value: Any, accepted: tuple) -> None:
  """Raises ValueError unless the value is one of the accepted ones."""
  if value not in accepted:
    raise ValueError(f'{name}={value!r} is not one of {accepted}.')


def kernels_are_interpreted() -> bool:
  """Whether calls of kernels traced here are interpreted.

  JAX has no function that tells; a call of a kernel carries the setting.
  """
  constant = jnp.zeros((8, 128))
  shape = varying.struct_like(constant, constant.shape, constant.dtype)
  call = pl.pallas_call(lambda _: None, out_shape=shape)
  (equation,) = jax.make_jaxpr(call)().eqns
  return bool(equation.params['interpret'])


_TARGETS = {
  'mosaic_tpu': (
    'tpu',
    'TPUs, meshes of TPUs given by jax.set_mesh, from which other machines '
    'compile ahead of time, and interpretation under '
    'jax.experimental.pallas.tpu.force_tpu_interpret_mode',
  ),
  'mosaic_gpu': (
    'gpu',
    'Hopper GPUs, and interpretation under '
    'jax.experimental.pallas.mosaic_gpu.force_gpu_interpret_mode',
  ),
}


def check_kernel_target(implementation: str) -> None:
  """Raises NotImplementedError where kernels would not be lowered."""
  wanted, supported = _TARGETS[implementation]
  platform = target.target_platform()
  if platform != wanted and not kernels_are_interpreted():
    raise NotImplementedError(
      f'implementation={implementation!r}: its kernels do not run on '
      f'{platform}; supported are {supported}.'
    )


def find_automatic_axis() -> str | None:
  """Says which mesh axis keeps kernels from running, or None."""
  mesh = jax.sharding.get_abstract_mesh()
  for axis, size in mesh.shape.items():
    if size > 1 and axis not in mesh.manual_axes:
      return (
        f'mesh axis {axis!r} of size {size} is not manual, and XLA cannot '
        'split a kernel; call it inside shard_map'
      )
  return None


def check_settings(
  lower_bound: float | None,
  precision: str,
  beta_sigmoid: bool,
  allow_neg_eigval: bool,
) -> None:
  """Raises ValueError for settings outside their range."""
  check_choice('precision', precision, products.PRECISIONS)
  if lower_bound is not None:
    if not -5.0 <= lower_bound < 0.0:
      raise ValueError(
        f'lower_bound={lower_bound} is not accepted; it must be in [-5, 0), '
        'or None for the softplus gate.'
      )
    tile.TileConfig().check_exponent_budget(lower_bound)
  if allow_neg_eigval and not beta_sigmoid:
    raise ValueError(
      'allow_neg_eigval=True doubles the sigmoid of beta and needs '
      'beta_sigmoid=True; with beta_sigmoid=False give beta up to 2 instead.'
    )


def check_gate(A_log, dt_bias, gate_in_kernel: bool) -> None:
  """Raises ValueError for gate parameters that would not be used."""
  for name, value in (('A_log', A_log), ('dt_bias', dt_bias)):
    if value is not None and not gate_in_kernel:
      raise ValueError(
        f'{name} of shape {value.shape} has no effect with '
        'gate_in_kernel=False; accepted is None.'
      )


def _check_is_array(name: str, value: Any) -> None:
  if not hasattr(value, 'shape') or not hasattr(value, 'dtype'):
    raise ValueError(f'{name} must be an array, not {type(value).__name__}.')


def _check_array(name: str, value: Any, shape: tuple, dtypes: tuple) -> None:
  _check_is_array(name, value)
  if tuple(value.shape) != shape:
    raise ValueError(f'{name} has shape {value.shape}; accepted is {shape}.')
  if value.dtype not in dtypes:
    names = ', '.join(jnp.dtype(d).name for d in dtypes)
    raise ValueError(f'{name} has dtype {value.dtype}; accepted: {names}.')


def check_arrays(
  arrays: operands.Operands,
  segment_ids: jax.Array | None,
  cu_seqlens: jax.Array | None,
  state_layout: str,
) -> None:
  """Raises ValueError for an array whose shape or dtype does not fit."""
  q, v = arrays.q_BTHK, arrays.v_BTHV
  for name, value in (('q', q), ('v', v)):
    if getattr(value, 'ndim', None) != 4:
      shape = getattr(value, 'shape', None)
      raise ValueError(
        f'{name} has shape {shape}; accepted is [batch, tokens, heads, dim].'
      )
  batch, tokens, heads, num_keys = q.shape
  value_heads, num_values = v.shape[2:]
  if batch < 1 or tokens < 1:
    raise ValueError(f'q has shape {q.shape}; it needs a batch and tokens.')
  if heads < 1 or value_heads < 1 or value_heads % heads:
    raise ValueError(
      f'v has shape {v.shape} with {value_heads} heads; accepted is a multiple '
      f'of the {heads} heads of q.'
    )
  low, high = HEAD_DIMS
  for name, value in (('q', q), ('v', v)):
    if not low <= value.shape[-1] <= high:
      raise ValueError(
        f'{name} has shape {value.shape}; accepted head dims are {low} to '
        f'{high}.'
      )
  f32 = (jnp.float32,)
  per_token = (batch, tokens, value_heads)
  _check_array('q', q, q.shape, FLOATS)
  _check_array('k', arrays.k_BTHK, q.shape, (q.dtype,))
  _check_array('v', v, (*per_token, num_values), (q.dtype,))
  _check_array('g', arrays.g_BTHK, (*per_token, num_keys), FLOATS)
  _check_array('beta', arrays.beta_BTH, per_token, FLOATS)
  if arrays.A_log_H is not None:
    _check_array('A_log', arrays.A_log_H, (value_heads,), f32)
  if arrays.dt_bias_HK is not None:
    _check_array('dt_bias', arrays.dt_bias_HK, (value_heads, num_keys), f32)
  states = batch
  for name, value in (('segment_ids', segment_ids), ('cu_seqlens', cu_seqlens)):
    if value is not None:
      _check_is_array(name, value)
  if segment_ids is not None:
    if cu_seqlens is not None:
      raise ValueError(
        f'segment_ids of shape {segment_ids.shape} and cu_seqlens of shape '
        f'{cu_seqlens.shape} exclude each other; give one of them.'
      )
    _check_array('segment_ids', segment_ids, (batch, tokens), (jnp.int32,))
  if cu_seqlens is not None:
    _check_bounds(cu_seqlens, batch, tokens)
    states = cu_seqlens.shape[0] - 1
  if arrays.h0_BHKV is not None:
    dims = (num_keys, num_values)
    dims = dims if state_layout == 'kv' else dims[::-1]
    _check_array('h0', arrays.h0_BHKV, (states, value_heads, *dims), f32)


def check_taps(arrays: operands.Operands, names: tuple[str, str, str]) -> None:
  """Raises ValueError unless all taps are given and fit, or none is.

  Args:
    arrays: of the call; `arrays.conv` holds what the caller gave.
    names: of the arguments that hold the taps of q, k and v.
  """
  given = dict(zip(names, arrays.conv))
  missing = [name for name, taps in given.items() if taps is None]
  if missing and len(missing) < len(given):
    raise ValueError(
      f'{missing[0]}=None, but others of {", ".join(names)} are given; '
      'accepted are all of them or none.'
    )
  if missing:
    return
  width = None
  inputs = (arrays.q_BTHK, arrays.k_BTHK, arrays.v_BTHV)
  for (name, taps), x in zip(given.items(), inputs):
    _check_is_array(name, taps)
    if taps.ndim != 3 or taps.shape[0] < 1:
      raise ValueError(
        f'{name} has shape {taps.shape}; accepted is [taps, heads, dim] with '
        'at least one tap.'
      )
    heads, dim = x.shape[2:]
    if taps.shape[1:] != (heads, dim):
      raise ValueError(
        f'{name} has shape {taps.shape}; accepted is [taps, {heads}, {dim}].'
      )
    width = taps.shape[0] if width is None else width
    if taps.shape[0] != width:
      raise ValueError(
        f'{name} has {taps.shape[0]} taps; accepted are {width}, as '
        f'{names[0]} has.'
      )
    _check_array(name, taps, taps.shape, (jnp.float32,))


def _check_bounds(cu_seqlens: jax.Array, batch: int, tokens: int) -> None:
  if batch != 1:
    raise ValueError(
      f'cu_seqlens of shape {cu_seqlens.shape} needs a batch of 1; the batch '
      f'is {batch}.'
    )
  if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
    raise ValueError(
      f'cu_seqlens has shape {cu_seqlens.shape}; accepted is [sequences + 1].'
    )
  _check_array('cu_seqlens', cu_seqlens, cu_seqlens.shape, (jnp.int32,))
  if isinstance(cu_seqlens, jax.core.Tracer):
    return
  bounds = np.asarray(cu_seqlens)
  if bounds[0] < 0 or bounds[-1] > tokens or np.any(np.diff(bounds) < 0):
    raise ValueError(
      f'cu_seqlens={bounds.tolist()} must rise from at least 0 to at most the '
      f'{tokens} tokens.'
    )
