# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` and `dequantize`, bitwise, against NumPy in f64.

The reference below follows the table of the numerical contract. It shares no
code with jaxplugin: codes come from gfloat's decoder and a search for the
nearest, exponents from a search in a table of powers of two, and f32 results
from f64 ones rounded to 24 bits (innocuous for one product or quotient of f32
numbers, since 53 >= 2 * 24 + 2), which also has no subnormals to lose.
"""

import functools

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin import formats
from jaxplugin import quantization
from jaxplugin import target

MXFP8, MXFP8_E5M2 = formats.MXFP8, formats.MXFP8_E5M2
MXFP4, NVFP4 = formats.MXFP4, formats.NVFP4
MX_FORMATS = (MXFP8, MXFP8_E5M2, MXFP4)
ROUNDINGS = ("up", "floor")

# OCP MX v1.0, section 5.3: (gfloat's format, emax).
VALUES = {
  MXFP8: (gfloat.formats.format_info_ocp_e4m3, 8),
  MXFP8_E5M2: (gfloat.formats.format_info_ocp_e5m2, 15),
  MXFP4: (gfloat.formats.format_info_ocp_e2m1, 2),
  NVFP4: (gfloat.formats.format_info_ocp_e2m1, 2),
}
E4M3_INFO = gfloat.formats.format_info_ocp_e4m3
E4M3_NAN = 0x7F
F32_MIN_NORMAL = 2.0**-126
F32_MAX = float(np.finfo(np.float32).max)

# Stochastic rounding draws from a fixed key, so the outcome is one number. A
# correct sampler passes a bound of 5.5 standard deviations in each of 100
# cells with probability 1 - 100 * 4e-8.
MAX_Z_SCORE = 5.5
DRAWS = 20_000


def finite_values(info):
  """f64, ascending: the finite values >= 0; the index is the code."""
  values = gfloat.decode_ndarray(info, np.arange(2 ** (info.bits - 1)))
  return values[np.isfinite(values)]


def nearest_code(magnitude, info):
  """Code of the nearest value, ties to the even code; saturates."""
  values = finite_values(info)
  ties = (values[1:] + values[:-1]) / 2
  code = np.searchsorted(ties, magnitude, side="left")
  is_tie = ties[np.minimum(code, len(ties) - 1)] == magnitude
  return (code + (is_tie & (code % 2 == 1))).astype(np.uint8)


def signed_code(magnitude, x, info):
  sign = np.signbit(x).astype(np.uint8) << (info.bits - 1)
  return nearest_code(magnitude, info) | sign


def split(x, block_size):
  with np.errstate(invalid="ignore"):  # signalling NaNs
    return x.reshape(*x.shape[:-1], -1, block_size).astype(np.float64)


def reference_mx(x, format, scale_rounding="up"):
  """(codes, scale bytes) of f32[..., k] by the contract's table."""
  info, emax = VALUES[format]
  shape, x = x.shape, split(x, 32)
  amax = np.max(np.abs(x), axis=-1, keepdims=True)
  is_bad = ~np.isfinite(amax)
  amax = np.where(is_bad, 0, amax)
  powers = np.ldexp(1.0, np.arange(-127, 128))
  if scale_rounding == "up":  # the least scale with amax / scale <= max
    scale = np.searchsorted(info.max * powers, amax, side="left")
  else:  # the greatest with 2^emax * scale <= amax
    scale = np.searchsorted(2.0**emax * powers, amax, side="right") - 1
  scale = np.clip(scale, 0, 254)
  codes = signed_code(np.abs(x) / powers[scale], x, info)
  codes = np.where(is_bad, 0, codes).astype(np.uint8)
  scale = np.where(is_bad, 255, scale).astype(np.uint8)
  return codes.reshape(shape), scale[..., 0]


def rounded_to_24_bits(x):
  mantissa, exponent = np.frexp(x)
  return np.ldexp(np.rint(np.ldexp(mantissa, 24)), exponent - 24)


def reference_nvfp4(x, global_scale=None):
  """(codes, scale bytes, global scale) of f32[..., k]."""
  info = VALUES[NVFP4][0]
  shape, x = x.shape, split(x, 16)
  amax = np.max(np.abs(x), axis=-1, keepdims=True)
  is_bad = ~np.isfinite(amax)
  amax = np.where(is_bad, 0, amax)
  if global_scale is None:
    largest = np.max(amax, initial=0)
    global_scale = max(rounded_to_24_bits(largest / (448 * 6)), F32_MIN_NORMAL)
    global_scale = 1.0 if largest == 0 else float(global_scale)
  ideal = rounded_to_24_bits(rounded_to_24_bits(amax / 6) / global_scale)
  scale = nearest_code(ideal, E4M3_INFO)
  step = rounded_to_24_bits(finite_values(E4M3_INFO)[scale] * global_scale)
  underflow = scale == 0
  quotient = rounded_to_24_bits(np.abs(x) / np.where(underflow, 1, step))
  codes = signed_code(np.where(underflow, 0, quotient), x, info)
  codes = np.where(is_bad, 0, codes).astype(np.uint8)
  scale = np.where(is_bad, E4M3_NAN, scale).astype(np.uint8)
  return codes.reshape(shape), scale[..., 0], np.float32(global_scale)


