# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims on machine code hold native products, and no emulated one."""

import functools

import triton
import triton.language as tl
from absl.testing import parameterized

from jaxplugin.kernels import architectures
from jaxplugin.lab.inspection import compile as kernel_compile
from jaxplugin.lab.inspection import machine_code
from jaxplugin.testing.kernels import machine_claims


@triton.jit
def _product_kernel(
  out, lhs, lhs_scale, rhs, rhs_scale,
  TILE: tl.constexpr, VEC_SIZE: tl.constexpr, RHS_FORMAT: tl.constexpr,
):  # fmt: skip
  """One tile, e4m3 by `RHS_FORMAT`; without rhs_scale a dot of FP8 alone."""
  row = tl.arange(0, TILE)
  a = tl.load(lhs + row[:, None] * TILE + row[None, :])
  if rhs_scale is None:
    b = tl.load(rhs + row[None, :] * TILE + row[:, None])
    acc = tl.dot(a, b)
  else:
    packed: tl.constexpr = TILE // 2 if RHS_FORMAT == "e2m1" else TILE
    inner = tl.arange(0, packed)
    b = tl.load(rhs + row[None, :] * packed + inner[:, None])
    block = tl.arange(0, TILE // VEC_SIZE)
    places = row[:, None] * (TILE // VEC_SIZE) + block[None, :]
    a_scale, b_scale = tl.load(lhs_scale + places), tl.load(rhs_scale + places)
    acc = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, RHS_FORMAT)
  tl.store(out + row[:, None] * TILE + row[None, :], acc)


@functools.cache
def instructions(architecture, rhs_format="e4m3", is_scaled=True):
  """Those of the machine code that a product compiles to."""
  pointers = {"out": "*fp32", "lhs": "*fp8e4nv", "lhs_scale": "*u8"}
  constexprs = {"TILE": 128, "VEC_SIZE": 32, "RHS_FORMAT": rhs_format}
  pointers["rhs"] = "*u8" if rhs_format == "e2m1" else "*fp8e4nv"
  if is_scaled:
    pointers["rhs_scale"] = "*u8"
  else:
    constexprs["rhs_scale"] = None
  return kernel_compile.compile_kernel(
    _product_kernel, pointers, constexprs, architecture
  ).machine_instructions


class ClaimTest(parameterized.TestCase):
  def test_every_architecture_has_claims(self):
    self.assertEqual({*machine_claims.CLAIMS}, {*architectures.ARCHITECTURES})
    for name, claims in machine_claims.CLAIMS.items():
      self.assertIn(machine_claims.UPCAST, claims)
      native = architectures.by_name(name)
      self.assertEqual("mxfp8" in claims, native.has_scaled_dot)
      self.assertEqual("nvfp4" in claims, native.scales_by_e4m3)
      self.assertEqual("mxfp8_mxfp4" in claims, native.mixes_fp4_and_fp8)

  @parameterized.parameters(
    ("sm_100", "mxfp8", "mxfp8", "mxfp8"),
    ("sm_100", "mxfp8_e5m2", "mxfp8", "mxfp8"),
    ("sm_100", "mxfp4", "mxfp8_e5m2", "mxfp8_mxfp4"),
    ("sm_120", "mxfp4", "mxfp8", "upcast"),
    ("sm_100", "nvfp4", "mxfp4", "upcast"),
    ("sm_100", "bf16", "nvfp4", "upcast"),
    ("gfx950", "nvfp4", "nvfp4", "upcast"),
    ("sm_90", "mxfp8", "mxfp8", "upcast"),
  )
  def test_kind_of(self, name, lhs, rhs, kind):
    self.assertEqual(machine_claims.kind(name, lhs, rhs), kind)

  def test_native_product_holds_its_claim(self):
    found = instructions("sm_100")
    self.assertEqual(machine_claims.broken("sm_100", "mxfp8", found), "")

  def test_product_that_triton_emulates_breaks_it(self):
    # `tl.dot_scaled` of FP8 by FP4 compiles for sm_120: to bf16, silently.
    found = instructions("sm_120", "e2m1")
    self.assertIn(
      "mxfp8 on sm_120 must have the instruction QMMA",
      machine_claims.broken("sm_120", "mxfp8", found),
    )
    self.assertEqual(machine_claims.broken("sm_120", "upcast", found), "")

  def test_product_without_scales_breaks_the_claim_of_the_same_name(self):
    # One that scales its sum afterwards: the mnemonic alone would not tell.
    found = instructions("sm_100", is_scaled=False)
    for instruction in found:
      self.assertStartsWith(instruction, "UTCQMMA ")
    self.assertIn("UTCQMMA", machine_claims.broken("sm_100", "mxfp8", found))

  @parameterized.parameters(
    ("sm_90", "upcast", {"HMMA.16816.F32.BF16": 8}),
    ("sm_90", "upcast", {"QGMMA.64x128x32.F32.E4M3.E4M3": 8}),
    ("sm_80", "upcast", {"HMMA.16816.F16": 8}),
    ("sm_100", "mxfp4", {"UTCOMMA.4X gdesc gdesc tmem tmem idesc tmem": 4}),
    ("sm_100", "nvfp4", {"UTCOMMA gdesc gdesc tmem tmem idesc tmem": 4}),
    ("sm_120", "mxfp8", {"QMMA.16832.F32.E4M3.E4M3": 4}),
    ("gfx950", "mxfp8", {"v_mfma_f32_32x32x16_bf16": 4}),
    ("gfx950", "mxfp8", {"v_mfma_f32_32x32x16_fp8_fp8": 4}),
    ("gfx950", "mxfp8", {}),
  )
  def test_other_instructions_break_a_claim(self, name, kind, found):
    text = machine_claims.broken(name, kind, found)
    self.assertIn(f"{kind} on {name}", text)
    self.assertIn(next(iter(found), "no matrix instruction"), text)

  def test_one_instruction_of_another_kind_breaks_a_claim(self):
    scaled = "QMMA.SF.16832.F32.E4M3.E5M2.E8"
    found = {scaled: 64}
    self.assertEqual(machine_claims.broken("sm_121", "mxfp8", found), "")
    found["HMMA.16816.F32.BF16"] = 1
    self.assertEndsWith(
      machine_claims.broken("sm_121", "mxfp8", found),
      "its machine code has HMMA.16816.F32.BF16",
    )

  def test_instructions_are_read_with_the_kinds_of_their_operands(self):
    text = """
        /*0000*/  UTCQMMA gdesc[UR6], gdesc[UR8], tmem[UR17], tmem[UR4], idesc[UR5], tmem[UR20], UP0 ;
        /*0010*/  @P0 UTCQMMA gdesc[UR6], gdesc[UR8], tmem[UR1], tmem[UR4], idesc[UR5], tmem[UR2], UPT ;
        /*0020*/  HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/  UTCCP.T.S.4x32dp128bit tmem[UR4], gdesc[UR6] ;
    """  # noqa: E501
    self.assertEqual(
      machine_code.matrix_instructions(machine_code.read_sass(text)),
      {
        "UTCQMMA gdesc gdesc tmem tmem idesc tmem": 2,
        "HMMA.16816.F32.BF16": 1,
      },
    )
