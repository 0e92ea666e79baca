"""Runs the stages of an experiment one after another, and resumes them.

A run continues from its newest good checkpoint in the same workdir, else it
starts afresh. Inside a stage the order of a step is fixed: next batch, step,
record, evaluation, checkpoint; so that a checkpoint has the records of its
own step before it and the data position of the next one in it.
"""

import dataclasses
import os
import time

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from hybrid_moe import extension, health, memory_plan, metrics, run_summary
from hybrid_moe.checkpoint import Checkpoints
from hybrid_moe.config import ExperimentConfig
from hybrid_moe.data.pipeline import StageData, prepare_stage
from hybrid_moe.data.tokenizer import check_vocabulary, load_tokenizer
from hybrid_moe.evaluation import evaluate
from hybrid_moe.mesh import check_batch, make_mesh
from hybrid_moe.preemption import PreemptionSignal
from hybrid_moe.progress import Progress
from hybrid_moe.run_data import changed_rows, rows_to_meta
from hybrid_moe.run_events import RunEvents
from hybrid_moe.run_position import RunPosition, require_same_config
from hybrid_moe.stage import StageProgram, compile_stage
from hybrid_moe.step_log import BadSteps, StepLog
from hybrid_moe.train_state import TrainState, abstract_state, init_state
from hybrid_moe.workdir import open_workdir


@dataclasses.dataclass(frozen=True)
class RunResult:
  """How a run ended.

  Attributes:
    is_complete: whether all stages ended; if not, the same command goes on.
    state: the last state.
    position: where the run is.
  """

  is_complete: bool
  state: TrainState
  position: RunPosition


def run(config: ExperimentConfig, workdir: str) -> RunResult:
  """Trains through all stages; see the module's docstring.

  Args:
    config: the experiment.
    workdir: folder for data, checkpoints, metrics and the report; shared by
      all processes.

  Returns:
    How it ended.

  Raises:
    ConfigError: anything that cannot work, before training begins.
    CheckpointError: every checkpoint in the workdir is damaged, or one cannot
      be written.
    RollbackError: the loss did not recover after several roll-backs.
  """
  # First of all: data can take hours to pack, and programs to compile.
  for stage in config.stages:
    check_batch(stage, make_mesh(stage.mesh))
  with open_workdir(workdir):
    runner = _Runner(config, workdir)
    with PreemptionSignal() as signal, runner.checkpoints:
      return runner.run(signal)


@dataclasses.dataclass
class _Continued:
  """A restored run."""

  state: TrainState
  position: RunPosition
  damaged: list[tuple[int, str]]


