"""KDA under jit, vmap, checkpoint, shard_map and an explicit mesh."""

import functools
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import agreement, arg_specs, custom_vjp, kda

_interpreter = runpy.run_path(
  pathlib.Path(__file__).with_name('tpu_interpreter.py')
)
interpreted, discharged = (
  _interpreter['interpreted'],
  _interpreter['discharged'],
)

CHUNKED = ('chunked_xla', 'mosaic_tpu')
QUICK = {'xla_backend_optimization_level': 0}
TAPS = ('q_conv', 'k_conv', 'v_conv')
PARAMETERS = ('A_log', 'dt_bias', *TAPS)


@functools.cache
def make_inputs(batch=8):
  spec = arg_specs.ArgSpec(batch, 70, 2, 2, 32, 32)
  inputs = arg_specs.make_inputs(spec)
  rng = np.random.default_rng(1)
  for name in TAPS:
    inputs[name] = jnp.asarray(rng.normal(size=(4, 2, 32)), jnp.float32)
  return inputs


@functools.cache
def make_segments(batch=8):
  rng = np.random.default_rng(0)
  ids = np.sort(rng.integers(0, 4, (batch, 70)), axis=1)
  return jnp.asarray(ids, jnp.int32)


def loss(inputs, segment_ids=None, implementation='chunked_xla'):
  """A sum over rows of something that weighs outputs and states unevenly."""
  o, final = kda(
    **inputs,
    segment_ids=segment_ids,
    return_final_state=True,
    implementation=implementation,
  )
  return jnp.sum(jnp.sin(3 * o)) + jnp.sum(final**2)


@functools.cache
def single_device_gradients(implementation):
  run = jax.jit(
    jax.value_and_grad(loss), static_argnums=2, compiler_options=QUICK
  )
  with discharged(implementation):
    return jax.block_until_ready(
      run(make_inputs(), make_segments(), implementation)
    )


class KdaTransformsTest(parameterized.TestCase):
  def assert_gradients_close(self, gradients, expected, bound=2e-6):
    for name, gradient in gradients.items():
      error = agreement.relative_rms(gradient, expected[name])
      self.assertLess(error, bound, name)

  @parameterized.parameters(*CHUNKED)
  def test_vmap_equals_a_larger_batch(self, implementation):
    inputs = make_inputs()
    split = {
      name: x if name in PARAMETERS else x.reshape(2, 4, *x.shape[1:])
      for name, x in inputs.items()
    }
    axes = {name: None if name in PARAMETERS else 0 for name in inputs}
    mapped = jax.vmap(
      functools.partial(loss, implementation=implementation), in_axes=(axes, 0)
    )
    with discharged(implementation):
      value, gradients = jax.block_until_ready(
        jax.jit(
          jax.value_and_grad(lambda x, ids: jnp.sum(mapped(x, ids))),
          compiler_options=QUICK,
        )(split, make_segments().reshape(2, 4, -1))
      )
    expected_value, expected = single_device_gradients(implementation)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    gradients = {
      name: x.reshape(expected[name].shape) for name, x in gradients.items()
    }
    self.assert_gradients_close(gradients, expected)

  @parameterized.product(
    implementation=CHUNKED, saved=(None, custom_vjp.ENTRY_STATES)
  )
  def test_checkpoint(self, implementation, saved):
    policy = saved and jax.checkpoint_policies.save_only_these_names(saved)
    call = functools.partial(loss, implementation=implementation)
    with discharged(implementation):
      value, gradients = jax.block_until_ready(
        jax.jit(
          jax.value_and_grad(jax.checkpoint(call, policy=policy)),
          compiler_options=QUICK,
        )(make_inputs(), make_segments())
      )
    expected_value, expected = single_device_gradients(implementation)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    self.assert_gradients_close(gradients, expected)

  @parameterized.parameters('reference', *CHUNKED)
  def test_shard_map_over_batch(self, implementation):
    inputs, ids = make_inputs(), make_segments()
    specs = {name: P() if name in PARAMETERS else P('data') for name in inputs}
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
      placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs[name]))
        for name, x in inputs.items()
      }
      ids = jax.device_put(ids, NamedSharding(mesh, P('data')))

      def local(inputs, ids):
        return jax.value_and_grad(
          lambda x: jax.lax.psum(loss(x, ids, implementation), 'data')
        )(inputs)

      run = jax.shard_map(
        local,
        in_specs=(specs, P('data')),
        out_specs=(P(), specs),
        check_vma=True,
      )
      with interpreted(implementation):
        value, gradients = jax.block_until_ready(
          jax.jit(run, compiler_options=QUICK)(placed, ids)
        )
    expected_value, expected = single_device_gradients(implementation)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    self.assert_gradients_close(gradients, expected)

  @parameterized.parameters('reference', 'chunked_xla')
  def test_explicit_mesh_over_batch_and_heads(self, implementation):
    inputs, ids = make_inputs(), make_segments()
    specs = dict.fromkeys(inputs, P('data', None, 'model'))
    specs['A_log'] = specs['dt_bias'] = P('model')
    specs |= dict.fromkeys(TAPS, P(None, 'model'))
    specs['h0'] = P('data', 'model')
    mesh = jax.make_mesh(
      (4, 2), ('data', 'model'), axis_types=(AxisType.Explicit,) * 2
    )
    with jax.set_mesh(mesh):
      placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs[name]))
        for name, x in inputs.items()
      }
      ids = jax.device_put(ids, NamedSharding(mesh, P('data')))
      run = jax.jit(
        jax.value_and_grad(loss), static_argnums=2, compiler_options=QUICK
      )
      value, gradients = run(placed, ids, implementation)
    expected_value, expected = single_device_gradients(implementation)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    self.assert_gradients_close(gradients, expected)
    self.assertEqual(gradients['q'].sharding.spec[0], 'data')

  @parameterized.parameters('reference', *CHUNKED)
  def test_state_layouts_agree(self, implementation):
    inputs = make_inputs(2)

    def run(inputs, layout):
      return kda(
        **inputs,
        return_final_state=True,
        state_layout=layout,
        implementation=implementation,
      )

    run = jax.jit(run, static_argnums=1, compiler_options=QUICK)
    flipped = {**inputs, 'h0': jnp.swapaxes(inputs['h0'], -1, -2)}
    with interpreted(implementation):
      o, final = jax.block_until_ready(run(inputs, 'kv'))
      other_o, other_final = jax.block_until_ready(run(flipped, 'vk'))
    np.testing.assert_allclose(o, other_o, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
      final, jnp.swapaxes(other_final, -1, -2), rtol=1e-6, atol=1e-6
    )

  def test_outputs_alone_have_the_dtype_of_v(self):
    inputs = make_inputs(2)
    low = {
      name: x.astype(jnp.bfloat16) if name in 'qkv' else x
      for name, x in inputs.items()
    }
    o = jax.eval_shape(lambda x: kda(**x), low)
    self.assertEqual((o.shape, o.dtype), (inputs['v'].shape, jnp.bfloat16))
    _, final = jax.eval_shape(lambda x: kda(**x, return_final_state=True), low)
    self.assertEqual(final.dtype, jnp.float32)


if __name__ == '__main__':
  absltest.main()
