# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The model's cycles of loops that are written here, counted by hand."""

from absl.testing import absltest, parameterized

from jaxplugin.lab.inspection import machine_code, simulation

HOPPER = simulation.CORES["sm_90"]
AMPERE = simulation.CORES["sm_80"]
MMA = "HMMA.16816.F32.BF16 R24, R88, R4, R24"
# 64 x 128 x 16 of a warp group: 512 products a cycle for each of its warps.
WGMMA = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR16], R24, gsb0"
WGMMA_CYCLES = 64 * 128 * 16 // 4 // 512
INTEGER = "IADD3 R3, R3, 0x1, RZ"
CONTROL = "NOP"
STALL_OF_BRANCH = 5


def line(text, stall=1, *, result=7, operand=7, waits=()):
  """Returns (text, control word) of an instruction; 7 means no scoreboard."""
  mask = sum(1 << number for number in waits)
  return text, stall | result << 5 | operand << 8 | mask << 11


def printed(*lines):
  """As `nvdisasm -c -hex` prints a loop of `lines`."""
  body = [*map(line_of, lines), line("BRA `(.L_x_0)", STALL_OF_BRANCH)]
  text = ["kernel:", ".L_x_0:"]
  for place, (instruction, control) in enumerate(body):
    text.append(
      f"        /*{16 * place:04x}*/     {instruction} ;"
      "                /* 0x0000000000007918 */"
    )
    # Bits below and above those of the schedule are the instruction's.
    word = control << 41 | 1 << 63 | (1 << 41) - 1
    text.append(f"{' ' * 50}/* 0x{word:016x} */")
  return "\n".join(text)


def line_of(item):
  return item if isinstance(item, tuple) else line(item)


def loop_of(*lines):
  items = [*machine_code.read_sass(printed(*lines))]
  return machine_code.main_loop(items).body


def cycles(*lines, core=HOPPER, num_warps=4, blocks=1):
  return simulation.simulate(
    loop_of(*lines), core, num_warps=num_warps, blocks=blocks
  ).cycles


LOAD = line("LDG.E.U8 R4, [R8.64]", result=2)
USE = line(INTEGER, waits=(2,))
LATENCY = simulation.LOAD_CYCLES + 1 + 1 + STALL_OF_BRANCH
FLOATS = ["FMUL R3, R4, R5"] * 100 + [MMA]
# Instructions, options of `cycles`, and the expected cycles within a tolerance.
CYCLES = {
  "stalls that ptxas wrote": (
    [line(INTEGER, 4), line(INTEGER, 7), line(MMA, 10)], {},
    4 + 7 + 10 + STALL_OF_BRANCH, 0,
  ),
  "integers, in every other cycle": (
    [INTEGER] * 100 + [MMA], {"num_warps": 16}, 4 * 200, 12,
  ),
  "floats in two pipes": (FLOATS, {"num_warps": 16}, 4 * 102, 12),
  "floats in Ampere's one pipe": (
    FLOATS, {"num_warps": 16, "core": AMPERE}, 4 * 200, 12,
  ),
  "a load that is waited for": ([LOAD, USE, MMA], {}, LATENCY, 0),
  "two blocks that wait at once": ([LOAD, USE, MMA], {"blocks": 2}, LATENCY, 3),
}  # fmt: skip


class SchedulingTest(absltest.TestCase):
  def test_control_word_is_read_and_seven_is_no_scoreboard(self):
    load = line("LDG.E R4, [R8.64]", 9, result=2, operand=5, waits=(0, 3))
    found = [
      (x.stall, x.result_scoreboard, x.operand_scoreboard, x.waits)
      for x in loop_of(load, MMA)[:2]
    ]
    self.assertEqual(found, [(9, 2, 5, (0, 3)), (1, None, None, ())])

  def test_text_without_words_is_what_nvdisasm_prints_without_them(self):
    plain = machine_code.without_words(printed(INTEGER, MMA))
    self.assertNotIn("/* 0x", plain)
    self.assertLen(plain.splitlines(), 2 + 3)
    loop = machine_code.main_loop([*machine_code.read_sass(plain)])
    self.assertEqual(loop.instructions, 3)

  def test_missing_word_is_an_error(self):
    first, second, *_ = printed(MMA).splitlines()[2:]
    del second
    with self.assertRaisesRegex(ValueError, "second word .*HMMA"):
      list(machine_code.read_sass(first))

  def test_distance_of_a_load_is_to_the_wait_for_its_scoreboard(self):
    other = line(INTEGER, waits=(1,))
    copy = line("LDGSTS.E.BYPASS.128 [R3], [R8.64]", operand=2)
    for loop, expected in (
      ((LOAD, other, other, USE, MMA), [2]),
      # In the next turn: MMA and the branch follow the load.
      ((USE, INTEGER, LOAD, MMA), [2]),
      # No instruction waits.
      ((LOAD, MMA), [3]),
      # A copy to shared memory is not a load.
      ((copy, USE, MMA), []),
    ):
      found = machine_code.Loop(loop_of(*loop)).load_distances()
      self.assertEqual(found, expected)


