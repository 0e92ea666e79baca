"""Summaries of fragments against the operator whose state they describe."""

import functools
import itertools
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import agreement, arg_specs, kda, state_fold, summary

interpreted = runpy.run_path(
  pathlib.Path(__file__).with_name('tpu_interpreter.py')
)['interpreted']

QUICK = {'xla_backend_optimization_level': 0}
TOKEN_ARRAYS = ('q', 'k', 'v', 'g', 'beta')
# Gates under which a state outlives a fragment.
WEAK = -0.05
SHARDS = 4


def make_inputs(spec, seed=0):
  """Arguments of `kda` without an initial state, and gradients of outputs."""
  inputs = arg_specs.make_inputs(spec, seed)
  del inputs['h0']
  rng = np.random.default_rng(seed + 1)
  d_o = jnp.asarray(rng.standard_normal(inputs['v'].shape, np.float32))
  return inputs, d_o.astype(inputs['v'].dtype)


def map_tokens(fn, inputs):
  return {n: fn(x) if n in TOKEN_ARRAYS else x for n, x in inputs.items()}


def without(inputs, name):
  return {n: x for n, x in inputs.items() if n != name}


@functools.partial(jax.jit, static_argnums=(4, 5), compiler_options=QUICK)
def summarize(inputs, d_o, segment_ids, previous_ids, implementation, options):
  """(M, N) and dN."""
  options = dict(
    options,
    segment_ids=segment_ids,
    previous_ids=previous_ids,
    implementation=implementation,
  )
  forward = summary.summarize_fragment(**without(inputs, 'q'), **options)
  d_N = summary.summarize_gradient(**without(inputs, 'v'), d_o=d_o, **options)
  return forward, d_N


def poison(x, ids):
  padding = jax.lax.expand_dims(ids == 0, range(2, x.ndim))
  return jnp.where(padding, jnp.nan, x).astype(x.dtype)


class SummaryKernelTest(parameterized.TestCase):
  def check(
    self, inputs, d_o, options, bound, ids=None, previous_ids=None, **kernel
  ):
    """M and dN, compared with the reference in float32 on the same values."""
    options = tuple(options.items())
    exact = {name: x.astype(jnp.float32) for name, x in inputs.items()}
    (M, N), d_N = summarize(
      exact, d_o.astype(jnp.float32), ids, previous_ids, 'reference', options
    )
    if ids is not None:
      inputs = map_tokens(lambda x: poison(x, ids), inputs)
      d_o = poison(d_o, ids)
    with interpreted(**kernel):
      got, got_d_N = summarize(
        inputs, d_o, ids, previous_ids, 'mosaic_tpu', options
      )
      errors = {
        'M': agreement.relative_rms(got.M, M),
        'N': agreement.relative_rms(got.N, N),
        'd_N': agreement.relative_rms(got_d_N, d_N),
      }
    for name, error in errors.items():
      self.assertLess(error, bound, f'{name}: {errors}')
    return got.M, got_d_N

  def test_documents_padding_and_odd_heads(self):
    ids = np.ones((2, 110), np.int32)
    # A boundary in the second chunk; padding before, between and at the end.
    ids[0, :5] = ids[0, 70:75] = 0
    ids[0, 90:] = 2
    # One document with padding inside, and a chunk of nothing but padding.
    ids[1, 40:45] = ids[1, 64:] = 0
    M, d_N = self.check(
      *make_inputs(arg_specs.ArgSpec(2, 110, 1, 3, 64, 32)),
      {'lower_bound': WEAK},
      2e-5,
      jnp.asarray(ids),
      jnp.ones((2,), jnp.int32),
      heads=3,
    )
    self.assertEqual(float(jnp.max(jnp.abs(M[0]))), 0.0)
    self.assertTrue(bool(jnp.all(jnp.any(M[1] != 0, axis=(1, 2)))))
    self.assertTrue(bool(jnp.all(jnp.any(d_N != 0, axis=(2, 3)))))

  def test_bfloat16(self):
    spec = arg_specs.ArgSpec(1, 128, 1, 2, 128, 128, 'bfloat16')
    self.check(*make_inputs(spec), {'lower_bound': WEAK}, 5e-3)

  @parameterized.parameters(('default', 1e-2), ('high', 5e-3))
  def test_like_keys_under_weak_decay(self, precision, bound):
    spec = arg_specs.ArgSpec(1, 128, 1, 1, 128, 128, 'bfloat16')
    inputs, d_o = make_inputs(spec)
    for name in ('q', 'k'):
      inputs[name] = jnp.abs(inputs[name])
    inputs['g'] = jnp.full_like(inputs['g'], -7)
    inputs['beta'] = jnp.full_like(inputs['beta'], 4)
    del inputs['A_log'], inputs['dt_bias']
    self.check(inputs, d_o, {'precision': precision}, bound)


