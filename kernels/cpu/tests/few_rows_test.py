# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests the engines of few rows, and products of integers.

dot_handler_test.py tests the rest of the contract for every engine.
"""

from __future__ import annotations

import functools
import pathlib
import resource
import sys

import jax
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

FORMATS = testing.FORMATS
QUANTIZED = testing.QUANTIZED
FP4 = ("mxfp4", "nvfp4")
# Numbers of rows around the limits of the few_rows engines (dot/rule.h): 4 rows
# with AVX2 (3 for two E2M1 operands), 9 and 12 with AVX-512.
ROWS = (1, 2, 3, 4, 5, 8, 9, 10, 12, 13)


class FewRowsTest(parameterized.TestCase):
  @testing.rows(lhs=QUANTIZED, rhs=QUANTIZED)
  def test_every_count_of_rows_and_any_tail_is_exact(self, lhs, rhs):
    """Weight rows do not fill registers, and scales exceed a chunk."""
    rng = np.random.default_rng([QUANTIZED.index(lhs), QUANTIZED.index(rhs)])
    for m in rng.choice(ROWS, 3, replace=False):
      k = int(rng.choice([2, 30, 34, 66, 190, 702, 2048, 2080, 4130]))
      testing.assert_exact(
        testing.integers(lhs, (1, m, k), rng),
        testing.integers(rhs, (1, 9, k), rng),
      )

  @testing.rows(name=QUANTIZED, m=(1, 4, 8, 20))
  def test_zeros_count_nothing_under_any_scale(self, name, m):
    """Both sides have a zero block for every finite scale byte."""
    block = FORMATS[name][2]
    count = 255 if name != "nvfp4" else 0x7F
    k = (count + 1) * block
    sides = []
    for rows in (m, 20):
      values = np.zeros((1, rows, k))
      values[..., -block:] = 1
      code = np.arange(count + 1)
      code[-1] = 0x38 if name == "nvfp4" else 127
      code = np.broadcast_to(code, (1, rows, count + 1))
      sides.append(testing.Side(name, values, code))
    testing.assert_exact(*sides)

  @testing.rows(weights=QUANTIZED, exponent=(-120, -88, -70, 31, 33, 90, 110))
  def test_floats_of_any_size_are_exact(self, weights, exponent):
    """The engine passes floats that it does not support to another engine."""
    rng = np.random.default_rng(0)
    rhs = testing.integers(weights, (1, 5, 96), rng)
    for rows in (1, 3):
      values = rng.integers(-4, 5, (1, rows, 96)).astype(np.float64)
      lhs = testing.Side("f32", np.ldexp(values, exponent), None)
      testing.assert_exact(lhs, rhs)

  @testing.rows(weights=QUANTIZED)
  def test_long_rows_of_floats_are_exact(self, weights):
    """The rows exceed L1. Against codes of 8 bits k is cut into pieces."""
    rng = np.random.default_rng(0)
    for m, n, k in ((3, 9, 4130), (4, 17, 4130), (7, 8, 3104)):
      testing.assert_exact(
        testing.integers("f32", (1, m, k), rng),
        testing.integers(weights, (1, n, k), rng),
      )

  @testing.each(weights=(*QUANTIZED, "fp8_1x128_e8m0"), m=(3, 4))
  def test_long_rows_of_floats_have_the_bits_of_single_rows(
    self, weights, isa, m
  ):
    """NaN scales and codes reach the results of their weight rows only."""
    if isa not in ("avx512_bf16", "amx_bf16"):
      return  # few_rows_avx2 has more accumulators if a pass has fewer rows
    rng = np.random.default_rng(0)
    lhs = testing.gaussians("f32", (1, m, 4130), rng)
    rhs = testing.any_side(weights, (1, 21, 4130), rng, False)
    rhs.scale.view(np.uint8)[0, 3, 20] = 0xFF
    if weights.startswith(("mxfp8", "fp8")):
      rhs.values.view(np.uint8)[0, 12, 1100] = 0xFF
    got = testing.call(lhs, rhs, isa=isa)
    nan = np.isnan(got).any(axis=(0, 1))
    expected = [3, 12] if weights.startswith(("mxfp8", "fp8")) else [3]
    np.testing.assert_array_equal(np.flatnonzero(nan), expected)
    for row in range(m):
      one = testing.Side("f32", lhs.values[:, row : row + 1], None)
      single = testing.call(one, rhs, isa=isa)
      np.testing.assert_array_equal(single[0, 0], got[0, row])

  @testing.rows(weights=QUANTIZED, m=(1, 4))
  def test_large_floats_do_not_overflow(self, weights, m):
    """The largest values have the largest safe scales, in many products."""
    largest = float(ml_dtypes.finfo(FORMATS[weights][0]).max)
    code = 0x7E if weights == "nvfp4" else 127 + 46
    for exponent in (24, 37):
      lhs = testing.constant("f32", (1, m, 4096), 2.0**exponent)
      rhs = testing.constant(weights, (1, 5, 4096), largest, code)
      testing.assert_exact(lhs, rhs)

  @testing.each(m=(1, 3, 8), name=("f32", "bf16"))
  def test_tiny_floats_lose_nothing_against_subnormal_codes(self, isa, m, name):
    """Tests the last bit of a float that is multiplied by E4M3's smallest."""
    bits = 23 if name == "f32" else 7
    value = (1 + 2.0**-bits) * 2.0**-100
    lhs = testing.constant(name, (1, m, 32), value)
    rhs = testing.constant("mxfp8", (1, 5, 32), 2.0**-9, 127 + 40)
    got = testing.call(lhs, rhs, isa=isa)
    # 32 products of 2^-100 * 2^-9 * 2^40.
    expected = np.full((1, m, 5), 2.0**-64 * (1 + 2.0**-bits), np.float32)
    np.testing.assert_array_equal(got, expected)

  @testing.rows(lhs=FP4, rhs=FP4, m=(1, 8, 40))
  def test_largest_fp4_products_do_not_overflow(self, lhs, rhs, m):
    """Products of bytes are added in 16 bits."""
    for sign in (-1, 1):
      sides = [
        testing.constant(lhs, (1, m, 640), 6 * sign),
        testing.constant(rhs, (1, 21, 640), 6),
      ]
      testing.assert_exact(*sides)

  @testing.each(name=QUANTIZED, m=(2, 3, 4, 20))
  def test_result_does_not_depend_on_the_other_rows(self, isa, name, m):
    """An element has the same bits next to any other rows."""
    rng = np.random.default_rng(3)
    lhs = testing.gaussians(name, (1, m, 512), rng, 4)
    other = testing.gaussians(name, (1, m, 512), rng, 4)
    rhs = testing.gaussians(name, (1, 50, 512), rng, 4)
    other.values[:, 1], other.scale[:, 1] = lhs.values[:, 1], lhs.scale[:, 1]
    got = testing.call(lhs, rhs, isa=isa)
    beside = testing.call(other, rhs, isa=isa)
    np.testing.assert_array_equal(beside[:, 1], got[:, 1])
    self.assertFalse(np.array_equal(beside[:, 0], got[:, 0]))

  @testing.each()
  def test_a_long_row_takes_little_scratch_memory(self, isa):
    """Scratch memory is at most a row in float32; portable code needs less."""
    k = 1 << 24
    values = jax.numpy.ones((1, 1, k), testing.E4M3)
    scale = jax.numpy.ones((1, 1, k // 32), testing.E8M0)
    call = functools.partial(testing.dot, isa=isa)
    compiled = jax.jit(call).lower(values, scale, values, scale).compile()
    text = pathlib.Path("/proc/self/statm").read_text()
    size = int(text.split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    # 48 MiB for other allocations in the meantime.
    allowed = (48 << 20) + (0 if isa == "baseline" else 4 * k)
    resource.setrlimit(resource.RLIMIT_AS, (size + allowed, limits[1]))
    try:
      result = np.asarray(compiled(values, scale, values, scale))
    finally:
      resource.setrlimit(resource.RLIMIT_AS, limits)
    self.assertEqual(result, k)

  @testing.rows(m=(1, 5, 7))
  def test_long_rows_are_added_up_as_short_ones(self, m):
    """Each chunk of a long row counts once. Sums of integers are exact."""
    k, n = (1 << 20) + 544, 9  # ends within a chunk
    rng = np.random.default_rng(0)
    lhs, rhs = (
      rng.integers(-2, 3, (1, rows, k)).astype(np.float32) for rows in (m, n)
    )
    # Sums stay below 2^24.
    expected = lhs.astype(np.float64) @ rhs.astype(np.float64).swapaxes(1, 2)
    scale = [np.ones((1, r, k // 32), testing.E8M0) for r in (m, n)]
    values = [x.astype(testing.E4M3) for x in (lhs, rhs)]
    for isa in testing.ISAS:
      got = testing.dot(values[0], scale[0], values[1], scale[1], isa=isa)
      np.testing.assert_array_equal(got, expected, isa)


if __name__ == "__main__":
  absltest.main()
