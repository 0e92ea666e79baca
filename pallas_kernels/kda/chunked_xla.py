"""KDA in chunks with unified tiles, in plain jax.numpy: forward.

For a chunk with scores kk and qk, entry views K~, Q~, exit view K^ and entry
state S: T = (I + Diag(beta) kk)^-1, Vn = T beta (V - K~ S), O = Q~ S + qk Vn,
S' = Diag(decay) S + K^^T Vn. Kimi Linear (arXiv 2510.26692) section 3 for the
chunk form; solving for Vn directly leaves no W and U to store.

Chunks are taken a block at a time: everything that does not need the state is
computed for the whole block at once, then a scan over its chunks carries the
state. Memory beyond the inputs does not grow with the number of tokens, except
for the entry states that a backward needs.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import (
  chunk_operands,
  gate,
  operands,
  pairwise_scores,
  products,
  segments,
  tile,
  tile_scores,
  triangular,
  varying,
)


@dataclasses.dataclass(frozen=True)
class ChunkedConfig:
  """Static settings of the chunked form.

  Attributes:
    kda: settings of the operator.
    tiles: chunk and tile sizes.
    blocks: blocks a row.
    chunks: chunks a block.
  """

  kda: operands.KdaConfig
  tiles: tile.TileConfig
  blocks: int
  chunks: int

  @property
  def tokens(self) -> int:
    """Tokens of a block."""
    return self.chunks * self.tiles.chunk


class Block(NamedTuple):
  """The arrays of one block, as the caller gave them; t = config.tokens.

  Attributes:
    q: [B, t, H, K].
    k: [B, t, H, K].
    v: [B, t, HV, V].
    g: [B, t, HV, K].
    beta: [B, t, HV].
    valid: bool [B, t] or None.
    document: int32 [B, t] or None.
    entry: int32 [B, N] or None.
    sequence: int32 [N] or None.
    first: bool [N] or None.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  g: jax.Array
  beta: jax.Array
  valid: jax.Array | None
  document: jax.Array | None
  entry: jax.Array | None
  sequence: jax.Array | None
  first: jax.Array | None


def split_blocks(x: jax.Array, blocks: int, axis: int = 1) -> jax.Array:
  """Cuts an axis into blocks and puts them first."""
  shape = (*x.shape[:axis], blocks, -1, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)


