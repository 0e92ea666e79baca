"""Parameters of a Linen module: float32 masters, born where they belong."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp

from hybrid_moe import sharding

Initializer = Callable[..., jax.Array]
Path = tuple[str, ...]

# Initial values that modules declare while `recorded` is active.
_declared: contextvars.ContextVar[dict[Path, Initializer] | None] = (
  contextvars.ContextVar('declared_parameters', default=None)
)


def matrix(
  module: nn.Module,
  name: str,
  dims: str,
  shape: tuple[int, ...],
  std: float,
) -> jax.Array:
  """A weight of the module, normal with deviation `std`, split over devices.

  Args:
    module: the module that owns the parameter, inside its `@nn.compact` call.
    name: the parameter's name; the optimiser knows its role by it.
    dims: one letter a dimension, as in `sharding.parameter`.
    shape: sizes.
    std: standard deviation of the initial values.

  Returns:
    The float32 weight; `linear.py` has what multiplies by it.
  """
  return _declare(module, name, _normal(std), dims, shape)


def vector(
  module: nn.Module, name: str, shape: tuple[int, ...], init: Initializer
) -> jax.Array:
  """A small float32 parameter, replicated."""
  return _declare(module, name, init, '.' * len(shape), shape)


@contextlib.contextmanager
def recorded() -> Iterator[dict[Path, Initializer]]:
  """Collects the initialiser of every parameter that is declared inside.

  A program that initialises hundreds of parameters takes minutes to compile;
  with the initialisers at hand each shape is compiled once.
  """
  declared: dict[Path, Initializer] = {}
  token = _declared.set(declared)
  try:
    yield declared
  finally:
    _declared.reset(token)


@functools.cache
def _normal(std: float) -> Initializer:
  """One object for one deviation, so that compiled programs are found again."""
  return nn.initializers.normal(std)


def _declare(
  module: nn.Module,
  name: str,
  init: Initializer,
  dims: str,
  shape: tuple[int, ...],
) -> jax.Array:
  declared = _declared.get()
  if declared is not None:
    declared[(*module.path, name)] = init
  return module.param(
    name, sharding.born_sharded(init, dims, shape), shape, jnp.float32
  )
