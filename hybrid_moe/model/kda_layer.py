"""Kimi Delta Attention: a gated delta rule with per-channel decay.

Kimi Linear (arXiv 2510.26692), section 3; bounded decay and full-rank output
gate as in the Kimi K3 report (arXiv 2607.24653), section 2.1.1. The operator
itself is `pallas_kernels.kda.kda`; this layer owns what surrounds it.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hybrid_moe import sharding
from hybrid_moe.model import norms, parameters
from hybrid_moe.model.linear import linear, merge_heads, project_heads
from hybrid_moe.model.softmax_attention import MIXED_TOKENS
from hybrid_moe.model_config import ModelConfig
from hybrid_moe.parallel.batch_shards import map_batch_shards
from pallas_kernels.kda import kda

# Range of the time step that the decay bias starts from (Mamba-2).
_DT_MIN, _DT_MAX, _DT_FLOOR = 1e-3, 1e-1, 1e-4
# Range of exp(A) with the published softplus gate (Kimi Linear).
_SOFTPLUS_A_MIN, _SOFTPLUS_A_MAX = 1.0, 16.0


def init_dt_bias(key, shape, dtype):
  """Inverse softplus of a time step that is log-uniform in [1e-3, 1e-1].

  Args:
    key: of the random numbers.
    shape: (HV, K).
    dtype: float32.
  """
  log_dt = jax.random.uniform(
    key, shape, dtype, jnp.log(_DT_MIN), jnp.log(_DT_MAX)
  )
  dt = jnp.maximum(jnp.exp(log_dt), _DT_FLOOR)
  return dt + jnp.log(-jnp.expm1(-dt))


def init_softplus_a_log(key, shape, dtype):
  """Logarithm of a decay rate that is uniform in [1, 16]; shape (HV,)."""
  a = jax.random.uniform(key, shape, dtype, _SOFTPLUS_A_MIN, _SOFTPLUS_A_MAX)
  return jnp.log(a)


def init_conv(key, shape, dtype):
  """Uniform in +-1/sqrt(taps), the usual start of a depthwise convolution.

  Args:
    key: of the random numbers.
    shape: (taps, channels).
    dtype: float32.
  """
  bound = shape[0] ** -0.5
  return jax.random.uniform(key, shape, dtype, -bound, bound)


class KdaLayer(nn.Module):
  """Projections, gates, the operator with its convolutions, gated output.

  Attributes:
    config: sizes; `config.kda` holds those of this layer.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Mixes the tokens of each document.

    Args:
      x_BTD: normed inputs, in the compute dtype.
      segment_ids_BT: int32 documents; 0 is padding.

    Returns:
      [B, T, D] in the dtype of `x_BTD`.
    """
    c, a = self.config, self.config.kda
    d, H, HV = c.d_model, a.num_heads, a.value_heads
    bounded = a.gate == 'bounded'

    def weight(name, dims, shape):
      return parameters.matrix(self, name, dims, shape, c.init_std)

    def project(prefix, heads, width):
      """Inputs [B, T, heads, width] of a convolution, and its taps."""
      w_DHK = weight(f'{prefix}_proj', 'DHK', (d, heads, width))
      taps = parameters.vector(
        self, f'{prefix}_conv', (a.conv_width, heads * width), init_conv
      )
      y_BTX = linear(x_BTD, w_DHK.reshape(d, heads * width))
      y_BTHK = sharding.reshape_rows(y_BTX, heads, width)
      return y_BTHK, taps.reshape(a.conv_width, heads, width)

    q_BTHK, q_conv_CHK = project('q', H, a.key_dim)
    k_BTHK, k_conv_CHK = project('k', H, a.key_dim)
    v_BTHV, v_conv_CHV = project('v', HV, a.value_dim)
    f_down_DR = weight('f_down', 'DR', (d, a.gate_rank))
    f_up_RHK = weight('f_up', 'RHK', (a.gate_rank, HV, a.key_dim))
    g_BTHK = project_heads(linear(x_BTD, f_down_DR), f_up_RHK)
    beta_BTH = linear(x_BTD, weight('b_proj', 'DH', (d, HV)))
    a_log_H = parameters.vector(
      self,
      'A_log',
      (HV,),
      nn.initializers.zeros if bounded else init_softplus_a_log,
    )
    dt_bias_HK = parameters.vector(
      self, 'dt_bias', (HV, a.key_dim), init_dt_bias
    )

    def attend(batched, replicated):
      q_bTHK, k_bTHK, v_bTHV, g_bTHK, beta_bTH, segment_ids_bT = batched
      a_log_H, dt_bias_HK, q_conv_CHK, k_conv_CHK, v_conv_CHV = replicated
      return kda(
        q_bTHK,
        k_bTHK,
        v_bTHV,
        g_bTHK,
        beta_bTH,
        A_log=a_log_H,
        dt_bias=dt_bias_HK,
        q_conv=q_conv_CHK,
        k_conv=k_conv_CHK,
        v_conv=v_conv_CHV,
        lower_bound=a.gate_lower_bound if bounded else None,
        allow_neg_eigval=a.allow_neg_eigval,
        segment_ids=segment_ids_bT,
        precision=a.precision,
        implementation=None if a.implementation == 'auto' else a.implementation,
      )

    out_BTHV = map_batch_shards(
      attend,
      (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, segment_ids_BT),
      (a_log_H, dt_bias_HK, q_conv_CHK, k_conv_CHK, v_conv_CHV),
    )
    out_BTHV = checkpoint_name(out_BTHV, MIXED_TOKENS)
    out_BTHV = norms.RmsNorm(c.norm_eps, name='o_norm')(out_BTHV)
    if a.output_gate_rank:
      g_down_DR = weight('g_down', 'DR', (d, a.output_gate_rank))
      g_up_RHV = weight('g_up', 'RHV', (a.output_gate_rank, HV, a.value_dim))
      gate_BTHV = project_heads(linear(x_BTD, g_down_DR), g_up_RHV)
    else:
      g_proj_DHV = weight('g_proj', 'DHV', (d, HV, a.value_dim))
      gate_BTHV = project_heads(x_BTD, g_proj_DHV)
    gate_BTHV = jax.nn.sigmoid(gate_BTHV.astype(jnp.float32))
    gated_BTHV = (gate_BTHV * out_BTHV.astype(jnp.float32)).astype(x_BTD.dtype)
    o_proj_HVD = weight('o_proj', 'HVD', (HV, a.value_dim, d))
    return merge_heads(gated_BTHV, o_proj_HVD)
