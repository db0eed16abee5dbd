# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every golden file holds, and each of its checks can fail."""

import argparse
import contextlib
import functools
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
from unittest import mock

import dots
import files
import golden
import pytest
import tool
from absl.testing import absltest, parameterized

from jaxplugin.lab.compilation import deviceless
from jaxplugin.testing import folders, triton_ir, written_modules

PATHS = golden.paths()
IMPOSSIBLE = "no such text in any module"
DOT = "--target cpu --lhs 8x32xmxfp8 --rhs 8x32xmxfp8 --implementation xla"


@functools.cache
def _output_of(arguments):
  return golden.output(tool.main, golden.Run(arguments, ()))


def _output(run):
  return _output_of(run.tool)


def _named(path):
  return {
    "testcase_name": f"{path.parent.name}_{path.stem}",
    "path": path,
  }


class GoldenTest(triton_ir.WithoutPtx):
  def skip_without_compiler(self, runs):
    if any(run.needs_compiler for run in runs) and tool.missing_compiler():
      self.skipTest(tool.missing_compiler())

  @parameterized.named_parameters(*map(_named, PATHS))
  def test_holds(self, path):
    runs = golden.runs(path)
    self.skip_without_compiler(runs)
    for run in runs:
      message = golden.match(path, run.filecheck, _output(run))
      self.assertEqual(message, "", f"{run}\n{_output(run)}")

  @parameterized.named_parameters(*map(_named, PATHS))
  @pytest.mark.sample(8)
  def test_every_check_can_fail(self, path):
    # In a copy of the file, each check is made impossible, and each CHECK-NOT
    # is made to match any text. The copy must fail.
    runs = golden.runs(path)
    self.skip_without_compiler(runs)
    checked = {prefix: run for run in runs for prefix in run.prefixes}
    pattern = re.compile(rf"// ({'|'.join(checked)})(-[A-Z]+(?:-\d+)?)?: ")
    lines = path.read_text().splitlines()
    found = [
      (number, match)
      for number, line in enumerate(lines)
      if (match := pattern.match(line))
    ]
    self.assertEqual({match[1] for _, match in found}, set(checked))
    folder = folders.new(self)
    if golden.is_generated(path):
      found = found[:: len(found) // 5]
    for number, match in found:
      wrong = "{{[a-z]}}" if match[2] == "-NOT" else IMPOSSIBLE
      changed = [*lines]
      changed[number] = match[0] + wrong
      copy = folder / path.name
      copy.write_text("\n".join(changed) + "\n")
      run = checked[match[1]]
      arguments = [str(copy), *run.filecheck[1:]]
      message = golden.match(copy, arguments, _output(run))
      self.assertNotEmpty(
        message, f"line {number + 1} is idle: {lines[number]}"
      )

  def test_regeneration_changes_nothing(self):
    generated = [path for path in PATHS if golden.is_generated(path)]
    self.assertNotEmpty(generated)
    for path in generated:
      fresh = golden.regenerated(tool.main, path)
      self.assertEqual(fresh, path.read_text(), path)

  def test_every_folder_has_files(self):
    self.assertEqual({p.parent.name for p in PATHS}, set(golden.FOLDERS))


class RunLineTest(parameterized.TestCase):
  def write(self, text):
    path = folders.new(self) / "golden.mlir"
    path.write_text(text)
    return path

  def test_definitions_and_continuations_are_replaced(self):
    path = self.write(
      "// A claim.\n// DEFINE: %{dot} = --lhs a \\\n// DEFINE:   --rhs b\n"
      "// RUN: %tool emit %{dot} \\\n// RUN:   | filecheck %s\n"
    )
    self.assertEqual(
      golden.runs(path),
      [golden.Run(("emit", "--lhs", "a", "--rhs", "b"), (str(path),))],
    )

  @parameterized.parameters(
    "",
    "// RUN: %tool emit\n",
    "// RUN: echo a | filecheck %s\n",
    "// RUN: %tool emit | filecheck other.mlir\n",
    "// RUN: %tool emit | filecheck %s | cat\n",
    "// DEFINE: dot = a\n// RUN: %tool emit | filecheck %s\n",
  )
  def test_anything_else_is_an_error(self, text):
    with self.assertRaises(golden.GoldenError):
      golden.runs(self.write(text))

  @parameterized.parameters(
    ("emit --target b100", "", "exit status 2"),
    (f"refuse {DOT}", "", "not refused"),
    (
      f"emit {DOT}",
      "// CHECK: stablehlo.dot_general\n// CHECK-SAME: bf16\n",
      'golden.mlir:3.*match "bf16"',
    ),
  )
  def test_command_or_check_that_fails_is_an_error(
    self, command, checks, message
  ):
    path = self.write(f"// RUN: %tool {command} | filecheck %s\n{checks}")
    with self.assertRaisesRegex(golden.GoldenError, message):
      golden.check(tool.main, path)

  def test_handwritten_file_is_not_regenerated(self):
    path = next(p for p in PATHS if not golden.is_generated(p))
    before = path.read_text()
    with self.assertRaisesRegex(golden.GoldenError, "by hand"):
      golden.regenerate(tool.main, [path])
    self.assertEqual(path.read_text(), before)

  def test_regenerating_restores_a_generated_file(self):
    path = next(p for p in PATHS if golden.is_generated(p))
    copy = self.write(path.read_text().replace("stablehlo", "mhlo"))
    self.assertEqual(golden.regenerate(tool.main, [copy]), [copy])
    self.assertEqual(copy.read_text(), path.read_text())
    self.assertEqual(golden.regenerate(tool.main, [copy]), [])


class ToolTest(parameterized.TestCase):
  def run_tool(self, *argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      status = tool.main(list(argv))
    return status, out.getvalue(), err.getvalue()

  def test_missing_compiler_is_told(self):
    error = deviceless.DevicelessError("install the wheels")
    dot = ("--lhs", "8x32xmxfp8", "--rhs", "8x32xmxfp8")
    with mock.patch.object(deviceless, "mesh", side_effect=error):
      self.assertEqual(tool.missing_compiler.__wrapped__(), str(error))
      status, _, text = self.run_tool("optimize", "--target", "b200", *dot)
    self.assertEqual(status, 2)
    self.assertIn("install the wheels", text)

  @parameterized.parameters(
    (("emit", "--target", "cpu"), "--lhs and --rhs are needed"),
    (("emit", "--target", "cpu", "--cudnn", "9.13"), "has no cuDNN"),
    (("emit", "--target", "b200", "--cudnn", "nine"), "must be a version"),
    (("optimize", "--target", "b200", "--rewrite"), "--rewrite needs a FILE"),
    (
      ("optimize", "x.mlir", "--target", "b200", "--mesh", "4"),
      "left out with a FILE",
    ),
  )
  def test_bad_argument_is_told(self, argv, message):
    if "--cudnn" in argv or "--rewrite" in argv:
      argv = (*argv, "--lhs", "8x32xmxfp8", "--rhs", "8x32xmxfp8")
    status, _, text = self.run_tool(*argv)
    self.assertEqual(status, 2)
    self.assertIn(message, text)

  @parameterized.parameters(
    ("8x32xfp8", "an operand must have"),
    ("mxfp8", "an operand must have"),
    ("8x32xmxfp8:twisted", "got 'twisted'"),
    ("8x32xbfloat16:packed", "floats must have no option"),
  )
  def test_bad_operand_is_told(self, text, message):
    with self.assertRaisesRegex(argparse.ArgumentTypeError, message):
      dots.operand(text)

  def test_comments_of_a_file_are_blanked_and_lines_keep_their_numbers(self):
    path = folders.new(self) / "a.mlir"
    path.write_text("// CHECK: x\nmodule {\n// y\n}\n")
    self.assertEqual(files.text_of(path), "\nmodule {\n\n}")

  def test_module_without_main_is_told(self):
    path = folders.new(self) / "a.mlir"
    path.write_text("module {\n}\n")
    status, _, text = self.run_tool("optimize", str(path), "--target", "b200")
    self.assertEqual(status, 2)
    self.assertIn("no function main", text)


class LitTest(absltest.TestCase):
  def test_folder_of_the_documentation_passes_and_can_fail(self):
    lit = shutil.which("lit", path=str(pathlib.Path(sys.executable).parent))
    if lit is None:
      self.skipTest("lit is not installed beside this Python")
    page = golden.ROOT.parent / "docs" / "how_to" / "golden_tests.md"
    checks, config = (
      "".join(f"{line.strip()}\n" for line in block.splitlines())
      for block in re.findall(r"(?:^(?: {4}.*)?\n)+", page.read_text(), re.M)
      if block.strip()
    )
    module = written_modules.dot_module()
    folder = folders.new(self)
    (folder / "lit.cfg.py").write_text(config)
    (folder / "good.mlir").write_text(checks + module)
    # The checks must not hold for the module that is not rewritten.
    wrong = re.sub("RUN: .*", "RUN: grep -v // %s | filecheck %s", checks)
    (folder / "wrong.mlir").write_text(wrong + module)
    path = os.pathsep.join((os.path.dirname(sys.executable), os.defpath))
    done = subprocess.run(
      [lit, folder],
      capture_output=True,
      text=True,
      check=False,
      env={"PATH": path},
    )
    self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
    self.assertIn("PASS: golden :: good.mlir", done.stdout)
    self.assertIn("FAIL: golden :: wrong.mlir", done.stdout)

  def test_run_lines_are_shell_commands(self):
    lit = shutil.which("lit", path=str(pathlib.Path(sys.executable).parent))
    if lit is None:
      self.skipTest("lit is not installed beside this Python")
    name = "padded_scale_of_nvfp4_gives_block_size_16"  # with continuations
    command = [lit, "-v", "--param", "shell=1", "--filter", name, golden.ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn("PASS: hlo_tests :: emitted/" + name, done.stdout)
