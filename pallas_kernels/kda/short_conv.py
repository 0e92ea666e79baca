"""Causal depthwise convolution over a few tokens, with SiLU, in plain jnp.

It precedes q, k and v of Kimi Delta Attention (Kimi Linear, arXiv 2510.26692,
section 3) and never reaches across a document's first token.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kda import gate, operands, segments


def short_conv(
  x_BTHD: jax.Array,
  taps_CHD: jax.Array,
  valid_BT: jax.Array | None = None,
  document_BT: jax.Array | None = None,
) -> jax.Array:
  """`silu(sum_j taps[j] * x[t - j])` over real tokens of the same document.

  Args:
    x_BTHD: inputs; padding may hold any values and takes gradient 0.
    taps_CHD: float32 taps, `taps_CHD[0]` for the token itself.
    valid_BT: bool, False for padding, or None.
    document_BT: int32 document of each token, or None for one a row.

  Returns:
    [B, T, H, D] in `x_BTHD.dtype`; products and sum are float32.
  """
  x_BTHD = gate.select_valid(valid_BT, x_BTHD)
  tokens = x_BTHD.shape[1]
  most = min(taps_CHD.shape[0], tokens) - 1
  # Inputs are padded, not products: the products then fuse into one pass.
  padded = jnp.pad(x_BTHD, ((0, 0), (most, 0), (0, 0), (0, 0)))
  total = x_BTHD.astype(jnp.float32) * taps_CHD[0][None, None]
  for lag in range(1, most + 1):
    past = padded[:, most - lag : most - lag + tokens].astype(jnp.float32)
    if document_BT is not None:
      same = document_BT[:, lag:] == document_BT[:, :-lag]
      same = jnp.pad(same, ((0, 0), (lag, 0)))
      past = gate.select_valid(same, past)
    total = total + past * taps_CHD[lag][None, None]
  return jax.nn.silu(total).astype(x_BTHD.dtype)


def convolve(
  arrays: operands.Operands,
  packing: operands.Packing,
  *,
  merge_heads: bool = False,
) -> operands.Operands:
  """Applies the taps of a call, if there are any.

  Args:
    arrays: arrays of the caller.
    packing: documents and padding, or sequences, of the caller.
    merge_heads: whether to convolve heads and channels as one axis, which keeps
      XLA for TPU from moving arrays when such an axis is needed afterwards.

  Returns:
    The arrays with q, k and v convolved, without taps.
  """
  taps = arrays.conv
  if taps is None:
    return arrays
  valid_BT, document_BT, bounds = packing
  if bounds is not None:
    index_T = jnp.arange(arrays.v_BTHV.shape[1], dtype=jnp.int32)
    valid_BT = ((index_T >= bounds[0]) & (index_T < bounds[-1]))[None]
    document_BT = segments.sequence_of_token(bounds, index_T)[None]

  def apply(x_BTHD, taps_CHD):
    if not merge_heads:
      return short_conv(x_BTHD, taps_CHD, valid_BT, document_BT)
    x = x_BTHD.reshape(*x_BTHD.shape[:2], 1, -1)
    flat_taps = taps_CHD.reshape(taps_CHD.shape[0], 1, -1)
    x = short_conv(x, flat_taps, valid_BT, document_BT)
    return x.reshape(x_BTHD.shape)

  return arrays._replace(
    q_BTHK=apply(arrays.q_BTHK, taps.q_CHK),
    k_BTHK=apply(arrays.k_BTHK, taps.k_CHK),
    v_BTHV=apply(arrays.v_BTHV, taps.v_CHV),
    conv=None,
  )
