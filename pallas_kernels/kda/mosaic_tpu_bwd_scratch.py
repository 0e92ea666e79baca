"""Memory of KDA's backward kernel for TPU: scratch, and what fits."""

import jax.numpy as jnp

from pallas_kernels.kda import mosaic_tpu_bwd_stages as stages
from pallas_kernels.kda import mosaic_tpu_conv, tile


def scratch_shapes(
  settings, groups: int, num_keys: int, num_values: int, gate_dtype
) -> dict:
  """Shape and dtype of each scratch; heads first, two buffers of what is kept.

  Args:
    settings: static settings.
    groups: value heads that read one head of q and k.
    num_keys: channels of a key.
    num_values: channels of a value.
    gate_dtype: of the gate's logits.
  """
  chunk, heads = settings.chunk, settings.heads
  own = stages.scratch_shapes(settings, num_keys, num_values, gate_dtype)
  scratch = {
    name: ((heads * (2 if name in stages.KEPT else 1), *shape), kind)
    for name, (shape, kind) in own.items()
  }
  scratch['d_state'] = ((2, heads, num_keys, num_values), jnp.float32)
  scratch['strengths'] = ((chunk, heads), jnp.float32)
  scratch['d_strengths'] = ((chunk, heads), jnp.float32)
  if min(groups, heads) > 1:
    width = max(heads // groups, 1) * num_keys
    scratch['d_q_sum'] = scratch['d_k_sum'] = ((chunk, width), jnp.float32)
  if settings.packed:
    lanes, parts = max(num_keys, num_values, chunk), 1 if settings.exact else 2
    places = stages.NUMBERS + 2 * max(settings.taps - 1, 0)
    scratch['numbers'] = ((2, places, chunk, lanes), jnp.int32)
    scratch['later'] = ((2, chunk, parts * chunk), settings.operand)
  if settings.taps:
    shape = mosaic_tpu_conv.shape_of_past(0, num_values)
    scratch['d_v_first'] = ((2, heads, *shape), jnp.float32)
  return scratch


def count_vmem_bytes(
  settings, groups: int, num_keys: int, num_values: int, gate_dtype
) -> int:
  """VMEM of a grid step, in bytes, at least; arguments as `scratch_shapes`."""
  chunk, heads = settings.chunk, settings.heads
  operand, f32 = settings.operand, jnp.float32
  parts = 1 if settings.exact else 2
  width = max(heads // groups, 1) * num_keys
  # Gradients of heads that several blocks share are added up in float32.
  qk_out = f32 if groups > heads else operand
  windows = [((chunk, width), kind) for kind in (operand, qk_out) * 2]
  windows += [((chunk, heads * num_keys), gate_dtype)] * 2
  windows += [((chunk, heads * num_values), operand)] * 3
  windows += [((heads, num_keys, num_values), kind) for kind in (f32, f32)]
  windows += [((heads, num_keys, num_values), operand)]
  windows += [((heads, chunk), f32)] * 2
  windows += [((2 * chunk + 8, parts * chunk), operand)]
  windows += [((1, heads * num_keys), f32)] * 2
  windows += [((8, heads * num_keys), f32), ((8, chunk), jnp.int32)]
  if settings.taps:
    for width in (num_keys, num_keys, num_values):
      windows += [((8 * settings.taps, heads * width), f32)] * 2
      windows += [((stages.TILE, heads * width), operand)]
  scratch = scratch_shapes(settings, groups, num_keys, num_values, gate_dtype)
  return tile.vmem_bytes(windows, scratch.values(), settings.exact)
