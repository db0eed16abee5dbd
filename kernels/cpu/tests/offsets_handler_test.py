# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Zero points and minima are added within the bound of a dot."""

from __future__ import annotations

import itertools
import pathlib
import sys

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

UNIT = 2.0**-24
FLOATS = (np.float32, testing.BF16, np.float16)
OFFSETS = (np.uint8, np.int8, *FLOATS)
SIZES = (  # m, n, k, block
  (1, 5, 32, 32),
  (1, 70, 1000, 32),
  (2, 6, 800, 32),
  (3, 2, 33, 128),
  (2, 300, 4096, 16),
  (7, 9, 300, 300),
)


def arrays(m, n, k, block, kinds=(np.float32,) * 3, seed=0):
  """Returns result, x, scale and offset."""
  rng = np.random.default_rng(seed)
  blocks = -(-k // block)
  normal = lambda *shape: rng.normal(size=shape)
  x_kind, scale_kind, offset_kind = kinds
  offset = normal(n, blocks)
  if np.dtype(offset_kind).kind in "iu":
    offset = rng.integers(0, 100, (n, blocks))
  return (
    normal(m, n).astype(np.float32),
    normal(m, k).astype(x_kind),
    normal(n, blocks).astype(scale_kind),
    offset.astype(offset_kind),
  )


def exact(result, x, scale, offset, block, code_offset=8):
  """Returns the sum and its magnitude in f64."""
  result, x, scale, minima = (
    a.astype(np.float64) for a in (result, x, scale, offset)
  )
  terms = code_offset * scale + minima
  if offset.dtype.kind in "iu":
    terms = (code_offset - minima) * scale
  terms = np.repeat(terms, block, axis=1)[:, : x.shape[1]]
  magnitude = np.abs(code_offset * scale) + np.abs(minima)
  if offset.dtype.kind in "iu":
    magnitude = np.abs(terms[:, ::block])
  magnitude = np.repeat(magnitude, block, axis=1)[:, : x.shape[1]]
  return result + x @ terms.T, np.abs(result) + np.abs(x) @ magnitude.T


class AddOffsetsTest(parameterized.TestCase):
  @parameterized.parameters(*testing.ISAS)
  def test_sums_are_within_the_bound(self, isa):
    for kinds in itertools.product(FLOATS, FLOATS, OFFSETS):
      for m, n, k, block in SIZES:
        given = arrays(m, n, k, block, kinds, seed=k)
        found = testing.add_offsets(*given, block_size=block, isa=isa)
        expected, magnitude = exact(*given, block)
        with self.subTest(kinds=kinds, sizes=(m, n, k, block)):
          error = np.abs(np.asarray(found, np.float64) - expected)
          self.assertLess(np.max(error / magnitude), 16 * UNIT)

  @parameterized.product(
    isa=testing.ISAS, k=(4096, 65536), block=(32, 4096, 65536)
  )
  def test_sums_of_equal_numbers_are_within_the_bound(self, isa, k, block):
    blocks = -(-k // block)
    given = (
      np.zeros((1, 2), np.float32),
      np.full((1, k), 0.1, np.float32),
      np.ones((2, blocks), np.float32),
      np.full((2, blocks), 0.3, np.float32),
    )
    found = testing.add_offsets(
      *given, block_size=block, code_offset=0, isa=isa
    )
    expected, magnitude = exact(*given, block, code_offset=0)
    error = np.abs(np.asarray(found, np.float64) - expected)
    self.assertLess(np.max(error / magnitude), 16 * UNIT)

  @parameterized.parameters(*testing.ISAS)
  def test_integers_are_exact(self, isa):
    rng = np.random.default_rng(1)
    for m, n, k, block in SIZES:
      blocks = -(-k // block)
      given = (
        rng.integers(-9, 9, (m, n)).astype(np.float32),
        rng.integers(-4, 5, (m, k)).astype(testing.BF16),
        np.exp2(rng.integers(-2, 3, (n, blocks))).astype(np.float16),
        rng.integers(0, 16, (n, blocks)).astype(np.uint8),
      )
      found = testing.add_offsets(*given, block_size=block, isa=isa)
      np.testing.assert_array_equal(found, exact(*given, block)[0])

  @parameterized.parameters(*testing.ISAS)
  def test_only_the_row_and_column_of_a_nan_are_nan(self, isa):
    result, x, scale, offset = arrays(3, 20, 200, 32)
    x[1, 7], offset[4, 3] = np.nan, np.inf
    found = testing.add_offsets(
      result, x, scale, offset, block_size=32, isa=isa
    )
    finite = np.isfinite(np.asarray(found))
    expected = np.ones((3, 20), bool)
    expected[1], expected[:, 4] = False, False
    np.testing.assert_array_equal(finite, expected)

  @parameterized.parameters(
    ({"block_size": 0}, "block_size must be positive"),
    ({"block_size": 16}, "scale must have ceil"),
    ({"x": np.zeros((2, 64), np.int8)}, "x must be f32, bf16 or f16"),
    ({"scale": np.zeros((5, 2), np.uint8)}, "scale must be f32, bf16 or f16"),
    ({"offset": np.zeros((5, 3), np.uint8)}, "offset must be u8, s8"),
    ({"offset": np.zeros((5, 2), np.int32)}, "offset must be u8, s8"),
    ({"result": np.zeros((2, 4), np.float32)}, "result and out must be f32"),
    ({"isa": 99}, "isa"),
  )
  def test_bad_arguments_are_errors(self, changed, message):
    names = ("result", "x", "scale", "offset")
    given = dict(zip(names, arrays(2, 5, 64, 32), strict=True))
    given |= {"block_size": 32} | changed
    with self.assertRaisesRegex(Exception, message):
      testing.add_offsets(**given)


if __name__ == "__main__":
  absltest.main()
