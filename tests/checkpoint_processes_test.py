"""Checkpoints across processes: killed in a save, and agreeing on a restore."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import textwrap
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax.sharding import SingleDeviceSharding

from hybrid_moe.checkpoint import Checkpoints
from hybrid_moe.run_config import CheckpointConfig

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

_KILLED_SAVE = """
  import sys
  import jax
  jax.config.update('jax_platforms', 'cpu')
  import jax.numpy as jnp
  from hybrid_moe.checkpoint import Checkpoints
  from hybrid_moe.run_config import CheckpointConfig
  key = jax.random.key(0)
  checkpoints = Checkpoints(sys.argv[1], CheckpointConfig())
  small = {'x': jax.random.normal(key, (1024, 1024))}
  checkpoints.save(1, small, {}, stage='8k', is_stage_end=False, wait=True)
  # Another state of the same shape, beside one that takes long to write.
  large = {'x': small['x'] + 1, 'y': jax.random.normal(key, (32, 1024, 1024))}
  checkpoints.save(2, large, {}, stage='8k', is_stage_end=False)
  print('saving', flush=True)
  checkpoints.wait()
  print('saved', flush=True)
"""

_TWO_PROCESSES = """
  import os
  import signal
  import sys
  import time
  import jax
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 2)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  index = int(sys.argv[2])
  jax.distributed.initialize(
    f'127.0.0.1:{sys.argv[3]}', num_processes=2, process_id=index
  )
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import AxisType, NamedSharding, PartitionSpec
  from hybrid_moe import checkpoint
  from hybrid_moe.preemption import PreemptionSignal
  from hybrid_moe.run_config import CheckpointConfig
  mesh = jax.make_mesh(
    (4, 1, 1, 1),
    ('data', 'expert', 'seq', 'model'),
    axis_types=(AxisType.Explicit,) * 4,
  )
  jax.set_mesh(mesh)
  sharding = NamedSharding(mesh, PartitionSpec('data'))
  make = jax.jit(
    lambda scale: jnp.arange(4096.0) * scale, out_shardings=sharding
  )
  checkpoints = checkpoint.Checkpoints(
    sys.argv[1], CheckpointConfig(every_steps=5, every_minutes=1)
  )
  for step in (1, 2, 3):
    checkpoints.save(
      step, {'x': make(float(step))}, {}, stage='8k', is_stage_end=False
    )
  checkpoints.wait()
  # The clock of the second process is far ahead and must not matter.
  ahead = lambda step: index * 1e6 * step
  due = [s for s in range(1, 17) if checkpoints.due(s, now=ahead(s))]
  behind = lambda step: (1 - index) * 1e6 * step
  late = [s for s in range(6, 18) if checkpoints.due(s, now=behind(s))]
  load = checkpoint._load_arrays
  def load_badly(path, expected):
    if index == 1 and path.name == 'step_00000003':
      raise OSError('stale file handle')
    return load(path, expected)
  checkpoint._load_arrays = load_badly
  abstract = jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=sharding)
  restored = checkpoints.restore_newest({'x': abstract})
  is_right = all(
    np.array_equal(s.data, (2 * np.arange(4096, dtype=np.float32))[s.index])
    for s in restored.state['x'].addressable_shards
  )
  # One is notified; both stop, at one step.
  with PreemptionSignal() as preemption:
    stopped = [preemption.should_stop(1)]
    if index == 1:
      os.kill(os.getpid(), signal.SIGTERM)
    while not stopped[-1] and len(stopped) < 1000:
      time.sleep(0.01)
      stopped.append(preemption.should_stop(len(stopped) + 1))
  print('RESULT', restored.step, is_right, due, late, stopped[-1])
  print('STOPPED', len(stopped))
  print('DAMAGED', restored.damaged)
  jax.distributed.shutdown()
"""


class ProcessesTest(chex.TestCase):
  def _start(self, program, *arguments):
    process = subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(program), *map(str, arguments)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=_REPOSITORY,
    )
    self.addCleanup(process.communicate)
    self.addCleanup(process.kill)
    return process

  def test_kill_during_a_save_leaves_the_previous_one(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    process = self._start(_KILLED_SAVE, directory)
    self.assertEqual(process.stdout.readline(), 'saving\n')
    unfinished = directory / 'step_00000002.orbax-checkpoint-tmp'
    while not unfinished.exists() and process.poll() is None:
      time.sleep(0.001)
    process.kill()
    process.wait()
    self.assertNotIn('saved', process.stdout.read())
    self.assertTrue(unfinished.exists())
    checkpoints = Checkpoints(str(directory), CheckpointConfig())
    self.assertEqual(os.listdir(directory), ['step_00000001'])
    sharding = SingleDeviceSharding(jax.devices()[0])
    abstract = jax.ShapeDtypeStruct(
      (1024, 1024), jnp.float32, sharding=sharding
    )
    restored = checkpoints.restore_newest({'x': abstract})
    self.assertEqual((restored.step, restored.damaged), (1, []))
    np.testing.assert_array_equal(
      restored.state['x'], jax.random.normal(jax.random.key(0), (1024, 1024))
    )

  def test_processes_choose_the_same_checkpoint(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    with socket.socket() as probe:
      probe.bind(('127.0.0.1', 0))
      port = probe.getsockname()[1]
    processes = [
      self._start(_TWO_PROCESSES, directory, index, port) for index in (0, 1)
    ]
    stops = set()
    for process in processes:
      out, err = process.communicate(timeout=100)
      self.assertEqual(process.returncode, 0, err[-3000:])
      self.assertIn('RESULT 2 True [5, 10, 15] [8, 10, 15, 16] True', out)
      self.assertIn('process 1: array x cannot be read', out)
      stops.add(re.search(r'STOPPED (\d+)', out)[1])
    self.assertLen(stops, 1)
    self.assertEqual(
      sorted(os.listdir(directory)),
      [f'step_{step:08d}' for step in (1, 2, 3)] + ['step_00000003.damaged'],
    )


if __name__ == '__main__':
  absltest.main()