class _Runner:
  """A run's open files, data, programs and position."""

  def __init__(self, config: ExperimentConfig, workdir: str):
    self.config = config
    self.workdir = workdir
    self.tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(self.tokenizer, config.model.vocab_size)
    self.data = [self._prepare(i) for i in range(len(config.stages))]
    self.validation = [
      data.validation_batches(
        config.eval.num_batches,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
      )
      for data in self.data
    ]
    self.checkpoints = Checkpoints(
      os.path.join(os.path.abspath(workdir), 'checkpoints'), config.checkpoint
    )
    self.ledger = health.RollbackLedger(workdir, config.health)
    self.programs: dict[int, StageProgram] = {}
    self.writer: metrics.MetricsWriter | None = None
    self.events: RunEvents | None = None

  def _prepare(self, index: int) -> StageData:
    stage = self.config.stages[index]
    data = prepare_stage(
      self.config.data,
      stage,
      self.tokenizer,
      self.config.data.data_dir or os.path.join(self.workdir, 'data'),
      process_index=jax.process_index(),
      barrier=_barrier,
    )
    report = data.report
    _say(
      f'data of stage {stage.name}: {report["rows"]:,} rows, '
      f'{report["tokens"]:,} tokens of {report["documents"]:,} documents, '
      f'{report["padding_waste"]:.1%} padding'
    )
    return data

  def program(self, index: int) -> StageProgram:
    """A stage's programs, compiled when first asked for."""
    if index not in self.programs:
      program = compile_stage(
        self.config, index, len(self.data[index].source_names)
      )
      _say(program.describe())
      memory_plan.check(program.memory, self.config.memory)
      run_summary.store_program(self.workdir, program)
      self.programs[index] = program
    return self.programs[index]

  def run(self, signal: PreemptionSignal) -> RunResult:
    """Restores or begins, then runs the stages that are left."""
    restored = self._restore()
    position = restored.position if restored else RunPosition()
    # All of them now: a plan that does not fit is refused before training.
    for index in range(position.stage_index, len(self.config.stages)):
      if index > position.stage_index or not position.is_stage_done:
        self.program(index)
    self.writer = metrics.MetricsWriter(
      self.workdir, position.step if restored else -1
    )
    self.events = RunEvents(self.writer, self.workdir)
    with self.writer:
      if restored:
        state = restored.state
        self._report(restored)
        del restored
      else:
        state = self._begin(position)
      is_stopped = False
      while not is_stopped and not self._is_over(position):
        if position.is_stage_done:
          position.enter_next_stage()
        position.data_position = self.ledger.position_after(
          position.step, position.data_position
        )
        failure = None
        try:
          state = self._enter_stage(state, position)
          state, is_stopped = self._run_stage(state, position, signal)
        except BadSteps as error:
          # Its traceback holds the state, and two may not fit in memory.
          failure = error.with_traceback(None)
        if failure is not None:
          state = None
          state, position = self._roll_back(failure)
      text = run_summary.finish(
        self.config,
        self.workdir,
        self.tokenizer,
        self.data,
        state,
        is_complete=self._is_over(position),
        lost_skips=self.ledger.skipped,
      )
      if text:
        self.writer.write_text(position.step, 'sample', text)
    return RunResult(self._is_over(position), state, position)

  def _is_over(self, position: RunPosition) -> bool:
    last = len(self.config.stages) - 1
    return position.stage_index == last and position.is_stage_done

  def _restore(self) -> '_Continued | None':
    """The newest good checkpoint, if there is any."""
    mesh = make_mesh(self.config.stages[0].mesh)
    restored = self.checkpoints.restore_newest(
      abstract_state(self.config, mesh),
      lambda meta: require_same_config(meta, self.config),
    )
    if restored is None:
      return None
    position = RunPosition.from_meta(restored.meta, self.config)
    _say(
      f'continuing from step {restored.step}, stage '
      f'{self.config.stages[position.stage_index].name!r}'
    )
    for change in changed_rows(restored.meta, self.data):
      _say(f'warning: the data has changed since that step: {change}')
    return _Continued(restored.state, position, restored.damaged)

  def _begin(self, position: RunPosition) -> TrainState:
    """Initial state, evaluated, and saved as one to go back to."""
    self.ledger.clear(write=jax.process_index() == 0)
    with jax.set_mesh(self.program(0).mesh):
      state = init_state(self.config, jax.random.key(self.config.seed))
    state = self._enter_stage(state, position)
    self._evaluate(state, position, None, is_last=False)
    self._save(state, position, is_stage_end=False, wait=False)
    return state

  def _roll_back(self, error: BadSteps) -> tuple[TrainState, RunPosition]:
    """The last checkpoint's state; its data continues past the bad batches."""
    restored = self._restore()
    position = restored.position
    self.ledger.record(
      position.step,
      error.data_position,
      str(error),
      skipped=error.skipped_total - int(restored.state.health.skipped_total),
      write=jax.process_index() == 0,
    )
    self.writer.rewind(position.step)
    _say(f'rolling back to step {position.step}: {error}')
    self._report(restored)
    return restored.state, position

  def _report(self, restored: '_Continued') -> None:
    """Tells of damaged checkpoints, and of roll-backs to this one."""
    position = restored.position
    stage = self.config.stages[position.stage_index].name
    for step, reason in restored.damaged:
      _say(f'checkpoint of step {step} is damaged and passed over: {reason}')
      event = metrics.DAMAGED_CHECKPOINT
      self.events.write(position.step, stage, event, reason)
    self.events.write_rollbacks(position.step, stage, self.ledger)

  def _enter_stage(
    self, state: TrainState, position: RunPosition
  ) -> TrainState:
    """Moves the state to the stage's mesh; resets what is the stage's own."""
    if position.stage_step == 0:
      state = state.replace(
        stage_step=jax.numpy.zeros_like(state.stage_step),
        health=health.restart_mean(state.health),
      )
    program = self.program(position.stage_index)
    return jax.device_put(
      state, jax.tree.map(lambda leaf: leaf.sharding, program.state)
    )

  def _run_stage(
    self, state: TrainState, position: RunPosition, signal: PreemptionSignal
  ) -> tuple[TrainState, bool]:
    """Runs a stage to its end; returns whether a signal stopped it before."""
    stage = self.config.stages[position.stage_index]
    program = self.program(position.stage_index)
    batches = self.data[position.stage_index].train_batches(
      position.data_position,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    )
    device = program.mesh.devices.flat[0]
    progress = Progress(
      stage.name,
      self._planned_steps(position),
      position.stage_step,
      flops_per_token=program.flops_per_token,
      num_devices=program.mesh.size,
      device_kind=device.device_kind,
    )
    log = StepLog(self.config, position.stage_index, self.writer, progress)
    is_save_due = is_stopped = is_over = False
    try:
      while not is_stopped and not is_over:
        batch = program.put_training_batch(next(batches))
        state, values = program.step(state, batch)
        position.advance(stage.step_tokens)
        log.add(position.step, position.tokens, position.data_position, values)
        is_last = position.stage_step == self._planned_steps(position)
        every = self.config.eval.every_steps
        if is_last or (every and position.stage_step % every == 0):
          log.flush()
          self._evaluate(state, position, log.load_LE, is_last=is_last)
          log.restart_clock()
        is_over = self._is_stage_over(position)
        if is_last and not is_over:
          progress.extend(self._planned_steps(position))
        is_stopped = signal.should_stop(position.step)
        is_save_due |= self.checkpoints.due(position.step, time.monotonic())
        # A state inside a run of bad steps is a poor one to go back to.
        if is_stopped or (is_save_due and log.flush()):
          log.flush()
          if not is_over:
            self._save(state, position, is_stage_end=False, wait=is_stopped)
          is_save_due = False
          log.restart_clock()
    finally:
      progress.close()
      batches.close()
    if not is_over:
      _say(f'stopped at step {position.step}; the same command continues')
      return state, True
    position.is_stage_done = True
    wait = is_stopped or self._is_over(position)
    self._save(state, position, is_stage_end=True, wait=wait)
    return state, is_stopped

  def _planned_steps(self, position: RunPosition) -> int:
    budget = self.config.stage_steps(self.config.stages[position.stage_index])
    return extension.planned_steps(
      self.config.extension, budget, position.pieces
    )

  def _is_stage_over(self, position: RunPosition) -> bool:
    """Whether the stage has had its steps and evidence lets it end."""
    if position.stage_step < self._planned_steps(position):
      return False
    if not self._should_prolong(position):
      return True
    position.pieces += 1
    buckets = position.stability.unstable_buckets(
      self.config.extension.tolerance_nats
    )
    reason = f'the loss in position buckets {buckets} is above its best'
    _say(f'the stage goes on to step {self._planned_steps(position)}: {reason}')
    stage = self.config.stages[position.stage_index].name
    self.events.write(position.step, stage, metrics.STAGE_PROLONGED, reason)
    return False

  def _should_prolong(self, position: RunPosition) -> bool:
    return extension.should_prolong(
      self.config.extension, position.stability, position.pieces
    )

  def _save(
    self,
    state: TrainState,
    position: RunPosition,
    *,
    is_stage_end: bool,
    wait: bool,
  ) -> None:
    self.writer.sync()
    self.checkpoints.save(
      position.step,
      state,
      position.to_meta(self.config) | rows_to_meta(self.data),
      stage=self.config.stages[position.stage_index].name,
      is_stage_end=is_stage_end,
      wait=wait,
    )

  def _evaluate(
    self,
    state: TrainState,
    position: RunPosition,
    load_LE: np.ndarray | None,
    *,
    is_last: bool,
  ) -> None:
    """Evaluates and records; `is_last` where the stage has had its steps."""
    index = position.stage_index
    values = evaluate(
      self.program(index),
      state,
      self.validation[index],
      self.data[index].source_names,
    )
    by_position = values[metrics.BY_POSITION][metrics.LOSS]
    position.stability.add(by_position)
    if load_LE is not None:
      total = load_LE.sum(axis=-1, keepdims=True).clip(min=1)
      values[metrics.UTILIZATION] = load_LE / total
    stage = self.config.stages[index].name
    _say(
      f'stage {stage}, step {position.step}: validation loss '
      f'{values[metrics.LOSS]:.4f} nats'
    )
    self.writer.write(
      position.step,
      metrics.EVAL,
      {
        metrics.TOKENS: position.tokens,
        metrics.STAGE: stage,
        metrics.IS_STAGE_END: is_last and not self._should_prolong(position),
        **values,
      },
    )


def _say(line: str) -> None:
  """Tells the person at the first process, and the log."""
  logging.info(line)
  if jax.process_index() == 0:
    print(line, flush=True)


def _barrier(name: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)
