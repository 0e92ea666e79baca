"""The kernels whose static schedules are kept, and what each call serves."""

import dataclasses
from collections.abc import Callable, Mapping

import jax


@dataclasses.dataclass(frozen=True)
class ScheduledKernel:
  """A call to be compiled ahead of time and measured.

  Attributes:
    name: by which figures are kept.
    function: traceable, calls one or more Pallas kernels.
    arguments: shapes and dtypes; enough grid steps that some are neither among
      the first nor among the last.
    step_token_heads: by the name given to `pallas_call`, tokens x heads that
      one turn of the kernel's outermost loop serves. Kernels add up.
    token_heads: tokens x heads that the whole call serves.
    chunk: tokens between two states; 1 for a kernel of single tokens.
    hbm_bytes: least traffic to and from HBM for a token and head.
    single_token: whether a call serves one token of each row, not all.
  """

  name: str
  function: Callable
  arguments: tuple[jax.ShapeDtypeStruct, ...]
  step_token_heads: Mapping[str, int]
  token_heads: int
  chunk: int
  hbm_bytes: float
  single_token: bool = False


def build_kernels(topology: str) -> list[ScheduledKernel]:
  """All kernels that are kept, for one topology.

  Args:
    topology: as 'v6e:2x2'.
  """
  del topology
  return []
