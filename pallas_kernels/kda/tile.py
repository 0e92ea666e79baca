"""Tile sizes of the chunked form and the exponent range they must respect.

A tile's scores are one matrix product of rows scaled by exp(G_i - G_0) and
columns scaled by exp(G_0 - G_j), G_0 being the tile's first row. With a log
decay of at least -5 and 16 rows the exponents span at most 16 * 5 = 80 nats,
inside the 88 that float32 and bfloat16 hold. Kimi K3 report (arXiv 2607.24653)
section 2.1.1.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# ln of the largest float32 is 88.72.
EXPONENT_LIMIT = 88.0

# On CPU a block that stays in the cache is fastest.
_CPU_BLOCK = 32

# Elsewhere a block is as large as its temporaries may be: every block is a
# further round of short steps, which leave an accelerator idle.
_BLOCK_BYTES = 2**30

# Temporaries of the backward for each chunk and head, in float32 arrays
# [C, K + V]; measured for K = V = 64 and 128, of which they are 15 and 16. A
# forward needs less than half.
_ARRAYS_AT_ONCE = 16

# Registers that do not fit and the compiler's own buffers, with operands of
# bfloat16 and of float32; at most 11 and 22 MiB in what was compiled.
_SPILL_BYTES = 12 * 2**20
_EXACT_SPILL_BYTES = 24 * 2**20
_TUNED = pathlib.Path(__file__).with_name('tuned_tiles.json')
# Every generation has at least 64 MB of VMEM a core.
_MOST_VMEM_BYTES = 60 * 2**20
# Words of SMEM that scalars may take.
MOST_SCALARS = 2**17
# Eight tiles; with fewer, products with the state are too small a part.
_CHUNK = 128
# Enough independent work to hide the latency of the matrix units.
_MOST_HEADS = 8
# By how devices call themselves; the v5s have no instructions for reciprocals
# and roots, and matrix units of half the width.
_NARROW_GENERATIONS = ('v5e', 'v5p')


@dataclasses.dataclass(frozen=True)
class TileConfig:
  """Sizes of the unified tile.

  Attributes:
    chunk: tokens between two states, a power-of-two multiple of tile.
    tile: tokens that share one anchor row.
    max_block: bound on batch * heads * chunks whose state-independent part is
      computed at once; limits temporary memory and changes no result beyond
      rounding. See `choose_tiles`.
  """

  chunk: int = 64
  tile: int = 16
  max_block: int = _CPU_BLOCK

  def __post_init__(self):
    tiles = self.chunk // self.tile
    if self.chunk != tiles * self.tile or tiles & (tiles - 1) or tiles < 1:
      raise ValueError(
        f'chunk={self.chunk} must be tile={self.tile} times a power of two.'
      )

  def check_exponent_budget(self, lower_bound: float) -> None:
    """Raises ValueError if a tile's decay could leave the float32 range."""
    span = self.tile * -lower_bound
    if not 0 < span < EXPONENT_LIMIT:
      raise ValueError(
        f'lower_bound={lower_bound} with tile={self.tile} spans {span} nats; '
        f'accepted are spans above 0 and below {EXPONENT_LIMIT}.'
      )

  def split_tokens(self, tokens: int, batch_heads: int) -> tuple[int, int]:
    """Splits a row into blocks of chunks of almost no padding.

    Args:
      tokens: length of the row.
      batch_heads: rows times heads, which a block holds for each chunk.

    Returns:
      Number of blocks and chunks a block.
    """
    chunks = -(-tokens // self.chunk)
    blocks = -(-chunks // max(1, self.max_block // batch_heads))
    return blocks, -(-chunks // blocks)


def choose_tiles(platform: str, key_dim: int, value_dim: int) -> TileConfig:
  """Sizes for a platform: short blocks on CPU, long ones elsewhere.

  Args:
    platform: 'cpu', 'gpu' or 'tpu'.
    key_dim: channels of a key.
    value_dim: channels of a value.

  Returns:
    Sizes with which the temporaries of a block take at most 1 GiB, provided
    that a single chunk of all rows and heads does not take more.
  """
  if platform == 'cpu':
    return TileConfig()
  row_bytes = 4 * (key_dim + value_dim) * _ARRAYS_AT_ONCE
  return TileConfig(max_block=_BLOCK_BYTES // (TileConfig.chunk * row_bytes))


def array_bytes(arrays: Iterable) -> int:
  """Bytes of arrays in HBM, given by shape and dtype."""
  return sum(math.prod(s) * jnp.dtype(dtype).itemsize for s, dtype in arrays)


def padded_bytes(shape: tuple[int, ...], dtype) -> int:
  """Bytes of an array in VMEM, whose last two axes are held in whole tiles.

  A tile is 8 rows of 128 words; narrower dtypes put more rows into a word.
  """
  size = jnp.dtype(dtype).itemsize
  *outer, rows, lanes = (1, 1, *shape)
  tile_rows = 8 * max(4 // size, 1)
  rows, lanes = -(-rows // tile_rows) * tile_rows, -(-lanes // 128) * 128
  return math.prod(outer) * rows * lanes * size


def vmem_bytes(windows: Iterable, scratch: Iterable, exact: bool) -> int:
  """VMEM that a kernel takes, in bytes.

  Args:
    windows: shape and dtype of each block that is copied in or out; there are
      two of each, one of which is being copied.
    scratch: shape and dtype of each scratch.
    exact: whether operands of products are float32.
  """
  copied = sum(2 * padded_bytes(*x) for x in windows)
  spilled = _EXACT_SPILL_BYTES if exact else _SPILL_BYTES
  return copied + sum(padded_bytes(*x) for x in scratch) + spilled


def check_scalars(count: int, what: str) -> None:
  """Raises NotImplementedError if int32 scalars do not fit the SMEM."""
  if count > MOST_SCALARS:
    raise NotImplementedError(
      f'The call has {count} {what}; supported are {MOST_SCALARS}.'
    )


def device_generation() -> str:
  """TPU generation of the mesh's device, or of the default backend's.

  Returns:
    'v5e', 'v5p', 'v6e' or 'tpu7x', or the device's own name for others.
  """
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  kind = (jax.devices()[0] if device is None else device).device_kind
  kinds = {
    'TPU v5 lite': 'v5e',
    'TPU v5e': 'v5e',
    'TPU v5': 'v5p',
    'TPU v5p': 'v5p',
    'TPU v6 lite': 'v6e',
    'TPU v6e': 'v6e',
    'TPU7x': 'tpu7x',
  }
  return kinds.get(kind, kind)


def is_narrow(generation: str) -> bool:
  """Whether a generation makes reciprocals and roots of exp2 and log2."""
  return generation in _NARROW_GENERATIONS


@functools.cache
def _tuned_tiles() -> list[dict]:
  return json.loads(_TUNED.read_text(encoding='utf-8'))


def fit_heads(
  most: int,
  heads: int,
  value_heads: int,
  count_bytes: Callable[[int], int],
) -> int:
  """The most value heads a grid step that fit the VMEM.

  Args:
    most: bound on them.
    heads: of q and k.
    value_heads: of v.
    count_bytes: heads -> VMEM bytes of a grid step.

  Raises:
    NotImplementedError: not even one head fits.
  """
  group = value_heads // heads
  for count in range(min(most, value_heads), 0, -1):
    shares = count % group == 0 or group % count == 0
    if value_heads % count or not shares:
      continue
    if count_bytes(count) <= _MOST_VMEM_BYTES:
      return count
  raise NotImplementedError(
    f'One head of a chunk takes {count_bytes(1)} bytes of VMEM; supported are '
    f'{_MOST_VMEM_BYTES}: use fewer channels or chunks of fewer tokens.'
  )


class KernelTile(NamedTuple):
  """What one grid step of a kernel for TPU takes.

  Attributes:
    chunk: tokens.
    heads: value heads.
    order: tuned settings of the order of instructions, by name, or empty.
  """

  chunk: int
  heads: int
  order: dict


def choose_kernel_tile(
  generation: str,
  tokens: int,
  heads: int,
  value_heads: int,
  dims: tuple[int, int],
  count_bytes: Callable[[int, int], int],
) -> KernelTile:
  """Picks a chunk and a number of heads that fit the VMEM.

  Args:
    generation: as of `device_generation`.
    tokens: of a row.
    heads: of q and k.
    value_heads: of v.
    dims: channels of a key and of a value.
    count_bytes: (chunk, heads) -> VMEM bytes of a grid step.

  Raises:
    NotImplementedError: not even one head fits.
  """
  tuned = [
    entry
    for entry in _tuned_tiles()
    if entry['generation'] == generation
    and tuple(entry['dims']) == dims
    and value_heads % entry['heads'] == 0
  ]
  chunk = tuned[0]['chunk'] if tuned else _CHUNK
  # A short row would mostly be padding.
  chunk = chunk if tokens > chunk // 2 else chunk // 2
  count = fit_heads(
    _MOST_HEADS, heads, value_heads, lambda count: count_bytes(chunk, count)
  )
  order = {}
  for entry in tuned:
    if (entry['chunk'], entry['heads']) == (chunk, count):
      order = entry['order']
  return KernelTile(chunk, count, order)
