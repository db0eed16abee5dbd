# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (modules in the text)
"""`explain` and `info`."""

import dataclasses
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.runtime import triton_library
from jaxplugin.testing import (
  quantization_lowerings,
  triton_ir,
  written_modules,
)


def _operand(format, *shape):
  return jp.quantize(np.ones(shape, np.float32), format)


class ExplainTest(parameterized.TestCase):
  def test_what_is_no_function_is_refused(self):
    compiled = jax.jit(jnp.sin).lower(jnp.ones(3)).compile()
    for fn, text in ((None, "None"), (compiled, ".*Compiled.*not compiled")):
      with self.assertRaisesRegex(TypeError, f"explain: fn must .* got {text}"):
        jp.explain(fn, jnp.ones(3))

  def test_every_dot_is_listed_with_its_problem_and_its_line(self):
    def model(x, w, v):
      y = jp.block_scaled_dot(x, w)
      return jp.block_scaled_dot(y, v, preferred_element_type=jnp.bfloat16)

    explanation = jp.explain(
      model,
      _operand(jp.MXFP8, 3, 64),
      _operand(jp.MXFP4, 32, 64),
      _operand(jp.NVFP4, 5, 32),
    )
    self.assertLen(explanation, 2)
    first, second = explanation
    self.assertEqual(
      str(first.problem), "mxfp8 x mxfp4 -> float32, batch=1 m=3 n=32 k=64"
    )
    self.assertEqual(
      str(second.problem),
      "float32 x nvfp4 -> bfloat16, batch=1 m=3 n=5 k=32",
    )
    self.assertIn("diagnostics_test.py", first.source)
    self.assertIn("model", first.source)
    self.assertNotEqual(first.source, second.source)

  def test_a_matmul_without_elements_runs_no_kernel(self):
    h200 = jp.named_target("h200")
    for m, groups in ((0, 4), (8, 0), (8, 4)):
      x, sizes = jnp.ones((m, 64)), jnp.zeros(groups, jnp.int32)
      experts = jp.ScaledArray(
        jnp.zeros((groups, 32, 64), jnp.float8_e4m3fn),
        jnp.zeros((groups, 32, 2), jnp.float8_e8m0fnu),
        None,
        jp.MXFP8,
      )
      (dot,) = jp.explain(jp.ragged_dot, x, experts, sizes, target=h200)
      with jp.use_target(h200), triton_ir.without_ptx():
        traced = jax.jit(jp.ragged_dot).trace(x, experts, sizes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
      is_empty = "without a kernel" in str(dot.decision.notes)
      self.assertEqual(is_empty, "custom_call" not in text)
      self.assertEqual(is_empty, 0 in (m, groups))

  def test_what_is_no_array_is_given_to_the_function_as_it_is(self):
    def model(layer, x, *, name):
      self.assertEqual((name, layer["is_biased"]), ("relu", False))
      y = jp.block_scaled_dot(x, layer["w"])
      return {"y": layer["activation"](y), "name": name}

    layer = {"w": _operand(jp.MXFP8, 32, 64), "activation": jax.nn.relu}
    layer["is_biased"] = False  # stays a Python bool, not a tracer
    x = jax.ShapeDtypeStruct((3, 64), np.float32)
    (dot,) = jp.explain(model, layer, x, name="relu")
    self.assertEqual(
      str(dot.problem), "float32 x mxfp8 -> float32, batch=1 m=3 n=32 k=64"
    )
    self.assertRegex(dot.source, r"diagnostics_test\.py:\d+ \(.*model\)")

  @parameterized.parameters(
    ("b200", "9.9", "needs cuDNN 9.10.0 or newer, the target has 9.9.0"),
    ("h200", "9.13", "needs compute capability 10.0 or higher.* has 9.0"),
    ("mi300x", None, "needs an NVIDIA GPU, the target's platform is rocm"),
  )
  def test_target_decides(self, name, cudnn, reason):
    target = jp.named_target(name, cudnn=cudnn)
    arguments = [_operand(jp.NVFP4, 128, 64)] * 2
    explained = [jp.explain(jp.block_scaled_dot, *arguments, target=target)]
    with jp.use_target(target):
      explained.append(jp.explain(jp.block_scaled_dot, *arguments))
    for explanation in explained:
      self.assertEqual(explanation[0].target, target)
      self.assertRegex(explanation.details(), f"not cudnn: {reason}")
      self.assertIn(str(target), explanation.details())

  def test_dots_inside_control_flow_and_transforms_are_found(self):
    w = _operand(jp.MXFP8, 32, 32)

    @jax.jit
    def model(x):
      body = lambda c, _: (jp.block_scaled_dot(jp.quantize(c, jp.MXFP8), w), 0)
      x, _ = jax.lax.scan(body, x, None, length=3)
      x = jax.lax.cond(
        x[0, 0] > 0, lambda x: jp.block_scaled_dot(x, w), lambda x: x, x
      )
      return jax.checkpoint(lambda x: jp.block_scaled_dot(x, w))(x)

    self.assertLen(jp.explain(model, jnp.ones((4, 32))), 3)

  def test_same_dot_at_the_same_place_is_counted(self):
    w = _operand(jp.MXFP8, 32, 32)

    def model(x):
      for _ in range(4):
        x = jp.block_scaled_dot(x, w)
      return x

    (dot,) = jp.explain(model, jnp.ones((4, 32)))
    self.assertEqual(dot.count, 4)

  def test_function_without_a_dot_says_so(self):
    self.assertEqual(jp.explain(jnp.sin, 1.0).details(), "no block-scaled dot")

  def test_target_of_another_type_is_refused(self):
    with self.assertRaisesRegex(
      TypeError, "target must be a jp.Target.*'b200'"
    ):
      jp.explain(jnp.sin, 1.0, target="b200")


class ExplainModuleTest(triton_ir.WithoutPtx):
  B200 = jp.named_target("b200", cudnn="9.12")

  def test_dot_has_its_place_problem_decision_and_refusals(self):
    explanation = jp.explain(written_modules.dot_module(), target=self.B200)
    (dot,), (parsed,) = explanation, json.loads(explanation.to_json())["dots"]
    self.assertEqual(dot.call, "__op$block_scaled_dot")
    self.assertEqual(dot.source, "<str>:3:10")
    self.assertEqual((parsed["call"], parsed["source"]), (dot.call, dot.source))
    self.assertEqual(
      str(dot.problem), "mxfp8 x mxfp8 -> float32, batch=1 m=8 n=16 k=64"
    )
    self.assertEqual(dot.decision.implementation, "cudnn")
    refused = [refusal.implementation for refusal in dot.decision.refusals]
    self.assertEqual(refused, ["triton", "xla", "cpu", "cutile"])
    self.assertEqual(dot.function, "")

  def test_report_says_what_becomes_of_a_call(self):
    report = jp.explain(
      written_modules.dot_module(), target=self.B200
    ).details()
    self.assertIn("target: b200 (cuda, sm_100, cuDNN 9.12.0)", report)
    self.assertIn("    at <str>:3:10\n    needs no change\n    cudnn: ", report)
    report = jp.explain(
      written_modules.dot_module(), target=jp.named_target("cpu")
    ).details()
    self.assertIn(
      "    becomes a call to @block_scaled_dot.mxfp8_xla\n    xla: ", report
    )
    self.assertIn(
      "    not cudnn: needs an NVIDIA GPU, the target's platform is cpu", report
    )

  def test_quantize_has_no_dot_to_decide_about(self):
    (call,) = jp.explain(written_modules.quantize_module(), target=self.B200)
    self.assertIsNone(call.problem)
    self.assertIsNone(call.decision)
    self.assertEqual(call.description, "quantize float32[8,64] to mxfp8")
    self.assertEqual(call.function, "quantize.mxfp8")

  def test_call_that_cannot_be_lowered_says_why_beside_the_others(self):
    bad = (
      written_modules.quantize_module("int8")
      .replace("@main", "@bad")
      .split("\n", 1)
    )
    module = written_modules.dot_module().rsplit("}", 1)[0] + bad[1]
    dot, quantize = jp.explain(module, target=self.B200)
    self.assertEqual(dot.error, "")
    self.assertRegex(quantize.error, "values must be floating-point, got int8")
    self.assertEqual(quantize.description, "(tensor<8x64xf32>)")
    self.assertIn(
      f"error: {quantize.error}",
      jp.explain(module, target=self.B200).details(),
    )

  def test_strict_raises_for_a_call_that_cannot_be_lowered(self):
    module = written_modules.quantize_module("int8")
    self.assertNotEmpty(jp.explain(module, target=self.B200)[0].error)
    with self.assertRaisesRegex(TypeError, "values must be floating-point"):
      jp.explain(module, target=self.B200, strict=True)
    with self.assertRaisesRegex(
      TypeError, "strict must be left out for a function"
    ):
      jp.explain(lambda x, strict: x, 1.0, strict=True)

  def test_decision_needs_no_package_that_lowers(self):
    h100 = jp.named_target("h100")
    (expected,) = jp.explain(written_modules.dot_module(), target=h100)
    self.assertEqual(expected.decision.implementation, "triton")
    self.assertEqual(expected.lowering_error, "")
    with mock.patch.object(
      triton_library, "_import_error", lambda: "no jax_triton"
    ):
      explanation = jp.explain(written_modules.dot_module(), target=h100)
      (found,) = explanation
      self.assertRegex(found.lowering_error, "needs jax-triton")
      self.assertIn("this process cannot lower it: ", explanation.details())
      with self.assertWarnsRegex(jp.RewriteWarning, "needs jax-triton"):
        jp.rewrite(written_modules.dot_module(), h100)
    self.assertEqual(
      dataclasses.replace(found, lowering_error="", launched_by=""),
      dataclasses.replace(expected, launched_by=""),
    )

  def test_estimate_is_that_of_the_function(self):
    def function(lhs, rhs, lhs_scale, rhs_scale):
      return jp.block_scaled_dot(
        jp.ScaledArray(lhs, lhs_scale, None, jp.MXFP8),
        jp.ScaledArray(rhs, rhs_scale, None, jp.MXFP8),
        preferred_element_type=jnp.float32,
      )

    for target in (self.B200, jp.named_target("h100")):
      (expected,) = jp.explain(
        function, *written_modules.mx_operands(), target=target
      )
      (found,) = jp.explain(written_modules.dot_module(), target=target)
      self.assertEqual(found.estimate, expected.estimate)
      self.assertEqual(found.estimate.flops, 2 * 8 * 16 * 64)

  def test_plain_products_of_a_module_are_listed_as_of_the_function(self):
    twice = jax.jit(lambda x: x @ x)

    def function(x, y):
      z = twice(twice(x))
      z = jax.lax.fori_loop(0, y, lambda _, a: a.T @ a, z)
      z = jax.lax.cond(y > 2, twice, lambda a: a, z)
      return jax.lax.conv(z[None, None], z[None, None, :2, :2], (1, 1), "SAME")

    arguments = jnp.ones((4, 4), jnp.bfloat16), 3
    of_function = jp.explain(function, *arguments, target=self.B200)
    lowered = jax.jit(function).lower(*arguments)
    of_module = jp.explain(lowered, target=self.B200)
    as_one = lambda others: sorted(
      (
        x.operation.split(".")[1].split("_")[0][:4],
        x.description,
        x.trips or 0,
        x.is_conditional,
        x.count,
        repr(x.estimate),
      )
      for x in others
    )
    self.assertEqual(as_one(of_module.others), as_one(of_function.others))
    self.assertLen(of_module.others, 4)
    self.assertIn("in a while loop, trip count unknown", of_module.details())
    self.assertRegex(of_module.others[0].source, r"diagnostics_test\.py:\d+")

  def test_calls_of_a_function_count(self):
    text = """module {
  func.func public @main(%a: tensor<8x64xf8E4M3FN>, %b: tensor<16x64xf8E4M3FN>, %c: tensor<8x2xf8E8M0FNU>, %d: tensor<16x2xf8E8M0FNU>) -> tensor<8x16xf32> {
    %0 = call @f(%a, %b, %c, %d) : (tensor<8x64xf8E4M3FN>, tensor<16x64xf8E4M3FN>, tensor<8x2xf8E8M0FNU>, tensor<16x2xf8E8M0FNU>) -> tensor<8x16xf32>
    %1 = call @f(%a, %b, %c, %d) : (tensor<8x64xf8E4M3FN>, tensor<16x64xf8E4M3FN>, tensor<8x2xf8E8M0FNU>, tensor<16x2xf8E8M0FNU>) -> tensor<8x16xf32>
    %2 = stablehlo.add %0, %1 : tensor<8x16xf32>
    return %2 : tensor<8x16xf32>
  }
"""
    function = written_modules.dot_module().replace(
      "public @main", "private @f"
    )
    (dot,) = jp.explain(
      text + function.split("\n", 1)[1], target=self.B200
    ).dots
    self.assertEqual(dot.count, 2)
    # A function without callers is rewritten too.
    (dot,) = jp.explain(function, target=self.B200).dots
    self.assertEqual(dot.count, 1)

  def test_every_form_of_a_module_is_explained(self):
    def function(x, w, x_scale, w_scale):
      return jax.lax.scaled_dot(x, w.T, lhs_scale=x_scale, rhs_scale=w_scale.T)

    lowered = jax.jit(function).lower(*written_modules.mx_operands())
    module = lowered.compiler_ir("stablehlo")
    text = lowered.as_text()
    for form in (lowered, module, text, text.encode()):
      (dot,) = jp.explain(form, target=self.B200)
      self.assertEqual(dot.call, "xla.scaled_dot")
      self.assertEqual((dot.problem.m, dot.problem.n), (8, 16))
    (dot,) = jp.explain(lowered, target=self.B200)
    self.assertRegex(dot.source, r"diagnostics_test\.py:\d+")
    self.assertIn("composite", lowered.as_text())

  @quantization_lowerings.needs_library
  def test_calls_of_a_lowered_module_are_said(self):
    x, w = np.ones((4, 128), np.float32), _operand("mxfp8", 64, 128)
    for target, platform, call in (
      (targets.current_target(), "cpu", "jaxplugin_block_scaled_dot"),
      (jp.named_target("h100"), "cuda", "triton_kernel_call"),
    ):
      with self.subTest(target.name), jp.use_target(target):
        lowered = (
          jax.jit(jp.linear).trace(x, w).lower(lowering_platforms=(platform,))
        )
        self.assertRegex(
          str(jp.explain(lowered)), rf"assumed: custom calls of {call}\S* \(1 "
        )

  def test_use_target_decides(self):
    with jp.use_target(self.B200):
      (dot,) = jp.explain(written_modules.dot_module())
    self.assertEqual(dot.decision.implementation, "cudnn")

  def test_module_takes_no_arguments(self):
    with self.assertRaisesRegex(TypeError, "must be empty for a module, got 1"):
      jp.explain(written_modules.dot_module(), 1.0)
