# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (modules in the text)
"""The command line."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.cli import main as command_line
from jaxplugin.stablehlo import modules
from jaxplugin.testing import written_modules

B200 = ("--target", "b200", "--cudnn", "9.12")
DOT_ARGUMENTS = "--lhs mxfp8 --rhs mxfp8 -m 1 -n 1 -k 32"


def dot_module(m=8):
  array = written_modules.array
  operands = [
    array((m, 64), jnp.float8_e4m3fn),
    array((16, 64), jnp.float8_e4m3fn),
    array((m, 2), jnp.float8_e8m0fnu),
    array((16, 2), jnp.float8_e8m0fnu),
  ]
  result = array((m, 16), np.float32)
  return written_modules.call_module(
    "__op$block_scaled_dot", operands, [result]
  )


class CommandLineTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    directory = self.enter_context(tempfile.TemporaryDirectory())
    self.directory = pathlib.Path(directory)

  def write(self, name, data):
    path = self.directory / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)

  def run_command(self, *arguments, stdin=b""):
    """Returns the exit status, what went to stdout (text), and to stderr."""
    status, out, err = self.run_binary(*arguments, stdin=stdin)
    return status, out.decode(), err

  def run_binary(self, *arguments, stdin=b""):
    out = io.TextIOWrapper(io.BytesIO())
    err = io.StringIO()
    given = io.TextIOWrapper(io.BytesIO(stdin))
    with contextlib.ExitStack() as stack:
      stack.enter_context(contextlib.redirect_stdout(out))
      stack.enter_context(contextlib.redirect_stderr(err))
      stack.enter_context(absltest.mock.patch.object(sys, "stdin", given))
      try:
        status = command_line.main(arguments)
      except SystemExit as stop:
        status = stop.code
    out.flush()
    return status, out.buffer.getvalue(), err.getvalue()

  def check_error(self, arguments, pattern, **options):
    """Asserts status 2, nothing on stdout, and one reason on stderr."""
    status, out, err = self.run_command(*arguments, **options)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err.replace("\n", " "), pattern)
    self.assertNotIn("Traceback", err)
    return err


class ExplainTest(CommandLineTestCase):
  def test_info(self):
    status, out, _ = self.run_command("info")
    self.assertEqual((status, out), (0, jp.info() + "\n"))

  def test_explain_for_a_device_that_is_not_here(self):
    line = "explain --lhs mxfp8 --rhs bfloat16 -m 1 -n 64 -k 96"
    status, out, _ = self.run_command(*line.split(), *B200)
    self.assertEqual(status, 0)
    self.assertIn("target: b200 (cuda, sm_100, cuDNN 9.12.0)", out)
    self.assertIn("mxfp8 x bfloat16 -> bfloat16, batch=1 m=1 n=64 k=96", out)
    self.assertIn("not cudnn: needs both operands quantized", out)

  def test_explain_prints_json(self):
    line = "explain --lhs nvfp4 --rhs nvfp4 -m 1 -n 64 -k 64 --json"
    status, out, _ = self.run_command(*line.split())
    (dot,) = json.loads(out)["dots"]
    self.assertEqual((status, dot["problem"]["k"]), (0, 64))

  def test_explain_of_a_file(self):
    path = self.write("m.mlir", dot_module())
    status, out, _ = self.run_command("explain", path, *B200)
    self.assertEqual(status, 0)
    self.assertIn("target: b200 (cuda, sm_100, cuDNN 9.12.0)", out)
    self.assertIn(f"    at {path}:3:10\n    stays as it is\n    cudnn: ", out)

  def test_explain_of_a_file_in_json_with_a_forced_implementation(self):
    path = self.write("m.mlir", dot_module())
    status, out, _ = self.run_command(
      "explain", path, *B200, "--json", "--implementation", "xla"
    )
    (parsed,) = json.loads(out)["dots"]
    self.assertEqual(status, 0)
    self.assertEqual(parsed["decision"]["implementation"], "xla")
    self.assertEqual(parsed["source"], f"{path}:3:10")

  def test_explain_of_standard_input(self):
    status, out, _ = self.run_command(
      "explain", "-", *B200, stdin=dot_module().encode()
    )
    self.assertEqual(status, 0)
    self.assertIn("at <stdin>:3:10", out)

  def test_explain_of_a_module_without_calls_says_so(self):
    path = self.write("m.mlir", "module {}")
    status, out, _ = self.run_command("explain", path)
    self.assertEqual((status, out), (0, "no block-scaled dot\n"))

  @parameterized.parameters(
    ("explain --lhs int3 --rhs mxfp8 -m 1 -n 1 -k 32", "int3"),
    ("explain --lhs mxfp8 --rhs mxfp8 -m 1 -n 1 -k 33", "multiple of 32.*k=33"),
    (
      f"explain {DOT_ARGUMENTS} --target x100",
      "unknown target 'x100'; known targets: a100, .*mi355x",
    ),
    (
      f"explain {DOT_ARGUMENTS} --target b200 --cudnn nine",
      "malformed version 'nine'",
    ),
    (f"explain {DOT_ARGUMENTS} --cudnn 9.9", "--cudnn needs --target"),
    (
      f"explain {DOT_ARGUMENTS} --target mi300x --implementation cudnn",
      "cannot serve.*platform is rocm",
    ),
    (
      "explain --lhs float32 --rhs float32 -m 1 -n 1 -k 32",
      "lhs or rhs must be quantized",
    ),
    ("explain", "needs FILE, or .*missing --lhs, --rhs, -m, -n, -k"),
    ("explain --lhs mxfp8 -m 1 -k 32", "missing --rhs, -n"),
    ("explain --batch 3", "missing --lhs, --rhs, -m, -n, -k"),
    (
      f"explain m.mlir {DOT_ARGUMENTS} --out float32",
      "not both: got m.mlir and --lhs, --rhs, -m, -n, -k, --out",
    ),
    ("explain no/such/file", "error: no/such/file: No such file or directory"),
    ("", "required"),
  )
  def test_bad_arguments_exit_with_2_and_a_reason(self, line, pattern):
    self.check_error(line.split(), pattern)


class RewriteTest(CommandLineTestCase):
  def test_result_goes_to_stdout_and_one_line_a_call_to_stderr(self):
    path = self.write("m.mlir", dot_module())
    status, out, err = self.run_command("rewrite", path, "--target", "cpu")
    self.assertEqual(status, 0)
    self.assertEqual(out, jp.rewrite(dot_module(), jp.named_target("cpu")))
    self.assertEqual(
      err.splitlines(),
      [
        f"{path}:3:10: __op$block_scaled_dot: mxfp8 x mxfp8 -> float32, batch=1"
        " m=8 n=16 k=64: xla, now a call of @block_scaled_dot.mxfp8_xla",
        f"{path}: 1 of 1 calls rewritten for cpu (cpu)",
      ],
    )

  def test_call_that_stays_is_told(self):
    path = self.write("m.mlir", dot_module())
    status, out, err = self.run_command("rewrite", path, *B200)
    self.assertEqual((status, out), (0, dot_module()))
    self.assertIn("cudnn, stays as it is", err)
    self.assertIn("0 of 1 calls rewritten", err)

  def test_module_without_calls_comes_out_as_it_is(self):
    text = "module { // a comment\n}\n"
    path = self.write("m.mlir", text)
    status, out, err = self.run_command("rewrite", path, *B200)
    self.assertEqual((status, out), (0, text))
    self.assertEqual(err, f"{path}: no block-scaled call, unchanged\n")

  def test_standard_input(self):
    status, out, err = self.run_command(
      "rewrite", "-", "--target", "cpu", stdin=dot_module().encode()
    )
    self.assertEqual(status, 0)
    self.assertEqual(out, jp.rewrite(dot_module(), jp.named_target("cpu")))
    self.assertStartsWith(err, "<stdin>:3:10: ")

  def test_cpu_target_is_one_that_any_process_can_run(self):
    path = self.write("m.mlir", dot_module())
    _, out, _ = self.run_command("rewrite", path, "--target", "cpu")
    self.assertNotIn("custom_call", out)

  def test_local_device_is_the_default(self):
    path = self.write("m.mlir", dot_module())
    _, out, _ = self.run_command("rewrite", path)
    self.assertEqual(out, jp.rewrite(dot_module(), jp.detect_target()))

  def test_implementation_and_scale_rounding_are_used(self):
    path = self.write("m.mlir", dot_module())
    _, out, _ = self.run_command(
      "rewrite", path, *B200, "--implementation", "xla"
    )
    self.assertIn("@block_scaled_dot.mxfp8_xla", out)
    array = written_modules.array
    module = written_modules.call_module(
      "__op$quantize",
      [array((8, 64), np.float32)],
      [array((8, 64), "float8_e4m3fn"), array((8, 2), "float8_e8m0fnu")],
    )
    path = self.write("q.mlir", module)
    for rounding in ("up", "floor"):
      _, out, _ = self.run_command(
        "rewrite", path, "--target", "cpu", "--scale-rounding", rounding
      )
      cpu = jp.named_target("cpu")
      self.assertEqual(out, jp.rewrite(module, cpu, scale_rounding=rounding))

  @parameterized.parameters("text", "bytecode", "portable")
  def test_formats(self, format):
    path = self.write("m.mlir", dot_module())
    status, out, _ = self.run_binary(
      "rewrite", path, "--target", "cpu", "--format", format
    )
    self.assertEqual(status, 0)
    start = {
      "text": b"module",
      "bytecode": b"ML\xefR\rMLIR",
      "portable": b"ML\xefR\rStableHLO_v",
    }
    self.assertStartsWith(out, start[format])
    # Bytecode keeps the places of the text that was read, which text has not.
    expected = jp.rewrite(dot_module(), jp.named_target("cpu"))
    self.assertEqual(str(modules.read(out).module), expected)

  def test_format_of_the_input_is_the_default(self):
    source = modules.read(dot_module())
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
    self.assertIn("quantize float32[8,64] to mxfp8: now a call of", err)

  @parameterized.parameters(
    ("m.mlir --target x100", "unknown target 'x100'; known targets: a100,"),
    ("m.mlir --target b200 --cudnn 9.x", "malformed version '9.x'"),
    ("m.mlir --target mi300x --cudnn 9.9", "mi300x is not an NVIDIA GPU"),
    ("m.mlir --cudnn 9.9", "--cudnn needs --target"),
    ("m.mlir --target b200 --implementation magic", "invalid choice: 'magic'"),
    (
      "m.mlir --target h100 --implementation cudnn",
      r"__op\$block_scaled_dot\(.*\) at .*m\.mlir:3:10: .*cannot serve",
    ),
    ("none.mlir --target cpu", r"error: \S*none\.mlir: No such file"),
    ("bad.mlir", r"error: \S*bad\.mlir:2:15: expected"),
    ("bad.hlo", r"error: \S*bad\.hlo:3:6: .*Unknown opcode"),
    ("invalid.mlir", r"error: \S*invalid\.mlir:3:5: type of return operand 0"),
    ("cut.mlirbc", r"error: \S*cut\.mlirbc: malformed or truncated bytecode: "),
    ("start.mlirbc", r"error: \S*start\.mlirbc: .*truncated after 3 B"),
    ("garbage", r"error: \S*garbage: neither MLIR bytecode.*nor UTF-8 text"),
    ("empty", r"error: \S*empty: the module is empty"),
    (".", r"error: \S*: Is a directory"),
    ("", "the following arguments are required: FILE"),
  )
  def test_bad_input_is_one_line_and_status_2(self, line, pattern):
    self.write("m.mlir", dot_module())
    self.write("bad.mlir", "module {\n func.func @x( }\n")
    self.write(
      "bad.hlo", "HloModule x\nENTRY main {\n x = f3[2] parameter(0)\n}"
    )
    self.write(
      "invalid.mlir",
      "module {\n  func.func @f(%x: tensor<2xf32>) -> tensor<3xf32> {\n"
      "    return %x : tensor<2xf32>\n  }\n}",
    )
    bytecode = modules.read(dot_module()).serialize("bytecode")
    self.write("cut.mlirbc", bytecode[: len(bytecode) // 2])
    self.write("start.mlirbc", bytecode[:3])
    self.write("garbage", b"\xff\xfe\x00")
    self.write("empty", " \n")
    arguments = line.split()
    if arguments:
      arguments[0] = str(self.directory / arguments[0])
    err = self.check_error(["rewrite", *arguments], pattern)
    if err.startswith("error") and "cannot serve" not in err:
      self.assertLen(err.splitlines(), 1)

  def test_process_ends_with_one_line_for_a_future_artifact(self):
    # MLIR itself would write to the process's stderr here, not to Python's.
    data = modules.read(dot_module()).serialize("portable")
    version = data[len(b"ML\xefR\rStableHLO_v") :].split(b".")[0]
    future = data.replace(b"StableHLO_v" + version, b"StableHLO_v9", 1)
    future = future.replace(b"block_scaled_dot", b"block_scaled_do", 1)
    path = self.write("future.mlirbc", future)
    result = subprocess.run(
      [sys.executable, "-m", "jaxplugin", "rewrite", path, "--target", "cpu"],
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
    )
    self.assertEqual((result.returncode, result.stdout), (2, ""))
    self.assertLen(result.stderr.splitlines(), 1)
    self.assertStartsWith(result.stderr, f"error: {path}: ")

  def test_help_of_each_command_has_an_example(self):
    for command in ("explain", "rewrite"):
      status, out, _ = self.run_command(command, "--help")
      self.assertEqual(status, 0)
      self.assertIn(f"python -m jaxplugin {command} ", out)
      self.assertIn("examples:", out)


class OutputTest(CommandLineTestCase):
  def setUp(self):
    super().setUp()
    self.input = self.write("m.mlir", dot_module())
    self.output = str(self.directory / "out.mlir")

  def rewrite(self, output, *options, path=None):
    return self.run_command(
      "rewrite", path or self.input, "--target", "cpu", "-o", output, *options
    )

  def expected(self):
    return jp.rewrite(dot_module(), jp.named_target("cpu"))

  def check_refused(self, pattern, output, *options, path=None):
    status, out, err = self.rewrite(output, *options, path=path)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, pattern)
    self.assertEqual(pathlib.Path(self.input).read_text(), dot_module())
    leftovers = [p.name for p in self.directory.iterdir() if p.name[0] == "."]
    self.assertEqual(leftovers, [])

  def test_file_is_written_and_nothing_else(self):
    status, out, err = self.rewrite(self.output)
    self.assertEqual((status, out), (0, ""))
    self.assertIn("1 of 1 calls rewritten", err)
    self.assertEqual(pathlib.Path(self.output).read_text(), self.expected())
    names = sorted(path.name for path in self.directory.iterdir())
    self.assertEqual(names, ["m.mlir", "out.mlir"])
    mask = os.umask(0)
    os.umask(mask)
    self.assertEqual(os.stat(self.output).st_mode & 0o777, 0o666 & ~mask)

  def test_dash_is_stdout(self):
    status, out, _ = self.rewrite("-")
    self.assertEqual((status, out), (0, self.expected()))

  def test_input_is_never_written_over(self):
    link = str(self.directory / "symlink")
    os.symlink(self.input, link)
    hard = str(self.directory / "hard")
    os.link(self.input, hard)
    other = str(self.directory / "." / "m.mlir")
    for output in (self.input, link, hard, other):
      for options in ((), ("--force",)):
        self.check_refused("is the input file", output, *options)
    self.check_refused("is the input file", self.input, "--force", path=link)

  def test_redirected_input_is_never_written_over(self):
    with open(self.input, "rb") as file:
      result = subprocess.run(
        [
          sys.executable,
          "-m",
          "jaxplugin",
          "rewrite",
          "-",
          "--target",
          "cpu",
          "-o",
          self.input,
          "--force",
        ],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=file,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
      )
    self.assertEqual(result.returncode, 2)
    self.assertIn("is the input file", result.stderr)
    self.assertEqual(pathlib.Path(self.input).read_text(), dot_module())

  def test_what_exists_is_written_over_only_when_forced(self):
    self.write("out.mlir", "precious")
    self.check_refused("out.mlir exists; .*--force", self.output)
    self.assertEqual(pathlib.Path(self.output).read_text(), "precious")
    status, _, _ = self.rewrite(self.output, "--force")
    self.assertEqual(status, 0)
    self.assertEqual(pathlib.Path(self.output).read_text(), self.expected())

  def test_what_a_link_points_to_stays(self):
    precious = self.write("precious", "precious")
    os.symlink(precious, self.output)
    self.check_refused("exists", self.output)
    self.assertEqual(self.rewrite(self.output, "--force")[0], 0)
    self.assertEqual(pathlib.Path(precious).read_text(), "precious")
    self.assertEqual(pathlib.Path(self.output).read_text(), self.expected())

  def test_directory_and_device_are_refused(self):
    for output in (str(self.directory), "/dev/null"):
      for options in ((), ("--force",)):
        self.check_refused("is no regular file", output, *options)

  def test_missing_directory_is_named(self):
    output = str(self.directory / "no" / "out.mlir")
    self.check_refused(f"error: {output}: No such file or directory", output)

  def test_error_leaves_no_output(self):
    status, _, _ = self.rewrite(self.output, "--implementation", "cudnn")
    self.assertEqual(status, 2)
    self.assertFalse(os.path.lexists(self.output))


if __name__ == "__main__":
  absltest.main()
