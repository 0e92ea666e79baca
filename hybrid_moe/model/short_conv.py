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
  x_f32 = x_BTD.astype(jnp.float32)
  total = x_f32 * w_CD[0][None, None]
  for lag in range(1, min(w_CD.shape[0], x_BTD.shape[1])):
    same = segment_ids_BT[:, lag:] == segment_ids_BT[:, :-lag]
    past = jnp.where(same[..., None], x_f32[:, :-lag], 0.0)
    past = past * w_CD[lag][None, None]
    total = total + jnp.pad(past, ((0, 0), (lag, 0), (0, 0)))
  return jax.nn.silu(total).astype(x_BTD.dtype)
