"""Scores of a chunk for a log decay without a lower bound.

Without a bound the diagonal tile has no common anchor that is safe, so each of
its pairs gets its own exponent. All exponents here are at most 0. Kimi Linear
(arXiv 2510.26692) section 3.2.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kda import chunk_operands, products, tile_scores


def diagonal_scores(left: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
  """Decayed scores inside a tile, pair by pair.

  Args:
    left: float32 rows [..., t, K].
    k: float32 keys [..., t, K].
    g: float32 log decay [..., t, K].

  Returns:
    float32 [..., t, t]; above the diagonal the scores are not decayed.
  """
  size = g.shape[-2]
  # Summing only the gates between j and i keeps the digits that a difference
  # of two long sums would lose.
  later = chunk_operands.lower_mask(size, -1)[..., None]
  later = jnp.broadcast_to(later, (*g.shape[:-1], *g.shape[-2:]))
  between = jnp.where(later, g[..., :, None, :], 0.0)
  weight = jnp.exp(jnp.cumsum(between, axis=-3))
  return jnp.sum(left[..., :, None, :] * k[..., None, :, :] * weight, axis=-1)


def pairwise_operands(
  q: jax.Array, k: jax.Array, g: jax.Array, tile: int
) -> chunk_operands.ChunkOperands:
  """Builds a chunk's operands before the selects, in float32 throughout.

  Args:
    q: float32 scaled queries [..., C, K].
    k: float32 keys [..., C, K].
    g: float32 log decay [..., C, K], any values of at most 0.
    tile: rows of a tile.
  """
  chunk = q.shape[-2]
  rows_q, rows_k, rows_g = (tile_scores.split_tiles(x, tile) for x in (q, k, g))
  inclusive = jnp.cumsum(rows_g, axis=-2)
  after = jnp.flip(jnp.cumsum(jnp.flip(rows_g[..., 1:, :], -2), -2), -2)
  after = jnp.concatenate([after, jnp.zeros_like(rows_g[..., :1, :])], -2)
  total = inclusive[..., -1:, :]
  leading = jnp.zeros_like(total[..., 0, :, :])
  prefix = None
  strips, entries = [], []
  for i in range(chunk // tile):
    q_i, k_i, g_i = (x[..., i, :, :] for x in (rows_q, rows_k, rows_g))
    scale = jnp.exp(inclusive[..., i, :, :])
    left = jnp.concatenate([q_i, k_i], axis=-2)
    strip = jnp.concatenate(
      [diagonal_scores(q_i, k_i, g_i), diagonal_scores(k_i, k_i, g_i)], axis=-2
    )
    if prefix is not None:
      decayed = left * jnp.concatenate([scale, scale], axis=-2)
      before = products.dot('...ik,...jk->...ij', decayed, prefix, jnp.float32)
      strip = jnp.concatenate([before, strip], axis=-1)
    unused = chunk - strip.shape[-1]
    strips.append(jnp.pad(strip, [(0, 0)] * (strip.ndim - 1) + [(0, unused)]))
    entries.append(jnp.exp(leading + inclusive[..., i, :, :]))
    leading = leading + total[..., i, :, :]
    columns = k_i * jnp.exp(after[..., i, :, :])
    if prefix is None:
      prefix = columns
    else:
      moved = prefix * jnp.exp(total[..., i, :, :])
      prefix = jnp.concatenate([moved, columns], axis=-2)
  entry = jnp.concatenate(entries, axis=-2)
  return chunk_operands.ChunkOperands(
    kk=jnp.concatenate([s[..., tile:, :] for s in strips], axis=-2),
    qk=jnp.concatenate([s[..., :tile, :] for s in strips], axis=-2),
    q_entry=q * entry,
    k_entry=k * entry,
    k_exit=prefix,
    decay=jnp.exp(leading[..., 0, :]),
  )
