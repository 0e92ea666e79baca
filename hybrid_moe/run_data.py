"""Notices that a run continues on other rows than it began with.

What a folder holds can change between a kill and the next start, as can the
standard library with Python. The run goes on, since its data position still
means something, but it is no longer the run that was not killed.
"""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from hybrid_moe.data.pipeline import StageData

_FILE = 'data.json'
_COUNTS = ('rows', 'documents', 'tokens')


def note_rows(workdir: str, data: Sequence[StageData]) -> list[str]:
  """Writes down how much each source gives, and what that was before.

  Args:
    workdir: the run's folder.
    data: rows of every stage.

  Returns:
    A line for each source that gave another number of rows, documents or
    tokens at the last start in this folder.
  """
  path = pathlib.Path(workdir) / _FILE
  now = {
    f'stage {stage.stage}, source {name}, {split}': _counts(source[split])
    for stage in data
    for name, source in stage.report['sources'].items()
    for split in ('train', 'validation')
  }
  before = json.loads(path.read_text()) if path.exists() else {}
  temporary = path.with_suffix('.tmp')
  temporary.write_text(json.dumps(now, indent=2) + '\n')
  os.replace(temporary, path)
  return [
    f'{name}: {counts} now, {before[name]} before'
    for name, counts in now.items()
    if name in before and before[name] != counts
  ]


def _counts(report: dict[str, Any]) -> str:
  return ', '.join(f'{report[name]:,} {name}' for name in _COUNTS)
