"""One optimiser step as a pure function."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hybrid_moe import health, loss, sharding
from hybrid_moe.balance.audit import audit
from hybrid_moe.balance.quantile import update_balance
from hybrid_moe.balance.state import RouterStats, RouterView, router_view
from hybrid_moe.config import ExperimentConfig
from hybrid_moe.model.decoder import Decoder, MaxLogits, head_matrix
from hybrid_moe.optim.build import build_optimizer
from hybrid_moe.optim.qk_clip import apply_qk_clip
from hybrid_moe.optim.schedule import Schedule
from hybrid_moe.train_state import TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, Any]


class _Gradients(NamedTuple):
  """What a micro-batch yields; all of it adds up but the largest logits.

  Attributes:
    objective: what is differentiated, over the targets of the whole step.
    nll: next-token loss, over the targets of the whole step.
    grads: gradient of the objective.
    stats: router statistics [L, shards, ...].
    max_logits: largest attention scores.
  """

  objective: jax.Array
  nll: jax.Array
  grads: Any
  stats: RouterStats | None
  max_logits: MaxLogits


def train_step(
  config: ExperimentConfig,
  remat: str,
  schedule: Schedule,
  state: TrainState,
  batch: Batch,
) -> tuple[TrainState, Metrics]:
  """Gradients over all micro-batches, then one update of everything.

  A bad step (`health.judge`) changes only the step counters and the health
  record. The balancer's update is used from the next step on.

  Args:
    config: the experiment.
    remat: rematerialisation policy of the stage.
    schedule: learning rate of the stage.
    state: the state before the step.
    batch: arrays [A, B, T] for A micro-batches: int32 tokens, targets and
      segment_ids, bool loss_mask.

  Returns:
    The state after the step, and metrics: float32 scalars `loss` (nats a
    target), `grad_norm`, `lr` and `max_logit`, int32 `tokens` (real targets),
    bool `skipped`, int32 `skipped_in_a_row` and `skipped_total`; `balance`,
    arrays [L] by name; `load_LE`.
  """
  views = router_view(config.balance, state.balance)
  num_targets = jnp.sum(batch['loss_mask'], dtype=jnp.int32)
  result = _accumulate(config, remat, state.params, views, batch, num_targets)
  grad_norm = optax.tree.norm(result.grads)
  is_bad, new_health = health.judge(
    config.health, state.health, result.nll, grad_norm
  )
  learning_rate = schedule(state.stage_step)
  updates, opt_state = build_optimizer(config.optim).update(
    result.grads, state.opt_state, state.params, learning_rate=learning_rate
  )
  params = apply_qk_clip(
    optax.apply_updates(state.params, updates),
    result.max_logits,
    config.optim.qk_clip_threshold,
    config.model.mla.head_dim,
  )
  balance, balance_metrics = state.balance, {}
  if result.stats is not None:
    stats = _pool_shards(result.stats)
    top_k = config.model.moe.top_k
    balance = update_balance(config.balance, state.balance, stats, top_k)
    balance_metrics = {
      'balance': audit(config.balance, stats, state.balance.bias_LE, top_k),
      'load_LE': stats.load_E,
    }
  params, opt_state, balance = health.select(
    is_bad,
    (state.params, state.opt_state, state.balance),
    (params, opt_state, balance),
  )
  new_state = TrainState(
    step=state.step + 1,
    stage_step=state.stage_step + 1,
    params=params,
    opt_state=opt_state,
    balance=balance,
    health=new_health,
  )
  metrics = {
    'loss': result.nll,
    'grad_norm': grad_norm,
    'lr': learning_rate,
    'tokens': num_targets,
    'skipped': is_bad,
    'skipped_in_a_row': new_health.skipped_in_a_row,
    'skipped_total': new_health.skipped_total,
    **balance_metrics,
  }
  if result.max_logits:
    tops = [jnp.max(top) for top in result.max_logits.values()]
    metrics['max_logit'] = jnp.max(jnp.stack(tops))
  return new_state, metrics


def _accumulate(
  config: ExperimentConfig,
  remat: str,
  params: Any,
  views: RouterView,
  batch: Batch,
  num_targets: jax.Array,
) -> _Gradients:
  """Gradients summed over the micro-batches."""
  num_micro = batch['tokens'].shape[0]

  def gradients(micro):
    (objective, (nll, stats, max_logits)), grads = jax.value_and_grad(
      _objective, has_aux=True
    )(params, config, remat, views, micro, num_targets, num_micro)
    return _Gradients(objective, nll, grads, stats, max_logits)

  first = jax.tree.map(lambda x: x[0], batch)
  if num_micro == 1:
    return gradients(first)

  def add(total, micro):
    new = gradients(micro)
    summed = jax.tree.map(jnp.add, total, new)
    tops = jax.tree.map(jnp.maximum, total.max_logits, new.max_logits)
    return summed._replace(max_logits=tops), None

  zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradients, first))
  zero = zero._replace(
    max_logits=jax.tree.map(lambda x: x - jnp.inf, zero.max_logits)
  )
  return jax.lax.scan(add, zero, batch)[0]


def _objective(
  params: Any,
  config: ExperimentConfig,
  remat: str,
  views: RouterView,
  micro: Batch,
  num_targets: jax.Array,
  num_micro: int,
) -> tuple[jax.Array, tuple[jax.Array, RouterStats | None, MaxLogits]]:
  """A micro-batch's part of the step's objective."""
  optim = config.optim
  out = Decoder(config.model, config.balance, remat).apply(
    {'params': params},
    micro['tokens'],
    micro['targets'],
    micro['segment_ids'],
    views,
  )
  head_DU = head_matrix(params, config.model.dtype)

  def mean_nll(hidden_BTD, targets_BT, mask_BT):
    losses = loss.token_losses(hidden_BTD, head_DU, targets_BT)
    over = jnp.maximum(num_targets, 1).astype(jnp.float32)
    nll = jnp.sum(jnp.where(mask_BT, losses.nll_BT, 0.0)) / over
    square = jnp.where(mask_BT, jnp.square(losses.log_z_BT), 0.0)
    return nll, nll + optim.z_loss * jnp.sum(square) / over

  nll, objective = mean_nll(
    out.hidden_BTD, micro['targets'], micro['loss_mask']
  )
  if out.mtp_hidden_BTD is not None:
    targets, mask = loss.mtp_targets(
      micro['targets'], micro['loss_mask'], micro['segment_ids']
    )
    _, mtp_loss = mean_nll(out.mtp_hidden_BTD, targets, mask)
    objective += optim.mtp_loss_weight * mtp_loss
  if config.balance.method == 'aux_loss':
    objective += config.balance.aux_weight * out.aux_loss / num_micro
  return objective, (nll, out.stats, out.max_logits)


def _pool_shards(stats: RouterStats) -> RouterStats:
  """Sums [L, shards, ...] over the shards, once for all layers."""
  required = sharding.constrain(stats.required_bias_NE, sharding.REPLICATED)
  L, shards, N, E = required.shape
  summed = jax.tree.map(
    lambda s: jnp.sum(s, axis=1, dtype=s.dtype),
    stats.replace(required_bias_NE=None),
  )
  return summed.replace(required_bias_NE=required.reshape(L, shards * N, E))
