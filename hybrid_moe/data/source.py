"""Documents as token ids: of a folder, a prepared dataset, or generated."""

import dataclasses
import hashlib
import os
from typing import Any, Protocol

import numpy as np
import tensorflow_datasets as tfds

from hybrid_moe.checks import ConfigError, require
from hybrid_moe.data import cache, corpus, synthetic
from hybrid_moe.data.tokenizer import ByteTokenizer, Tokenizer
from hybrid_moe.data_config import DataConfig, SourceConfig

SPLITS = ('train', 'validation')


@dataclasses.dataclass(frozen=True)
class Document:
  """A document as the model reads it.

  Attributes:
    tokens: ids, int32 [n], n >= 2, from the begin mark to the end mark.
    path: what the source calls it.
    source: name of the source.
  """

  tokens: np.ndarray
  path: str
  source: str


class Source(Protocol):
  """One split of a source's documents, in a fixed order.

  Attributes:
    name: the source's name in the configuration.
    identity: text that changes with the documents' content (not with the
      tokenizer).
  """

  name: str
  identity: str

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Document: ...


def open_source(
  config: SourceConfig,
  split: str,
  *,
  tokenizer: Tokenizer,
  data: DataConfig,
  data_dir: str,
  seq_len: int,
) -> Source:
  """Opens one split of a source; a folder's dataset is built on first use.

  Args:
    config: the source.
    split: 'train' or 'validation'.
    tokenizer: turns text into ids.
    data: where datasets are, how much is held out, and the seed.
    data_dir: where the datasets of folders are kept.
    seq_len: row length that synthetic documents are made to fill.

  Raises:
    ConfigError: no such folder, dataset, split or feature.
  """
  require(split in SPLITS, 'split', split, f'one of {SPLITS}')
  if config.kind == 'folder':
    return FolderSource(
      config, split, tokenizer, data.validation_fraction, data_dir
    )
  if config.kind == 'tfds':
    return TfdsSource(config, split, tokenizer, data.tfds_dir)
  return SyntheticSource(
    config, split, tokenizer, data.seed, data.validation_fraction, seq_len
  )


class FolderSource:
  """The files of a folder, through the dataset that `corpus` makes of them."""

  def __init__(
    self,
    config: SourceConfig,
    split: str,
    tokenizer: Tokenizer,
    validation_fraction: float,
    data_dir: str,
  ):
    self.name = config.name
    self._join = config.join
    self._split = split
    self._tokenizer = tokenizer
    self._validation_fraction = validation_fraction
    self._data_dir = data_dir
    self._listing = corpus.list_folder(config.path, config.patterns)
    key = corpus.corpus_key(self._listing, config.join, validation_fraction)
    self.identity = f'folder:{key}:{split}'
    self._examples = None

  def __len__(self) -> int:
    return len(self._open())

  def __getitem__(self, index: int) -> Document:
    example = _read_example(self._open(), index, self._listing.path)
    tokens = _mark(self._tokenizer.encode(example['text']), self._tokenizer)
    return Document(tokens, example['path'].decode(), self.name)

  def _open(self) -> Any:
    if self._examples is None:
      directory = corpus.prepare_corpus(
        self._listing,
        join=self._join,
        validation_fraction=self._validation_fraction,
        directory=self._data_dir,
      )
      try:
        builder = tfds.builder_from_directory(directory)
        self._examples = builder.as_data_source(split=self._split)
      except Exception as error:  # of many types, one for each lost file
        raise cache.DamagedCacheError(
          f'{directory}: cannot be read ({error}); delete the directory above '
          'it to have it built again'
        ) from error
    return self._examples