def make_documents(tokens):
  """Documents over any number of fragments, and states at both ends."""
  ids = np.ones((3, tokens), np.int32)
  # One boundary with padding behind it, boundaries at the end, and none.
  ids[0, 70:] = 2
  ids[0, 74:125] = 0
  ids[1, 90:] = 3
  # With the last of four fragments.
  ids[1, -40:] = 4
  ids[2, :3] = ids[2, -9:] = 0
  spec = arg_specs.ArgSpec(3, tokens, 1, 2, 32, 32)
  inputs, d_o = make_inputs(spec)
  rng = np.random.default_rng(5)
  h0, d_final = rng.standard_normal((2, 3, 2, 32, 32), np.float32)
  ids = jnp.asarray(ids)
  return inputs, d_o, ids, jnp.asarray(h0), jnp.asarray(d_final)


@functools.partial(jax.jit, static_argnums=(5, 6), compiler_options=QUICK)
def run_with_gradients(
  inputs, h0, segment_ids, d_o, d_final, implementation, options
):
  """Outputs and final state, and the gradients of inputs and h0."""

  def call(inputs, h0):
    return kda(
      **inputs,
      h0=h0,
      segment_ids=segment_ids,
      return_final_state=True,
      implementation=implementation,
      **dict(options),
    )

  outputs, pull = jax.vjp(call, inputs, h0)
  return outputs, pull((d_o, d_final))


