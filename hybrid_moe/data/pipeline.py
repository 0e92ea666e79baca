"""Batches of a stage, whose whole state is one integer: the batch's number.

Row r of batch p is place p * global_batch + r of the stage's mixture, however
many processes share the batch: process i of n takes the i-th of n equal parts
of its rows. A run therefore goes on exactly where it was from the batch's
number alone, on another number of processes too.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from hybrid_moe.checks import ConfigError
from hybrid_moe.config import StageConfig
from hybrid_moe.data import mixture, row_store, source
from hybrid_moe.data.packing import PackedRow
from hybrid_moe.data.prefetch import Prefetcher
from hybrid_moe.data.records import RowFile
from hybrid_moe.data.tokenizer import Tokenizer
from hybrid_moe.data_config import DataConfig, SourceConfig

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class StageData:
  """The rows of a stage.

  Batches are dicts of `tokens`, `targets`, `segment_ids` (int32 [b, T]),
  `loss_mask` (bool [b, T]) and `source_ids` (int32 [b]), where b is this
  process's share of the batch.

  Attributes:
    stage: name of the stage.
    seq_len: length T of a row.
    global_batch: rows of a batch over all processes.
    source_names: names by number in `source_ids`.
    weights: share of each source, of any sum.
    train: training rows by source.
    validation: validation rows by source; none of them is trained on.
    seed: order of the rows.
    digests: by source, what changes with anything that determines its rows.
    report: rows, documents, tokens and padding by source and split; JSON-able.
  """

  stage: str
  seq_len: int
  global_batch: int
  source_names: tuple[str, ...]
  weights: tuple[float, ...]
  train: tuple[RowFile, ...]
  validation: tuple[RowFile, ...]
  seed: int
  digests: dict[str, str]
  report: dict[str, Any]

  def train_batches(
    self, position: int, *, process_index: int = 0, process_count: int = 1
  ) -> Prefetcher[Batch]:
    """Returns the endless batches from number `position` on.

    They are read ahead in a thread; `close()` ends it.

    Raises:
      ConfigError: the batch cannot be shared by so many processes, or the
        position is negative.
      DamagedCacheError: from `next`, at a damaged record.
    """
    share = self._share(process_index, process_count)
    if position < 0:
      raise ConfigError(f'position={position}: accepted is >= 0')
    rows = mixture.mix_rows(
      self.train,
      self.weights,
      [self._order_seed(name, 'train') for name in self.source_names],
    )

    def read() -> Iterator[Batch]:
      batch = position
      while True:
        first = batch * self.global_batch
        yield _stack([rows[first + r] for r in share])
        batch += 1

    return Prefetcher(read())

  def validation_batches(
    self, num_batches: int, *, process_index: int = 0, process_count: int = 1
  ) -> list[Batch]:
    """Returns the same held-out batches on every call.

    Sources stand in proportion to the mixture, each at least once if there
    are rows enough in the batches. A source with fewer rows than its share
    gives them again.
    """
    share = self._share(process_index, process_count)
    counts = mixture.apportion(num_batches * self.global_batch, self.weights)
    orders = [
      mixture.permute(len(rows), self._order_seed(name, 'validation'))
      for name, rows in zip(self.source_names, self.validation)
    ]
    taken = [0] * len(orders)
    places = []
    for source_id in mixture.interleave(counts).tolist():
      order = orders[source_id]
      places.append((source_id, int(order[taken[source_id] % len(order)])))
      taken[source_id] += 1
    return [
      _stack(
        [
          (source_id, self.validation[source_id][row])
          for source_id, row in (places[first + r] for r in share)
        ]
      )
      for first in range(0, len(places), self.global_batch)
    ]

  def _share(self, process_index: int, process_count: int) -> range:
    if process_count < 1 or self.global_batch % process_count:
      raise ConfigError(
        f'stages[{self.stage!r}].global_batch={self.global_batch}: accepted '
        f'is a multiple of the number of processes, {process_count}'
      )
    if not 0 <= process_index < process_count:
      raise ConfigError(
        f'process_index={process_index}: accepted is in [0, {process_count})'
      )
    rows = self.global_batch // process_count
    return range(process_index * rows, (process_index + 1) * rows)

  def _order_seed(self, source_name: str, purpose: str) -> int:
    return mixture.order_seed(self.seed, self.stage, source_name, purpose)


def prepare_stage(
  data: DataConfig,
  stage: StageConfig,
  tokenizer: Tokenizer,
  data_dir: str,
  *,
  process_index: int = 0,
  barrier: Callable[[str], None] = lambda name: None,
) -> StageData:
  """Packs a stage's rows ahead, unless that has been done, and opens them.

  Process 0 prepares; the others wait at the barrier and open what it made, so
  `data_dir` must be one folder for all of them.

  Args:
    data: sources, seed, and what is held out.
    stage: row length, batch and mixture.
    tokenizer: of `data.tokenizer`.
    data_dir: where prepared data is kept.
    process_index: number of this process.
    barrier: waits for all processes; called once, with a name.

  Returns:
    The stage's rows.

  Raises:
    ConfigError: a source, filter or tokenizer that cannot work.
    DamagedCacheError: prepared data is damaged or missing.
  """
  configs = _find_sources(data, stage)

  def open_split(config: SourceConfig, split: str) -> source.Source:
    return source.open_source(
      config,
      split,
      tokenizer=tokenizer,
      data=data,
      data_dir=data_dir,
      seq_len=stage.seq_len,
    )

  try:
    sources = {
      split: [open_split(config, split) for config in configs]
      for split in source.SPLITS
    }
    if process_index == 0:
      _make_folder(data_dir)
      for split, opened in sources.items():
        for entry, documents in zip(stage.mixture, opened):
          row_store.prepare_rows(
            documents, entry, split, tokenizer, stage.seq_len, data_dir
          )
  finally:
    # Also after an error: the others would wait for ever.
    barrier(f'prepare_stage/{stage.name}')
  row_sets = {
    split: [
      row_store.open_rows(documents, entry, tokenizer, stage.seq_len, data_dir)
      for entry, documents in zip(stage.mixture, opened)
    ]
    for split, opened in sources.items()
  }
  return StageData(
    stage=stage.name,
    seq_len=stage.seq_len,
    global_batch=stage.global_batch,
    source_names=tuple(entry.source for entry in stage.mixture),
    weights=tuple(entry.weight for entry in stage.mixture),
    train=tuple(r.rows for r in row_sets['train']),
    validation=tuple(r.rows for r in row_sets['validation']),
    seed=data.seed,
    digests={
      entry.source: f'{train.digest}-{validation.digest}'
      for entry, train, validation in zip(
        stage.mixture, row_sets['train'], row_sets['validation']
      )
    },
    report=_report(stage, row_sets),
  )


def _find_sources(data: DataConfig, stage: StageConfig) -> list[SourceConfig]:
  """Returns the source of each mixture entry."""
  known = {config.name: config for config in data.sources}
  names = [entry.source for entry in stage.mixture]
  for name in names:
    if name not in known:
      raise ConfigError(
        f'stages[{stage.name!r}].mixture.source={name!r}: accepted is one of '
        f'data.sources: {sorted(known)}'
      )
    if names.count(name) > 1:
      raise ConfigError(
        f'stages[{stage.name!r}].mixture={names}: accepted is each source at '
        'most once; give a source a second name in data.sources to take '
        'other lengths of it'
      )
  folders: dict[str, SourceConfig] = {}
  for config in data.sources:
    if config.kind == 'folder':
      other = folders.setdefault(config.path, config)
      if other.join != config.join:
        logging.warning(
          'sources %r and %r join the files of %s differently: what one holds '
          'out, the other may train on',
          other.name,
          config.name,
          config.path,
        )
  return [known[name] for name in names]


def _make_folder(data_dir: str) -> None:
  try:
    os.makedirs(data_dir, exist_ok=True)
  except OSError as error:
    raise ConfigError(
      f'data.data_dir={data_dir!r}: accepted is a folder that can be written '
      f'to ({error})'
    ) from error


def _report(
  stage: StageConfig, row_sets: dict[str, list[row_store.RowSet]]
) -> dict[str, Any]:
  total = sum(entry.weight for entry in stage.mixture)
  sources = {
    entry.source: {
      'weight': entry.weight / total,
      'train': train.report,
      'validation': validation.report,
    }
    for entry, train, validation in zip(
      stage.mixture, row_sets['train'], row_sets['validation']
    )
  }
  rows = sum(s['train']['rows'] for s in sources.values())
  tokens = sum(s['train']['tokens'] for s in sources.values())
  return {
    'stage': stage.name,
    'seq_len': stage.seq_len,
    'rows': rows,
    'tokens': tokens,
    'documents': sum(s['train']['documents'] for s in sources.values()),
    'padding_waste': 1 - tokens / (rows * stage.seq_len),
    'sources': sources,
  }


def _stack(rows: Sequence[tuple[int, PackedRow]]) -> Batch:
  batch = {
    field.name: np.stack([getattr(row, field.name) for _, row in rows])
    for field in dataclasses.fields(PackedRow)
  }
  batch['source_ids'] = np.asarray([i for i, _ in rows], np.int32)
  return batch
