"""The whole optimiser: roles, decay, clipping, state, devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from hybrid_moe.optim import roles
from hybrid_moe.optim.build import build_optimizer
from hybrid_moe.optim.schedule import build_schedule
from hybrid_moe.run_config import OptimConfig

NO_DECAY = ('scale', 'query', 'A_log', 'dt_bias', 'q_conv', 'k_conv', 'v_conv')
SHAPES = {1: (8,), 2: (16, 8), 3: (16, 4, 8)}


def make_params():
  """One parameter of every role, alone and stacked."""
  rng = np.random.default_rng(0)
  params = {'blocks': {'layer_0': {}}}
  for name, role in sorted(roles.ROLES.items()):
    shape = SHAPES[role.rank]
    for tree, dims in ((params, ()), (params['blocks']['layer_0'], (2,))):
      draw = rng.standard_normal((*dims, *shape), np.float32)
      tree[name] = jnp.asarray(draw)
  return params


class RolesTest(parameterized.TestCase):
  def test_every_leaf_goes_to_its_optimiser(self):
    labels = roles.optimizer_labels(make_params())
    for tree in (labels, labels['blocks']['layer_0']):
      for name in roles.ROLES:
        want = roles.MUON
        if name in NO_DECAY:
          want = roles.ADAMW_NO_DECAY
        elif name in ('table', 'head'):
          want = roles.ADAMW
        self.assertEqual(tree[name], want, name)

  def test_unknown_name_is_named(self):
    params = {'blocks': {'layer_0': {'kernel': jnp.ones((2, 2))}}}
    with self.assertRaisesRegex(ValueError, 'blocks/layer_0/kernel'):
      build_optimizer(OptimConfig()).init(params)

  def test_too_few_dims_are_named(self):
    with self.assertRaisesRegex(ValueError, 'mixer/q_proj.*ndim=2'):
      roles.optimizer_labels({'mixer': {'q_proj': jnp.ones((2, 2))}})

  def test_layouts_cover_their_rank(self):
    for layout in roles.Layout:
      batch, rows, columns = layout.axes()
      self.assertCountEqual(
        (*batch, *rows, *columns), range(-layout.rank, 0), layout
      )


class OptimizerTest(parameterized.TestCase):
  def test_decay_excludes_vectors(self):
    params = make_params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = build_optimizer(OptimConfig(weight_decay=0.5, newton_schulz_steps=1))
    updates, _ = jax.jit(tx.update)(
      zeros, tx.init(params), params, learning_rate=0.1
    )

    def check(path, update, param):
      name = path[-1].key
      want = 0.0 if name in NO_DECAY else -0.05
      np.testing.assert_allclose(update, want * param, rtol=1e-5, err_msg=name)

    jax.tree_util.tree_map_with_path(check, updates, params)

  def test_gradients_are_clipped_to_the_global_norm(self):
    params = {'scale': jnp.zeros((4,)), 'query': jnp.zeros((9,))}
    grads = {'scale': jnp.full((4,), 3.0), 'query': jnp.full((9,), 4.0)}
    norm = np.sqrt(4 * 9 + 9 * 16)
    for clip_norm, factor in ((1.0, 1 / norm), (100.0, 1.0), (0.0, 1.0)):
      tx = build_optimizer(OptimConfig(clip_norm=clip_norm))
      _, state = tx.update(grads, tx.init(params), params, learning_rate=0.1)
      moments = optax.tree.get_all_with_path(state, 'mu')
      (mu,) = [m for _, m in moments if jax.tree.leaves(m)]
      for name, grad in grads.items():
        np.testing.assert_allclose(
          mu[name], 0.1 * factor * grad, rtol=1e-5, err_msg=name
        )

  def test_first_adamw_update_by_hand(self):
    params = {'scale': jnp.ones((2,)), 'head': jnp.ones((1, 2))}
    grads = {'scale': jnp.array([0.3, -0.2]), 'head': jnp.array([[0.1, -0.4]])}
    tx = build_optimizer(OptimConfig(weight_decay=0.5))
    updates, _ = tx.update(grads, tx.init(params), params, learning_rate=0.1)
    # The first bias-corrected step is the gradient's sign.
    np.testing.assert_allclose(updates['scale'], [-0.1, 0.1], rtol=1e-5)
    np.testing.assert_allclose(updates['head'], [[-0.15, 0.05]], rtol=1e-5)

  def test_learning_rate_is_required(self):
    params = {'scale': jnp.ones((2,))}
    tx = build_optimizer(OptimConfig())
    with self.assertRaises(TypeError):
      tx.update(params, tx.init(params), params)

  def test_descends_a_quadratic(self):
    names = ('q_proj', 'o_proj', 'g_proj', 'w_up', 'table', 'scale')
    target = {name: 0.3 * make_params()[name] for name in names}
    tx = build_optimizer(OptimConfig(weight_decay=0.0))
    schedule = build_schedule(OptimConfig(peak_lr=0.1), (60,))[0]

    def loss_of(params):
      gaps = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2), params, target)
      return sum(jax.tree.leaves(gaps))

    @jax.jit
    def step(params, state, count):
      loss, grads = jax.value_and_grad(loss_of)(params)
      updates, state = tx.update(
        grads, state, params, learning_rate=schedule(count)
      )
      return optax.apply_updates(params, updates), state, loss

    params = jax.tree.map(jnp.zeros_like, target)
    state = tx.init(params)
    losses = []
    for count in range(60):
      params, state, loss = step(params, state, count)
      losses.append(float(loss))
    self.assertLess(losses[-1], 0.1 * losses[0])

  def test_state_passes_through_stages(self):
    names = ('q_proj', 'w_up', 'table', 'scale')
    params = {name: make_params()[name] for name in names}
    # What differs between stages is the schedule alone.
    tx = build_optimizer(OptimConfig())
    abstract = jax.eval_shape(tx.init, params)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for schedule in build_schedule(OptimConfig(), (3, 2)):
      _, state = update(params, state, params, learning_rate=schedule(0))
      self.assertEqual(jax.tree.structure(state), jax.tree.structure(abstract))
      shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
      self.assertEqual(
        shapes, jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
      )
    counts = optax.tree.get_all_with_path(state, 'count')
    self.assertEqual({int(count) for _, count in counts}, {2})

  def test_one_and_eight_devices_agree(self):
    params = make_params()['blocks']
    grads = jax.tree.map(lambda p: p[..., ::-1], params)
    tx = build_optimizer(OptimConfig())

    @jax.jit
    def step(params, state, grads):
      updates, state = tx.update(grads, state, params, learning_rate=0.1)
      return optax.apply_updates(params, updates), state

    results = []
    for devices in (1, 8):
      mesh = jax.make_mesh(
        (devices,), ('data',), devices=jax.devices()[:devices]
      )
      with jax.set_mesh(mesh):

        def place(x, mesh=mesh):
          dim = next(d for d, size in enumerate(x.shape) if size % 8 == 0)
          spec = jax.P(*(None,) * dim, 'data')
          return jax.device_put(x, jax.NamedSharding(mesh, spec))

        placed, placed_grads = jax.tree.map(place, (params, grads))
        abstract = jax.eval_shape(tx.init, placed)
        state = jax.jit(tx.init)(placed)
        after, after_state = step(placed, state, placed_grads)
        for old, new in ((placed, after), (state, after_state)):
          jax.tree.map(
            lambda x, y: self.assertTrue(
              x.sharding.is_equivalent_to(y.sharding, x.ndim)
            ),
            old,
            new,
          )
        for shape, leaf in zip(
          jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True
        ):
          if leaf.ndim:
            self.assertEqual(
              shape.sharding.spec, jax.typeof(leaf).sharding.spec
            )
        results.append(jax.device_get(after))
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), *results
    )


if __name__ == '__main__':
  absltest.main()
