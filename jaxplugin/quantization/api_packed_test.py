# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packed values and swizzled scales are the same arrays in other layouts.

api_bits_test.py compares the codes with NumPy, arrays/scaled_array_test.py
tests the layout of scales, and backends/triton_test.py kernels that write it.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin import dot, quantization
from jaxplugin.core import formats
from jaxplugin.core.formats import MXFP4, MXFP8, NVFP4
from jaxplugin.testing import contract, quantization_lowerings

FP4 = (MXFP4, NVFP4)


def fp4_per(block_size):
  return contract.block_format(
    f"fp4_per_{block_size}", formats.E2M1, formats.E8M0, block_size
  )


def plain(x, format, *, packed, **options):
  return quantization.quantize(x, format, packed=packed, **options)


def jitted(x, format, packed):
  return jax.jit(lambda x: plain(x, format, axis=0, packed=packed))(x)


def both(x, format, packed):
  return jax.jit(
    lambda x: quantization.quantize_both(x, format, packed=packed)
  )(x)


def mapped(x, format, *, packed, axis):
  return jax.vmap(lambda x: plain(x, format, axis=axis, packed=packed))(x)


def unknown(x, format, packed):
  del format
  return plain(x, fp4_per(4), axis=0, packed=packed)


def floor(x, format, packed):
  rounding = "floor" if format.scale_is_power_of_two else "up"
  return plain(x, format, axis=1, packed=packed, scale_rounding=rounding)


# A call that quantizes, and the shape of its array.
CALLS = {
  "axis_-1": (plain, 64, 96),
  "axis_0": (functools.partial(plain, axis=0), 64, 96),
  "jit": (jitted, 64, 96),
  "both": (both, 64, 96),
  "floor": (floor, 3, 32, 7),
  "key": (functools.partial(plain, axis=1, key=jax.random.key(0)), 3, 32, 7),
  "batch": (functools.partial(plain, axis=1, batch_dims=1), 3, 32, 7),
  "vmap_0": (functools.partial(mapped, axis=0), 3, 32, 64),
  "vmap_1": (functools.partial(mapped, axis=1), 3, 32, 64),
  "one_block": (functools.partial(plain, axis=0),),
  "last_block": (plain,),
  "unknown_format": (unknown, 64, 12),
}


class PackedTest(parameterized.TestCase):
  def assert_packed_of(self, actual, unpacked):
    """Two values a byte along the blocked axis, the first in the low nibble."""
    self.assertEqual(unpacked.values.dtype, formats.E2M1)
    self.assertEqual(unpacked.values.shape, unpacked.shape)
    codes = np.asarray(unpacked.values).view(np.uint8)
    codes = np.moveaxis(codes, unpacked.axis, 0)
    expected = np.moveaxis(codes[::2] | (codes[1::2] << 4), 0, unpacked.axis)
    self.assertEqual(actual.values.dtype, np.uint8)
    np.testing.assert_array_equal(actual.values, expected)
    self.assertEqual(actual.shape, unpacked.shape)
    self.assertEqual(actual.axis, unpacked.axis)
    contract.assert_same_bits(
      [actual.scale, actual.global_scale],
      [unpacked.scale, unpacked.global_scale],
    )

  @parameterized.product(format=FP4, name=tuple(CALLS))
  @pytest.mark.sample(len(CALLS))  # each call once
  def test_default_has_the_bits_of_unpacked(self, format, name):
    call, *shape = CALLS[name]
    if shape:
      x = quantization_lowerings.numbers(shape, np.float32)
      arrays = [x]
    else:  # dimensions of one block
      k = format.block_size
      shapes = ((k,), (k, 1), (k, k))
      if name == "last_block":
        shapes = ((1, k),)
      arrays = [jnp.linspace(-1, 1, np.prod(s)).reshape(s) for s in shapes]

    is_array = lambda leaf: hasattr(leaf, "scale_layout")

    @jax.jit
    def both(x):
      results = [call(x, format, packed=packed) for packed in (None, False)]
      dequantize = functools.partial(
        jax.tree.map, quantization.dequantize, is_leaf=is_array
      )
      return results, list(map(dequantize, results))

    for x in arrays:
      results, floats = both(x)
      jax.tree.map(self.assert_packed_of, *results, is_leaf=is_array)
      contract.assert_same_bits(*floats)

  def test_fp8_is_never_packed(self):
    x = jnp.ones((32, 64))
    self.assertEqual(quantization.quantize(x, MXFP8).values.dtype, formats.E4M3)

  @parameterized.parameters(1, 2, 5)
  @pytest.mark.sample(2)
  def test_blocks_that_bytes_would_hide_stay_unpacked(self, block_size):
    # As many bytes as blocks would leave the blocked axis unknown.
    format, x = fp4_per(block_size), jnp.ones((20, 40))
    result = quantization.quantize(x, format, axis=0)
    self.assertEqual(result.values.dtype, formats.E2M1)
    np.testing.assert_array_equal(quantization.dequantize(result), x)
    with self.assertRaisesRegex(ValueError, f"blocks of {block_size}"):
      quantization.quantize(x, format, packed=True)

  @parameterized.parameters((2, 1), (2, 3), (1, 2), (3, 2))
  @pytest.mark.sample(1)
  def test_short_block_of_one_byte_stays_unpacked(self, *shape):
    axis = shape.index(2)
    x = jnp.arange(-3.0, 3.0)[: shape[0] * shape[1]].reshape(shape)
    result = quantization.quantize(x, formats.INT4_128, axis=axis)
    self.assertEqual(result.shape, shape)
    self.assertEqual(result.axis, axis)
    np.testing.assert_allclose(quantization.dequantize(result), x, atol=0.25)

  @quantization_lowerings.needs_library
  @parameterized.product(format=FP4, axis=(0, 1))
  def test_kernels_write_bytes(self, format, axis):
    text = quantization_lowerings.lowered_text(
      lambda x: quantization.quantize(x, format, axis=axis).values,
      np.zeros((64, 64), np.float32),
    )
    self.assertEqual(quantization_lowerings.kernel_calls(text), (1, 0))
    self.assertNotIn("f4E2M1", text)


