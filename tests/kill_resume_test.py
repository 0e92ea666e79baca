"""Runs that are killed, damaged or moved end as if nothing had happened.

Every run is a process of its own, as users start it. When to kill is decided
by what the run has left on disk, never by time.
"""

import json
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from absl.testing import absltest
from orbax.checkpoint import v1 as ocp

from hybrid_moe import metrics

_SMALL_PATH = pathlib.Path(__file__).with_name('small_experiment.py')
_SMALL = runpy.run_path(str(_SMALL_PATH))
_DEADLINE_S = 300
_LAST = 'step_00000016'


_programs_directory = ''


@pytest.fixture(scope='module', autouse=True)
def _programs(tmp_path_factory):
  global _programs_directory
  _programs_directory = _SMALL['programs_directory'](tmp_path_factory)


class Workdir:
  """A run's folder, and the runs in it."""

  def __init__(self, path, corpus, cache):
    self.path = pathlib.Path(path)
    self.checkpoints = self.path / 'checkpoints'
    self._corpus = corpus
    self._cache = cache
    self._process = None
    self.output = ''

  def copy(self, path):
    shutil.copytree(self.path, path)
    return Workdir(path, self._corpus, self._cache)

  def start(self, *flags, num_devices=1):
    environment = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(num_devices),
      'JAX_COMPILATION_CACHE_DIR': self._cache,
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'PYTHONUNBUFFERED': '1',
    }
    self._log = tempfile.TemporaryFile('w+')
    self._process = subprocess.Popen(
      [
        sys.executable,
        '-m',
        'experiments.pretrain',
        f'--config={_SMALL_PATH}:{self._corpus}',
        f'--workdir={self.path}',
        *flags,
      ],
      cwd=_SMALL_PATH.parents[1],
      env=environment,
      stdout=self._log,
      stderr=subprocess.STDOUT,
    )
    return self

  def finish(self):
    """Waits for the end and returns the exit status."""
    status = self._process.wait(_DEADLINE_S)
    self._log.seek(0)
    self.output = self._log.read()
    self._log.close()
    return status

  def run(self, *flags, num_devices=1):
    return self.start(*flags, num_devices=num_devices).finish()

  def signal_when(self, condition, number=signal.SIGKILL):
    """Sends a signal as soon as `condition()` holds; returns the status."""
    deadline_s = time.monotonic() + _DEADLINE_S
    try:
      while not condition():
        if self._process.poll() is not None:
          self.finish()
          raise AssertionError(f'it ended too early:\n{self.output}')
        if time.monotonic() > deadline_s:
          raise AssertionError('it never came to the moment of the signal')
        time.sleep(0.001)
      self._process.send_signal(number)
    except BaseException:
      self._process.kill()
      raise
    return self.finish()

  def names(self, folder):
    try:
      return sorted(os.listdir(self.path / folder))
    except FileNotFoundError:
      return []

  def is_saving(self, first_step=0):
    """Whether a save of that step or a later one has not been committed."""
    return any(
      '.orbax-checkpoint-tmp' in name and int(name[5:13]) >= first_step
      for name in self.names('checkpoints')
    )

  def has_recorded(self, step):
    path = self.path / metrics.FILE_NAME
    return path.exists() and f'"step": {step},' in path.read_text()

  def records(self):
    """What `metrics.jsonl` holds, line by line, but for the wall clock."""
    lines = (self.path / metrics.FILE_NAME).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
      record.pop(metrics.PERF, None)
    return records

  def final_manifest(self):
    """Shapes, dtypes and checksums of the last state, and its position."""
    newest = max(
      name
      for name in self.names('checkpoints')
      if name.startswith(_LAST) and not name.endswith('.damaged')
    )
    stored = ocp.checkpointables_metadata(self.checkpoints / newest)
    return json.loads(stored.custom_metadata['manifest'])


