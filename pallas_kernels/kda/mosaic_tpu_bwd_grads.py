"""Stages of KDA's backward kernel for TPU from the inverse on.

Continues `mosaic_tpu_bwd_stages`, whose notation it uses.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_tpu_bwd_stages import (
  AT_ENTRY,
  AT_LEAVE,
  AT_STEP,
  AT_TOTAL,
  COLUMNS_BY_COLUMNS,
  DOCUMENT,
  ROWS_BY_ROWS,
  TILE,
  Step,
  dot,
  iota,
  own_rows,
  pair_rows,
  prefix_row,
  prefix_rows,
  refines,
  split,
  tile_rows,
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
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  g: jax.Array
  beta: jax.Array
  g_sum: jax.Array | None
  g_moment: jax.Array | None
  h0: jax.Array


class ReadGradients(NamedTuple):
  """Float32 gradients of what touches states and values.

  Attributes:
    scores: [2 C, C] of scores, queries and keys alternating by tiles.
    rest: [C, C] to be added for the queries, or None.
    read: [2 C, K] of the entry views.
    leaving: [C, K] of the exit view.
    total: [1, K] of the decay of the whole chunk.
  """

  scores: jax.Array
  rest: jax.Array | None
  read: jax.Array
  leaving: jax.Array
  total: jax.Array


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
    own.inverse[tile_rows(i), tile_rows(i)] = inverse[:, tile_rows(i)]
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


def solve(step: Step, head, own, state, d_state):
  """New values, gradients of writes and of the entry state.

  Args:
    step: the grid step.
    head: the head's columns.
    own: the head's scratch.
    state: reference of the entry state [K, V].
    d_state: reference of the gradient of the exit state, float32 [K, V], in
      whose place that of the entry state comes.

  Returns:
    ReadGradients.
  """
  settings = step.settings
  chunk, operand = settings.chunk, settings.operand
  tiles, num_values = chunk // TILE, own.write.shape[-1]
  d_o = step.load('d_o', slice(None), head.v).astype(operand)
  keys = jnp.concatenate([own.entry[pair_rows(i)[1]] for i in range(tiles)])
  read = dot(keys, state[...])
  d_values = dot(own.qk[...], d_o, COLUMNS_BY_COLUMNS)
  d_exit = d_state[...].astype(operand)
  d_values += dot(own.leaving[...], d_exit)
  yield
  for i in range(tiles):
    rows = tile_rows(i)
    error = step.load('v', rows, head.v) - read[rows]
    write = own.beta[rows, :num_values] * error
    own.write[rows] = write.astype(operand)
    if refines(settings):
      own.write_exact[rows] = write
    own.outer[pair_rows(i)[0]] = d_o[rows]
  yield
  values = dot(own.inverse[...], own.write[...])
  d_write = dot(own.inverse[...], d_values.astype(operand), COLUMNS_BY_COLUMNS)
  yield
  if refines(settings):
    own.values[...] = values.astype(operand)
    own.write[...] = d_write.astype(operand)
    product = dot(own.lower[...], own.values[...])
    d_product = dot(own.lower[:chunk], own.write[...], COLUMNS_BY_COLUMNS)
    d_product += dot(own.lower[chunk:], own.write[...], COLUMNS_BY_COLUMNS)
    yield
    values = own.values[...].astype(jnp.float32)
    product = product[:chunk] + product[chunk:]
    residual = own.write_exact[...] - values - product
    d_write = own.write[...].astype(jnp.float32)
    d_residual = d_values - d_write - d_product
    values += dot(own.inverse[...], residual.astype(operand))
    d_write += dot(
      own.inverse[...], d_residual.astype(operand), COLUMNS_BY_COLUMNS
    )
    yield
  for i in range(tiles):
    rows = tile_rows(i)
    d_v = own.beta[rows, :num_values] * d_write[rows]
    step.blocks['d_v'][0, rows, head.v] = d_v.astype(step.blocks['d_v'].dtype)
    own.outer[pair_rows(i)[1]] = (-d_v).astype(operand)
    own.values[rows] = values[rows].astype(operand)
  yield
  if settings.kda.beta_sigmoid:
    corrected = values
  else:
    parts = split(values, settings)
    corrected = step.load('v', slice(None), head.v) - read
    corrected -= dot(own.kk[:chunk], parts[0])
    if not settings.exact:
      corrected -= dot(own.kk[chunk:], parts[0]) + dot(own.kk[:chunk], parts[1])
  for i in range(tiles):
    product = d_write[tile_rows(i)] * corrected[tile_rows(i)]
    step.d_strengths[tile_rows(i), head.index : head.index + 1] = jnp.sum(
      product, axis=-1, keepdims=True
    )
  yield
  d_scores = dot(own.outer[...], own.values[...], ROWS_BY_ROWS)
  d_rest = None
  if refines(settings):
    rest = (values - own.values[...].astype(jnp.float32)).astype(operand)
    d_rest = dot(d_o, rest, ROWS_BY_ROWS)
  yield
  d_read = dot(own.outer[...], state[...], ROWS_BY_ROWS)
  d_leaving = dot(own.values[...], d_exit, ROWS_BY_ROWS)
  yield
  product = (state[...].astype(jnp.float32) * d_state[...]).astype(operand)
  ones = jnp.ones((8, num_values), operand)
  d_total = dot(ones, product, ROWS_BY_ROWS)
  d_state[...] = own.total[...] * d_state[...] + dot(
    own.entry[...], own.outer[...], COLUMNS_BY_COLUMNS
  )
  yield
  return ReadGradients(d_scores, d_rest, d_read, d_leaving, d_total[0:1])


def pull_scores(step: Step, own, grads: ReadGradients):
  """Gradients of decayed queries and keys, each in its tile's anchor."""
  settings = step.settings
  chunk, operand = settings.chunk, settings.operand
  tiles = chunk // TILE
  leave = own.factors[AT_LEAVE : AT_LEAVE + 1]
  sums, d_keys = None, []
  for i in range(tiles):
    rows = tile_rows(i)
    d_keys.append(step.select_exit(rows, grads.leaving[rows] * leave))
    start = prefix_row(tiles - 1) + TILE * i
    product = own.prefixes[start : start + TILE].astype(jnp.float32) * d_keys[i]
    sums = product if sums is None else sums + product
  total = grads.total * own.factors[AT_TOTAL : AT_TOTAL + 1]
  own.tail[0:1] = total + jnp.sum(sums, axis=0, keepdims=True)
  yield
  for i in reversed(range(tiles)):
    place, width = TILE * i, TILE * (i + 1)
    both = slice(2 * place, 2 * width)
    scores = grads.scores[both, :width]
    if grads.rest is not None:
      queries = scores[:TILE] + grads.rest[tile_rows(i), :width]
      scores = jnp.concatenate([queries, scores[TILE:]])
    row, lane = iota(scores.shape, 0), iota(scores.shape, 1)
    # The last row of the queries is row 15, of the keys row 14: theirs are
    # strictly lower.
    allowed = lane - place <= jnp.where(row < TILE, row, row - TILE - 1)
    if step.numbers is not None:
      number = step.number(tile_rows(i), DOCUMENT, width)
      allowed &= jnp.concatenate([number, number]) == jnp.broadcast_to(
        step.blocks['tokens'][0, 0, DOCUMENT : DOCUMENT + 1, :width],
        scores.shape,
      )
    scores = jnp.where(allowed, scores, 0.0)
    left, prefix = own.left[both], own.prefixes[prefix_rows(i)]
    if refines(settings):
      parts = split(scores, settings)
      stacked = jnp.concatenate([parts[0], parts[1]])
      d_left = dot(stacked, prefix)
      d_left = d_left[: 2 * TILE] + d_left[2 * TILE :]
      d_prefix = dot(stacked, jnp.concatenate([left, left]), COLUMNS_BY_COLUMNS)
    else:
      scores = scores.astype(operand)
      d_left = dot(scores, prefix)
      d_prefix = dot(scores, left, COLUMNS_BY_COLUMNS)
    yield
    entry = own.factors[AT_ENTRY + i : AT_ENTRY + i + 1]
    for half, rows in enumerate(pair_rows(i)):
      d_read = step.select_entry(tile_rows(i), grads.read[rows] * entry)
      own.d_left[rows] = d_left[tile_rows(half)] + d_read
    for j in range(i + 1):
      if i < tiles - 1:
        d_keys[j] = d_keys[j] * own.factors[AT_STEP + i + 1 : AT_STEP + i + 2]
      d_keys[j] = d_keys[j] + d_prefix[tile_rows(j)]
    own.d_keys[tile_rows(i)] = d_keys[i]
    yield


