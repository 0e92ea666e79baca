"""Scores of a chunk inside KDA's forward kernel for TPU, for a pair of heads.

A tile's rows meet its own columns and those before it in blocks of 1, 1, 2, 4,
.. tiles, each block anchored at the first row of the rows' block: with a log
decay of at least -5 a block of one tile is a plain product (Kimi K3 report,
arXiv 2607.24653, section 2.1.1), and an earlier block has no exponent above 0.
Columns are pushed into the matrix unit, which costs more than streaming rows,
so blocks of both heads share a product: what one head leaves empty in its order
of tiles, the other, mirrored, fills.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda import mosaic_tpu_tokens, packed_rows, products
from pallas_kernels.kda.mosaic_tpu_views import (
  DOCUMENT,
  DOCUMENTS,
  EXIT_MASK,
  EXITS,
  LANES,
  MIRRORED,
  MOVES,
  ROWS_BY_ROWS,
  STEPS,
  TILE,
  TOTAL,
  Head,
  Slots,
  Windows,
  anchor_moves,
  dot,
  rows_of,
  stack_rows,
)


class Block(NamedTuple):
  """Rows that meet columns in one anchor.

  Attributes:
    rows: tiles of the rows.
    columns: tiles of the columns.
    anchor: the tile whose row 0 both are anchored at.
  """

  rows: tuple[int, ...]
  columns: tuple[int, ...]
  anchor: int


def _blocks_of(level: int, tiles: int) -> list[Block]:
  """The blocks below the diagonal that join runs of 2^level tiles."""
  size = 2**level
  return [
    Block(
      tuple(range(start + size, start + 2 * size)),
      tuple(range(start, start + size)),
      start + size,
    )
    for start in range(0, tiles, 2 * size)
  ]


class _Scorer:
  """What one head needs to make and keep its scores."""

  def __init__(self, head: Head, windows: Windows, slots: Slots, settings):
    self.head, self.slots, self.settings = head, slots, settings
    self.windows = windows
    self.tiles = settings.chunk // TILE
    self.rows_ref = slots.rows(head)
    self.columns_ref = slots.columns(head)
    self.factors_ref = slots.factors(head)
    self.stack_ref = slots.stack(head)
    self.moves = anchor_moves(self.tiles)
    self.stack = stack_rows(settings, self.columns_ref.shape[-1])
    shape = (TILE, settings.chunk)
    row, lane = (lax.broadcasted_iota(jnp.int32, shape, d) for d in (0, 1))
    self.lane, self.offset = lane, lane - row

  def place(self, tile: int) -> slice:
    return self.head.place(tile, self.tiles)

  def _factor(self, first: int, last: int) -> jax.Array:
    """Decay from a tile's row 0 to a later tile's, [1, K]."""
    if last == first + 1:
      row = STEPS.start + last
    else:
      row = MOVES.start + self.moves.index((first, last))
    return self.factors_ref[row : row + 1]

  def columns(self, tile: int, anchor: int) -> jax.Array:
    """Keys of a tile, grown from the row 0 of a tile not before it."""
    columns = self.columns_ref[rows_of(tile)]
    if anchor != tile:
      columns = columns * self._factor(tile, anchor)
    return columns.astype(self.settings.operand)

  def rows(self, tile: int, anchor: int) -> jax.Array:
    """Queries over keys of a tile, decayed from a tile not after it."""
    rows = self.rows_ref[2 * tile * TILE : 2 * (tile + 1) * TILE]
    if anchor != tile:
      moved = rows.astype(jnp.float32) * self._factor(anchor, tile)
      rows = moved.astype(self.settings.operand)
    return rows

  def _strength(self, tile: int) -> jax.Array:
    index = self.head.index
    return self.slots.strengths()[rows_of(tile), index : index + 1]

  def _same_document(self, tile: int) -> jax.Array:
    line = MIRRORED if self.head.mirrored else DOCUMENT
    chunk = self.settings.chunk
    others = self.windows.scored_tokens[0, 0, line : line + 1, :chunk]
    return self.slots.numbers(DOCUMENTS)[rows_of(tile), :chunk] == others

  def keep(self, tile: int, scores, lanes: slice, own: bool, level):
    """Masks and stores the scores of a tile.

    Args:
      tile: the rows.
      scores: float32 [32, C] of queries over keys, of any value outside lanes.
      lanes: those of the columns.
      own: whether these hold the tile's own columns.
      level: which merge joins the columns before the tile's own, or None.
    """
    settings, place = self.settings, self.place(tile)
    of_queries, of_keys = scores[:TILE], scores[TILE:]
    masks = None
    if own:
      masks = self.offset <= place.start, self.offset < place.start
      if self.head.mirrored and lanes.stop > place.stop:
        before = self.lane >= place.stop
        masks = tuple(mask | before for mask in masks)
    if settings.packed:
      same = self._same_document(tile)
      masks = tuple(m & same for m in masks) if own else (same, same)
    if masks is not None:
      of_queries = jnp.where(masks[0], of_queries, 0.0)
      of_keys = jnp.where(masks[1], of_keys, 0.0)
    # Negative, as merges need it.
    lower = of_keys * -self._strength(tile)
    stack, rows = self.stack, rows_of(tile)
    self._store(stack.scores, stack.scores_rest, rows, of_queries, lanes)
    self._store(stack.lower, stack.lower_rest, place, lower, lanes)
    if own:
      self.slots.diagonal(self.head)[:, place] = lower[:, place]
    if level is not None:
      self._store_below(lower.astype(settings.operand), place.start, level)

  def _store(self, whole: slice, rest: slice, rows: slice, x, lanes: slice):
    """Stores lanes of x at rows of the parts that the stack has."""
    if whole.start == whole.stop:
      return
    if rest.start == rest.stop:
      parts = [(whole, x.astype(self.settings.operand))]
    else:
      parts = zip((whole, rest), products.split(x))
    for part, kept in parts:
      packed_rows.store(self.stack_ref, part.start + rows.start, kept, lanes)

  def _store_below(self, lower, start: int, level: int):
    size = TILE * 2**level
    mirrored = self.head.mirrored
    block = start // size
    column = (block + (1 if mirrored else -1)) * size
    row = block // 2 * size + start % size
    row += mirrored * (self.settings.chunk // 2)
    packed_rows.store(
      self.slots.below(self.head.index // 2, level),
      row,
      lower,
      slice(column, column + size),
    )

  def keep_writes(self):
    """Stores the keys decayed to the exit, turned, and the chunk's decay."""
    settings, parts = self.settings, []
    for i in range(self.tiles):
      factor = self.factors_ref[EXITS.start + i : EXITS.start + i + 1]
      part = self.columns_ref[rows_of(i)] * factor
      if settings.packed:
        mask = self.slots.numbers(EXIT_MASK)[rows_of(i)]
        part = mosaic_tpu_tokens.select(mask, part)
      parts.append(part)
    writes = jnp.concatenate(parts[::-1] if self.head.mirrored else parts, 0)
    everywhere = slice(0, settings.chunk)
    if settings.refines:
      writes, rest = products.split(writes)
      packed_rows.store(
        self.stack_ref,
        self.stack.writes_rest.start,
        jnp.transpose(rest),
        everywhere,
      )
    packed_rows.store(
      self.stack_ref,
      self.stack.writes.start,
      jnp.transpose(writes.astype(settings.operand)),
      everywhere,
    )
    num_keys = self.columns_ref.shape[-1]
    total = jnp.transpose(self.factors_ref[TOTAL])[:, 0:1]
    self.slots.decay(self.head)[...] = jnp.broadcast_to(
      total, (num_keys, LANES)
    )


