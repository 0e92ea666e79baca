"""Sampling by the whole model."""

import functools

import jax
import numpy as np
from absl.testing import absltest

from hybrid_moe import sharding, train_state
from hybrid_moe.balance.state import router_view
from hybrid_moe.config import ExperimentConfig, MeshConfig, StageConfig
from hybrid_moe.infer import sampling
from hybrid_moe.mesh import make_mesh
from hybrid_moe.model.decoder import Decoder
from hybrid_moe.model_config import LocalAttentionConfig, ModelConfig, MoeConfig

U, ALLOWED = 32, 11
MODEL = ModelConfig(
  vocab_size=U,
  d_model=16,
  num_layers=1,
  mixers=('local',),
  final_mixer='',
  dense_layers=0,
  attn_res_block=0,
  init_std=0.5,
  dtype='float32',
  local=LocalAttentionConfig(num_heads=2, head_dim=8, window=6),
  moe=MoeConfig(num_experts=4, top_k=2, latent_dim=8, expert_hidden=8),
)
CONFIG = ExperimentConfig(
  model=MODEL,
  stages=(StageConfig('s', 16, 8, 1.0),),
  total_tokens=16 * 8,
  stage_share_range=(1.0, 1.0),
)
PROMPT = np.array([3, 1, 4])


@functools.cache
def plain_state():
  return train_state.init_state(CONFIG, jax.random.key(0))


def sample(state=None, prompt=PROMPT, num_tokens=9, **kwargs):
  state = state or plain_state()
  return sampling.sample(
    MODEL,
    CONFIG.balance,
    state.params,
    state.balance,
    prompt,
    num_tokens,
    **{'allowed_tokens': ALLOWED, **kwargs},
  )


class SamplingTest(absltest.TestCase):
  def test_greedy_takes_the_likeliest_token(self):
    ids = sample(temperature=0.0)
    self.assertEqual(ids.dtype, np.int32)
    np.testing.assert_array_equal(ids[:3], PROMPT)
    self.assertLen(ids, 12)
    # One forward pass over the result predicts each of its tokens: what came
    # after them had no influence.
    state = plain_state()
    tokens_BT = ids[None]
    out = jax.jit(Decoder(MODEL, CONFIG.balance).apply)(
      {'params': state.params},
      tokens_BT,
      tokens_BT,
      np.ones_like(tokens_BT),
      router_view(CONFIG.balance, state.balance),
    )
    logits = np.asarray(out.hidden_BTD[0] @ state.params['head'])
    likeliest = logits[:, :ALLOWED].argmax(-1)
    np.testing.assert_array_equal(ids[3:], likeliest[2:-1])
    # The limit matters here.
    self.assertTrue(np.any(logits.argmax(-1)[2:-1] >= ALLOWED))
    np.testing.assert_array_equal(sample(temperature=0.0, seed=5), ids)

  def test_never_emits_unused_ids(self):
    ids = sample(num_tokens=60, temperature=5.0)[3:]
    self.assertLess(ids.max(), ALLOWED)
    self.assertGreaterEqual(ids.min(), 0)
    # It does choose among the rest.
    self.assertGreater(len(set(ids.tolist())), ALLOWED // 2)

  def test_seed_decides(self):
    first = sample(temperature=1.0, seed=1)
    np.testing.assert_array_equal(first, sample(temperature=1.0, seed=1))
    self.assertTrue(np.any(first != sample(temperature=1.0, seed=2)))

  def test_devices_do_not_change_the_sample(self):
    want = sample(temperature=1.0)
    with jax.set_mesh(make_mesh(MeshConfig())):
      state = train_state.init_state(CONFIG, jax.random.key(0))
      balance = jax.tree.map(
        lambda x: sharding.constrain(x, sharding.REPLICATED), state.balance
      )
      got = sample(state.replace(balance=balance), temperature=1.0)
    np.testing.assert_array_equal(got, want)

  def test_nothing_to_add(self):
    np.testing.assert_array_equal(sample(num_tokens=0), PROMPT)

  def test_empty_prompt_is_rejected(self):
    with self.assertRaisesRegex(ValueError, r'prompt=\[\]: accepted is at'):
      sample(prompt=np.array([], np.int32))


if __name__ == '__main__':
  absltest.main()
