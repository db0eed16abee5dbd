# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The ragged dot's suite on a real GPU, where there is one.

python -m pytest jaxplugin/ragged/backends/gpu_device_test.py
"""

from __future__ import annotations

import jax
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import installed
from jaxplugin.testing.dot_suite import ragged_suite


@installed.needs_gpu
class TritonDeviceTest(ragged_suite.RaggedSuite):
  implementation = "triton"
  has_loop = True

  @parameterized.product(format=(jp.MXFP8, jp.MXFP4, jp.NVFP4), m=(5, 700))
  def test_large_experts_and_their_gradient(self, format, m):
    # Tiles, splits and groups of the sizes that they have in use.
    rng = np.random.default_rng(m)
    groups, n, k = 8, 1000, 2048
    rhs, exact = ragged_suite.operand(
      rng, format, (groups, n, k), integers=False
    )
    x = rng.normal(size=(m, k)).astype(np.float32)
    sizes = ragged_suite.random_sizes(rng, groups, m, 4)
    f = jax.jit(lambda x: self.dot(x, rhs, sizes))
    y, pull = jax.vjp(f, x)
    self.check(y, x, exact, sizes)
    g = rng.normal(size=(m, n)).astype(np.float32)
    self.check(pull(g)[0], g, exact.transpose(0, 2, 1), sizes)

  def check(self, actual, lhs, rhs, sizes):
    exact, magnitude = ragged_suite.oracle(lhs, rhs, sizes)
    bound = ragged_suite.contract.DOT_BOUND * magnitude
    ragged_suite.contract.assert_within(
      actual, exact, bound, ragged_suite.contract.F32
    )

  def test_is_captured_in_a_graph_and_repeated(self):
    # Sizes change between calls of one program, and nothing else.
    rng = np.random.default_rng(0)
    rhs, exact = ragged_suite.operand(rng, jp.MXFP8, (4, 64, 64), integers=True)
    x = rng.integers(-4, 5, (40, 64)).astype(np.float32)
    f = jax.jit(lambda sizes: self.dot(x, rhs, sizes))
    for kind in range(12):
      sizes = ragged_suite.random_sizes(rng, 4, 40, kind)
      expected, _ = ragged_suite.oracle(x, exact, sizes)
      np.testing.assert_array_equal(f(sizes), expected)
