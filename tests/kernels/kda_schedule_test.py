"""Static schedules of the kernels: the replay, and figures that must not grow.

Nothing here needs a TPU: libtpu compiles for one on any machine.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from jax.experimental import pallas as pl

from pallas_kernels.kda import (
  arg_specs,
  bundle_replay,
  bundle_text,
  bundle_walk,
  kernel_figures,
  schedule,
  scheduled_kernels,
  steady_state,
  tpu_generations,
)

# Six turns of a loop. Its eighth bundle runs in the first turn only; four more
# run after each branch before it takes effect.
LOOP = """
= control target key start
LB: loop body
     0   :  { %s90_s0 = smov.u32 0 }
   0x1 LB: > { %s1_s1 = sadd.s32 1, %s2_s0  ;;  \
%s2_s0 = sphi %s90_s0, %s3_s0 } /* Start region 5 */
   0x2   : > { %p4_p0 = scmp.ne.s32.totalorder %s2_s0, 0 }
   0x3   : > { %9 = sbr.rel (%p4_p0) target = $region7 }
   0x4   : > { %5 = sst [smem:[#allocation3_spill]] %s1_s1 }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   : > { %v20_v1 = vadd.f32 %v19_v0, %v19_v0 } /* End region 6 */
   0x9 PF: > { %v21_v2 = vadd.f32 %v19_v0, %v19_v0 /* a ;; in a
comment over two lines */ } /* Start/End empty region 7 :: Start region 8 */
   0xa   : > { %v22_v3 = vmul.f32 %v21_v2, %v21_v2  ;;  \
%s3_s0 = sld [smem:[#allocation3_spill]] }
   0xb   : > { %p6_p1 = scmp.ge.s32.totalorder %s3_s0, 6 }
   0xc   : > { %10 = sbr.rel (!%p6_p1) target = $region5 }
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
  0x10   :  {}
  0x11   :  { %v23_v4 = vadd.f32 %v22_v3, %v22_v3 }
"""
TURN = [*range(1, 8), *range(9, 17)]


def replay(text: str, generation: str = 'v6e') -> bundle_replay.Replay:
  """Replays bundles one after another, their addresses given here."""
  lines = text.strip().splitlines()
  text = '\n'.join(f'  {hex(i)}   : {x.strip()}' for i, x in enumerate(lines))
  bundles = bundle_text.parse_bundles(text)
  return bundle_replay.replay_bundles(
    bundles, range(len(bundles)), tpu_generations.GENERATIONS[generation]
  )


class BundleTextTest(absltest.TestCase):
  def test_reads_bundles_labels_regions_and_comments(self):
    bundles = bundle_text.parse_bundles(LOOP)
    self.assertLen(bundles, 18)
    self.assertEqual(bundles[1].regions, (5,))
    self.assertEqual(bundles[9].regions, (7, 8))
    self.assertLen(bundles[9].instructions, 1)
    self.assertEmpty(bundles[5].instructions)
    self.assertEqual(
      bundles[10].instructions[0],
      bundle_text.Instruction(
        'vmul.f32', '', 'v3', ('v2', 'v2'), '%v21_v2, %v21_v2'
      ),
    )

  def test_takes_the_unit_out_of_the_mnemonic(self):
    text = (
      '  0x1   : { %7 = vmatmul.mubr.bf16.gmra.mrb[4].mxu1 %v1_v2  ;;  '
      '%8 = vxpose.xlu0.c.b16.start [1/8] /*vx=*/%v3_v4, /*width=*/128  ;;  '
      '%v9_v5 = vpop.permute.xlu2 %6 }'
    )
    (bundle,) = bundle_text.parse_bundles(text)
    found = [(i.op, i.unit, i.result) for i in bundle.instructions]
    self.assertEqual(
      found,
      [
        ('vmatmul.mubr.bf16.gmra.mrb[4]', 'mxu1', '%7'),
        ('vxpose.c.b16.start', 'xlu0', '%8'),
        ('vpop.permute', 'xlu2', 'v5'),
      ],
    )
    self.assertEqual(bundle.instructions[2].operands, ('%6',))

  def test_no_bundle_is_an_error(self):
    with self.assertRaisesRegex(ValueError, 'No bundles'):
      bundle_text.parse_bundles('LB: loop body\n')


class BundleWalkTest(absltest.TestCase):
  def test_follows_loops_and_branches(self):
    walk = bundle_walk.Walk(bundle_text.parse_bundles(LOOP))
    expected = [0, *range(1, 17), *TURN * 5, 17]
    self.assertEqual(list(walk.addresses()), expected)
    self.assertEmpty(walk.unknown_branches)

  def test_a_branch_on_a_vector_counts_as_not_taken(self):
    text = LOOP.replace('scmp.ne.s32.totalorder %s2_s0, 0', 'vtos %v3_v3')
    walk = bundle_walk.Walk(bundle_text.parse_bundles(text))
    expected = [0, *list(range(1, 17)) * 6, 17]
    self.assertEqual(list(walk.addresses()), expected)
    self.assertEqual(walk.unknown_branches, {3})

  def test_what_was_not_written_reads_as_zero(self):
    bundles = bundle_text.parse_bundles("""
  0x1   : { %s1_s1 = sld [smem:[#allocation9 + %s7_s7]] }
  0x2   : { %p1_p1 = scmp.eq.s32.totalorder %s1_s1, 0 }
  0x3   : { %1 = sbr.rel (%p1_p1) target = $region4 }
  0x4   : {}
  0x5   : {}
  0x6   : {}
  0x7   : {}
  0x8   : { %v1_v1 = vmov 0.0 }
  0x9   : {} /* Start region 4 */
""")
    addresses = list(bundle_walk.Walk(bundles).addresses())
    self.assertEqual(addresses, [0, 1, 2, 3, 4, 5, 6, 8])

  def test_predicated_moves_keep_the_old_value(self):
    bundles = bundle_text.parse_bundles("""
  0x1   : { %p1_p0 = scmp.eq.s32.totalorder 1, 2  ;;  %s1_s1 = smov.u32 7 }
  0x2   : { %s2_s2 = smov.u32 (%p1_p0, %s1_s1), 3 }
  0x3   : { %p2_p1 = scmp.eq.s32.totalorder %s2_s2, 7 }
  0x4   : { %1 = sbr.rel (%p2_p1) target bundleno = 9 (0x9), region = 4 }
  0x5   : {}
  0x6   : {}
  0x7   : {}
  0x8   : {}
  0x9   : { %v1_v1 = vmov 0.0 }
  0xa   : {} /* Start region 4 */
""")
    addresses = list(bundle_walk.Walk(bundles).addresses())
    self.assertEqual(addresses, [0, 1, 2, 3, 4, 5, 6, 7, 9])

  def test_an_endless_loop_is_an_error(self):
    text = LOOP.replace('%s3_s0, 6', '%s3_s0, 999999')
    walk = bundle_walk.Walk(bundle_text.parse_bundles(text), longest=1000)
    with self.assertRaisesRegex(ValueError, 'No end after 1000'):
      list(walk.addresses())


class BundleReplayTest(parameterized.TestCase):
  def test_vector_arithmetic_takes_two_cycles_and_moves_one(self):
    done = replay("""
      { %v1_v1 = vmov 0.0 }
      { %v2_v2 = vadd.f32 %v1_v1, %v1_v1 }
      { %v3_v3 = vadd.f32 %v2_v2, %v2_v2 }
    """)
    self.assertEqual(done.cycles, 4)
    self.assertEqual(done.bundles, 3)
    self.assertEqual(done.stalls, {'result of vadd.f32': 1})

  @parameterized.parameters(
    ('v5e', '', 'mrf', 125), ('v6e', 'mubr.', 'mrf', 192)
  )
  def test_matrix_results_come_in_order(self, name, form, queue, latency):
    generation = tpu_generations.GENERATIONS[name]
    interval = generation.matmul_interval['bf16']
    done = replay(
      f"""
      {{ %1 = vmatmul.{form}bf16.gmra.mxu0 %v1_v1 }}
      {{ %2 = vmatmul.{form}bf16.gmra.mxu0 %v2_v2 }}
      {{ %v3_v3 = vpop.f32.{queue}.mxu0 }}
      {{ %v4_v4 = vpop.f32.{queue}.mxu0 }}
    """,
      name,
    )
    step = generation.matmul_step
    self.assertEqual(done.cycles, latency + step + 1)
    self.assertEqual(
      done.stalls,
      {
        'mxu product': interval - 1,
        'mxu result': latency - interval - 1 + step - 1,
      },
    )
    work = 2 * interval / generation.matrix_units
    self.assertEqual(done.unit_cycles['MATMUL'], work)

  def test_matrix_results_may_be_addressed(self):
    done = replay(
      """
      { %1 = vmatmul.mubr.bf16.gmra.mrb[8].mxu0 %v1_v1 }
      { %v3_v3 = vpop.f32.mrb[10].mxu0 }
    """,
      'tpu7x',
    )
    self.assertEqual(done.cycles, 211 + 2 + 1)

  def test_weights_must_be_pushed_before_the_product(self):
    done = replay("""
      { %1 = vmatpush3.bf16.xpose.msra.mxu0 %v1_v1 }
      { %2 = vmatpush3.bf16.xpose.msra.mxu0 %v1_v1 }
      { %3 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mxu0 %v1_v1 }
    """)
    self.assertEqual(done.stalls, {'mxu push': 7, 'mxu weights a': 6})

  @parameterized.parameters((0, 114), (2, 90))
  def test_the_third_lane_unit_of_v5e_is_quicker(self, unit, latency):
    done = replay(
      f"""
      {{ %1 = vbcast.lane.b32.xlu{unit} %v1_v1 }}
      {{ %v2_v2 = vpop.permute.xlu{unit} %1 }}
    """,
      'v5e',
    )
    self.assertEqual(done.cycles, latency + 1)

  def test_a_transpose_returns_its_rows_one_by_one(self):
    done = replay("""
      { %1 = vxpose.xlu0.b32.start.end [1/1] (short) %v1_v1, 16 }
      { %v2_v2 = vpop.trf.xlu0 }
      { %v3_v3 = vpop.trf.xlu0 }
    """)
    self.assertEqual(done.cycles, 124 + 4 + 1)

  def test_a_product_without_timings_is_an_error(self):
    with self.assertRaisesRegex(ValueError, 'No timing is known for vmatmul'):
      replay('{ %1 = vmatmul.mubr.s8.gmra.mxu0 %v1_v1 }')


class SteadyStateTest(absltest.TestCase):
  def measure(self, text):
    rows = '\n'.join(['0 0 1'] * 18)
    utilization = f'== CAPACITY:\nVALU, EUP, VLOAD:FILL\n4 1 3\n==\n{rows}\n'
    return steady_state.measure_step(
      text, text, utilization, tpu_generations.GENERATIONS['v6e']
    )

  def test_measures_a_turn_in_the_middle(self):
    step = self.measure(LOOP)
    self.assertEqual(step.bundles, len(TURN))
    # Waits for two comparisons, a load and a sum.
    self.assertEqual(step.cycles, len(TURN) + 2 * 1 + 5 + 1)
    self.assertEqual(step.slots, len(TURN))
    self.assertEqual(step.spill_fills, len(TURN))
    self.assertNotIn('VLOAD:FILL', step.unit_cycles)
    self.assertEqual(next(iter(step.stalls)), 'result of sld')

  def test_turns_that_alternate_are_averaged(self):
    text = LOOP.replace('{ %s1_s1', '{ %s6_s6 = sand.u32 1, %s2_s0  ;;  %s1_s1')
    step = self.measure(text.replace('%s2_s0, 0', '%s6_s6, 0'))
    self.assertEqual(step.bundles, len(TURN) + 0.5)

  def test_too_few_turns_are_an_error(self):
    with self.assertRaisesRegex(ValueError, 'turns 3 times'):
      self.measure(LOOP.replace('%s3_s0, 6', '%s3_s0, 3'))

  def test_dumps_of_two_kernels_are_an_error(self):
    with self.assertRaisesRegex(ValueError, '18 rows of use for 1 bundles'):
      self.measure('  0x1   : {}')


FIGURES = kernel_figures.KernelFigures(
  kernel='fwd',
  topology='v5p:2x2x1',
  chunk=128,
  cycles=7.0,
  bundles=6.5,
  slots=7.0,
  unit_cycles={'VALU': 3.5, 'MATMUL': 2.0},
  spill_stores=1.0,
  spill_fills=2.0,
  stalls={'mxu result': 0.5},
  vmem_bytes=2**20,
  unknown_branches=0,
  hbm_bytes=1300.0,
  single_token=False,
)


class FiguresTest(parameterized.TestCase):
  def test_summary(self):
    self.assertEqual(
      schedule.summarize(FIGURES),
      'kernel=fwd topology=v5p:2x2x1 chunk=128 cycles_per_token_head=7.00 '
      'bundles_per_token_head=6.50',
    )
    self.assertEqual(FIGURES.binding_unit, 'VALU')
    self.assertEqual(FIGURES.binding_share, 0.5)

  def test_report_names_every_quantity(self):
    report = schedule.describe(FIGURES, None, '8k')
    for text in ('VALU binds: 50%', 'mxu result', 'VMEM 1.0 MiB', 'aborts'):
      self.assertIn(text, report)

  def test_seconds(self):
    spec = arg_specs.SPECS['8k']
    compute, hbm = schedule.estimate_seconds(FIGURES, spec)
    token_heads = 8192 * 32
    # Two cores share a device's work.
    self.assertAlmostEqual(compute, token_heads * 7.0 / (2 * 1.75e9))
    self.assertAlmostEqual(hbm, token_heads * 1300 / 2.77e12)
    one = dataclasses.replace(FIGURES, single_token=True)
    self.assertAlmostEqual(
      schedule.estimate_seconds(one, spec)[0], compute / 8192
    )
    with self.assertRaisesRegex(ValueError, '128 channels'):
      schedule.estimate_seconds(FIGURES, arg_specs.SPECS['odd'])

  def test_regressions(self):
    path = pathlib.Path(self.create_tempdir().full_path) / 'figures.json'
    self.assertLen(
      schedule.find_regressions([FIGURES], schedule.read_kept(path)), 1
    )
    schedule.write_kept([FIGURES], path)
    kept = schedule.read_kept(path)
    self.assertEmpty(schedule.find_regressions([FIGURES], kept))
    allowed = dataclasses.replace(FIGURES, cycles=7.2, bundles=6.69)
    self.assertEmpty(schedule.find_regressions([allowed], kept))
    worse = dataclasses.replace(FIGURES, cycles=7.22, bundles=6.7)
    self.assertLen(schedule.find_regressions([worse], kept), 2)

  def test_topologies_without_timings_are_refused(self):
    with self.assertRaisesRegex(ValueError, "topology 'v4:2x2x1'"):
      kernel_figures.measure_kernels('v4:2x2x1')


def build_matmul(topology: str) -> list[scheduled_kernels.ScheduledKernel]:
  """A plain product, to hold the replay to the published peak."""
  del topology
  rows, depth = 1024, 512

  def kernel(a_ref, b_ref, o_ref):
    o_ref[...] = jnp.dot(
      a_ref[...], b_ref[...], preferred_element_type=jnp.float32
    )

  call = pl.pallas_call(
    kernel,
    grid=(8,),
    in_specs=[
      pl.BlockSpec((rows, depth), lambda i: (i, 0)),
      pl.BlockSpec((depth, depth), lambda i: (0, 0)),
    ],
    out_specs=pl.BlockSpec((rows, depth), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((8 * rows, depth), jnp.float32),
    name='plain_matmul',
  )
  arguments = (
    jax.ShapeDtypeStruct((8 * rows, depth), jnp.bfloat16),
    jax.ShapeDtypeStruct((depth, depth), jnp.bfloat16),
  )
  return [
    scheduled_kernels.ScheduledKernel(
      'matmul', call, arguments, {'plain_matmul': rows}, 8 * rows, 1, 0.0
    )
  ]


class CompiledTest(parameterized.TestCase):
  @parameterized.parameters(
    ('v5e:2x2', 197e12, 1.1), ('tpu7x:2x2x1', 2307e12 / 2, 1.4)
  )
  def test_a_plain_product_comes_near_the_published_peak(
    self, topology, peak, most
  ):
    (figures,) = kernel_figures.measure_kernels(
      topology, builder=f'{__name__}:build_matmul'
    )
    clock = tpu_generations.find_generation(topology).clock_hz
    ideal = 2 * 512 * 512 / peak * clock
    self.assertAlmostEqual(figures.unit_cycles['MATMUL'] / ideal, 1.0, places=2)
    # A block of this size does not hide the latency of the wide arrays.
    self.assertBetween(figures.cycles / ideal, 1.0, most)

  @parameterized.parameters(*schedule.TOPOLOGIES)
  def test_no_kernel_became_slower(self, topology):
    figures = kernel_figures.measure_kernels(topology)
    kept = schedule.read_kept()
    self.assertEmpty(schedule.find_regressions(figures, kept))
    self.assertEqual({one.kernel for one in figures}, set(kept))
    for one in figures:
      self.assertEqual(one.chunk, kept[one.kernel][topology]['chunk'])
      # The replay's latencies are those of the compiler that is installed.
      self.assertAlmostEqual(one.cycles / one.slots, 1.0, delta=0.02)
      self.assertEqual(one.unknown_branches, 0)

  def test_a_failed_compilation_tells_why(self):
    with self.assertRaisesRegex(RuntimeError, 'No kernel named absent'):
      kernel_figures.measure_kernels('v5e:2x2', ('absent',))


if __name__ == '__main__':
  absltest.main()
