"""Checksums of arrays that do not depend on how the arrays are sharded.

Orbax stores no checksum of array data: a flipped bit in a data file restores
as a wrong weight without an error. The checksum here is computed on the
devices, before saving and after restoring, and compared by `checkpoint.py`.

For the bit patterns b_i of an array's elements and a hash p_i of the element's
position,

  checksum = sum_i mix(b_i xor p_i)  mod 2^32.

`mix` is a bijection of 32-bit words, so changing one element, by one bit or by
many, always changes the sum. Addition mod 2^32 is exact in any order, so the
sum is the same for every sharding, device count and reduction order. A plain
weighted sum of the words would not do: with odd weights, flipping the sign bit
of any two elements cancels. Changes of several elements, including exchanges
of two, escape with probability 2^-32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
_POSITION_SEED = 0x9E3779B9


def checksum(x: jax.Array) -> jax.Array:
  """Checksum of one array's bits; run it under `jax.jit`.

  Args:
    x: an array of any shape, empty and scalar included, of a float, integer
      or bool dtype of one to eight bytes, or of typed PRNG keys.

  Returns:
    uint32 scalar, replicated.

  Raises:
    TypeError: `x` has a dtype without a bit pattern of whole bytes.
  """
  words = _words(x)
  position = jnp.uint32(_POSITION_SEED)
  for dim in range(words.ndim):
    # Hashing one dimension at a time needs no flat index, which would wrap
    # past 2^32 elements.
    index = jax.lax.broadcasted_iota(
      jnp.uint32, words.shape, dim, out_sharding=jax.typeof(words).sharding
    )
    position = _mix(position ^ index) + jnp.uint32(dim + 1)
  return jnp.sum(_mix(words ^ position), dtype=jnp.uint32)


def checksums(arrays: Sequence[jax.Array]) -> list[int]:
  """Checksums of arrays, computed on their devices.

  Arrays of one shape, dtype and sharding share a program, of which a model of
  many like layers needs few.

  Args:
    arrays: arrays, each of any sharding.

  Returns:
    one integer in [0, 2^32) an array, the same on every process.

  Raises:
    TypeError: an array has a dtype that `checksum` rejects.
  """
  return [int(value) for value in jax.device_get([_jitted(x) for x in arrays])]


_jitted = jax.jit(checksum)


def _words(x: jax.Array) -> jax.Array:
  """The bits of `x` as uint32; 8-byte elements become a last axis of two."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  whole_bytes = x.dtype.name not in ('int2', 'int4', 'uint2', 'uint4')
  is_real = not np.issubdtype(x.dtype, np.complexfloating)
  if x.dtype.itemsize not in _UNSIGNED or not whole_bytes or not is_real:
    raise TypeError(
      f'checksum: dtype {x.dtype}: accepted are float, integer, bool and PRNG '
      'key arrays of one to eight bytes an element'
    )
  words = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
  return words.astype(jnp.uint32)


def _mix(word: jax.Array) -> jax.Array:
  """A bijection of uint32: xor-shifts and odd multiplications, alternating."""
  word ^= word >> 16
  word *= jnp.uint32(0x85EBCA6B)
  word ^= word >> 13
  word *= jnp.uint32(0xC2B2AE35)
  return word ^ (word >> 16)
