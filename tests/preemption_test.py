"""SIGTERM becomes a question, once."""

import os
import signal

import chex
from absl.testing import absltest

from hybrid_moe.preemption import PreemptionSignal


class PreemptionTest(chex.TestCase):
  def test_sigterm_sets_a_flag_and_the_handler_is_given_back(self):
    previous = signal.getsignal(signal.SIGTERM)
    with PreemptionSignal() as preemption:
      self.assertFalse(preemption.should_stop(1))
      os.kill(os.getpid(), signal.SIGTERM)
      self.assertTrue(preemption.should_stop(2))
      self.assertTrue(preemption.should_stop(3))
      # A second one would have its usual effect.
      self.assertEqual(signal.getsignal(signal.SIGTERM), previous)
    with PreemptionSignal():
      self.assertNotEqual(signal.getsignal(signal.SIGTERM), previous)
    self.assertEqual(signal.getsignal(signal.SIGTERM), previous)


if __name__ == '__main__':
  absltest.main()