def _hull(places: list[slice]) -> slice:
  """The lanes from the first to the last of adjacent places."""
  return slice(min(p.start for p in places), max(p.stop for p in places))


def score(heads: list[Head], windows: Windows, slots: Slots, settings):
  """Scores a chunk of a pair of heads, or of a last head without a partner."""
  scorers = [_Scorer(head, windows, slots, settings) for head in heads]
  tiles = settings.chunk // TILE
  num_keys = scorers[0].columns_ref.shape[-1]
  empty = jnp.zeros((TILE, num_keys), settings.operand)

  def multiply(lefts, columns):
    parts = [columns.get(i * TILE, empty) for i in range(tiles)]
    return dot(
      jnp.concatenate(lefts, 0), jnp.concatenate(parts, 0), ROWS_BY_ROWS
    )

  def rows_at(product, i):
    return product[2 * TILE * i : 2 * TILE * (i + 1)]

  # Odd tiles against the tile before and themselves.
  odd = range(1, tiles, 2)
  for scorer in scorers:
    columns = {}
    for t in odd:
      columns[scorer.place(t).start] = scorer.columns(t, t)
      columns[scorer.place(t - 1).start] = scorer.columns(t - 1, t)
    product = multiply([scorer.rows(t, t) for t in odd], columns)
    yield
    for i, t in enumerate(odd):
      lanes = _hull([scorer.place(t - 1), scorer.place(t)])
      scorer.keep(t, rows_at(product, i), lanes, own=True, level=0)
      yield

  diagonal = [Block((t,), (t,), t) for t in range(0, tiles, 2)]
  groups = [(diagonal, None)]
  groups += [
    (_blocks_of(level, tiles), level)
    for level in range(1, int(math.log2(tiles)))
  ]
  for blocks, level in groups:
    columns, lefts, targets = {}, [], []
    for scorer in scorers:
      for block in blocks:
        for t in block.columns:
          columns[scorer.place(t).start] = scorer.columns(t, block.anchor)
        lanes = _hull([scorer.place(t) for t in block.columns])
        for t in block.rows:
          lefts.append(scorer.rows(t, block.anchor))
          targets.append((scorer, t, lanes))
    product = multiply(lefts, columns)
    yield
    for i, (scorer, t, lanes) in enumerate(targets):
      scorer.keep(t, rows_at(product, i), lanes, own=level is None, level=level)
      yield
  for scorer in scorers:
    scorer.keep_writes()
    yield


def count_steps(tiles: int) -> int:
  """How often `score` yields for a pair."""
  levels = int(math.log2(tiles))
  return 4 + tiles + levels * (1 + tiles)
