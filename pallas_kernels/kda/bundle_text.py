"""Reads the instruction bundles that the TPU compiler writes as text.

A TPU core issues one bundle a cycle at most; a bundle holds one instruction for
each of several units. The compiler's dump has a line a bundle: its address, a
two-letter label where control flow joins, its instructions between braces, and
comments that name the regions which start there. Branches name a region.
"""

import dataclasses
import functools
import re

_BUNDLE = re.compile(
  r'^[ \t]*(?:0x[0-9a-f]+|0)[ \t]+(?:[A-Z]{2})?[ \t]*:[> \t]*'
  r'\{(.*?)\}([^}{\n]*)$',
  re.MULTILINE | re.DOTALL,
)
_REGIONS = re.compile(r'/\* ((?:Start|End)[ /][^*]*region[^*]*) \*/')
_REGION_STARTS = re.compile(r'Start(?:/End empty)? region (\d+)')
_COMMENT = re.compile(r'/\*.*?\*/', re.DOTALL)
_INSTRUCTION = re.compile(r'(%\S+) = (\S+)\s*(.*)', re.DOTALL)
_UNIT = re.compile(r'\.(mxu|xlu)(\d)')
_TOKEN = re.compile(r'%(?:vm|v|s|p)?(\d+)(?:_((?:vm|v|s|p)\d+))?')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction of a bundle.

  Attributes:
    op: mnemonic without the number of its unit, as 'vmatmul.bf16.gmra'.
    unit: matrix or cross-lane unit, as 'mxu0' or 'xlu1'; '' for all others.
    result: register that it writes, as 'v12', 's3', 'p0' or 'vm1', or the
      number of a value that waits in a unit, as '%812'.
    operands: registers and numbered values that it reads.
    arguments: its operands as written.
  """

  op: str
  unit: str
  result: str
  operands: tuple[str, ...]
  arguments: str


@dataclasses.dataclass(frozen=True)
class Bundle:
  """Instructions issued together.

  Attributes:
    instructions: in the order of the text.
    regions: numbers of the regions that start here, which branches may name.
  """

  instructions: tuple[Instruction, ...]
  regions: tuple[int, ...] = ()


def _register(match: re.Match) -> str:
  number, register = match.groups()
  return register or f'%{number}'


@functools.lru_cache(maxsize=100_000)
def _parse_instruction(text: str) -> Instruction | None:
  match = _INSTRUCTION.match(text)
  if match is None:
    return None
  result, op, arguments = match.groups()
  unit = _UNIT.search(op)
  operands = tuple(_register(m) for m in _TOKEN.finditer(arguments))
  return Instruction(
    op=_UNIT.sub('', op),
    unit=''.join(unit.groups()) if unit else '',
    result=_register(_TOKEN.match(result)),
    operands=operands,
    arguments=arguments.strip(),
  )


def parse_bundles(text: str) -> list[Bundle]:
  """Bundles of one dump file, in the order of their addresses.

  Args:
    text: contents of a file named '*-final_bundles.txt' or
      '*-packed-bundles-*.txt'.

  Raises:
    ValueError: if the text holds no bundle.
  """
  text = _REGIONS.sub(lambda m: '@' + m.group(1), text)
  text = _COMMENT.sub('', text)
  bundles = []
  for match in _BUNDLE.finditer(text):
    body, tail = match.groups()
    parts = (part.strip() for part in body.split(';;'))
    parsed = (_parse_instruction(part) for part in parts if part)
    bundles.append(
      Bundle(
        instructions=tuple(i for i in parsed if i is not None),
        regions=tuple(int(n) for n in _REGION_STARTS.findall(tail)),
      )
    )
  if not bundles:
    raise ValueError('No bundles in the compiler output.')
  return bundles
