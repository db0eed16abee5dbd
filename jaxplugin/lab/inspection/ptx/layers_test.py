# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled PTX that reads a layer of stacked weights: the layer's own bits."""

import dataclasses

import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.testing import contract
from jaxplugin.testing.kernels import executed
from jaxplugin.testing.kernels import gpu_operands

pytestmark = pytest.mark.lab

LAYERS, LAYER = 3, 2


class LayersTest(parameterized.TestCase):
  @parameterized.parameters(
    ("sm_80", "bf16", "nvfp4", 5, "upcast"),
    ("sm_90", "bf16", "mxfp4", 5, "small_m"),
    ("sm_120", "mxfp8", "mxfp8", 70, "native"),
  )
  def test_bits_are_those_of_the_layer_alone(
    self, architecture, lhs, rhs, m, path
  ):
    rng = np.random.default_rng(m)
    n, k = 72, 160  # no multiples of a tile
    x = executed.dense(gpu_operands.make_operand(rng, lhs, (1, m, k)))
    stack = gpu_operands.make_operand(rng, rhs, (LAYERS, n, k))
    stack = executed.dense(stack)
    alone = dataclasses.replace(
      stack,
      values=stack.values[LAYER:].copy(),
      scale=stack.scale[LAYER:].copy(),
      exact=stack.exact[LAYER:],
    )
    of_stack = executed.product(architecture, x, stack, layer=LAYER)
    of_alone = executed.product(architecture, x, alone, config=of_stack.config)
    self.assertEqual(of_stack.config.path, path)
    result, _ = of_stack.run()
    exact, magnitude = contract.dot(x.exact, alone.exact)
    contract.assert_within(
      result, exact, contract.DOT_BOUND * magnitude, result.dtype
    )
    np.testing.assert_array_equal(result, of_alone.run()[0])


if __name__ == "__main__":
  absltest.main()
