"""Whether a stage may hand over to the next longer context."""

import dataclasses
from typing import Any

from hybrid_moe.run_config import ExtensionConfig


@dataclasses.dataclass
class Stability:
  """Validation losses of a stage by position bucket.

  Attributes:
    best: least loss of each bucket so far in the stage.
    latest: losses of the newest evaluation.
  """

  best: list[float] = dataclasses.field(default_factory=list)
  latest: list[float] = dataclasses.field(default_factory=list)

  def add(self, losses: list[float]) -> None:
    """Takes in an evaluation; a bucket without targets is not a number."""
    if not self.best:
      self.best = list(losses)
    # `min` keeps its first argument where a comparison involves nan.
    self.best = [
      new if best != best else min(best, new)
      for best, new in zip(self.best, losses)
    ]
    self.latest = list(losses)

  def unstable_buckets(self, tolerance_nats: float) -> list[int]:
    """Buckets whose newest loss is over their best by more than allowed.

    A loss that is not finite although the bucket once had one is unstable.
    """
    return [
      i
      for i, (best, new) in enumerate(zip(self.best, self.latest))
      if best == best and not new <= best + tolerance_nats
    ]

  def to_json(self) -> dict[str, Any]:
    """For a checkpoint; not-a-number becomes None."""
    return {
      name: [None if x != x else x for x in values]
      for name, values in dataclasses.asdict(self).items()
    }

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> 'Stability':
    """The inverse of `to_json`."""
    return cls(
      **{
        name: [float('nan') if x is None else x for x in losses]
        for name, losses in values.items()
      }
    )


def planned_steps(
  config: ExtensionConfig, budget_steps: int, pieces: int
) -> int:
  """Steps of a stage that has been prolonged `pieces` times."""
  piece = max(1, round(budget_steps * config.piece_share))
  return budget_steps + pieces * piece


def should_prolong(
  config: ExtensionConfig, stability: Stability, pieces: int
) -> bool:
  """Whether a stage at the end of its steps goes on.

  It does while a position bucket is unstable, at most `max_pieces` times; see
  `ExtensionConfig`.
  """
  if not config.on_evidence or pieces >= config.max_pieces:
    return False
  return bool(stability.unstable_buckets(config.tolerance_nats))
