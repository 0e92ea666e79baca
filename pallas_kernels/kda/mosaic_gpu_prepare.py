"""Everything of a chunk that does not need the state, as a kernel for Hopper.

One warpgroup takes a chunk of one head: gate, norms, decayed views of queries
and keys, scores in unified tiles, the inverse T of I + L, and W = T Diag(beta)
K~. Chunks are independent of each other.

Kimi Linear (arXiv 2510.26692) section 3 for the chunk form and the Kimi K3
report (arXiv 2607.24653) section 2.1.1 for the tiles of a bounded gate. Decay
is held as positive bits, -log2 of what it multiplies by; a tile's scores are
anchored at its row 0, which leaves the past independent of the future.
"""

import dataclasses
import functools
import math
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import (
  gate,
  mosaic_gpu_inverse,
  operands,
  tile_scores,
  varying,
)
from pallas_kernels.kda.mosaic_gpu_arrays import (
  BY_CHANNEL,
  CHANNELS,
  CHUNK,
  ROWS_BY_COLUMNS,
  TILE,
  TILES,
  accumulate,
  add_product,
  compiler_params,
  iota,
  load,
  repeat,
  rows_of,
  spread,
  swizzled,
  wait_for,
)

_LOG2_E = math.log2(math.e)
_REBALANCE_BITS = math.log2(tile_scores.REBALANCE)

# Rows of what is known of a chunk's tokens.
DOCUMENT, REAL, ENTERS, LEAVES = range(4)


@dataclasses.dataclass(frozen=True)
class GpuConfig:
  """Static settings of the kernels for Hopper.

  Attributes:
    kda: settings of the operator, with a lower bound.
    splits: whether new values are multiplied in two parts of bfloat16.
    packed: whether tokens have padding.
    documents: whether a chunk may hold more than one document.
    interpreted: whether the kernels are interpreted.
  """

  kda: operands.KdaConfig
  splits: bool
  packed: bool
  documents: bool
  interpreted: bool


class Prepared(NamedTuple):
  """What a chunk brings to the recurrence over states; rows are N chunks of 64.

  With T = (I + L)^-1 and strengths beta: new values are T Diag(beta) V - W S,
  outputs Q~ S + P Vn, and the state at exit is decay * S + K^^T Vn.

  Attributes:
    w: -W, bfloat16 [B * HV, N * 64, 128].
    q_entry: Q~, the same shape.
    k_exit: K^, the same shape.
    scores: transposed P, bfloat16 [B * HV, N * 64, 64].
    inverse: transposed T Diag(beta), the same shape.
    decay: float32 [B * HV, N, 128].
  """

  w: jax.Array
  q_entry: jax.Array
  k_exit: jax.Array
  scores: jax.Array
  inverse: jax.Array
  decay: jax.Array


def _scratch(gate_dtype) -> dict:
  """Shared memory of a block by name.

  What a view replaces lies in the place of its array; the inverse and what
  leads to it share the place of the scaled keys, which are done with by then.
  """
  square = (CHUNK, CHUNK)
  arrays = {
    'q': swizzled((CHUNK, CHANNELS)),
    'k': swizzled((CHUNK, CHANNELS)),
    'g': swizzled((CHUNK, CHANNELS)),
    'left': swizzled((2 * TILE, CHANNELS)),
    'diagonal': plgpu.SMEM(
      (CHUNK, TILES, mosaic_gpu_inverse.ROW_FLOATS), jnp.float32
    ),
    'shared': plgpu.RefUnion(
      # A product reads 64 rows, from wherever a tile begins.
      swizzled((CHUNK + (TILES - 1) * TILE, CHANNELS)),
      (
        swizzled(square),
        swizzled(square),
        swizzled(square, swizzle=32),
        plgpu.SMEM((TILES, TILE, mosaic_gpu_inverse.ROW_FLOATS), jnp.float32),
      ),
    ),
    'norms': plgpu.SMEM((2, CHUNK), jnp.float32),
    'decay': plgpu.SMEM((1, CHANNELS), jnp.float32),
    'beta': plgpu.SMEM((1, CHUNK), jnp.float32),
    'rate': plgpu.SMEM((1, CHANNELS), jnp.float32),
    'shift': plgpu.SMEM((1, CHANNELS), jnp.float32),
    'tokens': plgpu.SMEM((4, CHUNK), jnp.int32),
    'documents': plgpu.SMEM((TILES, TILE), jnp.int32),
  }
  if gate_dtype != jnp.bfloat16:
    arrays['k_exit'] = arrays['g']
    arrays['g'] = swizzled((CHUNK, CHANNELS), jnp.float32)
  return arrays


