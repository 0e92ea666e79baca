"""Replays executed bundles with the latencies of the units.

Bundles issue in order, one a cycle at most. A bundle waits until all that it
reads is there and each unit that it uses accepts a further instruction; the
core then stalls as a whole. Waits for copies from and to HBM are not modelled.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from pallas_kernels.kda.bundle_text import Bundle, Instruction
from pallas_kernels.kda.tpu_generations import Generation

_LANE_MOVE = re.compile(r'v(perm|bcast|rot)\.lane')
_LANE_REDUCE = re.compile(r'v(add|max|min)\.(index\.)?xlane')
_SPECIAL = re.compile(r'v(exp2|pow2|log2|rsqrt|rcp|tanh|sigshft|erf|sin|cos)\b')
_SLOT = re.compile(r'mrb\[(\d+)\]')
# Moves, masks, comparisons, selections and memory take one cycle, vector
# arithmetic two.
_ONE_CYCLE = re.compile(
  r'v(cmp|cmask|sel|mov|mmov|mpack|mand|mor|mxor|mneg|nez|weird|pop|ld|st|sync)'
)
_SCALAR_LOAD_LATENCY = 6


@dataclasses.dataclass(frozen=True)
class _Action:
  """What one instruction waits for and what it makes others wait for.

  Attributes:
    waits: names of registers and units that must be free.
    delays: names, and cycles for which the instruction keeps them.
    pops: queue whose oldest entry it takes, or ''.
    pushes: queue it fills, or ''.
    arrivals: cycles after which the entries that it pushes arrive.
    use: unit of which it takes `use_cycles`, or ''.
  """

  waits: tuple[str, ...]
  delays: tuple[tuple[str, int], ...]
  pops: str = ''
  pushes: str = ''
  arrivals: range = range(0)
  use: str = ''
  use_cycles: int = 0


@dataclasses.dataclass(frozen=True)
class Replay:
  """Outcome of a replay, over all bundles after the warm-up.

  Attributes:
    cycles: from the issue of the last warm-up bundle to the last bundle's.
    bundles: issued bundles.
    stalls: cycles lost, by what was waited for.
    unit_cycles: cycles that each kind of unit must have worked at least, with
      the work spread evenly over the units of the kind.
  """

  cycles: int
  bundles: int
  stalls: dict[str, int]
  unit_cycles: dict[str, float]


def _operand_kind(op: str) -> str:
  """Kind of a matrix instruction's operands.

  Raises:
    ValueError: for a kind without timings.
  """
  if '.lmr.' in op:
    return 'register'
  if '.xpose' in op and op.startswith('vmatpush'):
    return 'transposed'
  if '.bf16' in op:
    return 'bf16'
  # A push of float32 weights names no type.
  if '.f32' in op or re.match(r'vmatpush\d?\.(lsf\.)?(msk\.)?ms', op):
    return 'f32'
  raise ValueError(f'No timing is known for {op}.')


def _latency(op: str, unit: str, generation: Generation) -> int:
  """Cycles from an instruction's issue to the use of its result."""
  if op[0] == 'v':
    if _SPECIAL.match(op):
      return generation.special_latency
    if _LANE_REDUCE.match(op):
      extra = generation.lane_reduce_extra
      return generation.lane_latency[int(unit[-1])] + extra
    if _LANE_MOVE.match(op):
      return generation.lane_latency[int(unit[-1])]
    if op == 'vset.pattern.permute':
      return generation.lane_interval
    return 1 if _ONE_CYCLE.match(op) else 2
  if op == 'sld':
    return _SCALAR_LOAD_LATENCY
  two = op[0] == 'p' or op.startswith(('scmp', 'smul', 'scalar_select'))
  return 2 if two else 1


def _arrivals(first: int, step: int, count: int) -> range:
  return range(first, first + step * count, step)


def _matrix_action(op: str, unit: str, base: dict, g: Generation) -> _Action:
  """Action of a matrix product or of a push of its weights."""
  kind = _operand_kind(op)
  weights = f'{unit} weights {"b" if "msrb" in op else "a"}'
  if op.startswith('vmatpush'):
    interval = g.push_interval[kind]
    return _Action(
      waits=(*base['waits'], f'{unit} push'),
      delays=(
        *base['delays'],
        (f'{unit} push', interval),
        (weights, g.push_latency[kind]),
      ),
      use='MATPUSH',
      use_cycles=interval,
    )
  interval, count = g.matmul_interval[kind], g.matmul_results[kind]
  arrivals = _arrivals(g.matmul_latency, g.matmul_step, count)
  loads = (weights,) if '.vlgmr' in op else ()
  delays = (*base['delays'], (f'{unit} product', interval))
  slot = _SLOT.search(op)
  if slot:
    first = int(slot.group(1))
    delays += tuple(
      (f'{unit} result {first + i}', cycles)
      for i, cycles in enumerate(arrivals)
    )
  return _Action(
    waits=(*base['waits'], *loads, f'{unit} product'),
    delays=delays,
    pushes='' if slot else f'{unit} result',
    arrivals=range(0) if slot else arrivals,
    use='MATMUL',
    use_cycles=interval,
  )


