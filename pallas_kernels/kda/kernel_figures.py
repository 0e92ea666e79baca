"""Static figures of kernels compiled ahead of time, with no TPU at hand."""

import collections
import dataclasses
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile

from pallas_kernels.kda import steady_state
from pallas_kernels.kda.tpu_generations import find_generation

_BUILDER = 'pallas_kernels.kda.scheduled_kernels:build_kernels'

# Environment of a process that compiles for TPU where there is none. Without
# it libtpu asks a cloud's metadata server who it is, locks a file against other
# processes and writes logs. The accelerator need not match.
AHEAD_OF_TIME = {
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'JAX_PLATFORMS': 'cpu',
  'TPU_ACCELERATOR_TYPE': 'v5p-8',
  'TPU_LOG_DIR': 'disabled',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_STDERR_LOG_LEVEL': '3',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_WORKER_ID': '0',
}
# {0} stands for the folder of dumps.
_BUNDLE_FLAGS = (
  '--xla_jf_dump_to={0}',
  '--xla_jf_dump_hlo_text=false',
  '--xla_jf_dump_llo_text=true',
  '--xla_jf_dump_llo_pass_label_regex='
  '.*(final_bundles|final_hlo|packed-bundles-post-ra|pre-finalize).*',
)
_PROFILE_FLAGS = ('--xla_jf_dump_static_llo_profile_to={0}',)
_PROFILE = re.compile(
  r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)'
  r'(?:\s+num_equivalent_hlos: (\d+))?'
)
_ALLOCATION = re.compile(
  r'#allocation\d+ \[.*space=vmem, size = 0x([0-9a-f]+)', re.IGNORECASE
)
_SPILL_SLOT = re.compile(r'\[vmem:\[#allocation\d+_spill\]')
# A spilled register is [8, 128] of 32 bits.
_SPILL_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class KernelFigures:
  """Estimates for one kernel on one topology, none of them measured.

  Cycles and bundles are those of a grid step in the middle of a row, divided by
  the tokens x heads that the step serves.

  Attributes:
    kernel: its name.
    topology: as 'v6e:2x2'.
    chunk: tokens between two states.
    cycles: replayed bundles, waits for HBM not included.
    bundles: issued bundles.
    slots: length of the compiler's own schedule, latencies included.
    unit_cycles: lower bound by unit.
    spill_stores: registers stored for want of registers.
    spill_fills: registers loaded back.
    stalls: lost cycles by what was waited for, the longest first.
    vmem_bytes: on-chip memory of the largest kernel: windows, scratch, spills.
    unknown_branches: branches that the replay could not decide.
    hbm_bytes: least traffic to and from HBM for a token and head.
    single_token: whether a call serves one token of each row.
  """

  kernel: str
  topology: str
  chunk: int
  cycles: float
  bundles: float
  slots: float
  unit_cycles: dict[str, float]
  spill_stores: float
  spill_fills: float
  stalls: dict[str, float]
  vmem_bytes: int
  unknown_branches: int
  hbm_bytes: float
  single_token: bool

  @property
  def binding_unit(self) -> str:
    """The unit with the largest lower bound."""
    return max(self.unit_cycles, key=self.unit_cycles.__getitem__)

  @property
  def binding_share(self) -> float:
    """Share of the cycles in which the binding unit works."""
    return self.unit_cycles[self.binding_unit] / self.cycles


@dataclasses.dataclass(frozen=True)
class CallEstimate:
  """The compiler's own estimate of a whole call, first and last steps included.

  Attributes:
    kernel_cycles: cycles of the Pallas kernels, per token and head.
    other_cycles: cycles of all else that the call does.
  """

  kernel_cycles: float
  other_cycles: float


def estimate_vmem(allocations: str, final: str) -> int:
  """Bytes of on-chip memory that a kernel allocates.

  Args:
    allocations: '*-pre-finalize-registers-and-allocations.txt'.
    final: '*-final_bundles.txt'.
  """
  sizes = [int(size, 16) for size in _ALLOCATION.findall(allocations)]
  return sum(sizes) + _SPILL_BYTES * len(set(_SPILL_SLOT.findall(final)))


def _read_dump(folder: pathlib.Path, call: str, suffix: str) -> str:
  """One dump of a Pallas call.

  Raises:
    ValueError: if there is not exactly one.
  """
  pattern = re.compile(rf'\d+-{re.escape(call)}(\.\d+)?-\d+-{suffix}\.txt')
  found = [p for p in folder.iterdir() if pattern.fullmatch(p.name)]
  if len(found) != 1:
    raise ValueError(
      f'{len(found)} dumps {suffix!r} of a kernel named {call!r}; is that the '
      'name given to pallas_call?'
    )
  return found[0].read_text(encoding='utf-8')


