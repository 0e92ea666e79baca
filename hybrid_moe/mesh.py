"""Device meshes: axis names, sizes and order.

Every mesh has the four axes `data`, `expert`, `seq`, `model`, all of them
explicit: an array's sharding is part of its type, and a wrong one is an error
while tracing instead of a silent copy at run time.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from hybrid_moe.checks import ConfigError
from hybrid_moe.config import MeshConfig, StageConfig

DATA = 'data'
EXPERT = 'expert'
SEQ = 'seq'
MODEL = 'model'
AXES = (DATA, EXPERT, SEQ, MODEL)


def make_mesh(
  config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Lays devices out over the four axes.

  Args:
    config: axis sizes; `data=-1` takes what the other axes leave.
    devices: devices in mesh order; all devices of the process group by
      default.

  Returns:
    A mesh whose axes are all explicit.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  rest = config.expert * config.seq * config.model
  data = len(devices) // rest if config.data == -1 else config.data
  sizes = (data, config.expert, config.seq, config.model)
  if data < 1 or math.prod(sizes) != len(devices):
    raise ConfigError(
      f'mesh={config}: {math.prod(sizes)} places for {len(devices)} devices; '
      'accepted are sizes whose product is the number of devices'
    )
  return Mesh(
    np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Explicit,) * 4
  )


def check_batch(stage: StageConfig, mesh: Mesh) -> None:
  """Checks that the rows of a micro-batch divide over the data axis.

  Raises:
    ConfigError: they do not; names every number of micro-batches that would
      do, or the batches that would.
  """
  rows = stage.global_batch // stage.micro_batches
  shards = mesh.shape[DATA]
  if not rows % shards:
    return
  most, rest = divmod(stage.global_batch, shards)
  if rest:
    accepted = f'is a global_batch that is a multiple of {shards}'
  else:
    works = [m for m in range(1, most + 1) if most % m == 0]
    accepted = f'is micro_batches one of {works}, or a larger global_batch'
  raise ConfigError(
    f'stages[{stage.name!r}].global_batch={stage.global_batch}, '
    f'micro_batches={stage.micro_batches}: the {rows} rows of a micro-batch '
    f'do not divide over the data axis of {shards} devices; accepted {accepted}'
  )
