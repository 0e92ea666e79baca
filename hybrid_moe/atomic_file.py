"""Writing a small file so that a kill leaves the old one or the new one."""

import os
import pathlib


def replace_text(path: pathlib.Path, text: str) -> None:
  """Puts `text` in the place of the file, on disk when this returns.

  Args:
    path: the file, new or old; its folder exists.
    text: written as UTF-8; what that cannot hold becomes '?'.
  """
  temporary = path.with_name(path.name + '.tmp')
  with open(temporary, 'w', encoding='utf-8', errors='replace') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
