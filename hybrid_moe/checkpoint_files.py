"""Checkpoint directories on disk: names, order, retention, notes of damage.

What is inside a checkpoint is `checkpoint.py`'s business. Layout under the
directory, which all processes share:

  step_00000200            one committed checkpoint
  step_00000200.1          a later save of the same step; it supersedes the one
                           above and never overwrites it
  step_00000200.damaged    note that a restore found this one damaged
  *.orbax-checkpoint-tmp   a save that has not been committed
  *.deleting               a checkpoint that is being deleted
"""

import dataclasses
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from absl import logging

_NAME = re.compile(r'step_(\d{8,})(?:\.(\d+))?')
_UNCOMMITTED = '.orbax-checkpoint-tmp'
_DELETING = '.deleting'
_DAMAGED = '.damaged'


class CheckpointError(RuntimeError):
  """Checkpoints cannot be written, or none can be restored."""


@dataclasses.dataclass(frozen=True, order=True)
class Entry:
  """One checkpoint's place in the order of saves.

  Attributes:
    step: optimiser step.
    attempt: how many times that step had been saved before.
  """

  step: int
  attempt: int = 0

  @property
  def name(self) -> str:
    """Name of the checkpoint's directory."""
    suffix = f'.{self.attempt}' if self.attempt else ''
    return f'step_{self.step:08d}{suffix}'


@dataclasses.dataclass(frozen=True)
class Label:
  """What retention must know of a checkpoint."""

  stage: str
  is_stage_end: bool


class CheckpointFiles:
  """The checkpoints of one run on disk.

  Attributes:
    directory: where they are, absolute.
  """

  def __init__(self, directory: str, read_label: Callable[[pathlib.Path], Any]):
    """Creates the directory and finds out whether it can be written.

    Args:
      directory: where checkpoints are.
      read_label: reads a checkpoint's `Label`; raises if it is damaged.

    Raises:
      CheckpointError: the directory cannot be created or written.
    """
    self.directory = pathlib.Path(directory).absolute()
    self._read_label = read_label
    self._labels: dict[Entry, Label | None] = {}
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryFile(dir=self.directory):
        pass
    except OSError as error:
      raise CheckpointError(
        f'checkpoint directory {self.directory} cannot be written '
        f'({error.strerror}): accepted is a writable directory'
      ) from error

  def path(self, entry: Entry) -> pathlib.Path:
    """Directory of a checkpoint."""
    return self.directory / entry.name

  def entries(self) -> list[Entry]:
    """Committed checkpoints, oldest first."""
    matches = (_NAME.fullmatch(p.name) for p in self.directory.iterdir())
    return sorted(Entry(int(m[1]), int(m[2] or 0)) for m in matches if m)

  def next_entry(self, step: int) -> Entry:
    """The name under which to save a step, without overwriting another."""
    attempts = [e.attempt for e in self.entries() if e.step == step]
    return Entry(step, max(attempts, default=-1) + 1)

  def remove_unfinished(self) -> None:
    """Removes what saves and deletions of killed processes left behind."""
    for path in self.directory.iterdir():
      if _UNCOMMITTED in path.name or path.name.endswith(_DELETING):
        logging.info('Removing %s, left by a killed process.', path)
        shutil.rmtree(path, ignore_errors=True)

  def note_damage(self, entry: Entry, reason: str | None) -> None:
    """Notes, beside a checkpoint, that it is damaged, or (None) that it is not.

    The note outlives the process, so that retention never counts a damaged
    checkpoint as one of those it keeps. The damaged one itself is left alone.
    """
    self._labels.pop(entry, None)
    note = self.directory / f'{entry.name}{_DAMAGED}'
    try:
      if reason is None:
        note.unlink(missing_ok=True)
      else:
        note.write_text(reason + '\n')
    except OSError as error:
      logging.warning('%s: %s', note, error)

  def delete_surplus(self, keep_last: int) -> None:
    """Deletes all but the newest, and the newest end of every stage.

    Args:
      keep_last: how many of the newest intact steps stay.
    """
    intact = [e for e in self.entries() if self._label(e) is not None]
    by_step = {e.step: e for e in intact}
    keep = set(list(by_step.values())[-keep_last:])
    stage_ends = {
      self._label(e).stage: e
      for e in by_step.values()
      if self._label(e).is_stage_end
    }
    keep.update(stage_ends.values())
    for entry in intact:
      if entry not in keep:
        self._delete(entry)

  def _delete(self, entry: Entry) -> None:
    # Renamed first, so that half a deletion is never taken for damage.
    path = self.path(entry)
    doomed = path.with_name(path.name + _DELETING)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    self._labels.pop(entry, None)

  def _label(self, entry: Entry) -> Label | None:
    """A checkpoint's label; None if it is damaged."""
    if entry not in self._labels:
      path = self.path(entry)
      try:
        is_noted = path.with_name(path.name + _DAMAGED).exists()
        self._labels[entry] = None if is_noted else self._read_label(path)
      except Exception as error:
        logging.warning('Checkpoint %s is damaged: %s', path, error)
        self._labels[entry] = None
    return self._labels[entry]
