# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The numbers that `block_scaled_dot` gives, and the oracle of them."""

from __future__ import annotations

import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.core import formats
from jaxplugin.dot import reference
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import dot_cases, dot_rows, suite


@pytest.mark.sample(1)
class XlaDotTest(suite.DotSuite):
  """The xla implementation, over 500 shapes."""

  implementation = "xla"
  cases_per_test = 25


class XlaRowsTest(dot_rows.DotRowsTestCase):
  implementation = "xla"
  in_leg = (
    "mxfp4 blocked along k2, nvfp4 along k1",
    "gelu",
    "bf16 result of a residual",
    "block sizes 32 and 16",
  )


class SuiteTest(parameterized.TestCase):
  """The oracle, the storage and the bounds that the suite uses."""

  def test_sweep_covers_every_kind_and_storage(self):
    cases = [dot_cases.random_case(i) for i in range(500)]
    sides = [side for case in cases for side in (case.lhs, case.rhs)]
    kind = lambda side: (side.dtype, side.format)
    self.assertLen({(kind(c.lhs), kind(c.rhs)) for c in cases}, 40)
    storages = {*contract.STORAGES, *("packed_" + s for s in contract.STORAGES)}
    self.assertEqual({side.storage for side in sides}, storages)
    given = [c for c in cases if c.dimension_numbers is not None]
    self.assertLess(len(given), len(cases))
    num_batch = {len(c.dimension_numbers[1][0]) for c in given}
    self.assertEqual(num_batch | {0}, {0, 1, 2, 3})
    quantized = [s for s in sides if s.format is not None]
    ragged = [s for s in quantized if s.shape[s.axis] % s.format.block_size]
    self.assertGreater(len(ragged), 50)
    contracting = [c.dimension_numbers[0][0] for c in given]
    self.assertGreater(sum(len(d) > 1 for d in contracting), 50)
    self.assertGreater(len({(c.lhs.shape, c.rhs.shape) for c in cases}), 450)
    largest = max(
      np.prod([c.lhs.shape[d] for d in dims])
      for c, dims in zip(given, contracting, strict=True)
    )
    self.assertLessEqual(largest, contract.MAX_EXACT_K)

  @parameterized.product(
    format=formats.FORMATS, axis=(0, 1), size=(96, 80), packed=(False, True)
  )
  def test_oracle_dequantizes_as_ml_dtypes(self, format, axis, size, packed):
    rng = np.random.default_rng(size)
    shape = (size, 6) if axis == 0 else (6, size)
    values = reference.finite_codes(rng, shape, format.values_dtype)
    scale_shape = list(shape)
    scale_shape[axis] = -(-size // format.block_size)
    scale = rng.integers(0, 0x7F, scale_shape, np.uint8)
    scale = scale.view(format.scale_dtype)
    expected = np.empty(shape)
    for where in np.ndindex(shape):
      block = list(where)
      block[axis] //= format.block_size
      expected[where] = float(values[where]) * float(scale[tuple(block)])
    if packed and format.is_fp4:
      values = contract.pack(values, axis)
    actual = reference.oracle_dequantize(values, scale, format, axis=axis)
    np.testing.assert_array_equal(actual, expected)

  def test_bounds_can_fail(self):
    exact = np.full((2, 2), 100.0)
    bound = np.full((2, 2), 1e-5)
    for dtype, ulp in ((contract.F32, 2**-17), (contract.BF16, 0.5)):
      contract.assert_within(exact.astype(dtype), exact, bound, dtype)
      off = exact.copy()
      off[1, 0] += 4 * ulp
      with self.assertRaisesRegex(AssertionError, r"at \(1, 0\).*1 of 4"):
        contract.assert_within(off.astype(dtype), exact, bound, dtype)
    nan = exact.astype(np.float32)
    nan[0, 1] = np.nan
    with self.assertRaisesRegex(AssertionError, r"at \(0, 1\): got nan"):
      contract.assert_within(nan, exact, bound, contract.F32)
    with self.assertRaises(AssertionError):
      contract.assert_exact(exact.astype(np.float32) + 1, exact, contract.F32)
    with self.assertRaisesRegex(AssertionError, "dtype"):
      contract.assert_exact(exact.astype(np.float16), exact, contract.F32)
