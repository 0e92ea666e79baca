"""KDA's recurrence over the states of chunks, as a kernel for Hopper.

A warpgroup carries 64 of the state's value channels, transposed, in registers;
the channels of values do not depend on each other. Another warpgroup fetches
the views of later chunks. All products have the state or new values on the
left, in registers, so that only two of them wait for each other in a chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import products, varying
from pallas_kernels.kda.mosaic_gpu_arrays import (
  CHANNELS,
  CHUNK,
  ROWS_BY_COLUMNS,
  accumulate,
  add_product,
  compiler_params,
  load,
  spread,
  swizzled,
  wait_for,
  zeros,
)
from pallas_kernels.kda.mosaic_gpu_prepare import GpuConfig, Prepared

# Value channels that a warpgroup carries.
PART = 64
# Chunks in shared memory.
_STAGES = 2
# Registers of a thread that computes and of one that fetches.
_COMPUTE_REGISTERS, _FETCH_REGISTERS = 240, 24


class ChainResults(NamedTuple):
  """What the recurrence leaves.

  Attributes:
    o: bfloat16 [B, T, HV * V].
    final: float32 [R * HV, V, 128], transposed states, R rows or sequences.
    states: bfloat16 [B * HV, N * V, 128], the transposed state at each chunk's
      entry, or None.
  """

  o: jax.Array
  final: jax.Array
  states: jax.Array | None


def _advance(state, chunk, settings: GpuConfig, between):
  """One chunk of the recurrence.

  Args:
    state: float32 [64, 128], transposed.
    chunk: `Prepared` and the values [64, 64] of the chunk, in shared memory.
    settings: static settings.
    between: called with the rounded state while products run; holds a barrier.

  Returns:
    The next state and the transposed outputs bfloat16 [64, 64].
  """
  views, v = chunk

  def run(new, out, written):
    add_product(new, v.transpose((1, 0)), views.inverse)
    rounded = state.astype(jnp.bfloat16)
    add_product(new, rounded, views.w.transpose((1, 0)))
    add_product(out, rounded, views.q_entry.transpose((1, 0)))
    # Here neither the factors nor the state itself take registers for long. And
    # before the barrier in `between`: they are not read as operands are, and
    # the copy that replaces them may run once this chunk is given back.
    decay = load(views.decay, (0,), layout=ROWS_BY_COLUMNS.reduce(0))
    decayed = state * spread(decay, state.shape, (1,), ROWS_BY_COLUMNS)
    between(rounded)
    values = wait_for(new, in_flight=1)
    parts = products.split(values)[: 2 if settings.splits else 1]
    for part in parts:
      add_product(written, part, views.k_exit)
    for part in parts:
      add_product(out, part, views.scores)
    following = decayed + wait_for(written, in_flight=len(parts))
    return following, wait_for(out).astype(jnp.bfloat16)

  return accumulate(
    run,
    (PART, CHUNK),
    (PART, CHUNK),
    (PART, CHANNELS),
    interpreted=settings.interpreted,
  )


def chain_call(
  settings: GpuConfig,
  prepared: Prepared,
  v: jax.Array,
  h0: jax.Array | None = None,
  bounds: jax.Array | None = None,
  *,
  parts: int,
  save_states: bool = False,
) -> ChainResults:
  """Runs the recurrence of all rows and heads.

  Args:
    settings: static settings.
    prepared: of all chunks.
    v: bfloat16 [B, T, HV * V]; V is a multiple of 64, and padding is finite.
    h0: float32 [R * HV, V, 128] transposed initial states, or None for 0.
    bounds: int32 [R + 1], the first chunk of each of R sequences in one row
      (B = 1) and the end of the last, or None for a sequence a row.
    parts: parts of 64 value channels that a block carries.
    save_states: whether to return the states at the chunks' entries.
  """
  batch, num_tokens, width = v.shape
  chunks = num_tokens // CHUNK
  heads = prepared.w.shape[0] // batch
  num_values = width // heads
  rows = batch if bounds is None else bounds.shape[0] - 1
  block = PART * parts
  square = (_STAGES, CHUNK, CHUNK)
  wide = (_STAGES, CHUNK, CHANNELS)
  scratch = {
    'w': swizzled(wide),
    'q_entry': swizzled(wide),
    'k_exit': swizzled(wide),
    'scores': swizzled(square),
    'inverse': swizzled(square),
    'decay': plgpu.SMEM((_STAGES, 1, CHANNELS), jnp.float32),
    'v': swizzled((_STAGES, parts, CHUNK, PART)),
    'full': plgpu.Barrier(
      num_arrivals=len(Prepared._fields) + parts, num_barriers=_STAGES
    ),
    'empty': plgpu.Barrier(num_arrivals=parts, num_barriers=_STAGES),
  }
  outgoing = [swizzled((parts, CHUNK, PART))]
  if save_states:
    outgoing.append(swizzled((parts, PART, CHANNELS)))
  scratch['outgoing'] = outgoing
  if h0 is not None:
    # The initial state comes by way of shared memory: what is read from an
    # argument has its mesh axes, which the carry of a loop could not lose.
    incoming = swizzled((parts, PART, CHANNELS), jnp.float32)
    scratch['outgoing'] = plgpu.RefUnion(incoming, outgoing)
    scratch['entered'] = plgpu.Barrier(num_barriers=parts)
    scratch['taken'] = plgpu.Barrier(num_arrivals=parts)
  inputs = {**prepared._asdict(), 'v': v}
  if h0 is not None:
    inputs['h0'] = h0
  if bounds is not None:
    inputs['bounds'] = bounds
  array = functools.partial(varying.struct_like, v)
  outputs = {
    'o': array(v.shape, jnp.bfloat16),
    'final': array((rows * heads, num_values, CHANNELS), jnp.float32),
  }
  if save_states:
    shape = (batch * heads, chunks * num_values, CHANNELS)
    outputs['states'] = array(shape, jnp.bfloat16)

  def body(*refs):
    count = len(inputs) + len(outputs)
    gmem = dict(zip((*inputs, *outputs), refs))
    smem = dict(zip(scratch, refs[count:]))
    outgoing = smem['outgoing']
    if h0 is not None:
      incoming, outgoing = outgoing
    part, h, r = (lax.axis_index(axis) for axis in ('part', 'head', 'row'))
    warpgroup = lax.axis_index('warpgroup')
    b = r if bounds is None else 0
    row = b * heads + h
    first, last = 0, chunks
    if bounds is not None:
      first, last = gmem['bounds'][r], gmem['bounds'][r + 1]

    def channels(i):
      return (part * parts + i) * PART

    def fetch(n):
      slot = lax.rem(n - first, _STAGES)
      barrier = smem['full'].at[slot]
      chunk = pl.ds(n * CHUNK, CHUNK)
      for name in Prepared._fields:
        place = pl.ds(n, 1) if name == 'decay' else chunk
        source = gmem[name].at[row, place]
        plgpu.copy_gmem_to_smem(source, smem[name].at[slot], barrier)
      for i in range(parts):
        columns = pl.ds(h * num_values + channels(i), PART)
        source = gmem['v'].at[b, chunk, columns]
        plgpu.copy_gmem_to_smem(source, smem['v'].at[slot, i], barrier)

    @pl.when(warpgroup == parts)
    def _():
      plgpu.set_max_registers(_FETCH_REGISTERS, action='decrease')

      @pl.loop(first, last)
      def _(n):
        @pl.when(n - first >= _STAGES)
        def _():
          plgpu.barrier_wait(smem['empty'].at[lax.rem(n - first, _STAGES)])

        fetch(n)

    @pl.when(warpgroup < parts)
    def _():
      plgpu.set_max_registers(_COMPUTE_REGISTERS, action='increase')
      own = channels(warpgroup)
      place = (r * heads + h, pl.ds(own, PART))
      state = zeros((PART, CHANNELS))
      if h0 is not None:
        state_ref, barrier = (
          x.at[warpgroup] for x in (incoming, smem['entered'])
        )
        plgpu.copy_gmem_to_smem(gmem['h0'].at[place], state_ref, barrier)
        plgpu.barrier_wait(barrier)
        state = load(state_ref, layout=ROWS_BY_COLUMNS)
        plgpu.commit_smem()
        # What one warpgroup sends out lies where another's state came in.
        plgpu.barrier_arrive(smem['taken'])
        plgpu.barrier_wait(smem['taken'])
      o_ref, *state_refs = (x.at[warpgroup] for x in outgoing)

      def free_buffers():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()

      def store(n, o):
        o_ref.transpose((1, 0))[...] = o
        plgpu.commit_smem()
        columns = pl.ds(h * num_values + own, PART)
        chunk = pl.ds(n * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(o_ref, gmem['o'].at[b, chunk, columns])

      def step(n, carry):
        state, before = carry
        slot = lax.rem(n - first, _STAGES)
        plgpu.barrier_wait(smem['full'].at[slot])
        views = Prepared(*(smem[x].at[slot] for x in Prepared._fields))

        def between(rounded):
          free_buffers()

          @pl.when(n > first)
          def _():
            store(n - 1, before)

          for state_ref in state_refs:
            state_ref[...] = rounded
            plgpu.commit_smem()
            states = gmem['states'].at[row, pl.ds(n * num_values + own, PART)]
            plgpu.copy_smem_to_gmem(state_ref, states)

        chunk = views, smem['v'].at[slot, warpgroup]
        carry = _advance(state, chunk, settings, between)
        plgpu.barrier_arrive(smem['empty'].at[slot])
        return carry

      nothing = zeros((PART, CHUNK), jnp.bfloat16)
      state, o = lax.fori_loop(first, last, step, (state, nothing))

      @pl.when(last > first)
      def _():
        free_buffers()
        store(last - 1, o)

      gmem['final'][place] = state
      plgpu.wait_smem_to_gmem(0)

  results = plgpu.kernel(
    body,
    out_type=list(outputs.values()),
    scratch_types=list(scratch.values()),
    grid=(num_values // block, heads, rows),
    grid_names=('part', 'head', 'row'),
    num_threads=parts + 1,
    thread_name='warpgroup',
    compiler_params=compiler_params(),
    kernel_name='kda_chain',
  )(*inputs.values())
  states = results[2] if save_states else None
  return ChainResults(results[0], results[1], states)
