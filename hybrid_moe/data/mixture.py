"""Which source, and which of its rows, stands where in a stage."""

import functools
import sys
from collections.abc import Sequence

import grain
import numpy as np

from hybrid_moe.data import cache

# Rows over which a mixture keeps its weights exactly.
_PERIOD = 10_000
# Below this many rows an epoch's order is kept in memory.
_FEW_ROWS = 1 << 16


def apportion(total: int, weights: Sequence[float]) -> np.ndarray:
  """Shares `total` out by the method of largest remainders.

  Args:
    total: number of rows.
    weights: positive, of any sum.

  Returns:
    int64 [sources], summing to `total`; at least 1 each if `total` allows.
  """
  shares = np.asarray(weights, np.float64)
  exact = total * shares / shares.sum()
  counts = np.floor(exact).astype(np.int64)
  by_remainder = np.argsort(counts - exact, kind='stable')
  counts[by_remainder[: total - counts.sum()]] += 1
  if total >= len(counts):
    for source in np.flatnonzero(counts == 0):
      counts[np.argmax(counts)] -= 1
      counts[source] = 1
  return counts


def interleave(counts: np.ndarray) -> np.ndarray:
  """Spreads `counts[s]` places of each source s evenly; int64 [sum]."""
  places = np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n])
  sources = np.repeat(np.arange(len(counts)), counts)
  return sources[np.lexsort((sources, places))]


class MixtureSelection(grain.transforms.DatasetSelectionMap):
  """Maps a place in an endless mixture to (source, place in the source)."""

  def __init__(self, weights: Sequence[float]):
    period = _PERIOD if len(weights) > 1 else 1
    self._counts = apportion(period, weights)
    self._sources = interleave(self._counts)
    self._ranks = np.zeros(period, np.int64)
    for source, count in enumerate(self._counts):
      self._ranks[self._sources == source] = np.arange(count)

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, index: int) -> tuple[int, int]:
    cycle, place = divmod(index, len(self._sources))
    source = int(self._sources[place])
    return source, cycle * int(self._counts[source]) + int(self._ranks[place])


class SourceRows:
  """Rows of one source, each with the source's number (a Grain source)."""

  def __init__(self, source_id: int, rows: Sequence):
    self._source_id = source_id
    self._rows = rows

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> tuple[int, object]:
    return self._source_id, self._rows[index]


class ShuffledEpochs:
  """A few rows over and over, in a new order each time (a Grain source)."""

  def __init__(self, rows: Sequence, seed: int):
    self._rows = rows
    # Rows are drawn in sequence, so two epochs are in use at most.
    self._order = functools.lru_cache(2)(
      lambda epoch: permute(len(rows), seed, epoch)
    )

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, index: int) -> object:
    epoch, place = divmod(index, len(self._rows))
    return self._rows[int(self._order(epoch)[place])]


def permute(count: int, seed: int, epoch: int = 0) -> np.ndarray:
  """Returns an order of `count` things, int64 [count].

  It rests on the raw stream of a bit generator, which numpy keeps from one
  version to the next; a resumed run needs its old order.
  """
  stream = np.random.Philox(key=[seed, epoch])
  return np.argsort(stream.random_raw(count), kind='stable')


def mix_rows(
  row_sets: Sequence[Sequence], weights: Sequence[float], seeds: Sequence[int]
) -> grain.MapDataset:
  """Returns the endless, shuffled mixture of some rows.

  Every source is shuffled anew in each of its own epochs. The dataset is a
  pure map from a place to a row, so a place is all there is to save.

  Args:
    row_sets: rows of each source.
    weights: share of the rows that each source gives.
    seeds: order of each source, in [0, 2**32).

  Returns:
    A dataset of (source number, row).
  """
  sources = [
    _shuffle(SourceRows(i, rows), seed)
    for i, (rows, seed) in enumerate(zip(row_sets, seeds))
  ]
  return grain.MapDataset.select_from_datasets(
    sources, MixtureSelection(weights)
  )


def _shuffle(rows: SourceRows, seed: int) -> grain.MapDataset:
  # Grain shuffles any number of rows in constant memory, but walks about
  # 2**16 / rows steps for each row it draws: milliseconds if they are few.
  if len(rows) < _FEW_ROWS:
    return grain.MapDataset.source(ShuffledEpochs(rows, seed))
  return grain.MapDataset.source(rows).shuffle(seed=seed).repeat()


def order_seed(seed: int, stage: str, source: str, purpose: str) -> int:
  """Returns a seed in [0, 2**32) of its own for each use of `seed`."""
  fields = {'seed': seed, 'stage': stage, 'source': source, 'use': purpose}
  return int(cache.digest(fields)[:8], 16)
