"""The decoder: embedding, blocks of layers, final norm.

Kimi K3 report (arXiv 2607.24653), section 2. Equal consecutive blocks are
compiled once, as a loop over stacked parameters.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hybrid_moe import sharding
from hybrid_moe.balance.state import RouterStats, RouterView
from hybrid_moe.model import norms, parameters
from hybrid_moe.model.attention_residual import MixBlocks
from hybrid_moe.model.block import Block, BlockOutput, LayerKind
from hybrid_moe.model.linear import whole
from hybrid_moe.model.mtp import MtpLayer
from hybrid_moe.model_config import BalanceConfig, ModelConfig

# Path of an attention layer's parameters -> [H], or [blocks, H] where its
# block is part of the loop.
MaxLogits = dict[tuple[str, ...], jax.Array]


# Name under which the parameters of looped blocks are stacked.
LOOP = 'blocks'


class DecoderOutput(NamedTuple):
  """What the decoder returns.

  Attributes:
    hidden_BTD: normed outputs, ready for the output embedding.
    mtp_hidden_BTD: the same for the token after next; None without that layer.
    stats: router statistics [L, shards, ...] of the routed layers, in order.
    aux_loss: auxiliary balancing loss, mean over the routed layers.
    max_logits: largest attention scores of the latent-attention layers.
  """

  hidden_BTD: jax.Array
  mtp_hidden_BTD: jax.Array | None
  stats: RouterStats | None
  aux_loss: jax.Array
  max_logits: MaxLogits


class BlockRun(NamedTuple):
  """Consecutive blocks with the same layers."""

  name: str
  kinds: tuple[LayerKind, ...]
  num_blocks: int
  is_loop: bool


def plan_blocks(config: ModelConfig) -> list[BlockRun]:
  """Cuts the layers into blocks and finds the run that becomes a loop.

  Without attention residuals a block is one period of the mixers.
  """
  length = config.attn_res_block or len(config.mixers)
  kinds = [
    LayerKind(config.mixer_of(i), i >= config.dense_layers)
    for i in range(config.num_layers)
  ]
  blocks = [tuple(kinds[i : i + length]) for i in range(0, len(kinds), length)]
  runs: list[tuple[tuple[LayerKind, ...], int]] = []
  for block in blocks:
    if runs and runs[-1][0] == block:
      runs[-1] = (block, runs[-1][1] + 1)
    else:
      runs.append((block, 1))
  longest = max(count for _, count in runs)
  plan, index, has_loop = [], 0, False
  for block, count in runs:
    if config.scan_blocks and not has_loop and count == longest > 1:
      plan.append(BlockRun(LOOP, block, count, True))
      has_loop = True
    else:
      plan += [
        BlockRun(f'block_{index + i}', block, 1, False) for i in range(count)
      ]
    index += count
  return plan


class _LoopBody(nn.Module):
  """One iteration: a block that reads and extends a buffer of sources."""

  config: ModelConfig
  balance: BalanceConfig
  kinds: tuple[LayerKind, ...]
  remat: str

  @nn.compact
  def __call__(self, carry, views, segment_ids_BT):
    x_BTD, buffer_SBTD, num_sources = carry
    has_block_residuals = self.config.attn_res_block > 0
    valid_S = None
    if has_block_residuals:
      valid_S = jnp.arange(buffer_SBTD.shape[0]) < num_sources
    out = Block(
      self.config,
      self.balance,
      self.kinds,
      has_block_residuals,
      self.remat,
      name='block',
    )(x_BTD, tuple(buffer_SBTD), valid_S, segment_ids_BT, views)
    if has_block_residuals:
      buffer_SBTD = jax.lax.dynamic_update_index_in_dim(
        buffer_SBTD, out.x_BTD, num_sources, 0
      )
    carry = (out.x_BTD, buffer_SBTD, num_sources + 1)
    return carry, out._replace(x_BTD=None)


class Decoder(nn.Module):
  """Token ids to hidden states; `head_matrix` turns those into logits.

  Attributes:
    config: sizes.
    balance: what the routers observe.
    remat: one of `config.REMAT_POLICIES`.
  """

  config: ModelConfig
  balance: BalanceConfig
  remat: str = 'none'

  @nn.compact
  def __call__(
    self,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    segment_ids_BT: jax.Array,
    views: RouterView,
  ) -> DecoderOutput:
    """Runs the decoder.

    Args:
      tokens_BT: int32 ids.
      targets_BT: int32 next tokens; read by the multi-token-prediction layer
        only.
      segment_ids_BT: int32 documents of a row, from 1; 0 is padding.
      views: bias and bins of the routed layers, stacked.
    """
    c = self.config
    table_UD = parameters.matrix(
      self, 'table', 'UD', (c.vocab_size, c.d_model), c.init_std
    )
    # Owned here, used through `head_matrix`: the loss multiplies it chunk by
    # chunk of tokens.
    parameters.matrix(self, 'head', 'DU', (c.d_model, c.vocab_size), c.init_std)
    # Rows are cast after they are looked up: their gradients, of which a token
    # that is repeated has many, then add up in float32.
    table_UD = whole(table_UD, c.dtype)
    x = sharding.look_up(table_UD, tokens_BT).astype(c.dtype)
    sources = [x]
    all_stats: list[RouterStats] = []
    max_logits: MaxLogits = {}
    aux_loss = jnp.zeros((), jnp.float32)
    first_view = 0
    for run in plan_blocks(c):
      num_views = run.num_blocks * sum(kind.is_moe for kind in run.kinds)
      run_views = jax.tree.map(
        lambda v, i=first_view, n=num_views: v[i : i + n], views
      )
      first_view += num_views
      apply = self._loop if run.is_loop else self._block
      out, finished = apply(run, x, sources, segment_ids_BT, run_views)
      x = out.x_BTD
      sources += finished
      aux_loss = aux_loss + out.aux_loss
      if out.stats is not None:
        all_stats.append(out.stats)
      prefix = (run.name, 'block') if run.is_loop else (run.name,)
      for layer, top in out.max_logits.items():
        max_logits[(*prefix, layer, 'mixer')] = top
    if c.attn_res_block:
      x = MixBlocks(c.norm_eps, name='output_residual')(sources)
    hidden_BTD = norms.RmsNorm(c.norm_eps, name='final_norm')(x)
    mtp_hidden_BTD = None
    if c.mtp_layers:
      mtp_view = jax.tree.map(lambda v: v[first_view], views)
      out = MtpLayer(c, self.balance, self.remat, name='mtp')(
        x,
        sharding.look_up(table_UD, targets_BT).astype(c.dtype),
        segment_ids_BT,
        mtp_view,
      )
      mtp_hidden_BTD = out.x_BTD
      aux_loss = aux_loss + out.aux_loss
      all_stats.append(jax.tree.map(lambda s: s[None], out.stats))
      max_logits[('mtp', 'layer', 'mixer')] = out.max_logit_H
    stats = None
    if all_stats:
      stats = jax.tree.map(lambda *s: jnp.concatenate(s), *all_stats)
    aux_loss = aux_loss / max(1, c.num_moe_layers)
    return DecoderOutput(
      hidden_BTD, mtp_hidden_BTD, stats, aux_loss, max_logits
    )

  def _block(self, run, x, sources, segment_ids_BT, views):
    """Runs one block; returns its output and the sources that it adds."""
    has_block_residuals = self.config.attn_res_block > 0
    out = Block(
      self.config,
      self.balance,
      run.kinds,
      has_block_residuals,
      self.remat,
      name=run.name,
    )(x, tuple(sources), None, segment_ids_BT, views)
    return out, [out.x_BTD] if has_block_residuals else []

  def _loop(self, run, x, sources, segment_ids_BT, views):
    """Runs equal blocks as a loop over stacked parameters, as `_block`."""
    per_block = sum(kind.is_moe for kind in run.kinds)
    views = jax.tree.map(
      lambda v: v.reshape(run.num_blocks, per_block, *v.shape[1:]), views
    )
    # Room for the blocks that the loop finishes; without attention residuals
    # nothing is kept.
    kept = sources if self.config.attn_res_block else sources[:0]
    room = [jnp.zeros_like(x)] * (run.num_blocks if kept else 0)
    buffer_SBTD = jnp.stack([*kept, *room]) if kept else jnp.zeros((0,))
    body = nn.scan(
      _LoopBody,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=(0, nn.broadcast),
      length=run.num_blocks,
    )(self.config, self.balance, run.kinds, self.remat, name=run.name)
    carry = (x, buffer_SBTD, jnp.int32(len(kept)))
    (x, buffer_SBTD, _), out = body(carry, views, segment_ids_BT)
    finished = [buffer_SBTD[i] for i in range(len(kept), buffer_SBTD.shape[0])]
    stats = out.stats
    if stats is not None:
      # Not a reshape: that loses the sharding of arrays without elements.
      stats = jax.tree.map(lambda s: jnp.concatenate(tuple(s)), stats)
    out = BlockOutput(x, stats, jnp.sum(out.aux_loss), out.max_logits)
    return out, finished


def head_matrix(params: dict, dtype: str) -> jax.Array:
  """The output embedding [D, U] of a decoder's parameters; see `whole`."""
  return whole(params['head'], dtype)
