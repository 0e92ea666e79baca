"""KDA as its recurrence, token by token: the definition of the operator.

Kimi Linear (arXiv 2510.26692) equation 1 and the Kimi K3 report
(arXiv 2607.24653) equation 1. Gradients come from plain autodiff. This file is
the yardstick of all other implementations and is never made faster.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kda import gate, operands, segments, varying


def kda_reference(
  arrays: operands.Operands,
  packing: operands.Packing,
  config: operands.KdaConfig,
) -> tuple[jax.Array, jax.Array]:
  """Runs the recurrence in float32.

  For each token: S <- Diag(exp(g)) S; S <- S + beta k (v - k^T S)^T;
  o = scale * q^T S.

  Args:
    arrays: the arrays of the call.
    packing: documents and padding.
    config: static settings.

  Returns:
    Outputs [B, T, HV, V] in v's dtype and the final states, float32
    [B, HV, K, V] (or [N, HV, K, V] for N packed sequences).
  """
  batch, tokens = arrays.v_BTHV.shape[:2]
  valid_BT = packing.valid_BT
  reset_BT = jnp.zeros((batch, tokens), bool)
  sequence_T = jnp.zeros((tokens,), jnp.int32)
  if packing.document_BT is not None:
    before_BT = jnp.pad(packing.document_BT, ((0, 0), (1, 0)))[:, :tokens]
    reset_BT = packing.document_BT != before_BT
  bounds = packing.cu_seqlens
  if bounds is not None:
    index_T = jnp.arange(tokens, dtype=jnp.int32)
    sequence_T = segments.sequence_of_token(bounds, index_T)
    valid_BT = ((index_T >= bounds[0]) & (index_T < bounds[-1]))[None]
    reset_BT = (index_T == bounds[sequence_T])[None]

  x = gate.activate(arrays, valid_BT, config)
  initial_BHKV = arrays.h0_BHKV
  if initial_BHKV is None:
    initial_BHKV = varying.zero_state(x.g_BTHK, x.v_BTHV.shape[-1])
    if bounds is not None:
      initial_BHKV = jnp.repeat(initial_BHKV, bounds.shape[0] - 1, axis=0)

  def step(carry, token):
    state_BHKV, final_BHKV = carry
    q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, reset_B, sequence = token
    entry = 0.0 if bounds is None else initial_BHKV[sequence][None]
    state_BHKV = jnp.where(reset_B[:, None, None, None], entry, state_BHKV)
    state_BHKV = jnp.exp(g_BHK)[..., None] * state_BHKV
    error_BHV = v_BHV - jnp.sum(k_BHK[..., None] * state_BHKV, axis=-2)
    write_BHV = beta_BH[..., None] * error_BHV
    state_BHKV = state_BHKV + k_BHK[..., None] * write_BHV[..., None, :]
    o_BHV = jnp.sum(q_BHK[..., None] * state_BHKV, axis=-2)
    if bounds is not None:
      # Tokens past the last bound fall to the last sequence, which may be
      # empty and must then keep its initial state.
      holds = bounds[sequence] < bounds[sequence + 1]
      kept = jnp.where(holds, state_BHKV[0], final_BHKV[sequence])
      final_BHKV = final_BHKV.at[sequence].set(kept)
    return (state_BHKV, final_BHKV), o_BHV

  carry = (initial_BHKV[:batch], None if bounds is None else initial_BHKV)
  carry = varying.vary_over(carry, varying.varying_axes((carry, x)))
  tokens_first = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tuple(x))
  (last_BHKV, final_BHKV), o_TBHV = jax.lax.scan(
    step, carry, (*tokens_first, reset_BT.T, sequence_T)
  )
  o_BTHV = gate.select_valid(valid_BT, jnp.moveaxis(o_TBHV, 0, 1))
  final_BHKV = last_BHKV if bounds is None else final_BHKV
  return o_BTHV.astype(arrays.v_BTHV.dtype), final_BHKV
