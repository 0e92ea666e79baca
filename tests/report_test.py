"""Reports of whole runs, of runs cut short, and of none."""

import math
import pathlib

import chex
import matplotlib.image
import numpy as np
from absl.testing import absltest

from hybrid_moe import metrics, report
from hybrid_moe.memory_plan import MemoryReport

_FIGURES = ('loss.png', 'loss_by_position.png', 'expert_utilization.png')


def _eval(step, stage, is_end, loss):
  num_tokens = 8192 if stage == '8k' else 65536
  return {
    'step': step,
    'kind': metrics.EVAL,
    metrics.TOKENS: 1000 * step,
    metrics.STAGE: stage,
    metrics.IS_STAGE_END: is_end,
    metrics.LOSS: loss,
    metrics.BY_POSITION: {
      metrics.EDGES: [0, 64, 1024, num_tokens],
      metrics.LOSS: [loss + 1, loss, math.nan],
    },
    metrics.BY_SOURCE: {'code|py': loss, 'books': loss + 0.5},
    metrics.UTILIZATION: [[0.2, 0.3, 0.5, 0.0], [0.25] * 4],
  }


def _records():
  records = [
    {
      'step': step,
      'kind': metrics.TRAIN,
      metrics.TOKENS: 1000 * step,
      metrics.STAGE: '8k' if step <= 50 else '64k',
      metrics.LOSS: math.nan if step == 7 else 2 + 8 / step,
      metrics.SKIPPED: step == 7,
    }
    for step in range(1, 101)
  ]
  records.insert(50, _eval(50, '8k', True, 2.5))
  records.append(_eval(100, '64k', False, 2.25))
  for event, reason in (
    (metrics.ROLLBACK, 'loss was nan 3 times'),
    (metrics.DAMAGED_CHECKPOINT, 'step_00000100: checksum differs'),
    (metrics.DAMAGED_CHECKPOINT, 'step_00000100: checksum differs'),
  ):
    records.append(
      {
        'step': 40,
        'kind': metrics.EVENT,
        metrics.EVENT: event,
        metrics.REASON: reason,
      }
    )
  return records


def _facts():
  memory = MemoryReport(
    stage='8k',
    available=2**30,
    arguments=2**28,
    temporaries=2**27,
    outputs=0,
    aliased=0,
    code=0,
    peak=3 * 2**27,
  )
  return {
    report.NAME: 'tiny',
    report.IS_COMPLETE: True,
    report.DEVICES: '8 x cpu',
    report.BIGRAM_LOSS: 3.0,
    report.LOST_SKIPS: 2,
    report.SAMPLE: 'def f():\n  """```"""\n  return \x1b[0m1',
    report.STAGES: [
      {
        report.STAGE_NAME: '8k',
        report.SEQ_LEN: 8192,
        report.PARAMETERS: 1_234_567,
        report.ACTIVE_PARAMETERS: 234_567,
        report.FLOPS_PER_TOKEN: 1.5e6,
        report.MEMORY: memory,
        report.COMPILE_SECONDS: 12.34,
        report.STEPS: 50,
        report.STAGE_TOKENS: 50_000,
      },
      {report.STAGE_NAME: '64k', report.SEQ_LEN: 65536},
      {report.STAGE_NAME: '256k'},
    ],
  }


class ReportTest(chex.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = pathlib.Path(self.create_tempdir().full_path) / 'run'

  def _write(self, records, facts):
    return report.write_report(str(self._dir), records, facts).read_text()

  def test_whole_run(self):
    text = self._write(_records(), _facts())
    for part in (
      '# tiny',
      '100 steps, 100,000 tokens, training loss 2.0800, validation loss 2.2500',
      '| 8k | 8,192 | 1,234,567 | 234,567 | 1.5e+06 | 256.0 MiB | 128.0 MiB '
      '| 384.0 MiB | 62% | 12.3 |',
      '| stage | steps | tokens | validation loss | code\\|py | books |',
      '| 8k | 50 | 50,000 | 2.5000 | 2.5000 | 3.0000 |',
      '| 64k (not at its end) | – | – | 2.2500 | 2.2500 | 2.7500 |',
      '| 256k (not evaluated) | – | – | – | – | – |',
      'bigram model has a validation loss of 3.0000 nats; this run ends 0.7500 '
      'nats below it',
      'Skipped steps: 3 (7), 2 of them undone by roll-backs',
      'Roll-backs: 1\n  - at step 40: loss was nan 3 times',
      'Damaged checkpoints: 1\n  - at step 40: step\\_00000100: checksum',
    ):
      self.assertIn(part, text)
    self.assertNotIn('cut short', text)
    for name in _FIGURES:
      self.assertIn(f'({name})', text)
      pixels_HWC = matplotlib.image.imread(self._dir / name)
      self.assertGreater(min(pixels_HWC.shape[:2]), 300)
      self.assertGreater(np.std(pixels_HWC), 0.01)

  def test_sample_cannot_leave_its_fence(self):
    text = self._write([], _facts())
    block = text[text.index('````text\n') :]
    self.assertEqual(
      block,
      '````text\ndef f():\n  """```"""\n  return \ufffd[0m1\n````\n',
    )

  def test_figures_differ_with_the_records(self):
    self._write(_records(), _facts())
    before = {name: (self._dir / name).read_bytes() for name in _FIGURES}
    changed = _records()
    for record in changed:
      if record['kind'] == metrics.EVAL:
        record[metrics.UTILIZATION] = [[0.7, 0.1, 0.1, 0.1], [0.25] * 4]
        record[metrics.BY_POSITION][metrics.LOSS][1] += 0.5
        record[metrics.LOSS] += 0.5
    self._write(changed, _facts())
    for name in _FIGURES:
      self.assertNotEqual((self._dir / name).read_bytes(), before[name])

  def test_run_cut_short_before_its_first_evaluation(self):
    text = self._write(_records()[:3], {report.BIGRAM_LOSS: 3.0})
    for part in (
      'was cut short',
      '3 steps, 3,000 tokens',
      'programs of the stages were not recorded',
      '| 8k (not evaluated) | – | – | – |',
      'this run was not evaluated',
      'No record has a loss by position',
      'No record has the use of the experts',
      'No text was generated',
    ):
      self.assertIn(part, text)
    self.assertTrue((self._dir / 'loss.png').exists())
    self.assertFalse((self._dir / 'loss_by_position.png').exists())

  def test_nothing_at_all(self):
    text = self._write([], {})
    for part in (
      'was cut short',
      'No training step was recorded',
      'No stage was recorded',
      'No record has a loss.',
      'No bigram baseline',
      'Skipped steps: 0',
    ):
      self.assertIn(part, text)
    self.assertEqual([p.name for p in self._dir.iterdir()], ['report.md'])

  def test_losses_that_are_never_finite(self):
    records = [dict(r, **{metrics.LOSS: math.nan}) for r in _records()]
    text = self._write(records, {})
    self.assertIn('training loss not finite', text)
    text = self._write(records, {report.BIGRAM_LOSS: 3.0})
    self.assertIn('the loss of this run is not finite', text)
    self.assertIn('No record has a loss.', text)


if __name__ == '__main__':
  absltest.main()