def reference(x, format):
  return reference_nvfp4(x) if format is NVFP4 else reference_mx(x, format)


def as_codes(array):
  return np.asarray(array).view(np.uint8)


def assert_codes(actual, codes, scale, global_scale=None):
  np.testing.assert_array_equal(as_codes(actual.scale), scale)
  np.testing.assert_array_equal(as_codes(actual.values), codes)
  if global_scale is not None:
    np.testing.assert_array_equal(
      np.asarray(actual.global_scale), np.float32(global_scale)
    )


def assert_same(actual, expected):
  """Two `ScaledArray`s, bitwise."""
  assert_codes(actual, as_codes(expected.values), as_codes(expected.scale))
  if expected.global_scale is None:
    assert actual.global_scale is None
  else:
    np.testing.assert_array_equal(
      np.asarray(actual.global_scale).view(np.int32),
      np.asarray(expected.global_scale).view(np.int32),
    )


@functools.cache
def jitted(format, scale_rounding="up", axis=-1):
  """`quantize` under jit: eager calls compile each operation for each shape."""

  def f(x, global_scale=None, key=None):
    return quantization.quantize(
      x,
      format,
      axis=axis,
      scale_rounding=scale_rounding,
      global_scale=global_scale,
      key=key,
    )

  return jax.jit(f)


dequantize = jax.jit(quantization.dequantize, static_argnames="dtype")


def every_value(dtype, block_size, magnitudes=range(2**15)):
  """16-bit blocks: each value once as the amax, and among smaller values.

  Block i of either sign starts with the value of magnitude bits i. The other
  members have the bits i - offset, for offsets of up to 12 binades and
  alternating signs, so every value is also a lesser member of 15 or more
  blocks.
  """
  top = np.asarray(magnitudes)
  binade = 2 ** ml_dtypes.finfo(dtype).nmant
  offsets = np.rint(np.geomspace(1, 12 * binade, block_size - 1)).astype(int)
  bits = np.maximum(top[:, None] - np.array([0, *offsets]), 0)
  signs = np.where(np.arange(block_size) % 2, 0x8000, 0)
  bits = np.concatenate([bits | signs, bits | (signs ^ 0x8000)])
  return bits.astype(np.uint16).view(dtype)


def random_f32(seed, shape, top_exponent):
  """f32 of random sign and mantissa over 24 binades below `top_exponent`."""
  random = np.random.default_rng(seed)
  mantissa = random.uniform(1, 2, shape)
  exponent = np.asarray(top_exponent) - random.integers(0, 24, shape)
  sign = random.choice([-1.0, 1.0], shape)
  x = np.ldexp(sign * mantissa, exponent)
  return np.clip(x, -F32_MAX, F32_MAX).astype(np.float32)


def special_blocks(block_size):
  """f32[n, block_size]: random blocks, some with NaN, Inf, zeros, extremes."""
  top = np.random.default_rng(8).integers(-149, 128, (512, 1))
  x = random_f32(9, (512, block_size), top)
  x[::11, 3] = np.nan
  x[1::11, 0] = np.inf
  x[2::11, -1] = -np.inf
  x[3::11] = 0
  x[4::11, ::2] = -0.0
  x[5::11, 1] = F32_MAX
  return x


