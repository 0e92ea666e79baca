"""Held-out losses by position and by source."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe import eval_step, evaluation, metrics
from hybrid_moe.balance.state import init_balance, router_view
from hybrid_moe.config import ExperimentConfig, StageConfig
from hybrid_moe.model.decoder import Decoder
from hybrid_moe.model_config import LocalAttentionConfig, ModelConfig, MoeConfig
from hybrid_moe.train_state import init_params

B, T, U, E, SOURCES = 3, 150, 16, 6, 4
CONFIG = ExperimentConfig(
  model=ModelConfig(
    vocab_size=U,
    d_model=8,
    num_layers=1,
    mixers=('local',),
    final_mixer='',
    dense_layers=0,
    attn_res_block=0,
    init_std=0.5,
    dtype='float32',
    local=LocalAttentionConfig(num_heads=1, head_dim=8, window=4),
    moe=MoeConfig(num_experts=E, top_k=2, latent_dim=8, expert_hidden=8),
  ),
  stages=(StageConfig('s', T, B, 1.0),),
  total_tokens=B * T,
  stage_share_range=(1.0, 1.0),
)


def make_batch():
  rng = np.random.default_rng(0)
  segments = np.ones((B, T), np.int32)
  segments[0, 70:] = 2
  segments[1, 140:] = 0
  # One row of padding alone, of a source of its own.
  segments[2] = 0
  mask = (segments > 0) & (rng.uniform(size=(B, T)) < 0.8)
  return {
    'tokens': rng.integers(0, U, (B, T)).astype(np.int32),
    'targets': rng.integers(0, U, (B, T)).astype(np.int32),
    'segment_ids': segments,
    'loss_mask': mask,
    'source_ids': np.array([2, 0, 1], np.int32),
  }


@functools.cache
def compiled():
  return jax.jit(
    functools.partial(eval_step.eval_step, CONFIG, SOURCES),
    compiler_options={'xla_backend_optimization_level': 0},
  )


@functools.cache
def make_state():
  balance = init_balance(CONFIG.balance, 1, E)
  return init_params(CONFIG, jax.random.key(0)), balance


class PositionsTest(parameterized.TestCase):
  @parameterized.parameters(
    (1, (0, 64)),
    (64, (0, 64)),
    (65, (0, 64, 128)),
    (512, (0, 64, 128, 256, 512)),
    (513, (0, 64, 128, 256, 512, 1024)),
  )
  def test_edges(self, seq_len, want):
    self.assertEqual(eval_step.position_edges(seq_len), want)

  def test_longer_stages_only_add_buckets(self):
    short, long = (eval_step.position_edges(n) for n in (256, 2048))
    self.assertEqual(long[: len(short)], short)

  def test_positions_in_documents(self):
    segments = np.array([[1, 1, 1, 2, 3, 3, 0, 0], [7] * 8], np.int32)
    want = [[0, 1, 2, 0, 0, 1, 0, 1], list(range(8))]
    got = eval_step.document_positions(segments)
    self.assertEqual(got.tolist(), want)
    self.assertEqual(got.dtype, jnp.int32)


class EvalStepTest(absltest.TestCase):
  def test_matches_numpy(self):
    params, balance = make_state()
    batch = make_batch()
    sums = compiled()(params, balance, batch)
    out = jax.jit(Decoder(CONFIG.model, CONFIG.balance).apply)(
      {'params': params},
      batch['tokens'],
      batch['targets'],
      batch['segment_ids'],
      router_view(CONFIG.balance, balance),
    )
    logits = np.asarray(out.hidden_BTD, np.float64) @ params['head']
    log_z = np.log(np.exp(logits).sum(-1))
    nll = (
      log_z
      - np.take_along_axis(logits, batch['targets'][..., None], -1)[..., 0]
    )
    positions = np.zeros((B, T), int)
    for b in range(B):
      for t in range(1, T):
        if batch['segment_ids'][b, t] == batch['segment_ids'][b, t - 1]:
          positions[b, t] = positions[b, t - 1] + 1
    mask = batch['loss_mask']
    for i, (low, high) in enumerate(((0, 64), (64, 128), (128, 256))):
      inside = mask & (positions >= low) & (positions < high)
      self.assertEqual(int(sums['count_by_position'][i]), inside.sum())
      np.testing.assert_allclose(
        sums['nll_by_position'][i], nll[inside].sum(), rtol=1e-5
      )
    self.assertLen(sums['count_by_position'], 3)
    for source in range(SOURCES):
      inside = mask & (batch['source_ids'] == source)[:, None]
      self.assertEqual(int(sums['count_by_source'][source]), inside.sum())
      np.testing.assert_allclose(
        sums['nll_by_source'][source], nll[inside].sum(), rtol=1e-5
      )
    # Every target is in one bucket and of one source.
    self.assertEqual(int(sums['count_by_position'].sum()), mask.sum())
    self.assertEqual(int(sums['count_by_source'].sum()), mask.sum())

  def test_bias_routes_and_stays(self):
    params, balance = make_state()
    before = np.array(balance.bias_LE)
    plain = compiled()(params, balance, make_batch())
    # Evaluation reports losses alone; there is no balancer to take back.
    self.assertEqual(
      set(plain),
      {
        f'{what}_by_{kind}'
        for what in ('nll', 'count')
        for kind in ('position', 'source')
      },
    )
    np.testing.assert_array_equal(balance.bias_LE, before)
    forced = balance.replace(bias_LE=2.0 * (jnp.arange(E) < 2)[None])
    other = compiled()(params, forced, make_batch())
    self.assertGreater(
      abs(float(other['nll_by_source'][0] - plain['nll_by_source'][0])), 1e-3
    )


class _Program:
  """What `evaluate` needs of a stage's compiled programs."""

  stage = CONFIG.stages[0]

  def put_eval_batches(self, batch):
    return [batch]

  def evaluate(self, params, balance, batch):
    del params, balance
    return batch


class _State:
  params = balance = None


class EvaluationTest(absltest.TestCase):
  def test_means_over_batches(self):
    # Sums of 2 batches; the third bucket and the second source stay empty.
    batches = [
      {
        'nll_by_position': np.array([6.0, 4.0, 0.0], np.float32),
        'count_by_position': np.array([3, 1, 0]),
        'nll_by_source': np.array([10.0, 0.0], np.float32),
        'count_by_source': np.array([4, 0]),
      },
      {
        'nll_by_position': np.array([1.0, 2.0, 0.0], np.float32),
        'count_by_position': np.array([1, 1, 0]),
        'nll_by_source': np.array([3.0, 0.0], np.float32),
        'count_by_source': np.array([2, 0]),
      },
    ]
    result = evaluation.evaluate(_Program(), _State(), batches, ('a', 'b'))
    self.assertAlmostEqual(result[metrics.LOSS], 13 / 6)
    by_position = result[metrics.BY_POSITION]
    self.assertEqual(by_position[metrics.EDGES], [0, 64, 128, 256])
    np.testing.assert_allclose(by_position[metrics.LOSS], [7 / 4, 3.0, np.nan])
    np.testing.assert_allclose(
      [result[metrics.BY_SOURCE][s] for s in 'ab'], [13 / 6, np.nan]
    )


if __name__ == '__main__':
  absltest.main()
