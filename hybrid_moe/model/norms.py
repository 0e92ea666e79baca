"""RMSNorm."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hybrid_moe.model import parameters


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
  """`scale * x / sqrt(mean(x^2) + eps)` over the last dimension.

  The mean and the division are float32; the quotient is cast to `x.dtype`
  before the scale is applied, and the result is `x.dtype`.
  """
  x_f32 = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
  normed = (x_f32 * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
  return normed * jnp.broadcast_to(scale_D.astype(x.dtype), x.shape)


class RmsNorm(nn.Module):
  """RMSNorm with a learned scale, 1 at first.

  Attributes:
    eps: added to the mean square.
  """

  eps: float

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Norms the last dimension of an array [..., D]; keeps its dtype."""
    scale_D = parameters.vector(
      self, 'scale', x.shape[-1:], nn.initializers.ones
    )
    return rms_norm(x, scale_D, self.eps)
