# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Scales that no copy brings are loaded ahead, where that costs no block."""

import dataclasses

from absl.testing import parameterized
from jaxplugin.kernels.gpu import configs, matmul_plans

from jaxplugin.kernels import architectures
from jaxplugin.testing.kernels import matmul_shapes

SMALL_M = configs.MatmulConfig(
  path="small_m", block_m=16, block_n=128, block_k=128, swap=True
)
EIGHT_WARPS = dataclasses.replace(SMALL_M, block_n=256, num_warps=8)
UPCAST = configs.MatmulConfig(
  path="upcast", block_m=128, block_n=128, block_k=64, num_warps=8
)
NATIVE = dataclasses.replace(UPCAST, path="native", block_k=128)
AHEAD = "lhs rhs"


class ScalesAheadTest(parameterized.TestCase):
  @parameterized.parameters(
    # 128 rows of 4 codes and 128 threads: a copy of 4 bytes each.
    ("sm_90", "bf16", "mxfp4", {}, SMALL_M, ""),
    # Rows of 90 codes begin at no multiple of 4.
    ("sm_90", "bf16", "mxfp4", {"k": 2880}, SMALL_M, "rhs"),
    ("sm_90", "mxfp8", "mxfp8", {}, SMALL_M, "lhs"),
    # Registers of the last step's masks.
    ("sm_90", "mxfp8", "mxfp4", {"k": 2880}, EIGHT_WARPS, "rhs"),
    ("sm_90", "mxfp4", "mxfp4", {"k": 2880}, EIGHT_WARPS, AHEAD),
    # Rows of 4 codes, two threads each.
    ("sm_90", "nvfp4", "nvfp4", {}, UPCAST, AHEAD),
    ("sm_90", "bf16", "mxfp4", {}, UPCAST, "rhs"),
    # It would take more than 128 registers.
    ("sm_90", "mxfp8", "mxfp8", {}, UPCAST, ""),
    ("sm_80", "mxfp8", "mxfp8", {}, UPCAST, AHEAD),
    ("sm_120", "mxfp8", "mxfp8", {}, NATIVE, AHEAD),
    # 8 codes of each row in a step.
    ("sm_120", "nvfp4", "nvfp4", {}, NATIVE, ""),
    ("sm_80", "f32", "mxfp8", {}, UPCAST, ""),
    ("gfx950", "mxfp8", "mxfp8", {}, UPCAST, ""),
  )
  def test_those_that_are_too_short_to_copy(
    self, name, lhs, rhs, sizes, config, expected
  ):
    shape = matmul_shapes.product(lhs, rhs, **{"k": 4096, **sizes})
    architecture = architectures.by_name(name)
    (launch, *_) = matmul_plans.plan(shape, config, architecture)
    tiling = dict(launch.constexprs)["TILING"]
    sides = {"lhs": tiling.lhs, "rhs": tiling.rhs}
    ahead = [side for side, tile in sides.items() if tile.scale_is_ahead]
    self.assertEqual(" ".join(ahead), expected)


class ReduceTest(parameterized.TestCase):
  def test_a_thread_has_one_element_unless_there_are_many(self):
    threads = 32 * matmul_plans.REDUCE_WARPS
    self.assertEqual(matmul_plans.reduce_block(64 * 8192), threads)
    self.assertEqual(matmul_plans.reduce_block(4096 * 8192), 4 * threads)
