"""The LatentMoE layer against a dense computation of its equations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.balance.state import RouterView
from hybrid_moe.model.latent_moe import LatentMoe
from hybrid_moe.model_config import BalanceConfig, MoeConfig
from hybrid_moe.presets import TINY

B, T, D, E, S = 2, 8, 12, 6, 2
BALANCE = BalanceConfig(num_bins=50)
SEGMENTS = np.array([[1] * 6 + [0] * 2, [1] * 3 + [2] * 5], np.int32)


def make_config(dtype='float32', **moe):
  fields = dict(
    num_experts=E, top_k=S, latent_dim=8, expert_hidden=10, routed_scale=1.5
  )
  return dataclasses.replace(
    TINY, d_model=D, dtype=dtype, moe=MoeConfig(**{**fields, **moe})
  )


def make_view(bias_E):
  return RouterView(
    bias_E=jnp.asarray(bias_E, jnp.float32),
    low=jnp.float32(-3.0),
    width=jnp.float32(6.0 / BALANCE.num_bins),
  )


BIAS_E = np.linspace(-0.4, 0.4, E)


def random_params(config):
  layer = LatentMoe(config, BALANCE)
  shapes = jax.eval_shape(
    layer.init,
    jax.random.key(0),
    jnp.zeros((B, T, D)),
    SEGMENTS,
    make_view(np.zeros(config.moe.num_experts)),
  )
  rng = np.random.default_rng(1)
  return jax.tree_util.tree_map_with_path(
    lambda path, p: (
      (path[-1].key == 'scale') + 0.5 * rng.normal(size=p.shape)
    ).astype(np.float32),
    shapes['params'],
  )


def layer_output(config, params, x_BTD, bias_E, balance=BALANCE):
  return LatentMoe(config, balance).apply(
    {'params': params}, x_BTD, SEGMENTS, make_view(bias_E)
  )


def situ_glu(x, gate, up, down):
  a, b = x @ gate, x @ up
  hidden = 4 * jnp.tanh(a / 4) * jax.nn.sigmoid(a) * 25 * jnp.tanh(b / 25)
  return hidden @ down


def oracle(config, params, x_BTD, bias_E):
  """Every expert on every token, weighted by a mask of the chosen ones."""
  m, p = config.moe, params
  scores = jax.nn.sigmoid(x_BTD @ p['router'])
  ranks = jnp.argsort(jnp.argsort(-(scores + bias_E), axis=-1), axis=-1)
  chosen = scores * (ranks < m.top_k)
  weights = m.routed_scale * chosen / jnp.sum(chosen, -1, keepdims=True)
  z = x_BTD @ p['latent_down'] if m.latent_dim else x_BTD
  y = sum(
    weights[..., e : e + 1]
    * situ_glu(z, p['w_gate'][e], p['w_up'][e], p['w_down'][e])
    for e in range(m.num_experts)
  )
  if m.use_latent_norm:
    mean_square = jnp.mean(y**2, -1, keepdims=True)
    y = y * jax.lax.rsqrt(mean_square + config.norm_eps)
    y = y * p['latent_norm']['scale'][None, None]
  if m.latent_dim:
    y = y @ p['latent_up']
  if m.num_shared_experts:
    shared = p['shared']
    y = y + situ_glu(x_BTD, shared['w_gate'], shared['w_up'], shared['w_down'])
  return y


@functools.partial(
  jax.jit,
  static_argnums=(0, 1),
  compiler_options={'xla_backend_optimization_level': 0},
)
def value_and_gradients(is_oracle, config, params, x_BTD, bias_E, cotangent):
  def function(params, x_BTD):
    if is_oracle:
      return oracle(config, params, x_BTD, bias_E[None, None])
    return layer_output(config, params, x_BTD, bias_E)[0]

  value, pull = jax.vjp(function, params, x_BTD)
  return value, pull(cotangent)


class LatentMoeTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x_BTD, self.cotangent = rng.normal(size=(2, B, T, D)).astype('f')

  @parameterized.named_parameters(
    ('blocked', dict(implementation='blocked')),
    ('ragged_dot', dict(implementation='ragged_dot')),
    ('two_shared', dict(num_shared_experts=2)),
    ('none_shared', dict(num_shared_experts=0)),
    ('no_latent', dict(latent_dim=0, use_latent_norm=False)),
    ('no_latent_but_norm', dict(latent_dim=0)),
    ('one_of_two', dict(top_k=1, num_experts=2)),
  )
  def test_matches_equations(self, moe):
    config = make_config(**moe)
    params = random_params(config)
    bias_E = BIAS_E[: config.moe.num_experts].astype(np.float32)
    args = (config, params, self.x_BTD, bias_E, self.cotangent)
    want, want_grads = value_and_gradients(True, *args)
    got, got_grads = value_and_gradients(False, *args)
    np.testing.assert_allclose(got, want, atol=3e-5 * np.abs(want).max())
    for (path, a), b in zip(
      jax.tree_util.tree_leaves_with_path(got_grads),
      jax.tree.leaves(want_grads),
    ):
      # With one expert a token its weight is 1, whatever the router says.
      scale = max(np.abs(b).max(), 1e-3)
      np.testing.assert_allclose(a, b, atol=5e-5 * scale, err_msg=str(path))

  def test_router_reads_the_full_width(self):
    config = make_config()
    params = random_params(config)
    self.assertEqual(params['router'].shape, (D, E))
    self.assertEqual(params['w_gate'].shape, (E, 8, 10))
    self.assertEqual(params['shared']['w_gate'].shape, (D, 10))
    without = random_params(make_config(latent_dim=0))
    self.assertEqual(without['w_gate'].shape, (E, D, 10))
    self.assertNotIn('latent_down', without)

  def test_bias_chooses_but_does_not_weigh(self):
    """A bias that leaves the choice alone leaves the output alone."""
    config = make_config()
    params = random_params(config)
    plain, stats, _ = layer_output(config, params, self.x_BTD, np.zeros(E))
    shifted, _, _ = layer_output(config, params, self.x_BTD, np.full(E, 0.5))
    np.testing.assert_array_equal(plain, shifted)
    far = np.where(np.arange(E) < S, 2.0, 0.0)
    _, forced, _ = layer_output(config, params, self.x_BTD, far)
    real = int((SEGMENTS > 0).sum())
    np.testing.assert_array_equal(forced.load_E, [[real] * S + [0] * (E - S)])
    self.assertGreater(np.count_nonzero(stats.load_E), S)

  def test_statistics_count_real_tokens(self):
    config = make_config()
    params = random_params(config)
    _, stats, aux = layer_output(config, params, self.x_BTD, BIAS_E)
    real = int((SEGMENTS > 0).sum())
    self.assertEqual(int(stats.tokens[0]), real)
    self.assertEqual(int(stats.load_E.sum()), S * real)
    np.testing.assert_array_equal(
      stats.histogram_EW.sum(-1), np.full((1, E), real)
    )
    np.testing.assert_allclose(stats.gate_mass_E.sum(), 1.5 * real, rtol=1e-5)
    self.assertEqual(float(aux), 0.0)

  def test_aux_loss_only_when_asked(self):
    config = make_config()
    params = random_params(config)
    balance = BalanceConfig(method='aux_loss')
    _, _, aux = layer_output(config, params, self.x_BTD, np.zeros(E), balance)
    self.assertGreater(float(aux), 0.9)
    self.assertTrue(np.isfinite(aux))

  def test_bfloat16_routes_as_float32(self):
    """Scores come from the same bfloat16 inputs in float32."""
    config = make_config('bfloat16')
    params = random_params(config)
    x_BTD = jnp.asarray(self.x_BTD, jnp.bfloat16)
    y_BTD, low, _ = layer_output(config, params, x_BTD, BIAS_E)
    self.assertEqual(y_BTD.dtype, jnp.bfloat16)
    _, high, _ = layer_output(
      make_config(), params, x_BTD.astype(jnp.float32), BIAS_E
    )
    np.testing.assert_array_equal(low.histogram_EW, high.histogram_EW)


if __name__ == '__main__':
  absltest.main()
