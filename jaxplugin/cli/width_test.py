# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""No line of `--help` or of a command's default output is over 80 columns."""

import os

import numpy as np
import pytest
import safetensors.numpy
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin import __main__ as main
from jaxplugin.lab.bench import timing
from jaxplugin.lab.bench.report import results
from jaxplugin.lab.bench.report import table
from jaxplugin.testing import bench_results
from jaxplugin.testing import command_lines
from jaxplugin.testing import installed
from jaxplugin.testing import written_modules

LONG = "model.layers.{}.a_long_name_of_a_module.q_proj.weight"
DOT = "--lhs mxfp6_e2m3 --rhs mxfp6_e3m2 -m 16384 -n 128256 -k 16384"
FAST = (
  "info",
  f"explain {DOT} --target b200",
  f"explain {DOT} --verbose --target b200",
  "explain m.mlir --target b200",
  "rewrite m.mlir --target b200 -o out.mlir",
  "checkpoint model",
  "quantize model quantized --dry-run",
  "bench --show run.json",
  "bench --compare run.json run.json",
  "tune --shapes 1x4096x4096 --formats mxfp8 --target b200 --dry-run",
)
# They run compilers for seconds.
SLOW = (
  "kernels --target h200 --lhs bfloat16 --rhs nvfp4 -m 16 -n 256 -k 512",
  "compile m.mlir --target b200 --cudnn 9.13",
  "plan small --layout fsdp=2,tp=2,sp",
)


class WidthTest(command_lines.CommandLineTestCase):
  def setUp(self):
    super().setUp()
    self.write("m.mlir", written_modules.dot_module(m=128, n=384, k=256))
    tensors = {LONG.format(i): np.ones((64, 96), np.float32) for i in range(3)}
    (self.directory / "model").mkdir()
    safetensors.numpy.save_file(
      tensors, self.directory / "model" / "model.safetensors"
    )
    row = bench_results.row(
      bench_results.variant("cpu", 1, is_chosen=True),
      bench_results.variant("f32", 2),
      bench_results.variant("bf16", 3),
      row="experts:16384x4of128x2880x2880",
      formats="bfloat16xmxfp6_e2m3",
    )
    results.write(bench_results.run(row), self.directory / "run.json")
    before = os.getcwd()
    os.chdir(self.directory)
    self.addCleanup(os.chdir, before)
    self.enter_context(
      absltest.mock.patch.dict(os.environ, {"COLUMNS": "80", "LINES": "25"})
    )

  def check(self, *arguments):
    status, out, err = self.run_command(*arguments)
    self.assertEqual(status, 0, err)
    self.assertNotEmpty(out + err)
    for line in (out + err).splitlines():
      self.assertLessEqual(len(line), 80, line)

  def test_help(self):
    self.check("--help")
    for command in main.COMMANDS:
      self.check(command.name, "--help")

  def test_details_of_a_benchmark_have_120_columns(self):
    one = timing.stats([1.0])  # of one call, which a mark says
    names = ("cpu", "xla", "triton", "f32", "bf16", "a-longer-name-of-a-peer")
    row = bench_results.row(
      *(
        bench_results.variant(
          name, 1000, time=one, other_time=one, mode="step", launch_fraction=1.0
        )
        for name in names
      ),
      row="experts:16384x4of128x2880x2880",
    )
    run = bench_results.run(
      row,
      left_out=tuple(f"{i}x16384x16384 mxfp8" for i in range(9)),
      environment={**bench_results.ENVIRONMENT, "device": "A name " * 19},
    )
    lines = table.details(run).splitlines()
    self.assertLessEqual(max(map(len, lines)), 120, "\n".join(lines))
    self.assertIn("launch-bound? one call", "\n".join(lines))

  @parameterized.parameters(*FAST)
  def test_output(self, line):
    self.check(*line.split())

  @parameterized.parameters(*SLOW)
  @installed.needs_gpu_compilers
  @pytest.mark.lab
  def test_output_of_compilers(self, line):
    self.check(*line.split())
