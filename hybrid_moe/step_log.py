"""Turns the metrics of steps into records, one step late.

Reading a step's metrics waits for it; reading them after the next step is on
its way keeps the devices busy.
"""

import time
from typing import Any

import jax
import numpy as np

from hybrid_moe import metrics
from hybrid_moe.config import ExperimentConfig
from hybrid_moe.metrics import MetricsWriter
from hybrid_moe.progress import Progress

# Weight of the newest step in the smoothed step time.
_NEWEST = 0.1


class BadSteps(Exception):
  """Too many bad steps in a row; the run must go back.

  Attributes:
    data_position: first batch after the bad ones.
    skipped_total: bad steps of the run, these included.
  """

  def __init__(self, reason: str, data_position: int, skipped_total: int):
    super().__init__(reason)
    self.data_position = data_position
    self.skipped_total = skipped_total


class StepLog:
  """Records of the training steps of one stage."""

  def __init__(
    self,
    config: ExperimentConfig,
    stage_index: int,
    writer: MetricsWriter,
    progress: Progress,
  ):
    self._config = config
    self._stage = config.stages[stage_index]
    self._writer = writer
    self._progress = progress
    self._pending: tuple[int, int, int, dict[str, Any]] | None = None
    self._skipped_in_a_row = 0
    self._step_s: float | None = None
    self._last_s = time.monotonic()
    self.load_LE: np.ndarray | None = None

  def add(
    self, step: int, tokens: int, data_position: int, values: dict[str, Any]
  ) -> None:
    """Takes a step's metrics, on the device, and records the previous ones.

    Args:
      step: the run's step.
      tokens: tokens seen after it.
      data_position: first batch after it.
      values: metrics of `train_step`.

    Raises:
      BadSteps: the previous step was the last of too many bad ones.
    """
    previous, self._pending = self._pending, None
    if previous is not None:
      self._record(*previous)
    self._pending = (step, tokens, data_position, values)

  def flush(self) -> bool:
    """Records the step still pending.

    Returns:
      Whether the newest step was good.

    Raises:
      BadSteps: it was the last of too many bad ones.
    """
    previous, self._pending = self._pending, None
    if previous is not None:
      self._record(*previous)
    return self._skipped_in_a_row == 0

  def restart_clock(self) -> None:
    """Leaves what happened since the last step out of the step time."""
    self._last_s = time.monotonic()

  def _record(
    self, step: int, tokens: int, data_position: int, on_device: dict[str, Any]
  ) -> None:
    values = jax.device_get(on_device)
    now_s = time.monotonic()
    elapsed_s, self._last_s = now_s - self._last_s, now_s
    old_s = elapsed_s if self._step_s is None else self._step_s
    self._step_s = old_s + _NEWEST * (elapsed_s - old_s)
    loss = float(values['loss'])
    perf = self._progress.update(
      loss, self._stage.step_tokens / max(self._step_s, 1e-9), self._step_s
    )
    self.load_LE = values.get('load_LE')
    if step % self._config.log_every == 0 or values['skipped']:
      self._write(step, tokens, values, perf)
    self._skipped_in_a_row = int(values['skipped_in_a_row'])
    if self._skipped_in_a_row >= self._config.health.max_consecutive_skips:
      raise BadSteps(
        f'{self._skipped_in_a_row} bad steps in a row up to step {step} '
        f'(loss {loss:g}, gradient norm {float(values["grad_norm"]):g})',
        data_position,
        int(values['skipped_total']),
      )

  def _write(
    self, step: int, tokens: int, values: dict[str, Any], perf: dict[str, float]
  ) -> None:
    balance = dict(values.get('balance', {}))
    record = {
      metrics.TOKENS: tokens,
      metrics.STAGE: self._stage.name,
      metrics.LOSS: values['loss'],
      metrics.GRAD_NORM: values['grad_norm'],
      metrics.LEARNING_RATE: values['lr'],
      metrics.SKIPPED: bool(values['skipped']),
      metrics.TARGETS: values['tokens'],
      metrics.SKIPPED_TOTAL: values['skipped_total'],
    }
    if 'max_logit' in values:
      record[metrics.MAX_LOGIT] = values['max_logit']
    if balance:
      record[metrics.MAX_VIOLATION] = balance.pop('max_vio')
      record[metrics.BALANCE] = balance
    self._writer.write(step, metrics.TRAIN, record, perf)
