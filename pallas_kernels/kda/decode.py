"""KDA's decode step: a few tokens a request on states kept in slots."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import target
from pallas_kernels.kda import (
  checks,
  decode_plan,
  gate,
  mosaic_tpu_decode,
  operands,
  varying,
)

IMPLEMENTATIONS = ('reference', 'mosaic_tpu')
MOST_TOKENS = 8


@functools.cache
def _default_implementation(platform: str, reason: str | None) -> str:
  """The default for a platform, logged at its first use.

  Args:
    platform: that the program will run on.
    reason: why the kernel for TPU cannot take the call, or None.
  """
  kernel = platform == 'tpu' and reason is None
  choice = 'mosaic_tpu' if kernel else 'reference'
  log = logging.getLogger(__name__)
  log.info('kda_decode on %s runs as %s', platform, choice)
  if platform == 'tpu' and not kernel:
    log.warning('kda_decode does not run as mosaic_tpu: %s', reason)
  return choice


def kda_decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  states: jax.Array,
  read_slots: jax.Array,
  write_slots: jax.Array,
  *,
  fresh: jax.Array | None = None,
  A_log: jax.Array | None = None,
  dt_bias: jax.Array | None = None,
  lower_bound: float | None = -5.0,
  scale: float | None = None,
  qk_l2norm: bool = True,
  beta_sigmoid: bool = True,
  allow_neg_eigval: bool = False,
  gate_in_kernel: bool = True,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Advances N requests by T tokens each, on states kept in slots.

  The recurrence is that of `kda` (Kimi Linear, arXiv 2510.26692, equation 1),
  in float32 throughout, so that decoding continues a prefill whose final state
  was put in a slot. Ordinary decoding has T = 1 and writes the slot that it
  read. A speculative check gives each drafted token a slot of its own and later
  reads from the slot of the last accepted token.

  A request may write the slot that it reads, and requests may read the same
  slot. Slots that no id names keep their bits and may hold anything, NaN
  included. The pool is updated in place where `states` is donated to the
  enclosing jit, and copied otherwise. On TPU that also takes a V of 128 or 256,
  or else a row-major layout of the pool, in and out of that jit, given by
  `jax.experimental.layout`: by default slots would come last, and the pool be
  transposed before and after each call. Split heads with `jax.shard_map`.

  Caller errors, refused where ids are concrete: an id of `slots` or more, which
  under tracing counts as negative; two writes to one slot; a write to a slot
  that another request reads. The last two leave the named slots and the outputs
  of their readers undefined under tracing, and nothing else.

  Args:
    q: queries [N, T, H, K], bfloat16 or float32; T is 1 to 8, K is 32 to 256.
    k: keys [N, T, H, K], same dtype.
    v: values [N, T, HV, V], same dtype; HV is a multiple of H and value
      head h reads q/k head h * H // HV; V is 32 to 256.
    g: gate logits [N, T, HV, K], bfloat16 or float32; the log decay in nats
      when gate_in_kernel is False.
    beta: write-strength logits [N, T, HV], bfloat16 or float32; the write
      strength when beta_sigmoid is False.
    states: pool [slots, HV, K, V], float32, or bfloat16 to which states are
      rounded only as they are written.
    read_slots: int32 [N], the slot whose state a request continues; negative
      for an inactive request, whose output is 0, which writes nothing, and
      whose other arguments may hold any values.
    write_slots: int32 [N, T], the slot that keeps the state after a token;
      negative where it is not kept.
    fresh: bool [N], True for an active request that starts from a zero state
      instead of its slot's, which is then not read. None for all False.
    A_log: float32 [HV], as for `kda`.
    dt_bias: float32 [HV, K], as for `kda`.
    lower_bound: as for `kda`; None selects the softplus gate at no extra cost.
    scale: multiplies the queries; None for K**-0.5.
    qk_l2norm: whether q and k are divided by sqrt(sum of squares + 1e-6).
    beta_sigmoid: whether beta is sigmoid(beta).
    allow_neg_eigval: whether beta is 2 * sigmoid(beta).
    gate_in_kernel: whether g holds logits; when False, any log decay up to 0.
    implementation: None picks by the mesh's platform; or one of
      IMPLEMENTATIONS.

  Returns:
    Outputs [N, T, HV, V] in v's dtype, and the pool.

  Raises:
    ValueError: an argument's shape, dtype or value is not accepted.
    NotImplementedError: the implementation cannot take the call.
  """
  arrays = operands.Operands(q, k, v, g, beta, A_log, dt_bias, None)
  checks.check_choice(
    'implementation', implementation, (None, *IMPLEMENTATIONS)
  )
  checks.check_settings(lower_bound, 'highest', beta_sigmoid, allow_neg_eigval)
  checks.check_arrays(arrays, None, None, 'kv')
  checks.check_gate(A_log, dt_bias, gate_in_kernel)
  _check_pool(arrays, states, read_slots, write_slots, fresh)
  _check_ids(states.shape[0], read_slots, write_slots, fresh)

  reason = decode_plan.find_obstacle(arrays, states)
  if implementation is None:
    implementation = _default_implementation(target.target_platform(), reason)
  elif implementation == 'mosaic_tpu' and reason is not None:
    raise NotImplementedError(f"implementation='mosaic_tpu': {reason}")
  elif implementation == 'mosaic_tpu':
    checks.check_kernel_target('mosaic_tpu')
  config = operands.KdaConfig(
    lower_bound=None if lower_bound is None else float(lower_bound),
    scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
    qk_l2norm=qk_l2norm,
    beta_sigmoid=beta_sigmoid,
    allow_neg_eigval=allow_neg_eigval,
    gate_in_kernel=gate_in_kernel,
    precision='highest',
  )
  # One encoding for both implementations: an id that is no slot never reaches
  # them, and an inactive request keeps nothing.
  slots = states.shape[0]
  active_N = (read_slots >= 0) & (read_slots < slots)
  kept_NT = active_N[:, None] & (write_slots >= 0) & (write_slots < slots)
  read_N = jnp.where(active_N, read_slots, mosaic_tpu_decode.INACTIVE)
  if fresh is not None:
    read_N = jnp.where(active_N & fresh, mosaic_tpu_decode.FRESH, read_N)
  write_NT = jnp.where(kept_NT, write_slots, -1)
  call = (arrays, states, read_N, write_NT)
  call = varying.vary_over(call, varying.varying_axes(call))
  run = _decode_reference
  if implementation == 'mosaic_tpu':
    run = mosaic_tpu_decode.kda_decode_mosaic_tpu
  return run(*call, config)


