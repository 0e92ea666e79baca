"""The packed rows of one source at one length, prepared once."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import logging

from hybrid_moe.checks import ConfigError
from hybrid_moe.data import cache, records
from hybrid_moe.data.packing import Piece, pack_documents
from hybrid_moe.data.source import Source
from hybrid_moe.data.token_store import TokenStore, prepare_tokens
from hybrid_moe.data.tokenizer import Tokenizer
from hybrid_moe.data_config import MixtureEntry

# Part of every cache key: raise it when the same tokens give other rows.
_VERSION = 1
_ROW_FILE = 'rows.array_record'
# Documents that validate when a length filter would leave none.
_FALLBACK_DOCUMENTS = 16


@dataclasses.dataclass(frozen=True)
class RowSet:
  """Rows of one split of one source.

  Attributes:
    rows: the rows.
    digest: changes with anything that determines the rows.
    report: number of rows, documents and tokens (targets), share of padding,
      and whether the length filter was given up; JSON-able.
  """

  rows: records.RowFile
  digest: str
  report: dict[str, Any]


def rows_path(
  source: Source,
  entry: MixtureEntry,
  tokenizer: Tokenizer,
  seq_len: int,
  data_dir: str,
) -> str:
  """Returns the directory of the rows, named by all that determines them."""
  key = cache.digest(
    {
      'version': _VERSION,
      'record_version': records.VERSION,
      'source': source.identity,
      'tokenizer': tokenizer.identity,
      'seq_len': seq_len,
      'min_document_tokens': entry.min_document_tokens,
      'max_document_tokens': entry.max_document_tokens,
    }
  )
  return os.path.join(data_dir, f'rows-{source.name}-{seq_len}-{key}')


def prepare_rows(
  source: Source,
  entry: MixtureEntry,
  split: str,
  tokenizer: Tokenizer,
  seq_len: int,
  data_dir: str,
) -> None:
  """Packs the documents that pass the entry's filter, unless that is done.

  Args:
    source: documents of the split.
    entry: the length filter.
    split: 'train' or 'validation'. If the filter leaves no document to
      validate on, the longest below `max_document_tokens` are taken.
    tokenizer: what `source` was opened with.
    seq_len: length of a row.
    data_dir: where prepared data is kept.

  Raises:
    ConfigError: no document is left; names the filter.
    DamagedCacheError: tokens prepared earlier are damaged.
  """

  def build(partial: str) -> dict[str, Any]:
    store = prepare_tokens(source, tokenizer, data_dir)
    kept, fallback = select_documents(store.lengths, entry, split)
    tokens = 0

    def gather() -> Iterator[list[np.ndarray]]:
      nonlocal tokens
      for row in pack_documents(store.lengths[kept], seq_len):
        tokens += sum(piece.pairs for piece in row)
        yield [_cut(store, kept, piece) for piece in row]

    path = os.path.join(partial, _ROW_FILE)
    num_rows = records.write_rows(path, gather())
    return {
      'rows': num_rows,
      'documents': len(kept),
      'documents_left_out': len(store.lengths) - len(kept),
      'tokens': tokens,
      'padding_waste': 1 - tokens / (num_rows * seq_len),
      'filter_given_up': fallback,
    }

  path = rows_path(source, entry, tokenizer, seq_len, data_dir)
  cache.build_directory(path, build)


def open_rows(
  source: Source,
  entry: MixtureEntry,
  tokenizer: Tokenizer,
  seq_len: int,
  data_dir: str,
) -> RowSet:
  """Opens rows that `prepare_rows` has prepared.

  Raises:
    DamagedCacheError: they are not there, or not whole.
  """
  path = rows_path(source, entry, tokenizer, seq_len, data_dir)
  if not cache.is_complete(path):
    raise cache.DamagedCacheError(
      f'{path}: rows of source {source.name!r} are missing. Process 0 prepares '
      'them, so data.data_dir must be one folder that all processes see, and '
      'their sources must be the same; see also the log of process 0'
    )
  meta = cache.read_meta(path)
  rows = records.RowFile(
    os.path.join(path, _ROW_FILE),
    num_rows=meta['rows'],
    seq_len=seq_len,
    pad_id=tokenizer.pad_id,
  )
  return RowSet(rows, path.rpartition('-')[-1], meta)


def select_documents(
  lengths: np.ndarray, entry: MixtureEntry, split: str
) -> tuple[np.ndarray, bool]:
  """Returns the documents that pass the length filter.

  Returns:
    Indices in rising order, and whether the filter was given up for lack of
    documents to validate on.

  Raises:
    ConfigError: none is left.
  """
  not_too_long = np.full(len(lengths), True)
  if entry.max_document_tokens:
    not_too_long = lengths <= entry.max_document_tokens
  passing = not_too_long & (lengths >= entry.min_document_tokens)
  if passing.any():
    return np.flatnonzero(passing), False
  if split == 'train' or not not_too_long.any():
    lengths = (
      f'{lengths.min()} to {lengths.max()} tokens long'
      if len(lengths)
      else 'none at all'
    )
    raise ConfigError(
      f'mixture[{entry.source!r}].min_document_tokens='
      f'{entry.min_document_tokens}, max_document_tokens='
      f'{entry.max_document_tokens}: no {split} document is left of '
      f'{len(lengths)} ({lengths}); accepted is a filter that leaves some'
    )
  candidates = np.flatnonzero(not_too_long)
  longest = np.argsort(-lengths[candidates], kind='stable')
  kept = np.sort(candidates[longest[:_FALLBACK_DOCUMENTS]])
  logging.warning(
    'source %r: no validation document has min_document_tokens=%d; the '
    'longest %d validate instead (at most %d tokens)',
    entry.source,
    entry.min_document_tokens,
    len(kept),
    lengths[kept].max(),
  )
  return kept, True


def _cut(store: TokenStore, kept: np.ndarray, piece: Piece) -> np.ndarray:
  begin = store.offsets[kept[piece.document]] + piece.start
  return store.tokens[begin : begin + piece.pairs + 1]
