# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is told of kernels that are compiled for a GPU that is not there."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import pathlib
import re
import sys
import tempfile
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import __main__ as main_lib
from jaxplugin import compilation
from jaxplugin import formats
from jaxplugin import problem as problem_lib

needs_triton = absltest.skipIf(
  importlib.util.find_spec("triton") is None, "triton is not installed"
)


SIZES = ("-m", "128", "-n", "256", "-k", "4096")
ONE_DOT = ("--target", "h200", "--lhs", "mxfp8", "--rhs", "mxfp8", *SIZES)


def make_problem(lhs, rhs, **changes):
  operands = [
    problem_lib.OperandProblem(
      format=format,
      dtype=formats.BF16 if format is None else format.values_dtype,
    )
    for format in (lhs, rhs)
  ]
  fields = dict(batch=1, m=256, n=512, k=4096, out_dtype=formats.BF16)
  fields |= dict(lhs=operands[0], rhs=operands[1], **changes)
  return problem_lib.DotProblem(**fields)


def run(*argv):
  """(exit status, stdout, stderr) of the command line."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = main_lib.main(argv)
  return status, out.getvalue(), err.getvalue()


@needs_triton
class CompileDotTest(parameterized.TestCase):
  @parameterized.parameters(
    # PTX ISA, "tcgen05.mma"; CDNA 3 ISA.
    ("b200", jp.NVFP4, jp.NVFP4, "kind::mxf4nvf4.block_scale.block16"),
    ("h200", jp.MXFP8, jp.MXFP8, "wgmma.mma_async"),
    ("mi300x", jp.MXFP8, jp.MXFP4, "v_mfma_f32"),
  )
  def test_report_names_the_matrix_instruction(self, name, lhs, rhs, expected):
    target = jp.named_target(name)
    compiled = compilation.compile_dot(make_problem(lhs, rhs), target)
    text = str(compiled)
    self.assertIn(f"{lhs} x {rhs} -> bfloat16, batch=1 m=256", text)
    self.assertRegex(text, rf"matrix instructions: \d+ of \S*{expected}")
    self.assertIn(", 0 B spilled", text)
    self.assertRegex(text, r"main loop: \d+ instructions")

  def test_figures_of_json_and_files_are_those_of_the_report(self):
    problem = make_problem(None, jp.NVFP4, m=1, has_bias=True)
    compiled = compilation.compile_dot(problem, jp.named_target("h200"))
    text, figures = str(compiled), json.loads(compiled.to_json())
    with tempfile.TemporaryDirectory() as directory:
      paths = compiled.write(directory)
      contents = {path.name: path.read_bytes() for path in paths}
    for kernel in figures["kernels"]:
      name = kernel["name"]
      report = text.split(f"\n{name}\n")[1]
      self.assertIn(f"registers: {kernel['registers']} a thread", report)
      self.assertIn(f"grid: {kernel['grid']} blocks", report)
      self.assertIn(name.encode(), contents[f"{name}.sm_90.ptx"])
      self.assertEqual(contents[f"{name}.sm_90.cubin"][:4], b"\x7fELF")
      self.assertIn(b"EXIT", contents[f"{name}.sm_90.sass"])

  def test_kernels_are_those_that_explain_names(self):
    def f(x, w):
      return jp.block_scaled_dot(x, w, preferred_element_type=jnp.bfloat16)

    target = jp.named_target("h200")
    x = jp.quantize(np.ones((16, 512), np.float32), jp.MXFP8)
    (dot,) = jp.explain(f, x, x, target=target)
    compiled = compilation.compile_dot(dot.problem, target)
    names = [launch.name for launch in compiled.launches]
    self.assertEqual(dot.decision.notes, (f"kernels: {', '.join(names)}",))


class ErrorTest(parameterized.TestCase):
  @parameterized.parameters(
    ("cpu", {}, "needs an NVIDIA or AMD GPU"),
    ("h200", {"m": None}, "static sizes"),
  )
  def test_refusal_is_told(self, name, changes, reason):
    problem = make_problem(jp.MXFP8, jp.MXFP8, **changes)
    with self.assertRaisesRegex(NotImplementedError, reason):
      compilation.compile_dot(problem, jp.named_target(name))

  def test_missing_triton_is_told(self):
    missing = {"triton": None, "jaxplugin.kernels.compile": None}
    with (
      mock.patch.dict(sys.modules, missing),
      self.assertRaisesRegex(NotImplementedError, "pip install triton"),
    ):
      compilation.compile_dot(
        make_problem(jp.MXFP8, jp.MXFP8), jp.named_target("h200")
      )

  @needs_triton
  def test_kernel_beyond_a_limit_is_an_error(self):
    from jaxplugin.kernels import compile as compile_lib

    message = mock.PropertyMock(return_value="needs more than there is")
    with (
      mock.patch.object(compile_lib.CompiledKernel, "limit_error", message),
      self.assertRaisesRegex(RuntimeError, "needs more than there is"),
    ):
      compilation.compile_dot(
        make_problem(jp.MXFP8, jp.MXFP8), jp.named_target("h200")
      )


@needs_triton
class CommandTest(parameterized.TestCase):
  def test_compile_prints_a_report_and_writes_files(self):
    directory = self.enter_context(tempfile.TemporaryDirectory())
    status, out, err = run("compile", *ONE_DOT, "--write", directory)
    self.assertEqual(status, 0)
    self.assertIn("mxfp8 x mxfp8 -> bfloat16, batch=1 m=128 n=256 k=4096", out)
    self.assertIn("wgmma", out)
    written = {str(path) for path in pathlib.Path(directory).iterdir()}
    self.assertEqual(set(err.split()), written)

  def test_compile_prints_json(self):
    status, out, _ = run("compile", *ONE_DOT, "--json")
    self.assertEqual(status, 0)
    names = [kernel["name"] for kernel in json.loads(out)["kernels"]]
    self.assertTrue(all(re.match("block_scaled_", name) for name in names))

  @parameterized.parameters(
    ("h300", "unknown target 'h300'; known targets: a100"),
    ("cpu", "needs an NVIDIA or AMD GPU"),
  )
  def test_bad_target_is_one_message(self, target, message):
    status, out, err = run("compile", *ONE_DOT, "--target", target)
    self.assertEqual((status, out), (2, ""))
    self.assertTrue(err.startswith("error: "), err)
    self.assertIn(message, err)


if __name__ == "__main__":
  absltest.main()
