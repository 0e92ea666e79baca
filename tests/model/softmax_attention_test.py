"""Softmax attention in blocks of queries against all scores at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.model import softmax_attention as attention

B, H, K, V = 2, 2, 8, 6
SCALE = K**-0.5


def make_inputs(T, seed=0):
  rng = np.random.default_rng(seed)
  arrays = [
    rng.normal(size=(B, T, H, width)).astype(np.float32) for width in (K, K, V)
  ]
  # Two documents and padding in one row, one document in the other.
  segments = np.ones((B, T), np.int32)
  segments[0, T // 3 :] = 2
  segments[0, T - 2 :] = 0
  return (*arrays, segments)


def seen_by(segments, window):
  T = segments.shape[1]
  rows, columns = np.arange(T)[:, None], np.arange(T)[None]
  near = columns <= rows
  if window is not None:
    near &= columns > rows - window
  return near[None] & (segments[:, :, None] == segments[:, None, :])


def naive(q, k, v, segments, window):
  """Output and largest score of each row and head, float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  scores = SCALE * np.einsum('bthk,buhk->bhtu', q, k)
  seen = seen_by(segments, window)[:, None]
  real = (segments > 0)[:, None, :, None]
  top = np.where(seen & real, scores, -np.inf).max((2, 3))
  weights = np.where(seen, np.exp(np.where(seen, scores, 0)), 0)
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum('bhtu,buhv->bthv', weights, v), top


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(block, window, arrays, cotangent):
  """Output, largest scores, and gradients, in blocks of `block` queries."""
  q, k, v, segments = arrays
  before, attention.QUERY_BLOCK = attention.QUERY_BLOCK, block
  try:

    def attend(q, k, v):
      return attention.softmax_attention(q, k, v, segments, SCALE, window)

    (out, top), pull = jax.vjp(attend, q, k, v)
    return out, top, pull((cotangent, jnp.zeros_like(top)))
  finally:
    attention.QUERY_BLOCK = before


class SoftmaxAttentionTest(parameterized.TestCase):
  @parameterized.product(T=(24, 27), window=(None, 5, 40))
  def test_blocks_change_nothing(self, T, window):
    arrays = make_inputs(T)
    cotangent = np.random.default_rng(1).normal(size=(B, T, H, V))
    cotangent = cotangent.astype(np.float32)
    whole = run(T, window, arrays, cotangent)
    blocked = run(8, window, arrays, cotangent)
    want, top = naive(*arrays, window)
    for got in (whole, blocked):
      np.testing.assert_allclose(got[0], want, atol=2e-6)
      np.testing.assert_allclose(got[1], top, rtol=1e-5)
    for a, b in zip(whole[2], blocked[2]):
      self.assertGreater(np.abs(a).max(), 0.1)
      np.testing.assert_allclose(a, b, atol=5e-6)

  def test_window_of_one_is_the_token_itself(self):
    q, k, v, segments = make_inputs(9)
    out, _ = attention.softmax_attention(q, k, v, segments, SCALE, window=1)
    np.testing.assert_allclose(out, v, rtol=1e-6)

  def test_window_counts_the_token_itself(self):
    """Changing the key `window` tokens back has no effect, one nearer has."""
    T, window = 12, 4
    q, k, v, _ = make_inputs(T)
    segments = np.ones((B, T), np.int32)
    attend = functools.partial(
      attention.softmax_attention, q, k, scale=SCALE, window=window
    )
    base, _ = attend(v_BTHV=v, segment_ids_BT=segments)
    for lag, changes in ((window, False), (window - 1, True)):
      other = v.copy()
      other[:, T - 1 - lag] += 1
      moved, _ = attend(v_BTHV=other, segment_ids_BT=segments)
      self.assertEqual(bool(np.any(moved[:, -1] != base[:, -1])), changes)

  def test_bfloat16_inputs_give_float32_output(self):
    q, k, v, segments = make_inputs(16)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    out, top = attention.softmax_attention(*low, segments, SCALE)
    self.assertEqual(out.dtype, jnp.float32)
    self.assertEqual(top.dtype, jnp.float32)
    # Not a float32 copy of bfloat16 values.
    self.assertTrue(np.any(out != out.astype(jnp.bfloat16)))
    want, _ = naive(*low, segments, None)
    np.testing.assert_allclose(out, want, atol=0.02)

  def test_largest_score_ignores_padding(self):
    q, k, v, segments = make_inputs(10)
    segments[:] = [[1] * 8 + [0] * 2, [0] * 10]
    q[0, 8:], k[0, 8:] = 100, 100
    _, top = attention.softmax_attention(q, k, v, segments, SCALE)
    self.assertLess(np.max(top[0]), 100)
    np.testing.assert_array_equal(top[1], np.full(H, np.float32(-1e30)))

  def test_huge_scores_stay_finite(self):
    q, k, v, segments = make_inputs(10)
    out, _, grads = run(10, None, (1e4 * q, 1e4 * k, v, segments), v)
    self.assertTrue(np.all(np.isfinite(out)))
    for grad in grads:
      self.assertTrue(np.all(np.isfinite(grad)))


if __name__ == '__main__':
  absltest.main()
