# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks the records of formats against ml_dtypes and published tables."""

import dataclasses

import ml_dtypes
import numpy as np
from absl.testing import parameterized

from jaxplugin.kernels import formats

DTYPES = {
  "e4m3": ml_dtypes.float8_e4m3fn,
  "e5m2": ml_dtypes.float8_e5m2,
  "e2m3": ml_dtypes.float6_e2m3fn,
  "e3m2": ml_dtypes.float6_e3m2fn,
  "e2m1": ml_dtypes.float4_e2m1fn,
  "e8m0": ml_dtypes.float8_e8m0fnu,
}

INTEGERS = {8: np.int8, 4: ml_dtypes.int4}
WIDE = {
  formats.F16: np.float16,
  formats.BF16: ml_dtypes.bfloat16,
  formats.F32: np.float32,
}

# OCP MX v1.0, tables 1 and 2; NVFP4 from the cuDNN documentation:
# (bits, emax, largest, block size, scale, two levels).
PUBLISHED = {
  "mxfp8": (8, 8, 448.0, 32, "e8m0", False),
  "mxfp8_e5m2": (8, 15, 57344.0, 32, "e8m0", False),
  "mxfp6_e2m3": (6, 2, 7.5, 32, "e8m0", False),
  "mxfp6_e3m2": (6, 4, 28.0, 32, "e8m0", False),
  "mxfp4": (4, 2, 6.0, 32, "e8m0", False),
  "nvfp4": (4, 2, 6.0, 16, "e4m3", True),
}


def decoded(element, code):
  """Returns the value of a finite code from the record's fields."""
  mantissa = code & (1 << element.mantissa_bits) - 1
  exponent = code >> element.mantissa_bits & (1 << element.exponent_bits) - 1
  fraction = mantissa / 2**element.mantissa_bits
  if exponent == 0 and element.is_signed:
    magnitude = fraction * 2.0**element.min_exponent
  else:
    magnitude = (1 + fraction) * 2.0 ** (exponent - element.bias)
  is_negative = element.is_signed and code >> element.sign_shift
  return -magnitude if is_negative else magnitude


