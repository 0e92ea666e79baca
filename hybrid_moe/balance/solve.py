"""From required biases, counted or kept, to the bias that balances.

Source: Kimi K3 report (arXiv 2607.24653), section 2.3.3 and appendix D.
"""

import jax
import jax.numpy as jnp


def target_load(
  tokens: jax.Array, top_k: int, num_experts: int
) -> tuple[jax.Array, jax.Array]:
  """An expert's fair share tokens * top_k / num_experts, without overflow.

  Args:
    tokens: int32, any shape.
    top_k: experts of a token.
    num_experts: experts.

  Returns:
    Its whole part, int32, and the numerator (over `num_experts`) of the rest,
    int32 in [0, num_experts).
  """
  left = (tokens % num_experts) * top_k
  whole = (tokens // num_experts) * top_k + left // num_experts
  return whole, left % num_experts


def locate_quantile(
  histogram: jax.Array, top_k: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Finds the bin of each expert's target load.

  Args:
    histogram: [..., E, W] int32 or float32 counts; every expert has counted
      the same tokens.
    top_k: experts of a token.

  Returns:
    The first bin up to which at least the target is counted, int32 [..., E];
    the target less what is counted before that bin, float32 [..., E]; the
    count inside it, float32 [..., E].
  """
  num_experts = histogram.shape[-2]
  cumulative = jnp.cumsum(histogram, axis=-1, dtype=histogram.dtype)
  total = cumulative[..., -1:]
  if jnp.issubdtype(histogram.dtype, jnp.integer):
    whole, rest = target_load(total, top_k, num_experts)
    fraction = rest.astype(jnp.float32) / num_experts
    reached = cumulative >= whole + (rest > 0)
  else:
    whole, fraction = total * (top_k / num_experts), jnp.zeros_like(total)
    reached = cumulative >= whole
  bin_index = jnp.sum(~reached, axis=-1, dtype=jnp.int32)
  before = jnp.max(jnp.where(reached, 0, cumulative), axis=-1)
  bins_iota = jax.lax.broadcasted_iota(
    jnp.int32, histogram.shape, histogram.ndim - 1
  )
  inside = jnp.sum(
    jnp.where(bins_iota == bin_index[..., None], histogram, 0), axis=-1
  )
  missing = (whole[..., 0] - before).astype(jnp.float32) + fraction[..., 0]
  return bin_index, missing, inside.astype(jnp.float32)


def solve_histogram(
  histogram: jax.Array, low: jax.Array, width: jax.Array, top_k: int
) -> jax.Array:
  """Bias under which every expert would get its share, from counts.

  Within one bin of `solve_exact`. Source: Kimi K3 report, appendix D.

  Args:
    histogram: [..., E, W] int32 or float32 counts of required biases.
    low: [...] float32, lower edge of the first bin.
    width: [...] float32, width of a bin.
    top_k: experts of a token.

  Returns:
    [..., E] float32 with mean zero; without any count it means nothing.
  """
  bin_index, missing, inside = locate_quantile(histogram, top_k)
  part = jnp.clip(missing / jnp.maximum(inside, 1e-6), 0.0, 1.0)
  bias = low[..., None] + (bin_index + part) * width[..., None]
  return bias - jnp.mean(bias, axis=-1, keepdims=True)


def solve_exact(
  required_bias: jax.Array, tokens: jax.Array, top_k: int
) -> jax.Array:
  """Bias under which every expert would get its share, by sorting.

  Source: Kimi K3 report, equations 13 and 14.

  Args:
    required_bias: [..., N, E] float32, infinite for padding; not sharded.
    tokens: [...] int32, real tokens among the N.
    top_k: experts of a token.

  Returns:
    [..., E] float32 with mean zero: each expert's (q+1)-th smallest required
    bias, q the whole part of its share. Without tokens it means nothing.
  """
  num_experts = required_bias.shape[-1]
  if required_bias.shape[-2] == 0:
    return jnp.zeros_like(required_bias, shape=(*tokens.shape, num_experts))
  rank, _ = target_load(tokens, top_k, num_experts)
  rank = jnp.minimum(rank, jnp.maximum(tokens - 1, 0))[..., None, None]
  bias = jnp.take_along_axis(
    jnp.sort(required_bias, axis=-2),
    jnp.broadcast_to(rank, (*rank.shape[:-2], 1, num_experts)),
    axis=-2,
  )[..., 0, :]
  return bias - jnp.mean(bias, axis=-1, keepdims=True)
