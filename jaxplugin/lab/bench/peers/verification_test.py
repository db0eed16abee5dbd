# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of results can fail, and pass what is right."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.lab.bench.peers import verification

FORMATS = [dict(testcase_name=f.name, format=f) for f in formats.FORMATS]


def normal(rows, k, seed=0):
  x = np.random.default_rng(seed).standard_normal((rows, k))
  return jnp.asarray(x, jnp.float32)


class DotTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.lhs = np.asarray(normal(3, 64, 1))
    self.rhs = np.asarray(normal(5, 64, 2))
    self.expected = verification.expected_dot(self.lhs, self.rhs)
    self.right = self.lhs @ self.rhs.T

  def check(self, result, **options):
    options = {"bound": verification.OURS_BOUND, **options}
    return verification.check_dot(result, self.expected, **options)

  def test_right_result_passes_and_its_error_is_told(self):
    exact = self.lhs.astype(np.float64) @ self.rhs.T.astype(np.float64)
    self.assertLess(self.check(exact.astype(np.float32)), 1)
    # 5 units above, at one element.
    magnitude = np.abs(self.lhs) @ np.abs(self.rhs).T
    wrong = exact.copy()
    wrong[1, 2] += 5 * 2.0**-24 * magnitude[1, 2]
    self.assertBetween(self.check(wrong.astype(np.float32)), 3.5, 5.5)

  @parameterized.parameters((15, True), (18, False))
  def test_bound_is_that_of_the_contract(self, units, passes):
    magnitude = np.abs(self.lhs) @ np.abs(self.rhs).T
    wrong = self.expected.exact + units * 2.0**-24 * magnitude
    wrong = wrong.astype(np.float32)
    if passes:
      self.check(wrong)
    else:
      with self.assertRaises(verification.WrongResultError):
        self.check(wrong)

  @parameterized.parameters(
    ((2, 4), 0.01, r"at \(2, 4\): got .*above the bound"),
    ((0, 0), np.nan, "1 of 15 elements are not finite"),
  )
  def test_one_wrong_element_is_told(self, place, added, pattern):
    wrong = self.right.copy()
    wrong[place] += added
    with self.assertRaisesRegex(verification.WrongResultError, pattern):
      self.check(wrong)

  def test_cast_to_the_results_dtype_does_not_count(self):
    rounded = self.expected.exact.astype(ml_dtypes.bfloat16)
    self.assertLess(self.check(rounded), 2)
    with self.assertRaises(verification.WrongResultError):
      self.check(rounded.astype(np.float32))

  @parameterized.parameters(
    (np.float32, 2.0**-23),
    (ml_dtypes.bfloat16, 2.0**-7),
    (np.float16, 2.0**-10),
  )
  def test_result_halfway_between_two_numbers_may_be_either(self, dtype, step):
    # Next to 1 a rounding errs most, by almost 2^-p.
    dtype = np.dtype(dtype)
    exact = np.full((1, 1), 1 + step / 2)
    expected = verification.ExpectedSample(
      rows=np.arange(1), columns=np.arange(1), exact=exact, magnitude=0 * exact
    )
    for right in (1, 1 + step):
      result = np.full((1, 1), right, dtype)
      verification.check_dot(result, expected, bound=0)
    for wrong in (1 - step, 1 + 2 * step):
      with self.assertRaises(verification.WrongResultError):
        verification.check_dot(np.full((1, 1), wrong, dtype), expected, bound=0)

  def test_relative_error_allowed_is_of_the_result(self):
    off = (self.expected.exact * (1 + 2.0**-9)).astype(np.float32)
    self.check(off, relative=2.0**-8)
    with self.assertRaises(verification.WrongResultError):
      self.check(off)

  @parameterized.named_parameters(*FORMATS)
  def test_quantized_operands_mean_what_their_codes_say(self, format):
    x = quantization.quantize(normal(4, 64), format)
    expected = verification.expected_dot(x, np.eye(64, dtype=np.float32))
    values = np.asarray(x.unpack().values).astype(np.float64)
    values = values.reshape(4, -1, format.block_size)
    scale = np.asarray(x.scale).astype(np.float64)[..., None]
    exact = (values * scale).reshape(4, 64)
    if x.global_scale is not None:
      exact = exact * x.global_scale.item()
    np.testing.assert_array_equal(expected.exact, exact)

  @parameterized.parameters(
    formats.FP8_128X128, formats.FP8_1X128, formats.INT8_ROW, formats.INT4_32
  )
  def test_formats_of_checkpoints_mean_what_dequantize_returns(self, format):
    x = quantization.quantize(normal(150, 160), format)
    rows = np.array([0, 127, 128, 149])
    found = verification.f64(x, rows)
    expected = np.asarray(quantization.dequantize(x))[rows]
    np.testing.assert_array_equal(found.astype(np.float32), expected)

  @parameterized.parameters(formats.UINT4_128, formats.UINT4_32_MIN)
  def test_offsets_count_in_values_and_in_the_unit_of_errors(self, format):
    x = quantization.quantize(normal(4, 160) + 2, format)
    expected = verification.expected_dot(x, np.eye(160, dtype=np.float32))
    values = np.asarray(quantization.dequantize(x), np.float64)
    stored = np.asarray(quantization.dequantize(x.without_offset()), np.float64)
    magnitude = np.abs(stored) + np.abs(values - stored)
    self.assertGreater(np.max(magnitude - np.abs(values)), 1)
    for found, exact in (
      (expected.exact, values),
      (expected.magnitude, magnitude),
    ):
      self.assertLess(np.max(np.abs(found - exact) / magnitude), 2.0**-22)

  def test_large_results_are_sampled_with_both_ends(self):
    found = verification.some(100000, 50)
    self.assertLen(np.unique(found), 50)
    self.assertEqual((found[0], found[-1]), (0, 99999))
    np.testing.assert_array_equal(verification.some(5, 50), np.arange(5))


class CodecTest(parameterized.TestCase):
  @parameterized.named_parameters(*FORMATS)
  def test_what_the_package_quantizes_passes_and_a_wrong_code_is_told(
    self, format
  ):
    x = normal(6, 96)
    right = quantization.quantize(x, format)
    verification.check_quantized(right, x)
    right = right.unpack()
    wrongs = []
    for name in ("values", "scale"):
      codes = np.array(getattr(right, name))
      codes.view(np.uint8)[5, 1] ^= 1
      pattern = rf"{name} at \(5, 1\).* 1 of \d+ differ"
      wrongs.append(({name: codes}, pattern))
    if format.has_global_scale:
      scale = {"global_scale": right.global_scale * 2}
      wrongs.append((scale, "global scale"))
    for parts, pattern in wrongs:
      names = ("values", "scale", "global_scale")
      arrays = [parts.get(name, getattr(right, name)) for name in names]
      wrong = scaled_array.ScaledArray(*arrays, format)
      with self.assertRaisesRegex(verification.WrongResultError, pattern):
        verification.check_quantized(wrong, x)

  @parameterized.named_parameters(*FORMATS)
  @pytest.mark.sample(1)
  def test_dequantized_values_are_compared(self, format):
    x = quantization.quantize(normal(6, 96), format)
    right = np.asarray(quantization.dequantize(x))
    verification.check_dequantized(right, x)
    wrong = right.copy()
    wrong[0, 7] = np.nextafter(wrong[0, 7], np.float32(np.inf))
    with self.assertRaisesRegex(
      verification.WrongResultError, r"at \(0, 7\).* 1 of 576 differ"
    ):
      verification.check_dequantized(wrong, x)
