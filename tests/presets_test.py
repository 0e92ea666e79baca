"""Sizes of the presets, and Kimi K3's layer schedule."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from hybrid_moe import flops
from hybrid_moe.balance.state import init_balance, router_view
from hybrid_moe.model.attention_residual import MixBlocks
from hybrid_moe.model.decoder import LOOP, Decoder, plan_blocks
from hybrid_moe.model_config import BalanceConfig
from hybrid_moe.presets import K3_2P8T, PRESETS, TINY

BILLION = 1e9


def abstract_params(model):
  """Shapes of a model's parameters."""
  balance = BalanceConfig()
  tokens_BT = jnp.ones((1, 1), jnp.int32)
  state = init_balance(balance, model.num_moe_layers, model.moe.num_experts)
  init = functools.partial(
    Decoder(model, balance).init,
    jax.random.key(0),
    tokens_BT,
    tokens_BT,
    tokens_BT,
    router_view(balance, state),
  )
  return jax.eval_shape(init)['params']


@functools.cache
def counts(name: str) -> tuple[float, float]:
  """Total and active parameters in billions."""
  params = abstract_params(PRESETS[name])
  active = flops.count_active_parameters(PRESETS[name], params)
  return flops.count_parameters(params) / BILLION, active / BILLION


class PresetsTest(parameterized.TestCase):
  def test_k3_counts(self):
    total, active = counts('k3_2p8t')
    self.assertAlmostEqual(total, 2779.48, delta=0.005)
    self.assertAlmostEqual(active, 104.19, delta=0.005)

  @parameterized.parameters(
    ('nano', 0.020, None),
    ('small', 0.150, None),
    ('base_1b', 1.3, 0.25),
    ('kimi_linear_48b', 49.0, 3.0),
  )
  def test_counts_are_what_the_names_say(self, name, total, active):
    measured_total, measured_active = counts(name)
    self.assertAlmostEqual(measured_total, total, delta=0.1 * total)
    if active is not None:
      self.assertAlmostEqual(measured_active, active, delta=0.1 * active)

  def test_active_parameters_do_not_depend_on_the_loop(self):
    unrolled = dataclasses.replace(TINY, scan_blocks=False)
    for count in (
      lambda model, params: flops.count_parameters(params),
      flops.count_active_parameters,
    ):
      self.assertEqual(
        count(TINY, abstract_params(TINY)),
        count(unrolled, abstract_params(unrolled)),
      )

  def test_active_parameters_by_hand(self):
    params = abstract_params(TINY)
    moe = TINY.moe
    unused_experts = TINY.num_moe_layers * (moe.num_experts - moe.top_k)
    per_expert = 3 * moe.latent_dim * moe.expert_hidden
    self.assertEqual(
      flops.count_parameters(params)
      - flops.count_active_parameters(TINY, params),
      unused_experts * per_expert + TINY.vocab_size * TINY.d_model,
    )

  def test_k3_layers(self):
    mla = [i for i in range(93) if K3_2P8T.mixer_of(i) == 'mla']
    self.assertEqual(mla, [*range(3, 92, 4), 92])
    self.assertLen(mla, 24)
    kda = [i for i in range(93) if K3_2P8T.mixer_of(i) == 'kda']
    self.assertLen(kda, 69)
    self.assertEqual(K3_2P8T.num_moe_layers, 92)

  def test_k3_blocks(self):
    plan = plan_blocks(K3_2P8T)
    summary = [
      (run.name, len(run.kinds), run.num_blocks, run.is_loop) for run in plan
    ]
    self.assertEqual(
      summary,
      [
        ('block_0', 12, 1, False),
        (LOOP, 12, 6, True),
        ('block_7', 9, 1, False),
      ],
    )
    layers = [kind for run in plan for kind in run.kinds * run.num_blocks]
    self.assertEqual(
      [(kind.mixer, kind.is_moe) for kind in layers],
      [(K3_2P8T.mixer_of(i), i > 0) for i in range(93)],
    )

  def test_plan_without_residual_blocks_repeats_the_mixers(self):
    model = dataclasses.replace(TINY, attn_res_block=0, dense_layers=0)
    plan = plan_blocks(model)
    self.assertEqual(
      [(run.name, run.num_blocks) for run in plan], [(LOOP, 3), ('block_3', 1)]
    )
    self.assertEqual(
      [kind.mixer for kind in plan[0].kinds], ['kda', 'kda', 'kda', 'mla']
    )

  def test_unrolled_plan_names_every_block(self):
    model = dataclasses.replace(TINY, scan_blocks=False)
    names = [run.name for run in plan_blocks(model)]
    self.assertEqual(names, [f'block_{i}' for i in range(4)])

  def test_k3_sources(self):
    """Sources of each site: embedding, finished blocks, the block's own sum."""
    seen = {}
    original = MixBlocks.__call__

    def count(self, sources, valid_S=None):
      if valid_S is None:
        seen['/'.join(self.path)] = len(sources)
      return original(self, sources, valid_S)

    # The schedule of Kimi K3 at a small width.
    model = dataclasses.replace(
      TINY,
      num_layers=K3_2P8T.num_layers,
      attn_res_block=K3_2P8T.attn_res_block,
    )
    with mock.patch.object(MixBlocks, '__call__', count):
      abstract_params(model)
    want = {'output_residual': 9}
    for block, layers in ((0, 12), (7, 9)):
      for layer in range(layers):
        site = f'block_{block}/layer_{layer}'
        want[f'{site}/mixer_residual'] = block + 1 + (layer > 0)
        want[f'{site}/ffn_residual'] = block + 2
    self.assertEqual(want['block_0/layer_0/ffn_residual'], 2)
    self.assertEqual(want['block_7/layer_8/ffn_residual'], 9)
    self.assertEqual(seen, want)


if __name__ == '__main__':
  absltest.main()
