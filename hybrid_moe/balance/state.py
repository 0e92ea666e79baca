"""What the balancer keeps, shows to the forward pass and gets back from it."""

import flax.struct
import jax
import jax.numpy as jnp

from hybrid_moe.model_config import BalanceConfig

# The grid of a moving histogram. A centred bias stays inside (-1, 1): required
# biases of two experts for the same token differ by less than 1, as their
# scores do, hence so do their quantiles and any average of those. A cutoff
# then lies in (-1, 2) and a required bias in (-2, 2).
_FIXED_RANGE = (-2.0, 2.0)


@flax.struct.dataclass
class BalanceState:
  """State of the balancer for all MoE layers; replicated on every device.

  Attributes:
    bias_LE: float32, added to the scores for choosing experts.
    histogram_LEW: int32 counts gathered since the last update; no bins unless
      a histogram accumulates over several steps.
    window_LEW: float32 decayed counts of past updates; no bins unless
      `window_decay > 0`.
    load_LE: int32 load gathered since the last update; no experts unless the
      sign rule accumulates over several steps.
    tokens_L: int32 real tokens gathered since the last update.
    pending: int32 scalar, steps gathered since the last update.
    updates_L: int32, updates that each layer's bias has had.
  """

  bias_LE: jax.Array
  histogram_LEW: jax.Array
  window_LEW: jax.Array
  load_LE: jax.Array
  tokens_L: jax.Array
  pending: jax.Array
  updates_L: jax.Array


@flax.struct.dataclass
class RouterView:
  """What a layer's forward pass needs of the balancer.

  Stacked over layers (a leading L) as `router_view` returns it; slice or scan
  over it to get one layer's.

  Attributes:
    bias_E: float32, as in `BalanceState`.
    low: float32 scalar, lower edge of the first bin of required biases.
    width: float32 scalar, width of a bin.
  """

  bias_E: jax.Array
  low: jax.Array
  width: jax.Array


@flax.struct.dataclass
class RouterStats:
  """What one layer reports of the tokens it routed.

  All leaves but `required_bias_NE` add up over micro-batches and over shards
  of tokens; the integers do so exactly, in any order.

  Attributes:
    histogram_EW: int32 counts of required biases; no bins unless the estimator
      is the histogram.
    load_E: int32 (token, slot) pairs that chose each expert.
    gate_mass_E: float32 sum of each expert's combine weights.
    tokens: int32 scalar, real tokens.
    required_bias_NE: float32, infinite for padding; no rows unless the
      estimator is exact.
  """

  histogram_EW: jax.Array
  load_E: jax.Array
  gate_mass_E: jax.Array
  tokens: jax.Array
  required_bias_NE: jax.Array


def uses_histogram(config: BalanceConfig) -> bool:
  """Whether the forward pass counts required biases."""
  return config.method == 'quantile' and config.estimator == 'histogram'


def uses_exact(config: BalanceConfig) -> bool:
  """Whether the forward pass keeps every required bias."""
  return config.method == 'quantile' and config.estimator == 'exact'


def init_balance(
  config: BalanceConfig, num_layers: int, num_experts: int
) -> BalanceState:
  """A balancer that has seen nothing; its bias is zero.

  Args:
    config: method and estimator; they decide which arrays are empty.
    num_layers: layers with routed experts.
    num_experts: routed experts of a layer.

  Returns:
    The state, unsharded.
  """
  accumulates = config.update_every > 1
  histogram = uses_histogram(config)
  bins = config.num_bins if histogram and accumulates else 0
  window_bins = config.num_bins if histogram and config.window_decay > 0 else 0
  load_experts = num_experts if config.method == 'sign' and accumulates else 0
  return BalanceState(
    bias_LE=jnp.zeros((num_layers, num_experts), jnp.float32),
    histogram_LEW=jnp.zeros((num_layers, num_experts, bins), jnp.int32),
    window_LEW=jnp.zeros((num_layers, num_experts, window_bins), jnp.float32),
    load_LE=jnp.zeros((num_layers, load_experts), jnp.int32),
    tokens_L=jnp.zeros((num_layers,), jnp.int32),
    pending=jnp.zeros((), jnp.int32),
    updates_L=jnp.zeros((num_layers,), jnp.int32),
  )


def router_view(config: BalanceConfig, state: BalanceState) -> RouterView:
  """What the forward passes of one step need, stacked over layers.

  The bins span every required bias that the current bias can cause: from one
  below its least to one above its greatest entry. They are the same in all
  steps between two updates, since the bias is.

  Args:
    config: method, bins and window.
    state: the balancer before the step.

  Returns:
    bias_E: [L, E]; low and width: [L]; all float32.
  """
  if config.window_decay > 0:
    low_L = jnp.full_like(state.bias_LE[:, 0], _FIXED_RANGE[0])
    high_L = jnp.full_like(low_L, _FIXED_RANGE[1])
  else:
    low_L = jnp.min(state.bias_LE, axis=-1) - 1.0
    high_L = jnp.max(state.bias_LE, axis=-1) + 1.0
  return RouterView(
    bias_E=state.bias_LE, low=low_L, width=(high_L - low_L) / config.num_bins
  )
