"""About 150 million parameters through 2K to 16K tokens, on one GPU.

Command:  python -m experiments.pretrain --config=experiments/configs/small.py \
              --workdir=runs/small
Hardware: one GPU of 24 GB or more

The budget is a demonstration on Python's own library sources, many times over.
A real run brings its own data, tokenizer and budget of tokens.
"""

from ml_collections import config_dict

from experiments.configs.base import to_config_dict
from experiments.configs.context_ladder import context_ladder
from hybrid_moe.presets import SMALL
from hybrid_moe.run_config import OptimConfig


def get_config() -> config_dict.ConfigDict:
  """Four stages, each twice as long as the last."""
  return to_config_dict(
    context_ladder(
      SMALL,
      first_len=2048,
      step_tokens=131_072,
      micro_tokens=16_384,
      total_tokens=100_000_000,
      optim=OptimConfig(peak_lr=2e-3),
    )
  )