def _decay_bits(g, rate, shift, settings) -> jax.Array:
  """Decay of a tile, float32 [16, 128]."""
  g = g.astype(jnp.float32)
  if not settings.kda.gate_in_kernel:
    return g * -_LOG2_E
  # 1 / (exp(-x) / c + 1 / c) = c * sigmoid(x); the shift holds 1 / c. The root
  # is one instruction, and a division many.
  bits = -settings.kda.lower_bound * _LOG2_E
  root = lax.rsqrt(jnp.exp2(g * rate + shift) + 1 / bits)
  return root * root


def _select(s, mask: int, rows, x, needed: bool) -> jax.Array:
  """Zeroes rows of x [n, 128] where a mask of tokens is 0."""
  if not needed:
    return x
  layout = BY_CHANNEL.reduce(1)
  kept = load(s.tokens, (mask, rows), layout=layout)
  return jnp.where(spread(kept, x.shape, (0,), BY_CHANNEL) != 0, x, 0.0)


def _store_norms(s, settings) -> None:
  """Factors of all rows of q and k."""
  for place, (ref, factor) in enumerate(((s.q, settings.kda.scale), (s.k, 1))):
    x = load(ref, layout=ROWS_BY_COLUMNS).astype(jnp.float32)
    root = lax.rsqrt(jnp.sum(x * x, axis=1) + gate.L2_EPSILON)
    s.norms[place, :] = root * factor


def _load_rows(s, ref, place: int, rows, settings) -> jax.Array:
  """Normalised rows of q or k, float32 [16, 128]; padding may hold NaN."""
  x = load(ref, (rows, slice(None)), layout=BY_CHANNEL).astype(jnp.float32)
  if settings.kda.qk_l2norm:
    norms = load(s.norms, (place, rows), layout=BY_CHANNEL.reduce(1))
    x = x * spread(norms, x.shape, (0,), BY_CHANNEL)
  elif place == 0:
    x = x * settings.kda.scale
  return _select(s, REAL, rows, x, settings.packed)


def _score_tile(s, i: int, settings) -> tuple[jax.Array, jax.Array]:
  """Scores of a tile's queries and keys against keys up to the tile.

  Returns:
    Transposed scores float32 [64, 16] of queries and of keys; rows of later
    keys hold anything.
  """

  def both(total):
    keys = s.prefix.at[pl.ds(0, CHUNK)]
    add_product(total, keys, s.left.transpose((1, 0)))
    return wait_for(total)

  def own(total):
    # Once more with the tile's keys in the first rows, where the inverse reads
    # those of all tiles.
    keys = s.prefix.at[pl.ds(i * TILE, CHUNK)]
    rows = s.left.at[pl.ds(TILE, TILE)]
    add_product(total, keys, rows.transpose((1, 0)))
    return wait_for(total)

  interpreted = settings.interpreted
  scores = accumulate(both, (CHUNK, 2 * TILE), interpreted=interpreted)
  queries = lax.slice(scores, (0, 0), (CHUNK, TILE))
  keys = lax.slice(scores, (0, TILE), (CHUNK, 2 * TILE))
  diagonal = keys
  if i:
    diagonal = accumulate(own, (CHUNK, TILE), interpreted=interpreted)
  # The next tile overwrites what other warps still multiply.
  plgpu.commit_smem()
  shape = (CHUNK, TILE)
  beta = load(s.beta, (0, rows_of(i)), layout=ROWS_BY_COLUMNS.reduce(0))
  diagonal = diagonal * spread(beta, shape, (1,), ROWS_BY_COLUMNS)
  later = iota(shape, 0) < iota(shape, 1)
  s.diagonal[:, i, pl.ds(0, TILE)] = jnp.where(later, diagonal, 0.0)
  return queries, keys


