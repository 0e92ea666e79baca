"""Checkpoints: saved while training goes on, verified when restored.

The only file that knows Orbax. A save is written under a temporary name and
renamed when complete, so what has its final name (see `checkpoint_files.py`)
was committed. Each checkpoint carries a manifest: shape, dtype and checksum of
every array, the caller's meta data, and a digest of the manifest itself.
Restoring compares all of them, which tells a damaged checkpoint (an older one
is used) from one of another model (an error).
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
from absl import logging
from orbax.checkpoint import v1 as ocp

from hybrid_moe.agreement import any_process_text, first_process_integers
from hybrid_moe.checkpoint_files import (
  CheckpointError,
  CheckpointFiles,
  Entry,
  Label,
)
from hybrid_moe.checksum import checksums
from hybrid_moe.run_config import CheckpointConfig

# Processes agree on the time by a collective, which waits for the devices;
# doing so at every step would leave them idle between steps.
TIME_RULE_STEPS = 8


class CheckpointMismatchError(CheckpointError):
  """An intact checkpoint holds other arrays than the model needs."""


@dataclasses.dataclass(frozen=True)
class Restored:
  """A verified checkpoint.

  Attributes:
    state: arrays in the structure and shardings that were asked for.
    meta: the dict that was saved beside them.
    step: optimiser step of the checkpoint.
    damaged: (step, path and reason) of newer checkpoints passed over.
  """

  state: Any
  meta: dict[str, Any]
  step: int
  damaged: list[tuple[int, str]]


class Checkpoints:
  """Saves, keeps and restores the checkpoints of one run.

  All processes of a run construct one and make the same calls. Use it as a
  context manager or call `wait` before leaving, so that a pending save commits.
  """

  def __init__(self, directory: str, config: CheckpointConfig):
    """Prepares the directory and removes what killed saves left behind.

    Args:
      directory: where checkpoints are, shared by all processes.
      config: when to save and what to keep.

    Raises:
      CheckpointError: the directory cannot be created or written.
    """
    self._files = CheckpointFiles(directory, _read_label)
    self._config = config
    self._pending: tuple[Entry, Any] | None = None
    self._time_origin_s: float | None = None
    if jax.process_index() == 0:
      self._files.remove_unfinished()

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    error_type: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self.wait()

  def due(self, step: int, now: float) -> bool:
    """Whether a checkpoint is due after a step.

    Call it after every step: the time rule counts from the first call after
    construction or after a save.

    Args:
      step: the optimiser step just completed, the same on every process.
      now: seconds of a monotonic clock. With several processes the first
        one's clock decides, at every `TIME_RULE_STEPS`-th step.
    """
    if self._time_origin_s is None:
      self._time_origin_s = now
    every = self._config.every_steps
    if step > 0 and every and step % every == 0:
      return True
    is_late = now - self._time_origin_s >= 60 * self._config.every_minutes
    if jax.process_count() == 1:
      return is_late
    if step % TIME_RULE_STEPS:
      return False
    return bool(first_process_integers([int(is_late)])[0])

  def save(
    self,
    step: int,
    state: Any,
    meta: Mapping[str, Any],
    *,
    stage: str,
    is_stage_end: bool,
    wait: bool = False,
  ) -> None:
    """Saves a state; returns once it is copied to the host.

    The arrays may be donated as soon as this returns. A save still pending is
    waited for first, so that one copy of the state at most is on the host.

    Args:
      step: optimiser step of the state; saving a step again supersedes its
        earlier checkpoint.
      state: pytree of `jax.Array`, of any sharding.
      meta: what else the run needs to continue; JSON types only.
      stage: name of the stage that the state belongs to.
      is_stage_end: whether this is the state at that stage's end, of which the
        newest a stage is kept.
      wait: whether to return only when the checkpoint is committed.

    Raises:
      CheckpointError: this save could not begin or the pending one failed.
    """
    self.wait()
    arrays, _ = _flatten(state)
    for name, array in arrays.items():
      if not isinstance(array, jax.Array):
        raise CheckpointError(
          f'state array {name!r} is a {type(array).__name__}: accepted is a '
          'jax.Array'
        )
    sums = dict(zip(arrays, checksums(list(arrays.values()))))
    content = {
      'stage': stage,
      'is_stage_end': is_stage_end,
      'meta': dict(meta),
      'arrays': {
        name: [list(array.shape), str(array.dtype), sums[name]]
        for name, array in arrays.items()
      },
    }
    try:
      manifest = json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
      raise CheckpointError(f'meta={meta!r}: {error}') from error
    attempt = self._files.next_entry(step).attempt
    entry = Entry(step, first_process_integers([attempt])[0])
    path = self._files.path(entry)
    try:
      response = ocp.save_checkpointables_async(
        path,
        # Orbax has no format for arrays without elements.
        {'state': {n: a for n, a in arrays.items() if a.size}},
        custom_metadata={'manifest': manifest, 'digest': _digest(manifest)},
      )
    except Exception as error:
      raise CheckpointError(
        f'checkpoint {path} cannot be written: {_root_cause(error)}'
      ) from error
    self._pending = (entry, response)
    self._time_origin_s = None
    if wait:
      self.wait()

  def wait(self) -> None:
    """Waits until a pending save is committed, then deletes what is surplus.

    Raises:
      CheckpointError: the pending save failed; older ones are untouched.
    """
    if self._pending is None:
      return
    (entry, response), self._pending = self._pending, None
    path = self._files.path(entry)
    try:
      response.result()
    except Exception as error:
      raise CheckpointError(
        f'checkpoint {path} was not saved: {_root_cause(error)}'
      ) from error
    logging.info('Saved checkpoint %s.', path)
    if jax.process_index() == 0:
      self._files.delete_surplus(self._config.keep_last)

  def restore_newest(
    self,
    abstract_state: Any,
    check_meta: Callable[[dict[str, Any]], None] = lambda meta: None,
  ) -> Restored | None:
    """Restores the newest checkpoint that is whole and unchanged.

    All processes come to the same choice. Release a live state before calling,
    or both are in memory at once.

    Args:
      abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings (or of
        arrays): structure, shapes and dtypes that the checkpoint must have,
        and where its arrays go. Any mesh and device count will do.
      check_meta: is given the meta data before the arrays are looked at, and
        raises if the checkpoint is of another run.

    Returns:
      The checkpoint, or None if there is none at all.

    Raises:
      CheckpointMismatchError: an intact checkpoint has other arrays; the
        message names the first one that differs.
      CheckpointError: there are checkpoints and all of them are damaged.
    """
    self.wait()
    expected, treedef = _flatten(abstract_state)
    for name, x in expected.items():
      if getattr(x, 'sharding', None) is None:
        raise CheckpointError(
          f'abstract_state array {name!r} has no sharding: accepted is a '
          'ShapeDtypeStruct that has one'
        )
    entries = self._files.entries()
    steps = first_process_integers([e.step for e in entries])
    attempts = first_process_integers([e.attempt for e in entries])
    damaged: list[tuple[int, str]] = []
    for entry in map(Entry, reversed(steps), reversed(attempts)):
      path = self._files.path(entry)
      arrays, meta, reason = _read(path, expected, check_meta)
      if jax.process_index() == 0:
        self._files.note_damage(entry, reason)
      if reason is None:
        state = jax.tree.unflatten(treedef, arrays)
        return Restored(state, meta, entry.step, damaged)
      logging.warning('Checkpoint %s is damaged: %s', path, reason)
      damaged.append((entry.step, f'{path}: {reason}'))
    if damaged:
      raise CheckpointError(
        'every checkpoint is damaged; restore one from a copy, or remove '
        f'{self._files.directory} to start afresh:\n'
        + '\n'.join(f'  {reason}' for _, reason in damaged)
      )
    return None


def _read(
  path: pathlib.Path,
  expected: Mapping[str, Any],
  check_meta: Callable[[dict[str, Any]], None],
) -> tuple[list[jax.Array], dict[str, Any], str | None]:
  """Arrays in the order of `expected`, meta data, and what is damaged."""
  manifest, reason = {}, None
  try:
    manifest = _read_manifest(path)
  except Exception as error:
    reason = f'manifest: {_root_cause(error)}'
  if (reason := any_process_text(reason)) is not None:
    return [], {}, reason
  check_meta(manifest['meta'])
  _require_same_arrays(path, manifest['arrays'], expected)
  arrays = {}
  try:
    arrays = _load_arrays(path, expected)
  except jax.errors.JaxRuntimeError:
    # The device's trouble, such as too little memory, not the file's.
    raise
  except Exception as error:
    reason = f'{_first_unreadable(path, expected)}: {_root_cause(error)}'
  if (reason := any_process_text(reason)) is not None:
    return [], {}, reason
  ordered = [arrays[name] for name in expected]
  saved_sums = [manifest['arrays'][name][2] for name in expected]
  changed = [
    name
    for name, found, saved in zip(expected, checksums(ordered), saved_sums)
    if found != saved
  ]
  if changed:
    return [], {}, f'checksum differs from the saved one: {", ".join(changed)}'
  return ordered, manifest['meta'], None


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
  with _local_reading():
    stored = ocp.checkpointables_metadata(path).custom_metadata or {}
  text = stored.get('manifest')
  if text is None or stored.get('digest') != _digest(text):
    raise ValueError('it is missing or altered')
  return json.loads(text)


def _read_label(path: pathlib.Path) -> Label:
  manifest = _read_manifest(path)
  return Label(manifest['stage'], manifest['is_stage_end'])


def _load_arrays(
  path: pathlib.Path, expected: Mapping[str, Any]
) -> dict[str, jax.Array]:
  """Loads the named arrays; those without elements are made anew."""
  stored, arrays = {}, {}
  for name, x in expected.items():
    if x.size:
      stored[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    else:
      make = functools.partial(jnp.zeros, x.shape, x.dtype)
      arrays[name] = jax.jit(make, out_shardings=x.sharding)()
  with _local_reading():
    loaded = ocp.load_checkpointables(path, {'state': stored})['state']
  for name, x in stored.items():
    # Where its own metadata is damaged Orbax may return something else.
    array = loaded.get(name)
    if not isinstance(array, jax.Array) or array.shape != x.shape:
      raise ValueError(f'{name} was read as a {type(array).__name__}')
  return arrays | loaded


def _local_reading() -> ocp.Context:
  """Reading by each process alone, so that one's failure holds up no other."""
  index = jax.process_index()
  context = ocp.Context()
  context.multiprocessing.primary_host = index
  context.multiprocessing.active_processes = {index}
  context.multiprocessing.barrier_sync_key_prefix = f'read_{index}'
  context.pytree.loading.partial_load = True
  return context


