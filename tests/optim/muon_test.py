"""Muon's updates, matrix by matrix, and their layout over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from hybrid_moe.optim.muon import (
  matrix_spec,
  muon_direction,
  orthogonalize_matrix,
)
from hybrid_moe.optim.roles import Layout

# Name, shape, how to read matrices [count, rows, columns] out of it.
CASES = (
  ('q_proj', (24, 3, 8), lambda x: x.transpose(1, 0, 2)),
  ('kv_up', (2, 8, 3, 12), lambda x: x.transpose(0, 2, 1, 3)),
  ('g_proj', (24, 4, 4), lambda x: x.reshape(1, 24, 16)),
  ('g_up', (2, 8, 4, 4), lambda x: x.reshape(2, 8, 16)),
  ('o_proj', (4, 4, 24), lambda x: x.reshape(1, 16, 24)),
  ('o_proj', (2, 4, 8, 24), lambda x: x.reshape(2, 32, 24)),
  ('w_up', (24, 16), lambda x: x[None]),
  ('w_gate', (2, 5, 16, 24), lambda x: x.reshape(10, 16, 24)),
)


def direction_of(name, grad, momentum=0.95):
  tx = muon_direction(momentum, 5)

  @jax.jit
  def update(grads):
    return tx.update(grads, tx.init(grads))[0]

  return update({name: grad})[name]


class MuonTest(parameterized.TestCase):
  @parameterized.parameters(*CASES)
  def test_every_matrix_is_orthogonal_and_rms_is_that_of_adamw(
    self, name, shape, as_matrices
  ):
    grad = jax.random.normal(jax.random.key(0), shape)
    # A matrix far larger than the rest must not shrink them.
    grad = grad.at[..., :1, :, :].multiply(100.0) if grad.ndim == 4 else grad
    got = as_matrices(np.asarray(direction_of(name, grad)))
    got = got.reshape(-1, *got.shape[-2:])
    scale = 0.2 * np.sqrt(max(got.shape[-2:]))
    singular = np.linalg.svd(got / scale, compute_uv=False)
    self.assertGreater(singular.min(), 0.3)
    self.assertLess(singular.max(), 1.3)
    rms = np.sqrt(np.mean(got**2, axis=(-2, -1)))
    np.testing.assert_allclose(rms, 0.2, atol=0.05)

  def test_iterations_match_a_polynomial_of_the_singular_values(self):
    x = jax.random.normal(jax.random.key(0), (6, 9))
    u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    s = s / np.sqrt(np.sum(s**2))
    for _ in range(5):
      s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    want = (u * s) @ vt
    got = jax.jit(orthogonalize_matrix, static_argnums=1)
    np.testing.assert_allclose(got(x, 5), want, atol=1e-4)
    np.testing.assert_allclose(got(x.T, 5), want.T, atol=1e-4)

  @parameterized.parameters(
    ('q_proj', (24, 3, 8)), ('o_proj', (4, 4, 24)), ('w_down', (5, 24, 16))
  )
  def test_stacked_equals_separate(self, name, shape):
    grads = jax.random.normal(jax.random.key(0), (3, *shape))
    together = direction_of(name, grads)
    apart = jnp.stack([direction_of(name, g) for g in grads])
    np.testing.assert_allclose(together, apart, atol=1e-5)

  def test_heads_do_not_influence_each_other(self):
    grad = jax.random.normal(jax.random.key(0), (24, 3, 8))
    other = grad.at[:, 1].set(
      7.0 * jax.random.normal(jax.random.key(1), (24, 8))
    )
    base, changed = direction_of('k_proj', grad), direction_of('k_proj', other)
    np.testing.assert_allclose(base[:, 0], changed[:, 0], atol=1e-6)
    self.assertGreater(float(jnp.max(jnp.abs(base - changed)[:, 1])), 0.1)

  def test_momentum_is_nesterov(self):
    tx = muon_direction(0.5, 5)
    grads = [
      {'w_up': jax.random.normal(jax.random.key(i), (8, 12))} for i in range(2)
    ]
    state = tx.init(grads[0])
    _, state = tx.update(grads[0], state)
    got, _ = tx.update(grads[1], state)
    # M = 0.5 G0 + G1; orthogonalised is G1 + 0.5 M.
    want = direction_of(
      'w_up', 0.25 * grads[0]['w_up'] + 1.5 * grads[1]['w_up'], momentum=0.0
    )
    np.testing.assert_allclose(got['w_up'], want, atol=1e-4)

  def test_zero_gradient_gives_zero(self):
    grad = jax.random.normal(jax.random.key(0), (4, 8, 12)).at[2].set(0.0)
    got = direction_of('w_gate', grad)
    np.testing.assert_array_equal(got[2], jnp.zeros((8, 12)))
    self.assertTrue(bool(jnp.all(jnp.isfinite(got))))


class ShardedMuonTest(parameterized.TestCase):
  def assert_same_sharding(self, x, y):
    self.assertTrue(
      x.sharding.is_equivalent_to(y.sharding, x.ndim),
      (x.sharding, y.sharding),
    )

  def test_one_and_eight_devices_agree(self):
    # On a batch dim; moved to the heads; on the longer side; from the shorter
    # side to the longer; on fused heads; gathered; replicated;
    # square.
    cases = {
      'w_gate': ((2, 8, 16, 24), jax.P(None, 'data')),
      'v_proj': ((16, 8, 12), jax.P('data')),
      'q_proj': ((2, 24, 3, 8), jax.P(None, 'data')),
      'router': ((24, 16), jax.P(None, 'data')),
      'o_proj': ((2, 8, 4, 24), jax.P(None, 'data')),
      'f_down': ((8, 12), jax.P('data')),
      'w_down': ((2, 8, 12, 10), jax.P()),
      'g_proj': ((16, 2, 8), jax.P('data')),
    }
    grads = {
      name: jax.random.normal(jax.random.key(i), shape)
      for i, (name, (shape, _)) in enumerate(cases.items())
    }
    tx = muon_direction(0.95, 5)

    @jax.jit
    def first_update(grads):
      return tx.update(grads, tx.init(grads))

    results = []
    for devices in (1, 8):
      mesh = jax.make_mesh(
        (devices,), ('data',), devices=jax.devices()[:devices]
      )
      with jax.set_mesh(mesh):
        placed = {
          name: jax.device_put(grad, jax.NamedSharding(mesh, cases[name][1]))
          for name, grad in grads.items()
        }
        updates, state = first_update(placed)
        for name, update in updates.items():
          self.assert_same_sharding(update, placed[name])
        trace = optax.tree.get(state, 'trace')
        for name, leaf in trace.items():
          self.assert_same_sharding(leaf, placed[name])
        results.append(jax.device_get(updates))
    for name in cases:
      np.testing.assert_allclose(
        results[0][name], results[1][name], atol=1e-5, err_msg=name
      )

  @parameterized.named_parameters(
    dict(
      testcase_name='stays_on_a_batch_dim',
      shape=(2, 8, 6, 10),
      spec=jax.P(None, 'data'),
      layout=Layout.PLAIN,
      want=jax.P(None, 'data', None, None),
    ),
    dict(
      testcase_name='goes_to_a_batch_dim',
      shape=(2, 8, 6, 16),
      spec=jax.P(None, None, None, 'data'),
      layout=Layout.PLAIN,
      want=jax.P(None, 'data', None, None),
    ),
    dict(
      testcase_name='goes_to_the_heads',
      shape=(16, 8, 4),
      spec=jax.P('data'),
      layout=Layout.PER_HEAD,
      want=jax.P(None, 'data', None),
    ),
    dict(
      testcase_name='goes_to_the_longer_side',
      shape=(3, 8, 16),
      spec=jax.P(None, 'data'),
      layout=Layout.PLAIN,
      want=jax.P(None, None, 'data'),
    ),
    dict(
      testcase_name='goes_to_either_side_of_a_square',
      shape=(16, 2, 8),
      spec=jax.P('data'),
      layout=Layout.FUSED_OUT,
      want=jax.P('data', None, None),
    ),
    dict(
      testcase_name='shares_replicated_work',
      shape=(3, 16, 6, 10),
      spec=jax.P(),
      layout=Layout.PLAIN,
      want=jax.P(None, 'data', None, None),
    ),
    dict(
      testcase_name='stays_replicated',
      shape=(16, 8),
      spec=jax.P(),
      layout=Layout.PLAIN,
      want=jax.P(None, None),
    ),
    dict(
      testcase_name='is_gathered',
      shape=(3, 8, 9),
      spec=jax.P(None, 'data'),
      layout=Layout.PLAIN,
      want=jax.P(None, None, None),
    ),
  )
  def test_layout(self, shape, spec, layout, want):
    mesh = jax.make_mesh((8,), ('data',))
    with jax.set_mesh(mesh):
      leaf = jax.device_put(jnp.zeros(shape), jax.NamedSharding(mesh, spec))
      trailing, rows, columns = (
        tuple(axis + leaf.ndim for axis in axes) for axes in layout.axes()
      )
      batch = (*range(leaf.ndim - layout.rank), *trailing)
      got = jax.jit(
        lambda x: self.assertEqual(matrix_spec(x, batch, rows, columns), want)
      )
      got(leaf)

  def test_experts_stay_on_their_devices(self):
    mesh = jax.make_mesh((8,), ('data',))
    tx = muon_direction(0.95, 5)
    with jax.set_mesh(mesh):
      experts = jax.NamedSharding(mesh, jax.P(None, 'data'))
      grads = {'w_gate': jax.device_put(jnp.zeros((2, 8, 16, 24)), experts)}
      text = (
        jax.jit(lambda g: tx.update(g, tx.init(g))[0])
        .lower(grads)
        .compile()
        .as_text()
      )
    for collective in ('all-gather', 'all-reduce', 'all-to-all'):
      self.assertNotIn(collective, text)


if __name__ == '__main__':
  absltest.main()
