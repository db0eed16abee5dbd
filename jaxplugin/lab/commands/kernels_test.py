# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `kernels`."""

import json
import re

import pytest
from absl.testing import parameterized

from jaxplugin.testing import command_lines, installed

SIZES = ("-m", "128", "-n", "256", "-k", "4096")
ONE_DOT = ("--target", "h200", "--lhs", "mxfp8", "--rhs", "mxfp8", *SIZES)


@installed.needs_triton
class KernelsTest(command_lines.CommandLineTestCase):
  @pytest.mark.lab
  def test_report_is_printed_and_files_are_written(self):
    directory = self.directory / "kernels"
    status, out, err = self.run_command(
      "kernels", *ONE_DOT, "--write", str(directory)
    )
    self.assertEqual(status, 0)
    self.assertIn("mxfp8 x mxfp8 -> bfloat16, batch=1 m=128 n=256 k=4096", out)
    self.assertIn("wgmma", out)
    written = {str(path) for path in directory.iterdir()}
    self.assertEqual(set(err.split()), written)

  @pytest.mark.lab
  def test_compile_shows_kernels_with_tma_descriptors(self):
    status, out, _ = self.run_command("kernels", *ONE_DOT, "--descriptors")
    self.assertEqual(status, 0)
    self.assertRegex(out, r"(?m)^block_scaled_upcast_\S+_tma$")
    self.assertRegex(out, r"global loads: .*[1-9]\d* of tiles by TMA")

  @parameterized.parameters(
    ("h200", "bfloat16", "nvfp4"),
    ("a100", "mxfp8", "mxfp8"),
    ("b200", "nvfp4", "nvfp4"),
  )
  @pytest.mark.lab
  def test_kernels_are_executed(self, target, lhs, rhs):
    dot = ("--target", target, "--lhs", lhs, "--rhs", rhs, "--run")
    sizes = ("-m", "3", "-n", "72", "-k", "288")
    status, out, _ = self.run_command("kernels", *dot, *sizes)
    self.assertEqual(status, 0)
    error = re.search(r"error: (\S+) of what the contract allows", out)
    self.assertBetween(float(error[1]), 0.001, 1)
    self.assertRegex(out, r"instructions of warps: \d{4}")
    self.assertRegex(out, r"cp.async: \d+ passes, 1.00 times")

  @pytest.mark.lab
  def test_ptxas_that_is_named_decides_what_is_compiled(self):
    dot = "--target rtx5090 --lhs bfloat16 --rhs mxfp4 -m 1 -n 256 -k 512"
    for more in ((), ("--ptxas", "13.2")):
      directory = str(self.directory / f"kernels{len(more)}")
      status, _, err = self.run_command(
        "kernels", *dot.split(), *more, "--write", directory
      )
      self.assertEqual(status, 0)
      path = next(x for x in err.split() if x.endswith(".ptx"))
      with open(path) as file:
        self.assertEqual("cvt.rn.bf16x2.e2m1x2" in file.read(), bool(more))

  @pytest.mark.lab
  def test_json_has_kernels_and_counts_of_what_is_executed(self):
    sizes = ("-m", "3", "-n", "16", "-k", "1024", "--run", "--json")
    status, out, _ = self.run_command("kernels", *ONE_DOT, *sizes)
    self.assertEqual(status, 0)
    read = json.loads(out)
    self.assertLess(read["error"], 1)
    self.assertGreater(read["kernels"][0]["counts"]["matrix products"], 0)
    for kernel in read["kernels"]:
      self.assertStartsWith(kernel["name"], "block_scaled_")

  @parameterized.parameters("fp8_128x128", "fp8_row", "int4_32", "mxint8")
  @pytest.mark.lab
  def test_formats_of_checkpoints_are_executed(self, rhs):
    # Their names in kernels are not those of the package.
    dot = f"--target h200 --lhs bfloat16 --rhs {rhs} -m 3 -n 16 -k 256"
    status, out, _ = self.run_command(
      "kernels", *dot.split(), "--run", "--json"
    )
    self.assertEqual(status, 0)
    self.assertLess(json.loads(out)["error"], 1)

  @pytest.mark.lab
  def test_gpu_without_ptx_is_told(self):
    options = ("--run", "--target", "mi300x")
    self.check_error(("kernels", *ONE_DOT, *options), "choose an NVIDIA GPU")

  @parameterized.parameters(
    (
      "--target h300",
      "^error: named_target: name must be one of a100, .* got 'h300'",
    ),
    (
      "--target cpu",
      "^error: kernels: .*needs an NVIDIA or AMD GPU, .* Choose another --targ",
    ),
    (
      "--descriptors --target a100",
      "TMA descriptors need an NVIDIA GPU from sm_90 on",
    ),
    (f"--target h200 --write {__file__}", "kernels_test.py: Not a directory"),
  )
  def test_bad_argument_is_one_message(self, options, message):
    self.check_error(("kernels", *ONE_DOT, *options.split()), message)
