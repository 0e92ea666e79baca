"""Runs the README's training command in a fresh clone and checks its figures.

  python -m experiments.check_quickstart

Takes as long as that command. Exits with 1 when a figure is missed.
"""

import pathlib
import subprocess
import sys
import tempfile
import time

from absl import app

from hybrid_moe import metrics

_MAX_MINUTES = 12.0
_MIN_FALL_NATS = 1.0
_MAX_VIOLATION = 1.0
_NUM_STAGES = 4


def main(argv: list[str]) -> None:
  del argv
  root = pathlib.Path(__file__).resolve().parents[1]
  with tempfile.TemporaryDirectory() as folder:
    clone = pathlib.Path(folder) / 'clone'
    subprocess.run(['git', 'clone', '-q', root, clone], check=True)
    command = training_command((clone / 'README.md').read_text())
    print(f'$ {command}', flush=True)
    start_s = time.monotonic()
    subprocess.run(command, shell=True, cwd=clone, check=True)
    minutes = (time.monotonic() - start_s) / 60
    records = metrics.read_metrics(str(clone / 'runs' / 'tiny'))
    report = (clone / 'runs' / 'tiny' / 'report.md').read_text()
  evals = [r for r in records if r[metrics.KIND] == metrics.EVAL]
  trains = [r for r in records if r[metrics.KIND] == metrics.TRAIN]
  first, last = evals[0][metrics.LOSS], evals[-1][metrics.LOSS]
  ended = {r[metrics.STAGE] for r in evals if r[metrics.IS_STAGE_END]}
  losses = [r[metrics.LOSS] for r in evals + trains]
  violation = max(trains[-1][metrics.MAX_VIOLATION])
  checks = {
    f'{minutes:.1f} minutes of {_MAX_MINUTES}': minutes < _MAX_MINUTES,
    f'{len(ended)} stages of {_NUM_STAGES}': len(ended) == _NUM_STAGES,
    f'validation loss {first:.3f} to {last:.3f}': last < first - _MIN_FALL_NATS,
    'below the bigram model': 'nats below it' in report,
    f'MaxVio {violation:.3f} of {_MAX_VIOLATION}': violation < _MAX_VIOLATION,
    'all losses finite': all(loss == loss for loss in losses),
  }
  for figure, holds in checks.items():
    print(f'{"ok  " if holds else "MISS"} {figure}')
  if not all(checks.values()):
    sys.exit(1)


def training_command(readme: str) -> str:
  """The line of the README that trains the tiny model."""
  return next(
    line.strip()
    for line in readme.splitlines()
    if line.startswith('    ') and line.endswith('-m experiments.pretrain')
  )


if __name__ == '__main__':
  app.run(main)
