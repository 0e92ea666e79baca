"""Records of what happened to a run besides its steps."""

import jax

from hybrid_moe import metrics
from hybrid_moe.health import RollbackLedger
from hybrid_moe.metrics import MetricsWriter


class RunEvents:
  """Writes events beside the records of a run."""

  def __init__(self, writer: MetricsWriter, workdir: str):
    self._writer = writer
    self._workdir = workdir

  def write(self, step: int, stage: str, event: str, reason: str) -> None:
    """Writes one event.

    Args:
      step: from which the run continues.
      stage: name of the stage in progress.
      event: one of `metrics.EVENTS`.
      reason: for the reader.
    """
    self._writer.write(
      step,
      metrics.EVENT,
      {metrics.EVENT: event, metrics.STAGE: stage, metrics.REASON: reason},
    )

  def write_rollbacks(
    self, step: int, stage: str, ledger: RollbackLedger
  ) -> None:
    """Writes the roll-backs to a step that have no event yet.

    A run killed between the two writes has its roll-back in the ledger alone.
    """
    if jax.process_index() != 0:
      return
    written = sum(
      record[metrics.STEP] == step
      for record in metrics.read_metrics(self._workdir)
      if record.get(metrics.EVENT) == metrics.ROLLBACK
    )
    reasons = [
      entry['reason']
      for entry in ledger.entries
      if entry['restored_step'] == step
    ]
    for reason in reasons[written:]:
      self.write(step, stage, metrics.ROLLBACK, reason)
