# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matmul kernels that quantize their result give the bits of `jp.quantize`.

The kernels run in the interpreter. The expected bits are those of the f32
result of the same kernels, quantized by `jp.quantize`.
"""

import dataclasses

import numpy as np
import pytest
from absl.testing import parameterized
from jaxplugin.kernels.gpu import (
  block_scaled_matmul,
  matmul_plans,
  quantized_plans,
)
from jaxplugin.kernels.gpu.ragged import plans as ragged_plans

from jaxplugin.kernels import architectures
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import (
  gpu_operands,
  matmul_shapes,
  quantize_cases,
)

setUpModule = interpret.skip_unless_supported

SM_100 = matmul_shapes.SM_100
PATHS = matmul_shapes.PATHS
SPLIT = dataclasses.replace(PATHS["upcast"], split_k=3)
# (config, operands, result, scale rounding, whether there is an epilogue).
CASES = {
  "upcast": (PATHS["upcast"], ("bf16", "mxfp4"), "mxfp8", "up", False),
  "floor": (PATHS["upcast"], ("mxfp8", "nvfp4"), "mxfp4", "floor", True),
  "native": (PATHS["native"], ("nvfp4", "nvfp4"), "nvfp4", "up", True),
  "small_m": (PATHS["small_m"], ("bf16", "nvfp4"), "mxfp8_e5m2", "up", True),
  "split": (SPLIT, ("mxfp8", "mxfp8"), "nvfp4", "up", True),
  "split_mx": (SPLIT, ("bf16", "mxfp8"), "mxfp6_e2m3", "floor", False),
}
M, K, BATCH = 19, 136, 2
# n has whole blocks. With blocks of 16, a tile of 32 columns has a tail.
N = {"nvfp4": 80}
GLOBAL_SCALE = np.array([0.37], np.float32)


SPLIT_SMALL_M = dataclasses.replace(PATHS["small_m"], split_k=2)
SWAPPED = dataclasses.replace(PATHS["upcast"], swap=True, block_n=64)
# (config, format of rhs, activation, result).
RAGGED = {
  "upcast": (PATHS["upcast"], "mxfp4", "none", "mxfp8"),
  "gated": (SWAPPED, "mxfp8", "swiglu", "nvfp4"),
  "gated_mx": (SWAPPED, "nvfp4", "swigluoai", "mxfp4"),
  "split": (SPLIT_SMALL_M, "nvfp4", "swigluoai", "mxfp8"),
}
RAGGED_N = {"split": 64}


class QuantizedResultTest(parameterized.TestCase):
  def epilogue(self, n):
    """Returns an epilogue that makes a block with NaN, and one with -Inf."""
    rng = np.random.default_rng(0)
    residual = rng.normal(size=(BATCH, M, n)).astype(np.float32)
    residual[0, 1, 3], residual[1, 2, 20] = np.nan, -np.inf
    return gpu_operands.Epilogue(
      global_scale=np.array([2.0**-6], np.float32),
      bias=rng.normal(size=n).astype(np.float32),
      activation="gelu",
      residual=residual,
    )

  @parameterized.parameters(*CASES)
  @pytest.mark.sample(6)
  def test_bits_are_those_of_the_quantized_f32_result(self, key):
    config, formats, result, rounding, has_epilogue = CASES[key]
    n = N.get(result, 96)
    rng = np.random.default_rng(len(key))
    operands = [
      gpu_operands.make_operand(rng, format, (BATCH, rows, K), integers=True)
      for format, rows in zip(formats, (M, n), strict=True)
    ]
    operands[0].values[0, 4] = 0
    epilogue = self.epilogue(n) if has_epilogue else gpu_operands.Epilogue()
    shape = gpu_operands.shape_of(*operands, epilogue, "f32", None)
    global_scale = GLOBAL_SCALE if result == "nvfp4" else None
    arrays = gpu_operands.arrays_of(*operands, epilogue, None)
    arrays["out_global_scale"] = global_scale
    launches = matmul_plans.plan(shape, config, SM_100)
    rows = quantize_cases.with_given_scale(
      M, n, result, batch=BATCH, scale_rounding=rounding
    )
    self.check(block_scaled_matmul.KERNELS, launches, arrays, rows)

  @parameterized.parameters(*RAGGED)
  @pytest.mark.sample(4)
  def test_ragged_bits_are_those_of_the_quantized_f32_result(self, key):
    config, rhs, activation, result = RAGGED[key]
    rng = np.random.default_rng(len(key))
    groups, n, k = 4, RAGGED_N.get(key, 128), 136
    shapes = (("bf16", (1, M, k)), (rhs, (groups, n, k)))
    operands = [
      gpu_operands.make_operand(rng, format, shape, integers=True)
      for format, shape in shapes
    ]
    shape = ragged_plans.RaggedShape(
      groups=groups, batch=1, m=M, n=n, k=k, lhs=operands[0].kind,
      rhs=operands[1].kind, activation=activation, has_bias=True,
      has_global_scale=True, has_scale_of_group=True,
    )  # fmt: skip
    bias = rng.normal(size=(groups, n)).astype(np.float32)
    bias[2, 40] = np.inf
    arrays = gpu_operands.arrays_of(*operands, gpu_operands.Epilogue(), None)
    arrays |= {
      # The second group is empty, and three rows are in no group.
      "group_sizes": np.array([7, 0, 4, 5], np.int32),
      "global_scale": np.exp2([-6, 1, -9, -4]).astype(np.float32)[:, None],
      "bias": bias,
      "out_global_scale": GLOBAL_SCALE if result == "nvfp4" else None,
    }
    launches = ragged_plans.plan(shape, config, matmul_shapes.SM_90)
    rows = quantize_cases.with_given_scale(M, shape.out_columns, result)
    got = self.check(block_scaled_matmul.KERNELS, launches, arrays, rows)
    self.assertFalse(got["values"].reshape(M, -1)[-3:].any())

  def check(self, kernels, launches, arrays, rows):
    """Returns the arrays of the launches with a quantized result."""
    run = gpu_operands.run_launches
    x = run(kernels, launches, arrays)["out"]
    values, scale = quantize_cases.expected(
      x,
      rows.format,
      global_scale=arrays["out_global_scale"],
      scale_rounding=rows.scale_rounding,
    )
    has_amax = rows.format != "mxfp8"
    rows = dataclasses.replace(rows, returns_amax=has_amax)
    planned = quantized_plans.plan(launches, rows, SM_100)
    got = run(kernels, planned, arrays)
    np.testing.assert_array_equal(got["scale"].reshape(scale.shape), scale)
    np.testing.assert_array_equal(got["values"].reshape(values.shape), values)
    if has_amax:
      self.assertEqual(got["amax"].max(), np.abs(x[np.isfinite(x)]).max())
    return got

  def test_a_program_with_a_part_of_a_block_is_refused(self):
    shape = matmul_shapes.product(n=64)
    config = dataclasses.replace(PATHS["upcast"], block_n=16)
    launches = matmul_plans.plan(shape, config, SM_100)
    self.assertIsNone(quantized_plans.blocks_error(launches, "nvfp4"))
    self.assertEqual(
      quantized_plans.blocks_error(launches, "mxfp8"),
      "a program has 16 columns, not whole blocks of 32",
    )
    # A gated activation halves the columns.
    gated = matmul_shapes.product(n=64, groups=2, activation="swiglu")
    launches = ragged_plans.plan(gated, PATHS["upcast"], SM_100)
    self.assertIsNotNone(quantized_plans.blocks_error(launches, "mxfp8"))
    # The kernel that adds the parts of a split k has other programs.
    split = dataclasses.replace(config, split_k=2)
    launches = matmul_plans.plan(shape, split, architectures.by_name("sm_90"))
    self.assertIsNone(quantized_plans.blocks_error(launches, "mxfp8"))
