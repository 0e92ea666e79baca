"""What checkpoints carry of a run's position and configuration."""

import dataclasses
import json

from absl.testing import absltest, parameterized

from hybrid_moe.checks import ConfigError
from hybrid_moe.config import ExperimentConfig, MeshConfig, StageConfig
from hybrid_moe.model_config import BalanceConfig
from hybrid_moe.presets import TINY
from hybrid_moe.run_config import (
  CheckpointConfig,
  EvalConfig,
  ExtensionConfig,
  MemoryConfig,
  OptimConfig,
)
from hybrid_moe.run_position import RunPosition

CONFIG = ExperimentConfig(
  model=TINY,
  stages=(StageConfig('a', 64, 8, 0.5), StageConfig('b', 128, 4, 0.5)),
  total_tokens=100_000,
  stage_share_range=(0.5, 0.5),
)


def with_stage(**changes) -> ExperimentConfig:
  first, second = CONFIG.stages
  return dataclasses.replace(
    CONFIG, stages=(first, dataclasses.replace(second, **changes))
  )


def stored(position: RunPosition) -> dict:
  """The meta data as it comes back from a file."""
  return json.loads(json.dumps(position.to_meta(CONFIG), allow_nan=False))


class RunPositionTest(parameterized.TestCase):
  def test_counts_steps_and_stages(self):
    position = RunPosition()
    position.advance(512)
    position.advance(512)
    position.pieces, position.is_stage_done = 1, True
    position.stability.add([2.0])
    position.enter_next_stage()
    position.advance(512)
    self.assertEqual(
      position,
      RunPosition(
        step=3, stage_index=1, stage_step=1, data_position=1, tokens=1536
      ),
    )

  def test_round_trip(self):
    position = RunPosition(7, 1, 3, 5, 999, 2, True)
    position.stability.add([2.0, float('nan')])
    again = RunPosition.from_meta(stored(position), CONFIG)
    self.assertEqual(stored(again), stored(position))
    self.assertEqual(again.data_position, 5)

  @parameterized.named_parameters(
    ('mesh', with_stage(mesh=MeshConfig(data=2))),
    ('remat', with_stage(remat='none')),
    ('micro_batches', with_stage(micro_batches=2)),
    (
      'implementations',
      dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(
          TINY,
          kda=dataclasses.replace(TINY.kda, implementation='reference'),
          moe=dataclasses.replace(TINY.moe, implementation='ragged_dot'),
        ),
      ),
    ),
    ('log_every', dataclasses.replace(CONFIG, log_every=9)),
    ('eval', dataclasses.replace(CONFIG, eval=EvalConfig(every_steps=1))),
    (
      'checkpoint',
      dataclasses.replace(CONFIG, checkpoint=CheckpointConfig(keep_last=9)),
    ),
    ('memory', dataclasses.replace(CONFIG, memory=MemoryConfig(0.0))),
    (
      'data_dir',
      dataclasses.replace(
        CONFIG, data=dataclasses.replace(CONFIG.data, data_dir='elsewhere')
      ),
    ),
  )
  def test_allows_what_changes_only_how(self, config):
    self.assertNotEqual(config, CONFIG)
    position = RunPosition.from_meta(stored(RunPosition(step=4)), config)
    self.assertEqual(position.step, 4)

  @parameterized.named_parameters(
    (
      'model',
      dataclasses.replace(CONFIG, model=dataclasses.replace(TINY, d_model=128)),
      r'model.d_model=128, in the checkpoint 96',
    ),
    (
      'optim',
      dataclasses.replace(CONFIG, optim=OptimConfig(peak_lr=0.5)),
      r'optim.peak_lr=0.5, in the checkpoint 0.002',
    ),
    (
      'balance',
      dataclasses.replace(CONFIG, balance=BalanceConfig(num_bins=50)),
      r'balance.num_bins=50, in the checkpoint 1000',
    ),
    ('seed', dataclasses.replace(CONFIG, seed=1), 'seed=1, in .* 0'),
    (
      'stage',
      with_stage(global_batch=8),
      r'stages\[1\].global_batch=8, in the checkpoint 4',
    ),
    (
      'fewer_stages',
      dataclasses.replace(
        CONFIG,
        stages=(StageConfig('a', 64, 8, 1.0),),
        stage_share_range=(1.0, 1.0),
      ),
      'stages=',
    ),
    (
      'data',
      dataclasses.replace(
        CONFIG, data=dataclasses.replace(CONFIG.data, seed=5)
      ),
      'data.seed=5, in the checkpoint 0',
    ),
  )
  def test_refuses_another_configuration(self, config, pattern):
    with self.assertRaisesRegex(ConfigError, pattern) as caught:
      RunPosition.from_meta(stored(RunPosition()), config)
    self.assertIn('another workdir', str(caught.exception))

  def test_evaluations_that_decide_on_a_stage_are_not_free(self):
    config = dataclasses.replace(
      CONFIG,
      eval=EvalConfig(every_steps=9),
      extension=ExtensionConfig(on_evidence=True),
    )
    meta = RunPosition().to_meta(config)
    changed = dataclasses.replace(config.eval, sample_tokens=1)
    RunPosition.from_meta(meta, dataclasses.replace(config, eval=changed))
    for name, value in (('every_steps', 8), ('num_batches', 2)):
      changed = dataclasses.replace(config.eval, **{name: value})
      with self.assertRaisesRegex(ConfigError, f'eval.{name}={value}, in the'):
        RunPosition.from_meta(meta, dataclasses.replace(config, eval=changed))

  def test_names_every_difference(self):
    config = dataclasses.replace(CONFIG, seed=1, total_tokens=200_000)
    with self.assertRaises(ConfigError) as caught:
      RunPosition.from_meta(stored(RunPosition()), config)
    self.assertIn('seed=1', str(caught.exception))
    self.assertIn('; total_tokens=200000', str(caught.exception))


if __name__ == '__main__':
  absltest.main()
