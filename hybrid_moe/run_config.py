"""Configuration of a run: optimisers, evaluation, checkpoints, health."""

import dataclasses

from hybrid_moe.checks import require


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """Muon for matrices, AdamW for the rest, and their schedule.

  Attributes:
    peak_lr: learning rate of both optimisers at its highest; Muon's update is
      scaled to the root mean square of AdamW's (0.2, Moonlight).
    schedule: 'staged' gives every stage its own warm-up and cosine, each
      peak `stage_lr_factor` times the previous one's; 'cosine' is one warm-up
      and one cosine over all stages.
    stage_lr_factor: ratio of a stage's peak to the previous stage's.
    warmup_fraction: part of the steps (of a stage, or of the run) that warm
      up linearly.
    final_lr_fraction: learning rate at the end over the peak.
    weight_decay: decoupled, for matrices only.
    clip_norm: global norm to which gradients are clipped; 0 turns it off.
    muon_momentum: momentum of Muon (Nesterov).
    newton_schulz_steps: iterations of the orthogonalisation.
    adam_b1: first-moment decay of AdamW.
    adam_b2: second-moment decay of AdamW.
    adam_eps: AdamW's denominator constant.
    qk_clip_threshold: largest MLA attention logit before the query and key
      weights of a head are scaled down (Kimi K2); 0 turns it off.
    z_loss: weight of the squared log-normaliser of the output softmax.
    mtp_loss_weight: weight of the multi-token-prediction loss.
  """

  peak_lr: float = 2e-3
  schedule: str = 'staged'
  stage_lr_factor: float = 0.2
  warmup_fraction: float = 0.01
  final_lr_fraction: float = 0.1
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  muon_momentum: float = 0.95
  newton_schulz_steps: int = 5
  adam_b1: float = 0.9
  adam_b2: float = 0.95
  adam_eps: float = 1e-8
  qk_clip_threshold: float = 100.0
  z_loss: float = 0.0
  mtp_loss_weight: float = 0.3

  def __post_init__(self):
    schedules = ('staged', 'cosine')
    require(
      self.schedule in schedules,
      'optim.schedule',
      self.schedule,
      f'one of {schedules}',
    )
    require(self.peak_lr > 0, 'optim.peak_lr', self.peak_lr, '> 0')
    for field in ('stage_lr_factor', 'final_lr_fraction'):
      value = getattr(self, field)
      require(0 < value <= 1, f'optim.{field}', value, 'a number in (0, 1]')
    for field in (
      'warmup_fraction',
      'muon_momentum',
      'adam_b1',
      'adam_b2',
    ):
      value = getattr(self, field)
      require(0 <= value < 1, f'optim.{field}', value, 'a number in [0, 1)')
    for field in (
      'weight_decay',
      'clip_norm',
      'qk_clip_threshold',
      'z_loss',
      'mtp_loss_weight',
    ):
      value = getattr(self, field)
      require(value >= 0, f'optim.{field}', value, '>= 0')
    require(
      self.newton_schulz_steps >= 1,
      'optim.newton_schulz_steps',
      self.newton_schulz_steps,
      '>= 1',
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Evaluation on held-out rows.

  Attributes:
    every_steps: optimiser steps between evaluations; 0 evaluates at stage ends
      only.
    num_batches: batches of an evaluation.
    sample_tokens: length of the text sampled for the report.
    sample_prompt: text that the sample continues; not empty.
  """

  every_steps: int = 50
  num_batches: int = 4
  sample_tokens: int = 200
  sample_prompt: str = 'def '

  def __post_init__(self):
    require(self.every_steps >= 0, 'eval.every_steps', self.every_steps, '>= 0')
    require(self.num_batches >= 1, 'eval.num_batches', self.num_batches, '>= 1')
    require(
      self.sample_tokens >= 0, 'eval.sample_tokens', self.sample_tokens, '>= 0'
    )
    require(
      self.sample_prompt != '' or self.sample_tokens == 0,
      'eval.sample_prompt',
      self.sample_prompt,
      'some text, or eval.sample_tokens=0',
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When to save and what to keep.

  Attributes:
    every_steps: optimiser steps between checkpoints; 0 turns this rule off.
    every_minutes: wall-clock minutes between checkpoints.
    keep_last: newest checkpoints kept, besides one a stage.
  """

  every_steps: int = 200
  every_minutes: float = 30.0
  keep_last: int = 3

  def __post_init__(self):
    require(
      self.every_steps >= 0, 'checkpoint.every_steps', self.every_steps, '>= 0'
    )
    require(
      self.every_minutes > 0,
      'checkpoint.every_minutes',
      self.every_minutes,
      '> 0',
    )
    # One alone could be the damaged one.
    require(self.keep_last >= 2, 'checkpoint.keep_last', self.keep_last, '>= 2')


@dataclasses.dataclass(frozen=True)
class HealthConfig:
  """What counts as a bad step and what is done about it.

  A step whose loss or gradient norm is not finite, or whose loss exceeds its
  running mean by more than `spike_nats`, leaves the parameters, the optimiser
  and the balancer as they were. After `max_consecutive_skips` such steps the
  run goes back to its last checkpoint and passes over the offending rows.

  Attributes:
    spike_nats: rise of the loss over its running mean that is a spike.
    warmup_steps: steps before spikes are looked for.
    max_consecutive_skips: skipped steps in a row that cause a roll-back.
    max_rollbacks: roll-backs after which the run gives up.
  """

  spike_nats: float = 2.0
  warmup_steps: int = 20
  max_consecutive_skips: int = 3
  max_rollbacks: int = 3

  def __post_init__(self):
    require(self.spike_nats > 0, 'health.spike_nats', self.spike_nats, '> 0')
    for field in ('warmup_steps', 'max_rollbacks'):
      value = getattr(self, field)
      require(value >= 0, f'health.{field}', value, '>= 0')
    require(
      self.max_consecutive_skips >= 1,
      'health.max_consecutive_skips',
      self.max_consecutive_skips,
      '>= 1',
    )


@dataclasses.dataclass(frozen=True)
class ExtensionConfig:
  """When a stage may hand over to the next longer context.

  With `on_evidence` false a stage ends on its budget. With it true, a stage at
  the end of its budget goes on while the validation loss in one of its
  position buckets is unstable: above that bucket's best by more than
  `tolerance_nats`. It goes on in pieces of `piece_share` of its budget, at its
  final learning rate, at most `max_pieces` times.

  Attributes:
    on_evidence: whether evidence decides.
    tolerance_nats: rise over the best that is still stable.
    piece_share: length of one prolongation over the stage's budget.
    max_pieces: prolongations after which the next stage starts regardless.
  """

  on_evidence: bool = False
  tolerance_nats: float = 0.05
  piece_share: float = 0.25
  max_pieces: int = 2

  def __post_init__(self):
    require(
      self.tolerance_nats >= 0,
      'extension.tolerance_nats',
      self.tolerance_nats,
      '>= 0',
    )
    require(
      0 < self.piece_share <= 1,
      'extension.piece_share',
      self.piece_share,
      'a number in (0, 1]',
    )
    require(
      self.max_pieces >= 0, 'extension.max_pieces', self.max_pieces, '>= 0'
    )


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
  """The memory plan that a stage must meet before training begins.

  Attributes:
    headroom: part of a device's memory that must stay free at the peak.
    device_gib: memory of one device in GiB; 0 asks the device (on CPU: the
      machine's memory, shared by the simulated devices).
  """

  headroom: float = 0.3
  device_gib: float = 0.0

  def __post_init__(self):
    require(
      0 <= self.headroom < 1,
      'memory.headroom',
      self.headroom,
      'a number in [0, 1)',
    )
    require(self.device_gib >= 0, 'memory.device_gib', self.device_gib, '>= 0')
