"""Sliding-window softmax attention: precise recall of the last few tokens.

A choice beside Kimi Delta Attention and latent attention, for mixtures in
which a recurrent layer's compression of near tokens should be made good.
"""

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from hybrid_moe.model import parameters
from hybrid_moe.model.linear import merge_heads, project_heads
from hybrid_moe.model.softmax_attention import (
  MIXED_TOKENS,
  softmax_attention,
)
from hybrid_moe.model_config import ModelConfig
from hybrid_moe.parallel.batch_shards import map_batch_shards


class LocalAttention(nn.Module):
  """Multi-head attention to the `window` latest tokens of the document.

  Attributes:
    config: sizes; `config.local` holds those of this layer.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Mixes near tokens of each document.

    Args:
      x_BTD: normed inputs, in the compute dtype.
      segment_ids_BT: int32 documents; 0 is padding.

    Returns:
      [B, T, D] in the dtype of `x_BTD`.
    """
    c, a = self.config, self.config.local
    shape = (c.d_model, a.num_heads, a.head_dim)

    def heads(name):
      w_DHK = parameters.matrix(self, name, 'DHK', shape, c.init_std)
      return project_heads(x_BTD, w_DHK)

    def attend(batched, _):
      return softmax_attention(
        *batched, scale=a.head_dim**-0.5, window=a.window
      )[0]

    out_BTHV = map_batch_shards(
      attend,
      (heads('q_proj'), heads('k_proj'), heads('v_proj'), segment_ids_BT),
      (),
    )
    out_BTHV = checkpoint_name(out_BTHV, MIXED_TOKENS)
    o_proj_HVD = parameters.matrix(
      self, 'o_proj', 'HVD', (*shape[1:], c.d_model), c.init_std
    )
    return merge_heads(out_BTHV.astype(x_BTD.dtype), o_proj_HVD)
