"""Stages one after another, bad steps, and prolonging.

Runs that are killed are in `kill_resume_test.py`.
"""

import dataclasses
import itertools
import os
import pathlib
import runpy
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

from hybrid_moe import metrics, stage_runner
from hybrid_moe.data import row_store
from hybrid_moe.health import RollbackError
from hybrid_moe.metrics import MetricsWriter
from hybrid_moe.optim.schedule import build_schedule
from hybrid_moe.preemption import PreemptionSignal
from hybrid_moe.run_config import ExtensionConfig

_RUNS = runpy.run_path(str(pathlib.Path(__file__).with_name('small_runs.py')))
_SMALL = _RUNS['SMALL']
RunCase = _RUNS['RunCase']
_SHORT, _LONG = _SMALL['STAGES']


@pytest.fixture(scope='module', autouse=True)
def _programs(tmp_path_factory):
  directory = _SMALL['programs_directory'](tmp_path_factory)
  with _SMALL['kept_programs'](directory):
    yield


class HandOverTest(RunCase):
  def test_two_stages(self):
    pathlib.Path(self.workdir, 'rollbacks.json').write_text(
      '{"rollbacks": [{"restored_step": 0, "data_position": 9, "reason": ""}]}'
    )
    evaluation = dataclasses.replace(self.config.eval, sample_tokens=4)
    result = self.run_with(eval=evaluation)
    with self.subTest('state'):
      self.assertTrue(result.is_complete)
      self.assertEqual(int(result.state.step), 16)
      self.assertEqual(int(result.state.stage_step), 8)
      self.assertEqual(result.position.tokens, 16 * 1024)
    with self.subTest('roll-backs of a run that is gone do not count'):
      self.assertEqual(self.starts, [(_SHORT, 0), (_LONG, 0)])
    trains = self.records(metrics.TRAIN)
    with self.subTest('records'):
      self.assertEqual(self.steps(trains), [*range(1, 17)])
      names = [r[metrics.STAGE] for r in trains]
      self.assertEqual(names, 8 * [_SHORT] + 8 * [_LONG])
    with self.subTest('learning rates'):
      expected = [
        float(schedule(step))
        for schedule in build_schedule(self.config.optim, (8, 8))
        for step in range(8)
      ]
      found = [r[metrics.LEARNING_RATE] for r in trains]
      np.testing.assert_allclose(found, expected, rtol=1e-6)
      self.assertAlmostEqual(max(found[8:]), 0.5 * max(found[:8]), places=6)
    with self.subTest('the second stage goes on from the first'):
      first, last, next_ = (trains[i][metrics.LOSS] for i in (0, 7, 8))
      self.assertLess(last, first - 1)
      self.assertLess(abs(next_ - last), 0.5)
    with self.subTest('evaluations'):
      evals = self.records(metrics.EVAL)
      self.assertEqual(self.steps(evals), [0, 4, 8, 12, 16])
      ends = [r[metrics.STEP] for r in evals if r[metrics.IS_STAGE_END]]
      self.assertEqual(ends, [8, 16])
      by_position = [r[metrics.BY_POSITION] for r in evals]
      self.assertEqual(by_position[2][metrics.EDGES], [0, 64])
      self.assertEqual(by_position[4][metrics.EDGES], [0, 64, 128])
      self.assertLen(by_position[4][metrics.LOSS], 2)
      self.assertEqual([*evals[0][metrics.BY_SOURCE]], ['words', 'recall'])
    with self.subTest('checkpoints: the last two, and a stage end'):
      self.assertEqual(
        self.saved(), ['step_00000008', 'step_00000015', 'step_00000016']
      )
    with self.subTest('report'):
      report = pathlib.Path(self.workdir, 'report.md').read_text()
      self.assertRegex(report, rf'\| {_SHORT} \| 8 \| 8,192 \|')
      self.assertRegex(report, rf'\| {_LONG} \| 8 \| 8,192 \|')
      self.assertRegex(report, r'bigram model has a validation loss of [1-5]\.')
      self.assertRegex(report, r'```text\ndef ')
      for name in ('loss', 'loss_by_position', 'expert_utilization'):
        self.assertGreater(
          os.path.getsize(os.path.join(self.workdir, f'{name}.png')), 1000
        )
    with self.subTest('lines where there is no terminal'):
      lines = self.output.getvalue()
      self.assertIn('short: step 8/8, loss ', lines)
      self.assertIn('stage long, step 16: validation loss ', lines)
      self.assertIn('skipped steps: 0', lines)

  def test_a_single_step_and_rare_records(self):
    """One step, no evaluations but at the end, nothing to balance."""
    stage = dataclasses.replace(
      self.config.stages[0], budget_share=1.0, micro_batches=2
    )
    changes = dict(
      stages=(stage,),
      stage_share_range=(0.1, 1.0),
      total_tokens=1024,
      log_every=2,
      eval=dataclasses.replace(self.config.eval, every_steps=0, num_batches=9),
      balance=dataclasses.replace(self.config.balance, method='none'),
    )
    self.assertTrue(self.run_with(**changes).is_complete)
    self.assertEqual(self.steps(self.records()), [0, 1])
    report = pathlib.Path(self.workdir, 'report.md').read_text()
    self.assertRegex(report, rf'\| {_SHORT} \| 1 \| 1,024 \|')
    with mock.patch.object(row_store, '_VERSION', 9):
      again = self.run_with(**changes)
    self.assertIn('continuing from step 1,', self.output.getvalue())
    self.assertIn(
      "warning: the data has changed since that step: stage 'short', source "
      "'words'",
      self.output.getvalue(),
    )
    self.assertEqual(int(again.state.step), 1)


