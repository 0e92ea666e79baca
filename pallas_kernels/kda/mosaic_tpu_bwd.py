"""KDA's backward as one Pallas kernel for TPU.

The grid is (rows, blocks of heads, chunks + 1), the last axis sequential.
Chunks are taken in reverse. Each is recomputed from the inputs and the state
before it, all that the forward saves, and the gradient of the state is carried
in VMEM. The gradients of q, k and g are written one step late, among the waits
of the next chunk; `mosaic_tpu_bwd_order` has the order of all stages.
"""

import functools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import (
  gate,
  mosaic_tpu_bwd_scratch,
  mosaic_tpu_conv,
  tile,
  varying,
)
from pallas_kernels.kda import mosaic_tpu_bwd_grads as grads
from pallas_kernels.kda import mosaic_tpu_bwd_order as order
from pallas_kernels.kda import mosaic_tpu_bwd_stages as stages
from pallas_kernels.kda.mosaic_tpu_views import DOCUMENT, ENTRY, REAL


def _kernel(*refs, settings, names, scratch_names, own_names, groups):
  """One grid step; references come in the order of the names."""
  blocks = dict(zip(names, refs))
  refs = dict(zip(scratch_names, refs[len(names) :]))
  for name in ('d_q_sum', 'd_k_sum'):
    blocks[name] = refs.get(name)
  state_ref = refs['d_state']
  t, chunks = pl.program_id(2), pl.num_programs(2) - 1
  # The last step only finishes: it repeats the one before in all else, from the
  # same gradient of the state, and so writes what is already there.
  turn = jnp.minimum(t, chunks - 1)
  chunk = chunks - 1 - turn
  buffer, exit_slot = lax.rem(t, 2), lax.rem(turn, 2)
  ends, begins = t == 0, chunk == 0
  if settings.sequences:
    sequence_ref = blocks['sequence']
    sequence = sequence_ref[chunk]
    ends |= sequence_ref[jnp.minimum(chunk + 1, chunks - 1)] != sequence
    begins |= sequence_ref[jnp.maximum(chunk - 1, 0)] != sequence

  @pl.when(t == 0)
  def _():
    for count in sorted({refs[name].shape[0] for name in own_names}):
      cleared = [refs[x] for x in own_names if refs[x].shape[0] == count]

      def fill(h, _, cleared=cleared):
        for ref in cleared:
          ref[h] = jnp.zeros(ref.shape[1:], ref.dtype)

      lax.fori_loop(0, count, fill, None)
    for name in ('numbers', 'later'):
      if name in refs:
        refs[name][...] = jnp.zeros_like(refs[name])
    for name in ('d_gate', 'd_q_taps', 'd_k_taps', 'd_v_taps'):
      if name in blocks:
        blocks[name][...] = jnp.zeros_like(blocks[name])
    if settings.taps:
      # No token follows a row's last.
      after = refs['d_v_first'].at[exit_slot]
      after[...] = jnp.zeros_like(after)

  @pl.when(ends)
  def _():
    def fill(h, _):
      state_ref[exit_slot, h] = blocks['d_final'][0, h]

    lax.fori_loop(0, settings.heads, fill, None)

  beta = blocks['beta'][0, 0, 0]
  real = None
  if settings.packed:
    real = blocks['tokens'][0, 0, REAL : REAL + 1] != 0
    beta = jnp.where(real, beta, 0.0)
  strength = gate.write_strength(beta, settings.kda)
  if settings.packed:
    strength = jnp.where(real, strength, 0.0)
  refs['strengths'][...] = jnp.transpose(strength)
  later = blocks['sums'].at[settings.chunk + 8 :]

  def make_step(buffer):
    packed = settings.packed
    return stages.Step(
      blocks,
      settings,
      refs['strengths'],
      refs['numbers'].at[buffer] if packed else None,
      refs['later'].at[buffer] if packed else later,
      refs['d_strengths'],
      chunk == 0,
    )

  step, last_step = make_step(buffer), make_step(1 - buffer)
  if settings.packed:
    step.spread_numbers()
    step.mask_later(later)
  num_keys, num_values = state_ref.shape[2:]

  def own_scratch(h, buffer):
    own = {}
    for name in own_names:
      kept = name in stages.KEPT
      own[name] = refs[name].at[h + buffer * settings.heads if kept else h]
    return types.SimpleNamespace(**own)

  def values_after(h):
    if not settings.taps:
      return None, None, None
    ref = refs['d_v_first']
    weight = jnp.where(t < chunks, 1.0, 0.0)
    return ref.at[exit_slot, h], ref.at[1 - exit_slot, h], weight

  works = [
    order.Work(
      head,
      own_scratch(head.index, buffer),
      own_scratch(head.index, 1 - buffer),
      blocks['states'].at[0, 0, head.index],
      state_ref.at[exit_slot, head.index],
      state_ref.at[1 - exit_slot, head.index],
      *values_after(head.index),
    )
    for head in order.make_heads(settings, groups, num_keys, num_values)
  ]
  order.run_step(step, last_step, works)

  d_beta = jnp.transpose(refs['d_strengths'][...])
  if settings.kda.beta_sigmoid:
    d_beta *= gate.sigmoid(-beta)
  if settings.packed:
    d_beta = jnp.where(real, d_beta, 0.0)
  blocks['d_beta'][0, 0, 0] = d_beta

  @pl.when(begins)
  def _():
    def copy(h, _):
      blocks['d_h0'][0, h] = state_ref[1 - exit_slot, h]

    lax.fori_loop(0, settings.heads, copy, None)