def _store_qk_gradient(step: Step, head, name: str, rows, gradient):
  """Adds up the gradients of the value heads that share a head of q and k."""
  target = step.blocks[name]
  gradient = step.select_real(rows, gradient)
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
  for i in range(tiles):
    rows, (q_rows, k_rows) = tile_rows(i), pair_rows(i)
    d_q, d_k, d_key = own.d_left[q_rows], own.d_left[k_rows], own.d_keys[rows]
    by_q = own.left[q_rows].astype(f32) * d_q
    by_k = own.left[k_rows].astype(f32) * d_k
    by_key = own.prefixes[own_rows(i)].astype(f32) * d_key
    d_decay = by_q + by_k - by_key
    if i == tiles - 1:
      last = iota(d_decay.shape, 0) == TILE - 1
      d_decay += jnp.where(last, own.tail[0:1], 0.0)
    parts.append(split(d_decay, settings))
    d_q = own.grow[rows] * d_q * kda.scale
    d_k = own.grow[rows] * d_k + own.shrink[rows] * d_key
    if kda.qk_l2norm:
      along_q = jnp.sum(by_q, axis=-1, keepdims=True)
      along_k = jnp.sum(by_k + by_key, axis=-1, keepdims=True)
      q, k = step.load('q', rows, head.q), step.load('k', rows, head.q)
      q_root, k_root = own.q_root[rows], own.k_root[rows]
      d_q = q_root * (d_q - q * (q_root * along_q))
      d_k = k_root * (d_k - k * (k_root * along_k))
    _store_qk_gradient(step, head, 'd_q', rows, d_q)
    _store_qk_gradient(step, head, 'd_k', rows, d_k)
    yield
  later = step.later[...]
  d_decay = sum(dot(later, jnp.concatenate(part)) for part in zip(*parts))
  yield
  target = step.blocks['d_g']
  sums = [jnp.zeros((TILE, num_keys), f32) for _ in range(2)]
  for i in range(tiles):
    rows = tile_rows(i)
    d_g = d_decay[rows]
    if kda.gate_in_kernel:
      # rate is -log2(e) times the gate's; the slope is in bits.
      slope = step.blocks['rate'][:, head.g] * math.log(2) ** 2
      d_g = d_g * (own.slope[rows] * slope)
    d_g = step.select_real(rows, d_g)
    if kda.gate_in_kernel:
      sums[0] += d_g
      sums[1] += d_g * step.load('g', rows, head.g)
    target[0, rows, head.g] = d_g.astype(target.dtype)
    if i % 2:
      yield
  if kda.gate_in_kernel:
    for row, total in enumerate(sums):
      step.blocks['d_gate'][0, row : row + 1, head.g] += jnp.sum(
        total, axis=0, keepdims=True
      )
  yield
