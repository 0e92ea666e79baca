"""Stages of KDA's backward kernel for TPU from the inverse on.

Continues `mosaic_tpu_bwd_stages`, whose notation it uses.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import mosaic_tpu_bwd_conv as conv
from pallas_kernels.kda.mosaic_tpu_bwd_stages import (
  AT_ENTRY,
  AT_LEAVE,
  AT_STEP,
  AT_TOTAL,
  COLUMNS_BY_COLUMNS,
  LAST_MASK,
  Step,
  iota,
  own_rows,
  pair_rows,
  prefix_row,
  prefix_rows,
  split,
)
from pallas_kernels.kda.mosaic_tpu_views import (
  ENTRY_MASK,
  EXIT_MASK,
  LANES,
  REAL_MASK,
  ROWS_BY_ROWS,
  TILE,
  dot,
  rows_of,
)


class Gradients(NamedTuple):
  """Gradients of the flat arrays, in their shapes and dtypes.

  Attributes:
    q: [B, T, H * K].
    k: [B, T, H * K].
    v: [B, T, HV * V].
    g: [B, T, HV * K].
    beta: [B, T, HV].
    g_sum: float32 [B, HV * K], the sum of g's gradient over tokens, or None
      where the gate is ready.
    g_moment: the same of the gradient times g.
    h0: float32 [B or S, HV, K, V].
    taps: float32, as the taps of q, k and v, or None without.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  g: jax.Array
  beta: jax.Array
  g_sum: jax.Array | None
  g_moment: jax.Array | None
  h0: jax.Array
  taps: tuple[jax.Array, jax.Array, jax.Array] | None


def dot_sum(pairs) -> jax.Array:
  """Sum of the products of pairs of operands, by columns of the left ones.

  As one product, in which only the matrix unit adds, if the columns fill whole
  registers.
  """
  if all(left.shape[1] % LANES == 0 for left, _ in pairs):
    left = jnp.concatenate([left for left, _ in pairs], axis=1)
    return dot(left, jnp.concatenate([right for _, right in pairs]))
  return sum(dot(left, right) for left, right in pairs)


def dot_each(left: jax.Array, rights) -> list[jax.Array]:
  """Products with the transposes of arrays [n, k], as one product if aligned.

  A matrix unit of 256 columns takes two arrays in the time of one.
  """
  sizes = [right.shape[0] for right in rights]
  if any(size % LANES for size in sizes):
    return [dot(left, right, ROWS_BY_ROWS) for right in rights]
  joined = dot(left, jnp.concatenate(rights), ROWS_BY_ROWS)
  starts = [sum(sizes[:i]) for i in range(len(sizes))]
  return [joined[:, a : a + n] for a, n in zip(starts, sizes)]


