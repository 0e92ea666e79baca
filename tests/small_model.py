"""Weights and router views of small models, for tests of the whole model.

Loaded by its path (`runpy.run_path`): test folders are not packages.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_moe.balance.state import init_balance, router_view
from hybrid_moe.model.decoder import Decoder


def views(model, balance):
  """What the routers see before the first step."""
  state = init_balance(balance, model.num_moe_layers, model.moe.num_experts)
  return router_view(balance, state)


def random_params(model, balance, deviation, dt_bias=-3.0):
  """Normal parameters; scales near 1, `dt_bias` near the given value."""
  ones_BT = jnp.ones((1, 1), jnp.int32)
  shapes = jax.eval_shape(
    lambda: Decoder(model, balance).init(
      jax.random.key(0), ones_BT, ones_BT, ones_BT, views(model, balance)
    )
  )
  rng = np.random.default_rng(1)
  near = {'scale': 1.0, 'dt_bias': dt_bias}
  return jax.tree_util.tree_map_with_path(
    lambda path, p: (
      near.get(path[-1].key, 0.0) + deviation * rng.normal(size=p.shape)
    ).astype(np.float32),
    shapes['params'],
  )
