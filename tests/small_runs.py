"""Whole runs of the small experiment in the test's own process.

Loaded by its path. Faults are put in where a run meets the outside: its rows,
its losses, its files.
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import runpy
import tempfile
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from hybrid_moe import memory_plan, metrics, stage_runner
from hybrid_moe.data.pipeline import StageData
from hybrid_moe.data_config import DataConfig, SourceConfig
from hybrid_moe.run_config import (
  CheckpointConfig,
  EvalConfig,
  ExtensionConfig,
  MemoryConfig,
)
from hybrid_moe.stage import compile_stage

SMALL = runpy.run_path(
  str(pathlib.Path(__file__).with_name('small_experiment.py'))
)
SHORT, LONG = SMALL['STAGES']


@functools.cache
def _compiled(config, index, num_sources):
  return compile_stage(config, index, num_sources)


def compile_once(config, index, num_sources):
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


class RunCase(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.shared = pathlib.Path(folder.name)
    cls.config = SMALL['make_experiment'](
      SMALL['write_corpus'](cls.shared / 'corpus')
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
      mock.patch.object(stage_runner, 'compile_stage', compile_once),
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
      spoilt = spoiled if data.stage == LONG else ()
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
