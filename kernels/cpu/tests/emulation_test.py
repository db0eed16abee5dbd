# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests the AVX-512 sources with emulated intrinsics, on any machine.

These tests take seconds. `emulate.sh` also runs the handlers' tests.
"""

from __future__ import annotations

import os
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile
from typing import Final

import pytest
from absl.testing import absltest

# Resolved: under Bazel this file is a link.
HERE: Final = pathlib.Path(__file__).resolve().parent
SOURCES: Final = HERE.parent
COMPILER: Final = shutil.which(os.environ.get("CXX", "g++"))
IS_X86: Final = platform.machine() in ("x86_64", "AMD64")
# The options of CMakeLists.txt that change results.
DOT: Final = ("-ffp-contract=fast", "-fno-trapping-math")
QUANTIZE: Final = ("-ffp-contract=off", "-fno-trapping-math")
# CMakeLists.txt has the reasons for -Wno-psabi and -O0.
AVX2: Final = ("-mavx2", "-mfma", "-mf16c", "-Wno-psabi")
DOTS: Final = 400  # random dots, half of them with any codes and scales


def x86_flags() -> str:
  """Returns the first processor's features as Linux lists them."""
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text()
  except OSError:
    return ""
  found = re.search(r"^flags\s*:(.*)$", text, re.M)
  return found[1] if found else ""


def arm(features: str) -> tuple[str, ...]:
  """Returns the option that allows Arm's features; none on x86-64."""
  return () if IS_X86 else (f"-march=armv8.2-a{features}",)


def why_not() -> str:
  """Returns why the tests cannot run on this machine, or an empty string."""
  if COMPILER is None:
    return "there is no C++ compiler"
  if IS_X86 and not {"avx2", "fma", "f16c"} <= set(x86_flags().split()):
    return "the emulation is compiled for AVX2, which this machine lacks"
  return ""


def intrinsics(path: pathlib.Path) -> set[str]:
  """Returns the names of intrinsics in a file, without its comments."""
  text = re.sub(r"//.*", "", path.read_text())
  return set(re.findall(r"\b_mm\w*_\w+", text))


class EmulationTest(absltest.TestCase):
  folder: pathlib.Path

  def setUp(self):
    super().setUp()
    reason = why_not()
    if reason:
      self.skipTest(reason)
    self.folder = pathlib.Path(
      self.enter_context(tempfile.TemporaryDirectory())
    )

  def compile(self, output: str, *words: str) -> None:
    command = [COMPILER, "-std=c++17", "-w", "-I.", *words]
    command += ["-o", self.folder / output]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True)
    self.assertEqual(done.returncode, 0, f"{command}\n{done.stderr}")

  def output(self, *words: str) -> str:
    done = subprocess.run(
      [self.folder / words[0], *words[1:]], capture_output=True, text=True
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    return done.stdout

  def test_every_emulated_intrinsic_is_used(self):
    """(A used intrinsic that is not emulated does not compile.)"""
    emulated = intrinsics(HERE / "emulation" / "avx512.h")
    used = set()
    for path in SOURCES.rglob("*.inl"):
      used |= intrinsics(path)
    self.assertNotEmpty(emulated)
    self.assertEqual(emulated - used, set())

  @pytest.mark.full
  def test_kernels_are_right_where_avx512_is_emulated(self):
    emulate = "-DJAXPLUGIN_EMULATE_AVX512"
    avx2 = AVX2 if IS_X86 else ()
    files = {
      "isa": ("-O1",),
      "parallel": ("-O1",),
      "tests/emulation/kernels_test": ("-O1",),
      "dot/offsets": ("-O1",),
      "dot/ragged": ("-O1",),
      "dot/rebase": ("-O1",),
      "dot/baseline": ("-O1", *DOT),
      "dot/avx2": ("-O1", *DOT, *avx2),
      "dot/avx512bf16": ("-O0", *DOT, *avx2),
      "dot/neon_dotprod": ("-O1", *DOT, *arm("+dotprod")),
      "dot/neon_i8mm": ("-O1", *DOT, *arm("+dotprod+i8mm")),
      "quantize/baseline": ("-O1", *QUANTIZE),
      "quantize/avx2": ("-O1", *QUANTIZE, *avx2),
      "quantize/avx512": ("-O1", *QUANTIZE, *avx2),
    }
    objects = []
    for name, words in files.items():
      objects.append(f"{name.replace('/', '_')}.o")
      self.compile(objects[-1], "-c", emulate, *words, f"{name}.cc")
    self.compile(
      "kernels_test", *(str(self.folder / name) for name in objects), "-pthread"
    )
    found = self.output("kernels_test", str(DOTS))
    self.assertIn("avx512_emulated: 0 failures", found)
    self.assertIn("avx512_bf16_emulated: 0 failures", found)
