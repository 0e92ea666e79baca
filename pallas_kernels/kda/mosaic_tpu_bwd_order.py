"""Order of the stages of KDA's backward kernel for TPU, over heads.

All heads go through the inverse and the products around it together, so that
they fill each other's waits; heads that keep much in registers go in groups.
"""

import types
from typing import NamedTuple

import jax

from pallas_kernels.kda import kernel_weave
from pallas_kernels.kda import mosaic_tpu_bwd_conv as conv
from pallas_kernels.kda import mosaic_tpu_bwd_grads as grads
from pallas_kernels.kda import mosaic_tpu_bwd_stages as stages
from pallas_kernels.kda.mosaic_tpu_views import TILE

# Heads whose sums over tiles are held at once.
_PULLED_TOGETHER = 2


class Head(NamedTuple):
  """One value head of a grid step.

  Attributes:
    index: its number in the step.
    q: its channels in blocks of q and k.
    g: its channels in blocks of g.
    v: its channels in blocks of v.
    shares: whether other heads of the step read the same q and k.
    first: whether it is the first of these.
    last: whether it is the last of these.
  """

  index: int
  q: slice
  g: slice
  v: slice
  shares: bool
  first: bool
  last: bool


def make_heads(
  settings, groups: int, num_keys: int, num_values: int
) -> list[Head]:
  """The heads of a grid step, `groups` of which read one head of q and k."""
  heads, shared = [], min(groups, settings.heads)
  for h in range(settings.heads):
    key_head = h // groups
    heads.append(
      Head(
        h,
        slice(key_head * num_keys, (key_head + 1) * num_keys),
        slice(h * num_keys, (h + 1) * num_keys),
        slice(h * num_values, (h + 1) * num_values),
        shared > 1,
        h % shared == 0,
        h % shared == shared - 1,
      )
    )
  return heads


class Work(NamedTuple):
  """One head's share of a grid step.

  Attributes:
    head: the head.
    own: its scratch for this chunk.
    last_own: its scratch for the chunk of the step before.
    state: reference of the state before this chunk [K, V].
    d_exit: reference of the gradient of the state after it, float32 [K, V].
    d_entry: reference that takes the gradient of the state before it.
    d_after: reference of the gradient of the first rows of the convolution of v
      in the chunk after this one, float32 [V / 128, 8, 128], or None.
    d_first: reference that takes that of this chunk.
    weight: of this chunk in the gradients of taps of v.
  """

  head: Head
  own: types.SimpleNamespace
  last_own: types.SimpleNamespace
  state: jax.Array
  d_exit: jax.Array
  d_entry: jax.Array
  d_after: jax.Array | None
  d_first: jax.Array | None
  weight: jax.Array | None


def _invert(step, last_step, work: Work):
  """Inverts, and meanwhile does what does not need the inverse."""
  yield from grads.substitute(step, work.own)
  reading = grads.read(step, work.head, work.own, work.state, work.d_exit)
  finishing = grads.finish(last_step, work.head, work.last_own)
  # Merging is a chain of six products, each of which is waited for.
  for _ in grads.merge(step, work.own):
    next(reading, None)
    next(finishing, None)
    next(finishing, None)
    yield
  yield from finishing
  yield from reading


def _pull_values(step, work: Work):
  """Gradients of the inputs of v and of its taps."""
  conv.join_rows(work.own.d_v_ahead, work.d_after, work.d_first)
  yield
  yield from conv.pull(step, work.head, work.own, 'v', work.weight)


def run_step(step, last_step, works: list[Work]) -> None:
  """All stages, in an order in which heads fill each other's waits."""
  take_turns, stream = kernel_weave.take_turns, kernel_weave.Stream
  half = len(works) - len(works) // 2
  groups = works[:half], works[half:]
  tiles = step.settings.chunk // TILE

  def run(generators):
    for _ in take_turns(generators):
      pass

  def prepare(group):
    return take_turns(stages.prepare(step, w.head, w.own) for w in group)

  def score(group):
    return take_turns(stages.score(step, w.head, w.own) for w in group)

  if step.settings.taps:
    run(conv.convolve(step, w.head, w.own) for w in works)
  run([prepare(groups[0])])
  kernel_weave.weave(
    [
      stream(prepare(groups[1]), (2 * tiles + 1) * half, 0, 1),
      stream(score(groups[0]), (tiles + 1) * half, 0, 1),
    ]
  )
  run([score(groups[1])])

  run(_invert(step, last_step, w) for w in works)
  if step.settings.taps:
    for name in ('q', 'k'):
      run(conv.pull(last_step, w.head, w.last_own, name) for w in works)
  run(grads.solve(step, w.head, w.own) for w in works)
  if step.settings.taps:
    run(_pull_values(step, w) for w in works)
  run(grads.pull_scores(step, w.own, w.state) for w in works)
  run(
    grads.pull_states(step, w.own, w.state, w.d_exit, w.d_entry) for w in works
  )
  # Fewer heads at a time: their sums over tiles do not fit the registers.
  for i in range(0, len(works), _PULLED_TOGETHER):
    run(grads.pull_views(step, w.own) for w in works[i : i + _PULLED_TOGETHER])
