# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests dots that convert their rows of floats (`quantize_rows`)."""

from __future__ import annotations

import functools
import pathlib
import sys

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

ROWS = (testing.INT8, testing.F32, 32)
# The instruction sets that quantize rows.
QUANTIZING = tuple(isa for isa in testing.ISAS if isa != "baseline")
WEIGHTS = (
  *("mxfp4", "nvfp4", "int8_32", "int4_32", "int4_128", "int8_row", "int4_16"),
  *("mxint8", "e2m1_48", "e2m1_64", "int8_16", "int4_128_bf16"),
)
# Rows end within a block, a vector of codes and a step. The last shape has
# weights as the side with fewer rows.
SHAPES = (
  *((1, 37, 96), (2, 21, 66), (3, 70, 576), (4, 19, 4130), (5, 70, 1056)),
  *((19, 131, 544), (300, 60, 64)),
)
# Numbers of engines of bytes, and of one of floats (dot/config.h).
AVX2_ENGINES = ((3, 4), 2)
AVX512_ENGINES = ((6, 9), 5)
# README.md, "Accumulation": one rounding in the product of two scales, one in
# its product with a sum.
DOT_ERROR_ULPS = 18 * 2.0**-24


def quantized(x: np.ndarray) -> testing.Side:
  """Quantizes rows in NumPy, by the rule of docs/concepts/numerics.md."""
  k = x.shape[-1]
  blocks = np.zeros((*x.shape[:-1], -(-k // 32) * 32), np.float32)
  blocks[..., :k] = x
  blocks = blocks.reshape(*x.shape[:-1], -1, 32)
  amax = np.abs(blocks).max(-1)
  scale = np.maximum(amax / np.float32(127), np.float32(2.0**-126))
  scale = np.where(amax == 0, np.float32(0), scale)
  is_finite = np.isfinite(amax)
  with np.errstate(all="ignore"):
    values = np.rint((blocks / scale[..., None]).astype(np.float32))
  keep = is_finite & (amax > 0)
  values = np.where(keep[..., None], values, 0)
  values = values.reshape(*x.shape[:-1], -1)[..., :k]
  return testing.Side(ROWS, values, np.where(is_finite, scale, np.nan))


def floats(x: np.ndarray) -> testing.Side:
  lhs = testing.Side("f32", x, None)
  lhs.values = x
  return lhs


def call(x: np.ndarray, rhs: testing.Side, *args, **kwargs) -> np.ndarray:
  return testing.call(floats(x), rhs, *args, quantize_rows=1, **kwargs)


def rounded(x: np.ndarray) -> testing.Side:
  """Rounds rows to bf16 in ml_dtypes. Finite values stay finite."""
  largest = np.array(ml_dtypes.finfo(testing.BF16).max, x.dtype)
  is_finite = np.isfinite(x)
  with np.errstate(over="ignore"):
    bf16 = x.astype(testing.BF16)
  capped = np.copysign(largest, x).astype(testing.BF16)
  return floats(np.where(is_finite & ~np.isfinite(bf16), capped, bf16))


def is_in_int8(rows: int, name: str, isa: str, n: int = 1 << 20) -> bool:
  """Returns whether rows are quantized, and not rounded to bf16.

  A few rows are rounded, if AVX-512 BF16 streams the format of the weights.
  """
  most = 4 if name.startswith(("int8", "mxint8")) else 8
  # The weights may be the panel side.
  if name == "e2m1_48" or rows > n or isa in ("avx2", "avx512"):
    most = 0
  return rows > most


def multiplied(
  x: np.ndarray, name: str, isa: str, n: int = 1 << 20
) -> testing.Side:
  """Returns the lhs that is multiplied: `x` in int8 or in bf16."""
  if is_in_int8(x.shape[-2], name, isa, n):
    return quantized(x.astype(np.float32))
  return rounded(x)


def weights(name: str, shape, rng) -> testing.Side:
  if name in testing.CHECKPOINTS:
    return testing.checkpoint(name, shape, rng, packed=bool(rng.integers(2)))
  return testing.gaussians(name, shape, rng, packed=bool(rng.integers(2)))


class QuantizedRowsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if not QUANTIZING:
      self.skipTest("no instruction set of this machine quantizes rows")

  @parameterized.product(name=WEIGHTS, isa=QUANTIZING)
  def test_results_are_those_of_rows_that_numpy_converted(self, name, isa):
    rng = np.random.default_rng(0)
    for m, n, k in SHAPES:
      for dtype in testing.FLOATS:
        x = rng.standard_normal((1, m, k)).astype(dtype)
        rhs = weights(name, (1, n, k), rng)
        lhs = multiplied(x, name, isa, n)
        got = call(x, rhs, isa=isa)
        np.testing.assert_array_equal(got, testing.call(lhs, rhs, isa=isa))
        testing.assert_within(got, lhs, rhs, DOT_ERROR_ULPS)

  @parameterized.product(
    name=("mxfp4", "nvfp4", "int8_32", "int4_32"), isa=QUANTIZING, m=(2, 20)
  )
  def test_error_is_within_the_bound_of_half_a_step(self, name, isa, m):
    """Some blocks have an outlier, and blocks differ in size."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, m, 1056)).astype(np.float32)
    x *= np.repeat(np.exp2(rng.integers(-9, 9, (1, m, 33))), 32, -1)
    x[..., ::97] *= 100
    rhs = weights(name, (1, 50, 1056), rng)
    lhs = testing.Side("f32", x, None)
    error = np.abs(call(x, rhs, isa=isa) - testing.oracle(lhs, rhs))
    amax = np.abs(x.astype(np.float64)).reshape(1, m, 33, 32).max(-1)
    half = np.repeat(amax / 254, 32, -1) * (1 + 2.0**-16)
    magnitude = np.abs(np.swapaxes(rhs.exact, 1, 2))
    bound = half @ magnitude + DOT_ERROR_ULPS * (np.abs(x) + half) @ magnitude
    self.assertTrue(np.all(error <= bound), np.max(error / bound))
    # The bound is not much larger than the error of a single product.
    one = np.zeros_like(x)
    one[..., 0], one[..., 1] = 127, 0.5
    one_rhs = testing.Side(
      (testing.INT8, testing.F32, 32),
      np.eye(1056)[None, :2],
      np.ones((1, 2, 33)),
    )
    got = call(one, one_rhs, isa=isa)
    np.testing.assert_array_equal(got[..., 0], 127)
    half = 0 if is_in_int8(m, "int8_32", isa) else 0.5  # halves to even
    np.testing.assert_array_equal(got[..., 1], half)

  @parameterized.product(
    special=(np.nan, np.inf, -np.inf), isa=QUANTIZING, m=(2, 20)
  )
  def test_nan_and_inf_reach_only_the_results_of_their_row(
    self, special, isa, m
  ):
    """int8 has no Inf, so it becomes NaN."""
    rng = np.random.default_rng(2)
    rhs = testing.integers("mxfp4", (1, 40, 160), rng)
    x = rng.standard_normal((1, m, 160)).astype(np.float32)
    expected = call(x, rhs, isa=isa)
    x[0, -1, 70] = special
    expected[0, -1] = np.nan
    if not is_in_int8(m, "mxfp4", isa) and not np.isnan(special):
      with np.errstate(invalid="ignore"):
        expected[0, -1] = special * rhs.exact[0, :, 70]
    np.testing.assert_array_equal(call(x, rhs, isa=isa), expected)

  @parameterized.product(isa=QUANTIZING, dtype=(np.float32, np.float16))
  def test_the_largest_values_stay_finite_in_bf16(self, isa, dtype):
    """bf16 would round f32's largest value to Inf."""
    if is_in_int8(2, "mxfp4", isa):
      self.skipTest(f"{isa} rounds no rows to bf16")
    largest = np.finfo(dtype).max
    x = np.zeros((1, 2, 96), dtype)
    x[0, :, 0] = largest, -largest
    rhs = testing.constant("mxfp4", (1, 37, 96), 1)
    expected = testing.oracle(rounded(x), rhs).astype(np.float32)
    self.assertTrue(np.isfinite(expected).all())
    np.testing.assert_array_equal(call(x, rhs, isa=isa), expected)

  @parameterized.product(isa=QUANTIZING, m=(2, 3, 20))
  def test_blocks_of_any_size_are_exact_on_integers(self, isa, m):
    """Rows of zeros, of subnormals, and of steps far from each other."""
    rng = np.random.default_rng(3)
    values = rng.integers(-4, 5, (1, m, 96)).astype(np.float64)
    values[..., ::32] = 127
    for exponents in ((0, 0, 0), (-126, -126, -126), (110, 115, 120)):
      powers = np.repeat(np.exp2(np.array(exponents, np.float64)), 32)
      x = (values * powers).astype(np.float32)
      code = 127 - np.clip(exponents, -40, 40)
      rhs = testing.constant("mxfp4", (1, 37, 96), 1)
      scale = np.broadcast_to(code, rhs.scale.shape)
      rhs = testing.Side("mxfp4", np.ones((1, 37, 96)), scale)
      lhs = testing.Side("f32", x, None)
      expected = testing.oracle(lhs, rhs).astype(np.float32)
      np.testing.assert_array_equal(call(x, rhs, isa=isa), expected)
    x = np.zeros((1, m, 96), np.float32)
    np.testing.assert_array_equal(
      call(x, rhs, isa=isa), np.zeros((1, m, 37), np.float32)
    )

  @parameterized.product(isa=QUANTIZING, m=(2, 20), value=(127, -127))
  def test_sums_of_the_largest_products_are_exact(self, isa, m, value):
    x = np.full((1, m, 96), value, np.float32)
    for element, extremes in (
      (testing.INT8, (127, -128)),
      (testing.INT4, (7, -8)),
      ("mxfp4", (6, -6)),
    ):
      for extreme in extremes:
        values = np.full((1, 40, 96), extreme, np.float64)
        if element == "mxfp4":
          rhs = testing.Side(element, values, np.full((1, 40, 3), 127))
        else:
          kind = (element, testing.F32, 32)
          rhs = testing.Side(kind, values, np.ones((1, 40, 3)))
        expected = np.full((1, m, 40), 96 * value * extreme, np.float32)
        np.testing.assert_array_equal(call(x, rhs, isa=isa), expected)

  @parameterized.product(isa=QUANTIZING, m=(2, 20))
  def test_zero_blocks_under_the_largest_scale_stay_zero(self, isa, m):
    """The product of both scales would overflow."""
    values = np.ones((1, 37, 96))
    values[..., 32:64] = 0
    scale = np.broadcast_to([127, 254, 127], (1, 37, 3))
    rhs = testing.Side("mxfp4", values, scale)
    x = np.full((1, m, 96), 127 * 2.0**20, np.float32)
    expected = np.full((1, m, 37), 64 * 127 * 2.0**20, np.float32)
    np.testing.assert_array_equal(call(x, rhs, isa=isa), expected)

  @parameterized.product(isa=QUANTIZING, m=(2, 20))
  def test_subnormal_steps_and_rows_of_all_sizes_keep_the_bound(self, isa, m):
    rng = np.random.default_rng(4)
    rhs = testing.gaussians("mxfp4", (1, 40, 96), rng)
    for least, most in ((-149, -126), (-149, 90)):
      exponents = rng.integers(least, most, (1, m, 96))
      signs = rng.choice([-1.0, 1.0], exponents.shape)
      x = np.ldexp(signs, exponents).astype(np.float32)
      lhs = multiplied(x, "mxfp4", isa)
      got = call(x, rhs, isa=isa)
      testing.assert_within(got, lhs, rhs, DOT_ERROR_ULPS, 2.0**-149)

  @parameterized.product(isa=QUANTIZING, m=(1, 9), rhs_batch=(1, 3))
  def test_batches_and_the_epilogue_are_those_of_converted_rows(
    self, isa, m, rhs_batch
  ):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((3, m, 160)).astype(testing.BF16)
    rhs = weights("nvfp4", (rhs_batch, 70, 160), rng)
    bias = rng.standard_normal(70).astype(np.float32)
    residual = rng.standard_normal((3, m, 70)).astype(np.float32)
    options = {"activation": 2, "isa": isa}
    args = (np.float32(0.3), bias, residual)
    lhs = multiplied(x, "nvfp4", isa)
    np.testing.assert_array_equal(
      call(x, rhs, *args, **options), testing.call(lhs, rhs, *args, **options)
    )

  @parameterized.product(isa=QUANTIZING, m=(1, 40))
  def test_floats_on_the_side_of_rhs_are_quantized_too(self, isa, m):
    rng = np.random.default_rng(6)
    lhs = weights("int4_32", (1, m, 96), rng)
    x = rng.standard_normal((1, 37, 96)).astype(np.float32)
    rhs = testing.Side("f32", x, None)
    np.testing.assert_array_equal(
      testing.call(lhs, rhs, quantize_rows=1, isa=isa),
      testing.call(lhs, quantized(x), isa=isa),
    )

  @parameterized.product(isa=QUANTIZING, m=(1, 6))
  def test_a_config_is_that_of_the_dot_of_integers(self, isa, m):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((1, m, 96)).astype(np.float32)
    rhs = weights("mxfp4", (1, 40, 96), rng)
    is_avx2 = isa in ("avx2", "avx512")
    of_bytes, of_floats = AVX2_ENGINES if is_avx2 else AVX512_ENGINES
    for engine in of_bytes:
      got = call(x, rhs, isa=isa, attributes={"engine": engine})
      testing.assert_within(got, quantized(x), rhs, DOT_ERROR_ULPS)
    if is_avx2:  # its engine of floats multiplies int8, too
      got = call(x, rhs, isa=isa, attributes={"engine": of_floats})
      testing.assert_within(got, quantized(x), rhs, 32 * 2.0**-24)
      return
    with self.assertRaisesRegex(testing.HandlerError, "needs sides that are"):
      call(x, rhs, isa=isa, attributes={"engine": of_floats})


@functools.cache
def ragged_weights(name):
  """Returns two stacks of weights, which several tests multiply."""
  rng = np.random.default_rng(9)
  # The third group of the second one is cut into parts.
  return [weights(name, (4, n, k), rng) for n, k in ((70, 160), (1600, 544))]


class RaggedTest(parameterized.TestCase):
  """Groups of rows with a weight each: few rows, none, many, no group."""

  SIZES = (1, 0, 9, 3)

  @parameterized.product(
    name=("mxfp4", "nvfp4", "int8_32", "int4_128"),
    isa=QUANTIZING,
    activation=(0, *testing.GATES),
  )
  def test_results_are_those_of_rows_that_numpy_converted(
    self, name, isa, activation
  ):
    rng = np.random.default_rng(9)
    for rhs in ragged_weights(name):
      for dtype in testing.FLOATS:
        x = rng.standard_normal((15, rhs.exact.shape[-1])).astype(dtype)
        lhs = testing.Side("f32", x, None)
        lhs.values = x
        options = {"isa": isa, "activation": activation}
        got = testing.call_ragged(
          lhs, rhs, self.SIZES, quantize_rows=1, **options
        )
        # A group with few rows rounds them to bf16.
        in_int8, in_bf16 = (
          testing.call_ragged(own, rhs, self.SIZES, **options)
          for own in (quantized(x.astype(np.float32)), rounded(x))
        )
        self.assertTrue((in_int8 != in_bf16).any())
        ends = np.cumsum(self.SIZES)
        for start, end in zip((0, *ends), (*ends, 15), strict=True):
          rows = slice(start, end)
          expected = in_int8 if is_in_int8(end - start, name, isa) else in_bf16
          np.testing.assert_array_equal(got[rows], expected[rows])


class UnquantizedRowsTest(parameterized.TestCase):
  @testing.each(name=("mxfp8", "mxfp4", "int8_32"), m=(2, 20))
  def test_only_asked_dots_of_some_formats_quantize_rows(self, name, m, isa):
    rng = np.random.default_rng(8)
    x = rng.standard_normal((1, m, 96)).astype(np.float32)
    rhs = weights(name, (1, 40, 96), rng)
    unasked = testing.call(testing.Side("f32", x, None), rhs, isa=isa)
    is_quantized = isa in QUANTIZING and name != "mxfp8"
    self.assertEqual(
      is_quantized, bool((call(x, rhs, isa=isa) != unasked).any())
    )


if __name__ == "__main__":
  absltest.main()
