"""Configuration of documents: sources, tokenizer, mixtures of a stage."""

import dataclasses

from hybrid_moe.checks import require


@dataclasses.dataclass(frozen=True)
class SourceConfig:
  """One source of documents.

  Attributes:
    name: what mixtures, metrics and reports call it.
    kind: 'folder' turns a folder of text or code into a dataset; 'tfds' reads
      a prepared tensorflow-datasets dataset; 'synthetic' generates long-range
      tasks.
    path: folder: a directory, or 'stdlib' for the running Python's own
      standard library sources.
    patterns: folder: file name patterns that become documents.
    join: folder: 'file' makes a document of each file; 'package' joins the
      files of a package, dependencies first, into one long document.
    dataset: tfds: the dataset's name, as `tfds.data_source` takes it.
    train_split: tfds: split that is trained on.
    validation_split: tfds: split that is evaluated on.
    text_field: tfds: feature that holds the text (bytes or str) or the token
      ids (integers).
    task: synthetic: 'recall', 'needle' or 'copy'.
    num_documents: synthetic: documents generated for training.
  """

  name: str
  kind: str = 'folder'
  path: str = 'stdlib'
  patterns: tuple[str, ...] = ('*.py',)
  join: str = 'file'
  dataset: str = ''
  train_split: str = 'train'
  validation_split: str = 'validation'
  text_field: str = 'text'
  task: str = 'recall'
  num_documents: int = 256

  def __post_init__(self):
    at = f'data.sources[{self.name!r}]'
    require(
      self.name != '' and '/' not in self.name,
      'data.sources[].name',
      self.name,
      'a non-empty name without "/"',
    )
    kinds = ('folder', 'tfds', 'synthetic')
    require(self.kind in kinds, f'{at}.kind', self.kind, f'one of {kinds}')
    joins = ('file', 'package')
    require(self.join in joins, f'{at}.join', self.join, f'one of {joins}')
    tasks = ('recall', 'needle', 'copy')
    require(self.task in tasks, f'{at}.task', self.task, f'one of {tasks}')
    if self.kind == 'tfds':
      require(
        self.dataset != '', f'{at}.dataset', self.dataset, 'a dataset name'
      )
    if self.kind == 'folder':
      require(self.path != '', f'{at}.path', self.path, "a path or 'stdlib'")
    require(
      self.num_documents >= 1, f'{at}.num_documents', self.num_documents, '>= 1'
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where text comes from and how it becomes rows of tokens.

  Attributes:
    sources: every source that a stage's mixture may name.
    tokenizer: 'byte', or the path of a trained tokenizer (`tokenizer.json` of
      the tokenizers library, or a SentencePiece `.model`).
    data_dir: where datasets and packed rows are kept; '' means
      `<workdir>/data`.
    tfds_dir: where prepared tensorflow-datasets datasets live; '' means that
      library's default.
    validation_fraction: share of a folder's documents held out for
      validation, chosen by a hash of the document's path.
    seed: order of rows and content of synthetic tasks.
  """

  sources: tuple[SourceConfig, ...] = (SourceConfig(name='stdlib'),)
  tokenizer: str = 'byte'
  data_dir: str = ''
  tfds_dir: str = ''
  validation_fraction: float = 0.05
  seed: int = 0

  def __post_init__(self):
    names = [s.name for s in self.sources]
    require(len(names) >= 1, 'data.sources', names, 'at least one source')
    require(
      len(set(names)) == len(names), 'data.sources', names, 'distinct names'
    )
    require(
      0 < self.validation_fraction < 1,
      'data.validation_fraction',
      self.validation_fraction,
      'a number in (0, 1)',
    )


@dataclasses.dataclass(frozen=True)
class MixtureEntry:
  """Weight of one source in a stage, and the document lengths it takes.

  Attributes:
    source: name of a `SourceConfig`.
    weight: share of the rows, relative to the other entries.
    min_document_tokens: shorter documents are left out.
    max_document_tokens: longer documents are left out; 0 means no limit.
  """

  source: str
  weight: float = 1.0
  min_document_tokens: int = 0
  max_document_tokens: int = 0

  def __post_init__(self):
    at = f'mixture[{self.source!r}]'
    require(self.weight > 0, f'{at}.weight', self.weight, '> 0')
    require(
      self.min_document_tokens >= 0,
      f'{at}.min_document_tokens',
      self.min_document_tokens,
      '>= 0',
    )
    require(
      self.max_document_tokens == 0
      or self.max_document_tokens > self.min_document_tokens,
      f'{at}.max_document_tokens',
      self.max_document_tokens,
      '0, or more than min_document_tokens',
    )
