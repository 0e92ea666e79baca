"""The public KDA operator: checks its arguments once and picks who runs it."""

import functools
import logging

import jax
import jax.numpy as jnp

from pallas_kernels import target
from pallas_kernels.kda import (
  checks,
  chunked_op,
  mosaic_gpu_op,
  mosaic_tpu_op,
  operands,
  reference,
  segments,
  short_conv,
  varying,
)

IMPLEMENTATIONS = ('reference', 'chunked_xla', 'mosaic_tpu', 'mosaic_gpu')

_RUNNERS = {
  'reference': reference.kda_reference,
  'chunked_xla': chunked_op.kda_chunked_xla,
  'mosaic_tpu': mosaic_tpu_op.kda_mosaic_tpu,
  'mosaic_gpu': mosaic_gpu_op.kda_mosaic_gpu,
}
# These convolve q, k and v themselves.
_CONVOLVING = ('mosaic_tpu',)


@functools.cache
def _log_default(platform: str, choice: str, reason: str | None) -> None:
  """Logs the default for a platform, once for each reason."""
  because = f', because {reason}' if reason else ''
  logging.getLogger(__name__).info(
    'kda on %s runs as %s%s', platform, choice, because
  )


def _default_implementation(arrays, packing, config) -> str:
  """The default for the platform that is built for."""
  platform = target.target_platform()
  choice, reason = 'chunked_xla', None
  if platform == 'tpu':
    reason = mosaic_tpu_op.find_obstacle(arrays, packing, config)
    choice = 'mosaic_tpu' if reason is None else choice
  if platform == 'gpu':
    reason = mosaic_gpu_op.find_obstacle(arrays, config)
    choice = 'mosaic_gpu' if reason is None else choice
  _log_default(platform, choice, reason)
  return choice


