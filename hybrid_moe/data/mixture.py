"""Which source, and which of its rows, stands where in a stage."""

import sys
from collections.abc import Sequence

import grain
import numpy as np

from hybrid_moe.data import cache

# Rows over which a mixture keeps its weights exactly.
_PERIOD = 10_000


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
    grain.MapDataset.source(SourceRows(i, rows)).shuffle(seed=seed).repeat()
    for i, (rows, seed) in enumerate(zip(row_sets, seeds))
  ]
  return grain.MapDataset.select_from_datasets(
    sources, MixtureSelection(weights)
  )


def order_seed(seed: int, stage: str, source: str, purpose: str) -> int:
  """Returns a seed in [0, 2**32) of its own for each use of `seed`."""
  fields = {'seed': seed, 'stage': stage, 'source': source, 'use': purpose}
  return int(cache.digest(fields)[:8], 16)
