# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suite of the ragged dot for the xla implementation."""

import re

import jax
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import ragged_suite


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


if __name__ == "__main__":
  absltest.main()