class QuantizeMxTest(parameterized.TestCase):
  @parameterized.product(
    format=MX_FORMATS,
    scale_rounding=ROUNDINGS,
    dtype=(ml_dtypes.bfloat16, np.float16),
  )
  def test_all_65536_16_bit_values_bitwise(self, format, scale_rounding, dtype):
    x = every_value(dtype, 32)
    self.assertLen(np.unique(x[:, 0].view(np.uint16)), 65536)
    assert_codes(
      jitted(format, scale_rounding)(x),
      *reference_mx(x.astype(np.float32), format, scale_rounding),
    )

  @parameterized.product(format=MX_FORMATS, scale_rounding=ROUNDINGS)
  def test_random_f32_bit_patterns_bitwise(self, format, scale_rounding):
    words = np.random.default_rng(1).integers(0, 2**32, (4096, 32), np.uint32)
    words[:1024] &= 0x807FFFFF  # subnormal
    words[1024:2048] &= 0x81FFFFFF
    x = words.view(np.float32)
    assert_codes(
      jitted(format, scale_rounding)(x),
      *reference_mx(x, format, scale_rounding),
    )

  @parameterized.product(format=MX_FORMATS, scale_rounding=ROUNDINGS)
  def test_f32_blocks_of_every_magnitude_bitwise(self, format, scale_rounding):
    top = np.repeat(np.arange(-149, 128), 8)[:, None]
    x = random_f32(2, (len(top), 32), top)
    assert_codes(
      jitted(format, scale_rounding)(x),
      *reference_mx(x, format, scale_rounding),
    )

  @parameterized.product(format=MX_FORMATS, scale_rounding=ROUNDINGS)
  def test_f32_subnormals_are_honoured(self, format, scale_rounding):
    random = np.random.default_rng(3)
    words = random.integers(0, 2 ** random.integers(1, 24, (512, 1)), (512, 32))
    x = words.astype(np.uint32).view(np.float32)
    self.assertLess(x.max(), F32_MIN_NORMAL)
    assert_codes(
      jitted(format, scale_rounding)(x),
      *reference_mx(x, format, scale_rounding),
    )
    self.assertTrue(as_codes(jitted(format, scale_rounding)(x).values).any())

  @parameterized.product(format=MX_FORMATS, scale_rounding=ROUNDINGS)
  def test_amax_at_every_power_of_two_boundary_bitwise(
    self, format, scale_rounding
  ):
    # max * 2^e and 2^e, and what is one f32 ulp to either side.
    info, _ = VALUES[format]
    x = np.concatenate(
      [
        np.ldexp(factor, np.arange(-120, 112)).astype(np.float32)
        for factor in (1.0, info.max, info.max / 2, 1.5)
      ]
    )
    bits = x.view(np.int32)[:, None] + np.arange(-2, 3)
    blocks = np.zeros((bits.size, 32), np.float32)
    blocks[:, 5] = bits.astype(np.int32).view(np.float32).ravel()
    assert_codes(
      jitted(format, scale_rounding)(blocks),
      *reference_mx(blocks, format, scale_rounding),
    )

  @parameterized.parameters(
    # By hand: (format, amax, byte for "up", byte for "floor"); 127 is 2^0.
    (MXFP8, 448.0, 127, 127),
    (MXFP8, 449.0, 128, 127),
    (MXFP8, 511.0, 128, 127),
    (MXFP8, 512.0, 128, 128),
    (MXFP8, 256.0, 127, 127),
    (MXFP8, 224.0, 126, 126),
    (MXFP8, 225.0, 127, 126),
    (MXFP8, 1.0, 119, 119),
    (MXFP8_E5M2, 57344.0, 127, 127),
    (MXFP8_E5M2, 57345.0, 128, 127),
    (MXFP8_E5M2, 32768.0, 127, 127),
    (MXFP4, 6.0, 127, 127),
    (MXFP4, 6.5, 128, 127),
    (MXFP4, 4.0, 127, 127),
    (MXFP4, 3.5, 127, 126),
    (MXFP4, 3.0, 126, 126),
  )
  def test_scale_rounds_up_or_down_as_asked(self, format, amax, up, floor):
    x = jnp.zeros(32).at[7].set(-amax)
    for scale_rounding, expected in (("up", up), ("floor", floor)):
      result = jitted(format, scale_rounding)(x)
      self.assertEqual(as_codes(result.scale)[0], expected)

  @parameterized.parameters(*MX_FORMATS)
  def test_up_is_the_default_and_never_saturates(self, format):
    x = every_value(ml_dtypes.bfloat16, 32).astype(np.float32)
    x = x[np.isfinite(x).all(-1)]
    result = jitted(format)(x)
    assert_codes(
      quantization.quantize(x[::99], format),
      *reference_mx(x[::99], format, "up"),
    )
    scale = np.ldexp(1.0, as_codes(result.scale).astype(int) - 127)
    info, _ = VALUES[format]
    self.assertLessEqual((np.abs(x).max(-1) / scale[:, 0]).max(), info.max)

  @parameterized.parameters(
    (MXFP8, 511.0, 448.0), (MXFP8_E5M2, 65535.0, 57344.0), (MXFP4, 7.9, 6.0)
  )
  def test_floor_saturates_to_the_largest_value(self, format, amax, largest):
    x = jnp.zeros((2, 32)).at[0, 4].set(amax).at[1, 9].set(-amax)
    result = jitted(format, "floor")(x)
    np.testing.assert_array_equal(as_codes(result.scale), [[127], [127]])
    values = np.asarray(result.values).astype(np.float64)
    self.assertEqual(values[0, 4], largest)
    self.assertEqual(values[1, 9], -largest)

  @parameterized.product(
    format=MX_FORMATS,
    scale_rounding=ROUNDINGS,
    special=(np.nan, -np.nan, np.inf, -np.inf),
  )
  def test_nan_or_inf_spoils_its_own_block_and_no_other(
    self, format, scale_rounding, special
  ):
    x = np.random.default_rng(4).normal(size=(3, 96)).astype(np.float32)
    clean = jitted(format, scale_rounding)(x)
    spoiled = x.copy()
    spoiled[1, 40] = special
    result = jitted(format, scale_rounding)(spoiled)
    expected_scale = as_codes(clean.scale).copy()
    expected_scale[1, 1] = 255
    np.testing.assert_array_equal(as_codes(result.scale), expected_scale)
    is_spoiled = np.zeros(x.shape, bool)
    is_spoiled[1, 32:64] = True
    restored = np.asarray(dequantize(result))
    np.testing.assert_array_equal(np.isnan(restored), is_spoiled)
    np.testing.assert_array_equal(
      as_codes(result.values)[~is_spoiled], as_codes(clean.values)[~is_spoiled]
    )

  @parameterized.product(format=MX_FORMATS, scale_rounding=ROUNDINGS)
  def test_zero_block_quantizes_to_scale_byte_0_and_zero(
    self, format, scale_rounding
  ):
    x = np.ones((2, 64), np.float32)
    x[1, 32:] = 0
    result = jitted(format, scale_rounding)(x)
    self.assertEqual(as_codes(result.scale)[1, 1], 0)
    np.testing.assert_array_equal(as_codes(result.values)[1, 32:], 0)
    np.testing.assert_array_equal(np.asarray(dequantize(result)), x)


