"""Bad steps are skipped; too many in a row send the run back.

Two parts. On the device, inside the training step: `judge` decides from loss
and gradient norm whether a step is bad, `select` keeps the old state if it is.
On the host: `RollbackLedger` remembers from which data position to continue
after a roll-back, so that a run that is killed and started again takes the same
path as one that was not.
"""

import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hybrid_moe.atomic_file import replace_text
from hybrid_moe.run_config import HealthConfig

# A running mean over some tens of steps: short enough to follow the loss down.
LOSS_MEAN_DECAY = 0.95


class HealthState(NamedTuple):
  """What is known of the loss; part of the training state.

  Attributes:
    loss_mean: running mean of good losses in nats, not corrected for its start
      at zero; float32 scalar.
    good_steps: good steps since the mean was started; int32 scalar.
    skipped_in_a_row: bad steps since the last good one; int32 scalar.
    skipped_total: bad steps of the run; int32 scalar.
  """

  loss_mean: jax.Array
  good_steps: jax.Array
  skipped_in_a_row: jax.Array
  skipped_total: jax.Array


class RollbackError(RuntimeError):
  """A run keeps failing after its roll-backs."""


def init_health() -> HealthState:
  """The health of a run that has not begun."""
  return HealthState(
    loss_mean=jnp.zeros((), jnp.float32),
    good_steps=jnp.zeros((), jnp.int32),
    skipped_in_a_row=jnp.zeros((), jnp.int32),
    skipped_total=jnp.zeros((), jnp.int32),
  )


def restart_mean(health: HealthState) -> HealthState:
  """Forgets the loss's mean where another level is to be expected.

  At a change of stage other data and longer rows change the loss; no step
  counts as a spike for another `warmup_steps`.
  """
  return health._replace(
    loss_mean=jnp.zeros_like(health.loss_mean),
    good_steps=jnp.zeros_like(health.good_steps),
  )


def judge(
  config: HealthConfig,
  health: HealthState,
  loss: jax.Array,
  grad_norm: jax.Array,
) -> tuple[jax.Array, HealthState]:
  """Decides whether a step is bad, under `jax.jit`.

  Args:
    config: what counts as bad.
    health: before this step.
    loss: mean loss of the step's tokens in nats, over all devices; scalar.
    grad_norm: global norm of the gradients before clipping; scalar.

  Returns:
    bool scalar, true if the step must leave no trace, and the health after it.
    A bad step does not enter the mean.
  """
  loss = loss.astype(jnp.float32)
  # The mean began at zero; dividing by its weight so far makes it unbiased.
  weight = 1 - LOSS_MEAN_DECAY ** health.good_steps.astype(jnp.float32)
  mean = health.loss_mean / jnp.maximum(weight, 1 - LOSS_MEAN_DECAY)
  is_warm = health.good_steps >= max(config.warmup_steps, 1)
  is_spike = is_warm & (loss > mean + config.spike_nats)
  is_bad = ~jnp.isfinite(loss) | ~jnp.isfinite(grad_norm) | is_spike
  next_mean = LOSS_MEAN_DECAY * health.loss_mean + (1 - LOSS_MEAN_DECAY) * loss
  after = HealthState(
    loss_mean=jnp.where(is_bad, health.loss_mean, next_mean),
    good_steps=health.good_steps + ~is_bad,
    skipped_in_a_row=jnp.where(is_bad, health.skipped_in_a_row + 1, 0),
    skipped_total=health.skipped_total + is_bad,
  )
  return is_bad, after


def select(is_bad: jax.Array, old_tree: Any, new_tree: Any) -> Any:
  """`old_tree` if the step was bad, else `new_tree`.

  Args:
    is_bad: bool scalar.
    old_tree: pytree of arrays before the step.
    new_tree: pytree of the same structure, shapes and shardings after it.

  Returns:
    pytree; not-a-number in the tree not chosen does not get through.
  """
  return jax.tree.map(
    lambda old, new: jax.lax.select(is_bad, old, new), old_tree, new_tree
  )


class RollbackLedger:
  """The roll-backs of a run, on disk.

  A checkpoint knows the data position at which it was saved. After a roll-back
  to it the data continues further on, past the rows that did the harm, and the
  ledger is where that is written down. It is read by every start: a run killed
  after the roll-back, before its next checkpoint, restores the same checkpoint
  and learns the same position from it.
  """

  def __init__(self, workdir: str, config: HealthConfig):
    """Reads the ledger of `workdir`, if there is one.

    Raises:
      RollbackError: the file is there and cannot be read as a ledger.
    """
    self._path = pathlib.Path(workdir) / 'rollbacks.json'
    self._config = config
    self._entries: list[dict[str, Any]] = []
    if self._path.exists():
      try:
        self._entries = json.loads(self._path.read_text())['rollbacks']
        for entry in self._entries:
          entry['restored_step'], entry['data_position'], entry['reason']
      except (ValueError, KeyError, TypeError) as error:
        raise RollbackError(
          f'{self._path} is not a ledger of roll-backs ({error!r}): accepted '
          'is the file that the run wrote, or none'
        ) from error

  @property
  def entries(self) -> list[dict[str, Any]]:
    """Roll-backs, oldest first, with the arguments of `record`."""
    return [dict(entry) for entry in self._entries]

  @property
  def skipped(self) -> int:
    """Skipped steps that the states after the roll-backs do not count."""
    return sum(entry.get('skipped', 0) for entry in self._entries)

  def record(
    self,
    restored_step: int,
    data_position: int,
    reason: str,
    *,
    skipped: int,
    write: bool,
  ) -> None:
    """Adds a roll-back; on disk, and synced, when this returns.

    Args:
      restored_step: step of the checkpoint that the run went back to.
      data_position: first position of the data that is used after it.
      reason: what went wrong, for the report.
      skipped: steps skipped since that checkpoint, which it does not count.
      write: whether this process writes the file; one process does.

    Raises:
      RollbackError: the run has used up `max_rollbacks`.
    """
    used = len(self._entries)
    if used >= self._config.max_rollbacks:
      raise RollbackError(
        f'health.max_rollbacks={self._config.max_rollbacks} roll-backs did not '
        f'help; the next would be to step {restored_step}: {reason}. Lower '
        'optim.peak_lr, look at the data from position '
        f'{data_position}, or allow more'
      )
    self._entries.append(
      {
        'restored_step': restored_step,
        'data_position': data_position,
        'reason': reason,
        'skipped': skipped,
      }
    )
    if write:
      self._write()

  def clear(self, *, write: bool) -> None:
    """Forgets all roll-backs, for a run that starts from the beginning.

    They are those of a run whose checkpoints were removed.

    Args:
      write: whether this process removes the file; one process does.
    """
    self._entries = []
    if write:
      self._path.unlink(missing_ok=True)

  def position_after(self, step: int, default: int) -> int:
    """Where the data continues after restoring a checkpoint.

    Args:
      step: step of the checkpoint.
      default: the data position that the checkpoint carries.

    Returns:
      The position of the latest roll-back to that step, but never one before
      `default`: a checkpoint of that step saved anew, after a roll-back
      further back, may be ahead of it.
    """
    positions = [
      e['data_position'] for e in self._entries if e['restored_step'] == step
    ]
    return max([default, *positions])

  def _write(self) -> None:
    text = json.dumps({'rollbacks': self._entries}, indent=2)
    replace_text(self._path, text + '\n')
