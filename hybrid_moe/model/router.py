"""Routing of tokens to experts: sigmoid scores, biased choice, raw weights.

Kimi K3 report (arXiv 2607.24653), section 2.3. The balancing bias decides
which experts a token takes and never how they are weighted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_moe.balance.quantile import biased_scores
from hybrid_moe.model.linear import linear

# Keeps the weights finite when every chosen score has underflowed to zero. The
# gradient divides by its square, which is a normal float32.
_TINY = 1e-18


class Routes(NamedTuple):
  """Where tokens go.

  Attributes:
    ids_NS: int32 chosen experts.
    weight_NS: float32 weights, of sum `routed_scale`.
    cutoff_N: float32 best biased score among those not chosen.
  """

  ids_NS: jax.Array
  weight_NS: jax.Array
  cutoff_N: jax.Array


def router_scores(x_BTD: jax.Array, w_DE: jax.Array) -> jax.Array:
  """Sigmoid scores [B, T, E] in float32, from the full width.

  Near 0.5 a bfloat16 score is as coarse as a bin of the balancer, hence
  float32 operands and accumulation.
  """
  x_BTD = x_BTD.astype(jnp.float32)
  return jax.nn.sigmoid(linear(x_BTD, w_DE, jax.lax.Precision.HIGHEST))


def route(
  scores_NE: jax.Array, bias_E: jax.Array, top_k: int, routed_scale: float
) -> Routes:
  """Chooses experts by biased score and weights them by raw score.

  Args:
    scores_NE: float32 sigmoid scores.
    bias_E: float32 balancing bias.
    top_k: experts of a token, S; less than E.
    routed_scale: sum of a token's weights.

  Returns:
    The routes. Ids and cutoffs carry no gradient.
  """
  biased_NE = biased_scores(jax.lax.stop_gradient(scores_NE), bias_E)
  values, ids = jax.lax.top_k(biased_NE, top_k + 1)
  ids_NS = ids[:, :top_k]
  chosen_NS = jnp.take_along_axis(scores_NE, ids_NS, axis=1)
  total_N1 = jnp.sum(chosen_NS, axis=1, keepdims=True) + _TINY
  # The gradient of a quotient multiplies its cotangent by 1 / total^2 before it
  # multiplies by the numerator, and overflows; that of this product does not.
  weight_NS = chosen_NS * (routed_scale / total_N1)
  return Routes(ids_NS, weight_NS, values[:, top_k])
