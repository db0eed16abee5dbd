# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A build without the CPU kernels reports the reason.

The top-level CMakeLists.txt writes the reason to the first line of a file in
place of the library. `python -m jaxplugin info` quotes this line.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
from absl.testing import absltest, parameterized

# Resolved to the checkout's path, because under Bazel this file is a link.
ROOT = pathlib.Path(__file__).resolve().parents[1]
GENERATORS = {"Ninja": "ninja", "Unix Makefiles": "make"}
COMPILER = shutil.which("c++")


@absltest.skipIf(shutil.which("cmake") is None, "needs cmake")
class FailedBuildTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
      self.enter_context(tempfile.TemporaryDirectory())
    )

  def script(self, name, text):
    path = self.folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path

  def reason(self, generator, *options, **environment):
    if shutil.which(GENERATORS[generator]) is None:
      self.skipTest(f"needs {GENERATORS[generator]}")
    build = self.folder / "build"
    done = subprocess.run(
      ["cmake", "-G", generator, "-S", ROOT, "-B", build, *options],
      capture_output=True,
      text=True,
      env=os.environ | environment,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn("The CPU kernels are left out", done.stderr)
    report = (build / "stage" / "BUILD_FAILED.txt").read_text()
    return report.partition("\n")[0]

  @parameterized.named_parameters(
    ("error", "a\nb: error: c\nfailed", "b: error: c"),
    ("error_of_python", "a\nImportError: b\nfailed", "ImportError: b"),
    ("error_in_capitals", "failed\nERROR: a", "ERROR: a"),
    ("failed", "a\nsome job failed\nb", "some job failed"),
    ("failed_in_capitals", "a\nFAILED: b.o\nc", "FAILED: b.o"),
    ("killed", "a\nKilled\nb", "Killed"),
    ("other_words", "a\nno licence left\n\n \n", "no licence left"),
    ("word_that_is_false_to_cmake", "a-NOTFOUND", "a-NOTFOUND"),
    ("no_word", "", "exit status 3"),
  )
  def test_reason_is_the_line_that_tells_most(self, text, expected):
    (self.folder / "text").write_text(text)
    python = self.script("python", f'cat "{self.folder}/text" >&2; exit 3')
    generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
    self.assertEqual(
      self.reason(generator, f"-DPython_EXECUTABLE={python}"),
      f"failed to find the headers of jaxlib: {expected}",
    )

  @parameterized.parameters({}, {"CXX": "g++"})
  def test_missing_compiler_is_the_reason(self, **environment):
    generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
    tools = self.folder / "tools"
    tools.mkdir()
    for name in ("cmake", GENERATORS[generator]):
      (tools / name).symlink_to(shutil.which(name))
    reason = self.reason(
      generator,
      f"-DPython_EXECUTABLE={sys.executable}",
      PATH=str(tools),
      **environment,
    )
    self.assertEqual(reason, "failed to configure: there is no C++ compiler")

  @absltest.skipIf(COMPILER is None, "needs a C++ compiler")
  @parameterized.parameters(*GENERATORS)
  @pytest.mark.sample(1)
  def test_compiler_that_names_no_error_gives_a_reason(self, generator):
    """The compiler accepts CMake's test programs, but none of the kernels."""
    compiler = self.script(
      "compiler",
      'for word; do case "$word" in */kernels/cpu/*.cc)\n'
      "echo no licence left >&2; exit 1;; esac; done\n"
      f'exec "{COMPILER}" "$@"',
    )
    reason = self.reason(
      generator,
      f"-DPython_EXECUTABLE={sys.executable}",
      "-DCMAKE_TOOLCHAIN_FILE=" + str(self.toolchain(compiler)),
    )
    self.assertRegex(reason, r"^failed to compile: .*\w\.cc\.o")

  def toolchain(self, compiler):
    path = self.folder / "toolchain.cmake"
    path.write_text(f'set(CMAKE_CXX_COMPILER "{compiler}")\n')
    return path
