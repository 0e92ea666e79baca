"""KDA's decode step as a Pallas kernel for TPU.

The kernel is a copy pipeline: each head's state is read from HBM and written
back once, and everything else hides behind those copies. K lies on sublanes and
V on lanes, so decays, keys and queries, which arrive with K on lanes, must be
turned and then spread over all lanes. That is most of the work, so it is shared
between the two units that can do it. Kimi Linear (arXiv 2510.26692) equation 1
for the recurrence.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import decode_plan, gate, operands

INACTIVE = -1
FRESH = -2

_LANES = 128
_HIGH_HALF = -(2**16)


def _split(x: jax.Array) -> list[jax.Array]:
  """Three float32 arrays that fit bfloat16 exactly and whose sum is x.

  Bits are cut, because a compiler may drop a rounding to bfloat16 and back.
  """
  parts = []
  for _ in range(2):
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & _HIGH_HALF
    parts.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
    x = x - parts[-1]
  return [*parts, x]


def _turn(
  token, A_log_H1: jax.Array, dt_bias_HK: jax.Array, config: operands.KdaConfig
) -> tuple[jax.Array, jax.Array]:
  """Norms and gates of one token for the heads of one block, K on sublanes.

  Args:
    token: q, k [key_heads, K] and g [heads, K].
    A_log_H1: float32 [heads, 1].
    dt_bias_HK: float32 [heads, K].
    config: static settings.

  Returns:
    Columns [K, 3 * (heads + key_heads) + key_heads, rounded up to 8]: three
    parts of all decays and scaled queries, then keys. And q^T k [key_heads, 1].
  """
  q, k, g = (x.astype(jnp.float32) for x in token)
  if config.qk_l2norm:
    q, k = gate.normalize(q), gate.normalize(k)
  q = q * config.scale
  if config.gate_in_kernel:
    g, rate = g + dt_bias_HK, jnp.exp(A_log_H1)
    if config.lower_bound is None:
      g = rate * gate.log_decay(g, None, None, None)
    else:
      g = gate.log_decay(rate * g, None, None, config.lower_bound)
  parts = _split(jnp.concatenate([jnp.exp(g), q], axis=0))
  rows = jnp.concatenate([*parts, k], axis=0)
  rows = jnp.pad(rows, ((0, -rows.shape[0] % 8), (0, 0)))
  return rows.T, jnp.sum(q * k, axis=1, keepdims=True)


def _advance(
  source_ref,
  target_refs,
  columns_KC: jax.Array,
  qk_H1: jax.Array,
  v_HV: jax.Array,
  beta_H1: jax.Array,
) -> jax.Array:
  """One token for every head of a block.

  Args:
    source_ref: states [heads, K, V].
    target_refs: where the new states go.
    columns_KC: decays, queries and keys, as of `_turn`.
    qk_H1: q^T k [key_heads, 1].
    v_HV: float32 values [heads, V].
    beta_H1: float32 write strength [heads, 1].

  Returns:
    Outputs [heads, V], float32.
  """
  heads, num_values = v_HV.shape
  key_heads = qk_H1.shape[0]
  count = heads + key_heads
  parts_KC = columns_KC[:, : 3 * count].astype(jnp.bfloat16)
  shape = (3 * count, 2 * _LANES)
  column = jax.lax.broadcasted_iota(jnp.int32, shape, 0) % count
  lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)

  def fit(x):
    """As many lanes as values, of a matrix whose columns are all equal."""
    repeats = pl.cdiv(num_values, _LANES)
    return jnp.concatenate([x] * repeats, axis=1)[:, :num_values]

  outputs = []
  for h in range(heads):
    i = h * key_heads // heads
    # The product with ones spreads a column without loss: the three parts of a
    # number add up to it in float32. Cross-lane instructions spread the keys.
    wanted = jnp.where(lane < _LANES, h, heads + i)
    spread = jnp.dot(
      parts_KC,
      (column == wanted).astype(jnp.bfloat16),
      precision=jax.lax.Precision.DEFAULT,
      preferred_element_type=jnp.float32,
    )
    a_KV, q_KV = fit(spread[:, :_LANES]), fit(spread[:, _LANES:])
    k_K1 = columns_KC[:, 3 * count + i : 3 * count + i + 1]
    state_KV = a_KV * source_ref[h].astype(jnp.float32)
    seen_V = jnp.sum(k_K1 * state_KV, axis=0, keepdims=True)
    write_V = beta_H1[h : h + 1] * (v_HV[h : h + 1] - seen_V)
    # The output is read from the state before the write, so that it does not
    # wait for it: q^T (S + k w^T) = q^T S + (q^T k) w^T.
    read_V = jnp.sum(q_KV * state_KV, axis=0, keepdims=True)
    outputs.append(read_V + qk_H1[i : i + 1] * write_V)
    state_KV = state_KV + k_K1 * write_V
    for ref in target_refs:
      ref[h] = state_KV.astype(ref.dtype)
  return jnp.concatenate(outputs, axis=0)


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
  in_sem,
  out_sem,
  *,
  plan: decode_plan.DecodePlan,
  config: operands.KdaConfig,
):
  core, request = pl.program_id(0), pl.program_id(1)
  requests, tokens = pl.num_programs(1), o_ref.shape[1]
  blocks = plan.blocks // plan.cores
  loads, stores = requests * blocks, requests * blocks * tokens
  here = (q_ref, k_ref, g_ref)
  there = (next_q_ref, next_k_ref, next_g_ref)

  def find_heads(slot, block):
    first = (core * blocks + block) * plan.heads
    return pool_ref.at[slot, pl.ds(first, plan.heads)]

  def load(i, act):
    """Starts or awaits the load of the i-th block of this core, if any."""
    slot = read_ref[jax.lax.div(i, blocks)]
    buffer = jax.lax.rem(i, plan.buffers)

    @pl.when(slot >= 0)
    def _():
      source = find_heads(slot, jax.lax.rem(i, blocks))
      act(pltpu.make_async_copy(source, in_ref.at[buffer], in_sem.at[buffer]))

  def store(j, act):
    """Starts or awaits the store of the j-th block and token, if any."""
    i, t = jax.lax.div(j, tokens), jax.lax.rem(j, tokens)
    slot = write_ref[jax.lax.div(i, blocks) * tokens + t]
    buffer = jax.lax.rem(j, plan.buffers)

    @pl.when(slot >= 0)
    def _():
      target = find_heads(slot, jax.lax.rem(i, blocks))
      act(pltpu.make_async_copy(out_ref.at[buffer], target, out_sem.at[buffer]))

  def start(copy):
    copy.start()

  def wait(copy):
    copy.wait()

  def turn(j, block, token):
    columns, qk = _turn(token, A_log_ref[block], dt_bias_ref[block], config)
    columns_ref[jax.lax.rem(j, 2)] = columns
    qk_ref[jax.lax.rem(j, 2)] = qk

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

  @pl.when(request == 0)
  def _():
    first = jnp.minimum(plan.buffers - 1, loads)
    jax.lax.fori_loop(0, first, lambda i, _: load(i, start), None)
    turn(0, 0, [x[0, 0, 0] for x in here])

  def run_block(block, _):
    i = request * blocks + block
    buffer = jax.lax.rem(i, plan.buffers)
    ahead = i + plan.buffers - 1
    pl.when(ahead < loads)(functools.partial(load, ahead, start))
    load(i, wait)

    @pl.when(read_ref[request] == FRESH)
    def _():
      def clear(h, _):
        in_ref[buffer, h] = jnp.zeros(in_ref.shape[2:], in_ref.dtype)

      jax.lax.fori_loop(0, plan.heads, clear, None)

    def run_token(t, source_ref):
      j = i * tokens + t
      past = j - plan.buffers
      pl.when(past >= 0)(functools.partial(store, past, wait))

      @pl.when(read_ref[request] != INACTIVE)
      def _():
        targets = [out_ref.at[jax.lax.rem(j, plan.buffers)]]
        if tokens > 1:
          targets.append(carry_ref)
        o_HV = _advance(
          source_ref,
          targets,
          columns_ref[jax.lax.rem(j, 2)],
          qk_ref[jax.lax.rem(j, 2)],
          v_ref[0, t, block].astype(jnp.float32),
          gate.write_strength(beta_ref[0, t, block], config),
        )
        o_ref[0, t, block] = o_HV.astype(o_ref.dtype)
        turn_next(j, block, t)

      @pl.when(read_ref[request] == INACTIVE)
      def _():
        o_ref[0, t, block] = jnp.zeros(o_ref.shape[3:], o_ref.dtype)
        turn_next(j, block, t)

      store(j, start)

    run_token(0, in_ref.at[buffer])
    if tokens > 1:
      jax.lax.fori_loop(1, tokens, lambda t, _: run_token(t, carry_ref), None)

  jax.lax.fori_loop(0, blocks, run_block, None)

  @pl.when(request == requests - 1)
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

  A NaN or an infinity among q and g of one head reaches the heads next to it.

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

  def split(x, heads):
    """Splits the head axis of [.., heads, dim], so that blocks are whole."""
    *rows, all_heads, dim = x.shape
    # Value heads of several blocks may share a head of q and k.
    shared = plan.blocks * heads // all_heads
    x = x if shared == 1 else jnp.repeat(x, shared, axis=-2)
    return x.reshape(*rows, plan.blocks, heads, dim)

  turned = [
    split(arrays.q_BTHK, plan.key_heads),
    split(arrays.k_BTHK, plan.key_heads),
    split(arrays.g_BTHK, plan.heads),
  ]
  per_token = [
    split(arrays.v_BTHV, plan.heads),
    split(arrays.beta_BTH[..., None], plan.heads),
  ]
  per_head = [split(A_log[:, None], plan.heads), split(dt_bias, plan.heads)]
  o = jax.ShapeDtypeStruct(per_token[0].shape, arrays.v_BTHV.dtype)

  def window(x, ahead=0):
    """A request's part of an array, or the part of a request ahead."""
    shape = (1, tokens, plan.blocks // plan.cores, *x.shape[-2:])
    last = requests - 1
    return pl.BlockSpec(
      shape, lambda core, n, *_: (jnp.minimum(n + ahead, last), 0, core, 0, 0)
    )

  def whole(x):
    shape = (plan.blocks // plan.cores, *x.shape[-2:])
    return pl.BlockSpec(shape, lambda core, n, *_: (core, 0, 0))

  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  block_shape = (plan.heads, num_keys, num_values)
  buffers = pltpu.VMEM((plan.buffers, *block_shape), dtype)
  carry_shape = block_shape if tokens > 1 else (1, 8, _LANES)
  columns = 3 * (plan.heads + plan.key_heads) + plan.key_heads
  semaphores = pltpu.SemaphoreType.DMA((plan.buffers,))
  inputs = [*turned, *turned, *per_token, *per_head]
  axes = jax.typeof(states_SHKV).manual_axis_type
  cells = requests * tokens * value_heads * num_keys * num_values
  o, states_SHKV = pl.pallas_call(
    functools.partial(_decode_kernel, plan=plan, config=config),
    out_shape=[
      jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes)
      for x in (o, states_SHKV)
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(plan.cores, requests),
      in_specs=[
        *map(window, turned),
        *(window(x, ahead=1) for x in turned),
        *map(window, per_token),
        *map(whole, per_head),
        anywhere,
      ],
      out_specs=[window(o), anywhere],
      scratch_shapes=[
        buffers,
        buffers,
        pltpu.VMEM(carry_shape, f32),
        pltpu.VMEM((2, num_keys, pl.cdiv(columns, 8) * 8), f32),
        pltpu.VMEM((2, plan.key_heads, 1), f32),
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
  )(read_N, write_NT.reshape(-1), *inputs, states_SHKV)
  return o.reshape(arrays.v_BTHV.shape), states_SHKV
