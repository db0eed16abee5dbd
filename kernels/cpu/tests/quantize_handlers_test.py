# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the handlers of quantize and dequantize with NumPy and ml_dtypes.

The library is the same as in dot_handler_test.py.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import sys

import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

BF16, E4M3, E5M2 = testing.BF16, testing.E4M3, testing.E5M2
E2M1, E8M0 = testing.E2M1, testing.E8M0
FORMATS = testing.FORMATS
QUANTIZED = testing.QUANTIZED


@functools.cache  # for all instruction sets
def every_bf16_value(name, rounding):
  """Returns blocks, their global scale and their reference."""
  x = np.zeros((65536, FORMATS[name][2]), np.float32)
  x[:, 0] = np.arange(65536, dtype=np.uint16).view(BF16).astype(np.float32)
  x[:, 1] = 1
  given = np.float32(0.125) if name == "nvfp4" else None
  return x, given, testing.quantized_reference(x, name, rounding, given)


class QuantizeTest(parameterized.TestCase):
  def inputs(self, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, 544)).astype(np.float32)
    x[1] *= np.exp2(rng.integers(-60, 60, 544)).astype(np.float32)
    x[2] = 0
    x[2, 40] = -0.0
    x[3, 5] = np.nan
    x[3, 50] = np.inf
    x[3, 70:80] = -1e30
    x[4] = rng.integers(-12, 13, 544) / 4  # ties
    x[5, :32] = np.float32(2.0**-149) * rng.integers(0, 1000, 32)
    x[5, 32:64] = 448.0 * 2.0 ** rng.integers(-3, 3, 32)
    x[6] *= 1e-38
    return x.astype(dtype)

  @testing.each(name=QUANTIZED, dtype=testing.FLOATS, rounding=(0, 1))
  def test_bits_equal_the_reference(self, name, dtype, rounding, isa):
    arrays = [self.inputs(dtype)]
    arrays += [arrays[0][4:5], arrays[0][:0]]
    if dtype == np.float32:
      with np.errstate(over="ignore"):
        arrays += [arrays[0] * np.float32(f) for f in (1e-30, 1e-38, 1e30)]
    globals_ = [None, 0.01, 3.7] if name == "nvfp4" else [None]
    for x, given in itertools.product(arrays, globals_):
      given = None if given is None else np.float32(given)
      values, scale, global_scale = testing.quantize(
        x,
        given,
        format=QUANTIZED.index(name),
        rounding=rounding,
        compute_global=int(name == "nvfp4" and given is None),
        isa=isa,
      )
      expected = testing.quantized_reference(x, name, rounding, given)
      codes = testing.one_a_byte(values, name)
      np.testing.assert_array_equal(codes, expected[0])
      np.testing.assert_array_equal(scale, expected[1])
      if name == "nvfp4":
        self.assertEqual(global_scale, np.float32(expected[2]))

  @testing.each(name=QUANTIZED, rounding=(0, 1))
  def test_every_bf16_value_beside_one(self, name, rounding, isa):
    """Tests 65536 inputs, each in a block whose second value is 1."""
    x, given, expected = every_bf16_value(name, rounding)
    number = QUANTIZED.index(name)
    values, scale, _ = testing.quantize(
      x, given, format=number, rounding=rounding, isa=isa
    )
    codes = testing.one_a_byte(values, name)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(np.asarray(scale), expected[1])

  @testing.each(exponent=(-60, 0, 40, 100))
  def test_nvfp4_values_near_ties_are_quotients(self, isa, exponent):
    """A value is divided by scale * global. A reciprocal would change some."""
    rng = np.random.default_rng(0)
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    moved = 0
    for _ in range(16):
      given = np.float32(rng.uniform(1, 2) * 2.0**exponent)
      scale = rng.integers(8, 0x7E, (1024, 1), np.uint8).view(E4M3)
      step = scale.astype(np.float32) * given
      near = (ties * step).view(np.int32) + rng.integers(-2, 3, (1024, 7))
      near = near.astype(np.int32).view(np.float32)
      zeros = np.float32([0, -0.0]) * np.ones_like(step)
      x = np.concatenate([6 * step, near, -near[:, :6], zeros], axis=1)
      moved += (x * (1 / step) != x / step).sum()
      values, actual, _ = testing.quantize(
        x, given, format=QUANTIZED.index("nvfp4"), isa=isa
      )
      codes, scales, _ = testing.quantized_reference(x, "nvfp4", 0, given)
      np.testing.assert_array_equal(testing.one_a_byte(values, "nvfp4"), codes)
      np.testing.assert_array_equal(np.asarray(actual), scales)
    self.assertGreater(moved, 1000)

  @testing.each(given=(1.0, 0.7, 3e-25, 1e20))
  def test_nvfp4_scales_near_ties_are_of_two_divisions(self, isa, given):
    """A scale is amax / 6 / global. A reciprocal would change some scales."""
    codes = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    ties = (codes[:-1] + codes[1:]) / 2 * np.float32(6) * np.float32(given)
    bits = ties.view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
    x = np.zeros((bits.size, 16), np.float32)
    x[:, 5] = bits.ravel().view(np.float32)
    given = np.float32(given)
    values, scale, _ = testing.quantize(x, given, format=3, isa=isa)
    expected = testing.quantized_reference(x, "nvfp4", 0, given)
    np.testing.assert_array_equal(np.asarray(scale), expected[1])
    codes = testing.one_a_byte(values, "nvfp4")
    np.testing.assert_array_equal(codes, expected[0])

  @testing.each(position=((0, 0), (200, 3), (255, 1023)))
  def test_nvfp4_global_scale_is_of_the_largest_value_wherever_it_is(
    self, isa, position
  ):
    """Several tasks compute the maximum, each over some rows."""
    x = np.ones((256, 1024), np.float32)
    x[position] = -100
    _, scale, global_scale = testing.quantize(
      x, format=3, compute_global=1, isa=isa
    )
    expected = np.float32(100) / np.float32(448 * 6)
    self.assertEqual(np.asarray(global_scale), expected)
    code = np.float32(1 / 6 / expected).astype(E4M3).view(np.uint8)
    expected_scale = np.full((256, 64), code)
    row, column = position
    expected_scale[row, column // 16] = np.float32(448).astype(E4M3).view("u1")
    np.testing.assert_array_equal(scale, expected_scale)

  @parameterized.parameters(0.0, -1.0, np.inf, np.nan)
  def test_nvfp4_under_a_bad_global_scale_is_nan(self, given):
    x = np.ones((2, 32), np.float32)
    values, scale, _ = testing.quantize(x, np.float32(given), format=3)
    self.assertTrue(np.all(np.asarray(values) == 0))
    self.assertTrue(np.all(np.asarray(scale) == 0x7F))

  @parameterized.named_parameters(
    ("rank", {"x": np.ones((2, 2, 32), "f4")}, "x must be"),
    ("dtype", {"x": np.ones((2, 32), np.int32)}, "x must be"),
    ("k", {"x": np.ones((2, 40), "f4")}, "multiple of the block size 32"),
    ("format", {"format": 6}, "format must be"),
    ("format_negative", {"format": -1}, "format must be"),
    ("rounding", {"rounding": 2}, "rounding must be"),
    ("compute", {"compute_global": 1}, "compute_global must be"),
    ("global", {"global_scale": np.ones(3, "f4")}, "global_scale must be"),
    ("values", {"values": ((2, 33), "u1")}, "values must be"),
    ("values_dtype", {"values": ((2, 32), E5M2)}, "values must be"),
    ("scale", {"scale": ((2, 2), "u1")}, "scale must be"),
    ("scale_dtype", {"scale": ((2, 1), E4M3)}, "scale must be"),
    ("global_result", {"global_result": ((2,), "f4")}, "global scale result"),
    ("isa", {"isa": 9}, "isa must be"),
  )
  def test_malformed_call_is_an_error(self, change, message):
    x = np.ones((2, 32), "f4")
    with self.assertRaisesRegex(testing.HandlerError, message):
      testing.quantize_changed(testing.quantize, x, change)


class DequantizeTest(parameterized.TestCase):
  @testing.each(
    name=QUANTIZED,
    dtype=testing.FLOATS,
    packed_or_finite=(False, True),
  )
  def test_every_code_under_every_scale(
    self, name, dtype, isa, packed_or_finite
  ):
    has_nan = name.startswith("mxfp8")
    finite, packed = has_nan and packed_or_finite, packed_or_finite
    values_dtype, scale_dtype, block = FORMATS[name]
    count = 1 << testing.bits(values_dtype)
    codes = np.arange(count, dtype=np.int32).astype(np.uint8)
    k = 288  # every code, and a tail
    values = np.resize(codes, (256, k))
    if finite:  # other code may compute the values next to a NaN
      codes = codes[np.isfinite(codes.view(values_dtype).astype(np.float32))]
      values = np.resize(codes, (256, k))
    scale = np.arange(256, dtype=np.uint8)[:, None].repeat(k // block, 1)
    exact = testing.Side(name, values.view(values_dtype), scale).exact
    given = values.view(values_dtype)
    if packed and values_dtype == E2M1:
      given = values[:, 0::2] | values[:, 1::2] << 4
    for global_scale in (None, np.float32(0.37)):
      got = testing.dequantize(
        given,
        scale.view(scale_dtype),
        global_scale,
        k=k,
        block_size=block,
        isa=isa,
        dtype=dtype,
      )
      with np.errstate(all="ignore"):
        expected = exact.astype(np.float32)
        if global_scale is not None:
          expected = expected * global_scale
        expected = expected.astype(dtype).astype(np.float32)
      self.assertEqual(got.dtype, dtype)
      np.testing.assert_array_equal(np.asarray(got, np.float32), expected)

  @testing.each(dtype=testing.FLOATS)
  def test_nan_of_any_payload_stays_nan(self, isa, dtype):
    """Without a special case, rounding 0x7fffffff would give -0."""
    values = np.ones((3, 64), E4M3)
    for bits in testing.NAN_BITS:
      got = testing.dequantize(
        values,
        np.full((3, 2), 127, np.uint8).view(E8M0),
        np.uint32(bits).view(np.float32),
        k=64,
        block_size=32,
        isa=isa,
        dtype=dtype,
      )
      np.testing.assert_array_equal(np.asarray(got, np.float32), np.nan)

  def test_result_of_megabytes_is_that_of_its_rows(self):
    # The handlers request huge pages from 8 MiB on.
    rng = np.random.default_rng(0)
    values = rng.integers(0, 127, (2500, 1056), np.uint8).view(E4M3)
    scale = rng.integers(100, 150, (2500, 33), np.uint8).view(E8M0)
    got = testing.dequantize(values, scale, k=1056, block_size=32)
    self.assertGreater(got.nbytes, 10 << 20)
    parts = [
      testing.dequantize(values[i], scale[i], k=1056, block_size=32)
      for i in (slice(0, 1250), slice(1250, 2500))
    ]
    np.testing.assert_array_equal(got, np.concatenate(parts))

  @testing.each(name=QUANTIZED, dtype=testing.FLOATS)
  def test_long_rows_with_a_partial_last_block(self, isa, name, dtype):
    """Rows have several chunks of 1024 values, and no multiple of 16."""
    values_dtype, scale_dtype, block = FORMATS[name]
    rng = np.random.default_rng(0)
    k = 2094
    top = 1 << testing.bits(values_dtype)
    values = rng.integers(0, top, (3, k)).astype(np.uint8)
    low, high = (100, 140) if scale_dtype == E8M0 else (1, 127)
    scale = rng.integers(low, high, (3, -(-k // block))).astype(np.uint8)
    # One NaN, in one chunk of one row.
    values[~np.isfinite(values.view(values_dtype).astype(np.float32))] = 1
    scale[1, 3] = 255
    got = testing.dequantize(
      values.view(values_dtype),
      scale.view(scale_dtype),
      np.float32(-0.7),
      k=k,
      block_size=block,
      isa=isa,
      dtype=dtype,
    )
    exact = testing.Side(name, values.view(values_dtype), scale).exact
    expected = exact.astype(np.float32) * np.float32(-0.7)
    expected = expected.astype(dtype).astype(np.float32)
    self.assertEqual(int(np.isnan(expected).sum()), block)
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected)

  @parameterized.named_parameters(
    ("k", {"k": 63}, "the result must be"),
    ("block", {"block_size": 8}, "must be a multiple of 16"),
    ("scale", {"scale": np.ones((3, 3), E8M0)}, "values_scale must have"),
    ("dtype", {"dtype": np.uint8}, "the result must be"),
    ("isa", {"isa": 7}, "isa must be"),
  )
  def test_malformed_call_is_an_error(self, change, message):
    arguments = {
      "values": np.ones((3, 64), E4M3),
      "scale": np.ones((3, 2), E8M0),
      "k": 64,
      "block_size": 32,
    } | change
    with self.assertRaisesRegex(testing.HandlerError, message):
      testing.dequantize(**arguments)


if __name__ == "__main__":
  absltest.main()
