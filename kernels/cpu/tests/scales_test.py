# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests dots of rows whose E8M0 scales are far from 1 or from each other.

The kernels are exact for scales from 2^-46 to 2^46. Other rows are rebased by a
power of two if possible (dot/rebase.cc), else computed in float64.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

MX = ("mxfp8", "mxfp8_e5m2", "mxfp4")
UNIT = 2.0**-24


def times_powers(side: testing.Side, exponents) -> testing.Side:
  """Multiplies blocks of 32 by powers of two, in their scales."""
  code = side.scale.view(np.uint8).astype(np.int64) + exponents
  assert code.min() >= 0 and code.max() < 255
  exponents = np.broadcast_to(exponents, code.shape)
  side.scale = code.astype(np.uint8).view(side.scale.dtype)
  side.exact = np.ldexp(side.exact, np.repeat(exponents, 32, -1))
  return side


def moved(side: testing.Side, rng, most: int) -> testing.Side:
  """Multiplies each row's scales by a random power of two."""
  shape = (*side.scale.shape[:-1], 1)
  return times_powers(side, rng.integers(-most, most + 1, shape))


class ScalesTest(parameterized.TestCase):
  @testing.rows(name=MX, m=(1, 4, 8, 40), weights=("mxfp8", "mxfp4"))
  def test_rows_of_any_size_are_exact(self, name, m, weights):
    """Rows have different exponents; results range from 0 to Inf."""
    rng = np.random.default_rng(m)
    lhs = moved(testing.integers(name, (1, m, 544), rng), rng, 120)
    rhs = moved(testing.integers(weights, (1, 19, 544), rng), rng, 120)
    testing.assert_exact(lhs, rhs)
    largest = np.abs(testing.oracle(lhs, rhs)).max()
    self.assertTrue(largest > 2.0**128 or m < 8)

  @testing.rows(name=MX, m=(1, 8))
  def test_a_rebased_row_beside_one_that_cannot_be(self, name, m):
    rng = np.random.default_rng(m)
    lhs = times_powers(testing.integers(name, (1, m, 64), rng), -60)
    rhs = testing.integers("mxfp8", (1, 9, 64), rng)
    rhs = times_powers(rhs, np.array([60, -60]))
    testing.assert_close(lhs, rhs, bound=2 * UNIT)

  @testing.rows(m=(1, 8))
  def test_batches_and_swapped_sides_are_exact(self, m):
    """If n < m and n <= 256, rhs is the panel side."""
    rng = np.random.default_rng(m)
    for batch, n in ((3, 5), (1, 2)):
      lhs = moved(testing.integers("mxfp8", (batch, m, 96), rng), rng, 100)
      rhs = moved(testing.integers("mxfp8", (batch, n, 96), rng), rng, 100)
      testing.assert_exact(lhs, rhs)

  @testing.rows(m=(1, 8), name=MX)
  def test_scales_of_zeros_and_nan_do_not_count(self, m, name):
    """Rows have zero blocks with any scale byte next to values of 2^-60."""
    rng = np.random.default_rng(m)
    sides = [testing.integers(name, (1, rows, 256), rng) for rows in (m, 9)]
    for side in sides:
      code = side.scale.view(np.uint8).copy() - 60
      side.exact = side.exact * 2.0**-60
      side.values[..., 32:96] = 0
      side.exact[..., 32:96] = 0
      code[..., 1:3] = rng.integers(0, 255, code[..., 1:3].shape)
      code[:, 0, 1] = 0  # as quantize writes for a zero block
      side.scale = code.view(side.scale.dtype)
    rhs = sides[1]
    rhs.scale.view(np.uint8)[0, 7, 5] = 255
    rhs.exact[0, 7, 160:192] = np.nan
    testing.assert_exact(*sides)

  @testing.rows(m=(1, 8), spread=(46, 47), name=("mxfp8", "mxfp4"))
  def test_on_either_side_of_what_fits_sums_are_within_the_bound(
    self, m, spread, name
  ):
    rng = np.random.default_rng(spread)
    sides = []
    for rows in (m, 21):
      side = testing.gaussians(name, (1, rows, 512), rng, spread)
      code = side.scale.view(np.uint8).copy()
      code[..., 0], code[..., 1] = 127 - spread, 127 + spread
      side = testing.Side(name, side.values, code)
      sides.append(moved(side, rng, 60))
    lhs, rhs = sides
    magnitude = testing.magnitudes(lhs, rhs)
    exact = testing.oracle(lhs, rhs)
    finite = np.abs(exact) < 2.0**127
    self.assertTrue(finite.any())
    for isa, got in testing.results(lhs, rhs).items():
      # Below 2^-126 the spacing of float32, 2^-149, exceeds the bound.
      error = np.abs(got.astype(np.float64) - exact) - 2.0**-150
      self.assertLessEqual(np.max((error / magnitude)[finite]), 32 * UNIT, isa)

  def test_an_activation_comes_after_the_power_of_two(self):
    rng = np.random.default_rng(0)
    lhs = times_powers(testing.integers("mxfp8", (1, 8, 64), rng), -90)
    rhs = testing.integers("mxfp8", (1, 5, 64), rng)
    bias = np.full((5,), 2.0**-90, np.float32)
    got = testing.call(lhs, rhs, np.float32(2), bias=bias, activation=1)
    expected = np.maximum(2 * testing.oracle(lhs, rhs) + 2.0**-90, 0)
    np.testing.assert_array_equal(got, expected.astype(np.float32))

  @testing.each(m=(1, 4, 16))
  def test_rows_of_another_size_are_rebased(self, isa, m):
    """They have the bits of the kernels, which float64 would not have."""
    rng = np.random.default_rng(0)
    sides = [
      testing.gaussians("mxfp8", (1, rows, 2048), rng, 3) for rows in (m, 64)
    ]
    expected = testing.call(*sides, isa=isa)
    for side in sides:
      times_powers(side, -50)
    got = testing.call(*sides, isa=isa)
    np.testing.assert_array_equal(got, np.ldexp(expected, -100))


if __name__ == "__main__":
  absltest.main()
