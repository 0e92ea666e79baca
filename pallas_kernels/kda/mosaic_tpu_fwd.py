"""KDA's forward as one Pallas kernel for TPU.

A grid step works on three chunks at once, in stages of `mosaic_tpu_stages`: it
prepares one, scores the one before it and advances the state over the one
before that. The three have no dependence on each other, so that their
instructions fill each other's waits.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import (
  gate,
  kernel_weave,
  mosaic_tpu_conv,
  mosaic_tpu_scores,
  mosaic_tpu_scratch,
  mosaic_tpu_tokens,
  operands,
  tile,
  varying,
)
from pallas_kernels.kda import mosaic_tpu_stages as stages
from pallas_kernels.kda import mosaic_tpu_views as views

FAST, DEFAULT, HIGH, HIGHEST = range(4)


@dataclasses.dataclass(frozen=True)
class WeaveConfig:
  """How the stages of a grid step are interleaved; changes no result.

  Attributes:
    score_heads: heads that are scored at a time, an even number.
    prepare_heads: heads that are prepared at a time.
    starts: when advancing, scoring and preparing begin, in steps.
    lengths: how long each of them takes, in steps.
    turn: when the turn of write strengths begins and ends, in steps; masks of
      packed tokens are turned before their chunk is prepared.
    convolution: when convolving begins and how long it takes, in steps.
  """

  score_heads: int = 8
  prepare_heads: int = 2
  starts: tuple[float, float, float] = (0.3, 0.26, 0.25)
  lengths: tuple[float, float, float] = (0.82, 0.68, 0.72)
  turn: tuple[float, float] = (0.25, 0.35)
  convolution: tuple[float, float] = (0.02, 0.6)


@dataclasses.dataclass(frozen=True)
class TpuConfig:
  """Static settings of the kernels for TPU.

  Attributes:
    kda: settings of the operator, with a lower bound.
    chunk: tokens between two states.
    heads: value heads a grid step.
    level: FAST rounds all operands to bfloat16; DEFAULT multiplies new values
      unrounded and refines once what is solved for their gradient, which is
      read from unrounded scores; HIGH also refines the solve for new values and
      rounds no gradient of scores; HIGHEST rounds no operand.
    narrow: whether reciprocals and roots are made of exp2 and log2, which is
      cheaper where they are not instructions (TPU v5).
    packed: whether tokens have documents and padding.
    sequences: whether chunks of one row belong to several sequences.
    taps: of the convolutions of q, k and v, 0 without.
    weave: order of instructions.
  """

  kda: operands.KdaConfig
  chunk: int
  heads: int
  level: int = DEFAULT
  narrow: bool = False
  packed: bool = False
  sequences: bool = False
  taps: int = 0
  weave: WeaveConfig = WeaveConfig()

  @property
  def exact(self) -> bool:
    """Whether operands are float32."""
    return self.level == HIGHEST

  @property
  def splits(self) -> bool:
    """Whether new values, in the backward the scores, are in two parts.

    The backward also refines what it solves for their gradient.
    """
    return self.level in (DEFAULT, HIGH)

  @property
  def refines(self) -> bool:
    """Whether all solves are refined and no gradient of scores is rounded."""
    return self.level == HIGH

  @property
  def operand(self):
    """Dtype of matrix operands."""
    return jnp.float32 if self.exact else jnp.bfloat16


def _kernel(*refs, settings: TpuConfig, names, scratch_names, groups):
  """One grid step; references come in the order of the names."""
  blocks = dict(zip(names, refs))
  refs = dict(zip(scratch_names, refs[len(names) :]))
  first_ref = blocks.pop('first', None)
  sequence_ref = blocks.pop('sequence', None)
  absent = {f.name for f in dataclasses.fields(views.Windows)} - set(blocks)
  windows = views.Windows(**blocks, **dict.fromkeys(absent))
  t, chunks = pl.program_id(2), pl.num_programs(2) - 2
  advanced = t - 2
  state_ref = refs['state']

  def fill_state():
    def fill(h, _):
      zeros = jnp.zeros(state_ref.shape[1:], jnp.float32)
      state_ref[h] = zeros if windows.h0 is None else windows.h0[0, h]

    lax.fori_loop(0, settings.heads, fill, None)

  @pl.when(t == 0)
  def _():
    fill_state()
    mosaic_tpu_scratch.clear(refs)

  if settings.sequences:
    pl.when((advanced >= 0) & (first_ref[jnp.maximum(advanced, 0)] != 0))(
      fill_state
    )

  def slots_of(age):
    # The chunk that is `age` chunks behind the one prepared now.
    return views.Slots(refs, lax.rem(t + 6 - age, 2), lax.rem(t + 6 - age, 3))

  made, scored, done = (slots_of(age) for age in range(3))
  num_keys, num_values = state_ref.shape[1:]
  heads = views.make_heads(settings.heads, groups, num_keys, num_values)
  take_turns, weave = kernel_weave.take_turns, settings.weave
  pairs, tiles = -(-len(heads) // 2), settings.chunk // views.TILE

  def in_groups(size):
    return [heads[i : i + size] for i in range(0, len(heads), size)]

  def advancing():
    yield from take_turns(stages.merge(p, done, settings) for p in range(pairs))
    yield from take_turns(
      stages.advance(h, windows, done, settings) for h in heads
    )

  def scoring():
    for group in in_groups(weave.score_heads):
      yield from take_turns(
        mosaic_tpu_scores.score(group[i : i + 2], windows, scored, settings)
        for i in range(0, len(group), 2)
      )
    yield from take_turns(stages.substitute(h, scored, settings) for h in heads)

  turning = mosaic_tpu_tokens.turn_tokens(windows, made, settings)

  def convolving():
    if settings.packed:
      # Masks come first.
      yield from turning
    if settings.taps:
      for group in in_groups(weave.prepare_heads):
        yield from take_turns(
          stages.convolve(h, windows, made, settings) for h in group
        )
        convolved.extend(group)

  convolved, convolution = [], convolving()

  def preparing():
    for group in in_groups(weave.prepare_heads):
      # Convolving is woven on its own, but never too late.
      while settings.taps and group[-1] not in convolved:
        next(convolution, None)
        yield
      yield from take_turns(
        stages.prepare(h, windows, made, settings) for h in group
      )

  levels = int(math.log2(tiles))
  steps = (
    pairs * 2 * levels + len(heads) * 12,
    pairs * mosaic_tpu_scores.count_steps(tiles) + len(heads) * views.TILE,
    len(heads) * (2 * tiles + tiles // 2),
  )
  generators = (advancing(), scoring(), preparing())
  streams = [
    kernel_weave.Stream(generator, count, start, start + length)
    for generator, count, start, length in zip(
      generators, steps, weave.starts, weave.lengths
    )
  ]
  if settings.taps:
    start, length = weave.convolution
    streams.append(
      kernel_weave.Stream(
        convolution, len(heads) * 3 * tiles, start, start + length
      )
    )
  turn = (0.0, weave.starts[2]) if settings.packed else weave.turn
  streams.append(
    kernel_weave.Stream(turning, mosaic_tpu_tokens.TURN_STEPS, *turn)
  )
  kernel_weave.weave(streams)

  ends = t == chunks + 1
  if settings.sequences:
    following = jnp.clip(t - 1, 0, chunks - 1)
    now = jnp.maximum(advanced, 0)
    ends |= sequence_ref[now] != sequence_ref[following]

  @pl.when(ends)
  def _():
    def copy(h, _):
      windows.final[0, h] = state_ref[h]

    lax.fori_loop(0, settings.heads, copy, None)


def forward_call(
  settings: TpuConfig,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  rate: jax.Array,
  bias: jax.Array,
  tokens: jax.Array | None = None,
  entry: jax.Array | None = None,
  h0: jax.Array | None = None,
  sequence: jax.Array | None = None,
  first: jax.Array | None = None,
  *,
  taps: tuple[jax.Array, jax.Array, jax.Array] | None = None,
  save_states: bool = False,
  interpret=False,
  name: str = 'kda_forward',
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Runs all chunks of all rows and heads.

  Args:
    settings: static settings.
    q: [B, T, H * K], bfloat16 or float32; T is a multiple of the chunk, K and V
      are multiples of 128.
    k: [B, T, H * K], same dtype.
    v: [B, T, HV * V], same dtype.
    g: [B, T, HV * K], gate logits, or log decay in nats.
    beta: [B, T, HV], logits of write strengths, or write strengths.
    rate: float32 [1, HV * K], the gate's multiplier.
    bias: float32 [1, HV * K], added to the gate's logits.
    tokens: int32 [B, N, 8, C], row 0 the document of a token, never falling
      along a row, row 1 whether it is real (1) or padding (0); with taps also
      row LAGS of `mosaic_tpu_conv.mark_neighbours`.
    entry: int32 [B, N], the document of the state at each chunk's entry.
    h0: float32 initial states [B or S, HV, K, V], or None for 0.
    sequence: int32 [N], the sequence of each chunk, with settings.sequences.
    first: int32 [N], whether the chunk is its sequence's first.
    taps: float32 taps of the convolutions of q, k and v, [taps, H * K], [taps,
      H * K] and [taps, HV * V], with settings.taps; q and k have a head for
      each of v.
    save_states: whether to return the states before each chunk.
    interpret: as of `pallas_call`.
    name: of the kernel.

  Returns:
    Outputs [B, T, HV * V] in v's dtype, final states float32 [B or S, HV, K, V]
    and the states before each chunk [B, N, HV, K, V] in the dtype in which
    products read them, or None.
  """
  batch, num_tokens, value_heads = beta.shape
  chunk, heads = settings.chunk, settings.heads
  chunks, blocks = num_tokens // chunk, value_heads // heads
  num_keys, num_values = g.shape[2] // value_heads, v.shape[2] // value_heads
  key_heads = q.shape[2] // num_keys
  groups = value_heads // key_heads
  block_key_heads = max(heads // groups, 1)
  f32 = jnp.float32

  beta = beta.astype(f32).reshape(batch, chunks, chunk, blocks, heads)
  inputs = {'q': q, 'k': k, 'v': v, 'g': g}
  inputs['beta'] = jnp.transpose(beta, (0, 1, 3, 4, 2))
  inputs['rate'], inputs['shift'] = gate.exponent_terms(
    rate, bias, settings.kda.lower_bound
  )
  inputs['sums'] = jnp.asarray(views.sums_matrix(chunk), settings.operand)
  if settings.packed:
    inputs['tokens'] = mosaic_tpu_tokens.mirror_tokens(tokens, entry)
    inputs['scored_tokens'] = inputs['tokens']
  if h0 is not None:
    inputs['h0'] = h0
  if settings.taps:
    inputs |= mosaic_tpu_conv.name_taps(taps)
  scalars = {}
  if settings.sequences:
    scalars = {'sequence': sequence, 'first': first.astype(jnp.int32)}
  axes = varying.varying_axes((inputs, scalars))
  inputs, scalars = varying.vary_over((inputs, scalars), axes)

  def chunk_of(t, age):
    return jnp.clip(t - age, 0, chunks - 1)

  def along_tokens(width, age=0, shared=1):
    return pl.BlockSpec(
      (1, chunk, width),
      lambda b, h, t, *_: (b, chunk_of(t, age), h // shared),
    )

  def along_channels():
    return pl.BlockSpec((1, heads * num_keys), lambda b, h, t, *_: (0, h))

  def along_taps(width):
    return pl.BlockSpec(
      (settings.taps, mosaic_tpu_conv.ROWS, heads * width),
      lambda b, h, t, *_: (0, 0, h),
    )

  def numbers(age):
    return pl.BlockSpec(
      (1, 1, 8, chunk), lambda b, h, t, *_: (b, chunk_of(t, age), 0, 0)
    )

  def state_index(b, h, t, *refs):
    if settings.sequences:
      b = dict(zip(scalars, refs))['sequence'][chunk_of(t, 2)]
    return b, h, 0, 0

  state = (1, heads, num_keys, num_values)
  # Several blocks of value heads may share a head of q and k.
  qk = along_tokens(block_key_heads * num_keys, shared=max(groups // heads, 1))
  specs = {
    'q': qk,
    'k': qk,
    'v': along_tokens(heads * num_values),
    'g': along_tokens(heads * num_keys),
    'beta': pl.BlockSpec(
      (1, 1, 1, heads, chunk),
      lambda b, h, t, *_: (b, chunk_of(t, 0), h, 0, 0),
    ),
    'rate': along_channels(),
    'shift': along_channels(),
    'q_taps': along_taps(num_keys),
    'k_taps': along_taps(num_keys),
    'v_taps': along_taps(num_values),
    'sums': pl.BlockSpec((chunk + 32, chunk), lambda b, h, t, *_: (0, 0)),
    'tokens': numbers(0),
    'scored_tokens': numbers(1),
    'h0': pl.BlockSpec(state, state_index),
  }
  rows = batch if h0 is None else h0.shape[0]
  outputs = {
    'o': (v.shape, v.dtype, along_tokens(heads * num_values, age=2)),
    'final': (
      (rows, value_heads, num_keys, num_values),
      f32,
      pl.BlockSpec(state, state_index),
    ),
  }
  if save_states:
    outputs['states'] = (
      (batch, chunks, value_heads, num_keys, num_values),
      settings.operand,
      pl.BlockSpec(
        (1, *state), lambda b, h, t, *_: (b, chunk_of(t, 2), h, 0, 0)
      ),
    )
  scratch = mosaic_tpu_scratch.scratch_shapes(settings, num_keys, num_values)
  windows = [(specs[name].block_shape, x.dtype) for name, x in inputs.items()]
  windows += [(spec.block_shape, dtype) for _, dtype, spec in outputs.values()]
  cells = batch * num_tokens * value_heads
  results = pl.pallas_call(
    functools.partial(
      _kernel,
      settings=settings,
      names=(*scalars, *inputs, *outputs),
      scratch_names=tuple(scratch),
      groups=groups,
    ),
    out_shape=[
      varying.struct_like(inputs['q'], shape, dtype)
      for shape, dtype, _ in outputs.values()
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(batch, blocks, chunks + 2),
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
        6 * num_keys * num_values
        + 6 * chunk * num_keys
        + settings.taps * (2 * num_keys + num_values)
      ),
      bytes_accessed=tile.array_bytes(
        [(x.shape, x.dtype) for x in inputs.values()]
        + [(shape, dtype) for shape, dtype, _ in outputs.values()]
      ),
      transcendentals=4 * cells * num_keys,
    ),
    interpret=interpret,
    name=name,
  )(*scalars.values(), *inputs.values())
  results = dict(zip(outputs, results))
  return results['o'], results['final'], results.get('states')
