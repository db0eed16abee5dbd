# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every implementation of the ragged contraction must do, as a suite.

A test file of an implementation subclasses `ContractionSuite` and sets its
name. The oracle is NumPy in f64, a loop over groups.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import ragged_suite

_SIZES_OF_EACH: Final = 10

# (lhs, rhs, groups, m, n, k): every format; pairs, mixed, one-sided and plain;
# n and k with tails of every kernel's tiles; fewer rows than groups, and many
# more.
FUZZED: Final = (
  (jp.MXFP8, jp.MXFP8, 5, 96, 48, 33),
  (jp.MXFP8_E5M2, contract.F32, 4, 32, 17, 64),
  (jp.MXFP4, jp.MXFP4, 3, 160, 30, 18),
  (contract.BF16, jp.MXFP4, 40, 64, 24, 40),
  (jp.NVFP4, jp.NVFP4, 7, 80, 36, 20),
  (jp.NVFP4, contract.F16, 2, 16, 12, 50),
  (jp.NVFP4, jp.MXFP8, 6, 320, 34, 16),
  (jp.MXFP6_E2M3, jp.MXFP6_E3M2, 3, 64, 18, 22),
  (contract.F32, contract.F32, 4, 301, 12, 9),
)

NUMBERS: Final = jax.lax.RaggedDotDimensionNumbers(
  (((0,), (0,)), ((), ())), (0,), ()
)


