"""Pallas kernels for TPU that summarise a fragment of tokens.

They share all stages of KDA's forward kernel up to the inverse T = (I + L)^-1
of a chunk, and differ in what goes through it. With K~ and K^ the keys decayed
from the chunk's entry and to its exit, Q~ the queries decayed from entry and P
their scores, both are affine in the state, which is carried in VMEM:

  summary: the columns [N | M] of what the fragment writes and of what it lets
    through. W = T beta ([V | 0] - K~ [N | M]), [N | M] <- decay [N | M]
    + K^' W.
  reverse: dN, the gradient of the entry state by the fragment's own outputs,
    chunks in reversed order and transposed, so that no operand has to be turned
    but dO. X = (dO' P + dN' K^') T, dN' <- dN' decay + dO' Q~ - (beta X) K~.

Kimi Linear (arXiv 2510.26692) section 3 for the chunk form.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import (
  gate,
  mosaic_tpu_scratch,
  mosaic_tpu_tokens,
  tile,
  varying,
)
from pallas_kernels.kda import mosaic_tpu_summary_stages as stages
from pallas_kernels.kda import mosaic_tpu_views as views


def _clear(ref) -> None:
  """Fills scratch with zeros, an array of two axes at a time."""
  outer = ref.shape[:-2]

  def fill(i, _):
    index = [
      lax.rem(lax.div(i, math.prod(outer[axis + 1 :])), outer[axis])
      for axis in range(len(outer))
    ]
    ref[tuple(index)] = jnp.zeros(ref.shape[-2:], ref.dtype)

  lax.fori_loop(0, math.prod(outer), fill, None)


def _kernel(*refs, settings, names, scratch_names, groups):
  """One grid step; references come in the order of the names."""
  blocks = dict(zip(names, refs))
  scratch = dict(zip(scratch_names, refs[len(names) :]))
  fields = {f.name for f in dataclasses.fields(views.Windows)}
  windows = views.Windows(**{name: blocks.get(name) for name in fields})
  strengths = None
  if 'd_n' in blocks:
    strengths = blocks['strengths'].at[0, 0, 0]
  else:
    # No product reads the queries; the stages take the keys for them.
    windows = dataclasses.replace(windows, q=windows.k)
  t, last = pl.program_id(2), pl.num_programs(2) - 1
  state_ref = scratch['state']
  num_keys = scratch['columns'].shape[-1]
  num_values = scratch['values'].shape[-1]

  @pl.when(t == 0)
  def _():
    for ref in scratch.values():
      _clear(ref)

  @pl.when(t == 2)
  def _():
    # What came before had no chunk to work on.
    def start(h, _):
      zeros = jnp.zeros(state_ref.shape[1:], jnp.float32)
      if strengths is None:
        row = lax.broadcasted_iota(jnp.int32, zeros.shape, 0)
        column = lax.broadcasted_iota(jnp.int32, zeros.shape, 1)
        zeros = jnp.where(column == row + num_values, 1.0, zeros)
      state_ref[h] = zeros

    lax.fori_loop(0, settings.heads, start, None)

  # Slots of the chunks prepared, scored and ended now.
  two, three = ([lax.rem(t + 6 - age, n) for age in range(3)] for n in (2, 3))
  chunks = [stages.SummarySlots(scratch, *places) for places in zip(two, three)]
  heads = views.make_heads(settings.heads, groups, num_keys, num_values)
  if strengths is not None:
    for head in heads:
      scored = chunks[1]
      scored.total(head)[...] = scored.factors(head)[views.TOTAL]
  stages.run(heads, windows, strengths, chunks, settings)

  @pl.when(t == last)
  def _():
    def copy(h, _):
      if strengths is None:
        blocks['n'][0, h] = state_ref[h, :, :num_values]
        blocks['m'][0, h] = state_ref[h, :, num_values:]
      else:
        blocks['d_n'][0, h] = state_ref[h]

    lax.fori_loop(0, settings.heads, copy, None)


def _ordered_strengths(beta, real, settings) -> jax.Array:
  """Write strengths [.., heads, C], tiles reversed for mirrored heads.

  Args:
    beta: float32 [B, N, blocks, heads, C], as the caller gave it.
    real: bool [B, N, 1, 1, C], or None.
    settings: static settings.
  """
  if real is not None:
    beta = jnp.where(real, beta, 0.0)
  strengths = gate.write_strength(beta, settings.kda)
  if real is not None:
    strengths = jnp.where(real, strengths, 0.0)
  tiled = strengths.reshape(*strengths.shape[:-1], -1, views.TILE)
  mirrored = tiled[..., ::-1, :].reshape(strengths.shape)
  head = jax.lax.broadcasted_iota(jnp.int32, strengths.shape, 3)
  return jnp.where(head % 2 == 1, mirrored, strengths)


def _call(
  settings,
  streams: dict[str, jax.Array],
  g: jax.Array,
  beta: jax.Array,
  rate: jax.Array,
  bias: jax.Array,
  tokens: jax.Array | None,
  entry: jax.Array | None,
  outputs: dict[str, tuple[int, int]],
  reverse: bool,
  name: str,
) -> list[jax.Array]:
  """Runs a kernel; arguments as of `summary_call`.

  Args:
    settings: static settings.
    streams: k, v (or dO in its place) and in reverse q.
    g: as there, like all up to entry.
    beta: as there.
    rate: as there.
    bias: as there.
    tokens: as there.
    entry: as there.
    outputs: by name the last two axes of results [B, HV, .., ..].
    reverse: whether chunks are taken from the last.
    name: of the kernel.
  """
  batch, num_tokens, value_heads = beta.shape
  chunk, heads = settings.chunk, settings.heads
  chunks, blocks = num_tokens // chunk, value_heads // heads
  num_keys = g.shape[2] // value_heads
  num_values = streams['v'].shape[2] // value_heads
  groups = value_heads * num_keys // streams['k'].shape[2]
  block_key_heads = max(heads // groups, 1)
  f32 = jnp.float32
  factor, shift = gate.exponent_terms(rate, bias, settings.kda.lower_bound)

  beta = beta.astype(f32).reshape(batch, chunks, chunk, blocks, heads)
  inputs = {
    **streams,
    'g': g,
    'beta': jnp.transpose(beta, (0, 1, 3, 4, 2)),
    'rate': factor,
    'shift': shift,
    'sums': jnp.asarray(views.sums_matrix(chunk), settings.operand),
  }
  real = None
  if settings.packed:
    inputs['tokens'] = mosaic_tpu_tokens.mirror_tokens(tokens, entry)
    inputs['scored_tokens'] = inputs['tokens']
    real = tokens[:, :, None, views.REAL, None] != 0
  if reverse:
    inputs['strengths'] = _ordered_strengths(inputs['beta'], real, settings)
  axes = varying.varying_axes(inputs)
  inputs = varying.vary_over(inputs, axes)

  def chunk_of(t, age):
    place = jnp.clip(t - age, 0, chunks - 1)
    return chunks - 1 - place if reverse else place

  def along_tokens(width, shared=1):
    return pl.BlockSpec(
      (1, chunk, width), lambda b, h, t: (b, chunk_of(t, 0), h // shared)
    )

  def strengths(age):
    return pl.BlockSpec(
      (1, 1, 1, heads, chunk), lambda b, h, t: (b, chunk_of(t, age), h, 0, 0)
    )

  def numbers(age):
    return pl.BlockSpec(
      (1, 1, 8, chunk), lambda b, h, t: (b, chunk_of(t, age), 0, 0)
    )

  # Several blocks of value heads may share a head of q and k.
  qk = along_tokens(block_key_heads * num_keys, max(groups // heads, 1))
  channels = pl.BlockSpec((1, heads * num_keys), lambda b, h, t: (0, h))
  specs = {
    'q': qk,
    'k': qk,
    'v': along_tokens(heads * num_values),
    'g': along_tokens(heads * num_keys),
    'beta': strengths(0),
    'strengths': strengths(2),
    'rate': channels,
    'shift': channels,
    'sums': pl.BlockSpec(inputs['sums'].shape, lambda b, h, t: (0, 0)),
    'tokens': numbers(0),
    'scored_tokens': numbers(1),
  }
  out_specs = [
    pl.BlockSpec((1, heads, *dims), lambda b, h, t: (b, h, 0, 0))
    for dims in outputs.values()
  ]
  scratch = mosaic_tpu_scratch.scratch_shapes(settings, num_keys, num_values)
  rows = num_values if reverse else num_keys
  columns = num_keys if reverse else num_values + num_keys
  scratch['state'] = ((heads, rows, columns), f32)
  if reverse:
    scratch['total'] = ((2, heads, 8, num_keys), f32)
  windows = [(specs[name].block_shape, x.dtype) for name, x in inputs.items()]
  windows += [(spec.block_shape, f32) for spec in out_specs]
  cells = batch * num_tokens * value_heads
  flops = 3 * rows * columns + chunk * (3 * num_keys + columns)
  return pl.pallas_call(
    functools.partial(
      _kernel,
      settings=settings,
      names=(*inputs, *outputs),
      scratch_names=tuple(scratch),
      groups=groups,
    ),
    out_shape=[
      varying.struct_like(inputs['k'], (batch, value_heads, *dims), f32)
      for dims in outputs.values()
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=0,
      grid=(batch, blocks, chunks + 2),
      in_specs=[specs[name] for name in inputs],
      out_specs=out_specs,
      scratch_shapes=[pltpu.VMEM(*x) for x in scratch.values()],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary'),
      vmem_limit_bytes=tile.vmem_bytes(
        windows, scratch.values(), settings.exact
      ),
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * cells * flops,
      bytes_accessed=sum(x.nbytes for x in inputs.values()),
      transcendentals=4 * cells * num_keys,
    ),
    name=name,
  )(*inputs.values())


def summary_call(
  settings,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  rate: jax.Array,
  bias: jax.Array,
  tokens: jax.Array | None = None,
  entry: jax.Array | None = None,
  *,
  name: str = 'kda_summary',
) -> tuple[jax.Array, jax.Array]:
  """What the fragment makes of the state that enters it: S' = M S + N.

  Args:
    settings: static settings, a `mosaic_tpu_fwd.TpuConfig` without sequences.
    k: [B, T, H * K], as of `mosaic_tpu_fwd.forward_call`, like all arrays.
    v: [B, T, HV * V].
    g: [B, T, HV * K].
    beta: [B, T, HV].
    rate: float32 [1, HV * K].
    bias: float32 [1, HV * K].
    tokens: int32 [B, N, 8, C].
    entry: int32 [B, N].
    name: of the kernel.

  Returns:
    M float32 [B, HV, K, K] and N float32 [B, HV, K, V].
  """
  num_keys = g.shape[2] // beta.shape[2]
  num_values = v.shape[2] // beta.shape[2]
  outputs = {'m': (num_keys, num_keys), 'n': (num_keys, num_values)}
  streams = {'k': k, 'v': v}
  gates = (g, beta, rate, bias, tokens, entry)
  m, n = _call(settings, streams, *gates, outputs, False, name)
  return m, n


def summary_reverse_call(
  settings,
  q: jax.Array,
  k: jax.Array,
  d_o: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  rate: jax.Array,
  bias: jax.Array,
  tokens: jax.Array | None = None,
  entry: jax.Array | None = None,
  *,
  name: str = 'kda_summary_reverse',
) -> jax.Array:
  """Gradient of the entry state by the fragment's own outputs.

  Args:
    settings: as of `summary_call`, like all but the following.
    q: [B, T, H * K].
    k: [B, T, H * K].
    d_o: [B, T, HV * V], gradient of the outputs, in k's dtype.
    g: [B, T, HV * K].
    beta: [B, T, HV].
    rate: float32 [1, HV * K].
    bias: float32 [1, HV * K].
    tokens: int32 [B, N, 8, C].
    entry: int32 [B, N].
    name: of the kernel.

  Returns:
    float32 [B, HV, K, V].
  """
  num_keys = g.shape[2] // beta.shape[2]
  outputs = {'d_n': (d_o.shape[2] // beta.shape[2], num_keys)}
  streams = {'q': q, 'k': k, 'v': d_o}
  gates = (g, beta, rate, bias, tokens, entry)
  (d_n,) = _call(settings, streams, *gates, outputs, True, name)
  return jnp.swapaxes(d_n, 2, 3)
