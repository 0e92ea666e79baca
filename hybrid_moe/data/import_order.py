"""Orders the files of a package so that what is imported comes first."""

import ast
import warnings
from collections.abc import Mapping


def order_by_imports(texts: Mapping[str, str]) -> list[str]:
  """Returns the paths with every file after the files it imports.

  Imports are found in the syntax tree, at any depth of a file. A cycle is
  broken where a walk in the order of paths meets it, so the result depends
  on the files alone. Files that are not Python, or do not parse, import
  nothing.

  Args:
    texts: content by path relative to the folder that holds the package
      ('package/module.py').
  """
  paths = sorted(texts)
  modules = _name_modules(paths)
  imports = {path: _find_imports(path, texts[path], modules) for path in paths}
  ordered: list[str] = []
  seen: set[str] = set()
  # Depth first without recursion: chains of imports can be long.
  for start in paths:
    if start in seen:
      continue
    seen.add(start)
    stack = [(start, iter(imports[start]))]
    while stack:
      path, remaining = stack[-1]
      following = next((p for p in remaining if p not in seen), None)
      if following is None:
        ordered.append(path)
        stack.pop()
      else:
        seen.add(following)
        stack.append((following, iter(imports[following])))
  return ordered


def _name_modules(paths: list[str]) -> dict[str, str]:
  """Maps importable names to paths.

  A file is known by its whole dotted path and, where outer folders are no
  packages (as in 'src/package/module.py'), by the name that begins at the
  outermost package too.
  """
  known = set(paths)
  modules: dict[str, str] = {}
  for path in paths:
    name = _dotted(path)
    if name is None:
      continue
    modules.setdefault(name, path)
    folders = path.split('/')[:-1]
    begin = len(folders)
    while begin and '/'.join([*folders[:begin], '__init__.py']) in known:
      begin -= 1
    inner = '.'.join(name.split('.')[begin:])
    if inner:
      modules.setdefault(inner, path)
  return modules


def _dotted(path: str) -> str | None:
  if not path.endswith('.py'):
    return None
  parts = path[: -len('.py')].split('/')
  if parts[-1] == '__init__' and len(parts) > 1:
    parts.pop()
  return '.'.join(parts)


def _find_imports(
  path: str, text: str, modules: Mapping[str, str]
) -> list[str]:
  """Returns the sorted paths among `modules` that a file imports."""
  name = _dotted(path)
  if name is None:
    return []
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      tree = ast.parse(text)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return []
  package = name.split('.')
  if not path.endswith('__init__.py'):
    package = package[:-1]
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found.update(modules.get(alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module.split('.') if node.module else []
      if node.level:
        if node.level > len(package):
          continue
        base = package[: len(package) - node.level + 1] + base
      for alias in node.names:
        # `from a import b` names the module a.b, or something inside a.
        found.add(
          modules.get('.'.join([*base, alias.name]))
          or modules.get('.'.join(base))
        )
  return sorted(p for p in found if p is not None and p != path)
