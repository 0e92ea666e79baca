"""Pieces of the chunked KDA form: tiles, exponents and the inverse."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.kda import (
  agreement,
  arg_specs,
  kda,
  tile,
  tile_scores,
  triangular,
)


def collinear_lower(size, beta, seed=0):
  """Strictly lower beta k_i . k_j of nearly equal keys without decay."""
  rng = np.random.default_rng(seed)
  k = np.ones((size, 64)) + 0.02 * rng.normal(size=(size, 64))
  k /= np.linalg.norm(k, axis=1, keepdims=True)
  return np.tril(beta * (k @ k.T), -1)


class TriangularTest(parameterized.TestCase):
  @parameterized.product(size=(16, 32, 64, 128), beta=(0.99, 1.9))
  def test_inverse_of_repeated_keys(self, size, beta):
    lower = np.stack([collinear_lower(size, beta, seed) for seed in range(3)])
    expected = np.linalg.inv(np.eye(size) + lower)
    inverse = jax.jit(lambda x: triangular.invert_unit_lower(x, 16))(
      jnp.asarray(lower, jnp.float32)
    )
    error = np.abs(inverse - expected).max() / np.abs(expected).max()
    self.assertLess(error, 2e-5)
    np.testing.assert_array_equal(np.triu(inverse[0], 1), 0.0)

  def test_later_rows_do_not_touch_earlier_ones(self):
    lower = collinear_lower(64, 0.9)
    changed = lower.copy()
    changed[37:] = np.tril(np.full((64, 64), 0.3), -1)[37:]
    invert = jax.jit(lambda x: triangular.invert_unit_lower(x, 16))
    first = invert(jnp.asarray(lower, jnp.float32))
    second = invert(jnp.asarray(changed, jnp.float32))
    np.testing.assert_array_equal(first[:37], second[:37])


class TileTest(parameterized.TestCase):
  def test_refuses_sizes_and_spans(self):
    with self.assertRaisesRegex(ValueError, 'chunk=48'):
      tile.TileConfig(chunk=48)
    with self.assertRaisesRegex(ValueError, 'spans 96'):
      tile.TileConfig().check_exponent_budget(-6.0)
    with self.assertRaisesRegex(ValueError, 'spans 160'):
      tile.TileConfig(tile=32).check_exponent_budget(-5.0)
    tile.TileConfig().check_exponent_budget(-5.0)

  @parameterized.parameters(
    (1, 1), (64, 4), (65, 4), (4096, 4), (4160, 4), (640, 100)
  )
  def test_blocks_cover_the_tokens_with_little_padding(self, tokens, heads):
    config = tile.TileConfig()
    blocks, chunks = config.split_tokens(tokens, heads)
    needed = -(-tokens // config.chunk)
    self.assertGreaterEqual(blocks * chunks, needed)
    self.assertLess(blocks * chunks - needed, blocks)
    self.assertLessEqual(heads * chunks, max(config.max_block, heads))

  def test_the_platform_decides_on_the_length_of_blocks(self):
    inputs = arg_specs.abstract_inputs(arg_specs.SPECS['8k'])
    mesh = jax.make_mesh((8,), ('data',))

    def loop_lengths(platform):
      device = jax.sharding.AbstractDevice('some chip', 1, platform)
      abstract = jax.sharding.AbstractMesh(
        (1,), ('data',), mesh.axis_types, abstract_device=device
      )
      with jax.sharding.use_abstract_mesh(abstract):
        program = jax.make_jaxpr(
          lambda x: kda(**x, implementation='chunked_xla')
        )(inputs)
      (call,) = [e for e in program.eqns if 'call_jaxpr' in e.params]
      return [
        e.params['length']
        for e in call.params['call_jaxpr'].eqns
        if e.primitive.name == 'scan'
      ]

    self.assertEqual(loop_lengths('cpu'), [128])
    for platform in ('gpu', 'tpu'):
      self.assertEqual(loop_lengths(platform), [4])

  @parameterized.parameters(64, 128, 256)
  def test_blocks_of_accelerators_fit_their_memory(self, width):
    tiles = tile.choose_tiles('gpu', width, width)
    one = 16 * 64 * 2 * width * 4
    self.assertLessEqual(tiles.max_block * one, 2**30)
    self.assertGreater((tiles.max_block + 1) * one, 2**30)

  def test_the_length_of_blocks_changes_no_result(self):
    # 5 chunks of 2 heads: two whole blocks and padding, and one block.
    inputs = arg_specs.make_inputs(arg_specs.ArgSpec(1, 300, 2, 2, 32, 32))
    ids = jnp.asarray(np.repeat([1, 2, 0], [130, 150, 20])[None], jnp.int32)

    def run(max_block):
      tiles = tile.TileConfig(max_block=max_block)

      def program(inputs):
        def call(inputs):
          return kda(**inputs, segment_ids=ids, return_final_state=True)

        outputs, pull = jax.vjp(call, inputs)
        return outputs, pull((inputs['v'], inputs['h0']))

      options = {'xla_backend_optimization_level': 0}
      with mock.patch.object(tile, 'choose_tiles', return_value=tiles):
        return jax.jit(program, compiler_options=options)(inputs)

    short, long = run(6), run(4096)
    for a, b in zip(jax.tree.leaves(short), jax.tree.leaves(long), strict=True):
      self.assertLess(agreement.relative_rms(a, b), 1e-6)

  def test_decay_sums(self):
    rng = np.random.default_rng(0)
    g = -5 * rng.random((3, 64, 8))
    decay = tile_scores.accumulate_decay(jnp.asarray(g, jnp.float32), 16)
    total = np.cumsum(g, axis=1)
    first = total[:, ::16]
    inner = total.reshape(3, 4, 16, 8) - first[:, :, None]
    np.testing.assert_allclose(decay.inner, inner, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(decay.inner[:, :, 0], 0.0)
    np.testing.assert_allclose(decay.entry, first, rtol=1e-5)
    np.testing.assert_allclose(decay.exit, total[:, -1:] - first, rtol=1e-5)
    np.testing.assert_allclose(decay.step, np.diff(first, axis=1), rtol=1e-5)

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_a_saturated_tile_neither_overflows_nor_flushes(self, dtype):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(64, 32)) * 1e-3 for _ in range(2))
    g = np.full((64, 32), -5.0)
    operands, factors = jax.jit(
      lambda q, k, g: tile_scores.tile_operands(q, k, g, 16, dtype)
    )(*(jnp.asarray(x, jnp.float32) for x in (q, k, g)))
    for x in (*factors.left, factors.prefix[0], operands.qk, operands.kk):
      self.assertTrue(bool(jnp.all(jnp.isfinite(x))))
    for x in factors.left:
      self.assertFalse(bool(jnp.any(x == 0)))
    gap = np.subtract.outer(np.arange(64), np.arange(64))
    expected = (q @ k.T) * np.exp(-5.0 * np.maximum(gap, 0))
    tiles = np.arange(64) // 16
    near = (gap >= 0) & (gap < 14) & (tiles[:, None] == tiles)
    np.testing.assert_allclose(
      np.asarray(operands.qk)[near],
      expected[near],
      rtol=1e-4 if dtype == jnp.float32 else 0.5,
      atol=0 if dtype == jnp.float32 else 1e-7,
    )


if __name__ == '__main__':
  absltest.main()
