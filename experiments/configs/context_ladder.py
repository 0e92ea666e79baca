"""Four context stages for one model, each twice as long as the last."""

from hybrid_moe.config import ExperimentConfig, StageConfig
from hybrid_moe.data_config import DataConfig, MixtureEntry, SourceConfig
from hybrid_moe.model_config import ModelConfig
from hybrid_moe.run_config import EvalConfig, OptimConfig

_NUM_STAGES = 4
# Part of each stage's rows that are synthetic long-range tasks.
_SYNTHETIC = 0.1


def context_ladder(
  model: ModelConfig,
  *,
  first_len: int,
  step_tokens: int,
  micro_tokens: int,
  total_tokens: int,
  optim: OptimConfig,
) -> ExperimentConfig:
  """Stages of rising length over Python's own library sources.

  Packages are whole documents, their files in import order, so that there is
  text as long as the longest rows. A later stage takes longer documents.

  Args:
    model: the architecture.
    first_len: tokens of a row in the first stage.
    step_tokens: tokens of an optimiser step.
    micro_tokens: tokens of a micro-batch, which the memory of one device
      limits. On n devices rows divide over them, so that a stage may need
      fewer micro-batches: `--config.stages[0].micro_batches=...`; the error
      of a stage that does not divide names the numbers that work.
    total_tokens: token budget of the run, shared equally by the stages.
    optim: optimisers and schedule.
  """
  stages = []
  for i in range(_NUM_STAGES):
    seq_len = first_len * 2**i
    text = MixtureEntry(
      'stdlib', 1 - _SYNTHETIC, min_document_tokens=seq_len // 8 if i else 0
    )
    tasks = [
      MixtureEntry(name, _SYNTHETIC / 3)
      for name in ('recall', 'needle', 'copy')
    ]
    stages.append(
      StageConfig(
        name=f'context_{seq_len}',
        seq_len=seq_len,
        global_batch=max(1, step_tokens // seq_len),
        micro_batches=max(1, step_tokens // max(micro_tokens, seq_len)),
        budget_share=1 / _NUM_STAGES,
        mixture=(text, *tasks),
      )
    )
  sources = [SourceConfig('stdlib', join='package')] + [
    SourceConfig(name, kind='synthetic', task=name)
    for name in ('recall', 'needle', 'copy')
  ]
  return ExperimentConfig(
    model=model,
    data=DataConfig(sources=tuple(sources)),
    optim=optim,
    stages=tuple(stages),
    total_tokens=total_tokens,
    eval=EvalConfig(every_steps=100, num_batches=4),
  )