def _lane_action(
  instruction: Instruction, base: dict, g: Generation
) -> _Action:
  """Action of a cross-lane instruction."""
  op, unit = instruction.op, instruction.unit
  if op == 'vset.pattern.permute':
    # It changes how the next permutation works, so it waits for the last.
    return _Action(
      waits=(*base['waits'], f'{unit} pattern'), delays=base['delays']
    )
  interval = g.lane_interval
  pushes, arrivals = '', range(0)
  delays = base['delays']
  if op.startswith('vxpose'):
    size = 'b16' if '.b16' in op else 'b32'
    interval = g.transpose_interval[size]
    if '.start' in op:
      width = int(instruction.arguments.rpartition(',')[2])
      # Two arrays at once return twice the registers in the same time.
      both = '.binary' in op
      count = width // (8 if both or size == 'b32' else 16)
      step = interval // 2 if both else interval
      pushes = f'{unit} transposed'
      arrivals = _arrivals(g.transpose_latency[size], step, count)
  elif op.startswith('vperm'):
    delays = (*delays, (f'{unit} pattern', interval))
  return _Action(
    waits=(*base['waits'], f'{unit} lanes'),
    delays=(*delays, (f'{unit} lanes', interval)),
    pushes=pushes,
    arrivals=arrivals,
    use='XLU',
    use_cycles=interval,
  )


def _action(instruction: Instruction, generation: Generation) -> _Action:
  """What the replay must know of an instruction."""
  op, unit = instruction.op, instruction.unit
  if op in ('sphi', 'vphi', 'pphi'):
    # It names a register that a loop carries and executes nothing.
    return _Action(waits=(), delays=())
  base = {
    'waits': instruction.operands,
    'delays': ((instruction.result, _latency(op, unit, generation)),),
  }
  if op.startswith(('vmatmul', 'vmatpush')):
    return _matrix_action(op, unit, base, generation)
  if op.startswith('vpop.f32.mr'):
    if slot := _SLOT.search(op):
      waits = (*base['waits'], f'{unit} result {slot.group(1)}')
      return _Action(waits=waits, delays=base['delays'])
    return _Action(**base, pops=f'{unit} result')
  if op == 'vpop.trf':
    return _Action(**base, pops=f'{unit} transposed')
  if unit.startswith('xlu') and not op.startswith('vpop'):
    return _lane_action(instruction, base, generation)
  return _Action(**base)


def _describe(name: str, producers: dict[str, str]) -> str:
  """What a wait for a register or unit is called in the report."""
  if name in producers:
    return f'result of {producers[name]}'
  return re.sub(r'(mxu|xlu)\d', r'\1', re.sub(r' \d+$', '', name))


def replay_bundles(
  bundles: Sequence[Bundle],
  addresses: Iterable[int],
  generation: Generation,
  warmup: int = 0,
) -> Replay:
  """Replays bundles in the order of their execution.

  Args:
    bundles: a kernel's, by address.
    addresses: of the executed bundles, in order.
    generation: timings.
    warmup: executed bundles that only set the state for those that count.

  Raises:
    ValueError: for an instruction without timings.
  """
  actions: dict[int, tuple[_Action, ...]] = {}
  free: dict[str, int] = {}
  queues = collections.defaultdict(collections.deque)
  latest = collections.Counter()
  producers: dict[str, str] = {}
  stalls, use = collections.Counter(), collections.Counter()
  cycle, start, issued = -1, -1, 0
  for number, address in enumerate(addresses):
    if address not in actions:
      actions[address] = tuple(
        _action(i, generation) for i in bundles[address].instructions
      )
    earliest, reason = cycle + 1, ''
    for action in actions[address]:
      for name in action.waits:
        if free.get(name, 0) > earliest:
          earliest, reason = free[name], name
      if action.pops and queues[action.pops]:
        if queues[action.pops][0] > earliest:
          earliest, reason = queues[action.pops][0], action.pops
    if number >= warmup:
      issued += 1
      if earliest > cycle + 1:
        stalls[_describe(reason, producers)] += earliest - cycle - 1
    else:
      start = earliest
    cycle = earliest
    for action, instruction in zip(
      actions[address], bundles[address].instructions
    ):
      for name, cycles in action.delays:
        free[name] = cycle + cycles
      if action.delays:
        producers[instruction.result] = instruction.op
      if action.pops and queues[action.pops]:
        queues[action.pops].popleft()
      if action.arrivals:
        queue = queues[action.pushes]
        # Results leave a unit in order.
        late = max(0, latest[action.pushes] - cycle - action.arrivals.start)
        queue.extend(cycle + late + c for c in action.arrivals)
        latest[action.pushes] = queue[-1] + action.arrivals.step
      if number >= warmup and action.use:
        use[action.use] += action.use_cycles
  units = {
    'MATMUL': generation.matrix_units,
    'MATPUSH': generation.matrix_units,
    'XLU': len(generation.lane_latency),
  }
  return Replay(
    cycles=cycle - start,
    bundles=issued,
    stalls=dict(stalls),
    unit_cycles={name: use[name] / count for name, count in units.items()},
  )