class BadStepTest(RunCase):
  def test_one_spike_is_skipped(self):
    result = self.run_with(spoiled={5})
    trains = self.records(metrics.TRAIN)
    skipped = [r[metrics.STEP] for r in trains if r[metrics.SKIPPED]]
    self.assertEqual(skipped, [14])
    self.assertEqual(trains[-1]['skipped_total'], 1)
    self.assertEqual(int(result.state.health.skipped_total), 1)
    self.assertLess(trains[-1][metrics.LOSS], 4)
    self.assertEmpty(self.events())
    self.assertIn('skipped steps: 1', self.output.getvalue())

  def run_with_nan(self, stage, calls):
    """Runs with parameters that are nan in some calls of a stage's step."""

    def compile_faulty(config, index, num_sources):
      program = _RUNS['compile_once'](config, index, num_sources)
      if program.stage.name != stage:
        return program
      numbers = itertools.count(1)

      def step(state, batch):
        if next(numbers) not in calls:
          return program.step(state, batch)
        good = jax.tree.map(jnp.copy, state)
        nan_params = jax.tree.map(lambda x: x * jnp.nan, state.params)
        after, values = program.step(state.replace(params=nan_params), batch)
        for name in ('opt_state', 'balance'):
          old, new = getattr(good, name), getattr(after, name)
          jax.tree.map(np.testing.assert_array_equal, new, old)
        return after.replace(params=good.params), values

      return dataclasses.replace(program, step=step)

    with mock.patch.object(stage_runner, 'compile_stage', compile_faulty):
      return self.run_with()

  def test_not_a_number_is_skipped(self):
    result = self.run_with_nan(_LONG, {3})
    skipped = [
      (r[metrics.STEP], str(r[metrics.LOSS]))
      for r in self.records(metrics.TRAIN)
      if r[metrics.SKIPPED]
    ]
    self.assertEqual(skipped, [(11, 'nan')])
    self.assertEqual(int(result.state.health.skipped_total), 1)
    self.assertEmpty(self.events())

  def test_rolls_back_to_the_end_of_the_stage_before(self):
    self.assertTrue(self.run_with_nan(_LONG, {1, 2}).is_complete)
    self.assertEqual(self.events(), [(8, metrics.ROLLBACK)])
    self.assertEqual(self.starts, [(_SHORT, 0), (_LONG, 0), (_LONG, 2)])
    self.assertEqual(self.steps(self.records(metrics.TRAIN)), [*range(1, 17)])

  def test_rolls_back_and_passes_over_the_rows(self):
    result = self.run_with(spoiled={5, 6})
    self.assertTrue(result.is_complete)
    with self.subTest('it says so'):
      self.assertEqual(self.events(), [(12, metrics.ROLLBACK)])
      (event,) = self.records(metrics.EVENT)
      self.assertRegex(event[metrics.REASON], '2 bad steps in a row up to step')
      self.assertIn('rolling back to step 12', self.output.getvalue())
      report = pathlib.Path(self.workdir, 'report.md').read_text()
      self.assertIn('Roll-backs: 1', report)
      self.assertIn('Skipped steps: 2, 2 of them undone', report)
      self.assertIn('skipped steps: 2', self.output.getvalue())
    with self.subTest('it goes on after the rows'):
      self.assertEqual(self.starts, [(_SHORT, 0), (_LONG, 0), (_LONG, 7)])
      trains = self.records(metrics.TRAIN)
      self.assertEqual(self.steps(trains), [*range(1, 17)])
      self.assertFalse(any(r[metrics.SKIPPED] for r in trains))
      self.assertEqual(int(result.state.step), 16)
      self.assertEqual(result.position.data_position, 11)
    unbroken = self.raw_records()
    for method in (
      (stage_runner.health.RollbackLedger, 'record'),
      (MetricsWriter, 'rewind'),
    ):
      with self.subTest('killed right after', method=method[1]):
        self.workdir = self.create_tempdir().full_path
        original = getattr(*method)

        def then_die(*args, _original=original, **kwargs):
          _original(*args, **kwargs)
          raise KeyboardInterrupt

        with (
          mock.patch.object(*method, then_die),
          self.assertRaises(KeyboardInterrupt),
        ):
          self.run_with(spoiled={5, 6})
        self.starts.clear()
        self.run_with(spoiled={5, 6})
        self.assertEqual(self.starts, [(_LONG, 7)])
        self.assertEqual(self.raw_records(), unbroken)

  def test_gives_up(self):
    health = dataclasses.replace(self.config.health, max_rollbacks=1)
    pattern = 'health.max_rollbacks=1 .* to step 12: 2 bad steps in a row'
    for _ in range(2):  # the same command does not get round it
      with self.assertRaisesRegex(RollbackError, pattern):
        self.run_with(spoiled=range(5, 99), health=health)


