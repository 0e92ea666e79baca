r"""Times KDA implementations.

  python -m pallas_kernels.kda.bench --spec=cpu \
    --implementations=reference,chunked_xla
"""

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from absl import app, flags

from pallas_kernels.kda import api, arg_specs

_SPEC = flags.DEFINE_enum(
  'spec', 'cpu', sorted(arg_specs.SPECS), 'Named argument shape.'
)
_IMPLEMENTATIONS = flags.DEFINE_list(
  'implementations',
  ['reference', 'chunked_xla'],
  'Implementations to time; the ratio is to the first.',
)
_PRECISION = flags.DEFINE_string('precision', 'default', 'Precision of kda.')
_REPEATS = flags.DEFINE_integer('repeats', 5, 'Timed runs of each program.')


def time_call(fn: Callable, inputs: dict, repeats: int) -> list[float]:
  """Seconds of each run of a compiled function, its first run excluded."""
  jax.block_until_ready(fn(inputs))
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(fn(inputs))
    seconds.append(time.perf_counter() - start)
  return seconds


def make_programs(
  implementation: str, precision: str = 'default'
) -> tuple[Callable, Callable]:
  """Jitted forward and forward with backward over a dict of inputs."""

  def forward(inputs):
    return api.kda(**inputs, implementation=implementation, precision=precision)

  def total(inputs):
    return jnp.sum(forward(inputs).astype(jnp.float32))

  return jax.jit(forward), jax.jit(jax.value_and_grad(total))


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {argv[1:]}')
  spec = arg_specs.SPECS[_SPEC.value]
  inputs = arg_specs.make_inputs(spec)
  tokens = spec.batch * spec.tokens
  print(f'{_SPEC.value}: {spec} on {jax.devices()[0].device_kind}')
  print(
    f'{"implementation":<16}{"pass":<18}{"median ms":>12}'
    f'{"tokens/s":>14}{"ratio":>8}'
  )
  first = {}
  for name in _IMPLEMENTATIONS.value:
    programs = make_programs(name, _PRECISION.value)
    for label, program in zip(('forward', 'forward+backward'), programs):
      seconds = time_call(program, inputs, _REPEATS.value)
      median = statistics.median(seconds)
      first.setdefault(label, median)
      print(
        f'{name:<16}{label:<18}{median * 1e3:>12.2f}'
        f'{tokens / median:>14.0f}{first[label] / median:>8.2f}'
      )


if __name__ == '__main__':
  app.run(main)
