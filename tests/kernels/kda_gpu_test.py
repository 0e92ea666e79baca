"""KDA's kernels for Hopper, interpreted on the CPU and lowered for GPUs."""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import target
from pallas_kernels.kda import (
  agreement,
  api,
  arg_specs,
  checks,
  kda,
  mosaic_gpu_op,
  tile,
)

QUICK = (('xla_backend_optimization_level', 0),)
TOKEN_ARRAYS = ('q', 'k', 'v', 'g', 'beta')
# Those of the public tests of this operator for GPU.
BOUNDS = {
  **dict.fromkeys(('o', 'final'), 5e-3),
  **dict.fromkeys(('q', 'k', 'v', 'h0', 'dt_bias'), 8e-3),
  **dict.fromkeys(('g', 'beta', 'A_log'), 1.5e-2),
}


def interpreted():
  """Fails on races, unwritten memory in a result and reads out of bounds."""
  return plgpu.force_gpu_interpret_mode(
    plgpu.InterpretGPUParams(
      detect_races=True,
      on_race='raise',
      uninitialized_memory='nan',
      out_of_bounds_reads='raise',
    )
  )


def make_inputs(tokens, heads=1, value_heads=1, dims=(64, 64), gate=None):
  spec = arg_specs.ArgSpec(1, tokens, heads, value_heads, *dims, 'bfloat16')
  inputs = arg_specs.make_inputs(spec)
  if gate is not None:
    inputs['g'] = jnp.full_like(inputs['g'], gate)
  return inputs


def cut(inputs, start, stop):
  return {
    name: x[:, start:stop] if name in TOKEN_ARRAYS else x
    for name, x in inputs.items()
  }


@functools.partial(jax.jit, static_argnames=('implementation', 'dtype'))
def _run(inputs, indices, implementation, dtype):
  inputs = {
    name: x.astype(dtype) if name in TOKEN_ARRAYS and name != 'g' else x
    for name, x in inputs.items()
  }
  return kda(
    **inputs,
    **indices,
    return_final_state=True,
    implementation=implementation,
  )


def run(inputs, **indices):
  with interpreted():
    call = _run(inputs, indices, 'mosaic_gpu', jnp.bfloat16)
    return jax.block_until_ready(call)


def run_reference(inputs, **indices):
  return _run(inputs, indices, 'reference', jnp.float32)


