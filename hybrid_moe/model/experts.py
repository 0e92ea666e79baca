"""Routed experts on one device: sort by expert, grouped matrix products.

No token is dropped and no expert has a capacity. Two ways to multiply the
groups: `ragged_dot` is XLA's grouped product, native on TPU; elsewhere XLA
lowers it to a product with every expert, so `blocked` lays the sorted rows
out in blocks of one expert each and multiplies the blocks as a batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_moe.model.router import Routes
from hybrid_moe.model.situ_glu import situ
from pallas_kernels.target import target_platform

_LARGEST_BLOCK = 128
_SMALLEST_BLOCK = 8


class ExpertWeights(NamedTuple):
  """Weights of the routed experts."""

  gate_EZF: jax.Array
  up_EZF: jax.Array
  down_EFZ: jax.Array


class _Slots(NamedTuple):
  """Rows in the order in which they are multiplied.

  Attributes:
    assignment_M: which of the N*S assignments fills each slot; N*S if none.
    slot_NS: the slot of each assignment.
    group_sizes_E: slots of each expert ('ragged_dot').
    block_expert: expert of each block of slots ('blocked').
  """

  assignment_M: jax.Array
  slot_NS: jax.Array
  group_sizes_E: jax.Array
  block_expert: jax.Array | None


def resolve_implementation(implementation: str) -> str:
  """The grouped product that 'auto' stands for on the mesh's platform."""
  if implementation != 'auto':
    return implementation
  return 'ragged_dot' if target_platform() == 'tpu' else 'blocked'


def _block_len(num_assignments: int, num_experts: int) -> int:
  """Power of two near the mean group, so that padding stays small."""
  mean = max(1, num_assignments // num_experts)
  return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 1 << (mean.bit_length() - 1)))


def _assign_slots(ids_NS: jax.Array, num_experts: int, blocked: bool) -> _Slots:
  """Sorts assignments by expert, padding groups to whole blocks if asked."""
  num_assignments = ids_NS.size
  ids = ids_NS.reshape(-1)
  order = jnp.argsort(ids, stable=True)
  sizes = jnp.zeros(num_experts, jnp.int32).at[ids].add(1)
  starts = jnp.cumsum(sizes) - sizes
  if blocked:
    block = _block_len(num_assignments, num_experts)
    blocks = -(-sizes // block)
    ends = jnp.cumsum(blocks)
    num_blocks = num_assignments // block + num_experts
    first_slot = (ends - blocks) * block
    block_expert = jnp.minimum(
      jnp.searchsorted(ends, jnp.arange(num_blocks), side='right'),
      num_experts - 1,
    )
    num_slots = num_blocks * block
  else:
    first_slot, block_expert, num_slots = starts, None, num_assignments
  sorted_ids = ids[order]
  slots = (
    first_slot[sorted_ids]
    + jnp.arange(num_assignments, dtype=jnp.int32)
    - starts[sorted_ids]
  )
  assignment_M = (
    jnp.full(num_slots, num_assignments, jnp.int32)
    .at[slots]
    .set(order.astype(jnp.int32))
  )
  slot_NS = jnp.zeros(num_assignments, jnp.int32).at[order].set(slots)
  return _Slots(
    assignment_M, slot_NS.reshape(ids_NS.shape), sizes, block_expert
  )


def _grouped_matmul(x_MK: jax.Array, w_EKF: jax.Array, slots: _Slots):
  """Each slot's row times its expert's matrix, accumulated in float32."""
  if slots.block_expert is None:
    return jax.lax.ragged_dot(
      x_MK,
      w_EKF.astype(x_MK.dtype),
      slots.group_sizes_E,
      preferred_element_type=jnp.float32,
    )
  return _blocked_matmul(x_MK, w_EKF, slots.block_expert)


@jax.custom_vjp
def _blocked_matmul(x_MK, w_EKF, block_expert):
  """Blocks of rows, each times its expert's matrix; float32 result."""
  y = jnp.einsum(
    'nck,nkf->ncf',
    _in_blocks(x_MK, block_expert),
    w_EKF.astype(x_MK.dtype)[block_expert],
    preferred_element_type=jnp.float32,
  )
  return y.reshape(x_MK.shape[0], -1)


def _blocked_matmul_fwd(x_MK, w_EKF, block_expert):
  y_MF = _blocked_matmul(x_MK, w_EKF, block_expert)
  return y_MF, (x_MK, w_EKF, block_expert)


def _blocked_matmul_bwd(saved, dy_MF):
  x_MK, w_EKF, block_expert = saved
  dy = _in_blocks(dy_MF.astype(x_MK.dtype), block_expert)
  dx = jnp.einsum(
    'ncf,nkf->nck',
    dy,
    w_EKF.astype(x_MK.dtype)[block_expert],
    preferred_element_type=jnp.float32,
  )
  # An expert's gradient adds up over its blocks in float32.
  dw_EKF = jax.ops.segment_sum(
    jnp.einsum(
      'nck,ncf->nkf',
      _in_blocks(x_MK, block_expert),
      dy,
      preferred_element_type=jnp.float32,
    ),
    block_expert,
    w_EKF.shape[0],
    indices_are_sorted=True,
  )
  return (
    dx.reshape(x_MK.shape).astype(x_MK.dtype),
    dw_EKF.astype(w_EKF.dtype),
    None,
  )


_blocked_matmul.defvjp(_blocked_matmul_fwd, _blocked_matmul_bwd)


def _in_blocks(x_MK, block_expert):
  return x_MK.reshape(block_expert.size, -1, x_MK.shape[-1])


def run_experts(
  z_NZ: jax.Array,
  routes: Routes,
  weights: ExpertWeights,
  *,
  gate_cap: float,
  up_cap: float,
  implementation: str,
) -> jax.Array:
  """`sum_s weight[n, s] * expert[ids[n, s]](z[n])` for every token.

  A token's weight multiplies the expert's hidden activation rather than its
  output, which then need not be kept for the gradient of the weight (Kimi K3
  report, section 5.2.2).

  Args:
    z_NZ: latents of the tokens.
    routes: chosen experts and their weights.
    weights: the experts' SiTU-GLU weights, float32; the products are in the
      dtype of `z_NZ`.
    gate_cap: bound of the gate branch.
    up_cap: bound of the up branch.
    implementation: 'ragged_dot' or 'blocked'.

  Returns:
    [N, Z] in the dtype of `z_NZ`, summed over a token's experts in float32.
  """
  num_experts = weights.gate_EZF.shape[0]
  S = routes.ids_NS.shape[1]
  slots = _assign_slots(
    routes.ids_NS, num_experts, blocked=implementation == 'blocked'
  )
  filled_M = (slots.assignment_M < routes.ids_NS.size)[:, None]
  assignment_M = jnp.minimum(slots.assignment_M, routes.ids_NS.size - 1)
  x_MZ = jnp.where(filled_M, z_NZ[assignment_M // S], 0)
  weight_M = jnp.where(
    filled_M[:, 0], routes.weight_NS.reshape(-1)[assignment_M], 0.0
  )
  hidden_MF = situ(
    _grouped_matmul(x_MZ, weights.gate_EZF, slots),
    _grouped_matmul(x_MZ, weights.up_EZF, slots),
    gate_cap,
    up_cap,
  )
  hidden_MF = (hidden_MF * weight_M[:, None]).astype(z_NZ.dtype)
  y_MZ = _grouped_matmul(hidden_MF, weights.down_EFZ, slots)
  return jnp.sum(y_MZ[slots.slot_NS], axis=1).astype(z_NZ.dtype)
