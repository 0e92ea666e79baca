"""Packed rows in ArrayRecord files.

A record holds the pieces of one row: how many pairs each has, and its tokens,
one more than that. Inputs, targets, segments and mask follow from those. The
checksum covers the record's number too, so a record read from another place
is noticed.
"""

import os
import struct
import threading
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from array_record.python import array_record_module

from hybrid_moe.data.cache import DamagedCacheError
from hybrid_moe.data.packing import PackedRow, unpack_row

VERSION = 1

_MAGIC = b'HMRW'
# Magic, version, bytes of a token, record number, pieces; then the checksum.
_HEADER = struct.Struct('<4sHHQI')
_CHECKSUM = struct.Struct('<I')


def encode_row(number: int, pieces: Sequence[np.ndarray]) -> bytes:
  """Returns the record of a row.

  Args:
    number: position of the record in its file.
    pieces: tokens of each piece, all uint16 or all uint32.
  """
  pairs = np.asarray([len(piece) - 1 for piece in pieces], np.uint32)
  tokens = np.concatenate(pieces)
  header = _HEADER.pack(
    _MAGIC, VERSION, tokens.dtype.itemsize, number, len(pieces)
  )
  payload = pairs.tobytes() + tokens.tobytes()
  checksum = _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(header)))
  return header + checksum + payload


def decode_row(
  record: bytes, number: int, seq_len: int, pad_id: int
) -> PackedRow:
  """The inverse of `encode_row`.

  Raises:
    ValueError: the record is not the one that was written.
  """
  payload_at = _HEADER.size + _CHECKSUM.size
  if len(record) < payload_at:
    raise ValueError(f'{len(record)} bytes are too few')
  magic, version, itemsize, stored_number, num_pieces = _HEADER.unpack_from(
    record
  )
  if magic != _MAGIC or version != VERSION:
    raise ValueError(f'it begins with {record[:6]!r}')
  (stored,) = _CHECKSUM.unpack_from(record, _HEADER.size)
  checksum = zlib.crc32(record[: _HEADER.size])
  checksum = zlib.crc32(memoryview(record)[payload_at:], checksum)
  if checksum != stored:
    raise ValueError(f'checksum {checksum:08x}, but {stored:08x} was written')
  if stored_number != number:
    raise ValueError(f'it is record {stored_number}')
  pairs = np.frombuffer(record, np.uint32, num_pieces, payload_at)
  tokens = np.frombuffer(
    record,
    np.uint16 if itemsize == 2 else np.uint32,
    offset=payload_at + pairs.nbytes,
  )
  return unpack_row(pairs, tokens, seq_len, pad_id)


def write_rows(path: str, rows: Iterable[Sequence[np.ndarray]]) -> int:
  """Writes the rows, each a list of pieces, and returns their number."""
  # One record a chunk: rows are read in shuffled order.
  writer = array_record_module.ArrayRecordWriter(path, 'group_size:1,zstd:1')
  count = 0
  try:
    for count, pieces in enumerate(rows, 1):
      writer.write(encode_row(count - 1, pieces))
  finally:
    writer.close()
  return count


class RowFile:
  """Random access to the rows of a file, from any thread.

  Args:
    path: the file.
    num_rows: rows it must hold.
    seq_len: length of a row.
    pad_id: token that fills the end of a row.

  Raises:
    DamagedCacheError: it cannot be opened or has another number of rows.
  """

  def __init__(self, path: str, *, num_rows: int, seq_len: int, pad_id: int):
    self._path = path
    self._seq_len = seq_len
    self._pad_id = pad_id
    self._num_rows = num_rows
    # The reader keeps a position, so reads must not interleave.
    self._lock = threading.Lock()
    try:
      # The reader takes a missing file for an empty one.
      os.stat(path)
      self._reader = array_record_module.ArrayRecordReader(
        path, 'readahead_buffer_size:0,max_parallelism:0'
      )
      found = self._reader.num_records()
    except (RuntimeError, ValueError, OSError) as error:
      raise DamagedCacheError(
        f'{path}: cannot be opened ({error}); {self._remedy}'
      ) from error
    if found != num_rows:
      raise DamagedCacheError(
        f'{path}: holds {found} rows, but {num_rows} were written; '
        f'{self._remedy}'
      )

  def __len__(self) -> int:
    return self._num_rows

  def __getitem__(self, number: int) -> PackedRow:
    """Returns a row.

    Raises:
      IndexError: there is no such row.
      DamagedCacheError: the record is damaged; names file and record.
    """
    number = int(number)
    if not 0 <= number < self._num_rows:
      raise IndexError(f'{self._path}: row {number} of {self._num_rows}')
    try:
      with self._lock:
        (record,) = self._reader.read([number])
      return decode_row(record, number, self._seq_len, self._pad_id)
    except (RuntimeError, ValueError, OSError) as error:
      raise DamagedCacheError(
        f'{self._path}: record {number} is damaged ({error}); {self._remedy}'
      ) from error

  _remedy = 'delete its directory to have it built again'
