"""Checkpoints: exact, atomic, verified, and kept by the rules."""

import gc
import os
import pathlib
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hybrid_moe.checkpoint import CheckpointMismatchError, Checkpoints
from hybrid_moe.checkpoint_files import CheckpointError
from hybrid_moe.run_config import CheckpointConfig

_AXES = ('data', 'expert', 'seq', 'model')


def _mesh(num_data, num_model=1):
  return jax.make_mesh(
    (num_data, 1, 1, num_model), _AXES, axis_types=(AxisType.Explicit,) * 4
  )


def _abstract(mesh, axes=('data', 'model')):
  """Shapes and shardings of a small training state on `mesh`."""

  def array(shape, dtype, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  return {
    'params': {
      'embed': array((512, 256), jnp.float32, *axes),
      'experts': array((8, 64, 32), jnp.bfloat16, axes[0]),
    },
    'opt': (array((512, 256), jnp.float32, None, axes[0]), {}),
    'histogram': array((4, 16), jnp.int32),
    'unused': array((0, 8), jnp.float32),
    'key': array((), jax.random.key(0).dtype),
    'step': array((), jnp.int32),
  }


def _state(abstract, seed=0):
  rng = np.random.default_rng(seed)

  def make(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jax.device_put(jax.random.key(seed), x.sharding)
    value = rng.normal(size=x.shape) * 100
    return jax.device_put(np.asarray(value).astype(x.dtype), x.sharding)

  return jax.tree.map(make, abstract)


def _host(tree):
  """Copies that no later donation can touch."""

  def copy(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(x) if is_key else x)

  return jax.tree.map(copy, tree)


def _data_files(path):
  """Files of array data, largest first."""
  files = [p for p in path.rglob('*') if p.is_file() and p.parent.name == 'd']
  return sorted(files, key=lambda p: -p.stat().st_size)


def _flip_bit(path, share=0.5):
  content = bytearray(path.read_bytes())
  content[int(len(content) * share)] ^= 4
  path.write_bytes(bytes(content))


# When one array cannot be read, Orbax abandons the reads of the others: their
# coroutines are never awaited and their results find its event loop closed.
@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')
@pytest.mark.filterwarnings('ignore:Exception ignored in. (None|<coroutine)')
class CheckpointTest(chex.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = pathlib.Path(self.create_tempdir().full_path) / 'checkpoints'
    self._abstract = _abstract(_mesh(4, 2))

  def _open(self, **config):
    return Checkpoints(str(self._dir), CheckpointConfig(**config))

  def _save(self, *steps, stage='8k', **config):
    """Saves the state of seed `step` at each step; returns the paths."""
    with self._open(**config) as checkpoints:
      for step in steps:
        checkpoints.save(
          step,
          _state(self._abstract, step),
          {'position': 10 * step},
          stage=stage,
          is_stage_end=False,
        )
    return [self._dir / f'step_{step:08d}' for step in steps]

  def _names(self):
    return sorted(p.name for p in self._dir.iterdir())

  def _let_abandoned_reads_end(self):
    time.sleep(0.2)
    gc.collect()

  def test_round_trip_is_exact_and_keeps_shardings(self):
    state = _state(self._abstract)
    meta = {'stage': '8k', 'position': 17, 'seen': {'a': [1, 2.5, None]}}
    with self._open() as checkpoints:
      checkpoints.save(3, state, meta, stage='8k', is_stage_end=False)
      restored = checkpoints.restore_newest(self._abstract)
    self.assertEqual(restored.step, 3)
    self.assertEqual(restored.meta, meta)
    self.assertEqual(restored.damaged, [])
    chex.assert_trees_all_equal(_host(restored.state), _host(state))
    jax.tree.map(
      lambda got, want: self.assertEqual(got.sharding, want.sharding),
      restored.state,
      self._abstract,
    )

  def test_no_checkpoint_restores_none(self):
    self.assertIsNone(self._open().restore_newest(self._abstract))

  @parameterized.parameters((8, 1, 8), (2, 4, 8), (1, 1, 1))
  def test_restores_to_another_mesh(self, num_data, num_model, num_devices):
    self._save(1)
    mesh = _mesh(num_data, num_model)
    self.assertEqual(mesh.size, num_devices)
    abstract = _abstract(mesh, axes=('model', 'data'))
    with jax.set_mesh(mesh):
      restored = self._open().restore_newest(abstract)
    chex.assert_trees_all_equal(
      _host(restored.state), _host(_state(self._abstract, 1))
    )
    self.assertEqual(restored.state['params']['embed'].sharding.mesh, mesh)

  def test_state_may_be_donated_right_after_an_asynchronous_save(self):
    sharding = NamedSharding(_mesh(8), PartitionSpec('data'))
    make = jax.jit(
      lambda: jnp.arange(2**21, dtype=jnp.float32), out_shardings=sharding
    )
    update = jax.jit(lambda x: -x - 1, donate_argnums=0)
    x = make()
    expected = np.array(x)
    with self._open() as checkpoints:
      checkpoints.save(1, {'x': x}, {}, stage='8k', is_stage_end=False)
      for _ in range(20):
        x = update(x)
      x.block_until_ready()
      abstract = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
      restored = checkpoints.restore_newest({'x': abstract})
    np.testing.assert_array_equal(restored.state['x'], expected)

  def _assert_falls_back(self, damaged_path, reason):
    """Step 1 is restored although `damaged_path`, newer, is there."""
    self.addCleanup(self._let_abandoned_reads_end)
    with self.assertLogs('absl', 'WARNING') as logs:
      restored = self._open().restore_newest(self._abstract)
    self.assertEqual(restored.step, 1)
    self.assertEqual(restored.meta, {'position': 10})
    chex.assert_trees_all_equal(
      _host(restored.state), _host(_state(self._abstract, 1))
    )
    ((step, told),) = restored.damaged
    self.assertEqual(step, 2)
    self.assertIn(str(damaged_path), told)
    self.assertRegex(told, reason)
    self.assertTrue(
      any(str(damaged_path) in line for line in logs.output), logs.output
    )

  @parameterized.parameters(0.1, 0.37, 0.5, 0.9)
  def test_flipped_bit_is_found_and_the_older_one_used(self, share):
    _, newest = self._save(1, 2)
    _flip_bit(_data_files(newest / 'state')[0], share)
    self._assert_falls_back(
      newest, r'checksum.*(params|opt)\.|array \S+ cannot be read'
    )

  def test_truncated_data_is_found_and_the_array_named(self):
    _, newest = self._save(1, 2)
    data = _data_files(newest / 'state')[0]
    os.truncate(data, data.stat().st_size // 2)
    self._assert_falls_back(newest, r'array \S+ cannot be read')

  @parameterized.parameters(
    ('state/_METADATA', r'cannot be read'),
    ('_CHECKPOINT_METADATA', 'manifest'),
    ('state/manifest.ocdbt', r'cannot be read'),
    ('state', r'manifest|cannot be read'),
  )
  def test_missing_file_is_found_and_the_older_one_used(self, name, reason):
    _, newest = self._save(1, 2)
    (newest / name).rename(self._dir.parent / 'removed')
    self._assert_falls_back(newest, reason)

  def test_missing_data_file_is_found(self):
    _, newest = self._save(1, 2)
    _data_files(newest / 'state')[0].unlink()
    self._assert_falls_back(newest, 'cannot be read')

  def test_altered_manifest_is_damage_and_not_another_model(self):
    _, newest = self._save(1, 2)
    path = newest / '_CHECKPOINT_METADATA'
    path.write_text(path.read_text().replace('512', '513', 1))
    self._assert_falls_back(newest, 'manifest')

  def test_all_damaged_is_an_error_that_names_them(self):
    self.addCleanup(self._let_abandoned_reads_end)
    paths = self._save(1, 2)
    for path in paths:
      _flip_bit(_data_files(path / 'state')[0])
    with self.assertRaisesRegex(CheckpointError, 'every checkpoint') as caught:
      self._open().restore_newest(self._abstract)
    for path in paths:
      self.assertIn(str(path), str(caught.exception))

  def test_another_model_is_an_error_that_names_the_array(self):
    self._save(1)
    wider = dict(self._abstract)
    wider['histogram'] = jax.ShapeDtypeStruct(
      (4, 32), jnp.int32, sharding=self._abstract['histogram'].sharding
    )
    with self.assertRaisesRegex(
      CheckpointMismatchError,
      r"'histogram' is int32\[4, 16\] in the checkpoint, int32\[4, 32\]",
    ):
      self._open().restore_newest(wider)
    fewer = {k: v for k, v in self._abstract.items() if k != 'step'}
    with self.assertRaisesRegex(CheckpointMismatchError, "'step'.*missing"):
      self._open().restore_newest(fewer)
    more = dict(self._abstract, extra=self._abstract['step'])
    with self.assertRaisesRegex(CheckpointMismatchError, "'extra' is missing"):
      self._open().restore_newest(more)

  def test_damaged_checkpoint_does_not_count_and_its_step_can_be_saved(self):
    self.addCleanup(self._let_abandoned_reads_end)
    paths = self._save(1, 2, 3, keep_last=3)
    _flip_bit(_data_files(paths[2] / 'state')[0])
    with self._open(keep_last=3) as checkpoints:
      self.assertEqual(checkpoints.restore_newest(self._abstract).step, 2)
    # A new process: what is known of the damage is on disk.
    self._save(3, keep_last=3)
    self.assertEqual(
      self._names(),
      [
        'step_00000001',
        'step_00000002',
        'step_00000003',
        'step_00000003.1',
        'step_00000003.damaged',
      ],
    )
    restored = self._open().restore_newest(self._abstract)
    self.assertEqual((restored.step, restored.damaged), (3, []))

  def test_keeps_the_newest_and_one_a_stage(self):
    with self._open(keep_last=2) as checkpoints:
      for step, stage, is_end in (
        (1, '8k', False),
        (2, '8k', True),
        (3, '64k', False),
        (4, '64k', True),
        (5, '256k', False),
        (6, '256k', False),
        (7, '256k', False),
      ):
        checkpoints.save(
          step, {'x': jnp.int32(step)}, {}, stage=stage, is_stage_end=is_end
        )
    self.assertEqual(
      self._names(), [f'step_{step:08d}' for step in (2, 4, 6, 7)]
    )

  def test_saving_a_step_again_supersedes_it(self):
    self._save(1, 2)
    with self._open() as checkpoints:
      checkpoints.save(
        2, _state(self._abstract, 9), {}, stage='8k', is_stage_end=True
      )
      restored = checkpoints.restore_newest(self._abstract)
    chex.assert_trees_all_equal(
      _host(restored.state), _host(_state(self._abstract, 9))
    )
    self.assertEqual(self._names(), ['step_00000001', 'step_00000002.1'])

  def test_old_ones_go_only_after_the_new_one_has_committed(self):
    self._save(1, 2, keep_last=2)
    checkpoints = self._open(keep_last=2)
    checkpoints.save(
      3, _state(self._abstract), {}, stage='8k', is_stage_end=False
    )
    self.assertContainsSubset(['step_00000001', 'step_00000002'], self._names())
    checkpoints.wait()
    self.assertEqual(self._names(), ['step_00000002', 'step_00000003'])

  def test_due_by_steps_and_by_minutes(self):
    checkpoints = self._open(every_steps=100, every_minutes=0.5)
    self.assertFalse(checkpoints.due(0, now=1000.0))
    self.assertFalse(checkpoints.due(1, now=1029.0))
    self.assertTrue(checkpoints.due(2, now=1030.0))
    self.assertTrue(checkpoints.due(100, now=1001.0))
    checkpoints.save(
      100, {'x': jnp.int32(1)}, {}, stage='8k', is_stage_end=False, wait=True
    )
    self.assertFalse(checkpoints.due(101, now=1031.0))
    self.assertFalse(checkpoints.due(102, now=1060.0))
    self.assertTrue(checkpoints.due(103, now=1061.0))
    self.assertFalse(self._open(every_steps=0).due(200, now=0.0))

  def test_rejects_what_cannot_be_saved(self):
    checkpoints = self._open()
    with self.assertRaisesRegex(CheckpointError, "'a.b' is a ndarray"):
      checkpoints.save(
        1, {'a': {'b': np.ones(2)}}, {}, stage='8k', is_stage_end=False
      )
    with self.assertRaisesRegex(CheckpointError, 'meta='):
      checkpoints.save(
        1, {'a': jnp.ones(2)}, {'x': {1, 2}}, stage='8k', is_stage_end=False
      )

  def test_unwritable_directory_is_a_clear_error(self):
    self._dir.write_text('a file is in the way')
    with self.assertRaisesRegex(CheckpointError, str(self._dir)):
      self._open()


if __name__ == '__main__':
  absltest.main()
