"""A stage's batches: exact from any position, on any number of processes."""

import json
import os

import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.checks import ConfigError
from hybrid_moe.config import StageConfig
from hybrid_moe.data.pipeline import prepare_stage
from hybrid_moe.data.tokenizer import ByteTokenizer
from hybrid_moe.data_config import DataConfig, MixtureEntry, SourceConfig

_SEQ_LEN = 64


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


def _count(row_files):
  return sum(len(rows) for rows in row_files)


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
    train = _take(
      stage_data.train_batches(0), -(-_count(stage_data.train) // 8)
    )
    validation = stage_data.validation_batches(
      -(-_count(stage_data.validation) // 8)
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
    self.assertLen(validation, _count(stage_data.validation))
    steps = 2 * _count(stage_data.train) // 8
    training = {
      row
      for batch in _take(stage_data.train_batches(0), steps)
      for row in _rows(batch)
    }
    self.assertGreater(len(training), _count(stage_data.train) // 2)
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
    count = _count(stage_data.train)
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
    steps = -(-_count(stage_data.train) // 8)
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

  def test_batch_that_processes_cannot_share(self):
    stage_data = self._prepare()
    with self.assertRaisesRegex(ConfigError, 'global_batch=8.*processes, 3'):
      stage_data.train_batches(0, process_count=3)
    with self.assertRaisesRegex(ConfigError, 'process_index=2'):
      stage_data.validation_batches(1, process_index=2, process_count=2)
    with self.assertRaisesRegex(ConfigError, 'position=-1'):
      stage_data.train_batches(-1)

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
      self.assertGreater(_count(stage_data.validation), 20)


if __name__ == '__main__':
  absltest.main()
