"""KDA as Pallas kernels for TPU: the operator around the kernels."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import (
  checks,
  chunk_layout,
  custom_vjp,
  flat_arrays,
  mosaic_tpu_bwd,
  mosaic_tpu_bwd_scratch,
  mosaic_tpu_conv,
  mosaic_tpu_fwd,
  mosaic_tpu_scratch,
  mosaic_tpu_views,
  operands,
  products,
  segments,
  short_conv,
  tile,
  varying,
)

_BOUNDED_ONLY = (
  'lower_bound=None: the kernels for TPU support bounded gates, lower_bound in '
  '[-5, 0)'
)


class TokenPlan(NamedTuple):
  """Integer arrays that the kernels read; None for what a call lacks.

  Attributes:
    tokens: int32 [B, N, 8, C], see `mosaic_tpu_fwd.forward_call`.
    entry: int32 [B, N].
    sequence: int32 [N].
    first: int32 [N].
  """

  tokens: jax.Array | None
  entry: jax.Array | None
  sequence: jax.Array | None
  first: jax.Array | None


def _whole_lanes(channels: int) -> int:
  lanes = mosaic_tpu_views.LANES
  return -(-channels // lanes) * lanes


def _choose_level(config: operands.KdaConfig, dtype) -> int:
  """Which products keep more than bfloat16 operands."""
  if dtype == jnp.float32:
    return mosaic_tpu_fwd.HIGHEST
  level = products.PRECISIONS.index(config.precision)
  doubled = config.allow_neg_eigval or not config.beta_sigmoid
  if doubled and level == mosaic_tpu_fwd.DEFAULT:
    # Write strengths above 1, as those given ready may be, make entries of the
    # triangular inverse grow, and with them what its rounding loses.
    level = mosaic_tpu_fwd.HIGH
  return level


def count_fused_taps(arrays: operands.Operands) -> int:
  """Taps of the convolutions that the kernels apply, 0 if they apply none."""
  if arrays.conv is None:
    return 0
  # A head that several value heads share would be convolved for each of them.
  shared = arrays.q_BTHK.shape[2] != arrays.v_BTHV.shape[2]
  taps = arrays.conv.q_CHK.shape[0]
  return 0 if shared or taps > mosaic_tpu_conv.MOST_TAPS else taps


def choose_settings(
  arrays: operands.Operands,
  packing: operands.Packing,
  config: operands.KdaConfig,
) -> mosaic_tpu_fwd.TpuConfig:
  """Static settings of the kernels for a call.

  Raises:
    NotImplementedError: the kernels do not support the call.
  """
  if config.lower_bound is None:
    raise NotImplementedError(_BOUNDED_ONLY + '.')
  _, tokens, value_heads, num_values = arrays.v_BTHV.shape
  heads, num_keys = arrays.q_BTHK.shape[2:]
  dims = _whole_lanes(num_keys), _whole_lanes(num_values)
  gate_dtype = arrays.g_BTHK.dtype
  sequences = packing.cu_seqlens is not None
  generation = tile.device_generation()

  def settings(chunk, step_heads, order=()):
    return mosaic_tpu_fwd.TpuConfig(
      config,
      chunk,
      step_heads,
      level=_choose_level(config, arrays.v_BTHV.dtype),
      narrow=tile.is_narrow(generation),
      packed=sequences or packing.valid_BT is not None or tokens % chunk != 0,
      sequences=sequences,
      taps=count_fused_taps(arrays),
      weave=mosaic_tpu_fwd.WeaveConfig(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in order}
      ),
    )

  chosen = tile.choose_kernel_tile(
    generation,
    tokens,
    heads,
    value_heads,
    dims,
    lambda *sizes: mosaic_tpu_scratch.count_vmem_bytes(
      settings(*sizes), *dims, gate_dtype
    ),
  )
  if sequences:
    count = tokens // chosen.chunk + packing.cu_seqlens.shape[0]
    tile.check_scalars(2 * count, 'chunks of sequences')
  result = settings(chosen.chunk, chosen.heads, tuple(chosen.order.items()))
  # The backward takes no more heads at a time, and fails as early.
  fit_backward(result, heads, value_heads, dims, gate_dtype)
  return result


def fit_backward(
  settings: mosaic_tpu_fwd.TpuConfig,
  heads: int,
  value_heads: int,
  dims: tuple[int, int],
  gate_dtype,
) -> mosaic_tpu_fwd.TpuConfig:
  """Settings with the heads a grid step of the backward.

  Args:
    settings: of the forward.
    heads: of q and k.
    value_heads: of v.
    dims: channels of a key and of a value, whole registers.
    gate_dtype: of the gate's logits.

  Raises:
    NotImplementedError: not even one head fits the VMEM.
  """

  def with_heads(count):
    return dataclasses.replace(settings, heads=count)

  count = tile.fit_heads(
    settings.heads,
    heads,
    value_heads,
    lambda count: mosaic_tpu_bwd_scratch.count_vmem_bytes(
      with_heads(count), value_heads // heads, *dims, gate_dtype
    ),
  )
  return with_heads(count)


def find_obstacle(
  arrays: operands.Operands,
  packing: operands.Packing,
  config: operands.KdaConfig,
) -> str | None:
  """Says why the kernels cannot take a call, or None when they can."""
  if obstacle := checks.find_automatic_axis():
    return obstacle
  try:
    choose_settings(arrays, packing, config)
  except NotImplementedError as error:
    return str(error)
  return None


def kda_mosaic_tpu(
  arrays: operands.Operands,
  packing: operands.Packing,
  config: operands.KdaConfig,
) -> tuple[jax.Array, jax.Array]:
  """Runs KDA as kernels for TPU; arguments and results as `kda_reference`.

  Raises:
    NotImplementedError: the kernels do not support the call.
  """
  if not count_fused_taps(arrays):
    arrays = short_conv.convolve(arrays, packing, merge_heads=True)
  settings = choose_settings(arrays, packing, config)
  checks.check_kernel_target('mosaic_tpu')
  chunk = settings.chunk
  chunks = chunk_layout.count_chunks(arrays, packing, chunk)
  layout = chunk_layout.lay_out(arrays, packing, chunk, chunks)
  plan = number_tokens(layout.plan, settings, chunks)
  axes = varying.varying_axes((layout.arrays, plan))
  arrays, plan = varying.vary_over((layout.arrays, plan), axes)
  num_keys, num_values = arrays.q_BTHK.shape[-1], arrays.v_BTHV.shape[-1]
  o, final = _operator(settings, fill_lanes(arrays), plan)
  return layout.restore(o[..., :num_values], final[..., :num_keys, :num_values])


def fill_lanes(arrays: operands.Operands) -> operands.Operands:
  """Pads channels to whole registers."""
  lanes = mosaic_tpu_views.LANES
  return flat_arrays.pad_channels(arrays, lanes, lanes)


def number_tokens(
  plan: segments.ChunkPlan, settings: mosaic_tpu_fwd.TpuConfig, chunks: int
) -> TokenPlan:
  """Packs what is known of tokens into one block a chunk."""
  if not settings.packed:
    return TokenPlan(None, None, None, None)
  real_BT = plan.valid_BT.astype(jnp.int32)
  document_BT = plan.document_BT
  if document_BT is None:
    document_BT = jnp.zeros_like(real_BT)
  entry_BN = plan.entry_BN
  if entry_BN is None:
    entry_BN = jnp.zeros_like(real_BT[:, :chunks])
  tokens = jnp.stack([document_BT, real_BT], axis=1)
  tokens = jnp.pad(tokens, ((0, 0), (0, 6), (0, 0)))
  if settings.taps:
    group_BT = document_BT
    if plan.sequence_N is not None:
      group_BT = jnp.repeat(plan.sequence_N, settings.chunk)[None]
    lags_BT, aheads_BT = mosaic_tpu_conv.mark_neighbours(
      plan.valid_BT, group_BT, settings.taps
    )
    tokens = tokens.at[:, mosaic_tpu_views.LAGS].set(lags_BT)
    tokens = tokens.at[:, mosaic_tpu_views.AHEADS].set(aheads_BT)
  tokens = tokens.reshape(-1, 8, chunks, settings.chunk)
  first_N = plan.first_N
  return TokenPlan(
    jnp.swapaxes(tokens, 1, 2),
    entry_BN,
    plan.sequence_N,
    None if first_N is None else first_N.astype(jnp.int32),
  )


def _forward(settings, arrays, plan, save_states):
  o, final, states = mosaic_tpu_fwd.forward_call(
    settings,
    *flat_arrays.flatten(arrays),
    plan.tokens,
    plan.entry,
    arrays.h0_BHKV,
    plan.sequence,
    plan.first,
    taps=flat_arrays.flatten_taps(arrays),
    save_states=save_states,
  )
  return (o.reshape(arrays.v_BTHV.shape), final), states


def _backward(settings, arrays, plan, states, d_o, d_final):
  flat = flat_arrays.flatten(arrays)
  settings = fit_backward(
    settings,
    arrays.q_BTHK.shape[2],
    arrays.v_BTHV.shape[2],
    states.shape[-2:],
    arrays.g_BTHK.dtype,
  )
  grads = mosaic_tpu_bwd.backward_call(
    settings,
    *flat,
    states,
    d_o.reshape(flat.v.shape),
    d_final,
    plan.tokens,
    plan.entry,
    plan.sequence,
    taps=flat_arrays.flatten_taps(arrays),
  )
  d_conv = None
  if arrays.conv is not None:
    d_conv = operands.ConvTaps(
      *(d.reshape(taps.shape) for d, taps in zip(grads.taps, arrays.conv))
    )
  d_A_log = d_bias = None
  shape = arrays.g_BTHK.shape[2:]
  if arrays.A_log_H is not None:
    moment = grads.g_moment + flat.bias * grads.g_sum
    d_A_log = jnp.sum(moment.reshape(-1, *shape), axis=(0, 2))
  if arrays.dt_bias_HK is not None:
    d_bias = jnp.sum(grads.g_sum.reshape(-1, *shape), axis=0)
  return operands.Operands(
    q_BTHK=grads.q.reshape(arrays.q_BTHK.shape),
    k_BTHK=grads.k.reshape(arrays.k_BTHK.shape),
    v_BTHV=grads.v.reshape(arrays.v_BTHV.shape),
    g_BTHK=grads.g.reshape(arrays.g_BTHK.shape),
    beta_BTH=grads.beta,
    A_log_H=d_A_log,
    dt_bias_HK=d_bias,
    h0_BHKV=None if arrays.h0_BHKV is None else grads.h0,
    conv=d_conv,
  )


_operator = custom_vjp.join(_forward, _backward)
