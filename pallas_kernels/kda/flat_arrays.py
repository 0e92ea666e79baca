"""The arrays of a call as kernels take them: heads and channels in one axis."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import operands


def pad_channels(
  arrays: operands.Operands, keys: int, values: int
) -> operands.Operands:
  """Pads channels to multiples.

  Heads lie side by side along channels, and a head that began inside of a
  register or of a copy would have to be moved there in every step. Keys, values
  and states of added channels are 0 and stay so, whatever their decay.

  Args:
    arrays: arrays of the caller.
    keys: what the channels of keys become a multiple of.
    values: the same for values.
  """

  def pad(x, *multiples):
    if x is None:
      return None
    kept = x.ndim - len(multiples)
    extra = [-n % m for n, m in zip(x.shape[kept:], multiples)]
    widths = [(0, 0)] * kept + [(0, more) for more in extra]
    return jnp.pad(x, widths) if any(extra) else x

  conv = arrays.conv
  if conv is not None:
    conv = operands.ConvTaps(
      pad(conv.q_CHK, keys), pad(conv.k_CHK, keys), pad(conv.v_CHV, values)
    )
  return arrays._replace(
    q_BTHK=pad(arrays.q_BTHK, keys),
    k_BTHK=pad(arrays.k_BTHK, keys),
    v_BTHV=pad(arrays.v_BTHV, values),
    g_BTHK=pad(arrays.g_BTHK, keys),
    dt_bias_HK=pad(arrays.dt_bias_HK, keys),
    h0_BHKV=pad(arrays.h0_BHKV, keys, values),
    conv=conv,
  )


class FlatArrays(NamedTuple):
  """The arrays of a call with heads and channels in one axis.

  Attributes:
    q: [B, T, H * K].
    k: [B, T, H * K].
    v: [B, T, HV * V].
    g: [B, T, HV * K].
    beta: [B, T, HV].
    rate: float32 [1, HV * K], the gate's multiplier.
    bias: float32 [1, HV * K].
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  g: jax.Array
  beta: jax.Array
  rate: jax.Array
  bias: jax.Array


def flatten(arrays: operands.Operands) -> FlatArrays:
  """The arrays as the kernels take them."""

  def flat(x):
    return x.reshape(*x.shape[:2], -1)

  value_heads, num_keys = arrays.g_BTHK.shape[2:]
  ones = jnp.ones((value_heads, num_keys), jnp.float32)
  A_log, bias = arrays.A_log_H, arrays.dt_bias_HK
  rate = ones if A_log is None else ones * jnp.exp(A_log)[:, None]
  bias = jnp.zeros_like(ones) if bias is None else bias
  return FlatArrays(
    flat(arrays.q_BTHK),
    flat(arrays.k_BTHK),
    flat(arrays.v_BTHV),
    flat(arrays.g_BTHK),
    arrays.beta_BTH,
    rate.reshape(1, -1),
    bias.reshape(1, -1),
  )


def flatten_taps(
  arrays: operands.Operands,
) -> tuple[jax.Array, jax.Array, jax.Array] | None:
  """Taps [taps, H * K], [taps, H * K] and [taps, HV * V], or None."""
  if arrays.conv is None:
    return None
  return tuple(taps.reshape(taps.shape[0], -1) for taps in arrays.conv)
