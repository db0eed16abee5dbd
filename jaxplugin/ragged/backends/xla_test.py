# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suites of the ragged dot and the contraction for the xla backend."""

import re

import jax
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import contraction_suite, ragged_suite


@pytest.mark.sample(1)
class RaggedTest(ragged_suite.RaggedSuite):
  implementation = "xla"

  @parameterized.parameters((contract.F32, "f32"), (contract.BF16, "bf16"))
  def test_gpu_multiplies_in_bf16_what_bf16_holds(self, dtype, expected):
    rhs = jp.quantize(np.ones((1, 16, 32), np.float32), jp.MXFP8)
    lhs, sizes = np.ones((8, 32), dtype), np.array([8], np.int32)
    with jp.use_target(jp.named_target("h100")):
      traced = jax.jit(self.dot).trace(lhs, rhs, sizes)
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (dot,) = re.findall(r"stablehlo.dot_general.*", text)
    self.assertRegex(dot, rf"\(tensor<8x32x{expected}>, .*x{expected}>\)")


@pytest.mark.sample(1)
class ContractionTest(contraction_suite.ContractionSuite):
  implementation = "xla"

  def test_is_never_expanded_by_groups(self):
    # The module multiplies a tile of rows, and not an array of all groups.
    lhs = np.zeros((96, 16), np.float32)
    rhs = np.zeros((96, 24), np.float32)
    sizes = np.zeros(6, np.int32)
    text = jax.jit(self.contract).lower(lhs, rhs, sizes).as_text()
    dots = re.findall(r"stablehlo.dot_general.*", text)
    self.assertLen(dots, 1)
    self.assertRegex(dots[0], r"tensor<16x16xf32>, tensor<16x24xf32>")

  @parameterized.parameters((None, "f32"), (jp.MXFP8, "bf16"))
  def test_gpu_multiplies_in_bf16_what_bf16_holds(self, format, expected):
    lhs = rhs = np.ones((64, 16), np.float32)
    if format is not None:
      lhs = rhs = jp.quantize(lhs, format, axis=0)
    with jp.use_target(jp.named_target("h100")):
      traced = jax.jit(self.contract).trace(lhs, rhs, np.array([64], np.int32))
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (dot,) = re.findall(r"stablehlo.dot_general.*", text)
    self.assertRegex(dot, rf"\(tensor<64x16x{expected}>, .*x{expected}>\)")
