"""KDA's kernels compile ahead of time for pods, from 8K to 1M tokens."""

import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest, parameterized

from pallas_kernels.kda import kernel_figures

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Tokens, heads and devices that share the heads. Pods are of 32 devices, each
# of which has 1 or 3 heads; together they take all lengths with both.
PODS = {
  'v5e:4x8': ((8192, 96, 32), (1_048_576, 32, 32)),
  'v5p:2x4x4': ((65_536, 32, 32), (262_144, 96, 32)),
  'v6e:4x8': ((8192, 32, 32), (1_048_576, 96, 32)),
  'tpu7x:2x2x4': ((65_536, 96, 32), (262_144, 32, 32)),
}
# More elements in an array, and in decode's pool, than an int32 counts.
MANY_ELEMENTS = (2_228_224, 8, 1)
MANY_SLOTS = 32_768
# Reports the kernels and the memory of each program.
COMPILE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pallas_kernels.kda import arg_specs, decode, kda, summary

topology = topologies.get_topology_desc(
  platform='tpu', topology_name=sys.argv[1]
)
slots = int(sys.argv[3])
heads_of, states_of = P(None, None, 'model'), P(None, 'model')
reports = []

def train(inputs):
  def loss(inputs):
    inputs = dict(inputs)
    segments = inputs.pop('segments', None)
    o = kda(**inputs, segment_ids=segments)
    return jax.lax.psum(jnp.sum(o.astype(jnp.float32)), 'model')
  return jax.grad(loss, allow_int=True)(inputs)['q']

def summarize(inputs):
  inputs = dict(inputs)
  segments, h0, q = (inputs.pop(x, None) for x in ('segments', 'h0', 'q'))
  pair = summary.summarize_fragment(**inputs, segment_ids=segments)
  v = inputs.pop('v')
  return *pair, summary.summarize_gradient(
    q=q, **inputs, d_o=v, segment_ids=segments
  )

def step(inputs):
  return decode.kda_decode(**inputs)

for number, (tokens, heads, devices) in enumerate(json.loads(sys.argv[2])):
  mesh = jax.sharding.Mesh(
    np.array(topology.devices)[:devices], ('model',), (AxisType.Explicit,)
  )

  def compile(name, function, arrays, out_specs):
    specs = dict.fromkeys(arrays, heads_of)
    specs |= dict.fromkeys(('A_log', 'dt_bias'), P('model'))
    specs |= dict.fromkeys(('h0', 'states'), states_of)
    specs |= dict.fromkeys(('q_conv', 'k_conv', 'v_conv'), states_of)
    specs |= dict.fromkeys(('segments', 'read_slots', 'write_slots'), P())
    specs = {name: specs[name] for name in arrays}
    arrays = {
      name: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name])
      )
      for name, x in arrays.items()
    }
    with jax.set_mesh(mesh):
      run = jax.shard_map(
        function, in_specs=(specs,), out_specs=out_specs, check_vma=True
      )
      program = jax.jit(run).trace(arrays).lower().compile()
    memory = program.memory_analysis()
    reports.append({
      'program': name,
      'shape': (tokens, heads, devices),
      'kernels': program.as_text().count('"tpu_custom_call"'),
      'arguments': memory.argument_size_in_bytes,
      'temporary': memory.temp_size_in_bytes,
    })

  spec = arg_specs.ArgSpec(1, tokens, heads, heads, 128, 128, 'bfloat16')
  row = arg_specs.abstract_inputs(spec)
  # XLA compiles for minutes what counts the documents of a longer row.
  if tokens <= 65_536:
    row['segments'] = jax.ShapeDtypeStruct((1, tokens), np.int32)
  taps = {}
  if number % 2 == 0:
    # The kernels with a convolution for one shape, those without for another.
    shape = jax.ShapeDtypeStruct((4, heads, 128), np.float32)
    taps = dict.fromkeys(('q_conv', 'k_conv', 'v_conv'), shape)
  compile('train', train, row | taps, heads_of)
  compile('summarize', summarize, row, (states_of,) * 3)
  spec = arg_specs.ArgSpec(32, 1, heads, heads, 128, 128, 'bfloat16')
  requests = arg_specs.abstract_inputs(spec)
  pool = requests.pop('h0')
  states = (slots, *pool.shape[1:])
  requests['states'] = jax.ShapeDtypeStruct(states, pool.dtype)
  requests['read_slots'] = jax.ShapeDtypeStruct((32,), np.int32)
  requests['write_slots'] = jax.ShapeDtypeStruct((32, 1), np.int32)
  compile('decode', step, requests, (heads_of, states_of))