def windows(dtype):
  """Ranges of 16-bit magnitudes that one NVFP4 global scale can cover."""
  size = 2**15 // (16 if dtype == ml_dtypes.bfloat16 else 4)
  return [range(start, start + size) for start in range(0, 2**15, size)]


class QuantizeNvfp4Test(parameterized.TestCase):
  @parameterized.parameters(ml_dtypes.bfloat16, np.float16)
  def test_all_65536_16_bit_values_bitwise(self, dtype):
    seen = []
    for window in windows(dtype):
      x = every_value(dtype, 16, window)
      seen.append(x[:, 0].view(np.uint16))
      result = jitted(NVFP4)(x)
      assert_codes(result, *reference_nvfp4(x.astype(np.float32)))
    self.assertLen(np.unique(np.concatenate(seen)), 65536)

  @parameterized.product(
    dtype=(ml_dtypes.bfloat16, np.float16), factor=(0.7183, 37.11, 4099.0)
  )
  def test_all_65536_16_bit_values_bitwise_with_a_given_global_scale(
    self, dtype, factor
  ):
    # Times the computed one: 0.7 saturates scales, 4099 underflows them.
    for window in windows(dtype):
      x = every_value(dtype, 16, window)
      x32 = x.astype(np.float32)
      computed = float(reference_nvfp4(x32)[2])
      global_scale = np.float32(min(1e38, computed * factor))
      result = jitted(NVFP4)(x, global_scale)
      assert_codes(result, *reference_nvfp4(x32, float(global_scale)))

  @parameterized.parameters(
    *(-149, -140, -127, -126, -121, -115, -114, -113, -112, -100, -75, -65),
    *(-64, -54, -53, -52, -51, -20, 0, 1, 20, 60, 100, 120, 126, 127),
  )
  def test_f32_tensors_of_every_magnitude_bitwise(self, top_exponent):
    random = np.random.default_rng(5)
    tops = np.minimum(top_exponent - random.integers(0, 20, (256, 1)), 127)
    tops[0] = top_exponent
    x = random_f32(6, (256, 16), tops)
    x[0, 0] = np.ldexp(1.0, top_exponent)
    result = jitted(NVFP4)(x)
    assert_codes(result, *reference_nvfp4(x))

  @parameterized.parameters(
    1e-38, 2.0**-126, 1e-20, 2.0**-64, 0.99 * 2.0**-64, 0.1, 1.0, 7e20, 1e38
  )
  def test_random_f32_bit_patterns_bitwise_with_a_given_global_scale(
    self, global_scale
  ):
    random = np.random.default_rng(7)
    x = random.integers(0, 2**32, (2048, 16), np.uint32).view(np.float32)
    x[1024:] = random_f32(
      8,
      (1024, 16),
      np.frexp(global_scale)[1] + random.integers(-16, 20, (1024, 1)),
    )
    result = jitted(NVFP4)(x, np.float32(global_scale))
    expected = reference_nvfp4(x, float(np.float32(global_scale)))
    assert_codes(result, *expected)

  @parameterized.parameters(
    0.1, 0.7, 1 / 3, 3.3e-5, 1.9e-39, 4e-30, 7.7e20, 6e37, 3e38
  )
  def test_scales_next_to_ties_bitwise(self, global_scale):
    # amax / 6 / global within a few f32 ulps of a tie of E4M3, where a
    # division that is an ulp off shows. XLA turns (a / b) / c into a / (b * c).
    global_scale = np.float32(global_scale)
    scales = finite_values(E4M3_INFO)
    ties = (scales[1:] + scales[:-1]) / 2
    amax = np.minimum(ties * 6 * np.float64(global_scale), F32_MAX)
    bits = amax.astype(np.float32).view(np.int32)[:, None] + np.arange(-4, 4)
    bits = np.clip(bits, 1, 0x7F7FFFFF)
    x = np.zeros((bits.size, 16), np.float32)
    x[:, 3] = bits.astype(np.int32).view(np.float32).ravel()
    result = jitted(NVFP4)(x, global_scale)
    assert_codes(result, *reference_nvfp4(x, float(global_scale)))

  @parameterized.parameters(0.1, 1 / 3, 3.3e-5, 4e-30, 7.7e20)
  def test_values_next_to_ties_bitwise(self, global_scale):
    global_scale = np.float32(global_scale)
    scale = finite_values(E4M3_INFO)[8:]  # the normal numbers
    step = rounded_to_24_bits(scale * np.float64(global_scale))
    values = finite_values(VALUES[NVFP4][0])
    ties = (values[1:] + values[:-1]) / 2
    x = np.zeros((len(scale), 8, 16), np.float32)
    x[:, :, 0] = (6 * step)[:, None]
    near = np.multiply.outer(step, ties).astype(np.float32).view(np.int32)
    near = near[:, None, :] + np.arange(-4, 4)[:, None]
    x[:, :, 1:8] = near.astype(np.int32).view(np.float32)
    x = x.reshape(-1, 16)
    result = jitted(NVFP4)(x, global_scale)
    assert_codes(result, *reference_nvfp4(x, float(global_scale)))

  def test_formula_in_numpy_f32(self):
    # The contract's formula as it is written, in f32, divisions included.
    f32 = np.float32
    x = random_f32(10, (512, 16), 3)
    global_scale = np.abs(x).max() / f32(448 * 6)
    amax = np.abs(x).max(-1, keepdims=True)
    scale = (amax / f32(6) / global_scale).astype(ml_dtypes.float8_e4m3fn)
    quotient = x / (scale.astype(f32) * global_scale)
    values = np.clip(quotient, f32(-6), f32(6)).astype(ml_dtypes.float4_e2m1fn)
    self.assertGreater(scale.min(), 0)
    for f in (jitted(NVFP4), lambda x: quantization.quantize(x, NVFP4)):
      assert_codes(f(x), as_codes(values), as_codes(scale), global_scale)

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_nan_or_inf_spoils_its_own_block_and_no_other(self, special):
    x = np.random.default_rng(4).normal(size=(3, 48)).astype(np.float32)
    x[1, 16:32] = 0.5  # does not hold the largest magnitude
    clean = jitted(NVFP4)(x)
    spoiled = x.copy()
    spoiled[1, 20] = special
    result = jitted(NVFP4)(spoiled)
    expected_scale = as_codes(clean.scale).copy()
    expected_scale[1, 1] = E4M3_NAN
    np.testing.assert_array_equal(as_codes(result.scale), expected_scale)
    self.assertEqual(float(result.global_scale), float(clean.global_scale))
    is_spoiled = np.zeros(x.shape, bool)
    is_spoiled[1, 16:32] = True
    restored = np.asarray(dequantize(result))
    np.testing.assert_array_equal(np.isnan(restored), is_spoiled)
    np.testing.assert_array_equal(
      as_codes(result.values)[~is_spoiled], as_codes(clean.values)[~is_spoiled]
    )

  def test_spoiled_block_takes_no_part_in_the_global_scale(self):
    x = np.ones((2, 16), np.float32)
    x[1] = [np.nan, *[1e6] * 15]
    result = jitted(NVFP4)(x)
    expected = np.float32(1) / np.float32(2688)
    self.assertEqual(np.asarray(result.global_scale), expected)

  def test_zero_block_quantizes_to_zero(self):
    x = np.ones((2, 32), np.float32)
    x[0, 16:] = 0
    result = jitted(NVFP4)(x)
    self.assertEqual(as_codes(result.scale)[0, 1], 0)
    np.testing.assert_array_equal(as_codes(result.values)[0, 16:], 0)
    restored = np.asarray(dequantize(result))
    np.testing.assert_array_equal(restored[0, 16:], 0)

  def test_global_scale_of_a_zero_tensor_is_one(self):
    result = jitted(NVFP4)(jnp.zeros((2, 32)))
    self.assertEqual(float(result.global_scale), 1.0)
    self.assertFalse(np.asarray(dequantize(result)).any())

  def test_global_scale_of_a_tensor_of_nans_is_one(self):
    result = jitted(NVFP4)(jnp.full((2, 32), jnp.nan))
    self.assertEqual(float(result.global_scale), 1.0)
    self.assertTrue(np.isnan(np.asarray(dequantize(result))).all())

  @parameterized.parameters(2.0**-116, 2.0**-130, 2.0**-149)
  def test_global_scale_of_a_tiny_tensor_is_a_normal_number(self, amax):
    result = jitted(NVFP4)(jnp.full((2, 32), amax, jnp.float32))
    self.assertEqual(float(result.global_scale), F32_MIN_NORMAL)

  def test_given_global_scale_is_used_and_returned(self):
    x = random_f32(11, (4, 32), 0)
    expected = reference_nvfp4(x, 0.375)
    for given in (0.375, np.float32(0.375), jnp.array([0.375], jnp.float32)):
      result = quantization.quantize(x, NVFP4, global_scale=given)
      assert_codes(result, *expected)
      self.assertEqual(result.global_scale.shape, ())
      self.assertEqual(result.global_scale.dtype, np.float32)

  @parameterized.parameters(0.0, -1.0, np.nan, np.inf)
  def test_traced_global_scale_that_is_no_scale_gives_nan(self, global_scale):
    result = jitted(NVFP4)(jnp.ones((2, 32)), jnp.float32(global_scale))
    np.testing.assert_array_equal(as_codes(result.scale), E4M3_NAN)

  def test_computed_scales_are_never_negative(self):
    x = -np.abs(random_f32(12, (64, 64), 0))
    self.assertLess(as_codes(jitted(NVFP4)(x).scale).max(), E4M3_NAN)

  def test_scale_rounding_makes_no_difference(self):
    x = random_f32(13, (8, 64), 0)
    assert_same(jitted(NVFP4, "floor")(x), jitted(NVFP4)(x))


