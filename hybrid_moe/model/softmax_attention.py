"""Causal softmax attention inside documents, in plain JAX.

Queries are taken in blocks, each rematerialised in the backward pass, so that
memory grows with T and not with T^2. The output stays float32: rounding it to
bfloat16 before the gate is a biased error (Kimi K3 report, arXiv 2607.24653,
section 2.1.2).
"""

import jax
import jax.numpy as jnp

# Name under which mixers save their result for rematerialisation policies.
MIXED_TOKENS = 'mixed_tokens'

# Largest number of queries whose scores exist at once.
QUERY_BLOCK = 256

# Score of a masked pair: far below any real score, finite so that a gradient
# never multiplies infinity by zero.
_MASKED = -1e30


def softmax_attention(
  q_BTHK: jax.Array,
  k_BTHK: jax.Array,
  v_BTHV: jax.Array,
  segment_ids_BT: jax.Array,
  scale: float,
  window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of each token to itself and earlier tokens of its document.

  Args:
    q_BTHK: queries.
    k_BTHK: keys.
    v_BTHV: values; V may differ from K.
    segment_ids_BT: int32 documents; 0 is padding.
    scale: factor on the scores.
    window: tokens that a query sees, itself included; None is all.

  Returns:
    Attention output [B, T, H, V] float32, and the largest score of each head
    for each row, over real tokens, [B, H] float32 without gradient (-1e30
    where a row is all padding).
  """
  B, T = segment_ids_BT.shape
  block = min(QUERY_BLOCK, T)
  num_blocks = -(-T // block)
  pad = num_blocks * block - T
  q_BTHK = jnp.pad(q_BTHK, ((0, 0), (0, pad), (0, 0), (0, 0)))
  query_ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, pad)))
  # Every block adds to the gradients of keys and values: in float32.
  k_dtype, v_dtype = k_BTHK.dtype, v_BTHV.dtype
  k_BTHK, v_BTHV = k_BTHK.astype(jnp.float32), v_BTHV.astype(jnp.float32)
  # A window's queries see `window - 1` keys before their block; without one,
  # every block sees all keys.
  before = 0 if window is None else window - 1
  span = T if window is None else block + before
  if window is not None:
    reach = ((0, 0), (before, pad), (0, 0), (0, 0))
    k_BTHK, v_BTHV = jnp.pad(k_BTHK, reach), jnp.pad(v_BTHV, reach)
  key_ids_BT = jnp.pad(
    segment_ids_BT,
    ((0, 0), (before, 0 if window is None else pad)),
    constant_values=-1,
  )

  @jax.checkpoint
  def attend(index):
    start = index * block
    first_key = 0 if window is None else start
    q, ids = (
      jax.lax.dynamic_slice_in_dim(x, start, block, axis=1)
      for x in (q_BTHK, query_ids_BT)
    )
    k, v, key_ids = (
      jax.lax.dynamic_slice_in_dim(x, first_key, span, axis=1)
      for x in (k_BTHK, v_BTHV, key_ids_BT)
    )
    k, v = k.astype(k_dtype), v.astype(v_dtype)
    scores = scale * jnp.einsum(
      'bthk,buhk->bhtu', q, k, preferred_element_type=jnp.float32
    )
    rows = (start + jnp.arange(block))[:, None]
    columns = (first_key - before + jnp.arange(span))[None, :]
    near = columns <= rows
    if window is not None:
      near &= columns > rows - window
    same = ids[:, :, None] == key_ids[:, None, :]
    seen = (same & near[None])[:, None]
    scores = jnp.where(seen, scores, _MASKED)
    real = (ids > 0)[:, None, :, None]
    top = jnp.max(jnp.where(real, scores, _MASKED), axis=(2, 3))
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum(
      'bhtu,buhv->bthv',
      weights.astype(v.dtype),
      v,
      preferred_element_type=jnp.float32,
    )
    return out, jax.lax.stop_gradient(top)

  if num_blocks == 1:
    out, top_BH = attend(0)
    return out[:, :T], top_BH
  outs, tops = jax.lax.map(attend, jnp.arange(num_blocks))
  out = jnp.moveaxis(outs, 0, 1).reshape(
    B, num_blocks * block, *v_BTHV.shape[2:]
  )
  return out[:, :T], jnp.max(tops, axis=0)
