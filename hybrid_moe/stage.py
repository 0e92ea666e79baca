"""One context length: one compiled training program and what it costs."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from hybrid_moe import flops, memory_plan, sharding
from hybrid_moe.config import ExperimentConfig, StageConfig
from hybrid_moe.eval_step import eval_step
from hybrid_moe.memory_plan import MemoryReport, format_bytes
from hybrid_moe.mesh import check_batch, make_mesh
from hybrid_moe.optim.schedule import build_schedule
from hybrid_moe.train_state import TrainState, abstract_state
from hybrid_moe.train_step import train_step

_INT_FIELDS = ('tokens', 'targets', 'segment_ids')


@dataclasses.dataclass(frozen=True)
class StageProgram:
  """The compiled programs of a stage.

  Attributes:
    stage: its configuration.
    mesh: devices that it runs on.
    state: shapes and shardings of the training state on that mesh.
    step: compiled `train_step`; donates the state.
    evaluate: compiled `eval_step`, for the rows of one micro-batch.
    memory: bytes of a device that `step` or `evaluate` needs, whichever needs
      more beside the state.
    parameters: parameters of the model.
    active_parameters: parameters that a token meets.
    flops_per_token: operations of forward and backward for a token.
    compile_s: seconds that tracing and compiling took.
  """

  stage: StageConfig
  mesh: Mesh
  state: TrainState
  step: Any
  evaluate: Any
  memory: MemoryReport
  parameters: int
  active_parameters: int
  flops_per_token: float
  compile_s: float

  def describe(self) -> str:
    """The report that a person sees before training begins."""
    memory = self.memory
    return (
      f'stage {self.stage.name}: {self.stage.global_batch} rows of '
      f'{self.stage.seq_len} tokens on {self.mesh.size} '
      f'{self.mesh.devices.flat[0].device_kind} device(s); '
      f'{self.parameters:,} parameters ({self.active_parameters:,} active), '
      f'{self.flops_per_token:.3g} FLOPs a token; '
      f'bytes a device: {format_bytes(memory.arguments)} arguments, '
      f'{format_bytes(memory.temporaries)} temporaries, '
      f'{format_bytes(memory.peak)} peak of {format_bytes(memory.available)} '
      f'({memory.headroom:.0%} free); compiled in {self.compile_s:.1f} s'
    )

  def put_training_batch(
    self, batch: dict[str, np.ndarray]
  ) -> dict[str, jax.Array]:
    """Places this process's rows [b, T] on the mesh as [A, B, T]."""
    place = NamedSharding(self.mesh, sharding.MICRO_ABT)
    micro = self.stage.micro_batches
    return {
      name: jax.make_array_from_process_local_data(
        place, batch[name].reshape(micro, -1, self.stage.seq_len)
      )
      for name in (*_INT_FIELDS, 'loss_mask')
    }

  def put_eval_batches(
    self, batch: dict[str, np.ndarray]
  ) -> list[dict[str, jax.Array]]:
    """Places this process's rows as micro-batches [B, T]."""
    parts = {
      name: np.split(value, self.stage.micro_batches)
      for name, value in batch.items()
    }
    return [
      {
        name: jax.make_array_from_process_local_data(
          NamedSharding(
            self.mesh,
            sharding.ROWS_B if name == 'source_ids' else sharding.TOKENS_BT,
          ),
          part,
        )
        for name, part in zip(parts, values)
      }
      for values in zip(*parts.values())
    ]


def compile_stage(
  config: ExperimentConfig,
  index: int,
  num_sources: int,
  devices: list[jax.Device] | None = None,
) -> StageProgram:
  """Traces and compiles a stage's training and evaluation ahead of time.

  Args:
    config: the experiment.
    index: which of its stages.
    num_sources: sources in the stage's data.
    devices: devices to compile for; all by default.

  Raises:
    ConfigError: mesh and batch do not fit the devices.
  """
  start_s = time.monotonic()
  stage = config.stages[index]
  mesh = make_mesh(stage.mesh, devices)
  check_batch(stage, mesh)
  schedule = build_schedule(
    config.optim, tuple(config.stage_steps(s) for s in config.stages)
  )[index]
  state = abstract_state(config, mesh)
  rows = stage.global_batch // stage.micro_batches
  with jax.set_mesh(mesh):
    step = functools.partial(train_step, config, stage.remat, schedule)
    shape = (stage.micro_batches, rows, stage.seq_len)
    compiled_step = (
      jax.jit(step, donate_argnums=0)
      .trace(state, _abstract_batch(shape, mesh, sharding.MICRO_ABT))
      .lower()
      .compile(_compiler_options(mesh))
    )
    batch = _abstract_batch(shape[1:], mesh, sharding.TOKENS_BT)
    batch['source_ids'] = jax.ShapeDtypeStruct(
      (rows,), jnp.int32, sharding=NamedSharding(mesh, sharding.ROWS_B)
    )
    evaluate = functools.partial(eval_step, config, num_sources)
    compiled_evaluate = (
      jax.jit(evaluate)
      .trace(state.params, state.balance, batch)
      .lower()
      .compile(_compiler_options(mesh))
    )
  available = memory_plan.device_memory_bytes(
    config.memory, mesh.devices.flat[0]
  )
  memory, memory_of_evaluate = (
    MemoryReport.from_compiled(stage.name, compiled, available)
    for compiled in (compiled_step, compiled_evaluate)
  )
  memory = memory.beside(memory_of_evaluate)
  return StageProgram(
    stage=stage,
    mesh=mesh,
    state=state,
    step=compiled_step,
    evaluate=compiled_evaluate,
    memory=memory,
    parameters=flops.count_parameters(state.params),
    active_parameters=flops.count_active_parameters(config.model, state.params),
    flops_per_token=flops.training_flops_per_token(
      config.model, state.params, stage.seq_len
    ),
    compile_s=time.monotonic() - start_s,
  )


def _compiler_options(mesh: Mesh) -> dict[str, int]:
  """On CPU, LLVM's higher levels compile three times longer for nothing."""
  is_cpu = mesh.devices.flat[0].platform == 'cpu'
  return {'xla_backend_optimization_level': 1} if is_cpu else {}


def _abstract_batch(shape, mesh, spec):
  place = NamedSharding(mesh, spec)
  batch = {
    name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
    for name in _INT_FIELDS
  }
  batch['loss_mask'] = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=place)
  return batch
