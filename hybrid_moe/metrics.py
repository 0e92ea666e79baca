"""Records of a run: names, writing, reading, and use of the hardware.

`metrics.jsonl` is the source of truth: one JSON object a line, each with STEP
(optimiser step, counted over all stages) and KIND. TensorBoard files beside it
hold the same numbers for a viewer. What depends on the wall clock is under
PERF alone, so that a run that was killed and resumed leaves the same records,
apart from PERF, as one that was not.

Fields by kind, those in brackets optional:

  'train'  TOKENS seen so far, STAGE, LOSS in nats a token, GRAD_NORM,
           LEARNING_RATE, SKIPPED (bool: the step was bad and left no trace),
           SKIPPED_TOTAL (bad steps so far), TARGETS (tokens of the step that
           have a loss), [MAX_LOGIT: greatest attention logit],
           [MAX_VIOLATION: greatest load of an expert over the mean load,
           minus 1, by layer], [BALANCE: what else the balancer tells], and
           under PERF: [STEP_SECONDS, TOKENS_PER_SECOND, MFU]
  'eval'   TOKENS, STAGE, IS_STAGE_END (the stage does end here), LOSS,
           BY_POSITION ({EDGES: bucket limits, LOSS: one a bucket}; a position
           counts the tokens since its document's start in the row), BY_SOURCE
           ({name: loss}), [UTILIZATION: share of token slots by expert, a
           list a layer]
  'event'  EVENT (one of EVENTS), STAGE, and what belongs to it: REASON for a
           damaged checkpoint or a roll-back. Its step is the one that the run
           continues from, so that a later resumption there keeps it
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from tensorboardX import SummaryWriter

from hybrid_moe.atomic_file import replace_text

STEP = 'step'
KIND = 'kind'
PERF = 'perf'
TRAIN = 'train'
EVAL = 'eval'
EVENT = 'event'
KINDS = (TRAIN, EVAL, EVENT)

TOKENS = 'tokens'
STAGE = 'stage'
LOSS = 'loss'
GRAD_NORM = 'grad_norm'
LEARNING_RATE = 'lr'
SKIPPED = 'skipped'
TARGETS = 'targets'
SKIPPED_TOTAL = 'skipped_total'
MAX_LOGIT = 'max_logit'
MAX_VIOLATION = 'max_violation'
BALANCE = 'balance'
IS_STAGE_END = 'is_stage_end'
BY_POSITION = 'by_position'
EDGES = 'edges'
BY_SOURCE = 'by_source'
UTILIZATION = 'utilization'
REASON = 'reason'

STEP_SECONDS = 'step_s'
TOKENS_PER_SECOND = 'tokens_per_s'
MFU = 'mfu'

STAGE_PROLONGED = 'stage_prolonged'
ROLLBACK = 'rollback'
DAMAGED_CHECKPOINT = 'damaged_checkpoint'
EVENTS = (STAGE_PROLONGED, ROLLBACK, DAMAGED_CHECKPOINT)

FILE_NAME = 'metrics.jsonl'
TENSORBOARD_DIR = 'tensorboard'

# Dense bfloat16 peak of one jax device in FLOP/s, from the vendors' data
# sheets; the first part that `device_kind` contains, in lower case, decides. A
# device of TPU v4 and later is a chip, of tpu7x one of a chip's two chiplets.
_PEAK_FLOPS = (
  ('b200', 2.25e15),
  ('h200', 989e12),
  ('h100', 989e12),
  ('a100', 312e12),
  ('tpu7x', 1153.5e12),
  ('tpu v6', 918e12),
  ('tpu v5p', 459e12),
  ('tpu v5 lite', 197e12),
  ('tpu v5e', 197e12),
  ('tpu v5', 459e12),
  ('tpu v4', 275e12),
)


def peak_flops(device_kind: str) -> float | None:
  """Peak bfloat16 FLOP/s of one device, None if it is not known.

  Args:
    device_kind: `jax.Device.device_kind`, such as 'NVIDIA H100 80GB HBM3'.
  """
  kind = device_kind.lower()
  return next((peak for part, peak in _PEAK_FLOPS if part in kind), None)


def mfu(
  flops_per_token: float,
  tokens_per_s: float,
  device_kind: str,
  num_devices: int,
) -> float | None:
  """Model FLOP/s utilisation (PaLM, arXiv 2204.02311, appendix B).

  Args:
    flops_per_token: FLOPs that the model itself needs for a token, forward
      and backward, without recomputation.
    tokens_per_s: throughput over all devices.
    device_kind: `jax.Device.device_kind`.
    num_devices: devices that share the work.

  Returns:
    a share of the peak, or None on a device whose peak is not known.
  """
  peak = peak_flops(device_kind)
  if peak is None:
    return None
  return flops_per_token * tokens_per_s / (peak * num_devices)


class MetricsWriter:
  """Appends records to `metrics.jsonl` and TensorBoard.

  Only the first process writes; on others every method does nothing.
  """

  def __init__(self, workdir: str, resume_step: int):
    """Opens the records of a run at the step where it continues.

    Args:
      workdir: the run's directory; created if it is missing.
      resume_step: step of the state that the run continues from, -1 for a new
        run, which writes its step 0 itself. Records of later
        steps, which will be written again, and a last line that a kill cut
        short are dropped.
    """
    self._workdir = pathlib.Path(workdir)
    self._file = None
    self._board = None
    self._open(resume_step)

  def _open(self, resume_step: int) -> None:
    if jax.process_index() != 0:
      return
    path = self._workdir / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
      _drop_after(path, resume_step)
    self._file = open(path, 'a', encoding='utf-8')
    self._board = SummaryWriter(
      str(path.parent / TENSORBOARD_DIR), purge_step=resume_step + 1
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    error_type: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self.close()

  def write(
    self,
    step: int,
    kind: str,
    values: Mapping[str, Any],
    perf: Mapping[str, Any] | None = None,
  ) -> None:
    """Writes one record; it is with the operating system on return.

    Args:
      step: optimiser step.
      kind: one of KINDS.
      values: what the run's configuration and data determine. Scalars may be
        numpy or jax ones; numbers that are not finite become the strings
        'nan', 'inf' and '-inf'.
      perf: what depends on the wall clock.

    Raises:
      ValueError: `kind` is none of KINDS, or `values` uses a reserved name.
    """
    if kind not in KINDS:
      raise ValueError(f'kind={kind!r}: accepted is one of {KINDS}')
    if reserved := {STEP, KIND, PERF} & set(values):
      raise ValueError(f'values has {sorted(reserved)}: these names are ours')
    if self._file is None:
      return
    record = {STEP: step, KIND: kind, **_plain(values)}
    if perf:
      record[PERF] = _plain(perf)
    # One write call for the line, so that a kill cuts this record at most.
    self._file.write(json.dumps(record, allow_nan=False) + '\n')
    self._file.flush()
    for name, value in _scalars(record):
      self._board.add_scalar(f'{kind}/{name}', value, step)

  def rewind(self, step: int) -> None:
    """Drops records of later steps, when the run goes back to `step`."""
    self.close()
    self._open(step)

  def sync(self) -> None:
    """Puts what was written on disk, so that no checkpoint is ahead of it."""
    if self._file is not None:
      self._file.flush()
      os.fsync(self._file.fileno())

  def write_text(self, step: int, name: str, text: str) -> None:
    """Shows a text, such as a sample, in TensorBoard alone."""
    if self._board is not None:
      self._board.add_text(name, text, step)

  def close(self) -> None:
    """Closes the files."""
    if self._file is not None:
      self._file.close()
      self._board.close()
      self._file = None
      self._board = None


def read_metrics(path: str) -> list[dict[str, Any]]:
  """Reads the records of a run.

  Args:
    path: a `metrics.jsonl`, or the directory that holds one.

  Returns:
    records in the order they were written; 'nan', 'inf' and '-inf' are again
    floats. A last line that was cut short is left out.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line other than the last is not a record.
  """
  file = pathlib.Path(path)
  if file.is_dir():
    file /= FILE_NAME
  return [_numbers(json.loads(line)) for line in _whole_lines(file)]


def _whole_lines(path: pathlib.Path) -> list[str]:
  """Lines that are records; only the last may be something else."""
  lines = path.read_text(encoding='utf-8', errors='replace').splitlines(True)
  for number, line in enumerate(lines, 1):
    try:
      is_record = line.endswith('\n') and STEP in json.loads(line)
    except (ValueError, TypeError):
      is_record = False
    if is_record:
      continue
    if number == len(lines):
      return lines[:-1]
    raise ValueError(f'{path}:{number}: {line[:80]!r} is not a record')
  return lines


def _drop_after(path: pathlib.Path, step: int) -> None:
  """Rewrites the file, atomically, without records of later steps."""
  kept = [x for x in _whole_lines(path) if json.loads(x)[STEP] <= step]
  replace_text(path, ''.join(kept))


def _plain(value: Any) -> Any:
  """Python types that JSON can hold."""
  if isinstance(value, Mapping):
    return {str(k): _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  if isinstance(value, (np.ndarray, np.generic, jax.Array)):
    return _plain(np.asarray(value).tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def _numbers(value: Any) -> Any:
  """Undoes what `_plain` does to numbers that are not finite."""
  if isinstance(value, dict):
    return {k: _numbers(v) for k, v in value.items()}
  if isinstance(value, list):
    return [_numbers(v) for v in value]
  return float(value) if value in ('nan', 'inf', '-inf') else value


def _scalars(values: Mapping[str, Any], prefix: str = '') -> Any:
  """Yields names and numbers of a record, nested names joined by '/'."""
  for name, value in values.items():
    if isinstance(value, dict):
      yield from _scalars(value, f'{prefix}{name}/')
    elif value in ('nan', 'inf', '-inf'):
      yield f'{prefix}{name}', float(value)
    elif isinstance(value, (int, float)) and (prefix or name != STEP):
      yield f'{prefix}{name}', float(value)
