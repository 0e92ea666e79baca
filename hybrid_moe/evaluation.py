"""Evaluation over a fixed set of held-out batches."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hybrid_moe import metrics
from hybrid_moe.eval_step import position_edges
from hybrid_moe.stage import StageProgram
from hybrid_moe.train_state import TrainState


def evaluate(
  program: StageProgram,
  state: TrainState,
  batches: Sequence[dict[str, np.ndarray]],
  source_names: Sequence[str],
) -> dict[str, Any]:
  """Mean losses in nats a target.

  Args:
    program: the stage's compiled programs.
    state: its parameters and balancer are evaluated.
    batches: this process's share of each batch.
    source_names: names by number in `source_ids`.

  Returns:
    `LOSS`, `BY_POSITION` and `BY_SOURCE` as in `metrics.py`; what has no
    targets has the loss nan.
  """
  totals: dict[str, np.ndarray] = {}
  for batch in batches:
    for part in program.put_eval_batches(batch):
      sums = jax.device_get(program.evaluate(state.params, state.balance, part))
      for name, value in sums.items():
        totals[name] = totals.get(name, 0.0) + np.asarray(value, np.float64)
  by_position = _means(totals['nll_by_position'], totals['count_by_position'])
  by_source = _means(totals['nll_by_source'], totals['count_by_source'])
  targets = float(totals['count_by_position'].sum())
  total = float(totals['nll_by_position'].sum())
  return {
    metrics.LOSS: total / targets if targets else math.nan,
    metrics.BY_POSITION: {
      metrics.EDGES: list(position_edges(program.stage.seq_len)),
      metrics.LOSS: by_position,
    },
    metrics.BY_SOURCE: dict(zip(source_names, by_source)),
  }


def _means(sums: np.ndarray, counts: np.ndarray) -> list[float]:
  return [s / c if c else math.nan for s, c in zip(sums.tolist(), counts)]
