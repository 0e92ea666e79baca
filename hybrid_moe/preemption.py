"""Notices that the machine is about to be taken away, and stops in time.

Schedulers send SIGTERM some seconds or minutes before they kill a process.
`PreemptionSignal` turns it into a question that the training loop asks between
steps; what to do about it (save, then leave) is the loop's business.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

import jax
from absl import logging
from jax.experimental import multihost_utils


class PreemptionSignal:
  """Context in which SIGTERM asks for a stop instead of killing the process.

  One process alone handles the signal itself; a second SIGTERM then has its
  usual effect, so that a loop that hangs can still be ended. KeyboardInterrupt
  is never touched. Under `jax.distributed` its coordination service receives
  the signal, and the processes agree on the step at which all of them stop,
  also if only one of them was notified.
  """

  def __init__(self):
    self._received = False
    self._previous = None

  def __enter__(self) -> Self:
    # A handler of ours would hide the signal from jax's coordination service.
    if jax.distributed.is_initialized():
      return self
    if threading.current_thread() is not threading.main_thread():
      logging.warning('SIGTERM is not handled outside of the main thread.')
      return self
    previous = signal.signal(signal.SIGTERM, self._receive)
    # None stands for a handler that was not installed from Python.
    self._previous = signal.SIG_DFL if previous is None else previous
    return self

  def __exit__(
    self,
    error_type: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._give_back()

  def should_stop(self, step: int) -> bool:
    """Whether to save and leave after this step.

    Args:
      step: the step just completed. Under `jax.distributed` every process
        must ask after every step, with the same numbers.
    """
    if jax.distributed.is_initialized():
      return multihost_utils.reached_preemption_sync_point(step)
    return self._received

  def _receive(self, signum: int, frame: FrameType | None) -> None:
    self._received = True
    self._give_back()

  def _give_back(self) -> None:
    if self._previous is not None:
      signal.signal(signal.SIGTERM, self._previous)
      self._previous = None
