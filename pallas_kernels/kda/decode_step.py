"""What KDA's decode kernel for TPU computes for one token of a block of heads.

K lies on sublanes and V on lanes, so decays, keys and queries, which arrive
with K on lanes, must be turned and then spread over all lanes. That is most of
the work, so it is shared between the two units that can do it. Nothing is
rounded below float32. Kimi Linear (arXiv 2510.26692) equation 1 for the
recurrence.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda import gate, operands

_LANES = 128
_HIGH_HALF = -(2**16)


def _split(x: jax.Array) -> list[jax.Array]:
  """Three float32 arrays that fit bfloat16 exactly and whose sum is x.

  Bits are cut, because a compiler may drop a rounding to bfloat16 and back.
  """
  parts = []
  for _ in range(2):
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _HIGH_HALF
    parts.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
    x = x - parts[-1]
  return [*parts, x]


def turn(
  token, A_log_H1: jax.Array, dt_bias_HK: jax.Array, config: operands.KdaConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Norms and gates of one token for the heads of one block, K on sublanes.

  Args:
    token: q, k [key_heads, K] and g [heads, K].
    A_log_H1: float32 [heads, 1].
    dt_bias_HK: float32 [heads, K].
    config: static settings.

  Returns:
    Columns [K, 3 * (heads + key_heads) + key_heads, rounded up to 8]: three
    parts of all decays and scaled queries, then keys; q^T k [key_heads, 1];
    and [heads, 1] that is NaN for a decay that is not finite, else 0.
  """
  q, k, g = (x.astype(jnp.float32) for x in token)
  if config.qk_l2norm:
    q, k = gate.normalize(q), gate.normalize(k)
  q = q * config.scale
  if config.gate_in_kernel:
    g, rate = g + dt_bias_HK, jnp.exp(A_log_H1)
    if config.lower_bound is None:
      g = rate * gate.log_decay(g, None, None, None)
    else:
      g = gate.log_decay(rate * g, None, None, config.lower_bound)
  a = jnp.exp(g)
  # The products that spread columns would carry what is not finite to the other
  # heads and requests of the block. Queries reach the output by q^T k as well.
  spread = jnp.concatenate([a, q], axis=0)
  spread = jnp.where(jnp.abs(spread) < jnp.inf, spread, 0.0)
  rows = jnp.concatenate([*_split(spread), k], axis=0)
  rows = jnp.pad(rows, ((0, -rows.shape[0] % 8), (0, 0)))
  qk, broken = q * k, 0.0 * a
  return rows.T, *(jnp.sum(x, axis=1, keepdims=True) for x in (qk, broken))


def advance(
  source_ref,
  target_refs,
  columns_KC: jax.Array,
  qk_H1: jax.Array,
  broken_H1: jax.Array,
  v_HV: jax.Array,
  beta_H1: jax.Array,
) -> jax.Array:
  """One token for every head of a block.

  Args:
    source_ref: states [heads, K, V].
    target_refs: where the new states go.
    columns_KC: decays, queries and keys, as of `turn`.
    qk_H1: q^T k [key_heads, 1].
    broken_H1: 0 or NaN [heads, 1], added to what is written.
    v_HV: float32 values [heads, V].
    beta_H1: float32 write strength [heads, 1].

  Returns:
    Outputs [heads, V], float32.
  """
  heads, num_values = v_HV.shape
  key_heads = qk_H1.shape[0]
  count = heads + key_heads
  parts_KC = columns_KC[:, : 3 * count].astype(jnp.bfloat16)
  shape = (3 * count, 2 * _LANES)
  column = jax.lax.broadcasted_iota(jnp.int32, shape, 0) % count
  lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)

  def fit(x):
    """As many lanes as values, of a matrix whose columns are all equal."""
    repeats = pl.cdiv(num_values, _LANES)
    return jnp.concatenate([x] * repeats, axis=1)[:, :num_values]

  v_HV = v_HV + broken_H1
  outputs = []
  for h in range(heads):
    i = h * key_heads // heads
    # The product with ones spreads a column without loss: the three parts of a
    # number add up to it in float32. Cross-lane instructions spread the keys.
    wanted = jnp.where(lane < _LANES, h, heads + i)
    spread = jnp.dot(
      parts_KC,
      (column == wanted).astype(jnp.bfloat16),
      precision=jax.lax.Precision.DEFAULT,
      preferred_element_type=jnp.float32,
    )
    a_KV, q_KV = fit(spread[:, :_LANES]), fit(spread[:, _LANES:])
    k_K1 = columns_KC[:, 3 * count + i : 3 * count + i + 1]
    state_KV = a_KV * source_ref[h].astype(jnp.float32)
    seen_V = jnp.sum(k_K1 * state_KV, axis=0, keepdims=True)
    write_V = beta_H1[h : h + 1] * (v_HV[h : h + 1] - seen_V)
    # The output is read from the state before the write, so that it does not
    # wait for it: q^T (S + k w^T) = q^T S + (q^T k) w^T.
    read_V = jnp.sum(q_KV * state_KV, axis=0, keepdims=True)
    outputs.append(read_V + qk_H1[i : i + 1] * write_V)
    state_KV = state_KV + k_K1 * write_V
    for ref in target_refs:
      ref[h] = state_KV.astype(ref.dtype)
  return jnp.concatenate(outputs, axis=0)
