r"""Static schedules of the KDA kernels on TPUs, without a TPU.

  python -m pallas_kernels.kda.schedule --topology=v5e:2x2,v6e:2x2 --shape=8k

Compiles each kernel ahead of time, replays the compiler's bundles with the
compiler's latencies and prints what a token and head costs. All figures are
estimates; none is measured on hardware. `--update` keeps them in
schedule_figures.json, against which a test compares.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from absl import app, flags

from pallas_kernels.kda import arg_specs, kernel_figures, tpu_generations
from pallas_kernels.kda.kernel_figures import CallEstimate, KernelFigures

FIGURES_PATH = pathlib.Path(__file__).with_name('schedule_figures.json')
TOPOLOGIES = ('v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'tpu7x:2x2x1')
# What a change may add to the cycles or bundles of a kernel.
TOLERANCE = 0.03

_KEPT = ('chunk', 'cycles', 'bundles')
_HEAD_DIM = 128
_STALLS = 5

_TOPOLOGY = flags.DEFINE_list(
  'topology', list(TOPOLOGIES), 'Topologies to compile for, as v6e:2x2.'
)
_KERNELS = flags.DEFINE_list('kernels', [], 'Kernels to compile; all if empty.')
_SHAPE = flags.DEFINE_enum(
  'shape',
  '8k',
  sorted(
    name
    for name, spec in arg_specs.SPECS.items()
    if (spec.key_dim, spec.value_dim) == (_HEAD_DIM, _HEAD_DIM)
  ),
  'Named shape to estimate a time for.',
)
_JSON = flags.DEFINE_bool('json', False, 'Print the figures as JSON alone.')
_UPDATE = flags.DEFINE_bool('update', False, 'Keep the figures in the repo.')


def read_kept(path: pathlib.Path = FIGURES_PATH) -> dict:
  """Kept figures by kernel and topology; empty without a file."""
  return json.loads(path.read_text()) if path.exists() else {}


def write_kept(
  figures: Iterable[KernelFigures], path: pathlib.Path = FIGURES_PATH
) -> None:
  """Replaces the kept figures of the given kernels and topologies."""
  kept = read_kept(path)
  for one in figures:
    entry = {name: round(getattr(one, name), 3) for name in _KEPT}
    kept.setdefault(one.kernel, {})[one.topology] = entry
  path.write_text(json.dumps(kept, indent=2, sort_keys=True) + '\n')


def find_regressions(
  figures: Iterable[KernelFigures], kept: Mapping
) -> list[str]:
  """Describes each figure that is missing or more than 3 % above the kept one.

  Args:
    figures: new ones.
    kept: as of `read_kept`.
  """
  found = []
  for one in figures:
    entry = kept.get(one.kernel, {}).get(one.topology)
    where = f'{one.kernel} on {one.topology}'
    if entry is None:
      found.append(f'{where}: no figures are kept; run with --update.')
      continue
    for name in ('cycles', 'bundles'):
      new, old = getattr(one, name), entry[name]
      if new > old * (1 + TOLERANCE):
        found.append(
          f'{where}: {name} per token-head rose from {old:.3f} to {new:.3f}.'
        )
  return found


def estimate_seconds(
  figures: KernelFigures, spec: arg_specs.ArgSpec
) -> tuple[float, float]:
  """Estimated time of one call on one JAX device, and the floor set by HBM.

  Args:
    figures: of a kernel for heads of 128 channels.
    spec: shape of the call.

  Returns:
    Seconds of compute, and of moving the kernel's arrays at peak bandwidth. A
    call takes at least the larger of the two.

  Raises:
    ValueError: if the heads do not have 128 channels.
  """
  if (spec.key_dim, spec.value_dim) != (_HEAD_DIM, _HEAD_DIM):
    raise ValueError(
      f'Kernels are scheduled for heads of {_HEAD_DIM} channels, not for '
      f'{spec.key_dim} and {spec.value_dim}.'
    )
  generation = tpu_generations.find_generation(figures.topology)
  tokens = 1 if figures.single_token else spec.tokens
  token_heads = spec.batch * tokens * spec.value_heads
  cores = generation.cores_per_device
  compute = figures.cycles * token_heads / (generation.clock_hz * cores)
  bandwidth = generation.hbm_bytes_per_s * cores / generation.cores_per_chip
  return compute, figures.hbm_bytes * token_heads / bandwidth


def describe(
  figures: KernelFigures, estimate: CallEstimate | None, spec_name: str
) -> str:
  """Report on one kernel, several lines."""
  compute, hbm = estimate_seconds(figures, arg_specs.SPECS[spec_name])
  units = sorted(figures.unit_cycles.items(), key=lambda item: -item[1])
  stalls = list(figures.stalls.items())[:_STALLS]
  call = 'one token a row' if figures.single_token else 'all tokens'
  lines = [
    f'{figures.kernel} on {figures.topology}, chunk {figures.chunk}, '
    'cycles of a core per token and head:',
    f'  replay {figures.cycles:.2f}, of which {figures.bundles:.2f} issue '
    f'bundles; the compiler schedules {figures.slots:.2f}',
    f'  {figures.binding_unit} binds: '
    f'{figures.binding_share:.0%} of the cycles',
    '  units: ' + ', '.join(f'{name} {c:.2f}' for name, c in units),
    '  waits: ' + ', '.join(f'{name} {c:.2f}' for name, c in stalls),
    f'  spills {figures.spill_stores:.2f} stores and '
    f'{figures.spill_fills:.2f} fills; VMEM {figures.vmem_bytes / 2**20:.1f} '
    'MiB',
    f'  {spec_name}, {call}: {compute * 1e3:.3g} ms of compute, '
    f'{hbm * 1e3:.3g} ms at the peak of HBM, on one JAX device',
  ]
  own = "  the compiler's own estimate of a whole call: "
  if estimate is None:
    lines.append(own + 'none, it aborts')
  else:
    lines.append(
      f'{own}{estimate.kernel_cycles:.2f} in the kernel, '
      f'{estimate.other_cycles:.2f} outside of it'
    )
  if figures.unknown_branches:
    lines.append(
      '  branches that could not be decided and count as not taken: '
      f'{figures.unknown_branches}'
    )
  return '\n'.join(lines)


def summarize(figures: KernelFigures) -> str:
  """The figures that are kept, in one line."""
  return (
    f'kernel={figures.kernel} topology={figures.topology} '
    f'chunk={figures.chunk} cycles_per_token_head={figures.cycles:.2f} '
    f'bundles_per_token_head={figures.bundles:.2f}'
  )


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {argv[1:]}')
  figures = [
    one
    for topology in _TOPOLOGY.value
    for one in kernel_figures.measure_kernels(topology, tuple(_KERNELS.value))
  ]
  if _UPDATE.value:
    write_kept(figures)
  if _JSON.value:
    print(json.dumps([dataclasses.asdict(one) for one in figures], indent=2))
    return
  print('Estimates by the compiler and a replay; nothing ran on a TPU.')
  print('Waits for HBM are not in them, and clock rates are assumed.')
  for one in figures:
    estimate = kernel_figures.estimate_call(one.topology, one.kernel)
    print(describe(one, estimate, _SHAPE.value))
  for one in figures:
    print(summarize(one))


if __name__ == '__main__':
  app.run(main)
