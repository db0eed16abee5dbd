# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests the formats that kernels read and do not write.

They have wide scales (f32, bf16, f16), integers, or blocks of other sizes than
16 and 32.
"""

from __future__ import annotations

import itertools
import pathlib
import sys

import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

CHECKPOINTS, CODEBOOKS = testing.CHECKPOINTS, testing.CODEBOOKS
any_side, checkpoint = testing.any_side, testing.checkpoint
call, oracle = testing.call, testing.oracle
WIDE = tuple(
  name
  for name, (_, scale, _) in CHECKPOINTS.items()
  if np.dtype(scale).itemsize > 1
)
INTEGERS = tuple(
  name
  for name, (values, _, _) in CHECKPOINTS.items()
  if values in (testing.INT8, testing.INT4) and name not in CODEBOOKS
)
SHAPES = (
  (1, 19, 4130),
  (2, 21, 96),
  (3, 37, 576),
  (4, 9, 66),
  (19, 30, 190),
)
NAMES = (*CHECKPOINTS, "mxfp8", "nvfp4", "f32", "bf16", "f16")


class CheckpointFormatsTest(parameterized.TestCase):
  @testing.rows(name=tuple(CHECKPOINTS), other=NAMES)
  def test_integer_dots_are_exact(self, name, other):
    """Rows end within a block, a group of values and a chunk of scales."""
    if {name, other} <= CODEBOOKS.keys():
      return  # kernels read a codebook of one operand
    rng = np.random.default_rng([NAMES.index(name), NAMES.index(other)])
    for row in rng.permutation(len(SHAPES))[:2]:
      m, n, k = SHAPES[row]
      for pair in ((name, other), (other, name)):
        lhs = any_side(pair[0], (1, m, k), rng, True)
        rhs = any_side(pair[1], (1, n, k), rng, True)
        testing.assert_exact(lhs, rhs)

  @testing.rows(lhs=INTEGERS, rhs=INTEGERS, m=(1, 3, 20))
  def test_largest_integer_products_do_not_overflow(self, lhs, rhs, m):
    sides = []
    for name, rows in ((lhs, m), (rhs, 21)):
      side = checkpoint(name, (1, rows, 640), np.random.default_rng(1), True)
      most = -128 if CHECKPOINTS[name][0] == testing.INT8 else -8
      values = np.full((1, rows, 640), most)
      values[..., ::3] = -most - 1
      codes = side.scale
      if codes.dtype.itemsize == 1:
        codes = codes.view(np.uint8)
      sides.append(testing.Side(name, values, codes))
    testing.assert_close(*sides, bound=testing.LARGE_DOT_ERROR)

  @testing.rows(name=tuple(CHECKPOINTS), other=("same", "f32", "bf16", "mxfp8"))
  def test_random_dots_are_within_the_bound(self, name, other):
    if name in CODEBOOKS and other == "same":
      other = "int8_32"
    rng = np.random.default_rng(1)
    for m, k in ((1, 4130), (3, 1056), (20, 1568)):
      lhs = any_side(name if other == "same" else other, (1, m, k), rng, False)
      rhs = any_side(name, (1, 45, k), rng, False)
      bound = testing.DOT_ERROR if m < 5 else testing.LARGE_DOT_ERROR
      testing.assert_close(lhs, rhs, bound=bound)

  @testing.rows(
    name=(
      *("int8_row", "int8_32", "int4_32", "int4_128", "mxint8"),
      *("nf4", "codebook_48"),
    )
  )
  def test_every_code_is_read(self, name):
    count = 256 if CHECKPOINTS[name][0] == testing.INT8 else 16
    codes = testing.codebook_of(name)
    if codes is None:
      codes = np.arange(count) - count // 2
    values = np.tile(codes, 256 // count * 3)[None, None]
    block = CHECKPOINTS[name][2] or values.size
    scale_dtype = CHECKPOINTS[name][1]
    one = 127 if scale_dtype == testing.E8M0 else 1
    scale = np.full((1, 1, values.size // block), one)
    rhs = testing.Side(name, values, scale, packed=True)
    for m in (1, 6):
      lhs = testing.constant("f32", (1, m, values.size))
      lhs.values = np.eye(values.size, dtype=np.float32)[None, :m]
      for shift in range(0, values.size, 97):
        lhs.values = np.roll(lhs.values, shift, -1)
        lhs.exact = lhs.values.astype(np.float64)
        testing.assert_exact(lhs, rhs)

  @testing.rows(name=WIDE, m=(1, 20))
  def test_nan_and_infinite_scales_behave_as_in_f32(self, name, m):
    rng = np.random.default_rng(2)
    for special in (np.nan, np.inf, -np.inf):
      rhs = checkpoint(name, (1, 9, 320), rng, True)
      rhs.scale[0, 4, -1] = special
      block = min(rhs.block, 320)
      values = rhs.values.astype(np.float64)
      if special == -np.inf:
        values[0, 4] = np.abs(values[0, 4]) + 1
      rhs = testing.Side(name, values, rhs.scale)
      lhs = testing.constant("f32", (1, m, 320))
      expected = oracle(lhs, rhs)
      self.assertFalse(np.isfinite(expected[..., 4]).any(), block)

      testing.assert_exact(lhs, rhs)

  @testing.rows(
    lhs=("int8_32", "int4_128_bf16"), rhs=("int8_row", "int4_32"), m=(2, 9)
  )
  def test_special_scales_of_integer_pairs_behave_as_in_f32(self, lhs, rhs, m):
    """They are in any piece of a row; one side has special scales."""
    for special, row in itertools.product((np.nan, np.inf, 0), (0, 1)):
      rng = np.random.default_rng(2)
      sides = [checkpoint(lhs, (1, m, 320), rng, True)]
      sides.append(checkpoint(rhs, (1, 37, 320), rng, True))
      for i in (0, 1):
        values = sides[i].values.astype(np.float64)
        scale = sides[i].scale
        if i == row:
          scale[0, 1, -1] = special
        sides[i] = testing.Side((lhs, rhs)[i], values, scale)
      testing.assert_exact(*sides)

  @testing.rows(other=("mxfp8", "bf16", "same"), m=(4, 5, 20))
  def test_special_e8m0_scales_of_long_blocks(self, other, m):
    """Codes are NaN, far from 1, or 0 for a block of zeros."""
    name = "fp8_1x128_e8m0"
    for code in (255, 30, 220, 0):
      rng = np.random.default_rng(2)
      lhs = any_side(name if other == "same" else other, (1, m, 700), rng, True)
      rhs = checkpoint(name, (1, 37, 700), rng, True)
      values = rhs.values.astype(np.float64)
      scale = rhs.scale.view(np.uint8).copy()
      for row, column in ((1, 0), (30, 3), (36, 5)):
        scale[0, row, column] = code
        if code == 0:
          values[0, row, column * 128 : (column + 1) * 128] = 0
      rhs = testing.Side(name, values, scale)
      expected = oracle(lhs, rhs)
      with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)
      bound = testing.LARGE_DOT_ERROR * testing.magnitudes(lhs, rhs)
      for isa, got in testing.results(lhs, rhs).items():
        is_close = np.abs(got.astype(np.float64) - expected) <= bound
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        self.assertTrue(np.all(same | is_close), (code, isa))

  @testing.rows(name=("fp8_1x128", "int4_128_bf16", "fp8_row"), m=(1, 2, 20))
  def test_scales_far_from_one_lose_nothing(self, name, m):
    """Rows are rebased, or their elements are computed in float64."""
    rng = np.random.default_rng(3)
    for exponents in ((-100, -100), (-60, 60), (70, -20), (-130, 100)):
      sides = []
      for rows, exponent in zip((m, 9), exponents, strict=True):
        side = checkpoint(name, (1, rows, 384), rng, True)
        scale = np.ldexp(side.scale.astype(np.float64), exponent)
        sides.append(testing.Side(name, side.values.astype(np.float64), scale))
      testing.assert_exact(*sides)

  @testing.rows(name=("fp8_1x128", "int4_128_bf16"), m=(1, 20))
  def test_scales_of_one_row_may_span_all_of_f32(self, name, m):
    rng = np.random.default_rng(4)
    side = checkpoint(name, (1, 9, 640), rng, True)
    scale = np.exp2([-126.0, -90, 0, 60, 119])[None, None].repeat(9, 1)
    rhs = testing.Side(name, side.values.astype(np.float64), scale)
    lhs = testing.Side(
      "f32", np.repeat(1 / scale, 128, -1)[:, :1].repeat(m, 1), None
    )
    testing.assert_exact(lhs, rhs)

  @testing.rows(m=(1, 20))
  def test_blocks_of_the_code_zero_of_a_codebook_are_not_zero(self, m):
    values, scale = np.zeros((1, 9, 96)), np.full((1, 9, 3), 127.0)
    values[0, 3], scale[0, 3] = 3, 227  # 2^100
    rhs = testing.Side("codebook_32", values, scale)
    self.assertFalse(rhs.values[0, 3].any())
    lhs = testing.constant("f32", (1, m, 96), 2.0**-100)
    testing.assert_exact(lhs, rhs)

  @testing.rows(name=("int8_row", "int4_32", "mxint8"), m=(1, 20))
  def test_blocks_of_the_most_negative_integer_are_not_zero(self, name, m):
    values = np.zeros((1, 9, 96))
    values[0, 3] = -8 if name == "int4_32" else -128
    is_e8m0 = CHECKPOINTS[name][1] == testing.E8M0
    columns = 1 if name == "int8_row" else 3
    scale = np.full((1, 9, columns), 127.0 if is_e8m0 else 1)
    scale[0, 3] = 7 if is_e8m0 else 2.0 ** (-24 if name == "int4_32" else -120)
    rhs = testing.Side(name, values, scale)
    lhs = testing.constant("f32", (1, m, 96), 2.0**100)
    testing.assert_exact(lhs, rhs)

  @testing.each(name=WIDE, m=(1, 20))
  def test_zeros_under_an_infinite_scale_are_nan(self, name, m, isa):
    rhs = checkpoint(name, (1, 9, 64), np.random.default_rng(5), True)
    values, scale = rhs.values.astype(np.float64), rhs.scale
    values[0, 3], scale[0, 3] = 0, np.inf
    rhs = testing.Side(name, values, scale)
    found = call(testing.constant("f32", (1, m, 64)), rhs, isa=isa)
    self.assertTrue(np.isnan(found[..., 3]).all())
    self.assertTrue(np.isfinite(np.delete(found, 3, -1)).all())

  @testing.rows(
    name=("fp8_1x128", "fp8_row"), m=(1, 20), scale=(0, 1e-38, 1e38)
  )
  def test_zero_blocks_count_nothing_under_any_finite_scale(
    self, name, m, scale
  ):
    rng = np.random.default_rng(5)
    rhs = checkpoint(name, (1, 9, 256), rng, True)
    values, scales = rhs.values.astype(np.float64), rhs.scale
    values[0, 3, -128:], scales[0, 3, -1] = 0, scale
    if name == "fp8_row":
      values[0, 3] = 0
    rhs = testing.Side(name, values, scales)
    lhs = testing.integers("f32", (1, m, 256), rng)
    testing.assert_exact(lhs, rhs)

  @testing.rows(name=tuple(CHECKPOINTS), m=(1, 2, 3, 4))
  def test_one_product_of_wide_scales_may_outweigh_all_others(self, name, m):
    """The product of a value and its scale is rounded, too."""
    for k, seed in itertools.product((544, 4096), range(3)):
      rng = np.random.default_rng(seed)
      rhs = checkpoint(name, (1, 9, k), rng)
      lhs = checkpoint("fp8_1x128", (1, m, k), rng)
      values = np.abs(lhs.values.astype(np.float64)) * np.sign(rhs.exact[:, :1])
      values[..., 1:128] = 0
      values[..., 0] = 1.75
      lhs.scale[..., 0] *= 2.0**24
      lhs = testing.Side("fp8_1x128", values, lhs.scale)
      testing.assert_close(lhs, rhs)

  @testing.each(
    name=tuple(name for name in CHECKPOINTS if name not in CODEBOOKS),
    dtype=testing.FLOATS,
  )
  def test_dequantize_rounds_each_product_once(self, name, dtype, isa):
    rng = np.random.default_rng(8)
    for k in (190, 2176):
      side = checkpoint(name, (7, k), rng, packed=True)
      got = testing.dequantize(
        side.values,
        side.scale,
        np.float32(1.25),
        k=k,
        dtype=dtype,
        **testing.operand(side),
        isa=isa,
      )
      expected = side.exact.astype(np.float32) * np.float32(1.25)
      np.testing.assert_array_equal(got, expected.astype(dtype))


if __name__ == "__main__":
  absltest.main()
