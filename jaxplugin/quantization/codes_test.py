# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every code of every format, and rounding to them, bitwise.

Expected values come from ml_dtypes and from gfloat, two codecs that share no
code with each other or with jaxplugin.
"""

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.core import formats
from jaxplugin.quantization import codes

pytestmark = pytest.mark.smoke

GFLOAT = {
  formats.E4M3: gfloat.formats.format_info_ocp_e4m3,
  formats.E5M2: gfloat.formats.format_info_ocp_e5m2,
  formats.E2M1: gfloat.formats.format_info_ocp_e2m1,
  formats.E8M0: gfloat.formats.format_info_ocp_e8m0,
}
VALUES_DTYPES = (formats.E4M3, formats.E5M2, formats.E2M1)
F32_MIN_NORMAL = 2.0**-126


def all_codes(dtype):
  return np.arange(2 ** GFLOAT[dtype].bits, dtype=np.uint8)


def assert_same_bits(actual, expected):
  """Equal, with NaN equal to NaN and -0 different from 0."""
  actual, expected = np.asarray(actual), np.asarray(expected)
  np.testing.assert_array_equal(actual, expected)
  finite = ~np.isnan(expected)
  np.testing.assert_array_equal(
    np.signbit(actual[finite]), np.signbit(expected[finite])
  )


def representable(dtype):
  """f64, ascending: the finite values >= 0 of `dtype`, from gfloat."""
  info = GFLOAT[dtype]
  codes_ = np.arange(2 ** (info.bits - 1))
  values = gfloat.decode_ndarray(info, codes_)
  return values[np.isfinite(values)]


def f32_neighbours(x, steps):
  """f32 values that are up to `steps` f32 ulps from `x` > 0, and `x`."""
  bits = np.asarray(x, np.float32).view(np.int32)[:, None]
  return (bits + np.arange(-steps, steps + 1)).astype(np.int32).view(np.float32)


def hard_samples(dtype):
  """f32 >= 0: values, ties and their neighbours, and dense coverage."""
  values = representable(dtype)
  ties = (values[1:] + values[:-1]) / 2
  beyond = values[-1] * np.array([1.03, 1.0625, 1.1, 2, 1e6, 1e38 / 6e4])
  points = np.concatenate([values[1:], ties, beyond])
  random = np.random.default_rng(0)
  smallest, largest = np.log2(values[1]) - 3, np.log2(values[-1]) + 2
  samples = np.concatenate(
    [
      f32_neighbours(points, 3).ravel(),
      np.linspace(0, 1.1 * values[-1], 20_001).astype(np.float32),
      np.exp2(random.uniform(smallest, largest, 40_000)).astype(np.float32),
      np.exp2(random.uniform(-126, 127, 10_000)).astype(np.float32),
      np.array([0, F32_MIN_NORMAL, 3.4028235e38], np.float32),
    ]
  )
  return samples[(samples == 0) | (samples >= np.float32(F32_MIN_NORMAL))]


class DecodeTest(parameterized.TestCase):
  @parameterized.parameters(*VALUES_DTYPES, formats.E8M0)
  def test_ml_dtypes_and_gfloat_agree_on_every_code(self, dtype):
    # The premise of everything below: two oracles, one answer.
    expected = gfloat.decode_ndarray(
      GFLOAT[dtype], all_codes(dtype).astype(np.int32)
    )
    assert_same_bits(all_codes(dtype).view(dtype).astype(np.float64), expected)

  @parameterized.parameters(*VALUES_DTYPES)
  def test_every_code_decodes_as_gfloat_says(self, dtype):
    decode = jax.jit(lambda c: codes.from_codes(c, dtype).astype(jnp.float32))
    expected = gfloat.decode_ndarray(
      GFLOAT[dtype], all_codes(dtype).astype(np.int32)
    )
    assert_same_bits(decode(all_codes(dtype)), expected)

  @parameterized.parameters(*VALUES_DTYPES, formats.E8M0)
  def test_from_codes_keeps_every_bit(self, dtype):
    array = codes.from_codes(jnp.asarray(all_codes(dtype)), dtype)
    self.assertEqual(array.dtype, dtype)
    np.testing.assert_array_equal(
      np.asarray(array).view(np.uint8), all_codes(dtype)
    )

  def test_every_e8m0_code_decodes_to_a_power_of_two(self):
    scale = all_codes(formats.E8M0).view(formats.E8M0)
    factors = jax.jit(codes.decode_e8m0)(scale)
    factors = [np.asarray(factor, np.float64) for factor in factors]
    product = factors[0] * factors[1]
    exponents = np.arange(255) - 127
    np.testing.assert_array_equal(product[:255], np.ldexp(1.0, exponents))
    self.assertTrue(np.isnan(product[255]))
    for factor in factors:
      self.assertGreaterEqual(np.nanmin(factor), F32_MIN_NORMAL)


# Eager calls compile each operation.
encode = jax.jit(codes.encode, static_argnums=1)


class EncodeTest(parameterized.TestCase):
  @parameterized.parameters(*VALUES_DTYPES)
  def test_encode_rounds_to_nearest_even_and_saturates(self, dtype):
    x = hard_samples(dtype)
    actual = encode(x.view(np.int32), formats.encoding(dtype))
    info, largest = GFLOAT[dtype], np.float32(representable(dtype)[-1])
    rounded = gfloat.round_ndarray(
      info, x.astype(np.float64), gfloat.RoundMode.TiesToEven, sat=True
    )
    np.testing.assert_array_equal(actual, gfloat.encode_ndarray(info, rounded))
    by_ml_dtypes = np.minimum(x, largest).astype(dtype).view(np.uint8)
    np.testing.assert_array_equal(actual, by_ml_dtypes)

  @parameterized.parameters(*VALUES_DTYPES)
  @pytest.mark.sample(1)
  def test_every_value_encodes_to_its_own_code(self, dtype):
    bits = representable(dtype).astype(np.float32).view(np.int32)
    for random_bits in (None, np.full(bits.shape, 2**32 - 1, np.uint32)):
      actual = encode(bits, formats.encoding(dtype), random_bits)
      np.testing.assert_array_equal(actual, np.arange(len(bits)))

  @parameterized.named_parameters(
    # (dtype, f32 value, code below, exact fraction of the way to the next code)
    ("e4m3_normal", formats.E4M3, 17 + 0.3125, 0x58, 0.65625),
    ("e4m3_subnormal", formats.E4M3, 2.0**-9 * 2.75, 2, 0.75),
    ("e4m3_below_all", formats.E4M3, 2.0**-9 * 0.125, 0, 0.125),
    ("e5m2_normal", formats.E5M2, 1.0 + 0.25 * 0.375, 0x3C, 0.375),
    ("e5m2_subnormal", formats.E5M2, 2.0**-16 * 1.5, 1, 0.5),
    ("e2m1_normal", formats.E2M1, 4.25, 6, 0.125),
    ("e2m1_subnormal", formats.E2M1, 0.0625, 0, 0.125),
    ("e2m1_odd_bits", formats.E2M1, 1.0 + 0.5 * 5 / 2**22, 2, 5 / 2**22),
  )
  @pytest.mark.sample(4)
  def test_stochastic_rounding_goes_up_with_exactly_the_discarded_fraction(
    self, dtype, value, below, fraction
  ):
    # Over all values of the 22 random bits in use, so no statistics.
    noise = np.arange(2**22, dtype=np.uint32)
    bits = np.full(noise.shape, np.float32(value).view(np.int32))
    info = GFLOAT[dtype]
    low = gfloat.decode_float(info, below).fval
    high = gfloat.decode_float(info, below + 1).fval
    self.assertEqual((value - low) / (high - low), fraction)
    actual = np.asarray(encode(bits, formats.encoding(dtype), noise))
    counts = np.bincount(actual, minlength=256)
    self.assertEqual(counts[below + 1], fraction * 2**22)
    self.assertEqual(counts[below], (1 - fraction) * 2**22)

  @parameterized.parameters(*VALUES_DTYPES)
  @pytest.mark.sample(1)
  def test_stochastic_rounding_ignores_unused_high_random_bits(self, dtype):
    x = hard_samples(dtype)
    random = np.random.default_rng(1).integers(0, 2**22, x.shape, np.uint32)
    bits, encoding = x.view(np.int32), formats.encoding(dtype)
    np.testing.assert_array_equal(
      encode(bits, encoding, random),
      encode(bits, encoding, random | 0xFFC00000),
    )

  @parameterized.parameters(*VALUES_DTYPES)
  @pytest.mark.sample(1)
  def test_stochastic_rounding_never_exceeds_the_largest_value(self, dtype):
    top = representable(dtype)[-1]
    x = f32_neighbours(np.array([top]), 5).ravel()
    noise = np.full(x.shape, 2**32 - 1, np.uint32)
    actual = encode(x.view(np.int32), formats.encoding(dtype), noise)
    self.assertEqual(np.asarray(actual).max(), len(representable(dtype)) - 1)

  @parameterized.parameters(*VALUES_DTYPES)
  @pytest.mark.sample(1)
  def test_with_sign_gives_the_codes_of_ml_dtypes(self, dtype):
    values = representable(dtype).astype(np.float32)
    x = np.concatenate([values, -values])
    magnitude = np.tile(np.arange(len(values), dtype=np.uint8), 2)
    signed = codes.with_sign(
      jnp.asarray(magnitude), jnp.asarray(x), formats.encoding(dtype)
    )
    np.testing.assert_array_equal(signed, x.astype(dtype).view(np.uint8))


class ExtendedBitsTest(parameterized.TestCase):
  def value_of(self, extended):
    """f64 meaning of extended bits: any exponent, normalized mantissa."""
    extended = np.asarray(extended, np.int64)
    mantissa = (extended & 0x7FFFFF) + 0x800000
    return np.ldexp(mantissa.astype(np.float64), (extended >> 23) - 127 - 23)

  def magnitudes(self):
    random = np.random.default_rng(2)
    bits = np.concatenate(
      [
        2 ** np.arange(31),
        2 ** np.arange(1, 31) - 1,
        np.arange(1, 3000),
        random.integers(1, 0x800000, 5000),
        random.integers(0x800000, 0x7F800000, 5000),
      ]
    )
    return bits[bits < 0x7F800000].astype(np.int32)

  def test_extend_keeps_the_value_of_subnormals_and_normals(self):
    bits = self.magnitudes()
    expected = bits.view(np.float32).astype(np.float64)
    for extend in (codes.extend, jax.jit(codes.extend)):
      np.testing.assert_array_equal(self.value_of(extend(bits)), expected)

  def test_times_power_of_two_is_exact_below_the_f32_range_too(self):
    bits = self.magnitudes()
    times = jax.jit(lambda b, e: codes.times_power_of_two(codes.extend(b), e))
    for exponent in (-127, -1, 0, 1, 127):
      expected = np.ldexp(bits.view(np.float32).astype(np.float64), exponent)
      is_in_range = expected < 2.0**129  # where int32 holds the sum
      actual = self.value_of(times(bits, exponent))
      np.testing.assert_array_equal(actual[is_in_range], expected[is_in_range])

  def test_flush_zeroes_exactly_what_is_below_the_normal_range(self):
    bits = self.magnitudes()
    value = bits.view(np.float32).astype(np.float64)
    flush = jax.jit(lambda bits: codes.flush(codes.extend(bits)))
    flushed = np.asarray(flush(bits)).view(np.float32)
    expected = np.where(value < F32_MIN_NORMAL, 0, value)
    np.testing.assert_array_equal(flushed, expected)

  def test_magnitude_bits_orders_nan_above_infinity_above_all_else(self):
    x = np.float32([0.0, -1.5, 3.4e38, -np.inf, np.nan])
    bits = np.asarray(jax.jit(codes.magnitude_bits)(x))
    self.assertTrue((np.diff(bits) > 0).all())
    self.assertEqual(bits[0], 0)
    self.assertEqual(bits[3], 0x7F800000)

  @parameterized.parameters(jnp.bfloat16, jnp.float16, jnp.float32)
  def test_f32_bits_are_those_of_numpy_whatever_the_dtype(self, dtype):
    x = np.array([0, -0.0, 1.5, -2.25, 0.0999, 60000], dtype)
    np.testing.assert_array_equal(
      codes.f32_bits(jnp.asarray(x)),
      x.astype(np.float32).view(np.int32),
    )


class DivideTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    random = np.random.default_rng(3)
    exponents = random.uniform(-60, 60, (512, 16))
    self.numerator = np.exp2(exponents).astype(np.float32)
    self.numerator[::7, ::3] = 0
    self.denominator = np.exp2(exponents[:, :1] / 2).astype(np.float32)

  @parameterized.parameters(6.0, 2688.0, 3.0)
  @pytest.mark.sample(1)
  def test_division_by_a_constant_is_correctly_rounded(self, constant):
    actual = jax.jit(lambda x: codes.divide(x, constant))(self.numerator)
    expected = self.numerator / np.float32(constant)
    np.testing.assert_array_equal(actual, expected)

  def test_division_by_a_broadcast_is_correctly_rounded(self):
    def divide(x, y):
      return codes.divide(x, jnp.broadcast_to(y, x.shape))

    expected = self.numerator / self.denominator
    for f in (divide, jax.jit(divide)):
      actual = f(jnp.asarray(self.numerator), jnp.asarray(self.denominator))
      np.testing.assert_array_equal(actual, expected)

  def test_zero_over_anything_is_zero(self):
    below = np.float32([0.0, 1.0, np.inf, np.nan])
    result = jax.jit(codes.divide)(np.zeros_like(below), below)
    np.testing.assert_array_equal(result, np.zeros(4))
