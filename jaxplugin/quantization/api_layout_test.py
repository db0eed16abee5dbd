# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize(scale_layout=)` is `swizzle_scale` of what it is without, bitwise.

Where the layout itself comes from is in arrays/scaled_array_test.py; Triton's
kernels write it in backends/triton_test.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing import quantization_lowerings

SWIZZLED = "swizzled_128x4"
P = jax.sharding.PartitionSpec


def swizzled(array):
  return jp.ScaledArray(
    array.values,
    jp.swizzle_scale(array.scale),
    array.global_scale,
    array.format,
    scale_layout=SWIZZLED,
  )


def numbers(shape):
  x = np.random.default_rng(5).normal(size=shape).astype(np.float32)
  x[..., -1, 3] = np.nan
  return jnp.asarray(x)


class ScaleLayoutTest(parameterized.TestCase):
  @parameterized.product(
    format=formats.KNOWN, shape=((5, 96), (2, 130, 32), (128, 128))
  )
  @pytest.mark.sample(2)
  def test_scale_is_that_of_swizzle_scale(self, format, shape):
    x = numbers(shape)
    expected = swizzled(jp.quantize(x, format))
    quantize = lambda x: jp.quantize(x, format, scale_layout=SWIZZLED)
    for f in (quantize, quantization_lowerings.by_operations(quantize)):
      actual = f(x)
      self.assertEqual(actual.scale_layout, SWIZZLED)
      contract.assert_same_bits(actual, expected)
      np.testing.assert_array_equal(
        jp.dequantize(actual), jp.dequantize(jp.quantize(x, format))
      )

  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  @pytest.mark.sample(1)
  def test_under_vmap_and_of_stacks_each_matrix_has_its_tiles(self, format):
    x = numbers((3, 5, 96))
    quantize = lambda x: jp.quantize(x, format, scale_layout=SWIZZLED)
    mapped = jax.vmap(quantize)(x)
    plain = jax.vmap(lambda x: jp.quantize(x, format))(x)
    contract.assert_same_bits(mapped, swizzled(plain))
    stack = jp.quantize(x, format, batch_dims=1, scale_layout=SWIZZLED)
    plain = jp.quantize(x, format, batch_dims=1)
    contract.assert_same_bits(stack, swizzled(plain))

  def test_stochastic_rounding_takes_it_too(self):
    x, key = numbers((5, 96)), jax.random.key(3)
    actual = jp.quantize(x, jp.MXFP4, key=key, scale_layout=SWIZZLED)
    expected = swizzled(jp.quantize(x, jp.MXFP4, key=key))
    contract.assert_same_bits(actual, expected)

  def test_product_has_the_bits_of_the_linear_scale(self):
    x = numbers((5, 96))[:4]
    w = jp.quantize(x, jp.NVFP4)
    w_swizzled = jp.quantize(x, jp.NVFP4, scale_layout=SWIZZLED)
    np.testing.assert_array_equal(
      jp.block_scaled_dot(x, w_swizzled), jp.block_scaled_dot(x, w)
    )

  def test_partitioned_module_agrees(self):
    mesh = jax.make_mesh((4,), ("x",))
    x = numbers((512, 128))
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("x")))
    quantize = jax.jit(
      lambda x: jp.quantize(x, jp.MXFP8, scale_layout=SWIZZLED)
    )
    contract.assert_same_bits(
      quantize(sharded), swizzled(jp.quantize(x, jp.MXFP8))
    )


if __name__ == "__main__":
  absltest.main()
