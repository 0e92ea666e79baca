"""Compiles kernels for a TPU topology; run in a process of its own.

  python -m pallas_kernels.kda.schedule_worker TOPOLOGY DUMPS OUT BUILDER NAMES

libtpu reads its environment when it is loaded, so the caller sets that and
starts a process for each topology. DUMPS is the folder to which libtpu was told
to write, OUT gets a folder of dumps a kernel and the list `kernels.json`.
BUILDER names a function as 'module:function', NAMES is a comma-separated
selection or ''.
"""

import importlib
import json
import pathlib
import sys

import jax
import numpy as np
from jax.experimental import topologies


def compile_kernel(kernel, mesh: jax.sharding.Mesh) -> None:
  """Compiles a kernel for the only device of a mesh."""
  sharding = jax.sharding.NamedSharding(mesh, jax.P())
  arguments = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
    kernel.arguments,
  )
  with jax.set_mesh(mesh):
    traced = jax.jit(kernel.function).trace(*arguments)
    traced.lower(lowering_platforms=('tpu',)).compile()


def main(argv: list[str]) -> None:
  topology, dumps, out, builder, selection = argv
  module, _, function = builder.partition(':')
  kernels = getattr(importlib.import_module(module), function)(topology)
  names = [name for name in selection.split(',') if name]
  missing = set(names) - {kernel.name for kernel in kernels}
  if missing:
    raise ValueError(f'No kernel named {", ".join(sorted(missing))}.')
  description = topologies.get_topology_desc(
    platform='tpu', topology_name=topology
  )
  mesh = jax.sharding.Mesh(np.array(description.devices[:1]), ('device',))
  listed = []
  for kernel in kernels:
    if names and kernel.name not in names:
      continue
    compile_kernel(kernel, mesh)
    folder = pathlib.Path(out) / kernel.name
    folder.mkdir()
    for path in pathlib.Path(dumps).iterdir():
      path.rename(folder / path.name)
    fields = ('name', 'token_heads', 'chunk', 'hbm_bytes', 'single_token')
    entry = {field: getattr(kernel, field) for field in fields}
    entry['step_token_heads'] = dict(kernel.step_token_heads)
    listed.append(entry)
  (pathlib.Path(out) / 'kernels.json').write_text(json.dumps(listed))


if __name__ == '__main__':
  main(sys.argv[1:])