def oracle(
  lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """f64 sums by groups, and the same of magnitudes."""
  of_row = ragged_suite.group_of_rows(sizes, len(lhs))
  shape = (2, len(sizes), lhs.shape[1], rhs.shape[1])
  result, magnitude = np.zeros(shape)
  for group in range(len(sizes)):
    own = of_row == group
    result[group] = lhs[own].T @ rhs[own]
    magnitude[group] = np.abs(lhs[own]).T @ np.abs(rhs[own])
  return result, magnitude


class ContractionSuite(parameterized.TestCase):
  """The numerical contract of one implementation.

  Attributes:
    implementation: its name.
  """

  implementation = ""

  def setUp(self):
    super().setUp()
    if type(self) is ContractionSuite:
      self.skipTest("the suite itself")

  def contract(self, *args: Any, **options: Any) -> jax.Array:
    return jp.ragged_dot_general(
      *args, NUMBERS, implementation=self.implementation, **options
    )

  @parameterized.parameters(*enumerate(FUZZED))
  def test_fuzzed_sizes(self, seed, case):
    lhs_format, rhs_format, groups, m, n, k = case
    rng = np.random.default_rng(seed)
    dtype = contract.RESULT_DTYPES[seed % 3]
    # One program for all: both kinds of data, and every kind of sizes. Groups
    # begin anywhere, also inside of blocks.
    function = jax.jit(
      functools.partial(self.contract, preferred_element_type=dtype)
    )
    for integers in (True, False):
      if dtype == contract.F16 and not integers:
        continue  # scales of 2^30 overflow it
      made = functools.partial(
        ragged_suite.operand, rng, axis=0, integers=integers
      )
      lhs, exact_lhs = made(lhs_format, (m, n))
      rhs, exact_rhs = made(rhs_format, (m, k))
      for kind in range(_SIZES_OF_EACH):
        sizes = ragged_suite.random_sizes(rng, groups, m, kind)
        actual = function(lhs, rhs, sizes)
        expected = oracle(exact_lhs, exact_rhs, sizes)
        contract.assert_dot(actual, *expected, dtype, integers=integers)

  @parameterized.parameters(0, 2, 3, -1)
  def test_rows_of_others_do_not_leak(self, own):
    # NaN in every row that a group must not see, whatever the other side has.
    rng = np.random.default_rng(own + 1)
    m, n, k = 45, 6, 10
    lhs = rng.integers(-8, 9, (m, n)).astype(np.float32)
    rhs = rng.integers(-8, 9, (m, k)).astype(np.float32)
    sizes = np.array([13, 0, 9, 18], np.int32)
    expected, _ = oracle(lhs, rhs, sizes)
    others = (ragged_suite.group_of_rows(sizes, m) != own)[:, None]
    for poison in (np.nan, np.inf):
      for places in ((True, False), (False, True), (True, True)):
        poisoned = [
          np.where(others & place, np.float32(poison), x)
          for x, place in zip((lhs, rhs), places, strict=True)
        ]
        actual = np.asarray(self.contract(*poisoned, sizes))
        groups = [own] if own >= 0 else [1]  # the empty one
        contract.assert_exact(actual[groups], expected[groups], contract.F32)

  @parameterized.parameters(jp.MXFP8, jp.MXFP4, jp.NVFP4)
  def test_nan_in_a_block_of_its_own_stays_in_its_group(self, format):
    rng = np.random.default_rng(0)
    size = format.block_size
    lhs, exact_lhs = ragged_suite.operand(
      rng, format, (4 * size, 8), axis=0, integers=True
    )
    rhs, exact_rhs = ragged_suite.operand(
      rng, format, (4 * size, 12), axis=0, integers=True
    )
    nan = 0xFF if format.scale_is_power_of_two else 0x7F
    scale = np.asarray(lhs.scale).view(np.uint8).copy()
    scale[[1, 3]] = nan  # of group 1, and of no group
    scale = jnp.asarray(scale.view(lhs.scale.dtype))
    lhs = jp.ScaledArray(lhs.values, scale, lhs.global_scale, format)
    sizes = np.array([size, size, size - 5], np.int32)
    actual = np.asarray(self.contract(lhs, rhs, sizes))
    expected, _ = oracle(exact_lhs, exact_rhs, sizes)
    contract.assert_exact(actual[[0, 2]], expected[[0, 2]], contract.F32)
    self.assertTrue(np.isnan(actual[1]).all())

  @parameterized.parameters(
    ([9, 0, 0], [6, 0, 0]), ([2, 9, 1], [2, 4, 0]), ([2, -3, 2], [2, 0, 2])
  )
  def test_sizes_that_do_not_fit_end_with_the_rows(self, given, meant):
    rng = np.random.default_rng(2)
    lhs, rhs = rng.integers(-8, 9, (2, 6, 4)).astype(np.float32)
    expected, _ = oracle(lhs, rhs, np.array(meant))
    actual = self.contract(lhs, rhs, np.array(given, np.int32))
    contract.assert_exact(actual, expected, contract.F32)

  @parameterized.parameters(
    ((1, 1), (1, 1)), ((1, 7), (1, 1)), ((1, 7), (1, 5))
  )
  def test_global_scales_multiply_whatever_they_vary_over(self, of_lhs, of_rhs):
    rng = np.random.default_rng(4)
    made = functools.partial(
      ragged_suite.operand, rng, jp.NVFP4, axis=0, integers=True
    )
    lhs, exact_lhs = made((32, 7))
    rhs, exact_rhs = made((32, 5))
    of_lhs = np.exp2(rng.integers(-60, 60, of_lhs)).astype(np.float32)
    of_rhs = np.exp2(rng.integers(-60, 60, of_rhs)).astype(np.float32)
    lhs = jp.ScaledArray(lhs.values, lhs.scale, of_lhs, jp.NVFP4)
    rhs = jp.ScaledArray(rhs.values, rhs.scale, of_rhs, jp.NVFP4)
    sizes = np.array([11, 0, 18], np.int32)
    exact, _ = oracle(
      exact_lhs * of_lhs.astype(np.float64),
      exact_rhs * of_rhs.astype(np.float64),
      sizes,
    )
    actual = self.contract(lhs, rhs, sizes)
    contract.assert_exact(actual, exact, contract.F32)

  @parameterized.parameters((0, 8, 4), (32, 0, 4), (32, 8, 0))
  def test_empty(self, m, n, k):
    values = jnp.zeros((m, n), jnp.float8_e4m3fn)
    scale = jnp.zeros((m // 32, n), jnp.float8_e8m0fnu)
    lhs = jp.ScaledArray(values, scale, None, jp.MXFP8)
    actual = self.contract(lhs, jnp.zeros((m, k)), jnp.array([m, 0]))
    np.testing.assert_array_equal(actual, np.zeros((2, n, k), np.float32))

  @parameterized.parameters(jp.MXFP8, jp.MXFP4, jp.NVFP4)
  def test_bytes_are_the_same_array(self, format):
    rng = np.random.default_rng(5)
    lhs = jp.quantize(rng.normal(size=(64, 12)), format, axis=0)
    rhs = rng.normal(size=(64, 10)).astype(np.float32)
    sizes = np.array([30, 20], np.int32)
    np.testing.assert_array_equal(
      self.contract(lhs.to_bytes(), rhs, sizes), self.contract(lhs, rhs, sizes)
    )

  def test_format_codes_are_read_as_they_are(self):
    # A code that is read wrongly errs by more than rounding. This tests all
    # codes.
    for format in (jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP4, jp.NVFP4):
      rng = np.random.default_rng(6)
      lhs, exact = ragged_suite.operand(
        rng, format, (64, 16), axis=0, integers=False
      )
      one = np.zeros((64, 64), np.float32)
      np.fill_diagonal(one, 1)
      sizes = np.array([40, 24], np.int32)
      actual = np.asarray(self.contract(lhs, one, sizes), np.float64)
      expected, _ = oracle(exact, one.astype(np.float64), sizes)
      np.testing.assert_array_equal(actual, expected.astype(np.float32))
