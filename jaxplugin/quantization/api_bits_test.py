# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` and `dequantize`, bitwise, against NumPy in f64."""

import itertools

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
from jaxplugin.testing import contract
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing.oracles import quantization_oracle as oracle

MXFP8, MXFP8_E5M2 = formats.MXFP8, formats.MXFP8_E5M2
MXFP4, NVFP4 = formats.MXFP4, formats.NVFP4


def bit_patterns():
  words = np.random.default_rng(1).integers(0, 2**32, (4096, 32), np.uint32)
  words[:1024] &= 0x807FFFFF  # subnormal
  words[1024:2048] &= 0x81FFFFFF
  return words.view(np.float32)


def blocks_of_every_magnitude():
  top = np.repeat(np.arange(-149, 128), 8)[:, None]
  return oracle.random_f32(2, (len(top), 32), top)


def subnormals():
  random = np.random.default_rng(3)
  words = random.integers(0, 2 ** random.integers(1, 24, (512, 1)), (512, 32))
  return words.astype(np.uint32).view(np.float32)


def amax_around_powers_of_two(format):
  """Returns max * 2^e and 2^e, and what is 1 or 2 f32 ulps to either side."""
  info, _ = oracle.VALUES[format]
  x = np.concatenate(
    [
      np.ldexp(factor, np.arange(-120, 112)).astype(np.float32)
      for factor in (1.0, info.max, info.max / 2, 1.5)
    ]
  )
  bits = x.view(np.int32)[:, None] + np.arange(-2, 3)
  blocks = np.zeros((bits.size, 32), np.float32)
  blocks[:, 5] = bits.astype(np.int32).view(np.float32).ravel()
  return blocks


def f32_blocks(format):
  """Returns all of them as one array, for one program."""
  amax = amax_around_powers_of_two(format)
  return np.concatenate(
    [bit_patterns(), blocks_of_every_magnitude(), subnormals(), amax]
  )


INPUTS = {
  "every_bf16": lambda _: oracle.every_value(ml_dtypes.bfloat16, 32),
  "every_f16": lambda _: oracle.every_value(np.float16, 32),
  "f32": f32_blocks,
}


class QuantizeMxTest(parameterized.TestCase):
  @parameterized.product(
    name=tuple(INPUTS),
    format=oracle.MX_FORMATS,
    scale_rounding=oracle.ROUNDINGS,
  )
  @pytest.mark.sample(14)
  def test_bits_are_those_of_numpy(self, name, format, scale_rounding):
    x = INPUTS[name](format)
    result = oracle.jitted(format, scale_rounding)(x)
    expected = oracle.reference_mx(x.astype(np.float32), format, scale_rounding)
    oracle.assert_codes(result, *expected)

  def test_inputs_have_every_value_of_16_bits_and_subnormals(self):
    for name in ("every_bf16", "every_f16"):
      first = INPUTS[name](MXFP8)[:, 0].view(np.uint16)
      self.assertLen(np.unique(first), 65536)
    x = subnormals()
    self.assertLess(x.max(), oracle.F32_MIN_NORMAL)
    for format, rounding in itertools.product(
      oracle.MX_FORMATS, oracle.ROUNDINGS
    ):
      codes, _ = oracle.reference_mx(x, format, rounding)
      self.assertTrue(codes.any())

  @parameterized.parameters(*oracle.MX_FORMATS)
  @pytest.mark.sample(2)
  def test_up_is_the_default_and_never_saturates(self, format):
    x = oracle.every_value(ml_dtypes.bfloat16, 32).astype(np.float32)
    x = x[np.isfinite(x).all(-1)]
    result = oracle.jitted(format)(x)
    oracle.assert_codes(
      quantization.quantize(x[::99], format),
      *oracle.reference_mx(x[::99], format, "up"),
    )
    scale = np.ldexp(1.0, oracle.as_codes(result.scale).astype(int) - 127)
    info, _ = oracle.VALUES[format]
    self.assertLessEqual((np.abs(x).max(-1) / scale[:, 0]).max(), info.max)


