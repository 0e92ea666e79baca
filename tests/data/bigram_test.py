"""The bigram baseline against counting by hand."""

import collections
import math
from unittest import mock

import numpy as np
from absl.testing import absltest

from hybrid_moe.data import bigram


def _batch(tokens, targets, mask):
  return {
    'tokens': np.array([tokens], np.int32),
    'targets': np.array([targets], np.int32),
    'loss_mask': np.array([mask], bool),
  }


class BigramTest(absltest.TestCase):
  def test_equals_brute_force(self):
    train = [
      _batch([0, 1, 0, 1, 3], [1, 0, 1, 2, 3], [1, 1, 1, 1, 0]),
      _batch([2, 0, 3], [0, 2, 3], [1, 1, 0]),
    ]
    held_out = [_batch([0, 1, 3, 2], [1, 1, 0, 3], [1, 1, 1, 0])]
    vocab_size, prior = 4, bigram.PRIOR_COUNTS
    pairs = collections.Counter(
      [(0, 1), (1, 0), (0, 1), (1, 2), (2, 0), (0, 2)]
    )
    losses = []
    for token, target in [(0, 1), (1, 1), (3, 0)]:
      seen = sum(n for (a, _), n in pairs.items() if a == token)
      following = sum(n for (_, b), n in pairs.items() if b == target)
      single = (following + 1) / (6 + vocab_size)
      p = (pairs[token, target] + prior * single) / (seen + prior)
      losses.append(-math.log(p))
    model = bigram.fit_bigram(train, vocab_size)
    self.assertAlmostEqual(
      model.mean_loss(held_out), np.mean(losses), places=12
    )

  def test_probabilities_sum_to_one(self):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 7, 200)
    model = bigram.fit_bigram(
      [_batch(tokens[:-1], tokens[1:], np.ones(199))], 9
    )
    for token in range(9):
      losses = model.losses(np.full(9, token), np.arange(9))
      self.assertAlmostEqual(np.exp(-losses).sum(), 1.0, places=12)

  def test_merging_on_the_way_changes_nothing(self):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 100_000, (20, 51))
    tokens[10:] = tokens[:10]
    batches = [_batch(row[:-1], row[1:], np.ones(50)) for row in tokens]
    whole = bigram.fit_bigram(batches, 100_000)
    with mock.patch.object(bigram, '_PENDING_PAIRS', 120):
      merged = bigram.fit_bigram(batches, 100_000)
    np.testing.assert_array_equal(whole.pairs, merged.pairs)
    np.testing.assert_array_equal(whole.counts, merged.counts)
    self.assertEqual(whole.counts.sum(), 1000)
    self.assertEqual(whole.counts.min(), 2)


if __name__ == '__main__':
  absltest.main()
