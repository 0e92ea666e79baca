"""Where a run is, as its checkpoints carry it."""

import dataclasses
import json
from typing import Any, Self

from hybrid_moe.checks import ConfigError
from hybrid_moe.config import ExperimentConfig, config_to_dict
from hybrid_moe.extension import Stability

# Parts of the configuration that may change between a checkpoint and the run
# that continues from it: they do not change what is computed but for rounding.
_FREE_FIELDS = ('eval', 'checkpoint', 'memory', 'log_every')
_FREE_STAGE_FIELDS = ('mesh', 'remat', 'micro_batches')
_FREE_MODEL_FIELDS = (('kda', 'implementation'), ('moe', 'implementation'))
# Parts of the free field `eval` that decide whether a stage is prolonged.
_EVIDENCE_FIELDS = ('every_steps', 'num_batches')
_FREE_DATA_FIELDS = ('data_dir', 'tfds_dir')
# Differences that an error names.
_MAX_NAMED = 4


@dataclasses.dataclass
class RunPosition:
  """Everything that a run needs to continue besides its state.

  Attributes:
    step: optimiser steps of the run.
    stage_index: stage in progress.
    stage_step: optimiser steps of the stage.
    data_position: the stage's next batch.
    tokens: tokens seen, padding included.
    pieces: times that the stage has been prolonged.
    is_stage_done: whether the stage has handed over.
    stability: validation losses of the stage.
  """

  step: int = 0
  stage_index: int = 0
  stage_step: int = 0
  data_position: int = 0
  tokens: int = 0
  pieces: int = 0
  is_stage_done: bool = False
  stability: Stability = dataclasses.field(default_factory=Stability)

  def advance(self, tokens: int) -> None:
    """Counts one step."""
    self.step += 1
    self.stage_step += 1
    self.data_position += 1
    self.tokens += tokens

  def enter_next_stage(self) -> None:
    """Moves to the start of the next stage."""
    self.stage_index += 1
    self.stage_step = self.data_position = self.pieces = 0
    self.is_stage_done = False
    self.stability = Stability()

  def to_meta(self, config: ExperimentConfig) -> dict[str, Any]:
    """What a checkpoint stores beside the state."""
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    values['stability'] = self.stability.to_json()
    return {'position': values, 'config': _identity(config)}

  @classmethod
  def from_meta(cls, meta: dict[str, Any], config: ExperimentConfig) -> Self:
    """Reads what `to_meta` wrote.

    Raises:
      ConfigError: the checkpoint's run had another configuration.
    """
    require_same_config(meta, config)
    values = dict(meta['position'])
    values['stability'] = Stability.from_json(values['stability'])
    return cls(**values)


def require_same_config(meta: dict[str, Any], config: ExperimentConfig) -> None:
  """Checks that a checkpoint is of this experiment.

  Raises:
    ConfigError: its run had another configuration; names the fields.
  """
  changes = _differences('', meta['config'], _identity(config))
  if changes:
    more = len(changes) - _MAX_NAMED
    raise ConfigError(
      '; '.join(changes[:_MAX_NAMED])
      + (f'; and {more} more fields' if more > 0 else '')
      + ': the checkpoints in this workdir are of another configuration; '
      'accepted is the same one, or another workdir'
    )


def _identity(config: ExperimentConfig) -> dict[str, Any]:
  """The part of a configuration that decides what is computed, as JSON."""
  values = config_to_dict(config)
  evidence = {field: values['eval'][field] for field in _EVIDENCE_FIELDS}
  for field in _FREE_FIELDS:
    del values[field]
  if config.extension.on_evidence:
    values['eval'] = evidence
  for part, field in _FREE_MODEL_FIELDS:
    del values['model'][part][field]
  for field in _FREE_DATA_FIELDS:
    del values['data'][field]
  for stage in values['stages']:
    for field in _FREE_STAGE_FIELDS:
      del stage[field]
  return json.loads(json.dumps(values))


def _differences(path: str, old: Any, new: Any) -> list[str]:
  """Fields that differ, each with both values."""
  if isinstance(old, dict) and isinstance(new, dict):
    return [
      change
      for key in sorted(old.keys() | new.keys())
      for change in _differences(
        f'{path}.{key}' if path else key, old.get(key), new.get(key)
      )
    ]
  if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
    return [
      change
      for i, (a, b) in enumerate(zip(old, new))
      for change in _differences(f'{path}[{i}]', a, b)
    ]
  return [] if old == new else [f'{path}={new!r}, in the checkpoint {old!r}']
