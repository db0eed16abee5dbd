# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (modules in the text)
"""The command `rewrite`."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.stablehlo import modules
from jaxplugin.testing import command_lines, written_modules

B200 = ("--target", "b200", "--cudnn", "9.12")
CPU = ("--target", "cpu")
PROCESS = (sys.executable, "-m", "jaxplugin", "rewrite")
MODULE = written_modules.dot_module()
REWRITTEN = jp.rewrite(MODULE, jp.named_target("cpu"))


class RewriteTestCase(command_lines.CommandLineTestCase):
  def setUp(self):
    super().setUp()
    self.path = self.write("m.mlir", MODULE)

  def rewrite(self, *options):
    return self.run_command("rewrite", self.path, *options)


class RewriteTest(RewriteTestCase):
  def test_result_goes_to_stdout_and_one_line_a_call_to_stderr(self):
    status, out, err = self.rewrite(*CPU)
    self.assertEqual(status, 0)
    self.assertEqual(out, REWRITTEN)
    self.assertEqual(
      err.split(),
      f"{self.path}:3:10: __op$block_scaled_dot: mxfp8 x mxfp8 -> float32,"
      " batch=1 m=8 n=16 k=64: xla, now a call to @block_scaled_dot.mxfp8_xla"
      f" {self.path}: 1 of 1 calls rewritten for cpu (cpu)".split(),
    )

  def test_call_that_stays_is_told(self):
    status, out, err = self.rewrite(*B200)
    self.assertEqual((status, out), (0, MODULE))
    err = " ".join(err.split())
    self.assertIn("cudnn, needs no change", err)
    self.assertIn("0 of 1 calls rewritten for b200", err)
    self.assertEndsWith(err, "9.12.0), 1 needs no change")

  def test_refused_call_stays_and_its_line_says_why(self):
    status, out, err = self.rewrite(*B200, "--implementation", "cpu")
    self.assertEqual((status, out), (0, MODULE))
    line = " ".join(err.split())
    self.assertStartsWith(
      line, f"{self.path}:3:10: __op$block_scaled_dot: (tensor<"
    )
    self.assertRegex(
      line, "not changed: .*implementation='cpu' does not support"
    )
    self.assertEndsWith(
      line,
      "0 of 1 calls rewritten for b200 (cuda, sm_100, cuDNN 9.12.0), 1 cannot"
      " be lowered",
    )

  def test_json_says_what_became_of_each_call(self):
    output = str(self.directory / "out.mlir")
    status, out, err = self.rewrite(*CPU, "--json", "-o", output)
    self.assertEqual((status, err), (0, ""))
    (call,) = json.loads(out)["calls"]
    self.assertEqual(call["source"], f"{self.path}:3:10")
    self.assertEqual(call["backend"], "xla")
    self.assertEqual(call["function"], "block_scaled_dot.mxfp8_xla")
    arguments = ("rewrite", self.path, *CPU, "--json")
    self.check_error(arguments, "--json needs -o OUT")

  def test_cudnn_that_is_not_named_is_told(self):
    notice = "no cuDNN is assumed: "
    for arguments, expected in (
      (("--target", "b200", "--implementation", "xla"), True),
      (("--target", "h100", "--implementation", "xla"), False),
      (B200, False),
      (CPU, False),
    ):
      status, _, err = self.rewrite(*arguments)
      self.assertEqual((status, notice in err), (0, expected))

  def test_module_without_calls_comes_out_as_it_is(self):
    text = "module { // a comment\n}\n"
    path = self.write("m.mlir", text)
    status, out, err = self.run_command("rewrite", path, *B200)
    self.assertEqual((status, out), (0, text))
    self.assertEqual(err, f"{path}: no block-scaled call, unchanged\n")

  def test_standard_input(self):
    status, out, err = self.run_command(
      "rewrite", "-", *CPU, stdin=MODULE.encode()
    )
    self.assertEqual(status, 0)
    self.assertEqual(out, REWRITTEN)
    self.assertStartsWith(err, "<stdin>:3:10: ")

  def test_local_device_is_the_default(self):
    _, out, _ = self.rewrite()
    self.assertEqual(out, jp.rewrite(MODULE, jp.detect_target()))

  def test_implementation_and_scale_rounding_are_used(self):
    _, out, _ = self.rewrite(*B200, "--implementation", "xla")
    self.assertIn("@block_scaled_dot.mxfp8_xla", out)
    module = written_modules.quantize_module()
    path = self.write("q.mlir", module)
    for rounding in ("up", "floor"):
      _, out, _ = self.run_command(
        "rewrite", path, "--target", "cpu", "--scale-rounding", rounding
      )
      cpu = jp.named_target("cpu")
      self.assertEqual(out, jp.rewrite(module, cpu, scale_rounding=rounding))

  @parameterized.parameters("text", "bytecode", "portable")
  @pytest.mark.sample(1)
  def test_formats(self, format):
    status, out, _ = self.run_binary(
      "rewrite", self.path, *CPU, "--format", format
    )
    self.assertEqual(status, 0)
    start = {
      "text": b"module",
      "bytecode": b"ML\xefR\rMLIR",
      "portable": b"ML\xefR\rStableHLO_v",
    }
    self.assertStartsWith(out, start[format])
    # Bytecode keeps the places of the text that was read, which text has not.
    self.assertEqual(str(modules.read(out).module), REWRITTEN)

  def test_format_of_the_input_is_the_default(self):
    source = modules.read(MODULE)
    older = dataclasses.replace(source, version="1.10.0")
    for data in (source.serialize("bytecode"), older.serialize("portable")):
      path = self.write("m.mlirbc", data)
      _, out, _ = self.run_binary("rewrite", path, "--target", "cpu")
      self.assertStartsWith(out, data[: data.index(b"\0")])
      _, text, _ = self.run_command(
        "rewrite", path, "--target", "cpu", "--format", "text"
      )
      self.assertIn("@block_scaled_dot.mxfp8_xla", text)

  def test_format_is_converted_where_nothing_is_rewritten(self):
    path = self.write("m.mlir", "module {}")
    _, out, _ = self.run_binary("rewrite", path, "--format", "bytecode")
    self.assertStartsWith(out, b"ML\xefR")

  def test_hlo_text(self):
    hlo = """HloModule h

