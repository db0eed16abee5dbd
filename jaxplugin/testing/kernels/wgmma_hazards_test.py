# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Overwritten operands are found in machine code that is written here."""

import pytest
from absl.testing import parameterized

from jaxplugin.testing.kernels import wgmma_hazards

pytestmark = pytest.mark.lab

PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR16], R24, gsb0"
SHARED = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], gdesc[UR16], R24, gsb0"


def sass(*lines):
  """As nvdisasm prints it; a line that ends in ":" is a label."""
  return "\n".join(
    line if line.endswith(":") else f"        /*{16 * i:04x}*/    {line} ;"
    for i, line in enumerate(lines)
  )


def wait(groups):
  return f"WARPGROUP.DEPBAR.LE gsb0, 0x{groups:x}"


class OverwrittenOperandsTest(parameterized.TestCase):
  @parameterized.parameters(
    "MOV R88, R3",
    "LDS.U8 R91, [R8+UR15+0xc000]",
    "LDS.128 R85, [R8]",  # 85 to 88
    "LDG.E.64 R90, desc[UR16][R14.64]",
    "IMAD.WIDE R90, R2, R3, R4",
    "LDSM.16.M88.4 R86, [R3]",
    "@P0 HFMA2 R89, R2, R3, R4",
    "LOP3.LUT P0, R88, R2, R3, R4, 0xc0, !PT",
    "CS2R R90, SRZ",
  )
  def test_written_before_the_wait(self, line):
    text = sass(PRODUCT, line, wait(0), "EXIT")
    (found,) = wgmma_hazards.overwritten_operands(text)
    self.assertIn(line.removeprefix("@P0 ").rpartition(" ")[0][:8], found)
    text = sass(PRODUCT, wait(0), line, "EXIT")
    self.assertEqual(wgmma_hazards.overwritten_operands(text), [])

  @parameterized.parameters(
    "MOV R92, R88",
    "LDS.64 R86, [R88]",  # 86 and 87
    "STS.128 [R3], R88",
    "ISETP.GE.AND P0, PT, R88, 0x1, PT",
    "WARPGROUP.ARRIVE",
    "MOV R24, R3",  # the accumulator, which is not what this is about
    "CS2R.32 R87, SR_CLOCKLO",
  )
  def test_other_registers_may_be_written(self, line):
    text = sass(PRODUCT, line, wait(0), "EXIT")
    self.assertEqual(wgmma_hazards.overwritten_operands(text), [])

  def test_operand_in_shared_memory_is_in_no_register(self):
    text = sass(SHARED, "MOV R88, R3", "MOV R8, R3", wait(0), "EXIT")
    self.assertEqual(wgmma_hazards.overwritten_operands(text), [])

  def test_wait_leaves_the_newest_groups_in_flight(self):
    other = PRODUCT.replace("R88", "R96")
    lines = (PRODUCT, other, wait(1), "MOV R88, R3", "MOV R96, R3", "EXIT")
    (found,) = wgmma_hazards.overwritten_operands(sass(*lines))
    self.assertIn("MOV R96", found)

  def test_products_of_one_group_are_waited_for_together(self):
    first = PRODUCT.removesuffix(", gsb0")
    second = PRODUCT.replace("R88", "R92")
    text = sass(first, second, wait(0), "MOV R88, R3", "MOV R92, R3", "EXIT")
    self.assertEqual(wgmma_hazards.overwritten_operands(text), [])
    text = sass(first, "MOV R88, R3", second, wait(0), "EXIT")
    self.assertLen(wgmma_hazards.overwritten_operands(text), 1)

  def test_next_trip_of_a_loop_is_followed(self):
    loop = (
      ".L_1:",
      "LDS R88, [R3]",
      PRODUCT,
      "@P0 BRA `(.L_1)",
      wait(0),
      "EXIT",
    )
    (found,) = wgmma_hazards.overwritten_operands(sass(*loop))
    self.assertIn("LDS R88", found)
    waiting = (*loop[:3], wait(0), *loop[3:])
    self.assertEqual(wgmma_hazards.overwritten_operands(sass(*waiting)), [])

  def test_loop_that_never_waits_ends(self):
    loop = sass(".L_1:", PRODUCT, "BRA `(.L_1)", "EXIT")
    self.assertEqual(wgmma_hazards.overwritten_operands(loop), [])

  def test_branch_around_the_wait_is_followed(self):
    text = sass(
      PRODUCT, "@P0 BRA `(.L_1)", wait(0), ".L_1:", "MOV R88, R3", "EXIT"
    )
    self.assertLen(wgmma_hazards.overwritten_operands(text), 1)
