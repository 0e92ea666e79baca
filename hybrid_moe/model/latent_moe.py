"""Stable LatentMoE: routed experts in a narrower space, shared ones beside.

Kimi K3 report (arXiv 2607.24653), section 2.3. The router reads the full
width; experts work on a down-projected latent; their sum is normed before it
is projected up, which keeps the chain of products from blowing up.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hybrid_moe.balance.quantile import aux_loss, observe
from hybrid_moe.balance.state import RouterStats, RouterView
from hybrid_moe.model import experts, norms, parameters, router
from hybrid_moe.model.linear import linear, whole
from hybrid_moe.model.situ_glu import SituGlu
from hybrid_moe.model_config import BalanceConfig, ModelConfig
from hybrid_moe.parallel.batch_shards import map_batch_shards


class LatentMoe(nn.Module):
  """Router, routed experts in the latent space, shared experts.

  Attributes:
    config: sizes; `config.moe` holds those of this layer.
    balance: what the router observes.
  """

  config: ModelConfig
  balance: BalanceConfig

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    segment_ids_BT: jax.Array,
    view: RouterView,
  ) -> tuple[jax.Array, RouterStats, jax.Array]:
    """Routes the tokens.

    Args:
      x_BTD: normed inputs, in the compute dtype.
      segment_ids_BT: int32 documents; 0 is padding, which is not counted.
      view: the router's bias and bins.

    Returns:
      [B, T, D] in the dtype of `x_BTD`; each shard's statistics, stacked in
      front; the auxiliary loss, a float32 scalar that is 0 unless that is how
      the experts are balanced.
    """
    c, m = self.config, self.config.moe
    d, Z = c.d_model, m.latent_dim or c.d_model
    E, F = m.num_experts, m.expert_hidden

    def weight(name, dims, shape):
      return parameters.matrix(self, name, dims, shape, c.init_std)

    router_DE = weight('router', 'DE', (d, E))
    scores_BTE = router.router_scores(x_BTD, router_DE)
    if m.latent_dim:
      z_BTZ = linear(x_BTD, weight('latent_down', 'DZ', (d, Z)))
    else:
      z_BTZ = x_BTD
    expert_weights = experts.ExpertWeights(
      whole(weight('w_gate', 'EZF', (E, Z, F)), c.dtype),
      whole(weight('w_up', 'EZF', (E, Z, F)), c.dtype),
      whole(weight('w_down', 'EFZ', (E, F, Z)), c.dtype),
    )
    implementation = experts.resolve_implementation(m.implementation)

    def run(batched, replicated):
      scores_bTE, z_bTZ, segment_ids_bT = batched
      expert_weights, view = replicated
      scores_NE = scores_bTE.reshape(-1, E)
      routes = router.route(scores_NE, view.bias_E, m.top_k, m.routed_scale)
      stats = observe(
        self.balance,
        scores_NE,
        routes.cutoff_N,
        routes.ids_NS,
        routes.weight_NS,
        segment_ids_bT.reshape(-1) > 0,
        view,
      )
      u_NZ = experts.run_experts(
        z_bTZ.reshape(-1, Z),
        routes,
        expert_weights,
        gate_cap=c.situ_gate_cap,
        up_cap=c.situ_up_cap,
        implementation=implementation,
      )
      # A leading dimension that counts the shards: they are summed once a
      # step for all layers, not once a layer.
      return u_NZ.reshape(z_bTZ.shape), jax.tree.map(lambda s: s[None], stats)

    u_BTZ, stats = map_batch_shards(
      run, (scores_BTE, z_BTZ, segment_ids_BT), (expert_weights, view)
    )
    if m.use_latent_norm:
      u_BTZ = norms.RmsNorm(c.norm_eps, name='latent_norm')(u_BTZ)
    y_BTD = u_BTZ
    if m.latent_dim:
      y_BTD = linear(u_BTZ, weight('latent_up', 'ZD', (Z, d)))
    if m.num_shared_experts:
      shared = SituGlu(c, m.num_shared_experts * F, name='shared')
      y_BTD = y_BTD + shared(x_BTD)
    aux = jnp.zeros((), jnp.float32)
    if self.balance.method == 'aux_loss':
      aux = aux_loss(
        scores_BTE.reshape(-1, E),
        jnp.sum(stats.load_E, axis=0),
        segment_ids_BT.reshape(-1) > 0,
      )
    return y_BTD, stats, aux
