# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the FFI handler of the dot with NumPy in float64 and ml_dtypes.

Set JAXPLUGIN_CPU_LIBRARY to test a library built elsewhere (README.md has the
sanitizer builds); otherwise CMake builds one into a temporary directory.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

BF16, E4M3, E5M2 = testing.BF16, testing.E4M3, testing.E5M2
E2M1, E8M0 = testing.E2M1, testing.E8M0
FORMATS = testing.FORMATS
QUANTIZED, ISAS = testing.QUANTIZED, testing.ISAS
Side, ones = testing.Side, np.ones
integers, gaussians = testing.integers, testing.gaussians
constant, call, oracle = testing.constant, testing.call, testing.oracle

MX = tuple(name for name in QUANTIZED if FORMATS[name][1] == E8M0)
PAIRS = tuple(itertools.product(FORMATS, FORMATS))


class DotTest(parameterized.TestCase):
  @testing.rows(pair=PAIRS)
  def test_integer_dots_are_exact_for_every_pair_of_formats(self, pair):
    rng = np.random.default_rng(0)
    for m, n, k in ((1, 37, 96), (19, 70, 576)):
      lhs = integers(pair[0], (1, m, k), rng)
      rhs = integers(pair[1], (1, n, k), rng, packed=True)
      testing.assert_exact(lhs, rhs)

  @testing.rows(seed=tuple(range(6)))
  def test_fuzzed_shapes_are_exact_on_integers(self, seed):
    rng = np.random.default_rng(seed)
    for _ in range(8):
      batch = int(rng.choice([1, 1, 2, 5]))
      rhs_batch = int(rng.choice([1, batch]))
      m = int(rng.choice([1, 2, 3, 4, 6, 12, 13, 31, 65]))
      n = int(rng.choice([1, 2, 3, 8, 31, 32, 33, 64, 100]))
      k = int(rng.choice([2, 16, 32, 48, 64, 96, 130, 512, 544, 1056]))
      names = rng.choice(list(FORMATS), 2)
      lhs = integers(names[0], (batch, m, k), rng, bool(rng.integers(2)))
      rhs = integers(names[1], (rhs_batch, n, k), rng, bool(rng.integers(2)))
      with self.subTest(f"{names} {batch} {rhs_batch} {m} {n} {k}"):
        testing.assert_exact(lhs, rhs)

  @testing.rows(
    pair=(
      ("mxfp8", "mxfp8"),
      ("mxfp8_e5m2", "mxfp4"),
      ("nvfp4", "nvfp4"),
      ("mxfp8", "nvfp4"),
      ("bf16", "nvfp4"),
      ("f32", "mxfp8"),
      ("mxfp4", "f16"),
      ("mxfp6_e2m3", "mxfp6_e3m2"),
      ("mxfp6_e3m2", "nvfp4"),
    ),
    m=(1, 3, 42),
  )
  def test_random_dots_are_within_the_bound(self, pair, m):
    rng = np.random.default_rng(1)
    for spread in (0, 30):
      lhs = gaussians(pair[0], (1, m, 1568), rng, spread)
      rhs = gaussians(pair[1], (1, 45, 1568), rng, spread)
      # 2^-149: the error of rounding to a subnormal result.
      testing.assert_close(lhs, rhs, least=2.0**-149)

  @testing.each(m=(1, 6, 20, 70))
  def test_rows_that_share_scales_have_the_bits_of_repeated_ones(self, isa, m):
    rng = np.random.default_rng(2)
    for name, batch, n, rows in (
      ("mxfp8", 1, 45, 32),
      ("mxfp6_e2m3", 2, 64, 32),
      ("fp8_1x128", 1, 300, 128),
      ("int8_32", 1, 70, 32),
    ):
      k = 160
      side = (testing.checkpoint if name in testing.CHECKPOINTS else gaussians)(
        name, (batch, n, k), rng
      )
      if name == "mxfp8":  # Rows are not safe. The kernels rebase some of them.
        side.scale = rng.integers(20, 235, side.scale.shape).astype("u1")
        side.scale = side.scale.view(E8M0)
      shared = side.scale[:, ::rows].copy()
      side.scale = np.repeat(shared, rows, axis=1)[:, :n]
      for dtype in ("bf16", "f32"):
        lhs = gaussians(dtype, (batch, m, k), rng)
        expected = call(lhs, side, isa=isa)
        got = testing.dot(
          *(lhs.values, lhs.scale, side.values, shared),
          **testing.operand(side, "rhs_"),
          shape=expected.shape,
          isa=isa,
          attributes={"rhs_scale_rows": rows},
        )
        with self.subTest(f"{name} {dtype}"):
          np.testing.assert_array_equal(got, expected)

  @testing.each(m=(1, 20))
  def test_scale_bytes_b_against_254_minus_b_give_32(self, isa, m):
    for name in MX:
      ones = np.ones((255, m, 32))
      code = np.broadcast_to(np.arange(255)[:, None, None], (255, m, 1))
      lhs = Side(name, ones, code)
      rhs = Side(name, np.ones((255, 3, 32)), (254 - code)[:, :1].repeat(3, 1))
      got = call(lhs, rhs, isa=isa)
      np.testing.assert_array_equal(got, np.full((255, m, 3), 32, np.float32))
      # All scales in one row, also with subnormal codes of the values.
      codes = code.reshape(1, 255, m).swapaxes(1, 2)
      one_row = Side(name, np.ones((1, m, 255 * 32)), codes)
      other = Side(
        name,
        np.full((1, 2, 255 * 32), 0.5),
        np.broadcast_to(254 - np.arange(255), (1, 2, 255)),
      )
      got = call(one_row, other, isa=isa)
      np.testing.assert_array_equal(
        got, np.full((1, m, 2), 255 * 16, np.float32)
      )

  @testing.each(shape=((1, 40), (20, 40), (40, 3)), large=("lhs", "rhs"))
  def test_value_beyond_f32_counts_where_only_one_side_is_extreme(
    self, isa, shape, large
  ):
    """The value 448 * 2^127, which is out of range, is multiplied by 2^-46."""
    sides = []
    for name, rows in zip(("lhs", "rhs"), shape, strict=True):
      value, byte = (448, 254) if name == large else (1, 127 - 46)
      sides.append(constant("mxfp8", (1, rows, 32), value, byte))
    got = call(*sides, isa=isa)
    expected = np.full((1, *shape), 448 * 32 * 2.0**81, np.float32)
    np.testing.assert_array_equal(got, expected)

  @testing.each(m=(1, 20))
  def test_e8m0_byte_zero_is_a_subnormal_and_counts(self, isa, m):
    lhs = constant("mxfp8", (1, m, 32), code=0)
    got = call(lhs, constant("f32", (1, 2, 32)), isa=isa)
    np.testing.assert_array_equal(got, np.full((1, m, 2), 2.0**-122, "f4"))

  @testing.rows(m=(1, 3, 20), name=QUANTIZED)
  def test_nan_scale_over_zero_values_is_nan(self, m, name):
    rng = np.random.default_rng(2)
    nan_code = 0x7F if name == "nvfp4" else 255
    for side in (0, 1):
      sides = [
        integers(name, (1, m, 160), rng),
        integers(name, (1, 35, 160), rng),
      ]
      block = FORMATS[name][2]
      scale = sides[side].scale.view(np.uint8).copy()
      values = sides[side].values.astype(np.float64)
      row = values.shape[1] - 1
      scale[0, row, 1] = nan_code
      values[0, row, block : 2 * block] = 0
      sides[side] = Side(name, values, scale)
      self.assertTrue(np.isnan(oracle(*sides)).any())
      testing.assert_exact(*sides)

  @testing.rows(m=(1, 20))
  def test_nan_and_inf_values_propagate(self, m):
    rng = np.random.default_rng(3)
    for name, special in (
      ("mxfp8", np.nan),
      ("mxfp8_e5m2", np.nan),
      ("mxfp8_e5m2", np.inf),
      ("bf16", -np.inf),
      ("f32", np.nan),
    ):
      lhs = integers(name, (1, m, 96), rng)
      values = lhs.values.astype(np.float64)
      values[0, 0, 70] = special
      lhs = Side(
        name, values, None if lhs.scale is None else lhs.scale.view(np.uint8)
      )
      rhs = integers("mxfp8", (1, 9, 96), rng)
      rhs = Side("mxfp8", np.abs(rhs.exact).clip(1, 4), rhs.scale.view("u1"))
      testing.assert_exact(lhs, rhs)

  @testing.rows(m=(1, 20), exponent=(-130, -73, 62, 127))
  def test_plain_bf16_of_any_size_is_exact(self, m, exponent):
    """Includes subnormals. The scales of rhs bring the products into range."""
    values = np.full((1, m, 32), 2.0**exponent)
    values[0, 0, 5] = 2.0 ** (exponent - 3)
    lhs = Side("bf16", values, None)
    scale = 127 + int(np.clip(-exponent, -46, 46))
    rhs = constant("mxfp8", (1, 40, 32), code=scale)
    testing.assert_exact(lhs, rhs)

  @testing.rows(m=(1, 20), exponent=(-55, -64, -70))
  def test_subnormal_products_of_bf16_count(self, m, exponent):
    lhs = constant("bf16", (1, m, 32), 1.9921875 * 2.0**exponent)
    rhs = constant("bf16", (1, 40, 32), 2.0**exponent)
    testing.assert_exact(lhs, rhs)

  @testing.each(m=(1, 21), activation=(0, 1, 2, 3), dtype=testing.FLOATS)
  def test_epilogue_is_f32_before_one_cast(self, isa, m, activation, dtype):
    rng = np.random.default_rng(5)
    lhs = integers("mxfp8", (2, m, 64), rng)
    rhs = integers("nvfp4", (2, 150, 64), rng)
    bias = rng.standard_normal(150).astype(np.float32)
    scale = np.float32(0.0173)
    for residual_dtype in {np.dtype(np.float32), dtype}:
      residual = rng.standard_normal((2, m, 150)).astype(residual_dtype)
      options = {"activation": activation, "dtype": dtype, "isa": isa}
      got = call(lhs, rhs, scale, bias, residual, **options)
      x = oracle(lhs, rhs) * np.float64(scale) + bias
      y = {
        0: lambda x: x,
        1: lambda x: np.maximum(x, 0),
        2: lambda x: (
          x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        ),
        3: lambda x: x / (1 + np.exp(-x)),
      }[activation](x)
      expected = y + residual.astype(np.float64)
      # A few roundings to f32, then one to the result's dtype.
      eps = float(ml_dtypes.finfo(dtype).eps) / 2
      bound = 32 * 2.0**-24 * (np.abs(x) + np.abs(residual.astype(float)) + 1)
      bound = bound + 1.01 * eps * np.abs(expected)
      error = np.abs(got.astype(np.float64) - expected)
      self.assertTrue(np.all(error <= bound), np.max(error / bound))

  @testing.each(dtype=testing.FLOATS[1:])
  def test_results_are_rounded_once_to_nearest_even(self, isa, dtype):
    rng = np.random.default_rng(6)
    lhs = integers("mxfp8", (1, 24, 512), rng)
    rhs = integers("mxfp8", (1, 96, 512), rng)
    for factor in (1, 2.0**9, 2.0**-12, 2.0**-27, 2.0**-30):
      got = call(lhs, rhs, np.float32(factor), dtype=dtype, isa=isa)
      with np.errstate(over="ignore"):
        expected = (oracle(lhs, rhs) * factor).astype(np.float32).astype(dtype)
      np.testing.assert_array_equal(got.view("u2"), expected.view("u2"))

  @testing.each(m=(1, 20), dtype=testing.FLOATS)
  def test_nan_of_any_payload_stays_nan(self, isa, m, dtype):
    """Without a special case, rounding 0x7fffffff to bf16 would give -0."""
    lhs = constant("mxfp8", (1, m, 64))
    rhs = constant("mxfp8", (1, 40, 64))
    for bits in testing.NAN_BITS:
      residual = np.zeros((1, m, 40), np.float32)
      residual[..., 1::3] = np.uint32(bits).view(np.float32)
      got = call(lhs, rhs, None, None, residual, dtype=dtype, isa=isa)
      expected = np.where(np.isnan(residual), np.nan, 64)
      np.testing.assert_array_equal(got.astype(np.float64), expected)

  @testing.each(m=(1, 20), activation=(0, 1, 2, 3))
  def test_nan_passes_each_activation(self, isa, m, activation):
    values = np.ones((1, m, 64))
    values[0, -1, 5] = np.nan
    lhs = Side("mxfp8", values, np.full((1, m, 2), 127))
    rhs = constant("mxfp8", (1, 40, 64))
    got = call(lhs, rhs, activation=activation, isa=isa)
    self.assertTrue(np.isnan(got[0, -1]).all())
    np.testing.assert_allclose(got[0, :-1], 64)

  @testing.each(m=(2, 9), sign=(-1, 1))
  def test_two_global_factors_whose_product_f32_does_not_hold(
    self, isa, m, sign
  ):
    factors = np.float32([1 + 2.0**-20, 1]) * np.exp2([sign * 100, sign * 40])
    factors = factors.astype(np.float32)
    # Sums are 64 * 2^-+60, so that the results are normal numbers.
    code = 127 - sign * 30
    lhs, rhs = (constant("mxfp8", (1, rows, 64), code=code) for rows in (m, 70))
    got = call(lhs, rhs, factors, isa=isa)
    expected = oracle(lhs, rhs) * np.prod(factors.astype(np.float64))
    np.testing.assert_array_equal(got, expected.astype(np.float32))

  @testing.each()
  def test_f16_results_overflow_to_infinity(self, isa):
    lhs = constant("mxfp8", (1, 2, 64), 448)
    got = call(lhs, lhs, dtype=np.float16, isa=isa)
    np.testing.assert_array_equal(got, np.full((1, 2, 2), np.inf, np.float16))

  @testing.each(shape=((0, 3, 64), (2, 0, 64), (2, 3, 0), (20, 40, 0)))
  def test_zero_sizes_give_empty_or_zero_results(self, shape, isa):
    m, n, k = shape
    rng = np.random.default_rng(7)
    for name in ("mxfp8", "nvfp4", "f32"):
      lhs = integers(name, (2, m, k), rng, packed=True)
      rhs = integers(name, (2, n, k), rng)
      bias = np.arange(n, dtype=np.float32)
      got = call(lhs, rhs, None, bias, isa=isa)
      expected = np.zeros((2, m, n)) + (oracle(lhs, rhs) + bias)
      np.testing.assert_array_equal(got, expected)

  @testing.each()
  def test_calls_from_many_threads_give_the_same_bits(self, isa):
    rng = np.random.default_rng(8)
    cases = []
    for m, n, k in ((1, 2048, 1024), (40, 512, 1024), (3, 100, 4096)):
      lhs = gaussians("mxfp8", (1, m, k), rng, 4)
      rhs = gaussians("nvfp4", (1, n, k), rng)
      cases.append((lhs, rhs, call(lhs, rhs, isa=isa)))

    def once(i):
      lhs, rhs, expected = cases[i % len(cases)]
      return np.array_equal(call(lhs, rhs, isa=isa), expected)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
      self.assertTrue(all(pool.map(once, range(60))))


