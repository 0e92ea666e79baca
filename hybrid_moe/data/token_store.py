"""The documents of a source, tokenised once for all stages.

One flat file of ids that is mapped into memory, and the documents' offsets in
it. A checksum over the ids is verified on opening.
"""

import array
import dataclasses
import os
import zlib
from typing import Any

import numpy as np

from hybrid_moe.data import cache
from hybrid_moe.data.source import Source
from hybrid_moe.data.tokenizer import Tokenizer

_VERSION = 1
_CHUNK_TOKENS = 1 << 24


@dataclasses.dataclass(frozen=True)
class TokenStore:
  """Tokenised documents.

  Attributes:
    tokens: ids of all documents one after another, uint16 or uint32.
    offsets: where each document begins, int64, with the end of the last
      one behind them.
  """

  tokens: np.ndarray
  offsets: np.ndarray

  @property
  def lengths(self) -> np.ndarray:
    """Tokens of each document, int64."""
    return np.diff(self.offsets)


def store_path(source: Source, tokenizer: Tokenizer, data_dir: str) -> str:
  """Returns the directory of a source's tokens."""
  key = cache.digest(
    {
      'version': _VERSION,
      'source': source.identity,
      'tokenizer': tokenizer.identity,
    }
  )
  return os.path.join(data_dir, f'tokens-{source.name}-{key}')


def prepare_tokens(
  source: Source, tokenizer: Tokenizer, data_dir: str
) -> TokenStore:
  """Tokenises a source, unless that has been done, and opens the result."""
  dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32

  def build(partial: str) -> dict[str, Any]:
    offsets = array.array('q', [0])
    checksum = 0
    with open(os.path.join(partial, 'tokens.bin'), 'wb') as file:
      for index in range(len(source)):
        tokens = source[index].tokens
        content = tokens.astype(dtype).tobytes()
        checksum = zlib.crc32(content, checksum)
        file.write(content)
        offsets.append(offsets[-1] + len(tokens))
    offsets = np.asarray(offsets, np.int64)
    np.save(os.path.join(partial, 'offsets.npy'), offsets)
    return {
      'documents': len(source),
      'tokens': int(offsets[-1]),
      'dtype': np.dtype(dtype).name,
      'crc32': checksum,
      'offsets_crc32': zlib.crc32(offsets.tobytes()),
    }

  path = store_path(source, tokenizer, data_dir)
  return _open(path, cache.build_directory(path, build))


def _open(path: str, meta: dict[str, Any]) -> TokenStore:
  try:
    offsets = np.load(os.path.join(path, 'offsets.npy'))
    tokens = np.zeros(0, meta['dtype'])
    if meta['tokens']:
      tokens = np.memmap(
        os.path.join(path, 'tokens.bin'),
        meta['dtype'],
        mode='r',
        shape=(meta['tokens'],),
      )
  except (OSError, ValueError, EOFError) as error:
    raise cache.DamagedCacheError(
      f'{path}: cannot be read ({error}); delete the directory to have it '
      'built again'
    ) from error
  checksum = 0
  for first in range(0, len(tokens), _CHUNK_TOKENS):
    checksum = zlib.crc32(tokens[first : first + _CHUNK_TOKENS], checksum)
  if (
    checksum != meta['crc32']
    or zlib.crc32(offsets.tobytes()) != meta['offsets_crc32']
  ):
    raise cache.DamagedCacheError(
      f'{path}: the tokens do not match their checksum; delete the directory '
      'to have it built again'
    )
  return TokenStore(tokens, offsets)
