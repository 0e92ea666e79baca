"""Products with parameters: values, and gradients that add up in float32."""

import contextlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe import loss, sharding
from hybrid_moe.config import MeshConfig
from hybrid_moe.mesh import make_mesh
from hybrid_moe.model import experts, softmax_attention
from hybrid_moe.model.linear import (
  linear,
  merge_heads,
  project_heads,
  whole,
)
from hybrid_moe.model.router import Routes

QUICK = {'xla_backend_optimization_level': 0}


def on_devices(count):
  """A mesh of `count` devices; for 0 none."""
  if not count:
    return contextlib.nullcontext()
  return jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:count]))


def place_rows(x):
  return sharding.constrain(jnp.asarray(x), sharding.ROWS_B)


def place_parameter(w, dims):
  spec = sharding.parameter(dims, w.shape)
  return jnp.asarray(w) if spec is None else jax.device_put(w, spec)


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def relative_rms(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))


def quick_jit(function):
  return jax.jit(function, compiler_options=QUICK)


class LinearTest(parameterized.TestCase):
  @parameterized.parameters(0, 1, 8)
  def test_equals_plain_products(self, devices):
    B, T, D, H, K = 8, 5, 16, 2, 12
    x_BTD, w_DHK = normal(0, B, T, D), normal(1, D, H, K)
    v_HKD, cotangent = normal(2, H, K, D), normal(3, B, T, D)

    def plain(x_BTD, w_DHK, v_HKD):
      y_BTHK = jnp.einsum('btd,dhk->bthk', x_BTD, w_DHK)
      z_BTD = jnp.einsum('bthk,hkd->btd', y_BTHK, v_HKD)
      return z_BTD + z_BTD @ v_HKD.reshape(-1, D)[:D]

    def ours(x_BTD, w_DHK, v_HKD):
      z_BTD = merge_heads(project_heads(x_BTD, w_DHK), v_HKD)
      square_DD = whole(v_HKD, 'float32').reshape(-1, D)[:D]
      return z_BTD + jnp.einsum('btd,de->bte', z_BTD, square_DD)

    want, pull = jax.vjp(plain, x_BTD, w_DHK, v_HKD)
    want_grads = pull(cotangent)
    with on_devices(devices):
      arguments = (
        place_rows(x_BTD),
        place_parameter(w_DHK, 'DHK'),
        place_parameter(v_HKD, 'HVD'),
      )

      @quick_jit
      def run(arguments, cotangent):
        got, pull = jax.vjp(ours, *arguments)
        return got, pull(cotangent)

      got, got_grads = run(arguments, place_rows(cotangent))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    for a, b, argument in zip(got_grads, want_grads, arguments):
      np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
      self.assertEqual(a.dtype, jnp.float32)
      self.assertTrue(
        a.sharding.is_equivalent_to(argument.sharding, argument.ndim)
      )

  @parameterized.parameters(0, 8)
  def test_bfloat16_weight_gradient_is_a_float32_sum(self, devices):
    """4104 tokens add 1 each, which bfloat16 cannot even hold."""
    B, T, D = 8, 513, 16
    with on_devices(devices):
      x_BTD = place_rows(jnp.ones((B, T, D), jnp.bfloat16))
      w_DY = place_parameter(normal(0, D, 4), 'DY')

      @quick_jit
      def gradient(x_BTD, w_DY):
        y_BTY, pull = jax.vjp(lambda w: linear(x_BTD, w), w_DY)
        return y_BTY, pull(jnp.ones_like(y_BTY))[0]

      y_BTY, dw_DY = gradient(x_BTD, w_DY)
    self.assertEqual(y_BTY.dtype, jnp.bfloat16)
    self.assertEqual(dw_DY.dtype, jnp.float32)
    self.assertTrue(dw_DY.sharding.is_equivalent_to(w_DY.sharding, 2))
    np.testing.assert_array_equal(dw_DY, np.full((D, 4), B * T))

  @parameterized.parameters(0, 8)
  def test_gradient_of_a_row_that_is_looked_up_often(self, devices):
    B, T, U, D = 8, 512, 4, 16
    with on_devices(devices):
      table_UD = place_parameter(normal(0, U, D), 'UD')
      ids_BT = place_rows(np.ones((B, T), np.int32))

      @quick_jit
      def gradient(table_UD, ids_BT):
        def look_up(table_UD):
          rows_BTD = sharding.look_up(whole(table_UD, 'bfloat16'), ids_BT)
          return rows_BTD.astype(jnp.bfloat16)

        x_BTD, pull = jax.vjp(look_up, table_UD)
        return pull(jnp.ones_like(x_BTD))[0]

      got = gradient(table_UD, ids_BT)
    want = np.zeros((U, D))
    want[1] = B * T
    self.assertEqual(got.dtype, jnp.float32)
    self.assertTrue(got.sharding.is_equivalent_to(table_UD.sharding, 2))
    np.testing.assert_array_equal(got, want)

  def test_gradients_cross_devices_in_float32(self):
    with on_devices(8):
      x_BTD = place_rows(jnp.ones((8, 4, 16), jnp.bfloat16))
      w_DY = place_parameter(normal(0, 16, 8), 'DY')

      def gradient(x_BTD, w_DY):
        y_BTY, pull = jax.vjp(lambda w: linear(x_BTD, w), w_DY)
        return pull(y_BTY)

      text = jax.jit(gradient).lower(x_BTD, w_DY).compile().as_text()
    sums = re.findall(
      r'= \(?(\w+)\[[^=]*? (?:all-reduce|reduce-scatter)(?:-start)?\(', text
    )
    self.assertNotEmpty(sums, text)
    self.assertEqual(set(sums), {'f32'})
    # The CPU compiler widens a sum of bfloat16 and says so in its name.
    self.assertNotIn('promoted', text)

  def test_head_gradient_over_many_stretches(self):
    B, T, D, U = 2, 256, 16, 32
    hidden_BTD = jnp.asarray(normal(0, B, T, D), jnp.bfloat16)
    # A gradient that all tokens push the same way, so that its sum grows.
    hidden_BTD = jnp.abs(hidden_BTD)
    head_DU = normal(1, D, U)
    targets_BT = np.random.default_rng(2).integers(0, 4, (B, T))

    def gradient(dtype, logits_at_once):
      with mock.patch.object(loss, '_LOGITS_AT_ONCE', logits_at_once):

        def total(head_DU):
          hidden = hidden_BTD.astype(dtype)
          # The same rounded values in either dtype.
          head_DU = whole(head_DU, 'bfloat16')
          return jnp.sum(loss.token_losses(hidden, head_DU, targets_BT).nll_BT)

        return quick_jit(jax.grad(total))(head_DU)

    exact = gradient('float32', 2**26)
    one = relative_rms(gradient('bfloat16', 2**26), exact)
    many = relative_rms(gradient('bfloat16', B * U), exact)
    self.assertLess(one, 4e-3)
    self.assertLess(many, 4e-3)

  def test_expert_gradient_over_many_blocks(self):
    E, Z, F, N = 2, 16, 16, 4096
    z_NZ = jnp.asarray(np.abs(normal(0, N, Z)), jnp.bfloat16)
    weights = experts.ExpertWeights(
      *(
        0.2 * normal(i, *shape).astype(jnp.bfloat16).astype(np.float32)
        for i, shape in enumerate(((E, Z, F), (E, Z, F), (E, F, Z)))
      )
    )
    ids_NS = jnp.asarray(np.arange(N)[:, None] % E, jnp.int32)

    def gradients(dtype, implementation):
      def total(weights):
        u_NZ = experts.run_experts(
          z_NZ.astype(dtype),
          Routes(ids_NS, jnp.ones((N, 1)), jnp.zeros(N)),
          weights,
          gate_cap=4.0,
          up_cap=25.0,
          implementation=implementation,
        )
        return jnp.sum(u_NZ.astype(jnp.float32))

      return quick_jit(jax.grad(total))(weights)

    exact = gradients('float32', 'ragged_dot')
    ragged = gradients('bfloat16', 'ragged_dot')
    blocked = gradients('bfloat16', 'blocked')
    for name, got, whole_sum, want in zip(
      weights._fields, blocked, ragged, exact
    ):
      error = relative_rms(got, want)
      self.assertLess(error, 8e-3, name)
      self.assertLess(error, 1.1 * relative_rms(whole_sum, want), name)

  def test_key_and_value_gradients_over_many_query_blocks(self):
    B, T, H, K = 1, 512, 2, 16
    q, k, v = (
      jnp.asarray(normal(i, B, T, H, K), jnp.bfloat16) for i in range(3)
    )
    segments_BT = np.ones((B, T), np.int32)
    cotangent = np.abs(normal(3, B, T, H, K))

    def gradients(dtype):
      with mock.patch.object(softmax_attention, 'QUERY_BLOCK', 8):

        def attend(q, k, v):
          return softmax_attention.softmax_attention(
            q, k, v, segments_BT, K**-0.5
          )[0]

        @quick_jit
        def run(q, k, v):
          return jax.vjp(attend, q, k, v)[1](cotangent)

        return run(*(x.astype(dtype) for x in (q, k, v)))

    exact = gradients('float32')
    got = gradients('bfloat16')
    for name, a, b in zip('qkv', got, exact):
      self.assertLess(relative_rms(a, b), 3e-3, name)


if __name__ == '__main__':
  absltest.main()
