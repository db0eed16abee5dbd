# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dots of weights with zero points or minima are within the bound of a dot."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys

import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

CODE_OFFSET = 8
FLOATS = (np.float32, testing.BF16, np.float16)
OFFSETS = (np.uint8, np.int8, *FLOATS)
SIZES = (  # m, n, k, block
  (1, 5, 32, 32),
  (1, 70, 1000, 32),
  (2, 6, 800, 32),
  (3, 2, 33, 128),
  (2, 300, 4096, 16),
  (7, 9, 300, 300),
  (33, 130, 96, 32),
  (5, 700, 64, 32),
  (3, 70, 2048, 1024),
  (2, 70, 576, 32),
)


@dataclasses.dataclass(frozen=True)
class Case:
  """Rows, weights, and the offsets of the weights' blocks."""

  x: testing.Side
  w: testing.Side
  offset: np.ndarray

  def call(self, **options):
    return testing.call(self.x, self.w, **self._options(options))

  def ragged(self, sizes, **options):
    """Returns the dot of groups of rows; w has a matrix for each group."""
    return testing.ragged_dot(
      *(self.x.values[0], None, self.w.values, self.w.scale),
      np.asarray(sizes, np.int32),
      **testing.operand(self.x, "lhs_"),
      **testing.operand(self.w, "rhs_"),
      **self._options(options),
    )

  def _options(self, options):
    attributes = {"rhs_code_offset": CODE_OFFSET}
    return {"rhs_offset": self.offset, "attributes": attributes} | options

  def exact(self):
    """Returns the dot in f64, and the magnitude of its products."""
    with np.errstate(invalid="ignore"):
      scale = self.w.scale.astype(np.float64)
      offset = self.offset.astype(np.float64)
      if self.offset.dtype.kind in "iu":
        terms = (CODE_OFFSET - offset) * scale
        sizes = np.abs(terms)
      else:
        terms = CODE_OFFSET * scale + offset
        sizes = np.abs(CODE_OFFSET * scale) + np.abs(offset)
      terms, sizes = (
        np.repeat(a, self.w.block, axis=-1)[..., : self.w.exact.shape[-1]]
        for a in (terms, sizes)
      )
      turned = lambda a: np.swapaxes(a, -1, -2)
      return (
        self.x.exact @ turned(self.w.exact + terms),
        np.abs(self.x.exact) @ turned(np.abs(self.w.exact) + sizes),
      )

  def assert_within(self, found, rows=slice(None)):
    """Checks a result, or the dot by each instruction set."""
    exact, magnitude = self.exact()
    limit = testing.DOT_ERROR * magnitude[..., rows, :] + 1e-30
    for name, y in found.items() if isinstance(found, dict) else [("", found)]:
      error = np.abs(np.asarray(y, np.float64) - exact)[..., rows, :]
      np.testing.assert_array_less(error, limit, name)

  def results(self):
    """Returns the dot by each instruction set of this machine."""
    return {isa: self.call(isa=isa) for isa in testing.ISAS}


