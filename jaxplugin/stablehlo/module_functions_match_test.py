# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (modules in the text)
"""Calls that already equal the call that would replace them."""

from absl.testing import parameterized

from jaxplugin.stablehlo import module_calls, module_functions, modules

A, B = "tensor<128x96xf8E4M3FN>", "tensor<128x4xf8E8M0FNU>"
GLOBAL = "tensor<bf16>"
OUT = "tensor<128x128xbf16>"
TYPES = f"({A}, {A}, {B}, {B}, {GLOBAL}) -> ({OUT}, tensor<0xui8>)"

MASK = """%keep = stablehlo.constant dense<[true, true, true, false]> : tensor<4xi1>
  %keeps = stablehlo.broadcast_in_dim %keep, dims = [1] : (tensor<4xi1>) -> tensor<128x4xi1>
  %zero = stablehlo.constant dense<0> : tensor<128x4xui8>
  %code = stablehlo.bitcast_convert %c : (tensor<128x4xf8E8M0FNU>) -> tensor<128x4xui8>
  %chosen = stablehlo.select %keeps, %code, %zero : tensor<128x4xi1>, tensor<128x4xui8>
  %masked = stablehlo.bitcast_convert %chosen : (tensor<128x4xui8>) -> tensor<128x4xf8E8M0FNU>"""


def module(before="", operands="%a, %b, %c, %d, %g", after="", result="%0#0"):
  text = f"""module {{
  func.func public @main(%a: {A}, %b: {A}, %c: {B}, %d: {B}, %g: {GLOBAL}) -> {OUT} {{
  {before}
  %0:2 = stablehlo.custom_call @__cudnn$blockScaledDot({operands}) : {TYPES}
  {after}
  return {result} : {OUT}
  }}
}}"""
  return modules.read(text).module


def is_emitted(there, emitted):
  """Returns `module_functions.is_emitted` for the only call of a module."""
  (operation,) = (
    operation
    for operation in modules.walk(there.operation)
    if module_calls.call_name(operation)
  )
  call = module_calls.read(operation)
  emitted = modules.imported(emitted, there.context)
  return module_functions.is_emitted(operation, call, emitted)


class MatchTest(parameterized.TestCase):
  def test_the_same_call_matches(self):
    self.assertTrue(is_emitted(module(), module()))

  def test_reshapes_and_casts_there_and_back_change_nothing(self):
    emitted = module(
      f"""%1 = stablehlo.reshape %a : ({A}) -> tensor<1x128x96xf8E4M3FN>
  %2 = stablehlo.slice %1 [0:1, 0:128, 0:96] : (tensor<1x128x96xf8E4M3FN>) -> tensor<1x128x96xf8E4M3FN>
  %3 = stablehlo.reshape %2 : (tensor<1x128x96xf8E4M3FN>) -> {A}
  %4 = stablehlo.convert %g : ({GLOBAL}) -> tensor<f32>
  %5 = stablehlo.convert %4 : (tensor<f32>) -> {GLOBAL}""",
      "%3, %b, %c, %d, %5",
    )
    self.assertTrue(is_emitted(module(), emitted))

  def test_cast_that_rounds_is_none(self):
    emitted = module(
      f"""%4 = stablehlo.convert %g : ({GLOBAL}) -> tensor<f8E4M3FN>
  %5 = stablehlo.convert %4 : (tensor<f8E4M3FN>) -> {GLOBAL}""",
      "%a, %b, %c, %d, %5",
    )
    self.assertFalse(is_emitted(module(), emitted))

  def test_other_order_of_operands_is_another_call(self):
    self.assertFalse(is_emitted(module(), module("", "%b, %a, %c, %d, %g")))
    self.assertFalse(is_emitted(module(), module("", "%a, %b, %d, %c, %g")))

  def test_fewer_operands_are_another_call(self):
    text = str(module()).replace(", %arg4) :", ") :", 1)
    text = text.replace(f"{B}, {GLOBAL}) -> (", f"{B}) -> (", 1)
    self.assertFalse(is_emitted(module(), modules.read(text).module))

  def test_what_follows_must_not_change_the_result(self):
    after = f"%9 = stablehlo.add %0#0, %0#0 : {OUT}"
    self.assertFalse(is_emitted(module(), module(after=after, result="%9")))

  def test_mask_that_is_there_already_matches(self):
    masked = module(MASK, "%a, %b, %masked, %d, %g")
    self.assertTrue(is_emitted(masked, masked))

  def test_mask_that_is_missing_does_not_match(self):
    masked = module(MASK, "%a, %b, %masked, %d, %g")
    self.assertFalse(is_emitted(module(), masked))

  def test_another_mask_does_not_match(self):
    masked = module(MASK, "%a, %b, %masked, %d, %g")
    for old, new in (
      ("true, true, true, false", "true, true, false, false"),
      ("dense<0>", "dense<1>"),
    ):
      other = module(MASK.replace(old, new), "%a, %b, %masked, %d, %g")
      self.assertFalse(is_emitted(other, masked))

  def test_what_changes_again_when_done_again_does_not_match(self):
    flipped = module(
      f"%f = stablehlo.reverse %c, dims = [0] : {B}", "%a, %b, %f, %d, %g"
    )
    self.assertFalse(is_emitted(flipped, flipped))

  def test_choice_that_depends_on_the_operand_does_not_match(self):
    before = MASK.replace("%keeps, %code", "%odd, %code").replace(
      "%chosen =",
      "%odd = stablehlo.compare EQ, %code, %zero : (tensor<128x4xui8>,"
      " tensor<128x4xui8>) -> tensor<128x4xi1>\n  %chosen =",
    )
    chosen = module(before, "%a, %b, %masked, %d, %g")
    self.assertFalse(is_emitted(chosen, chosen))

  def test_other_layouts_do_not_match(self):
    layout = lambda *order: f"dense<{list(order)}> : tensor<{len(order)}xindex>"
    there = str(module())
    row, column = layout(1, 0), layout(0, 1)
    scalar = "dense<> : tensor<0xindex>"
    results = f"result_layouts = [{row}, {layout(0)}]"
    for first, expected in ((row, True), (column, False)):
      operands = f"operand_layouts = [{first}, {row}, {row}, {row}, {scalar}]"
      text = there.replace(") : (", f") {{{operands}, {results}}} : (", 1)
      matches = is_emitted(modules.read(text).module, module())
      self.assertEqual(matches, expected)
