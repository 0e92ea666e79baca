"""Everything that training changes, in one tree."""

import functools
import zlib
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from hybrid_moe import sharding
from hybrid_moe.balance.state import BalanceState, init_balance, router_view
from hybrid_moe.config import ExperimentConfig
from hybrid_moe.health import HealthState, init_health
from hybrid_moe.model import decoder, parameters
from hybrid_moe.optim.build import build_optimizer


@flax.struct.dataclass
class TrainState:
  """State of a run; it passes through all stages.

  Attributes:
    step: int32 optimiser steps of the run, skipped ones included.
    stage_step: int32 steps of the current stage.
    params: float32 parameters.
    opt_state: state of the optimiser.
    balance: biases and counts of the routers.
    health: running mean of the loss and skipped steps.
  """

  step: jax.Array
  stage_step: jax.Array
  params: dict[str, Any]
  opt_state: optax.OptState
  balance: BalanceState
  health: HealthState


def init_params(config: ExperimentConfig, key: jax.Array) -> dict[str, Any]:
  """Initial parameters, born sharded on the mesh in use.

  They depend on the key and the model alone, not on lengths or devices.
  """
  with parameters.recorded() as initializers:
    shapes = _abstract_params(config)

  def make(path, leaf):
    names = tuple(entry.key for entry in path)
    # Python's own hash of a string differs from process to process.
    leaf_key = jax.random.fold_in(key, zlib.crc32('/'.join(names).encode()))
    return _initial_value(
      initializers[names],
      leaf.shape,
      names[0] == decoder.LOOP,
      leaf.sharding.spec if leaf.sharding else None,
      leaf_key,
    )

  return jax.tree_util.tree_map_with_path(make, shapes)


def init_state(config: ExperimentConfig, key: jax.Array) -> TrainState:
  """The state at step 0, born sharded on the mesh in use."""
  return _state_around(config, init_params(config, key))


def abstract_state(config: ExperimentConfig, mesh: Mesh) -> TrainState:
  """Shapes, dtypes and shardings of the state on a mesh.

  One tree for compilation ahead of time and for restoring a checkpoint.
  """
  with jax.set_mesh(mesh):
    shapes = jax.eval_shape(
      functools.partial(_state_around, config), _abstract_params(config)
    )

  def placed(leaf):
    spec = leaf.sharding.spec if leaf.sharding else sharding.REPLICATED
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
    )

  return jax.tree.map(placed, shapes)


def _state_around(
  config: ExperimentConfig, params: dict[str, Any]
) -> TrainState:
  """The state at step 0 with the given parameters."""
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    stage_step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=build_optimizer(config.optim).init(params),
    balance=_init_balance(config),
    health=init_health(),
  )


def _abstract_params(config: ExperimentConfig) -> dict[str, Any]:
  """Shapes and shardings of the parameters on the mesh in use."""
  # One token a shard is the smallest input; parameters do not depend on it.
  rows = sharding.num_batch_shards()

  def init():
    tokens_BT = sharding.constrain(
      jnp.ones((rows, 1), jnp.int32), sharding.TOKENS_BT
    )
    return decoder.Decoder(config.model, config.balance).init(
      jax.random.key(0),
      tokens_BT,
      tokens_BT,
      tokens_BT,
      router_view(config.balance, _init_balance(config)),
    )

  return jax.eval_shape(init)['params']


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _initial_value(init, shape, is_stacked, spec, key):
  """One parameter; of a stack, every entry from its own key."""
  if is_stacked:
    keys = jax.random.split(key, shape[0])
    value = jax.vmap(lambda k: init(k, shape[1:], jnp.float32))(keys)
  else:
    value = init(key, shape, jnp.float32)
  return value if spec is None else sharding.constrain(value, spec)


def _init_balance(config: ExperimentConfig) -> BalanceState:
  return init_balance(
    config.balance, config.model.num_moe_layers, config.model.moe.num_experts
  )
