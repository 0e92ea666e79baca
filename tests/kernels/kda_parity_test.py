"""Every KDA implementation against the token recurrence."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from pallas_kernels.kda import agreement, arg_specs, kda

interpreted = runpy.run_path(
  pathlib.Path(__file__).with_name('tpu_interpreter.py')
)['interpreted']

# The kernels for GPU take bfloat16 alone; `kda_gpu_test` is theirs.
COMPARED = ('chunked_xla', 'mosaic_tpu')

# Compiles in a quarter of the time; `kda_hard_inputs_test` also runs programs
# as they are meant to be optimised.
QUICK = (('xla_backend_optimization_level', 0),)

# The kernels round scores, states and the inverse to bfloat16. The bounds are
# those of the public tests of this operator for GPU, twice as much if hard. The
# gradient of A_log is one number a head, a sum that nearly cancels in some.
KERNEL_BOUNDS = [
  {
    **dict.fromkeys(('o', 'final'), 5e-3 * scale),
    **dict.fromkeys(('q', 'k', 'v', 'h0', 'dt_bias'), 8e-3 * scale),
    **dict.fromkeys(('g', 'beta', 'A_log'), 2e-2 * scale),
  }
  for scale in (1, 2)
]
# Saturated gates leave a gradient of the decay that is a small difference of
# large sums; that of A_log, one number a head, sums it up once more.
SATURATED_GATES = ('saturated', 'near_saturation')
SATURATED_BOUNDS = {
  'float32': {'g': 1e-4, 'A_log': 5e-3, 'dt_bias': 5e-4},
  'bfloat16': {'g': 5e-3, 'A_log': 5e-2, 'dt_bias': 8e-3},
}
HARD_GATES = ('no_decay', 'logits_of_30')


def make_inputs(spec, gate='random', seed=0):
  """Random inputs with the gate logits of a regime."""
  inputs = arg_specs.make_inputs(spec, seed)
  g, beta = inputs['g'], inputs['beta']
  if gate == 'saturated':
    inputs['g'] = jnp.full_like(g, 30)
  if gate == 'near_saturation':
    inputs['g'] = jnp.abs(g) + 3
  if gate == 'no_decay':
    inputs['g'] = jnp.full_like(g, -30)
  if gate == 'logits_of_30':
    inputs['g'] = jnp.where(g > 0, 30, -30).astype(g.dtype)
    inputs['beta'] = jnp.where(beta > 0, 30, -30).astype(beta.dtype)
  return inputs


def tiny(implementation, dtype='float32'):
  """A small shape; fewer heads for kernels, whose interpretation is slow."""
  heads = (1, 150, 1, 2) if implementation == 'mosaic_tpu' else (2, 150, 2, 4)
  return arg_specs.ArgSpec(*heads, 64, 32, dtype)


def without(inputs, *names):
  return {k: v for k, v in inputs.items() if k not in names}


class KdaParityTest(parameterized.TestCase):
  def check(self, inputs, implementation, hard=False, gate='', **kwargs):
    kernel = implementation == 'mosaic_tpu'
    kwargs['compiler_options'] = QUICK
    with interpreted(implementation):
      errors = agreement.compare_with_reference(
        inputs, implementation, **kwargs
      )
    bound = {'float32': (2e-5, 1e-4), 'bfloat16': (5e-3, 1e-2)}
    bound = bound[inputs['q'].dtype.name][hard]
    bounds = dict.fromkeys(errors, bound)
    if inputs['q'].dtype == jnp.float32:
      bounds['g'] = max(bound, 5e-5)
    elif kernel:
      bounds |= KERNEL_BOUNDS[hard]
    if kernel and gate in SATURATED_GATES:
      bounds |= SATURATED_BOUNDS[inputs['q'].dtype.name]
    for name, error in errors.items():
      self.assertLess(error, bounds[name], f'{name}: {errors}')

  @parameterized.product(
    implementation=COMPARED,
    gate=('random', 'saturated', 'near_saturation', *HARD_GATES),
    dtype=('float32', 'bfloat16'),
  )
  def test_gate_regimes(self, implementation, gate, dtype):
    inputs = make_inputs(tiny(implementation, dtype), gate)
    hard = gate in HARD_GATES
    self.check(inputs, implementation, hard=hard, gate=gate)

  @parameterized.parameters(*COMPARED)
  def test_saturated_gates_of_a_document_that_ends_inside_a_chunk(self, name):
    # What the last token writes is far more than what is left of the rest,
    # and no rounding of it may reach the gradient of earlier gates.
    spec = arg_specs.ArgSpec(1, 130, 1, 1, 64, 64, 'bfloat16')
    inputs = make_inputs(spec, seed=1)
    inputs['g'] = jnp.full_like(inputs['g'], 5)
    token = jnp.arange(130, dtype=jnp.int32)
    segments = jnp.where(token < 75, 1 + token // 30, 0)[None]
    with interpreted(name):
      errors = agreement.compare_with_reference(
        inputs, name, segment_ids=segments, compiler_options=QUICK
      )
    self.assertLess(errors['g'], 5e-3, errors)
    self.assertLess(errors['dt_bias'], 8e-3, errors)

  @parameterized.parameters(
    (name, tokens, dtype)
    for name in COMPARED
    for tokens in ((1, 300) if name == 'mosaic_tpu' else (1, 15, 63, 1000))
    for dtype in ('float32', 'bfloat16')
  )
  def test_lengths(self, implementation, tokens, dtype):
    spec = arg_specs.ArgSpec(1, tokens, 1, 1, 32, 32, dtype)
    self.check(make_inputs(spec), implementation)

  @parameterized.product(
    implementation=COMPARED, dims=((100, 60), (128, 256), (256, 128))
  )
  def test_head_dims(self, implementation, dims):
    # Several heads: A_log's gradient is one number a head, a sum that may
    # nearly cancel in any one of them.
    spec = arg_specs.ArgSpec(1, 90, 1, 3, *dims)
    self.check(make_inputs(spec), implementation)

  @parameterized.product(implementation=COMPARED, dtype=('float32', 'bfloat16'))
  def test_beta_up_to_two(self, implementation, dtype):
    inputs = make_inputs(tiny(implementation, dtype))
    self.check(inputs, implementation, allow_neg_eigval=True)

  @parameterized.parameters(*COMPARED)
  def test_ready_gate_and_beta(self, implementation):
    inputs = make_inputs(tiny(implementation))
    inputs = without(inputs, 'A_log', 'dt_bias')
    inputs['g'] = -5 * jax.nn.sigmoid(inputs['g'])
    beta = jax.nn.sigmoid(inputs['beta'])
    # A write strength of 0 must not divide.
    inputs['beta'] = jnp.where(beta > 0.9, 0.0, beta)
    inputs['q'], inputs['k'] = inputs['q'] / 8, inputs['k'] / 8
    self.check(
      inputs,
      implementation,
      gate_in_kernel=False,
      beta_sigmoid=False,
      qk_l2norm=False,
      scale=0.5,
      state_layout='kv',
    )

  @parameterized.parameters(*COMPARED)
  def test_another_lower_bound(self, implementation):
    spec = arg_specs.ArgSpec(1, 63, 1, 1, 32, 32)
    self.check(make_inputs(spec), implementation, lower_bound=-1.5)

  @parameterized.parameters(*COMPARED)
  def test_softplus_gate(self, implementation):
    inputs = make_inputs(tiny(implementation))
    if implementation == 'mosaic_tpu':
      with self.assertRaisesRegex(NotImplementedError, 'lower_bound=None'):
        kda(**inputs, implementation=implementation, lower_bound=None)
      return
    self.check(inputs, implementation, lower_bound=None)
    # Logits of 1000 decay far below what any shared anchor could hold.
    inputs['g'] = jnp.where(inputs['g'] > 3, 1000.0, inputs['g'])
    self.check(inputs, implementation, lower_bound=None)

  @parameterized.parameters(*COMPARED)
  def test_heads_with_very_different_rates(self, implementation):
    spec = arg_specs.ArgSpec(1, 70, 2, 4, 64, 32)
    inputs = make_inputs(spec)
    inputs['A_log'] = jnp.asarray([-3.0, 0.0, 1.5, 3.0])
    self.check(inputs, implementation)

  @parameterized.product(implementation=COMPARED, precision=('fast', 'highest'))
  def test_precisions(self, implementation, precision):
    spec = arg_specs.ArgSpec(1, 100, 2, 2, 64, 64, 'bfloat16')
    self.check(
      without(make_inputs(spec), 'A_log'),
      implementation,
      hard=precision == 'fast',
      precision=precision,
    )


if __name__ == '__main__':
  absltest.main()