class DotErrorTest(parameterized.TestCase):
  """Malformed calls are errors that name the rule and what was given."""

  def good(self):
    values = np.ones((2, 3, 64), E4M3)
    scale = np.full((2, 3, 2), 127, np.uint8).view(E8M0)
    return {
      "lhs": values, "lhs_scale": scale, "rhs": values, "rhs_scale": scale,
    }  # fmt: skip

  def test_the_good_call_is_good(self):
    got = np.asarray(testing.dot(**self.good()))
    np.testing.assert_array_equal(got, np.full((2, 3, 3), 64, np.float32))

  @parameterized.named_parameters(
    ("lhs_rank", {"lhs": ones((3, 64), E4M3), "shape": (2, 3, 3)}, "rank 3"),
    ("rhs_rank", {"rhs": ones((64,), E4M3), "shape": (2, 3, 3)}, "rank 3"),
    ("lhs_dtype", {"lhs": ones((2, 3, 64), np.int32)}, "lhs must be"),
    ("rhs_dtype", {"rhs": ones((2, 3, 64), np.int32)}, "rhs must be"),
    ("k", {"rhs": ones((2, 3, 32), E4M3)}, "rhs_scale must have"),
    (
      "k_both",
      {"rhs": ones((2, 3, 32), E4M3), "rhs_scale": ones((2, 3, 1), E8M0)},
      "same k",
    ),
    (
      "batch",
      {"rhs": ones((3, 3, 64), E4M3), "rhs_scale": ones((3, 3, 2), E8M0)},
      "batch of lhs",
    ),
    ("scale_rows", {"lhs_scale": ones((2, 4, 2), E8M0)}, "lhs_scale must"),
    ("scale_cols", {"lhs_scale": ones((2, 3, 1), E8M0)}, "2 columns"),
    ("scale_rank", {"rhs_scale": ones((2, 3), E8M0)}, "rhs_scale must"),
    ("scale_dtype", {"rhs_scale": ones((2, 3, 2), "i4")}, "must be f8e8m0fnu"),
    ("scale_missing", {"lhs_scale": None}, "lhs_scale must have lhs's shape"),
    ("scale_extra", {"lhs": ones((2, 3, 64), "f4")}, "empty scale"),
    ("block_size", {"lhs_block_size": 24}, "must be a multiple of 16"),
    ("block_zero", {"rhs_block_size": 0}, "must be a multiple of 16"),
    ("block_low", {"rhs_block_size": -(2**63)}, "must be a multiple of 16"),
    ("block_of_row", {"rhs_block_size": 2**63 - 1}, "1 columns for block size"),
    (
      "fraction_bits",
      {"lhs": ones((2, 3, 64), "i1"), "lhs_fraction_bits": 9},
      "fraction_bits must be 0, or for integers at most 8, got 9",
    ),
    (
      "fraction_bits_of_floats",
      {"rhs_fraction_bits": 1},
      "fraction_bits must be 0, .* got 1 for f8e4m3fn",
    ),
    (
      "scale_element",
      {"lhs_scale": ones((2, 3, 2), "u1"), "lhs_scale_element": 4},
      "lhs_scale_element must be 0, .* got 4 for u8",
    ),
    ("block_16", {"lhs_block_size": 16}, "4 columns for block size 16"),
    (
      "scale_rows_of_three",
      {"rhs_scale_rows": 3},
      "rhs_scale_rows must be a power of two, got 3",
    ),
    (
      "scale_rows_of_none",
      {"rhs_scale_rows": 0},
      "rhs_scale_rows must be a power of two, got 0",
    ),
    (
      "scale_rows_of_a_batch",
      {"rhs_scale": ones((2, 2, 2), E8M0), "rhs_scale_rows": 2},
      "rhs's rows must be a multiple of scale_rows .* got 2",
    ),
    ("global_shape", {"global_scale": ones(3, "f4")}, "global_scale must"),
    ("global_dtype", {"global_scale": ones((), BF16)}, "global_scale must"),
    ("bias_shape", {"bias": ones(4, "f4")}, "bias must be"),
    ("bias_rank", {"bias": ones((1, 3), "f4")}, "bias must be"),
    ("bias_dtype", {"bias": ones(3, BF16)}, "bias must be"),
    ("residual_shape", {"residual": ones((2, 3, 4), "f4")}, "residual must"),
    ("residual_dtype", {"residual": ones((2, 3, 3), BF16)}, "residual must"),
    ("activation", {"activation": 4}, "activation must be"),
    ("activation_negative", {"activation": -1}, "activation must be"),
    ("isa", {"isa": 6}, "isa must be"),
    ("isa_negative", {"isa": -1}, "isa must be"),
    (
      "element",
      {"lhs": ones((2, 3, 32), "u1"), "lhs_element": 7},
      "lhs's element must be 0, .* got 7 for u8",
    ),
    (
      "element_of_f8",
      {"rhs_element": 1},
      "rhs's element must be 0, .* got 1 for f8e4m3fn",
    ),
    ("attribute", {"x": 1}, "no other attributes are"),
    ("quantize_rows", {"quantize_rows": 2}, "must be 0 or 1, got 2"),
    (
      "attribute_dtype",
      {"isa": np.int32(1)},
      "the attribute isa must be i64, got another type",
    ),
    ("result_shape", {"shape": (2, 3, 4)}, "the result must be"),
    ("result_rank", {"shape": (2, 9)}, "the result must be"),
    ("result_dtype", {"dtype": np.int32}, "the result must be"),
  )
  def test_malformed_call_is_an_error(self, change, message):
    arguments = self.good() | change
    with self.assertRaisesRegex(testing.HandlerError, message):
      testing.dot(**arguments)

  def test_fp4_with_odd_k_is_an_error(self):
    values = np.ones((1, 2, 33), E2M1)
    scale = np.ones((1, 2, 2), E8M0)
    with self.assertRaisesRegex(testing.HandlerError, "even k"):
      testing.dot(values, scale, values, scale)


