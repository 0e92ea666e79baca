"""The report of a run: a page of Markdown and its figures.

It is made from the records (`metrics.py`) and a dict of what is not in them,
the facts. Every fact may be missing, and a run cut short has a report too: what
is not known is said not to be. Facts:

  NAME         title of the run
  IS_COMPLETE  whether all stages came to their end
  DEVICES      such as '8 x TPU v5p'
  BIGRAM_LOSS  loss of a bigram model on the validation rows, nats a token
  LOST_SKIPS   skipped steps that roll-backs took out of the records
  SAMPLE       text that the model generated, prompt included
  STAGES       a list, in order, of dicts: STAGE_NAME, SEQ_LEN, PARAMETERS,
               ACTIVE_PARAMETERS, FLOPS_PER_TOKEN, MEMORY (a `MemoryReport`),
               COMPILE_SECONDS, STEPS, STAGE_TOKENS (both done, not planned)
"""

import math
import os
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from hybrid_moe import metrics, plots
from hybrid_moe.atomic_file import replace_text
from hybrid_moe.memory_plan import format_bytes

NAME = 'name'
IS_COMPLETE = 'is_complete'
DEVICES = 'devices'
BIGRAM_LOSS = 'bigram_loss'
SAMPLE = 'sample'
LOST_SKIPS = 'lost_skips'
STAGES = 'stages'
STAGE_NAME = 'name'
SEQ_LEN = 'seq_len'
PARAMETERS = 'parameters'
ACTIVE_PARAMETERS = 'active_parameters'
FLOPS_PER_TOKEN = 'flops_per_token'
MEMORY = 'memory'
COMPILE_SECONDS = 'compile_s'
STEPS = 'steps'
STAGE_TOKENS = 'tokens'

FILE_NAME = 'report.md'
_UNKNOWN = '–'
_MAX_LISTED_STEPS = 20

Record = Mapping[str, Any]


def write_report(
  workdir: str, records: Sequence[Record], facts: Mapping[str, Any]
) -> pathlib.Path:
  """Writes `report.md` and its figures.

  Args:
    workdir: the run's directory.
    records: what `metrics.read_metrics` returns; may be empty.
    facts: see the top of this module; may be empty.

  Returns:
    path of the page.
  """
  directory = pathlib.Path(workdir)
  directory.mkdir(parents=True, exist_ok=True)
  evals = _last_evals(records)
  newest = next(reversed(evals.values()), {})
  bigram_loss = facts.get(BIGRAM_LOSS)
  figures = {
    'loss.png': plots.draw_loss(records, bigram_loss),
    'loss_by_position.png': plots.draw_loss_by_position(
      {_stage_title(stage, r): r for stage, r in evals.items()}
    ),
    'expert_utilization.png': plots.draw_utilization(newest),
  }
  shown = {
    name: _save_figure(directory / name, figure)
    for name, figure in figures.items()
  }
  sections = [
    f'# {_line(facts.get(NAME, "Training run"))}',
    _summary(records, facts, newest),
    '## Stages',
    _program_table(facts),
    _result_table(records, facts, evals),
    '## Loss',
    _image(shown, 'loss.png', 'Loss against tokens', 'a loss'),
    _baseline(bigram_loss, newest),
    '## Loss by position in the document',
    _image(
      shown,
      'loss_by_position.png',
      'Validation loss by tokens since the start of the document in its row, '
      'at the end of each stage',
      'a loss by position',
    ),
    '## Experts',
    _image(
      shown,
      'expert_utilization.png',
      'Load of each expert in the newest evaluation',
      'the use of the experts',
    ),
    '## Health',
    _health(records, facts.get(LOST_SKIPS, 0)),
    '## Sample',
    _sample(facts.get(SAMPLE)),
  ]
  path = directory / FILE_NAME
  text = '\n\n'.join(section for section in sections if section) + '\n'
  replace_text(path, text)
  return path


def _last_evals(records: Iterable[Record]) -> dict[str, Record]:
  """By stage, in order, its evaluation at the end, or else the newest one."""
  evals: dict[str, Record] = {}
  for record in records:
    if record[metrics.KIND] == metrics.EVAL:
      evals[record.get(metrics.STAGE, '')] = record
  return evals


def _stage_title(stage: str, record: Record) -> str:
  ended = record.get(metrics.IS_STAGE_END)
  return stage if ended else f'{stage} (not at its end)'


def _save_figure(path: pathlib.Path, figure: Figure | None) -> bool:
  """Saves a figure; removes an older one where there is nothing to draw."""
  if figure is None:
    path.unlink(missing_ok=True)
    return False
  temporary = path.with_suffix('.tmp')
  figure.savefig(temporary, format='png', dpi=120)
  os.replace(temporary, path)
  return True


def _summary(
  records: Sequence[Record], facts: Mapping[str, Any], newest: Record
) -> str:
  train = [r for r in records if r[metrics.KIND] == metrics.TRAIN]
  lines = []
  if not facts.get(IS_COMPLETE):
    lines.append(
      '**This run was cut short: not all stages came to their end.**'
    )
  if train:
    last = train[-1]
    lines.append(
      f'{last[metrics.STEP]:,} steps, '
      f'{_count(last.get(metrics.TOKENS))} tokens, training loss '
      f'{_loss(last.get(metrics.LOSS))}, validation loss '
      f'{_loss(newest.get(metrics.LOSS))} nats a token.'
    )
  else:
    lines.append('No training step was recorded.')
  if DEVICES in facts:
    lines.append(f'Devices: {_line(facts[DEVICES])}.')
  return '\n\n'.join(lines)


