"""Configurations check themselves and say what they would accept."""

import copy
import dataclasses
import math

from absl.testing import absltest, parameterized
from ml_collections import config_dict

from hybrid_moe import config, model_config
from hybrid_moe.checks import ConfigError
from hybrid_moe.config import ExperimentConfig, MeshConfig, StageConfig
from hybrid_moe.data_config import DataConfig, MixtureEntry, SourceConfig
from hybrid_moe.presets import PRESETS, TINY
from hybrid_moe.run_config import (
  CheckpointConfig,
  EvalConfig,
  ExtensionConfig,
  HealthConfig,
  MemoryConfig,
  OptimConfig,
)
from pallas_kernels.kda import IMPLEMENTATIONS
from pallas_kernels.kda.products import PRECISIONS


def make_config() -> ExperimentConfig:
  sources = (SourceConfig('code'), SourceConfig('web', 'tfds', dataset='c4'))
  return ExperimentConfig(
    model=TINY,
    data=DataConfig(sources=sources),
    stages=(
      StageConfig('short', 64, 8, 0.5, 2, (MixtureEntry('code'),)),
      StageConfig('long', 128, 4, 0.5, 1, (MixtureEntry('web', 2.0),)),
    ),
    total_tokens=100_000,
    stage_share_range=(0.4, 0.6),
  )


def set_in(values, path: str, value):
  """Sets `a.b[1].c`-like paths, written with dots only."""
  *parents, last = path.split('.')
  for key in parents:
    values = values[int(key) if key.isdigit() else key]
  values[last] = value


def as_lists(values):
  """Tuples of a config dictionary as lists, so that they can be written to."""
  if isinstance(values, dict):
    return {k: as_lists(v) for k, v in values.items()}
  if isinstance(values, (list, tuple)):
    return [as_lists(v) for v in values]
  return values


