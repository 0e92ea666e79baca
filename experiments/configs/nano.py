"""About 20 million parameters through 512 to 4096 tokens, on a CPU.

Command:  python -m experiments.pretrain --config=experiments/configs/nano.py \
              --workdir=runs/nano
Hardware: a CPU of several cores, 8 GiB of memory

The budget is a demonstration on Python's own library sources. A real run brings
its own data, tokenizer and budget of tokens.
"""

from ml_collections import config_dict

from experiments.configs.base import to_config_dict
from experiments.configs.context_ladder import context_ladder
from hybrid_moe.presets import NANO
from hybrid_moe.run_config import OptimConfig


def get_config() -> config_dict.ConfigDict:
  """Four stages, each twice as long as the last."""
  return to_config_dict(
    context_ladder(
      NANO,
      first_len=512,
      step_tokens=16_384,
      micro_tokens=8_192,
      total_tokens=20_000_000,
      optim=OptimConfig(peak_lr=5e-3),
    )
  )
