# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests dots of two E2M1 operands with every kind of scale and block.

Such dots add integers, with one sum for each block, and multiply it by both
scales. The two operands have different scales: all bytes of E4M3 (with signs,
subnormals, zero and NaN), or E8M0 with zero blocks and NaN.
"""

from __future__ import annotations

import itertools
import pathlib
import sys

import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

SCALES = ("e8m0", "e4m3")
BLOCKS = (16, 32)
SIDES = tuple(itertools.product(SCALES, BLOCKS))
# The scales of MXFP4 and NVFP4.
FORMATS = (("e8m0", 32), ("e4m3", 16))
# (m, n, k): less than a tile of any engine, and some tiles. rhs is the panel
# side if it is smaller. k has a tail of a block, a group, and a chunk. The last
# shape has enough rows for a table of scales.
SHAPES = (
  (1, 9, 4130),
  (2, 35, 1102),
  (4, 35, 2),
  (6, 35, 18),
  (7, 35, 130),
  (20, 300, 1102),
  (20, 9, 544),
  (65, 70, 1102),
)
NAN = {"e8m0": 255, "e4m3": 0x7F}


def fp4_side(kind, block, codes, scale) -> testing.Side:
  """Returns E2M1 values with scales of E8M0 or E4M3, each of a block."""
  dtype = testing.E8M0 if kind == "e8m0" else testing.E4M3
  values = codes.astype(np.uint8).view(testing.E2M1)
  return testing.Side((testing.E2M1, dtype, block), values, scale)


def random_side(kind, block, rows, k, rng) -> testing.Side:
  """Returns all codes and all scales but NaN; E8M0 scales are in 2^+-5."""
  codes = rng.integers(0, 16, (1, rows, k))
  shape = (1, rows, -(-k // block))
  if kind == "e8m0":
    return fp4_side(kind, block, codes, rng.integers(122, 133, shape))
  scale = rng.integers(0, 256, shape)
  return fp4_side(kind, block, codes, np.where(scale % 128 == 127, 0, scale))


class Fp4PairsTest(parameterized.TestCase):
  @testing.rows(lhs=SIDES, rhs=SIDES)
  def test_any_scales_and_blocks_are_within_the_bound(self, lhs, rhs):
    rng = np.random.default_rng(0)
    for m, n, k in SHAPES:
      with self.subTest(m=m, n=n, k=k):
        x = random_side(*lhs, m, k, rng)
        w = random_side(*rhs, n, k, rng)
        testing.assert_close(x, w)

  @testing.rows(lhs=FORMATS, rhs=FORMATS)
  def test_a_nan_scale_makes_its_row_nan_and_no_other(self, lhs, rhs):
    rng = np.random.default_rng(1)
    for at, sign, over_zeros in ((0, 0, False), (17, 128, True)):
      sides = []
      for (kind, block), rows in ((lhs, (3, 69)), (rhs, (0, 21, 34))):
        side = random_side(kind, block, 70, 544, rng)
        codes = side.values.view(np.uint8).copy()
        scale = side.scale.view(np.uint8).copy()
        # Zero times NaN, and NaN times a scale of zero, are NaN too.
        scale[0, :, 0] = 0 if kind == "e4m3" else scale[0, :, 0]
        for row in rows:
          scale[0, row, at % scale.shape[-1]] = NAN[kind] | sign
          if over_zeros:
            codes[0, row] = 0
        sides.append(fp4_side(kind, block, codes, scale))
      expected = np.zeros((1, 70, 70), bool)
      expected[0, [3, 69]] = expected[0, :, [0, 21, 34]] = True
      found = testing.results(*sides)
      for isa, got in found.items():
        np.testing.assert_array_equal(np.isnan(got), expected, isa)
      testing.assert_within(found, *sides)

  @testing.rows(lhs=FORMATS, rhs=FORMATS)
  def test_zeros_under_extreme_scales_count_nothing(self, lhs, rhs):
    rng = np.random.default_rng(2)
    sides = []
    for kind, block in (lhs, rhs):
      side = random_side(kind, block, 65, 320, rng)
      codes = side.values.view(np.uint8).copy()
      scale = side.scale.view(np.uint8).copy()
      codes[..., 32:128] = 0
      first, last = 32 // block, 128 // block
      extreme = (0, 1, 254, 0, 254) if kind == "e8m0" else (0, 1, 0x7E, 0, 0xFE)
      scale[..., first:last] = np.resize(extreme, last - first)
      sides.append(fp4_side(kind, block, codes, scale))
    testing.assert_close(*sides)

  @testing.each(lhs=FORMATS, rhs=FORMATS)
  def test_batches_do_not_depend_on_each_other(self, isa, lhs, rhs):
    """Each small batch entry is a task. It has the bits of a dot by itself."""
    rng = np.random.default_rng(3)
    many = [
      [random_side(*side, rows, 160, rng) for _ in range(9)]
      for side, rows in ((lhs, 6), (rhs, 33))
    ]
    together = np.asarray(
      testing.dot(
        *(
          np.concatenate([getattr(side, name) for side in sides])
          for sides in many
          for name in ("values", "scale")
        ),
        lhs_block_size=lhs[1],
        rhs_block_size=rhs[1],
        isa=isa,
      )
    )
    for i, (x, w) in enumerate(zip(*many, strict=True)):
      alone = testing.call(x, w, isa=isa)
      np.testing.assert_array_equal(together[i : i + 1], alone)
      testing.assert_within(alone, x, w)


if __name__ == "__main__":
  absltest.main()
