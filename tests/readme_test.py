"""The README says what CI does, and names files that are there."""

import pathlib
import re

from absl.testing import absltest

from experiments.check_quickstart import training_command

_ROOT = pathlib.Path(__file__).resolve().parents[1]


class ReadmeTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.readme = (_ROOT / 'README.md').read_text()

  def test_ci_runs_the_test_command(self):
    commands = [
      line.strip()
      for line in self.readme.splitlines()
      if line.startswith('    ') and 'pytest' in line
    ]
    self.assertLen(commands, 1)
    lines = (_ROOT / '.ci' / 'run').read_text().splitlines()
    self.assertIn(commands[0], lines)

  def test_training_command_makes_its_own_environment(self):
    command = training_command(self.readme)
    self.assertStartsWith(command, 'python3.12 -m venv .venv && ')
    self.assertIn('pip install', command)

  def test_no_figure_is_left_out(self):
    self.assertEmpty(re.findall(r'\b(?:MAIN|TEST)_[A-Z]+\b', self.readme))

  def test_files_that_it_names_exist(self):
    named = re.findall(
      r'`((?:experiments|hybrid_moe)/[\w/]+\.py)`', self.readme
    )
    self.assertNotEmpty(named)
    for name in named:
      self.assertTrue((_ROOT / name).exists(), name)


if __name__ == '__main__':
  absltest.main()
