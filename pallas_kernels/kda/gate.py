"""Activations in front of the recurrence, shared by all implementations.

Kimi Linear (arXiv 2510.26692) section 4 for the L2-normalised keys and the
softplus gate; the Kimi K3 report (arXiv 2607.24653) section 2.1.1 for the
bounded gate.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import operands

L2_EPSILON = 1e-6
_LOG2_E = math.log2(math.e)


class Activated(NamedTuple):
  """Float32 arrays that enter the recurrence.

  Attributes:
    q_BTHK: scaled queries [B, T, HV, K].
    k_BTHK: keys [B, T, HV, K].
    v_BTHV: values [B, T, HV, V].
    g_BTHK: log decay [B, T, HV, K], at most 0.
    beta_BTH: write strength [B, T, HV].
  """

  q_BTHK: jax.Array
  k_BTHK: jax.Array
  v_BTHV: jax.Array
  g_BTHK: jax.Array
  beta_BTH: jax.Array


@jax.custom_jvp
def sigmoid(x: jax.Array) -> jax.Array:
  """Logistic function whose derivative stays accurate at both ends.

  The derivative is sigmoid(x) * sigmoid(-x). The textbook form
  s * (1 - s) rounds to 0 from x = 17 on in float32.
  """
  return jax.nn.sigmoid(x)


@sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  y = sigmoid(x)
  return y, dx * y * sigmoid(-x)


def normalize(x: jax.Array) -> jax.Array:
  """L2 norm over the last axis: x / sqrt(sum(x^2) + 1e-6)."""
  square = jnp.sum(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(square + L2_EPSILON)


def log_decay(
  g_BTHK: jax.Array,
  A_log_H: jax.Array | None,
  dt_bias_HK: jax.Array | None,
  lower_bound: float | None,
) -> jax.Array:
  """Log decay per token and channel from the raw gate logits.

  Args:
    g_BTHK: float32 logits [B, T, HV, K].
    A_log_H: float32 [HV], log of the multiplier, or None for 1.
    dt_bias_HK: float32 [HV, K], or None for 0.
    lower_bound: the gate is lower_bound * sigmoid(exp(A_log) * (g + dt_bias)),
      or -exp(A_log) * softplus(g + dt_bias) when None.

  Returns:
    float32 [B, T, HV, K], nats, at most 0.
  """
  if dt_bias_HK is not None:
    g_BTHK = g_BTHK + dt_bias_HK[None, None]
  rate = 1.0 if A_log_H is None else jnp.exp(A_log_H)[None, None, :, None]
  if lower_bound is None:
    return -rate * jax.nn.softplus(g_BTHK)
  return lower_bound * sigmoid(rate * g_BTHK)


def exponent_terms(
  rate: jax.Array, bias: jax.Array, lower_bound: float
) -> tuple[jax.Array, jax.Array]:
  """Factor and shift by which kernels make decay of gate logits.

  With bits = -lower_bound * log2(e), the decay of a logit x in bits is
  1 / (exp2(x * factor + shift) + 1 / bits).

  Args:
    rate: float32, the gate's multiplier.
    bias: float32, added to the logits.
    lower_bound: of the gate, in nats.
  """
  factor = -_LOG2_E * rate
  return factor, factor * bias - math.log2(-lower_bound * _LOG2_E)


def write_strength(
  beta_BTH: jax.Array, config: operands.KdaConfig
) -> jax.Array:
  """Write strength in float32 from its logits (or as given)."""
  beta_BTH = beta_BTH.astype(jnp.float32)
  if not config.beta_sigmoid:
    return beta_BTH
  return sigmoid(beta_BTH) * (2.0 if config.allow_neg_eigval else 1.0)


def select_valid(valid_BT: jax.Array | None, x: jax.Array) -> jax.Array:
  """Zeroes padding by a select, so that NaN or Inf in it has no effect.

  Args:
    valid_BT: bool, False for padding, or None.
    x: any array whose first two axes are [B, T].
  """
  if valid_BT is None:
    return x
  valid = jax.lax.expand_dims(valid_BT, range(2, x.ndim))
  return jnp.where(valid, x, jnp.zeros((), x.dtype))


def repeat_heads(x_BTHK: jax.Array, num_heads: int) -> jax.Array:
  """Repeats each q/k head for the value heads that read it."""
  groups = num_heads // x_BTHK.shape[2]
  return x_BTHK if groups == 1 else jnp.repeat(x_BTHK, groups, axis=2)


def activate_qkg(
  q_BTHK: jax.Array,
  k_BTHK: jax.Array,
  g_BTHK: jax.Array,
  A_log_H: jax.Array | None,
  dt_bias_HK: jax.Array | None,
  valid_BT: jax.Array | None,
  config: operands.KdaConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Norm, scale and gate; padding becomes q = k = log decay = 0.

  Returns:
    q, k and log decay, float32 [B, T, HV, K].
  """
  f32 = jnp.float32
  q = select_valid(valid_BT, q_BTHK).astype(f32)
  k = select_valid(valid_BT, k_BTHK).astype(f32)
  g = select_valid(valid_BT, g_BTHK).astype(f32)
  if config.qk_l2norm:
    q, k = normalize(q), normalize(k)
  if config.gate_in_kernel:
    g = log_decay(g, A_log_H, dt_bias_HK, config.lower_bound)
    g = select_valid(valid_BT, g)
  heads = g.shape[2]
  q, k = repeat_heads(q * config.scale, heads), repeat_heads(k, heads)
  return q, k, g


def activate(
  arrays: operands.Operands,
  valid_BT: jax.Array | None,
  config: operands.KdaConfig,
) -> Activated:
  """Everything that the recurrence reads, from the caller's arrays."""
  q, k, g = activate_qkg(
    arrays.q_BTHK,
    arrays.k_BTHK,
    arrays.g_BTHK,
    arrays.A_log_H,
    arrays.dt_bias_HK,
    valid_BT,
    config,
  )
  v = select_valid(valid_BT, arrays.v_BTHV).astype(jnp.float32)
  beta = write_strength(select_valid(valid_BT, arrays.beta_BTH), config)
  return Activated(q, k, v, g, select_valid(valid_BT, beta))
