"""Mixtures: proportions at every point, each row once an epoch."""

import collections

import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.data import mixture


class MixtureTest(parameterized.TestCase):
  @parameterized.parameters(
    (10, [1.0], [10]),
    (10, [0.7, 0.3], [7, 3]),
    (3, [0.98, 0.01, 0.01], [1, 1, 1]),
    (10, [1e6, 1.0], [9, 1]),
    (1, [0.4, 0.6], [0, 1]),
    (7, [1, 1, 1], [3, 2, 2]),
  )
  def test_apportion(self, total, weights, expected):
    counts = mixture.apportion(total, weights)
    self.assertEqual(counts.tolist(), expected)

  @parameterized.parameters(
    ([0.7, 0.3],), ([0.333, 0.667],), ([0.9, 0.09, 0.01],), ([5.0],)
  )
  def test_proportions_hold_in_every_prefix(self, weights):
    rows = [[(i, r) for r in range(50)] for i in range(len(weights))]
    mixed = mixture.mix_rows(rows, weights, seeds=range(len(weights)))
    sources = np.array([mixed[k][0] for k in range(12_000)])
    shares = np.array(weights) / sum(weights)
    for i, share in enumerate(shares):
      so_far = np.cumsum(sources == i)
      expected = share * np.arange(1, len(sources) + 1)
      self.assertLess(np.abs(so_far - expected).max(), 3)

  @parameterized.parameters(1, 2, 13)
  def test_every_row_once_an_epoch_in_a_new_order(self, num_rows):
    mixed = mixture.mix_rows(
      [range(num_rows), range(5)], [0.5, 0.5], seeds=[3, 4]
    )
    drawn = collections.defaultdict(list)
    for k in range(400):
      source, row = mixed[k]
      drawn[source].append(row)
    epochs = [
      drawn[0][e * num_rows : (e + 1) * num_rows]
      for e in range(200 // num_rows)
    ]
    for epoch in epochs:
      self.assertCountEqual(epoch, range(num_rows))
    if num_rows == 13:
      self.assertGreater(len(set(map(tuple, epochs))), 10)

  def test_many_rows_are_shuffled_too(self):
    count = 70_000
    mixed = mixture.mix_rows([range(count)], [1.0], seeds=[3])
    first = [mixed[k][1] for k in range(300)]
    second = [mixed[count + k][1] for k in range(300)]
    self.assertLen(set(first), 300)
    self.assertNotEqual(first, sorted(first))
    self.assertNotEqual(first, second)

  def test_order_is_that_of_earlier_releases(self):
    self.assertEqual(
      mixture.permute(8, seed=1, epoch=2).tolist(), [4, 2, 0, 6, 1, 5, 7, 3]
    )

  def test_far_places_cost_no_more(self):
    mixed = mixture.mix_rows([range(7), range(3)], [0.6, 0.4], seeds=[1, 2])
    far = 10**12
    self.assertCountEqual(
      [mixed[far + k][0] for k in range(10)], [0] * 6 + [1] * 4
    )

  def test_order_seeds_differ_by_use(self):
    seeds = {
      mixture.order_seed(seed, stage, source, use)
      for seed in (0, 1)
      for stage in ('a', 'b')
      for source in ('x', 'y')
      for use in ('train', 'validation')
    }
    self.assertLen(seeds, 16)
    self.assertBetween(max(seeds), 0, 2**32 - 1)


if __name__ == '__main__':
  absltest.main()
