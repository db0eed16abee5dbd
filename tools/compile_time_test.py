# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compile time is measured in a separate process for each format."""

import contextlib
import importlib.util
import io

import compile_time
import pytest
from absl.testing import absltest

needs_compiler = absltest.skipIf(
  importlib.util.find_spec("jax_triton") is None
  or importlib.util.find_spec("jax_cuda13_plugin") is None,
  "jax-triton or jax-cuda13-plugin is not installed",
)


class CompileTimeTest(absltest.TestCase):
  def test_ratios_are_to_the_first_format(self):
    rows = [
      compile_time.Compiled(
        format=name, cpu_s=s, peak_bytes=5 * 10**8, kernels=9, moved=moved
      )
      for name, s, moved in (("f32", 2, None), ("nvfp4", 30, 3.07))
    ]
    self.assertEqual(
      [line.split() for line in compile_time.table(rows).splitlines()[1:]],
      [
        ["f32", "2.0", "1.0x", "0.50", "9"],
        ["nvfp4", "30.0", "15.0x", "0.50", "9", "3.07x"],
      ],
    )

  def test_logs_are_measured_by_level(self):
    costs = compile_time.log_costs(2, 1)
    self.assertEqual([*costs], ["off", "INFO", "DEBUG"])
    self.assertGreater(min(costs.values()), 0)

  @needs_compiler
  @pytest.mark.full
  def test_a_small_step_is_measured(self):
    output = io.StringIO()
    sizes = ["--dots", "1", "--devices", "2", "--size", "128"]
    sizes += ["--rounds", "1"]
    with contextlib.redirect_stdout(output):
      self.assertEqual(
        compile_time.main([*sizes, "--formats", "bf16", "mxfp8"]), 0
      )
    _, plain, quantized = map(str.split, output.getvalue().splitlines())
    self.assertEqual([plain[0], quantized[0]], ["bf16", "mxfp8"])
    for row in (plain, quantized):
      self.assertGreater(float(row[1]), 0)
      self.assertGreater(float(row[3]), 0.05)
    # At least the kernels of five matmuls. `x` is read once; a byte for each
    # value, and a scale for each block, are written twice.
    self.assertGreater(int(quantized[4]), 5)
    self.assertEqual(quantized[5], f"{1 + (1 + 1 / 32):.2f}x")
