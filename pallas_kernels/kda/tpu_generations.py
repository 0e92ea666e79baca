"""Speeds and instruction timings of the TPU generations that are scheduled for.

The timings are those by which the compiler itself places instructions. Before
it removes empty bundles it writes a schedule in which a bundle is a cycle; the
smallest distance there between two dependent instructions, or between two of
one unit, over some thousand occurrences, is the number below. Replaying the
final bundles with them gives the length of that schedule within one percent.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Generation:
  """One TPU generation. Times are cycles of one core.

  A matrix instruction takes [16, contraction] bfloat16 rows or [8, contraction]
  float32 rows; its result comes back in registers of [8, 128] float32.

  Attributes:
    clock_hz: cycles a second. Assumed: published peak rate over the products a
      cycle that the timings below allow.
    hbm_bytes_per_s: published peak of one chip.
    cores_per_chip: cores, each with the units below.
    cores_per_device: cores that share the work of one JAX device.
    matrix_units: matrix units of a core.
    matmul_interval: by operand kind, from one matrix instruction to the next.
    matmul_results: by operand kind, registers that one instruction returns.
    matmul_latency: from a matrix instruction to its first result.
    matmul_step: from one result register to the next.
    push_interval: by operand kind, from one push of weights to the next.
    push_latency: by operand kind, from the last push to the product with it.
    lane_interval: from one cross-lane instruction to the next.
    lane_latency: of a permutation across lanes, for each cross-lane unit.
    lane_reduce_extra: what a reduction across lanes takes longer.
    transpose_interval: by element size, from one row in to the next.
    transpose_latency: by element size, from the first row in to the first out.
    special_latency: of exponentials, reciprocals and roots.
  """

  clock_hz: float
  hbm_bytes_per_s: float
  cores_per_chip: int
  cores_per_device: int
  matrix_units: int
  matmul_interval: Mapping[str, int]
  matmul_results: Mapping[str, int]
  matmul_latency: int
  matmul_step: int
  push_interval: Mapping[str, int]
  push_latency: Mapping[str, int]
  lane_interval: int
  lane_latency: tuple[int, ...]
  lane_reduce_extra: int
  transpose_interval: Mapping[str, int]
  transpose_latency: Mapping[str, int]
  special_latency: int


# A 128 x 128 array takes one row a cycle: 4 x 128 x 128 products a cycle are
# the published 197 TFLOP/s of v5e at 1.5 GHz and half of v5p's 459 at 1.75.
# Operand kind 'register' is a product whose left side a unit already holds.
_NARROW_ARRAYS = {
  'matrix_units': 4,
  'matmul_interval': {'bf16': 16, 'f32': 8, 'register': 8},
  'matmul_results': {'bf16': 2, 'f32': 1, 'register': 1},
  'matmul_latency': 125,
  'matmul_step': 8,
  'lane_interval': 8,
  # The third unit cannot transpose and is quicker.
  'lane_latency': (114, 114, 90),
  'lane_reduce_extra': 1,
  'transpose_interval': {'b16': 16, 'b32': 8},
  'transpose_latency': {'b16': 172, 'b32': 164},
}
# A 256 x 256 array takes two rows a cycle: 4 x 256 x 256 products a cycle are
# the published 918 TFLOP/s of v6e at 1.75 GHz and half of tpu7x's 2307 at 2.2.
_WIDE_ARRAYS = {
  'matrix_units': 2,
  'matmul_interval': {'bf16': 8, 'f32': 4},
  'matmul_results': {'bf16': 4, 'f32': 2},
  'lane_interval': 4,
  'lane_reduce_extra': 14,
  'transpose_interval': {'b16': 4, 'b32': 4},
}
_PUSHES = {
  'push_interval': {'bf16': 4, 'f32': 2, 'transposed': 8},
  'push_latency': {'bf16': 3, 'f32': 1, 'transposed': 7},
}

GENERATIONS = {
  'v5e': Generation(
    clock_hz=1.5e9,
    hbm_bytes_per_s=0.82e12,
    cores_per_chip=1,
    cores_per_device=1,
    special_latency=6,
    **_NARROW_ARRAYS,
    **_PUSHES,
  ),
  'v5p': Generation(
    clock_hz=1.75e9,
    hbm_bytes_per_s=2.77e12,
    cores_per_chip=2,
    cores_per_device=2,
    special_latency=8,
    **_NARROW_ARRAYS,
    **_PUSHES,
  ),
  'v6e': Generation(
    clock_hz=1.75e9,
    hbm_bytes_per_s=1.6e12,
    cores_per_chip=1,
    cores_per_device=1,
    matmul_latency=192,
    matmul_step=2,
    lane_latency=(123, 123),
    transpose_latency={'b16': 98, 'b32': 124},
    special_latency=13,
    **_WIDE_ARRAYS,
    **_PUSHES,
  ),
  'tpu7x': Generation(
    clock_hz=2.2e9,
    hbm_bytes_per_s=7.37e12,
    cores_per_chip=2,
    cores_per_device=1,
    matmul_latency=211,
    matmul_step=1,
    lane_latency=(127, 127),
    transpose_latency={'b16': 102, 'b32': 128},
    special_latency=10,
    **_WIDE_ARRAYS,
    **_PUSHES,
  ),
}


def find_generation(topology: str) -> Generation:
  """The generation of a topology's name, as 'v5e:2x2'.

  Raises:
    ValueError: for a generation without timings here.
  """
  name = topology.partition(':')[0]
  if name not in GENERATIONS:
    known = ', '.join(sorted(GENERATIONS))
    raise ValueError(f'No timings for topology {topology!r}; known: {known}.')
  return GENERATIONS[name]
