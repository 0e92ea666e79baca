"""TPU kernels on the CPU, loaded by its path: test folders are no packages."""

import contextlib
from unittest import mock

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import tile

# Short chunks and few heads a grid step, which compile fast; a call still has
# several of both.
CHUNK = 64


@contextlib.contextmanager
def interpreted(implementation='mosaic_tpu', cores=1, chunk=CHUNK, heads=2):
  """Runs TPU kernels by interpretation.

  Fails on races between cores and copies, on unwritten memory that reaches a
  result and on reads out of bounds.

  Args:
    implementation: of KDA; all but 'mosaic_tpu' run as they are.
    cores: cores that share the parallel axes of the grid.
    chunk: tokens between two states.
    heads: most value heads a grid step.
  """
  if implementation != 'mosaic_tpu':
    yield
    return
  params = pltpu.InterpretParams(
    detect_races=True,
    on_race='raise',
    # Races between many events are missed with the default size.
    vector_clock_size=64,
    uninitialized_memory='nan',
    out_of_bounds_reads='raise',
    num_cores_or_threads=cores,
  )
  with (
    pltpu.force_tpu_interpret_mode(params),
    mock.patch.object(tile, '_CHUNK', chunk),
    mock.patch.object(tile, '_MOST_HEADS', heads),
  ):
    try:
      yield
    finally:
      pltpu.reset_tpu_interpret_mode_state()


@contextlib.contextmanager
def discharged(implementation='mosaic_tpu'):
  """Runs TPU kernels as plain array programs, without the checks above.

  The interpreter with checks has side effects, which `jax.checkpoint` refuses,
  and does not know of axes that `jax.vmap` adds to a grid.
  """
  if implementation != 'mosaic_tpu':
    yield
    return
  with (
    pltpu.force_tpu_interpret_mode(True),
    mock.patch.object(tile, '_CHUNK', CHUNK),
    mock.patch.object(tile, '_MOST_HEADS', 1),
  ):
    yield
