"""The KDA layer against its equations, token by token in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.model import kda_layer
from hybrid_moe.model_config import KdaConfig
from hybrid_moe.presets import TINY

B, T, D = 2, 12, 24
SEGMENTS = np.array([[1] * 5 + [2] * 4 + [3] * 3, [1] * 12], np.int32)


def make_config(**kda):
  fields = dict(
    num_heads=2,
    key_dim=32,
    value_dim=40,
    gate_rank=6,
    implementation='reference',
  )
  return dataclasses.replace(
    TINY, d_model=D, init_std=0.3, kda=KdaConfig(**{**fields, **kda})
  )


# Compiles faster; nothing here is slow to run.
jit = functools.partial(
  jax.jit,
  static_argnums=0,
  compiler_options={'xla_backend_optimization_level': 0},
)


def init(config):
  layer = kda_layer.KdaLayer(config)
  x_BTD = jnp.zeros((B, T, D))
  return layer.init(jax.random.key(0), x_BTD, jnp.asarray(SEGMENTS))['params']


@jit
def apply(config, params, x_BTD, segment_ids_BT):
  layer = kda_layer.KdaLayer(config)
  return layer.apply({'params': params}, x_BTD, segment_ids_BT)


def random_params(config):
  """Every parameter away from its special initial value."""
  rng = np.random.default_rng(1)
  near = {'scale': 1.0, 'dt_bias': -3.0}
  return jax.tree_util.tree_map_with_path(
    lambda path, p: (
      near.get(path[-1].key, 0.0) + 0.3 * rng.normal(size=p.shape)
    ).astype(np.float32),
    jax.eval_shape(lambda: init(config)),
  )


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def oracle(config, params, x_BTD, segments):
  """The layer by its equations, one row, token and head at a time."""
  a = config.kda
  p = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
  out = np.zeros(x_BTD.shape)
  H, HV, K, V = a.num_heads, a.value_heads, a.key_dim, a.value_dim

  def convolved(row, ids, name, heads, width):
    y = row @ p[f'{name}_proj'].reshape(D, heads * width)
    z = np.zeros_like(y)
    for t in range(len(y)):
      for lag in range(a.conv_width):
        if t >= lag and ids[t] == ids[t - lag]:
          z[t] += p[f'{name}_conv'][lag] * y[t - lag]
    return (z * sigmoid(z)).reshape(-1, heads, width)

  for b in range(len(x_BTD)):
    row, ids = np.asarray(x_BTD[b], np.float64), segments[b]
    q, k = (convolved(row, ids, n, H, K) for n in 'qk')
    v = convolved(row, ids, 'v', HV, V)
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    z = np.einsum('tr,rhk->thk', row @ p['f_down'], p['f_up']) + p['dt_bias']
    rate = np.exp(p['A_log'])[:, None]
    if a.gate == 'bounded':
      g = a.gate_lower_bound * sigmoid(rate * z)
    else:
      g = -rate * np.log1p(np.exp(z))
    beta = sigmoid(row @ p['b_proj']) * (2 if a.allow_neg_eigval else 1)
    if a.output_gate_rank:
      gate = np.einsum('tr,rhv->thv', row @ p['g_down'], p['g_up'])
    else:
      gate = np.einsum('td,dhv->thv', row, p['g_proj'])
    for h in range(HV):
      state = np.zeros((K, V))
      of = h * H // HV
      for t in range(len(row)):
        if t == 0 or ids[t] != ids[t - 1]:
          state[:] = 0
        state = np.exp(g[t, h])[:, None] * state
        error = v[t, h] - state.T @ k[t, of]
        state = state + beta[t, h] * np.outer(k[t, of], error)
        o = state.T @ q[t, of] * K**-0.5
        o = o / np.sqrt((o**2).mean() + config.norm_eps)
        o = o * p['o_norm']['scale'] * sigmoid(gate[t, h])
        out[b, t] += o @ p['o_proj'][h]
  return out


class KdaLayerTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('bounded', {}),
    ('weaker_bound', dict(gate_lower_bound=-2.0)),
    ('softplus', dict(gate='softplus')),
    ('grouped_value_heads', dict(num_value_heads=4)),
    ('low_rank_output_gate', dict(output_gate_rank=5)),
    ('negative_eigenvalues', dict(allow_neg_eigval=True, conv_width=2)),
    ('chunked', dict(implementation='chunked_xla', value_dim=32)),
  )
  def test_matches_equations(self, kda):
    config = make_config(**kda)
    params = random_params(config)
    x_BTD = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
    y_BTD = apply(config, params, x_BTD, SEGMENTS)
    want = oracle(config, params, x_BTD, SEGMENTS)
    self.assertGreater(np.abs(want).max(), 0.1)
    np.testing.assert_allclose(
      y_BTD, want, atol=2e-5 * np.abs(want).max(), rtol=2e-5
    )

  def test_initial_decay(self):
    params = jit(init)(make_config())
    np.testing.assert_array_equal(params['A_log'], np.zeros(2))
    # What a zero input makes of the gate: -5 sigmoid(b).
    g = -5 * sigmoid(np.asarray(params['dt_bias'], np.float64))
    self.assertGreaterEqual(g.min(), -5 * (1 - np.exp(-0.1)) - 1e-4)
    self.assertLessEqual(g.max(), -5 * (1 - np.exp(-1e-3)) + 1e-4)
    # Log-uniform: about half lies on either side of the geometric mean.
    dt_bias = kda_layer.init_dt_bias(jax.random.key(1), (4000,), jnp.float32)
    dt = np.log1p(np.exp(np.asarray(dt_bias, np.float64)))
    self.assertAlmostEqual(np.mean(dt < 1e-2), 0.5, delta=0.03)
    self.assertBetween(dt.min(), 0.99e-3, 1.1e-3)
    self.assertBetween(dt.max(), 0.09, 0.1001)

  def test_initial_rate_of_the_softplus_gate(self):
    a_log = kda_layer.init_softplus_a_log(
      jax.random.key(0), (2000,), jnp.float32
    )
    rate = np.exp(np.asarray(a_log))
    self.assertBetween(rate.min(), 1.0, 1.1)
    self.assertBetween(rate.max(), 15.9, 16.0)
    self.assertAlmostEqual(rate.mean(), 8.5, delta=0.3)

  def test_softplus_gate_starts_from_that_rate(self):
    a_log_H = jit(init)(make_config(gate='softplus'))['A_log']
    self.assertGreaterEqual(np.min(a_log_H), 0)
    self.assertGreater(np.ptp(np.asarray(a_log_H)), 0)

  def test_initial_convolution(self):
    taps = kda_layer.init_conv(jax.random.key(0), (4, 500), jnp.float32)
    self.assertBetween(np.max(np.abs(taps)), 0.49, 0.5)


if __name__ == '__main__':
  absltest.main()
