"""Multi-token prediction: one more layer that predicts the token after next.

DeepSeek-V3 (arXiv 2412.19437), section 2.2; the layer has the form that
Kimi K3's public inference code loads: normed hidden state and normed
embedding of the next token, concatenated, projected, and one latent-attention
layer with a plain residual stream. Embeddings are shared with the decoder.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hybrid_moe.balance.state import RouterView
from hybrid_moe.model import norms, parameters
from hybrid_moe.model.block import LayerKind, LayerOutput, remat_layer
from hybrid_moe.model.linear import linear
from hybrid_moe.model_config import BalanceConfig, ModelConfig


class MtpLayer(nn.Module):
  """Hidden states of t and the embedding of t + 1 to those for t + 2.

  Attributes:
    config: sizes.
    balance: what the router observes.
    remat: one of `config.REMAT_POLICIES`.
  """

  config: ModelConfig
  balance: BalanceConfig
  remat: str

  @nn.compact
  def __call__(
    self,
    hidden_BTD: jax.Array,
    next_BTD: jax.Array,
    segment_ids_BT: jax.Array,
    view: RouterView,
  ) -> LayerOutput:
    """Runs the layer.

    Args:
      hidden_BTD: the decoder's outputs before the final norm.
      next_BTD: embeddings of the next tokens, in the same dtype.
      segment_ids_BT: int32 documents; 0 is padding.
      view: the router's bias and bins.

    Returns:
      The layer's output with a normed hidden state.
    """
    c = self.config
    joined_BTX = jnp.concatenate(
      [
        norms.RmsNorm(c.norm_eps, name='embedding_norm')(next_BTD),
        norms.RmsNorm(c.norm_eps, name='hidden_norm')(hidden_BTD),
      ],
      axis=-1,
    )
    projection_XD = parameters.matrix(
      self,
      'mtp_proj',
      'XD',
      (2 * c.d_model, c.d_model),
      c.init_std,
    )
    layer = remat_layer(self.remat)(
      c, self.balance, LayerKind('mla', True), False, name='layer'
    )
    out = layer(
      linear(joined_BTX, projection_XD), (), None, segment_ids_BT, view
    )
    normed = norms.RmsNorm(c.norm_eps, name='final_norm')(out.x_BTD)
    return out._replace(x_BTD=normed)
