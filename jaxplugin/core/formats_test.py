# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of formats; kernels/formats_test.py has the published facts."""

import dataclasses
import pickle

import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin.kernels.formats
from jaxplugin.core import formats

pytestmark = pytest.mark.smoke

FIELDS = dataclasses.fields(formats.BlockFormat)

ALL = formats.KNOWN


class FormatsTest(parameterized.TestCase):
  @parameterized.parameters(
    # (format, largest value, smallest, scales of a [256, 384] array)
    (formats.MXINT8, 127 / 64, 1 / 64, (256, 12)),
    (formats.INT8_32, 127, 1, (256, 12)),
    (formats.INT4_32, 7, 1, (256, 12)),
    (formats.INT4_128, 7, 1, (256, 3)),
    (formats.INT4_128_BF16, 7, 1, (256, 3)),
    (formats.INT8_ROW, 127, 1, (256, 1)),
    (formats.FP8_ROW, 448, 2**-9, (256, 1)),
    (formats.FP8_1X128, 448, 2**-9, (256, 3)),
    (formats.FP8_1X128_E8M0, 448, 2**-9, (256, 3)),
    (formats.FP8_128X128, 448, 2**-9, (2, 3)),
    (formats.FP8_128X128_E8M0, 448, 2**-9, (2, 3)),
  )
  def test_format_of_checkpoints(self, format, largest, smallest, scales):
    self.assertEqual(format.values_encoding.max, largest)
    self.assertEqual(format.values_encoding.min_positive, smallest)
    rows = 256 // format.block_rows
    self.assertEqual((rows, 384 // format.along(384).block_size), scales)
    self.assertIs(formats.by_name(format.name), format)
    self.assertTrue(format.may_be_short or format is formats.MXINT8)

  @parameterized.parameters(*ALL)
  def test_kernels_are_told_the_same(self, format):
    self.assertEqual(
      jaxplugin.kernels.formats.by_name(format.name), format.facts
    )

  @parameterized.parameters(formats.MXFP6_E2M3, formats.MXFP6_E3M2)
  def test_six_bits_are_stored_as_bytes(self, format):
    self.assertEqual(format.storage_dtypes, (np.dtype(np.uint8),))

  def test_only_nvfp4_has_floating_point_and_global_scales(self):
    for format in formats.FORMATS:
      is_nvfp4 = format.name == "nvfp4"
      self.assertEqual(format.has_global_scale, is_nvfp4)
      self.assertEqual(format.scale_is_power_of_two, not is_nvfp4)
    self.assertEqual(formats.NVFP4.scale_dtype, ml_dtypes.float8_e4m3fn)
    self.assertEqual(formats.NVFP4.scale_encoding.max, 448.0)

  @parameterized.parameters(
    *ALL,
    formats.BlockFormat(  # 4 + 4 bits of significand fit exactly
      name="fits",
      values_dtype=formats.E4M3,
      scale_dtype=formats.E4M3,
      block_size=16,
    ),
    formats.MXINT8,
    formats.INT4_32,  # 4 + 11 bits
    formats.INT4_128_BF16,
    formats.UnquantizedFormat(  # 2 + 8 bits
      name="does_not_fit",
      values_dtype=formats.E2M1,
      scale_dtype=formats.BF16,
      block_size=16,
    ),
  )
  def test_exact_in_bf16_says_whether_every_product_fits_bf16(self, format):
    def positive(dtype):
      """Returns every finite positive value of `dtype` in [2^-40, 2^40]."""
      word = np.uint8 if dtype.itemsize == 1 else np.uint16
      bits = 4 if dtype in (formats.E2M1, formats.INT4) else 8 * dtype.itemsize
      x = np.arange(2**bits, dtype=word).view(dtype)
      with np.errstate(invalid="ignore"):  # signalling NaNs
        x = x.astype(np.float64)
      return x[(x >= 2.0**-40) & (x <= 2.0**40)]

    products = np.multiply.outer(
      positive(format.values_dtype), positive(format.scale_dtype)
    )
    fits = products.astype(ml_dtypes.bfloat16).astype(np.float64) == products
    self.assertEqual(format.exact_in_bf16, bool(fits.all()))

  def test_infer_reads_every_format_from_its_dtypes(self):
    for format in formats.FORMATS:
      found = formats.infer(format.values_dtype, format.scale_dtype)
      self.assertIs(found, format)

  def test_infer_takes_uint8_for_packed_fp4(self):
    u8 = np.dtype(np.uint8)
    self.assertIs(formats.infer(u8, formats.E8M0), formats.MXFP4)
    self.assertIs(formats.infer(u8, formats.E4M3), formats.NVFP4)

  def test_infer_knows_no_other_pair(self):
    dtypes = (formats.E4M3, formats.E5M2, formats.E2M1, formats.E8M0)
    dtypes += (formats.BF16, np.dtype(np.float32), np.dtype(np.int8))
    known = {(f.values_dtype, f.scale_dtype) for f in formats.FORMATS}
    for values in dtypes:
      for scale in dtypes:
        if (values, scale) not in known:
          self.assertIsNone(formats.infer(values, scale), (values, scale))

  def test_by_name_ignores_case(self):
    for format in formats.FORMATS:
      self.assertIs(formats.by_name(format.name), format)
      self.assertIs(formats.by_name(format.name.upper()), format)

  def test_unknown_name_error_lists_the_known_ones(self):
    with self.assertRaisesRegex(
      ValueError, "'mxfp6'.*mxfp8, mxfp8_e5m2, mxfp4, nvfp4"
    ):
      formats.by_name("mxfp6")

  @parameterized.parameters(
    ({"values_dtype": np.dtype(np.int16)}, TypeError, "values_dt.*got int16"),
    ({"values_dtype": formats.E8M0}, TypeError,
      "e4m3fn or.*e8m0fnu; jp.scaled"),
    ({"values_dtype": None}, TypeError, "values_dtype must be.*got None"),
    ({"values_dtype": "fp8"}, TypeError, "values_dtype must be.*got 'fp8'"),
    ({"scale_dtype": np.float64}, TypeError, "scale_dtype.*got float64"),
    ({"scale_dtype": np.int8}, TypeError, "scale_dtype.*got int8"),
    ({"name": ""}, TypeError, "name must be a string.*got ''"),
    ({"name": None}, TypeError, "name must be a string.*got None"),
    ({"block_size": -1}, ValueError, "positive integer, .*got -1"),
    ({"block_size": 32.0}, TypeError, r"be an integer, got 32\.0"),
    ({"block_rows": 2}, ValueError, "block_rows.*got 2 for block_size 32"),
    ({"fraction_bits": 6}, ValueError, "got 6 for float8_e4m3fn"),
    ({"has_global_scale": True}, ValueError, "e8m0fnu scales.* for odd"),
    ({"has_global_scale": True, "scale_dtype": np.float32}, ValueError,
      "float32 scales.* for odd"),
  )  # fmt: skip
  def test_format_that_nothing_serves_is_refused_when_made(
    self, changes, error, message
  ):
    fields = {
      "name": "odd",
      "values_dtype": formats.E4M3,
      "scale_dtype": formats.E8M0,
      "block_size": 32,
    }
    formats.BlockFormat(**fields)
    with self.assertRaisesRegex(error, f"^BlockFormat: .*{message}"):
      formats.BlockFormat(**(fields | changes))

  def test_dtypes_may_be_given_as_types(self):
    made = formats.BlockFormat(
      name="mxfp8",
      values_dtype=ml_dtypes.float8_e4m3fn,
      scale_dtype=ml_dtypes.float8_e8m0fnu,
      block_size=32,
    )
    self.assertEqual(made, formats.MXFP8)
    self.assertEqual(hash(made), hash(formats.MXFP8))

  def test_pair_that_is_only_multiplied_is_no_known_format(self):
    pair = formats.UnquantizedFormat(
      **{f.name: getattr(formats.MXFP8, f.name) for f in FIELDS}
    )
    self.assertNotEqual(pair, formats.MXFP8)
    self.assertFalse(pair.is_standard)

  def test_resolve_takes_a_format_and_its_name(self):
    self.assertIs(formats.resolve("f", formats.NVFP4), formats.NVFP4)
    self.assertIs(formats.resolve("f", "NVFP4"), formats.NVFP4)

  @parameterized.parameters(
    ("int9", ValueError, "f: rhs: unknown block format 'int9'"),
    (8, TypeError, "f: rhs must be a BlockFormat .*got 8"),
    (None, TypeError, "f: rhs must be a BlockFormat .*got None"),
  )
  def test_resolve_refuses_with_the_known_names(self, given, error, message):
    with self.assertRaisesRegex(error, message) as raised:
      formats.resolve("f", given, "rhs")
    for format in formats.NAMED:
      self.assertIn(format.name, str(raised.exception))

  def test_pairs_table_names_every_format_with_its_dtypes(self):
    table = formats.pairs_table()
    for text in (
      "mxfp8 = float8_e4m3fn + float8_e8m0fnu per 32",
      "mxfp8_e5m2 = float8_e5m2 + float8_e8m0fnu per 32",
      "mxfp4 = float4_e2m1fn + float8_e8m0fnu per 32",
      "nvfp4 = float4_e2m1fn + float8_e4m3fn per 16",
    ):
      self.assertIn(text, table)

  @parameterized.parameters(*formats.FORMATS)
  def test_standard_is_by_value_not_by_name(self, format):
    self.assertTrue(format.is_standard)
    self.assertTrue(dataclasses.replace(format).is_standard)
    halved = dataclasses.replace(format, block_size=format.block_size // 2)
    self.assertFalse(halved.is_standard)

  @parameterized.parameters(*formats.FORMATS)
  def test_format_is_frozen_hashable_and_survives_pickling(self, format):
    with self.assertRaises(dataclasses.FrozenInstanceError):
      format.block_size = 64
    loaded = pickle.loads(pickle.dumps(format))
    self.assertEqual(loaded, format)
    self.assertEqual(hash(loaded), hash(format))
    self.assertEqual(repr(loaded), format.name)
