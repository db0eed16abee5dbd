# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bazel compiles the CPU kernels with the options that CMake gives them."""

from __future__ import annotations

import ast
import json
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
from typing import Any, Final

import jax
from absl.testing import absltest

# Resolved, because under Bazel this file is a link.
ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
CMAKE: Final = ROOT / "kernels" / "cpu"
BAZEL: Final = ROOT / "tools" / "bazel" / "cc.bzl"
# Options that change the code, except -fPIC and -fPIE, which Bazel adds, and
# the standard, which CMake omits if it is the compiler's default.
DECISIVE: Final = ("-O", "-W", "-f", "-m")
ADDED: Final = ("-fPIC", "-fPIE")


def constants(path: pathlib.Path) -> dict[str, Any]:
  """Returns the lists and dictionaries that a .bzl file defines."""
  names: dict[str, Any] = {}

  def value(node: ast.expr) -> Any:
    match node:
      case ast.List():
        return [value(item) for item in node.elts]
      case ast.Dict():
        return {
          value(key): value(item)
          for key, item in zip(node.keys, node.values, strict=True)
        }
      case ast.Name():
        return names[node.id]
      case ast.BinOp(op=ast.Add()):
        return value(node.left) + value(node.right)
    return ast.literal_eval(node)

  for statement in ast.parse(path.read_text()).body:
    if isinstance(statement, ast.Assign):
      (target,) = statement.targets
      names[target.id] = value(statement.value)
  return names


def bazel_options(name: str, given: dict[str, Any]) -> set[str]:
  """Returns Bazel's compiler options of the file NAME.cc."""
  kind, _, isa = name.partition("/")
  options = set(given["COPTS"])
  if isa in given["_ISA_COPTS"] | given["_ARM_COPTS"]:
    options |= set(given[f"{kind.upper()}_COPTS"])
    machine = "_ARM" if platform.machine() == "aarch64" else "_ISA"
    options |= set(given[f"{machine}_COPTS"].get(isa, ()))
  return {option for option in options if option.startswith(DECISIVE)}


def cmake_options() -> dict[str, set[str]]:
  """Returns options by file name, from a configured build that is not built."""
  with tempfile.TemporaryDirectory() as folder:
    subprocess.run(
      [
        "cmake",
        *("-S", CMAKE, "-B", folder, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"),
        f"-DJAXPLUGIN_XLA_FFI_INCLUDE_DIR={jax.ffi.include_dir()}",
      ],
      check=True,
      stdout=subprocess.DEVNULL,
    )
    text = pathlib.Path(folder, "compile_commands.json").read_text()
  return {
    pathlib.Path(entry["file"]).relative_to(CMAKE).with_suffix("").as_posix(): {
      word
      for word in shlex.split(entry["command"])
      if word.startswith(DECISIVE) and word not in ADDED
    }
    for entry in json.loads(text)
  }


@absltest.skipIf(shutil.which("cmake") is None, "needs cmake")
class BazelOptionsTest(absltest.TestCase):
  def test_each_file_has_the_same_options(self):
    given = constants(BAZEL)
    expected = cmake_options()
    self.assertContainsSubset({"ffi", "isa", "dot/baseline"}, set(expected))
    for name, options in expected.items():
      self.assertEqual(bazel_options(name, given), options, name)
