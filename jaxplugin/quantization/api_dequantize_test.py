# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dequantize`: exact where f32 is, one rounding where a global scale is."""

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.quantization import operations
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing.oracles import quantization_oracle as oracle

MXFP8, MXFP4, NVFP4 = formats.MXFP8, formats.MXFP4, formats.NVFP4
VALUES = {format: info for format, (info, _) in oracle.VALUES.items()}
F32_MIN_NORMAL = 2.0**-126

# Jitted functions compile fewer programs than eager calls.
quantize = jax.jit(quantization.quantize, static_argnames=("format", "axis"))
dequantize = jax.jit(quantization.dequantize, static_argnames="dtype")


def scaled(codes, scale_codes, format, global_scale=None):
  """`ScaledArray` of raw bytes."""
  return scaled_array.ScaledArray(
    jnp.asarray(codes.astype(np.uint8).view(format.array_dtype)),
    jnp.asarray(scale_codes.astype(np.uint8).view(format.scale_dtype)),
    global_scale,
    format,
  )


def every_product(format, global_scale=None):
  """Every value code under every scale code, and the products in f64.

  Returns:
    (ScaledArray of shape (256, k), f64[256, k]); k holds every code of the
    values, repeated where they are fewer than a block.
  """
  info = VALUES[format]
  codes = np.arange(max(2**info.bits, format.block_size)) % 2**info.bits
  codes = np.tile(codes, (256, 1))
  scale_codes = np.arange(256)
  k_blocks = codes.shape[1] // format.block_size
  x = scaled(
    codes, np.tile(scale_codes[:, None], (1, k_blocks)), format, global_scale
  )
  scale_info = (
    oracle.E4M3_INFO if format is NVFP4 else gfloat.formats.format_info_ocp_e8m0
  )
  scale = gfloat.decode_ndarray(scale_info, scale_codes)[:, None]
  with np.errstate(invalid="ignore"):  # 0 * NaN and, for E5M2, Inf * 2^e
    return x, gfloat.decode_ndarray(info, codes) * scale


