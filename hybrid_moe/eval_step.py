"""Losses of held-out rows, by position and by source."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from hybrid_moe import loss
from hybrid_moe.balance.state import BalanceState, router_view
from hybrid_moe.config import ExperimentConfig
from hybrid_moe.model.decoder import Decoder, head_matrix

# Upper end of the first position bucket; each later one ends at twice the end
# of the one before.
_FIRST_BUCKET = 64


def position_edges(seq_len: int) -> tuple[int, ...]:
  """Edges of the position buckets: 0, 64, 128, 256, ... up to `seq_len`.

  Every stage's buckets are the previous stage's and more.
  """
  edges = [0, _FIRST_BUCKET]
  while edges[-1] < seq_len:
    edges.append(2 * edges[-1])
  return tuple(edges)


def document_positions(segment_ids_BT: jax.Array) -> jax.Array:
  """Tokens of the same document before each token, in its row, int32."""
  positions_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
  changes = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
  starts = jnp.where(jnp.pad(changes, ((0, 0), (1, 0))), positions_T[None], 0)
  return positions_T[None] - jax.lax.cummax(starts, axis=1)


def eval_step(
  config: ExperimentConfig,
  num_sources: int,
  params: Any,
  balance: BalanceState,
  batch: dict[str, jax.Array],
) -> dict[str, jax.Array]:
  """Sums of losses over a batch; the balancer stays as it is.

  Args:
    config: the experiment.
    num_sources: sources of the stage.
    params: parameters.
    balance: the balancer; its bias routes.
    batch: [B, T] int32 tokens, targets, segment_ids, bool loss_mask, and
      int32 source_ids [B].

  Returns:
    Float32 sums of nats and int32 counts of targets: `nll_by_position` and
    `count_by_position` over the buckets of `position_edges`, `nll_by_source`
    and `count_by_source`.
  """
  out = Decoder(config.model, config.balance).apply(
    {'params': params},
    batch['tokens'],
    batch['targets'],
    batch['segment_ids'],
    router_view(config.balance, balance),
  )
  nll_BT = loss.token_losses(
    out.hidden_BTD, head_matrix(params, config.model.dtype), batch['targets']
  ).nll_BT
  mask_BT = batch['loss_mask']
  nll_BT = jnp.where(mask_BT, nll_BT, 0.0)
  positions_BT = document_positions(batch['segment_ids'])
  edges = position_edges(nll_BT.shape[1])
  sums: dict[str, list[jax.Array]] = {
    'nll_by_position': [],
    'count_by_position': [],
    'nll_by_source': [],
    'count_by_source': [],
  }
  groups = [
    ('position', (positions_BT >= low) & (positions_BT < high))
    for low, high in itertools.pairwise(edges)
  ]
  groups += [
    ('source', (batch['source_ids'] == i)[:, None]) for i in range(num_sources)
  ]
  for kind, inside in groups:
    sums[f'nll_by_{kind}'].append(jnp.sum(jnp.where(inside, nll_BT, 0.0)))
    sums[f'count_by_{kind}'].append(jnp.sum(inside & mask_BT, dtype=jnp.int32))
  return {name: jnp.stack(values) for name, values in sums.items()}
