# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`explain`, `info`, and the command line."""

import contextlib
import importlib.metadata
import io
import json
import platform

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import __main__ as command_line


def _operand(format, *shape):
  return jp.quantize(np.ones(shape, np.float32), format)


class ExplainTest(parameterized.TestCase):
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

  def test_global_scale_says_separate_or_none(self):
    explain = lambda format: (
      jp.explain(
        jp.block_scaled_dot, _operand(format, 2, 32), _operand(format, 2, 32)
      )[0].decision.global_scale
    )
    self.assertEqual(explain(jp.MXFP8), "none")
    self.assertIn(explain(jp.NVFP4), ("separate", "fused"))

  def test_every_other_implementation_is_refused_with_a_reason(self):
    (dot,) = jp.explain(
      jp.block_scaled_dot, _operand(jp.MXFP8, 2, 32), _operand(jp.MXFP8, 2, 32)
    )
    names = {refusal.implementation for refusal in dot.decision.refusals}
    self.assertEqual(
      names | {dot.decision.implementation}, {"xla", "cpu", "cudnn", "triton"}
    )
    for refusal in dot.decision.refusals:
      self.assertNotEmpty(refusal.reason)

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
      self.assertRegex(str(explanation), f"not cudnn: {reason}")
      self.assertIn(str(target), str(explanation))

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

  def test_gradient_products_are_explained(self):
    dot_general = jp.dot_general(jp.MXFP8, jp.MXFP8)
    loss = lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ()))).sum()
    explanation = jp.explain(
      jax.grad(loss, argnums=(0, 1)), jnp.ones((4, 64)), jnp.ones((64, 8))
    )
    self.assertEqual(sum(dot.count for dot in explanation), 3)

  def test_abstract_arguments_will_do(self):
    x = jax.ShapeDtypeStruct((4, 32), jnp.bfloat16)
    w = jax.eval_shape(lambda: jp.quantize(jnp.ones((8, 32)), jp.MXFP8))
    (dot,) = jp.explain(jp.block_scaled_dot, x, w)
    self.assertEqual((dot.problem.m, dot.problem.n, dot.problem.k), (4, 8, 32))

  def test_json_holds_the_same(self):
    explanation = jp.explain(
      jp.block_scaled_dot, _operand(jp.NVFP4, 2, 32), _operand(jp.NVFP4, 3, 32)
    )
    (parsed,) = json.loads(explanation.to_json())
    self.assertEqual(parsed["problem"]["n"], 3)
    self.assertEqual(
      parsed["decision"]["implementation"],
      explanation[0].decision.implementation,
    )

  def test_function_without_a_dot_says_so(self):
    self.assertEqual(str(jp.explain(jnp.sin, 1.0)), "no block-scaled dot")

  def test_target_of_another_type_is_refused(self):
    with self.assertRaisesRegex(
      TypeError, "target must be a jp.Target.*'b200'"
    ):
      jp.explain(jnp.sin, 1.0, target="b200")


class InfoTest(absltest.TestCase):
  def test_versions_devices_target_and_implementations_are_told(self):
    text = jp.info()
    self.assertIn(f"python: {platform.python_version()}", text)
    for package in ("jax", "jaxlib", "numpy"):
      self.assertIn(f"{package}: {importlib.metadata.version(package)}", text)
    self.assertIn(f"target: {jp.detect_target()}", text)
    for name in ("xla", "cpu", "cudnn", "triton"):
      self.assertRegex(text, rf"\n  {name}: .*mxfp8.*: (serves|no: .+)")
    self.assertIn("xla: mxfp8, mxfp8_e5m2, mxfp4, nvfp4: serves", text)


class CommandLineTest(parameterized.TestCase):
  def run_command(self, *arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      try:
        status = command_line.main(arguments)
      except SystemExit as stop:
        status = stop.code
    return status, out.getvalue(), err.getvalue()

  def test_info(self):
    status, out, _ = self.run_command("info")
    self.assertEqual((status, out), (0, jp.info() + "\n"))

  def test_explain_for_a_device_that_is_not_here(self):
    status, out, _ = self.run_command(
      *[
        "explain",
        "--lhs",
        "mxfp8",
        "--rhs",
        "bfloat16",
        "-m",
        "1",
        "-n",
        "64",
        "-k",
        "96",
      ],
      *["--target", "b200", "--cudnn", "9.12"],
    )
    self.assertEqual(status, 0)
    self.assertIn("target: b200 (cuda, sm_100, cuDNN 9.12.0)", out)
    self.assertIn("mxfp8 x bfloat16 -> bfloat16, batch=1 m=1 n=64 k=96", out)
    self.assertIn("not cudnn: needs both operands quantized", out)

  def test_explain_prints_json(self):
    status, out, _ = self.run_command(
      *[
        "explain",
        "--lhs",
        "nvfp4",
        "--rhs",
        "nvfp4",
        "-m",
        "1",
        "-n",
        "64",
        "-k",
        "64",
        "--json",
      ]
    )
    self.assertEqual((status, json.loads(out)[0]["problem"]["k"]), (0, 64))

  @parameterized.parameters(
    ("explain --lhs int3 --rhs mxfp8 -m 1 -n 1 -k 32", "int3"),
    ("explain --lhs mxfp8 --rhs mxfp8 -m 1 -n 1 -k 33", "multiple of 32.*k=33"),
    (
      "explain --lhs mxfp8 --rhs mxfp8 -m 1 -n 1 -k 32 --target x100",
      "unknown target 'x100'; known targets: a100, .*mi355x",
    ),
    (
      "explain --lhs mxfp8 --rhs mxfp8 -m 1 -n 1 -k 32 --target b200"
      " --cudnn nine",
      "malformed version 'nine'",
    ),
    (
      "explain --lhs mxfp8 --rhs mxfp8 -m 1 -n 1 -k 32 --cudnn 9.9",
      "--cudnn needs --target",
    ),
    (
      "explain --lhs mxfp8 --rhs mxfp8 -m 1 -n 1 -k 32 --target mi300x"
      " --implementation cudnn",
      "cannot serve.*platform is rocm",
    ),
    (
      "explain --lhs float32 --rhs float32 -m 1 -n 1 -k 32",
      "lhs or rhs must be quantized",
    ),
    ("", "required"),
  )
  def test_bad_arguments_exit_with_2_and_a_reason(self, line, pattern):
    status, out, err = self.run_command(*line.split())
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err.replace("\n", " "), pattern)


if __name__ == "__main__":
  absltest.main()
