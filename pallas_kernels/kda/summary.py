"""What a fragment of tokens does to KDA's state, for context parallelism.

KDA is affine in the state: a fragment takes the state S that enters it to
M S + N, and gradients back as dS = M^T dS' + dN. `state_fold` joins summaries.
Kimi Linear (arXiv 2510.26692) equation 1.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import target
from pallas_kernels.kda import (
  checks,
  chunk_layout,
  chunked_op,
  flat_arrays,
  mosaic_tpu_op,
  mosaic_tpu_summary,
  operands,
  reference,
  segments,
  state_fold,
  varying,
)
from pallas_kernels.kda.state_fold import Summary

IMPLEMENTATIONS = ('reference', 'chunked_xla', 'mosaic_tpu')

_OPERATORS = {
  'reference': reference.kda_reference,
  'chunked_xla': chunked_op.kda_chunked_xla,
}


def summarize_fragment(
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  *,
  A_log: jax.Array | None = None,
  dt_bias: jax.Array | None = None,
  lower_bound: float | None = -5.0,
  qk_l2norm: bool = True,
  beta_sigmoid: bool = True,
  allow_neg_eigval: bool = False,
  gate_in_kernel: bool = True,
  segment_ids: jax.Array | None = None,
  previous_ids: jax.Array | None = None,
  precision: str = 'default',
  implementation: str | None = None,
) -> Summary:
  """Map from the state that enters a fragment to the one that leaves it.

  The arguments are those of `kda`. A document that begins inside of the
  fragment, or with it, lets nothing through: M is 0 then, and N the state of
  the last document. No gradient is defined through the kernels: the rule of
  the whole sharded operator is made of `summarize_gradient`.

  Args:
    k: keys [B, T, H, K].
    v: values [B, T, HV, V].
    g: gate logits or log decay [B, T, HV, K].
    beta: write-strength logits, or write strengths [B, T, HV].
    A_log: float32 [HV] or None.
    dt_bias: float32 [HV, K] or None.
    lower_bound: in [-5, 0), nats per token, or None.
    qk_l2norm: whether k is divided by its norm.
    beta_sigmoid: whether beta is sigmoid(beta).
    allow_neg_eigval: whether beta is 2 * sigmoid(beta).
    gate_in_kernel: whether g holds logits.
    segment_ids: int32 [B, T], 0 for padding, which may hold any values, and
      positive for documents.
    previous_ids: int32 [B], the id of the last real token before the fragment,
      0 where there is none, see `state_fold.find_previous_ids`. None where the
      first document of the fragment goes on from before.
    precision: 'fast', 'default', 'high' or 'highest'.
    implementation: None picks by the mesh's platform; or one of
      IMPLEMENTATIONS.

  Returns:
    The summary.

  Raises:
    ValueError: an argument's shape, dtype or value is not accepted.
    NotImplementedError: the implementation cannot take the call.
  """
  arrays = operands.Operands(k, k, v, g, beta, A_log, dt_bias, None)
  arrays, packing, config, implementation = _check(
    arrays,
    segment_ids,
    previous_ids,
    implementation,
    lower_bound=lower_bound,
    scale=1.0,
    qk_l2norm=qk_l2norm,
    beta_sigmoid=beta_sigmoid,
    allow_neg_eigval=allow_neg_eigval,
    gate_in_kernel=gate_in_kernel,
    precision=precision,
  )
  if implementation == 'mosaic_tpu':
    summary = _summarize_mosaic_tpu(arrays, packing, config)
  else:
    run = _OPERATORS[implementation]
    summary = _summarize_by_states(run, arrays, packing, config)
  passes = state_fold.continues_document(segment_ids, previous_ids)
  if passes is None:
    return summary
  return summary._replace(M=state_fold.keep_rows(passes, summary.M))


def summarize_gradient(
  q: jax.Array,
  k: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  d_o: jax.Array,
  *,
  A_log: jax.Array | None = None,
  dt_bias: jax.Array | None = None,
  lower_bound: float | None = -5.0,
  scale: float | None = None,
  qk_l2norm: bool = True,
  beta_sigmoid: bool = True,
  allow_neg_eigval: bool = False,
  gate_in_kernel: bool = True,
  segment_ids: jax.Array | None = None,
  previous_ids: jax.Array | None = None,
  precision: str = 'default',
  implementation: str | None = None,
) -> jax.Array:
  """Gradient of the state that enters a fragment, by the fragment's outputs.

  With the gradient dS' of the state that leaves the fragment, that of the
  state that enters it is M^T dS' + dN; this is dN. It does not depend on
  values. The arguments are those of `kda` and of `summarize_fragment`.

  Args:
    q: queries [B, T, H, K].
    k: keys [B, T, H, K].
    g: gate logits or log decay [B, T, HV, K].
    beta: write-strength logits, or write strengths [B, T, HV].
    d_o: gradient of the outputs [B, T, HV, V], in q's dtype; padding may hold
      any values.
    A_log: float32 [HV] or None.
    dt_bias: float32 [HV, K] or None.
    lower_bound: in [-5, 0), nats per token, or None.
    scale: multiplies the queries; None for K**-0.5.
    qk_l2norm: whether q and k are divided by their norms.
    beta_sigmoid: whether beta is sigmoid(beta).
    allow_neg_eigval: whether beta is 2 * sigmoid(beta).
    gate_in_kernel: whether g holds logits.
    segment_ids: int32 [B, T] or None.
    previous_ids: int32 [B] or None.
    precision: 'fast', 'default', 'high' or 'highest'.
    implementation: None picks by the mesh's platform; or one of
      IMPLEMENTATIONS.

  Returns:
    dN, float32 [B, HV, K, V].

  Raises:
    ValueError: an argument's shape, dtype or value is not accepted.
    NotImplementedError: the implementation cannot take the call.
  """
  arrays = operands.Operands(q, k, d_o, g, beta, A_log, dt_bias, None)
  arrays, packing, config, implementation = _check(
    arrays,
    segment_ids,
    previous_ids,
    implementation,
    lower_bound=lower_bound,
    scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
    qk_l2norm=qk_l2norm,
    beta_sigmoid=beta_sigmoid,
    allow_neg_eigval=allow_neg_eigval,
    gate_in_kernel=gate_in_kernel,
    precision=precision,
  )
  if implementation == 'mosaic_tpu':
    d_N = _summarize_gradient_mosaic_tpu(arrays, packing, config)
  else:
    run = _OPERATORS[implementation]
    d_N = _pull_entry_state(run, arrays, packing, config)
  passes = state_fold.continues_document(segment_ids, previous_ids)
  return d_N if passes is None else state_fold.keep_rows(passes, d_N)


def _check(arrays, segment_ids, previous_ids, implementation, **settings):
  """Checks a call; returns its arrays, packing, settings and implementation."""
  checks.check_choice(
    'implementation', implementation, (None, *IMPLEMENTATIONS)
  )
  checks.check_settings(
    settings['lower_bound'],
    settings['precision'],
    settings['beta_sigmoid'],
    settings['allow_neg_eigval'],
  )
  checks.check_arrays(arrays, segment_ids, None, 'kv')
  checks.check_gate(
    arrays.A_log_H, arrays.dt_bias_HK, settings['gate_in_kernel']
  )
  batch = arrays.v_BTHV.shape[0]
  if previous_ids is not None:
    if segment_ids is None:
      raise ValueError(
        f'previous_ids of shape {previous_ids.shape} has no effect without '
        'segment_ids; accepted is None.'
      )
    if previous_ids.shape != (batch,) or previous_ids.dtype != jnp.int32:
      raise ValueError(
        f'previous_ids has shape {previous_ids.shape} and dtype '
        f'{previous_ids.dtype}; accepted is {(batch,)} and int32.'
      )
  lower_bound = settings.pop('lower_bound')
  config = operands.KdaConfig(
    lower_bound=None if lower_bound is None else float(lower_bound), **settings
  )
  packing = operands.Packing(None, None, None)
  if segment_ids is not None:
    packing = operands.Packing(
      segment_ids > 0, segments.count_documents(segment_ids), None
    )
  if implementation is None:
    implementation = 'chunked_xla'
    if target.target_platform() == 'tpu':
      obstacle = mosaic_tpu_op.find_obstacle(arrays, packing, config)
      implementation = 'mosaic_tpu' if obstacle is None else implementation
  axes = varying.varying_axes((arrays, packing))
  arrays, packing = varying.vary_over((arrays, packing), axes)
  return arrays, packing, config, implementation


def _summarize_by_states(run, arrays, packing, config) -> Summary:
  """The final state of values [v | 0] from the initial state [0 | I]."""
  v_BTHV, num_keys = arrays.v_BTHV, arrays.g_BTHK.shape[-1]
  num_values = v_BTHV.shape[-1]
  added = [(0, 0)] * 3 + [(0, num_keys)]
  start = varying.zero_state(arrays.g_BTHK, num_values + num_keys)
  identity = jnp.eye(num_keys, num_values + num_keys, num_values)
  start = start + identity[None, None]
  arrays = arrays._replace(v_BTHV=jnp.pad(v_BTHV, added), h0_BHKV=start)
  _, final = run(arrays, packing, config)
  return Summary(M=final[..., num_values:], N=final[..., :num_values])


def _pull_entry_state(run, arrays, packing, config) -> jax.Array:
  """The gradient of the initial state; values hold the outputs' gradients."""
  d_o = arrays.v_BTHV
  arrays = arrays._replace(v_BTHV=jnp.zeros_like(d_o))

  def read(h0_BHKV):
    return run(arrays._replace(h0_BHKV=h0_BHKV), packing, config)[0]

  start = varying.zero_state(arrays.g_BTHK, d_o.shape[-1])
  _, pull = jax.vjp(read, start)
  (d_N,) = pull(d_o)
  return d_N


