"""The kernels whose static schedules are kept, and what each call serves."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda import mosaic_tpu_decode, operands, tpu_generations


@dataclasses.dataclass(frozen=True)
class ScheduledKernel:
  """A call to be compiled ahead of time and measured.

  Attributes:
    name: by which figures are kept.
    function: traceable, calls one or more Pallas kernels.
    arguments: trees of shapes and dtypes; enough grid steps that some are
      neither among the first nor among the last.
    step_token_heads: by the name given to `pallas_call`, tokens x heads that
      one turn of the kernel's outermost loop serves. Kernels add up.
    token_heads: tokens x heads that the whole call serves.
    chunk: tokens between two states; 1 for a kernel of single tokens.
    hbm_bytes: least traffic to and from HBM for a token and head.
    single_token: whether a call serves one token of each row, not all.
  """

  name: str
  function: Callable
  arguments: tuple[Any, ...]
  step_token_heads: Mapping[str, int]
  token_heads: int
  chunk: int
  hbm_bytes: float
  single_token: bool = False


# Of the models in `hybrid_moe`; K = V = 128.
_HEADS = 32
_HEAD_DIM = 128


def _decode(topology: str) -> ScheduledKernel:
  """One token of 16 requests, float32 states."""
  requests, slots = 16, 32
  row = jax.ShapeDtypeStruct((requests, 1, _HEADS, _HEAD_DIM), jnp.bfloat16)
  arrays = operands.Operands(
    q_BTHK=row,
    k_BTHK=row,
    v_BTHV=row,
    g_BTHK=row,
    beta_BTH=jax.ShapeDtypeStruct(row.shape[:-1], jnp.bfloat16),
    A_log_H=jax.ShapeDtypeStruct((_HEADS,), jnp.float32),
    dt_bias_HK=jax.ShapeDtypeStruct((_HEADS, _HEAD_DIM), jnp.float32),
    h0_BHKV=None,
  )
  states = jax.ShapeDtypeStruct(
    (slots, _HEADS, _HEAD_DIM, _HEAD_DIM), jnp.float32
  )
  config = operands.KdaConfig(
    lower_bound=-5.0,
    scale=_HEAD_DIM**-0.5,
    qk_l2norm=True,
    beta_sigmoid=True,
    allow_neg_eigval=False,
    gate_in_kernel=True,
    precision='highest',
  )
  # Cores of a device share the heads of each request.
  cores = tpu_generations.find_generation(topology).cores_per_device
  state_bytes = 2 * 4 * _HEAD_DIM**2
  return ScheduledKernel(
    name='decode',
    function=functools.partial(
      mosaic_tpu_decode.kda_decode_mosaic_tpu, config=config
    ),
    arguments=(
      arrays,
      states,
      jax.ShapeDtypeStruct((requests,), jnp.int32),
      jax.ShapeDtypeStruct((requests, 1), jnp.int32),
    ),
    step_token_heads={'kda_decode': _HEADS // cores},
    token_heads=requests * _HEADS,
    chunk=1,
    # The state in and out, and q, k, v, g and o.
    hbm_bytes=state_bytes + 5 * 2 * _HEAD_DIM,
    single_token=True,
  )


def build_kernels(topology: str) -> list[ScheduledKernel]:
  """All kernels that are kept, for one topology.

  Args:
    topology: as 'v6e:2x2'.
  """
  return [_decode(topology)]
