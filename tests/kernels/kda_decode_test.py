"""KDA's decode step, the TPU kernel in interpret mode with race detection."""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import arg_specs, decode, decode_plan, kda

BOTH = ('reference', 'mosaic_tpu')
QUICK = {'xla_backend_optimization_level': 0}
SLOTS = 12
SPEC = arg_specs.ArgSpec(3, 2, 2, 4, 32, 64)
LONG = arg_specs.ArgSpec(2, 32, 1, 2, 32, 32)
# Requests 0 and 2 continue slots 3 and 0; slots 1, 4 and 6 and up are not
# named.
READ = np.array([3, -1, 0], np.int32)
WRITE = np.array([[-1, 3], [9, 10], [2, 5]], np.int32)
UNNAMED = [1, 4, 6, 7, 8, 9, 10, 11]


@contextlib.contextmanager
def interpreted(cores=1, most_heads=2):
  """Runs TPU kernels on the CPU, failing on races and unwritten memory.

  Few heads a block make several blocks of the few heads that a test has.
  """
  params = pltpu.InterpretParams(
    detect_races=True,
    on_race='raise',
    uninitialized_memory='nan',
    out_of_bounds_reads='raise',
    num_cores_or_threads=cores,
    # Copies get a clock each; with the few of the default most races go by.
    vector_clock_size=64,
  )
  with (
    pltpu.force_tpu_interpret_mode(params),
    mock.patch.object(decode_plan, 'count_cores', lambda: cores),
    mock.patch.object(decode_plan, '_MOST_HEADS', most_heads),
  ):
    try:
      yield
    finally:
      pltpu.reset_tpu_interpret_mode_state()


def make_inputs(spec=SPEC, seed=0):
  inputs = arg_specs.make_inputs(spec, seed)
  return {name: x for name, x in inputs.items() if name != 'h0'}


def make_pool(spec=SPEC, dtype=jnp.float32, seed=1):
  shape = (SLOTS, spec.value_heads, spec.key_dim, spec.value_dim)
  states = np.random.default_rng(seed).standard_normal(shape, np.float32)
  return jnp.asarray(0.3 * states).astype(dtype)


@functools.cache
def make_call(implementation, plan, options):
  """A jitted call whose ids are traced, compiled once for all tests."""
  del plan  # A call is traced under one plan.

  @functools.partial(jax.jit, donate_argnums=1, compiler_options=QUICK)
  def call(inputs, states, read, write, fresh):
    return decode.kda_decode(
      **inputs,
      states=states,
      read_slots=read,
      write_slots=write,
      fresh=fresh,
      implementation=implementation,
      **dict(options),
    )

  return call


def run(
  implementation, inputs, states, read, write, fresh=None, plan=(), **options
):
  """Decodes in one call that consumes states; `plan` goes to `interpreted`."""
  call = make_call(implementation, plan, tuple(options.items()))
  fresh = np.zeros(len(read), bool) if fresh is None else fresh
  ids = (jnp.asarray(read, jnp.int32), jnp.asarray(write, jnp.int32))
  with interpreted(*plan):
    return jax.block_until_ready(call(inputs, states, *ids, jnp.asarray(fresh)))


def take(inputs, start, stop):
  """Tokens of q, k, v, g and beta; parameters as they are."""
  return {
    name: x if name in ('A_log', 'dt_bias') else x[:, start:stop]
    for name, x in inputs.items()
  }


@functools.cache
def prefill(tokens):
  """Outputs and final states of the first tokens, by the definition of KDA."""
  return kda(
    **take(make_inputs(LONG), 0, tokens),
    implementation='reference',
    return_final_state=True,
  )


