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


def plain(format, **options):
  return lambda x: jp.quantize(x, format, **options)


def mapped(format, **options):
  return jax.vmap(plain(format, **options))


class ScaleLayoutTest(parameterized.TestCase):
  @parameterized.parameters(
    *(
      (plain, format, shape)
      for format in formats.KNOWN
      for shape in ((5, 96), (2, 130, 32), (128, 128))
    ),
    (plain, jp.MXFP4, (5, 96), {"key": jax.random.key(3)}),
    # Each matrix has its tiles.
    *(
      (call, format, (3, 5, 96), options)
      for format in (jp.MXFP8, jp.NVFP4)
      for call, options in ((mapped, {}), (plain, {"batch_dims": 1}))
    ),
  )
  @pytest.mark.sample(6)
  def test_scale_is_that_of_swizzle_scale(
    self, call, format, shape, options=None
  ):
    x, options = numbers(shape), options or {}
    linear = call(format, **options)(x)
    quantize = call(format, scale_layout=SWIZZLED, **options)
    for f in (quantize, quantization_lowerings.by_operations(quantize)):
      actual = f(x)
      self.assertEqual(actual.scale_layout, SWIZZLED)
      contract.assert_same_bits(actual, swizzled(linear))
      np.testing.assert_array_equal(
        jp.dequantize(actual), jp.dequantize(linear)
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
