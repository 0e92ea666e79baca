"""Where arrays live."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import linen as nn
from jax.sharding import PartitionSpec

from hybrid_moe import sharding
from hybrid_moe.config import MeshConfig
from hybrid_moe.mesh import make_mesh


class ShardingTest(parameterized.TestCase):
  def test_no_mesh_means_no_spec(self):
    self.assertFalse(sharding.has_mesh())
    self.assertIsNone(sharding.parameter('DF', (16, 8)))
    x = jnp.ones((2, 2))
    self.assertIs(sharding.constrain(x, sharding.TOKENS_BT), x)

  @parameterized.parameters(
    ('DF', (16, 24), ('data', None)),
    ('FD', (24, 16), (None, 'data')),
    ('DHK', (32, 2, 4), ('data', None, None)),
    # Not divisible by 8.
    ('DF', (12, 8), (None, None)),
    # A mesh axis splits one dimension only.
    ('DD', (16, 16), ('data', None)),
    ('EZF', (8, 8, 8), ('data', None, None)),
    ('EZF', (12, 8, 8), (None, 'data', None)),
    ('RHK', (16, 2, 4), ('data', None, None)),
    ('.', (8,), (None,)),
  )
  def test_parameter_spec(self, dims, shape, want):
    with jax.set_mesh(make_mesh(MeshConfig())):
      self.assertTrue(sharding.has_mesh())
      self.assertEqual(sharding.parameter(dims, shape), PartitionSpec(*want))

  def test_dims_and_shape_must_agree(self):
    with jax.set_mesh(make_mesh(MeshConfig())):
      with self.assertRaises(ValueError):
        sharding.parameter('DF', (16, 8, 8))

  def test_parameters_are_born_sharded(self):
    with jax.set_mesh(make_mesh(MeshConfig())):
      init = sharding.born_sharded(nn.initializers.ones, 'DF', (16, 3))
      w_DF = jax.jit(init, static_argnums=(1, 2))(
        jax.random.key(0), (16, 3), jnp.float32
      )
    self.assertEqual(w_DF.sharding.spec, PartitionSpec('data', None))
    self.assertEqual(w_DF.addressable_shards[0].data.shape, (2, 3))

  def test_gather_and_its_gradient(self):
    w_DF = jnp.arange(32.0).reshape(16, 2)
    with jax.set_mesh(make_mesh(MeshConfig())):
      w = sharding.constrain(w_DF, PartitionSpec('data', None))
      whole = jax.jit(sharding.gather)(w)
      self.assertTrue(whole.sharding.is_fully_replicated)
      np.testing.assert_array_equal(whole, w_DF)
      grad = jax.jit(jax.grad(lambda w: jnp.sum(sharding.gather(w) ** 2)))(w)
    # Fully sharded data parallelism: gradients keep the parameter's layout.
    self.assertEqual(grad.sharding.spec, PartitionSpec('data', None))
    np.testing.assert_array_equal(grad, 2 * w_DF)

  @parameterized.parameters((8, 8, 2), (8, 8, 1), (1, 1, 1), (1, 1, 2))
  def test_reshape_keeps_the_split_of_rows(self, devices, rows, heads):
    x_BTX = jnp.arange(rows * 3.0 * heads * 4).reshape(rows, 3, heads * 4)
    plain = sharding.reshape_rows(x_BTX, heads, 4)
    self.assertEqual(plain.shape, (rows, 3, heads, 4))
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:devices])):
      x = sharding.constrain(x_BTX, sharding.ACT_BTD)
      there = jax.jit(lambda x: sharding.reshape_rows(x, heads, 4))(x)
      back = jax.jit(lambda x: sharding.reshape_rows(x, heads * 4))(there)
      # Of the same type as what it came from: the two can be added.
      jax.jit(jnp.add)(back, x)
    self.assertEqual(there.sharding.spec[0], 'data')
    np.testing.assert_array_equal(there, plain)
    np.testing.assert_array_equal(back, x_BTX)

  def test_look_up_follows_the_ids(self):
    table_UD = jnp.arange(30.0).reshape(10, 3)
    ids_BT = jnp.arange(16, dtype=jnp.int32).reshape(8, 2) % 10
    plain = sharding.look_up(table_UD, ids_BT)
    np.testing.assert_array_equal(plain, np.asarray(table_UD)[ids_BT])
    with jax.set_mesh(make_mesh(MeshConfig())):
      rows = jax.jit(sharding.look_up)(
        sharding.constrain(table_UD, sharding.REPLICATED),
        sharding.constrain(ids_BT, sharding.TOKENS_BT),
      )
    self.assertEqual(rows.sharding.spec, sharding.ACT_BTD)
    np.testing.assert_array_equal(rows, plain)


if __name__ == '__main__':
  absltest.main()
