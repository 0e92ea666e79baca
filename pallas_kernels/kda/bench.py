r"""Times KDA implementations against the memory floor and against rivals.

  python -m pallas_kernels.kda.bench --specs=cpu \
    --implementations=reference,chunked_xla
  python -m pallas_kernels.kda.bench --specs=8k_h96,8k_h64,8k,64k \
    --implementations=mosaic_gpu --rivals

The floor is the time to read every argument and to write every result once, in
training also every gradient, at the bandwidth that a large copy has on the same
device in the same run; the share is the floor over the time. Extra memory is
what a call takes beyond its arguments.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from absl import app, flags

from pallas_kernels.kda import api, arg_specs, bench_rivals, products

_SPECS = flags.DEFINE_list(
  'specs',
  ['cpu'],
  f'Named argument shapes, of {", ".join(arg_specs.SPECS)}; all but the first '
  'three are bfloat16.',
)
_IMPLEMENTATIONS = flags.DEFINE_list(
  'implementations',
  ['reference', 'chunked_xla'],
  f'Implementations to time, of {", ".join(api.IMPLEMENTATIONS)}.',
)
_PRECISION = flags.DEFINE_enum(
  'precision', 'default', products.PRECISIONS, 'Precision of kda.'
)
_REPEATS = flags.DEFINE_integer('repeats', 10, 'Timed runs of each program.')
_RIVALS = flags.DEFINE_bool(
  'rivals', False, 'Also time kernels of other projects that are installed.'
)
_FORWARD_ONLY = flags.DEFINE_bool('forward_only', False, 'Leave out training.')

_COPY_BYTES = 2**30
_ROW = '{:<12}{:<32}{:<18}{:>10}{:>8}{:>8}{:>9}{:>9}{:>10}'


def time_call(fn: Callable, inputs: dict, repeats: int) -> list[float]:
  """Seconds of each run of a compiled function, its first run excluded."""
  jax.block_until_ready(fn(inputs))
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(fn(inputs))
    seconds.append(time.perf_counter() - start)
  return seconds


def time_queue(fn: Callable, inputs: dict, repeats: int) -> float:
  """Seconds a run of a compiled function that is queued several times.

  The host's part of a call then runs beside the device's; the median of three
  queues.
  """
  jax.block_until_ready(fn(inputs))
  seconds = []
  for _ in range(3):
    start = time.perf_counter()
    for _ in range(repeats):
      results = fn(inputs)
    jax.block_until_ready(results)
    seconds.append((time.perf_counter() - start) / repeats)
  return statistics.median(seconds)


def make_programs(
  implementation: str, precision: str = 'default'
) -> tuple[Callable, Callable]:
  """Jitted forward and forward with backward over a dict of inputs."""

  def forward(inputs):
    return api.kda(**inputs, implementation=implementation, precision=precision)

  def total(inputs):
    return jnp.sum(forward(inputs).astype(jnp.float32))

  return jax.jit(forward), jax.jit(jax.value_and_grad(total))


def measure_bandwidth(repeats: int) -> float:
  """Bytes a second that a large copy reads and writes."""
  x = jnp.zeros((_COPY_BYTES // 4,), jnp.float32)
  negate = jax.jit(jnp.negative)
  return 2 * x.nbytes / time_queue(negate, x, repeats)


def count_bytes(spec: arg_specs.ArgSpec, training: bool) -> int:
  """Bytes of q, k, v, g, beta and o, in training also of their gradients."""
  rows = spec.batch * spec.tokens
  item = jnp.dtype(spec.dtype).itemsize
  keys = 2 * spec.heads * spec.key_dim + spec.value_heads * spec.key_dim
  values = spec.value_heads * spec.value_dim
  arguments, output = keys + values + spec.value_heads, values
  if not training:
    return rows * item * (arguments + output)
  # The backward reads the arguments and the output's gradient again.
  return rows * item * (3 * arguments + 2 * output)


def count_flops(
  spec: arg_specs.ArgSpec, training: bool, chunk: int = 64
) -> int:
  """Multiplications and additions of the chunked form's products."""
  keys, values = spec.key_dim, spec.value_dim
  # Scores, inverse and reads of the state; new values, outputs, the next state.
  forward = chunk * (2 * keys + chunk + keys) + chunk * 2 * values
  forward += 3 * keys * values
  cells = spec.batch * spec.tokens * spec.value_heads
  return 2 * cells * forward * (3 if training else 1)


def measure(
  names: Sequence[str],
  spec: arg_specs.ArgSpec,
  precision: str,
  repeats: int,
  training: bool,
) -> Iterator[tuple[str, str, float, int]]:
  """Name, pass, seconds and peak extra bytes of each implementation."""
  inputs = arg_specs.draw_inputs(spec)
  del inputs['h0']
  labels = ('forward', 'forward+backward')[: 2 if training else 1]
  for name in names:
    for label, program in zip(labels, make_programs(name, precision)):
      compiled = program.lower(inputs).compile()
      memory = compiled.memory_analysis()
      extra = memory.temp_size_in_bytes + memory.output_size_in_bytes
      yield name, label, time_queue(compiled, inputs, repeats), extra


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {argv[1:]}')
  for name in _SPECS.value:
    if name not in arg_specs.SPECS:
      raise app.UsageError(
        f'--specs={name} is not one of {sorted(arg_specs.SPECS)}.'
      )
  for name in _IMPLEMENTATIONS.value:
    if name not in api.IMPLEMENTATIONS:
      raise app.UsageError(
        f'--implementations={name} is not one of {api.IMPLEMENTATIONS}.'
      )
  bandwidth = measure_bandwidth(_REPEATS.value)
  print(
    f'{jax.devices()[0].device_kind}, jax {jax.__version__}; '
    f'copy {bandwidth / 1e12:.2f} TB/s'
  )
  columns = ('ms', 'floor', 'share', 'GB/s', 'TFLOP/s', 'extra GB')
  print(_ROW.format('spec', 'implementation', 'pass', *columns))
  for spec_name in _SPECS.value:
    spec = arg_specs.SPECS[spec_name]

    def show(name, label, seconds, extra, spec_name=spec_name, spec=spec):
      training = label != 'forward'
      needed = count_bytes(spec, training)
      floor = needed / bandwidth
      figures = (
        f'{seconds * 1e3:.3f}',
        f'{floor * 1e3:.2f}',
        f'{floor / seconds:.1%}',
        f'{needed / seconds / 1e9:.0f}',
        f'{count_flops(spec, training) / seconds / 1e12:.1f}',
        f'{extra / 1e9:.2f}',
      )
      print(_ROW.format(spec_name, name, label, *figures), flush=True)

    repeats, training = _REPEATS.value, not _FORWARD_ONLY.value
    for row in measure(
      _IMPLEMENTATIONS.value, spec, _PRECISION.value, repeats, training
    ):
      show(*row)
    if _RIVALS.value:
      for found in bench_rivals.time_rivals(spec, repeats, training):
        if isinstance(found, str):
          print(found, flush=True)
        else:
          show(*found)


if __name__ == '__main__':
  app.run(main)