def _largest_file(directory):
  files = [path for path in directory.rglob('*') if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def _flip_bit(directory):
  path = _largest_file(directory)
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


class KillResumeTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls._folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(cls._folder.cleanup)
    cls.folder = pathlib.Path(cls._folder.name)
    cls.corpus = _SMALL['write_corpus'](cls.folder / 'corpus')
    cls.unbroken = cls.workdir('unbroken')
    assert cls.unbroken.run() == 0, cls.unbroken.output

  @classmethod
  def workdir(cls, name):
    cache = _programs_directory or str(cls.folder / 'programs')
    return Workdir(cls.folder / name, cls.corpus, cache)

  def assert_as_unbroken(self, workdir, *, without_events=False):
    records = workdir.records()
    if without_events:
      records = [r for r in records if r[metrics.KIND] != metrics.EVENT]
    self.assertEqual(records, self.unbroken.records())
    self.assertEqual(workdir.final_manifest(), self.unbroken.final_manifest())

  def test_killed_at_many_moments(self):
    workdir = self.workdir('killed')

    def kill_when(condition):
      self.assertEqual(workdir.signal_when(condition), -signal.SIGKILL)

    with self.subTest('while data is prepared'):
      workdir.start()
      kill_when(lambda: any('.partial-' in n for n in workdir.names('data')))
    with self.subTest('during the first checkpoint'):
      workdir.start()
      kill_when(lambda: workdir.is_saving(0))
      self.assertTrue(workdir.is_saving(0))
    with self.subTest('between checkpoints'):
      workdir.start()
      kill_when(
        lambda: (
          workdir.has_recorded(4)
          and 'step_00000003' in workdir.names('checkpoints')
        )
      )
      self.assertNotIn('continuing', workdir.output)
    with self.subTest('during a checkpoint'):
      workdir.start()
      kill_when(lambda: workdir.is_saving(6))
      self.assertRegex(workdir.output, "continuing from step [36], stage 'sho")
      self.assertTrue(workdir.is_saving(6))
    with self.subTest('after the end of a stage'):
      workdir.start()
      kill_when(lambda: 'step_00000008' in workdir.names('checkpoints'))
      self.assertRegex(workdir.output, "continuing from step [36], stage 'sho")
    with self.subTest('on SIGTERM'):
      workdir.start()
      status = workdir.signal_when(
        lambda: workdir.has_recorded(11), signal.SIGTERM
      )
      self.assertEqual(status, 143, workdir.output)
      self.assertRegex(workdir.output, 'continuing from step [89], stage')
      self.assertRegex(workdir.output, r'stopped at step 1\d; the same command')
      report = (workdir.path / 'report.md').read_text()
      self.assertIn('cut short', report)
    with self.subTest('to the end'):
      self.assertEqual(workdir.run(), 0, workdir.output)
      self.assertRegex(
        workdir.output, "continuing from step 1\\d, stage 'long'"
      )
      self.assert_as_unbroken(workdir)
      self.assertEqual(
        workdir.names('checkpoints'), self.unbroken.names('checkpoints')
      )

  def test_started_again_after_its_end(self):
    workdir = self.unbroken.copy(self.folder / 'ended')
    before = (workdir.path / metrics.FILE_NAME).read_bytes()
    self.assertEqual(workdir.run(), 0, workdir.output)
    after = (workdir.path / metrics.FILE_NAME).read_bytes()
    self.assertEqual(after, before)

  def test_damaged_checkpoints(self):
    workdir = self.unbroken.copy(self.folder / 'damaged')
    _flip_bit(workdir.checkpoints / _LAST)
    path = _largest_file(workdir.checkpoints / 'step_00000015')
    os.truncate(path, path.stat().st_size // 2)
    self.assertEqual(workdir.run(), 0, workdir.output)
    for name in ('step_00000015', _LAST):
      self.assertRegex(workdir.output, f'damaged and passed over: .*{name}')
    self.assertIn('continuing from step 8,', workdir.output)
    self.assert_as_unbroken(workdir, without_events=True)
    events = [r for r in workdir.records() if r['kind'] == metrics.EVENT]
    self.assertEqual(
      [e[metrics.EVENT] for e in events], 2 * [metrics.DAMAGED_CHECKPOINT]
    )
    self.assertIn(_LAST, events[0][metrics.REASON])
    self.assertIn('step_00000015', events[1][metrics.REASON])
    self.assertIn(
      'Damaged checkpoints: 2', (workdir.path / 'report.md').read_text()
    )

  def test_continues_on_eight_devices(self):
    workdir = self.unbroken.copy(self.folder / 'moved')
    for name in ('step_00000015', _LAST):
      shutil.rmtree(workdir.checkpoints / name)
    self.assertEqual(workdir.run(num_devices=8), 0, workdir.output)
    self.assertIn('continuing from step 8,', workdir.output)
    self.assertIn('on 8 cpu device(s)', workdir.output)
    found, expected = workdir.records(), self.unbroken.records()
    key = lambda r: (r['step'], r['kind'], r['stage'], r['tokens'])  # noqa: E731
    self.assertEqual([*map(key, found)], [*map(key, expected)])
    np.testing.assert_allclose(
      [r['loss'] for r in found], [r['loss'] for r in expected], rtol=1e-5
    )


if __name__ == '__main__':
  absltest.main()
