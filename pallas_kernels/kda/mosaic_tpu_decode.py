"""KDA's decode step as a Pallas kernel for TPU.

The kernel is a copy pipeline: each head's state is read from HBM and written
back once, and everything else hides behind those copies. Kimi Linear
(arXiv 2510.26692) equation 1 for the recurrence.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import gate, operands

INACTIVE = -1
FRESH = -2

# Eight heads fill the sublanes of a register tile; more would only lengthen
# the unrolled code.
_MOST_HEADS = 8
# Copies in flight have to cover the latency of HBM: at 3.7 TB/s and about a
# microsecond these are 4 MB in each direction.
_BYTES_IN_FLIGHT = 4 * 2**20
_MOST_BUFFERS = 8
_SPILL_BYTES = 8 * 2**20
# Every generation has at least 64 MB of VMEM a core.
_MOST_VMEM_BYTES = 60 * 2**20
# Words of SMEM.
_MOST_IDS = 2**17


@dataclasses.dataclass(frozen=True)
class DecodePlan:
  """How one call is cut into copies.

  Attributes:
    heads: value heads a copy; divides those of the call.
    key_heads: q/k heads that they read.
    blocks: copies of a request, over all cores.
    cores: tensor cores of a device that share the heads.
    buffers: blocks held in VMEM on their way in, and as many on their way out.
    vmem_bytes: limit to compile under.
  """

  heads: int
  key_heads: int
  blocks: int
  cores: int
  buffers: int
  vmem_bytes: int


def _device_cores() -> int:
  """Tensor cores of one device of the mesh, or of the default backend."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  device = jax.devices()[0] if device is None else device
  return getattr(device, 'num_cores', None) or 1


def _tile_bytes(rows: int, lanes: int, dtype) -> int:
  """VMEM bytes of a matrix, which is held in tiles of (8 words, 128)."""
  size = jnp.dtype(dtype).itemsize
  return pl.cdiv(rows * size, 32) * 32 * pl.cdiv(lanes, 128) * 128


