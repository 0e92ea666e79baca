"""Gated multi-head latent attention without positional encoding.

Kimi K3 report (arXiv 2607.24653), section 2.1.2. What a decoder caches of a
token is the normed latent and the key part that all heads share.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hybrid_moe.model import norms, parameters
from hybrid_moe.model.linear import (
  linear,
  merge_heads,
  project_heads,
  whole,
)
from hybrid_moe.model.softmax_attention import (
  MIXED_TOKENS,
  softmax_attention,
)
from hybrid_moe.model_config import ModelConfig
from hybrid_moe.parallel.batch_shards import map_batch_shards


def expand_keys(
  latent_BTR: jax.Array,
  shared_key_BTP: jax.Array,
  kv_up_RHX: jax.Array,
  head_dim: int,
) -> tuple[jax.Array, jax.Array]:
  """Keys and values of all heads from the cached latents.

  Args:
    latent_BTR: normed key/value latents.
    shared_key_BTP: key part common to all heads.
    kv_up_RHX: up-projection, X = head_dim + V.
    head_dim: per-head part of a key.

  Returns:
    Keys [B, T, H, head_dim + P] and values [B, T, H, V].
  """
  R, H, X = kv_up_RHX.shape
  B, T, P = shared_key_BTP.shape
  up = (latent_BTR @ kv_up_RHX.reshape(R, H * X)).reshape(B, T, H, X)
  shared = jnp.broadcast_to(shared_key_BTP[:, :, None], (B, T, H, P))
  return jnp.concatenate([up[..., :head_dim], shared], -1), up[..., head_dim:]


class GatedMla(nn.Module):
  """Latent queries, keys and values, softmax attention, sigmoid gate.

  Attributes:
    config: sizes; `config.mla` holds those of this layer.
  """

  config: ModelConfig

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, segment_ids_BT: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Mixes the tokens of each document.

    Args:
      x_BTD: normed inputs, in the compute dtype.
      segment_ids_BT: int32 documents; 0 is padding.

    Returns:
      [B, T, D] in the dtype of `x_BTD`, and each head's largest score over
      real tokens [H], float32 without gradient.
    """
    c, m = self.config, self.config.mla
    d, H = c.d_model, m.num_heads
    key_dim = m.head_dim + m.shared_key_dim

    def weight(name, dims, shape):
      return parameters.matrix(self, name, dims, shape, c.init_std)

    def latent_norm(name):
      return norms.RmsNorm(c.latent_norm_eps, name=name)

    if m.q_lora_rank:
      q_down_DR = weight('q_down', 'DR', (d, m.q_lora_rank))
      q_up_RHK = weight('q_up', 'RHK', (m.q_lora_rank, H, key_dim))
      q_latent_BTR = latent_norm('q_norm')(linear(x_BTD, q_down_DR))
      q_BTHK = project_heads(q_latent_BTR, q_up_RHK)
    else:
      q_BTHK = project_heads(x_BTD, weight('q_proj', 'DHK', (d, H, key_dim)))
    kv_down_DX = weight('kv_down', 'DX', (d, m.kv_lora_rank + m.shared_key_dim))
    kv_up_RHX = weight(
      'kv_up', 'RHX', (m.kv_lora_rank, H, m.head_dim + m.value_dim)
    )
    kv_BTX = linear(x_BTD, kv_down_DX)
    latent_BTR = latent_norm('kv_norm')(kv_BTX[..., : m.kv_lora_rank])
    shared_key_BTP = kv_BTX[..., m.kv_lora_rank :]

    def attend(batched, kv_up_RHX):
      q_bTHK, latent_bTR, shared_key_bTP, segment_ids_bT = batched
      k_bTHK, v_bTHV = expand_keys(
        latent_bTR, shared_key_bTP, kv_up_RHX.astype(c.dtype), m.head_dim
      )
      return softmax_attention(
        q_bTHK, k_bTHK, v_bTHV, segment_ids_bT, scale=key_dim**-0.5
      )

    out_BTHV, top_BH = map_batch_shards(
      attend,
      (q_BTHK, latent_BTR, shared_key_BTP, segment_ids_BT),
      whole(kv_up_RHX, c.dtype),
    )
    out_BTHV = checkpoint_name(out_BTHV, MIXED_TOKENS)
    if m.output_gate:
      g_proj_DHV = weight('g_proj', 'DHV', (d, H, m.value_dim))
      gate_BTHV = project_heads(x_BTD, g_proj_DHV).astype(jnp.float32)
      out_BTHV = jax.nn.sigmoid(gate_BTHV) * out_BTHV
    o_proj_HVD = weight('o_proj', 'HVD', (H, m.value_dim, d))
    y_BTD = merge_heads(out_BTHV.astype(x_BTD.dtype), o_proj_HVD)
    return y_BTD, jnp.max(top_BH, axis=0)
