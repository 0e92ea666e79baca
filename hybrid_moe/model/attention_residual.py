"""Block attention residuals: each site mixes the outputs of earlier blocks.

Attention Residuals (arXiv 2603.15031), section 3; Kimi K3 report (arXiv
2607.24653), section 2.2. There is no residual stream: a block sums its own
sub-layers, and every sub-layer reads a softmax mixture of the finished blocks
and the running sum of its own.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from hybrid_moe.model import parameters


def mix_blocks(
  sources: Sequence[jax.Array],
  query_D: jax.Array,
  scale_D: jax.Array,
  eps: float,
  valid_S: jax.Array | None = None,
) -> jax.Array:
  """Softmax mixture of the sources, one weight per token and source.

  The score of source v is `query . (scale * v / rms(v))`; the mixture is of
  the unnormalised sources. Scores, softmax and sum are float32.

  Args:
    sources: S arrays [B, T, D].
    query_D: pseudo-query of the site.
    scale_D: scale of the key norm.
    eps: constant in the key norm.
    valid_S: which sources exist; all of them when None.

  Returns:
    [B, T, D] in the sources' dtype.
  """
  if len(sources) == 1 and valid_S is None:
    return sources[0]
  key_D = (query_D * scale_D)[None, None]
  scores = []
  for source in sources:
    v = source.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(v), axis=-1)
    scores.append(jnp.sum(v * key_D, -1) * jax.lax.rsqrt(mean_square + eps))
  score_SBT = jnp.stack(scores)
  if valid_S is not None:
    score_SBT = jnp.where(valid_S[:, None, None], score_SBT, -jnp.inf)
  weight_SBT = jax.nn.softmax(score_SBT, axis=0)
  mixed = jnp.zeros(sources[0].shape, jnp.float32)
  for weight_BT, source in zip(weight_SBT, sources):
    mixed = mixed + weight_BT[..., None] * source.astype(jnp.float32)
  return mixed.astype(sources[0].dtype)


class MixBlocks(nn.Module):
  """Parameters of one site: a zero query, so that it starts as a mean.

  Attributes:
    eps: constant in the key norm.
  """

  eps: float

  @nn.compact
  def __call__(
    self, sources: Sequence[jax.Array], valid_S: jax.Array | None = None
  ) -> jax.Array:
    """Mixes S sources [B, T, D]; see `mix_blocks`.

    Args:
      sources: outputs of finished blocks and the running sum, of one dtype.
      valid_S: bool, which of them exist; all of them when None.

    Returns:
      [B, T, D] in the dtype of the sources.
    """
    width = sources[0].shape[-1:]
    query_D = parameters.vector(self, 'query', width, nn.initializers.zeros)
    scale_D = parameters.vector(self, 'scale', width, nn.initializers.ones)
    # Without this the float32 copies of all sources would be kept for the
    # backward pass of every site (Kimi K3 report, section 5.2.2).
    mix = jax.checkpoint(mix_blocks, static_argnums=(3,))
    return mix(tuple(sources), query_D, scale_D, self.eps, valid_S)
