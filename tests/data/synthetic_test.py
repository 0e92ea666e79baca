"""Long-range tasks, each solved by a program that reads only what is above."""

import re

from absl.testing import absltest, parameterized

from hybrid_moe.checks import ConfigError
from hybrid_moe.data import synthetic


def _solve_recall(text: str, start: int) -> str:
  key = text[:start].split('\n')[-1].strip()
  return re.search(f'^{key} (.*)$', text[: text.index('?')], re.M).group(1)


def _solve_needle(text: str, start: int) -> str:
  question = text[:start].split('\n')[-1]
  name = re.fullmatch('Code of ([a-z]*)[?] ', question).group(1)
  return re.search(f'The code of {name} is ([0-9]*)[.]', text).group(1)


def _solve_copy(text: str, start: int) -> str:
  return text[:start].split('\n=\n')[0]


_SOLVERS = {
  'recall': _solve_recall,
  'needle': _solve_needle,
  'copy': _solve_copy,
}


class SyntheticTest(parameterized.TestCase):
  @parameterized.product(
    task=synthetic.TASKS, length=[synthetic.MIN_LENGTH, 57, 300, 2047, 20001]
  )
  def test_oracle_finds_every_answer(self, task, length):
    for index in range(3):
      document = synthetic.generate(task, seed=1, index=index, length=length)
      self.assertLen(document.text, length)
      self.assertTrue(document.text.isascii())
      self.assertNotEmpty(document.answers)
      for start, end in document.answers:
        answer = _SOLVERS[task](document.text, start)
        self.assertEqual(document.text[start:end], answer)

  @parameterized.parameters(*synthetic.TASKS)
  def test_seed_index_and_length_decide(self, task):
    def make(seed=3, index=4, length=200):
      return synthetic.generate(task, seed=seed, index=index, length=length)

    self.assertEqual(make(), make())
    texts = {
      make().text,
      make(seed=4).text,
      make(index=5).text,
      make(length=300).text[:200],
    }
    self.assertLen(texts, 4)

  def test_recall_keys_are_distinct(self):
    text = synthetic.generate('recall', seed=0, index=0, length=50000).text
    pairs = text[: text.index('?')].splitlines()
    self.assertGreater(len(pairs), 2000)
    self.assertLen({pair.split()[0] for pair in pairs}, len(pairs))

  def test_needles_lie_at_all_depths(self):
    depths = []
    for index in range(40):
      text = synthetic.generate('needle', seed=0, index=index, length=2000).text
      depths.append(text.index('The code of') / 2000)
    self.assertLess(min(depths), 0.2)
    self.assertGreater(max(depths), 0.8)

  def test_rejects_what_it_cannot_make(self):
    with self.assertRaisesRegex(ConfigError, 'length=55.*>= 56'):
      synthetic.generate('copy', seed=0, index=0, length=55)
    with self.assertRaisesRegex(ConfigError, "task='sort'"):
      synthetic.generate('sort', seed=0, index=0, length=100)


if __name__ == '__main__':
  absltest.main()
