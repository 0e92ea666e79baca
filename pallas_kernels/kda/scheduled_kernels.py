"""The kernels whose static schedules are kept, and what each call serves."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda import (
  flat_arrays,
  mosaic_tpu_bwd,
  mosaic_tpu_decode,
  mosaic_tpu_fwd,
  mosaic_tpu_op,
  mosaic_tpu_summary,
  operands,
  tpu_generations,
)


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


# Enough for a turn that is neither among the first nor among the last.
_CHUNKS = 8
_CHUNK = 128
_STEP_HEADS = 8
_TAPS = 4

_CONFIG = operands.KdaConfig(
  lower_bound=-5.0,
  scale=_HEAD_DIM**-0.5,
  qk_l2norm=True,
  beta_sigmoid=True,
  allow_neg_eigval=False,
  gate_in_kernel=True,
  precision='default',
)


def _operands(tokens: int, heads: int) -> operands.Operands:
  """Shapes of a row of tokens, bfloat16."""
  row = jax.ShapeDtypeStruct((1, tokens, heads, _HEAD_DIM), jnp.bfloat16)
  return operands.Operands(
    q_BTHK=row,
    k_BTHK=row,
    v_BTHV=row,
    g_BTHK=row,
    beta_BTH=jax.ShapeDtypeStruct(row.shape[:-1], jnp.bfloat16),
    A_log_H=jax.ShapeDtypeStruct((heads,), jnp.float32),
    dt_bias_HK=jax.ShapeDtypeStruct((heads, _HEAD_DIM), jnp.float32),
    h0_BHKV=None,
  )


def _choose_settings(arrays: operands.Operands) -> mosaic_tpu_fwd.TpuConfig:
  """What the operator takes for these shapes on the mesh's device.

  Raises:
    ValueError: it is not what the figures are counted for.
  """
  packing = operands.Packing(None, None, None)
  settings = mosaic_tpu_op.choose_settings(arrays, packing, _CONFIG)
  if (settings.chunk, settings.heads) != (_CHUNK, _STEP_HEADS):
    raise ValueError(
      f'The kernels take {settings.chunk} tokens of {settings.heads} heads a '
      f'step; figures are counted for {_CHUNK} of {_STEP_HEADS}.'
    )
  return settings


def _forward(_: str) -> ScheduledKernel:
  """The forward of documents that fill their rows, no state saved."""
  arrays = _operands(_CHUNKS * _CHUNK, _STEP_HEADS)

  def run(arrays):
    settings = _choose_settings(arrays)
    flat = flat_arrays.flatten(arrays)
    taps = flat_arrays.flatten_taps(arrays)
    return mosaic_tpu_fwd.forward_call(settings, *flat, taps=taps)

  return ScheduledKernel(
    name='fwd',
    function=run,
    arguments=(arrays,),
    step_token_heads={'kda_forward': _CHUNK * _STEP_HEADS},
    token_heads=_CHUNKS * _CHUNK * _STEP_HEADS,
    chunk=_CHUNK,
    # q, k, v, g and o, and beta.
    hbm_bytes=5 * 2 * _HEAD_DIM + 2,
  )


def _with_taps(arrays: operands.Operands) -> operands.Operands:
  """The same with convolutions of four taps."""
  taps = jax.ShapeDtypeStruct((_TAPS, *arrays.q_BTHK.shape[2:]), jnp.float32)
  return arrays._replace(conv=operands.ConvTaps(taps, taps, taps))


def _forward_conv(topology: str) -> ScheduledKernel:
  """The forward that convolves q, k and v."""
  plain = _forward(topology)
  (arrays,) = plain.arguments
  return dataclasses.replace(
    plain, name='fwd_conv', arguments=(_with_taps(arrays),)
  )


def _backward(_: str) -> ScheduledKernel:
  """The backward, which recomputes all but the states before each chunk."""
  arrays = _operands(_CHUNKS * _CHUNK, _STEP_HEADS)
  states = (1, _CHUNKS, _STEP_HEADS, _HEAD_DIM, _HEAD_DIM)

  def run(arrays, states, d_o, d_final):
    settings = _choose_settings(arrays)
    flat = flat_arrays.flatten(arrays)
    taps = flat_arrays.flatten_taps(arrays)
    d_o = d_o.reshape(flat.v.shape)
    return mosaic_tpu_bwd.backward_call(
      settings, *flat, states, d_o, d_final, taps=taps
    )

  return ScheduledKernel(
    name='bwd',
    function=run,
    arguments=(
      arrays,
      jax.ShapeDtypeStruct(states, jnp.bfloat16),
      arrays.v_BTHV,
      jax.ShapeDtypeStruct((1, *states[2:]), jnp.float32),
    ),
    step_token_heads={'kda_backward': _CHUNK * _STEP_HEADS},
    token_heads=_CHUNKS * _CHUNK * _STEP_HEADS,
    chunk=_CHUNK,
    # q, k, v, g, dO, the states, and the gradients of q, k, v and g.
    hbm_bytes=2 * (9 * _HEAD_DIM + _HEAD_DIM**2 // _CHUNK + 2),
  )


def _backward_conv(topology: str) -> ScheduledKernel:
  """The backward of the forward that convolves."""
  plain = _backward(topology)
  arrays, *others = plain.arguments
  return dataclasses.replace(
    plain,
    name='bwd_conv',
    arguments=(_with_taps(arrays), *others),
    # And a tile of the inputs of q, k and v before each chunk.
    hbm_bytes=plain.hbm_bytes + 3 * 2 * _HEAD_DIM * 16 / _CHUNK,
  )


def _summary(_: str) -> ScheduledKernel:
  """What a fragment makes of the state, for context parallelism."""
  arrays = _operands(_CHUNKS * _CHUNK, _STEP_HEADS)

  def run(arrays):
    settings = _choose_settings(arrays)
    _, *flat = flat_arrays.flatten(arrays)
    return mosaic_tpu_summary.summary_call(settings, *flat)

  return ScheduledKernel(
    name='summary',
    function=run,
    arguments=(arrays,),
    step_token_heads={'kda_summary': _CHUNK * _STEP_HEADS},
    token_heads=_CHUNKS * _CHUNK * _STEP_HEADS,
    chunk=_CHUNK,
    # k, v and g, and beta.
    hbm_bytes=3 * 2 * _HEAD_DIM + 2,
  )


def _summary_reverse(_: str) -> ScheduledKernel:
  """The gradient of the state that enters a fragment, by its outputs."""
  arrays = _operands(_CHUNKS * _CHUNK, _STEP_HEADS)

  def run(arrays):
    settings = _choose_settings(arrays)
    # The gradients of the outputs come in the place of the values.
    flat = flat_arrays.flatten(arrays)
    return mosaic_tpu_summary.summary_reverse_call(settings, *flat)

  return ScheduledKernel(
    name='summary_reverse',
    function=run,
    arguments=(arrays,),
    step_token_heads={'kda_summary_reverse': _CHUNK * _STEP_HEADS},
    token_heads=_CHUNKS * _CHUNK * _STEP_HEADS,
    chunk=_CHUNK,
    # q, k, g and dO, and beta.
    hbm_bytes=4 * 2 * _HEAD_DIM + 2,
  )


def _decode(topology: str) -> ScheduledKernel:
  """One token of 16 requests, float32 states."""
  requests, slots = 16, 32
  shapes = _operands(1, _HEADS)
  arrays = shapes._replace(
    **{
      name: jax.ShapeDtypeStruct((requests, *x.shape[1:]), x.dtype)
      for name, x in shapes._asdict().items()
      if name in ('q_BTHK', 'k_BTHK', 'v_BTHV', 'g_BTHK', 'beta_BTH')
    }
  )
  states = jax.ShapeDtypeStruct(
    (slots, _HEADS, _HEAD_DIM, _HEAD_DIM), jnp.float32
  )
  config = dataclasses.replace(_CONFIG, precision='highest')
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
  return [
    build(topology)
    for build in (
      _forward,
      _forward_conv,
      _backward,
      _backward_conv,
      _summary,
      _summary_reverse,
      _decode,
    )
  ]