class OperationsMxTest(QuantizeMxTest):
  """The same where the kernels for CPUs are not: in JAX operations."""

  def setUp(self):
    super().setUp()
    self.enter_context(target.use_target(target.named_target("cpu")))


class OperationsNvfp4Test(QuantizeNvfp4Test):
  """The same where the kernels for CPUs are not: in JAX operations."""

  def setUp(self):
    super().setUp()
    self.enter_context(target.use_target(target.named_target("cpu")))


class QuantizeTest(parameterized.TestCase):
  @parameterized.product(
    format=formats.FORMATS,
    x=(3.0e38, F32_MAX, 2.0**127, 1e-30, 2.0**-115, 1e-40, 2.0**-149),
  )
  def test_extreme_constant_tensor_bitwise(self, format, x):
    # Every value of the tensor is its amax, up to the ends of f32.
    x = np.full((4, format.block_size), x, np.float32)
    x[1::2] *= -1
    assert_codes(jitted(format)(x), *reference(x, format))

  @parameterized.parameters(*formats.FORMATS)
  def test_zeros_keep_their_sign(self, format):
    x = np.zeros((3, format.block_size), np.float32)
    x[0, ::2] = -0.0
    x[1, 1::2] = -0.0
    x[1, 0] = 3  # zeros beside something larger
    result = jitted(format)(x)
    values = np.asarray(result.values).astype(np.float32)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(x))
    restored = np.asarray(dequantize(result))
    np.testing.assert_array_equal(np.signbit(restored), np.signbit(x))

  @parameterized.product(format=formats.FORMATS, axis=(0, 1, -1, -3))
  def test_any_axis_is_the_last_axis_of_the_moved_array(self, format, axis):
    x = random_f32(14, (64, 32, 96), 4)
    codes, scale, *global_scale = reference(np.moveaxis(x, axis, -1), format)
    result = jitted(format, axis=axis)(x)
    assert_codes(
      result,
      np.moveaxis(codes, -1, axis),
      np.moveaxis(scale, -1, axis),
      *global_scale,
    )
    self.assertEqual(result.axis, axis % 3)
    self.assertEqual(result.shape, x.shape)

  @parameterized.parameters(
    *((format, "up", False) for format in formats.FORMATS),
    (MXFP8, "floor", False),
    (MXFP8, "up", True),
    (NVFP4, "up", True),
  )
  def test_jit_and_eager_agree_bitwise(
    self, format, scale_rounding, stochastic
  ):
    x = special_blocks(format.block_size)
    key = jax.random.key(0) if stochastic else None
    compiled = jitted(format, scale_rounding)(x, key=key)
    with jax.disable_jit():  # one operation at a time
      eager = quantization.quantize(
        x, format, scale_rounding=scale_rounding, key=key
      )
    assert_same(compiled, eager)

  @parameterized.product(
    format=formats.FORMATS, dtype=(ml_dtypes.bfloat16, np.float16)
  )
  def test_result_does_not_depend_on_the_input_dtype(self, format, dtype):
    x = every_value(dtype, 32)[::5]
    f = jitted(format)
    assert_same(f(x), f(x.astype(np.float32)))

  @parameterized.parameters(*formats.FORMATS)
  def test_f64_is_rounded_to_f32_first(self, format):
    x = random_f32(15, (64, 32), 5).astype(np.float64) * (1 + 2.0**-30)
    with jax.enable_x64(True):
      self.assertEqual(jnp.asarray(x).dtype, np.float64)
      wide = jitted(format)(x)
    assert_codes(wide, *reference(x.astype(np.float32), format))

  @parameterized.parameters(*formats.FORMATS)
  def test_enabling_x64_changes_no_bit(self, format):
    x = special_blocks(format.block_size)
    with jax.enable_x64(True):
      result = jitted(format)(x)
      restored = dequantize(result)
    assert_codes(result, *reference(x, format))
    self.assertEqual(restored.dtype, np.float32)

  @parameterized.parameters(MXFP4, NVFP4)
  def test_size_zero_in_any_dimension_gives_an_empty_array(self, format):
    for shape, axis in (
      ((0, 64), 1),
      ((64, 0), 0),
      ((64, 0), 1),
      ((0,), 0),
      ((0, 64), 0),
      ((0, 0, 3), 1),
    ):
      result = jitted(format, axis=axis)(jnp.zeros(shape))
      self.assertEqual(result.shape, shape, (shape, axis))
      self.assertEqual(dequantize(result).shape, shape)

  def test_result_has_the_dtypes_and_shapes_of_the_format(self):
    for format in formats.FORMATS:
      result = jitted(format)(jnp.ones((2, 3, 64)))
      self.assertEqual(result.values.dtype, format.values_dtype)
      self.assertEqual(result.values.shape, (2, 3, 64))
      self.assertEqual(result.scale.dtype, format.scale_dtype)
      self.assertEqual(result.scale.shape, (2, 3, 64 // format.block_size))
      self.assertEqual(result.scale_layout, "linear")
      self.assertEqual(result.global_scale is None, format is not NVFP4)


class QuantizeErrorsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("k", (2, 40), {}, TypeError, "axis 1.*multiple of 32.*k=40.*pad x"),
    (
      "k_of_axis",
      (33, 64),
      {"axis": 0},
      TypeError,
      r"axis 0.*multiple of 32 for MXFP8.*k=33 in shape \(33, 64\)",
    ),
    ("axis", (2, 64), {"axis": 2}, ValueError, "axis 2.*rank 2"),
    ("low_axis", (2, 64), {"axis": -3}, ValueError, "axis -3.*rank 2"),
    (
      "rounding",
      (2, 64),
      {"scale_rounding": "nearest"},
      ValueError,
      "scale_rounding.*up.*floor.*'nearest'",
    ),
    (
      "global_scale",
      (2, 64),
      {"global_scale": 2.5},
      ValueError,
      "mxfp8 has no global scale.*2.5",
    ),
    ("scalar", (), {}, TypeError, "x must have rank 1 or more"),
  )
  def test_bad_argument_is_named_with_its_value(
    self, shape, options, error, message
  ):
    with self.assertRaisesRegex(error, f"quantize: .*{message}"):
      quantization.quantize(jnp.ones(shape), MXFP8, **options)

  def test_k_error_names_nvfp4_and_its_block_size(self):
    with self.assertRaisesRegex(TypeError, "multiple of 16 for NVFP4.*k=24"):
      quantization.quantize(jnp.ones((2, 24)), NVFP4)

  @parameterized.parameters(jnp.int32, jnp.int8, jnp.bool_, jnp.float8_e4m3fn)
  def test_x_that_is_no_float_array_is_refused(self, dtype):
    with self.assertRaisesRegex(
      TypeError, rf"x must be float32.*{jnp.dtype(dtype).name}\[2,32\]"
    ):
      quantization.quantize(jnp.ones((2, 32), dtype), MXFP8)

  def test_scaled_array_is_not_quantized_again(self):
    x = quantization.quantize(jnp.ones((2, 32)), MXFP4)
    with self.assertRaisesRegex(TypeError, "ScaledArray already.*mxfp4"):
      quantization.quantize(x, MXFP8)

  def test_format_that_is_no_format_is_refused(self):
    with self.assertRaisesRegex(
      TypeError, "must be a BlockFormat, got 'mxfp8'"
    ):
      quantization.quantize(jnp.ones((2, 32)), "mxfp8")

  @parameterized.parameters(0.0, -1.5, np.inf, np.nan)
  def test_concrete_global_scale_must_be_positive_and_finite(self, value):
    with self.assertRaisesRegex(
      ValueError, f"positive and finite, got {value}"
    ):
      quantization.quantize(jnp.ones((2, 32)), NVFP4, global_scale=value)

  def test_global_scale_must_be_one_number(self):
    with self.assertRaisesRegex(ValueError, r"one float32, got float32\[3\]"):
      quantization.quantize(jnp.ones((2, 32)), NVFP4, global_scale=jnp.ones(3))

  def test_dequantize_takes_only_a_scaled_array(self):
    with self.assertRaisesRegex(TypeError, "must be a ScaledArray.*ndarray"):
      quantization.dequantize(np.ones((2, 32)))

  def test_errors_come_at_trace_time(self):
    f = jax.jit(lambda x: quantization.quantize(x, MXFP8))
    with self.assertRaisesRegex(TypeError, "k=40"):
      f.trace(jax.ShapeDtypeStruct((2, 40), jnp.float32))


class StochasticRoundingTest(parameterized.TestCase):
  def draw(self, format, x, seed=0):
    """Quantizes blocks [max, *x] with a scale of 1, `DRAWS` times.

    Returns:
      f64[DRAWS, len(x)]: the quantized values of x.
    """
    info, _ = VALUES[format]
    block = np.array([info.max, *x], np.float32)
    self.assertLen(block, format.block_size)
    result = jitted(format)(
      np.broadcast_to(block, (DRAWS, len(block))),
      global_scale=np.float32(1) if format is NVFP4 else None,
      key=jax.random.key(seed),
    )
    scale = np.asarray(result.scale).astype(np.float64)
    np.testing.assert_array_equal(scale, 1)
    return np.asarray(result.values).astype(np.float64)[:, 1:]

  def samples(self, format):
    """Values over the whole range, subnormal ones included, both signs."""
    values = finite_values(VALUES[format][0])
    random = np.random.default_rng(16)
    index = np.linspace(0, len(values) - 2, format.block_size - 1).astype(int)
    fraction = random.uniform(0.03, 0.97, len(index))
    x = values[index] + fraction * (values[index + 1] - values[index])
    return (x * np.where(np.arange(len(x)) % 2, -1, 1)).astype(np.float32)

  @parameterized.parameters(*formats.FORMATS)
  def test_only_the_two_neighbours_come_out_without_bias(self, format):
    x = self.samples(format).astype(np.float64)
    values = finite_values(VALUES[format][0])
    below = np.searchsorted(values, np.abs(x), side="right") - 1
    low, high = values[below] * np.sign(x), values[below + 1] * np.sign(x)
    drawn = self.draw(format, x)
    self.assertTrue(((drawn == low) | (drawn == high)).all())
    probability = (x - low) / (high - low)
    count = (drawn == high).sum(0)
    deviation = np.sqrt(DRAWS * probability * (1 - probability))
    z_score = (count - DRAWS * probability) / deviation
    self.assertLess(np.abs(z_score).max(), MAX_Z_SCORE)

  @parameterized.parameters(*formats.FORMATS)
  def test_exact_values_are_unchanged(self, format):
    values = finite_values(VALUES[format][0])
    index = np.linspace(0, len(values) - 1, format.block_size - 1).astype(int)
    x = values[index] * np.where(index % 2, -1, 1)
    drawn = self.draw(format, x)
    np.testing.assert_array_equal(drawn, np.broadcast_to(x, drawn.shape))

  @parameterized.parameters(*formats.FORMATS)
  def test_same_key_same_bits_other_key_other_bits(self, format):
    x = self.samples(format)
    first = self.draw(format, x, seed=1)
    np.testing.assert_array_equal(first, self.draw(format, x, seed=1))
    self.assertTrue((first != self.draw(format, x, seed=2)).any())

  @parameterized.product(format=formats.FORMATS, scale_rounding=ROUNDINGS)
  def test_scales_are_those_of_rounding_to_nearest(
    self, format, scale_rounding
  ):
    x = special_blocks(format.block_size)
    nearest = jitted(format, scale_rounding)(x)
    drawn = jitted(format, scale_rounding)(x, key=jax.random.key(3))
    np.testing.assert_array_equal(
      as_codes(drawn.scale), as_codes(nearest.scale)
    )

  def test_values_beyond_the_largest_saturate(self):
    x = jnp.zeros(32).at[0].set(511.0).at[1].set(-450.0)
    for seed in range(8):
      result = jitted(MXFP8, "floor")(x, key=jax.random.key(seed))
      values = np.asarray(result.values).astype(np.float64)
      np.testing.assert_array_equal(values[:2], [448, -448])


class IdempotenceTest(parameterized.TestCase):
  """Of quantize(dequantize(.)), where f32 holds every dequantized value."""

  def blocks(self, format):
    """bf16 blocks, all mantissas, of amax in [2^-80, 2^126)."""
    binade = 2**7
    magnitudes = range((127 - 80) * binade, (127 + 126) * binade)
    return every_value(ml_dtypes.bfloat16, format.block_size, magnitudes)

  @parameterized.product(format=MX_FORMATS, scale_rounding=ROUNDINGS)
  def test_dequantized_values_are_bitwise_stable(self, format, scale_rounding):
    f = jitted(format, scale_rounding)
    once = np.asarray(dequantize(f(self.blocks(format))))
    twice = np.asarray(dequantize(f(once)))
    self.assertTrue(np.isfinite(once).all())
    np.testing.assert_array_equal(twice.view(np.int32), once.view(np.int32))

  @parameterized.parameters(*MX_FORMATS)
  def test_floor_codes_are_bitwise_stable(self, format):
    f = jitted(format, "floor")
    once = f(self.blocks(format))
    assert_same(f(dequantize(once)), once)

  @parameterized.parameters(*MX_FORMATS)
  def test_up_codes_change_only_where_the_amax_rounded_to_half_the_maximum(
    self, format
  ):
    # max / 2 with scale 2^e is max with scale 2^(e - 1): the same number.
    f = jitted(format)
    once = f(self.blocks(format))
    twice = f(dequantize(once))
    largest = np.abs(np.asarray(once.values).astype(np.float64)).max(-1)
    halved = largest == VALUES[format][0].max / 2
    self.assertTrue(halved.any())
    self.assertTrue((~halved).any())
    np.testing.assert_array_equal(
      as_codes(twice.scale)[:, 0], as_codes(once.scale)[:, 0] - halved
    )
    np.testing.assert_array_equal(
      as_codes(twice.values)[~halved], as_codes(once.values)[~halved]
    )
    assert_same(f(dequantize(twice)), twice)

  def test_nvfp4_codes_are_bitwise_stable_where_the_scale_is_normal(self):
    # A subnormal E4M3 scale is off by up to 1/2 of itself, so that a block's
    # amax need not come out as 6 and the scale may change. See the next test.
    binade = 2**7
    for top in (-40, 0, 60):
      magnitudes = range((127 + top - 20) * binade, (127 + top) * binade)
      once = jitted(NVFP4)(every_value(ml_dtypes.bfloat16, 16, magnitudes))
      twice = jitted(NVFP4)(dequantize(once), once.global_scale)
      normal = np.asarray(once.scale).astype(np.float64)[:, 0] >= 2.0**-6
      self.assertTrue(normal.any())
      np.testing.assert_array_equal(
        as_codes(twice.scale)[normal], as_codes(once.scale)[normal]
      )
      np.testing.assert_array_equal(
        as_codes(twice.values)[normal], as_codes(once.values)[normal]
      )

  def test_nvfp4_block_with_a_subnormal_scale_need_not_be_stable(self):
    # By hand, in units of 2^-9: amax / 6 = 1.5 rounds to 2 (ties to even),
    # 9 / 2 = 4.5 to 4; then 8 / 6 rounds to 1, and 8 / 1 saturates at 6.
    x = jnp.zeros(16, jnp.float32).at[0].set(9 * 2.0**-9)
    once = jitted(NVFP4)(x, np.float32(1))
    twice = jitted(NVFP4)(dequantize(once), np.float32(1))
    self.assertEqual(float(dequantize(once)[0]), 8 * 2.0**-9)
    self.assertEqual(float(dequantize(twice)[0]), 6 * 2.0**-9)


if __name__ == "__main__":
  absltest.main()
