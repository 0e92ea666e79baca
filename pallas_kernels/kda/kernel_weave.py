"""Orders the instructions of independent stages of a kernel.

The TPU compiler reorders instructions only within a window and otherwise
follows the program. Results of the matrix units come 100 to 200 cycles late, so
stages that do not depend on each other have to be written interleaved. Each
stage is a generator that yields where another may go on.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Stream(NamedTuple):
  """A stage and when it runs, in units of one grid step.

  Attributes:
    stage: generator of instructions.
    steps: how often it yields, about.
    start: when its first piece is due.
    end: when its last piece is due.
  """

  stage: Iterator
  steps: int
  start: float
  end: float


def take_turns(stages: Iterable[Iterator]) -> Iterator:
  """Runs one piece of each stage in turn until all have ended."""
  stages = list(stages)
  while stages:
    remaining = []
    for stage in stages:
      try:
        next(stage)
      except StopIteration:
        continue
      remaining.append(stage)
      yield
    stages = remaining


def weave(streams: Iterable[Stream]) -> None:
  """Runs all streams to their ends, always the piece that is due first."""
  streams = list(streams)
  done = [0] * len(streams)
  live = set(range(len(streams)))

  def due(i):
    _, steps, start, end = streams[i]
    return start + (done[i] + 0.5) / steps * (end - start), i

  while live:
    i = min(live, key=due)
    try:
      next(streams[i].stage)
      done[i] += 1
    except StopIteration:
      live.remove(i)
