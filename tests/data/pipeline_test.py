"""A stage's batches: exact from any position, on any number of processes."""

import itertools
import json
import os
import subprocess
import sys
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

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


def _take(batches, count):
  taken = [next(batches) for _ in range(count)]
  batches.close()
  return taken


class PipelineTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Every line is distinct, and so is every row: no batch equals another
    # by chance.
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

  def _prepare(
    self,
    mixture=None,
    seed=0,
    global_batch=8,
    seq_len=_SEQ_LEN,
    name='short',
    fraction=0.2,
    **kwargs,
  ):
    data = DataConfig(
      sources=(
        SourceConfig(name='files', path=self.folder),
        SourceConfig(name='copies', kind='synthetic', task='copy'),
      ),
      validation_fraction=fraction,
      seed=seed,
    )
    stage = StageConfig(
      name=name,
      seq_len=seq_len,
      global_batch=global_batch,
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

  def test_shapes_and_types(self):
    stage_data = self._prepare()
    (batch,) = _take(stage_data.train_batches(0), 1)
    for name in ('tokens', 'targets', 'segment_ids', 'loss_mask'):
      self.assertEqual(batch[name].shape, (8, _SEQ_LEN))
      dtype = bool if name == 'loss_mask' else np.int32
      self.assertEqual(batch[name].dtype, dtype)
    self.assertEqual(batch['source_ids'].shape, (8,))
    self.assertEqual(batch['source_ids'].dtype, np.int32)
    self.assertEqual(stage_data.source_names, ('files', 'copies'))
    np.testing.assert_array_equal(batch['loss_mask'], batch['segment_ids'] > 0)

  def test_rows_hold_the_documents(self):
    stage_data = self._prepare(mixture=(MixtureEntry('files'),))
    train = _take(stage_data.train_batches(0), -(-stage_data.train_rows // 8))
    validation = stage_data.validation_batches(
      -(-stage_data.validation_rows // 8)
    )
    found = set()
    for batch in train + validation:
      for row, segments in zip(batch['tokens'], batch['segment_ids']):
        for segment in range(1, segments.max() + 1):
          found.add(ByteTokenizer().decode(row[segments == segment]))
    texts = list(self.texts.values())
    for text in found:
      self.assertTrue(any(text in whole for whole in texts))
    # The first is short enough for a row; the last begins with its first 63
    # characters after the begin mark.
    self.assertIn(texts[0], found)
    self.assertIn(texts[-1][: _SEQ_LEN - 1], found)

  def test_same_seed_same_batches(self):
    first = _take(self._prepare().train_batches(0), 5)
    again = _take(self._prepare().train_batches(0), 5)
    other = _take(self._prepare(seed=1).train_batches(0), 5)
    renamed = _take(self._prepare(name='other').train_batches(0), 5)
    for a, b in zip(first, again):
      self.assertEqual(_rows(a), _rows(b))
    for unlike in (other, renamed):
      self.assertNotEqual(_rows(first[0]), _rows(unlike[0]))

  @parameterized.product(count=[1, 2, 4], position=[1, 17])
  def test_resumes_exactly_on_any_number_of_processes(self, count, position):
    stage_data = self._prepare()
    whole = _take(stage_data.train_batches(0), position + 3)[position:]
    shares = [
      _take(
        stage_data.train_batches(
          position, process_index=i, process_count=count
        ),
        3,
      )
      for i in range(count)
    ]
    for step in range(3):
      rows = [row for share in shares for row in _rows(share[step])]
      self.assertEqual(rows, _rows(whole[step]))

  def test_mixture_proportions(self):
    stage_data = self._prepare()
    ids = np.concatenate(
      [b['source_ids'] for b in _take(stage_data.train_batches(3), 20)]
    )
    self.assertAlmostEqual(np.mean(ids == 1), 0.25, delta=0.02)
    ids = np.concatenate(
      [b['source_ids'] for b in stage_data.validation_batches(4)]
    )
    self.assertEqual(np.bincount(ids).tolist(), [24, 8])

  def test_validation_is_fixed_and_shared_out(self):
    stage_data = self._prepare()
    whole = stage_data.validation_batches(3)
    self.assertLen(whole, 3)
    again = self._prepare().validation_batches(3)
    shares = [
      stage_data.validation_batches(3, process_index=i, process_count=4)
      for i in range(4)
    ]
    for step in range(3):
      self.assertEqual(_rows(whole[step]), _rows(again[step]))
      rows = [row for share in shares for row in _rows(share[step])]
      self.assertEqual(rows, _rows(whole[step]))

  def test_validation_wraps_and_never_meets_training(self):
    stage_data = self._prepare()
    batches = stage_data.validation_batches(40)
    validation = {row for batch in batches for row in _rows(batch)}
    self.assertLess(len(validation), 40 * 8)
    self.assertLen(validation, stage_data.validation_rows)
    steps = 2 * stage_data.train_rows // 8
    training = {
      row
      for batch in _take(stage_data.train_batches(0), steps)
      for row in _rows(batch)
    }
    self.assertGreater(len(training), stage_data.train_rows // 2)
    self.assertEmpty(training & validation)

  def test_every_source_validates_however_small_its_share(self):
    stage_data = self._prepare(
      mixture=(MixtureEntry('files', 1000.0), MixtureEntry('copies', 1.0)),
      global_batch=2,
    )
    (batch,) = stage_data.validation_batches(1)
    self.assertCountEqual(batch['source_ids'].tolist(), [0, 1])

  def test_report_is_true(self):
    stage_data = self._prepare(mixture=(MixtureEntry('files'),))
    report = json.loads(json.dumps(stage_data.report))
    count = stage_data.train_rows
    rows = [
      row
      for batch in _take(
        self._prepare(
          mixture=(MixtureEntry('files'),), global_batch=1
        ).train_batches(0),
        count,
      )
      for row in batch['loss_mask']
    ]
    targets = sum(int(row.sum()) for row in rows)
    train = report['sources']['files']['train']
    held_out = report['sources']['files']['validation']
    self.assertEqual(train['rows'], count)
    self.assertEqual(train['tokens'], targets)
    self.assertAlmostEqual(
      train['padding_waste'], 1 - targets / (count * _SEQ_LEN)
    )
    self.assertEqual(train['documents'] + held_out['documents'], 40)
    # A document of n bytes has n + 1 pairs with both marks.
    self.assertEqual(
      train['tokens'] + held_out['tokens'],
      sum(len(text) + 1 for text in self.texts.values()),
    )
    self.assertEqual(report['tokens'], targets)

  def test_length_filters(self):
    stage_data = self._prepare(
      mixture=(
        MixtureEntry(
          'files', min_document_tokens=500, max_document_tokens=1500
        ),
      ),
      seq_len=1500,
    )
    report = stage_data.report['sources']['files']['train']
    lengths = [len(text) + 2 for text in self.texts.values()]
    passing = sum(500 <= n <= 1500 for n in lengths)
    validating = stage_data.report['sources']['files']['validation']
    self.assertFalse(validating['filter_given_up'])
    self.assertEqual(report['documents'] + validating['documents'], passing)
    self.assertEqual(
      report['documents_left_out'] + validating['documents_left_out'],
      40 - passing,
    )
    steps = -(-stage_data.train_rows // 8)
    for batch in _take(stage_data.train_batches(0), steps):
      for segments in batch['segment_ids']:
        sizes = np.bincount(segments)[1:]
        self.assertTrue(((sizes >= 499) & (sizes < 1500)).all(), sizes)

  def test_filter_that_leaves_nothing_to_train_on(self):
    with self.assertRaisesRegex(
      ConfigError,
      r"mixture\['files'\].min_document_tokens=1000000.*no train document is "
      r'left of [0-9]+ \([0-9]+ to [0-9]+ tokens long\)',
    ):
      self._prepare(mixture=(MixtureEntry('files', min_document_tokens=10**6),))

  def test_longest_documents_validate_when_none_passes(self):
    lengths = {n: len(t) + 2 for n, t in self.texts.items()}
    longest = max(lengths.values())
    # A fraction that holds out very few documents, none of them the longest.
    with self.assertLogs('absl', 'WARNING') as logs:
      stage_data = self._prepare(
        mixture=(MixtureEntry('files', min_document_tokens=longest),),
        fraction=0.01,
      )
    self.assertIn('validate instead', logs.output[0])
    report = stage_data.report['sources']['files']
    self.assertTrue(report['validation']['filter_given_up'])
    self.assertFalse(report['train']['filter_given_up'])
    self.assertEqual(report['train']['documents'], 1)
    self.assertNotEmpty(stage_data.validation_batches(2))

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
    steps = -(-stage_data.train_rows // 8)
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
    rows = self._prepare().train_rows
    self.data_dir = self.create_tempdir().full_path
    self.assertEqual(rows, self._prepare().train_rows)

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

  def test_batch_that_processes_cannot_share(self):
    stage_data = self._prepare()
    with self.assertRaisesRegex(ConfigError, 'global_batch=8.*processes, 3'):
      stage_data.train_batches(0, process_count=3)
    with self.assertRaisesRegex(ConfigError, 'process_index=2'):
      stage_data.validation_batches(1, process_index=2, process_count=2)
    with self.assertRaisesRegex(ConfigError, 'position=-1'):
      stage_data.train_batches(-1)

  def test_unknown_and_doubled_sources(self):
    with self.assertRaisesRegex(ConfigError, "'web'.*'copies', 'files'"):
      self._prepare(mixture=(MixtureEntry('web'),))
    with self.assertRaisesRegex(ConfigError, 'at most once'):
      self._prepare(mixture=(MixtureEntry('files'), MixtureEntry('files')))

  def test_folder_that_cannot_be_written_to(self):
    self.data_dir = os.path.join(self.folder, 'pkg', 'm00.py', 'data')
    with self.assertRaisesRegex(ConfigError, 'data.data_dir=.*m00.py'):
      self._prepare()

  def test_standard_library_at_two_lengths(self):
    for seq_len in (512, 2048):
      stage = StageConfig(
        name='default', seq_len=seq_len, global_batch=4, budget_share=1.0
      )
      stage_data = prepare_stage(
        DataConfig(), stage, ByteTokenizer(), self.data_dir
      )
      self.assertGreater(stage_data.report['tokens'], 3_000_000)
      self.assertLess(stage_data.report['padding_waste'], 0.02)
      self.assertGreater(stage_data.validation_rows, 20)


if __name__ == '__main__':
  absltest.main()