class SimulateTest(parameterized.TestCase):
  @parameterized.parameters(*CYCLES)
  def test_cycles_of(self, name):
    body, options, expected, delta = CYCLES[name]
    self.assertAlmostEqual(cycles(*body, **options), expected, delta=delta)

  @parameterized.parameters(1, 2)
  def test_one_instruction_a_cycle_is_issued(self, blocks):
    body = [CONTROL] * 99 + [MMA]
    warps = 4 * blocks  # of 16, on a quarter
    simulated = simulation.simulate(
      loop_of(*body), HOPPER, num_warps=16, blocks=blocks
    )
    self.assertAlmostEqual(simulated.cycles, 101 * warps, delta=8)
    self.assertAlmostEqual(simulated.instructions_per_cycle, 1, delta=0.02)

  def test_work_between_load_and_use_hides_latency(self):
    work = [line(INTEGER, 10)] * 50
    late = cycles(LOAD, USE, *work, MMA)
    early = cycles(LOAD, *work, USE, MMA)
    self.assertAlmostEqual(late - early, 500, delta=1)

  def test_copies_in_flight_hide_latency(self):
    copy = ["LDGSTS.E.128 [R3], [R8.64]", "LDGDEPBAR"]
    at_once = cycles(*copy, "DEPBAR.LE SB0, 0x0", MMA)
    one_ahead = cycles(*copy, "DEPBAR.LE SB0, 0x1", MMA)
    two_ahead = cycles(*copy, "DEPBAR.LE SB0, 0x2", MMA)
    self.assertBetween(at_once, 600, 610)
    self.assertAlmostEqual(one_ahead, at_once / 2, delta=5)
    self.assertAlmostEqual(two_ahead, at_once / 3, delta=5)

  def test_wgmma_runs_beside_what_follows_until_it_is_waited_for(self):
    work = [line(INTEGER, 10)] * 10
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    apart = cycles(WGMMA, wait, *work)
    beside = cycles(WGMMA, *work, wait)
    self.assertGreater(apart, WGMMA_CYCLES + 100)
    self.assertLess(beside, 120)

  def test_wgmma_of_two_blocks_fills_the_tensor_core(self):
    work = [line(INTEGER, 5)] * 10
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    simulated = simulation.simulate(
      loop_of(*[WGMMA] * 8, wait, *work), HOPPER, num_warps=8, blocks=2
    )
    self.assertGreater(simulated.matrix_share, 0.97)
    products = 8 * 64 * 128 * 16 * 2  # of both warp groups
    self.assertEqual(simulated.products, products)
    # A quarter has a quarter of them.
    ideal = products // 4 // 512
    self.assertAlmostEqual(
      simulated.cycles_of(products), ideal, delta=0.03 * ideal
    )

  def test_barrier_waits_for_the_last_warp(self):
    # The one that issued its 20 integers second is the later one.
    body = [INTEGER] * 20 + ["BAR.SYNC.DEFER_BLOCKING 0x0", MMA]
    both = cycles(*body, num_warps=8)
    self.assertBetween(both, 2 * 2 * 20 + simulation.BARRIER_CYCLES - 8, 120)

  def test_products_are_those_of_the_shape(self):
    (mma, *_) = loop_of(MMA)
    (wgmma, *_) = loop_of(WGMMA)
    (fp4, *_) = loop_of("OMMA.SF.16864.F32.E2M1.E2M1.UE8M0 R4, R8, R6, R4")
    self.assertEqual(simulation.products_of(mma), 16 * 8 * 16)
    self.assertEqual(simulation.products_of(wgmma), 64 * 128 * 16 // 4)
    self.assertEqual(simulation.products_of(fp4), 16 * 8 * 64)

  def test_unknown_instruction_is_refused(self):
    with self.assertRaisesRegex(ValueError, "does not support FROB.X"):
      cycles("FROB.X R3, R4", MMA)

  @parameterized.parameters((2, 1), (6, 1), (4, 0))
  def test_blocks_that_are_no_quarters_are_refused(self, num_warps, blocks):
    with self.assertRaisesRegex(ValueError, f"got {num_warps} and {blocks}"):
      cycles(MMA, num_warps=num_warps, blocks=blocks)
