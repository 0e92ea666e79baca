"""Whether a compiled stage fits in a device's memory, before it runs.

The compiler states the bytes a program needs. Comparing them with what the
device has turns an out-of-memory crash in the middle of a run into an error
before it, that says what to change.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Self

import jax

from hybrid_moe.checks import ConfigError
from hybrid_moe.run_config import MemoryConfig

_GIB = 2**30
# Limits of version 2 and version 1 of Linux's control groups.
_LIMIT_FILES = (
  '/sys/fs/cgroup/memory.max',
  '/sys/fs/cgroup/memory/memory.limit_in_bytes',
)


class MemoryPlanError(ConfigError):
  """A stage does not fit in a device's memory with the headroom asked for."""


@dataclasses.dataclass(frozen=True)
class MemoryReport:
  """Bytes of one device that a compiled program needs.

  Attributes:
    stage: name of the stage.
    available: memory of the device.
    arguments: state and batch.
    temporaries: activations and workspace.
    outputs: new state and metrics.
    aliased: part of the outputs written over donated arguments.
    code: the program itself.
    peak: most that is in use at once.
  """

  stage: str
  available: int
  arguments: int
  temporaries: int
  outputs: int
  aliased: int
  code: int
  peak: int

  @classmethod
  def from_compiled(cls, stage: str, compiled: Any, available: int) -> Self:
    """Asks a compiled program for its memory.

    Args:
      stage: name of the stage.
      compiled: result of `jax.jit(...).lower(...).compile()`.
      available: memory of one device in bytes.
    """
    analysis = compiled.memory_analysis()
    arguments = analysis.argument_size_in_bytes
    temporaries = analysis.temp_size_in_bytes
    outputs = analysis.output_size_in_bytes
    aliased = analysis.alias_size_in_bytes
    code = analysis.generated_code_size_in_bytes
    return cls(
      stage=stage,
      available=available,
      arguments=arguments,
      temporaries=temporaries,
      outputs=outputs,
      aliased=aliased,
      code=code,
      # The sum of all that is allocated; a bound, since not every temporary
      # lives while every other one does.
      peak=arguments + temporaries + outputs - aliased + code,
    )

  def beside(self, other: Self) -> Self:
    """The larger of two programs that take turns on one state.

    Args:
      other: of a program whose arguments are part of this one's, all of which
        stay where they are while it runs.
    """
    together = dataclasses.replace(
      other,
      arguments=self.arguments,
      peak=other.peak - other.arguments + self.arguments,
    )
    return max(self, together, key=lambda report: report.peak)

  @property
  def headroom(self) -> float:
    """Part of the memory that is free at the peak; negative if none is."""
    return 1 - self.peak / self.available


def device_memory_bytes(config: MemoryConfig, device: jax.Device) -> int:
  """Memory of one device.

  Args:
    config: may state it, which goes before what the device says.
    device: one device of the stage's mesh.

  Returns:
    bytes; on CPU what the machine has, or its control group allows, over the
    number of simulated devices.

  Raises:
    MemoryPlanError: the device does not say, nor does `config`.
  """
  if config.device_gib:
    return int(config.device_gib * _GIB)
  limit = (device.memory_stats() or {}).get('bytes_limit', 0)
  if limit:
    return limit
  if device.platform == 'cpu':
    return host_memory_bytes() // len(jax.local_devices(backend='cpu'))
  raise MemoryPlanError(
    f'memory.device_gib={config.device_gib!r}: {device.device_kind} does not '
    'state its memory; accepted is its size in GiB'
  )


def host_memory_bytes(limit_files: Sequence[str] = _LIMIT_FILES) -> int:
  """Memory of the machine, or what a container may use of it.

  Args:
    limit_files: where control groups state their limits in bytes.
  """
  sizes = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
  for path in limit_files:
    with contextlib.suppress(OSError, ValueError):
      # Without a limit the text is 'max', or a number beyond every machine's.
      sizes.append(int(pathlib.Path(path).read_text()))
  return min(sizes)


def check(report: MemoryReport, config: MemoryConfig) -> None:
  """Rejects a stage that leaves less memory free than was asked for.

  Raises:
    MemoryPlanError: it does; the message says what to change.
  """
  if report.headroom >= config.headroom:
    return
  allowed = int(report.available * (1 - config.headroom))
  raise MemoryPlanError(
    f'memory.headroom={config.headroom!r}: stage {report.stage!r} needs '
    f"{format_bytes(report.peak)} of a device's "
    f'{format_bytes(report.available)} at its peak '
    f'({format_bytes(report.arguments)} arguments, '
    f'{format_bytes(report.temporaries)} temporaries, '
    f'{format_bytes(report.outputs - report.aliased)} outputs that are not '
    f'donated) and leaves {report.headroom:.0%} free; accepted is a peak of '
    f'{format_bytes(allowed)} at most. More micro_batches (fewer rows at a '
    "time), remat='layer' or more devices lower it"
  )


def format_bytes(num_bytes: int) -> str:
  """A size for people, in binary units: 1536 is '1.5 KiB'."""
  size = float(num_bytes)
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if abs(size) < 1024:
      return f'{size:.0f} B' if unit == 'B' else f'{size:.1f} {unit}'
    size /= 1024
  return f'{size:.1f} TiB'