def join_blocks(x: jax.Array) -> jax.Array:
  """[blocks, B, t, ...] to [B, blocks * t, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def to_chunks(x: jax.Array, chunks: int) -> jax.Array:
  """[B, N * C, H, D] to [N, B, H, C, D]."""
  x = x.reshape(x.shape[0], chunks, -1, *x.shape[2:])
  return jnp.transpose(x, (1, 0, 3, 2, 4))


def from_chunks(x: jax.Array) -> jax.Array:
  """[N, B, H, C, D] to [B, N * C, H, D]."""
  x = jnp.transpose(x, (1, 0, 3, 2, 4))
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def make_blocks(
  arrays: operands.Operands, plan: segments.ChunkPlan, config: ChunkedConfig
) -> Block:
  """Cuts everything that runs along tokens into blocks, blocks first."""

  def along_tokens(x):
    return None if x is None else split_blocks(x, config.blocks)

  def along_chunks(x):
    return None if x is None else split_blocks(x, config.blocks, axis=0)

  return Block(
    q=along_tokens(arrays.q_BTHK),
    k=along_tokens(arrays.k_BTHK),
    v=along_tokens(arrays.v_BTHV),
    g=along_tokens(arrays.g_BTHK),
    beta=along_tokens(arrays.beta_BTH),
    valid=along_tokens(plan.valid_BT),
    document=along_tokens(plan.document_BT),
    entry=along_tokens(plan.entry_BN),
    sequence=along_chunks(plan.sequence_N),
    first=along_chunks(plan.first_N),
  )


def block_activations(q, k, g, A_log_H, dt_bias_HK, valid, config):
  """Scaled q, k and log decay of a block, float32 [N, B, HV, C, K]."""
  activated = gate.activate_qkg(q, k, g, A_log_H, dt_bias_HK, valid, config.kda)
  return tuple(to_chunks(x, config.chunks) for x in activated)


def block_values(block: Block, config: ChunkedConfig):
  """v [N, B, HV, C, V] and beta [N, B, HV, C, 1] of a block, float32."""
  v = gate.select_valid(block.valid, block.v).astype(jnp.float32)
  beta = gate.select_valid(block.valid, block.beta)
  beta = gate.write_strength(beta, config.kda)
  beta = gate.select_valid(block.valid, beta)
  return to_chunks(v, config.chunks), to_chunks(beta[..., None], config.chunks)


def block_masks(
  block: Block, config: ChunkedConfig
) -> chunk_operands.ChunkMasks | None:
  """Document masks of a block, or None when its rows are one document."""
  if block.document is None:
    return None
  document = block.document.reshape(-1, config.chunks, config.tiles.chunk)
  document = jnp.swapaxes(document, 0, 1)
  return chunk_operands.make_masks(document, block.entry.T)


def invert_scores(kk, beta, config: ChunkedConfig, dtypes):
  """(I + Diag(beta) kk)^-1."""
  return triangular.invert_unit_lower(
    beta * kk, config.tiles.tile, dtypes.inverse
  )


def initial_states(
  arrays: operands.Operands, plan: segments.ChunkPlan
) -> tuple[jax.Array, jax.Array | None]:
  """State before the first chunk, and the final states to be filled in.

  Returns:
    float32 [B, HV, K, V], and for sequences sharing a row their [N, HV, K, V].
  """
  start = arrays.h0_BHKV
  if start is None:
    start = varying.zero_state(arrays.g_BTHK, arrays.v_BTHV.shape[-1])
  if plan.sequence_N is None:
    return start, None
  return jnp.zeros_like(start[:1]), start


def kda_forward(
  config: ChunkedConfig,
  arrays: operands.Operands,
  plan: segments.ChunkPlan,
  save_states: bool,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
  """Runs the chunks of every row.

  Args:
    config: static settings.
    arrays: arrays of whole blocks of tokens; h0 has one state a sequence when
      sequences share a row, and is then not None.
    plan: documents, padding and sequences.
    save_states: whether to keep the entry states.

  Returns:
    Outputs [B, T, HV, V] in v's dtype, final states float32 [B, HV, K, V] (or
    one a sequence), and the entry states [blocks, N, B, HV, K, V] in the
    dtype in which products read them, or None.
  """
  dtypes = products.choose_dtypes(config.kda.precision, arrays.v_BTHV.dtype)
  per_sequence = plan.sequence_N is not None

  def chunk_step(carry, chunk):
    state, finals = carry
    ops, inverse, v, beta, sequence, first = chunk
    if per_sequence:
      state = jnp.where(first, arrays.h0_BHKV[sequence][None], state)
    read = state.astype(dtypes.state)
    error = v - products.dot(
      '...kc,...kv->...cv', ops.k_entry, read, dtypes.state
    )
    new_v = products.dot(
      '...dc,...dv->...cv', inverse, beta * error, dtypes.solve
    )
    state = ops.decay[..., None] * state + products.dot(
      '...ck,...cv->...kv', ops.k_exit, new_v, dtypes.state
    )
    if per_sequence:
      finals = finals.at[sequence].set(state[0])
    return (state, finals), (read, new_v)

  def block_step(carry, block):
    q, k, g = block_activations(
      block.q,
      block.k,
      block.g,
      arrays.A_log_H,
      arrays.dt_bias_HK,
      block.valid,
      config,
    )
    v, beta = block_values(block, config)
    if config.kda.lower_bound is None:
      ops = pairwise_scores.pairwise_operands(q, k, g, config.tiles.tile)
    else:
      ops, _ = tile_scores.tile_operands(
        q, k, g, config.tiles.tile, dtypes.scores
      )
    ops = chunk_operands.select(ops, block_masks(block, config))
    inverse = invert_scores(ops.kk, beta, config, dtypes)
    carry, (entry_states, new_v) = jax.lax.scan(
      chunk_step,
      carry,
      (
        # The scan's products run fastest on CPU with the summed axis first.
        ops._replace(k_entry=jnp.swapaxes(ops.k_entry, -1, -2)),
        jnp.swapaxes(inverse, -1, -2),
        v,
        beta,
        block.sequence,
        block.first,
      ),
    )
    o = products.dot(
      '...ck,...kv->...cv', ops.q_entry, entry_states, dtypes.state
    )
    o += products.dot('...cd,...dv->...cv', ops.qk, new_v, dtypes.output)
    o = gate.select_valid(block.valid, from_chunks(o))
    saved = entry_states if save_states else None
    return carry, (o.astype(block.v.dtype), saved)

  blocks = make_blocks(arrays, plan, config)
  carry = initial_states(arrays, plan)
  carry = varying.vary_over(carry, varying.varying_axes((arrays, plan)))
  (state, finals), (o, states) = jax.lax.scan(block_step, carry, blocks)
  final = finals if per_sequence else state
  return (join_blocks(o), final), states
