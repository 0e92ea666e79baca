"""Who may import whom, and where certain names may appear at all."""

import ast
import functools
import pathlib
import subprocess
import sys

from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# A module imports only modules of a lower rank, or of its own package.
# Every module has a rank, by its own name or by its package's.
RANKS = {
  'checks': 0,
  'model_config': 1,
  'data_config': 1,
  'run_config': 1,
  'config': 2,
  'presets': 2,
  'mesh': 3,
  'sharding': 4,
  'data': 5,
  # What the model is made of.
  'balance': 5,
  'parallel': 5,
  'model': 6,
  'loss': 7,
  'flops': 7,
  'optim': 8,
  # Parts of a run that know nothing of the model.
  'agreement': 2,
  'checkpoint_files': 2,
  'checksum': 2,
  'extension': 2,
  'health': 2,
  'memory_plan': 2,
  'metrics': 2,
  'preemption': 2,
  'checkpoint': 3,
  'plots': 3,
  'progress': 3,
  'run_events': 3,
  'run_position': 3,
  'atomic_file': 1,
  'workdir': 3,
  'report': 4,
  'step_log': 4,
  'train_state': 9,
  'train_step': 10,
  'eval_step': 10,
  'infer': 10,
  'stage': 11,
  'evaluation': 12,
  'run_data': 12,
  'run_summary': 12,
  'stage_runner': 13,
}
SPINE = (
  'config',
  'mesh',
  'sharding',
  'data',
  'model',
  'loss',
  'optim',
  'train_state',
  'train_step',
  'stage',
  'stage_runner',
)

# The only modules of the kernels that read flags.
KERNEL_COMMANDS = (
  'pallas_kernels.kda.bench',
  'pallas_kernels.kda.schedule',
)


# Other projects, imported by the benchmark if they are there.
RIVALS = {'pallas_kernels.kda.bench_rivals': {'torch', 'fla', 'cudnn'}}


@functools.cache
def modules(package: str) -> dict[str, ast.Module]:
  """Syntax trees of a package by dotted name."""
  trees = {}
  for path in sorted((ROOT / package).rglob('*.py')):
    parts = path.relative_to(ROOT).with_suffix('').parts
    name = '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)
    trees[name] = ast.parse(path.read_text(encoding='utf-8'))
  return trees


def imports(tree: ast.Module) -> set[str]:
  """Everything that a module imports, also inside of functions."""
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, 'imports are absolute'
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
  return found


def own_imports(name: str) -> set[str]:
  """Modules of `hybrid_moe` that one of them imports."""
  known = modules('hybrid_moe')
  found = set()
  for target in imports(known[name]):
    while target and target not in known:
      target = target.rpartition('.')[0]
    found |= {target} - {'', 'hybrid_moe'}
  return found


def unit(name: str) -> str:
  """The top-level module or package that a module belongs to."""
  return name.split('.')[1]


def dotted_names(tree: ast.Module) -> set[str]:
  """Every `a.b.c` and every bare name in the code, comments not counted."""
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, (ast.Attribute, ast.Name)):
      found.add(ast.unparse(node))
  return found