def make_plan(
  arrays: operands.Operands, states_SHKV: jax.Array, cores: int
) -> DecodePlan:
  """Chooses heads a copy and the number of buffers.

  Args:
    arrays: the arrays of the call.
    states_SHKV: the pool of states.
    cores: tensor cores of the device.
  """
  tokens, key_heads, num_keys = arrays.q_BTHK.shape[1:]
  value_heads, num_values = arrays.v_BTHV.shape[2:]
  group = value_heads // key_heads
  heads = max(
    n
    for n in range(1, _MOST_HEADS + 1)
    if value_heads % n == 0 and (n % group == 0 or group % n == 0)
  )
  blocks = value_heads // heads
  cores = cores if blocks % cores == 0 else 1
  block_bytes = heads * _tile_bytes(num_keys, num_values, states_SHKV.dtype)
  buffers = min(max(_BYTES_IN_FLIGHT // block_bytes, 2), _MOST_BUFFERS)
  f32 = jnp.float32
  carry_bytes = heads * _tile_bytes(num_keys, num_values, f32)
  # q, k, g and a bias, v and the output, beta and a rate.
  operand_bytes = (
    tokens
    * blocks
    * (
      4 * _tile_bytes(heads, num_keys, f32)
      + 2 * _tile_bytes(heads, num_values, f32)
      + 2 * _tile_bytes(heads, 1, f32)
    )
  )
  return DecodePlan(
    heads=heads,
    key_heads=max(heads // group, 1),
    blocks=blocks,
    cores=cores,
    buffers=buffers,
    vmem_bytes=(
      2 * buffers * block_bytes + carry_bytes + 2 * operand_bytes + _SPILL_BYTES
    ),
  )


def find_obstacle(
  arrays: operands.Operands, states_SHKV: jax.Array
) -> str | None:
  """Says why the kernel cannot take a call, or None when it can."""
  plan = make_plan(arrays, states_SHKV, 1)
  if plan.vmem_bytes > _MOST_VMEM_BYTES:
    tokens, value_heads = arrays.v_BTHV.shape[1:3]
    return (
      f'{value_heads} value heads and {tokens} tokens a request need '
      f'{plan.vmem_bytes} bytes of VMEM; accepted are {_MOST_VMEM_BYTES}.'
    )
  ids = arrays.q_BTHK.shape[0] * (arrays.q_BTHK.shape[1] + 1)
  if ids > _MOST_IDS:
    return f'{ids} ids of slots; accepted are {_MOST_IDS} a call.'
  return None


def _activate(refs, t, block, config: operands.KdaConfig):
  """Norms and gates of one token for the heads of one block.

  Returns:
    Log decay exponentiated [heads, K], keys and scaled queries [key_heads, K],
    their products [key_heads, 1], values [heads, V] and write strength
    [heads, 1], all float32.
  """
  q_ref, k_ref, v_ref, g_ref, beta_ref, A_log_ref, dt_bias_ref = refs
  f32 = jnp.float32
  q, k = (ref[0, t, block].astype(f32) for ref in (q_ref, k_ref))
  if config.qk_l2norm:
    q, k = gate.normalize(q), gate.normalize(k)
  q = q * config.scale
  g = g_ref[0, t, block].astype(f32)
  if config.gate_in_kernel:
    g = g + dt_bias_ref[block]
    rate = jnp.exp(A_log_ref[block])
    if config.lower_bound is None:
      g = rate * gate.log_decay(g, None, None, None)
    else:
      g = gate.log_decay(rate * g, None, None, config.lower_bound)
  qk = jnp.sum(q * k, axis=1, keepdims=True)
  v = v_ref[0, t, block].astype(f32)
  beta = gate.write_strength(beta_ref[0, t, block], config)
  return jnp.exp(g), k, q, qk, v, beta


def _transpose(rows: list[jax.Array]) -> jax.Array:
  """Stacks matrices of K columns and turns them to K rows."""
  stack = jnp.concatenate(rows, axis=0)
  missing = -stack.shape[0] % 8
  return jnp.pad(stack, ((0, missing), (0, 0))).T


def _advance(source_ref, target_refs, activated) -> jax.Array:
  """One token for every head of a block.

  Returns:
    Outputs [heads, V], float32.
  """
  a_HK, k_HK, q_HK, qk_H1, v_HV, beta_H1 = activated
  heads, key_heads = a_HK.shape[0], k_HK.shape[0]
  columns = _transpose([a_HK, k_HK, q_HK])
  outputs = []
  for h in range(heads):
    i = h * key_heads // heads
    a, k, q = (
      columns[:, c : c + 1] for c in (h, heads + i, heads + key_heads + i)
    )
    state_KV = a * source_ref[h].astype(jnp.float32)
    seen_V = jnp.sum(k * state_KV, axis=0, keepdims=True)
    write_V = beta_H1[h : h + 1] * (v_HV[h : h + 1] - seen_V)
    # The output is read from the state before the write, so that it does not
    # wait for it: q^T (S + k w^T) = q^T S + (q^T k) w^T.
    read_V = jnp.sum(q * state_KV, axis=0, keepdims=True)
    outputs.append(read_V + qk_H1[i : i + 1] * write_V)
    state_KV = state_KV + k * write_V
    for ref in target_refs:
      ref[h] = state_KV.astype(ref.dtype)
  return jnp.concatenate(outputs, axis=0)


def _decode_kernel(read_ref, write_ref, *refs, plan, config):
  *inputs, _, o_ref, pool_ref, in_ref, out_ref, carry_ref, in_sem, out_sem = (
    refs
  )
  core, request = pl.program_id(0), pl.program_id(1)
  requests, tokens = pl.num_programs(1), o_ref.shape[1]
  blocks = plan.blocks // plan.cores
  loads, stores = requests * blocks, requests * blocks * tokens

  def heads_of(slot, block):
    first = (core * blocks + block) * plan.heads
    return pool_ref.at[slot, pl.ds(first, plan.heads)]

  def load(i, act):
    """Starts or awaits the load of the i-th block of this core, if any."""
    slot = read_ref[jax.lax.div(i, blocks)]
    buffer = jax.lax.rem(i, plan.buffers)

    @pl.when(slot >= 0)
    def _():
      source = heads_of(slot, jax.lax.rem(i, blocks))
      copy = pltpu.make_async_copy(source, in_ref.at[buffer], in_sem.at[buffer])
      act(copy)

  def store(j, act):
    """Starts or awaits the store of the j-th block and token, if any."""
    i = jax.lax.div(j, tokens)
    t = jax.lax.rem(j, tokens)
    slot = write_ref[jax.lax.div(i, blocks) * tokens + t]
    buffer = jax.lax.rem(j, plan.buffers)

    @pl.when(slot >= 0)
    def _():
      target = heads_of(slot, jax.lax.rem(i, blocks))
      copy = pltpu.make_async_copy(
        out_ref.at[buffer], target, out_sem.at[buffer]
      )
      act(copy)

  def start(copy):
    copy.start()

  def wait(copy):
    copy.wait()

  @pl.when(request == 0)
  def _():
    first = jnp.minimum(plan.buffers - 1, loads)
    jax.lax.fori_loop(0, first, lambda i, _: load(i, start), None)

  def run_block(block, _):
    i = request * blocks + block
    buffer = jax.lax.rem(i, plan.buffers)
    ahead = i + plan.buffers - 1
    pl.when(ahead < loads)(functools.partial(load, ahead, start))
    load(i, wait)

    @pl.when(read_ref[request] == FRESH)
    def _():
      in_ref[buffer] = jnp.zeros(in_ref.shape[1:], in_ref.dtype)

    def run_token(t, source_ref):
      j = i * tokens + t
      past = j - plan.buffers
      pl.when(past >= 0)(functools.partial(store, past, wait))

      @pl.when(read_ref[request] != INACTIVE)
      def _():
        activated = _activate(inputs, t, block, config)
        targets = [out_ref.at[jax.lax.rem(j, plan.buffers)]]
        if tokens > 1:
          targets.append(carry_ref)
        o_HV = _advance(source_ref, targets, activated)
        o_ref[0, t, block] = o_HV.astype(o_ref.dtype)

      @pl.when(read_ref[request] == INACTIVE)
      def _():
        o_ref[0, t, block] = jnp.zeros(o_ref.shape[3:], o_ref.dtype)

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
  plan = make_plan(arrays, states_SHKV, _device_cores())
  blocks, f32 = plan.blocks, jnp.float32
  A_log, dt_bias = arrays.A_log_H, arrays.dt_bias_HK
  if A_log is None:
    A_log = jnp.zeros((value_heads,), f32)
  if dt_bias is None:
    dt_bias = jnp.zeros((value_heads, num_keys), f32)

  def split(x, heads):
    """Splits the head axis of [.., heads, dim], so that blocks are whole."""
    *rows, all_heads, dim = x.shape
    # Value heads of two blocks may share a head of q and k.
    if all_heads < blocks * heads:
      x = jnp.repeat(x, blocks * heads // all_heads, axis=-2)
    return x.reshape(*rows, blocks, heads, dim)

  inputs = [
    split(arrays.q_BTHK, plan.key_heads),
    split(arrays.k_BTHK, plan.key_heads),
    split(arrays.v_BTHV, plan.heads),
    split(arrays.g_BTHK, plan.heads),
    split(arrays.beta_BTH[..., None], plan.heads),
    split(A_log[:, None], plan.heads),
    split(dt_bias, plan.heads),
  ]
  core_blocks = blocks // plan.cores

  def block_spec(x):
    shape = (core_blocks, *x.shape[-2:])
    if x.ndim == 3:
      return pl.BlockSpec(shape, lambda core, n, *_: (core, 0, 0))
    return pl.BlockSpec(
      (1, tokens, *shape), lambda core, n, *_: (n, 0, core, 0, 0)
    )

  o = jax.ShapeDtypeStruct(
    (requests, tokens, blocks, plan.heads, num_values), arrays.v_BTHV.dtype
  )
  axes = jax.typeof(states_SHKV).manual_axis_type
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  state_shape = (plan.heads, num_keys, num_values)
  buffer = pltpu.VMEM((plan.buffers, *state_shape), states_SHKV.dtype)
  carry_shape = state_shape if tokens > 1 else (1, 8, 128)
  semaphores = pltpu.SemaphoreType.DMA((plan.buffers,))
  o, states_SHKV = pl.pallas_call(
    functools.partial(_decode_kernel, plan=plan, config=config),
    out_shape=[
      jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes)
      for x in (o, states_SHKV)
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(plan.cores, requests),
      in_specs=[*map(block_spec, inputs), anywhere],
      out_specs=[block_spec(o), anywhere],
      scratch_shapes=[
        buffer,
        buffer,
        pltpu.VMEM(carry_shape, f32),
        semaphores,
        semaphores,
      ],
    ),
    input_output_aliases={2 + len(inputs): 1},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      vmem_limit_bytes=plan.vmem_bytes,
    ),
    name='kda_decode',
  )(read_N, write_NT.reshape(-1), *inputs, states_SHKV)
  return o.reshape(arrays.v_BTHV.shape), states_SHKV
