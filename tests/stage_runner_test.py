"""Stages one after another, bad steps, prolonging, and refusals.

Whole runs in this process on one device; runs that are killed are in
`kill_resume_test.py`. Faults are put in where a run meets the outside: its
rows, its losses, its files.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import pathlib
import runpy
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe import memory_plan, metrics, stage_runner
from hybrid_moe.checkpoint import Checkpoints
from hybrid_moe.checks import ConfigError
from hybrid_moe.checksum import checksums
from hybrid_moe.config import MeshConfig
from hybrid_moe.data.cache import DamagedCacheError
from hybrid_moe.data.pipeline import StageData
from hybrid_moe.data_config import DataConfig, SourceConfig
from hybrid_moe.health import RollbackError
from hybrid_moe.memory_plan import MemoryPlanError
from hybrid_moe.mesh import make_mesh
from hybrid_moe.metrics import MetricsWriter
from hybrid_moe.optim.schedule import build_schedule
from hybrid_moe.preemption import PreemptionSignal
from hybrid_moe.run_config import (
  CheckpointConfig,
  EvalConfig,
  ExtensionConfig,
  MemoryConfig,
)
from hybrid_moe.stage import compile_stage
from hybrid_moe.train_state import abstract_state, init_state
from hybrid_moe.workdir import open_workdir

_SMALL = runpy.run_path(
  str(pathlib.Path(__file__).with_name('small_experiment.py'))
)
_SHORT, _LONG = _SMALL['STAGES']


@functools.cache
def _compiled(config, index, num_sources):
  return compile_stage(config, index, num_sources)


def _compile_once(config, index, num_sources):
  """`compile_stage`, but not again where only the host's part differs."""
  key = dataclasses.replace(
    config,
    eval=EvalConfig(),
    checkpoint=CheckpointConfig(),
    extension=ExtensionConfig(),
    memory=MemoryConfig(),
    health=dataclasses.replace(config.health, max_rollbacks=0),
    data=DataConfig(tuple(SourceConfig(s.name) for s in config.data.sources)),
    log_every=1,
  )
  program = _compiled(key, index, num_sources)
  available = memory_plan.device_memory_bytes(
    config.memory, program.mesh.devices.flat[0]
  )
  return dataclasses.replace(
    program, memory=dataclasses.replace(program.memory, available=available)
  )


class _SpoiledRows:
  """Batches of which some have targets that nothing could predict."""

  def __init__(self, batches, position, spoiled):
    self._batches = batches
    self._position = position
    self._spoiled = spoiled

  def __next__(self):
    batch = dict(next(self._batches))
    if self._position in self._spoiled:
      rng = np.random.default_rng(0)
      batch['targets'] = rng.integers(
        150, 250, batch['targets'].shape, np.int32
      )
    self._position += 1
    return batch

  def close(self):
    self._batches.close()


