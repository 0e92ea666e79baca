"""Grouped expert products against running every expert on every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.model import experts
from hybrid_moe.model.router import Routes

E, Z, F = 6, 8, 10
CAPS = dict(gate_cap=4.0, up_cap=25.0)


def make_weights(seed=0):
  rng = np.random.default_rng(seed)
  shapes = ((E, Z, F), (E, Z, F), (E, F, Z))
  return experts.ExpertWeights(
    *(rng.normal(size=s).astype(np.float32) for s in shapes)
  )


def make_ids(case: str, N: int, S: int):
  rng = np.random.default_rng(3)
  match case:
    case 'mixed':
      return np.stack([rng.permutation(E)[:S] for _ in range(N)])
    case 'one_expert':
      # Expert 2 takes every token first; the rest share the second slot.
      return np.stack([[2, 3, 4][:S]] * N)
    case 'some_empty':
      return np.stack([rng.permutation([0, 3, 5])[:S] for _ in range(N)])
    case 'last_only':
      return np.stack([[5, 4, 3][:S]] * N)


def dense(z_NZ, weight_NS, weights, ids_NS):
  """Every expert runs on every token; combined by one-hot weights."""
  gate, up, down = weights
  a = jnp.einsum('nz,ezf->enf', z_NZ, gate)
  b = jnp.einsum('nz,ezf->enf', z_NZ, up)
  hidden = 4 * jnp.tanh(a / 4) * jax.nn.sigmoid(a) * 25 * jnp.tanh(b / 25)
  y_ENZ = jnp.einsum('enf,efz->enz', hidden, down)
  combine_NE = jnp.sum(jax.nn.one_hot(ids_NS, E) * weight_NS[..., None], axis=1)
  return jnp.einsum('ne,enz->nz', combine_NE, y_ENZ)


def grouped(z_NZ, weight_NS, weights, ids_NS, implementation):
  routes = Routes(ids_NS, weight_NS, jnp.zeros(len(z_NZ)))
  return experts.run_experts(
    z_NZ, routes, weights, **CAPS, implementation=implementation
  )


@functools.partial(
  jax.jit,
  static_argnums=0,
  compiler_options={'xla_backend_optimization_level': 0},
)
def value_and_gradients(implementation, cotangent, z, weight, weights, ids):
  if implementation == 'dense':
    function = functools.partial(dense, ids_NS=ids)
  else:
    function = functools.partial(
      grouped, ids_NS=ids, implementation=implementation
    )
  value, pull = jax.vjp(function, z, weight, weights)
  return value, pull(cotangent)


class ExpertsTest(parameterized.TestCase):
  @parameterized.product(
    implementation=('ragged_dot', 'blocked'),
    case=('mixed', 'one_expert', 'some_empty', 'last_only'),
    size=((40, 2), (3, 3), (17, 1)),
  )
  def test_equals_dense(self, implementation, case, size):
    N, S = size
    rng = np.random.default_rng(1)
    z_NZ, cotangent = rng.normal(size=(2, N, Z)).astype(np.float32)
    weight_NS = rng.uniform(0.1, 1, size=(N, S)).astype(np.float32)
    ids_NS = jnp.asarray(make_ids(case, N, S), jnp.int32)
    args = (cotangent, z_NZ, weight_NS, make_weights(), ids_NS)
    want, want_grads = value_and_gradients('dense', *args)
    got, got_grads = value_and_gradients(implementation, *args)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(want_grads)):
      np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    # An expert without tokens learns nothing, the others do.
    used = np.bincount(np.asarray(ids_NS).ravel(), minlength=E) > 0
    by_expert = np.abs(got_grads[2].gate_EZF).max((1, 2))
    np.testing.assert_array_equal(by_expert > 0, used)

  @parameterized.parameters('ragged_dot', 'blocked')
  def test_no_token_is_dropped(self, implementation):
    """However many tokens choose one expert, each gets its own output."""
    N = 300
    ids_NS = jnp.full((N, 1), 4, jnp.int32)
    z_NZ = np.random.default_rng(0).normal(size=(N, Z)).astype(np.float32)
    ones = jnp.ones((N, 1))
    y_NZ = grouped(z_NZ, ones, make_weights(), ids_NS, implementation)
    want = dense(z_NZ, ones, make_weights(), ids_NS)
    np.testing.assert_allclose(y_NZ, want, atol=1e-4)
    self.assertGreater(np.abs(want).max(1).min(), 1e-3)

  @parameterized.parameters('ragged_dot', 'blocked')
  def test_bfloat16_sums_a_tokens_experts_in_float32(self, implementation):
    N, S = 16, 3
    rng = np.random.default_rng(1)
    weights = jax.tree.map(
      lambda w: jnp.asarray(w, jnp.bfloat16), make_weights()
    )
    z_NZ = jnp.asarray(rng.normal(size=(N, Z)), jnp.bfloat16)
    weight_NS = jnp.full((N, S), 1 / S)
    ids_NS = jnp.asarray(make_ids('mixed', N, S), jnp.int32)
    y_NZ = grouped(z_NZ, weight_NS, weights, ids_NS, implementation)
    self.assertEqual(y_NZ.dtype, jnp.bfloat16)
    z_f32, weights_f32 = jax.tree.map(
      lambda w: w.astype(jnp.float32), (z_NZ, weights)
    )
    want = dense(z_f32, weight_NS, weights_f32, ids_NS)
    np.testing.assert_allclose(
      np.asarray(y_NZ, np.float32), want, atol=0.02 * np.abs(want).max()
    )

  def test_blocks_fill_with_one_expert_each(self):
    ids_NS = jnp.asarray(make_ids('mixed', 40, 2), jnp.int32)
    slots = experts._assign_slots(ids_NS, E, blocked=True)
    block = slots.assignment_M.size // slots.block_expert.size
    flat = np.asarray(ids_NS).reshape(-1)
    assignment = np.asarray(slots.assignment_M)
    filled = assignment < flat.size
    # Every assignment has a slot of its own, in a block of its expert.
    np.testing.assert_array_equal(np.sort(assignment[filled]), np.arange(80))
    expert = np.repeat(np.asarray(slots.block_expert), block)
    np.testing.assert_array_equal(expert[filled], flat[assignment[filled]])

  def test_auto_is_blocked_on_cpu(self):
    self.assertEqual(experts.resolve_implementation('auto'), 'blocked')
    self.assertEqual(experts.resolve_implementation('ragged_dot'), 'ragged_dot')


if __name__ == '__main__':
  absltest.main()
