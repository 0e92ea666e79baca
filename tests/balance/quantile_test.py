"""Observation, solving and the rules by which a bias moves."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.balance import quantile
from hybrid_moe.balance.solve import target_load
from hybrid_moe.model_config import BalanceConfig

SIZES = (
  dict(testcase_name='_64', experts=64, top_k=4, tokens=4096),
  dict(testcase_name='_896', experts=896, top_k=16, tokens=4096),
)


def skewed_scores(tokens: int, experts: int, seed: int = 0) -> jax.Array:
  """Sigmoid scores of a router that strongly prefers some experts."""
  noise_key, expert_key = jax.random.split(jax.random.key(seed))
  preference_E = jax.random.normal(expert_key, (experts,))
  noise_NE = jax.random.normal(noise_key, (tokens, experts))
  return jax.nn.sigmoid(noise_NE + preference_E[None])


@functools.partial(jax.jit, static_argnums=(0, 4))
def route(config, scores_NE, mask_N, view, top_k):
  biased_NE = quantile.biased_scores(scores_NE, view.bias_E)
  values_NS, chosen_NS = jax.lax.top_k(biased_NE, top_k + 1)
  gates_NS = jnp.take_along_axis(scores_NE, chosen_NS[:, :top_k], axis=1)
  gates_NS = gates_NS / jnp.sum(gates_NS, axis=1, keepdims=True)
  return quantile.observe(
    config,
    scores_NE,
    values_NS[:, top_k],
    chosen_NS[:, :top_k],
    gates_NS,
    mask_N,
    view,
  )


def layer_view(config, state, layer=0):
  view = quantile.router_view(config, state)
  return jax.tree.map(lambda x: x[layer], view)


def stack(stats):
  return jax.tree.map(lambda x: x[None], stats)


def make_step(config, top_k):
  """One closed-loop step on given scores: (next state, its statistics)."""

  @jax.jit
  def step(state, scores_NE, mask_N):
    view = layer_view(config, state)
    stats = stack(route(config, scores_NE, mask_N, view, top_k))
    return quantile.update_balance(config, state, stats, top_k), stats

  return step


def max_vio(stats):
  load_E = np.asarray(stats.load_E[0], np.float64)
  return load_E.max() / load_E.mean() - 1


class SolveTest(parameterized.TestCase):
  @parameterized.named_parameters(*SIZES)
  def test_histogram_is_within_a_bin_of_exact(self, experts, top_k, tokens):
    scores_NE = skewed_scores(tokens, experts)
    mask_N = jnp.arange(tokens) < tokens - 100
    bias_E = 0.2 * jax.random.normal(jax.random.key(3), (experts,))
    config = BalanceConfig()
    exact = BalanceConfig(estimator='exact')
    state = quantile.init_balance(config, 1, experts)
    view = layer_view(config, state.replace(bias_LE=bias_E[None]))

    @jax.jit
    def both(scores_NE, mask_N, view):
      counted = route(config, scores_NE, mask_N, view, top_k)
      kept = route(exact, scores_NE, mask_N, view, top_k)
      return (
        quantile.solve_histogram(
          counted.histogram_EW, view.low, view.width, top_k
        ),
        quantile.solve_exact(kept.required_bias_NE, kept.tokens, top_k),
      )

    approx_E, exact_E = both(scores_NE, mask_N, view)
    # Both are centred, so what is within a bin is their uncentred difference.
    error_E = approx_E - exact_E
    self.assertLessEqual(
      float(jnp.max(error_E) - jnp.min(error_E)), 2 * float(view.width)
    )
    self.assertLessEqual(float(jnp.max(jnp.abs(error_E))), float(view.width))
    self.assertGreater(float(jnp.ptp(exact_E)), 50 * float(view.width))

  def test_exact_matches_numpy_order_statistic(self):
    tokens, experts, top_k = 120, 8, 2
    required_NE = jax.random.uniform(jax.random.key(0), (tokens, experts))
    padded = jnp.concatenate([required_NE, jnp.full((7, experts), jnp.inf)])
    got_E = quantile.solve_exact(padded, jnp.int32(tokens), top_k)
    share = tokens * top_k // experts
    want_E = np.sort(np.asarray(required_NE), axis=0)[share]
    np.testing.assert_allclose(got_E, want_E - want_E.mean(), atol=1e-6)

  def test_histogram_interpolates_by_hand(self):
    # 8 tokens, 4 experts, top-1: the target is 2.
    histogram_EW = jnp.array(
      [[0, 4, 4, 0], [2, 6, 0, 0], [1, 1, 6, 0], [0, 0, 0, 8]], jnp.int32
    )
    got_E = quantile.solve_histogram(
      histogram_EW, jnp.float32(-1.0), jnp.float32(0.5), 1
    )
    want_E = np.array([-1 + 1.5 * 0.5, -0.5, 0.0, -1 + 3.25 * 0.5])
    np.testing.assert_allclose(got_E, want_E - want_E.mean(), atol=1e-6)

  def test_fractional_share_counts_up_to_its_ceiling(self):
    # 3 tokens, 2 experts, top-1: the target is 1.5, reached by the 2nd token.
    histogram_EW = jnp.array([[1, 1, 1, 0], [1, 0, 0, 2]], jnp.int32)
    got_E = quantile.solve_histogram(
      histogram_EW, jnp.float32(0.0), jnp.float32(1.0), 1
    )
    want_E = np.array([1.5, 3.25])
    np.testing.assert_allclose(got_E, want_E - want_E.mean(), atol=1e-6)

  def test_share_of_many_tokens_does_not_overflow(self):
    tokens = 2**30 + 13
    whole, rest = target_load(jnp.int32(tokens), 16, 896)
    self.assertEqual(int(whole), tokens * 16 // 896)
    self.assertEqual(int(rest), tokens * 16 % 896)


class ClosedLoopTest(parameterized.TestCase):
  @parameterized.named_parameters(*SIZES)
  def test_balances_a_fixed_skewed_router(self, experts, top_k, tokens):
    scores_NE = skewed_scores(tokens, experts)
    mask_N = jnp.ones((tokens,), bool)
    for smoothing, updates in ((0.0, 5), (0.5, 10)):
      config = BalanceConfig(smoothing=smoothing)
      step = make_step(config, top_k)
      state = quantile.init_balance(config, 1, experts)
      first = None
      for _ in range(updates):
        state, stats = step(state, scores_NE, mask_N)
        first = max_vio(stats) if first is None else first
      _, stats = step(state, scores_NE, mask_N)
      self.assertGreater(first, 3.0)
      self.assertLess(max_vio(stats), 0.3)
      np.testing.assert_allclose(jnp.mean(state.bias_LE), 0.0, atol=1e-6)

  def test_overloaded_experts_fall_and_idle_ones_rise(self):
    config = BalanceConfig()
    scores_NE = skewed_scores(4096, 64)
    step = make_step(config, 4)
    state, stats = step(
      quantile.init_balance(config, 1, 64), scores_NE, jnp.ones((4096,), bool)
    )
    order = jnp.argsort(stats.load_E[0])
    bias_E = state.bias_LE[0]
    self.assertLess(float(jnp.max(bias_E[order[-8:]])), 0.0)
    self.assertGreater(float(jnp.min(bias_E[order[:8]])), 0.0)
    ranks = [jnp.argsort(jnp.argsort(x)) for x in (stats.load_E[0], bias_E)]
    self.assertLess(np.corrcoef(np.stack(ranks))[0, 1], -0.9)

  def test_common_shift_of_the_bias_changes_nothing(self):
    config = BalanceConfig(smoothing=0.0)
    scores_NE = skewed_scores(1024, 16)
    step = make_step(config, 4)
    mask_N = jnp.ones((1024,), bool)
    state, _ = step(quantile.init_balance(config, 1, 16), scores_NE, mask_N)
    shifted = state.replace(bias_LE=state.bias_LE + 0.25)
    after, stats = step(state, scores_NE, mask_N)
    after_shifted, stats_shifted = step(shifted, scores_NE, mask_N)
    np.testing.assert_array_equal(stats.load_E, stats_shifted.load_E)
    np.testing.assert_allclose(after.bias_LE, after_shifted.bias_LE, atol=3e-3)

  def test_exact_estimator_closes_the_loop(self):
    config = BalanceConfig(estimator='exact', smoothing=0.0)
    scores_NE = skewed_scores(2048, 64)
    step = make_step(config, 4)
    state = quantile.init_balance(config, 1, 64)
    for _ in range(5):
      state, _ = step(state, scores_NE, jnp.ones((2048,), bool))
    _, stats = step(state, scores_NE, jnp.ones((2048,), bool))
    self.assertLess(max_vio(stats), 0.3)


class UpdateTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.mask_N = jnp.ones((512,), bool)
    self.batches = [skewed_scores(512, 16, seed) for seed in range(4)]

  def test_first_update_is_whole_and_later_ones_smoothed(self):
    config = BalanceConfig(smoothing=0.75)
    plain = BalanceConfig(smoothing=0.0)
    start = quantile.init_balance(config, 1, 16)
    first, _ = make_step(config, 4)(start, self.batches[0], self.mask_N)
    first_plain, _ = make_step(plain, 4)(start, self.batches[0], self.mask_N)
    np.testing.assert_array_equal(first.bias_LE, first_plain.bias_LE)
    second, _ = make_step(config, 4)(first, self.batches[1], self.mask_N)
    solved, _ = make_step(plain, 4)(first, self.batches[1], self.mask_N)
    np.testing.assert_allclose(
      second.bias_LE, 0.75 * first.bias_LE + 0.25 * solved.bias_LE, atol=1e-6
    )
    np.testing.assert_array_equal(second.updates_L, [2])

  def test_routes_of_a_step_do_not_depend_on_its_own_statistics(self):
    config = BalanceConfig()
    step = make_step(config, 4)
    state, _ = step(
      quantile.init_balance(config, 1, 16), self.batches[0], self.mask_N
    )
    view = layer_view(config, state)

    @jax.jit
    def early_load(scores_NE):
      early_N = jnp.arange(512) < 256
      stats = route(config, scores_NE, early_N, view, 4)
      return stats.load_E, step(state, scores_NE, self.mask_N)[0].bias_LE

    base = self.batches[1]
    changed = base.at[256:].set(1.0 - base[256:])
    load, bias_LE = early_load(base)
    load_changed, bias_changed_LE = early_load(changed)
    np.testing.assert_array_equal(load, load_changed)
    self.assertGreater(float(jnp.max(jnp.abs(bias_LE - bias_changed_LE))), 0.01)

  def test_update_every_gathers_counts_under_one_bias(self):
    config = BalanceConfig(update_every=3, smoothing=0.0)
    step = make_step(config, 4)
    state = quantile.init_balance(config, 1, 16)
    for count, scores_NE in enumerate(self.batches[:2]):
      state, _ = step(state, scores_NE, self.mask_N)
      np.testing.assert_array_equal(state.bias_LE, jnp.zeros((1, 16)))
      self.assertEqual(int(state.pending), count + 1)
      self.assertEqual(int(state.tokens_L[0]), 512 * (count + 1))
    state, _ = step(state, self.batches[2], self.mask_N)
    once = BalanceConfig(smoothing=0.0)
    at_once, _ = make_step(once, 4)(
      quantile.init_balance(once, 1, 16),
      jnp.concatenate(self.batches[:3]),
      jnp.ones((1536,), bool),
    )
    np.testing.assert_array_equal(state.bias_LE, at_once.bias_LE)
    self.assertEqual(int(state.pending), 0)
    self.assertEqual(int(jnp.sum(state.histogram_LEW)), 0)
    self.assertEqual(int(state.tokens_L[0]), 0)

  def test_window_decay_weighs_old_counts_down(self):
    config = BalanceConfig(window_decay=0.5, smoothing=0.0)
    step = make_step(config, 4)
    state = quantile.init_balance(config, 1, 16)
    histograms = []
    for scores_NE in self.batches[:3]:
      view = layer_view(config, state)
      np.testing.assert_allclose(
        (view.low, view.width), (-2.0, 4 / 1000), rtol=1e-6
      )
      state, stats = step(state, scores_NE, self.mask_N)
      histograms.append(np.asarray(stats.histogram_EW[0], np.float64))
    want_EW = 0.25 * histograms[0] + 0.5 * histograms[1] + histograms[2]
    np.testing.assert_allclose(state.window_LEW[0], want_EW, rtol=1e-6)
    want_E = quantile.solve_histogram(
      jnp.asarray(want_EW, jnp.float32), view.low, view.width, 4
    )
    np.testing.assert_allclose(state.bias_LE[0], want_E, atol=1e-5)

  @parameterized.parameters(
    dict(method='quantile'),
    dict(method='quantile', estimator='exact'),
    dict(method='quantile', update_every=2),
    dict(method='quantile', window_decay=0.5),
    dict(method='sign'),
  )
  def test_step_without_real_tokens_leaves_the_state(self, **fields):
    config = BalanceConfig(**fields)
    step = make_step(config, 4)
    state, _ = step(
      quantile.init_balance(config, 1, 16), self.batches[0], self.mask_N
    )
    after, stats = step(state, self.batches[1], jnp.zeros((512,), bool))
    chex.assert_trees_all_equal(after, state)
    self.assertEqual(int(jnp.sum(stats.load_E)), 0)
    empty, _ = step(state, jnp.zeros((0, 16)), jnp.zeros((0,), bool))
    chex.assert_trees_all_equal(empty, state)

  def test_layer_without_tokens_keeps_its_bias(self):
    config = BalanceConfig()
    state = quantile.init_balance(config, 2, 16)
    views = [layer_view(config, state, layer) for layer in range(2)]
    stats = jax.tree.map(
      lambda *x: jnp.stack(x),
      route(config, self.batches[0], self.mask_N, views[0], 4),
      route(config, self.batches[0], ~self.mask_N, views[1], 4),
    )
    after = quantile.update_balance(config, state, stats, 4)
    self.assertGreater(float(jnp.ptp(after.bias_LE[0])), 0.1)
    np.testing.assert_array_equal(after.bias_LE[1], jnp.zeros((16,)))
    np.testing.assert_array_equal(after.updates_L, [1, 0])

  def test_ties_stay_finite(self):
    config = BalanceConfig()
    step = make_step(config, 4)
    state = quantile.init_balance(config, 1, 16)
    for _ in range(3):
      state, _ = step(state, jnp.full((512, 16), 0.5), self.mask_N)
      chex.assert_tree_all_finite(state)
    self.assertLess(float(jnp.max(jnp.abs(state.bias_LE))), 1.0)

  @parameterized.parameters('mean', 'median')
  def test_sign_rule_steps_against_the_load(self, reference):
    config = BalanceConfig(
      method='sign', sign_step=0.25, sign_reference=reference
    )
    state = quantile.init_balance(config, 1, 5)
    load_LE = jnp.array([[0, 1, 2, 4, 18]])
    stats = quantile.RouterStats(
      histogram_EW=jnp.zeros((1, 5, 0), jnp.int32),
      load_E=load_LE,
      gate_mass_E=jnp.zeros((1, 5)),
      tokens=jnp.array([25]),
      required_bias_NE=jnp.zeros((1, 0, 5)),
    )
    after = quantile.update_balance(config, state, stats, 1)
    want = {
      'mean': [[0.25, 0.25, 0.25, 0.25, -0.25]],
      'median': [[0.25, 0.25, 0.0, -0.25, -0.25]],
    }[reference]
    np.testing.assert_array_equal(after.bias_LE, want)

  def test_sign_rule_balances_slowly(self):
    config = BalanceConfig(method='sign', sign_step=0.02)
    step = make_step(config, 4)
    state = quantile.init_balance(config, 1, 16)
    vios = []
    for _ in range(40):
      state, stats = step(state, self.batches[0], self.mask_N)
      vios.append(max_vio(stats))
    self.assertLess(vios[-1], 0.5 * vios[0])
    # It cannot move faster than its step.
    self.assertGreater(vios[1], 0.8 * vios[0])

  def test_sign_rule_gathers_load(self):
    config = BalanceConfig(method='sign', update_every=2, sign_step=0.5)
    step = make_step(config, 4)
    state, first = step(
      quantile.init_balance(config, 1, 16), self.batches[0], self.mask_N
    )
    np.testing.assert_array_equal(state.load_LE, first.load_E)
    state, second = step(state, self.batches[1], self.mask_N)
    load_E = first.load_E + second.load_E
    np.testing.assert_array_equal(
      state.bias_LE, 0.5 * jnp.sign(jnp.mean(load_E) - load_E)
    )

  @parameterized.parameters('aux_loss', 'none')
  def test_other_methods_keep_a_zero_bias(self, method):
    config = BalanceConfig(method=method)
    state, stats = make_step(config, 4)(
      quantile.init_balance(config, 1, 16), self.batches[0], self.mask_N
    )
    np.testing.assert_array_equal(state.bias_LE, jnp.zeros((1, 16)))
    self.assertEqual(int(jnp.sum(stats.load_E)), 4 * 512)
    self.assertEqual(stats.histogram_EW.size, 0)


if __name__ == '__main__':
  absltest.main()
