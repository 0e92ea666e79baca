"""Preparing a stage: once, whole, by one process; damage is named."""

import itertools
import os
import subprocess
import sys
from unittest import mock

from absl.testing import absltest

from hybrid_moe.checks import ConfigError
from hybrid_moe.config import StageConfig
from hybrid_moe.data import row_store
from hybrid_moe.data.cache import DamagedCacheError
from hybrid_moe.data.pipeline import prepare_stage
from hybrid_moe.data.tokenizer import ByteTokenizer
from hybrid_moe.data_config import DataConfig, MixtureEntry, SourceConfig

_SEQ_LEN = 64

_PREPARE = """
import sys
sys.path = {path!r}
from hybrid_moe.config import StageConfig
from hybrid_moe.data.pipeline import prepare_stage
from hybrid_moe.data.tokenizer import ByteTokenizer
from hybrid_moe.data_config import DataConfig, MixtureEntry, SourceConfig

data = DataConfig(sources=(SourceConfig(name='files', path={folder!r}),))
stage = StageConfig(
  name='s',
  seq_len=64,
  global_batch=4,
  budget_share=1.0,
  mixture=(MixtureEntry('files'),),
)
sys.stdin.readline()
stage_data = prepare_stage(data, stage, ByteTokenizer(), {data_dir!r})
print(next(stage_data.train_batches(0))['tokens'].sum())
"""


def _rows(batch):
  """Rows of a batch as comparable values."""
  return [
    tuple(batch[name][i].tobytes() for name in sorted(batch))
    for i in range(len(batch['tokens']))
  ]


def _count(row_files):
  return sum(len(rows) for rows in row_files)


class StagePreparationTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.texts = {
      f'pkg/m{i:02d}.py': ''.join(
        f'value_{i:02d}_{j:03d} = {i * j}\n' for j in range(3 * i + 1)
      )
      for i in range(40)
    }

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    for name, text in self.texts.items():
      path = os.path.join(self.folder, name)
      os.makedirs(os.path.dirname(path), exist_ok=True)
      with open(path, 'w') as file:
        file.write(text)
    self.data_dir = self.create_tempdir().full_path

  def _prepare(self, mixture=None, seq_len=_SEQ_LEN, **kwargs):
    data = DataConfig(
      sources=(
        SourceConfig(name='files', path=self.folder),
        SourceConfig(name='copies', kind='synthetic', task='copy'),
      ),
      validation_fraction=0.2,
    )
    stage = StageConfig(
      name='short',
      seq_len=seq_len,
      global_batch=8,
      budget_share=1.0,
      mixture=mixture
      or (MixtureEntry('files', 0.75), MixtureEntry('copies', 0.25)),
    )
    return prepare_stage(data, stage, ByteTokenizer(), self.data_dir, **kwargs)

  def _row_files(self):
    return sorted(
      os.path.join(self.data_dir, name, 'rows.array_record')
      for name in os.listdir(self.data_dir)
      if name.startswith('rows-') and not name.endswith('.lock')
    )

  def test_damaged_record_is_named_where_it_is_drawn(self):
    self._prepare(mixture=(MixtureEntry('files'),))
    path = max(self._row_files(), key=os.path.getsize)
    size = os.path.getsize(path)
    with open(path, 'r+b') as file:
      content = bytearray(file.read())
      # Records of some 100 bytes lie at the beginning of each 64 KiB.
      content[150] ^= 0xFF
      file.seek(0)
      file.write(content)
    self.assertEqual(os.path.getsize(path), size)
    stage_data = self._prepare(mixture=(MixtureEntry('files'),))
    steps = -(-_count(stage_data.train) // 8)
    batches = stage_data.train_batches(0)
    with self.assertRaisesRegex(
      DamagedCacheError, f'{path}: record [0-9]+ is damaged'
    ):
      for _ in range(steps):
        next(batches)
    batches.close()

  def test_damaged_tokens_are_noticed_before_packing(self):
    self._prepare(mixture=(MixtureEntry('files'),))
    for name in os.listdir(self.data_dir):
      path = os.path.join(self.data_dir, name, 'tokens.bin')
      if name.startswith('tokens-files') and os.path.exists(path):
        with open(path, 'r+b') as file:
          file.write(b'!')
    with self.assertRaisesRegex(DamagedCacheError, 'tokens-files.*checksum'):
      self._prepare(mixture=(MixtureEntry('files'),), seq_len=128)

  def test_lost_row_file_is_named(self):
    self._prepare(mixture=(MixtureEntry('files'),))
    path = self._row_files()[0]
    os.remove(path)
    with self.assertRaisesRegex(DamagedCacheError, path):
      self._prepare(mixture=(MixtureEntry('files'),))

  def test_a_changed_file_makes_other_rows(self):
    mixture = (MixtureEntry('files'),)
    before = self._prepare(mixture=mixture)
    path = os.path.join(self.folder, 'pkg', 'm00.py')
    with open(path, 'a') as file:
      file.write('added = 1\n')
    after = self._prepare(mixture=mixture)
    tokens = [
      sum(
        d.report['sources']['files'][split]['tokens']
        for split in ('train', 'validation')
      )
      for d in (before, after)
    ]
    self.assertEqual(tokens[1] - tokens[0], len('added = 1\n'))

  def test_everything_that_decides_rows_is_in_their_key(self):
    class OtherTokenizer(ByteTokenizer):
      identity = 'other'

    def path(tokenizer, seq_len=64, identity='a', **filters):
      source = mock.Mock(identity=identity)
      source.name = 'files'
      entry = MixtureEntry('files', **filters)
      return row_store.rows_path(source, entry, tokenizer, seq_len, 'data')

    tokenizer = ByteTokenizer()
    paths = [
      path(tokenizer),
      path(OtherTokenizer()),
      path(tokenizer, seq_len=65),
      path(tokenizer, identity='b'),
      path(tokenizer, min_document_tokens=2),
      path(tokenizer, max_document_tokens=2),
    ]
    self.assertLen(set(paths), len(paths))
    self.assertEqual(path(tokenizer, weight=3.0), paths[0])

  def test_only_process_0_prepares(self):
    calls = []
    with self.assertRaisesRegex(DamagedCacheError, 'Process 0 prepares them'):
      self._prepare(process_index=1, barrier=calls.append)
    self.assertEqual(calls, ['prepare_stage/short'])
    self.assertEmpty(os.listdir(self.data_dir))
    # While process 1 waits at the barrier, process 0 prepares.
    waited = self._prepare(
      process_index=1, barrier=lambda name: self._prepare()
    )
    self.assertEqual(
      _rows(next(waited.train_batches(2))),
      _rows(next(self._prepare().train_batches(2))),
    )

  def test_an_error_on_process_0_lets_the_others_go(self):
    calls = []
    with self.assertRaises(ConfigError):
      self._prepare(
        mixture=(MixtureEntry('files', min_document_tokens=10**6),),
        barrier=calls.append,
      )
    self.assertEqual(calls, ['prepare_stage/short'])

  def test_an_interrupted_preparation_leaves_nothing_to_be_trusted(self):
    written = row_store.records.write_rows

    def interrupt(path, rows):
      written(path, itertools.islice(rows, 3))
      raise KeyboardInterrupt

    with (
      mock.patch.object(row_store.records, 'write_rows', interrupt),
      self.assertRaises(KeyboardInterrupt),
    ):
      self._prepare()
    self.assertEmpty(self._row_files())
    rows = _count(self._prepare().train)
    self.data_dir = self.create_tempdir().full_path
    self.assertEqual(rows, _count(self._prepare().train))

  def test_two_joins_of_one_folder_are_warned_of(self):
    sources = (
      SourceConfig(name='files', path=self.folder),
      SourceConfig(name='packages', path=self.folder, join='package'),
    )
    stage = StageConfig(
      name='s',
      seq_len=_SEQ_LEN,
      global_batch=1,
      budget_share=1.0,
      mixture=(MixtureEntry('files'),),
    )
    with self.assertLogs('absl', 'WARNING') as logs:
      prepare_stage(
        DataConfig(sources=sources), stage, ByteTokenizer(), self.data_dir
      )
    self.assertIn("'files' and 'packages'", logs.output[0])

  def test_two_processes_prepare_at_once(self):
    program = _PREPARE.format(
      path=sys.path, folder=self.folder, data_dir=self.data_dir
    )
    processes = [
      subprocess.Popen(
        [sys.executable, '-c', program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
      for _ in range(2)
    ]
    for process in processes:
      process.stdin.write('go\n')
      process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    self.assertEqual([p.returncode for p in processes], [0, 0])
    self.assertEqual(outputs[0], outputs[1])
    names = [n for n in os.listdir(self.data_dir) if not n.endswith('.lock')]
    self.assertLen(names, 5)  # a corpus, tokens and rows of both splits

  def test_unknown_and_doubled_sources(self):
    with self.assertRaisesRegex(ConfigError, "'web'.*'copies', 'files'"):
      self._prepare(mixture=(MixtureEntry('web'),))
    with self.assertRaisesRegex(ConfigError, 'at most once'):
      self._prepare(mixture=(MixtureEntry('files'), MixtureEntry('files')))

  def test_folder_that_cannot_be_written_to(self):
    self.data_dir = os.path.join(self.folder, 'pkg', 'm00.py', 'data')
    with self.assertRaisesRegex(ConfigError, 'data.data_dir=.*m00.py'):
      self._prepare()


if __name__ == '__main__':
  absltest.main()
