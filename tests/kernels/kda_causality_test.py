"""Nothing later may change an earlier KDA output by a single bit."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.kda import arg_specs, kda

interpreted = runpy.run_path(
  pathlib.Path(__file__).with_name('tpu_interpreter.py')
)['interpreted']

TOKENS = 150


class KdaCausalityTest(parameterized.TestCase):
  @parameterized.product(
    implementation=('reference', 'chunked_xla', 'mosaic_tpu'),
    lower_bound=(-5.0, None),
    dtype=('float32', 'bfloat16'),
  )
  def test_past_outputs_are_bitwise_fixed(
    self, implementation, lower_bound, dtype
  ):
    if implementation == 'mosaic_tpu' and lower_bound is None:
      return  # It takes bounded gates only.
    if implementation == 'reference' and dtype == 'bfloat16':
      dtype = 'float32'  # It computes in float32 whatever it is given.
    with interpreted(implementation):
      self.check(implementation, lower_bound, dtype)

  def check(self, implementation, lower_bound, dtype):
    kernel = implementation == 'mosaic_tpu'
    spec = arg_specs.ArgSpec(1, TOKENS, 1, 1 + kernel, 32, 32, dtype)
    inputs, other = (arg_specs.make_inputs(spec, seed) for seed in (0, 1))
    run = jax.jit(
      lambda x: kda(
        **x, implementation=implementation, lower_bound=lower_bound
      ),
      # Interpreted kernels take long to compile.
      compiler_options={'xla_backend_optimization_level': 0} if kernel else {},
    )
    for saturated in (False, True):
      if saturated:
        inputs['g'] = jnp.full_like(inputs['g'], 30)
        other['g'] = jnp.full_like(inputs['g'], -30)
      before = np.asarray(run(inputs), np.float32)
      # Inside the first tile, inside a later tile, and at a chunk's start.
      for first in (5, 64, 149) if kernel else (5, 45, 64, 149):
        for name in 'kg' if kernel else ('q', 'k', 'v', 'g', 'beta'):
          x = inputs[name]
          later = jnp.arange(TOKENS) >= first
          later = jax.lax.expand_dims(later, (0, *range(2, x.ndim)))
          changed = {**inputs, name: jnp.where(later, other[name], x)}
          after = np.asarray(run(changed), np.float32)
          np.testing.assert_array_equal(
            after[:, :first], before[:, :first], f'{name} from {first}'
          )
          if name in 'qkv':
            self.assertFalse(
              np.array_equal(after[:, first:], before[:, first:]),
              f'{name} from {first} has no effect',
            )


if __name__ == '__main__':
  absltest.main()
