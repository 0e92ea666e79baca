"""Every configuration file builds a valid experiment."""

import pathlib
import runpy

from absl.testing import absltest, parameterized
from ml_collections import config_dict

from hybrid_moe.checks import ConfigError
from hybrid_moe.config import config_from_dict
from hybrid_moe.optim.schedule import build_schedule

_FOLDER = pathlib.Path(__file__).parents[2] / 'experiments' / 'configs'
_NAMES = sorted(
  path.stem
  for path in _FOLDER.glob('*.py')
  if 'def get_config' in path.read_text()
)


def _load(name):
  return runpy.run_path(str(_FOLDER / f'{name}.py'))


class ConfigsTest(parameterized.TestCase):
  def test_finds_them(self):
    self.assertContainsSubset({'tiny', 'nano'}, _NAMES)

  @parameterized.parameters(*_NAMES)
  def test_is_valid(self, name):
    values = _load(name)['get_config']()
    self.assertIsInstance(values, config_dict.ConfigDict)
    config = config_from_dict(values)
    steps = tuple(config.stage_steps(stage) for stage in config.stages)
    self.assertGreater(min(steps), 1)
    for schedule, count in zip(build_schedule(config.optim, steps), steps):
      self.assertGreater(float(schedule(count - 1)), 0)

  @parameterized.parameters(*_NAMES)
  def test_says_how_it_is_run(self, name):
    text = (_FOLDER / f'{name}.py').read_text()
    self.assertRegex(text, r'Command:\s+python -m experiments\.pretrain')
    self.assertIn('Hardware:', text)

  @parameterized.parameters(*_NAMES)
  def test_can_be_overridden(self, name):
    values = _load(name)['get_config']()
    values.total_tokens *= 2
    values.optim.peak_lr = 1e-4
    values.stages[0]['remat'] = 'layer'
    config = config_from_dict(values)
    self.assertEqual(config.optim.peak_lr, 1e-4)
    self.assertEqual(config.stages[0].remat, 'layer')
    values.model.num_layers = 0
    with self.assertRaisesRegex(ConfigError, 'model.num_layers=0'):
      config_from_dict(values)


if __name__ == '__main__':
  absltest.main()
