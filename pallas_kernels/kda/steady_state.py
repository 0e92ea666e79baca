"""Cycles of one step of a kernel's grid, away from its first and last steps.

The grid is the kernel's outermost loop. Its first and last turns only start or
drain copies, or do what the kernel does once a row; the turns in the middle are
what a long row consists of. What they skip by a branch is not counted, what
they execute under a false predicate is.
"""

import collections
import dataclasses

from pallas_kernels.kda import bundle_replay, bundle_text, bundle_walk
from pallas_kernels.kda.tpu_generations import Generation

_LEAST_TURNS = 5


@dataclasses.dataclass(frozen=True)
class Step:
  """Figures of one grid step.

  Attributes:
    cycles: of the replay.
    bundles: issued bundles.
    slots: cycles in the compiler's own schedule, before it removes the empty
      bundles in which only latencies pass.
    unit_cycles: lower bounds of cycles by kind of unit.
    spill_stores: registers stored for want of registers.
    spill_fills: registers loaded back.
    stalls: cycles by what was waited for, the longest first.
    unknown_branches: branches whose predicate could not be computed and which
      count as not taken.
  """

  cycles: float
  bundles: float
  slots: float
  unit_cycles: dict[str, float]
  spill_stores: float
  spill_fills: float
  stalls: dict[str, float]
  unknown_branches: int


@dataclasses.dataclass(frozen=True)
class _Window:
  """Executed addresses: `[:warmup]` set the state, the rest are `turns`."""

  addresses: list[int]
  warmup: int
  turns: int
  unknown_branches: int


def _find_window(bundles: list[bundle_text.Bundle]) -> _Window:
  """Middle turns of the outermost loop, or the whole kernel without one.

  Raises:
    ValueError: if the loop has too few turns to have a middle.
  """
  walk = bundle_walk.Walk(bundles)
  trace = list(walk.addresses())
  unknown = len(walk.unknown_branches)
  last = {}
  for position in range(1, len(trace)):
    if trace[position] < trace[position - 1]:
      last[trace[position]] = position
  if not last:
    return _Window(trace, 0, 1, unknown)
  header = max(last, key=lambda address: last[address] - trace.index(address))
  starts = [i for i, address in enumerate(trace) if address == header]
  if len(starts) < _LEAST_TURNS:
    raise ValueError(
      f'The outermost loop turns {len(starts)} times; a figure needs at least '
      f'{_LEAST_TURNS}, so compile more steps.'
    )
  middle = len(starts) // 2
  begin, start, end, further = starts[middle - 2 : middle + 2]
  # A kernel that alternates between two kinds of step is measured over both.
  turns = 1
  if trace[start:end] != trace[end:further]:
    turns, end = 2, further
  return _Window(trace[begin:end], start - begin, turns, unknown)


def _parse_utilization(text: str) -> tuple[dict[str, int], list[list[int]]]:
  """Capacity by unit, and uses of each unit by bundle."""
  lines = text.splitlines()
  names = [name.strip() for name in lines[1].split(',')]
  capacity = dict(zip(names, map(int, lines[2].split())))
  rows = [[int(n) for n in line.split()] for line in lines[4:] if line.strip()]
  return capacity, rows


def measure_step(
  final: str, packed: str, utilization: str, generation: Generation
) -> Step:
  """Figures of a grid step from three dumps of one kernel.

  Args:
    final: '*-final_bundles.txt'.
    packed: '*-packed-bundles-post-ra.txt'.
    utilization: '*-final_hlo-static-per-bundle-utilization.txt'.
    generation: of the TPU that the kernel was compiled for.

  Raises:
    ValueError: if the dumps do not belong together or the grid is too short.
  """
  bundles = bundle_text.parse_bundles(final)
  capacity, rows = _parse_utilization(utilization)
  if len(rows) != len(bundles):
    raise ValueError(f'{len(rows)} rows of use for {len(bundles)} bundles.')
  window = _find_window(bundles)
  replay = bundle_replay.replay_bundles(
    bundles, window.addresses, generation, window.warmup
  )
  slots = _find_window(bundle_text.parse_bundles(packed))
  turns = window.turns
  uses = collections.Counter()
  for address in window.addresses[window.warmup :]:
    uses.update(dict(zip(capacity, rows[address])))
  units = {name: uses[name] / capacity[name] / turns for name in capacity}
  # The dump counts a matrix or lane unit as used in the bundles that follow its
  # instruction, so the removal of empty bundles makes these too small.
  units |= {name: c / turns for name, c in replay.unit_cycles.items()}
  stalls = sorted(replay.stalls.items(), key=lambda item: -item[1])
  return Step(
    cycles=replay.cycles / turns,
    bundles=replay.bundles / turns,
    slots=(len(slots.addresses) - slots.warmup) / slots.turns,
    unit_cycles={n: c for n, c in units.items() if ':' not in n},
    spill_stores=uses['VSTORE:SPILL'] / turns,
    spill_fills=uses['VLOAD:FILL'] / turns,
    stalls={name: cycles / turns for name, cycles in stalls},
    unknown_branches=window.unknown_branches,
  )