class _Case(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.shared = pathlib.Path(folder.name)
    cls.config = _SMALL['make_experiment'](
      _SMALL['write_corpus'](cls.shared / 'corpus')
    )
    # Rows are prepared once; sampling compiles anew in every run.
    cls.config = dataclasses.replace(
      cls.config,
      data=dataclasses.replace(cls.config.data, data_dir=str(cls.shared / 'd')),
      eval=EvalConfig(every_steps=4, num_batches=1, sample_tokens=0),
      health=dataclasses.replace(cls.config.health, max_consecutive_skips=2),
    )

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.starts = []
    self.output = io.StringIO()
    one = jax.devices()[:1]
    for patch in (
      mock.patch.object(jax, 'devices', lambda *unused: one),
      mock.patch.object(stage_runner, 'compile_stage', _compile_once),
    ):
      self.enterContext(patch)

  def run_with(self, spoiled=(), **changes):
    """Runs with some of the second stage's batches spoiled."""
    original = StageData.train_batches

    def train_batches(data, position, **share):
      batches = original(data, position, **share)
      if not share:  # of the bigram model
        return batches
      self.starts.append((data.stage, position))
      spoilt = spoiled if data.stage == _LONG else ()
      return _SpoiledRows(batches, position, spoilt)

    config = dataclasses.replace(self.config, **changes)
    with (
      mock.patch.object(StageData, 'train_batches', train_batches),
      contextlib.redirect_stdout(self.output),
      contextlib.redirect_stderr(self.output),
    ):
      return stage_runner.run(config, self.workdir)

  def records(self, kind=None):
    records = metrics.read_metrics(self.workdir)
    for record in records:
      record.pop(metrics.PERF, None)
    return [r for r in records if kind in (None, r[metrics.KIND])]

  def raw_records(self):
    path = pathlib.Path(self.workdir, metrics.FILE_NAME)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
      record.pop(metrics.PERF, None)
    return records

  def events(self):
    return [
      (r[metrics.STEP], r[metrics.EVENT]) for r in self.records(metrics.EVENT)
    ]

  def steps(self, records):
    return [r[metrics.STEP] for r in records]

  def saved(self):
    return sorted(os.listdir(os.path.join(self.workdir, 'checkpoints')))


class HandOverTest(_Case):
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
    again = self.run_with(**changes)
    self.assertIn('continuing from step 1,', self.output.getvalue())
    self.assertEqual(int(again.state.step), 1)


class BadStepTest(_Case):
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
      program = _compile_once(config, index, num_sources)
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


class ExtensionTest(_Case):
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
    unbroken = self.raw_records()
    self.workdir = self.create_tempdir().full_path
    for stop in (8, 11):
      self.assertFalse(self.run_unstable(stop_at={stop}).is_complete)
      self.assertIn(f'step_{stop:08d}', self.saved())
    self.assertTrue(self.run_unstable().is_complete)
    self.assertIn('continuing from step 8,', self.output.getvalue())
    self.assertIn('continuing from step 11,', self.output.getvalue())
    self.assertEqual(self.raw_records(), unbroken)


class RefusalTest(_Case):
  def assert_refused(self, error, pattern, **changes):
    with self.assertRaisesRegex(error, pattern) as caught:
      self.run_with(**changes)
    self.assertNotIn('\n', str(caught.exception))
    self.assertEmpty(self.starts)

  def test_a_plan_that_does_not_fit(self):
    self.assert_refused(
      MemoryPlanError,
      r"memory.headroom=0.3: stage 'short' needs 1\d\.\d MiB .* 10\.2 MiB at "
      r'its peak .* accepted is a peak of 7\.2 MiB at most',
      memory=MemoryConfig(device_gib=0.01),
    )
    self.assertEmpty(self.saved())

  def test_a_vocabulary_that_is_too_small(self):
    self.assert_refused(
      ConfigError,
      'vocab_size=100',
      model=dataclasses.replace(self.config.model, vocab_size=100),
    )

  def test_a_dataset_that_is_missing(self):
    words = SourceConfig('words', kind='tfds', dataset='no_such_text')
    self.assert_refused(
      ConfigError,
      r"data.sources\['words'\].dataset='no_such_text'",
      data=dataclasses.replace(
        self.config.data,
        sources=(words, self.config.data.sources[1]),
        tfds_dir=self.workdir,
      ),
    )

  def test_a_mesh_of_more_devices(self):
    stages = tuple(
      dataclasses.replace(stage, mesh=MeshConfig(data=3))
      for stage in self.config.stages
    )
    self.assert_refused(ConfigError, '3 places for 1 devices', stages=stages)

  def test_a_workdir_in_use(self):
    with open_workdir(self.workdir):
      self.assert_refused(ConfigError, f"workdir='{self.workdir}': another run")

  def test_a_workdir_under_a_file(self):
    path = pathlib.Path(self.workdir, 'file')
    path.touch()
    self.workdir = str(path / 'run')
    self.assert_refused(ConfigError, 'workdir=.*file/run.*written to')

  def test_damaged_rows(self):
    folder = self.create_tempdir()
    data = dataclasses.replace(self.config.data, data_dir=folder.full_path)
    stop = lambda unused, step: True  # noqa: E731
    with mock.patch.object(PreemptionSignal, 'should_stop', stop):
      self.assertFalse(self.run_with(data=data).is_complete)
    paths = pathlib.Path(folder.full_path).glob('rows-words-64-*/*record')
    for path in paths:
      content = bytearray(path.read_bytes())
      middle = len(content) // 2
      content[middle : middle + 64] = bytes(64)
      path.write_bytes(content)
    with self.assertRaisesRegex(DamagedCacheError, 'rows-words-64-.*delete'):
      self.run_with(data=data)


class SavedStateTest(_Case):
  @parameterized.parameters('none', 'aux_loss', 'sign', 'quantile', 'exact')
  def test_every_balancer(self, method):
    """Some of a balancer's arrays have no elements."""
    balance = dataclasses.replace(
      self.config.balance,
      **({'estimator': 'exact'} if method == 'exact' else {'method': method}),
    )
    config = dataclasses.replace(self.config, balance=balance)
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
      state = init_state(config, jax.random.key(0))
    folder = self.create_tempdir().full_path
    with Checkpoints(folder, config.checkpoint) as checkpoints:
      checkpoints.save(0, state, {}, stage='a', is_stage_end=False, wait=True)
      restored = checkpoints.restore_newest(abstract_state(config, mesh)).state
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    self.assertEqual(
      checksums(jax.tree.leaves(restored)), checksums(jax.tree.leaves(state))
    )


if __name__ == '__main__':
  absltest.main()