def _program_table(facts: Mapping[str, Any]) -> str:
  if not facts.get(STAGES):
    return 'The programs of the stages were not recorded.'
  rows = []
  for stage in facts[STAGES]:
    memory = stage.get(MEMORY)
    sizes = [_UNKNOWN] * 4
    if memory is not None:
      sizes = [
        format_bytes(memory.arguments),
        format_bytes(memory.temporaries),
        format_bytes(memory.peak),
        f'{memory.headroom:.0%}',
      ]
    rows.append(
      [
        stage.get(STAGE_NAME, _UNKNOWN),
        _count(stage.get(SEQ_LEN)),
        _count(stage.get(PARAMETERS)),
        _count(stage.get(ACTIVE_PARAMETERS)),
        _number(stage.get(FLOPS_PER_TOKEN), '.3g'),
        *sizes,
        _number(stage.get(COMPILE_SECONDS), '.1f'),
      ]
    )
  return _table(
    [
      'stage',
      'row length',
      'parameters',
      'active',
      'FLOPs/token',
      'arguments',
      'temporaries',
      'peak a device',
      'free at the peak',
      'compile (s)',
    ],
    rows,
  )


def _result_table(
  records: Sequence[Record],
  facts: Mapping[str, Any],
  evals: Mapping[str, Record],
) -> str:
  stages = {s.get(STAGE_NAME): s for s in facts.get(STAGES, ())}
  seen = [r[metrics.STAGE] for r in records if metrics.STAGE in r]
  names = list(dict.fromkeys([*stages, *seen]))
  if not names:
    return 'No stage was recorded.'
  sources = list(
    dict.fromkeys(
      s for r in evals.values() for s in r.get(metrics.BY_SOURCE, {})
    )
  )
  rows = []
  for name in names:
    stage = stages.get(name, {})
    record = evals.get(name, {})
    by_source = record.get(metrics.BY_SOURCE, {})
    rows.append(
      [
        _stage_title(name, record) if record else f'{name} (not evaluated)',
        _count(stage.get(STEPS)),
        _count(stage.get(STAGE_TOKENS)),
        _loss(record.get(metrics.LOSS)),
        *(_loss(by_source.get(source)) for source in sources),
      ]
    )
  header = ['stage', 'steps', 'tokens', 'validation loss', *sources]
  return _table(header, rows)


def _baseline(bigram_loss: float | None, newest: Record) -> str:
  if bigram_loss is None:
    return 'No bigram baseline was computed.'
  text = f'A bigram model has a validation loss of {_loss(bigram_loss)} nats'
  if metrics.LOSS not in newest:
    return f'{text}; this run was not evaluated.'
  gain = bigram_loss - newest[metrics.LOSS]
  if not math.isfinite(gain):
    return f'{text}; the loss of this run is not finite.'
  side = 'below' if gain >= 0 else 'above'
  return f'{text}; this run ends {abs(gain):.4f} nats {side} it.'


def _health(records: Sequence[Record], lost_skips: int) -> str:
  skipped = [r[metrics.STEP] for r in records if r.get(metrics.SKIPPED)]
  lines = [f'- Skipped steps: {len(skipped) + lost_skips}']
  if skipped:
    shown = ', '.join(map(str, skipped[:_MAX_LISTED_STEPS]))
    rest = len(skipped) - _MAX_LISTED_STEPS
    lines[0] += f' ({shown}{f" and {rest} more" if rest > 0 else ""})'
  if lost_skips:
    lines[0] += f', {lost_skips} of them undone by roll-backs'
  for event, title in (
    (metrics.ROLLBACK, 'Roll-backs'),
    (metrics.DAMAGED_CHECKPOINT, 'Damaged checkpoints'),
    (metrics.STAGE_PROLONGED, 'Stages prolonged'),
  ):
    # A resumed run finds the same damaged checkpoint again.
    found = dict.fromkeys(
      (r[metrics.STEP], _line(r.get(metrics.REASON, 'no reason recorded')))
      for r in records
      if r.get(metrics.EVENT) == event
    )
    lines.append(f'- {title}: {len(found)}')
    lines += [f'  - at step {step}: {reason}' for step, reason in found]
  return '\n'.join(lines)


def _sample(text: str | None) -> str:
  if not text:
    return 'No text was generated.'
  kept = ''.join(
    c if c in '\n\t' or unicodedata.category(c)[0] != 'C' else '\ufffd'
    for c in text
  )
  # Longer than any fence in the text, which could otherwise end the block.
  runs = [len(run) for run in re.findall('`+', kept)]
  fence = '`' * max(3, max(runs, default=0) + 1)
  return f'{fence}text\n{kept}\n{fence}'


def _image(
  shown: Mapping[str, bool], name: str, title: str, missing: str
) -> str:
  if shown[name]:
    return f'![{title}]({name})'
  return f'No record has {missing}.'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [header, ['---'] * len(header), *rows]
  return '\n'.join(
    '| ' + ' | '.join(_line(cell) for cell in line) + ' |' for line in lines
  )


def _line(text: Any) -> str:
  """Text that stays in its line, its table cell and its place."""
  escaped = re.sub(r'([\\|`*_<>\[\]])', r'\\\1', str(text))
  return ' '.join(escaped.split())


def _number(value: float | None, spec: str) -> str:
  return _UNKNOWN if value is None else format(value, spec)


def _count(value: int | None) -> str:
  return _number(value, ',')


def _loss(value: float | None) -> str:
  if value is not None and not math.isfinite(value):
    return 'not finite'
  return _number(value, '.4f')
