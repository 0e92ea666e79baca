"""Staged pretraining.

  python -m experiments.pretrain
  python -m experiments.pretrain --config=experiments/configs/nano.py \
      --workdir=runs/nano --config.total_tokens=20_000_000
"""

import sys

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from hybrid_moe.checkpoint_files import CheckpointError
from hybrid_moe.checks import ConfigError
from hybrid_moe.config import config_from_dict
from hybrid_moe.data.records import DamagedCacheError
from hybrid_moe.health import RollbackError
from hybrid_moe.stage_runner import run

_CONFIG = config_flags.DEFINE_config_file(
  'config',
  'experiments/configs/tiny.py',
  'Configuration file; fields are overridden with --config.field=value.',
  lock_config=True,
)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  'runs/tiny',
  'Folder for data, checkpoints, metrics and the report. A run that was '
  'stopped continues from it.',
)
_DISTRIBUTED = flags.DEFINE_bool(
  'distributed',
  False,
  'Whether this is one of several processes (TPU pods, Slurm, Open MPI).',
)

# Exit status of a process that SIGTERM ended, as shells report it.
_STOPPED = 143


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f'unknown arguments: {argv[1:]}')
  logging.use_absl_handler()
  if _DISTRIBUTED.value:
    jax.distributed.initialize()
  try:
    config = config_from_dict(_CONFIG.value)
    result = run(config, _WORKDIR.value)
  except (
    ConfigError,
    CheckpointError,
    DamagedCacheError,
    RollbackError,
  ) as error:
    sys.exit(f'{type(error).__name__}: {error}')
  if not result.is_complete:
    sys.exit(_STOPPED)


if __name__ == '__main__':
  app.run(main)