class KdaDecodeTest(parameterized.TestCase):
  def check(self, spec, dtype='float32', pool='float32', bound=1e-6, **options):
    """Both implementations agree on outputs and kept states."""
    inputs = options.pop('inputs', None) or make_inputs(spec)
    calls = [
      run(name, inputs, make_pool(spec, pool), READ, WRITE, **options)
      for name in BOTH
    ]
    (o, kept), (o_kernel, kept_kernel) = calls
    self.assertEqual(o_kernel.dtype, jnp.dtype(dtype))
    self.assertEqual(kept_kernel.dtype, jnp.dtype(pool))
    f32 = functools.partial(np.asarray, dtype=np.float32)
    self.assertGreater(np.max(np.abs(f32(o))), 1e-3)
    for expected, actual in ((o, o_kernel), (kept, kept_kernel)):
      expected, actual = f32(expected), f32(actual)
      limit = bound * max(1.0, np.max(np.abs(expected)))
      np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)

  @parameterized.product(implementation=BOTH, tokens=(1, 4, 8))
  def test_continues_a_prefill(self, implementation, tokens):
    inputs = make_inputs(LONG)
    expected_o, expected_state = prefill(LONG.tokens)
    prefix = 16
    read = np.array([7, 2])
    states = make_pool(LONG).at[read].set(prefill(prefix)[1])
    for t in range(prefix, LONG.tokens, tokens):
      write = np.full((2, tokens), -1)
      write[:, -1] = read
      step = take(inputs, t, t + tokens)
      o, states = run(implementation, step, states, read, write)
      np.testing.assert_allclose(
        o, expected_o[:, t : t + tokens], rtol=0, atol=1e-5
      )
    np.testing.assert_allclose(states[read], expected_state, rtol=0, atol=1e-5)

  @parameterized.parameters(*BOTH)
  def test_many_steps_equal_one_prefill(self, implementation):
    inputs = make_inputs(LONG)
    expected_o, expected_state = prefill(LONG.tokens)
    slots = np.array([5, 0])
    states = make_pool(LONG).at[slots].set(0.0)
    for t in range(LONG.tokens):
      before, step = states, take(inputs, t, t + 1)
      o, states = run(implementation, step, before, slots, slots[:, None])
      self.assertTrue(before.is_deleted())
      np.testing.assert_allclose(o, expected_o[:, t : t + 1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(states[slots], expected_state, rtol=0, atol=1e-5)

  @parameterized.product(
    implementation=BOTH, poison=(np.nan, 1e30), dtype=('float32', 'bfloat16')
  )
  def test_slots_not_named_keep_their_bits(self, implementation, poison, dtype):
    states = make_pool(dtype=dtype).at[jnp.array([1, 2, 5, 8])].set(poison)
    before = np.array(states.astype(jnp.float32))
    inputs, clean = make_inputs(), make_pool(dtype=dtype)
    o_clean, expected = run(implementation, inputs, clean, READ, WRITE)
    o, after = run(implementation, inputs, states, READ, WRITE)
    np.testing.assert_array_equal(o, o_clean)
    expected, after = (
      np.asarray(x.astype(jnp.float32)) for x in (expected, after)
    )
    np.testing.assert_array_equal(after[[2, 3, 5]], expected[[2, 3, 5]])
    # Slot 0 is read and not written.
    for slot in (0, *UNNAMED):
      self.assertEqual(after[slot].tobytes(), before[slot].tobytes())

  @parameterized.parameters(*BOTH)
  def test_inactive_requests(self, implementation):
    inputs = make_inputs()
    expected = run(implementation, inputs, make_pool(), READ, WRITE)
    for name in ('q', 'k', 'v', 'g', 'beta'):
      inputs[name] = inputs[name].at[1].set(jnp.nan)
    o, states = run(implementation, inputs, make_pool(), READ, WRITE)
    np.testing.assert_array_equal(o[1], np.zeros_like(o[1]))
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(states, expected[1])

  @parameterized.parameters(*BOTH)
  def test_nobody_is_active(self, implementation):
    read = np.full(3, -1)
    o, states = run(implementation, make_inputs(), make_pool(), read, WRITE)
    np.testing.assert_array_equal(o, np.zeros_like(o))
    np.testing.assert_array_equal(states, make_pool())

  @parameterized.parameters(*BOTH)
  def test_fresh_requests_start_from_zero(self, implementation):
    inputs = make_inputs()
    states = make_pool().at[3].set(0.0)
    expected = run(implementation, inputs, states, READ, WRITE)
    fresh = np.array([True, True, False])
    states = make_pool().at[3].set(jnp.nan)
    o, after = run(implementation, inputs, states, READ, WRITE, fresh=fresh)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(after, expected[1])

  @parameterized.parameters(*BOTH)
  def test_requests_fork_from_one_slot(self, implementation):
    inputs = make_inputs()
    read, write = np.array([4, 4, 4]), np.array([[0, 1], [2, 3], [-1, 5]])
    o, states = run(implementation, inputs, make_pool(), read, write)
    apart = make_pool().at[jnp.array([6, 7])].set(make_pool()[4])
    expected = run(implementation, inputs, apart, np.array([6, 7, 4]), write)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(states[:6], expected[1][:6])

  @parameterized.parameters(*BOTH)
  def test_a_check_keeps_the_state_of_each_token(self, implementation):
    inputs = take(make_inputs(LONG), 0, 4)
    slots, single = np.array([0, 1]), make_pool(LONG)
    # The last token of each goes back to the slot that was read.
    write = np.array([[2, 3, 4, 0], [5, 6, 7, 1]])
    o, states = run(implementation, inputs, make_pool(LONG), slots, write)
    for t in range(4):
      step = take(inputs, t, t + 1)
      o_t, single = run(
        implementation, step, single, slots, write[:, t : t + 1]
      )
      slots = write[:, t]
      np.testing.assert_allclose(o[:, t : t + 1], o_t, rtol=0, atol=1e-6)
    np.testing.assert_allclose(states, single, rtol=0, atol=1e-6)

  @parameterized.parameters(*BOTH)
  def test_traced_ids_out_of_range_count_as_negative(self, implementation):
    inputs = make_inputs()
    expected = run(implementation, inputs, make_pool(), READ, WRITE)
    far = 2**31 - 1
    read = np.where(READ < 0, far, READ)
    write = np.where(WRITE < 0, SLOTS, WRITE)
    write[1] = [-far, far]
    o, states = run(implementation, inputs, make_pool(), read, write)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(states, expected[1])

  @parameterized.parameters(
    # Heads per block, then heads, value heads and channels.
    (16, 3, 3, 100, 60),
    (16, 2, 6, 32, 256),
    (2, 1, 8, 256, 128),
  )
  def test_head_counts_and_dims(self, most_heads, *shape):
    self.check(arg_specs.ArgSpec(3, 2, *shape), plan=(1, most_heads))

  def test_bfloat16_inputs(self):
    spec = arg_specs.ArgSpec(3, 2, 2, 4, 32, 64, 'bfloat16')
    self.check(spec, 'bfloat16', bound=4e-3)

  def test_bfloat16_pool(self):
    self.check(SPEC, pool='bfloat16', bound=4e-3)

  def test_softplus_gate_and_beta_up_to_two(self):
    inputs = make_inputs()
    inputs['beta'] = inputs['beta'] + 3
    options = {'lower_bound': None, 'allow_neg_eigval': True}
    self.check(SPEC, inputs=inputs, **options)
    inputs['g'] = jnp.where(inputs['g'] > 1, 1000.0, inputs['g'])
    self.check(SPEC, inputs=inputs, **options)

  def test_ready_gate_and_beta(self):
    inputs = make_inputs()
    inputs['g'] = -1000 * jax.nn.sigmoid(inputs['g'] - 5)
    inputs['beta'] = jax.nn.sigmoid(inputs['beta'])
    inputs['q'], inputs['k'] = inputs['q'] / 8, inputs['k'] / 8
    del inputs['A_log'], inputs['dt_bias']
    self.check(
      SPEC,
      inputs=inputs,
      gate_in_kernel=False,
      beta_sigmoid=False,
      qk_l2norm=False,
      scale=0.5,
    )

  @parameterized.parameters((30, -30), (-30, 30), (1000, -1000), (-1000, 0))
  def test_extreme_logits(self, g, beta):
    inputs = make_inputs()
    inputs['g'] = jnp.full_like(inputs['g'], g)
    inputs['beta'] = jnp.full_like(inputs['beta'], beta)
    self.check(SPEC, inputs=inputs)

  @parameterized.parameters(1, 2)
  def test_requests_share_a_block(self, cores):
    spec = arg_specs.ArgSpec(5, 2, 2, 4, 32, 32)
    read = np.array([3, -1, 0, 3, 11])
    write = np.array([[-1, 1], [9, 10], [2, 0], [5, -1], [-1, 6]])
    fresh = np.array([False, False, True, False, False])
    calls = []
    for implementation in BOTH:
      states = make_pool(spec).at[jnp.array([0, 7])].set(jnp.nan)
      inputs = make_inputs(spec)
      for name in ('q', 'k', 'v', 'g', 'beta'):
        inputs[name] = inputs[name].at[1].set(jnp.nan)
      plan = (cores, 8)
      call = (inputs, states, read, write, fresh)
      calls.append(run(implementation, *call, plan=plan))
    for expected, actual in zip(*calls):
      np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)

  @parameterized.parameters('q', 'k', 'v', 'g', 'beta')
  def test_nan_stays_in_its_request_and_head(self, name):
    inputs = make_inputs()
    inputs[name] = inputs[name].at[2, 0, 1].set(jnp.nan)
    calls = [
      run(implementation, inputs, make_pool(), READ, WRITE)
      for implementation in BOTH
    ]
    self.assertTrue(np.any(np.isnan(calls[0][0])))
    for expected, actual in zip(*calls):
      np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)

  def test_two_cores_share_the_heads(self):
    self.check(arg_specs.ArgSpec(3, 2, 1, 4, 32, 32), plan=(2, 1))

  def test_the_detector_sees_what_callers_must_not_do(self):
    inputs = make_inputs()
    read_of_another = np.array([[1, 3], [9, 10], [3, 5]])
    twice = np.array([[1, 2], [9, 10], [2, 5]])
    for write in (read_of_another, twice):
      with self.assertRaisesRegex(Exception, 'RACE DETECTED'):
        run('mosaic_tpu', inputs, make_pool(), READ, write)

  def test_heads_may_be_sharded(self):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ('model',), auto)
    inputs, states = make_inputs(), make_pool()
    del inputs['dt_bias']
    expected = run('reference', inputs, make_pool(), READ, WRITE)
    specs = {
      name: P('model') if x.ndim < 3 else P(None, None, 'model')
      for name, x in inputs.items()
    }
    for implementation in BOTH:

      def call(inputs, states, read, write, name=implementation):
        return decode.kda_decode(
          **inputs,
          states=states,
          read_slots=read,
          write_slots=write,
          implementation=name,
        )

      sharded = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(specs, P(None, 'model'), P(), P()),
        out_specs=(P(None, None, 'model'), P(None, 'model')),
      )
      with interpreted():
        o, after = jax.block_until_ready(
          jax.jit(sharded, compiler_options=QUICK)(inputs, states, READ, WRITE)
        )
      np.testing.assert_allclose(o, expected[0], rtol=0, atol=1e-6)
      np.testing.assert_allclose(after, expected[1], rtol=0, atol=1e-6)


if __name__ == '__main__':
  absltest.main()
