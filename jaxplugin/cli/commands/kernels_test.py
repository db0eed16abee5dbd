# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `kernels`."""

import importlib.util
import json
import re

from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.testing import command_lines

SIZES = ("-m", "128", "-n", "256", "-k", "4096")
ONE_DOT = ("--target", "h200", "--lhs", "mxfp8", "--rhs", "mxfp8", *SIZES)


@absltest.skipIf(
  importlib.util.find_spec("triton") is None, "triton is not installed"
)
class KernelsTest(command_lines.CommandLineTestCase):
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

  def test_json_is_printed(self):
    status, out, _ = self.run_command("kernels", *ONE_DOT, "--json")
    self.assertEqual(status, 0)
    names = [kernel["name"] for kernel in json.loads(out)["kernels"]]
    self.assertTrue(all(re.match("block_scaled_", name) for name in names))

  def test_compile_shows_kernels_with_tma_descriptors(self):
    status, out, _ = self.run_command("kernels", *ONE_DOT, "--descriptors")
    self.assertEqual(status, 0)
    self.assertRegex(out, r"(?m)^block_scaled_upcast_\S+_tma$")
    self.assertRegex(out, r"global loads: .*[1-9]\d* of tiles by TMA")

  def test_gpu_without_tma_is_told(self):
    options = ("--descriptors", "--target", "a100")
    status, out, err = self.run_command("kernels", *ONE_DOT, *options)
    self.assertEqual((status, out), (2, ""))
    self.assertIn("TMA descriptors need an NVIDIA GPU from sm_90 on", err)

  @parameterized.parameters(
    ("h300", "unknown target 'h300'; known targets: a100"),
    ("cpu", "needs an NVIDIA or AMD GPU"),
  )
  def test_bad_target_is_one_message(self, target, message):
    status, out, err = self.run_command("kernels", *ONE_DOT, "--target", target)
    self.assertEqual((status, out), (2, ""))
    self.assertTrue(err.startswith("error: "), err)
    self.assertIn(message, err)


if __name__ == "__main__":
  absltest.main()
