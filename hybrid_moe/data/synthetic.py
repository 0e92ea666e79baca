"""Long-range tasks as text of any length.

Associative recall is the multi-query task of Zoology (arXiv 2312.04927); the
needle is a fact hidden in filler and asked for at the end; copy repeats its
first half. The text is ASCII, so an offset in it is the same in characters
and in bytes.
"""

import dataclasses

import numpy as np

from hybrid_moe.checks import require

TASKS = ('recall', 'needle', 'copy')
MIN_LENGTH = 56
# Part of every cache key: raise it when the same seed gives another text.
VERSION = 1

_SUBJECTS = ('heron', 'miller', 'lantern', 'glacier', 'sparrow', 'harbour')
_VERBS = ('watched', 'passed', 'followed', 'answered', 'carried', 'missed')
_ADJECTIVES = ('grey', 'quiet', 'narrow', 'early', 'distant', 'plain')
_OBJECTS = ('river', 'meadow', 'letter', 'bridge', 'winter', 'garden')


@dataclasses.dataclass(frozen=True)
class SyntheticDocument:
  """A generated document.

  Attributes:
    text: ASCII, of exactly the length asked for.
    answers: [start, end) offsets in `text` of what can only be known from
      far above.
  """

  text: str
  answers: tuple[tuple[int, int], ...]


def generate(
  task: str, *, seed: int, index: int, length: int
) -> SyntheticDocument:
  """Returns one document, the same for the same arguments.

  Args:
    task: 'recall', 'needle' or 'copy'.
    seed: stream of documents, >= 0.
    index: number of the document in the stream, >= 0.
    length: characters, >= MIN_LENGTH.

  Raises:
    ConfigError: an unknown task or too short a length.
  """
  require(task in TASKS, 'task', task, f'one of {TASKS}')
  require(length >= MIN_LENGTH, 'length', length, f'>= {MIN_LENGTH}')
  rng = np.random.default_rng([seed, index, length, TASKS.index(task)])
  make = {'recall': _recall, 'needle': _needle, 'copy': _copy}[task]
  text, answers = make(rng, length)
  return SyntheticDocument(text, tuple(answers))


def _recall(rng, length):
  """Lines 'key value', then the same pairs in another order."""
  letters = 4 if length < 10**6 else 6
  line = letters + 6  # key, space, four digits, newline
  num_pairs = (length - 2) // (2 * line)
  keys = [
    _word(n, letters) for n in rng.choice(26**letters, num_pairs, replace=False)
  ]
  lines = [
    f'{key} {value:04d}\n'
    for key, value in zip(keys, rng.integers(10**4, size=num_pairs))
  ]
  asked = [lines[i] for i in rng.permutation(num_pairs)]
  text = ''.join(lines) + '?\n' + ''.join(asked)
  first = num_pairs * line + 2
  answers = [
    (first + i * line + letters + 1, first + (i + 1) * line - 1)
    for i in range(num_pairs)
  ]
  return text.ljust(length, '\n'), answers


def _needle(rng, length):
  """A fact at a random depth of the filler; the question ends the text."""
  name = _word(rng.integers(26**6), 6)
  code = f'{rng.integers(10**5):05d}'
  fact = f'The code of {name} is {code}. '
  question = f'\nCode of {name}? {code}.'
  room = length - len(fact) - len(question)
  sentences, total = [], 0
  picks = rng.integers(6, size=(room // 20 + 1, 4))
  for a, b, c, d in picks:
    sentence = (
      f'The {_ADJECTIVES[a]} {_SUBJECTS[b]} {_VERBS[c]} the {_OBJECTS[d]}. '
    )
    if total + len(sentence) > room:
      break
    sentences.append(sentence)
    total += len(sentence)
  depth = int(rng.integers(len(sentences) + 1))
  sentences.insert(depth, fact)
  text = ''.join(sentences).ljust(length - len(question), '.') + question
  return text, [(length - 1 - len(code), length - 1)]


def _copy(rng, length):
  """Random letters in words, a separator, the same again."""
  half = (length - 4) // 2
  letters = rng.integers(97, 123, half).astype(np.uint8)
  letters[rng.random(half) < 0.15] = ord(' ')
  content = letters.tobytes().decode('ascii')
  text = f'{content}\n=\n{content}\n'
  return text.ljust(length, '\n'), [(half + 3, 2 * half + 3)]


def _word(number: int, letters: int) -> str:
  """Writes a number below 26**letters in letters."""
  word = []
  for _ in range(letters):
    number, letter = divmod(int(number), 26)
    word.append(chr(97 + letter))
  return ''.join(word)
