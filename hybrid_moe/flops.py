"""Parameters and floating-point operations of a model, by formula.

The compiler counts the body of a loop once, so that its own figure is of no
use for scanned layers. A multiply and an add are two operations.
"""

import jax
import numpy as np

from hybrid_moe.model.decoder import LOOP
from hybrid_moe.model_config import ModelConfig

# Chunk length with which Kimi Delta Attention's operations are counted.
_KDA_CHUNK = 64


def kda_flops_per_token(key_dim: int, value_dim: int, chunk: int) -> int:
  """Operations of the chunked delta rule for one token and head.

  Kimi Linear (arXiv 2510.26692), equation 13, counts 6 d^2 + 3 C d + C^2 for
  d = K = V, so that figures compare with published ones. With the widths
  apart, its terms are

  - 6 K V: K V multiply-adds each to read the state for the correction and for
    the output, and to write to it;
  - C (2 K + V): scores with keys and with queries and the product with the new
    values, each with half of a chunk on average;
  - C^2: the inverse of the triangular system.

  Applying that inverse, C V more in the form that runs here, is not in the
  equation.

  Args:
    key_dim: K.
    value_dim: V.
    chunk: C.
  """
  K, V, C = key_dim, value_dim, chunk
  return 6 * K * V + C * (2 * K + V) + C * C


def count_parameters(params: dict) -> int:
  """Elements of a (possibly abstract) parameter tree."""
  return sum(int(np.prod(p.shape)) for p in jax.tree.leaves(params))


def count_active_parameters(config: ModelConfig, params: dict) -> int:
  """Parameters that a token meets: no input embedding, top-k experts only.

  Args:
    config: sizes.
    params: parameters of the decoder, possibly abstract.
  """
  active = 0
  share = config.moe.top_k / config.moe.num_experts
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    names = [entry.key for entry in path]
    size = int(np.prod(leaf.shape))
    if names == ['table']:
      continue
    is_routed = names[-2] == 'ffn' if len(names) > 1 else False
    if is_routed and names[-1] in ('w_gate', 'w_up', 'w_down'):
      # A dense layer's weights have the same names and one dimension less.
      stacked = names[0] == LOOP
      if leaf.ndim - stacked == 3:
        size = round(size * share)
    active += size
  return active


def forward_flops_per_token(
  config: ModelConfig, params: dict, seq_len: int
) -> float:
  """Operations of a forward pass over one token of a row of `seq_len`.

  Matrix products count two operations a parameter that the token meets. Kimi
  Delta Attention adds `kda_flops_per_token` a head, and softmax attention a
  product with half of the tokens it may see, on average.
  """
  total = 2.0 * count_active_parameters(config, params)
  kda, mla, local = config.kda, config.mla, config.local
  mixers = [config.mixer_of(i) for i in range(config.num_layers)]
  mixers += ['mla'] * config.mtp_layers
  for mixer in mixers:
    if mixer == 'kda':
      one_head = kda_flops_per_token(kda.key_dim, kda.value_dim, _KDA_CHUNK)
      total += kda.value_heads * one_head
    elif mixer == 'mla':
      width = mla.head_dim + mla.shared_key_dim + mla.value_dim
      total += mla.num_heads * width * seq_len
    else:
      seen = min(local.window, seq_len / 2)
      total += 4.0 * local.num_heads * local.head_dim * seen
  if config.mtp_layers:
    # The output embedding is multiplied once more.
    total += 2.0 * config.d_model * config.vocab_size
  return total


def training_flops_per_token(
  config: ModelConfig, params: dict, seq_len: int
) -> float:
  """Operations of forward and backward; recomputation is not counted."""
  return 3.0 * forward_flops_per_token(config, params, seq_len)
