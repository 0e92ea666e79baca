"""Staged pretraining.

  python -m experiments.pretrain
  python -m experiments.pretrain --config=experiments/configs/nano.py \
      --config.total_tokens=20_000_000
"""

import errno
import pathlib
import sys

import jax
from absl import app, flags, logging
from ml_collections import config_dict, config_flags

from hybrid_moe.checkpoint_files import CheckpointError
from hybrid_moe.checks import ConfigError
from hybrid_moe.config import config_from_dict
from hybrid_moe.data.records import DamagedCacheError
from hybrid_moe.health import RollbackError
from hybrid_moe.stage_runner import run

_CONFIG = config_flags.DEFINE_config_file(
  'config',
  None,
  'Configuration file, configs/tiny.py by default; fields are overridden with '
  '--config.field=value.',
  lock_config=True,
)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'Folder for data, checkpoints, metrics and the report; by default runs/ and '
  "the configuration file's name without .py. A run that was stopped continues "
  'from it.',
)
_DISTRIBUTED = flags.DEFINE_bool(
  'distributed',
  False,
  'Whether this is one of several processes (TPU pods, Slurm, Open MPI).',
)

_DEFAULT_CONFIG = pathlib.Path(__file__).parent / 'configs' / 'tiny.py'

# Exit status of a process that SIGTERM ended, as shells report it.
_STOPPED = 143


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f'unknown arguments: {argv[1:]}')
  logging.use_absl_handler()
  # What a person needs is printed; libraries say much more at lower levels.
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)
  if _DISTRIBUTED.value:
    jax.distributed.initialize()
  try:
    config = config_from_dict(_load_config())
    result = run(config, _find_workdir())
  except (
    ConfigError,
    CheckpointError,
    DamagedCacheError,
    RollbackError,
  ) as error:
    sys.exit(f'{type(error).__name__}: {error}')
  except OSError as error:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    sys.exit(f'{error}; the same command continues when there is room')
  if not result.is_complete:
    sys.exit(_STOPPED)


def default_workdir(config_filename: str) -> str:
  """A folder for each configuration file: runs/nano for configs/nano.py."""
  path, _, _ = config_filename.partition('.py:')
  return f'runs/{pathlib.Path(path).name.removesuffix(".py")}'


def _find_workdir() -> str:
  if _WORKDIR.value is not None:
    return _WORKDIR.value
  return default_workdir(flags.FLAGS['config'].config_filename)


def _load_config() -> config_dict.ConfigDict:
  try:
    # The flag reports a file that it could not read when it is first used.
    _CONFIG.value.keys()
  except OSError as error:
    name = flags.FLAGS['config'].config_filename
    raise ConfigError(
      f'--config={name!r}: accepted is the path of a configuration file'
    ) from error
  return _CONFIG.value


def _parse_flags(argv: list[str]) -> list[str]:
  """Parses the command line; a mistake in it ends the process in a line."""
  # The flag's own default would be loaded, with its overrides, where nothing
  # can catch a mistake in them.
  if not any(arg.split('=')[0] in ('--config', '-config') for arg in argv):
    argv = [argv[0], f'--config={_DEFAULT_CONFIG}', *argv[1:]]
  overrides = [arg for arg in argv if arg.startswith('--config.')]
  try:
    return app.parse_flags_with_usage(argv)
  except ConfigError as error:
    sys.exit(f'{type(error).__name__}: {error}')
  except (AttributeError, LookupError) as error:
    # How a ConfigDict and a tuple say that they lack what a flag names.
    if not overrides:
      raise
    sys.exit(f'no such field ({error}) in {" ".join(overrides)}')


if __name__ == '__main__':
  app.run(main, flags_parser=_parse_flags)
