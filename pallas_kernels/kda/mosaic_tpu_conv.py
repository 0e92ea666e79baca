"""The short convolution inside KDA's kernels for TPU.

q, k and v of a head are `silu(sum_j taps[j] * x[t - j])`. The inputs of a chunk
lie in VMEM in float32 after those of the tokens before it, so that a lag is a
load from so many rows earlier and costs no arithmetic.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda import mosaic_tpu_tokens
from pallas_kernels.kda.mosaic_tpu_views import LANES, TILE

# Rows before a chunk that are at hand: one register.
HALO = ROWS = 8
MOST_TAPS = HALO + 1

_LOG2_E = math.log2(math.e)


def mark_neighbours(
  real_BT: jax.Array, document_BT: jax.Array, taps: int
) -> tuple[jax.Array, jax.Array]:
  """Finds which tokens a token's convolution reads, and which read it.

  Args:
    real_BT: bool, False for padding.
    document_BT: int32 document or sequence of each token.
    taps: of the convolution.

  Returns:
    int32 [B, T] twice. Bit j of the first is set if a token and that j tokens
    before it are real and of one document, bit j of the second if it and that j
    tokens after it are.
  """
  lags = aheads = real_BT.astype(jnp.int32)
  for lag in range(1, min(taps, real_BT.shape[1])):
    both = (document_BT[:, lag:] == document_BT[:, :-lag]) & (
      real_BT[:, lag:] & real_BT[:, :-lag]
    )
    bit = both.astype(jnp.int32) << lag
    lags |= jnp.pad(bit, ((0, 0), (lag, 0)))
    aheads |= jnp.pad(bit, ((0, 0), (0, lag)))
  return lags, aheads


def name_taps(taps) -> dict[str, jax.Array]:
  """Taps of q, k and v by the names of the kernels' windows.

  Each [taps, D] becomes [taps, 8, D], so that a tap is loaded as registers.
  """
  names = ('q_taps', 'k_taps', 'v_taps')
  return {
    name: jnp.broadcast_to(x[:, None], (x.shape[0], ROWS, x.shape[1]))
    for name, x in zip(names, taps)
  }


def shape_of_past(chunk: int, channels: int) -> tuple[int, int, int]:
  """Shape of a chunk's rows of one head with some before or after them.

  Rows of one register's lanes lie back to back, so that loads may begin at any
  of them.
  """
  return channels // LANES, HALO + chunk, LANES


def store_rows(ref, start: int, x: jax.Array) -> None:
  """Stores x [rows, D] into a reference of `shape_of_past` from a row on."""
  for part in range(ref.shape[0]):
    lanes = slice(part * LANES, (part + 1) * LANES)
    ref[part, start : start + x.shape[0]] = x[:, lanes]


def load_tile(ref, start: int) -> jax.Array:
  """16 rows [16, D] of a reference of `shape_of_past` from any row on."""
  rows = slice(start, start + TILE)
  return jnp.concatenate([ref[part, rows] for part in range(ref.shape[0])], 1)


def spread_taps(taps_ref, lanes: slice) -> list[jax.Array]:
  """A head's taps along a tile's rows, each [16, D]."""
  taps = [taps_ref[lag, :, lanes] for lag in range(taps_ref.shape[0])]
  return [jnp.concatenate([tap, tap]) for tap in taps]


def convolve(
  past_ref,
  x: jax.Array,
  i: int,
  taps: list[jax.Array],
  masks: list[jax.Array] | None,
) -> jax.Array:
  """Convolves a tile, and puts its inputs where later tiles find them.

  Args:
    past_ref: float32 reference of `shape_of_past`, with the rows before.
    x: float32 inputs of the tile [16, D].
    i: number of the tile.
    taps: of `spread_taps`.
    masks: int32 [16, 128] for each lag but 0, -1 where it is read, or None.

  Returns:
    float32 [16, D], before SiLU.
  """
  start, total = HALO + i * TILE, x * taps[0]
  store_rows(past_ref, start, x)
  for lag in range(1, len(taps)):
    past = load_tile(past_ref, start - lag)
    if masks is not None:
      past = mosaic_tpu_tokens.select(masks[lag - 1], past)
    total = total + past * taps[lag]
  return total


def logistic(z: jax.Array, settings) -> jax.Array:
  """1 / (1 + exp(-z)), 0 far to the left."""
  grown = 1.0 + jnp.exp2(z * -_LOG2_E)
  if settings.exact:
    return 1.0 / grown
  if settings.narrow:
    return jnp.exp2(-jnp.log2(grown))
  # As precise as the root of a norm, and cheaper than a precise reciprocal.
  root = lax.rsqrt(grown)
  return root * root
