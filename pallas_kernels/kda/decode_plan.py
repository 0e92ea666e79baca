"""How KDA's decode kernel for TPU cuts a call into copies."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda import operands, tile

_LANES = 128
# Sixteen heads hide most of a block's start-up; with q that makes 96 rows of
# parts, which a matrix unit of 128 rows still takes at once.
_MOST_HEADS = 16
_MOST_BLOCK_BYTES = 2 * 2**20
# Copies in flight have to cover the latency of HBM: at 3.7 TB/s and about a
# microsecond these are 4 MB in each direction.
_BYTES_IN_FLIGHT = 4 * 2**20
_MOST_BUFFERS = 8
_SPILL_BYTES = 8 * 2**20
# Every generation has at least 64 MB of VMEM a core.
_MOST_VMEM_BYTES = 60 * 2**20


@dataclasses.dataclass(frozen=True)
class DecodePlan:
  """How one call is cut into blocks, which are copied and computed as a whole.

  Attributes:
    requests: requests a block; more than one only if a core has so few heads
      that one block holds all of a request's.
    heads: value heads of each request in a block; divides those of the call.
    key_heads: q/k heads that they read.
    blocks: blocks that one request is part of, over all cores.
    cores: tensor cores of a device that share the heads.
    buffers: blocks held in VMEM on their way in, and as many on their way out.
    vmem_bytes: limit to compile under.
  """

  requests: int
  heads: int
  key_heads: int
  blocks: int
  cores: int
  buffers: int
  vmem_bytes: int

  @property
  def rows(self) -> int:
    """Value heads a block, of all its requests."""
    return self.requests * self.heads

  @property
  def key_rows(self) -> int:
    """Heads of q and k a block, of all its requests."""
    return self.requests * self.key_heads


def count_cores() -> int:
  """Tensor cores of one device of the mesh, or of the default backend."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  device = jax.devices()[0] if device is None else device
  return getattr(device, 'num_cores', None) or 1


def _tile_bytes(rows: int, lanes: int, dtype) -> int:
  """VMEM bytes of a matrix, which is held in tiles of (8 words, 128)."""
  size = jnp.dtype(dtype).itemsize
  return pl.cdiv(rows * size, 32) * 32 * pl.cdiv(lanes, 128) * 128


def make_plan(
  arrays: operands.Operands, states_SHKV: jax.Array, cores: int
) -> DecodePlan:
  """Chooses what a block holds and the number of buffers.

  Args:
    arrays: the arrays of the call.
    states_SHKV: the pool of states.
    cores: tensor cores of the device; one of them takes all if the heads do
      not divide.
  """
  requests, tokens, key_heads, num_keys = arrays.q_BTHK.shape
  value_heads, num_values = arrays.v_BTHV.shape[2:]
  f32 = jnp.float32
  group = value_heads // key_heads
  cores = cores if value_heads % cores == 0 else 1
  head_bytes = _tile_bytes(num_keys, num_values, f32)
  most = min(_MOST_HEADS, _MOST_BLOCK_BYTES // head_bytes)
  heads = max(
    n
    for n in range(1, most + 1)
    if value_heads % (n * cores) == 0 and (n % group == 0 or group % n == 0)
  )
  blocks = value_heads // heads
  shared = 1
  if blocks == cores:
    # Two blocks at least, so that copies overlap with arithmetic; then as few
    # as before, filled evenly.
    shared = min(most // heads, max(requests // 2, 1))
    shared = pl.cdiv(requests, pl.cdiv(requests, shared))
  rows = shared * heads
  block_bytes = rows * _tile_bytes(num_keys, num_values, states_SHKV.dtype)
  buffers = min(max(_BYTES_IN_FLIGHT // block_bytes, 2), _MOST_BUFFERS)
  # q, k and g of this block and of the next, v and the output, beta.
  operand_bytes = tokens * (
    6 * _tile_bytes(rows, num_keys, f32)
    + 2 * _tile_bytes(rows, num_values, f32)
    + _tile_bytes(rows, 1, f32)
  )
  gate_bytes = _tile_bytes(heads, num_keys, f32) + _tile_bytes(heads, 1, f32)
  return DecodePlan(
    requests=shared,
    heads=heads,
    key_heads=max(heads // group, 1),
    blocks=blocks,
    cores=cores,
    buffers=buffers,
    vmem_bytes=(
      2 * buffers * block_bytes
      + rows * head_bytes
      + 2 * blocks // cores * (operand_bytes + gate_bytes)
      + 2 * _tile_bytes(num_keys, _LANES, f32)
      + _SPILL_BYTES
    ),
  )


def find_obstacle(
  arrays: operands.Operands, states_SHKV: jax.Array
) -> str | None:
  """Says why the kernel cannot take a call, or None when it can."""
  plan = make_plan(arrays, states_SHKV, 1)
  requests, tokens, value_heads, _ = arrays.v_BTHV.shape
  if plan.vmem_bytes > _MOST_VMEM_BYTES:
    return (
      f'{value_heads} value heads and {tokens} tokens a request need '
      f'{plan.vmem_bytes} bytes of VMEM; accepted are {_MOST_VMEM_BYTES}.'
    )
  ids = requests * (tokens + 1)
  if ids > tile.MOST_SCALARS:
    return f'The call has {ids} ids of slots; accepted are {tile.MOST_SCALARS}.'
  return None