class ScanTest(parameterized.TestCase):
  @parameterized.parameters(*FP4)
  def test_scan_slices_bytes_of_weights_that_are_not_prepared(self, format):
    rng = np.random.default_rng(3)
    weights = jax.device_put(rng.normal(size=(4, 32, 64)))
    x = jax.device_put(rng.normal(size=(2, 64)))

    def layers(x, w_q):
      step = lambda x, w: (x, dot.block_scaled_dot(x, w))
      return lax.scan(step, x, w_q)[1]

    w_q = quantization.quantize(weights, format, batch_dims=1)
    text = jax.jit(layers).lower(x, w_q).compile().as_text()
    self.assertIn("u8[4,32,32]", text)
    self.assertEmpty(re.findall(r"f4e2m1fn\[4,.*", text))


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


def layout_numbers(shape):
  x = np.random.default_rng(5).normal(size=shape).astype(np.float32)
  x[..., -1, 3] = np.nan
  return x


def quantizer(format, **options):
  return lambda x: jp.quantize(x, format, **options)


def vmapped(format, **options):
  return jax.vmap(quantizer(format, **options))


class ScaleLayoutTest(parameterized.TestCase):
  @parameterized.parameters(
    *(
      (quantizer, format, shape)
      for format in formats.KNOWN
      for shape in ((5, 96), (2, 130, 32), (128, 128))
    ),
    (quantizer, jp.MXFP4, (5, 96), {"key": jax.random.key(3)}),
    # Each matrix has its tiles.
    *(
      (call, format, (3, 5, 96), options)
      for format in (jp.MXFP8, jp.NVFP4)
      for call, options in ((vmapped, {}), (quantizer, {"batch_dims": 1}))
    ),
  )
  @pytest.mark.sample(6)
  def test_scale_is_that_of_swizzle_scale(
    self, call, format, shape, options=None
  ):
    x, options = layout_numbers(shape), options or {}

    def both(x):
      linear = call(format, **options)(x)
      actual = call(format, scale_layout=SWIZZLED, **options)(x)
      self.assertEqual(actual.scale_layout, SWIZZLED)
      floats = jp.dequantize(actual), jp.dequantize(linear)
      return (actual, swizzled(linear)), floats

    for f in (both, quantization_lowerings.by_operations(both)):
      arrays, floats = jax.jit(f)(x)
      contract.assert_same_bits(*arrays)
      np.testing.assert_array_equal(*floats)

  def test_partitioned_module_agrees(self):
    mesh = jax.make_mesh((4,), ("x",))
    x = layout_numbers((512, 128))
    sharded = jax.device_put(
      np.asarray(x), jax.sharding.NamedSharding(mesh, P("x"))
    )
    quantize = jax.jit(
      lambda x: jp.quantize(x, jp.MXFP8, scale_layout=SWIZZLED)
    )
    contract.assert_same_bits(
      quantize(sharded), swizzled(jp.quantize(x, jp.MXFP8))
    )
