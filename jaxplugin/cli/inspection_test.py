# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `explain`."""

import json

from absl.testing import parameterized

from jaxplugin.core import formats
from jaxplugin.testing import command_lines, written_modules

B200 = ("--target", "b200", "--cudnn", "9.12")
DOT = "--lhs mxfp8 --rhs mxfp8 -m 1 -n 1 -k 32"


class ExplainTest(command_lines.CommandLineTestCase):
  def explain(self, line, *arguments, **options):
    return self.run_command("explain", *line.split(), *arguments, **options)

  def test_explain_for_a_device_that_is_not_here(self):
    line = "--lhs mxfp8 --rhs bf16 --out bf16 -m 1 -n 64 -k 96"
    status, out, _ = self.explain(line, *B200, "--verbose")
    self.assertEqual(status, 0)
    self.assertIn("target: b200 (cuda, sm_100, cuDNN 9.12.0)", out)
    self.assertIn("mxfp8 x bfloat16 -> bfloat16, batch=1 m=1 n=64 k=96", out)
    self.assertIn("not cudnn: needs both operands quantized", out)

  @parameterized.parameters(*(format.name for format in formats.KNOWN))
  def test_every_format_is_known_by_its_name(self, name):
    line = f"--lhs {name} --rhs {name} -m 3 -n 5 -k 64 --target h100"
    status, out, _ = self.explain(line)
    self.assertEqual(status, 0)
    self.assertRegex(out, f"\n0  {name} x {name} +3 +5 +64 +1  triton")

  def test_explain_prints_json(self):
    line = "--lhs nvfp4 --rhs nvfp4 -m 1 -n 64 -k 64 --json"
    status, out, _ = self.explain(line)
    (dot,) = json.loads(out)["dots"]
    self.assertEqual((status, dot["problem"]["k"]), (0, 64))

  def test_explain_of_a_file(self):
    path = self.write("m.mlir", written_modules.dot_module())
    status, out, _ = self.explain(path, *B200)
    self.assertEqual(status, 0)
    self.assertIn("target: b200 (cuda, sm_100, cuDNN 9.12.0)", out)
    self.assertRegex(out, r" mxfp8 x mxfp8 +8 +16 +64 +1  cudnn ")
    self.assertNotIn("not cpu", out)
    status, out, _ = self.explain(path, *B200, "--verbose")
    self.assertIn(f"    at {path}:3:10\n    needs no change\n    cudnn: ", out)

  def test_explain_of_a_file_in_json_with_a_forced_implementation(self):
    path = self.write("m.mlir", written_modules.dot_module())
    status, out, _ = self.explain(f"{path} --json --implementation xla", *B200)
    (parsed,) = json.loads(out)["dots"]
    self.assertEqual(status, 0)
    self.assertEqual(parsed["decision"]["implementation"], "xla")
    self.assertEqual(parsed["source"], f"{path}:3:10")

  def test_status_is_1_if_no_call_can_be_taken(self):
    good = written_modules.dot_module()
    bad = good.replace("8x2xf8E8M0FNU", "8x3xf8E8M0FNU").replace("@m", "@bad")
    both = good.rsplit("}", 1)[0] + bad.split("\n", 1)[1]
    for text, expected in ((good, 0), (bad, 1), (both, 0), ("module {}", 0)):
      path = self.write("m.mlir", text)
      status, out, _ = self.explain(path, *B200)
      self.assertEqual(status, expected, out)
    path = self.write("m.mlir", both)
    self.check_error(
      ["explain", path, *B200, "--strict"], "k must be a positive multiple"
    )

  def test_explain_of_standard_input(self):
    module = written_modules.dot_module().encode()
    status, out, _ = self.explain("-", *B200, stdin=module)
    self.assertEqual(status, 0)
    self.assertIn("0  <stdin>:3:10  mxfp8 x mxfp8", out)

  def test_explain_assumes_the_ptxas_that_is_named(self):
    dot = "--lhs bfloat16 --rhs nvfp4 -m 1 -n 256 -k 256 --target rtx5090"
    for more, expected in (
      ("", "FP4 is decoded by integer operations"),
      (" --ptxas 13.2", "FP4 is converted by cvt.rn.bf16x2.e2m1x2"),
    ):
      status, out, _ = self.explain(f"{dot}{more} --verbose")
      self.assertEqual(status, 0)
      self.assertIn(expected, " ".join(out.split()))

  def test_explain_of_a_module_without_calls_says_so(self):
    path = self.write("m.mlir", "module {}")
    status, out, _ = self.explain(path)
    self.assertEqual((status, out), (0, "no block-scaled dot\n"))

  @parameterized.parameters(
    ("--lhs int3 --rhs mxfp8 -m 1 -n 1 -k 32", "int3"),
    ("--lhs mxfp8 --rhs mxfp8 -m 1 -n 1 -k 33", "multiple of 32.*k=33"),
    (f"{DOT} --target x100", "name must be one of a100.*got 'x100'"),
    (f"{DOT} --target b200 --cudnn nine", "cudnn must be a version.*'nine'"),
    (f"{DOT} --cudnn 9.9", "--cudnn needs --target"),
    (f"{DOT} --ptxas 13.2", "--ptxas needs --target"),
    (f"{DOT} --target mi300x --ptxas 13.2",
      "ptxas must be None, because mi300x is not .* got '13.2'"),
    (f"{DOT} --target mi300x --implementation cudnn",
      "does not support.*platform is rocm"),
    ("--lhs float32 --rhs float32 -m 1 -n 1 -k 32", "rhs must be quantized"),
    ("", "needs FILE, or .*missing --lhs, --rhs, -m, -n, -k"),
    ("--lhs mxfp8 -m 1 -k 32", "missing --rhs, -n"),
    ("--batch 3", "missing --lhs, --rhs, -m, -n, -k"),
    (f"m.mlir {DOT} --out float32 --precision fastest",
      "not both: got m.mlir and --lhs, --rhs, -m, -n, -k, --out, --precision"),
    ("no/such/file", "error: no/such/file: No such file or directory"),
  )  # fmt: skip
  def test_bad_arguments_exit_with_2_and_a_reason(self, line, pattern):
    self.check_error(["explain", *line.split()], pattern)

  def test_precision_chooses_the_kernel(self):
    dot = "--lhs fp8_1x128 --rhs fp8_128x128 -m 128 -n 128 -k 256"
    _, out, _ = self.explain(f"{dot} --precision fastest --target h100 -v")
    self.assertIn("14 significant bits", " ".join(out.split()))
