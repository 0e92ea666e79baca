"""Arguments that KDA refuses, and how it picks an implementation."""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from pallas_kernels import target
from pallas_kernels.kda import IMPLEMENTATIONS, api, arg_specs, bench, kda, tile

SPEC = arg_specs.ArgSpec(1, 20, 2, 4, 32, 64)


@functools.cache
def abstract_inputs():
  return arg_specs.abstract_inputs(SPEC)


def of(shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def trace(**changes):
  """Traces a call whose arrays are all abstract."""
  arguments = {**abstract_inputs(), **changes}
  arrays = {k: v for k, v in arguments.items() if hasattr(v, 'shape')}
  options = {k: v for k, v in arguments.items() if k not in arrays}
  return jax.eval_shape(lambda arrays: kda(**arrays, **options), arrays)


@contextlib.contextmanager
def tpu_mesh(devices):
  """A mesh of TPUs to trace for; none is there."""
  types = jax.make_mesh((8,), ('data',)).axis_types
  device = jax.sharding.AbstractDevice('TPU v5 lite', 1, 'tpu')
  mesh = jax.sharding.AbstractMesh(
    (devices,), ('data',), types, abstract_device=device
  )
  with jax.sharding.use_abstract_mesh(mesh):
    yield


class KdaApiTest(parameterized.TestCase):
  def test_accepts_what_the_refusals_start_from(self):
    self.assertEqual(trace().shape, (1, 20, 4, 64))

  @parameterized.parameters(
    ('q', of((1, 20, 32)), r'q has shape \(1, 20, 32\)'),
    ('q', of((1, 0, 2, 32)), r'needs a batch and tokens'),
    ('k', of((1, 20, 4, 32)), r'k has shape .* accepted is \(1, 20, 2, 32\)'),
    ('k', of((1, 20, 2, 32), jnp.bfloat16), 'k has dtype bfloat16'),
    ('q', of((1, 20, 2, 32), jnp.float16), 'q has dtype float16'),
    ('v', of((1, 20, 3, 64)), 'accepted is a multiple of the 2 heads'),
    ('v', of((1, 20, 4, 512)), 'accepted head dims are 32 to 256'),
    ('g', of((1, 20, 4, 64)), r'g has shape .* accepted is \(1, 20, 4, 32\)'),
    ('beta', of((1, 20, 2)), r'beta has shape .* accepted is \(1, 20, 4\)'),
    ('beta', of((1, 20, 4), jnp.int32), 'beta has dtype int32'),
    ('A_log', of((2,)), r'A_log has shape \(2,\)'),
    ('dt_bias', of((4, 32), jnp.bfloat16), 'dt_bias has dtype bfloat16'),
    ('h0', of((1, 4, 64, 32)), r'accepted is \(1, 4, 32, 64\)'),
    ('segment_ids', of((1, 19), jnp.int32), 'segment_ids has shape'),
    ('segment_ids', of((1, 20)), 'segment_ids has dtype float32'),
    ('cu_seqlens', of((1,), jnp.int32), 'cu_seqlens has shape'),
    ('lower_bound', -5.5, r'lower_bound=-5.5 .* \[-5, 0\)'),
    ('lower_bound', 0.0, r'lower_bound=0.0'),
    ('precision', 'double', "precision='double' is not one of"),
    ('state_layout', 'hk', "state_layout='hk' is not one of"),
    ('implementation', 'triton', "implementation='triton' is not one of"),
    ('gate_in_kernel', False, 'A_log of shape .* gate_in_kernel=False'),
  )
  def test_refuses(self, name, value, message):
    with self.assertRaisesRegex(ValueError, message):
      trace(**{name: value})

  def test_refuses_combinations(self):
    bounds, ids = of((3,), jnp.int32), of((1, 20), jnp.int32)
    with self.assertRaisesRegex(ValueError, 'exclude each other'):
      trace(cu_seqlens=bounds, segment_ids=ids)
    with self.assertRaisesRegex(ValueError, r'accepted is \(2, 4, 32, 64\)'):
      trace(cu_seqlens=bounds)
    with self.assertRaisesRegex(ValueError, 'beta_sigmoid=True'):
      trace(allow_neg_eigval=True, beta_sigmoid=False)
    spec = arg_specs.ArgSpec(2, 20, 1, 1, 32, 32)
    with self.assertRaisesRegex(ValueError, 'needs a batch of 1'):
      trace(**arg_specs.abstract_inputs(spec), cu_seqlens=bounds)

  @parameterized.parameters(
    ('v_conv', None, 'v_conv=None, but others of q_conv, k_conv, v_conv'),
    ('q_conv', of((4, 64)), r'q_conv has shape \(4, 64\); accepted is \[taps'),
    ('q_conv', of((0, 2, 32)), 'with at least one tap'),
    ('k_conv', of((3, 2, 32)), 'k_conv has 3 taps; accepted are 4, as q_conv'),
    ('v_conv', of((4, 2, 64)), r'v_conv has shape .* \[taps, 4, 64\]'),
    ('v_conv', of((4, 4, 64), jnp.bfloat16), 'v_conv has dtype bfloat16'),
  )
  def test_refuses_taps(self, name, value, message):
    taps = dict(
      q_conv=of((4, 2, 32)), k_conv=of((4, 2, 32)), v_conv=of((4, 4, 64))
    )
    self.assertEqual(trace(**taps).shape, (1, 20, 4, 64))
    with self.assertRaisesRegex(ValueError, message):
      trace(**{**taps, name: value})
    with self.assertRaisesRegex(ValueError, 'must be an array, not list'):
      jax.eval_shape(
        lambda x: kda(**x, q_conv=[1], k_conv=[1], v_conv=[1]),
        abstract_inputs(),
      )

  @parameterized.parameters(([0, 30],), ([5, 3, 20],), ([-1, 20],))
  def test_refuses_bounds_it_can_read(self, bounds):
    inputs = {k: v for k, v in abstract_inputs().items() if k != 'h0'}
    bounds = jnp.asarray(bounds, jnp.int32)
    with self.assertRaisesRegex(ValueError, 'must rise from at least 0'):
      jax.eval_shape(lambda x: kda(**x, cu_seqlens=bounds), inputs)
    with self.assertRaisesRegex(ValueError, 'must be an array, not list'):
      jax.eval_shape(lambda x: kda(**x, cu_seqlens=[0, 20]), inputs)

  def test_refuses_what_is_not_available(self):
    with self.assertRaisesRegex(NotImplementedError, "cp_axis='seq'"):
      trace(cp_axis='seq')
    with self.assertRaisesRegex(NotImplementedError, 'lower_bound=None: .*-5'):
      trace(implementation='mosaic_tpu', lower_bound=None)
    with self.assertRaisesRegex(NotImplementedError, 'do not run on cpu'):
      trace(implementation='mosaic_tpu')
    with mock.patch.object(tile, '_MOST_VMEM_BYTES', 2**20):
      with self.assertRaisesRegex(NotImplementedError, 'of VMEM; supported'):
        trace(implementation='mosaic_tpu')

  def test_the_mesh_picks_the_platform(self):
    self.assertEqual(target.target_platform(), 'cpu')
    with tpu_mesh(4):
      self.assertEqual(target.target_platform(), 'tpu')

  def test_the_default_is_logged_once(self):
    api._log_default.cache_clear()
    with self.assertLogs('pallas_kernels.kda.api', 'INFO') as logs:
      trace()
      trace()
    self.assertLen(logs.output, 1)
    self.assertIn('kda on cpu runs as chunked_xla', logs.output[0])

  @parameterized.parameters(
    (1, {}, 'kda on tpu runs as mosaic_tpu$'),
    (1, {'lower_bound': None}, 'as chunked_xla, because lower_bound=None'),
    (4, {}, "as chunked_xla, because mesh axis 'data' of size 4 is not manual"),
  )
  def test_the_default_on_tpu(self, devices, options, message):
    api._log_default.cache_clear()
    with self.assertLogs('pallas_kernels.kda.api', 'INFO') as logs:
      with tpu_mesh(devices):
        trace(**options)
    self.assertRegex(logs.output[0], message)
    for implementation in ('chunked_xla', 'mosaic_tpu'):
      self.assertIn(implementation, IMPLEMENTATIONS)

  def test_named_shapes_are_accepted(self):
    for spec in arg_specs.SPECS.values():
      inputs = arg_specs.abstract_inputs(spec)
      o = jax.eval_shape(lambda x: kda(**x), inputs)
      self.assertEqual(o.shape, inputs['v'].shape)

  def test_bench_programs_run(self):
    spec = arg_specs.ArgSpec(1, 20, 1, 1, 32, 32)
    inputs = arg_specs.make_inputs(spec)
    forward, both = bench.make_programs('reference')
    self.assertLen(bench.time_call(forward, inputs, 2), 2)
    value, _ = both(inputs)
    self.assertAlmostEqual(float(value), float(jnp.sum(forward(inputs))), 4)


if __name__ == '__main__':
  absltest.main()