class OperationsMxTest(lowerings.WithOperations, QuantizeMxTest):
  pass


def amax_of(row):
  return np.abs(row).reshape(-1, 16).max(-1)


def windows(dtype):
  """Ranges of 16-bit magnitudes that one NVFP4 global scale can cover."""
  size = 2**15 // (16 if dtype == ml_dtypes.bfloat16 else 4)
  return [range(start, start + size) for start in range(0, 2**15, size)]


class QuantizeNvfp4Test(parameterized.TestCase):
  @parameterized.parameters(ml_dtypes.bfloat16, np.float16)
  @pytest.mark.sample(1)
  def test_all_65536_16_bit_values_bitwise(self, dtype):
    seen = []
    for window in windows(dtype):
      x = oracle.every_value(dtype, 16, window)
      seen.append(x[:, 0].view(np.uint16))
      result = oracle.jitted(NVFP4)(x)
      oracle.assert_codes(result, *oracle.reference_nvfp4(x.astype(np.float32)))
    self.assertLen(np.unique(np.concatenate(seen)), 65536)

  @parameterized.product(
    dtype=(ml_dtypes.bfloat16, np.float16), factor=(0.7183, 37.11, 4099.0)
  )
  @pytest.mark.sample(3)
  def test_all_65536_16_bit_values_bitwise_with_a_given_global_scale(
    self, dtype, factor
  ):
    # Times the computed one: 0.7 saturates scales, 4099 clamps them to 2^-9.
    for window in windows(dtype):
      x = oracle.every_value(dtype, 16, window)
      x32 = x.astype(np.float32)
      computed = float(oracle.reference_nvfp4(x32)[2])
      global_scale = np.float32(min(1e38, computed * factor))
      result = oracle.jitted(NVFP4)(x, global_scale)
      oracle.assert_codes(
        result, *oracle.reference_nvfp4(x32, float(global_scale))
      )

  @parameterized.parameters(
    *(-149, -140, -127, -126, -121, -115, -114, -113, -112, -100, -75, -65),
    *(-64, -54, -53, -52, -51, -20, 0, 1, 20, 60, 100, 120, 126, 127),
  )
  def test_f32_tensors_of_every_magnitude_bitwise(self, top_exponent):
    random = np.random.default_rng(5)
    tops = np.minimum(top_exponent - random.integers(0, 20, (256, 1)), 127)
    tops[0] = top_exponent
    x = oracle.random_f32(6, (256, 16), tops)
    x[0, 0] = np.ldexp(1.0, top_exponent)
    result = oracle.jitted(NVFP4)(x)
    oracle.assert_codes(result, *oracle.reference_nvfp4(x))

  @parameterized.parameters(
    1e-38, 2.0**-126, 1e-20, 2.0**-64, 0.99 * 2.0**-64, 0.1, 1.0, 7e20, 1e38
  )
  def test_random_f32_bit_patterns_bitwise_with_a_given_global_scale(
    self, global_scale
  ):
    random = np.random.default_rng(7)
    x = random.integers(0, 2**32, (2048, 16), np.uint32).view(np.float32)
    x[1024:] = oracle.random_f32(
      8,
      (1024, 16),
      np.frexp(global_scale)[1] + random.integers(-16, 20, (1024, 1)),
    )
    result = oracle.jitted(NVFP4)(x, np.float32(global_scale))
    expected = oracle.reference_nvfp4(x, float(np.float32(global_scale)))
    oracle.assert_codes(result, *expected)

  @parameterized.parameters(
    0.1, 0.7, 1 / 3, 3.3e-5, 1.9e-39, 4e-30, 7.7e20, 6e37, 3e38
  )
  def test_scales_next_to_ties_bitwise(self, global_scale):
    # amax / 6 / global within a few f32 ulps of a tie of E4M3, where a
    # division that is an ulp off shows. XLA turns (a / b) / c into a / (b * c).
    global_scale = np.float32(global_scale)
    scales = oracle.finite_values(oracle.E4M3_INFO)
    ties = (scales[1:] + scales[:-1]) / 2
    amax = np.minimum(ties * 6 * np.float64(global_scale), oracle.F32_MAX)
    bits = amax.astype(np.float32).view(np.int32)[:, None] + np.arange(-4, 4)
    bits = np.clip(bits, 1, 0x7F7FFFFF)
    x = np.zeros((bits.size, 16), np.float32)
    x[:, 3] = bits.astype(np.int32).view(np.float32).ravel()
    result = oracle.jitted(NVFP4)(x, global_scale)
    oracle.assert_codes(result, *oracle.reference_nvfp4(x, float(global_scale)))

  @parameterized.parameters(0.1, 1 / 3, 3.3e-5, 4e-30, 7.7e20)
  def test_values_next_to_ties_bitwise(self, global_scale):
    global_scale = np.float32(global_scale)
    scale = oracle.finite_values(oracle.E4M3_INFO)[8:]  # the normal numbers
    step = oracle.rounded_to_24_bits(scale * np.float64(global_scale))
    values = oracle.finite_values(oracle.VALUES[NVFP4][0])
    ties = (values[1:] + values[:-1]) / 2
    x = np.zeros((len(scale), 8, 16), np.float32)
    x[:, :, 0] = (6 * step)[:, None]
    near = np.multiply.outer(step, ties).astype(np.float32).view(np.int32)
    near = near[:, None, :] + np.arange(-4, 4)[:, None]
    x[:, :, 1:8] = near.astype(np.int32).view(np.float32)
    x = x.reshape(-1, 16)
    result = oracle.jitted(NVFP4)(x, global_scale)
    oracle.assert_codes(result, *oracle.reference_nvfp4(x, float(global_scale)))

  def test_blocks_far_below_the_maximum_keep_what_the_least_scale_holds(self):
    # Row i is 2^-(14 + i) of the first row. Its values are the multiples of the
    # least step, 2^-9 * global scale, that E2M1 has, in f64.
    x = np.random.default_rng(3).normal(size=(13, 64))
    x[1:] *= 2.0 ** -np.arange(14, 26)[:, None]
    x[0, 0] = 2688 / 512  # so the global scale is 2^-9
    x[-1, 16:32] = 0
    x = x.astype(np.float32)
    step = 2.0**-18
    for fields in ({}, {"packed": False}, {"key": jax.random.key(1)}):
      result = quantization.quantize(x, NVFP4, **fields)
      restored = np.asarray(quantization.dequantize(result), np.float64)
      self.assertEqual(float(result.global_scale.item()), 2.0**-9)
      for i in range(6, 13):  # 2^-19 and less
        wanted = (x[i] / step).astype(ml_dtypes.float4_e2m1fn)
        wanted = wanted.astype(np.float64) * step
        np.testing.assert_array_equal(
          oracle.as_codes(result.scale)[i] > 0, amax_of(x[i]) > 0
        )
        if "key" in fields:  # one of the two values beside each
          self.assertLessEqual(np.abs(restored[i] - x[i]).max(), step * 2)
        else:
          np.testing.assert_array_equal(restored[i], wanted)
      if "key" not in fields:
        error = np.linalg.norm(restored[6] - x[6]) / np.linalg.norm(x[6])
        self.assertLess(error, 0.35)

  @parameterized.parameters(
    # Value of all blocks, of the second block, and the global scale.
    (0.0, 0.0, 1.0),
    (np.nan, np.nan, 1.0),
    (1.0, np.nan, np.float32(1) / np.float32(2688)),
    *((x, x, 2.0**-126) for x in (2.0**-116, 2.0**-130, 2.0**-149)),
    (oracle.F32_MAX, oracle.F32_MAX, np.float32(oracle.F32_MAX) / 2688),
  )
  @pytest.mark.sample(4)
  def test_global_scale_of_special_tensors(self, x, bad, expected):
    blocks = np.full((2, 32), x, np.float32)
    blocks[1, 16:] = [bad, *[1e6 if np.isnan(bad) else bad] * 15]
    result = oracle.jitted(NVFP4)(blocks)
    self.assertEqual(result.global_scale.item(), expected)
    is_nan = np.isnan(np.asarray(oracle.dequantize(result)))
    np.testing.assert_array_equal(is_nan[1, 16:], np.isnan(bad))
    np.testing.assert_array_equal(is_nan[0], np.isnan(x))

  def test_given_global_scale_is_used_and_returned(self):
    x = oracle.random_f32(11, (4, 32), 0)
    expected = oracle.reference_nvfp4(x, 0.375)
    for given in (0.375, np.float32(0.375), jnp.array([0.375], jnp.float32)):
      result = quantization.quantize(x, NVFP4, global_scale=given)
      oracle.assert_codes(result, *expected)
      self.assertEqual(result.global_scale.shape, (1, 1))
      self.assertEqual(result.global_scale.dtype, np.float32)

  @parameterized.parameters(0.0, -1.0, np.nan, np.inf)
  def test_traced_global_scale_that_is_no_scale_gives_nan(self, global_scale):
    result = oracle.jitted(NVFP4)(jnp.ones((2, 32)), jnp.float32(global_scale))
    np.testing.assert_array_equal(
      oracle.as_codes(result.scale), oracle.E4M3_NAN
    )


