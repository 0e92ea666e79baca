"""Packing: every pair once, boundaries exact, waste small and told truly."""

import itertools

import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.data import packing


def _pack(documents, seq_len, window=packing.WINDOW_DOCUMENTS):
  """Packs token arrays all the way to rows."""
  lengths = np.asarray([len(d) for d in documents])
  pieces = list(packing.pack_documents(lengths, seq_len, window=window))
  rows = []
  for row in pieces:
    parts = [
      documents[p.document][p.start : p.start + p.pairs + 1] for p in row
    ]
    rows.append(
      packing.unpack_row(
        [p.pairs for p in row], np.concatenate(parts), seq_len, pad_id=-1
      )
    )
  return pieces, rows


def _documents(seed, count=60, longest=70):
  """Arrays whose tokens are unique over all documents."""
  lengths = np.random.default_rng(seed).integers(0, longest, count)
  ends = np.cumsum(lengths)
  return [np.arange(e - n, e) for n, e in zip(lengths, ends)]


class PackingTest(parameterized.TestCase):
  @parameterized.product(seq_len=[1, 2, 7, 16, 69, 100], window=[5, 1000])
  def test_every_pair_exactly_once(self, seq_len, window):
    documents = _documents(seq_len)
    _, rows = _pack(documents, seq_len, window)
    found = []
    for row in rows:
      mask = row.loss_mask
      found += zip(row.tokens[mask].tolist(), row.targets[mask].tolist())
    expected = [
      (int(a), int(b)) for d in documents for a, b in itertools.pairwise(d)
    ]
    self.assertEqual(sorted(found), sorted(expected))

  def test_boundaries(self):
    row = packing.unpack_row(
      [2, 1, 3], np.array([1, 2, 3, 4, 5, 6, 7, 8, 9]), seq_len=8, pad_id=0
    )
    np.testing.assert_array_equal(row.tokens, [1, 2, 4, 6, 7, 8, 0, 0])
    np.testing.assert_array_equal(row.targets, [2, 3, 5, 7, 8, 9, 0, 0])
    np.testing.assert_array_equal(row.segment_ids, [1, 1, 2, 3, 3, 3, 0, 0])
    np.testing.assert_array_equal(row.loss_mask, [1, 1, 1, 1, 1, 1, 0, 0])
    for array in (row.tokens, row.targets, row.segment_ids):
      self.assertEqual(array.dtype, np.int32)
    self.assertEqual(row.loss_mask.dtype, bool)

  def test_a_long_document_is_cut_into_whole_rows_and_a_rest(self):
    pieces, _ = _pack([np.arange(24)], seq_len=10)
    self.assertEqual(
      pieces,
      [
        [packing.Piece(0, 0, 10)],
        [packing.Piece(0, 10, 10)],
        [packing.Piece(0, 20, 3)],
      ],
    )

  def test_short_documents_stay_whole(self):
    documents = _documents(3, longest=20)
    pieces, _ = _pack(documents, seq_len=20)
    cut = [p for row in pieces for p in row if p.start]
    self.assertEmpty(cut)

  def test_best_fit(self):
    # Largest first: 8 | 7 | 5, then 3 beside 7 (fullest with room), 2
    # beside 8, 2 and 2 beside 5.
    bins = packing.best_fit_decreasing(np.array([2, 7, 3, 8, 5, 2, 2]), 10)
    self.assertEqual(bins, [[3, 0], [1, 2], [4, 5, 6]])

  def test_wastes_little(self):
    documents = _documents(0, count=3000)
    _, rows = _pack(documents, seq_len=256)
    used = sum(int(row.loss_mask.sum()) for row in rows)
    self.assertGreater(used / (len(rows) * 256), 0.995)

  def test_no_documents_and_documents_without_pairs(self):
    self.assertEmpty(_pack([], 8)[0])
    self.assertEmpty(_pack([np.arange(0), np.arange(1)], 8)[0])


if __name__ == '__main__':
  absltest.main()
