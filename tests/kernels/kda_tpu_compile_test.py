"""KDA's kernels compile ahead of time for pods, from 8K to 1M tokens."""

import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest, parameterized

from pallas_kernels.kda import kernel_figures

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Of 32 devices each.
PODS = ('v5e:4x8', 'v5p:2x4x4', 'v6e:4x8', 'tpu7x:2x2x4')
# Tokens and heads; a device has 1 or 3 of the heads.
SHAPES = ((8192, 32), (1_048_576, 96))
# Reports the kernels and the temporary memory of each program.
COMPILE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pallas_kernels.kda import arg_specs, kda, summary

topology = topologies.get_topology_desc(
  platform='tpu', topology_name=sys.argv[1]
)
mesh = jax.sharding.Mesh(
  np.array(topology.devices).reshape(-1), ('model',), (AxisType.Explicit,)
)
reports = []
for tokens, heads in json.loads(sys.argv[2]):
  spec = arg_specs.ArgSpec(1, tokens, heads, heads, 128, 128, 'bfloat16')
  inputs = arg_specs.abstract_inputs(spec)
  specs = dict.fromkeys(inputs, P(None, None, 'model'))
  specs['A_log'] = specs['dt_bias'] = P('model')
  specs['h0'] = P(None, 'model')
  specs['segments'] = P()
  inputs['segments'] = jax.ShapeDtypeStruct((1, tokens), np.int32)
  inputs = {
    name: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name])
    )
    for name, x in inputs.items()
  }

  def train(inputs):
    def loss(inputs):
      inputs = dict(inputs)
      segments = inputs.pop('segments')
      o = kda(**inputs, segment_ids=segments)
      return jax.lax.psum(jnp.sum(o.astype(jnp.float32)), 'model')
    return jax.grad(loss, allow_int=True)(inputs)['q']

  def summarize(inputs):
    inputs = dict(inputs)
    segments, h0, q = (inputs.pop(x) for x in ('segments', 'h0', 'q'))
    pair = summary.summarize_fragment(**inputs, segment_ids=segments)
    v = inputs.pop('v')
    return *pair, summary.summarize_gradient(
      q=q, **inputs, d_o=v, segment_ids=segments
    )

  states = P(None, 'model')
  for function, out in ((train, specs['q']), (summarize, (states,) * 3)):
    with jax.set_mesh(mesh):
      run = jax.shard_map(
        function, in_specs=(specs,), out_specs=out, check_vma=True
      )
      program = jax.jit(run).trace(inputs).lower().compile()
    reports.append({
      'shape': (tokens, heads),
      'kernels': program.as_text().count('"tpu_custom_call"'),
      'temporary': program.memory_analysis().temp_size_in_bytes,
    })
print(json.dumps(reports))
"""


class CompileTest(parameterized.TestCase):
  @parameterized.parameters(*PODS)
  def test_all_kernels_compile_on_shards_of_heads(self, pod):
    done = subprocess.run(
      [sys.executable, '-c', COMPILE, pod, json.dumps(SHAPES)],
      cwd=ROOT,
      env={**os.environ, **kernel_figures.AHEAD_OF_TIME},
      capture_output=True,
      text=True,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    reports = json.loads(done.stdout.splitlines()[-1])
    self.assertLen(reports, 2 * len(SHAPES))
    for report in reports:
      # A forward and a backward, or both summaries.
      self.assertEqual(report['kernels'], 2, report)


if __name__ == '__main__':
  absltest.main()
