"""Stages of the chunked form inside KDA's forward kernel for TPU.

A chunk passes through the stages in three grid steps: `prepare` in the first,
`score` and `substitute` in the second, `merge` and `advance` in the third. Each
stage is a generator over one head (`merge` over a pair), to be interleaved.

Heads of odd index are mirrored: their tiles are in reversed order along rows
and columns, which makes their triangles upper block triangles. A pair of heads
then fills one matrix: what is zero in one head holds blocks of the other, and
one product of full width merges both.

Kimi Linear (arXiv 2510.26692) section 3 for the chunk form and the Kimi K3
report (arXiv 2607.24653) section 2.1.1 for the tiles of a bounded gate. Decay
is held as positive bits, -log2 of what it multiplies by.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import (
  gate,
  mosaic_tpu_conv,
  mosaic_tpu_tokens,
  packed_rows,
  products,
  tile_scores,
)
from pallas_kernels.kda.mosaic_tpu_views import (
  ENTRIES,
  ENTRY_MASK,
  EXITS,
  LAG_MASKS,
  LANES,
  REAL_MASK,
  TILE,
  TOTAL,
  Head,
  Slots,
  Windows,
  dot,
  rows_of,
  stack_rows,
)

_LOG2_E = math.log2(math.e)
_REBALANCE_BITS = math.log2(tile_scores.REBALANCE)


def _reciprocal(x: jax.Array, settings) -> jax.Array:
  if settings.exact:
    return 1.0 / x
  if settings.narrow:
    return jnp.exp2(-jnp.log2(x))
  return pltpu.reciprocal(x, approx=True)


def _inverse_root(x: jax.Array, settings) -> jax.Array:
  if settings.narrow and not settings.exact:
    return jnp.exp2(-0.5 * jnp.log2(x))
  return lax.rsqrt(x)


def _decay_bits(rows, head: Head, windows: Windows, settings) -> jax.Array:
  """Decay of a tile, float32 [16, K]."""
  logits = windows.g[0, rows, head.g].astype(jnp.float32)
  if not settings.kda.gate_in_kernel:
    return logits * -_LOG2_E
  # 1 / (exp(-x) / c + 1 / c) = c * sigmoid(x); the shift holds 1 / c.
  grown = jnp.exp2(logits * windows.rate[:, head.g] + windows.shift[:, head.g])
  bits = -settings.kda.lower_bound * _LOG2_E
  return _reciprocal(grown + 1 / bits, settings)


def _convolved_rows(name: str, i: int) -> slice:
  """Where a tile of convolved q or k waits: where its view will be."""
  return rows_of(2 * i + (name == 'k'))


def convolve(head: Head, windows: Windows, slots: Slots, settings):
  """Makes q, k and v of their inputs, before `prepare`."""
  operand = settings.operand
  for i in range(settings.chunk // TILE):
    rows = rows_of(i)
    for name, lanes in (('q', head.qk), ('k', head.qk), ('v', head.v)):
      past_ref = slots.past(name, head)
      if i == 0:
        # The chunk before this one is still there.
        past_ref[:, : mosaic_tpu_conv.HALO] = past_ref[:, settings.chunk :]
      x = getattr(windows, name)[0, rows, lanes].astype(jnp.float32)
      masks = None
      if settings.packed:
        x = mosaic_tpu_tokens.select(slots.numbers(REAL_MASK)[rows], x)
        masks = [
          slots.numbers(LAG_MASKS + lag)[rows]
          for lag in range(settings.taps - 1)
        ]
      taps = mosaic_tpu_conv.spread_taps(
        getattr(windows, f'{name}_taps'), lanes
      )
      z = mosaic_tpu_conv.convolve(past_ref, x, i, taps, masks)
      y = z * mosaic_tpu_conv.logistic(z, settings)
      if name == 'v':
        slots.values(head)[rows] = y.astype(operand)
      else:
        slots.rows(head)[_convolved_rows(name, i)] = y.astype(operand)
      yield


def prepare(head: Head, windows: Windows, slots: Slots, settings):
  """Normalises q and k, sums the decay and scales every view of both."""
  f32, operand = jnp.float32, settings.operand
  chunk, tiles = settings.chunk, settings.chunk // TILE
  num_keys = head.g.stop - head.g.start
  rows_ref, readers_ref = slots.rows(head), slots.readers(head)
  columns_ref, factors_ref = slots.columns(head), slots.factors(head)

  def select(mask, rows, x):
    """Zeroes padding, which may hold NaN, or what is of another document."""
    if not settings.packed:
      return x
    return mosaic_tpu_tokens.select(slots.numbers(mask)[rows], x)

  def load(name, i):
    if settings.taps:
      return rows_ref[_convolved_rows(name, i)].astype(f32)
    return getattr(windows, name)[0, rows_of(i), head.qk].astype(f32)

  terms = []
  for i in range(tiles):
    rows = rows_of(i)
    bits = _decay_bits(rows, head, windows, settings)
    bits = select(REAL_MASK, rows, bits)
    terms.append((bits,) if settings.exact else products.split(bits))
    if not settings.taps:
      v = windows.v[0, rows, head.v]
      if settings.packed:
        v = select(REAL_MASK, rows, v.astype(f32))
      slots.values(head)[rows] = v.astype(operand)
    yield
  sums = sum(
    dot(windows.sums[...], jnp.concatenate(part, 0)) for part in zip(*terms)
  )
  squares = []
  for i in range(tiles):
    if settings.kda.qk_l2norm:
      q, k = load('q', i), load('k', i)
      squares.append(
        tuple(
          jnp.sum(x * x, -1, keepdims=True) + gate.L2_EPSILON for x in (q, k)
        )
      )
    if i % 2:
      yield
  inner, last = sums[:chunk], sums[chunk - 1 : chunk]
  row = lax.broadcasted_iota(jnp.int32, (TOTAL.start, num_keys), 0)
  balance = jnp.where(row < ENTRIES.stop, -_REBALANCE_BITS, 0.0)
  balance = jnp.where(row < EXITS.start, balance, _REBALANCE_BITS)
  factors_ref[: TOTAL.start] = jnp.exp2(balance - sums[chunk:])
  total = jnp.exp2(-last - sums[chunk + tiles - 1 : chunk + tiles])
  # A state does not outlive its document.
  total = select(ENTRY_MASK, slice(chunk - 1, chunk), total)
  factors_ref[TOTAL] = jnp.broadcast_to(total, (8, num_keys))
  for i in range(tiles):
    rows = rows_of(i)
    q, k = load('q', i), load('k', i)
    scale = settings.kda.scale
    if settings.kda.qk_l2norm:
      scale_q, scale_k = (_inverse_root(x, settings) for x in squares[i])
      q, k = q * (scale_q * scale), k * scale_k
    else:
      q = q * scale
    q, k = select(REAL_MASK, rows, q), select(REAL_MASK, rows, k)
    grow = jnp.exp2(_REBALANCE_BITS - inner[rows])
    q_rows, k_rows = q * grow, k * grow
    columns_ref[rows] = k * jnp.exp2(inner[rows] - _REBALANCE_BITS)
    rows_ref[rows_of(2 * i)] = q_rows.astype(operand)
    rows_ref[rows_of(2 * i + 1)] = k_rows.astype(operand)
    entry = factors_ref[i : i + 1]
    k_reader = select(ENTRY_MASK, rows, k_rows * entry).astype(operand)
    readers_ref[head.place(i, tiles)] = k_reader
    q_reader = select(ENTRY_MASK, rows, q_rows * entry).astype(operand)
    readers_ref[rows_of(tiles + i)] = q_reader
    yield


def substitute(head: Head, slots: Slots, settings):
  """Inverts all diagonal tiles of I + L at once, by forward substitution."""
  chunk, tiles = settings.chunk, settings.chunk // TILE
  inverse_ref = slots.inverse(head.index)
  shape = (8, chunk)
  lane, row = (lax.broadcasted_iota(jnp.int32, shape, d) for d in (1, 0))
  first = lane & -TILE
  lane = lane & (TILE - 1)
  top = jnp.where(lane == row, 1.0, 0.0)
  bottom = jnp.where(lane == row + 8, 1.0, 0.0)
  diagonal = slots.diagonal(head)[...]

  def spread(x, column):
    """A column of each tile along the tile's lanes."""
    return jnp.take_along_axis(
      x, first + column, axis=1, mode='promise_in_bounds'
    )

  for j in range(TILE - 1):
    done = top[j : j + 1] if j < 8 else bottom[j - 8 : j - 7]
    if j < 7:
      top = top + spread(diagonal[:8], j) * done
    bottom = bottom + spread(diagonal[8:], j) * done
    yield
  inverses = jnp.concatenate([top, bottom], 0).astype(settings.operand)
  for i in range(tiles):
    packed_rows.store(inverse_ref, i * TILE, inverses, rows_of(i))
  # Products of the first merges run over whole rows, so blocks that later
  # merges fill must not hold those of an earlier chunk.
  size = 2 * TILE
  zeros = jnp.zeros((chunk // 2, chunk), settings.operand)
  while size < chunk:
    for start in range(0, chunk, 2 * size):
      pair = slice(start, start + size), slice(start + size, start + 2 * size)
      target, source = pair if head.mirrored else pair[::-1]
      packed_rows.store(inverse_ref, target.start, zeros[:size], source)
    size *= 2
  yield


def merge(pair: int, slots: Slots, settings):
  """Joins the inverted blocks of a pair of heads up to the whole chunk.

  [[A, 0], [N, D]]^-1 = [[A^-1, 0], [-D^-1 N A^-1, D^-1]] at every level. A head
  without a partner merges with blocks that stay zero.
  """
  chunk, operand = settings.chunk, settings.operand
  plain, mirrored = slots.inverse(2 * pair), slots.inverse(2 * pair + 1)
  half = chunk // 2
  level, size = 0, TILE
  while size < chunk:
    count = chunk // size // 2
    even = [slice(2 * j * size, (2 * j + 1) * size) for j in range(count)]
    odd = [slice((2 * j + 1) * size, (2 * j + 2) * size) for j in range(count)]
    firsts = [
      packed_rows.load(ref, part)
      for j in range(count)
      for ref, part in ((plain, even[j]), (mirrored, odd[j]))
    ]
    below = packed_rows.load(slots.below(pair, level))
    corners = dot(below, jnp.concatenate(firsts, 0))
    corners = corners.astype(operand)
    yield
    # Each head's corners go where the other head's second blocks have zeros.
    crossed = []
    for j in range(count):
      part = slice(j * size, (j + 1) * size)
      crossed += [corners[half:][part], corners[:half][part]]
    seconds = [packed_rows.load(plain, part) for part in odd]
    seconds += [packed_rows.load(mirrored, part) for part in even]
    joined = dot(jnp.concatenate(seconds, 0), jnp.concatenate(crossed, 0))
    joined = joined.astype(operand)
    yield
    for j in range(count):
      part = slice(j * size, (j + 1) * size)
      packed_rows.store(plain, odd[j].start, joined[:half][part], even[j])
      packed_rows.store(mirrored, even[j].start, joined[half:][part], odd[j])
    level, size = level + 1, size * 2


def advance(head: Head, windows: Windows, slots: Slots, settings):
  """Solves for the new values, writes outputs and carries the state on."""
  f32, operand = jnp.float32, settings.operand
  chunk, tiles = settings.chunk, settings.chunk // TILE
  state_ref, values_ref = slots.state(head), slots.values(head)
  readers_ref, stack_ref = slots.readers(head), slots.stack(head)
  inverse = packed_rows.load(slots.inverse(head.index))
  num_keys, num_values = state_ref.shape
  stack = stack_rows(settings, num_keys)
  state = state_ref[...].astype(operand)
  if windows.states is not None:
    windows.states[0, 0, head.index] = state
  read = dot(readers_ref[...], state)
  yield
  yield
  errors = []
  for i in range(tiles):
    rows = rows_of(i)
    strength = slots.strengths()[rows, head.index : head.index + 1]
    error = values_ref[rows].astype(f32) - read[head.place(i, tiles)]
    error = strength * error
    errors.append(error if settings.refines else error.astype(operand))
    if i % 4 == 3:
      yield
  errors = jnp.concatenate(errors[::-1] if head.mirrored else errors, 0)
  new = dot(inverse, errors.astype(operand))
  yield
  yield
  if settings.splits:
    new, rest = products.split(new)
  else:
    new = new.astype(operand)
  yield
  whole = dot(packed_rows.load(stack_ref), new)
  if settings.refines:
    yield
    missing = errors - new.astype(f32) + whole[stack.lower]
    missing = missing + whole[stack.lower_rest]
    rest = dot(inverse, missing.astype(operand)).astype(operand)
    yield
  if settings.splits:
    parts = slice(stack.scores.start, stack.writes.stop)
    part = dot(packed_rows.load(stack_ref, parts), rest)
  yield
  yield
  o, written = whole[stack.scores], whole[stack.writes]
  if settings.splits:
    o = (o + part[:chunk]) + whole[stack.scores_rest]
    written = written + part[chunk:]
  windows.o[0, :, head.v] = (read[chunk:] + o).astype(windows.o.dtype)
  yield
  if settings.refines:
    written = written + whole[stack.writes_rest]
  decay = jnp.concatenate([slots.decay(head)[...]] * (num_values // LANES), 1)
  state_ref[...] = state_ref[...] * decay + written
  yield
