# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` to the MX formats, bitwise, against NumPy in f64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.testing.oracles import quantization_oracle

MXFP8 = formats.MXFP8
MXFP8_E5M2 = formats.MXFP8_E5M2
MXFP4 = formats.MXFP4
F32_MIN_NORMAL = quantization_oracle.F32_MIN_NORMAL
MX_FORMATS = quantization_oracle.MX_FORMATS
ROUNDINGS = quantization_oracle.ROUNDINGS
VALUES = quantization_oracle.VALUES
as_codes = quantization_oracle.as_codes
assert_codes = quantization_oracle.assert_codes
dequantize = quantization_oracle.dequantize
every_value = quantization_oracle.every_value
jitted = quantization_oracle.jitted
random_f32 = quantization_oracle.random_f32
reference_mx = quantization_oracle.reference_mx


class QuantizeMxTest(parameterized.TestCase):
  @parameterized.product(
    format=MX_FORMATS,
    scale_rounding=ROUNDINGS,
    dtype=(ml_dtypes.bfloat16, np.float16),
  )
  @pytest.mark.sample(3)
  def test_all_65536_16_bit_values_bitwise(self, format, scale_rounding, dtype):
    x = every_value(dtype, 32)
    self.assertLen(np.unique(x[:, 0].view(np.uint16)), 65536)
    assert_codes(
      jitted(format, scale_rounding)(x),
      *reference_mx(x.astype(np.float32), format, scale_rounding),
    )

  @parameterized.product(format=MX_FORMATS, scale_rounding=ROUNDINGS)
  @pytest.mark.sample(5)
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
  @pytest.mark.sample(5)
  def test_f32_blocks_of_every_magnitude_bitwise(self, format, scale_rounding):
    top = np.repeat(np.arange(-149, 128), 8)[:, None]
    x = random_f32(2, (len(top), 32), top)
    assert_codes(
      jitted(format, scale_rounding)(x),
      *reference_mx(x, format, scale_rounding),
    )

  @parameterized.product(format=MX_FORMATS, scale_rounding=ROUNDINGS)
  @pytest.mark.sample(5)
  def test_f32_subnormals_are_honoured(self, format, scale_rounding):
    random = np.random.default_rng(3)
    words = random.integers(0, 2 ** random.integers(1, 24, (512, 1)), (512, 32))
    x = words.astype(np.uint32).view(np.float32)
    self.assertLess(x.max(), F32_MIN_NORMAL)
    assert_codes(
      jitted(format, scale_rounding)(x),
      *reference_mx(x, format, scale_rounding),
    )
    self.assertTrue(
      as_codes(jitted(format, scale_rounding)(x).unpack().values).any()
    )

  @parameterized.product(format=MX_FORMATS, scale_rounding=ROUNDINGS)
  @pytest.mark.sample(5)
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
  @pytest.mark.sample(2)
  def test_scale_rounds_up_or_down_as_asked(self, format, amax, up, floor):
    x = jnp.zeros(32).at[7].set(-amax)
    for scale_rounding, expected in (("up", up), ("floor", floor)):
      result = jitted(format, scale_rounding)(x)
      self.assertEqual(as_codes(result.scale)[0], expected)

  @parameterized.parameters(*MX_FORMATS)
  @pytest.mark.sample(2)
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
    values = np.asarray(result.unpack().values).astype(np.float64)
    self.assertEqual(values[0, 4], largest)
    self.assertEqual(values[1, 9], -largest)

  @parameterized.product(
    format=MX_FORMATS,
    scale_rounding=ROUNDINGS,
    special=(np.nan, -np.nan, np.inf, -np.inf),
  )
  @pytest.mark.sample(5)
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
      as_codes(result.unpack().values)[~is_spoiled],
      as_codes(clean.unpack().values)[~is_spoiled],
    )

  @parameterized.product(format=MX_FORMATS, scale_rounding=ROUNDINGS)
  @pytest.mark.sample(4)
  def test_zero_block_quantizes_to_scale_byte_0_and_zero(
    self, format, scale_rounding
  ):
    x = np.ones((2, 64), np.float32)
    x[1, 32:] = 0
    result = jitted(format, scale_rounding)(x)
    self.assertEqual(as_codes(result.scale)[1, 1], 0)
    np.testing.assert_array_equal(as_codes(result.unpack().values)[1, 32:], 0)
    np.testing.assert_array_equal(np.asarray(dequantize(result)), x)


class OperationsMxTest(QuantizeMxTest):
  """The same where the kernels for CPUs are not: in JAX operations."""

  def setUp(self):
    super().setUp()
    self.enter_context(targets.use_target(targets.named_target("cpu")))


if __name__ == "__main__":
  absltest.main()
