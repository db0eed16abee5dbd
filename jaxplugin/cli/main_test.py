# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What all commands of the command line have in common."""

import os
import subprocess
import sys

import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.cli import main
from jaxplugin.testing import command_lines

SIZES = ("-m", "128", "-n", "256", "-k", "4096")
ONE_DOT = ("--target", "h200", "--lhs", "mxfp8", "--rhs", "mxfp8", *SIZES)


class MainTest(command_lines.CommandLineTestCase):
  def test_info(self):
    status, out, _ = self.run_command("info")
    self.assertEqual((status, out), (0, jp.info() + "\n"))

  @pytest.mark.full
  def test_info_prints_no_traceback_without_a_gpu(self):
    if main.has_nvidia_gpu():
      self.skipTest("there is an NVIDIA GPU")
    environment = dict(os.environ)
    for name in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
      environment.pop(name, None)
    result = subprocess.run(
      [sys.executable, "-m", "jaxplugin", "info"],
      env=environment,
      capture_output=True,
      text=True,
      check=True,
    )
    self.assertNotIn("Traceback", result.stderr)

  def test_missing_command_is_told(self):
    self.check_error([], "required: command")

  def test_help_of_each_command_has_an_example(self):
    for command in ("explain", "rewrite"):
      status, out, _ = self.run_command(command, "--help")
      self.assertEqual(status, 0)
      self.assertIn(f"python -m jaxplugin {command} ", out)
      self.assertIn("examples:", out)

  @parameterized.product(
    given=(
      ("explain", "-4", "must be at least 0, got -4"),
      ("explain", "1e3", "must be a whole number, got '1e3'"),
      ("kernels", "-4", "must be at least 1, got -4"),
      ("kernels", "0", "must be at least 1, got 0"),
    ),
    option=("-m", "-n", "-k", "--batch"),
  )
  def test_bad_size_is_refused_with_its_option(self, given, option):
    command, size, said = given
    self.check_error(
      [command, *ONE_DOT, option, size], f"argument {option}: {said}"
    )


if __name__ == "__main__":
  absltest.main()