class FoldTest(parameterized.TestCase):
  def assert_close(self, x, expected, bound=2e-5):
    self.assertLess(agreement.relative_rms(x, expected), bound)

  def test_fragments_of_uneven_lengths_equal_one_call(self):
    inputs, d_o, ids, h0, d_final = make_documents(160)
    options = (('lower_bound', WEAK),)
    (o, final), (d_inputs, d_h0) = run_with_gradients(
      inputs, h0, ids, d_o, d_final, 'reference', options
    )
    bounds = (0, 1, 85, 160)
    parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    fragments = [map_tokens(lambda x, p=p: x[:, p], inputs) for p in parts]
    last_ids = jnp.stack([state_fold.find_last_ids(ids[:, p]) for p in parts])
    previous = [state_fold.find_previous_ids(last_ids, i) for i in range(3)]
    forward, d_N = zip(
      *(
        summarize(x, d_o[:, p], ids[:, p], before, 'reference', options)
        for x, p, before in zip(fragments, parts, previous)
      )
    )
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *forward)
    self.assert_close(state_fold.fold_states(stacked, h0, 3), final)
    composed = state_fold.compose(
      state_fold.compose(forward[0], forward[1]), forward[2]
    )
    self.assert_close(state_fold.advance_state(composed, h0), final)
    d_N = jnp.stack(d_N)
    self.assert_close(
      state_fold.fold_gradients(stacked.M, d_N, d_final, -1), d_h0
    )
    for i, (x, part) in enumerate(zip(fragments, parts)):
      entry = state_fold.fold_states(stacked, h0, i)
      passes = state_fold.continues_document(ids[:, part], previous[i])
      entry = state_fold.keep_rows(passes, entry)
      d_exit = state_fold.fold_gradients(stacked.M, d_N, d_final, i)
      (o_part, _), (d_part, _) = run_with_gradients(
        x, entry, ids[:, part], d_o[:, part], d_exit, 'reference', options
      )
      self.assert_close(o_part, o[:, part])
      for name in TOKEN_ARRAYS:
        self.assert_close(d_part[name], d_inputs[name][:, part], 5e-5)

  def test_shards_gather_and_fold(self):
    inputs, d_o, ids, h0, d_final = make_documents(SHARDS * 40)
    options = {'lower_bound': WEAK, 'implementation': 'chunked_xla'}
    mesh = jax.make_mesh(
      (SHARDS,),
      ('seq',),
      axis_types=(AxisType.Auto,),
      devices=jax.devices()[:SHARDS],
    )

    def call(inputs, d_o, ids, h0, d_final):
      gather = functools.partial(jax.lax.all_gather, axis_name='seq')
      index = jax.lax.axis_index('seq')
      last_ids = gather(state_fold.find_last_ids(ids))
      previous = state_fold.find_previous_ids(last_ids, index)
      packing = {'segment_ids': ids, 'previous_ids': previous}
      own = summary.summarize_fragment(
        **without(inputs, 'q'), **packing, **options
      )
      d_N = summary.summarize_gradient(
        **without(inputs, 'v'), d_o=d_o, **packing, **options
      )
      gathered, d_N = gather(own), gather(d_N)
      entry = state_fold.keep_rows(
        state_fold.continues_document(ids, previous),
        state_fold.fold_states(gathered, h0, index),
      )
      d_exit = state_fold.fold_gradients(gathered.M, d_N, d_final, index)
      # Each shard returns its own copy of what all of them know.
      final = state_fold.fold_states(gathered, h0, SHARDS)[None]
      d_h0 = state_fold.fold_gradients(gathered.M, d_N, d_final, -1)[None]

      def own_part(inputs):
        return kda(
          **inputs,
          h0=entry,
          segment_ids=ids,
          return_final_state=True,
          **options,
        )

      (o, _), pull = jax.vjp(own_part, inputs)
      (d_inputs,) = pull((d_o, d_exit))
      return o, final, d_inputs, d_h0

    tokens = P(None, 'seq')
    specs = {n: tokens if n in TOKEN_ARRAYS else P() for n in inputs}
    sharded = jax.shard_map(
      call,
      mesh=mesh,
      in_specs=(specs, tokens, tokens, P(), P()),
      out_specs=(tokens, P('seq'), specs, P('seq')),
      check_vma=True,
    )
    o, final, d_inputs, d_h0 = jax.jit(sharded, compiler_options=QUICK)(
      inputs, d_o, ids, h0, d_final
    )
    (expected_o, expected_final), (expected, expected_h0) = run_with_gradients(
      inputs, h0, ids, d_o, d_final, 'reference', (('lower_bound', WEAK),)
    )
    self.assert_close(o, expected_o)
    for i in range(SHARDS):
      self.assert_close(final[i], expected_final)
      self.assert_close(d_h0[i], expected_h0)
    for name, gradient in d_inputs.items():
      self.assert_close(gradient, expected[name], 5e-5)


class SummaryArgumentsTest(parameterized.TestCase):
  def check(self, pattern, error=ValueError, **changes):
    inputs, _ = make_inputs(arg_specs.ArgSpec(2, 16, 1, 2, 32, 32))
    inputs = {**without(inputs, 'q'), **changes}
    with self.assertRaisesRegex(error, pattern):
      summary.summarize_fragment(**inputs)

  def test_previous_ids_need_segment_ids(self):
    previous = jnp.zeros((2,), jnp.int32)
    self.check('previous_ids of shape', previous_ids=previous)

  def test_previous_ids_have_one_id_a_row(self):
    ids = jnp.ones((2, 16), jnp.int32)
    previous = jnp.zeros((3,), jnp.int32)
    self.check(
      r'previous_ids has shape \(3,\)', segment_ids=ids, previous_ids=previous
    )

  def test_unknown_implementation(self):
    self.check('implementation', implementation='mosaic_gpu')

  def test_kernels_need_a_lower_bound(self):
    self.check(
      'lower_bound',
      NotImplementedError,
      lower_bound=None,
      implementation='mosaic_tpu',
    )


if __name__ == '__main__':
  absltest.main()