class LayeringTest(absltest.TestCase):
  def test_every_module_has_a_rank(self):
    units = {unit(n) for n in modules('hybrid_moe') if n != 'hybrid_moe'}
    self.assertEqual(units, set(RANKS))

  def test_spine_rises(self):
    ranks = [RANKS[name] for name in SPINE]
    self.assertEqual(ranks, sorted(set(ranks)))

  def test_nothing_imports_upward(self):
    for name in modules('hybrid_moe'):
      if name == 'hybrid_moe':
        self.assertEmpty(own_imports(name))
        continue
      for target in own_imports(name):
        if unit(target) != unit(name):
          self.assertLess(
            RANKS[unit(target)], RANKS[unit(name)], f'{name} -> {target}'
          )

  def test_no_cycle_within_a_package(self):
    done, path = set(), []

    def visit(name):
      self.assertNotIn(name, path, ' -> '.join([*path, name]))
      if name in done:
        return
      path.append(name)
      for target in own_imports(name) - {name}:
        visit(target)
      path.pop()
      done.add(name)

    for name in modules('hybrid_moe'):
      visit(name)
    self.assertEqual(done, set(modules('hybrid_moe')))

  def test_kernels_import_nothing_of_ours(self):
    for name, tree in modules('pallas_kernels').items():
      for target in imports(tree):
        top = target.split('.')[0]
        allowed = {'jax', 'numpy', 'chex', 'pallas_kernels'}
        allowed |= RIVALS.get(name, set())
        if top == 'absl':
          of_command = target in ('absl.app', 'absl.flags')
          self.assertTrue(
            target == 'absl.logging'
            or (of_command and name in KERNEL_COMMANDS),
            f'{name} -> {target}',
          )
        else:
          self.assertTrue(
            top in allowed or top in sys.stdlib_module_names,
            f'{name} -> {target}',
          )

  def test_library_imports_no_experiment_and_no_test(self):
    for name, tree in modules('hybrid_moe').items():
      tops = {target.split('.')[0] for target in imports(tree)}
      self.assertNoCommonElements(
        tops, {'experiments', 'tests', 'colabs'}, name
      )

  def test_outside_libraries_stay_in_their_place(self):
    places = {
      'orbax': ('hybrid_moe.checkpoint',),
      'tensorflow_datasets': ('hybrid_moe.data.',),
      'grain': ('hybrid_moe.data.',),
      'tensorflow': (),
      'matplotlib': ('hybrid_moe.plots', 'hybrid_moe.report'),
      'ml_collections': (),
    }
    for name, tree in modules('hybrid_moe').items():
      for target in imports(tree):
        allowed = places.get(target.split('.')[0])
        if allowed is not None:
          self.assertTrue(
            any(
              name == a or (a[-1] == '.' and name.startswith(a))
              for a in allowed
            ),
            f'{name} -> {target}',
          )

  def test_shard_map_only_in_parallel(self):
    users = {
      name
      for package in ('hybrid_moe', 'pallas_kernels')
      for name, tree in modules(package).items()
      if any('shard_map' in used.split('.') for used in dotted_names(tree))
      or any(target.endswith('shard_map') for target in imports(tree))
    }
    self.assertEqual(users, {'hybrid_moe.parallel.batch_shards'})

  def test_shard_map_checks_which_axes_vary(self):
    tree = modules('hybrid_moe')['hybrid_moe.parallel.batch_shards']
    calls = [
      node
      for node in ast.walk(tree)
      if isinstance(node, ast.Call)
      and ast.unparse(node.func) == 'jax.shard_map'
    ]
    self.assertLen(calls, 1)
    keywords = {k.arg: ast.unparse(k.value) for k in calls[0].keywords}
    self.assertEqual(keywords['check_vma'], 'True')

  def test_specs_are_written_in_sharding_only(self):
    # Muon derives the layout of its matrices from the parameter's own spec
    # and the tensor's batch dims; it names no mesh axis, so no choice of axis
    # is made outside of `sharding`.
    derives = {'hybrid_moe.optim.muon'}
    makers = {'jax.P', 'PartitionSpec', 'jax.sharding.PartitionSpec', 'P'}
    axes = {'data', 'expert', 'seq', 'model'}
    for name, tree in modules('hybrid_moe').items():
      calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in makers
      ]
      if name in derives:
        self.assertNotEmpty(calls)
        texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        self.assertNoCommonElements(
          {t for t in texts if isinstance(t, str)}, axes
        )
      elif name != 'hybrid_moe.sharding':
        self.assertEmpty(calls, name)

  def test_no_flags_and_no_environment_in_libraries(self):
    for package in ('hybrid_moe', 'pallas_kernels'):
      for name, tree in modules(package).items():
        if name in KERNEL_COMMANDS:
          continue
        used = dotted_names(tree) | imports(tree)
        self.assertNoCommonElements(
          used,
          {'os.environ', 'os.getenv', 'absl.flags', 'absl.app', 'argparse'},
          name,
        )

  def test_no_ambient_mesh_is_entered_the_old_way(self):
    for name, tree in modules('hybrid_moe').items():
      for node in ast.walk(tree):
        if isinstance(node, ast.With):
          for item in node.items:
            self.assertNotRegex(
              ast.unparse(item.context_expr), r'^\w*mesh$', name
            )

  def test_import_computes_nothing_and_asks_for_no_device(self):
    names = [*modules('pallas_kernels'), *modules('hybrid_moe')]
    code = '\n'.join(
      [
        'import importlib',
        f'for name in {names!r}: importlib.import_module(name)',
        'from jax._src import xla_bridge',
        'assert not xla_bridge._backends, xla_bridge._backends',
      ]
    )
    done = subprocess.run(
      [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
    )
    self.assertEqual(done.returncode, 0, done.stderr)

  def test_every_kda_implementation_is_in_the_kernel_tests(self):
    tree = modules('pallas_kernels')['pallas_kernels.kda.api']
    (names,) = [
      ast.literal_eval(node.value)
      for node in tree.body
      if isinstance(node, ast.Assign)
      and ast.unparse(node.targets[0]) == 'IMPLEMENTATIONS'
    ]
    self.assertNotEmpty(names)
    texts = ''.join(
      path.read_text() for path in (ROOT / 'tests/kernels').glob('*_test.py')
    )
    for name in names:
      self.assertIn(f"'{name}'", texts)


if __name__ == '__main__':
  absltest.main()
