"""Prepared directories: complete or absent, whatever dies on the way."""

import os
import signal
import subprocess
import sys
import threading

from absl.testing import absltest

from hybrid_moe.data import cache

# Says that it has begun, then never ends.
_HANGING_BUILD = """
import sys, time
from hybrid_moe.data import cache

def build(partial):
  open(partial + '/half', 'w').write('x')
  print('begun', flush=True)
  time.sleep(600)

cache.build_directory(sys.argv[1], build)
"""


class CacheTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    self.path = os.path.join(self.folder, 'thing')
    self.builds = 0

  def _build(self, partial):
    self.builds += 1
    with open(os.path.join(partial, 'content'), 'w') as file:
      file.write('whole')
    return {'size': 5}

  def test_builds_once(self):
    for _ in range(2):
      meta = cache.build_directory(self.path, self._build)
      self.assertEqual(meta, {'size': 5})
    self.assertEqual(self.builds, 1)

  def test_an_error_leaves_nothing(self):
    def build(partial):
      self._build(partial)
      raise ZeroDivisionError

    with self.assertRaises(ZeroDivisionError):
      cache.build_directory(self.path, build)
    self.assertEqual(os.listdir(self.folder), ['thing.lock'])
    cache.build_directory(self.path, self._build)
    self.assertTrue(cache.is_complete(self.path))

  def test_a_killed_build_is_not_taken_for_complete(self):
    process = subprocess.Popen(
      [sys.executable, '-c', _HANGING_BUILD, self.path],
      stdout=subprocess.PIPE,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    self.assertEqual(process.stdout.readline(), b'begun\n')
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    self.assertFalse(cache.is_complete(self.path))
    left = [n for n in os.listdir(self.folder) if '.partial-' in n]
    self.assertLen(left, 1)
    cache.build_directory(self.path, self._build)
    self.assertEqual(sorted(os.listdir(self.path)), ['content', 'meta.json'])
    left = [n for n in os.listdir(self.folder) if '.partial-' in n]
    self.assertEmpty(left)

  def test_a_directory_without_metadata_is_built_again(self):
    os.makedirs(self.path)
    cache.build_directory(self.path, self._build)
    self.assertEqual(self.builds, 1)
    self.assertTrue(cache.is_complete(self.path))

  def test_a_second_builder_waits_for_the_first(self):
    begun, go_on = threading.Event(), threading.Event()

    def slow(partial):
      begun.set()
      go_on.wait()
      return self._build(partial)

    threads = [
      threading.Thread(target=cache.build_directory, args=(self.path, build))
      for build in (slow, self._build)
    ]
    threads[0].start()
    begun.wait()
    threads[1].start()
    threads[1].join(0.2)
    waited = threads[1].is_alive()
    go_on.set()
    for thread in threads:
      thread.join()
    self.assertTrue(waited)
    self.assertEqual(self.builds, 1)

  def test_loses_the_race_where_there_are_no_locks(self):
    def build(partial):
      # Meanwhile another machine finishes.
      os.makedirs(self.path)
      with open(os.path.join(self.path, cache.META_FILE), 'w') as file:
        file.write('{"by": "the other"}')
      return self._build(partial)

    meta = cache.build_directory(self.path, build)
    self.assertEqual(meta, {'by': 'the other'})

  def test_unreadable_metadata(self):
    cache.build_directory(self.path, self._build)
    with open(os.path.join(self.path, cache.META_FILE), 'w') as file:
      file.write('{')
    with self.assertRaisesRegex(cache.DamagedCacheError, 'thing.*delete'):
      cache.build_directory(self.path, self._build)

  def test_digest_follows_every_field(self):
    first = cache.digest({'a': 1, 'b': 'x'})
    self.assertEqual(first, cache.digest({'b': 'x', 'a': 1}))
    self.assertNotEqual(first, cache.digest({'a': 2, 'b': 'x'}))


if __name__ == '__main__':
  absltest.main()
