"""Operations of a model, by hand."""

import dataclasses

import jax
import jax.numpy as jnp
from absl.testing import absltest

from hybrid_moe import flops
from hybrid_moe.balance.state import init_balance, router_view
from hybrid_moe.model.decoder import Decoder
from hybrid_moe.model_config import BalanceConfig
from hybrid_moe.presets import TINY

# 13 layers: 9 KDA, 4 MLA.
T = 512


def abstract_params(model):
  balance = BalanceConfig()
  ones_BT = jnp.ones((1, 1), jnp.int32)
  state = init_balance(balance, model.num_moe_layers, model.moe.num_experts)
  return jax.eval_shape(
    lambda: Decoder(model, balance).init(
      jax.random.key(0), ones_BT, ones_BT, ones_BT, router_view(balance, state)
    )
  )['params']


class FlopsTest(absltest.TestCase):
  def test_counts_every_element(self):
    params = {'a': jnp.zeros((3, 4)), 'b': {'c': jnp.zeros(5)}}
    self.assertEqual(flops.count_parameters(params), 17)

  def test_forward_by_hand(self):
    params = abstract_params(TINY)
    active = flops.count_active_parameters(TINY, params)
    # Equation 13 of Kimi Linear for 2 heads of width 32 and chunks of 64.
    kda = 2 * (6 * 32**2 + 3 * 64 * 32 + 64**2)
    mla = 2 * (32 + 16 + 32) * T / 2
    self.assertEqual(
      flops.forward_flops_per_token(TINY, params, T),
      2 * (active + 4 * mla) + 9 * kda,
    )
    self.assertEqual(
      flops.training_flops_per_token(TINY, params, T),
      3 * flops.forward_flops_per_token(TINY, params, T),
    )

  def test_kda_with_widths_of_its_own(self):
    self.assertEqual(
      flops.kda_flops_per_token(128, 128, 64),
      6 * 128**2 + 3 * 64 * 128 + 64**2,
    )
    # A further value channel: three passes over the state's K rows, and one
    # product with half of the chunk.
    self.assertEqual(
      flops.kda_flops_per_token(128, 129, 64)
      - flops.kda_flops_per_token(128, 128, 64),
      6 * 128 + 64,
    )
    # A further key channel: the same, and two kinds of scores.
    self.assertEqual(
      flops.kda_flops_per_token(129, 128, 64)
      - flops.kda_flops_per_token(128, 128, 64),
      6 * 128 + 2 * 64,
    )

  def test_window_bounds_local_attention(self):
    model = dataclasses.replace(TINY, mixers=('local',), final_mixer='')
    params = abstract_params(model)
    # From twice the window on, the length makes no difference.
    window = model.local.window

    def at(seq_len):
      return flops.forward_flops_per_token(model, params, seq_len)

    self.assertEqual(at(2 * window), at(64 * window))
    # Below, each of 13 layers has 2 heads of 32.
    self.assertEqual(
      at(2 * window) - at(window), 2 * 13 * 2 * 2 * 32 * window / 2
    )

  def test_multi_token_prediction_reads_the_head_twice(self):
    model = dataclasses.replace(TINY, mtp_layers=1)
    params = abstract_params(model)
    plain = abstract_params(TINY)
    added = flops.count_active_parameters(
      model, params
    ) - flops.count_active_parameters(TINY, plain)
    more = flops.forward_flops_per_token(
      model, params, T
    ) - flops.forward_flops_per_token(TINY, plain, T)
    mla = 2 * (32 + 16 + 32) * T / 2
    head = TINY.d_model * TINY.vocab_size
    self.assertEqual(more, 2 * (added + mla + head))


if __name__ == '__main__':
  absltest.main()
