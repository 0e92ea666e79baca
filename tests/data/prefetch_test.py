"""Reading ahead: order, errors and the end of the thread."""

import gc
import subprocess
import sys
import threading
import time

from absl.testing import absltest

from hybrid_moe.data.prefetch import Prefetcher


def _prefetch_threads():
  return [t for t in threading.enumerate() if t.name == 'prefetch']


class PrefetchTest(absltest.TestCase):
  def test_keeps_order_and_ends(self):
    ahead = Prefetcher(iter(range(100)))
    self.assertEqual(list(ahead), list(range(100)))
    with self.assertRaises(StopIteration):
      next(ahead)

  def test_stays_at_most_its_depth_ahead(self):
    read = []

    def elements():
      for i in range(100):
        read.append(i)
        yield i

    ahead = Prefetcher(elements(), depth=3)
    next(ahead)
    deadline = time.monotonic() + 5
    while len(read) < 5 and time.monotonic() < deadline:
      time.sleep(0.01)
    time.sleep(0.05)
    # One taken, three waiting, one in the hand of the thread.
    self.assertEqual(read, list(range(5)))
    ahead.close()

  def test_an_error_comes_where_it_happened(self):
    def elements():
      yield 1
      raise ZeroDivisionError('in the thread')

    ahead = Prefetcher(elements())
    self.assertEqual(next(ahead), 1)
    for _ in range(2):
      with self.assertRaisesRegex(ZeroDivisionError, 'in the thread'):
        next(ahead)

  def test_close_ends_the_thread(self):
    ahead = Prefetcher(iter(int, 1))
    next(ahead)
    ahead.close()
    ahead.close()
    self.assertEmpty(_prefetch_threads())
    with self.assertRaisesRegex(ValueError, 'closed'):
      next(ahead)

  def test_dropping_it_ends_the_thread(self):
    ahead = Prefetcher(iter(int, 1))
    next(ahead)
    del ahead
    gc.collect()
    self.assertEmpty(_prefetch_threads())

  def test_a_program_can_end_while_it_reads(self):
    program = (
      'from hybrid_moe.data.prefetch import Prefetcher\n'
      'ahead = Prefetcher(iter(int, 1))\n'
      'next(ahead)\n'
    )
    subprocess.run(
      [sys.executable, '-c', f'import sys; sys.path = {sys.path}\n' + program],
      check=True,
      timeout=60,
    )


if __name__ == '__main__':
  absltest.main()
