"""Figures of a run, drawn from its records.

Every function returns a `matplotlib` figure that belongs to no window and no
global state, or None where the records have nothing to draw.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hybrid_moe import metrics

Record = Mapping[str, Any]

_SIZE_INCHES = (8, 4.5)
# A loss is drawn up to so many nats over the highest of the rest of the run;
# the first steps would flatten everything else.
_MARGIN_NATS = 1.0


def draw_loss(
  records: Sequence[Record], bigram_loss: float | None
) -> Figure | None:
  """Training and validation loss against tokens, with stage boundaries.

  Args:
    records: of the whole run, oldest first.
    bigram_loss: loss of a bigram model in nats a token, drawn as a line.
  """
  train = _points(records, metrics.TRAIN)
  valid = _points(records, metrics.EVAL)
  if not train and not valid:
    return None
  figure, axes = _figure('tokens', 'loss (nats a token)')
  if train:
    axes.plot(*zip(*train), lw=0.8, color='C0', label='train')
  if valid:
    axes.plot(*zip(*valid), 'o-', ms=3, color='C1', label='validation')
  if bigram_loss is not None:
    axes.axhline(bigram_loss, ls='--', color='gray', label='bigram model')
  settled = [y for _, y in train[len(train) // 20 :] + valid]
  low, high = min(settled), max(settled)
  if bigram_loss is not None:
    low, high = min(low, bigram_loss), max(high, bigram_loss)
  axes.set_ylim(low - 0.1, high + _MARGIN_NATS)
  for stage, start in _stage_starts(records):
    axes.axvline(start, ls=':', color='black', lw=0.8)
    axes.annotate(
      stage,
      (start, 1.0),
      xycoords=('data', 'axes fraction'),
      xytext=(3, -12),
      textcoords='offset points',
      parse_math=False,
    )
  axes.legend(loc='upper right')
  return figure


def draw_loss_by_position(evals: Mapping[str, Record]) -> Figure | None:
  """Validation loss by position in the document, a line a stage.

  A position counts the tokens since the document's start in its row.


  Args:
    evals: by stage, the 'eval' record to draw.
  """
  curves = {
    stage: record[metrics.BY_POSITION]
    for stage, record in evals.items()
    if record.get(metrics.BY_POSITION)
  }
  if not curves:
    return None
  figure, axes = _figure(
    'position in the document (tokens since its start in the row)',
    'loss (nats a token)',
  )
  for number, (stage, curve) in enumerate(curves.items()):
    # The first bucket begins at position 0, where a logarithm has no place.
    edges = np.maximum(np.asarray(curve[metrics.EDGES], float), 1.0)
    loss = np.asarray(curve[metrics.LOSS], float)
    axes.stairs(loss, edges, baseline=None, color=f'C{number}', label=stage)
  axes.set_xscale('log', base=2)
  axes.legend()
  return figure


def draw_utilization(record: Record) -> Figure | None:
  """Load of each expert over the mean load, layers by experts.

  Args:
    record: an 'eval' record.
  """
  share_LE = np.asarray(record.get(metrics.UTILIZATION, ()), float)
  if share_LE.ndim != 2 or not share_LE.size:
    return None
  total_L1 = np.maximum(share_LE.sum(axis=1, keepdims=True), 1e-30)
  load_LE = share_LE / total_L1 * share_LE.shape[1]
  figure, axes = _figure('expert', 'MoE layer')
  axes.grid(False)
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_locator(MaxNLocator(integer=True))
  image = axes.imshow(
    load_LE, aspect='auto', cmap='viridis', vmin=0, interpolation='nearest'
  )
  figure.colorbar(image, ax=axes, label='load over the mean load')
  return figure


def _figure(x_label: str, y_label: str) -> tuple[Figure, Any]:
  figure = Figure(figsize=_SIZE_INCHES, layout='constrained')
  axes = figure.add_subplot()
  axes.set_xlabel(x_label)
  axes.set_ylabel(y_label)
  axes.grid(alpha=0.3)
  return figure, axes


def _points(records: Sequence[Record], kind: str) -> list[tuple[float, float]]:
  """Tokens and finite losses of the records of one kind."""
  return [
    (r[metrics.TOKENS], r[metrics.LOSS])
    for r in records
    if r[metrics.KIND] == kind
    and metrics.TOKENS in r
    and math.isfinite(r.get(metrics.LOSS, math.nan))
  ]


def _stage_starts(records: Sequence[Record]) -> list[tuple[str, float]]:
  """Stages and the tokens seen before the first record of each."""
  starts: dict[str, float] = {}
  seen = 0
  for record in records:
    if record[metrics.KIND] == metrics.TRAIN:
      starts.setdefault(record.get(metrics.STAGE, ''), seen)
      seen = record.get(metrics.TOKENS, seen)
  return list(starts.items())
