# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executed PTX of matmuls with a quantized result gives `jp.quantize`'s bits.

These kernels do not spill. An SM runs as many of their programs at a time as it
runs programs that store f32.
"""

import dataclasses

import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.kernels import architectures
from jaxplugin.kernels.gpu import (
  constraints,
  matmul_plans,
  quantized_plans,
  tiles_by_rule,
)
from jaxplugin.lab.inspection import compile
from jaxplugin.testing.kernels import (
  executed,
  executed_cases,
  gpu_operands,
  matmul_shapes,
  quantize_cases,
)

pytestmark = pytest.mark.lab

# (architecture, operands, result, scale rounding, parts of k).
CASES = (
  ("sm_80", ("bf16", "mxfp4"), "mxfp8", "up", 1),
  ("sm_90", ("bf16", "nvfp4"), "nvfp4", "up", 1),
  ("sm_90", ("mxfp8", "mxfp8"), "mxfp4", "floor", 2),
  ("sm_100", ("mxfp8", "mxfp8"), "nvfp4", "up", 1),
  ("sm_100", ("nvfp4", "nvfp4"), "mxfp8", "floor", 1),
)
M, N, K = 70, 160, 288  # m and n have tails
# Large products: kernels' registers, on GPUs with and without tensor memory.
LARGE = tuple(
  (name, operands, result)
  for name in ("sm_80", "sm_90", "sm_100", "sm_120")
  for operands, result in (
    (("mxfp8", "mxfp8"), "mxfp8"),
    (("bf16", "mxfp4"), "nvfp4"),
  )
)


class QuantizedResultTest(executed_cases.Case):
  @parameterized.parameters(*CASES)
  def test_bits_are_those_of_the_quantized_f32_result(
    self, architecture, formats, result, rounding, split_k
  ):
    operands = self.make(*formats, m=M, n=N, k=K)
    epilogue = gpu_operands.Epilogue(
      bias=self.rng.normal(size=N).astype(np.float32), activation="silu"
    )
    product = executed.product(architecture, *operands, epilogue=epilogue)
    config = dataclasses.replace(product.config, split_k=split_k)
    product = dataclasses.replace(product, config=config)
    x, _ = product.run()
    global_scale = None
    if result == "nvfp4":
      global_scale = np.array([np.abs(x).max() / 2000], np.float32)
    quantized = dataclasses.replace(
      product,
      rows=quantize_cases.with_given_scale(
        M, N, result, scale_rounding=rounding
      ),
      arrays={**product.arrays, "out_global_scale": global_scale},
    )
    got, _ = quantized.run_all()
    values, scale = quantize_cases.expected(
      x, result, global_scale=global_scale, scale_rounding=rounding
    )
    np.testing.assert_array_equal(got["scale"].reshape(scale.shape), scale)
    np.testing.assert_array_equal(got["values"].reshape(values.shape), values)
    self.assertEqual(got["amax"].max(), np.abs(x).max())

  @parameterized.parameters(*LARGE)
  def test_kernels_neither_spill_nor_run_fewer_programs(
    self, name, formats, result
  ):
    shape = matmul_shapes.product(*formats, m=2048, n=4096, k=4096)
    architecture = architectures.by_name(name)
    config = tiles_by_rule.default_config(
      shape, architecture, core_count=executed.CORES[name]
    )
    self.assertEqual(config.split_k, 1)
    launches = matmul_plans.plan(shape, config, architecture)
    rows = quantize_cases.with_given_scale(shape.m, shape.n, result)
    plain, quantized = (
      compile.compile_matmul(launch, shape, architecture)
      for launch in (
        *launches,
        *quantized_plans.plan(launches, rows, architecture),
      )
    )
    self.assertIsNone(quantized.limit_error)
    self.assertEqual(quantized.spill_bytes, 0)
    self.assertLessEqual(
      quantized.shared_memory_bytes,
      constraints.shared_memory_bound(config, shape, architecture),
    )
    # An accumulator that is transposed may cost one of two programs.
    least = plain.resident_blocks - config.swap
    self.assertGreaterEqual(quantized.resident_blocks, least)
