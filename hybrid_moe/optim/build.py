"""The optimiser of a run."""

from typing import Any

import jax
import optax

from hybrid_moe.optim.muon import muon_direction
from hybrid_moe.optim.roles import (
  ADAMW,
  ADAMW_NO_DECAY,
  MUON,
  optimizer_labels,
)
from hybrid_moe.run_config import OptimConfig


def build_optimizer(
  optim: OptimConfig,
) -> optax.GradientTransformationExtraArgs:
  """Clipping, then Muon or AdamW by a parameter's role.

  The learning rate is an argument of `update`, not part of the optimiser:

    updates, state = tx.update(
        grads, state, params, learning_rate=schedule(stage_step))
    params = optax.apply_updates(params, updates)

  So one state, of one structure, passes through all stages whatever their
  schedules are. An update is -learning_rate * (direction + weight_decay * w),
  the decay for matrices and embeddings only.

  Args:
    optim: hyper-parameters.

  Returns:
    A transformation of parameter trees whose leaves are named as in
    `roles.ROLES`. Its state follows the parameters' dtype and sharding.
    `init` and `update` raise ValueError for a leaf without a role; `update`
    raises TypeError without `learning_rate`.
  """
  decay = optax.add_decayed_weights(optim.weight_decay)
  adam = optax.scale_by_adam(
    b1=optim.adam_b1, b2=optim.adam_b2, eps=optim.adam_eps
  )
  directions = {
    MUON: optax.named_chain(
      (
        'muon',
        muon_direction(optim.muon_momentum, optim.newton_schulz_steps),
      ),
      ('decay', decay),
    ),
    ADAMW: optax.named_chain(('adam', adam), ('decay', decay)),
    ADAMW_NO_DECAY: optax.named_chain(('adam', adam)),
  }
  clip = (
    optax.clip_by_global_norm(optim.clip_norm)
    if optim.clip_norm > 0
    else optax.identity()
  )
  return optax.named_chain(
    ('clip', clip),
    ('by_role', optax.partition(directions, optimizer_labels)),
    ('learning_rate', _scale_by_given_learning_rate()),
  )


def _scale_by_given_learning_rate() -> optax.GradientTransformationExtraArgs:
  def update(
    updates: Any,
    state: optax.EmptyState,
    params: Any = None,
    *,
    learning_rate: jax.Array | float,
    **extra_args: Any,
  ) -> tuple[Any, optax.EmptyState]:
    del params, extra_args
    return jax.tree.map(lambda u: -learning_rate * u, updates), state

  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )
