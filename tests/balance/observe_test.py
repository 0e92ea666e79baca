"""What a shard of tokens reports, and that sharding it changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.balance import quantile
from hybrid_moe.model_config import BalanceConfig

TOKENS, EXPERTS, TOP_K = 256, 24, 3


def make_inputs():
  keys = jax.random.split(jax.random.key(0), 3)
  scores_NE = jax.nn.sigmoid(2 * jax.random.normal(keys[0], (TOKENS, EXPERTS)))
  bias_E = 0.1 * jax.random.normal(keys[1], (EXPERTS,))
  mask_N = jax.random.uniform(keys[2], (TOKENS,)) < 0.8
  return scores_NE, mask_N, bias_E


def view_of(config, bias_E):
  state = quantile.init_balance(config, 1, bias_E.shape[0])
  view = quantile.router_view(config, state.replace(bias_LE=bias_E[None]))
  return jax.tree.map(lambda x: x[0], view)


@functools.partial(jax.jit, static_argnums=0)
def report(config, scores_NE, mask_N, view):
  biased_NE = quantile.biased_scores(scores_NE, view.bias_E)
  values_NS, chosen_NS = jax.lax.top_k(biased_NE, TOP_K + 1)
  chosen_NS = chosen_NS[:, :TOP_K]
  return quantile.observe(
    config,
    scores_NE,
    values_NS[:, TOP_K],
    chosen_NS,
    jnp.full(chosen_NS.shape, 1.0 / TOP_K),
    mask_N,
    view,
  )


def stack(stats):
  return jax.tree.map(lambda x: x[None], stats)


class ObserveTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.config = BalanceConfig(num_bins=200)
    self.scores_NE, self.mask_N, bias_E = make_inputs()
    self.view = view_of(self.config, bias_E)

  def test_counts_match_numpy(self):
    stats = report(self.config, self.scores_NE, self.mask_N, self.view)
    scores = np.asarray(self.scores_NE)[np.asarray(self.mask_N)]
    biased = scores + np.asarray(self.view.bias_E)
    order = np.argsort(-biased, axis=1)
    cutoff = np.take_along_axis(biased, order[:, TOP_K : TOP_K + 1], axis=1)
    load = np.bincount(order[:, :TOP_K].ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(stats.load_E, load)
    np.testing.assert_allclose(stats.gate_mass_E, load / TOP_K, rtol=1e-5)
    self.assertEqual(int(stats.tokens), len(scores))
    low, width = float(self.view.low), float(self.view.width)
    edges = low + width * np.arange(201)
    for expert in range(EXPERTS):
      want, _ = np.histogram((cutoff - scores)[:, expert], bins=edges)
      # A required bias within rounding of an edge may fall on either side.
      moved = np.abs(np.cumsum(stats.histogram_EW[expert] - want))
      self.assertLessEqual(moved.max(), 1)

  def test_range_covers_every_required_bias(self):
    stats = report(
      BalanceConfig(estimator='exact'), self.scores_NE, self.mask_N, self.view
    )
    required = np.asarray(stats.required_bias_NE)
    required = required[np.asarray(self.mask_N)]
    self.assertGreaterEqual(required.min(), float(self.view.low))
    high = float(self.view.low + 200 * self.view.width)
    self.assertLessEqual(required.max(), high)
    bias = np.asarray(self.view.bias_E)
    self.assertAlmostEqual(float(self.view.low), bias.min() - 1, places=5)
    self.assertAlmostEqual(high, bias.max() + 1, places=5)

  def test_padding_counts_nowhere(self):
    spoiled_NE = jnp.where(self.mask_N[:, None], self.scores_NE, 0.999)
    for estimator in ('histogram', 'exact'):
      config = BalanceConfig(num_bins=200, estimator=estimator)
      clean = report(config, self.scores_NE, self.mask_N, self.view)
      spoiled = report(config, spoiled_NE, self.mask_N, self.view)
      jax.tree.map(np.testing.assert_array_equal, clean, spoiled)

  def test_no_gradient_passes(self):
    def mass(scores_NE, bias_E):
      config = BalanceConfig(estimator='exact')
      view = self.view.replace(bias_E=bias_E)
      stats = report(config, scores_NE, self.mask_N, view)
      kept = jnp.where(self.mask_N[:, None], stats.required_bias_NE, 0.0)
      return jnp.sum(kept) + jnp.sum(stats.gate_mass_E)

    grads = jax.grad(mass, argnums=(0, 1))(self.scores_NE, self.view.bias_E)
    for grad in grads:
      np.testing.assert_array_equal(grad, jnp.zeros_like(grad))

  def test_bias_gets_no_gradient_from_biased_scores(self):
    def total(scores_NE, bias_E):
      return jnp.sum(quantile.biased_scores(scores_NE, bias_E) ** 2)

    scores_grad, bias_grad = jax.grad(total, argnums=(0, 1))(
      self.scores_NE, self.view.bias_E
    )
    np.testing.assert_array_equal(bias_grad, jnp.zeros((EXPERTS,)))
    self.assertGreater(float(jnp.min(jnp.abs(scores_grad))), 0.0)

  @parameterized.parameters(1, 2, 8)
  def test_any_micro_batching_gives_the_same_counts(self, parts):
    whole = report(self.config, self.scores_NE, self.mask_N, self.view)
    pieces = [
      report(self.config, scores_NE, mask_N, self.view)
      for scores_NE, mask_N in zip(
        jnp.split(self.scores_NE, parts), jnp.split(self.mask_N, parts)
      )
    ]
    total = jax.tree.map(lambda *x: sum(x), *pieces)
    for leaf in ('histogram_EW', 'load_E', 'tokens'):
      np.testing.assert_array_equal(getattr(total, leaf), getattr(whole, leaf))
    self.assertGreater(int(jnp.max(whole.histogram_EW)), 1)


class ShardedTest(absltest.TestCase):
  def test_one_and_eight_devices_agree_bit_for_bit(self):
    config = BalanceConfig(num_bins=200)
    scores_NE, mask_N, bias_E = make_inputs()
    view = view_of(config, bias_E)

    def local(scores_ne, mask_n, view):
      return stack(report(config, scores_ne, mask_n, view))

    @jax.jit
    def step(scores_NE, mask_N, view, state):
      rows = jax.P('data')
      shards = jax.shard_map(
        local, in_specs=(rows, rows, jax.P()), out_specs=rows
      )(scores_NE, mask_N, view)
      stats = jax.tree.map(lambda s: jnp.sum(s, axis=0), shards)
      return stats, quantile.update_balance(config, state, stack(stats), TOP_K)

    results = []
    for devices in (1, 8):
      mesh = jax.make_mesh(
        (devices,), ('data',), devices=jax.devices()[:devices]
      )
      with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P('data'))
        whole = jax.NamedSharding(mesh, jax.P())
        state = quantile.init_balance(config, 1, EXPERTS)
        stats, state = step(
          *jax.device_put((scores_NE, mask_N), rows),
          *jax.device_put((view, state.replace(bias_LE=bias_E[None])), whole),
        )
        self.assertTrue(state.bias_LE.sharding.is_fully_replicated)
        results.append(jax.device_get((stats, state)))
    (one, one_state), (eight, eight_state) = results
    for leaf in ('histogram_EW', 'load_E', 'tokens'):
      np.testing.assert_array_equal(getattr(one, leaf), getattr(eight, leaf))
    jax.tree.map(np.testing.assert_array_equal, one_state, eight_state)
    np.testing.assert_allclose(one.gate_mass_E, eight.gate_mass_E, rtol=1e-6)
    self.assertEqual(int(eight.tokens), int(jnp.sum(mask_N)))


if __name__ == '__main__':
  absltest.main()