def _first_unreadable(path: pathlib.Path, expected: Mapping[str, Any]) -> str:
  """Names the first array that cannot be read on its own."""
  for name, x in expected.items():
    try:
      _load_arrays(path, {name: x})
    except Exception:
      return f'array {name} cannot be read'
  return 'the arrays cannot be read together'


def _require_same_arrays(
  path: pathlib.Path, saved: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
  """Raises on the first array that differs between checkpoint and model."""
  was = {name: f'{dtype}{shape}' for name, (shape, dtype, _) in saved.items()}
  want = {name: f'{x.dtype}{list(x.shape)}' for name, x in expected.items()}
  for name in [*want, *was]:
    if was.get(name) != want.get(name):
      raise CheckpointMismatchError(
        f'checkpoint {path} is of another model: array {name!r} is '
        f'{was.get(name, "missing")} in the checkpoint, '
        f'{want.get(name, "missing")} in the model'
      )


def _flatten(tree: Any) -> tuple[dict[str, Any], Any]:
  """Leaves by dotted name, in tree order, and the tree's structure."""
  leaves, treedef = jax.tree.flatten_with_path(tree)
  named = {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in leaves
  }
  if len(named) != len(leaves):
    raise CheckpointError('state: two arrays have the same dotted name')
  return named, treedef


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _root_cause(error: BaseException) -> str:
  """One line; Orbax wraps the cause in messages about something else."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = str(error).strip() or type(error).__name__
  return text.splitlines()[0][:400]