class KdaGpuTest(parameterized.TestCase):
  def check(self, inputs, bounds=BOUNDS, **kwargs):
    with interpreted():
      errors = agreement.compare_with_reference(
        inputs, 'mosaic_gpu', compiler_options=QUICK, **kwargs
      )
    for name, error in errors.items():
      self.assertLess(error, bounds[name], f'{name}: {errors}')

  def assert_close(self, got, want, bound=5e-3):
    for x, y in zip(got, want):
      self.assertLess(agreement.relative_rms(x, y), bound)

  @parameterized.parameters('random', 30, 5, -30)
  def test_gate_regimes(self, gate):
    inputs = make_inputs(150, 1, 2, gate=None if gate == 'random' else gate)
    hard = gate == -30
    self.check(inputs, {k: x * (1 + hard) for k, x in BOUNDS.items()})

  @parameterized.parameters(
    (1, {}),
    (64, {}),
    (200, {'dims': (100, 60)}),
    (70, {'dims': (128, 256)}),
    (70, {'heads': 2, 'value_heads': 4, 'dims': (128, 128)}),
  )
  def test_lengths_and_heads(self, tokens, shape):
    inputs = make_inputs(tokens, **shape)
    got, want = run(inputs), run_reference(inputs)
    self.assert_close(got, want)

  def test_two_parts_of_values_a_block(self):
    inputs = make_inputs(150, dims=(128, 128))
    with mock.patch.object(mosaic_gpu_op, '_BLOCKS_AT_ONCE', 1):
      self.check(inputs)

  def test_ready_gate_and_keys(self):
    inputs = make_inputs(100)
    del inputs['A_log'], inputs['dt_bias']
    inputs['g'] = -5 * jax.nn.sigmoid(inputs['g'].astype(jnp.float32))
    inputs['q'], inputs['k'] = inputs['q'] / 8, inputs['k'] / 8
    self.check(inputs, gate_in_kernel=False, qk_l2norm=False, scale=0.5)

  def test_rows_without_initial_states(self):
    spec = arg_specs.ArgSpec(2, 128, 1, 2, 64, 64, 'bfloat16')
    inputs = arg_specs.make_inputs(spec)
    del inputs['h0']
    self.check(inputs)

  def test_convolution_in_front(self):
    inputs = make_inputs(130, dims=(64, 32))
    ids = jnp.asarray([[1] * 20 + [0] * 9 + [2] * 101], jnp.int32)
    padding = (ids == 0)[..., None, None]
    poisoned = {
      name: jnp.where(padding, jnp.nan, x) if name in 'qkv' else x
      for name, x in inputs.items()
    }
    rng = np.random.default_rng(0)
    taps = {
      f'{name}_conv': jnp.asarray(
        rng.standard_normal((4, 1, inputs[name].shape[-1])), jnp.float32
      )
      for name in 'qkv'
    }
    with interpreted():
      o = jax.jit(
        functools.partial(kda, segment_ids=ids, implementation='mosaic_gpu')
      )(**poisoned, **taps)
    want = kda(**inputs, **taps, segment_ids=ids, implementation='reference')
    self.assertLess(agreement.relative_rms(o, want), 8e-3)

  @parameterized.parameters('fast', 'default')
  def test_correlated_keys_under_slow_decay(self, precision):
    inputs = make_inputs(320, dims=(128, 128), gate=-8)
    inputs['k'] = (jnp.abs(inputs['k']) + 1).astype(jnp.bfloat16)
    with interpreted():
      o = jax.jit(
        functools.partial(kda, implementation='mosaic_gpu', precision=precision)
      )(**inputs)
    want, _ = run_reference(inputs)
    bound = {'fast': 1.5e-2, 'default': 8e-3}[precision]
    self.assertLess(agreement.relative_rms(o, want), bound)

  def test_documents_and_padding_that_holds_anything(self):
    lengths = (1, 15, 17, 64, 40, 3)
    ids = np.repeat(np.arange(len(lengths)) + 1, lengths)
    ids[70:80] = ids[-7:] = 0
    ids = jnp.asarray(ids[None], jnp.int32)
    clean = make_inputs(ids.shape[1], 1, 2, dims=(64, 32))
    poisoned = dict(clean)
    poisons = (jnp.nan, jnp.inf, jnp.nan, -jnp.inf, jnp.nan)
    for name, poison in zip(TOKEN_ARRAYS, poisons):
      padding = jax.lax.expand_dims(ids == 0, range(2, clean[name].ndim))
      clean[name] = jnp.where(padding, 0, clean[name])
      poisoned[name] = jnp.where(padding, poison, clean[name])
    self.check(poisoned, reference_inputs=clean, segment_ids=ids)

  def test_sequences_of_any_length(self):
    bounds = jnp.asarray([2, 2, 67, 68, 131, 131], jnp.int32)
    inputs = make_inputs(140, 1, 2, dims=(64, 32))
    h0 = inputs['h0']
    inputs['h0'] = jnp.concatenate([h0 * (i + 1) for i in range(5)])
    self.check(inputs, cu_seqlens=bounds)

  def test_later_tokens_change_nothing_before_them(self):
    inputs = make_inputs(140)
    changed = {
      name: x.at[:, 90:].set(x[:, 90:] * 3 + 1) if name in TOKEN_ARRAYS else x
      for name, x in inputs.items()
    }
    (o, _), (other, _) = run(inputs), run(changed)
    np.testing.assert_array_equal(o[:, :90], other[:, :90])
    self.assertGreater(float(jnp.max(jnp.abs(o - other)[:, 90:])), 0)

  def test_pieces_equal_one_call(self):
    inputs = make_inputs(192)
    o, final = run(inputs)
    first, state = run(cut(inputs, 0, 128))
    second, last = run({**cut(inputs, 128, 192), 'h0': state})
    self.assert_close((first, second), (o[:, :128], o[:, 128:]), 1e-6)
    self.assert_close([last], [final], 1e-6)

  def test_blocks_of_the_backward_pad_primes_alone(self):
    tiles = tile.choose_tiles('gpu', 128, 128)
    for chunks in (1, 127, 128, 1024, 16384):
      for heads in (1, 32, 96):
        blocks, size = mosaic_gpu_op.split_chunks(chunks, tiles, heads)
        padded = chunks == 127 and blocks > 1
        self.assertEqual(blocks * size > chunks, padded)
        self.assertLess(blocks * size, chunks + blocks)

  def test_refuses_what_is_not_supported(self):
    inputs = make_inputs(20)
    for change, options, message in (
      ({'v': jnp.float32}, {}, 'q, k and v in float32: .* support bfloat16'),
      ({}, {'lower_bound': None}, 'lower_bound=None: .* bounded gates'),
      ({}, {'precision': 'highest'}, "'highest': .* 'fast' and 'default'"),
      ({}, {'allow_neg_eigval': True}, 'allow_neg_eigval=True: .* up to 1'),
      ({}, {'beta_sigmoid': False}, 'beta_sigmoid=False: .* made of logits'),
    ):
      call = dict(inputs)
      if change:
        call |= {name: call[name].astype(jnp.float32) for name in 'qkv'}
      with interpreted(), self.assertRaisesRegex(NotImplementedError, message):
        kda(**call, **options, implementation='mosaic_gpu')
    wide = make_inputs(20, dims=(256, 64))
    message = '256 channels of keys'
    with interpreted(), self.assertRaisesRegex(NotImplementedError, message):
      kda(**wide, implementation='mosaic_gpu')

  def test_refuses_other_devices(self):
    call = functools.partial(
      kda, **make_inputs(20), implementation='mosaic_gpu'
    )
    message = 'do not run on cpu; supported are Hopper GPUs'
    with self.assertRaisesRegex(NotImplementedError, message):
      call()
    with (
      mock.patch.object(target, 'target_platform', lambda: 'gpu'),
      mock.patch.object(tile, 'device_generation', lambda: 'NVIDIA A100'),
      self.assertRaisesRegex(NotImplementedError, 'Hopper, and this is .*A100'),
    ):
      call()

  @parameterized.parameters(
    ('NVIDIA H200', {}, 'kda on gpu runs as mosaic_gpu$'),
    (
      'NVIDIA A100',
      {},
      'as chunked_xla, because .* Hopper, and this is .*A100',
    ),
    (
      'NVIDIA H100 80GB HBM3',
      {'lower_bound': None},
      'as chunked_xla, because lower_bound=None',
    ),
  )
  def test_the_default_on_gpu(self, device, options, message):
    api._log_default.cache_clear()
    inputs = make_inputs(20)
    with contextlib.ExitStack() as stack:
      enter = stack.enter_context
      enter(mock.patch.object(target, 'target_platform', lambda: 'gpu'))
      enter(mock.patch.object(tile, 'device_generation', lambda: device))
      logs = enter(self.assertLogs('pallas_kernels.kda.api', 'INFO'))
      jax.eval_shape(functools.partial(kda, **options), **inputs)
    self.assertRegex(logs.output[0], message)


