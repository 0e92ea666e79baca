"""A run that continues on other rows says so."""

import types

from absl.testing import absltest

from hybrid_moe.run_data import note_rows


def _data(tokens):
  counts = {'rows': 3, 'documents': 2, 'tokens': tokens, 'padding_waste': 0.1}
  sources = {'words': {'train': counts, 'validation': counts | {'tokens': 9}}}
  return types.SimpleNamespace(stage='short', report={'sources': sources})


class NoteRowsTest(absltest.TestCase):
  def test_names_what_changed(self):
    workdir = self.create_tempdir().full_path
    self.assertEmpty(note_rows(workdir, [_data(1500)]))
    self.assertEmpty(note_rows(workdir, [_data(1500)]))
    self.assertEqual(
      note_rows(workdir, [_data(1400)]),
      [
        'stage short, source words, train: 3 rows, 2 documents, 1,400 tokens '
        'now, 3 rows, 2 documents, 1,500 tokens before'
      ],
    )


if __name__ == '__main__':
  absltest.main()