def read_figures(
  folder: pathlib.Path, entry: dict, topology: str
) -> KernelFigures:
  """Figures from the dumps of one compiled kernel.

  Args:
    folder: with the dumps of this kernel alone.
    entry: fields of a `ScheduledKernel`.
    topology: that it was compiled for.

  Raises:
    ValueError: if dumps are missing or cannot be replayed.
  """
  generation = find_generation(topology)
  totals, units = collections.Counter(), collections.Counter()
  stalls = collections.Counter()
  vmem, unknown = 0, 0
  for call, served in entry['step_token_heads'].items():
    final = _read_dump(folder, call, 'final_bundles')
    step = steady_state.measure_step(
      final=final,
      packed=_read_dump(folder, call, 'packed-bundles-post-ra'),
      utilization=_read_dump(
        folder, call, 'final_hlo-static-per-bundle-utilization'
      ),
      generation=generation,
    )
    for field in ('cycles', 'bundles', 'slots', 'spill_stores', 'spill_fills'):
      totals[field] += getattr(step, field) / served
    for counter, values in ((units, step.unit_cycles), (stalls, step.stalls)):
      for name, cycles in values.items():
        counter[name] += cycles / served
    allocations = _read_dump(
      folder, call, 'pre-finalize-registers-and-allocations'
    )
    vmem = max(vmem, estimate_vmem(allocations, final))
    unknown += step.unknown_branches
  return KernelFigures(
    kernel=entry['name'],
    topology=topology,
    chunk=entry['chunk'],
    unit_cycles=dict(units),
    stalls=dict(stalls.most_common()),
    vmem_bytes=vmem,
    unknown_branches=unknown,
    hbm_bytes=entry['hbm_bytes'],
    single_token=entry['single_token'],
    **totals,
  )


def _compile(
  topology: str,
  root: pathlib.Path,
  flags: tuple[str, ...],
  names: tuple[str, ...],
  builder: str,
) -> list[dict]:
  """Compiles in a process of its own; one folder of dumps a kernel in root.

  Returns:
    Fields of each `ScheduledKernel`.

  Raises:
    ModuleNotFoundError: without libtpu.
    RuntimeError: if the compilation fails.
    ValueError: for an unknown generation.
  """
  find_generation(topology)
  if importlib.util.find_spec('libtpu') is None:
    raise ModuleNotFoundError(
      'Compiling for a TPU ahead of time needs libtpu: pip install libtpu'
    )
  dumps = root / 'dumps'
  dumps.mkdir()
  environment = {
    'LIBTPU_INIT_ARGS': ' '.join(flags).format(dumps),
    'PYTHONPATH': ':'.join(path or '.' for path in sys.path),
  }
  worker = [sys.executable, '-m', 'pallas_kernels.kda.schedule_worker']
  done = subprocess.run(
    [*worker, topology, dumps, root, builder, ','.join(names)],
    env=AHEAD_OF_TIME | environment,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise RuntimeError(f'Compiling for {topology} failed:\n{done.stderr}')
  return json.loads((root / 'kernels.json').read_text())


def measure_kernels(
  topology: str, names: tuple[str, ...] = (), builder: str = _BUILDER
) -> list[KernelFigures]:
  """Compiles kernels for a topology and reads their figures.

  Args:
    topology: as 'v6e:2x2'; its first device is compiled for.
    names: kernels to measure, all by default.
    builder: 'module:function' that returns a list of `ScheduledKernel` for a
      topology.

  Raises:
    ModuleNotFoundError: without libtpu.
    RuntimeError: if the compilation fails.
    ValueError: for an unknown generation, or output that cannot be read.
  """
  with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    entries = _compile(topology, root, _BUNDLE_FLAGS, names, builder)
    return [read_figures(root / e['name'], e, topology) for e in entries]


def estimate_call(
  topology: str, name: str, builder: str = _BUILDER
) -> CallEstimate | None:
  """The compiler's own estimate of a call, from a second compilation.

  Args:
    topology: as 'v6e:2x2'.
    name: of the kernel.
    builder: as of `measure_kernels`.

  Returns:
    None if the compiler aborts while it estimates. libtpu 0.0.52 does on v5e
    and v5p for products with masked operands, and for some copies.

  Raises:
    ModuleNotFoundError: without libtpu.
  """
  with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    try:
      (entry,) = _compile(topology, root, _PROFILE_FLAGS, (name,), builder)
    except RuntimeError:
      return None
    kernels, others = 0, 0
    for path in (root / name).glob('*.textproto'):
      for op, cycles, copies in _PROFILE.findall(path.read_text()):
        total = int(cycles) * int(copies or 1)
        if re.sub(r'\.\d+$', '', op) in entry['step_token_heads']:
          kernels += total
        else:
          others += total
    served = entry['token_heads']
    return CallEstimate(kernels / served, others / served)
