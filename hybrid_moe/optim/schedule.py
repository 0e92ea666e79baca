"""Learning rates of a run's stages."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hybrid_moe.checks import require
from hybrid_moe.run_config import OptimConfig

Schedule = Callable[[jax.Array | int], jax.Array]


def build_schedule(
  optim: OptimConfig, stage_steps: tuple[int, ...]
) -> tuple[Schedule, ...]:
  """Learning rate of every stage as a function of the stage's own steps.

  A phase of n steps warms up linearly over w = max(1, warmup_fraction n)
  steps, the last of which runs at the peak, then falls along half a cosine to
  `final_lr_fraction` times the peak at its last step. With 'staged' each stage
  is a phase: its peak is `stage_lr_factor` times the previous stage's, and its
  warm-up leaves from the previous stage's last rate. With 'cosine' the whole
  run is one phase. A stage that goes on past its steps keeps its last rate.
  Source: Kimi K3 report (arXiv 2607.24653), sections 3.2 and 3.3.

  Args:
    optim: peak, shape and fractions.
    stage_steps: planned optimiser steps of each stage.

  Returns:
    One function a stage, from a step number (0 for the stage's first update,
    int32 scalar or array) to float32 of the same shape; may be traced.

  Raises:
    ConfigError: no stage, or a stage without steps.
  """
  accepted = 'at least one stage, each of at least one step'
  require(
    len(stage_steps) >= 1 and min(stage_steps) >= 1,
    'stage_steps',
    stage_steps,
    accepted,
  )
  if optim.schedule == 'cosine':
    phase = _phase(optim, optim.peak_lr, 0.0, sum(stage_steps))
    starts = [sum(stage_steps[:i]) for i in range(len(stage_steps))]
    return tuple(
      _slice(phase, start, steps) for start, steps in zip(starts, stage_steps)
    )
  schedules = []
  start_lr = 0.0
  for stage, steps in enumerate(stage_steps):
    peak = optim.peak_lr * optim.stage_lr_factor**stage
    phase = _phase(optim, peak, start_lr, steps)
    schedules.append(_slice(phase, 0, steps))
    # A stage that is all warm-up ends on its peak.
    start_lr = (
      peak * optim.final_lr_fraction
      if steps > _warmup_steps(optim, steps)
      else peak
    )
  return tuple(schedules)


def _warmup_steps(optim: OptimConfig, steps: int) -> int:
  # A whole number of steps must not be lost to rounding of the product.
  return max(1, int(optim.warmup_fraction * steps + 1e-9))


def _phase(
  optim: OptimConfig, peak: float, start_lr: float, steps: int
) -> Schedule:
  warmup = _warmup_steps(optim, steps)
  final = peak * optim.final_lr_fraction

  def learning_rate(step: jax.Array | int) -> jax.Array:
    # The warm-up's last step counts as the cosine's first.
    done = jnp.asarray(step, jnp.float32) - (warmup - 1)
    rising = start_lr + (peak - start_lr) * (1 + done / warmup)
    progress = jnp.clip(done / max(1, steps - warmup), 0.0, 1.0)
    falling = final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return jnp.where(done < 0, rising, falling)

  return learning_rate


def _slice(phase: Schedule, start: int, steps: int) -> Schedule:
  """The part of a phase that a stage runs, held at its last rate."""

  def learning_rate(step: jax.Array | int) -> jax.Array:
    return phase(start + jnp.minimum(step, steps - 1))

  return learning_rate
