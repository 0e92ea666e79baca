"""The folder of a run: writable, and one run's at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

import jax
from absl import logging

from hybrid_moe.agreement import any_process_text
from hybrid_moe.checks import ConfigError

_LOCK_FILE = 'run.lock'


@contextlib.contextmanager
def open_workdir(workdir: str) -> Iterator[None]:
  """Creates the folder, and keeps other runs out of it while it is open.

  Two runs in one folder would mix their records and remove each other's
  unfinished checkpoints. The lock ends with its process, however that ends.

  Args:
    workdir: the run's folder, shared by all its processes.

  Raises:
    ConfigError: a process cannot write to it, or another run is using it; on
      every process.
  """
  with contextlib.ExitStack() as stack:
    # A process that gave up alone would leave the others waiting for it.
    reason = any_process_text(_open(workdir, stack))
    if reason is not None:
      raise ConfigError(reason)
    yield


def _open(workdir: str, stack: contextlib.ExitStack) -> str | None:
  """Opens and locks the folder until `stack` closes, or says why not."""
  try:
    os.makedirs(workdir, exist_ok=True)
    file = stack.enter_context(open(os.path.join(workdir, _LOCK_FILE), 'a'))
  except OSError as error:
    return (
      f'workdir={workdir!r}: accepted is a folder that can be written to '
      f'({error})'
    )
  if jax.process_index() != 0:
    return None
  try:
    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return (
      f'workdir={workdir!r}: another run is using it; accepted is another '
      'folder, or this one when that run has ended'
    )
  except OSError as error:
    logging.warning('%s cannot be locked: %s', workdir, error)
  return None
