"""Directories that exist complete or not at all.

Everything the pipeline prepares is a directory named by a digest of all that
determines its content. It is built under another name and renamed, so a
directory with the final name is complete even if a build was killed.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

META_FILE = 'meta.json'


class DamagedCacheError(RuntimeError):
  """Prepared data that is missing parts or fails its checksum."""


def digest(fields: dict[str, Any]) -> str:
  """Returns 16 hex digits that change with any field (JSON-able values)."""
  text = json.dumps(fields, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_complete(path: str) -> bool:
  """Whether `build_directory` has finished `path`."""
  return os.path.isfile(os.path.join(path, META_FILE))


def build_directory(
  path: str, build: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
  """Makes sure that directory `path` exists, building it at most once.

  Safe against a kill at any moment and against other processes that build
  the same directory: a lock makes them wait, and where the file system has
  no locks the first rename wins.

  Args:
    path: the directory; its parents are made.
    build: fills the directory it is given and returns its metadata
      (JSON-able).

  Returns:
    The metadata, of this build or of the one that had finished before.
  """
  if is_complete(path):
    return read_meta(path)
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with _lock(path + '.lock'):
    if is_complete(path):
      return read_meta(path)
    _remove_abandoned(path)
    owner = f'{socket.gethostname()}-{os.getpid()}'
    partial = f'{path}.partial-{owner}-{uuid.uuid4().hex[:8]}'
    os.makedirs(partial)
    try:
      meta = build(partial)
      with open(os.path.join(partial, META_FILE), 'w') as file:
        json.dump(meta, file, indent=1, sort_keys=True)
      _sync(partial)
      if os.path.isdir(path) and not is_complete(path):
        shutil.rmtree(path)  # someone removed its metadata by hand
      try:
        os.rename(partial, path)
      except OSError:
        if not is_complete(path):
          raise
    finally:
      shutil.rmtree(partial, ignore_errors=True)
  return read_meta(path)


def read_meta(path: str) -> dict[str, Any]:
  """Returns the metadata of a finished directory.

  Raises:
    DamagedCacheError: there is none, or it cannot be read.
  """
  try:
    with open(os.path.join(path, META_FILE)) as file:
      return json.load(file)
  except (OSError, ValueError) as error:
    raise DamagedCacheError(
      f'{path}: no readable {META_FILE} ({error}); delete the directory to '
      'have it built again'
    ) from error


@contextlib.contextmanager
def _lock(path: str) -> Iterator[None]:
  with open(path, 'a') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
      logging.warning('%s: no lock (%s); the first rename wins', path, error)
    yield


def _remove_abandoned(path: str) -> None:
  """Removes what killed builds of `path` on this machine have left."""
  parent, name = os.path.split(path)
  owned = re.compile(
    re.escape(f'{name}.partial-{socket.gethostname()}-') + '([0-9]+)-[0-9a-f]+'
  )
  for entry in os.listdir(parent):
    match = owned.fullmatch(entry)
    if match and not _is_alive(int(match.group(1))):
      logging.info('removing abandoned %s', entry)
      shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)


def _is_alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True


def _sync(path: str) -> None:
  """Flushes a directory to disk, so that no rename outlives its content."""
  for folder, _, names in os.walk(path, topdown=False):
    for name in [*names, '.']:
      handle = os.open(os.path.join(folder, name), os.O_RDONLY)
      try:
        os.fsync(handle)
      finally:
        os.close(handle)
