"""What a chunk's tokens bring to KDA's forward kernel once for all heads."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda import gate
from pallas_kernels.kda.mosaic_tpu_views import (
  DOCUMENT,
  DOCUMENTS,
  ENTRY,
  ENTRY_MASK,
  EXIT_MASK,
  LAG_MASKS,
  LAGS,
  LANES,
  MIRRORED,
  REAL,
  REAL_MASK,
  TILE,
  Slots,
  Windows,
)

# Pieces between a turn and the use of its result.
TURN_STEPS = 4


def mirror_tokens(tokens_BN8C: jax.Array, entry_BN: jax.Array) -> jax.Array:
  """Adds the rows MIRRORED and ENTRY to DOCUMENT and REAL."""
  document = tokens_BN8C[:, :, DOCUMENT]
  tiled = document.reshape(*document.shape[:2], -1, TILE)
  mirrored = tiled[:, :, ::-1].reshape(document.shape)
  entry = jnp.broadcast_to(entry_BN[..., None], document.shape)
  tokens_BN8C = tokens_BN8C.at[:, :, MIRRORED].set(mirrored)
  return tokens_BN8C.at[:, :, ENTRY].set(entry)


def turn_tokens(windows: Windows, slots: Slots, settings):
  """Turns write strengths and numbers of tokens from lanes to rows.

  Masks are -1 or 0 in every lane, so that a head's select is one bitwise and.
  """
  beta = gate.write_strength(windows.beta[0, 0, 0], settings.kda)
  if settings.packed:
    tokens = windows.tokens[0, 0]
    beta = jnp.where(tokens[REAL : REAL + 1] != 0, beta, 0.0)
    tokens = jnp.transpose(tokens)
  beta = jnp.transpose(beta)
  # Stored late: a store waits for the turn, and later loads for the store.
  for _ in range(TURN_STEPS - 1):
    yield
  slots.strengths()[...] = beta
  if settings.packed:

    def along_lanes(column):
      column = tokens[:, column : column + 1]
      return jnp.broadcast_to(column, (tokens.shape[0], LANES))

    document = along_lanes(DOCUMENT)
    slots.numbers(DOCUMENTS)[...] = document
    last = document[-1:]
    for place, mask in (
      (REAL_MASK, along_lanes(REAL) != 0),
      (ENTRY_MASK, document == along_lanes(ENTRY)),
      (EXIT_MASK, document == last),
    ):
      slots.numbers(place)[...] = jnp.where(mask, -1, 0)
    lags = along_lanes(LAGS) if settings.taps > 1 else None
    for lag in range(1, settings.taps):
      # The bit becomes the sign, which fills the word.
      mask = (lags << (31 - lag)) >> 31
      slots.numbers(LAG_MASKS + lag - 1)[...] = mask
  yield


def select(mask: jax.Array, x: jax.Array) -> jax.Array:
  """float32 x [.., D] where a mask [.., 128] is -1, and 0 where it is 0."""
  mask = jnp.concatenate([mask] * (x.shape[1] // LANES), 1)
  bits = lax.bitcast_convert_type(x, jnp.int32)
  return lax.bitcast_convert_type(bits & mask, jnp.float32)
