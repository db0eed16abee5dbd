# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums stay within the contract's bound if one product outweighs all others.

Each rounding of a sum adds an error of up to half an ulp, which is 2^-24 of
sum|a * b| if one product is most of the sum. With such data, the error counts
the roundings. With random data it does not, because rounding errors cancel.
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

# (value, scale, other value, other scale) of both sides. One value of a row is
# large, the others of its block are 0, and all other blocks have the other
# value. The ratio of the products is about 2^22 to 2^27. At these ratios, sums
# round up, round down or lose the small product, also after 4 or 8 small
# products have been added.
DOMINATED = {
  "mxfp8": (
    (256, 1, 16, 2.0**-8),
    (256, 16, 1, 1),
    (416, 16, 1.125, 1),
    (256, 1, 15, 2.0**-9),
  ),
  "mxfp8_e5m2": ((256, 16, 1, 1), (448, 16, 1.25, 1), (256, 1, 1.75, 2.0**-6)),
  "mxfp4": (
    (4, 2.0**8, 0.5, 2.0**-1),
    (4, 2.0**8, 0.5, 1),
    (6, 256, 1.5, 0.25),
    (6, 256, 1, 0.125),
  ),
  "nvfp4": ((4, 256, 0.5, 0.125), (4, 256, 0.5, 0.25), (6, 208, 1, 0.140625)),
}
FP4 = ("mxfp4", "nvfp4")
# Rows for every path: few rows, large dots, and last tiles of one row, or with
# one row missing.
ROWS = (1, 2, 3, 4, 5, 17, 25, 31)
UNIT = 2.0**-24