def kda(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  *,
  A_log: jax.Array | None = None,
  dt_bias: jax.Array | None = None,
  q_conv: jax.Array | None = None,
  k_conv: jax.Array | None = None,
  v_conv: jax.Array | None = None,
  lower_bound: float | None = -5.0,
  scale: float | None = None,
  qk_l2norm: bool = True,
  beta_sigmoid: bool = True,
  allow_neg_eigval: bool = False,
  gate_in_kernel: bool = True,
  h0: jax.Array | None = None,
  return_final_state: bool = False,
  segment_ids: jax.Array | None = None,
  cu_seqlens: jax.Array | None = None,
  state_layout: str = 'kv',
  precision: str = 'default',
  cp_axis: str | None = None,
  implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Kimi Delta Attention: a delta rule with a decay per token and channel.

  With a = exp(log decay), for each token and head:
  S <- Diag(a) S; S <- S + beta k (v - k^T S)^T; o = scale * q^T S. The read
  sees the token's own write. Kimi Linear (arXiv 2510.26692) equation 1; the
  bounded gate is that of the Kimi K3 report (arXiv 2607.24653) section 2.1.1.

  Args:
    q: queries [B, T, H, K], bfloat16 or float32; K is 32 to 256.
    k: keys [B, T, H, K], same dtype.
    v: values [B, T, HV, V], same dtype; HV is a multiple of H and value
      head h reads q/k head h * H // HV; V is 32 to 256.
    g: gate logits [B, T, HV, K], bfloat16 or float32; the log decay in
      nats when gate_in_kernel is False.
    beta: write-strength logits [B, T, HV], bfloat16 or float32; the write
      strength when beta_sigmoid is False.
    A_log: float32 [HV], log of the gate's multiplier; None for multiplier 1.
    dt_bias: float32 [HV, K] added to the gate logits; None for 0.
    q_conv: float32 taps [taps, H, K] of a causal convolution per channel, all
      three or None. With them q, k and v are its inputs, and the operator reads
      silu(sum_j taps[j] * x[t - j]), so taps[0] is the token's own, over the
      real tokens of t's document, or sequence, none before the row; products
      and sum are float32, the result is rounded to the arrays' dtype. The
      kernels for TPU convolve up to 9 taps themselves where q has a head for
      each of v. By static schedules that adds 0.9 cycles a token and head to
      the forward and 3.3 to the backward on v6e, 1.3 and 3.7 on v5e; else XLA
      convolves before the kernels, for 3.2 and 6.2 on v6e, 4.4 and 7.3 on v5e
      by its compiler's estimate.
    k_conv: the same for the keys.
    v_conv: the same for the values, [taps, HV, V].
    lower_bound: in [-5, 0), nats per token: log decay is
      lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). None selects the
      unbounded -exp(A_log) * softplus(g + dt_bias), which is slower.
    scale: multiplies the queries; None for K**-0.5.
    qk_l2norm: whether q and k are divided by sqrt(sum of squares + 1e-6).
    beta_sigmoid: whether beta is sigmoid(beta). Strengths that are given may be
      above 1, and the kernels for TPU then work as 'high' where 'default' is
      asked for.
    allow_neg_eigval: whether beta is 2 * sigmoid(beta), which lets a write
      reverse a state's component.
    gate_in_kernel: whether g holds logits. When False, g must be at most 0,
      and with a lower_bound at least -5, which is not checked: a value below
      overflows the tiles of the chunked form. Use lower_bound=None for others.
    h0: float32 initial states [B, HV, K, V], or [N, HV, K, V] with cu_seqlens;
      [.., V, K] in layout 'vk'. It belongs to the first real token's document.
    return_final_state: whether to return the state after the last real token.
    segment_ids: int32 [B, T], 0 for padding and positive for documents. The
      state starts at 0 where a real token's id differs from the one of the real
      token before it. Padding changes no state, gives output 0, takes gradient
      0, and may hold any values, NaN included.
    cu_seqlens: int32 [N + 1], non-decreasing bounds of N sequences laid back to
      back in one row (B = 1); empty sequences keep their initial state. Tokens
      outside the bounds are padding. Excludes segment_ids.
    state_layout: 'kv' or 'vk', order of the last two axes of states.
    precision: 'fast', 'default', 'high' or 'highest': how much more than one
      product of bfloat16 operands is spent where q, k and v are bfloat16; only
      'highest' multiplies in float32. Where keys repeat for thousands of tokens
      under next to no decay, states of 'fast' and 'default' are off by percents
      and those of 'high' by 1e-3; with write strengths next to 2 there, which
      only just do not grow, 'highest' alone is right. float32 arrays are never
      rounded.
    cp_axis: mesh axis over which tokens are split; only None is implemented.
    implementation: None picks by the mesh's platform: on TPU and on Hopper GPUs
      the kernels if they support the call, else 'chunked_xla'; or one of
      'reference', 'chunked_xla', 'mosaic_tpu' and 'mosaic_gpu'. The kernels
      need a lower_bound and all axes of the mesh manual; those for TPU a TPU,
      or a mesh of them to compile for; those for GPU a Hopper GPU, bfloat16
      arrays, keys of at most 128 channels, to which fewer are padded, beta as
      logits of strengths up to 1, and precision 'fast' or 'default'. Both also
      run by Pallas' interpretation.

  Returns:
    Outputs [B, T, HV, V] in v's dtype; with return_final_state also the final
    states, float32, in the shape of h0.

  Raises:
    ValueError: an argument's shape, dtype or value is not accepted.
    NotImplementedError: the implementation or cp_axis is not available.
  """
  conv = operands.ConvTaps(q_conv, k_conv, v_conv)
  arrays = operands.Operands(q, k, v, g, beta, A_log, dt_bias, h0, conv)
  checks.check_choice(
    'implementation', implementation, (None, *IMPLEMENTATIONS)
  )
  checks.check_choice('state_layout', state_layout, ('kv', 'vk'))
  checks.check_settings(lower_bound, precision, beta_sigmoid, allow_neg_eigval)
  checks.check_arrays(arrays, segment_ids, cu_seqlens, state_layout)
  checks.check_gate(A_log, dt_bias, gate_in_kernel)
  checks.check_taps(arrays, ('q_conv', 'k_conv', 'v_conv'))
  if q_conv is None:
    arrays = arrays._replace(conv=None)
  if cp_axis is not None:
    raise NotImplementedError(
      f'cp_axis={cp_axis!r}: tokens cannot be split over a mesh axis inside '
      'this operator; accepted is None.'
    )
  config = operands.KdaConfig(
    lower_bound=None if lower_bound is None else float(lower_bound),
    scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
    qk_l2norm=qk_l2norm,
    beta_sigmoid=beta_sigmoid,
    allow_neg_eigval=allow_neg_eigval,
    gate_in_kernel=gate_in_kernel,
    precision=precision,
  )
  packing = operands.Packing(None, None, cu_seqlens)
  if segment_ids is not None:
    packing = operands.Packing(
      segment_ids > 0, segments.count_documents(segment_ids), None
    )
  if implementation is None:
    implementation = _default_implementation(arrays, packing, config)
  # The arrays join the widest set of mesh axes here, so that the transpose of
  # the cast sums the gradients of replicated parameters over shards.
  axes = varying.varying_axes((arrays, packing))
  arrays = varying.vary_over(arrays, axes)
  packing = varying.vary_over(packing, axes)
  if h0 is not None and state_layout == 'vk':
    arrays = arrays._replace(h0_BHKV=jnp.swapaxes(arrays.h0_BHKV, -1, -2))
  if implementation not in _CONVOLVING:
    arrays = short_conv.convolve(arrays, packing)
  o_BTHV, final_BHKV = _RUNNERS[implementation](arrays, packing, config)
  if not return_final_state:
    return o_BTHV
  if state_layout == 'vk':
    final_BHKV = jnp.swapaxes(final_BHKV, -1, -2)
  return o_BTHV, final_BHKV
