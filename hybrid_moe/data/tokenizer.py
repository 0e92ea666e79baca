"""Text to token ids: bytes by default, or a trained vocabulary from a file."""

import hashlib
import importlib
import os
import types
from typing import Protocol

import numpy as np

from hybrid_moe.checks import ConfigError

# Names that published vocabularies give to the marks of a document's ends.
_BOS_NAMES = ('<s>', '<bos>', '<|bos|>', '<|begin_of_text|>', '[BOS]')
_EOS_NAMES = (
  '</s>',
  '<eos>',
  '<|eos|>',
  '<|end_of_text|>',
  '<|endoftext|>',
  '[EOS]',
)
_PAD_NAMES = ('<pad>', '<|pad|>', '[PAD]')


class Tokenizer(Protocol):
  """What the data pipeline needs of a tokenizer.

  Attributes:
    vocab_size: ids are below it.
    bos_id: first token of a document.
    eos_id: last token of a document.
    pad_id: fills the unused end of a row.
    identity: text that changes whenever the encoding could.
  """

  vocab_size: int
  bos_id: int
  eos_id: int
  pad_id: int
  identity: str

  def encode(self, text: str | bytes) -> np.ndarray:
    """Returns int32 ids [n], without marks of the document's ends."""
    ...

  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of ids [n]; marks and unknown ids give nothing."""
    ...


class ByteTokenizer:
  """UTF-8 bytes 0..255 as they are, and three marks above them."""

  pad_id = 256
  bos_id = 257
  eos_id = 258
  vocab_size = 259
  identity = 'byte-1'

  def encode(self, text: str | bytes) -> np.ndarray:
    if isinstance(text, str):
      text = text.encode('utf-8', errors='replace')
    return np.frombuffer(text, np.uint8).astype(np.int32)

  def decode(self, ids: np.ndarray) -> str:
    ids = np.asarray(ids).reshape(-1)
    in_range = (ids >= 0) & (ids < 256)
    return ids[in_range].astype(np.uint8).tobytes().decode('utf-8', 'replace')


class BpeTokenizer:
  """A `tokenizer.json` of the `tokenizers` library."""

  def __init__(self, path: str):
    content = _read(path)
    tokenizers = _import('tokenizers', path)
    try:
      self._model = tokenizers.Tokenizer.from_str(content.decode('utf-8'))
    except Exception as error:  # the library raises bare Exception
      raise ConfigError(
        f'data.tokenizer={path!r}: accepted is a tokenizer.json that the '
        f'tokenizers library can read ({error})'
      ) from error
    # Settings in the file that would cut documents or fill them up, and the
    # reading of mark names inside a text as marks, do not belong in a corpus.
    self._model.no_truncation()
    self._model.no_padding()
    self._model.encode_special_tokens = True
    vocabulary = self._model.get_vocab(with_added_tokens=True)
    self.vocab_size = max(vocabulary.values()) + 1
    self.eos_id = _find(vocabulary, _EOS_NAMES)
    if self.eos_id is None:
      raise ConfigError(
        f'data.tokenizer={path!r}: accepted is a vocabulary with an '
        f'end-of-document token, one of {_EOS_NAMES}'
      )
    self.bos_id = _find(vocabulary, _BOS_NAMES, self.eos_id)
    self.pad_id = _find(vocabulary, _PAD_NAMES, self.eos_id)
    self.identity = f'bpe-1:{hashlib.sha256(content).hexdigest()}'

  def encode(self, text: str | bytes) -> np.ndarray:
    encoding = self._model.encode(_as_str(text), add_special_tokens=False)
    return np.asarray(encoding.ids, np.int32)

  def decode(self, ids: np.ndarray) -> str:
    kept = _keep_known(ids, self.vocab_size)
    return self._model.decode(kept, skip_special_tokens=True)


class SentencePieceTokenizer:
  """A SentencePiece `.model`."""

  def __init__(self, path: str):
    content = _read(path)
    sentencepiece = _import('sentencepiece', path)
    self._model = sentencepiece.SentencePieceProcessor()
    try:
      self._model.LoadFromSerializedProto(content)
    except (RuntimeError, ValueError) as error:
      raise ConfigError(
        f'data.tokenizer={path!r}: accepted is a SentencePiece model ({error})'
      ) from error
    self.vocab_size = self._model.GetPieceSize()
    self.eos_id = self._model.eos_id()
    if self.eos_id < 0:
      raise ConfigError(
        f'data.tokenizer={path!r}: accepted is a SentencePiece model with an '
        'end-of-sentence id'
      )
    bos_id, pad_id = self._model.bos_id(), self._model.pad_id()
    self.bos_id = bos_id if bos_id >= 0 else self.eos_id
    self.pad_id = pad_id if pad_id >= 0 else self.eos_id
    self.identity = f'sentencepiece-1:{hashlib.sha256(content).hexdigest()}'

  def encode(self, text: str | bytes) -> np.ndarray:
    return np.asarray(self._model.EncodeAsIds(_as_str(text)), np.int32)

  def decode(self, ids: np.ndarray) -> str:
    return self._model.DecodeIds(_keep_known(ids, self.vocab_size))


def load_tokenizer(name: str) -> Tokenizer:
  """Returns the tokenizer that `DataConfig.tokenizer` names.

  Args:
    name: 'byte', or the path of a `.json` or `.model` file.

  Raises:
    ConfigError: the file is missing, cannot be read, is of another kind or
      has no end-of-document token.
  """
  if name == 'byte':
    return ByteTokenizer()
  if name.endswith('.json'):
    return BpeTokenizer(name)
  if name.endswith('.model'):
    return SentencePieceTokenizer(name)
  raise ConfigError(
    f"data.tokenizer={name!r}: accepted is 'byte' or the path of a "
    'tokenizer.json or of a SentencePiece .model'
  )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
  """Raises `ConfigError` if the model has no row for some token."""
  if tokenizer.vocab_size > vocab_size:
    raise ConfigError(
      f'model.vocab_size={vocab_size}: accepted is at least the '
      f"tokenizer's vocab_size={tokenizer.vocab_size} "
      f'({tokenizer.identity.split(":")[0]})'
    )


def _import(library: str, path: str) -> types.ModuleType:
  try:
    return importlib.import_module(library)
  except ModuleNotFoundError as error:
    raise ConfigError(
      f"data.tokenizer={path!r}: reading it takes the package '{library}', "
      'which is not installed'
    ) from error


def _read(path: str) -> bytes:
  path = os.path.expanduser(path)
  try:
    with open(path, 'rb') as file:
      return file.read()
  except FileNotFoundError as error:
    raise ConfigError(
      f'data.tokenizer={path!r}: there is no such file; accepted is '
      "'byte' or the path of a trained tokenizer"
    ) from error
  except OSError as error:
    raise ConfigError(
      f'data.tokenizer={path!r}: accepted is a readable file ({error})'
    ) from error


def _find(
  vocabulary: dict[str, int], names: tuple[str, ...], default: int | None = None
) -> int | None:
  for name in names:
    if name in vocabulary:
      return vocabulary[name]
  return default


def _as_str(text: str | bytes) -> str:
  if isinstance(text, bytes):
    return text.decode('utf-8', errors='replace')
  return text


def _keep_known(ids: np.ndarray, vocab_size: int) -> list[int]:
  ids = np.asarray(ids).reshape(-1)
  return ids[(ids >= 0) & (ids < vocab_size)].tolist()
