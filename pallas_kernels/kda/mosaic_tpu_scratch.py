"""Memory of KDA's forward kernel for TPU: scratch, and what fits."""

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda import mosaic_tpu_conv, packed_rows, tile
from pallas_kernels.kda import mosaic_tpu_views as views


def scratch_shapes(
  settings, num_keys: int, num_values: int
) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
  """Shape and dtype of each scratch of `views.Slots`, buffers first.

  Args:
    settings: static settings, a `mosaic_tpu_fwd.TpuConfig`.
    num_keys: channels of a key.
    num_values: channels of a value.
  """
  f32, operand = jnp.float32, settings.operand
  chunk, heads = settings.chunk, settings.heads
  pairs = -(-heads // 2)
  stacked = views.stack_rows(settings, num_keys)[-1].stop
  levels = int(math.log2(chunk // views.TILE))
  shapes = {
    'rows': ((2, heads, 2 * chunk, num_keys), operand),
    'columns': ((2, heads, chunk, num_keys), f32),
    'factors': ((2, heads, views.FACTOR_ROWS, num_keys), f32),
    'readers': ((3, heads, 2 * chunk, num_keys), operand),
    'values': ((3, heads, chunk, num_values), operand),
    'strengths': ((3, chunk, heads), f32),
    'diagonal': ((2, heads, views.TILE, chunk), f32),
    'decay': ((2, heads, num_keys, views.LANES), f32),
    'state': ((heads, num_keys, num_values), f32),
  }

  def add_packed(name, count, rows):
    words = not settings.narrow
    shape, dtype = packed_rows.shape_of(rows, chunk, operand, words)
    shapes[name] = (2, count, *shape), dtype

  add_packed('stack', heads, stacked)
  add_packed('inverse', 2 * pairs, chunk)
  for level in range(levels):
    add_packed(f'below{level}', pairs, chunk)
  if settings.packed:
    places = views.LAG_MASKS + max(settings.taps - 1, 0)
    shapes['numbers'] = ((2, places, chunk, views.LANES), jnp.int32)
  if settings.taps:
    for name, width in (('q', num_keys), ('k', num_keys), ('v', num_values)):
      shape = mosaic_tpu_conv.shape_of_past(chunk, width)
      shapes[f'{name}_past'] = (heads, *shape), f32
  return shapes


def count_vmem_bytes(
  settings, num_keys: int, num_values: int, gate_dtype
) -> int:
  """VMEM of a grid step that saves states, in bytes, at least."""
  chunk, heads = settings.chunk, settings.heads
  operand, f32 = settings.operand, jnp.float32
  windows = [((chunk, heads * num_keys), operand)] * 2
  windows += [((chunk, heads * num_keys), gate_dtype)]
  windows += [((chunk, heads * num_values), operand)] * 2
  # The initial, final and saved states.
  windows += [((heads, num_keys, num_values), f32)] * 2
  windows += [((heads, num_keys, num_values), operand)]
  windows += [((heads, chunk), f32), ((chunk + 32, chunk), operand)]
  windows += [((1, heads * num_keys), f32), ((8, chunk), jnp.int32)] * 2
  if settings.taps:
    widths = (num_keys, num_keys, num_values)
    windows += [((8 * settings.taps, heads * width), f32) for width in widths]
  scratch = scratch_shapes(settings, num_keys, num_values).values()
  return tile.vmem_bytes(windows, scratch, settings.exact)


def clear(refs) -> None:
  """Gives the first steps, which have no chunks to work on, finite data."""
  ones = ('factors', 'decay')
  for name, ref in refs.items():
    if name == 'state':
      continue
    value = 1 if name in ones else 0
    if ref.ndim < 4:
      ref[...] = jnp.full(ref.shape, value, ref.dtype)
      continue

    def fill(i, _, ref=ref, value=value):
      buffer, head = lax.div(i, ref.shape[1]), lax.rem(i, ref.shape[1])
      ref[buffer, head] = jnp.full(ref.shape[2:], value, ref.dtype)

    lax.fori_loop(0, ref.shape[0] * ref.shape[1], fill, None)
