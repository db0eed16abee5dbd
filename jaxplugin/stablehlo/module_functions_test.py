# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The lowering of a module's calls, and the errors of refused calls."""

from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.stablehlo import module_calls, module_functions
from jaxplugin.testing import written_modules

array = written_modules.array
CPU = jp.named_target("cpu")


def call(name, operands, results, **options):
  return module_calls.ModuleCall(
    name=name,
    operands=tuple(array(*x) for x in operands),
    results=tuple(array(*x) for x in results),
    **options,
  )


def dot(
  lhs="float8_e4m3fn",
  rhs="float8_e4m3fn",
  lhs_scale="float8_e8m0fnu",
  rhs_scale="float8_e8m0fnu",
  result="float32",
  block=32,
):
  return call(
    module_calls.DOT,
    [
      ((8, 64), lhs),
      ((16, 64), rhs),
      ((8, 64 // block), lhs_scale),
      ((16, 64 // block), rhs_scale),
    ],
    [((8, 16), result)],
    block_sizes=(block, block),
  )


def scaled_dot(
  values="float8_e4m3fn", columns=2, result=((8, 16), "float32"), **options
):
  return call(
    module_calls.SCALED_DOT,
    [
      ((8, 64), values),
      ((64, 16), values),
      ((8, columns), "float8_e8m0fnu"),
      ((columns, 16), "float8_e8m0fnu"),
    ],
    [result],
    dimension_numbers=(((1,), (0,)), ((), ())),
    **options,
  )


def quantize(values, scale, x="float32", block=32):
  return call(
    module_calls.QUANTIZE,
    [((8, 64), x)],
    [((8, 64), values), ((8, 64 // block), scale)],
    block_sizes=(block,),
  )


def lower(call, implementation=None):
  return module_functions.lower(call, CPU, implementation, "up")


class NameTest(parameterized.TestCase):
  def test_functions_are_named_by_formats_and_implementation(self):
    for made, name in (
      (dot(), "block_scaled_dot.mxfp8_xla"),
      (dot(rhs="float8_e5m2"), "block_scaled_dot.mxfp8_mxfp8_e5m2_xla"),
      (dot(lhs="float4_e2m1fn"), "block_scaled_dot.mxfp4_mxfp8_xla"),
      (
        dot(block=16),
        "block_scaled_dot.float8_e4m3fn_float8_e8m0fnu_per_16_xla",
      ),
      (quantize("float8_e4m3fn", "float8_e8m0fnu"), "quantize.mxfp8"),
      (quantize("float4_e2m1fn", "float8_e4m3fn", block=16), "quantize.nvfp4"),
    ):
      lowering = lower(made)
      self.assertEqual(lowering.name, name)
      (main, *_) = lowering.stablehlo().body
      arguments = main.type.inputs
      self.assertLen(arguments, len(made.operands))

  def test_uint8_values_are_integers_and_no_packed_fp4(self):
    lowering = lower(dot(lhs="uint8"))
    self.assertEqual(
      lowering.description,
      "bfloat16 + float8_e8m0fnu per 32 x mxfp8 -> float32, batch=1 m=8 n=16"
      " k=64",
    )

  def test_two_plain_sides_are_a_plain_dot(self):
    made = scaled_dot("bfloat16", columns=1, has_scale=(False, False))
    lowering = lower(made)
    self.assertEqual(lowering.name, "scaled_dot.plain")
    self.assertIsNone(lowering.decided)
    self.assertEqual(
      lowering.description, "plain dot of bfloat16[8,64], bfloat16[64,16]"
    )
    self.assertIn("stablehlo.dot_general", str(lowering.stablehlo()))


class RefusalTest(parameterized.TestCase):
  @parameterized.parameters(
    (dot(result="uint8"), TypeError, "float32, bfloat16 or float16, got uint8"),
    (quantize("int8", "float8_e8m0fnu"), TypeError,
      "values must be floating-point, got int8"),
    (quantize("float8_e4m3fn", "int8"), TypeError,
      "scale must be floating-point, got int8"),
    (quantize("float8_e4m3fn", "float8_e8m0fnu", x="int8"), TypeError,
      "unquantized array must be float32, bfloat16 or float16, got int8"),
    (quantize("float8_e4m3fn", "float32"), NotImplementedError,
      "cannot quantize to float8_e4m3fn . float32 per 32; known formats"),
    (quantize("bfloat16", "float8_e8m0fnu"), NotImplementedError,
      "cannot quantize to bfloat16"),
    (scaled_dot(result=((16, 8), "float32")), TypeError,
      r"results must be float32\[8,16\], got float32\[16,8\]"),
    (
      call(
        module_calls.SWIZZLED_DOT,
        [
          *(((128, 64), dtype) for dtype in ("uint8", "float8_e4m3fn")),
          *[((128, 4), "float8_e8m0fnu")] * 2,
        ],
        [((128, 128), "float32"), ((0,), "uint8")],
      ),
      TypeError,
      "lhs uint8 with lhs_scale float8_e8m0fnu is not a block format",
    ),
  )  # fmt: skip
  def test_call_is_refused_with_its_types(self, made, error, pattern):
    with self.assertRaisesRegex(error, pattern):
      lower(made)
