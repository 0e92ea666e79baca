"""Functions run once for each shard of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from hybrid_moe import sharding
from hybrid_moe.config import MeshConfig
from hybrid_moe.mesh import make_mesh
from hybrid_moe.parallel.batch_shards import map_batch_shards

B, D = 16, 3


def local(batched, replicated):
  """A product row by row, and one sum for each shard."""
  x_bD, scale_b = batched
  y_bD = scale_b[:, None] * (x_bD @ replicated)
  return y_bD, jnp.sum(y_bD)[None], jnp.int32(x_bD.shape[0])[None]


class BatchShardsTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x_BD = rng.normal(size=(B, D)).astype(np.float32)
    self.scale_B = rng.normal(size=B).astype(np.float32)
    self.w_DD = rng.normal(size=(D, D)).astype(np.float32)
    self.mesh = make_mesh(MeshConfig())

  def place(self):
    rows = sharding.constrain(self.x_BD, sharding.ROWS_B)
    scale = sharding.constrain(self.scale_B, sharding.ROWS_B)
    return (rows, scale), sharding.constrain(self.w_DD, sharding.REPLICATED)

  def test_outside_a_mesh_it_is_a_call(self):
    y_BD, sums, rows = map_batch_shards(
      local, (self.x_BD, self.scale_B), self.w_DD
    )
    want = self.scale_B[:, None] * (self.x_BD @ self.w_DD)
    np.testing.assert_allclose(y_BD, want, rtol=1e-5)
    self.assertEqual(sums.shape, (1,))
    self.assertEqual(rows.tolist(), [B])

  def test_each_shard_sees_its_own_rows(self):
    want = self.scale_B[:, None] * (self.x_BD @ self.w_DD)
    with jax.set_mesh(self.mesh):
      call = jax.jit(lambda b, r: map_batch_shards(local, b, r))
      y_BD, sums, rows = call(*self.place())
    np.testing.assert_allclose(y_BD, want, rtol=1e-5)
    self.assertEqual(rows.tolist(), [2] * 8)
    np.testing.assert_allclose(
      sums, want.reshape(8, -1).sum(1), rtol=1e-5, atol=1e-6
    )
    self.assertEqual(tuple(y_BD.sharding.spec)[:1], tuple(sharding.ROWS_B))

  def test_gradient_of_replicated_arrays_is_summed_over_shards(self):
    def objective(batched, replicated):
      y_BD, _, _ = map_batch_shards(local, batched, replicated)
      return jnp.sum(y_BD**2)

    grad = jax.grad(objective, argnums=(0, 1))
    want = grad((self.x_BD, self.scale_B), self.w_DD)
    with jax.set_mesh(self.mesh):
      got = jax.jit(grad)(*self.place())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


if __name__ == '__main__':
  absltest.main()
