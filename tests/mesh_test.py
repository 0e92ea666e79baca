"""Meshes and which batches fit them."""

import dataclasses

import jax
from absl.testing import absltest, parameterized
from jax.sharding import AxisType

from hybrid_moe import mesh as mesh_lib
from hybrid_moe.checks import ConfigError
from hybrid_moe.config import MeshConfig, StageConfig


class MeshTest(parameterized.TestCase):
  def test_takes_all_devices_in_order(self):
    mesh = mesh_lib.make_mesh(MeshConfig())
    self.assertEqual(mesh.axis_names, ('data', 'expert', 'seq', 'model'))
    self.assertEqual(mesh.devices.shape, (8, 1, 1, 1))
    self.assertEqual(list(mesh.devices.flat), jax.devices())

  def test_every_axis_is_explicit(self):
    mesh = mesh_lib.make_mesh(MeshConfig())
    self.assertEqual(mesh.axis_types, (AxisType.Explicit,) * 4)

  def test_given_devices_and_size(self):
    devices = jax.devices()[2:6]
    mesh = mesh_lib.make_mesh(MeshConfig(data=4), devices)
    self.assertEqual(list(mesh.devices.flat), devices)

  @parameterized.parameters(3, 16)
  def test_size_that_does_not_fit_is_rejected(self, size):
    with self.assertRaisesRegex(
      ConfigError, f'data={size}.*{size} places for 8 devices; accepted'
    ):
      mesh_lib.make_mesh(MeshConfig(data=size))

  def test_no_devices_are_rejected(self):
    with self.assertRaisesRegex(ConfigError, 'for 0 devices'):
      mesh_lib.make_mesh(MeshConfig(), [])

  @parameterized.parameters((8, 1), (16, 2), (24, 1))
  def test_accepts_rows_that_divide(self, global_batch, micro_batches):
    stage = StageConfig('s', 16, global_batch, 1.0, micro_batches)
    mesh_lib.check_batch(stage, mesh_lib.make_mesh(MeshConfig()))

  @parameterized.parameters(
    (4, 1, 4, 'a global_batch that is a multiple of 8'),
    (12, 1, 12, 'a global_batch that is a multiple of 8'),
    (16, 4, 4, r'micro_batches one of \[1, 2\], or'),
    (48, 48, 1, r'micro_batches one of \[1, 2, 3, 6\], or'),
  )
  def test_rejects_rows_that_do_not(
    self, global_batch, micro_batches, rows, accepted
  ):
    stage = StageConfig('s', 16, global_batch, 1.0, micro_batches)
    with self.assertRaisesRegex(
      ConfigError,
      rf"stages\['s'\].global_batch={global_batch}, micro_batches="
      rf'{micro_batches}: the {rows} rows .* of 8 devices; accepted is '
      + accepted,
    ):
      mesh_lib.check_batch(stage, mesh_lib.make_mesh(MeshConfig()))
    one = mesh_lib.make_mesh(MeshConfig(), jax.devices()[:1])
    mesh_lib.check_batch(dataclasses.replace(stage), one)


if __name__ == '__main__':
  absltest.main()
