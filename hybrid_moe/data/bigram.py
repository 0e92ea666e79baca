"""The loss of a bigram model: what a language model has to beat.

The next token's distribution is that of the tokens seen after the present one,
mixed with the distribution of single tokens in proportion to how little has
been seen (a hierarchical Dirichlet model, MacKay and Peto 1995):

  p(b | a) = (count(a, b) + s * p(b)) / (count(a) + s)
  p(b)     = (count(b) + 1) / (total + U)
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from hybrid_moe.data.pipeline import Batch

# Weight s of the single-token distribution, in counts.
PRIOR_COUNTS = 4.0

# Distinct pairs of recent batches that wait to be merged into the counts.
_PENDING_PAIRS = 1 << 22


@dataclasses.dataclass(frozen=True)
class BigramModel:
  """Counts of (token, next token) pairs; only pairs seen take memory.

  Attributes:
    vocab_size: U, above every token id.
    pairs: token * U + next token of each pair seen, int64, rising.
    counts: how often each was seen, int64.
  """

  vocab_size: int
  pairs: np.ndarray
  counts: np.ndarray

  def losses(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns -log p(target | token) in nats, float64 of the same shape."""
    seen_U, following_U = (
      np.bincount(ids, self.counts, self.vocab_size)
      for ids in np.divmod(self.pairs, self.vocab_size)
    )
    single_U = (following_U + 1) / (following_U.sum() + self.vocab_size)
    wanted = tokens.astype(np.int64) * self.vocab_size + targets
    # A pair beyond all others, never wanted, keeps the look-up in range.
    pairs = np.append(self.pairs, np.iinfo(np.int64).max)
    counts = np.append(self.counts, 0)
    at = np.searchsorted(pairs, wanted)
    found = np.where(pairs[at] == wanted, counts[at], 0)
    mixed = found + PRIOR_COUNTS * single_U[targets]
    return -np.log(mixed / (seen_U[tokens] + PRIOR_COUNTS))

  def mean_loss(self, batches: Iterable[Batch]) -> float:
    """Returns the mean loss in nats over all real targets of `batches`."""
    total, count = 0.0, 0
    for batch in batches:
      mask = batch['loss_mask']
      losses = self.losses(batch['tokens'][mask], batch['targets'][mask])
      total += float(losses.sum())
      count += losses.size
    return total / count


def fit_bigram(batches: Iterable[Batch], vocab_size: int) -> BigramModel:
  """Counts the pairs of `batches`, a few batches in memory at a time.

  Args:
    batches: as `StageData` gives them.
    vocab_size: U, above every token id.
  """
  merged = (np.zeros(0, np.int64), np.zeros(0, np.int64))
  pending, size = [merged], 0
  for batch in batches:
    mask = batch['loss_mask']
    pairs = batch['tokens'][mask].astype(np.int64) * vocab_size
    pairs += batch['targets'][mask]
    pending.append(np.unique(pairs, return_counts=True))
    size += len(pending[-1][0])
    if size > _PENDING_PAIRS:
      pending, size = [_merge(pending)], 0
  return BigramModel(vocab_size, *_merge(pending))


def _merge(
  parts: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
  """Adds the counts of equal pairs up."""
  pairs, counts = (np.concatenate(arrays) for arrays in zip(*parts))
  merged, at = np.unique(pairs, return_inverse=True)
  # bincount sums in float64: exact below 2**53.
  totals = np.bincount(at, counts, len(merged)).astype(np.int64)
  return merged, totals
