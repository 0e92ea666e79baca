"""Causal depthwise convolution over a few tokens, with SiLU.

It precedes q, k and v of Kimi Delta Attention (Kimi Linear, arXiv 2510.26692)
and never reaches across a document's first token.
"""

import jax
import jax.numpy as jnp


def short_conv(
  x_BTD: jax.Array, w_CD: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
  """`silu(sum_j w[j] * x[t - j])`, the sum over tokens of the same document.

  Args:
    x_BTD: inputs.
    w_CD: taps, `w_CD[0]` for the token itself; float32.
    segment_ids_BT: int32 document of each token.

  Returns:
    [B, T, D] in `x_BTD.dtype`; products and sum are float32.
  """
  tokens = x_BTD.shape[1]
  most = min(w_CD.shape[0], tokens) - 1
  # Inputs are padded, not products: the products then fuse into one pass.
  padded = jnp.pad(x_BTD, ((0, 0), (most, 0), (0, 0)))
  total = x_BTD.astype(jnp.float32) * w_CD[0][None, None]
  for lag in range(1, most + 1):
    same = segment_ids_BT[:, lag:] == segment_ids_BT[:, :-lag]
    same = jnp.pad(same, ((0, 0), (lag, 0)))
    past = padded[:, most - lag : most - lag + tokens].astype(jnp.float32)
    past = jnp.where(same[..., None], past, 0.0)
    total = total + past * w_CD[lag][None, None]
  return jax.nn.silu(total).astype(x_BTD.dtype)
