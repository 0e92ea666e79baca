"""The audit on planted cases."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from hybrid_moe.balance.audit import audit
from hybrid_moe.balance.state import RouterStats
from hybrid_moe.model_config import BalanceConfig


def make_stats(load_LE, gate_mass_LE=None, histogram_LEW=None, tokens=None):
  load_LE = jnp.asarray(load_LE, jnp.int32)
  layers, experts = load_LE.shape
  return RouterStats(
    histogram_EW=jnp.zeros((layers, experts, 0), jnp.int32)
    if histogram_LEW is None
    else histogram_LEW,
    load_E=load_LE,
    gate_mass_E=load_LE.astype(jnp.float32)
    if gate_mass_LE is None
    else jnp.asarray(gate_mass_LE, jnp.float32),
    tokens=jnp.full((layers,), 0 if tokens is None else tokens, jnp.int32),
    required_bias_NE=jnp.zeros((layers, 0, experts)),
  )


class AuditTest(absltest.TestCase):
  def test_planted_layers(self):
    stats = make_stats(
      [[10, 10, 10, 10], [20, 16, 4, 0], [40, 0, 0, 0]],
      gate_mass_LE=[[1, 1, 1, 1], [2, 1, 1, 0], [1, 0, 0, 0]],
    )
    bias_LE = jnp.array([[0.0, 0, 0, 0], [-0.5, 0, 0.25, 0.25], [0, 0, 0, 1]])
    got = audit(BalanceConfig(), stats, bias_LE, top_k=2)
    shares = np.array([0.5, 0.4, 0.1])
    entropy = -np.sum(shares * np.log(shares)) / np.log(4)
    want = {
      'max_vio': [0, 1, 3],
      'util_min': [1, 0, 0],
      'util_max': [1, 2, 4],
      'entropy': [1, entropy, 0],
      'dead_experts': [0, 1, 3],
      'gate_mass_min': [1, 0, 0],
      'bias_range': [0, 0.75, 1],
    }
    self.assertCountEqual(got, want)
    for key, value in want.items():
      np.testing.assert_allclose(got[key], value, atol=1e-6, err_msg=key)

  def test_equal_loads_do_not_hide_a_weightless_expert(self):
    stats = make_stats([[10, 10]], gate_mass_LE=[[19.0, 1.0]])
    got = audit(BalanceConfig(), stats, jnp.zeros((1, 2)), top_k=1)
    np.testing.assert_allclose(got['max_vio'], [0.0])
    np.testing.assert_allclose(got['gate_mass_min'], [0.1], rtol=1e-6)

  def test_threshold_decides_what_is_dead(self):
    stats = make_stats([[30, 27, 3]])
    for threshold, dead in ((0.1, 0), (0.2, 1)):
      config = BalanceConfig(dead_threshold=threshold)
      got = audit(config, stats, jnp.zeros((1, 3)), top_k=1)
      np.testing.assert_array_equal(got['dead_experts'], [dead])

  def test_bin_mass_tells_coarse_bins(self):
    histogram_LEW = jnp.array([[[0, 8, 0, 0], [1, 1, 3, 3]]], jnp.int32)
    stats = make_stats([[4, 4]], histogram_LEW=histogram_LEW, tokens=8)
    got = audit(BalanceConfig(num_bins=4), stats, jnp.zeros((1, 2)), top_k=1)
    np.testing.assert_allclose(got['bin_mass_over_q'], [2.0])

  def test_no_load_reports_balance(self):
    histogram_LEW = jnp.zeros((2, 4, 8), jnp.int32)
    stats = make_stats(jnp.zeros((2, 4)), histogram_LEW=histogram_LEW)
    got = jax.jit(audit, static_argnums=(0, 3))(
      BalanceConfig(), stats, jnp.zeros((2, 4)), 1
    )
    for key, value in got.items():
      self.assertTrue(np.all(np.isfinite(value)), key)
    np.testing.assert_array_equal(got['dead_experts'], [0, 0])
    np.testing.assert_array_equal(got['max_vio'], [0.0, 0.0])


if __name__ == '__main__':
  absltest.main()