def _lay_out_mosaic_tpu(arrays, packing, config):
  """Settings, flat arrays and the tokens' plan of a call.

  Blocks of heads are those of the forward kernel. What a summary holds more of
  states is about as much as it holds less of queries, outputs and saved states.
  """
  settings = mosaic_tpu_op.choose_settings(arrays, packing, config)
  checks.check_kernel_target('mosaic_tpu')
  chunks = chunk_layout.count_chunks(arrays, packing, settings.chunk)
  layout = chunk_layout.lay_out(arrays, packing, settings.chunk, chunks)
  plan = mosaic_tpu_op.number_tokens(layout.plan, settings, chunks)
  axes = varying.varying_axes((layout.arrays, plan))
  arrays, plan = varying.vary_over((layout.arrays, plan), axes)
  flat = flat_arrays.flatten(mosaic_tpu_op.fill_lanes(arrays))
  return settings, flat, plan


def _summarize_mosaic_tpu(arrays, packing, config) -> Summary:
  num_keys, num_values = arrays.q_BTHK.shape[-1], arrays.v_BTHV.shape[-1]
  settings, flat, plan = _lay_out_mosaic_tpu(arrays, packing, config)
  M, N = mosaic_tpu_summary.summary_call(
    settings, *flat[1:], plan.tokens, plan.entry
  )
  return Summary(
    M=M[..., :num_keys, :num_keys], N=N[..., :num_keys, :num_values]
  )


def _summarize_gradient_mosaic_tpu(arrays, packing, config) -> jax.Array:
  num_keys, num_values = arrays.q_BTHK.shape[-1], arrays.v_BTHV.shape[-1]
  settings, flat, plan = _lay_out_mosaic_tpu(arrays, packing, config)
  d_N = mosaic_tpu_summary.summary_reverse_call(
    settings, *flat, plan.tokens, plan.entry
  )
  return d_N[..., :num_keys, :num_values]
