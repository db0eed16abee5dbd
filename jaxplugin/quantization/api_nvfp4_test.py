# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` to NVFP4, bitwise, against NumPy in f64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.core import formats
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing.oracles import quantization_oracle as oracle

NVFP4 = formats.NVFP4


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

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_nan_or_inf_spoils_its_own_block_and_no_other(self, special):
    x = np.random.default_rng(4).normal(size=(3, 48)).astype(np.float32)
    x[1, 16:32] = 0.5  # does not hold the largest magnitude
    clean = oracle.jitted(NVFP4)(x)
    spoiled = x.copy()
    spoiled[1, 20] = special
    result = oracle.jitted(NVFP4)(spoiled)
    expected_scale = oracle.as_codes(clean.scale).copy()
    expected_scale[1, 1] = oracle.E4M3_NAN
    np.testing.assert_array_equal(oracle.as_codes(result.scale), expected_scale)
    self.assertEqual(result.global_scale.item(), clean.global_scale.item())
    is_spoiled = np.zeros(x.shape, bool)
    is_spoiled[1, 16:32] = True
    restored = np.asarray(oracle.dequantize(result))
    np.testing.assert_array_equal(np.isnan(restored), is_spoiled)
    np.testing.assert_array_equal(
      oracle.as_codes(result.unpack().values)[~is_spoiled],
      oracle.as_codes(clean.unpack().values)[~is_spoiled],
    )

  @parameterized.parameters(
    # Value of all blocks, of the second block, and the global scale.
    (0.0, 0.0, 1.0),
    (np.nan, np.nan, 1.0),
    (1.0, np.nan, np.float32(1) / np.float32(2688)),
    *((x, x, 2.0**-126) for x in (2.0**-116, 2.0**-130, 2.0**-149)),
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
