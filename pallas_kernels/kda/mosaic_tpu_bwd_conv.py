"""The short convolution in KDA's backward kernel for TPU, there and back.

With z the sum over lags and y = silu(z): dz = dy * silu'(z), dx_t is the sum
over j of taps[j] * dz_{t + j}, and the gradient of taps[j] that of x_t *
dz_{t + j} over tokens. Chunks come in reverse, so that dz of the rows after a
chunk is there; it is kept with the chunk's own, and a step ahead is a load from
so many rows later.
"""

import jax.numpy as jnp

from pallas_kernels.kda import mosaic_tpu_conv as conv
from pallas_kernels.kda import mosaic_tpu_tokens
from pallas_kernels.kda.mosaic_tpu_views import REAL_MASK, TILE, rows_of

# What is needed one step late.
KEPT = ('q_slope', 'k_slope', 'q_input', 'k_input')


def scratch_shapes(settings, num_keys: int, num_values: int) -> dict:
  """Shape and dtype by name of what one head keeps between stages."""
  if not settings.taps:
    return {}
  f32, operand, chunk = jnp.float32, settings.operand, settings.chunk
  shapes = {}
  for name, width in (('q', num_keys), ('k', num_keys), ('v', num_values)):
    shape = conv.shape_of_past(chunk, width)
    shapes[f'{name}_past'] = (shape, f32)
    shapes[f'd_{name}_ahead'] = (shape, f32)
    shapes[f'{name}_slope'] = ((chunk, width), f32)
  shapes['q_input'] = shapes['k_input'] = ((chunk, num_keys), operand)
  shapes['v'] = ((chunk, num_values), operand)
  return shapes


def arrays_of(head) -> tuple[tuple[str, slice], ...]:
  """Names of the convolved arrays, and a head's channels of them."""
  return ('q', head.q), ('k', head.q), ('v', head.v)


def convolve(step, head, own):
  """Makes q, k and v of their inputs, with the slope of each, as `own`."""
  settings = step.settings
  for i in range(settings.chunk // TILE):
    rows = rows_of(i)
    for name, lanes in arrays_of(head):
      past_ref = getattr(own, f'{name}_past')
      if i == 0:
        halo = step.blocks[f'{name}_halo'][0, TILE - conv.HALO :, lanes]
        halo = halo.astype(jnp.float32)
        if step.numbers is None:
          halo = jnp.where(step.begins, 0.0, halo)
        conv.store_rows(past_ref, 0, halo)
      x = step.load(name, rows, lanes)
      taps = conv.spread_taps(step.blocks[f'{name}_taps'], lanes)
      z = conv.convolve(past_ref, x, i, taps, step.masks('lag', rows))
      share = conv.logistic(z, settings)
      y = z * share
      getattr(own, name)[rows] = y.astype(settings.operand)
      getattr(own, f'{name}_slope')[rows] = share + y * (1.0 - share)
      if name != 'v':
        getattr(own, f'{name}_input')[rows] = x.astype(settings.operand)
      yield


def store_gradient(step, own, name: str, rows: slice, gradient) -> None:
  """Keeps dz of a tile, given the gradient of what was convolved."""
  gradient = step.select(REAL_MASK, rows, gradient)
  gradient = gradient * getattr(own, f'{name}_slope')[rows]
  conv.store_rows(getattr(own, f'd_{name}_ahead'), rows.start, gradient)


def move_first_rows(ahead_ref) -> None:
  """Puts the first rows of the chunk after a chunk behind those of its own."""
  ahead_ref[:, -conv.HALO :] = ahead_ref[:, : conv.HALO]


def join_rows(ahead_ref, after_ref, first_ref) -> None:
  """The same where the rows behind are kept apart, and so are the first."""
  ahead_ref[:, -conv.HALO :] = after_ref[...]
  first_ref[...] = ahead_ref[:, : conv.HALO]


def pull(step, head, own, name: str, scale=None):
  """Gradients of the inputs of a convolution and of its taps.

  Args:
    step: whose chunk it is.
    head: the head.
    own: its scratch, with dz of all tiles and of the rows after them.
    name: of the array.
    scale: multiplies the gradient of the taps, None for 1.
  """
  lanes, count = dict(arrays_of(head))[name], step.settings.taps
  taps = conv.spread_taps(step.blocks[f'{name}_taps'], lanes)
  ahead_ref, target = getattr(own, f'd_{name}_ahead'), step.blocks[f'd_{name}']
  sums = [0.0] * count
  for i in range(step.settings.chunk // TILE):
    rows = rows_of(i)
    if name == 'v':
      x = step.load(name, rows, lanes)
    else:
      x = getattr(own, f'{name}_input')[rows].astype(jnp.float32)
    masks, total = step.masks('ahead', rows), 0.0
    for lag in range(count):
      d_z = conv.load_tile(ahead_ref, rows.start + lag)
      if lag and masks is not None:
        d_z = mosaic_tpu_tokens.select(masks[lag - 1], d_z)
      total = total + d_z * taps[lag]
      product = x * d_z
      sums[lag] = sums[lag] + (product[: conv.ROWS] + product[conv.ROWS :])
    target[0, rows, lanes] = total.astype(target.dtype)
    yield
  d_taps = step.blocks[f'd_{name}_taps']
  for lag in range(count):
    part = sums[lag] if scale is None else sums[lag] * scale
    d_taps[0, lag, :, lanes] += part
  yield
