# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares quantized results of dots with their quantized f32 results."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys

import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing


@dataclasses.dataclass(frozen=True)
class Row:
  """A dot: formats, [batch, m, n, k], and what its result is quantized to."""

  lhs: str
  rhs: str
  shape: tuple[int, int, int, int]
  out: str
  global_scale: float | None = None
  rounding: int = 0
  rhs_batch: int = 1
  spread: int = 2  # of the exponents of E8M0 scales
  activation: int = 0
  has_epilogue: bool = False


# Few rows; tails of rows; rows and columns that end inside of a task; rhs as
# the panel side; several panels; batches; scales that are rebased, or differ
# too much for that; each format.
ROWS = (
  Row("mxfp8", "mxfp8", (1, 1, 96, 64), "mxfp8"),
  Row("mxfp8", "mxfp8", (1, 5, 160, 544), "mxfp4", rounding=1),
  Row("bf16", "mxfp4", (1, 3, 2080, 96), "mxfp8"),
  Row("bf16", "mxfp8", (1, 2, 96, 64), "mxfp8", spread=60),
  Row("bf16", "nvfp4", (1, 20, 304, 96), "nvfp4", 0.5, has_epilogue=True),
  Row("f32", "mxfp8", (1, 70, 416, 160), "mxfp8_e5m2", activation=3),
  Row("mxfp8", "mxfp4", (1, 300, 96, 64), "mxfp6_e2m3"),
  Row("mxfp8", "mxfp8", (1, 300, 224, 20000), "mxfp8"),
  Row("mxfp4", "mxfp4", (1, 70, 288, 96), "mxfp6_e3m2", has_epilogue=True),
  Row("nvfp4", "nvfp4", (1, 530, 400, 64), "nvfp4", 2.0**-70),
  Row("nvfp4", "nvfp4", (1, 4, 48, 64), "nvfp4", 1e30),
  Row("nvfp4", "nvfp4", (1, 64, 16, 64), "nvfp4", -1.0),
  Row("int8_32", "int8_32", (1, 40, 352, 96), "mxfp8", activation=1),
  Row("int8_32", "int4_32", (1, 4, 352, 96), "mxfp4"),
  Row("mxfp8", "mxfp8", (3, 7, 64, 96), "mxfp8", rhs_batch=3),
  Row("mxfp8", "mxfp8", (9, 40, 96, 32), "mxfp4", rhs_batch=9),
  Row("mxfp8", "mxfp8", (2, 33, 288, 64), "mxfp8", spread=60),
  Row("mxfp8", "mxfp8", (1, 40, 96, 160), "mxfp8", spread=120),
)


@dataclasses.dataclass(frozen=True)
class RaggedRow:
  """A ragged dot: formats, [m, n, k], sizes, and the result's format."""

  lhs: str
  rhs: str
  shape: tuple[int, int, int]
  sizes: tuple[int, ...]
  out: str
  global_scale: float | None = None
  spread: int = 2
  activation: int = 0
  has_epilogue: bool = False


# Rows without a group; groups without rows; parts of columns; both gates;
# unsafe rows.
RAGGED_ROWS = (
  RaggedRow("mxfp8", "mxfp8", (40, 96, 64), (3, 0, 30), "mxfp8"),
  RaggedRow("bf16", "mxfp4", (64, 1600, 1024), (40, 24), "mxfp4"),
  RaggedRow("nvfp4", "nvfp4", (33, 48, 64), (1, 7), "nvfp4", 0.01),
  RaggedRow("nvfp4", "nvfp4", (33, 48, 64), (1, 7), "nvfp4", np.nan),
  RaggedRow("nvfp4", "nvfp4", (33, 48, 64), (1, 7), "nvfp4", np.inf),
  RaggedRow("nvfp4", "nvfp4", (33, 48, 64), (1, 7), "nvfp4", -1.0),
  RaggedRow("mxfp8", "mxfp8", (20, 128, 96), (9, 5), "mxfp8", activation=4),
  RaggedRow("f32", "mxfp8", (60, 1664, 512), (50, 5), "mxfp8", activation=5),
  RaggedRow(
    *("bf16", "nvfp4", (20, 96, 64), (4, 12), "nvfp4", 2.0),
    activation=3,
    has_epilogue=True,
  ),
  RaggedRow("mxfp8", "mxfp8", (40, 96, 64), (20, 20), "mxfp8", spread=60),
)


