"""A folder of text or code as a prepared tensorflow-datasets dataset.

Files are read as UTF-8; one that is not, or holds nothing but white space,
makes no document. Hidden files and folders and `__pycache__` are left out, and
links to folders are not followed.

'stdlib' is the running Python's own library. Of it are left out, besides: what
is installed beside it (site-packages, dist-packages), every folder of tests
(test, tests, idle_test), the IDLE editor, lib2to3 and the turtle demos, and
what programs have written rather than people (pydoc_data, encodings, config-*,
__phello__, _sysconfigdata*).
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import io
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds
from absl import logging

from hybrid_moe.checks import ConfigError
from hybrid_moe.data import cache
from hybrid_moe.data.import_order import order_by_imports

STDLIB = 'stdlib'
STDLIB_EXCLUDED = (
  'site-packages',
  'dist-packages',
  'test',
  'tests',
  'idle_test',
  'idlelib',
  'lib2to3',
  'turtledemo',
  'pydoc_data',
  'encodings',
  'config-*',
  '__phello__',
  '_sysconfigdata*',
)
# Part of every cache key: raise it when the same files give other documents.
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Listing:
  """The files of a folder that can become documents.

  Attributes:
    path: what the configuration calls the folder.
    root: the folder itself.
    patterns: file name patterns that were asked for.
    files: paths relative to `root`, with '/', sorted.
    identity: text that changes with the files.
  """

  path: str
  root: str
  patterns: tuple[str, ...]
  files: tuple[str, ...]
  identity: str


def list_folder(path: str, patterns: tuple[str, ...]) -> Listing:
  """Finds the files that match any of `patterns`.

  Args:
    path: a folder, or 'stdlib'.
    patterns: as in a shell; tried on the file's name and on its path relative
      to the folder.

  Raises:
    ConfigError: there is no such folder, or it cannot be listed.
  """
  try:
    return _list(path, patterns)
  except OSError as error:
    raise _unreadable(path, error) from error


def _list(path: str, patterns: tuple[str, ...]) -> Listing:
  is_stdlib = path == STDLIB
  root = (
    sysconfig.get_paths()['stdlib'] if is_stdlib else os.path.expanduser(path)
  )
  if not os.path.isdir(root):
    raise ConfigError(
      f"data.sources[].path={path!r}: accepted is a folder, or '{STDLIB}'"
    )
  excluded = STDLIB_EXCLUDED if is_stdlib else ()
  files = []
  stamps = hashlib.sha256()
  for file in sorted(_walk(root, excluded)):
    name = file.split('/')[-1]
    if not any(
      fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(file, p)
      for p in patterns
    ):
      continue
    files.append(file)
    status = os.stat(os.path.join(root, file))
    # Two installations of one Python differ in times, not in content.
    changed = 0 if is_stdlib else status.st_mtime_ns
    stamps.update(f'{file}\0{status.st_size}\0{changed}\n'.encode())
  identity = stamps.hexdigest()
  if is_stdlib:
    identity = f'{platform.python_implementation()} {sys.version} {identity}'
  return Listing(path, root, tuple(patterns), tuple(files), identity)


def prepare_corpus(
  listing: Listing,
  *,
  join: str,
  validation_fraction: float,
  directory: str,
) -> str:
  """Builds the dataset of a folder, unless it is there already.

  Args:
    listing: the folder.
    join: 'file' or 'package'; see `collect_documents`.
    validation_fraction: share of the documents that are held out.
    directory: where prepared folders live.

  Returns:
    The folder that `tfds.builder_from_directory` takes.

  Raises:
    ConfigError: fewer than two documents can be made, a file cannot be read,
      or the files changed while they were read.
    DamagedCacheError: the dataset was prepared earlier and is gone.
  """

  def build(partial: str) -> dict[str, Any]:
    documents, skipped = collect_documents(listing, join)
    splits = split_documents(documents, validation_fraction)
    builder = TextCorpus(listing=listing, splits=splits, data_dir=partial)
    # The library announces a download, which this is not.
    tfds.display_progress_bar(False)
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare()
    if list_folder(listing.path, listing.patterns) != listing:
      raise _changed(listing, 'its files')
    return {
      'dataset': os.path.relpath(builder.data_path, partial),
      'documents': {split: len(d) for split, d in splits.items()},
      'skipped_files': skipped,
    }

  key = corpus_key(listing, join, validation_fraction)
  path = os.path.join(directory, f'corpus-{key}')
  meta = cache.build_directory(path, build)
  dataset = os.path.join(path, meta['dataset'])
  if not os.path.isdir(dataset):
    raise cache.DamagedCacheError(
      f'{path}: the dataset {meta["dataset"]} is missing; delete the directory '
      'to have it built again'
    )
  return dataset


def corpus_key(listing: Listing, join: str, validation_fraction: float) -> str:
  """Returns a key that changes with anything that changes the dataset."""
  return cache.digest(
    {
      'version': _VERSION,
      'files': listing.identity,
      'excluded': STDLIB_EXCLUDED if listing.path == STDLIB else (),
      'join': join,
      'validation_fraction': validation_fraction,
    }
  )


@dataclasses.dataclass(frozen=True)
class DocumentFiles:
  """A document to be made: its path, its package and its files."""

  path: str
  package: str
  files: tuple[str, ...]


def collect_documents(
  listing: Listing, join: str
) -> tuple[list[DocumentFiles], dict[str, int]]:
  """Decides which files make which document.

  A package is a folder at the top of the listing, with all below it; a file
  at the top is a package by itself. 'file' makes a document of every file,
  'package' one of every package.

  Returns:
    The documents by path, and how many files were left out and why.

  Raises:
    ConfigError: fewer than two documents, for one must train and one validate.
  """
  members: dict[str, list[str]] = {}
  skipped = {'undecodable': 0, 'empty': 0}
  for file in listing.files:
    text = _read(listing, file)
    if text is None:
      skipped['undecodable'] += 1
    elif not text.strip():
      skipped['empty'] += 1
    else:
      name = file if join == 'file' else _package_of(file)
      members.setdefault(name, []).append(file)
  if skipped['undecodable']:
    logging.warning(
      '%s: skipped %d files that are not UTF-8',
      listing.path,
      skipped['undecodable'],
    )
  if len(members) < 2:
    raise ConfigError(
      f'data.sources[].path={listing.path!r}: {len(members)} documents come of '
      f'the {len(listing.files)} files that match patterns='
      f'{listing.patterns} with join={join!r} ({skipped["undecodable"]} are '
      f'not UTF-8, {skipped["empty"]} are empty); accepted are at least 2, one '
      'to train on and one to validate'
    )
  documents = [
    DocumentFiles(name, _package_of(files[0]), tuple(files))
    for name, files in sorted(members.items())
  ]
  return documents, skipped


def split_documents(
  documents: list[DocumentFiles], validation_fraction: float
) -> dict[str, list[DocumentFiles]]:
  """Holds out the documents whose path hashes below the fraction.

  Whether a document is held out depends on its path alone, so adding files
  moves no other. Only where that would leave a side empty, the document
  with the least (or greatest) hash goes over.
  """
  ranked = sorted(documents, key=lambda d: _hash_fraction(d.path))
  count = sum(_hash_fraction(d.path) < validation_fraction for d in ranked)
  count = min(max(count, 1), len(ranked) - 1)
  return {'train': ranked[count:], 'validation': ranked[:count]}


class TextCorpus(tfds.core.GeneratorBasedBuilder):
  """Documents of a folder, with their path and package.

  The file format is always array_record: it needs no TensorFlow, and the
  library's parquet writer drops rows.
  """

  VERSION = tfds.core.Version('1.0.0')

  def __init__(
    self,
    *,
    listing: Listing,
    splits: dict[str, list[DocumentFiles]],
    **kwargs: Any,
  ):
    self._listing = listing
    self._splits = splits
    super().__init__(**{**kwargs, 'file_format': 'array_record'})

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description='Documents made of the files of a folder.',
      features=tfds.features.FeaturesDict(
        {
          'text': tfds.features.Text(),
          'path': tfds.features.Text(),
          'package': tfds.features.Text(),
        }
      ),
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # nothing is downloaded
    return {
      split: self._generate_examples(documents)
      for split, documents in self._splits.items()
    }

  def _generate_examples(
    self, documents: list[DocumentFiles]
  ) -> Iterator[tuple[str, dict[str, str]]]:
    for document in documents:
      texts = {file: _read(self._listing, file) for file in document.files}
      if any(text is None for text in texts.values()):
        raise _changed(self._listing, document.path)
      if document.files == (document.path,):
        text = texts[document.path]
      else:
        text = join_files(texts)
      yield (
        document.path,
        {'text': text, 'path': document.path, 'package': document.package},
      )


def join_files(texts: dict[str, str]) -> str:
  """Joins files, imported ones first, each under a line '# <path>'."""
  parts = []
  for path in order_by_imports(texts):
    text = texts[path]
    ending = '' if text.endswith('\n') else '\n'
    parts.append(f'# {path}\n{text}{ending}')
  return ''.join(parts)


def _walk(root: str, excluded: tuple[str, ...]) -> Iterator[str]:
  def is_kept(name: str) -> bool:
    return (
      not name.startswith('.')
      and name != '__pycache__'
      and not any(fnmatch.fnmatchcase(name, pattern) for pattern in excluded)
    )

  for folder, subfolders, names in os.walk(root, onerror=_reraise):
    subfolders[:] = [name for name in subfolders if is_kept(name)]
    relative = os.path.relpath(folder, root).replace(os.sep, '/')
    prefix = '' if relative == '.' else relative + '/'
    for name in names:
      if is_kept(name) and os.path.isfile(os.path.join(folder, name)):
        yield prefix + name


def _reraise(error: OSError) -> None:
  raise error


def _read(listing: Listing, file: str) -> str | None:
  """Returns a file's text, or None if it is not UTF-8."""
  try:
    with open(os.path.join(listing.root, file), 'rb') as handle:
      content = handle.read()
  except OSError as error:
    raise _unreadable(listing.path, error) from error
  try:
    return content.decode('utf-8')
  except UnicodeDecodeError:
    return None


def _unreadable(path: str, error: OSError) -> ConfigError:
  return ConfigError(
    f'data.sources[].path={path!r}: accepted is a folder whose files can be '
    f'read ({error}); patterns can leave some out'
  )


def _changed(listing: Listing, what: str) -> ConfigError:
  return ConfigError(
    f'data.sources[].path={listing.path!r}: {what} changed while they were '
    'read; accepted is a folder that stays as it is; start again'
  )


def _package_of(file: str) -> str:
  first, *rest = file.split('/')
  return first if rest else os.path.splitext(first)[0]


def _hash_fraction(path: str) -> float:
  return int(hashlib.sha256(path.encode()).hexdigest()[:12], 16) / 16**12
