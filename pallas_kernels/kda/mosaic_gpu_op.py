"""KDA as Pallas kernels for Hopper: the operator around the kernels.

The forward is two kernels: all chunks at once, then the recurrence over their
states. The backward is that of the chunked form in plain jax.numpy, from the
states that the second kernel saves.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import target
from pallas_kernels.kda import (
  checks,
  chunk_layout,
  chunked_xla,
  chunked_xla_bwd,
  custom_vjp,
  flat_arrays,
  gate,
  mosaic_gpu_chain,
  mosaic_gpu_prepare,
  operands,
  segments,
  tile,
  varying,
)
from pallas_kernels.kda.mosaic_gpu_arrays import CHANNELS, CHUNK
from pallas_kernels.kda.mosaic_gpu_chain import PART

# How devices with the instructions of the kernels call themselves.
_HOPPER_DEVICES = ('H100', 'H200', 'H800', 'H20')
# Blocks of one part of a head's values that a GPU runs at a time, one on each
# multiprocessor (H100 SXM, H200); with more, a block takes two parts, which
# then share what it fetches.
_BLOCKS_AT_ONCE = 132
# One axis of a grid numbers the chunks; sequences may add a chunk each.
_MOST_TOKENS = 2**15 * CHUNK


class TokenPlan(NamedTuple):
  """Integer arrays that the kernels read; None for what a call lacks.

  Attributes:
    tokens: int32 [B * N, 4, 64], see `mosaic_gpu_prepare.prepare_call`.
    bounds: int32 [S + 1], see `mosaic_gpu_chain.chain_call`.
    chunks: what the backward knows of the chunks.
  """

  tokens: jax.Array | None
  bounds: jax.Array | None
  chunks: segments.ChunkPlan


@dataclasses.dataclass(frozen=True)
class GpuOpConfig:
  """Static settings of a call.

  Attributes:
    kernel: of the kernels.
    chunked: of the backward.
  """

  kernel: mosaic_gpu_prepare.GpuConfig
  chunked: chunked_xla.ChunkedConfig


def check_support(
  arrays: operands.Operands, config: operands.KdaConfig
) -> None:
  """Raises NotImplementedError for a call that the kernels do not support."""

  def refuse(what, supported):
    raise NotImplementedError(
      f'{what}: the kernels for Hopper support {supported}.'
    )

  if config.lower_bound is None:
    refuse('lower_bound=None', 'bounded gates, lower_bound in [-5, 0)')
  dtype = arrays.v_BTHV.dtype
  if dtype != jnp.bfloat16:
    refuse(f'q, k and v in {dtype.name}', 'bfloat16')
  if config.precision not in ('fast', 'default'):
    refuse(f'precision={config.precision!r}', "'fast' and 'default'")
  strengths = 'write strengths up to 1, made of logits'
  if config.allow_neg_eigval:
    refuse('allow_neg_eigval=True', strengths)
  if not config.beta_sigmoid:
    refuse('beta_sigmoid=False', strengths)
  tokens, _, num_keys = arrays.q_BTHK.shape[1:]
  if num_keys > CHANNELS:
    refuse(f'{num_keys} channels of keys', f'at most {CHANNELS}')
  if tokens > _MOST_TOKENS:
    refuse(f'{tokens} tokens a row', f'at most {_MOST_TOKENS}')


def find_other_device() -> str | None:
  """Says which GPU without the kernels' instructions this is, or None."""
  kind = tile.device_generation()
  if any(name in kind for name in _HOPPER_DEVICES):
    return None
  return f'the kernels for GPU are for Hopper, and this is {kind}'


def find_obstacle(
  arrays: operands.Operands, config: operands.KdaConfig
) -> str | None:
  """Says why the kernels cannot take a call, or None when they can."""
  if obstacle := find_other_device() or checks.find_automatic_axis():
    return obstacle
  try:
    check_support(arrays, config)
  except NotImplementedError as error:
    return str(error)
  return None


def number_tokens(plan: segments.ChunkPlan) -> jax.Array | None:
  """What `prepare_call` is told of tokens, or None if all are real."""
  if plan.valid_BT is None and plan.document_BT is None:
    return None
  known = plan.document_BT if plan.valid_BT is None else plan.valid_BT
  document_BNC = jnp.zeros(known.shape, jnp.int32).reshape(
    known.shape[0], -1, CHUNK
  )
  enters_BNC = leaves_BNC = jnp.ones_like(document_BNC)
  real_BNC = jnp.ones_like(document_BNC)
  if plan.valid_BT is not None:
    real_BNC = plan.valid_BT.reshape(document_BNC.shape)
  if plan.document_BT is not None:
    document_BNC = plan.document_BT.reshape(document_BNC.shape)
    enters_BNC = document_BNC == plan.entry_BN[..., None]
    leaves_BNC = document_BNC == document_BNC[..., -1:]
  rows = (document_BNC, real_BNC, enters_BNC, leaves_BNC)
  tokens = jnp.stack([x.astype(jnp.int32) for x in rows], axis=2)
  return tokens.reshape(-1, len(rows), CHUNK)


