"""Checksums: the same for every sharding, changed by every flipped bit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hybrid_moe.checksum import checksum, checksums


def _sample(dtype, shape=(24, 16), seed=0):
  """Random bits read as `dtype`, so NaNs and denormals occur."""
  dtype = np.dtype(dtype)
  rng = np.random.default_rng(seed)
  if dtype == np.bool_:
    return rng.integers(0, 2, shape).astype(np.bool_)
  return np.frombuffer(
    rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype
  ).reshape(shape)


def _mesh(sizes):
  return jax.make_mesh(sizes, ('a', 'b'), axis_types=(AxisType.Explicit,) * 2)


class ChecksumTest(chex.TestCase):
  @parameterized.parameters(
    jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32, jnp.uint16, jnp.bool_
  )
  def test_does_not_depend_on_sharding_or_device_count(self, dtype):
    x = _sample(dtype)
    expected = checksums([jax.device_put(x, jax.devices()[0])])
    for sizes, spec in (
      ((8, 1), ('a', None)),
      ((4, 2), ('a', 'b')),
      ((4, 2), (None, ('a', 'b'))),
      ((2, 2), ('b', 'a')),
      ((2, 4), ()),
    ):
      sharding = NamedSharding(_mesh(sizes), PartitionSpec(*spec))
      self.assertEqual(checksums([jax.device_put(x, sharding)]), expected)

  def test_under_an_explicit_mesh_beside_replicated_arrays(self):
    mesh = _mesh((4, 2))
    x = _sample(jnp.float32)
    expected = checksums([jnp.asarray(x), jnp.int32(7)])
    with jax.set_mesh(mesh):
      sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec('a', 'b')))
      scalar = jax.device_put(np.int32(7), NamedSharding(mesh, PartitionSpec()))
      self.assertEqual(checksums([sharded, scalar]), expected)

  @parameterized.parameters(
    jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint32, jnp.float8_e4m3fn
  )
  def test_every_single_bit_flip_of_a_small_array_changes_it(self, dtype):
    clean = np.array(_sample(dtype, (3, 5)))
    num_bits = clean.nbytes * 8
    flipped = np.repeat(clean[None], num_bits, axis=0)
    as_bytes = flipped.reshape(num_bits, -1).view(np.uint8)
    for bit in range(num_bits):
      as_bytes[bit, bit // 8] ^= 1 << (bit % 8)
    sums = jax.jit(jax.vmap(checksum))(flipped)
    self.assertNotIn(int(jax.jit(checksum)(clean)), np.asarray(sums).tolist())

  def test_random_bit_flips_of_a_large_array_change_it(self):
    clean = np.array(_sample(jnp.float32, (256, 512)))
    expected = checksums([jnp.asarray(clean)])
    rng = np.random.default_rng(1)
    for _ in range(20):
      damaged = clean.copy()
      view = damaged.view(np.uint8).reshape(-1)
      view[rng.integers(view.size)] ^= np.uint8(1 << rng.integers(8))
      self.assertNotEqual(checksums([jnp.asarray(damaged)]), expected)

  def test_two_flipped_signs_do_not_cancel(self):
    clean = np.ones((4, 4), np.float32)
    damaged = clean.copy()
    damaged[0, 0] = damaged[3, 1] = -1
    self.assertNotEqual(
      checksums([jnp.asarray(clean)]), checksums([jnp.asarray(damaged)])
    )

  def test_exchanged_elements_and_rows_change_it(self):
    clean = np.array(_sample(jnp.float32, (6, 6)))
    expected = checksums([jnp.asarray(clean)])
    for damaged in (clean.T, clean[::-1], np.roll(clean, 1, axis=1)):
      self.assertNotEqual(checksums([jnp.asarray(damaged)]), expected)

  def test_scalars_empty_arrays_and_keys(self):
    values = [jnp.int32(4), jnp.int32(5), jnp.zeros((0, 3)), jnp.bool_(True)]
    four, five, empty, _ = checksums(values)
    self.assertNotEqual(four, five)
    self.assertEqual(empty, 0)
    keys = [jax.random.key(0), jax.random.key(1)]
    self.assertLen(set(checksums(keys)), 2)

  @parameterized.parameters(jnp.complex64, jnp.int4)
  def test_rejects_a_dtype_without_whole_byte_patterns(self, dtype):
    with self.assertRaisesRegex(TypeError, jnp.dtype(dtype).name):
      checksums([jnp.zeros((2,), dtype)])


if __name__ == '__main__':
  absltest.main()
