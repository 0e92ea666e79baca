"""KDA's backward kernel for TPU on the inputs that rounding hurts most."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.kda import (
  agreement,
  gate,
  mosaic_tpu_bwd,
  mosaic_tpu_fwd,
  operands,
)

# Compiles several times faster.
QUICK = {'xla_backend_optimization_level': 0}
TOKENS, DIM = 256, 128
NAMES = ('q', 'k', 'v', 'g', 'beta')
CONFIG = operands.KdaConfig(
  lower_bound=-5.0,
  scale=DIM**-0.5,
  qk_l2norm=True,
  beta_sigmoid=True,
  allow_neg_eigval=False,
  gate_in_kernel=True,
  precision='default',
)


def make_inputs(regime):
  """One head of bfloat16 inputs."""
  rng = np.random.default_rng(0)
  shape = (1, TOKENS, 1, DIM)
  q, k, v, g = (rng.normal(size=shape) for _ in range(4))
  if regime == 'saturated':
    g = np.full(shape, 6.0)
  if regime == 'positive_keys':
    q, k, g = rng.random(shape), rng.random(shape), g - 6
  if regime == 'correlated_keys':
    base = rng.normal(size=shape[-1])
    q, k, g = base + 0.3 * q, base + 0.3 * k, g - 4
  arrays = {'q': q, 'k': k, 'v': v, 'g': g, 'beta': rng.normal(size=shape[:3])}
  return {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}


@functools.partial(jax.jit, static_argnames='chunk')
def entry_states(inputs, chunk):
  """States before each chunk [1, N, 1, K, V], by the recurrence."""
  arrays = operands.Operands(
    *(inputs[name].astype(jnp.float32) for name in NAMES), None, None, None
  )
  x = gate.activate(arrays, None, CONFIG)

  def step(state, token):
    k, v, g, beta = token
    decayed = jnp.exp(g)[:, None] * state
    write = beta * (v - k @ decayed)
    return decayed + k[:, None] * write[None], state

  tokens = (x.k_BTHK, x.v_BTHV, x.g_BTHK)
  tokens = (*(a[0, :, 0] for a in tokens), x.beta_BTH[0, :, 0])
  _, states = jax.lax.scan(step, jnp.zeros((DIM, DIM)), tokens)
  return states[::chunk][None, :, None]


@functools.cache
def make_backward(chunk, narrow):
  settings = mosaic_tpu_fwd.TpuConfig(
    kda=CONFIG, chunk=chunk, heads=1, narrow=narrow
  )

  def run(inputs, states, d_o, d_final):
    flat = [inputs[name].reshape(1, TOKENS, -1) for name in NAMES]
    rate = jnp.ones((1, DIM))
    return mosaic_tpu_bwd.backward_call(
      settings, *flat, rate, 0 * rate, states, d_o, d_final, interpret=True
    )

  return jax.jit(run, compiler_options=QUICK)


class KdaTpuBwdTest(parameterized.TestCase):
  def errors_of(self, regime, chunk=128, narrow=False):
    inputs = make_inputs(regime)
    rng = np.random.default_rng(1)
    d_o = jnp.asarray(rng.normal(size=(1, TOKENS, 1, DIM)), jnp.bfloat16)
    d_final = jnp.asarray(rng.normal(size=(1, 1, DIM, DIM)), jnp.float32) / 8
    _, expected = agreement.run_with_gradients(
      {name: x.astype(jnp.float32) for name, x in inputs.items()},
      (d_o.astype(jnp.float32), d_final),
      {},
      'reference',
    )
    states = entry_states(inputs, chunk).astype(jnp.bfloat16)
    result = make_backward(chunk, narrow)(
      inputs, states, d_o.reshape(1, TOKENS, DIM), d_final
    )
    return {
      name: agreement.relative_rms(
        getattr(result, name).reshape(inputs[name].shape), expected[name]
      )
      for name in inputs
    }

  @parameterized.parameters('random', 'saturated')
  def test_ordinary_and_saturated_gates(self, regime):
    errors = self.errors_of(regime)
    for name, error in errors.items():
      self.assertLess(error, 5e-3, f'{name}: {errors}')

  @parameterized.parameters('positive_keys', 'correlated_keys')
  def test_keys_that_resemble_each_other(self, regime):
    errors = self.errors_of(regime)
    for name, error in errors.items():
      self.assertLess(error, 1e-2, f'{name}: {errors}')

  def test_narrow_arrays(self):
    errors = self.errors_of('random', chunk=64, narrow=True)
    for name, error in errors.items():
      self.assertLess(error, 5e-3, f'{name}: {errors}')


if __name__ == '__main__':
  absltest.main()