def _mark_last(tokens: jax.Array) -> jax.Array:
  """1 at the last real token [.., C] of a chunk's last document, else 0."""
  document = tokens[..., DOCUMENT, :]
  leaves = (tokens[..., REAL, :] != 0) & (document == document[..., -1:])
  place = stages.iota(leaves.shape, leaves.ndim - 1) + 1
  last = jnp.max(jnp.where(leaves, place, 0), axis=-1, keepdims=True)
  return (place == last).astype(tokens.dtype)


def backward_call(
  settings,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  rate: jax.Array,
  bias: jax.Array,
  states: jax.Array,
  d_o: jax.Array,
  d_final: jax.Array,
  tokens: jax.Array | None = None,
  entry: jax.Array | None = None,
  sequence: jax.Array | None = None,
  *,
  taps: tuple[jax.Array, jax.Array, jax.Array] | None = None,
  interpret=False,
  name: str = 'kda_backward',
) -> grads.Gradients:
  """Gradients of the arrays of `mosaic_tpu_fwd.forward_call`.

  Args:
    settings: static settings, a `mosaic_tpu_fwd.TpuConfig`.
    q: as in the forward, like all up to bias.
    k: as in the forward.
    v: as in the forward.
    g: as in the forward.
    beta: as in the forward.
    rate: as in the forward.
    bias: as in the forward.
    states: states before each chunk [B, N, HV, K, V] from the forward.
    d_o: gradient of the outputs [B, T, HV * V].
    d_final: float32 gradient of the final states [B or S, HV, K, V].
    tokens: as in the forward.
    entry: as in the forward.
    sequence: as in the forward.
    taps: as in the forward; tokens then also have the row AHEADS.
    interpret: as of `pallas_call`.
    name: of the kernel.

  Returns:
    The gradients. Those of rate and bias follow from g_sum and g_moment: with
    z = rate * (g + bias), d_bias = g_sum and rate * d_rate = g_moment + bias *
    g_sum.
  """
  batch, num_tokens, value_heads = beta.shape
  chunk, heads = settings.chunk, settings.heads
  chunks, blocks = num_tokens // chunk, value_heads // heads
  num_keys, num_values = g.shape[2] // value_heads, v.shape[2] // value_heads
  groups = value_heads * num_keys // q.shape[2]
  block_key_heads = max(heads // groups, 1)
  # So many blocks of value heads read the same head of q and k.
  shared = max(groups // heads, 1)
  f32, dtype = jnp.float32, q.dtype

  parts = 1 if settings.exact else 2
  sums = stages.sums_matrix(chunk, parts)
  factor, shift = gate.exponent_terms(rate, bias, settings.kda.lower_bound)
  inputs = {
    'q': q,
    'k': k,
    'v': v,
    'g': g,
    'beta': jnp.transpose(
      beta.astype(f32).reshape(batch, chunks, chunk, blocks, heads),
      (0, 1, 3, 4, 2),
    ),
    'rate': factor,
    'shift': shift,
    'sums': jnp.asarray(sums, settings.operand),
    'states': states,
    'd_o': d_o,
    'd_final': d_final,
  }
  if settings.packed:
    numbers = jnp.broadcast_to(entry[..., None], (batch, chunks, chunk))
    tokens = tokens.at[:, :, ENTRY].set(numbers)
    inputs['tokens'] = tokens.at[:, :, stages.LAST].set(_mark_last(tokens))
  if settings.taps:
    inputs |= {'q_halo': q, 'k_halo': k, 'v_halo': v}
    inputs |= mosaic_tpu_conv.name_taps(taps)
  scalars = {'sequence': sequence} if settings.sequences else {}
  axes = varying.varying_axes((inputs, scalars))
  inputs, scalars = varying.vary_over((inputs, scalars), axes)

  def chunk_of(t, age=0):
    return chunks - 1 - jnp.clip(t - age, 0, chunks - 1)

  def along_tokens(width, shared=1, age=0):
    return pl.BlockSpec(
      (1, chunk, width),
      lambda b, h, t, *_: (b, chunk_of(t, age), lax.div(h, shared)),
    )

  def before_chunk(width):
    def index(b, h, t, *_):
      first = chunk_of(t) * (chunk // stages.TILE)
      return b, jnp.maximum(first - 1, 0), h

    return pl.BlockSpec((1, stages.TILE, heads * width), index)

  taps_shape = (settings.taps, mosaic_tpu_conv.ROWS)

  def along_taps(width):
    shape = (*taps_shape, heads * width)
    return pl.BlockSpec(shape, lambda b, h, t, *_: (0, 0, h))

  def state_index(b, h, t, *scalars):
    row = scalars[0][chunk_of(t)] if settings.sequences else b
    return row, h, 0, 0

  state = (1, heads, num_keys, num_values)
  qk = along_tokens(block_key_heads * num_keys, shared)
  values = along_tokens(heads * num_values)
  gates = along_tokens(heads * num_keys)
  betas = pl.BlockSpec(
    (1, 1, 1, heads, chunk), lambda b, h, t, *_: (b, chunk_of(t), h, 0, 0)
  )
  channels = pl.BlockSpec((1, heads * num_keys), lambda b, h, t, *_: (0, h))
  specs = {
    'q': qk,
    'k': qk,
    'v': values,
    'g': gates,
    'beta': betas,
    'rate': channels,
    'shift': channels,
    'sums': pl.BlockSpec(sums.shape, lambda b, h, t, *_: (0, 0)),
    'states': pl.BlockSpec(
      (1, *state), lambda b, h, t, *_: (b, chunk_of(t), h, 0, 0)
    ),
    'd_o': values,
    'd_final': pl.BlockSpec(state, state_index),
    'q_halo': before_chunk(num_keys),
    'k_halo': before_chunk(num_keys),
    'v_halo': before_chunk(num_values),
    'q_taps': along_taps(num_keys),
    'k_taps': along_taps(num_keys),
    'v_taps': along_taps(num_values),
    'tokens': pl.BlockSpec(
      (1, 1, 8, chunk), lambda b, h, t, *_: (b, chunk_of(t), 0, 0)
    ),
  }
  # Sums over blocks that share a head are left to XLA.
  width = blocks * block_key_heads * num_keys
  qk_out = (
    (batch, num_tokens, width),
    dtype if shared == 1 else f32,
    along_tokens(block_key_heads * num_keys, age=1),
  )
  outputs = {
    'd_q': qk_out,
    'd_k': qk_out,
    'd_v': (v.shape, v.dtype, values),
    'd_g': (g.shape, g.dtype, along_tokens(heads * num_keys, age=1)),
    'd_beta': (inputs['beta'].shape, f32, betas),
    'd_h0': (d_final.shape, f32, pl.BlockSpec(state, state_index)),
  }
  if settings.kda.gate_in_kernel:
    outputs['d_gate'] = (
      (batch, 8, value_heads * num_keys),
      f32,
      pl.BlockSpec((1, 8, heads * num_keys), lambda b, h, t, *_: (b, 0, h)),
    )
  for x in ('q', 'k', 'v') if settings.taps else ():
    width = num_values if x == 'v' else num_keys
    outputs[f'd_{x}_taps'] = (
      (batch, *taps_shape, value_heads * width),
      f32,
      pl.BlockSpec(
        (1, *taps_shape, heads * width), lambda b, h, t, *_: (b, 0, 0, h)
      ),
    )
  scratch = mosaic_tpu_bwd_scratch.scratch_shapes(
    settings, groups, num_keys, num_values, g.dtype
  )
  windows = [(specs[name].block_shape, x.dtype) for name, x in inputs.items()]
  windows += [(spec.block_shape, dtype) for _, dtype, spec in outputs.values()]
  cells = batch * num_tokens * value_heads

  def read(name, x):
    shape = list(x.shape)
    if name.endswith('_halo'):
      # One tile a chunk.
      shape[1] = chunks * stages.TILE
    return shape, x.dtype

  results = pl.pallas_call(
    functools.partial(
      _kernel,
      settings=settings,
      names=(*scalars, *inputs, *outputs),
      scratch_names=tuple(scratch),
      own_names=tuple(
        stages.scratch_shapes(settings, num_keys, num_values, g.dtype)
      ),
      groups=groups,
    ),
    out_shape=[
      varying.struct_like(inputs['q'], shape, dtype)
      for shape, dtype, _ in outputs.values()
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(batch, blocks, chunks + 1),
      in_specs=[specs[name] for name in inputs],
      out_specs=[spec for _, _, spec in outputs.values()],
      scratch_shapes=[pltpu.VMEM(*x) for x in scratch.values()],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary'),
      vmem_limit_bytes=tile.vmem_bytes(
        windows, scratch.values(), settings.exact
      ),
    ),
    cost_estimate=pl.CostEstimate(
      flops=2
      * cells
      * (
        7 * num_keys * num_values
        + 11 * chunk * num_keys
        + 3 * settings.taps * (2 * num_keys + num_values)
      ),
      bytes_accessed=tile.array_bytes(
        [read(name, x) for name, x in inputs.items()]
        + [(shape, dtype) for shape, dtype, _ in outputs.values()]
      ),
      transcendentals=4 * cells * num_keys,
    ),
    interpret=interpret,
    name=name,
  )(*scalars.values(), *inputs.values())
  results = dict(zip(outputs, results))
  d_q, d_k, d_h0 = results['d_q'], results['d_k'], results['d_h0']
  if shared > 1:
    d_q, d_k = (
      x.reshape(batch, num_tokens, -1, shared, num_keys)
      .sum(axis=3)
      .reshape(q.shape)
      .astype(dtype)
      for x in (d_q, d_k)
    )
  if settings.sequences:
    # No chunk writes the gradient of a sequence without tokens.
    written = jnp.zeros((d_h0.shape[0],), bool).at[sequence].set(True)
    d_h0 = jnp.where(written[:, None, None, None], d_h0, 0.0)
  d_beta = jnp.transpose(results['d_beta'], (0, 1, 4, 2, 3)).reshape(beta.shape)
  gate_sums = results.get('d_gate')
  d_taps = None
  if settings.taps:
    d_taps = tuple(results[f'd_{x}_taps'].sum(axis=(0, 2)) for x in 'qkv')
  return grads.Gradients(
    d_q,
    d_k,
    results['d_v'],
    results['d_g'],
    d_beta.astype(beta.dtype),
    None if gate_sums is None else gate_sums[:, 0],
    None if gate_sums is None else gate_sums[:, 1],
    d_h0,
    d_taps,
  )
