"""One optimiser step: accumulation, skipping, balancing, clipping, learning."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe import loss, train_step
from hybrid_moe.balance.state import router_view
from hybrid_moe.config import ExperimentConfig, StageConfig
from hybrid_moe.health import HealthState
from hybrid_moe.model.decoder import Decoder
from hybrid_moe.model_config import (
  BalanceConfig,
  LocalAttentionConfig,
  MlaConfig,
  ModelConfig,
  MoeConfig,
)
from hybrid_moe.run_config import OptimConfig
from hybrid_moe.train_state import init_state

ROWS, T, U, E, TOP_K = 8, 16, 32, 8, 2
MODEL = ModelConfig(
  vocab_size=U,
  d_model=16,
  num_layers=2,
  mixers=('local', 'mla'),
  final_mixer='',
  dense_hidden=16,
  attn_res_block=2,
  init_std=0.2,
  dtype='float32',
  mla=MlaConfig(
    num_heads=2,
    q_lora_rank=8,
    kv_lora_rank=8,
    head_dim=6,
    shared_key_dim=4,
    value_dim=6,
  ),
  local=LocalAttentionConfig(num_heads=2, head_dim=6, window=4),
  moe=MoeConfig(num_experts=E, top_k=TOP_K, latent_dim=8, expert_hidden=8),
)
CONFIG = ExperimentConfig(
  model=MODEL,
  stages=(StageConfig('s', T, ROWS, 1.0, remat='none'),),
  total_tokens=ROWS * T * 100,
  stage_share_range=(1.0, 1.0),
  optim=OptimConfig(peak_lr=0.03, weight_decay=0.01),
)
# From this step of the stage on, nothing is learnt.
STANDSTILL = 1000


def schedule(stage_step):
  return jnp.where(stage_step < STANDSTILL, 0.03, 0.0)


@functools.cache
def compiled(config):
  step = functools.partial(train_step.train_step, config, 'none', schedule)
  return jax.jit(step, compiler_options={'xla_backend_optimization_level': 0})


@functools.cache
def state_of(config):
  return init_state(config, jax.random.key(0))


def make_batch(micro_batches=1):
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, U, (ROWS, T + 1))
  segments = np.ones((ROWS, T), np.int32)
  segments[:, 9:] = 2
  segments[0, 12:] = 0
  mask = segments > 0
  mask[:, 8] = False
  batch = {
    'tokens': tokens[:, :-1].astype(np.int32),
    'targets': tokens[:, 1:].astype(np.int32),
    'segment_ids': segments,
    'loss_mask': mask,
  }
  return {
    k: jnp.asarray(v.reshape(micro_batches, -1, T)) for k, v in batch.items()
  }


def assert_bitwise(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


def relative_distance(a, b):
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  pairs = [(np.ravel(x), np.ravel(y)) for x, y in leaves]
  distance = np.linalg.norm(np.concatenate([x - y for x, y in pairs]))
  return distance / np.linalg.norm(np.concatenate([y for _, y in pairs]))


def standing_still(state, **changes):
  return state.replace(stage_step=jnp.int32(STANDSTILL), **changes)


class AccumulationTest(parameterized.TestCase):
  @parameterized.parameters(2, 4)
  def test_micro_batches_change_nothing(self, micro_batches):
    # Masks differ between the micro-batches, so that a mean of their means
    # would be another number.
    state, step = state_of(CONFIG), compiled(CONFIG)
    whole, whole_metrics = step(state, make_batch())
    parts, metrics = step(state, make_batch(micro_batches))
    for name in ('loss', 'grad_norm', 'max_logit'):
      np.testing.assert_allclose(
        metrics[name], whole_metrics[name], rtol=1e-5, err_msg=name
      )
    self.assertEqual(int(metrics['tokens']), int(whole_metrics['tokens']))
    np.testing.assert_array_equal(metrics['load_LE'], whole_metrics['load_LE'])
    assert_bitwise(parts.balance, whole.balance)
    moved = jax.tree.map(jnp.subtract, whole.params, state.params)
    other = jax.tree.map(jnp.subtract, parts.params, state.params)
    self.assertLess(relative_distance(other, moved), 1e-5)

  def test_metrics_count_targets_and_pairs(self):
    batch = make_batch()
    _, metrics = compiled(CONFIG)(state_of(CONFIG), batch)
    self.assertEqual(int(metrics['tokens']), int(batch['loss_mask'].sum()))
    real = int((batch['segment_ids'] > 0).sum())
    self.assertEqual(metrics['load_LE'].shape, (1, E))
    self.assertEqual(int(metrics['load_LE'].sum()), TOP_K * real)
    self.assertFalse(bool(metrics['skipped']))
    self.assertAlmostEqual(float(metrics['lr']), 0.03, places=6)

  def test_objective_adds_its_terms(self):
    """Cross entropy, z-loss and the token after next, over all targets."""
    model = dataclasses.replace(MODEL, mtp_layers=1)
    optim = OptimConfig(z_loss=0.1, mtp_loss_weight=0.5)
    config = dataclasses.replace(CONFIG, model=model, optim=optim)
    state = state_of(config)
    views = router_view(config.balance, state.balance)
    micro = jax.tree.map(lambda x: x[0], make_batch())
    num_targets = jnp.int32(200)

    @jax.jit
    def values(params):
      objective, (nll, _, _) = train_step._objective(
        params, config, 'none', views, micro, num_targets, 1
      )
      out = Decoder(model, config.balance).apply(
        {'params': params},
        micro['tokens'],
        micro['targets'],
        micro['segment_ids'],
        views,
      )
      return objective, nll, out.hidden_BTD, out.mtp_hidden_BTD

    objective, nll, hidden, mtp_hidden = values(state.params)

    def terms(hidden_BTD, targets, mask):
      logits = np.asarray(hidden_BTD, np.float64) @ state.params['head']
      log_z = np.log(np.exp(logits).sum(-1))
      index = np.asarray(targets)[..., None]
      nll = log_z - np.take_along_axis(logits, index, -1)[..., 0]
      mask = np.asarray(mask)
      return (nll * mask).sum() / 200, (log_z**2 * mask).sum() / 200

    first, first_z = terms(hidden, micro['targets'], micro['loss_mask'])
    second, second_z = terms(
      mtp_hidden,
      *loss.mtp_targets(
        micro['targets'], micro['loss_mask'], micro['segment_ids']
      ),
    )
    want = first + 0.1 * first_z + 0.5 * (second + 0.1 * second_z)
    np.testing.assert_allclose(nll, first, rtol=1e-5)
    np.testing.assert_allclose(objective, want, rtol=1e-5)


class SkipTest(parameterized.TestCase):
  def check_skipped(self, state, batch):
    after, metrics = compiled(CONFIG)(state, batch)
    self.assertTrue(bool(metrics['skipped']))
    assert_bitwise(after.params, state.params)
    assert_bitwise(after.opt_state, state.opt_state)
    assert_bitwise(after.balance, state.balance)
    self.assertEqual(int(after.step), int(state.step) + 1)
    self.assertEqual(int(after.stage_step), int(state.stage_step) + 1)
    self.assertEqual(int(metrics['skipped_in_a_row']), 1)
    self.assertEqual(
      int(after.health.skipped_total), int(state.health.skipped_total) + 1
    )
    return after

  @parameterized.parameters(np.nan, np.inf)
  def test_not_finite_step_leaves_no_trace(self, bad):
    # After a good step no part of the state is at its initial value.
    state, _ = compiled(CONFIG)(state_of(CONFIG), make_batch())
    head_DU = state.params['head'].at[0, 0].set(bad)
    self.check_skipped(
      state.replace(params={**state.params, 'head': head_DU}), make_batch()
    )

  def test_spike_is_skipped_and_good_steps_go_on(self):
    calm = HealthState(
      jnp.float32(0.1), jnp.int32(1000), jnp.int32(0), jnp.int32(4)
    )
    state = state_of(CONFIG).replace(health=calm)
    skipped = self.check_skipped(state, make_batch())
    self.assertEqual(float(skipped.health.loss_mean), float(calm.loss_mean))
    used_to_it = calm._replace(loss_mean=jnp.float32(5.0))
    state = skipped.replace(
      health=used_to_it._replace(skipped_in_a_row=jnp.int32(1))
    )
    after, metrics = compiled(CONFIG)(state, make_batch())
    self.assertFalse(bool(metrics['skipped']))
    self.assertEqual(int(metrics['skipped_in_a_row']), 0)
    self.assertGreater(relative_distance(after.params, state.params), 1e-4)

  def test_step_without_targets_changes_no_bias(self):
    batch = make_batch()
    empty = {
      **batch,
      'loss_mask': jnp.zeros_like(batch['loss_mask']),
      'segment_ids': jnp.zeros_like(batch['segment_ids']),
    }
    after, metrics = compiled(CONFIG)(state_of(CONFIG), empty)
    self.assertEqual(float(metrics['loss']), 0.0)
    self.assertEqual(float(metrics['grad_norm']), 0.0)
    assert_bitwise(after.balance, state_of(CONFIG).balance)
    for leaf in jax.tree.leaves(after.params):
      self.assertTrue(np.all(np.isfinite(leaf)))


class BalanceTest(parameterized.TestCase):
  def with_method(self, **balance):
    return dataclasses.replace(CONFIG, balance=BalanceConfig(**balance))

  def test_bias_is_used_from_the_next_step_on(self):
    state = standing_still(state_of(CONFIG))
    first, metrics = compiled(CONFIG)(state, make_batch())
    self.assertGreater(np.abs(first.balance.bias_LE).max(), 1e-3)
    second, next_metrics = compiled(CONFIG)(first, make_batch())
    assert_bitwise(second.params, state.params)
    load, next_load = metrics['load_LE'], next_metrics['load_LE']
    self.assertTrue(np.any(load != next_load))
    # Routed by the old bias: what the first step did, a frozen one does again.
    again, again_metrics = compiled(CONFIG)(
      first.replace(balance=state.balance), make_batch()
    )
    np.testing.assert_array_equal(again_metrics['load_LE'], load)
    assert_bitwise(again.balance, first.balance)
    # It brings the loads together.
    self.assertLess(np.ptp(next_load), np.ptp(load))

  def test_exact_estimator_agrees_with_the_histogram(self):
    config = self.with_method(estimator='exact')
    state = standing_still(state_of(config))
    exact, _ = compiled(config)(state, make_batch())
    rough, _ = compiled(CONFIG)(standing_still(state_of(CONFIG)), make_batch())
    # The first histogram spans [-1, 1].
    width = 2 / CONFIG.balance.num_bins
    np.testing.assert_allclose(
      exact.balance.bias_LE, rough.balance.bias_LE, atol=2 * width
    )
    self.assertTrue(np.any(exact.balance.bias_LE != rough.balance.bias_LE))

  def test_sign_moves_by_its_step(self):
    config = self.with_method(method='sign', sign_step=0.25)
    state = standing_still(state_of(config))
    after, metrics = compiled(config)(state, make_batch())
    load_LE = np.asarray(metrics['load_LE'], np.float64)
    want = 0.25 * np.sign(load_LE.mean() - load_LE)
    np.testing.assert_allclose(after.balance.bias_LE, want)

  def test_without_balancing_the_bias_stays(self):
    none = self.with_method(method='none')
    aux = self.with_method(method='aux_loss', aux_weight=1.0)
    after_none, metrics_none = compiled(none)(state_of(none), make_batch())
    after_aux, metrics_aux = compiled(aux)(state_of(aux), make_batch())
    for after in (after_none, after_aux):
      np.testing.assert_array_equal(after.balance.bias_LE, np.zeros((1, E)))
    # The auxiliary loss is in the gradient and not in the reported loss.
    np.testing.assert_allclose(
      metrics_aux['loss'], metrics_none['loss'], rtol=1e-6
    )
    self.assertGreater(
      abs(float(metrics_aux['grad_norm'] - metrics_none['grad_norm'])), 1e-4
    )
    # It pulls the experts together, given time.
    state = state_of(aux)
    for _ in range(15):
      state, metrics = compiled(aux)(state, make_batch())
    plain = state_of(none)
    for _ in range(15):
      plain, plain_metrics = compiled(none)(plain, make_batch())
    self.assertLess(
      np.std(metrics['load_LE']), np.std(plain_metrics['load_LE'])
    )


class LearningTest(parameterized.TestCase):
  def test_qk_clip_brings_logits_down(self):
    state = standing_still(state_of(CONFIG))
    _, before = compiled(CONFIG)(state, make_batch())
    params = jax.tree_util.tree_map_with_path(
      lambda path, p: (
        p * 400 / before['max_logit'] if path[-1].key == 'q_up' else p
      ),
      state.params,
    )
    clipped, metrics = compiled(CONFIG)(
      state.replace(params=params), make_batch()
    )
    self.assertAlmostEqual(float(metrics['max_logit']), 400, delta=1)
    again, metrics = compiled(CONFIG)(clipped, make_batch())
    self.assertLessEqual(float(metrics['max_logit']), 100.1)
    self.assertGreater(float(metrics['max_logit']), 90)
    # Heads within the limit are let be.
    third, _ = compiled(CONFIG)(again, make_batch())
    for name in ('q_up', 'kv_up'):
      mixer = [
        s.params['block_0']['layer_1']['mixer'][name] for s in (again, third)
      ]
      np.testing.assert_allclose(*mixer, rtol=1e-3)

  def test_two_runs_are_bitwise_equal(self):
    def run():
      state = init_state(CONFIG, jax.random.key(0))
      history = []
      for _ in range(3):
        state, metrics = compiled(CONFIG)(state, make_batch())
        history.append(metrics)
      return state, history

    first, second = run(), run()
    assert_bitwise(first, second)
    self.assertNotEqual(float(first[1][0]['loss']), float(first[1][2]['loss']))

  def test_overfits_one_batch(self):
    state, losses = state_of(CONFIG), []
    for _ in range(30):
      state, metrics = compiled(CONFIG)(state, make_batch())
      losses.append(float(metrics['loss']))
    self.assertEqual(int(metrics['skipped_total']), 0)
    self.assertGreater(losses[0], 3.0)
    self.assertGreater(losses[0] - losses[-1], 2.0)


if __name__ == '__main__':
  absltest.main()