# Field to set, its bad value, the name in the message, what is accepted.
REJECTED = (
  ('model.vocab_size', 0, 'model.vocab_size', '>= 1'),
  ('model.d_model', -3, 'model.d_model', '>= 1'),
  ('model.num_layers', 0, 'model.num_layers', '>= 1'),
  ('model.dense_hidden', 0, 'model.dense_hidden', '>= 1'),
  ('model.mixers', (), 'model.mixers', 'a mixer'),
  ('model.mixers', ('kda', 'rnn'), 'model.mixers', 'local'),
  ('model.final_mixer', 'rnn', 'model.final_mixer', 'mla'),
  ('model.dense_layers', 14, 'model.dense_layers', '0 to num_layers=13'),
  ('model.dense_layers', -1, 'model.dense_layers', '0 to num_layers=13'),
  ('model.attn_res_block', -1, 'model.attn_res_block', '>= 0'),
  ('model.mtp_layers', 2, 'model.mtp_layers', '0 or 1'),
  ('model.situ_gate_cap', -1.0, 'model.situ_gate_cap', '>= 0'),
  ('model.situ_up_cap', -1.0, 'model.situ_up_cap', '>= 0'),
  ('model.norm_eps', 0.0, 'model.norm_eps', '> 0'),
  ('model.latent_norm_eps', -1e-6, 'model.latent_norm_eps', '> 0'),
  ('model.init_std', 0.0, 'model.init_std', '> 0'),
  ('model.dtype', 'float16', 'model.dtype', 'bfloat16'),
  ('model.kda.num_heads', 0, 'model.kda.num_heads', '>= 1'),
  ('model.kda.num_value_heads', 3, 'model.kda.num_value_heads', 'multiple'),
  ('model.kda.num_value_heads', -2, 'model.kda.num_value_heads', 'multiple'),
  ('model.kda.key_dim', 16, 'model.kda.key_dim', '32 to 256'),
  ('model.kda.value_dim', 512, 'model.kda.value_dim', '32 to 256'),
  ('model.kda.conv_width', 0, 'model.kda.conv_width', '>= 1'),
  ('model.kda.gate_rank', 0, 'model.kda.gate_rank', '>= 1'),
  ('model.kda.output_gate_rank', -1, 'model.kda.output_gate_rank', '>= 0'),
  ('model.kda.gate', 'linear', 'model.kda.gate', 'softplus'),
  ('model.kda.gate_lower_bound', 0.0, 'model.kda.gate_lower_bound', '[-5, 0)'),
  ('model.kda.gate_lower_bound', -6, 'model.kda.gate_lower_bound', '[-5, 0)'),
  ('model.kda.precision', 'low', 'model.kda.precision', 'highest'),
  ('model.kda.implementation', 'triton', 'model.kda.implementation', 'chunked'),
  ('model.mla.num_heads', 0, 'model.mla.num_heads', '>= 1'),
  ('model.mla.q_lora_rank', -1, 'model.mla.q_lora_rank', '>= 0'),
  ('model.mla.kv_lora_rank', 0, 'model.mla.kv_lora_rank', '>= 1'),
  ('model.mla.shared_key_dim', 0, 'model.mla.shared_key_dim', '>= 1'),
  ('model.local.window', 0, 'model.local.window', '>= 1'),
  ('model.moe.num_experts', 1, 'model.moe.num_experts', '>= 2'),
  ('model.moe.top_k', 16, 'model.moe.top_k', 'num_experts - 1 = 15'),
  ('model.moe.top_k', 0, 'model.moe.top_k', '1 to'),
  ('model.moe.num_shared_experts', -1, 'model.moe.num_shared_experts', '>= 0'),
  ('model.moe.latent_dim', -1, 'model.moe.latent_dim', '>= 0'),
  ('model.moe.expert_hidden', 0, 'model.moe.expert_hidden', '>= 1'),
  ('model.moe.routed_scale', 0.0, 'model.moe.routed_scale', '> 0'),
  ('model.moe.implementation', 'dense', 'model.moe.implementation', 'blocked'),
  ('balance.method', 'greedy', 'balance.method', 'quantile'),
  ('balance.estimator', 'median', 'balance.estimator', 'histogram'),
  ('balance.sign_reference', 'mode', 'balance.sign_reference', 'median'),
  ('balance.num_bins', 1, 'balance.num_bins', '>= 2'),
  ('balance.smoothing', 1.0, 'balance.smoothing', '[0, 1)'),
  ('balance.window_decay', -0.1, 'balance.window_decay', '[0, 1)'),
  ('balance.update_every', 0, 'balance.update_every', '>= 1'),
  ('balance.aux_weight', -1.0, 'balance.aux_weight', '>= 0'),
  ('optim.schedule', 'linear', 'optim.schedule', 'staged'),
  ('optim.peak_lr', 0.0, 'optim.peak_lr', '> 0'),
  ('optim.stage_lr_factor', 1.5, 'optim.stage_lr_factor', '(0, 1]'),
  ('optim.final_lr_fraction', 0.0, 'optim.final_lr_fraction', '(0, 1]'),
  ('optim.warmup_fraction', 1.0, 'optim.warmup_fraction', '[0, 1)'),
  ('optim.muon_momentum', 1.0, 'optim.muon_momentum', '[0, 1)'),
  ('optim.adam_b2', -0.1, 'optim.adam_b2', '[0, 1)'),
  ('optim.weight_decay', -0.1, 'optim.weight_decay', '>= 0'),
  ('optim.clip_norm', -1.0, 'optim.clip_norm', '>= 0'),
  ('optim.newton_schulz_steps', 0, 'optim.newton_schulz_steps', '>= 1'),
  ('optim.mtp_loss_weight', -0.1, 'optim.mtp_loss_weight', '>= 0'),
  ('eval.every_steps', -1, 'eval.every_steps', '>= 0'),
  ('eval.num_batches', 0, 'eval.num_batches', '>= 1'),
  ('eval.sample_tokens', -1, 'eval.sample_tokens', '>= 0'),
  ('eval.sample_prompt', '', 'eval.sample_prompt', 'sample_tokens=0'),
  ('checkpoint.every_steps', -1, 'checkpoint.every_steps', '>= 0'),
  ('checkpoint.every_minutes', 0.0, 'checkpoint.every_minutes', '> 0'),
  ('checkpoint.keep_last', 1, 'checkpoint.keep_last', '>= 2'),
  ('health.spike_nats', 0.0, 'health.spike_nats', '> 0'),
  ('health.max_rollbacks', -1, 'health.max_rollbacks', '>= 0'),
  ('health.max_consecutive_skips', 0, 'health.max_consecutive_skips', '>= 1'),
  ('extension.tolerance_nats', -0.1, 'extension.tolerance_nats', '>= 0'),
  ('extension.piece_share', 0.0, 'extension.piece_share', '(0, 1]'),
  ('extension.max_pieces', -1, 'extension.max_pieces', '>= 0'),
  ('memory.headroom', 1.0, 'memory.headroom', '[0, 1)'),
  ('memory.device_gib', -1.0, 'memory.device_gib', '>= 0'),
  ('data.validation_fraction', 0.0, 'data.validation_fraction', '(0, 1)'),
  ('data.sources', (), 'data.sources', 'at least one source'),
  ('data.sources.0.name', '', 'data.sources[].name', 'non-empty'),
  ('data.sources.0.name', 'a/b', 'data.sources[].name', 'without "/"'),
  ('data.sources.0.name', 'web', 'data.sources', 'distinct names'),
  ('data.sources.0.kind', 'sql', "data.sources['code'].kind", 'synthetic'),
  ('data.sources.0.join', 'repo', "data.sources['code'].join", 'package'),
  ('data.sources.0.task', 'sort', "data.sources['code'].task", 'needle'),
  ('data.sources.0.path', '', "data.sources['code'].path", 'stdlib'),
  ('data.sources.1.dataset', '', "data.sources['web'].dataset", 'a dataset'),
  ('stages', (), 'stages', 'at least one stage'),
  ('stages.0.name', '', 'stages[].name', 'non-empty'),
  ('stages.0.name', 'long', 'stages', 'distinct names'),
  ('stages.0.seq_len', 0, "stages['short'].seq_len", '>= 1'),
  ('stages.0.seq_len', 256, 'stages[].seq_len', 'rising lengths'),
  ('stages.0.global_batch', 0, "stages['short'].global_batch", '>= 1'),
  ('stages.0.micro_batches', 3, "stages['short'].micro_batches", 'divisor of'),
  ('stages.0.budget_share', 0.0, "stages['short'].budget_share", '(0, 1]'),
  ('stages.0.budget_share', 0.4, 'stages[].budget_share', 'sum to 1'),
  ('stages.0.mixture', (), "stages['short'].mixture", 'at least one entry'),
  ('stages.0.mixture.0.source', 'sql', 'mixture.source', "'code', 'web'"),
  ('stages.0.mixture.0.weight', 0.0, "mixture['code'].weight", '> 0'),
  ('stages.0.remat', 'all', "stages['short'].remat", 'layer_save_mixer'),
  ('stages.0.mesh.data', 0, 'mesh.data', '-1 or >= 1'),
  ('stages.0.mesh.expert', 2, 'mesh.expert', 'data axis only'),
  ('stages.0.mesh.seq', 2, 'mesh.seq', 'data axis only'),
  ('stages.0.mesh.model', 2, 'mesh.model', 'data axis only'),
  ('total_tokens', 100, 'total_tokens', 'at least one step'),
  ('log_every', 0, 'log_every', '>= 1'),
  # What the dataclasses themselves cannot see.
  ('model.width', 5, 'model.width', 'd_model'),
  ('stages.0.colour', 5, 'stages[0].colour', 'unknown field'),
  ('model.d_model', 96.0, 'model.d_model', 'a int'),
  ('model.d_model', '96', 'model.d_model', 'a int'),
  ('model.d_model', True, 'model.d_model', 'a int'),
  ('model.scan_blocks', 1, 'model.scan_blocks', 'a bool'),
  ('model.dtype', 32, 'model.dtype', 'a str'),
  ('model.mixers', 'kda', 'model.mixers', 'a sequence'),
  ('model.mixers', ('kda', 3), 'model.mixers[1]', 'a str'),
  ('model.kda', 7, 'model.kda', 'a mapping of KdaConfig'),
  ('stage_share_range', (0.1, 0.2, 0.3), 'stage_share_range', '2 values'),
  ('optim.peak_lr', True, 'optim.peak_lr', 'a float'),
)
FLOATS = ('optim.peak_lr', 'model.norm_eps', 'health.spike_nats')


