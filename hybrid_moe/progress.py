"""The progress bar of a stage, on the first process."""

import sys
import time
from typing import TextIO

import jax
from tqdm import tqdm

from hybrid_moe import metrics

# Without a terminal a bar would fill a log with carriage returns.
LINE_INTERVAL_S = 30.0


class Progress:
  """A bar that shows loss, speed and time left; lines where no terminal is.

  It takes plain numbers, and never touches a device: the caller passes a
  step's values when it has them, one step late.
  """

  def __init__(
    self,
    stage: str,
    num_steps: int,
    first_step: int = 0,
    *,
    flops_per_token: float | None = None,
    num_devices: int = 1,
    device_kind: str = '',
    stream: TextIO | None = None,
  ):
    """Opens the bar of one stage.

    Args:
      stage: its name.
      num_steps: optimiser steps of the whole stage.
      first_step: steps of the stage done before, when a run is resumed.
      flops_per_token: FLOPs of a token, for the utilisation; None leaves it
        out.
      num_devices: devices that share the work.
      device_kind: `jax.Device.device_kind`.
      stream: where to write; standard error if None.
    """
    self._stage = stage
    self._num_steps = num_steps
    self._done = first_step
    self._flops_per_token = flops_per_token
    self._num_devices = num_devices
    self._device_kind = device_kind
    self._stream = sys.stderr if stream is None else stream
    self._shows = jax.process_index() == 0
    self._bar = None
    self._line_due_s = 0.0
    if self._shows and self._stream.isatty():
      self._bar = tqdm(
        total=num_steps,
        initial=first_step,
        desc=stage,
        unit='step',
        file=self._stream,
        dynamic_ncols=True,
        mininterval=0.5,
      )

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def update(
    self, loss: float, tokens_per_s: float, step_s: float
  ) -> dict[str, float]:
    """Advances by one step.

    Args:
      loss: mean loss of the step in nats.
      tokens_per_s: throughput over all devices.
      step_s: seconds a step takes, smoothed by the caller as it likes.

    Returns:
      the step's entries for the PERF part of its record.
    """
    self._done += 1
    perf = {
      metrics.STEP_SECONDS: step_s,
      metrics.TOKENS_PER_SECOND: tokens_per_s,
    }
    shown = f'loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s'
    if self._flops_per_token is not None:
      share = metrics.mfu(
        self._flops_per_token,
        tokens_per_s,
        self._device_kind,
        self._num_devices,
      )
      if share is not None:
        perf[metrics.MFU] = share
        shown += f', MFU {share:.1%}'
    if self._bar is not None:
      self._bar.set_postfix_str(shown, refresh=False)
      self._bar.update(1)
    elif self._shows:
      self._print_line(shown, step_s)
    return perf

  def extend(self, num_steps: int) -> None:
    """Takes in that the stage is now planned to have `num_steps` steps."""
    self._num_steps = num_steps
    if self._bar is not None:
      self._bar.total = num_steps
      self._bar.refresh()

  def close(self) -> None:
    """Leaves the bar as it stands."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None

  def _print_line(self, shown: str, step_s: float) -> None:
    now_s = time.monotonic()
    if now_s < self._line_due_s and self._done < self._num_steps:
      return
    self._line_due_s = now_s + LINE_INTERVAL_S
    left = tqdm.format_interval((self._num_steps - self._done) * step_s)
    print(
      f'{self._stage}: step {self._done}/{self._num_steps}, {shown}, '
      f'{left} left in the stage',
      file=self._stream,
      flush=True,
    )
