"""Follows a kernel's control flow, so that each executed bundle is known.

The dump lists a kernel's bundles once: the grid is a loop, and what runs in the
first or last step alone sits behind branches. Whether a branch is taken depends
on a few scalar instructions, which are executed here; vectors are not. What a
kernel reads from scalar memory that it has not written, the number of the core
and its scalar operands, counts as 0.
"""

import re
from collections.abc import Callable, Iterator

from pallas_kernels.kda.bundle_text import Bundle, Instruction

# A branch takes effect after the four bundles that follow it.
_DELAY_SLOTS = 4
_WORD = 2**32
_PREDICATE = re.compile(
  r'\((!?)%p\d+_(p\d+)(?:, %(?:s|p)\d+_((?:s|p)\d+))?\),?\s*'
)
_OPERAND = re.compile(r'%(?:s|p)\d+_((?:s|p)\d+)$')
_ADDRESS = re.compile(r'\[smem:\[([^\]]*)\]\]')
_TARGET = re.compile(r'(?:target = \$region|region = )(\d+)')


def _signed(value: int) -> int:
  return value - _WORD if value >= _WORD // 2 else value


_COMPARE: dict[str, Callable[[int, int], bool]] = {
  'eq': lambda a, b: a == b,
  'ne': lambda a, b: a != b,
  'lt': lambda a, b: a < b,
  'le': lambda a, b: a <= b,
  'gt': lambda a, b: a > b,
  'ge': lambda a, b: a >= b,
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
  'sadd.s32': lambda a, b: a + b,
  'ssub.s32': lambda a, b: a - b,
  'smul.u32': lambda a, b: a * b,
  'sand.u32': lambda a, b: a & b,
  'sor.u32': lambda a, b: a | b,
  'sxor.u32': lambda a, b: a ^ b,
  'sshll.u32': lambda a, b: a << b if b < 32 else 0,
  'sshrl.u32': lambda a, b: a >> b if b < 32 else 0,
  'sshra.s32': lambda a, b: _signed(a) >> min(b, 31),
  'por': lambda a, b: a | b,
  'pand': lambda a, b: a & b,
  'pxor': lambda a, b: a ^ b,
  'pnand': lambda a, b: 1 - (a & b),
}
_UNARY: dict[str, Callable[[int], int]] = {
  'smov.u32': lambda a: a,
  'pmov': lambda a: a,
  'pneg': lambda a: 1 - a,
}


class _Scalars:
  """Scalar and predicate registers; a value not known is absent."""

  def __init__(self):
    self.values: dict[str, int] = {}

  def read(self, text: str) -> int | None:
    """Value of an operand as written: a number or a register."""
    text = text.strip()
    if re.fullmatch(r'-?\d+', text):
      return int(text) % _WORD
    match = _OPERAND.match(text)
    if match is None:
      return None
    return self.values.get(match.group(1))

  def address(self, arguments: str) -> tuple | None:
    """Place in scalar memory that an instruction names, None if unknown."""
    place = []
    for part in _ADDRESS.search(arguments).group(1).split('+'):
      part = part.strip()
      value = part if part.startswith('#') else self.read(part)
      if value is None:
        return None
      place.append(value)
    return tuple(place)

  def condition(self, arguments: str) -> tuple[int | None, str | None, str]:
    """Splits a leading predicate off: its value, the tied register, the rest.

    An instruction without a predicate has the value 1.
    """
    match = _PREDICATE.match(arguments)
    if match is None:
      return 1, None, arguments
    negated, register, tied = match.groups()
    value = self.values.get(register)
    if value is not None and negated:
      value = 1 - value
    return value, tied, arguments[match.end() :]

  def compute(self, op: str, arguments: str) -> int | None:
    """Result of a scalar instruction, None if it cannot be known."""
    operands = [self.read(text) for text in arguments.split(',')]
    if op == 'scalar_select' and len(operands) == 3:
      if operands[0] is None:
        return None
      return operands[1] if operands[0] else operands[2]
    if None in operands:
      return None
    if op in _UNARY and len(operands) == 1:
      return _UNARY[op](operands[0]) % _WORD
    if len(operands) != 2:
      return None
    if op in _ARITHMETIC:
      return _ARITHMETIC[op](*operands) % _WORD
    if match := re.match(r'scmp\.(\w\w)\.([su])32', op):
      if match.group(2) == 's':
        operands = [_signed(value) for value in operands]
      return int(_COMPARE[match.group(1)](*operands))
    return None


def _executes(instruction: Instruction) -> bool:
  """Whether the walk must execute an instruction."""
  if instruction.op in ('sst', 'sbr.rel'):
    return True
  # A phi names a register that a loop carries; it moves nothing.
  return instruction.result[0] in 'sp' and not instruction.op.endswith('phi')


class Walk:
  """One pass over a kernel.

  A branch whose predicate depends on memory or vectors is not taken, so that
  what it skips is counted and a loop that it closes runs once.

  Attributes:
    unknown_branches: addresses of such branches.
  """

  def __init__(self, bundles: list[Bundle], longest: int = 5_000_000):
    """Prepares a walk.

    Args:
      bundles: a kernel's.
      longest: executed bundles after which the walk is given up.
    """
    self._bundles = bundles
    self._longest = longest
    self._scalar = [
      [i for i in bundle.instructions if _executes(i)] for bundle in bundles
    ]
    self._address = {
      region: address
      for address, bundle in enumerate(bundles)
      for region in bundle.regions
    }
    self.unknown_branches: set[int] = set()

  def addresses(self) -> Iterator[int]:
    """Yields the address of each executed bundle.

    Raises:
      ValueError: at a branch to nowhere, or after too many bundles.
    """
    scalars, memory = _Scalars(), {}
    address, executed, slots, target = 0, 0, 0, None
    while address < len(self._bundles):
      yield address
      executed += 1
      if executed > self._longest:
        raise ValueError(f'No end after {self._longest} bundles.')
      taken = self._step(address, scalars, memory, target is None)
      address += 1
      if target is not None:
        slots -= 1
      elif taken is not None:
        slots, target = _DELAY_SLOTS, taken
      if target is not None and slots == 0:
        address, target = target, None

  def _step(self, address, scalars, memory, branches) -> int | None:
    """Executes a bundle's scalar instructions and returns a taken target.

    In the delay slots of a taken branch no other is looked at: its predicate
    may be left over from another path.
    """
    writes, target = {}, None
    for instruction in self._scalar[address]:
      op = instruction.op
      known, tied, arguments = scalars.condition(instruction.arguments)
      if op == 'sbr.rel':
        if not branches:
          continue
        if known is None:
          self.unknown_branches.add(address)
        elif known:
          region = int(_TARGET.search(arguments).group(1))
          if region not in self._address:
            raise ValueError(f'Branch to region {region}, which is not there.')
          target = self._address[region]
        continue
      if op == 'sst':
        place = scalars.address(arguments)
        if place and known != 0:
          value = scalars.read(arguments[_ADDRESS.search(arguments).end() :])
          memory[place] = value if known else None
        continue
      if known == 0:
        if tied is None or tied == instruction.result:
          continue
        value = scalars.values.get(tied)
      elif known is None:
        value = None
      elif op == 'sld':
        value = memory.get(scalars.address(arguments), 0)
      else:
        value = scalars.compute(op, arguments)
      writes[instruction.result] = value
    for register, value in writes.items():
      if value is None:
        scalars.values.pop(register, None)
      else:
        scalars.values[register] = value
    return target
