"""Notices that a run continues on other rows than it began with.

What a folder holds can change between a kill and the next start, as can the
standard library with Python. The run goes on, since its data position still
means something, but it is no longer the run that was not killed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_moe.data.pipeline import StageData

_KEY = 'rows'


def rows_to_meta(data: Sequence[StageData]) -> dict[str, Any]:
  """What a checkpoint stores of the rows: digests of all that makes them.

  Args:
    data: rows of every stage.
  """
  return {_KEY: {stage.stage: dict(stage.digests) for stage in data}}


def changed_rows(
  meta: Mapping[str, Any], data: Sequence[StageData]
) -> list[str]:
  """Compares the rows with those that a checkpoint's run was on.

  Args:
    meta: of the checkpoint, with what `rows_to_meta` gave.
    data: rows of every stage.

  Returns:
    Names of the stages and sources whose files, tokenizer or document filter
    are not the same.
  """
  before = meta.get(_KEY, {})
  return [
    f'stage {stage.stage!r}, source {source!r}'
    for stage in data
    for source, digest in stage.digests.items()
    if before.get(stage.stage, {}).get(source, digest) != digest
  ]
