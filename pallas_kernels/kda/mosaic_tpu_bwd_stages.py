"""Stages of KDA's backward kernel for TPU, each a generator over one head.

With E = V - K~ S, Vn = T beta E and dS the gradient of the exit state:
dVn = P^T dO + K^ dS, dR = T^T dVn, dV = beta dR, and the gradients of the
scores are [dO; -dV] Vn^T. Kimi Linear (arXiv 2510.26692) section 3 for the
chunk form.

A tile's anchor is its first row's cumulative decay rounded down to whole bits,
one per channel. Moving keys to another anchor multiplies by a power of two and
does not round, so a key has one rounded value in all products of a chunk. The
gradient of the log decay is a difference of nearly equal sums of products with
rounded operands; as both sums round alike, their errors cancel.

Decay is held as positive bits, -log2 of what it multiplies by.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import gate, mosaic_tpu_bwd_conv, tile_scores
from pallas_kernels.kda.mosaic_tpu_views import (
  AHEADS,
  DOCUMENT,
  DOCUMENTS,
  ENTRY,
  ENTRY_MASK,
  EXIT_MASK,
  LAGS,
  LANES,
  REAL,
  REAL_MASK,
  ROWS_BY_ROWS,
  TILE,
  dot,
  rows_of,
)

COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))

# Besides the numbers of `mosaic_tpu_views`, in a block and in scratch: whether
# a token is the last real one of the chunk's last document. With convolutions
# there follow masks of bits 1 and up of LAGS and of AHEADS.
LAST, LAST_MASK, NUMBERS = 4, 4, 5

# Rows of the scratch `factors`, all [.., K]; the first three one per tile.
AT_ENTRY, AT_ANCHOR, AT_STEP, AT_LEAVE, AT_TOTAL = range(0, 40, 8)
FACTOR_ROWS = 40

_LOG2_E = math.log2(math.e)
_REBALANCE_BITS = math.log2(tile_scores.REBALANCE)
# Bits at which the logits' exponential stops growing: the decay has long
# vanished in float32, its reciprocal has not.
_LARGEST_EXPONENT = 120.0
_LOW_HALF = -(2**16)


def split(x: jax.Array, settings) -> tuple[jax.Array, ...]:
  """Operands whose sum is x, to 16 bits if operands are bfloat16.

  Bits are cut, because a compiler may drop a rounding to bfloat16 and back.
  """
  if settings.exact:
    return (x,)
  bits = lax.bitcast_convert_type(x, jnp.int32) & _LOW_HALF
  high = lax.bitcast_convert_type(bits, jnp.float32)
  return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def sums_matrix(chunk: int, parts: int) -> np.ndarray:
  """0/1 matrix [2 C + 8, parts * C] of all sums over tokens.

  Rows are, for each row the sum inside its tile without the tile's first row;
  for each tile the sum up to its first row, padded to 8; for each row the sum
  from it to the chunk's end. Columns are repeated for each part of a summand.
  """
  row, column = np.arange(chunk)[:, None], np.arange(chunk)[None]
  inner = (row // TILE == column // TILE) & (column % TILE > 0)
  tiles = np.arange(8)[:, None]
  entry = (column <= tiles * TILE) & (tiles < chunk // TILE)
  kinds = (inner & (column <= row), entry, column >= row)
  matrix = np.concatenate(kinds).astype(np.float32)
  return np.tile(matrix, (1, parts))


def pair_rows(i: int) -> tuple[slice, slice]:
  """Rows of tile i where its queries and its keys alternate."""
  return rows_of(2 * i), rows_of(2 * i + 1)


def prefix_row(i: int) -> int:
  """Where the keys up to tile i, in its anchor, begin in scratch `prefixes`."""
  return TILE * i * (i + 1) // 2


def prefix_rows(i: int) -> slice:
  """Keys up to tile i in its anchor."""
  return slice(prefix_row(i), prefix_row(i + 1))


def own_rows(i: int) -> slice:
  """Keys of tile i in its own anchor."""
  return slice(prefix_row(i + 1) - TILE, prefix_row(i + 1))


def scale(
  x: jax.Array, row: jax.Array, settings, exactly: bool = False
) -> jax.Array:
  """Multiplies operands [.., K] by a row of factors.

  Args:
    x: operands.
    row: float32 [1, K], powers of two unless exactly.
    settings: static settings.
    exactly: whether not to round the factors, only the products.
  """
  if settings.narrow or settings.exact or exactly:
    return (x.astype(jnp.float32) * row).astype(x.dtype)
  factors = jnp.broadcast_to(row, (TILE, x.shape[1])).astype(x.dtype)
  parts = [x[i : i + TILE] * factors for i in range(0, x.shape[0], TILE)]
  return jnp.concatenate(parts)


def power_of_two(exponent: jax.Array) -> jax.Array:
  """2^exponent for whole numbers up to 127, exactly; 0 from -127 down.

  The exponential of a device may be an ulp off, and what moves from tile to
  tile forth and back would no longer be the same.
  """
  biased = jnp.clip(exponent, -127.0, 127.0).astype(jnp.int32) + 127
  return lax.bitcast_convert_type(biased << 23, jnp.float32)


def iota(shape, axis):
  """Numbers along one axis, int32."""
  return lax.broadcasted_iota(jnp.int32, shape, axis)


# What the gradients of q, k and g still need when the next chunk is prepared.
# They also need d_left, d_keys and tail, of which there is one buffer: `finish`
# must end before `pull_scores` and `pull_states` of the next chunk.
KEPT = (
  *('left', 'prefixes', 'grow', 'shrink', 'slope', 'q_root', 'k_root'),
  *('q', 'k', 'g'),
  *mosaic_tpu_bwd_conv.KEPT,
)


def scratch_shapes(
  settings, num_keys: int, num_values: int, gate_dtype
) -> dict:
  """Shape and dtype by name of what one head keeps between stages."""
  f32, operand, chunk = jnp.float32, settings.operand, settings.chunk
  lanes = max(num_values, num_keys, chunk)
  tiles, parts = chunk // TILE, 2 if settings.splits else 1
  shapes = {
    'left': ((2 * chunk, num_keys), operand),
    'entry': ((2 * chunk, num_keys), operand),
    'prefixes': ((prefix_row(tiles), num_keys), operand),
    'leaving': ((chunk, num_keys), operand),
    'grow': ((chunk, num_keys), f32),
    'shrink': ((chunk, num_keys), f32),
    'slope': ((chunk, num_keys), f32),
    'q': ((chunk, num_keys), operand),
    'k': ((chunk, num_keys), operand),
    'g': ((chunk, num_keys), gate_dtype),
    'q_root': ((chunk, num_keys), f32),
    'k_root': ((chunk, num_keys), f32),
    'beta': ((chunk, lanes), f32),
    'factors': ((FACTOR_ROWS, num_keys), f32),
    'total': ((num_keys, num_values), f32),
    'tail': ((8, num_keys), f32),
    'qk': ((parts * chunk, chunk), operand),
    'diagonal': ((TILE, chunk), f32),
    'inverse': ((chunk, chunk), operand),
    'write': ((chunk, num_values), operand),
    'd_values': ((chunk, num_values), f32),
    'values': ((chunk, num_values), operand),
    'outer': ((2 * chunk, num_values), operand),
    'd_scores': ((2 * chunk * (2 if settings.refines else 1), chunk), operand),
    'd_left': ((2 * chunk, num_keys), f32),
    'd_keys': ((chunk, num_keys), f32),
  }
  for level in range(tiles.bit_length() - 1):
    shapes[f'below{level}'] = ((chunk // 2, chunk), operand)
    shapes[f'merged{level}'] = ((chunk, chunk), operand)
  if settings.splits:
    lower_parts = 2 if settings.refines else 1
    shapes['lower'] = ((lower_parts * chunk, chunk), operand)
    shapes['d_write'] = ((chunk, num_values), operand)
    shapes['write_missing'] = ((chunk, num_values), operand)
  if settings.refines:
    shapes['rest'] = ((chunk, num_values), operand)
    shapes['write_exact'] = ((chunk, num_values), f32)
  if not settings.kda.beta_sigmoid:
    shapes['kk'] = ((2 * chunk, chunk), operand)
    shapes['error'] = ((chunk, num_values), f32)
  conv = mosaic_tpu_bwd_conv.scratch_shapes(settings, num_keys, num_values)
  return shapes | conv


class Step:
  """What the stages of one grid step share.

  Attributes:
    blocks: references of arrays by name.
    settings: static settings.
    strengths: float32 [C, heads] write strengths, one row per token.
    numbers: int32 [5 .., C, lanes] documents and masks of tokens, or None.
    later: operand [C, parts * C], 1 where the column's token is in the sums of
      the row.
    d_strengths: float32 [C, heads] takes the gradient of write strengths.
    begins: whether the chunk is its row's first.
  """

  def __init__(
    self, blocks, settings, strengths, numbers, later, d_strengths, begins
  ):
    self.blocks = blocks
    self.settings = settings
    self.strengths = strengths
    self.numbers = numbers
    self.later = later
    self.d_strengths = d_strengths
    self.begins = begins

  def spread_numbers(self) -> None:
    """Fills `numbers`: each along a row of lanes, once for all heads."""
    columns = jnp.transpose(self.blocks['tokens'][0, 0])
    shape = self.numbers.shape[1:]

    def along_lanes(row):
      return jnp.broadcast_to(columns[:, row : row + 1], shape)

    document = along_lanes(DOCUMENT)
    self.numbers[DOCUMENTS] = document
    self.numbers[REAL_MASK] = along_lanes(REAL)
    self.numbers[LAST_MASK] = along_lanes(LAST)
    for place, other in (
      (ENTRY_MASK, along_lanes(ENTRY)),
      (EXIT_MASK, jnp.broadcast_to(document[-1:], shape)),
    ):
      self.numbers[place] = (document == other).astype(jnp.int32)
    place = NUMBERS
    for row in (LAGS, AHEADS):
      for bit in range(1, self.settings.taps):
        # The bit becomes the sign, which fills the word.
        self.numbers[place] = (along_lanes(row) << (31 - bit)) >> 31
        place += 1

  def masks(self, kind: str, rows: slice) -> list[jax.Array] | None:
    """Masks of a tile's tokens by lag from 1 on, -1 where it is read.

    Args:
      kind: 'lag' for the tokens that these read, 'ahead' for those that read
        these.
      rows: of the tile.
    """
    if self.numbers is None:
      return None
    lags = self.settings.taps - 1
    first = NUMBERS + (lags if kind == 'ahead' else 0)
    return [self.numbers[first + i, rows, :LANES] for i in range(lags)]

  def select(self, mask: int, rows: slice, x: jax.Array) -> jax.Array:
    """Zeroes the rows that one of the masks of tokens excludes."""
    if self.numbers is None:
      return x
    return jnp.where(self.numbers[mask, rows, : x.shape[1]] != 0, x, 0.0)

  def same_document(self, rows: slice, width: int) -> jax.Array:
    """Whether a row's token and a column's are of one document."""
    columns = self.blocks['tokens'][0, 0, DOCUMENT : DOCUMENT + 1, :width]
    document = self.numbers[DOCUMENTS, rows, :width]
    return document == jnp.broadcast_to(columns, document.shape)

  def mask_later(self, later_ref) -> None:
    """Fills `later` with the sums over later tokens of the same document."""
    chunk = self.settings.chunk
    same = self.same_document(slice(None), chunk)
    for part in range(0, self.later.shape[1], chunk):
      columns = slice(part, part + chunk)
      later = later_ref[:, columns].astype(jnp.float32)
      later = jnp.where(same, later, 0.0)
      self.later[:, columns] = later.astype(self.later.dtype)

  def load(self, name: str, rows: slice, columns: slice) -> jax.Array:
    """Rows of an input in float32, padding zeroed."""
    x = self.blocks[name][0, rows, columns].astype(jnp.float32)
    return self.select(REAL_MASK, rows, x)


def _reciprocal(x, settings):
  if settings.narrow and not settings.exact:
    return jnp.exp2(-jnp.log2(x))
  return 1.0 / x


def _inverse_root(x, settings):
  if settings.narrow and not settings.exact:
    return jnp.exp2(-0.5 * jnp.log2(x))
  return lax.rsqrt(x)


def _read_decay(step: Step, head, own, i: int) -> jax.Array:
  """Decay of a tile in bits; keeps its derivative for the last stage."""
  rows, settings = rows_of(i), step.settings
  logits = step.load('g', rows, head.g)
  own.g[rows] = logits.astype(own.g.dtype)
  if not settings.kda.gate_in_kernel:
    return logits * -_LOG2_E
  bits = -settings.kda.lower_bound * _LOG2_E
  rate, shift = step.blocks['rate'][:, head.g], step.blocks['shift'][:, head.g]
  # 1 / (exp(-x) / c + 1 / c) = c * sigmoid(x); the shift holds 1 / c.
  exponent = jnp.minimum(logits * rate + shift, _LARGEST_EXPONENT)
  grown = jnp.exp2(exponent)
  decay = _reciprocal(grown + 1 / bits, settings)
  # grown * decay = sigmoid(-x), which no rounding takes to 0 too early.
  own.slope[rows] = decay * (grown * decay)
  return step.select(REAL_MASK, rows, decay)


def prepare(step: Step, head, own):
  """Decays, norms and decayed views of queries and keys."""
  settings = step.settings
  chunk, operand = settings.chunk, settings.operand
  tiles, num_keys = chunk // TILE, own.left.shape[-1]
  parts = []
  for i in range(tiles):
    rows = rows_of(i)
    parts.append(split(_read_decay(step, head, own, i), settings))
    strength = step.strengths[rows, head.index : head.index + 1]
    own.beta[rows] = jnp.broadcast_to(strength, (TILE, own.beta.shape[1]))
    yield
  sums = step.blocks['sums'][: chunk + 8]
  bits = dot(sums, jnp.concatenate([x for part in zip(*parts) for x in part]))
  yield
  entry = bits[chunk:]
  whole = jnp.floor(entry)
  own.factors[AT_ENTRY : AT_ENTRY + 8] = power_of_two(-_REBALANCE_BITS - whole)
  anchor = _REBALANCE_BITS - (entry - whole)
  own.factors[AT_ANCHOR : AT_ANCHOR + 8] = anchor
  step_bits = whole - pltpu.roll(whole, 1, 0)
  own.factors[AT_STEP : AT_STEP + 8] = power_of_two(-step_bits)
  leave = anchor[tiles - 1 : tiles] - bits[chunk - 1 : chunk]
  own.factors[AT_LEAVE : AT_LEAVE + 8] = jnp.broadcast_to(
    jnp.exp2(leave), (8, num_keys)
  )
  total = jnp.exp2(leave - whole[tiles - 1 : tiles] - _REBALANCE_BITS)
  total = step.select(ENTRY_MASK, slice(chunk - 1, chunk), total)
  own.factors[AT_TOTAL : AT_TOTAL + 8] = jnp.broadcast_to(total, (8, num_keys))
  for i in range(tiles):
    rows, (q_rows, k_rows) = rows_of(i), pair_rows(i)
    exponent = own.factors[AT_ANCHOR + i : AT_ANCHOR + i + 1] - bits[rows]
    grow, shrink = jnp.exp2(exponent), jnp.exp2(-exponent)
    own.grow[rows], own.shrink[rows] = grow, shrink
    if settings.taps:
      q, k = (
        step.select(REAL_MASK, rows, x[rows].astype(jnp.float32))
        for x in (own.q, own.k)
      )
    else:
      q, k = step.load('q', rows, head.q), step.load('k', rows, head.q)
      own.q[rows], own.k[rows] = q.astype(operand), k.astype(operand)
    if settings.kda.qk_l2norm:
      roots = []
      for x in (q, k):
        square = jnp.sum(x * x, axis=-1, keepdims=True) + gate.L2_EPSILON
        roots.append(_inverse_root(square, settings))
      own.q_root[rows] = jnp.broadcast_to(roots[0], q.shape)
      own.k_root[rows] = jnp.broadcast_to(roots[1], k.shape)
      q, k = q * (roots[0] * settings.kda.scale), k * roots[1]
    else:
      q = q * settings.kda.scale
    q, k, columns = q * grow, k * grow, (k * shrink).astype(operand)
    own.prefixes[own_rows(i)] = columns
    for x, place in ((q, q_rows), (k, k_rows)):
      x = x.astype(operand)
      own.left[place] = x
      x = scale(x, own.factors[AT_ENTRY + i : AT_ENTRY + i + 1], settings)
      own.entry[place] = step.select(ENTRY_MASK, rows, x)
    yield


def _store_parts(ref, place: int, width: int, x: jax.Array, settings) -> None:
  """Stores a tile's rows in as many parts as the reference has room for."""
  chunk = settings.chunk
  parts = (x.astype(settings.operand),)
  if ref.shape[0] > chunk:
    parts = split(x, settings)
  for part, kept in enumerate(parts):
    start = part * chunk + place
    ref[start : start + TILE, :width] = kept


