"""KDA in chunks with unified tiles, in plain jax.numpy: backward.

Blocks are taken in reverse. Each is recomputed from the inputs and the entry
states, a scan carries the gradient of the state from its last chunk to its
first, and all that does not need that gradient in sequence is computed for the
block at once. With E = V - K~ S the error that a write corrects and dR the
gradient of beta E: dR = T^T (qk^T dO + K^ dS'), dkk = -strict(beta dR Vn^T), so
no gradient passes through the inverse, and the gradient of log(beta) is
dR . Vn, so none is divided by beta.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kda import (
  chunk_operands,
  chunked_xla,
  gate,
  operands,
  pairwise_scores,
  products,
  segments,
  tile_scores,
  varying,
)


def beta_gradient(block, log_grad, direct_grad, config):
  """Gradient of beta as the caller gave it, [B, t, HV].

  Args:
    block: the block's arrays.
    log_grad: gradient of log(write strength) [B, t, HV].
    direct_grad: gradient of the write strength, used without a sigmoid.
    config: static settings.
  """
  logits = gate.select_valid(block.valid, block.beta).astype(jnp.float32)
  if config.kda.beta_sigmoid:
    grad = log_grad * gate.sigmoid(-logits)
  else:
    grad = direct_grad
  return gate.select_valid(block.valid, grad).astype(block.beta.dtype)


def kda_backward(
  config: chunked_xla.ChunkedConfig,
  arrays: operands.Operands,
  plan: segments.ChunkPlan,
  states: jax.Array,
  d_o: jax.Array,
  d_final: jax.Array,
) -> operands.Operands:
  """Gradients of every differentiable array of `chunked_xla.kda_forward`.

  Args:
    config: static settings.
    arrays: as in the forward.
    plan: as in the forward.
    states: entry states from the forward [blocks, N, B, HV, K, V].
    d_o: gradient of the outputs [B, T, HV, V].
    d_final: gradient of the final states, float32.

  Returns:
    Gradients in the shapes and dtypes of the arrays; None where the array is.
  """
  dtypes = products.choose_dtypes(config.kda.precision, arrays.v_BTHV.dtype)
  per_sequence = plan.sequence_N is not None
  bounded = config.kda.lower_bound is not None

  def chunk_step(carry, chunk):
    d_state, d_initial = carry
    ops, inverse, beta, d_values, d_read, sequence, first, last = chunk
    if per_sequence:
      d_state = jnp.where(last, d_final[sequence][None], d_state)
    d_exit = d_state
    d_new_v = d_values + products.dot(
      '...kc,...kv->...cv', ops.k_exit, d_exit, dtypes.state
    )
    d_write = products.dot('...dc,...dv->...cv', inverse, d_new_v, dtypes.solve)
    d_state = ops.decay[..., None] * d_exit + d_read
    d_state -= products.dot(
      '...ck,...cv->...kv', ops.k_entry, beta * d_write, dtypes.state
    )
    if per_sequence:
      entered = jnp.where(first, d_state[0], d_initial[sequence])
      d_initial = d_initial.at[sequence].set(entered)
    return (d_state, d_initial), (d_exit, d_write)

  def block_step(carry, xs):
    block, entry_states, d_o, last = xs
    d_state, d_initial, d_A_log, d_dt_bias = carry
    (q, k, g), pull_activations = jax.vjp(
      lambda *args: chunked_xla.block_activations(*args, block.valid, config),
      block.q,
      block.k,
      block.g,
      arrays.A_log_H,
      arrays.dt_bias_HK,
    )
    v, beta = chunked_xla.block_values(block, config)
    masks = chunked_xla.block_masks(block, config)
    size = config.tiles.tile
    if bounded:
      ops, factors = tile_scores.tile_operands(q, k, g, size, dtypes.scores)
    else:
      ops, pull_operands = jax.vjp(
        lambda *args: pairwise_scores.pairwise_operands(*args, size), q, k, g
      )
    ops = chunk_operands.select(ops, masks)
    inverse = chunked_xla.invert_scores(ops.kk, beta, config, dtypes)
    error = v - products.dot(
      '...ck,...kv->...cv', ops.k_entry, entry_states, dtypes.state
    )
    new_v = products.dot(
      '...cd,...dv->...cv', inverse, beta * error, dtypes.solve
    )
    d_o = gate.select_valid(block.valid, d_o).astype(jnp.float32)
    d_o = chunked_xla.to_chunks(d_o, config.chunks)
    d_values = products.dot('...dc,...dv->...cv', ops.qk, d_o, dtypes.output)
    d_read = products.dot('...ck,...cv->...kv', ops.q_entry, d_o, dtypes.state)
    (d_state, d_initial), (d_exit, d_write) = jax.lax.scan(
      chunk_step,
      (d_state, d_initial),
      (
        # The scan's products run fastest on CPU with the summed axis first.
        ops._replace(k_exit=jnp.swapaxes(ops.k_exit, -1, -2)),
        inverse,
        beta,
        d_values,
        d_read,
        block.sequence,
        block.first,
        last,
      ),
      reverse=True,
    )

    d_v = beta * d_write
    rows = jnp.concatenate([d_o, -d_v], axis=-2)
    chunk = config.tiles.chunk
    d_scores = products.dot('...cv,...dv->...cd', rows, new_v, dtypes.output)
    d_entry = products.dot(
      '...cv,...kv->...ck', rows, entry_states, dtypes.state
    )
    d_decay = jnp.sum(entry_states.astype(jnp.float32) * d_exit, axis=-1)
    grads = chunk_operands.select(
      chunk_operands.ChunkOperands(
        kk=d_scores[..., chunk:, :],
        qk=d_scores[..., :chunk, :],
        q_entry=d_entry[..., :chunk, :],
        k_entry=d_entry[..., chunk:, :],
        k_exit=products.dot('...cv,...kv->...ck', new_v, d_exit, dtypes.state),
        decay=d_decay,
      ),
      masks,
    )
    if bounded:
      d_q, d_k, d_g = tile_scores.tile_operands_bwd(
        q,
        k,
        factors,
        ops,
        grads._replace(decay=grads.decay * ops.decay),
        jnp.sum(d_o * new_v, axis=-1),
        None if masks is None else masks.pair,
        dtypes.score_grads,
      )
    else:
      d_q, d_k, d_g = pull_operands(grads)
    d_q, d_k, d_g, d_A_log_part, d_dt_bias_part = pull_activations(
      (d_q, d_k, d_g)
    )
    d_beta = jnp.sum(d_write * new_v, axis=-1, keepdims=True)
    d_beta_direct = None
    if not config.kda.beta_sigmoid:
      corrected = error - products.dot(
        '...cd,...dv->...cv', ops.kk, new_v, jnp.float32
      )
      d_beta_direct = jnp.sum(d_write * corrected, axis=-1, keepdims=True)
      d_beta_direct = chunked_xla.from_chunks(d_beta_direct)[..., 0]
    d_beta = chunked_xla.from_chunks(d_beta)[..., 0]
    d_beta = beta_gradient(block, d_beta, d_beta_direct, config)
    d_v = gate.select_valid(block.valid, chunked_xla.from_chunks(d_v))
    carry = (
      d_state,
      d_initial,
      None if d_A_log is None else d_A_log + d_A_log_part,
      None if d_dt_bias is None else d_dt_bias + d_dt_bias_part,
    )
    return carry, (d_q, d_k, d_v.astype(block.v.dtype), d_g, d_beta)

  blocks = chunked_xla.make_blocks(arrays, plan, config)
  last = None
  if per_sequence:
    last = jnp.concatenate([plan.first_N[1:], jnp.ones((1,), bool)])
    last = chunked_xla.split_blocks(last, config.blocks, axis=0)
  d_o = chunked_xla.split_blocks(d_o, config.blocks)
  zeros = jnp.zeros_like
  carry = (
    zeros(d_final[:1]) if per_sequence else d_final,
    zeros(d_final) if per_sequence else None,
    None if arrays.A_log_H is None else zeros(arrays.A_log_H),
    None if arrays.dt_bias_HK is None else zeros(arrays.dt_bias_HK),
  )
  axes = varying.varying_axes((arrays, plan, d_o, d_final))
  (d_state, d_initial, d_A_log, d_dt_bias), d_blocks = jax.lax.scan(
    block_step,
    varying.vary_over(carry, axes),
    (blocks, states, d_o, last),
    reverse=True,
  )
  d_q, d_k, d_v, d_g, d_beta = (chunked_xla.join_blocks(x) for x in d_blocks)
  d_h0 = d_initial if per_sequence else d_state
  return operands.Operands(
    q_BTHK=d_q,
    k_BTHK=d_k,
    v_BTHV=d_v,
    g_BTHK=d_g,
    beta_BTH=d_beta,
    A_log_H=d_A_log,
    dt_bias_HK=d_dt_bias,
    h0_BHKV=None if arrays.h0_BHKV is None else d_h0,
  )
