# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A layer that is read from its stack gives the bits of the layer alone."""

import dataclasses

import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jaxplugin.kernels.gpu import configs
from jaxplugin.kernels.gpu import matmul_plans

from jaxplugin.kernels import architectures
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import gpu_operands
from jaxplugin.testing.kernels import matmul_shapes

LAYERS = 3
M, N, K = 19, 35, 104  # no multiples of a tile
UPCAST = matmul_shapes.UPCAST
CONFIGS = {
  **matmul_shapes.PATHS,
  "split": dataclasses.replace(UPCAST, block_k=32, split_k=2),
  "descriptors": dataclasses.replace(UPCAST, use_descriptors=True),
}

setUpModule = interpret.skip_unless_supported


class LayersTest(parameterized.TestCase):
  @parameterized.product(
    config=tuple(CONFIGS), layer=(0, 2), swizzled=(False, True)
  )
  @pytest.mark.sample(1)
  def test_bits_are_those_of_the_layer_alone(self, config, layer, swizzled):
    rng = np.random.default_rng(layer)
    format = "mxfp8" if config == "native" else "mxfp4"
    k = 128 if config == "descriptors" else K  # rows of whole 16 bytes
    make = gpu_operands.make_operand
    lhs = make(rng, "mxfp8" if config == "native" else "f32", (1, M, k))
    stack = make(rng, format, (LAYERS, N, k), swizzled=swizzled)
    if config == "descriptors":
      lhs, stack = map(without_gaps, (lhs, stack))
    alone = dataclasses.replace(
      stack,
      values=stack.values[layer : layer + 1],
      scale=stack.scale[layer : layer + 1],
      exact=stack.exact[layer : layer + 1],
    )
    results = [
      gpu_operands.run(
        lhs, rhs, CONFIGS[config], layer=of, architecture="sm_90"
      )
      for rhs, of in ((stack, layer), (alone, None))
    ]
    self.assertEqual(results[0].shape, (1, M, N))
    np.testing.assert_array_equal(*results)

  def test_launches_say_so(self):
    shape = matmul_shapes.product("bf16", "mxfp4", M, N, K)
    stacked = dataclasses.replace(shape, layers=LAYERS)
    for given, name in ((shape, "lhs"), (stacked, "layer")):
      (launch,) = matmul_plans.plan(
        given, CONFIGS["upcast"], architectures.by_name("sm_90")
      )
      self.assertEqual(launch.inputs[4], name)
      self.assertEqual(launch.name.endswith("_layer"), name == "layer")
      signature = matmul_plans.signature(launch, given)
      self.assertEqual(
        signature["layer"], "*i32" if name == "layer" else "*bf16"
      )


def without_gaps(operand):
  _, rows, k = operand.exact.shape
  return dataclasses.replace(
    operand,
    kind=dataclasses.replace(
      configs.operand(operand.kind.format, rows, k),
      scale_strides=operand.kind.scale_strides,
    ),
    values=np.ascontiguousarray(operand.values),
  )


if __name__ == "__main__":
  absltest.main()