def score(step: Step, head, own):
  """Scores of each tile against the keys up to it, and the exit view."""
  settings = step.settings
  chunk, operand = settings.chunk, settings.operand
  tiles = chunk // TILE
  for i in range(tiles):
    rows, width, place = rows_of(i), TILE * (i + 1), TILE * i
    if i:
      moved = slice(prefix_row(i), prefix_row(i) + place)
      factor = own.factors[AT_STEP + i : AT_STEP + i + 1]
      own.prefixes[moved] = scale(
        own.prefixes[prefix_rows(i - 1)], factor, settings
      )
    left = own.left[2 * place : 2 * place + 2 * TILE]
    strip = dot(left, own.prefixes[prefix_rows(i)], ROWS_BY_ROWS)
    row, lane = iota((TILE, width), 0) + place, iota((TILE, width), 1)
    causal, strict = lane <= row, lane < row
    if step.numbers is not None:
      same = step.same_document(rows, width)
      causal, strict = causal & same, strict & same
    qk = jnp.where(causal, strip[:TILE], 0.0)
    _store_parts(own.qk, place, width, qk, settings)
    kk = jnp.where(strict, strip[TILE:], 0.0)
    if not settings.kda.beta_sigmoid:
      _store_parts(own.kk, place, width, kk, settings)
    lower = kk * own.beta[rows, :width]
    own.diagonal[:, place : place + TILE] = lower[:, place : place + TILE]
    if settings.splits:
      _store_parts(own.lower, place, width, lower, settings)
    negative = (-lower).astype(operand)
    for level in range(tiles.bit_length() - 1):
      size = TILE << level
      block, inside = divmod(place, size)
      if block % 2:
        target = (block // 2) * size + inside
        columns = slice((block - 1) * size, block * size)
        below = getattr(own, f'below{level}')
        below[target : target + TILE, columns] = negative[:, columns]
    yield
  factor = own.factors[AT_LEAVE : AT_LEAVE + 1]
  for i in range(tiles):
    start = prefix_row(tiles - 1) + TILE * i
    keys = own.prefixes[start : start + TILE]
    # At a cost that only `high` pays: the rounding of a factor is common to all
    # keys of a chunk.
    leaving = scale(keys, factor, settings, exactly=settings.refines)
    own.leaving[rows_of(i)] = step.select(EXIT_MASK, rows_of(i), leaving)
  column = jnp.transpose(own.factors[AT_TOTAL : AT_TOTAL + 8])[:, 0:1]
  own.total[...] = jnp.broadcast_to(column, own.total.shape)
  yield
