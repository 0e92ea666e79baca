"""What every source file owes its reader."""

import ast
import pathlib
import re

from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ('pallas_kernels', 'hybrid_moe', 'experiments')
LONGEST = 450


def sources(*folders: str) -> list[pathlib.Path]:
  found = [p for f in folders for p in sorted((ROOT / f).rglob('*.py'))]
  assert found, folders
  return found


def public_definitions(tree: ast.Module):
  """Classes and functions of a module that others may use, but `main`."""
  for node in tree.body:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
      if not node.name.startswith('_') and node.name != 'main':
        yield node


class FilesTest(absltest.TestCase):
  def test_files_are_short(self):
    for path in sources(*PACKAGES, 'tests'):
      lines = path.read_text(encoding='utf-8').count('\n')
      self.assertLessEqual(lines, LONGEST, path)

  def test_names_say_what_a_file_is_about(self):
    forbidden = {'utils', 'util', 'helpers', 'helper', 'common', 'misc', 'lib'}
    for path in sources(*PACKAGES, 'tests'):
      parts = path.relative_to(ROOT).with_suffix('').parts
      words = {word for part in parts for word in part.split('_')}
      self.assertNoCommonElements(words, forbidden, path)

  def test_public_names_have_docstrings(self):
    for path in sources('pallas_kernels', 'hybrid_moe'):
      tree = ast.parse(path.read_text(encoding='utf-8'))
      self.assertIsNotNone(ast.get_docstring(tree), path)
      for node in public_definitions(tree):
        self.assertIsNotNone(
          ast.get_docstring(node), f'{path}:{node.lineno} {node.name}'
        )

  def test_nothing_is_left_to_do(self):
    pattern = re.compile(r'\b(TODO|FIXME|XXX|HACK)\b')
    for path in sources(*PACKAGES):
      self.assertNotRegex(path.read_text(encoding='utf-8'), pattern, path)

  def test_tests_have_no_packages(self):
    self.assertEmpty(list((ROOT / 'tests').rglob('__init__.py')))

  def test_every_skip_has_a_reason(self):
    for path in sources('tests'):
      for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Call) and re.search(
          r'(skip|skipTest|xfail)$', ast.unparse(node.func)
        ):
          self.assertTrue(node.args or node.keywords, f'{path}:{node.lineno}')


if __name__ == '__main__':
  absltest.main()
