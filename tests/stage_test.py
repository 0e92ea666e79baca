"""Compiled programs of a stage: memory, communication, one abstract state."""

import pathlib
import re
import runpy
import tempfile

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from hybrid_moe.checks import ConfigError
from hybrid_moe.stage import compile_stage
from hybrid_moe.train_state import init_state

_SMALL = runpy.run_path(
  str(pathlib.Path(__file__).with_name('small_experiment.py'))
)
_COLLECTIVE = re.compile(
  r' (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|'
  r'collective-broadcast|ragged-all-to-all|send|recv)(?:-start)?\('
)


@pytest.fixture(scope='module', autouse=True)
def _programs(tmp_path_factory):
  directory = _SMALL['programs_directory'](tmp_path_factory)
  with _SMALL['kept_programs'](directory):
    yield


def _batch(program, seed=0):
  """Rows of two documents each."""
  stage = program.stage
  rng = np.random.default_rng(seed)
  shape = (stage.global_batch, stage.seq_len)
  segment_ids = np.ones(shape, np.int32)
  segment_ids[:, stage.seq_len // 3 :] = 2
  return {
    'tokens': rng.integers(0, 256, shape, np.int32),
    'targets': rng.integers(0, 256, shape, np.int32),
    'segment_ids': segment_ids,
    'loss_mask': rng.random(shape) < 0.9,
    'source_ids': np.arange(stage.global_batch, dtype=np.int32) % 2,
  }


class StageTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = _SMALL['make_experiment'](tempfile.gettempdir())
    one = jax.devices()[:1]
    cls.short = compile_stage(cls.config, 0, 2, one)
    cls.long = compile_stage(cls.config, 1, 2, one)
    cls.on_eight = compile_stage(cls.config, 1, 2)

  @parameterized.parameters('short', 'on_eight')
  def test_donates_the_whole_state(self, name):
    program = getattr(self, name)
    state_bytes = sum(
      np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=int)
      * leaf.dtype.itemsize
      for leaf in jax.tree.leaves(program.state)
    )
    self.assertEqual(program.memory.aliased, state_bytes)
    metrics_bytes = program.memory.outputs - program.memory.aliased
    self.assertLess(metrics_bytes, 0.1 * state_bytes)

  def test_peak_is_below_the_sum(self):
    memory = self.short.memory
    self.assertGreaterEqual(memory.peak, memory.arguments + memory.temporaries)
    self.assertIn('% free', self.short.describe())
    self.assertIn('stage short: 16 rows of 64 tokens', self.short.describe())

  @parameterized.parameters('step', 'evaluate')
  def test_no_communication_on_one_device(self, name):
    for line in getattr(self.short, name).as_text().splitlines():
      if _COLLECTIVE.search(line):
        # What `shard_map` sums over a group of one moves nothing.
        self.assertIn('all-reduce(', line)
        self.assertIn('replica_groups={{0}}', line)

  def test_communication_on_eight_devices(self):
    reducing = {'all-reduce', 'all-gather', 'reduce-scatter'}
    text = self.on_eight.step.as_text()
    found = set(_COLLECTIVE.findall(text))
    self.assertContainsSubset({'all-reduce', 'all-gather'}, found)
    self.assertContainsSubset(found, reducing | {'all-to-all'})
    for line in text.splitlines():
      if ' all-to-all(' in line:
        # Muon hands whole matrices to devices, and their updates back.
        self.assertIn('op_name="jit(train_step)/reshard"', line)
    evaluate = set(_COLLECTIVE.findall(self.on_eight.evaluate.as_text()))
    self.assertContainsSubset(evaluate, reducing)

  def test_stages_share_one_state(self):
    self.assertNotEqual(self.short.step.as_text(), self.long.step.as_text())
    jax.tree.map(
      lambda a, b: self.assertEqual(
        (a.shape, a.dtype, a.sharding), (b.shape, b.dtype, b.sharding)
      ),
      self.short.state,
      self.long.state,
    )
    self.assertEqual(self.short.parameters, self.long.parameters)
    self.assertLess(self.short.flops_per_token, self.long.flops_per_token)

  def test_devices_agree(self):
    losses, norms, evaluated = [], [], []
    for program in (self.long, self.on_eight):
      with jax.set_mesh(program.mesh):
        state = init_state(self.config, jax.random.key(1))
      for leaf, expected in zip(
        jax.tree.leaves(state), jax.tree.leaves(program.state)
      ):
        self.assertEqual(leaf.shape, expected.shape)
      state = jax.device_put(
        state, jax.tree.map(lambda leaf: leaf.sharding, program.state)
      )
      for seed in range(3):
        batch = program.put_training_batch(_batch(program, seed))
        state, values = program.step(state, batch)
        losses.append(float(values['loss']))
        norms.append(float(values['grad_norm']))
      (part,) = program.put_eval_batches(_batch(program, 9))
      sums = jax.device_get(program.evaluate(state.params, state.balance, part))
      evaluated.append(sums)
    np.testing.assert_allclose(losses[:3], losses[3:], rtol=1e-5)
    np.testing.assert_allclose(norms[:3], norms[3:], rtol=1e-4)
    for name, value in evaluated[0].items():
      np.testing.assert_allclose(value, evaluated[1][name], rtol=1e-4)
    mask = _batch(self.long, 9)['loss_mask']
    self.assertEqual(evaluated[0]['count_by_position'].sum(), mask.sum())
    self.assertEqual(evaluated[0]['count_by_source'].sum(), mask.sum())

  def test_refuses_rows_that_do_not_divide(self):
    with self.assertRaisesRegex(
      ConfigError, r"stages\['short'\].global_batch=16.*data axis of 3"
    ):
      compile_stage(self.config, 0, 2, jax.devices()[:3])


if __name__ == '__main__':
  absltest.main()
