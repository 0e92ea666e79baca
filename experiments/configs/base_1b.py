"""About 1.3 billion parameters through 8K to 64K tokens, on one large GPU.

Command:  python -m experiments.pretrain \
              --config=experiments/configs/base_1b.py --workdir=runs/base_1b
Hardware: one GPU of 80 to 140 GB

The budget is a demonstration on Python's own library sources, many times over:
it shows that every stage runs, and trains no useful model of this size. A real
run brings its own data, tokenizer and budget of tokens.
"""

from ml_collections import config_dict

from experiments.configs.base import to_config_dict
from experiments.configs.context_ladder import context_ladder
from hybrid_moe.presets import BASE_1B
from hybrid_moe.run_config import OptimConfig


def get_config() -> config_dict.ConfigDict:
  """Four stages, each twice as long as the last."""
  return to_config_dict(
    context_ladder(
      BASE_1B,
      first_len=8192,
      step_tokens=524_288,
      micro_tokens=16_384,
      # The library's sources have far fewer: more would be more epochs of them.
      total_tokens=100_000_000,
      optim=OptimConfig(peak_lr=1e-3),
    )
  )