print(json.dumps(reports))
"""


# K, V, dtype, precision, whether documents are packed and taps: what takes most
# VMEM, which tpu7x has least of.
WIDE = (
  (256, 256, 'bfloat16', 'high', True, 9),
  (256, 128, 'float32', 'default', False, 4),
)
COMPILE_WIDE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pallas_kernels.kda import arg_specs, kda

topology = topologies.get_topology_desc(
  platform='tpu', topology_name='tpu7x:2x2x1'
)
mesh = jax.sharding.Mesh(
  np.array(topology.devices[:1]), ('model',), (AxisType.Explicit,)
)
for keys, values, dtype, precision, packed, taps in json.loads(sys.argv[1]):
  spec = arg_specs.ArgSpec(1, 512, 8, 8, keys, values, dtype)
  inputs = arg_specs.abstract_inputs(spec)
  if packed:
    inputs['segment_ids'] = jax.ShapeDtypeStruct((1, 512), np.int32)
  for name, width in (('q', keys), ('k', keys), ('v', values)):
    inputs[f'{name}_conv'] = jax.ShapeDtypeStruct((taps, 8, width), np.float32)
  inputs = {
    name: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(mesh, P())
    )
    for name, x in inputs.items()
  }

  def loss(inputs):
    o = kda(**inputs, precision=precision, implementation='mosaic_tpu')
    return jnp.sum(o.astype(jnp.float32))

  with jax.set_mesh(mesh):
    run = jax.shard_map(
      jax.grad(loss, allow_int=True), in_specs=P(), out_specs=P()
    )
    print(jax.jit(run).lower(inputs).compile().as_text().count('kda_backward'))
"""


def run_script(script, *arguments):
  """Lines that a script prints in a process that compiles ahead of time."""
  done = subprocess.run(
    [sys.executable, '-c', script, *arguments],
    cwd=ROOT,
    env={**os.environ, **kernel_figures.AHEAD_OF_TIME},
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise RuntimeError(f'Compiling with {arguments} failed:\n{done.stderr}')
  return done.stdout.splitlines()


def compile_programs(topology, shapes, slots=64):
  """A report of each program of each shape, on devices of a topology."""
  lines = run_script(COMPILE, topology, json.dumps(shapes), str(slots))
  return json.loads(lines[-1])


class CompileTest(parameterized.TestCase):
  def check(self, reports, shapes):
    self.assertLen(reports, 3 * len(shapes))
    # A forward and a backward, both summaries, and decode.
    expected = {'train': 2, 'summarize': 2, 'decode': 1}
    for report in reports:
      self.assertEqual(report['kernels'], expected[report['program']], report)

  @parameterized.parameters(*PODS)
  def test_all_kernels_compile_on_shards_of_heads(self, pod):
    self.check(compile_programs(pod, PODS[pod]), PODS[pod])

  def test_wide_heads_fit_the_smallest_memory(self):
    counts = [int(line) for line in run_script(COMPILE_WIDE, json.dumps(WIDE))]
    self.assertLen(counts, len(WIDE))
    self.assertGreater(min(counts), 0)

  def test_more_elements_than_an_int32_counts(self):
    # The compiler finds that the arrays fit the memory of one device and its
    # range of addresses; no machine that runs tests holds them.
    tokens, heads, _ = MANY_ELEMENTS
    self.assertGreater(tokens * heads * 128, 2**31)
    self.assertGreater(MANY_SLOTS * heads * 128 * 128, 2**31)
    reports = compile_programs('v5p:2x2x1', (MANY_ELEMENTS,), MANY_SLOTS)
    self.check(reports, (MANY_ELEMENTS,))


if __name__ == '__main__':
  absltest.main()
