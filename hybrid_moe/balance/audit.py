"""Numbers that say whether experts are used evenly."""

import jax
import jax.numpy as jnp

from hybrid_moe.balance.solve import locate_quantile, target_load
from hybrid_moe.balance.state import RouterStats
from hybrid_moe.model_config import BalanceConfig


def audit(
  config: BalanceConfig,
  stats: RouterStats,
  bias_LE: jax.Array,
  top_k: int,
) -> dict[str, jax.Array]:
  """Balance of one step's routing, layer by layer.

  Utilisation is an expert's load over its fair share. A layer without load
  reports perfect balance, so that an empty step raises no alarm.

  Args:
    config: `dead_threshold`.
    stats: statistics of the step with a leading L, summed over micro-batches
      and shards.
    bias_LE: float32 bias that the step routed by.
    top_k: experts of a token.

  Returns:
    Arrays [L], float32 but for the one count:
      max_vio: greatest utilisation less 1 (arXiv 2408.15664).
      util_min, util_max: least and greatest utilisation.
      entropy: of the load shares, over its greatest value; in [0, 1].
      dead_experts: int32, experts with utilisation below `dead_threshold`.
      gate_mass_min: least sum of combine weights over the mean sum. Equal
        loads hide an expert whose every token takes it with a small weight.
      bias_range: greatest bias less the least.
      bin_mass_over_q: greatest count, over experts, in the bin that holds the
        target, over the target. Near 1 the bins are too coarse for the scores.
        Absent unless the estimator is the histogram.
  """
  num_experts = stats.load_E.shape[-1]
  load_LE = stats.load_E.astype(jnp.float32)
  util_LE = _over_mean(load_LE)
  share_LE = util_LE / num_experts
  entropy_L = -jnp.sum(
    share_LE * jnp.log(jnp.where(share_LE > 0, share_LE, 1.0)), axis=-1
  )
  util_max_L = jnp.max(util_LE, axis=-1)
  report = {
    'max_vio': util_max_L - 1.0,
    'util_min': jnp.min(util_LE, axis=-1),
    'util_max': util_max_L,
    'entropy': entropy_L / jnp.log(num_experts),
    'dead_experts': jnp.sum(
      util_LE < config.dead_threshold, axis=-1, dtype=jnp.int32
    ),
    'gate_mass_min': jnp.min(_over_mean(stats.gate_mass_E), axis=-1),
    'bias_range': jnp.max(bias_LE, axis=-1) - jnp.min(bias_LE, axis=-1),
  }
  if stats.histogram_EW.size:
    _, _, inside_LE = locate_quantile(stats.histogram_EW, top_k)
    whole_L, rest_L = target_load(stats.tokens, top_k, num_experts)
    target_L = whole_L + rest_L / num_experts
    report['bin_mass_over_q'] = jnp.max(inside_LE, axis=-1) / jnp.maximum(
      target_L, 1.0
    )
  return report


def _over_mean(amount_LE: jax.Array) -> jax.Array:
  mean_L1 = jnp.mean(amount_LE, axis=-1, keepdims=True)
  return jnp.where(
    mean_L1 > 0, amount_LE / jnp.where(mean_L1 > 0, mean_L1, 1.0), 1.0
  )
