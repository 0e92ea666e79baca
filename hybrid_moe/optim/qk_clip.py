"""QK-clip: scales down the heads whose attention logits grow too large."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def qk_clip(
  mla_params: Mapping[str, Any],
  max_logit_H: jax.Array,
  threshold: float,
  head_dim: int,
) -> dict[str, Any]:
  """Scales one MLA layer so that its largest logits come down to `threshold`.

  Per head, gamma = min(1, threshold / max_logit). The per-head parts of query
  and key take sqrt(gamma) each. The shared key belongs to all heads and stays
  as it is, so the query's part that meets it takes gamma alone. Values are
  untouched. Source: Kimi K2 report (arXiv 2507.20534), algorithm 1.

  Args:
    mla_params: parameters of the layer: 'q_up' or 'q_proj'
      [..., in, H, head_dim + shared_key_dim], 'kv_up'
      [..., R, H, head_dim + V], and others, which are passed through.
    max_logit_H: [..., H] float32, largest scaled logit before the softmax of
      each head in the step. A head whose value is not finite is left alone.
    threshold: largest logit that is let be.
    head_dim: width of a head's own part of a query or key.

  Returns:
    A new mapping of the same structure.

  Raises:
    ValueError: the layer has no query or key projection, or the dims of
      `max_logit_H` do not match it.
  """
  query = next((q for q in ('q_up', 'q_proj') if q in mla_params), None)
  if query is None or 'kv_up' not in mla_params:
    raise ValueError(
      f'mla_params: keys {sorted(mla_params)}; accepted are those of an MLA '
      "layer: 'kv_up' and one of 'q_up' and 'q_proj'"
    )
  q, kv = mla_params[query], mla_params['kv_up']
  heads = (*q.shape[:-3], q.shape[-2])
  if max_logit_H.shape != heads:
    raise ValueError(
      f'max_logit_H: shape {max_logit_H.shape}; accepted is {heads}, the stack '
      f'and heads of {query!r}'
    )
  exceeds = jnp.isfinite(max_logit_H) & (max_logit_H > threshold)
  gamma_H = jnp.where(
    exceeds, threshold / jnp.where(exceeds, max_logit_H, 1.0), 1.0
  )
  root_H = jnp.sqrt(gamma_H)
  return {
    **mla_params,
    query: q * _column_factors(root_H, gamma_H, head_dim, q.shape[-1]),
    'kv_up': kv
    * _column_factors(root_H, jnp.ones_like(root_H), head_dim, kv.shape[-1]),
  }


def apply_qk_clip(
  params: Mapping[str, Any],
  max_logits: Mapping[tuple[str, ...], jax.Array],
  threshold: float,
  head_dim: int,
) -> Mapping[str, Any]:
  """Applies `qk_clip` to the MLA layers of a parameter tree.

  Args:
    params: nested mappings of parameters.
    max_logits: the step's largest logits by the path of the layer's mapping in
      `params`, e.g. ('blocks', 'layer_3', 'mixer'): [H], or [n, H] for stacked
      layers.
    threshold: as in `qk_clip`; 0 returns `params` as they are.
    head_dim: as in `qk_clip`.

  Returns:
    The tree with the named layers replaced.

  Raises:
    ValueError: a path that leads nowhere, and as `qk_clip`.
  """
  if threshold == 0:
    return params
  for path, max_logit_H in max_logits.items():
    params = _replace(params, path, path, max_logit_H, threshold, head_dim)
  return params


def _replace(
  tree: Mapping[str, Any],
  rest: tuple[str, ...],
  path: tuple[str, ...],
  max_logit_H: jax.Array,
  threshold: float,
  head_dim: int,
) -> dict[str, Any]:
  if not rest:
    return qk_clip(tree, max_logit_H, threshold, head_dim)
  if rest[0] not in tree:
    raise ValueError(
      f'max_logits: path {path}; at {rest[0]!r} accepted are {sorted(tree)}'
    )
  child = _replace(
    tree[rest[0]], rest[1:], path, max_logit_H, threshold, head_dim
  )
  return {**tree, rest[0]: child}


def _column_factors(
  first_H: jax.Array, second_H: jax.Array, split: int, width: int
) -> jax.Array:
  """[..., 1, H, width]: `first_H` left of column `split`, `second_H` after."""
  is_first_K = (jnp.arange(width) < split).reshape(
    (1,) * first_H.ndim + (width,)
  )
  factors = jnp.where(is_first_K, first_H[..., None], second_H[..., None])
  return factors[..., None, :, :]
