"""Folders as datasets: what becomes a document, how it is joined and split."""

import builtins
import os
import shutil
import sys
from unittest import mock

import tensorflow_datasets as tfds
from absl.testing import absltest, parameterized

from hybrid_moe.checks import ConfigError
from hybrid_moe.data import cache, corpus
from hybrid_moe.data.import_order import order_by_imports


def _write(root: str, files: dict[str, str | bytes]) -> None:
  for name, content in files.items():
    path = os.path.join(root, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if isinstance(content, str):
      content = content.encode()
    with open(path, 'wb') as file:
      file.write(content)


class CorpusTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = self.create_tempdir().full_path
    self.cache = self.create_tempdir().full_path

  def _prepare(self, patterns=('*.py',), join='file', fraction=0.3):
    listing = corpus.list_folder(self.root, patterns)
    directory = corpus.prepare_corpus(
      listing,
      join=join,
      validation_fraction=fraction,
      directory=self.cache,
    )
    builder = tfds.builder_from_directory(directory)
    self.assertEqual(builder.info.file_format.value, 'array_record')
    return {
      split: {
        e['path'].decode(): {k: v.decode() for k, v in e.items()}
        for e in builder.as_data_source(split=split)
      }
      for split in ('train', 'validation')
    }

  def _texts(self, **kwargs):
    splits = self._prepare(**kwargs)
    self.assertEmpty(set(splits['train']) & set(splits['validation']))
    return {
      path: example['text']
      for documents in splits.values()
      for path, example in documents.items()
    }

  def test_files_become_documents(self):
    files = {f'pkg/sub/m{i}.py': f'x = {i}  # ü\n' for i in range(5)}
    files['top.py'] = 'y = 1\n'
    _write(self.root, files)
    self.assertEqual(self._texts(), files)
    documents = {}
    for split in self._prepare().values():
      documents.update(split)
    self.assertEqual(documents['pkg/sub/m0.py']['package'], 'pkg')
    self.assertEqual(documents['top.py']['package'], 'top')

  def test_patterns_and_what_is_left_out(self):
    kept = {'a.py': 'a', 'b.txt': 'b', 'docs/c.md': 'c'}
    _write(self.root, kept)
    _write(
      self.root,
      {
        'other.rst': 'x',
        'd.md': 'only below docs',
        '.git/x.py': 'x',
        '.hidden.py': 'x',
        'pkg/__pycache__/x.py': 'x',
        'empty.py': ' \n',
        'latin.py': 'x = "é"'.encode('latin-1'),
      },
    )
    patterns = ('*.py', '*.txt', 'docs/*.md')
    with self.assertLogs('absl', 'WARNING') as logs:
      self.assertEqual(self._texts(patterns=patterns), kept)
    self.assertIn('skipped 1 files that are not UTF-8', logs.output[0])

  @parameterized.parameters(
    ({}, '0 documents come of the 0 files'),
    ({'a.py': 'x'}, '1 documents come of the 1 files'),
    ({'a.txt': 'x', 'b.txt': 'x'}, '0 documents come of the 0 files'),
    (
      {'a.py': b'\xff', 'b.py': '', 'c.py': 'x'},
      '1 are not UTF-8, 1 are empty',
    ),
  )
  def test_too_few_documents(self, files, message):
    _write(self.root, files)
    with self.assertRaises(ConfigError) as caught:
      self._prepare()
    for part in (self.root, "patterns=('*.py',)", message):
      self.assertIn(part, str(caught.exception))
    self.assertEmpty([n for n in os.listdir(self.cache) if 'lock' not in n])

  def test_missing_folder(self):
    with self.assertRaisesRegex(ConfigError, 'nowhere.*accepted is a folder'):
      corpus.list_folder('nowhere', ('*',))

  def test_held_out_share_depends_on_the_path_alone(self):
    files = {f'm{i}.py': 'x' for i in range(400)}
    _write(self.root, files)
    before = self._prepare(fraction=0.1)
    self.assertBetween(len(before['validation']), 25, 55)
    _write(self.root, {f'n{i}.py': 'y' for i in range(50)})
    after = self._prepare(fraction=0.1)
    for split, documents in before.items():
      self.assertContainsSubset(set(documents), set(after[split]))

  @parameterized.parameters(1e-6, 1 - 1e-6)
  def test_neither_side_is_empty(self, fraction):
    _write(self.root, {f'm{i}.py': 'x' for i in range(4)})
    for documents in self._prepare(fraction=fraction).values():
      self.assertNotEmpty(documents)

  def test_packages_are_joined_in_import_order(self):
    _write(
      self.root,
      {
        'pkg/__init__.py': 'from pkg import a\n',
        'pkg/a.py': 'from . import z\nA = 1',
        'pkg/z.py': 'import os\n',
        'solo.py': 'S = 1\n',
      },
    )
    texts = self._texts(join='package')
    self.assertEqual(
      texts,
      {
        'pkg': '# pkg/z.py\nimport os\n'
        '# pkg/a.py\nfrom . import z\nA = 1\n'
        '# pkg/__init__.py\nfrom pkg import a\n',
        'solo': '# solo.py\nS = 1\n',
      },
    )

  def test_is_prepared_once_and_again_when_a_file_changes(self):
    _write(self.root, {'a.py': 'a', 'b.py': 'b'})
    self._prepare()
    (first,) = [n for n in os.listdir(self.cache) if 'lock' not in n]
    before = os.stat(os.path.join(self.cache, first)).st_mtime_ns
    self._prepare()
    self.assertEqual(
      os.stat(os.path.join(self.cache, first)).st_mtime_ns, before
    )
    _write(self.root, {'a.py': 'changed'})
    self.assertEqual(self._texts(), {'a.py': 'changed', 'b.py': 'b'})

  def test_key_follows_everything(self):
    _write(self.root, {'a.py': 'a', 'b.py': 'b'})
    listing = corpus.list_folder(self.root, ('*',))
    keys = [
      corpus.corpus_key(listing, 'file', 0.1),
      corpus.corpus_key(listing, 'package', 0.1),
      corpus.corpus_key(listing, 'file', 0.2),
    ]
    os.utime(os.path.join(self.root, 'a.py'), (0, 0))
    listing = corpus.list_folder(self.root, ('*',))
    keys.append(corpus.corpus_key(listing, 'file', 0.1))
    _write(self.root, {'c.py': 'c'})
    listing = corpus.list_folder(self.root, ('*',))
    keys.append(corpus.corpus_key(listing, 'file', 0.1))
    self.assertLen(set(keys), 5)

  @parameterized.parameters((builtins, 'open'), (os, 'scandir'))
  def test_what_cannot_be_read_is_named(self, module, function):
    _write(self.root, {'a.py': 'a', 'b.py': 'b', 'c/d.py': 'd'})
    original = getattr(module, function)

    def refuse(path, *args, **kwargs):
      if str(path).endswith(('/b.py', '/c')):
        raise PermissionError(13, 'Permission denied', path)
      return original(path, *args, **kwargs)

    with (
      mock.patch.object(module, function, refuse),
      self.assertRaisesRegex(ConfigError, r"path='.*\(.*denied: .*/[bc]"),
    ):
      self._prepare()

  def test_a_file_that_goes_while_it_is_read_is_named(self):
    _write(self.root, {'a.py': 'a', 'b.py': 'b'})
    collect = corpus.collect_documents

    def collect_and_remove(listing, join):
      found = collect(listing, join)
      os.remove(os.path.join(self.root, 'b.py'))
      return found

    with (
      mock.patch.object(corpus, 'collect_documents', collect_and_remove),
      self.assertRaisesRegex(ConfigError, r'path=.*No such file.*b\.py'),
    ):
      self._prepare()

  def test_change_while_reading_is_an_error(self):
    _write(self.root, {'a.py': 'a', 'b.py': 'b'})
    listing = corpus.list_folder(self.root, ('*.py',))
    _write(self.root, {'c.py': 'c'})
    with self.assertRaisesRegex(ConfigError, 'changed while they were read'):
      corpus.prepare_corpus(
        listing,
        join='file',
        validation_fraction=0.1,
        directory=self.cache,
      )
    self.assertEmpty([n for n in os.listdir(self.cache) if 'lock' not in n])

  def test_a_lost_file_of_the_dataset_is_an_error_that_names_it(self):
    _write(self.root, {'a.py': 'a', 'b.py': 'b'})
    self._prepare()
    (name,) = [n for n in os.listdir(self.cache) if 'lock' not in n]
    shutil.rmtree(os.path.join(self.cache, name, 'text_corpus'))
    with self.assertRaisesRegex(cache.DamagedCacheError, name):
      self._prepare()

  def test_standard_library(self):
    listing = corpus.list_folder('stdlib', ('*.py',))
    self.assertIn(sys.version, listing.identity)
    self.assertContainsSubset(
      {'ast.py', 'json/decoder.py', 'asyncio/tasks.py'}, set(listing.files)
    )
    self.assertGreater(len(listing.files), 300)
    for file in listing.files:
      for part in file.split('/'):
        self.assertNotIn(
          part,
          (
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
            '__phello__',
            '__pycache__',
          ),
        )
        self.assertFalse(part.startswith(('config-', '_sysconfigdata')), file)


class ImportOrderTest(parameterized.TestCase):
  @parameterized.parameters(
    ('import p.b', 'import_dotted'),
    ('from p import b', 'from_package'),
    ('from p.b import thing', 'from_module'),
    ('from . import b', 'relative'),
    ('from .b import thing', 'relative_module'),
    ('def f():\n  import p.b', 'inside_a_function'),
    ('try:\n  import p.b as x\nexcept ImportError: pass', 'guarded'),
  )
  def test_what_is_imported_comes_first(self, statement, _):
    texts = {'p/__init__.py': '', 'p/a.py': statement, 'p/b.py': ''}
    order = order_by_imports(texts)
    self.assertCountEqual(order, texts)
    self.assertLess(order.index('p/b.py'), order.index('p/a.py'))

  def test_relative_imports_climb(self):
    texts = {
      'p/__init__.py': '',
      'p/a/__init__.py': '',
      'p/a/m.py': 'from ..z import f\nfrom .n import g',
      'p/a/n.py': '',
      'p/z.py': '',
    }
    order = order_by_imports(texts)
    self.assertLess(order.index('p/z.py'), order.index('p/a/m.py'))
    self.assertLess(order.index('p/a/n.py'), order.index('p/a/m.py'))

  def test_packages_below_a_folder_that_is_none(self):
    texts = {
      'src/p/__init__.py': '',
      'src/p/a.py': 'import p.b',
      'src/p/b.py': '',
    }
    order = order_by_imports(texts)
    self.assertLess(order.index('src/p/b.py'), order.index('src/p/a.py'))

  def test_a_long_chain(self):
    texts = {f'p/m{i:04d}.py': f'import p.m{i + 1:04d}' for i in range(3000)}
    self.assertEqual(order_by_imports(texts), sorted(texts, reverse=True))

  def test_cycles_are_broken_the_same_way_whatever_the_order(self):
    texts = {
      'p/a.py': 'import p.b',
      'p/b.py': 'import p.c',
      'p/c.py': 'import p.a, p.d',
      'p/d.py': '',
    }
    order = order_by_imports(texts)
    self.assertEqual(order, ['p/d.py', 'p/c.py', 'p/b.py', 'p/a.py'])
    self.assertEqual(order_by_imports(dict(reversed(texts.items()))), order)

  def test_what_does_not_parse_imports_nothing(self):
    texts = {
      'p/a.py': 'print "python 2"',
      'p/b.py': 'x = "\\d"\nimport p.c',
      'p/c.py': '\0',
      'p/notes.txt': 'import p.a',
    }
    order = order_by_imports(texts)
    self.assertCountEqual(order, texts)
    self.assertLess(order.index('p/c.py'), order.index('p/b.py'))


if __name__ == '__main__':
  absltest.main()
