"""Row files: exact, and any damage is named."""

import os

import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.data import records
from hybrid_moe.data.cache import DamagedCacheError


def _rows(dtype=np.uint16):
  rng = np.random.default_rng(0)
  return [
    [rng.integers(0, 60000, n).astype(dtype) for n in (5, 300, 2)]
    for _ in range(20)
  ]


class RecordsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = os.path.join(self.create_tempdir().full_path, 'rows')

  def _open(self, num_rows=20):
    return records.RowFile(self.path, num_rows=num_rows, seq_len=310, pad_id=7)

  @parameterized.parameters(np.uint16, np.uint32)
  def test_reads_what_was_written(self, dtype):
    rows = _rows(dtype)
    self.assertEqual(records.write_rows(self.path, rows), 20)
    file = self._open()
    self.assertLen(file, 20)
    for number in (19, 0, 7):
      row = file[number]
      inputs = np.concatenate([piece[:-1] for piece in rows[number]])
      targets = np.concatenate([piece[1:] for piece in rows[number]])
      np.testing.assert_array_equal(row.tokens[:304], inputs)
      np.testing.assert_array_equal(row.targets[:304], targets)
      np.testing.assert_array_equal(row.tokens[304:], 7)
    with self.assertRaisesRegex(IndexError, 'row 20 of 20'):
      file[20]

  def test_a_flipped_byte_names_file_and_record(self):
    records.write_rows(self.path, _rows())
    with open(self.path, 'rb') as file:
      content = bytearray(file.read())
    content[5000] ^= 0x10  # records of some 640 bytes begin at byte 64
    with open(self.path, 'wb') as file:
      file.write(content)
    damaged = []
    rows = self._open()
    for number in range(20):
      try:
        rows[number]
      except DamagedCacheError as error:
        self.assertIn(f'{self.path}: record {number} is damaged', str(error))
        damaged.append(number)
    self.assertLen(damaged, 1)
    self.assertBetween(damaged[0], 5, 10)

  def test_every_flipped_bit_of_a_record_is_noticed(self):
    pieces = [np.arange(3, dtype=np.uint16), np.arange(9, 14, dtype=np.uint16)]
    record = records.encode_row(4, pieces)
    records.decode_row(record, 4, 6, 0)
    for bit in range(8 * len(record)):
      flipped = bytearray(record)
      flipped[bit // 8] ^= 1 << bit % 8
      with self.assertRaises(ValueError):
        records.decode_row(bytes(flipped), 4, 6, 0)

  def test_a_record_from_another_place_is_noticed(self):
    record = records.encode_row(4, [np.arange(3, dtype=np.uint16)])
    with self.assertRaisesRegex(ValueError, 'it is record 4'):
      records.decode_row(record, 5, 6, 0)

  def test_a_cut_file_is_noticed(self):
    records.write_rows(self.path, _rows())
    os.truncate(self.path, os.path.getsize(self.path) // 2)
    with self.assertRaisesRegex(DamagedCacheError, f'{self.path}: '):
      self._open()[19]

  def test_a_missing_file_is_named(self):
    with self.assertRaisesRegex(DamagedCacheError, f'{self.path}: .*opened'):
      self._open()

  def test_another_number_of_rows_is_noticed(self):
    records.write_rows(self.path, _rows())
    with self.assertRaisesRegex(DamagedCacheError, 'holds 20 rows, but 21'):
      self._open(num_rows=21)


if __name__ == '__main__':
  absltest.main()
