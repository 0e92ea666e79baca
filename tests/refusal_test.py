"""Runs that cannot work are refused; every balancer's state is saved."""

import dataclasses
import pathlib
import runpy
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from hybrid_moe import stage_runner
from hybrid_moe import workdir as workdir_lib
from hybrid_moe.checkpoint import Checkpoints
from hybrid_moe.checks import ConfigError
from hybrid_moe.checksum import checksums
from hybrid_moe.config import MeshConfig
from hybrid_moe.data.cache import DamagedCacheError
from hybrid_moe.data_config import SourceConfig
from hybrid_moe.memory_plan import MemoryPlanError
from hybrid_moe.mesh import make_mesh
from hybrid_moe.preemption import PreemptionSignal
from hybrid_moe.run_config import MemoryConfig
from hybrid_moe.train_state import abstract_state, init_state
from hybrid_moe.workdir import open_workdir

_RUNS = runpy.run_path(str(pathlib.Path(__file__).with_name('small_runs.py')))
_SMALL = _RUNS['SMALL']
RunCase = _RUNS['RunCase']


@pytest.fixture(scope='module', autouse=True)
def _programs(tmp_path_factory):
  directory = _SMALL['programs_directory'](tmp_path_factory)
  with _SMALL['kept_programs'](directory):
    yield


class RefusalTest(RunCase):
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
    with self.no_data():
      self.assert_refused(ConfigError, '3 places for 1 devices', stages=stages)

  def test_a_batch_that_does_not_divide_over_the_devices(self):
    first, second = self.config.stages
    second = dataclasses.replace(second, micro_batches=4)
    four = jax.local_devices()[:4]
    with self.no_data(), mock.patch.object(jax, 'devices', lambda: four):
      self.assert_refused(
        ConfigError,
        r"stages\['long'\].*2 rows .* 4 devices; .* one of \[1, 2\]",
        stages=(first, second),
      )

  def no_data(self):
    return mock.patch.object(
      stage_runner, 'prepare_stage', side_effect=AssertionError
    )

  def test_a_workdir_that_another_process_cannot_use(self):
    agree = mock.patch.object(
      workdir_lib, 'any_process_text', return_value='process 3: no room'
    )
    with agree:
      self.assert_refused(ConfigError, 'process 3: no room')

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
    self.assertNotIn('the data has changed', self.output.getvalue())
    paths = pathlib.Path(folder.full_path).glob('rows-words-64-*/*record')
    for path in paths:
      content = bytearray(path.read_bytes())
      middle = len(content) // 2
      content[middle : middle + 64] = bytes(64)
      path.write_bytes(content)
    with self.assertRaisesRegex(DamagedCacheError, 'rows-words-64-.*delete'):
      self.run_with(data=data)


class SavedStateTest(RunCase):
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
