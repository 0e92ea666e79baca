"""Folds summaries of fragments into the states between them.

Every shard of a sequence gathers the summaries of all and folds those before
its own fragment into the state that enters it; gradients fold those after. All
products are of full precision: there are few, and errors would grow along the
fold.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import varying


class Summary(NamedTuple):
  """An affine map of states, S to M S + N.

  Attributes:
    M: float32 [B, HV, K, K].
    N: float32 [B, HV, K, V].
  """

  M: jax.Array
  N: jax.Array


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def advance_state(summary: Summary, state_BHKV: jax.Array) -> jax.Array:
  """The state that leaves a fragment, float32 [B, HV, K, V]."""
  return _dot(summary.M, state_BHKV) + summary.N


def retreat_gradient(
  M_BHKK: jax.Array, d_N_BHKV: jax.Array, d_state_BHKV: jax.Array
) -> jax.Array:
  """The gradient of the state that enters a fragment.

  Args:
    M_BHKK: of the fragment's summary.
    d_N_BHKV: from `summary.summarize_gradient`.
    d_state_BHKV: gradient of the state that leaves the fragment.

  Returns:
    float32 [B, HV, K, V].
  """
  return _dot(jnp.swapaxes(M_BHKK, -1, -2), d_state_BHKV) + d_N_BHKV


def compose(first: Summary, second: Summary) -> Summary:
  """The summary of a fragment and the one after it.

  (M2, N2) after (M1, N1) is (M2 M1, M2 N1 + N2). Leading axes are free, so
  that `jax.lax.associative_scan` can take it.
  """
  return Summary(M=_dot(second.M, first.M), N=advance_state(second, first.N))


def fold_states(
  summaries: Summary, h0_BHKV: jax.Array | None, index: jax.Array | int
) -> jax.Array:
  """The state that leaves the last fragment before one.

  Args:
    summaries: of R fragments in their order, each array with R in front.
    h0_BHKV: float32 state before the first fragment, or None for 0.
    index: 0 to R; R gives the state after all fragments. May be traced, as the
      place of a shard.

  Returns:
    float32 [B, HV, K, V]. It enters the fragment only where that goes on with
    the document of what comes before; see `continues_document`.
  """
  if h0_BHKV is None:
    h0_BHKV = jnp.zeros_like(summaries.N[0])
  fragments = jnp.arange(summaries.N.shape[0])

  def step(state, fragment):
    number, summary = fragment
    return jnp.where(number < index, advance_state(summary, state), state), None

  xs = fragments, summaries
  axes = varying.varying_axes((summaries, h0_BHKV, index))
  state, _ = jax.lax.scan(step, varying.vary_over(h0_BHKV, axes), xs)
  return state


def fold_gradients(
  M_RBHKK: jax.Array,
  d_N_RBHKV: jax.Array,
  d_final_BHKV: jax.Array | None,
  index: jax.Array | int,
) -> jax.Array:
  """The gradient of the state that leaves a fragment.

  Args:
    M_RBHKK: of R fragments in their order.
    d_N_RBHKV: from `summary.summarize_gradient`.
    d_final_BHKV: gradient of the state after all fragments, or None for 0.
    index: -1 to R - 1; -1 gives the gradient of the state before all
      fragments. May be traced.

  Returns:
    float32 [B, HV, K, V].
  """
  if d_final_BHKV is None:
    d_final_BHKV = jnp.zeros_like(d_N_RBHKV[0])
  fragments = jnp.arange(d_N_RBHKV.shape[0])

  def step(d_state, fragment):
    number, M_BHKK, d_N_BHKV = fragment
    entered = retreat_gradient(M_BHKK, d_N_BHKV, d_state)
    return jnp.where(number > index, entered, d_state), None

  xs = fragments, M_RBHKK, d_N_RBHKV
  axes = varying.varying_axes((M_RBHKK, d_N_RBHKV, d_final_BHKV, index))
  start = varying.vary_over(d_final_BHKV, axes)
  d_state, _ = jax.lax.scan(step, start, xs, reverse=True)
  return d_state


def find_last_ids(segment_ids_BT: jax.Array) -> jax.Array:
  """int32 [B], the id of each row's last real token, 0 where there is none."""
  place_BT = jax.lax.broadcasted_iota(jnp.int32, segment_ids_BT.shape, 1)
  last_B = jnp.max(jnp.where(segment_ids_BT > 0, place_BT, 0), axis=1)
  return jnp.take_along_axis(segment_ids_BT, last_B[:, None], axis=1)[:, 0]


def find_previous_ids(
  last_ids_RB: jax.Array, index: jax.Array | int
) -> jax.Array:
  """int32 [B], the id of the last real token before a fragment, or 0.

  Args:
    last_ids_RB: `find_last_ids` of all fragments in their order.
    index: of the fragment; may be traced.
  """
  before_R = jnp.arange(last_ids_RB.shape[0]) < index
  return find_last_ids(jnp.where(before_R[:, None], last_ids_RB, 0).T)


def continues_document(
  segment_ids_BT: jax.Array | None, previous_ids_B: jax.Array | None
) -> jax.Array | None:
  """Whether the state before a fragment enters it.

  It does where the first real token's id is that of the last real token before,
  and where there is no real token on one of the two sides.

  Args:
    segment_ids_BT: int32, 0 for padding, or None.
    previous_ids_B: int32, 0 where there is no real token before, or None.

  Returns:
    bool [B], or None where an argument is None and all do.
  """
  if segment_ids_BT is None or previous_ids_B is None:
    return None
  first_B = find_last_ids(segment_ids_BT[:, ::-1])
  absent_B = (first_B == 0) | (previous_ids_B == 0)
  return absent_B | (first_B == previous_ids_B)


def keep_rows(keep_B: jax.Array, x_BHKV: jax.Array) -> jax.Array:
  """Zeroes the states of the rows that are not kept."""
  return jnp.where(keep_B[:, None, None, None], x_BHKV, 0.0)
