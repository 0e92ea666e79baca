"""Configuration of an experiment: frozen dataclasses that check themselves.

An `ml_collections.ConfigDict` exists only between the command line and
`config_from_dict`; everything past that edge takes the smallest dataclass it
needs. Every error names the field, its value and what would be accepted, and
is raised before anything is compiled. Sizes of the model are in
`model_config.py`, documents in `data_config.py`, the rest of a run in
`run_config.py`.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from hybrid_moe.checks import ConfigError, require
from hybrid_moe.data_config import DataConfig, MixtureEntry
from hybrid_moe.model_config import BalanceConfig, ModelConfig
from hybrid_moe.run_config import (
  CheckpointConfig,
  EvalConfig,
  ExtensionConfig,
  HealthConfig,
  MemoryConfig,
  OptimConfig,
)

REMAT_POLICIES = ('none', 'layer', 'layer_save_mixer')


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the four mesh axes; `data=-1` takes all remaining devices."""

  data: int = -1
  expert: int = 1
  seq: int = 1
  model: int = 1

  def __post_init__(self):
    require(
      self.data == -1 or self.data >= 1, 'mesh.data', self.data, '-1 or >= 1'
    )
    for name in ('expert', 'seq', 'model'):
      size = getattr(self, name)
      require(
        size == 1,
        f'mesh.{name}',
        size,
        '1: this release shards over the data axis only',
      )


@dataclasses.dataclass(frozen=True)
class StageConfig:
  """One context length: one compiled program.

  Attributes:
    name: what reports and checkpoints call it.
    seq_len: tokens of a row.
    global_batch: rows of one optimiser step, over all devices.
    micro_batches: parts into which the rows of a step are split; gradients are
      accumulated over them.
    budget_share: share of `ExperimentConfig.total_tokens`.
    mixture: sources of the rows.
    mesh: device mesh of the stage.
    remat: what the backward pass recomputes: 'none' keeps every activation,
      'layer' keeps layer inputs only, 'layer_save_mixer' keeps too what
      the mixing of tokens yields, its most expensive part.
  """

  name: str
  seq_len: int
  global_batch: int
  budget_share: float
  micro_batches: int = 1
  mixture: tuple[MixtureEntry, ...] = (MixtureEntry(source='stdlib'),)
  mesh: MeshConfig = MeshConfig()
  remat: str = 'layer'

  def __post_init__(self):
    at = f'stages[{self.name!r}]'
    require(
      self.name != '' and '/' not in self.name,
      'stages[].name',
      self.name,
      'a non-empty name without "/"',
    )
    for field in ('seq_len', 'global_batch', 'micro_batches'):
      value = getattr(self, field)
      require(value >= 1, f'{at}.{field}', value, '>= 1')
    require(
      self.global_batch % self.micro_batches == 0,
      f'{at}.micro_batches',
      self.micro_batches,
      f'a divisor of global_batch={self.global_batch}',
    )
    require(
      0 < self.budget_share <= 1,
      f'{at}.budget_share',
      self.budget_share,
      'a number in (0, 1]',
    )
    require(len(self.mixture) >= 1, f'{at}.mixture', (), 'at least one entry')
    require(
      self.remat in REMAT_POLICIES,
      f'{at}.remat',
      self.remat,
      f'one of {REMAT_POLICIES}',
    )

  @property
  def step_tokens(self) -> int:
    """Tokens of one optimiser step."""
    return self.global_batch * self.seq_len


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
  """Everything that a run is made of.

  Attributes:
    model: the architecture.
    data: sources, tokenizer and where rows are kept.
    optim: optimisers and schedule.
    stages: context lengths, shortest first.
    total_tokens: token budget of the whole run.
    stage_share_range: least and greatest share a stage may take; the default
      holds for four or five stages, fewer need their own.
    balance: how experts are kept equally loaded.
    seed: initial parameters.
    log_every: optimiser steps between records in `metrics.jsonl`.
  """

  model: ModelConfig
  stages: tuple[StageConfig, ...]
  total_tokens: int
  data: DataConfig = DataConfig()
  optim: OptimConfig = OptimConfig()
  balance: BalanceConfig = BalanceConfig()
  eval: EvalConfig = EvalConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  health: HealthConfig = HealthConfig()
  extension: ExtensionConfig = ExtensionConfig()
  memory: MemoryConfig = MemoryConfig()
  stage_share_range: tuple[float, float] = (0.2, 0.3)
  seed: int = 0
  log_every: int = 1

  def __post_init__(self):
    names = [s.name for s in self.stages]
    require(len(names) >= 1, 'stages', names, 'at least one stage')
    require(len(set(names)) == len(names), 'stages', names, 'distinct names')
    require(self.log_every >= 1, 'log_every', self.log_every, '>= 1')
    lengths = [s.seq_len for s in self.stages]
    require(
      lengths == sorted(lengths), 'stages[].seq_len', lengths, 'rising lengths'
    )
    shares = [s.budget_share for s in self.stages]
    require(
      math.isclose(sum(shares), 1.0, abs_tol=1e-6),
      'stages[].budget_share',
      shares,
      f'shares that sum to 1 (these sum to {sum(shares):g})',
    )
    low, high = self.stage_share_range
    require(
      0 < low <= high <= 1,
      'stage_share_range',
      self.stage_share_range,
      'two numbers in (0, 1], the lower one first',
    )
    for stage in self.stages:
      require(
        low <= stage.budget_share <= high,
        f'stages[{stage.name!r}].budget_share',
        stage.budget_share,
        f'a share in stage_share_range={self.stage_share_range}; set that '
        'field for a run of fewer stages',
      )
      require(
        self.stage_steps(stage) >= 1,
        'total_tokens',
        self.total_tokens,
        f'at least one step of {stage.step_tokens} tokens in stage '
        f'{stage.name!r}',
      )
      # Evidence is a rise over an earlier evaluation of the stage.
      every, steps = self.eval.every_steps, self.stage_steps(stage)
      require(
        not self.extension.on_evidence or 0 < every < steps,
        'extension.on_evidence=True with eval.every_steps',
        every,
        f'a number in [1, {steps}) for the {steps} steps of stage '
        f'{stage.name!r}, or extension.on_evidence=False',
      )
      known = [s.name for s in self.data.sources]
      for entry in stage.mixture:
        require(
          entry.source in known,
          f'stages[{stage.name!r}].mixture.source',
          entry.source,
          f'one of data.sources: {known}',
        )
      if self.balance.estimator == 'exact':
        require(
          stage.micro_batches == 1,
          f'stages[{stage.name!r}].micro_batches',
          stage.micro_batches,
          "1 with balance.estimator='exact', which keeps every score",
        )

  def stage_steps(self, stage: StageConfig) -> int:
    """Optimiser steps of a stage's token budget (the rest is left unused)."""
    return int(
      self.total_tokens * stage.budget_share / stage.step_tokens + 1e-9
    )


