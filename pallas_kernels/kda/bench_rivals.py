"""Other projects' kernels for KDA, timed beside ours where they are installed.

They run on PyTorch and are never dependencies: without them the benchmark says
so and goes on.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pallas_kernels.kda import arg_specs


class RivalTimes(NamedTuple):
  """One measurement.

  Attributes:
    name: project and what its kernel covers; a bare one leaves gate, norms and
      the sigmoid of beta to others.
    label: 'forward' or 'forward+backward'.
    seconds: of a call.
    extra_bytes: peak device memory beyond the arguments.
  """

  name: str
  label: str
  seconds: float
  extra_bytes: int


def _time(torch, call: Callable, repeats: int) -> tuple[float, int]:
  """Seconds a call in a queue of several, and peak bytes beyond what was held.

  The median of three queues, by device events, after a first call.
  """
  call()
  torch.cuda.synchronize()
  held = torch.cuda.memory_allocated()
  torch.cuda.reset_peak_memory_stats()
  seconds = []
  for _ in range(3):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
      call()
    end.record()
    torch.cuda.synchronize()
    seconds.append(start.elapsed_time(end) / 1e3 / repeats)
  extra = torch.cuda.max_memory_allocated() - held
  return statistics.median(seconds), extra


def _make_arrays(torch, spec: arg_specs.ArgSpec) -> dict:
  """Arguments with the distributions of `arg_specs.make_inputs`."""
  generator = torch.Generator(device='cuda').manual_seed(0)

  def normal(*shape, deviation=1.0, dtype=torch.bfloat16):
    x = torch.randn(
      shape, generator=generator, device='cuda', dtype=torch.float32
    )
    return (x * deviation).to(dtype)

  rows = (spec.batch, spec.tokens)
  keys = (spec.heads, spec.key_dim)
  return {
    'q': normal(*rows, *keys),
    'k': normal(*rows, *keys),
    'v': normal(*rows, spec.heads, spec.value_dim),
    'g': normal(*rows, *keys, deviation=2.0),
    'beta': normal(*rows, spec.heads, deviation=2.0),
    'A_log': normal(spec.heads, deviation=0.3, dtype=torch.float32),
    'dt_bias': normal(
      spec.heads * spec.key_dim, deviation=0.3, dtype=torch.float32
    ),
  }


def _time_passes(
  torch, name: str, forward: Callable, arrays: dict, repeats, training
) -> Iterator[RivalTimes]:
  """Times a forward on arrays, in training also with its backward."""
  with torch.no_grad():
    yield RivalTimes(name, 'forward', *_time(torch, forward, repeats))
  if not training:
    return
  for x in arrays.values():
    x.requires_grad_()
  d_o = torch.ones_like(arrays['v'])

  def both():
    for x in arrays.values():
      x.grad = None
    forward().backward(d_o)

  yield RivalTimes(name, 'forward+backward', *_time(torch, both, repeats))


def _time_fla(torch, spec, repeats, training) -> Iterator[RivalTimes]:
  from fla.ops.kda import chunk_kda

  arrays = _make_arrays(torch, spec)

  def forward():
    return chunk_kda(
      **arrays,
      use_gate_in_kernel=True,
      use_qk_l2norm_in_kernel=True,
      use_beta_sigmoid_in_kernel=True,
      safe_gate=True,
      lower_bound=-5.0,
    )[0]

  yield from _time_passes(torch, 'FLA', forward, arrays, repeats, training)


def _time_cudnn(torch, spec, repeats, training) -> Iterator[RivalTimes]:
  from cudnn.linear_attention.ops import kimi_delta_attention

  arrays = {
    name: x.flatten(0, 1) if x.dim() > 2 else x
    for name, x in _make_arrays(torch, spec).items()
  }
  bounds = torch.arange(spec.batch + 1, device='cuda', dtype=torch.int32)
  bounds = bounds * spec.tokens
  A_log = arrays.pop('A_log')
  dt_bias = arrays.pop('dt_bias').reshape(spec.heads, spec.key_dim)

  def fused(dtype):
    gate = arrays['g'].to(dtype)

    def call():
      return kimi_delta_attention(
        **{**arrays, 'g': gate},
        cu_seqlens=bounds,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        gate_lower_bound=-5.0,
        a_log=A_log,
        dt_bias=dt_bias,
      )

    return call

  with torch.no_grad():
    for dtype in (torch.bfloat16, torch.float32):
      name = f'cuDNN frontend, {str(dtype).removeprefix("torch.")} gate'
      yield RivalTimes(name, 'forward', *_time(torch, fused(dtype), repeats))
    normal = torch.nn.functional.normalize
    ready = {
      'q': normal(arrays['q'].float(), dim=-1).bfloat16(),
      'k': normal(arrays['k'].float(), dim=-1).bfloat16(),
      'v': arrays['v'],
      'g': -5.0 * torch.sigmoid(arrays['g'].float()),
      'beta': torch.sigmoid(arrays['beta'].float()),
    }

  def bare():
    result = kimi_delta_attention(**ready, cu_seqlens=bounds)
    return result[0] if isinstance(result, tuple) else result

  name = 'cuDNN frontend, bare'
  yield from _time_passes(torch, name, bare, ready, repeats, training)


def time_rivals(
  spec: arg_specs.ArgSpec, repeats: int, training: bool
) -> Iterator[RivalTimes | str]:
  """Times what is installed; says in words what is not or fails."""
  try:
    import torch
  except ImportError:
    yield 'PyTorch is not installed: no rivals'
    return
  if not torch.cuda.is_available():
    yield 'PyTorch sees no GPU: no rivals'
    return
  if spec.value_heads != spec.heads:
    yield f'{spec.value_heads} value heads on {spec.heads}: rivals need as many'
    return
  for name, measure in (('FLA', _time_fla), ('cuDNN frontend', _time_cudnn)):
    try:
      yield from measure(torch, spec, repeats, training)
    except Exception as error:
      yield f'{name}: {type(error).__name__}: {str(error).splitlines()[:1]}'
    torch.cuda.empty_cache()