def _scale_and_score(s, settings) -> tuple[jax.Array, jax.Array]:
  """Writes all views and returns the transposed scores, float32 [64, 64]."""
  bf16 = jnp.bfloat16
  rate, shift = (load(x, layout=BY_CHANNEL) for x in (s.rate, s.shift))
  rate, shift = repeat(rate, TILE), repeat(shift, TILE)
  # Bits from the chunk's entry to row 0 of the tile and from there to its end.
  entry = since = None
  columns, scores = [], []
  for i in range(TILES):
    rows = rows_of(i)
    g = load(s.g, (rows, slice(None)), layout=BY_CHANNEL)
    bits = _decay_bits(g, rate, shift, settings)
    bits = _select(s, REAL, rows, bits, settings.packed)
    row = [lax.slice(bits, (r, 0), (r + 1, CHANNELS)) for r in range(TILE)]
    sums = [row[0] - row[0], row[1]]
    for r in range(2, TILE):
      sums.append(sums[-1] + row[r])
    move = row[0] if since is None else since + row[0]
    entry = move if entry is None else entry + move
    since = sums[-1]
    inner = jnp.concatenate(sums, axis=0)
    grow = jnp.exp2(_REBALANCE_BITS - inner)
    shrink = jnp.exp2(inner - _REBALANCE_BITS)
    k = _load_rows(s, s.k, 1, rows, settings)
    q_rows = _load_rows(s, s.q, 0, rows, settings) * grow
    k_rows = k * grow
    s.left[pl.ds(0, TILE), :] = q_rows.astype(bf16)
    s.left[pl.ds(TILE, TILE), :] = k_rows.astype(bf16)
    factor = repeat(jnp.exp2(-_REBALANCE_BITS - entry), TILE)
    for ref, x in ((s.q, q_rows), (s.k, k_rows)):
      x = _select(s, ENTERS, rows, x * factor, settings.documents)
      ref[rows, :] = x.astype(bf16)
    if i:
      factor = repeat(jnp.exp2(-move), TILE)
      columns = [x * factor for x in columns]
    columns.append(k * shrink)
    for j, x in enumerate(columns):
      s.prefix[rows_of(j), :] = x.astype(bf16)
    plgpu.commit_smem()
    scores.append(_score_tile(s, i, settings))
  factor = repeat(jnp.exp2(_REBALANCE_BITS - since), TILE)
  for j, x in enumerate(columns):
    x = _select(s, LEAVES, rows_of(j), x * factor, settings.documents)
    s.k_exit[rows_of(j), :] = x.astype(bf16)
  # A state does not outlive its document.
  decay = jnp.exp2(-(entry + since))
  if settings.documents:
    decay = decay * s.tokens[ENTERS, CHUNK - 1].astype(jnp.float32)
  s.decay[...] = decay
  return tuple(jnp.concatenate(x, axis=1) for x in zip(*scores))


def prepare(s, settings: GpuConfig) -> None:
  """Turns a chunk's arrays in shared memory into its `Prepared` views.

  Reads s.q, k, g, beta, rate, shift and tokens; leaves Q~ in s.q, -W in s.k, K^
  in s.k_exit, and the rest in s.scores, s.inverse and s.decay.
  """
  bf16, square = jnp.bfloat16, (CHUNK, CHUNK)
  if settings.kda.qk_l2norm:
    _store_norms(s, settings)
    plgpu.commit_smem()
  queries, keys = _scale_and_score(s, settings)
  row, lane = iota(square, 0), iota(square, 1)
  allowed, lower = row <= lane, row < lane
  if settings.documents:
    by_row, by_lane = (
      spread(
        load(s.tokens, (DOCUMENT,), layout=ROWS_BY_COLUMNS.reduce(1 - d)),
        square,
        (d,),
        ROWS_BY_COLUMNS,
      )
      for d in (0, 1)
    )
    same = by_row == by_lane
    allowed, lower = allowed & same, lower & same
  s.scores[...] = jnp.where(allowed, queries, 0.0).astype(bf16)
  beta = load(s.beta, (0,), layout=ROWS_BY_COLUMNS.reduce(0))
  keys = jnp.where(
    lower, keys * spread(beta, square, (1,), ROWS_BY_COLUMNS), 0.0
  )
  plgpu.commit_smem()
  inverse = mosaic_gpu_inverse.invert(s, keys, settings)
  beta = load(s.beta, (0,), layout=ROWS_BY_COLUMNS.reduce(1))
  inverse = inverse * spread(beta, square, (0,), ROWS_BY_COLUMNS)
  s.inverse[...] = inverse.astype(bf16)
  plgpu.commit_smem()

  def read(total):
    add_product(total, s.inverse.transpose((1, 0)), s.k)
    return wait_for(total)

  w = accumulate(read, (CHUNK, CHANNELS), interpreted=settings.interpreted)
  plgpu.commit_smem()
  s.k[...] = (-w).astype(bf16)
  plgpu.commit_smem()


