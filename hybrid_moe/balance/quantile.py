"""Balancing by quantiles: observe required biases, solve, update.

The rule of the Kimi K3 report (arXiv 2607.24653, section 2.3.3 and appendix
D), derived as a coordinate step of the balanced-assignment dual by Su
(kexue.fm 11619). An expert j takes token i when score_ij + bias_j exceeds the
token's cutoff, its (k+1)-th largest biased score; so the bias that just admits
the token is cutoff_i - score_ij, and the (k/E)-quantile of these over tokens is
the bias under which j gets its share. What a step observes moves the bias of
the next step only: routing by statistics of the same tokens would leak between
them and differ from inference.

Two other rules, for comparison, are DeepSeek's sign rule (arXiv 2408.15664) and
the auxiliary loss of Switch transformers (arXiv 2101.03961).
"""

import jax
import jax.numpy as jnp

from hybrid_moe.balance.solve import solve_exact, solve_histogram
from hybrid_moe.balance.state import (
  BalanceState,
  RouterStats,
  RouterView,
  init_balance,
  router_view,
  uses_exact,
  uses_histogram,
)
from hybrid_moe.model_config import BalanceConfig

__all__ = [
  'BalanceState',
  'RouterStats',
  'RouterView',
  'aux_loss',
  'biased_scores',
  'init_balance',
  'observe',
  'router_view',
  'solve_exact',
  'solve_histogram',
  'update_balance',
]


def biased_scores(scores: jax.Array, bias_E: jax.Array) -> jax.Array:
  """Scores by which experts are chosen, in training and in inference.

  Args:
    scores: [..., E] float32 sigmoid scores.
    bias_E: [E] float32; no gradient passes to it.

  Returns:
    Array like `scores`. Combine weights come from the scores without bias.
  """
  bias_E = jax.lax.stop_gradient(bias_E)
  return scores + jnp.broadcast_to(bias_E, scores.shape)


def observe(
  config: BalanceConfig,
  scores_NE: jax.Array,
  cutoff_N: jax.Array,
  chosen_NS: jax.Array,
  gates_NS: jax.Array,
  mask_N: jax.Array,
  view: RouterView,
) -> RouterStats:
  """Statistics of the tokens that one layer has routed on one shard.

  Every token counts once, padding not at all; no gradient flows through. The
  arrays must not be sharded: call it inside `shard_map`, or on one device.

  Args:
    config: method and estimator.
    scores_NE: float32 scores without bias; N may be 0.
    cutoff_N: float32, (k+1)-th largest biased score of each token.
    chosen_NS: int32 experts of each token.
    gates_NS: float32 weights with which their outputs are combined.
    mask_N: bool, true for real tokens.
    view: this layer's entry of `router_view`.

  Returns:
    The shard's statistics.
  """
  scores_NE, cutoff_N, gates_NS = jax.lax.stop_gradient(
    (scores_NE, cutoff_N, gates_NS)
  )
  num_tokens, num_experts = scores_NE.shape
  required_NE = cutoff_N[:, None] - scores_NE
  count_N = mask_N.astype(jnp.int32)
  count_NS = jnp.broadcast_to(count_N[:, None], chosen_NS.shape)

  bins = config.num_bins if uses_histogram(config) else 0
  histogram_EW = jnp.zeros((num_experts, bins), jnp.int32)
  if bins:
    bin_NE = jnp.floor((required_NE - view.low) / view.width).astype(jnp.int32)
    bin_NE = jnp.clip(bin_NE, 0, bins - 1)
    expert_NE = jax.lax.broadcasted_iota(jnp.int32, bin_NE.shape, 1)
    histogram_EW = histogram_EW.at[expert_NE, bin_NE].add(
      jnp.broadcast_to(count_N[:, None], bin_NE.shape),
      mode='promise_in_bounds',
    )
  kept = num_tokens if uses_exact(config) else 0
  return RouterStats(
    histogram_EW=histogram_EW,
    load_E=jnp.zeros((num_experts,), jnp.int32).at[chosen_NS].add(count_NS),
    gate_mass_E=jnp.zeros((num_experts,), jnp.float32)
    .at[chosen_NS]
    .add(jnp.where(count_NS > 0, gates_NS.astype(jnp.float32), 0.0)),
    tokens=jnp.sum(count_N, dtype=jnp.int32),
    required_bias_NE=jnp.where(mask_N[:, None], required_NE, jnp.inf)[:kept],
  )


