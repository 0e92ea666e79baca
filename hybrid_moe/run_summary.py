"""What a person gets when a run ends: a summary, a sample and the report."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hybrid_moe import metrics, report
from hybrid_moe.atomic_file import replace_text
from hybrid_moe.config import ExperimentConfig
from hybrid_moe.data.bigram import fit_bigram
from hybrid_moe.data.pipeline import StageData
from hybrid_moe.data.tokenizer import Tokenizer
from hybrid_moe.infer.sampling import sample
from hybrid_moe.memory_plan import MemoryReport
from hybrid_moe.stage import StageProgram
from hybrid_moe.train_state import TrainState

_PROGRAMS_FILE = 'programs.json'
# A bigram model of bytes has learned what it can long before this.
_BIGRAM_TOKENS = 2**25


def store_program(workdir: str, program: StageProgram) -> None:
  """Remembers a stage's costs for the report of a run that was resumed."""
  if jax.process_index() != 0:
    return
  path = pathlib.Path(workdir) / _PROGRAMS_FILE
  programs = _load_programs(path)
  programs[program.stage.name] = {
    report.SEQ_LEN: program.stage.seq_len,
    report.PARAMETERS: program.parameters,
    report.ACTIVE_PARAMETERS: program.active_parameters,
    report.FLOPS_PER_TOKEN: program.flops_per_token,
    report.MEMORY: dataclasses.asdict(program.memory),
    report.COMPILE_SECONDS: program.compile_s,
  }
  replace_text(path, json.dumps(programs, indent=2) + '\n')


def finish(
  config: ExperimentConfig,
  workdir: str,
  tokenizer: Tokenizer,
  data: Sequence[StageData],
  state: TrainState,
  *,
  is_complete: bool,
  lost_skips: int,
) -> str:
  """Writes `report.md` and prints a summary.

  Args:
    config: the experiment.
    workdir: the run's folder, with its `metrics.jsonl`.
    tokenizer: of the data.
    data: rows of every stage; the bigram model is fitted to those that the
      stages train on.
    state: samples are drawn from it, by all processes together.
    is_complete: whether all stages came to their end; if not, no sample is
      drawn and no bigram model fitted.
    lost_skips: skipped steps that roll-backs took out of the records.

  Returns:
    The sample; empty if none was drawn.
  """
  mesh = state.step.sharding.mesh
  text = ''
  # A run that was told to stop has no time for a sample or a baseline.
  if is_complete and config.eval.sample_tokens:
    text = _sample(config, tokenizer, state)
  if jax.process_index() != 0:
    return text
  records = metrics.read_metrics(workdir)
  bigram_loss = None
  if is_complete:
    bigram_loss = _bigram_loss(config, data)
  facts = {
    report.NAME: os.path.basename(os.path.abspath(workdir)),
    report.IS_COMPLETE: is_complete,
    report.DEVICES: f'{mesh.size} x {mesh.devices.flat[0].device_kind}',
    report.BIGRAM_LOSS: bigram_loss,
    report.SAMPLE: text,
    report.LOST_SKIPS: lost_skips,
    report.STAGES: _stage_facts(config, workdir, records),
  }
  path = report.write_report(workdir, records, facts)
  for line in _summary(records, bigram_loss, lost_skips):
    print(line)
  print(f'report: {path}', flush=True)
  return text


def _sample(
  config: ExperimentConfig, tokenizer: Tokenizer, state: TrainState
) -> str:
  """The prompt as a document's beginning, and how the model goes on."""
  prompt = tokenizer.encode(config.eval.sample_prompt)
  prompt = np.concatenate([[tokenizer.bos_id], prompt])
  with jax.set_mesh(state.step.sharding.mesh):
    ids = sample(
      config.model,
      config.balance,
      state.params,
      state.balance,
      prompt,
      config.eval.sample_tokens,
      allowed_tokens=tokenizer.vocab_size,
      seed=config.seed,
    )
  # The begin mark may be the end mark too.
  ends = np.flatnonzero(ids[1:] == tokenizer.eos_id)
  return tokenizer.decode(ids[1:][: ends[0] if len(ends) else None])


def _bigram_loss(config: ExperimentConfig, data: Sequence[StageData]) -> float:
  """Loss of a bigram model of the run's training rows, up to a number.

  On the last stage's validation rows, those of all processes.
  """
  tokens = _BIGRAM_TOKENS // len(config.stages)

  def batches():
    for stage, rows in zip(config.stages, data):
      steps = min(config.stage_steps(stage), -(-tokens // stage.step_tokens))
      reader = rows.train_batches(0)
      try:
        for _, batch in zip(range(steps), reader):
          yield batch
      finally:
        reader.close()

  model = fit_bigram(batches(), config.model.vocab_size)
  return model.mean_loss(data[-1].validation_batches(config.eval.num_batches))


def _stage_facts(
  config: ExperimentConfig, workdir: str, records: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
  programs = _load_programs(pathlib.Path(workdir) / _PROGRAMS_FILE)
  facts = []
  before = 0
  for stage in config.stages:
    # Not every step is recorded; the evaluation at a stage's end is.
    last = max(
      (r[metrics.STEP] for r in records if r[metrics.STAGE] == stage.name),
      default=before,
    )
    fact = {
      report.STAGE_NAME: stage.name,
      report.SEQ_LEN: stage.seq_len,
      report.STEPS: last - before,
      report.STAGE_TOKENS: (last - before) * stage.step_tokens,
      **programs.get(stage.name, {}),
    }
    if report.MEMORY in fact:
      fact[report.MEMORY] = MemoryReport(**fact[report.MEMORY])
    facts.append(fact)
    before = last
  return facts


def _load_programs(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text()) if path.exists() else {}


def _summary(
  records: Sequence[dict[str, Any]],
  bigram_loss: float | None,
  lost_skips: int,
) -> list[str]:
  """The figures that say whether the run went well."""
  evals = [r for r in records if r[metrics.KIND] == metrics.EVAL]
  trains = [r for r in records if r[metrics.KIND] == metrics.TRAIN]
  lines = []
  if evals:
    first, last = evals[0][metrics.LOSS], evals[-1][metrics.LOSS]
    lines.append(
      f'validation loss: {first:.4f} nats at first, {last:.4f} at the end '
      f'({first - last:.4f} less)'
    )
  if bigram_loss is not None:
    lines.append(f'validation loss of a bigram model: {bigram_loss:.4f} nats')
  if trains and metrics.MAX_VIOLATION in trains[-1]:
    worst = max(trains[-1][metrics.MAX_VIOLATION])
    lines.append(f'expert load: MaxVio {worst:.3f} in the worst layer')
  if trains:
    skipped = trains[-1][metrics.SKIPPED_TOTAL] + lost_skips
    lines.append(f'skipped steps: {skipped}')
  return lines