ENTRY main {
  x = f32[8,64]{1,0} parameter(0)
  ROOT q = (f8e4m3fn[8,64]{1,0}, f8e8m0fnu[8,2]{1,0}) custom-call(x), custom_call_target="__op$quantize"
}
"""
    status, out, err = self.run_command(
      "rewrite", self.write("h.hlo", hlo), "--target", "cpu"
    )
    self.assertEqual(status, 0)
    self.assertIn("call @quantize.mxfp8", out)
    self.assertIn("quantize float32[8,64] to mxfp8: now a call to", err)

  def test_hlo_text_becomes_stablehlo_where_nothing_is_rewritten(self):
    """For one target or another, users get the same kind of file."""
    hlo = """HloModule h

ENTRY main {
  ROOT x = f32[8,64]{1,0} parameter(0)
}
"""
    _, out, err = self.run_command("rewrite", self.write("h.hlo", hlo), *CPU)
    self.assertIn("no block-scaled call, unchanged", err)
    self.assertIn("module @h", out)
    self.assertEqual(str(modules.read(out).module).count("func.func"), 1)

  @parameterized.parameters(
    (
      "m.mlir --target x100",
      "named_target: name must be one of a100, .* got 'x100'",
    ),
    ("m.mlir --target b200 --implementation magic", "invalid choice: 'magic'"),
    (
      "m.mlir --target h100 --implementation cudnn --strict",
      r"__op\$block_scaled_dot\(.*\) at .*m\.mlir:3:10: .*does not support",
    ),
    (
      "cpu.mlir --target h100",
      r"error: \S*cpu.mlir: .*lowered for the platform 'cuda' of h100, got a"
      r" custom call of jaxplugin_dequantize at \S*cpu.mlir:3:10, which that .*"
      r"use_target\(jp.named_target\('h100'\)\) .*"
      r"lower\(lowering_platforms=\('cuda',\)\)",
    ),
    (
      "b200.mlir --target h200 --cudnn 9.13",
      r"error: \S*b200.mlir: .*a kernel for sm_100a, which h200 \(cuda, sm_90,"
      r" cuDNN 9\.13\.0\) does not run",
    ),
    ("none.mlir --target cpu", r"error: \S*none\.mlir: No such file"),
    ("bad.mlir", r"error: \S*bad\.mlir:2:15: expected"),
    ("cut.mlirbc", r"error: \S*cut\.mlirbc: malformed or truncated bytecode: "),
    (".", r"error: \S*: Is a directory"),
    ("", "the following arguments are required: FILE"),
  )
  def test_bad_input_is_one_line_and_status_2(self, line, pattern):
    self.write("cpu.mlir", written_modules.cpu_module())
    b200 = written_modules.triton_module(b"\n.target sm_100a\n")
    self.write("b200.mlir", b200)
    self.write("bad.mlir", "module {\n func.func @x( }\n")
    bytecode = modules.read(MODULE).serialize("bytecode")
    self.write("cut.mlirbc", bytecode[: len(bytecode) // 2])
    arguments = line.split()
    if arguments:
      arguments[0] = str(self.directory / arguments[0])
    err = self.check_error(["rewrite", *arguments], pattern)
    if err.startswith("error") and "does not support" not in err:
      self.assertLen(err.splitlines(), 1)

  @pytest.mark.full
  def test_process_ends_with_one_line_for_a_future_artifact(self):
    # MLIR itself would write to the process's stderr here, not to Python's.
    data = modules.read(MODULE).serialize("portable")
    version = data[len(b"ML\xefR\rStableHLO_v") :].split(b".")[0]
    future = data.replace(b"StableHLO_v" + version, b"StableHLO_v9", 1)
    future = future.replace(b"block_scaled_dot", b"block_scaled_do", 1)
    path = self.write("future.mlirbc", future)
    result = subprocess.run(
      [*PROCESS, path, *CPU],
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
    )
    self.assertEqual((result.returncode, result.stdout), (2, ""))
    self.assertLen(result.stderr.splitlines(), 1)
    self.assertStartsWith(result.stderr, f"error: {path}: ")

  def test_elided_text_tells_the_length_of_a_kernel(self):
    config = "x" * 300
    for attributes, shown in (
      (f'backend_config = "{config}"', 'backend_config = "<300 bytes>"'),
      (
        f'mhlo.backend_config = {{a = "{config}", b = 3 : i64}}',
        'mhlo.backend_config = {a = "<300 bytes>", b = 3 : i64}',
      ),
    ):
      text = written_modules.call_module(
        "mine",
        [written_modules.array((3,), np.float32)],
        [written_modules.array((3,), np.float32)],
        attributes,
      )
      arguments = ("rewrite", self.write("long.mlir", text), "--target", "cpu")
      _, out, _ = self.run_command(*arguments)
      self.assertIn(config, out)
      _, out, _ = self.run_command(*arguments, "--elide")
      self.assertNotIn("xxx", out)
      self.assertIn(shown, out)
    status, _, err = self.run_command(
      *arguments, "--elide", "--format", "bytecode"
    )
    self.assertEqual(status, 2)
    self.assertIn("--elide needs --format text", err)


class OutputTest(RewriteTestCase):
  def setUp(self):
    super().setUp()
    self.output = str(self.directory / "out.mlir")

  def rewrite_to(self, output, *options, path=None):
    return self.run_command(
      "rewrite", path or self.path, *CPU, "-o", output, *options
    )

  def check_refused(self, pattern, output, *options, path=None):
    status, out, err = self.rewrite_to(output, *options, path=path)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, pattern)
    self.assertEqual(pathlib.Path(self.path).read_text(), MODULE)
    leftovers = [p.name for p in self.directory.iterdir() if p.name[0] == "."]
    self.assertEqual(leftovers, [])

  def test_file_is_written_and_nothing_else(self):
    status, out, err = self.rewrite_to(self.output)
    self.assertEqual((status, out), (0, ""))
    self.assertIn("1 of 1 calls rewritten", err)
    self.assertEqual(pathlib.Path(self.output).read_text(), REWRITTEN)
    names = sorted(path.name for path in self.directory.iterdir())
    self.assertEqual(names, ["m.mlir", "out.mlir"])
    mask = os.umask(0)
    os.umask(mask)
    self.assertEqual(os.stat(self.output).st_mode & 0o777, 0o666 & ~mask)

  def test_dash_is_stdout(self):
    status, out, _ = self.rewrite_to("-")
    self.assertEqual((status, out), (0, REWRITTEN))

  def test_input_is_never_written_over(self):
    link = str(self.directory / "symlink")
    os.symlink(self.path, link)
    hard = str(self.directory / "hard")
    os.link(self.path, hard)
    other = str(self.directory / "." / "m.mlir")
    for output in (self.path, link, hard, other):
      for options in ((), ("--force",)):
        self.check_refused("is the input file", output, *options)
    self.check_refused("is the input file", self.path, "--force", path=link)

  @pytest.mark.full
  def test_redirected_input_is_never_written_over(self):
    with open(self.path, "rb") as file:
      result = subprocess.run(
        [*PROCESS, "-", *CPU, "-o", self.path, "--force"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=file,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
      )
    self.assertEqual(result.returncode, 2)
    self.assertIn("is the input file", result.stderr)
    self.assertEqual(pathlib.Path(self.path).read_text(), MODULE)

  def test_what_exists_is_written_over_only_when_forced(self):
    self.write("out.mlir", "precious")
    self.check_refused("out.mlir exists; .*--force", self.output)
    self.assertEqual(pathlib.Path(self.output).read_text(), "precious")
    status, _, _ = self.rewrite_to(self.output, "--force")
    self.assertEqual(status, 0)
    self.assertEqual(pathlib.Path(self.output).read_text(), REWRITTEN)

  def test_directory_and_device_are_refused(self):
    for output in (str(self.directory), "/dev/null"):
      for options in ((), ("--force",)):
        self.check_refused("is not a regular file", output, *options)

  def test_missing_directory_is_named(self):
    output = str(self.directory / "no" / "out.mlir")
    self.check_refused(f"error: {output}: No such file or directory", output)

  def test_error_leaves_no_output(self):
    status, _, _ = self.rewrite_to(
      self.output, "--implementation", "cudnn", "--strict"
    )
    self.assertEqual(status, 2)
    self.assertFalse(os.path.lexists(self.output))
