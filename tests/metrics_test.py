"""Records survive kills; names and utilisation are right."""

import io
import json
import math
import pathlib
from unittest import mock

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe import metrics
from hybrid_moe.metrics import MetricsWriter, read_metrics
from hybrid_moe.progress import Progress


def _train(writer, steps, seconds=1.0):
  for step in steps:
    writer.write(
      step,
      metrics.TRAIN,
      {metrics.LOSS: 5.0 / step, metrics.STAGE: '8k'},
      {metrics.STEP_SECONDS: seconds},
    )
    if step % 2 == 0:
      writer.write(step, metrics.EVAL, {metrics.LOSS: 6.0 / step})


class MetricsTest(chex.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = self.create_tempdir().full_path
    self._path = pathlib.Path(self._dir) / metrics.FILE_NAME

  def _without_perf(self):
    records = read_metrics(self._dir)
    return [{k: v for k, v in r.items() if k != metrics.PERF} for r in records]

  @parameterized.parameters('', '{"step": 6, "ki', '{"step": 6, "kind": "x"}')
  def test_killed_and_resumed_run_leaves_the_same_records(self, half_line):
    with MetricsWriter(self._dir, 0) as writer:
      _train(writer, range(1, 9))
    expected = self._without_perf()
    self._path.unlink()
    with MetricsWriter(self._dir, 0) as writer:
      _train(writer, range(1, 6))
    with open(self._path, 'a') as file:
      file.write(half_line)
    with MetricsWriter(self._dir, 4) as writer:
      self.assertEqual(self._without_perf()[-1]['step'], 4)
      _train(writer, range(5, 9), seconds=2.0)
    self.assertEqual(self._without_perf(), expected)
    self.assertEqual(read_metrics(self._dir)[-2]['perf'], {'step_s': 2.0})

  def test_rewinding_drops_later_records(self):
    with MetricsWriter(self._dir, 0) as writer:
      _train(writer, range(1, 8))
      writer.rewind(3)
      writer.write(3, metrics.EVENT, {metrics.EVENT: metrics.ROLLBACK})
      _train(writer, [4])
    self.assertEqual(
      [(r['step'], r['kind']) for r in read_metrics(self._dir)],
      [
        (1, 'train'),
        (2, 'train'),
        (2, 'eval'),
        (3, 'train'),
        (3, 'event'),
        (4, 'train'),
        (4, 'eval'),
      ],
    )

  def test_a_record_is_on_disk_as_soon_as_it_is_written(self):
    writer = MetricsWriter(self._dir, 0)
    self.addCleanup(writer.close)
    writer.write(1, metrics.TRAIN, {metrics.LOSS: 1.0})
    self.assertEqual(
      read_metrics(str(self._path)), [{'step': 1, 'kind': 'train', 'loss': 1.0}]
    )

  def test_every_line_is_strict_json_with_numbers_that_are_not_finite(self):
    with MetricsWriter(self._dir, 0) as writer:
      writer.write(
        1,
        metrics.TRAIN,
        {
          metrics.LOSS: jnp.float32(jnp.nan),
          metrics.GRAD_NORM: np.float32(np.inf),
          metrics.SKIPPED: np.bool_(True),
          metrics.BY_POSITION: {'edges': np.arange(2), 'loss': [-math.inf, 1]},
        },
      )
    (line,) = self._path.read_text().splitlines()

    def refuse(name):
      raise AssertionError(name)

    self.assertEqual(
      json.loads(line, parse_constant=refuse),
      {
        'step': 1,
        'kind': 'train',
        'loss': 'nan',
        'grad_norm': 'inf',
        'skipped': True,
        'by_position': {'edges': [0, 1], 'loss': ['-inf', 1]},
      },
    )
    (record,) = read_metrics(self._dir)
    self.assertTrue(math.isnan(record['loss']))
    self.assertEqual(record['by_position']['loss'], [-math.inf, 1])

  def test_a_bad_line_that_is_not_the_last_is_an_error(self):
    self._path.write_text('{"step": 1}\nnot a record\n{"step": 2}\n')
    with self.assertRaisesRegex(ValueError, r'metrics\.jsonl:2'):
      read_metrics(self._dir)

  def test_rejects_unknown_kinds_and_reserved_names(self):
    with MetricsWriter(self._dir, 0) as writer:
      with self.assertRaisesRegex(ValueError, "kind='tain'"):
        writer.write(1, 'tain', {})
      with self.assertRaisesRegex(ValueError, 'perf'):
        writer.write(1, metrics.TRAIN, {'perf': {}})

  def test_sync_puts_records_on_disk(self):
    with (
      MetricsWriter(self._dir, -1) as writer,
      mock.patch.object(metrics.os, 'fsync') as fsync,
    ):
      writer.sync()
      fsync.assert_called_once()
    writer.sync()  # closed: nothing to do

  def test_tensorboard_files_are_written(self):
    with MetricsWriter(self._dir, 0) as writer:
      _train(writer, range(1, 3))
      writer.write_text(2, 'sample', 'def f(): pass')
    board = pathlib.Path(self._dir) / metrics.TENSORBOARD_DIR
    (file,) = board.iterdir()
    for name in (b'train/loss', b'train/perf/step_s', b'eval/loss'):
      self.assertIn(name, file.read_bytes())

  @parameterized.parameters(
    ('NVIDIA H100 80GB HBM3', 989e12),
    ('NVIDIA H200', 989e12),
    ('NVIDIA B200', 2250e12),
    ('NVIDIA A100-SXM4-40GB', 312e12),
    ('TPU v4', 275e12),
    ('TPU v5 lite', 197e12),
    ('TPU v5', 459e12),
    ('TPU v5p', 459e12),
    ('TPU v6 lite', 918e12),
    ('TPU7x', 1153.5e12),
    ('cpu', None),
  )
  def test_peak_by_device_kind(self, kind, expected):
    self.assertEqual(metrics.peak_flops(kind), expected)

  def test_mfu_is_the_share_of_all_devices_peak(self):
    self.assertAlmostEqual(
      metrics.mfu(6e9, 1e5, 'NVIDIA H100 80GB HBM3', 2), 6e14 / (2 * 989e12)
    )
    self.assertIsNone(metrics.mfu(6e9, 1e5, 'cpu', 2))


class _Terminal(io.StringIO):
  def isatty(self):
    return True


class ProgressTest(chex.TestCase):
  def test_lines_where_there_is_no_terminal(self):
    stream = io.StringIO()
    with Progress('8k', 4, first_step=1, stream=stream) as progress:
      for loss in (3.0, 2.0, 1.0):
        perf = progress.update(loss, tokens_per_s=1234.0, step_s=60.0)
    self.assertEqual(perf, {'step_s': 60.0, 'tokens_per_s': 1234.0})
    # The first and the last; those between came too soon.
    self.assertEqual(
      stream.getvalue().splitlines(),
      [
        '8k: step 2/4, loss 3.0000, 1,234 tokens/s, 02:00 left in the stage',
        '8k: step 4/4, loss 1.0000, 1,234 tokens/s, 00:00 left in the stage',
      ],
    )

  def test_bar_on_a_terminal(self):
    stream = _Terminal()
    with Progress(
      '64k',
      2,
      flops_per_token=989e12 / 1000,
      num_devices=2,
      device_kind='NVIDIA H100',
      stream=stream,
    ) as progress:
      perf = progress.update(2.5, tokens_per_s=1000.0, step_s=1.0)
      progress.update(2.5, tokens_per_s=1000.0, step_s=1.0)
    self.assertAlmostEqual(perf['mfu'], 0.5)
    for part in ('64k', '2/2', 'loss 2.5000', 'MFU 50.0%'):
      self.assertIn(part, stream.getvalue())


if __name__ == '__main__':
  absltest.main()
