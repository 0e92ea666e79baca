"""The folder of a run: writable, and one run's at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

import jax
from absl import logging

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
    ConfigError: it cannot be written to, or another run is using it.
  """
  path = os.path.join(workdir, _LOCK_FILE)
  try:
    os.makedirs(workdir, exist_ok=True)
    file = open(path, 'a')
  except OSError as error:
    raise ConfigError(
      f'workdir={workdir!r}: accepted is a folder that can be written to '
      f'({error})'
    ) from error
  with file:
    if jax.process_index() == 0:
      _lock(file.fileno(), workdir)
    yield


def _lock(handle: int, workdir: str) -> None:
  try:
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise ConfigError(
      f'workdir={workdir!r}: another run is using it; accepted is another '
      'folder, or this one when that run has ended'
    ) from error
  except OSError as error:
    logging.warning('%s cannot be locked: %s', workdir, error)
