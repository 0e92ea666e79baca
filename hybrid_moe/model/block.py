"""Layers and blocks of layers.

A layer is a token mixer and a feed-forward network, each behind an RMSNorm.
With attention residuals, a block of layers sums its own sub-layers and every
sub-layer reads a mixture of earlier blocks and that sum; without, a block
passes an ordinary residual stream through.
"""

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hybrid_moe.balance.state import RouterStats, RouterView
from hybrid_moe.model import norms
from hybrid_moe.model.attention_residual import MixBlocks
from hybrid_moe.model.gated_mla import GatedMla
from hybrid_moe.model.kda_layer import KdaLayer
from hybrid_moe.model.latent_moe import LatentMoe
from hybrid_moe.model.local_attention import LocalAttention
from hybrid_moe.model.situ_glu import SituGlu
from hybrid_moe.model.softmax_attention import MIXED_TOKENS
from hybrid_moe.model_config import BalanceConfig, ModelConfig
from pallas_kernels.kda import ENTRY_STATES


class LayerKind(NamedTuple):
  """What a layer is made of.

  Attributes:
    mixer: 'kda', 'mla' or 'local'.
    is_moe: whether its feed-forward network is routed.
  """

  mixer: str
  is_moe: bool


class LayerOutput(NamedTuple):
  """What a layer returns.

  Attributes:
    x_BTD: the block's running sum, or the residual stream.
    stats: router statistics; None for a dense layer.
    aux_loss: auxiliary balancing loss, 0 where there is none.
    max_logit_H: largest attention score of each head; None unless latent
      attention.
  """

  x_BTD: jax.Array
  stats: RouterStats | None
  aux_loss: jax.Array
  max_logit_H: jax.Array | None


class Layer(nn.Module):
  """One decoder layer.

  Attributes:
    config: sizes.
    balance: what the router observes.
    kind: its mixer and feed-forward network.
    has_block_residuals: whether sub-layers read a mixture of sources.
  """

  config: ModelConfig
  balance: BalanceConfig
  kind: LayerKind
  has_block_residuals: bool

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array | None,
    sources: Sequence[jax.Array],
    valid_S: jax.Array | None,
    segment_ids_BT: jax.Array,
    view: RouterView | None,
  ) -> LayerOutput:
    """Applies mixer and feed-forward network.

    Args:
      x_BTD: the block's sum so far (None at its first sub-layer), or the
        residual stream.
      sources: finished blocks, the embedding first; unused without attention
        residuals.
      valid_S: which of the sources exist; None when all do.
      segment_ids_BT: int32 documents; 0 is padding.
      view: the router's bias and bins; None for a dense layer.
    """
    c = self.config

    def read(x, name):
      if not self.has_block_residuals:
        return x
      seen, valid = list(sources), valid_S
      if x is not None:
        seen.append(x)
        if valid is not None:
          valid = jnp.append(valid, True)
      return MixBlocks(c.norm_eps, name=name)(seen, valid)

    def norm(name):
      return norms.RmsNorm(c.norm_eps, name=name)

    h_BTD = norm('mixer_norm')(read(x_BTD, 'mixer_residual'))
    max_logit_H = None
    match self.kind.mixer:
      case 'kda':
        y_BTD = KdaLayer(c, name='mixer')(h_BTD, segment_ids_BT)
      case 'mla':
        y_BTD, max_logit_H = GatedMla(c, name='mixer')(h_BTD, segment_ids_BT)
      case 'local':
        y_BTD = LocalAttention(c, name='mixer')(h_BTD, segment_ids_BT)
    x_BTD = y_BTD if x_BTD is None else x_BTD + y_BTD
    h_BTD = norm('ffn_norm')(read(x_BTD, 'ffn_residual'))
    stats, aux_loss = None, jnp.zeros((), jnp.float32)
    if self.kind.is_moe:
      y_BTD, stats, aux_loss = LatentMoe(c, self.balance, name='ffn')(
        h_BTD, segment_ids_BT, view
      )
    else:
      y_BTD = SituGlu(c, c.dense_hidden, name='ffn')(h_BTD)
    return LayerOutput(x_BTD + y_BTD, stats, aux_loss, max_logit_H)


def remat_layer(policy: str) -> type[nn.Module]:
  """`Layer` with the named rematerialisation policy."""
  if policy == 'none':
    return Layer
  save = None
  if policy == 'layer_save_mixer':
    save = jax.checkpoint_policies.save_only_these_names(
      MIXED_TOKENS, ENTRY_STATES
    )
  return nn.remat(Layer, policy=save, prevent_cse=True)


class BlockOutput(NamedTuple):
  """What a block of layers returns.

  Attributes:
    x_BTD: the block's sum, or the residual stream.
    stats: statistics of its routed layers, stacked in front; None if none.
    aux_loss: sum over its layers.
    max_logits: by layer name, [H]; latent attention only.
  """

  x_BTD: jax.Array
  stats: RouterStats | None
  aux_loss: jax.Array
  max_logits: dict[str, jax.Array]


class Block(nn.Module):
  """Consecutive layers that share their attention-residual sources.

  Attributes:
    config: sizes.
    balance: what the routers observe.
    kinds: of the layers, in order.
    has_block_residuals: whether sub-layers read a mixture of sources.
    remat: one of `config.REMAT_POLICIES`.
  """

  config: ModelConfig
  balance: BalanceConfig
  kinds: tuple[LayerKind, ...]
  has_block_residuals: bool
  remat: str

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    sources: Sequence[jax.Array],
    valid_S: jax.Array | None,
    segment_ids_BT: jax.Array,
    views: RouterView | None,
  ) -> BlockOutput:
    """Applies the layers; `views` stacks those of the routed layers.

    `x_BTD` is the residual stream; with attention residuals it is not read,
    the embedding or previous block being the last of `sources`.
    """
    layer_cls = remat_layer(self.remat)
    x = None if self.has_block_residuals else x_BTD
    all_stats, max_logits = [], {}
    aux_loss = jnp.zeros((), jnp.float32)
    for i, kind in enumerate(self.kinds):
      view = None
      if kind.is_moe:
        view = jax.tree.map(lambda v: v[len(all_stats)], views)
      layer = layer_cls(
        self.config,
        self.balance,
        kind,
        self.has_block_residuals,
        name=f'layer_{i}',
      )
      out = layer(x, tuple(sources), valid_S, segment_ids_BT, view)
      x = out.x_BTD
      aux_loss = aux_loss + out.aux_loss
      if out.stats is not None:
        all_stats.append(out.stats)
      if out.max_logit_H is not None:
        max_logits[f'layer_{i}'] = out.max_logit_H
    stats = None
    if all_stats:
      stats = jax.tree.map(lambda *s: jnp.stack(s), *all_stats)
    return BlockOutput(x, stats, aux_loss, max_logits)