def _check_array(name: str, value: Any, shape: tuple, dtypes: tuple) -> None:
  found = getattr(value, 'shape', None), getattr(value, 'dtype', None)
  if found[0] != shape or found[1] not in dtypes:
    names = ' or '.join(jnp.dtype(d).name for d in dtypes)
    raise ValueError(
      f'{name} has shape {found[0]} and dtype {found[1]}; accepted is {shape} '
      f'and {names}.'
    )


def _check_pool(arrays, states, read_slots, write_slots, fresh) -> None:
  """Raises ValueError for a shape or dtype that the pool does not fit."""
  requests, tokens, value_heads, num_values = arrays.v_BTHV.shape
  if tokens > MOST_TOKENS:
    raise ValueError(
      f'q has {tokens} tokens a request; accepted are 1 to {MOST_TOKENS}. '
      'Longer inputs are a prefill: use kda.'
    )
  state_shape = (value_heads, arrays.q_BTHK.shape[-1], num_values)
  slots = states.shape[0] if getattr(states, 'ndim', 0) else 0
  _check_array('states', states, (max(slots, 1), *state_shape), checks.FLOATS)
  ids = (jnp.int32,)
  _check_array('read_slots', read_slots, (requests,), ids)
  _check_array('write_slots', write_slots, (requests, tokens), ids)
  if fresh is not None:
    _check_array('fresh', fresh, (requests,), (jnp.bool_,))


def _check_ids(slots: int, read_slots, write_slots, fresh) -> None:
  """Raises ValueError for concrete ids that are out of range or collide."""
  ids = (read_slots, write_slots, fresh)
  if any(isinstance(x, jax.core.Tracer) for x in ids):
    return
  read_N, write_NT = np.asarray(read_slots), np.asarray(write_slots)
  for name, value in (('read_slots', read_N), ('write_slots', write_NT)):
    if value.max() >= slots:
      raise ValueError(
        f'{name} holds {value.max()}; accepted is below {slots}, the number '
        'of slots.'
      )
  request_NT, _ = np.indices(write_NT.shape)
  kept_NT = (write_NT >= 0) & (read_N >= 0)[:, None]
  written, writer = write_NT[kept_NT], request_NT[kept_NT]
  if len(set(written)) < len(written):
    raise ValueError(
      f'write_slots={write_NT.tolist()} names a slot twice; accepted is one '
      'write a slot.'
    )
  reads_N = read_N >= 0
  if fresh is not None:
    reads_N = reads_N & ~np.asarray(fresh)
  shared = read_N[reads_N][:, None] == written
  if np.any(shared & (np.flatnonzero(reads_N)[:, None] != writer)):
    raise ValueError(
      f'write_slots={write_NT.tolist()} names a slot that another request '
      f'reads, read_slots={read_N.tolist()}; accepted is a slot of its own.'
    )


def _decode_reference(
  arrays: operands.Operands,
  states_SHKV: jax.Array,
  read_N: jax.Array,
  write_NT: jax.Array,
  config: operands.KdaConfig,
) -> tuple[jax.Array, jax.Array]:
  """The recurrence in plain jnp; arguments as of the kernel."""
  tokens = arrays.v_BTHV.shape[1]
  active_N = read_N != mosaic_tpu_decode.INACTIVE
  valid_NT = jnp.broadcast_to(active_N[:, None], write_NT.shape)
  x = gate.activate(arrays, valid_NT, config)
  # A select, so that the content of a slot that is not read has no effect.
  state_NHKV = jnp.where(
    (read_N >= 0)[:, None, None, None],
    states_SHKV[jnp.maximum(read_N, 0)].astype(jnp.float32),
    0.0,
  )
  # Past the end, where a scatter drops it; a negative index would wrap.
  write_NT = jnp.where(write_NT < 0, states_SHKV.shape[0], write_NT)
  outputs = []
  for t in range(tokens):
    k_NHK1 = x.k_BTHK[:, t, :, :, None]
    state_NHKV = jnp.exp(x.g_BTHK[:, t, :, :, None]) * state_NHKV
    error_NHV = x.v_BTHV[:, t] - jnp.sum(k_NHK1 * state_NHKV, axis=-2)
    write_NHV = x.beta_BTH[:, t, :, None] * error_NHV
    state_NHKV = state_NHKV + k_NHK1 * write_NHV[:, :, None]
    outputs.append(jnp.sum(x.q_BTHK[:, t, :, :, None] * state_NHKV, axis=-2))
    states_SHKV = states_SHKV.at[write_NT[:, t]].set(
      state_NHKV.astype(states_SHKV.dtype), mode='drop'
    )
  o_NTHV = gate.select_valid(valid_NT, jnp.stack(outputs, axis=1))
  return o_NTHV.astype(arrays.v_BTHV.dtype), states_SHKV
