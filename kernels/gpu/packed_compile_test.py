# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels that store decoded packed values in shared memory compile.

Triton aborts the process if it finds no layout ("LLVM ERROR: Illegal shared
layout"), so a child process compiles the kernels.
"""

import pytest
from absl.testing import parameterized

from jaxplugin.testing import contract

pytestmark = pytest.mark.lab

_PROGRAM = """
import dataclasses
import sys
from jaxplugin.kernels import architectures
from jaxplugin.kernels.gpu import matmul_plans
from jaxplugin.kernels.gpu import tiles_by_rule
from jaxplugin.lab.inspection import compile
from jaxplugin.testing.kernels import matmul_shapes

architecture = architectures.by_name("sm_90")
packed = sys.argv[1]
for lhs, rhs in (packed, packed), ("int8_f16_32", packed), (packed, "mxfp8"):
  shape = matmul_shapes.product(lhs, rhs, m=200, n=4096, k=1152)
  default = tiles_by_rule.default_config(shape, architecture, core_count=132)
  # A tile of 128 rows and 32 values of k has one row in each of 128 threads.
  for config in (
    default,
    dataclasses.replace(
      default, block_m=64, block_n=128, block_k=32, num_warps=4, swap=False
    ),
    dataclasses.replace(
      default, block_m=128, block_n=64, block_k=32, num_warps=4, swap=True
    ),
  ):
    launch = matmul_plans.plan(shape, config, architecture)[0]
    print(launch.name, flush=True)
    compile.compile_matmul(launch, shape, architecture)
"""


class PackedCompileTest(parameterized.TestCase):
  @parameterized.parameters("int4_f16_32", "int4_bf16_128", "e2m1_f32_128")
  def test_tiles_of_decoded_values_have_a_layout(self, packed):
    found = contract.run_program(_PROGRAM, packed)
    started = found.stdout.split()
    self.assertEqual(
      found.returncode, 0, f"{started[-1:]}: {found.stderr[-2000:]}"
    )
    self.assertLen(started, 9)
