"""The chunked KDA form must be worth having: five times the recurrence."""

from absl.testing import absltest, parameterized

from pallas_kernels.kda import arg_specs, bench


class KdaSpeedTest(parameterized.TestCase):
  @parameterized.named_parameters(('forward', 0), ('forward_backward', 1))
  def test_five_times_the_recurrence(self, which):
    # Heads of 128, the width that models of useful size have.
    inputs = arg_specs.make_inputs(arg_specs.SPECS['cpu'])
    slow = bench.make_programs('reference')[which]
    fast = bench.make_programs('chunked_xla')[which]
    slow_seconds, fast_seconds = [], []
    # The best of many runs, of both: other work on the machine comes and goes.
    for _ in range(20):
      slow_seconds += bench.time_call(slow, inputs, 1)
      fast_seconds += bench.time_call(fast, inputs, 3)
      ratio = min(slow_seconds) / min(fast_seconds)
      if ratio > 5.0:
        return
    self.fail(f'only {ratio:.1f} times as fast')


class KdaMemoryTest(absltest.TestCase):
  def test_temporary_memory_does_not_grow_like_the_scores(self):
    def temporary_bytes(tokens):
      spec = arg_specs.ArgSpec(1, tokens, 1, 1, 64, 64)
      program = bench.make_programs('chunked_xla')[1]
      lowered = program.lower(arg_specs.abstract_inputs(spec))
      options = {'xla_backend_optimization_level': 0}
      compiled = lowered.compile(compiler_options=options)
      return compiled.memory_analysis().temp_size_in_bytes

    few, many = 8192, 32_768
    growth = (temporary_bytes(many) - temporary_bytes(few)) / (many - few)
    # Per token, the output's gradient and the entry states: 64 floats each.
    # Scores and inverses of whole rows would add 64 floats for each of them.
    self.assertLess(growth, 4 * 64 * 3)


if __name__ == '__main__':
  absltest.main()