class OperationsNvfp4Test(lowerings.WithOperations, QuantizeNvfp4Test):
  pass


class NonFiniteTest(parameterized.TestCase):
  @parameterized.parameters(
    *itertools.product(oracle.MX_FORMATS, oracle.ROUNDINGS), (NVFP4, "up")
  )
  @pytest.mark.sample(5)
  def test_nan_or_inf_spoils_its_own_block_and_no_other(self, format, rounding):
    quantize = oracle.jitted(format, rounding)
    size = format.block_size
    x = np.random.default_rng(4).normal(size=(3, 3 * size)).astype(np.float32)
    x[1, size : 2 * size] = 0.5  # does not hold the largest magnitude
    clean = quantize(x)
    expected_scale = oracle.as_codes(clean.scale).copy()
    expected_scale[1, 1] = oracle.E4M3_NAN if format is NVFP4 else 255
    is_spoiled = np.zeros(x.shape, bool)
    is_spoiled[1, size : 2 * size] = True
    for special in (np.nan, -np.nan, np.inf, -np.inf):
      spoiled = x.copy()
      spoiled[1, size + 4] = special
      result = quantize(spoiled)
      scale = oracle.as_codes(result.scale)
      np.testing.assert_array_equal(scale, expected_scale)
      self.assertEqual(result.global_scale, clean.global_scale)
      restored = np.asarray(oracle.dequantize(result))
      np.testing.assert_array_equal(np.isnan(restored), is_spoiled)
      np.testing.assert_array_equal(
        contract.codes(result)[~is_spoiled], contract.codes(clean)[~is_spoiled]
      )


class OperationsNonFiniteTest(lowerings.WithOperations, NonFiniteTest):
  pass


VALUES = {format: info for format, (info, _) in oracle.VALUES.items()}

# Jitted functions compile fewer programs than eager calls.
quantize = jax.jit(quantization.quantize, static_argnames=("format", "axis"))
dequantize = jax.jit(quantization.dequantize, static_argnames="dtype")


def scaled(codes, scale_codes, format, global_scale=None):
  """`ScaledArray` of raw bytes."""
  return scaled_array.ScaledArray(
    jax.device_put(codes.astype(np.uint8).view(format.array_dtype)),
    jax.device_put(scale_codes.astype(np.uint8).view(format.scale_dtype)),
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
    is_small = np.abs(exact) < oracle.F32_MIN_NORMAL
    flushed = is_small & (np.asarray(actual) == 0)
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