def prepare_call(
  settings: GpuConfig,
  q: jax.Array,
  k: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  rate: jax.Array,
  bias: jax.Array,
  tokens: jax.Array | None = None,
) -> Prepared:
  """Prepares all chunks of all rows and heads.

  Args:
    settings: static settings.
    q: bfloat16 [B, T, H * 128]; T is a multiple of 64.
    k: bfloat16 [B, T, H * 128].
    g: bfloat16 or float32 [B, T, HV * 128], gate logits, or log decay in nats.
    beta: float32 [B * HV, N, 64], write strengths, 0 for padding.
    rate: float32 [1, HV * 128], the gate's multiplier.
    bias: float32 [1, HV * 128], added to the gate's logits.
    tokens: int32 [B * N, 4, 64] if tokens have padding or documents: their
      document, and whether they are real, of the document of the entry state
      and of the chunk's last document.

  Returns:
    The views of all chunks.
  """
  batch, num_tokens, width = g.shape
  heads, chunks = width // CHANNELS, num_tokens // CHUNK
  groups = width // q.shape[2]
  scratch = _scratch(g.dtype)
  if tokens is None:
    del scratch['tokens']
  if not settings.documents:
    del scratch['documents']
  factor, shift = gate.exponent_terms(rate, bias, settings.kda.lower_bound)
  inputs = {
    'q': q,
    'k': k,
    'g': g,
    'beta': beta,
    'rate': factor,
    'shift': shift,
  }
  if tokens is not None:
    inputs['tokens'] = tokens
  if settings.documents:
    inputs['documents'] = tokens[:, DOCUMENT].reshape(-1, TILES, TILE)
  rows = (batch * heads, num_tokens)
  array = functools.partial(varying.struct_like, q)
  outputs = Prepared(
    *[array((*rows, CHANNELS), jnp.bfloat16)] * 3,
    *[array((*rows, CHUNK), jnp.bfloat16)] * 2,
    array((batch * heads, chunks, CHANNELS), jnp.float32),
  )

  def body(*refs):
    count = len(inputs) + len(outputs)
    sources = dict(zip(inputs, refs))
    targets = Prepared(*refs[len(inputs) : count])
    s = types.SimpleNamespace(**dict(zip(scratch, refs[count:])))
    barrier = refs[-1]
    s.prefix, (s.scores, s.inverse, s.merged, s.inverses) = s.shared
    if 'k_exit' not in scratch:
      s.k_exit = s.g
    n, h, b = (lax.axis_index(axis) for axis in ('chunk', 'head', 'row'))
    row = b * heads + h
    head = pl.ds(h * CHANNELS, CHANNELS)
    key_head = pl.ds(lax.div(h, groups) * CHANNELS, CHANNELS)
    chunk = pl.ds(n * CHUNK, CHUNK)
    places = {
      'q': (b, chunk, key_head),
      'k': (b, chunk, key_head),
      'g': (b, chunk, head),
      'beta': (row, pl.ds(n, 1)),
      'rate': (slice(None), head),
      'shift': (slice(None), head),
      'tokens': (b * chunks + n,),
      'documents': (b * chunks + n,),
    }
    for name, source in sources.items():
      target = getattr(s, name)
      plgpu.copy_gmem_to_smem(source.at[places[name]], target, barrier)
    plgpu.barrier_wait(barrier)
    prepare(s, settings)
    made = Prepared(s.k, s.q, s.k_exit, s.scores, s.inverse, s.decay)
    for name, source in made._asdict().items():
      place = pl.ds(n, 1) if name == 'decay' else chunk
      plgpu.copy_smem_to_gmem(source, getattr(targets, name).at[row, place])
    plgpu.wait_smem_to_gmem(0)

  results = plgpu.kernel(
    body,
    out_type=list(outputs),
    scratch_types=[
      *scratch.values(),
      plgpu.Barrier(num_arrivals=len(inputs)),
    ],
    grid=(chunks, heads, batch),
    grid_names=('chunk', 'head', 'row'),
    compiler_params=compiler_params(),
    kernel_name='kda_prepare',
  )(*inputs.values())
  return Prepared(*results)
