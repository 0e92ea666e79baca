"""Cross entropy of next tokens, without all logits at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_moe import sharding

# Most logits that exist at once on a device: 256 MiB of float32.
_LOGITS_AT_ONCE = 2**26


class TokenLosses(NamedTuple):
  """Per token: negative log-likelihood in nats, and the log-normaliser."""

  nll_BT: jax.Array
  log_z_BT: jax.Array


def token_losses(
  hidden_BTD: jax.Array, head_DU: jax.Array, targets_BT: jax.Array
) -> TokenLosses:
  """Negative log-likelihood of each target.

  Logits are made and, in the backward pass, made again for a stretch of
  tokens at a time; they are float32.

  Args:
    hidden_BTD: normed outputs of the decoder.
    head_DU: output embedding, replicated float32; the product is in the dtype
      of `hidden_BTD`, and the gradients of all stretches add up in float32.
    targets_BT: int32 ids in [0, U).

  Returns:
    Two float32 arrays [B, T].
  """
  B, T, D = hidden_BTD.shape
  U = head_DU.shape[1]
  rows = -(-B // sharding.num_batch_shards())

  @jax.checkpoint
  def stretch(hidden_BCD, targets_BC):
    logits_BCU = jnp.einsum(
      'bcd,du->bcu',
      hidden_BCD,
      head_DU.astype(hidden_BCD.dtype),
      preferred_element_type=jnp.float32,
    )
    log_z_BC = jax.nn.logsumexp(logits_BCU, axis=-1)
    # A masked sum, because a gather along a dimension that may be sharded
    # would move the logits.
    is_target = jnp.arange(U)[None, None] == targets_BC[..., None]
    target_BC = jnp.sum(jnp.where(is_target, logits_BCU, 0.0), axis=-1)
    return TokenLosses(log_z_BC - target_BC, log_z_BC)

  length = max(1, min(T, _LOGITS_AT_ONCE // (rows * U)))
  count = -(-T // length)
  if count == 1:
    return stretch(hidden_BTD, targets_BT)
  pad = count * length - T
  hidden = jnp.pad(hidden_BTD, ((0, 0), (0, pad), (0, 0)))
  targets = jnp.pad(targets_BT, ((0, 0), (0, pad)))
  losses = jax.lax.map(
    lambda x: stretch(*x),
    (
      jnp.moveaxis(hidden.reshape(B, count, length, D), 1, 0),
      jnp.moveaxis(targets.reshape(B, count, length), 1, 0),
    ),
  )
  return TokenLosses(
    *(jnp.moveaxis(x, 0, 1).reshape(B, count * length)[:, :T] for x in losses)
  )


def mtp_targets(
  targets_BT: jax.Array, loss_mask_BT: jax.Array, segment_ids_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Targets two tokens ahead, and where they lie in the same document."""
  last = ((0, 0), (0, 1))
  targets = jnp.pad(targets_BT[:, 1:], last)
  mask = jnp.pad(loss_mask_BT[:, 1:], last)
  same = jnp.pad(segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1], last)
  return targets, mask & same & loss_mask_BT
