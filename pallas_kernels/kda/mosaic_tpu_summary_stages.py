"""Stages of the kernels that summarise a fragment, and their order.

`advance` and `retreat`, each a generator over one head, come in the place of
`mosaic_tpu_stages.advance`; all before them is the forward kernel's.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp

from pallas_kernels.kda import (
  kernel_weave,
  mosaic_tpu_scores,
  mosaic_tpu_tokens,
  packed_rows,
  products,
)
from pallas_kernels.kda import mosaic_tpu_stages as stages
from pallas_kernels.kda import mosaic_tpu_views as views
from pallas_kernels.kda.mosaic_tpu_views import Head, Slots, dot

# How often the last stages yield, about.
_ADVANCE_STEPS, _RETREAT_STEPS = 10, 9


@dataclasses.dataclass(frozen=True)
class SummarySlots(Slots):
  """The forward's scratch, and a chunk's decay along lanes."""

  def total(self, head: Head):
    """float32 [8, K], the decay of the whole chunk in each row."""
    return self.refs['total'].at[self.two, head.index]


def advance(head: Head, slots: Slots, settings):
  """Takes the columns [N | M] through a chunk."""
  operand, f32 = settings.operand, jnp.float32
  chunk, tiles = settings.chunk, settings.chunk // views.TILE
  state_ref, values_ref = slots.state(head), slots.values(head)
  inverse = packed_rows.load(slots.inverse(head.index))
  load = functools.partial(packed_rows.load, slots.stack(head))
  num_keys, width = state_ref.shape
  num_values = values_ref.shape[-1]
  stack = views.stack_rows(settings, num_keys)
  read = dot(slots.readers(head)[:chunk], state_ref[...].astype(operand))
  yield
  yield
  errors = []
  for i in range(tiles):
    rows, place = views.rows_of(i), head.place(i, tiles)
    strength = slots.strengths()[rows, head.index : head.index + 1]
    written = values_ref[rows].astype(f32) - read[place, :num_values]
    error = jnp.concatenate([written, -read[place, num_values:]], 1) * strength
    errors.append(error if settings.refines else error.astype(operand))
    if i % 4 == 3:
      yield
  errors = jnp.concatenate(errors[::-1] if head.mirrored else errors, 0)
  new = dot(inverse, errors.astype(operand))
  yield
  yield
  rest = None
  if settings.splits:
    new, rest = products.split(new)
  else:
    new = new.astype(operand)
  if settings.refines:
    missing = errors - new.astype(f32) + dot(load(stack.lower), new)
    missing = missing + dot(load(stack.lower_rest), new)
    yield
    rest = dot(inverse, missing.astype(operand)).astype(operand)
    yield
  written = dot(load(stack.writes), new)
  yield
  if settings.splits:
    written = written + dot(load(stack.writes), rest)
  if settings.refines:
    written = written + dot(load(stack.writes_rest), new)
  yield
  decay = jnp.concatenate([slots.decay(head)[...]] * (width // views.LANES), 1)
  state_ref[...] = state_ref[...] * decay + written
  yield


def retreat(head: Head, strengths, slots: Slots, settings):
  """Takes dN, transposed, from a chunk's exit to its entry.

  Args:
    head: the head.
    strengths: reference of float32 [heads, C], write strengths in each head's
      order.
    slots: the chunk's; values are the gradients of its outputs.
    settings: static settings.
  """
  operand, f32 = settings.operand, jnp.float32
  chunk = settings.chunk
  state_ref, readers_ref = slots.state(head), slots.readers(head)
  inverse = packed_rows.load(slots.inverse(head.index))
  load = functools.partial(packed_rows.load, slots.stack(head))
  stack = views.stack_rows(settings, state_ref.shape[1])
  d_o = jnp.transpose(slots.values(head)[...])
  yield
  state, state_rest = state_ref[...], None
  if settings.refines:
    state, state_rest = products.split(state)
  else:
    state = state.astype(operand)
  # Scores and writes follow each other in the stack.
  parts = [d_o, d_o, state] if settings.splits else [d_o, state]
  rows = slice(stack.scores_rest.start, stack.writes.stop)
  d_new = dot(jnp.concatenate(parts, 1), load(rows))
  if settings.refines:
    d_new = d_new + dot(state_rest, load(stack.writes))
    d_new = d_new + dot(state, load(stack.writes_rest))
  yield
  yield
  solved = dot(d_new.astype(operand), inverse)
  yield
  yield
  if settings.refines:
    high = solved.astype(operand)
    missing = d_new - high.astype(f32) + dot(high, load(stack.lower))
    missing = missing + dot(high, load(stack.lower_rest))
    yield
    solved = high.astype(f32)
    solved = solved + dot(missing.astype(operand), inverse)
    yield
  d_error = solved * -strengths[head.index : head.index + 1]
  rest = None
  if settings.splits:
    d_error, rest = products.split(d_error)
  else:
    d_error = d_error.astype(operand)
  read = dot(jnp.concatenate([d_error, d_o], 1), readers_ref[...])
  yield
  if settings.splits:
    read = read + dot(rest, readers_ref[:chunk])
  yield
  state_ref[...] = state_ref[...] * slots.total(head)[0:1] + read
  yield


def _scoring(heads, windows, slots: Slots, settings):
  """Scores a chunk and inverts its diagonal tiles."""
  size = settings.weave.score_heads
  for i in range(0, len(heads), size):
    yield from kernel_weave.take_turns(
      mosaic_tpu_scores.score(heads[j : j + 2], windows, slots, settings)
      for j in range(i, min(i + size, len(heads)), 2)
    )
  yield from kernel_weave.take_turns(
    stages.substitute(h, slots, settings) for h in heads
  )


def _preparing(heads, windows, slots: Slots, settings):
  size = settings.weave.prepare_heads
  for i in range(0, len(heads), size):
    yield from kernel_weave.take_turns(
      stages.prepare(h, windows, slots, settings) for h in heads[i : i + size]
    )


def _solving(heads, strengths, slots: Slots, settings):
  """Inverts a chunk's scores and takes the states through it."""
  yield from kernel_weave.take_turns(
    stages.merge(p, slots, settings) for p in range(-(-len(heads) // 2))
  )
  if strengths is None:
    last = [advance(h, slots, settings) for h in heads]
  else:
    last = [retreat(h, strengths, slots, settings) for h in heads]
  yield from kernel_weave.take_turns(last)


def run(heads, windows, strengths, chunks, settings) -> None:
  """Prepares one chunk, scores the one before and ends the one before that.

  Args:
    heads: of the grid step.
    windows: its blocks.
    strengths: None for `advance`; what `retreat` takes otherwise.
    chunks: the three chunks' slots, that of the one prepared first.
    settings: static settings.
  """
  made, scored, done = chunks
  tiles, weave = settings.chunk // views.TILE, settings.weave
  pairs = -(-len(heads) // 2)
  solve_steps = _ADVANCE_STEPS
  if strengths is not None:
    solve_steps = _RETREAT_STEPS
  steps = (
    pairs * 2 * int(math.log2(tiles)) + len(heads) * solve_steps,
    pairs * mosaic_tpu_scores.count_steps(tiles) + len(heads) * views.TILE,
    len(heads) * (2 * tiles + tiles // 2),
  )
  generators = (
    _solving(heads, strengths, done, settings),
    _scoring(heads, windows, scored, settings),
    _preparing(heads, windows, made, settings),
  )
  streams = [
    kernel_weave.Stream(generator, count, start, start + length)
    for generator, count, start, length in zip(
      generators, steps, weave.starts, weave.lengths
    )
  ]
  turn = (0.0, weave.starts[2]) if settings.packed else weave.turn
  turning = mosaic_tpu_tokens.turn_tokens(windows, made, settings)
  streams.append(
    kernel_weave.Stream(turning, mosaic_tpu_tokens.TURN_STEPS, *turn)
  )
  kernel_weave.weave(streams)
