"""Where the parts of KDA's forward kernel for TPU keep their data."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TILE = 16
LANES = 128
# Rows of a block of tokens' numbers.
DOCUMENT, REAL, MIRRORED, ENTRY = range(4)
# Bits j of these rows: whether the convolution of a token, or of that j tokens
# after it, reads over j tokens. Row 4 is the backward's.
LAGS, AHEADS = 5, 6
# Scratch of numbers: masks of real tokens, of tokens of the entry state's
# document and of the chunk's last document, the documents themselves, and with
# a convolution the masks of bits 1 and up of LAGS.
REAL_MASK, ENTRY_MASK, EXIT_MASK, DOCUMENTS, LAG_MASKS = range(5)
# Rows of the scratch of factors: from the chunk's entry to each tile, from each
# tile to the next, between the tiles of `anchor_moves`, from each tile to the
# exit, and from entry to exit.
ENTRIES, STEPS, MOVES, EXITS = (slice(i, i + 8) for i in range(0, 32, 8))
TOTAL = slice(32, 40)
FACTOR_ROWS = 40

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))
ROWS_BY_ROWS = (((1,), (1,)), ((), ()))


class Head(NamedTuple):
  """Where a head's data lies.

  Attributes:
    index: of the value head within the block.
    qk: its channels of the blocks of q and k.
    g: its channels of the block of g.
    v: its channels of the blocks of v and o.
  """

  index: int
  qk: slice
  g: slice
  v: slice

  @property
  def mirrored(self) -> bool:
    """Whether tiles are in reversed order."""
    return self.index % 2 == 1

  def place(self, tile: int, tiles: int) -> slice:
    """Rows or columns at which a tile of the chunk is kept."""
    return rows_of(tiles - 1 - tile if self.mirrored else tile)


def make_heads(
  heads: int, groups: int, num_keys: int, num_values: int
) -> list[Head]:
  """The heads of a grid step, `groups` of which read one head of q and k."""

  def channels(index, width):
    return slice(index * width, (index + 1) * width)

  return [
    Head(
      h,
      channels(h // groups, num_keys),
      channels(h, num_keys),
      channels(h, num_values),
    )
    for h in range(heads)
  ]


@dataclasses.dataclass(frozen=True)
class Windows:
  """References to the blocks of a grid step; None for what a call lacks.

  Attributes:
    q: [1, C, heads * K].
    k: [1, C, heads * K].
    v: [1, C, heads * V].
    g: [1, C, heads * K].
    beta: float32 [1, 1, 1, heads, C].
    rate: float32 [1, heads * K], -log2(e) times the gate's multiplier.
    shift: float32 [1, heads * K], what the scaled logits are moved by.
    sums: [C + 32, C], sums decay within tiles, to and between their rows 0.
    tokens: int32 [1, 1, 8, C], numbers of the tokens that are prepared.
    scored_tokens: int32 [1, 1, 8, C], numbers of the tokens that are scored.
    h0: float32 [1, heads, K, V].
    q_taps: float32 [taps, 8, heads * K].
    k_taps: float32 [taps, 8, heads * K].
    v_taps: float32 [taps, 8, heads * V].
    o: [1, C, heads * V].
    final: float32 [1, heads, K, V].
    states: [1, 1, heads, K, V].
  """

  q: Any
  k: Any
  v: Any
  g: Any
  beta: Any
  rate: Any
  shift: Any
  sums: Any
  tokens: Any
  scored_tokens: Any
  h0: Any
  q_taps: Any
  k_taps: Any
  v_taps: Any
  o: Any
  final: Any
  states: Any


@dataclasses.dataclass(frozen=True)
class Slots:
  """Scratch of one chunk on its way; buffers are reused every 2 or 3 chunks.

  Each method gives a head's part. P are scores of queries against keys, L those
  of keys times beta, K^ keys decayed to the exit.

  Attributes:
    refs: references by name, all but 'state' and 'past' with a leading axis of
      buffers.
    two: which of two buffers the chunk uses.
    three: which of three.

  Those of `stack`, `below` and `inverse` are of `packed_rows`.
  """

  refs: dict[str, Any]
  two: Any
  three: Any

  def rows(self, head: Head):
    """[2 C, K], for each tile its decayed queries over its decayed keys."""
    return self.refs['rows'].at[self.two, head.index]

  def columns(self, head: Head):
    """float32 [C, K], keys grown from the chunk's tiles' rows 0."""
    return self.refs['columns'].at[self.two, head.index]

  def past(self, name: str, head: Head):
    """float32 [D / 128, 8 + C, 128], inputs of the convolution of q, k or v."""
    return self.refs[f'{name}_past'].at[head.index]

  def factors(self, head: Head):
    """float32 [40, K], decay from tile to tile."""
    return self.refs['factors'].at[self.two, head.index]

  def readers(self, head: Head):
    """[2 C, K], keys (in the head's order) and queries decayed from entry."""
    return self.refs['readers'].at[self.three, head.index]

  def values(self, head: Head):
    """[C, V], the values."""
    return self.refs['values'].at[self.three, head.index]

  def strengths(self):
    """float32 [C, heads], write strengths."""
    return self.refs['strengths'].at[self.three]

  def numbers(self, place: int):
    """int32 [C, 128], masks and documents of tokens."""
    return self.refs['numbers'].at[self.two, place]

  def stack(self, head: Head):
    """[.., C], all that new values are multiplied with; see `StackRows`."""
    return self.refs['stack'].at[self.two, head.index]

  def diagonal(self, head: Head):
    """float32 [16, C], the diagonal tiles of -L side by side."""
    return self.refs['diagonal'].at[self.two, head.index]

  def below(self, pair: int, level: int):
    """[C, C], blocks of -L that a level of merges joins, of both heads."""
    return self.refs[f'below{level}'].at[self.two, pair]

  def inverse(self, index: int):
    """[C, C], (I + L)^-1 in the head's order."""
    return self.refs['inverse'].at[self.two, index]

  def decay(self, head: Head):
    """float32 [K, 128], the decay of the whole chunk along rows."""
    return self.refs['decay'].at[self.two, head.index]

  def state(self, head: Head):
    """float32 [K, V]."""
    return self.refs['state'].at[head.index]


class StackRows(NamedTuple):
  """Rows of the stack of left operands; parts that a tier lacks are empty.

  Attributes:
    lower_rest: what rounding took from -L, in the head's order.
    lower: -L, in the head's order.
    scores_rest: what rounding took from P.
    scores: P.
    writes: K^ transposed.
    writes_rest: what rounding took from K^ transposed.
  """

  lower_rest: slice
  lower: slice
  scores_rest: slice
  scores: slice
  writes: slice
  writes_rest: slice


def stack_rows(settings, num_keys: int) -> StackRows:
  """Lays out the stack for a tier."""
  lower = settings.chunk if settings.refines else 0
  rest = settings.chunk if settings.splits else 0
  writes_rest = num_keys if settings.refines else 0
  sizes = (lower, lower, rest, settings.chunk, num_keys, writes_rest)
  ends = np.cumsum(sizes)
  return StackRows(*(slice(int(e - s), int(e)) for s, e in zip(sizes, ends)))


def dot(lhs: jax.Array, rhs: jax.Array, dims=_ROWS_BY_COLUMNS) -> jax.Array:
  """float32 product; float32 operands are not rounded."""
  exact = lhs.dtype == jnp.float32
  return lax.dot_general(
    lhs,
    rhs,
    dims,
    preferred_element_type=jnp.float32,
    precision=lax.Precision.HIGHEST if exact else None,
  )


def rows_of(tile: int) -> slice:
  """Rows of a tile."""
  return slice(tile * TILE, (tile + 1) * TILE)


def anchor_moves(tiles: int) -> list[tuple[int, int]]:
  """Pairs of tiles, further apart than one, between which scores move."""
  moves = set()
  size = 2
  while size < tiles:
    for anchor in range(size, tiles, 2 * size):
      moves |= {(t, anchor) for t in range(anchor - size, anchor - 1)}
      moves |= {(anchor, t) for t in range(anchor + 2, anchor + size)}
    size *= 2
  return sorted(moves)


def sums_matrix(chunk: int) -> np.ndarray:
  """[C + 32, C] of 0 and 1 that sums decay.

  Rows 0 to C: from row 0 of the token's tile to the token, where row 0 is 0, so
  that no small sum is a difference of large ones. Then 8 rows each from the
  chunk's entry to row 0 of each tile, from the row 0 before, between the tiles
  of `anchor_moves`, and from row 0 of each tile to the chunk's last row.
  """
  row = np.arange(chunk)
  same_tile = row[:, None] // TILE == row[None] // TILE
  inner = same_tile & (row[None] % TILE > 0) & (row[None] <= row[:, None])
  entry, step, move, leave = np.zeros((4, 8, chunk))
  for i in range(chunk // TILE):
    entry[i, : i * TILE + 1] = 1
    leave[i, i * TILE + 1 :] = 1
    if i:
      step[i, (i - 1) * TILE + 1 : i * TILE + 1] = 1
  for i, (first, last) in enumerate(anchor_moves(chunk // TILE)):
    move[i, first * TILE + 1 : last * TILE + 1] = 1
  return np.concatenate([inner, entry, step, move, leave]).astype(np.float32)
