"""Documents into rows of a fixed length (pure numpy).

A document of n tokens holds n - 1 (input, next token) pairs. It is cut into
pieces of at most `seq_len` pairs; every pair is in exactly one piece, so the
token at a cut is the last target of one piece and the first input of the
next. Pieces are placed best-fit decreasing (Ding et al., arXiv 2404.10830,
"Fewer truncations improve language modeling"): each goes into the fullest row
that still has room. Only lengths are needed to decide, and they are read in
windows, so a corpus need not fit into memory.
"""

import bisect
import dataclasses
from collections.abc import Iterator

import numpy as np

WINDOW_DOCUMENTS = 65536


@dataclasses.dataclass(frozen=True)
class Piece:
  """Pairs [start, start + pairs) of a document, which need one token more.

  Attributes:
    document: index of the document.
    start: offset of the first input token.
    pairs: number of (input, next token) pairs, at least 1.
  """

  document: int
  start: int
  pairs: int


@dataclasses.dataclass(frozen=True)
class PackedRow:
  """One row as the model takes it.

  Attributes:
    tokens: inputs, int32 [T]; the padding id past the last piece.
    targets: next token inside the same document, int32 [T].
    segment_ids: 1, 2, ... for the pieces, 0 for padding, int32 [T].
    loss_mask: whether there is a target, bool [T].
  """

  tokens: np.ndarray
  targets: np.ndarray
  segment_ids: np.ndarray
  loss_mask: np.ndarray


def pack_documents(
  lengths: np.ndarray,
  seq_len: int,
  *,
  window: int = WINDOW_DOCUMENTS,
) -> Iterator[list[Piece]]:
  """Yields rows of pieces that hold every pair of every document once.

  Args:
    lengths: tokens of each document, integers; documents of fewer than two
      tokens have no pair and are passed over.
    seq_len: pairs of a row.
    window: documents that are packed together. Rows of one window are closed
      before the next, which costs one window's few unfilled rows.

  Yields:
    The pieces of a row, in the order in which they stand in it.
  """
  for first in range(0, len(lengths), window):
    pairs = np.asarray(lengths[first : first + window], np.int64) - 1
    whole = np.maximum(pairs, 0) // seq_len
    for document in np.flatnonzero(whole):
      for part in range(whole[document]):
        yield [Piece(first + int(document), part * seq_len, seq_len)]
    rest = np.maximum(pairs, 0) - whole * seq_len
    short = np.flatnonzero(rest)
    for members in best_fit_decreasing(rest[short], seq_len):
      yield [
        Piece(
          first + int(document),
          int(whole[document]) * seq_len,
          int(rest[document]),
        )
        for document in short[members]
      ]


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> list[list[int]]:
  """Places items into bins, largest first, each into the fullest that fits.

  Args:
    sizes: sizes in [1, capacity], integers.
    capacity: size of a bin.

  Returns:
    The items of each bin; equal sizes keep their order.
  """
  bins: list[list[int]] = []
  by_room: dict[int, list[int]] = {}  # room left -> bins that have it
  rooms: list[int] = []  # its keys, sorted
  order = np.argsort(-np.asarray(sizes), kind='stable')
  for item, size in zip(order.tolist(), np.asarray(sizes)[order].tolist()):
    at = bisect.bisect_left(rooms, size)
    if at == len(rooms):
      chosen, room = len(bins), capacity
      bins.append([])
    else:
      room = rooms[at]
      chosen = by_room[room].pop()
      if not by_room[room]:
        del by_room[room]
        del rooms[at]
    bins[chosen].append(item)
    room -= size
    if room:
      if room not in by_room:
        by_room[room] = []
        bisect.insort(rooms, room)
      by_room[room].append(chosen)
  return bins


def unpack_row(
  pairs: np.ndarray, tokens: np.ndarray, seq_len: int, pad_id: int
) -> PackedRow:
  """Lays the pieces of a row out.

  Args:
    pairs: pairs of each piece, integers, summing to at most `seq_len`.
    tokens: tokens of the pieces one after another, each one token longer
      than its pairs.
    seq_len: length of the row.
    pad_id: token that fills the rest.

  Returns:
    The row.
  """
  pairs = np.asarray(pairs, np.int64)
  ends = np.cumsum(pairs + 1)
  is_input = np.ones(len(tokens), bool)
  is_input[ends - 1] = False
  is_target = np.ones(len(tokens), bool)
  is_target[ends - pairs - 1] = False
  used = int(pairs.sum())
  tokens_T = np.full(seq_len, pad_id, np.int32)
  targets_T = np.full(seq_len, pad_id, np.int32)
  segment_ids_T = np.zeros(seq_len, np.int32)
  tokens_T[:used] = tokens[is_input]
  targets_T[:used] = tokens[is_target]
  segment_ids_T[:used] = np.repeat(np.arange(1, len(pairs) + 1), pairs)
  return PackedRow(tokens_T, targets_T, segment_ids_T, segment_ids_T > 0)