def dominated(name, rows, k, at, large, large_scale, other, other_scale):
  """Returns an operand whose large value is at k = `at`."""
  _, scale_dtype, block = testing.FORMATS[name]
  values = np.full((1, rows, k), other, np.float64)
  scale = np.full((1, rows, k // block), other_scale, np.float64)
  first = at // block * block
  values[..., first : first + block] = 0
  values[..., at] = large
  scale[..., first // block] = large_scale
  side = testing.Side(name, values, scale.astype(scale_dtype).view(np.uint8))
  # The operand represents the values exactly.
  np.testing.assert_array_equal(side.exact, values * scale.repeat(block, -1))
  return side


def bound(lhs, rhs, rows, isa):
  """Returns the limit of error / sum|a * b|: the contract's or twice that."""
  is_fp4 = lhs in FP4 and rhs in FP4
  # The large dots in AVX2's float32, BF16 and AMX have twice the bound. Two FP4
  # operands use AMX from 24 rows on (README.md, Accumulation).
  rows_min = 24 if is_fp4 else 5
  is_twice = isa == "amx_bf16" if is_fp4 else isa != "baseline"
  return (32 if is_twice and rows >= rows_min else 16) * UNIT


class AccuracyTest(parameterized.TestCase):
  def assert_close(self, lhs, rhs, limit):
    """Checks that error / sum|a * b| is at most `limit` of each ISA."""
    expected = testing.oracle(lhs, rhs)
    magnitudes = testing.magnitudes(lhs, rhs)
    for isa, got in testing.results(lhs, rhs).items():
      worst = np.max(np.abs(got.astype(np.float64) - expected) / magnitudes)
      self.assertLessEqual(worst, limit(isa), (isa, got.shape))

  @testing.rows(
    row=[(name, data) for name, rows in DOMINATED.items() for data in rows]
  )
  def test_one_product_may_outweigh_all_others(self, row):
    name, data = row
    for k, at in itertools.product((512, 4096, 16384), (0, 13)):
      rhs = dominated(name, max(ROWS), k, at, *data)
      for rows in ROWS if k < 16384 else (1, 4, 17):
        lhs = dominated(name, rows, k, at, *data)
        limit = functools.partial(bound, name, name, rows)
        with self.subTest(k=k, rows=rows, at=at):
          self.assert_close(lhs, rhs, limit)

  @testing.each(rows=(1, 3, 8, 31, 40))
  def test_large_parts_that_cancel_leave_what_a_total_rounded_off(
    self, isa, rows
  ):
    """Chunks of a long row add 1, 2^30 and -2^30."""
    if isa in ("avx512_bf16", "amx_bf16"):
      return  # the bf16 engines add in another order
    k, chunk = 6144, 2048
    lhs, rhs = np.zeros((1, rows, k)), np.zeros((1, 9, k))
    code = np.full((1, rows, k // 32), 127)
    parts = ((1, 1, 0), (256, 256, 14), (-256, 256, 14))
    for i, (a, b, exponent) in enumerate(parts):
      lhs[..., chunk * i + 5], rhs[..., chunk * i + 5] = a, b
      code[..., chunk * i // 32] = 127 + exponent
    lhs = testing.Side("mxfp8", lhs, code)
    rhs = testing.Side("mxfp8", rhs, np.full((1, 9, k // 32), 127))
    np.testing.assert_array_equal(testing.call(lhs, rhs, isa=isa), 1)

  @testing.rows(name=("mxfp8", "nvfp4"), rows=(1, 8))
  def test_long_sums_of_ordinary_data_are_within_the_bound(self, name, rows):
    """Without signs, sums and their rounding errors grow."""
    rng = np.random.default_rng(3)
    sides = [
      testing.gaussians(name, (1, count, 65536), rng) for count in (rows, 5)
    ]
    for side in sides:
      side.values, side.exact = np.abs(side.values), np.abs(side.exact)
    self.assert_close(*sides, lambda isa: 16 * UNIT)

  @testing.rows(rows=(1, 8))
  def test_massive_activations_are_within_twice_the_bound(self, rows):
    """One activation is 2^10 times as large as the others."""
    rng = np.random.default_rng(4)
    lhs = np.abs(rng.standard_normal((1, rows, 4096)))
    lhs[..., 5] *= 2.0**10
    lhs = testing.Side("bf16", lhs, None)
    rhs = testing.gaussians("mxfp8", (1, 64, 4096), rng)
    rhs.values, rhs.exact = np.abs(rhs.values), np.abs(rhs.exact)
    self.assert_close(lhs, rhs, functools.partial(bound, "bf16", "mxfp8", rows))

  @testing.rows(name=(*testing.QUANTIZED, *testing.CHECKPOINTS))
  def test_floats_against_weights(self, name):
    """Products with floats are rounded, too."""
    rng = np.random.default_rng(1)
    for k, plain in itertools.product((544, 4096), ("f32", "bf16")):
      for rows in ROWS:
        rhs = testing.any_side(name, (1, 9, k), rng, False)
        large = 2.0 ** rng.uniform(18, 26, (1, rows, 1))
        values = rng.uniform(0.5, 1, (1, rows, k)) * np.sign(rhs.exact[:, :1])
        values[..., :1] *= large
        lhs = testing.Side(plain, values, None)
        limit = functools.partial(bound, plain, name, rows)
        with self.subTest(k=k, rows=rows, plain=plain):
          self.assert_close(lhs, rhs, limit)

  @testing.rows(rows=(5, 17, 31), step=(16, 1))
  def test_all_roundings_of_a_sum_may_go_up(self, rows, step):
    """Products of slightly more than half a unit are added to 1, one by one.

    They are in the lane of the 1, or added to it with the other lanes.
    """
    k = 1024
    values = np.zeros((1, rows, k), np.float32)
    values[..., ::step] = 2.0**-24 * (1 + 2.0**-7)
    values[..., [1, 2, 4, 8]] = values[..., 16, None]
    values[..., 0] = 1
    lhs = testing.Side("f32", values, None)
    rhs = testing.Side("f32", np.ones((1, 31, k), np.float32), None)
    self.assert_close(lhs, rhs, functools.partial(bound, "f32", "f32", rows))


if __name__ == "__main__":
  absltest.main()
