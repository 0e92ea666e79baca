"""What KDA's decode step refuses, how it picks, and compiles on TPUs."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from pallas_kernels.kda import arg_specs, decode, kernel_figures

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOPOLOGIES = ('v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'tpu7x:2x2x1')
SPEC = arg_specs.ArgSpec(3, 2, 2, 4, 32, 64)
SLOTS = 12
# Reports the bytes that each program aliases and those that it adds.
COMPILE = """
import json, sys
import jax, numpy as np
from jax.experimental import layout, topologies
from pallas_kernels.kda import arg_specs, decode

reports = []
for name in sys.argv[1:]:
  topology = topologies.get_topology_desc(platform='tpu', topology_name=name)
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ('device',))
  sharding = jax.sharding.NamedSharding(mesh, jax.P())
  rows = layout.Format(layout.Layout((0, 1, 2, 3)), sharding)
  def place(x, sharding=sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  for heads, value_heads, tokens, dims, dtype in (
    (32, 32, 1, (128, 128), 'float32'),
    (96, 96, 4, (128, 128), 'float32'),
    (2, 6, 2, (100, 60), 'bfloat16'),
  ):
    spec = arg_specs.ArgSpec(8, tokens, heads, value_heads, *dims, 'bfloat16')
    inputs = jax.tree.map(place, arg_specs.abstract_inputs(spec))
    # Too large to be copied on chip.
    shape = (2000, *inputs.pop('h0').shape[1:])
    pool = jax.ShapeDtypeStruct(shape, dtype)
    default = dims == (128, 128)
    pool = place(pool) if default else place(pool, rows)
    ids = [
      place(jax.ShapeDtypeStruct(shape, np.int32))
      for shape in ((8,), (8, tokens))
    ]
    call = lambda inputs, states, read, write: decode.kda_decode(
      **inputs, states=states, read_slots=read, write_slots=write
    )
    call = jax.jit(
      call, donate_argnums=1, out_shardings=None if default else (None, rows)
    )
    with jax.set_mesh(mesh):
      traced = call.trace(inputs, pool, *ids)
      program = traced.lower(lowering_platforms=('tpu',)).compile()
    memory = program.memory_analysis()
    reports.append({
      'topology': name,
      'pool': pool.size * pool.dtype.itemsize,
      'kernels': program.as_text().count('"tpu_custom_call"'),
      'aliased': memory.alias_size_in_bytes,
      'added': memory.temp_size_in_bytes,
    })
print(json.dumps(reports))
"""


def of(shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def trace(spec=SPEC, read=None, write=None, **changes):
  """Traces a call whose arrays are abstract, except ids that are given."""
  arrays = arg_specs.abstract_inputs(spec)
  arrays['states'] = of((SLOTS, *arrays.pop('h0').shape[1:]))
  arrays['read_slots'] = of((spec.batch,), jnp.int32)
  arrays['write_slots'] = of((spec.batch, spec.tokens), jnp.int32)
  arrays |= {k: v for k, v in changes.items() if hasattr(v, 'shape')}
  options = {k: v for k, v in changes.items() if k not in arrays}
  ids = {'read_slots': read, 'write_slots': write}
  ids = {k: jnp.asarray(v, jnp.int32) for k, v in ids.items() if v is not None}
  arrays = {k: v for k, v in arrays.items() if k not in ids}
  return jax.make_jaxpr(lambda x: decode.kda_decode(**x, **ids, **options))(
    arrays
  )


class KdaDecodeApiTest(parameterized.TestCase):
  @parameterized.parameters(
    ('states', of((4, 32, 64)), r'states has shape \(4, 32, 64\)'),
    ('states', of((0, 4, 32, 64)), r'accepted is \(1, 4, 32, 64\)'),
    ('states', of((12, 4, 64, 32)), r'accepted is \(12, 4, 32, 64\)'),
    ('states', of((12, 4, 32, 64), jnp.float16), 'states .* dtype float16'),
    ('read_slots', of((3,)), 'read_slots .* dtype float32'),
    ('write_slots', of((3, 1), jnp.int32), r'accepted is \(3, 2\) and int32'),
    ('fresh', of((3,), jnp.int32), 'fresh .* accepted is .* bool'),
    ('k', of((3, 2, 4, 32)), 'k has shape'),
    ('lower_bound', -6.0, 'lower_bound=-6.0'),
    ('implementation', 'mosaic_gpu', "implementation='mosaic_gpu'"),
    ('gate_in_kernel', False, 'A_log of shape'),
    ('spec', arg_specs.ArgSpec(1, 9, 1, 1, 32, 32), '9 tokens a request'),
  )
  def test_refuses(self, name, value, message):
    with self.assertRaisesRegex(ValueError, message):
      trace(**{name: value})

  @parameterized.parameters(
    ([3, 12, 0], [[-1, 3], [4, 5], [2, 6]], 'read_slots holds 12; .* below 12'),
    ([3, -1, 0], [[-1, 3], [4, 5], [2, 99]], 'write_slots holds 99'),
    ([3, -1, 0], [[2, 3], [4, 5], [2, 6]], 'names a slot twice'),
    ([3, -1, 0], [[0, 3], [4, 5], [2, 6]], 'that another request reads'),
  )
  def test_refuses_ids_that_it_can_read(self, read, write, message):
    with self.assertRaisesRegex(ValueError, message):
      trace(read=read, write=write)

  def test_accepts_what_only_looks_like_a_collision(self):
    # An inactive request writes nothing; a fresh one reads nothing.
    fresh = jnp.array([False, False, True])
    write = [[0, 3], [3, 3], [2, 5]]

    def call(x):
      return decode.kda_decode(
        **x,
        read_slots=jnp.array([3, -1, 0], jnp.int32),
        write_slots=jnp.array(write, jnp.int32),
        fresh=fresh,
      )

    arrays = arg_specs.abstract_inputs(SPEC)
    arrays['states'] = of((SLOTS, *arrays.pop('h0').shape[1:]))
    jax.eval_shape(call, arrays)

  def test_says_what_the_kernel_cannot_take(self):
    spec = arg_specs.ArgSpec(1, 8, 512, 512, 256, 256)
    with self.assertRaisesRegex(NotImplementedError, '512 value heads'):
      trace(spec, implementation='mosaic_tpu')
    spec = arg_specs.ArgSpec(70_000, 1, 1, 1, 32, 32)
    with self.assertRaisesRegex(NotImplementedError, '140000 ids'):
      trace(spec, implementation='mosaic_tpu')

  def test_the_mesh_picks_the_implementation(self):
    device = jax.sharding.AbstractDevice('TPU v5 lite', 1, 'tpu')
    mesh = jax.sharding.AbstractMesh(
      (1,), ('data',), (jax.sharding.AxisType.Auto,), abstract_device=device
    )
    too_large = arg_specs.ArgSpec(1, 8, 512, 512, 256, 256)
    decode._default_implementation.cache_clear()
    with self.assertLogs('pallas_kernels.kda.decode', 'INFO') as logs:
      for _ in range(2):
        self.assertNotIn('pallas_call', str(trace()))
        with jax.sharding.use_abstract_mesh(mesh):
          self.assertIn('pallas_call', str(trace()))
          self.assertNotIn('pallas_call', str(trace(too_large)))
    self.assertLen(logs.output, 4)
    self.assertIn('512 value heads', logs.output[-1])

  def test_compiles_for_every_tpu_in_place(self):
    done = subprocess.run(
      [sys.executable, '-c', COMPILE, *TOPOLOGIES],
      cwd=ROOT,
      env={**os.environ, **kernel_figures.AHEAD_OF_TIME},
      capture_output=True,
      text=True,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    reports = json.loads(done.stdout.splitlines()[-1])
    self.assertLen(reports, 3 * len(TOPOLOGIES))
    for report in reports:
      self.assertEqual(report['kernels'], 1, report)
      self.assertGreaterEqual(report['aliased'], report['pool'], report)
      self.assertLess(report['added'], report['pool'] / 20, report)


if __name__ == '__main__':
  absltest.main()
