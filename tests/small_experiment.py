"""The smallest whole experiment: two layers, two stages of 8 steps.

Both layers attend by MLA: nothing in KDA is kept between steps, and its
chunked form takes longest to compile. It is a configuration file
(`--config=tests/small_experiment.py:CORPUS`) and, loaded by its path, a module
for tests of whole runs.
"""

import contextlib
import os
import pathlib
import random
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import config_dict

from experiments.configs.base import to_config_dict
from hybrid_moe.config import ExperimentConfig, StageConfig
from hybrid_moe.data_config import DataConfig, MixtureEntry, SourceConfig
from hybrid_moe.model_config import (
  MlaConfig,
  ModelConfig,
  MoeConfig,
)
from hybrid_moe.run_config import (
  CheckpointConfig,
  EvalConfig,
  HealthConfig,
  OptimConfig,
)

ROOT = pathlib.Path(__file__).parents[1]
STAGES = ('short', 'long')
STAGE_STEPS = 8


def programs_directory(factory: pytest.TempPathFactory) -> str:
  """Where the processes of one test run keep compiled programs."""
  base = factory.getbasetemp()
  is_worker = 'PYTEST_XDIST_WORKER' in os.environ
  return str((base.parent if is_worker else base) / 'programs')


@contextlib.contextmanager
def kept_programs(directory: str) -> Iterator[None]:
  """Programs compiled in this process are kept, and not compiled again."""
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
  )
  before = {name: getattr(jax.config, name) for name in names}
  try:
    for name, value in zip(names, (directory, 1.0)):
      jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()


def write_corpus(directory: str | os.PathLike[str]) -> str:
  """Makes text files of random words; returns the folder."""
  rng = random.Random(0)
  words = [f'w{rng.randrange(100)}' for _ in range(30)]
  os.makedirs(directory, exist_ok=True)
  for number in range(40):
    text = ' '.join(rng.choices(words, k=60))
    pathlib.Path(directory, f'{number}.txt').write_text(text)
  return str(directory)


def make_experiment(corpus: str) -> ExperimentConfig:
  """Trains on the files of a folder and on synthetic recall."""

  def stage(name, seq_len, global_batch):
    return StageConfig(
      name=name,
      seq_len=seq_len,
      global_batch=global_batch,
      budget_share=0.5,
      mixture=(MixtureEntry('words', 0.75), MixtureEntry('recall', 0.25)),
      remat='none',
    )

  return ExperimentConfig(
    model=ModelConfig(
      vocab_size=272,
      d_model=32,
      num_layers=2,
      mixers=('mla',),
      dense_hidden=32,
      attn_res_block=2,
      init_std=0.06,
      dtype='float32',
      mla=MlaConfig(
        num_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        head_dim=32,
        shared_key_dim=16,
        value_dim=32,
      ),
      moe=MoeConfig(num_experts=4, top_k=2, latent_dim=16, expert_hidden=16),
    ),
    data=DataConfig(
      sources=(
        SourceConfig('words', path=corpus, patterns=('*.txt',)),
        SourceConfig('recall', kind='synthetic', num_documents=32),
      ),
      validation_fraction=0.2,
    ),
    optim=OptimConfig(peak_lr=1e-2, stage_lr_factor=0.5, warmup_fraction=0.25),
    stages=(stage(STAGES[0], 64, 16), stage(STAGES[1], 128, 8)),
    total_tokens=2 * STAGE_STEPS * 16 * 64,
    stage_share_range=(0.1, 0.9),
    eval=EvalConfig(every_steps=4, num_batches=2, sample_tokens=4),
    checkpoint=CheckpointConfig(every_steps=3, keep_last=2),
    health=HealthConfig(warmup_steps=4),
  )


def get_config(corpus: str) -> config_dict.ConfigDict:
  """The experiment as a configuration file gives it."""
  return to_config_dict(make_experiment(corpus))
