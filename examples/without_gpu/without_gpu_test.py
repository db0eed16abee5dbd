# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The outputs in docs/getting_started/hlo.md are those of this example."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import pathlib
import shlex
import subprocess
import sys

import pytest
from absl.testing import absltest

DIRECTORY = pathlib.Path(__file__).resolve().parent
PAGE = DIRECTORY.parents[1] / "docs" / "getting_started" / "hlo.md"


def quoted(start: str) -> list[str]:
  """Lines of the page's code block that starts with `start`."""
  for block in PAGE.read_text().split("```"):
    lines = block.strip("\n").splitlines()
    if lines and lines[0].startswith(start):
      return lines
  raise AssertionError(f"{PAGE.name} quotes nothing that starts with {start!r}")


def of_either_jax(line: str) -> str:
  """Some versions of XLA print a collective as its start."""
  return line.replace("-start", "").rstrip()


def run_quoted(start: str) -> tuple[list[str], list[str]]:
  """Runs the command of the page that starts so.

  Returns:
    (lines that the page quotes after it, lines printed), without indentation.
  """
  page = [line.strip() for line in PAGE.read_text().splitlines()]
  (at,) = (i for i, line in enumerate(page) if line.startswith(f"$ {start}"))
  quoted = list(itertools.takewhile(lambda x: x not in ("", "..."), page[at:]))
  arguments = shlex.split(quoted[0].removeprefix("$ python "))
  out = subprocess.run(
    [sys.executable, *arguments],
    capture_output=True,
    text=True,
    check=True,
    cwd=DIRECTORY,
  ).stdout
  return quoted[1:], [line.strip() for line in out.splitlines()]


class CommandsTest(absltest.TestCase):
  @absltest.skipIf(
    importlib.util.find_spec("triton") is None, "triton is not installed"
  )
  @pytest.mark.full
  def test_kernel_is_the_one_that_the_page_quotes(self):
    expected, printed = run_quoted("python -m jaxplugin kernels")
    self.assertLen(expected, 9)
    if not importlib.metadata.version("triton").startswith("3.9."):
      # Another Triton makes other instructions of the same kernel.
      expected = expected[:3]
    self.assertEqual(printed[: len(expected)], expected)

  @absltest.skipIf(
    importlib.util.find_spec("jax_cuda13_plugin") is None
    or importlib.util.find_spec("jax_triton") is None,
    "jax-cuda13-plugin or jax-triton is not installed",
  )
  @pytest.mark.full
  def test_compiled_function_is_the_one_that_the_page_quotes(self):
    expected, printed = run_quoted("python -m jaxplugin compile")
    self.assertLen(expected, 5)
    self.assertEqual(printed[0], expected[0])
    if importlib.metadata.version("jaxlib").startswith("0.10."):
      # Another XLA fuses otherwise.
      self.assertEqual(printed, expected)


@absltest.skipIf(
  importlib.util.find_spec("jax_cuda13_plugin") is None
  or importlib.util.find_spec("jax_triton") is None,
  "jax-cuda13-plugin or jax-triton is not installed",
)
@pytest.mark.full
class WithoutGpuTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    script = DIRECTORY / "without_gpu.py"
    out = subprocess.run(
      [sys.executable, str(script)], capture_output=True, text=True, check=True
    ).stdout
    out = out.replace(f"{DIRECTORY}/", "examples/without_gpu/")
    cls.lines = [of_either_jax(line) for line in out.splitlines()]

  def assert_printed(self, lines):
    """`lines` follow each other in what was printed."""
    lines = [of_either_jax(line) for line in lines]
    at = [i for i, line in enumerate(self.lines) if line == lines[0]]
    self.assertNotEmpty(at, f"not printed: {lines[0]}")
    follow = [self.lines[i : i + len(lines)] for i in at]
    self.assertIn(lines, follow)

  def test_decisions_are_those_that_the_page_quotes(self):
    *lines, dots = quoted("target: b200")
    self.assertEqual(dots, "[1] ...")
    self.assert_printed(lines)

  def test_optimized_hlo_is_what_the_page_quotes(self):
    self.assert_printed(quoted("optimized HLO"))

  def test_older_cudnn_is_refused(self):
    self.assertIn(
      "    not cudnn: needs cuDNN 9.10.0 or newer, the target has 9.9.0",
      self.lines,
    )