class ExtensionTest(RunCase):
  def run_unstable(self, stop_at=()):
    """Runs with the loss at the end of the first stage above its best."""
    evaluate = stage_runner.evaluate

    def rising(program, state, batches, names):
      values = evaluate(program, state, batches, names)
      if program.stage.name == _SHORT:
        values[metrics.BY_POSITION][metrics.LOSS][0] = float(state.step)
      return values

    stop = lambda unused, step: step in stop_at  # noqa: E731
    with (
      mock.patch.object(stage_runner, 'evaluate', rising),
      mock.patch.object(PreemptionSignal, 'should_stop', stop),
    ):
      return self.run_with(
        extension=ExtensionConfig(on_evidence=True, max_pieces=2)
      )

  def test_prolongs_a_stage(self):
    result = self.run_unstable()
    self.assertTrue(result.is_complete)
    prolonged = metrics.STAGE_PROLONGED
    self.assertEqual(self.events(), [(8, prolonged), (10, prolonged)])
    self.assertEqual(int(result.state.step), 20)
    trains = self.records(metrics.TRAIN)
    names = [r[metrics.STAGE] for r in trains]
    self.assertEqual(names, 12 * [_SHORT] + 8 * [_LONG])
    rates = [r[metrics.LEARNING_RATE] for r in trains]
    self.assertEqual(rates[8:12], 4 * [rates[7]])
    self.assertIn('step 10/10', self.output.getvalue())
    ends = [r[metrics.STEP] for r in self.records() if r.get('is_stage_end')]
    self.assertEqual(ends, [12, 20])
    unbroken = self.raw_records()
    self.workdir = self.create_tempdir().full_path
    for stop in (8, 11):
      self.assertFalse(self.run_unstable(stop_at={stop}).is_complete)
      self.assertIn(f'step_{stop:08d}', self.saved())
    self.assertTrue(self.run_unstable().is_complete)
    self.assertIn('continuing from step 8,', self.output.getvalue())
    self.assertIn('continuing from step 11,', self.output.getvalue())
    self.assertEqual(self.raw_records(), unbroken)


if __name__ == '__main__':
  absltest.main()