class EightBitPairTest(parameterized.TestCase):
  """8-bit codes with E4M3 scales and blocks of 16, which no format has."""

  @testing.each(dtype=(E4M3, E5M2), k=(48, 528, 1040), is_finite=(True, False))
  def test_dot_is_within_the_bound(self, dtype, k, is_finite, isa):
    rng = np.random.default_rng(0)
    sides = []
    for rows in (17, 70):
      values = rng.standard_normal((1, rows, k)).astype(dtype)
      scale = rng.uniform(0.5, 2, (1, rows, k // 16)).astype(E4M3)
      if not is_finite:
        values[0, 3, 5] = np.inf if dtype == E5M2 else np.nan
        values[0, 9, 40] = np.nan
      sides.append(Side((dtype, E4M3, 16), values, scale.view(np.uint8)))
    got = call(*sides, isa=isa)
    expected = oracle(*sides)
    with np.errstate(invalid="ignore"):
      bound = testing.DOT_ERROR * testing.magnitudes(*sides)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    np.testing.assert_array_less(
      np.abs(got[finite] - expected[finite]), bound[finite]
    )


class SixBitTest(parameterized.TestCase):
  """6-bit codes are passed as u8, and an attribute gives their format."""

  @testing.rows(name=("mxfp6_e2m3", "mxfp6_e3m2"), m=(1, 4, 20), plain=(0, 1))
  def test_every_code_counts_what_ml_dtypes_says(self, name, m, plain):
    """Each weight row has one code, which moves through a block."""
    dtype = FORMATS[name][0]
    codes = np.arange(64, dtype=np.uint8)
    values = np.zeros((1, 64, 96), np.uint8)
    values[0, codes, codes % 32] = codes
    values[0, codes, 64 + (5 * codes) % 32] = codes
    rhs = Side(name, values.view(dtype), np.full((1, 64, 3), 127))
    lhs = integers(
      "f32" if plain else name, (1, m, 96), np.random.default_rng(0)
    )
    self.assertTrue(oracle(lhs, rhs).any())
    testing.assert_exact(lhs, rhs)


class XlaTest(absltest.TestCase):
  """XLA passes arguments, attributes and errors like direct calls."""

  def test_each_handler_gives_the_bits_of_a_direct_call(self):
    rng = np.random.default_rng(0)
    lhs = gaussians("bf16", (1, 7, 64), rng)
    rhs = gaussians("nvfp4", (1, 50, 64), rng, packed=True)
    bias = rng.standard_normal(50).astype(np.float32)
    sizes = np.int32([3, 4])
    x = rng.standard_normal((7, 64)).astype(np.float32)
    codes, scale, _ = testing.quantize(x, format=0)
    codes, scale = codes.view(E4M3), scale.view(E8M0)
    weights = np.repeat(rhs.values, 2, 0), np.repeat(rhs.scale, 2, 0)
    options = {"rhs_block_size": 16, "activation": 1, "dtype": BF16}

    def handlers(lhs, bias, x, codes):
      values, scale_of_weights = weights
      return (
        testing.dot(
          lhs, None, values[:1], scale_of_weights[:1], None, bias, **options
        ),
        testing.ragged_dot(
          lhs[0], None, values, scale_of_weights, sizes, **options,
          shape=(7, 50),
        ),
        *testing.quantize(x, format=3, compute_global=1),
        *testing.quantize_operand(x[..., None], format=2, hadamard=16),
        testing.dequantize(codes, scale, k=64, block_size=32, dtype=BF16),
      )  # fmt: skip

    arrays = lhs.values, bias, x, codes
    expected = handlers(*arrays)
    for got, wanted in zip(jax.jit(handlers)(*arrays), expected, strict=True):
      self.assertEqual(got.dtype, wanted.dtype)
      self.assertEqual(np.asarray(got).tobytes(), wanted.tobytes())

  def test_an_error_of_a_handler_is_raised(self):
    ones = np.ones((3, 64), E4M3)
    with self.assertRaisesRegex(Exception, "lhs must have rank 3"):
      jax.jit(lambda x: testing.dot(x, None, ones, None, shape=(2, 3, 3)))(ones)


class LibraryTest(parameterized.TestCase):
  @parameterized.parameters(*testing.ISA_LEVELS)
  def test_tests_have_rows_for(self, isa):
    if isa not in ISAS:
      self.skipTest(f"this machine lacks {isa}: no test has a row for it")

  def test_environment_limits_the_instruction_set(self):
    program = (
      "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]);"
      " library.jaxplugin_cpu_isa.restype = ctypes.c_char_p;"
      " print(library.jaxplugin_cpu_isa().decode())"
    )
    for limit in {"baseline", "avx2"} & set(ISAS):
      found = subprocess.run(
        [sys.executable, "-c", program, testing.library()._name],
        env=os.environ | {"JAXPLUGIN_CPU_ISA": limit},
        capture_output=True,
        text=True,
        check=True,
      ).stdout.strip()
      self.assertIn(found, (limit, "baseline_neon"))

  def test_ffi_api_version_is_major_and_minor(self):
    version = testing.library().jaxplugin_cpu_ffi_api_version()
    self.assertEqual(version // 1000, 0)
    self.assertGreaterEqual(version % 1000, 1)


if __name__ == "__main__":
  absltest.main()
