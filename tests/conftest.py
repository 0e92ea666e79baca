"""Eight simulated CPU devices for every test, set before JAX starts."""

import jax
from absl import flags

jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Grain reads absl flags from library code; without a parsed command line that
# raises UnparsedFlagAccessError.
flags.FLAGS.mark_as_parsed()
