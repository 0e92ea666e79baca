"""Cross entropy in stretches of tokens, and targets two tokens ahead."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe import loss

B, T, D, U = 2, 13, 6, 17


def make_inputs():
  rng = np.random.default_rng(0)
  hidden_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
  head_DU = rng.normal(size=(D, U)).astype(np.float32)
  targets_BT = rng.integers(0, U, (B, T)).astype(np.int32)
  return hidden_BTD, head_DU, targets_BT


@functools.partial(jax.jit, static_argnums=0)
def run(at_once, hidden_BTD, head_DU, targets_BT, cotangents):
  with mock.patch.object(loss, '_LOGITS_AT_ONCE', at_once):
    losses, pull = jax.vjp(
      lambda h, w: loss.token_losses(h, w, targets_BT), hidden_BTD, head_DU
    )
    return losses, pull(loss.TokenLosses(*cotangents))


class TokenLossesTest(parameterized.TestCase):
  def test_matches_definition(self):
    hidden, head, targets = make_inputs()
    losses = loss.token_losses(hidden, head, targets)
    logits = hidden.astype(np.float64) @ head
    log_z = np.log(np.exp(logits).sum(-1))
    target = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(losses.log_z_BT, log_z, rtol=1e-5)
    np.testing.assert_allclose(losses.nll_BT, log_z - target, rtol=1e-5)

  @parameterized.parameters(
    # One token, four tokens (13 is no multiple), all but one.
    B * U,
    4 * B * U,
    12 * B * U,
    1,
  )
  def test_stretches_change_nothing(self, at_once):
    inputs = make_inputs()
    cotangents = np.random.default_rng(1).normal(size=(2, B, T)).astype('f')
    want, want_grads = run(2**26, *inputs, cotangents)
    got, got_grads = run(at_once, *inputs, cotangents)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      np.testing.assert_allclose(a, b, rtol=1e-6)
    for a, b in zip(got_grads, want_grads):
      np.testing.assert_allclose(a, b, atol=1e-5)

  def test_gradient_is_probability_minus_target(self):
    hidden, head, targets = make_inputs()
    zeros = np.zeros((B, T), np.float32)
    _, (by_hidden, _) = run(
      4 * B * U, hidden, head, targets, (zeros + 1, zeros)
    )
    logits = hidden.astype(np.float64) @ head
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = (p - np.eye(U)[targets]) @ head.T.astype(np.float64)
    np.testing.assert_allclose(by_hidden, want, atol=1e-5)

  def test_bfloat16_logits_are_float32(self):
    hidden, head, targets = make_inputs()
    low = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    losses = loss.token_losses(*low, targets)
    self.assertEqual(losses.nll_BT.dtype, jnp.float32)
    exact = loss.token_losses(*(x.astype(jnp.float32) for x in low), targets)
    np.testing.assert_allclose(losses.nll_BT, exact.nll_BT, atol=1e-5)

  def test_huge_logits_are_finite(self):
    hidden, head, targets = make_inputs()
    zeros = np.zeros((B, T), np.float32)
    losses, grads = run(
      2**26, 1e4 * hidden, 1e4 * head, targets, (zeros + 1, zeros)
    )
    for leaf in jax.tree.leaves((losses, grads)):
      self.assertTrue(np.all(np.isfinite(leaf)))


class MtpTargetsTest(absltest.TestCase):
  def test_two_ahead_within_a_document(self):
    # Two documents of 4 and 3 tokens, and padding. A document's last token
    # has no target.
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32)
    targets = np.array([[11, 12, 13, 99, 21, 22, 99, 99]], np.int32)
    mask = np.array([[1, 1, 1, 0, 1, 1, 0, 0]], bool)
    ahead, ahead_mask = loss.mtp_targets(targets, mask, segments)
    self.assertEqual(
      ahead_mask.tolist(),
      [[True, True, False, False, True, False, False, False]],
    )
    self.assertEqual(np.asarray(ahead)[0, [0, 1, 4]].tolist(), [12, 13, 22])

  def test_mask_inside_of_a_document_is_kept(self):
    """A token that is no target is none two ahead either."""
    segments = np.ones((1, 5), np.int32)
    targets = np.arange(1, 6, dtype=np.int32)[None]
    mask = np.array([[True, True, False, True, True]])
    _, ahead_mask = loss.mtp_targets(targets, mask, segments)
    self.assertEqual(ahead_mask.tolist(), [[True, False, False, True, False]])

  def test_documents_with_targets_across_their_end(self):
    """Even where the mask lets a target cross, the one two ahead does not."""
    segments = np.array([[1, 1, 2, 2]], np.int32)
    targets = np.arange(1, 5, dtype=np.int32)[None]
    mask = np.ones((1, 4), bool)
    _, ahead_mask = loss.mtp_targets(targets, mask, segments)
    self.assertEqual(ahead_mask.tolist(), [[True, False, True, False]])


if __name__ == '__main__':
  absltest.main()
