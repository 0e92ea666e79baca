"""Products with parameters: gathered forward, float32 gradients backward.

A parameter is a float32 master, split over devices. It is cast to the compute
dtype before it is gathered, so that the exchange moves the smaller type. Its
gradient is accumulated in float32, over tokens as over devices, and comes out
in the parameter's own layout: a sum of many bfloat16 terms in bfloat16 stops
growing at 256 of them.
"""

import functools

import jax
import jax.numpy as jnp

from hybrid_moe import sharding


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(
  x_BTX: jax.Array,
  w_XY: jax.Array,
  precision: jax.lax.Precision | None = None,
) -> jax.Array:
  """`x @ w` in the dtype of `x`.

  Args:
    x_BTX: activations.
    w_XY: a parameter, or one with its dimensions merged; float32.
    precision: of all three products.

  Returns:
    [B, T, Y] in the dtype of `x_BTX`.
  """
  w_XY = sharding.gather(w_XY.astype(x_BTX.dtype))
  return jnp.einsum('btx,xy->bty', x_BTX, w_XY, precision=precision)


def _linear_fwd(x_BTX, w_XY, precision):
  return linear(x_BTX, w_XY, precision), (x_BTX, w_XY)


def _linear_bwd(precision, saved, dy_BTY):
  x_BTX, w_XY = saved
  gathered_XY = sharding.gather(w_XY.astype(x_BTX.dtype))
  dx_BTX = jnp.einsum('bty,xy->btx', dy_BTY, gathered_XY, precision=precision)
  dw_XY = jnp.einsum(
    'btx,bty->xy',
    x_BTX,
    dy_BTY,
    precision=precision,
    preferred_element_type=jnp.float32,
    out_sharding=sharding.spec_of(w_XY),
  )
  return dx_BTX, dw_XY.astype(w_XY.dtype)


linear.defvjp(_linear_fwd, _linear_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def whole(w: jax.Array, dtype: str | jnp.dtype) -> jax.Array:
  """A parameter on every device, for uses other than one product.

  Args:
    w: the parameter, float32.
    dtype: compute dtype, to which the values are rounded.

  Returns:
    The rounded values, replicated, as float32. Cast them where they are used:
    gradients of several uses are then added up in float32.
  """
  return sharding.gather(w.astype(dtype)).astype(jnp.float32)


def _whole_fwd(w, dtype):
  return whole(w, dtype), w


def _whole_bwd(dtype, w, dw):
  del dtype
  return (sharding.constrain(dw, sharding.spec_of(w)),)


whole.defvjp(_whole_fwd, _whole_bwd)


def project_heads(x_BTX: jax.Array, w_XHK: jax.Array) -> jax.Array:
  """[B, T, X] to [B, T, H, K] as one matrix product."""
  X, H, K = w_XHK.shape
  return sharding.reshape_rows(linear(x_BTX, w_XHK.reshape(X, H * K)), H, K)


def merge_heads(x_BTHV: jax.Array, w_HVD: jax.Array) -> jax.Array:
  """[B, T, H, V] to [B, T, D] as one matrix product."""
  H, V, D = w_HVD.shape
  x_BTX = sharding.reshape_rows(x_BTHV, H * V)
  return linear(x_BTX, w_HVD.reshape(H * V, D))
