"""KDA's decode step as a Pallas kernel for TPU.

The kernel is a copy pipeline: each head's state is read from HBM and written
back once, and everything else hides behind those copies. While one block is
computed, the next ones are on their way in, the last ones on their way out, and
the arguments of the next token are made ready.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import (
  decode_plan,
  decode_step,
  gate,
  operands,
  varying,
)

INACTIVE = -1
FRESH = -2


def _decode_kernel(
  read_ref,
  write_ref,
  q_ref,
  k_ref,
  g_ref,
  next_q_ref,
  next_k_ref,
  next_g_ref,
  v_ref,
  beta_ref,
  A_log_ref,
  dt_bias_ref,
  _,
  o_ref,
  pool_ref,
  in_ref,
  out_ref,
  carry_ref,
  columns_ref,
  qk_ref,
  broken_ref,
  in_sem,
  out_sem,
  *,
  plan: decode_plan.DecodePlan,
  config: operands.KdaConfig,
):
  core, group = pl.program_id(0), pl.program_id(1)
  groups, tokens = pl.num_programs(1), o_ref.shape[1]
  blocks = plan.blocks // plan.cores
  loads, stores = groups * blocks, groups * blocks * tokens
  here = (q_ref, k_ref, g_ref)
  there = (next_q_ref, next_k_ref, next_g_ref)

  def slot_of(r):
    return read_ref[group * plan.requests + r]

  def rows_of(r):
    return pl.ds(r * plan.heads, plan.heads)

  def heads_of(block):
    return pl.ds((core * blocks + block) * plan.heads, plan.heads)

  def load(i, act):
    """Starts or awaits the loads of the i-th block of this core."""
    buffer = jax.lax.rem(i, plan.buffers)
    heads = heads_of(jax.lax.rem(i, blocks))
    for r in range(plan.requests):
      slot = read_ref[jax.lax.div(i, blocks) * plan.requests + r]

      @pl.when(slot >= 0)
      def _(r=r, slot=slot):
        source, target = pool_ref.at[slot, heads], in_ref.at[buffer, rows_of(r)]
        act(pltpu.make_async_copy(source, target, in_sem.at[buffer, r]))

  def store(j, act):
    """Starts or awaits the stores of the j-th block and token."""
    i, t = jax.lax.div(j, tokens), jax.lax.rem(j, tokens)
    buffer = jax.lax.rem(j, plan.buffers)
    heads = heads_of(jax.lax.rem(i, blocks))
    for r in range(plan.requests):
      request = jax.lax.div(i, blocks) * plan.requests + r
      slot = write_ref[request * tokens + t]

      @pl.when(slot >= 0)
      def _(r=r, slot=slot):
        source, target = (
          out_ref.at[buffer, rows_of(r)],
          pool_ref.at[slot, heads],
        )
        act(pltpu.make_async_copy(source, target, out_sem.at[buffer, r]))

  def start(copy):
    copy.start()

  def wait(copy):
    copy.wait()

  def turn(j, block, token):
    gates = (
      jnp.concatenate([ref[block]] * plan.requests, axis=0)
      for ref in (A_log_ref, dt_bias_ref)
    )
    turned = decode_step.turn(token, *gates, config)
    for ref, x in zip((columns_ref, qk_ref, broken_ref), turned):
      ref[jax.lax.rem(j, 2)] = x

  def turn_next(j, block, t):
    """Turns what comes after a block and token, while that is advanced."""
    wraps = t == tokens - 1
    t = jnp.where(wraps, 0, t + 1)
    block = jnp.where(wraps, block + 1, block)
    leaves = block == blocks
    block = jnp.where(leaves, 0, block)
    token = [
      jnp.where(leaves, y[0, 0, 0], x[0, t, block]) for x, y in zip(here, there)
    ]
    turn(j + 1, block, token)

  @pl.when(group == 0)
  def _():
    first = jnp.minimum(plan.buffers - 1, loads)
    jax.lax.fori_loop(0, first, lambda i, _: load(i, start), None)
    turn(0, 0, [x[0, 0, 0] for x in here])

  def run_block(block, _):
    i = group * blocks + block
    buffer = jax.lax.rem(i, plan.buffers)
    ahead = i + plan.buffers - 1
    pl.when(ahead < loads)(functools.partial(load, ahead, start))
    load(i, wait)
    active = slot_of(0) != INACTIVE
    for r in range(plan.requests):
      active |= slot_of(r) != INACTIVE

      def clear(h, _, r=r):
        h = r * plan.heads + h
        in_ref[buffer, h] = jnp.zeros(in_ref.shape[2:], in_ref.dtype)

      cleared = jnp.where(slot_of(r) == FRESH, plan.heads, 0)
      jax.lax.fori_loop(0, cleared, clear, None)

    def run_token(t, source_ref):
      j = i * tokens + t
      past = j - plan.buffers
      pl.when(past >= 0)(functools.partial(store, past, wait))

      @pl.when(active)
      def _():
        targets = [out_ref.at[jax.lax.rem(j, plan.buffers)]]
        if tokens > 1:
          targets.append(carry_ref)
        o_HV = decode_step.advance(
          source_ref,
          targets,
          *(x[jax.lax.rem(j, 2)] for x in (columns_ref, qk_ref, broken_ref)),
          v_ref[0, t, block].astype(jnp.float32),
          gate.write_strength(beta_ref[0, t, block], config),
        )
        o_ref[0, t, block] = o_HV.astype(o_ref.dtype)
        turn_next(j, block, t)

      @pl.when(jnp.logical_not(active))
      def _():
        turn_next(j, block, t)

      for r in range(plan.requests):

        @pl.when(slot_of(r) == INACTIVE)
        def _(r=r):
          zeros = jnp.zeros((plan.heads, o_ref.shape[-1]), o_ref.dtype)
          o_ref[0, t, block, rows_of(r)] = zeros

      store(j, start)

    run_token(0, in_ref.at[buffer])
    if tokens > 1:
      jax.lax.fori_loop(1, tokens, lambda t, _: run_token(t, carry_ref), None)

  jax.lax.fori_loop(0, blocks, run_block, None)

  @pl.when(group == groups - 1)
  def _():
    last = jnp.maximum(stores - plan.buffers, 0)
    jax.lax.fori_loop(last, stores, lambda j, _: store(j, wait), None)


def kda_decode_mosaic_tpu(
  arrays: operands.Operands,
  states_SHKV: jax.Array,
  read_N: jax.Array,
  write_NT: jax.Array,
  config: operands.KdaConfig,
) -> tuple[jax.Array, jax.Array]:
  """Runs every token of every request.

  Args:
    arrays: the arrays of the call, rows being requests; h0_BHKV is not used.
    states_SHKV: float32 or bfloat16 pool of states [slots, HV, K, V].
    read_N: int32 slot that a request continues, INACTIVE or FRESH.
    write_NT: int32 slot that keeps the state after a token, or -1; -1 for all
      tokens of inactive requests.
    config: static settings.

  Returns:
    Outputs [N, T, HV, V] in v's dtype and the pool, updated in place.
  """
  requests, tokens, value_heads, num_values = arrays.v_BTHV.shape
  num_keys = arrays.k_BTHK.shape[-1]
  plan = decode_plan.make_plan(arrays, states_SHKV, decode_plan.count_cores())
  f32, dtype = jnp.float32, states_SHKV.dtype
  A_log, dt_bias = arrays.A_log_H, arrays.dt_bias_HK
  if A_log is None:
    A_log = jnp.zeros((value_heads,), f32)
  if dt_bias is None:
    dt_bias = jnp.zeros((value_heads, num_keys), f32)

  groups = pl.cdiv(requests, plan.requests)
  missing = groups * plan.requests - requests

  def pad(x, value=0):
    """Adds inactive requests, which fill the last block."""
    widths = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, widths, constant_values=value) if missing else x

  def split(x, heads):
    """Splits the head axis of [.., heads, dim], so that blocks are whole."""
    *rows, all_heads, dim = x.shape
    # Value heads of several blocks may share a head of q and k.
    shared = plan.blocks * heads // all_heads
    x = x if shared == 1 else jnp.repeat(x, shared, axis=-2)
    return x.reshape(*rows, plan.blocks, heads, dim)

  def split_requests(x, heads):
    """Splits heads, and makes heads of the requests that share a block."""
    x = split(pad(x), heads)
    _, _, blocks, heads, dim = x.shape
    x = x.reshape(groups, plan.requests, tokens, blocks, heads, dim)
    x = jnp.moveaxis(x, 1, 3)
    return x.reshape(groups, tokens, blocks, plan.requests * heads, dim)

  turned = [
    split_requests(arrays.q_BTHK, plan.key_heads),
    split_requests(arrays.k_BTHK, plan.key_heads),
    split_requests(arrays.g_BTHK, plan.heads),
  ]
  per_token = [
    split_requests(arrays.v_BTHV, plan.heads),
    split_requests(arrays.beta_BTH[..., None], plan.heads),
  ]
  per_head = [split(A_log[:, None], plan.heads), split(dt_bias, plan.heads)]
  axes = varying.varying_axes(states_SHKV)
  per_head = varying.vary_over(per_head, axes)
  o = jax.ShapeDtypeStruct(per_token[0].shape, arrays.v_BTHV.dtype)

  def window(x, ahead=0):
    """A group's part of an array, or that of a group ahead."""
    shape = (1, tokens, plan.blocks // plan.cores, *x.shape[-2:])
    last = groups - 1
    return pl.BlockSpec(
      shape, lambda core, n, *_: (jnp.minimum(n + ahead, last), 0, core, 0, 0)
    )

  def whole(x):
    shape = (plan.blocks // plan.cores, *x.shape[-2:])
    return pl.BlockSpec(shape, lambda core, n, *_: (core, 0, 0))

  # XLA would move a small pool to VMEM and back as a whole.
  states_SHKV = pltpu.with_memory_space_constraint(states_SHKV, pltpu.HBM)
  pool = pl.BlockSpec(memory_space=pltpu.HBM)
  block_shape = (plan.rows, num_keys, num_values)
  buffers = pltpu.VMEM((plan.buffers, *block_shape), dtype)
  carry_shape = block_shape if tokens > 1 else (1, 8, 128)
  columns = 3 * (plan.rows + plan.key_rows) + plan.key_rows
  semaphores = pltpu.SemaphoreType.DMA((plan.buffers, plan.requests))
  inputs = [*turned, *turned, *per_token, *per_head]
  cells = requests * tokens * value_heads * num_keys * num_values
  o, states_SHKV = pl.pallas_call(
    functools.partial(_decode_kernel, plan=plan, config=config),
    out_shape=[
      varying.struct_like(states_SHKV, x.shape, x.dtype)
      for x in (o, states_SHKV)
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(plan.cores, groups),
      in_specs=[
        *map(window, turned),
        *(window(x, ahead=1) for x in turned),
        *map(window, per_token),
        *map(whole, per_head),
        pool,
      ],
      out_specs=[window(o), pool],
      scratch_shapes=[
        buffers,
        buffers,
        pltpu.VMEM(carry_shape, f32),
        pltpu.VMEM((2, num_keys, pl.cdiv(columns, 8) * 8), f32),
        pltpu.VMEM((2, plan.key_rows, 1), f32),
        pltpu.VMEM((2, plan.rows, 1), f32),
        semaphores,
        semaphores,
      ],
    ),
    input_output_aliases={2 + len(inputs): 1},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      vmem_limit_bytes=plan.vmem_bytes,
    ),
    cost_estimate=pl.CostEstimate(
      flops=9 * cells,
      bytes_accessed=2 * cells * dtype.itemsize,
      transcendentals=2 * cells // num_values,
    ),
    name='kda_decode',
  )(pad(read_N, INACTIVE), pad(write_NT, -1).reshape(-1), *inputs, states_SHKV)
  o = o.reshape(groups, tokens, plan.blocks, plan.requests, plan.heads, -1)
  o = jnp.moveaxis(o, 3, 1).reshape(-1, tokens, value_heads, num_values)
  return o[:requests], states_SHKV