class ElementTest(parameterized.TestCase):
  def test_every_element_is_compared(self):
    self.assertEqual(set(formats.ELEMENTS), set(DTYPES))

  @parameterized.parameters(*DTYPES)
  def test_every_code_means_what_ml_dtypes_says(self, name):
    element = formats.ELEMENTS[name]
    codes = np.arange(2**element.bits, dtype=np.uint8)
    expected = codes.view(DTYPES[name]).astype(np.float64)
    finite = np.isfinite(expected)
    self.assertEqual(
      [decoded(element, int(code)) for code in codes[finite]],
      list(expected[finite]),
    )
    self.assertEqual(element.max, expected[finite].max())
    self.assertEqual(element.has_infinity, bool(np.isinf(expected).any()))
    self.assertEqual(element.nan_code is not None, np.isnan(expected).any())
    if element.nan_code is not None:
      self.assertTrue(np.isnan(expected[element.nan_code]))

  @parameterized.parameters(*DTYPES)
  def test_codes_fill_their_share_of_a_byte(self, name):
    element = formats.ELEMENTS[name]
    self.assertEqual(element.values_per_byte, 8 // element.bits)
    self.assertEqual(element.stored_bits, 4 if element.bits == 4 else 8)

  @parameterized.parameters(*DTYPES)
  def test_largest_value_has_its_f32_bits(self, name):
    element = formats.ELEMENTS[name]
    bits = int(np.float32(element.max).view(np.int32))
    self.assertEqual(element.max_f32_bits, bits)

  @parameterized.product(bits=tuple(INTEGERS), fraction_bits=(0, 6))
  def test_integer_is_that_of_ml_dtypes(self, bits, fraction_bits):
    element = formats.integer(bits, fraction_bits)
    info = ml_dtypes.iinfo(INTEGERS[bits])
    self.assertEqual(element.max, info.max / 2**fraction_bits)
    self.assertEqual(element.min_positive, 1 / 2**fraction_bits)
    self.assertEqual((element.bits, element.stored_bits), (bits, bits))
    self.assertTrue(element.is_twos_complement)

  @parameterized.parameters(*WIDE)
  def test_wide_scale_is_that_of_ml_dtypes(self, element):
    dtype = np.dtype(WIDE[element])
    info = ml_dtypes.finfo(dtype)
    self.assertEqual(element.bits, info.bits)
    self.assertEqual(element.mantissa_bits, info.nmant)
    self.assertEqual(element.min_exponent, info.minexp)
    self.assertEqual(element.max, float(info.max))
    word = np.dtype(f"u{dtype.itemsize}").type(element.nan_code)
    self.assertTrue(np.isnan(np.array(word).view(dtype)))


class FormatTest(parameterized.TestCase):
  def test_every_format_is_published(self):
    self.assertEqual(set(formats.FORMATS), set(PUBLISHED))

  @parameterized.parameters(*PUBLISHED)
  def test_format_has_the_published_facts(self, name):
    format = formats.by_name(name)
    found = (
      format.element.bits,
      format.element.max_exponent,
      format.element.max,
      format.block_size,
      format.scale.name,
      format.is_two_level,
    )
    self.assertEqual(found, PUBLISHED[name])
    self.assertEqual(format.name, name)
    self.assertEqual(format.is_packed, format.element.bits == 4)

  def test_unknown_name_error_lists_the_known_ones(self):
    with self.assertRaisesRegex(ValueError, "'mxfp6'; known.*mxfp6_e2m3"):
      formats.by_name("mxfp6")

  @parameterized.parameters(
    (formats.E4M3, formats.E8M0, 128, "mxfp8", 4),
    (formats.E2M1, formats.E4M3, 48, "nvfp4", 3),
    (formats.MXINT8_ELEMENT, formats.E8M0, 32, "int8_q6_e8m0_32", 1),
    (formats.INT4, formats.E4M3, 16, "int4_e4m3_16", 1),
    (formats.INT8, formats.E4M3, 32, "int8_e4m3_32", 1),
    (formats.E4M3, formats.F32, 128, "e4m3_f32_128", 1),
    (formats.E4M3, formats.E8M0, 100, "e4m3_e8m0_100", 1),
  )
  def test_gpus_read_blocks_in_the_format(
    self, element, scale, size, name, repeats
  ):
    found = formats.readable(element, scale, size)
    self.assertIsNotNone(found)
    format, found_repeats = found
    self.assertEqual((format.name, found_repeats), (name, repeats))
    self.assertEqual(formats.readable_by_name(name), format)
    self.assertEqual((format.element, format.scale), (element, scale))
    # bf16 has 8 significant bits.
    exact = name in formats.FORMATS or name in (
      "int8_q6_e8m0_32",
      "int4_e4m3_16",
    )
    self.assertEqual(format.scales_sums, not exact)

  def test_scales_of_whole_blocks_do_not_repeat(self):
    found = formats.readable(formats.E4M3, formats.E8M0, 128, repeats=False)
    self.assertIsNotNone(found)
    format, repeats = found
    self.assertEqual((format.name, repeats), ("e4m3_e8m0_128", 1))
    self.assertTrue(format.scales_sums)

  @parameterized.parameters("e4m3", "int8_128", "e4m3_e2m1_32", "bf16")
  def test_name_of_no_format_is_none(self, name):
    self.assertIsNone(formats.readable_by_name(name))

  def test_records_are_compile_time_constants(self):
    for record in (formats.NVFP4, formats.E2M1):
      self.assertEqual(hash(dataclasses.replace(record)), hash(record))
      with self.assertRaises(dataclasses.FrozenInstanceError):
        record.name = "other"
