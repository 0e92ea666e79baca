"""A run that continues on other rows says so."""

import json
import types

from absl.testing import absltest

from hybrid_moe.run_data import changed_rows, rows_to_meta


def _data(**digests):
  return types.SimpleNamespace(stage='short', digests=digests)


class ChangedRowsTest(absltest.TestCase):
  def test_names_what_changed(self):
    data = [_data(words='a-b', recall='c-d')]
    meta = json.loads(json.dumps(rows_to_meta(data)))
    self.assertEmpty(changed_rows(meta, data))
    self.assertEqual(
      changed_rows(meta, [_data(words='a-e', recall='c-d')]),
      ["stage 'short', source 'words'"],
    )

  def test_what_a_checkpoint_does_not_say_has_not_changed(self):
    self.assertEmpty(changed_rows({}, [_data(words='a-b')]))


if __name__ == '__main__':
  absltest.main()