def bound_sequences(
  cu_seqlens: jax.Array | None, chunks: int
) -> jax.Array | None:
  """First chunk of each sequence, and the end of all chunks as the last's."""
  if cu_seqlens is None:
    return None
  ends = jnp.cumsum(-(-jnp.diff(cu_seqlens) // CHUNK))
  begins = jnp.pad(ends[:-1], (1, 0))
  return jnp.append(begins, chunks).astype(jnp.int32)


def split_chunks(
  needed: int, tiles: tile.TileConfig, batch_heads: int
) -> tuple[int, int]:
  """Blocks of the backward and chunks of each, at best without padding.

  Padding would be copies of all arrays, which the forward does not need.

  Args:
    needed: chunks a row.
    tiles: sizes of the backward.
    batch_heads: rows times heads.
  """
  fewest, _ = tiles.split_tokens(needed * CHUNK, batch_heads)
  for blocks in range(fewest, 2 * fewest + 1):
    if needed % blocks == 0:
      return blocks, needed // blocks
  return fewest, -(-needed // fewest)


def kda_mosaic_gpu(
  arrays: operands.Operands,
  packing: operands.Packing,
  config: operands.KdaConfig,
) -> tuple[jax.Array, jax.Array]:
  """Runs KDA as kernels for Hopper; arguments and results as `kda_reference`.

  Raises:
    NotImplementedError: the kernels do not support the call.
  """
  checks.check_kernel_target('mosaic_gpu')
  interpreted = checks.kernels_are_interpreted()
  if not interpreted and (obstacle := find_other_device()):
    raise NotImplementedError(f"implementation='mosaic_gpu': {obstacle}.")
  check_support(arrays, config)
  batch, _, heads, num_values = arrays.v_BTHV.shape
  num_keys = arrays.q_BTHK.shape[-1]
  tiles = tile.choose_tiles(target.target_platform(), num_keys, num_values)
  needed = chunk_layout.count_chunks(arrays, packing, CHUNK)
  blocks, chunks = split_chunks(needed, tiles, batch * heads)
  layout = chunk_layout.lay_out(arrays, packing, CHUNK, blocks * chunks)
  plan = TokenPlan(
    number_tokens(layout.plan),
    bound_sequences(packing.cu_seqlens, blocks * chunks),
    layout.plan,
  )
  settings = GpuOpConfig(
    mosaic_gpu_prepare.GpuConfig(
      config,
      splits=config.precision == 'default',
      packed=layout.plan.valid_BT is not None,
      documents=layout.plan.document_BT is not None,
      interpreted=interpreted,
    ),
    chunked_xla.ChunkedConfig(config, tiles, blocks, chunks),
  )
  axes = varying.varying_axes((layout.arrays, plan))
  arrays, plan = varying.vary_over((layout.arrays, plan), axes)
  return layout.restore(*_operator(settings, arrays, plan))


def _forward(settings: GpuOpConfig, arrays, plan: TokenPlan, save_states):
  kernel = settings.kernel
  num_keys, num_values = arrays.q_BTHK.shape[-1], arrays.v_BTHV.shape[-1]
  arrays = flat_arrays.pad_channels(arrays, CHANNELS, PART)
  batch, num_tokens, heads, width = arrays.v_BTHV.shape
  flat = flat_arrays.flatten(arrays)
  valid_BT = plan.chunks.valid_BT
  beta_BTH = gate.write_strength(flat.beta, kernel.kda)
  beta_BHT = jnp.swapaxes(gate.select_valid(valid_BT, beta_BTH), 1, 2)
  prepared = mosaic_gpu_prepare.prepare_call(
    kernel,
    flat.q,
    flat.k,
    flat.g,
    beta_BHT.reshape(batch * heads, num_tokens // CHUNK, CHUNK),
    flat.rate,
    flat.bias,
    plan.tokens,
  )
  h0 = arrays.h0_BHKV
  if h0 is not None:
    h0 = jnp.swapaxes(h0, -1, -2).reshape(-1, width, CHANNELS)
  pairs = width % (2 * PART) == 0
  many = batch * heads * (width // PART) > _BLOCKS_AT_ONCE
  results = mosaic_gpu_chain.chain_call(
    kernel,
    prepared,
    gate.select_valid(valid_BT, flat.v),
    h0,
    plan.bounds,
    parts=2 if pairs and many else 1,
    save_states=save_states,
  )
  o = results.o.reshape(arrays.v_BTHV.shape)[..., :num_values]
  final = results.final.reshape(-1, heads, width, CHANNELS)
  final = jnp.swapaxes(final, -1, -2)[..., :num_keys, :num_values]
  states = results.states
  if states is not None:
    blocks = settings.chunked.blocks
    states = states.reshape(batch, heads, blocks, -1, width, CHANNELS)
    states = jnp.transpose(states, (2, 3, 0, 1, 5, 4))
    states = states[..., :num_keys, :num_values]
  return (o, final), states


def _backward(settings: GpuOpConfig, arrays, plan, states, d_o, d_final):
  return chunked_xla_bwd.kda_backward(
    settings.chunked, arrays, plan.chunks, states, d_o, d_final
  )


_operator = custom_vjp.join(_forward, _backward)