class TfdsSource:
  """A split of any dataset prepared in a random-access format."""

  def __init__(
    self,
    config: SourceConfig,
    split: str,
    tokenizer: Tokenizer,
    tfds_dir: str,
  ):
    self.name = config.name
    self._at = f'data.sources[{config.name!r}]'
    self._dataset = config.dataset
    self._field = config.text_field
    self._tokenizer = tokenizer
    tfds_split = (
      config.train_split if split == 'train' else config.validation_split
    )
    directory = os.path.expanduser(tfds_dir) or None
    builder = self._find_dataset(directory)
    self._examples = self._open_split(builder, split, tfds_split, directory)
    features = builder.info.features
    if features is None or self._field not in features:
      raise ConfigError(
        f'{self._at}.text_field={self._field!r}: dataset '
        f'{config.dataset!r} has the features {sorted(features or ())}'
      )
    self.identity = (
      f'tfds:{builder.info.full_name}:{tfds_split}:{self._field}:'
      f'{len(self._examples)}:{_stamp_files(str(builder.data_path))}'
    )

  def __len__(self) -> int:
    return len(self._examples)

  def __getitem__(self, index: int) -> Document:
    example = _read_example(self._examples, index, self._dataset)
    value = example[self._field]
    if isinstance(value, str | bytes):
      ids = self._tokenizer.encode(value)
    else:
      ids = self._check_ids(np.asarray(value), index)
    path = f'{self._dataset}/{index}'
    return Document(_mark(ids, self._tokenizer), path, self.name)

  def _find_dataset(self, directory: str | None) -> Any:
    try:
      return tfds.builder(self._dataset, data_dir=directory, try_gcs=False)
    except tfds.core.registered.DatasetNotFoundError as error:
      raise ConfigError(
        f'{self._at}.dataset={self._dataset!r}: no prepared dataset of that '
        f'name in {_describe(directory)}, nor code to prepare one; accepted '
        'is a dataset prepared there with '
        "builder.download_and_prepare() and file_format='array_record'"
      ) from error

  def _open_split(
    self, builder: Any, split: str, tfds_split: str, directory: str | None
  ) -> Any:
    try:
      return builder.as_data_source(split=tfds_split)
    except Exception as error:
      # The library raises one of many types for each of these causes.
      splits = sorted(builder.info.splits)
      if splits and tfds_split.split('[')[0] not in splits:
        raise ConfigError(
          f'{self._at}.{split}_split={tfds_split!r}: dataset '
          f'{self._dataset!r} has the splits {splits}'
        ) from error
      if not builder.is_prepared() or not splits:
        state = 'is not prepared'
      elif isinstance(error, NotImplementedError):
        state = f'is prepared as {builder.info.file_format}'
      else:
        raise ConfigError(
          f'{self._at}.{split}_split={tfds_split!r}: cannot be read from '
          f'dataset {self._dataset!r} ({error})'
        ) from error
      raise ConfigError(
        f'{self._at}.dataset={self._dataset!r}: {state} in '
        f'{_describe(directory)}; prepare it with '
        f'tfds.builder({self._dataset!r}, data_dir=..., '
        "file_format='array_record').download_and_prepare() and set "
        'data.tfds_dir to that data_dir'
      ) from error

  def _check_ids(self, ids: np.ndarray, index: int) -> np.ndarray:
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
      raise ConfigError(
        f'{self._at}.text_field={self._field!r}: example {index} is '
        f'{ids.dtype} of shape {ids.shape}; accepted is text, or integers '
        'of one dimension'
      )
    if (
      ids.size and not 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size
    ):
      raise ConfigError(
        f'{self._at}.text_field={self._field!r}: example {index} holds ids '
        f'{ids.min()} to {ids.max()}; accepted are ids in [0, '
        f'{self._tokenizer.vocab_size}), the vocabulary of data.tokenizer'
      )
    return ids.astype(np.int32)


class SyntheticSource:
  """Generated documents, each of about a row's length."""

  def __init__(
    self,
    config: SourceConfig,
    split: str,
    tokenizer: Tokenizer,
    seed: int,
    validation_fraction: float,
    seq_len: int,
  ):
    require(
      seq_len > synthetic.MIN_LENGTH,
      'stages[].seq_len',
      seq_len,
      f'> {synthetic.MIN_LENGTH} with the synthetic source {config.name!r}',
    )
    require(seed >= 0, 'data.seed', seed, '>= 0 with a synthetic source')
    self.name = config.name
    self._task = config.task
    self._tokenizer = tokenizer
    # Two seeds of one run never meet, so validation is never trained on.
    self._seed = 2 * seed + SPLITS.index(split)
    self._count = config.num_documents
    if split == 'validation':
      held_out = round(config.num_documents * validation_fraction)
      self._count = max(16, held_out)
    self._length = self._fit_length(seq_len)
    self.identity = (
      f'synthetic-{synthetic.VERSION}:{config.task}:{self._seed}:'
      f'{self._count}:{self._length}:{np.__version__}'
    )

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, index: int) -> Document:
    if not 0 <= index < self._count:
      raise IndexError(index)
    document = synthetic.generate(
      self._task, seed=self._seed, index=index, length=self._length
    )
    tokens = _mark(self._tokenizer.encode(document.text), self._tokenizer)
    return Document(tokens, f'{self._task}/{index}', self.name)

  def _fit_length(self, seq_len: int) -> int:
    """Characters whose tokens, with both marks, make seq_len pairs."""
    if isinstance(self._tokenizer, ByteTokenizer):
      return seq_len - 1
    sample = synthetic.generate(
      self._task, seed=self._seed, index=0, length=4 * seq_len
    )
    characters = len(sample.text) / len(self._tokenizer.encode(sample.text))
    # Documents differ a little; one that is too long would be cut.
    return max(synthetic.MIN_LENGTH, int(0.95 * (seq_len - 1) * characters))


def _mark(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
  """Puts the marks of a document's ends around ids that lack them."""
  begin = [] if ids.size and ids[0] == tokenizer.bos_id else [tokenizer.bos_id]
  end = [tokenizer.eos_id]
  if ids.size > 1 and ids[-1] == tokenizer.eos_id:
    end = []
  return np.concatenate([begin, ids, end]).astype(np.int32)


def _read_example(examples: Any, index: int, dataset: str) -> dict[str, Any]:
  try:
    return examples[index]
  except (RuntimeError, ValueError) as error:
    raise cache.DamagedCacheError(
      f'dataset {dataset!r}: example {index} cannot be read ({error})'
    ) from error


def _describe(directory: str | None) -> str:
  if directory is None:
    return "the default folder of tensorflow-datasets (data.tfds_dir='')"
  return f'data.tfds_dir={directory!r}'


def _stamp_files(directory: str) -> str:
  """Returns a digest of the names, sizes and times of a dataset's files."""
  if not os.path.isdir(directory):
    return 'no files'
  stamps = hashlib.sha256()
  with os.scandir(directory) as entries:
    for entry in sorted(entries, key=lambda e: e.name):
      status = entry.stat()
      stamps.update(
        f'{entry.name}\0{status.st_size}\0{status.st_mtime_ns}\n'.encode()
      )
  return stamps.hexdigest()