class ConfigTest(parameterized.TestCase):
  def values(self):
    return as_lists(config.config_to_dict(make_config()))

  @parameterized.parameters(*REJECTED)
  def test_rejection_names_field_value_and_accepted(
    self, path, value, field, accepted
  ):
    values = self.values()
    set_in(values, path, value)
    with self.assertRaises(ConfigError) as caught:
      config.config_from_dict(values)
    message = str(caught.exception)
    name, _, rest = message.partition('=')
    self.assertTrue(name.endswith(field), message)
    # Of a list of stages or sources the message shows names or lengths.
    if not isinstance(value, (list, tuple)) and 'sources' not in field:
      self.assertIn(repr(value).strip("'"), rest)
    self.assertIn('accepted', message)
    self.assertIn(accepted, message)

  @parameterized.product(path=FLOATS, value=(math.nan, math.inf, -math.inf))
  def test_not_finite_number_is_rejected(self, path, value):
    values = self.values()
    set_in(values, path, value)
    with self.assertRaisesRegex(ConfigError, f'{path}={value}.*finite'):
      config.config_from_dict(values)

  def test_not_a_number_is_rejected_without_dictionary(self):
    with self.assertRaisesRegex(ConfigError, 'optim.peak_lr=nan'):
      OptimConfig(peak_lr=math.nan)

  def test_stage_share_outside_range_is_rejected(self):
    values = self.values()
    values['stages'][0]['budget_share'] = 0.3
    values['stages'][1]['budget_share'] = 0.7
    pattern = r"stages\['short'\].budget_share=0.3: .*stage_share_range=\(0.4"
    with self.assertRaisesRegex(ConfigError, pattern):
      config.config_from_dict(values)

  def test_default_share_range_refuses_a_single_stage(self):
    values = self.values()
    values['stages'] = values['stages'][:1]
    values['stages'][0]['budget_share'] = 1.0
    del values['stage_share_range']
    with self.assertRaisesRegex(ConfigError, 'budget_share=1.0.*0.2, 0.3'):
      config.config_from_dict(values)
    values['stage_share_range'] = [1.0, 1.0]
    config.config_from_dict(values)

  @parameterized.parameters(((0.0, 1.0),), ((0.6, 0.4),), ((0.5, 1.1),))
  def test_share_range_that_is_none_is_rejected(self, limits):
    values = self.values() | {'stage_share_range': limits}
    with self.assertRaisesRegex(ConfigError, r'stage_share_range=\(.*lower'):
      config.config_from_dict(values)

  @parameterized.parameters(0, 97, 500)
  def test_prolonging_without_two_evaluations_is_rejected(self, every_steps):
    values = self.values()
    values['extension']['on_evidence'] = True
    values['eval']['every_steps'] = every_steps
    with self.assertRaisesRegex(
      ConfigError,
      rf'extension.on_evidence=True with eval.every_steps={every_steps}: '
      r'accepted is a number in \[1, 97\) .*short',
    ):
      config.config_from_dict(values)
    values['eval']['every_steps'] = 96
    config.config_from_dict(values)

  def test_missing_fields_are_named(self):
    values = self.values()
    del values['total_tokens']
    with self.assertRaisesRegex(ConfigError, r"missing fields \['total_tokens"):
      config.config_from_dict(values)
    values = self.values()
    del values['stages'][1]['seq_len']
    with self.assertRaisesRegex(ConfigError, r'stages\[1\]: missing.*seq_len'):
      config.config_from_dict(values)

  def test_exact_estimator_has_its_limits(self):
    values = self.values()
    values['balance']['estimator'] = 'exact'
    pattern = r"stages\['short'\].micro_batches=2: accepted is 1 with"
    with self.assertRaisesRegex(ConfigError, pattern):
      config.config_from_dict(values)
    values['stages'][0]['micro_batches'] = 1
    config.config_from_dict(values)
    values['balance']['update_every'] = 2
    with self.assertRaisesRegex(ConfigError, "balance.estimator='exact'"):
      config.config_from_dict(values)

  def test_document_lengths_that_exclude_everything_are_rejected(self):
    with self.assertRaisesRegex(ConfigError, 'max_document_tokens=10: '):
      MixtureEntry('code', min_document_tokens=10, max_document_tokens=10)

  def test_dictionary_round_trip(self):
    original = dataclasses.replace(
      make_config(),
      eval=EvalConfig(every_steps=7),
      checkpoint=CheckpointConfig(keep_last=5),
      health=HealthConfig(spike_nats=1.5),
      extension=ExtensionConfig(on_evidence=True),
      memory=MemoryConfig(headroom=0.1),
      balance=model_config.BalanceConfig(method='sign'),
      seed=3,
    )
    values = config.config_to_dict(original)
    self.assertEqual(config.config_from_dict(values), original)
    # Lists, as JSON has them, and a ConfigDict, as flags have it.
    self.assertEqual(config.config_from_dict(as_lists(values)), original)
    locked = config_dict.ConfigDict(copy.deepcopy(values), convert_dict=True)
    self.assertEqual(config.config_from_dict(locked), original)
    self.assertNotEqual(config.config_from_dict(values), make_config())

  def test_whole_numbers_are_accepted_for_floats(self):
    values = self.values()
    values['optim']['clip_norm'] = 2
    self.assertIsInstance(
      config.config_from_dict(values).optim.clip_norm, float
    )

  def test_every_preset_survives_the_round_trip(self):
    for name, preset in PRESETS.items():
      original = dataclasses.replace(make_config(), model=preset)
      again = config.config_from_dict(config.config_to_dict(original))
      self.assertEqual(again.model, preset, name)

  def test_stage_steps_spend_the_budget(self):
    made = make_config()
    self.assertEqual([s.step_tokens for s in made.stages], [512, 512])
    # 50,000 / 512 = 97.66; a started step is not taken.
    self.assertEqual([made.stage_steps(s) for s in made.stages], [97, 97])
    # 0.58 * 50 is 28.999999999999996 in binary.
    most = StageConfig('most', 64, 8, 0.58)
    rest = StageConfig('rest', 64, 8, 0.42)
    exact = dataclasses.replace(
      make_config(),
      stages=(most, rest),
      total_tokens=50 * 512,
      stage_share_range=(0.1, 1.0),
      data=DataConfig(),
    )
    self.assertEqual(exact.stage_steps(most), 29)
    self.assertEqual(exact.stage_steps(rest), 21)

  def test_names_agree_with_the_kernel(self):
    self.assertEqual(
      model_config.KDA_IMPLEMENTATIONS, ('auto', *IMPLEMENTATIONS)
    )
    self.assertEqual(model_config.KDA_PRECISIONS, tuple(PRECISIONS))

  def test_configs_are_frozen_and_hashable(self):
    made = make_config()
    self.assertEqual(hash(made), hash(make_config()))
    with self.assertRaises(dataclasses.FrozenInstanceError):
      made.seed = 4
    self.assertEqual(MeshConfig().data, -1)


if __name__ == '__main__':
  absltest.main()