# Each instruction set has the same operands, which take most of the time.
@functools.cache
def _operands(row: Row):
  rng = np.random.default_rng(0)
  batch, m, n, k = row.shape

  def side(name, shape):
    if name in testing.CHECKPOINTS:
      return testing.checkpoint(name, shape, rng)
    return testing.gaussians(name, shape, rng, row.spread)

  arrays = ()
  if row.has_epilogue:
    arrays = (
      np.float32(0.75),
      rng.standard_normal(n).astype(np.float32),
      rng.standard_normal((batch, m, n)).astype(np.float32),
    )
  lhs, rhs = side(row.lhs, (batch, m, k)), side(row.rhs, (row.rhs_batch, n, k))
  return (lhs, rhs, *arrays)


@functools.cache
def _ragged_operands(row: RaggedRow):
  rng = np.random.default_rng(0)
  m, n, k = row.shape
  groups = len(row.sizes)
  lhs = testing.gaussians(row.lhs, (m, k), rng, row.spread)
  rhs = testing.gaussians(row.rhs, (groups, n, k), rng, row.spread)
  if not row.has_epilogue:
    return lhs, rhs, row.sizes
  factors = rng.uniform(1, 2, (1, groups)).astype(np.float32)
  bias = rng.standard_normal((groups, n)).astype(np.float32)
  return lhs, rhs, row.sizes, factors, bias


class QuantizedResultTest(parameterized.TestCase):
  def assert_same(self, got, expected):
    for array, right in zip(got, expected, strict=True):
      np.testing.assert_array_equal(array, right)

  @testing.each(row=ROWS)
  def test_bits_are_those_of_the_quantized_f32_result(self, row, isa):
    operands = _operands(row)
    options = {"activation": row.activation, "isa": isa}
    result = testing.call(*operands, **options)
    for config in ({}, {"task_rows": 40, "panel_rows": 40}, {"threads": 1}):
      out = testing.QuantizedResult(
        row.out, row.global_scale, row.rounding, has_amax=config != {}
      )
      with self.subTest(str(config)):
        got = testing.call(*operands, out=out, **options, attributes=config)
        self.assert_same(got, out.of(result, isa))

  @testing.each(m=(2, 40))
  def test_amax_has_no_sums_of_rows_that_are_rebased_later(self, m, isa):
    out = testing.QuantizedResult("mxfp8")
    # The second dot reuses scratch memory of the first one, whose sums are
    # large. Its rows are not safe.
    for code, amax in ((150, 64 * 2.0**46), (60, 64 * 2.0**-134)):
      sides = (
        testing.constant("mxfp8", (1, rows, 64), code=code) for rows in (m, 96)
      )
      *_, got = testing.call(*sides, out=out, isa=isa)
      self.assertEqual(got, np.float32(amax))

  @testing.each(row=RAGGED_ROWS)
  def test_ragged_dots_quantize_the_f32_result(self, row, isa):
    operands = _ragged_operands(row)
    options = {"activation": row.activation, "isa": isa}
    out = testing.QuantizedResult(row.out, row.global_scale)
    expected = out.of(testing.call_ragged(*operands, **options), isa)
    got = testing.call_ragged(*operands, out=out, **options)
    self.assert_same(got, expected)

  def test_a_call_with_wrong_results_is_an_error(self):
    mxfp8 = testing.QuantizedResult("mxfp8")
    two_scales = testing.QuantizedResult("mxfp8", np.ones(2))
    for rule, n, out, attributes in (
      ("results must be one array", 64, None, {"result_format": 0}),
      ("format must be 0", 64, mxfp8, {"result_format": 6}),
      (
        r"values must be f4e2m1fn\[4,64\] or u8\[4,32\], got u8\[4,64\]",
        *(64, mxfp8, {"result_format": 2}),
      ),
      (
        r"scale must be f8e4m3fn\[4,4\] or u8\[4,4\], got u8\[4,2\]",
        *(64, testing.QuantizedResult("mxfp4"), {"result_format": 3}),
      ),
      ("no other attributes are known", 64, None, {"result_rounding": 1}),
      ("rhs_code_offset must be 0 if", 64, mxfp8, {"rhs_code_offset": 8}),
      ("rhs_code_offset must be 0 if", 64, None, {"rhs_code_offset": 8}),
      ("rounding must be 0", 64, mxfp8, {"result_rounding": 2}),
      ("multiple of its block size, got 40", 40, mxfp8, {}),
      ("global_scale must be f32", 64, two_scales, {}),
    ):
      lhs = testing.constant("mxfp8", (1, 4, 32))
      rhs = testing.constant("mxfp8", (1, n, 32))
      with (
        self.subTest(rule),
        self.assertRaisesRegex(testing.HandlerError, rule),
      ):
        testing.call(lhs, rhs, out=out, attributes=attributes)


if __name__ == "__main__":
  absltest.main()