class KdaGpuLoweringTest(parameterized.TestCase):
  """Lowering checks layouts, shared memory and accesses to its banks."""

  def lower(self, call, *args):
    with (
      mock.patch.object(checks, 'check_kernel_target'),
      mock.patch.object(mosaic_gpu_op, 'find_other_device', lambda: None),
    ):
      traced = jax.jit(call).trace(*args)
      text = traced.lower(lowering_platforms=('cuda',)).as_text()
    for kernel in ('kda_prepare', 'kda_chain'):
      self.assertIn(kernel, text)

  def abstract(self, tokens=256, dims=(128, 128), gate='bfloat16'):
    spec = arg_specs.ArgSpec(1, tokens, 2, 4, *dims, 'bfloat16')
    inputs = arg_specs.abstract_inputs(spec)
    shape = inputs['g'].shape
    return {**inputs, 'g': jax.ShapeDtypeStruct(shape, jnp.dtype(gate))}

  @parameterized.parameters(
    {},
    {'dims': (64, 64)},
    {'dims': (128, 256)},
    {'gate': 'float32'},
    {'tokens': 1_048_576},
    {'blocks': 1},
    {'states': False},
  )
  def test_forward_and_gradient(self, blocks=132, states=True, **shape):
    def loss(inputs):
      o, final = kda(
        **inputs, return_final_state=True, implementation='mosaic_gpu'
      )
      return jnp.sum(o.astype(jnp.float32)) + jnp.sum(final)

    with mock.patch.object(mosaic_gpu_op, '_BLOCKS_AT_ONCE', blocks):
      inputs = self.abstract(**shape)
      if not states:
        del inputs['h0']
      self.lower(jax.grad(loss), inputs)

  @parameterized.parameters(1, 132)
  def test_documents(self, blocks):
    call = functools.partial(kda, implementation='mosaic_gpu')
    ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    with mock.patch.object(mosaic_gpu_op, '_BLOCKS_AT_ONCE', blocks):
      self.lower(
        lambda x, ids: call(**x, segment_ids=ids), self.abstract(), ids
      )

  def test_vmap(self):
    call = functools.partial(kda, implementation='mosaic_gpu')
    inputs = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), self.abstract()
    )
    self.lower(jax.vmap(lambda x: call(**x)), inputs)

  def test_shard_map(self):
    mesh = jax.make_mesh(
      (2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    parameters = ('A_log', 'dt_bias')
    inputs = self.abstract()
    specs = {name: P() if name in parameters else P('data') for name in inputs}
    inputs = {
      name: x
      if name in parameters
      else jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype)
      for name, x in inputs.items()
    }

    def local(inputs):
      o = kda(**inputs, implementation='mosaic_gpu')
      return jax.lax.psum(jnp.sum(o.astype(jnp.float32)), 'data')

    run = jax.shard_map(
      jax.grad(local), mesh=mesh, in_specs=(specs,), out_specs=specs
    )
    self.lower(run, inputs)


if __name__ == '__main__':
  absltest.main()
