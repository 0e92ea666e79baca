"""Decisions that every process of a run must take alike.

Each function is called by all processes together. With one process they cost
nothing. With several they use a collective, which waits for the devices.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils

_TEXT_BYTES = 1024


def first_process_integers(values: list[int]) -> list[int]:
  """The first process's integers (below 2^31), on every process.

  Args:
    values: integers; their number may differ between processes.
  """
  if jax.process_count() == 1:
    return values
  count = int(multihost_utils.broadcast_one_to_all(np.int32(len(values))))
  if not count:
    return []
  sent = np.zeros(count, np.int32)
  if jax.process_index() == 0:
    sent[:] = values
  return [int(v) for v in multihost_utils.broadcast_one_to_all(sent)]


def any_process_text(text: str | None) -> str | None:
  """What processes report, each under its number; None if none does.

  Args:
    text: this process's report, cut after 1024 bytes, or None.
  """
  if jax.process_count() == 1:
    return text
  sent = np.zeros(_TEXT_BYTES, np.uint8)
  encoded = (text or '').encode()[:_TEXT_BYTES]
  sent[: len(encoded)] = np.frombuffer(encoded, np.uint8)
  rows = multihost_utils.process_allgather(sent)
  found = [
    f'process {index}: {bytes(row).rstrip(bytes(1)).decode(errors="replace")}'
    for index, row in enumerate(rows)
    if row.any()
  ]
  return '; '.join(found) or None
