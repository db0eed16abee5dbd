# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `compile`."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

from jaxplugin.testing import command_lines, installed, written_modules

needs_compiler = installed.needs("jax_cuda13_plugin")
# Written to a directory that the command line finds modules in.
MODEL = """
import jax
import jaxplugin as jp

def mlp(x, w):
  return jax.nn.relu(jp.block_scaled_dot(jp.quantize(x, jp.MXFP8), w))

class Model:
  def __call__(self): return jax.numpy.zeros(3)

model = Model()
number = 3
"""


class CompileTest(command_lines.CommandLineTestCase):
  def setUp(self):
    super().setUp()
    self.write("model_of_test.py", MODEL)
    self.write("m.mlir", written_modules.dot_module(m=128, n=384, k=256))
    path = [str(self.directory), *sys.path]
    self.enter_context(absltest.mock.patch.object(sys, "path", path))

  def compile(self, source, *options):
    target = ("--target", "b200", "--cudnn", "9.13")
    return self.run_command("compile", source, *target, *options)

  @needs_compiler
  def test_function_is_compiled_for_the_target(self):
    args = ("--arg", "bf16[16,256]", "--arg", "mxfp8[128,256]")
    status, out, err = self.compile("model_of_test:mlp", *args)
    self.assertEqual((status, err), (0, ""))
    self.assertStartsWith(
      out, "model_of_test:mlp on b200 (cuda, sm_100, cuDNN 9.13.0)\nkernels: "
    )
    self.assertIn("1 __cudnn$blockScaledDot", out)
    self.assertRegex(out, r"bytes: \d+ arguments, 8192 results, \d+ temporary")

  @needs_compiler
  def test_hlo_is_written_and_figures_are_json(self):
    path = self.directory / "out.hlo"
    status, out, _ = self.compile(
      str(self.directory / "m.mlir"), "-o", str(path), "--json"
    )
    self.assertEqual(status, 0)
    figures = json.loads(out)
    self.assertEqual(figures["custom_calls"], {"__cudnn$blockScaledDot": 1})
    self.assertEqual(figures["kernels"], 3)
    self.assertStartsWith(path.read_text(), "HloModule ")
    status, _, err = self.compile(
      str(self.directory / "m.mlir"), "-o", str(path)
    )
    self.assertEqual(status, 2)
    self.assertIn("exists", err)

  @needs_compiler
  def test_hlo_on_standard_output_has_it_alone(self):
    status, out, err = self.compile("model_of_test:model", "-o", "-")
    self.assertEqual(status, 0)
    self.assertStartsWith(out, "HloModule ")
    self.assertNotIn("kernels:", out)
    self.assertStartsWith(err, "model_of_test:model on b200")

  @needs_compiler
  def test_module_is_rewritten_on_request(self):
    path = str(self.directory / "m.mlir")
    arguments = ("compile", path, "--target", "b200", "--cudnn", "9.9")
    _, as_it_is, _ = self.run_command(*arguments)
    _, rewritten, _ = self.run_command(*arguments, "--rewrite")
    self.assertNotIn("triton_kernel_call", as_it_is)
    self.assertIn("custom calls: 1 triton_kernel_call_ffi", rewritten)

  @needs_compiler
  @pytest.mark.full
  def test_cudnn_that_is_not_named_is_told(self):
    path = str(self.directory / "m.mlir")
    arguments = ("compile", path, "--target", "b200")
    for more, expected in ((("--rewrite",), True), ((), False)):
      _, _, err = self.run_command(*arguments, *more)
      self.assertEqual("no cuDNN is assumed: b200" in err, expected)

  @needs_compiler
  def test_module_of_another_device_is_refused(self):
    h200 = written_modules.triton_module(b"\n.target sm_90a\n")
    svd = jax.jit(jnp.linalg.svd).lower(jnp.eye(8)).as_text()
    for text, call in (
      (written_modules.cpu_module(), "jaxplugin_dequantize at .*"),
      (svd, "lapack_sgesdd_ffi"),
      (h200, "triton_kernel_call_ffi at .*, a kernel for sm_90a"),
    ):
      path = self.write("cpu.mlir", text)
      status, out, err = self.compile(str(path))
      self.assertEqual((status, out), (2, ""))
      self.assertRegex(
        err,
        f"cpu.mlir: .*'cuda' of b200, got a custom call of {call},.*"
        "lower.lowering_platforms=.'cuda',",
      )

  @parameterized.parameters(
    ("no_such_module:f", (), "no module named no_such_module"),
    ("model_of_test:none", (), "model_of_test has no none"),
    ("model_of_test:number", (), "must be a function, got int"),
    ("model_of_test:mlp", ("--rewrite",), "--rewrite needs a module"),
    ("m.mlir", ("--arg", "f32[3]"), "--arg needs a function"),
    ("m.mlir", ("--strict",), "--strict needs --rewrite"),
    ("m.mlir", ("--elide",), "--elide needs -o"),
    ("m.mlir", ("--force",), "--force needs -o"),
    ("none.mlir", (), "No such file"),
    ("m.mlir", ("--arg", "f33[3]"), "must be an array"),
    ("m.mlir", ("--target", "mi300x"), "mi300x is not an NVIDIA GPU"),
  )
  def test_bad_arguments_are_one_message(self, source, options, pattern):
    target = ("--target", "b200", "--cudnn", "9.13")
    self.check_error(("compile", source, *target, *options), pattern)
