"""Eight simulated CPU devices for every test, set before JAX starts."""

import jax
import pytest
from absl import flags

jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Grain reads absl flags from library code; without a parsed command line that
# raises UnparsedFlagAccessError.
flags.FLAGS.mark_as_parsed()


@pytest.fixture(autouse=True, scope='module')
def drop_compiled_programs():
  """Unmaps what a file compiled once its tests are done.

  Every program that XLA compiles for a CPU stays mapped until JAX's caches let
  go of it, and a process may hold only so many mappings (vm.max_map_count, in
  general 65530): one worker that runs half of this suite would die of them.
  """
  yield
  jax.clear_caches()