def update_balance(
  config: BalanceConfig,
  state: BalanceState,
  stats: RouterStats,
  top_k: int,
) -> BalanceState:
  """The balancer after one optimiser step.

  Call it once a step; the bias it returns is used from the next step on. A
  step without real tokens leaves everything as it is, and a layer without
  real tokens keeps its bias.

  Args:
    config: method and its constants.
    state: the balancer that the step's forward passes used.
    stats: the step's statistics with a leading L, summed over micro-batches
      and shards; for the exact estimator `required_bias_NE` is [L, N, E] with
      all tokens, not sharded.
    top_k: experts of a token.

  Returns:
    The next state.
  """
  if config.method not in ('quantile', 'sign'):
    return state
  tokens_L = state.tokens_L + stats.tokens
  pending = state.pending + 1
  due = pending >= config.update_every

  histogram_LEW, load_LE = stats.histogram_EW, stats.load_E
  if state.histogram_LEW.size:
    histogram_LEW = state.histogram_LEW + histogram_LEW
  if state.load_LE.size:
    load_LE = state.load_LE + load_LE
  window_LEW = state.window_LEW

  if config.method == 'sign':
    bias_LE = state.bias_LE + _sign_step(config, load_LE)
  else:
    view = router_view(config, state)
    if uses_exact(config):
      solved_LE = solve_exact(stats.required_bias_NE, tokens_L, top_k)
    elif window_LEW.size:
      window_LEW = config.window_decay * window_LEW + histogram_LEW
      solved_LE = solve_histogram(window_LEW, view.low, view.width, top_k)
    else:
      solved_LE = solve_histogram(histogram_LEW, view.low, view.width, top_k)
    # Half of the first bias would be an average with nothing.
    old_weight_L = jnp.where(state.updates_L > 0, config.smoothing, 0.0)
    bias_LE = solved_LE + old_weight_L[:, None] * (state.bias_LE - solved_LE)

  moved_L = due & (tokens_L > 0)
  after = BalanceState(
    bias_LE=jnp.where(moved_L[:, None], bias_LE, state.bias_LE),
    histogram_LEW=jnp.where(due, 0, histogram_LEW)
    if state.histogram_LEW.size
    else state.histogram_LEW,
    window_LEW=jnp.where(moved_L[:, None, None], window_LEW, state.window_LEW),
    load_LE=jnp.where(due, 0, load_LE) if state.load_LE.size else state.load_LE,
    tokens_L=jnp.where(due, 0, tokens_L),
    pending=jnp.where(due, 0, pending),
    updates_L=state.updates_L + moved_L,
  )
  has_tokens = jnp.any(stats.tokens > 0)
  return jax.tree.map(
    lambda new, old: jnp.where(has_tokens, new, old), after, state
  )


def aux_loss(
  scores_NE: jax.Array, load_E: jax.Array, mask_N: jax.Array
) -> jax.Array:
  """Differentiable auxiliary loss, for comparison; 1 at perfect balance.

  E sum_e f_e P_e, with f_e the share of (token, slot) pairs that expert e got
  and P_e the mean over real tokens of its share of a token's scores. Linear
  in P: for one `load_E`, the mean over shards weighted by their real tokens is
  the loss of all tokens. Source: Switch transformers (arXiv 2101.03961),
  equation 4, on normalised sigmoid scores as in DeepSeek-V3 (arXiv
  2412.19437).

  Args:
    scores_NE: float32 sigmoid scores without bias.
    load_E: int32 load; no gradient passes to it.
    mask_N: bool, true for real tokens.

  Returns:
    float32 scalar, not weighted by `aux_weight`; 0 without real tokens.
  """
  load_E = load_E.astype(jnp.float32)
  share_E = load_E / jnp.maximum(jnp.sum(load_E), 1.0)
  total_N1 = jnp.sum(scores_NE, axis=-1, keepdims=True)
  weight_N1 = mask_N.astype(jnp.float32)[:, None]
  # The gradient divides by the square, which must be a normal float32.
  normal_NE = scores_NE / jnp.maximum(total_N1, 1e-18) * weight_N1
  mean_E = jnp.sum(normal_NE, axis=0) / jnp.maximum(jnp.sum(weight_N1), 1.0)
  return scores_NE.shape[-1] * jnp.sum(share_E * mean_E)


def _sign_step(config: BalanceConfig, load_LE: jax.Array) -> jax.Array:
  load_LE = load_LE.astype(jnp.float32)
  reference = jnp.mean if config.sign_reference == 'mean' else jnp.median
  return config.sign_step * jnp.sign(
    reference(load_LE, axis=-1, keepdims=True) - load_LE
  )