def config_from_dict(values: Mapping[str, Any]) -> ExperimentConfig:
  """Builds an `ExperimentConfig` from nested mappings (or a ConfigDict).

  Raises:
    ConfigError: an unknown key, a missing key, a wrong type or a value that
      the dataclasses reject; the message names the field.
  """
  return _build(ExperimentConfig, values, '')


def config_to_dict(config: Any) -> dict[str, Any]:
  """The inverse of `config_from_dict`: plain dicts, tuples and scalars."""
  return dataclasses.asdict(config)


def _build(cls: type, values: Mapping[str, Any], path: str) -> Any:
  if not isinstance(values, Mapping) and not hasattr(values, 'items'):
    raise ConfigError(
      f'{path or "config"}={values!r}: accepted is a mapping of '
      f'{cls.__name__} fields'
    )
  fields = {f.name: f for f in dataclasses.fields(cls)}
  hints = typing.get_type_hints(cls)
  prefix = f'{path}.' if path else ''
  for key in values:
    if key not in fields:
      raise ConfigError(
        f'{prefix}{key}={values[key]!r}: unknown field; accepted are '
        f'{sorted(fields)}'
      )
  built = {
    key: _coerce(hints[key], value, f'{prefix}{key}')
    for key, value in values.items()
  }
  missing = [
    name
    for name, f in fields.items()
    if name not in built
    and f.default is dataclasses.MISSING
    and f.default_factory is dataclasses.MISSING
  ]
  if missing:
    raise ConfigError(f'{path or "config"}: missing fields {missing}')
  return cls(**built)


def _coerce(hint: Any, value: Any, path: str) -> Any:
  """Checks `value` against a field's type, descending into dataclasses."""
  if dataclasses.is_dataclass(hint):
    return _build(hint, value, path)
  if typing.get_origin(hint) is tuple:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
      raise ConfigError(f'{path}={value!r}: accepted is a sequence')
    args = typing.get_args(hint)
    if args[-1] is Ellipsis:
      args = (args[0],) * len(value)
    if len(args) != len(value):
      raise ConfigError(f'{path}={value!r}: accepted are {len(args)} values')
    return tuple(
      _coerce(a, v, f'{path}[{i}]') for i, (a, v) in enumerate(zip(args, value))
    )
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if not isinstance(value, hint) or (
    isinstance(value, bool) and hint is not bool
  ):
    raise ConfigError(f'{path}={value!r}: accepted is a {hint.__name__}')
  if hint is float and not math.isfinite(value):
    raise ConfigError(f'{path}={value!r}: accepted is a finite number')
  return value
