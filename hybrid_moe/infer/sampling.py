"""Sampling by running the whole model for every token.

Simple, exact and slow: time grows with the square of the length. It serves
the sample in a run's report.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_moe import sharding
from hybrid_moe.balance.state import BalanceState, router_view
from hybrid_moe.model.decoder import Decoder, head_matrix
from hybrid_moe.model_config import BalanceConfig, ModelConfig


def sample(
  model: ModelConfig,
  balance: BalanceConfig,
  params: Any,
  balance_state: BalanceState,
  prompt: np.ndarray,
  num_tokens: int,
  *,
  allowed_tokens: int,
  temperature: float = 0.8,
  seed: int = 0,
) -> np.ndarray:
  """Continues a prompt.

  Args:
    model: sizes.
    balance: how the experts are balanced.
    params: parameters, on the mesh in use.
    balance_state: the balancer; its bias routes.
    prompt: int ids, at least one.
    num_tokens: tokens to add.
    allowed_tokens: ids at and above this are never chosen: rows of the
      embedding that the tokenizer does not use.
    temperature: divisor of the logits; 0 takes the likeliest token.
    seed: of the choices.

  Returns:
    int32 [len(prompt) + num_tokens].

  Raises:
    ValueError: the prompt is empty.
  """
  if len(prompt) == 0:
    raise ValueError('prompt=[]: accepted is at least one token')
  # One row for each shard of the batch: a smaller batch cannot be split.
  rows = sharding.num_batch_shards()
  length = len(prompt) + num_tokens
  tokens_T = np.zeros(length, np.int32)
  tokens_T[: len(prompt)] = prompt
  tokens_BT = sharding.constrain(
    jnp.tile(jnp.asarray(tokens_T)[None], (rows, 1)), sharding.TOKENS_BT
  )
  generate = functools.partial(
    _generate, model, balance, allowed_tokens, temperature
  )
  out_BT = jax.jit(generate)(
    params,
    balance_state,
    tokens_BT,
    jnp.int32(len(prompt)),
    jax.random.key(seed),
  )
  whole_BT = sharding.constrain(out_BT, sharding.REPLICATED)
  return np.asarray(jax.device_get(whole_BT))[0]


def _generate(
  model,
  balance,
  allowed_tokens,
  temperature,
  params,
  state,
  tokens_BT,
  start,
  key,
):
  """Fills `tokens_BT` from position `start` on."""
  views = router_view(balance, state)
  head_DU = head_matrix(params, model.dtype)
  length = tokens_BT.shape[1]
  is_allowed_U = jnp.arange(head_DU.shape[1]) < allowed_tokens

  def add_token(position, tokens_BT):
    out = Decoder(model, balance).apply(
      {'params': params},
      tokens_BT,
      tokens_BT,
      # Everything not yet written is padding.
      sharding.constrain(
        jnp.broadcast_to(
          (jnp.arange(length) < position).astype(jnp.int32), tokens_BT.shape
        ),
        sharding.TOKENS_BT,
      ),
      views,
    )
    hidden_BD = jax.lax.dynamic_index_in_dim(
      out.hidden_BTD, position - 1, axis=1, keepdims=False
    )
    logits_BU = jnp.einsum(
      'bd,du->bu',
      hidden_BD,
      head_DU.astype(hidden_BD.dtype),
      preferred_element_type=jnp.float32,
    )
    logits_BU = jnp.where(is_allowed_U[None], logits_BU, -jnp.inf)
    if temperature > 0:
      noise_U = jax.random.gumbel(
        jax.random.fold_in(key, position), logits_BU.shape[1:]
      )
      # All rows hold the same text, hence take the same noise.
      logits_BU = logits_BU / temperature + noise_U[None]
    chosen_B = jnp.argmax(logits_BU, axis=-1).astype(jnp.int32)
    here_T = jnp.arange(length) == position
    return jnp.where(here_T[None], chosen_B[:, None], tokens_BT)

  return jax.lax.fori_loop(start, length, add_token, tokens_BT)