def random(
  m,
  n,
  k,
  block,
  kinds=(np.float32,) * 3,
  seed=0,
  groups=1,
  x_format=None,
  factor=1.0,
):
  """Returns rows [1, m, k] and weights [groups, n, k].

  Rows with scales are multiplied by the factor; otherwise the weights are.
  """
  rng = np.random.default_rng(seed)
  x_kind, scale_kind, offset_kind = kinds
  scales = (groups, n, -(-k // block))
  offset = rng.normal(size=scales)
  if np.dtype(offset_kind).kind in "iu":
    offset = rng.integers(0, 100, scales)
  x_format = x_format or (x_kind, None, 32)
  x_scale = rng.uniform(0.5, 1, (1, m, -(-k // x_format[2]))) * factor
  values = rng.normal(size=(1, m, k)) * (1 if x_format[1] is None else 40)
  return Case(
    testing.Side(x_format, values, x_scale),
    testing.Side(
      (np.int8, scale_kind, block),
      rng.integers(-8, 8, (groups, n, k)),
      rng.normal(size=scales) * (1 if x_format else factor),
    ),
    offset.astype(offset_kind),
  )


class OffsetsTest(parameterized.TestCase):
  def test_dots_are_within_the_bound(self):
    all_kinds = [
      *itertools.product(FLOATS, FLOATS, OFFSETS),
      *itertools.repeat((testing.BF16, np.float16, np.float16), len(SIZES)),
    ]
    for kinds, sizes in zip(all_kinds, itertools.cycle(SIZES), strict=False):
      case = random(*sizes, kinds, seed=sizes[2])
      with self.subTest(kinds=kinds, sizes=sizes):
        case.assert_within(case.results())

  @parameterized.product(k=(4096, 65536), block=(32, 4096, 65536))
  def test_sums_of_equal_numbers_are_within_the_bound(self, k, block):
    scales = (1, 6, -(-k // block))
    case = Case(
      testing.Side((np.float32, None, 32), np.full((1, 1, k), 0.1), None),
      testing.Side(
        (np.int8, np.float32, min(block, k)),
        np.zeros((1, 6, k)),
        np.ones(scales),
      ),
      np.full(scales, 0.3, np.float32),
    )
    case.assert_within(case.results())

  def test_integers_are_exact(self):
    rng = np.random.default_rng(1)
    for m, n, k, block in SIZES:
      scales = (1, n, -(-k // block))
      case = Case(
        testing.Side(
          (testing.BF16, None, 32), rng.integers(-4, 5, (1, m, k)), None
        ),
        testing.Side(
          (np.int8, np.float16, block),
          rng.integers(-8, 8, (1, n, k)),
          np.exp2(rng.integers(-2, 3, scales)),
        ),
        rng.integers(0, 16, scales).astype(np.uint8),
      )
      exact, _ = case.exact()
      for isa, found in case.results().items():
        np.testing.assert_array_equal(found, exact, isa)

  @parameterized.parameters(1, 3, 40)
  def test_rows_may_be_quantized(self, m):
    case = random(m, 70, 320, 32, x_format=(np.int8, np.float32, 32))
    case.assert_within(case.results())

  @parameterized.parameters(1, 9)
  def test_scales_may_be_far_from_one(self, m):
    floats, half = (np.float32,) * 3, (np.float32, np.float16, np.float16)
    for kinds, x_format, factor in (
      ((testing.BF16, *floats[1:]), None, 2.0**60),
      ((testing.BF16, *floats[1:]), None, 2.0**-60),
      (half, (testing.E4M3, np.float32, 32), 2.0**60),
    ):
      with self.subTest(kinds=kinds, factor=factor):
        case = random(
          *(m, 70, 1100, 32, kinds), x_format=x_format, factor=factor
        )
        case.assert_within(case.results())

  @parameterized.parameters(*testing.ISAS)
  def test_threads_change_no_bits_beside_a_large_scale(self, isa):
    kinds = (testing.BF16, np.float32, np.float32)
    case = random(4, 6000, 1024, 32, kinds)
    case.w.scale[0, 3] *= 2.0**60
    one, two = (
      case.ragged(
        [4],
        isa=isa,
        attributes={"rhs_code_offset": CODE_OFFSET, "max_threads": threads},
      )
      for threads in (1, 2)
    )
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, case.call(isa=isa)[0])

  @parameterized.product(isa=testing.ISAS, sizes=((1, 0, 2), (0, 40, 5)))
  def test_groups_have_the_offsets_of_their_weights(self, isa, sizes):
    case = random(sum(sizes) + 1, 800, 96, 32, groups=3)
    found = case.ragged(sizes, isa=isa)
    ends = np.cumsum(sizes)
    exact, magnitude = case.exact()
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
      error = np.abs(found[start:end] - exact[group, start:end])
      limit = testing.DOT_ERROR * magnitude[group, start:end] + 1e-30
      np.testing.assert_array_less(error, limit)
    np.testing.assert_array_equal(found[ends[-1] :], 0)

  @parameterized.product(isa=testing.ISAS, block=(0, 3, 6))
  def test_only_the_row_and_column_of_a_nan_are_nan(self, isa, block):
    case = random(3, 20, 200, 32)
    case.x.values[0, 1, 7], case.offset[0, 4, block] = np.nan, np.inf
    expected = np.ones((1, 3, 20), bool)
    expected[0, 1], expected[0, :, 4] = False, False
    np.testing.assert_array_equal(np.isfinite(case.call(isa=isa)), expected)

  def test_bad_arguments_are_errors(self):
    case = random(2, 5, 64, 32)
    bf16 = case.offset.astype(testing.BF16)
    for changed, message in (
      ({"rhs_offset": case.offset[:, :4]}, "with the shape of rhs_scale"),
      ({"rhs_offset": case.offset.astype(np.int32)}, "rhs_offset must be u8"),
      ({"bias": np.zeros(5, np.float32)}, "without an epilogue if rhs has"),
      ({"global_scale": np.ones((), np.float32)}, "got an epilogue"),
      ({"attributes": {"activation": 1}}, "got an activation"),
      ({"dtype": testing.BF16}, "must be f32 without an epilogue"),
    ):
      with self.subTest(message), self.assertRaisesRegex(Exception, message):
        case.call(**changed)
    sizes = np.array([1], np.int32)
    with self.assertRaisesRegex(Exception, "must be f32 without an epilogue"):
      case.ragged(sizes, attributes={"activation": 1})
    case.ragged(sizes, rhs_offset=bf16)
    batched = random(2, 5, 64, 32, groups=2)
    with self.assertRaisesRegex(Exception, "rhs must have batch 1"):
      testing.dot(
        *(np.repeat(batched.x.values, 2, 0), None),
        *(batched.w.values, batched.w.scale),
        lhs_block_size=32,
        rhs_block_size=32,
        rhs_offset=batched.offset,
      )
    e8m0 = testing.gaussians("mxfp8", (1, 5, 64), np.random.default_rng(0))
    with self.assertRaisesRegex(Exception, "rhs_scale must be f32, bf16 or"):
      testing.call(case.x, e8m0, rhs_offset=case.offset)
    case = random(2, 5, 96, 48)
    codebook = testing.Side(
      "codebook_48", np.zeros((1, 5, 96)), np.ones((1, 5, 2))
    )
    with self.assertRaisesRegex(Exception, "rhs must have no codebook if it"):
      testing.call(case.x, codebook, rhs_offset=case.offset)


if __name__ == "__main__":
  absltest.main()