def substitute(step: Step, own):
  """Inverts the diagonal tiles side by side by forward substitution."""
  chunk = step.settings.chunk
  half = TILE // 2
  group = iota((half, chunk), 1) & -TILE
  row = iota((half, chunk), 0)
  lane = iota((half, chunk), 1) & (TILE - 1)
  upper, lower = own.diagonal[:half], own.diagonal[half:]
  above = jnp.where(lane == row, 1.0, 0.0)
  below = jnp.where(lane == row + half, 1.0, 0.0)

  def spread(x, m):
    return jnp.take_along_axis(x, group + m, axis=1, mode='promise_in_bounds')

  for m in range(TILE - 1):
    final = above[m : m + 1] if m < half else below[m - half : m - half + 1]
    if m < half - 1:
      above = above - spread(upper, m) * final
    below = below - spread(lower, m) * final
    yield
  inverse = jnp.concatenate([above, below]).astype(own.inverse.dtype)
  for i in range(chunk // TILE):
    own.inverse[rows_of(i), rows_of(i)] = inverse[:, rows_of(i)]
  yield


def merge(step: Step, own):
  """Joins inverted diagonal blocks in pairs until one is left.

  What the last chunk left below the diagonal blocks meets only zeros or columns
  that are not kept.
  """
  chunk, operand = step.settings.chunk, step.settings.operand
  for level in range((chunk // TILE).bit_length() - 1):
    size = TILE << level
    odd = range(1, chunk // size, 2)
    merged = getattr(own, f'merged{level}')
    product = dot(getattr(own, f'below{level}')[...], own.inverse[...])
    product = product.astype(operand)
    yield
    places = [slice(i * size, (i + 1) * size) for i in odd]
    for j, place in enumerate(places):
      merged[place] = product[j * size : (j + 1) * size]
    rows = jnp.concatenate([own.inverse[place] for place in places])
    product = dot(rows, merged[...]).astype(operand)
    yield
    for j, place in enumerate(places):
      left = slice(place.start - size, place.start)
      own.inverse[place, left] = product[j * size : (j + 1) * size, left]


def read(step: Step, head, own, state, d_exit):
  """Writes before the solve, and what new values get from outputs and exit."""
  settings = step.settings
  chunk, operand = settings.chunk, settings.operand
  tiles, num_values = chunk // TILE, own.write.shape[-1]
  keys = jnp.concatenate([own.entry[pair_rows(i)[1]] for i in range(tiles)])
  known = dot(keys, state[...])
  for i in range(tiles):
    rows = rows_of(i)
    if settings.taps:
      v = own.v[rows].astype(jnp.float32)
    else:
      v = step.load('v', rows, head.v)
    error = v - known[rows]
    if not settings.kda.beta_sigmoid:
      own.error[rows] = error
    write = own.beta[rows, :num_values] * error
    own.write[rows] = write.astype(operand)
    if settings.refines:
      own.write_exact[rows] = write
  yield
  d_o = step.load('d_o', slice(None), head.v).astype(operand)
  for i in range(tiles):
    own.outer[pair_rows(i)[0]] = d_o[rows_of(i)]
  pairs = [(own.leaving[...], d_exit[...].astype(operand))]
  for part in range(0, own.qk.shape[0], chunk):
    pairs.append((jnp.transpose(own.qk[part : part + chunk]), d_o))
  own.d_values[...] = dot_sum(pairs)
  yield


def solve(step: Step, head, own):
  """New values, and gradients of writes, values and write strengths."""
  settings = step.settings
  chunk, operand = settings.chunk, settings.operand
  tiles, num_values = chunk // TILE, own.write.shape[-1]
  f32 = jnp.float32
  values = dot(own.inverse[...], own.write[...])
  own.values[...] = values.astype(operand)
  yield
  d_write = dot(
    own.inverse[...], own.d_values[...].astype(operand), COLUMNS_BY_COLUMNS
  )
  if settings.splits:
    own.d_write[...] = d_write.astype(operand)
  yield
  if settings.splits:
    lower = [
      own.lower[part : part + chunk]
      for part in range(0, own.lower.shape[0], chunk)
    ]
    product = dot_sum([(jnp.transpose(x), own.d_write[...]) for x in lower])
    missing = own.d_values[...] - own.d_write[...].astype(f32) - product
    own.write_missing[...] = missing.astype(operand)
    yield
    d_write = own.d_write[...].astype(f32) + dot(
      own.inverse[...], own.write_missing[...], COLUMNS_BY_COLUMNS
    )
  if settings.refines:
    product = dot_sum([(x, own.values[...]) for x in lower])
    missing = own.write_exact[...] - own.values[...].astype(f32) - product
    values = own.values[...].astype(f32)
    values += dot(own.inverse[...], missing.astype(operand))
    own.values[...] = values.astype(operand)
    rest = values - own.values[...].astype(f32)
    own.rest[...] = rest.astype(operand)
  corrected = own.values
  if not settings.kda.beta_sigmoid:
    parts = split(values, settings)
    error = own.error[...] - dot(own.kk[:chunk], parts[0])
    if not settings.exact:
      error -= dot(own.kk[chunk:], parts[0]) + dot(own.kk[:chunk], parts[1])
    own.error[...] = error
    corrected = own.error
  for i in range(tiles):
    rows = rows_of(i)
    d_v = own.beta[rows, :num_values] * d_write[rows]
    if settings.taps:
      conv.store_gradient(step, own, 'v', rows, d_v)
    else:
      target = step.blocks['d_v']
      target[0, rows, head.v] = d_v.astype(target.dtype)
    own.outer[pair_rows(i)[1]] = (-d_v).astype(operand)
    product = d_write[rows] * corrected[rows].astype(f32)
    step.d_strengths[rows, head.index : head.index + 1] = jnp.sum(
      product, axis=-1, keepdims=True
    )
  yield


def pull_scores(step: Step, own, state):
  """Gradients of scores, and of views by what they read of the entry state."""
  settings = step.settings
  chunk, operand = settings.chunk, settings.operand
  all_scores, all_read = dot_each(own.outer[...], [own.values[...], state[...]])
  if settings.refines:
    d_o = [own.outer[pair_rows(i)[0]] for i in range(chunk // TILE)]
    rest = dot(jnp.concatenate(d_o), own.rest[...], ROWS_BY_ROWS)
  for i in range(chunk // TILE):
    width = TILE * (i + 1)
    both = slice(2 * TILE * i, 2 * TILE * (i + 1))
    scores = all_scores[both, :width]
    if settings.refines:
      queries = scores[:TILE] + rest[rows_of(i), :width]
      scores = jnp.concatenate([queries, scores[TILE:]])
    row, lane = iota(scores.shape, 0), iota(scores.shape, 1)
    # The last row of the queries is row 15, of the keys row 14: theirs are
    # strictly lower.
    allowed = lane - TILE * i <= jnp.where(row < TILE, row, row - TILE - 1)
    if step.numbers is not None:
      same = step.same_document(rows_of(i), width)
      allowed &= jnp.concatenate([same, same])
    scores = jnp.where(allowed, scores, 0.0)
    parts = split(scores, settings) if settings.refines else (scores,)
    for part, x in enumerate(parts):
      start = 2 * chunk * part + both.start
      own.d_scores[start : start + 2 * TILE, :width] = x.astype(operand)
    entry = own.factors[AT_ENTRY + i : AT_ENTRY + i + 1]
    for rows in pair_rows(i):
      d_read = step.select(ENTRY_MASK, rows_of(i), all_read[rows] * entry)
      own.d_left[rows] = d_read
  yield


def pull_states(step: Step, own, state, d_exit, d_entry):
  """Gradients of the entry state, of what leaves and of the decay of both."""
  settings = step.settings
  chunk, operand = settings.chunk, settings.operand
  tiles, num_values = chunk // TILE, own.values.shape[-1]
  # Ones sum up the gradient of the decay along with the gradient of K^.
  product = state[...].astype(jnp.float32) * d_exit[...]
  product = product.astype(operand)
  ones = jnp.ones((TILE, num_values), operand)
  d_state = d_exit[...].astype(operand)
  if settings.narrow:
    leaving = dot(own.values[...], d_state, ROWS_BY_ROWS)
    total = dot(ones, product, ROWS_BY_ROWS)
  else:
    left = jnp.concatenate([own.values[...], ones])
    leaving, total = dot_each(left, [d_state, product])
    total = total[chunk:]
  leave = own.factors[AT_LEAVE : AT_LEAVE + 1]
  sums = None
  for i in range(tiles):
    rows = rows_of(i)
    d_key = step.select(EXIT_MASK, rows, leaving[rows] * leave)
    own.d_keys[rows] = d_key
    start = prefix_row(tiles - 1) + TILE * i
    product = own.prefixes[start : start + TILE].astype(jnp.float32) * d_key
    sums = product if sums is None else sums + product
  total = total[:1] * own.factors[AT_TOTAL : AT_TOTAL + 1]
  own.tail[0:1] = total + jnp.sum(sums, axis=0, keepdims=True)
  yield
  d_entry[...] = own.total[...] * d_exit[...] + dot(
    own.entry[...], own.outer[...], COLUMNS_BY_COLUMNS
  )
  yield


def pull_views(step: Step, own):
  """Gradients of the views of queries and keys, in their tiles' anchors."""
  settings = step.settings
  chunk = settings.chunk
  tiles = chunk // TILE
  d_keys = [own.d_keys[rows_of(i)] for i in range(tiles)]
  for i in reversed(range(tiles)):
    width = TILE * (i + 1)
    both = slice(2 * TILE * i, 2 * TILE * (i + 1))
    left, prefix = own.left[both], own.prefixes[prefix_rows(i)]
    scores = own.d_scores[both, :width]
    if settings.refines:
      low = own.d_scores[2 * chunk + both.start : 2 * chunk + both.stop, :width]
      stacked = jnp.concatenate([scores, low])
      d_left = dot(stacked, prefix)
      d_left = d_left[: 2 * TILE] + d_left[2 * TILE :]
      d_prefix = dot(stacked, jnp.concatenate([left, left]), COLUMNS_BY_COLUMNS)
    else:
      d_left = dot(scores, prefix)
      d_prefix = dot(scores, left, COLUMNS_BY_COLUMNS)
    yield
    own.d_left[both] += d_left
    for j in range(i + 1):
      if i < tiles - 1:
        d_keys[j] = d_keys[j] * own.factors[AT_STEP + i + 1 : AT_STEP + i + 2]
      d_keys[j] = d_keys[j] + d_prefix[rows_of(j)]
    own.d_keys[rows_of(i)] = d_keys[i]
    yield


def _store_qk_gradient(step: Step, head, name: str, rows, gradient):
  """Adds up the gradients of the value heads that share a head of q and k."""
  target = step.blocks[name]
  gradient = step.select(REAL_MASK, rows, gradient)
  if not head.shares:
    target[0, rows, head.q] = gradient.astype(target.dtype)
    return
  total = step.blocks[f'{name}_sum']
  if not head.first:
    gradient = gradient + total[rows, head.q]
  if head.last:
    target[0, rows, head.q] = gradient.astype(target.dtype)
  else:
    total[rows, head.q] = gradient


def finish(step: Step, head, own):
  """Gradients of the inputs q, k and g, and of the gate's parameters."""
  settings, kda = step.settings, step.settings.kda
  tiles = settings.chunk // TILE
  f32 = jnp.float32
  num_keys = own.left.shape[-1]
  parts = []
  if settings.taps:
    for name in ('q', 'k'):
      conv.move_first_rows(getattr(own, f'd_{name}_ahead'))
  for i in range(tiles):
    rows, (q_rows, k_rows) = rows_of(i), pair_rows(i)
    d_q, d_k, d_key = own.d_left[q_rows], own.d_left[k_rows], own.d_keys[rows]
    by_q = own.left[q_rows].astype(f32) * d_q
    by_k = own.left[k_rows].astype(f32) * d_k
    by_key = own.prefixes[own_rows(i)].astype(f32) * d_key
    d_decay = by_q + by_k - by_key
    # Where what a token writes itself is taken away again, before rounding.
    if step.numbers is not None:
      tail = jnp.broadcast_to(own.tail[0:1], d_decay.shape)
      d_decay += step.select(LAST_MASK, rows, tail)
    elif i == tiles - 1:
      last = iota(d_decay.shape, 0) == TILE - 1
      d_decay += jnp.where(last, own.tail[0:1], 0.0)
    parts.append(split(d_decay, settings))
    d_q = own.grow[rows] * d_q * kda.scale
    d_k = own.grow[rows] * d_k + own.shrink[rows] * d_key
    if kda.qk_l2norm:
      along_q = jnp.sum(by_q, axis=-1, keepdims=True)
      along_k = jnp.sum(by_k + by_key, axis=-1, keepdims=True)
      q, k = own.q[rows].astype(f32), own.k[rows].astype(f32)
      q_root, k_root = own.q_root[rows], own.k_root[rows]
      d_q = q_root * (d_q - q * (q_root * along_q))
      d_k = k_root * (d_k - k * (k_root * along_k))
    for name, gradient in (('q', d_q), ('k', d_k)):
      if settings.taps:
        conv.store_gradient(step, own, name, rows, gradient)
      else:
        _store_qk_gradient(step, head, f'd_{name}', rows, gradient)
    yield
  later = step.later[...]
  d_decay = dot(
    later, jnp.concatenate([x for part in zip(*parts) for x in part])
  )
  yield
  target = step.blocks['d_g']
  sums = [jnp.zeros((TILE, num_keys), f32) for _ in range(2)]
  for i in range(tiles):
    rows = rows_of(i)
    d_g = d_decay[rows]
    if kda.gate_in_kernel:
      # rate is -log2(e) times the gate's; the slope is in bits.
      slope = step.blocks['rate'][:, head.g] * math.log(2) ** 2
      d_g = d_g * (own.slope[rows] * slope)
    d_g = step.select(REAL_MASK, rows, d_g)
    if kda.gate_in_kernel:
      sums[0] += d_g
      sums[1] += d_g * own.g[rows].astype(f32)
    target[0, rows, head.g] = d_g.astype(target.dtype)
    if i % 2:
      yield
  if kda.gate_in_kernel:
    for row, total in enumerate(sums):
      step.blocks['d_gate'][0, row : row + 1, head.g] += jnp.sum(
        total, axis=0, keepdims=True
      )
  yield