class DequantizeTest(parameterized.TestCase):
  def assert_f32_of(self, actual, exact):
    """Bitwise f32(exact), where that is a normal number or not finite.

    Below 2^-126 it is f32(exact) or zero, because XLA:CPU flushes subnormals.
    """
    with np.errstate(over="ignore"):
      expected = exact.astype(np.float32)
    flushed = (np.abs(exact) < F32_MIN_NORMAL) & (np.asarray(actual) == 0)
    expected = np.where(flushed, np.copysign(0, exact), expected)
    np.testing.assert_array_equal(actual, expected)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(
      np.signbit(np.asarray(actual))[is_number], np.signbit(expected)[is_number]
    )

  @parameterized.parameters(*oracle.MX_FORMATS)
  @pytest.mark.sample(3)
  def test_every_value_times_every_scale_is_exact(self, format):
    x, exact = every_product(format)
    for f in (dequantize, quantization.dequantize):
      self.assertEqual(f(x).dtype, np.float32)
      self.assert_f32_of(f(x), exact)

  @parameterized.parameters(1.0, 2.0**-3, 0.1, 3.1415927e-5, 1.7e30, 1e-34)
  def test_nvfp4_is_rounded_once(self, global_scale):
    global_scale = np.float32(global_scale)
    x, exact = every_product(NVFP4, jnp.float32(global_scale))
    # 2 + 4 + 24 significant bits: exact in f64, so f32() rounds once.
    for f in (dequantize, quantization.dequantize):
      self.assert_f32_of(f(x), exact * np.float64(global_scale))

  def test_global_scale_multiplies_mx_formats_too(self):
    x, exact = every_product(MXFP4, jnp.float32(0.3))
    finite = slice(60, 180)
    exact = exact[finite] * np.float64(np.float32(0.3))
    self.assert_f32_of(dequantize(x)[finite], exact)

  @parameterized.product(
    format=formats.KNOWN, dtype=(jnp.float32, jnp.bfloat16, jnp.float16)
  )
  @pytest.mark.sample(1)
  def test_dtype_is_rounded_to_once_from_f32(self, format, dtype):
    # 37 and 0.37 give results that f16 cannot hold exactly; scales 2^-8..2^6.
    random = np.random.default_rng(17)
    info = VALUES[format]
    codes = random.integers(0, 2**info.bits, (16, 64))
    values = gfloat.decode_ndarray(info, codes)
    codes[~np.isfinite(values)] = 0
    values[~np.isfinite(values)] = 0
    low, high = (8, 0x58) if format is NVFP4 else (119, 134)
    scale_codes = random.integers(low, high, (16, 64 // format.block_size))
    scale = scale_codes.astype(np.uint8).view(format.scale_dtype)
    scale = np.repeat(scale.astype(np.float64), format.block_size, axis=1)
    global_scale = np.float32(0.37)
    x = scaled(codes, scale_codes, format, jnp.float32(global_scale))
    in_f32 = (values * scale * np.float64(global_scale)).astype(np.float32)
    with np.errstate(over="ignore"):
      expected = in_f32.astype(dtype)
    result = np.asarray(dequantize(x, dtype=dtype))
    self.assertEqual(result.dtype, dtype)
    normal = np.abs(in_f32) >= float(ml_dtypes.finfo(dtype).smallest_normal)
    self.assertGreater(normal.sum(), 100)
    np.testing.assert_array_equal(result[normal], expected[normal])

  @parameterized.product(format=formats.KNOWN, axis=(0, 1, 2))
  @pytest.mark.sample(1)
  def test_each_axis_uses_its_own_scales(self, format, axis):
    info = VALUES[format]
    random = np.random.default_rng(20)
    shape = (64, 32, 96)
    scale_shape = list(shape)
    scale_shape[axis] //= format.block_size
    codes = random.integers(0, 2 ** (info.bits - 1) - 4, shape)
    scale_codes = random.integers(40, 90, scale_shape)
    exact = gfloat.decode_ndarray(info, codes)
    scale = scale_codes.astype(np.uint8).view(format.scale_dtype)
    scale = np.repeat(scale.astype(np.float64), format.block_size, axis=axis)
    result = dequantize(scaled(codes, scale_codes, format))
    np.testing.assert_array_equal(result, exact * scale)

  def test_raw_dequantize_takes_a_last_block_that_is_not_full(self):
    x = quantize(oracle.random_f32(21, (5, 96), 3), MXFP8)
    full = np.asarray(dequantize(x))
    values, scale = np.asarray(x.values), np.asarray(x.scale)
    f = jax.jit(lambda v, s: operations.dequantize_raw(v, s, MXFP8, axis=1))
    for size in (95, 64, 33, 1):
      result = f(values[:, :size], scale[:, : -(-size // 32)])
      np.testing.assert_array_equal(result, full[:, :size])

  @parameterized.parameters(*formats.KNOWN)
  @pytest.mark.sample(1)
  def test_stacked_arrays_dequantize_as_each_alone(self, format):
    # k = E = 32, so that a global scale that broadcasts along k goes unnoticed
    # by shapes.
    x = oracle.random_f32(22, (32, 3, 32), np.arange(32)[:, None, None] - 16)
    stacked = jax.vmap(lambda a: quantize(a, format))(x)
    alone = [dequantize(quantize(a, format)) for a in x]
    for result in (
      jax.vmap(dequantize)(stacked),
      dequantize(stacked),
    ):
      np.testing.assert_array_equal(result, np.stack(alone))

  def test_global_scales_of_a_stack_bring_numbers_into_range(self):
    x = quantize(oracle.random_f32(22, (4, 3, 32), 20), MXFP8)
    g = np.float32(2.0 ** -np.arange(20, 24)).reshape(4, 1, 1)
    stacked = scaled_array.ScaledArray(x.values, x.scale, g, MXFP8)
    expected = np.asarray(dequantize(x), np.float64) * g
    np.testing.assert_array_equal(
      dequantize(stacked, jnp.float16), expected.astype(np.float16)
    )


class OperationsTest(lowerings.WithOperations, DequantizeTest):
  pass
