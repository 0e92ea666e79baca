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

from hybrid_moe.checks import require
from hybrid_moe.data.pipeline import Batch, StageData

MAX_VOCAB_SIZE = 8192
# Weight s of the single-token distribution, in counts.
PRIOR_COUNTS = 4.0


@dataclasses.dataclass(frozen=True)
class BigramModel:
  """Counts of (token, next token) pairs.

  Attributes:
    counts_UU: int64; row is the present token, column the next.
  """

  counts_UU: np.ndarray

  def losses(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns -log p(target | token) in nats, float64 of the same shape."""
    following_U = self.counts_UU.sum(0)
    vocab_size = len(following_U)
    single_U = (following_U + 1) / (following_U.sum() + vocab_size)
    seen_U = self.counts_UU.sum(1)
    joint = self.counts_UU[tokens, targets] + PRIOR_COUNTS * single_U[targets]
    return -np.log(joint / (seen_U[tokens] + PRIOR_COUNTS))

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
  """Counts the pairs of `batches`, one batch in memory at a time.

  Args:
    batches: as `StageData` gives them.
    vocab_size: U, above every token id.

  Raises:
    ConfigError: the table of U x U counts would not fit into memory.
  """
  require(
    1 <= vocab_size <= MAX_VOCAB_SIZE,
    'vocab_size',
    vocab_size,
    f'in [1, {MAX_VOCAB_SIZE}] for the bigram baseline, which keeps a table '
    'of all pairs',
  )
  counts = np.zeros(vocab_size * vocab_size, np.int64)
  for batch in batches:
    mask = batch['loss_mask']
    pairs = batch['tokens'][mask].astype(np.int64) * vocab_size
    pairs += batch['targets'][mask]
    found, repeats = np.unique(pairs, return_counts=True)
    counts[found] += repeats
  return BigramModel(counts.reshape(vocab_size, vocab_size))


def bigram_baseline(
  stage_data: StageData,
  *,
  vocab_size: int,
  num_train_batches: int,
  validation: Iterable[Batch],
) -> float:
  """Fits to the rows that a stage trains on and returns its validation loss.

  Args:
    stage_data: the stage's rows.
    vocab_size: of the tokenizer.
    num_train_batches: batches that the stage trains on.
    validation: the batches on which the model is evaluated.

  Returns:
    Mean loss in nats per target.
  """
  batches = stage_data.train_batches(0)
  try:
    first = (batch for _, batch in zip(range(num_train_batches), batches))
    model = fit_bigram(first, vocab_size)
  finally:
    batches.close()
  return model.mean_loss(validation)
