"""The command: what goes wrong is said in one line, before anything else."""

import concurrent.futures
import errno
import os
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import absltest, parameterized

from experiments import pretrain
from hybrid_moe.checkpoint_files import CheckpointError
from hybrid_moe.checks import ConfigError
from hybrid_moe.data.records import DamagedCacheError
from hybrid_moe.health import RollbackError

_ROOT = pathlib.Path(__file__).parents[2]
_MISTAKES = {
  '--config.nonsense=3': r'no such field .*nonsense.* in --config\.n',
  '--config.stages[9].seq_len=3': r'no such field .* in --config\.stages\[9\]',
  '--config.model.d_model=wide': r"--config\.model\.d_model=wide.*'wide'",
  '--config.model.d_model=-1': r'ConfigError: model\.d_model=-1: accepted is',
  '--config=none.py': r"ConfigError: --config='none\.py'",
  'nonsense': r"unknown arguments: \['nonsense'\]",
}


def _run(mistake, workdir):
  return subprocess.run(
    [
      sys.executable,
      '-m',
      'experiments.pretrain',
      f'--workdir={workdir}',
      mistake,
    ],
    cwd=_ROOT,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=120,
  )


class CommandLineTest(absltest.TestCase):
  def test_mistakes(self):
    folder = self.create_tempdir().full_path
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      runs = pool.map(lambda mistake: _run(mistake, folder), _MISTAKES)
    for (mistake, pattern), run in zip(_MISTAKES.items(), runs):
      with self.subTest(mistake):
        self.assertNotEqual(run.returncode, 0)
        self.assertRegex(run.stderr, pattern)
        self.assertNotIn('Traceback', run.stderr)
        lines = [x for x in run.stderr.splitlines() if '--help' not in x]
        self.assertLen(lines, 1, run.stderr)


class MainTest(parameterized.TestCase):
  @parameterized.parameters(
    (str(pretrain._DEFAULT_CONFIG), 'runs/tiny'),
    ('experiments/configs/nano.py', 'runs/nano'),
    ('tests/some.py:/a/folder', 'runs/some'),
  )
  def test_every_configuration_has_its_workdir(self, filename, workdir):
    self.assertEqual(pretrain.default_workdir(filename), workdir)

  def run_main(self, **outcome):
    with (
      mock.patch.object(pretrain, 'run', **outcome),
      mock.patch.object(pretrain, '_load_config'),
      mock.patch.object(pretrain, '_find_workdir'),
      mock.patch.object(pretrain, 'config_from_dict'),
      mock.patch.object(pretrain.logging, 'use_absl_handler'),
      mock.patch.object(pretrain.logging, 'set_verbosity'),
    ):
      pretrain.main(['pretrain'])

  @parameterized.parameters(
    ConfigError, CheckpointError, DamagedCacheError, RollbackError
  )
  def test_errors_end_in_a_line(self, error):
    with self.assertRaises(SystemExit) as caught:
      self.run_main(side_effect=error('what is wrong'))
    self.assertEqual(caught.exception.code, f'{error.__name__}: what is wrong')

  def test_bugs_keep_their_traceback(self):
    with self.assertRaises(ZeroDivisionError):
      self.run_main(side_effect=ZeroDivisionError)

  def test_a_full_disk(self):
    with self.assertRaisesRegex(
      SystemExit, 'No space left on device: .x.; the'
    ):
      self.run_main(side_effect=OSError(errno.ENOSPC, os.strerror(28), 'x'))
    with self.assertRaises(OSError):
      self.run_main(side_effect=OSError(errno.EINVAL, 'another'))

  def test_stopped(self):
    with self.assertRaises(SystemExit) as caught:
      self.run_main(return_value=mock.Mock(is_complete=False))
    self.assertEqual(caught.exception.code, 143)

  def test_complete(self):
    self.run_main(return_value=mock.Mock(is_complete=True))


if __name__ == '__main__':
  absltest.main()
