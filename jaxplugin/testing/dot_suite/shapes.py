# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suite of the dot: shapes and dimension numbers, from empty to long."""

from __future__ import annotations

import itertools
from typing import Final

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import dot_cases

FORMATS: Final = formats.FORMATS
NUM_FUZZ_TESTS: Final = dot_cases.NUM_FUZZ_TESTS


class DotShapesTestCase(dot_cases.DotTestCase):
  """Calls of any shape are exact on integers, and within the bound."""

  @parameterized.parameters(range(NUM_FUZZ_TESTS))
  def test_fuzzed_shapes_are_exact_on_integers_and_bounded_otherwise(
    self, chunk
  ):
    for i in range(self.cases_per_test):
      index = chunk + i * NUM_FUZZ_TESTS
      case = dot_cases.random_case(index, self.kinds)
      with self.subTest(f"random_case({index})", case=case):
        self._check_case(case, np.random.default_rng(index))

  def _check_case(
    self, case: dot_cases.DotCase, rng: np.random.Generator
  ) -> None:
    for integers in (True, False):
      lhs = contract.make_operand(rng, case.lhs, integers=integers)
      rhs = contract.make_operand(rng, case.rhs, integers=integers)
      expected = contract.dot(lhs.exact, rhs.exact, case.dimension_numbers)
      dtype = case.dtype
      if not integers and dtype == contract.F16:
        dtype = contract.BF16  # f16 does not have the range
      actual = self.call(
        lhs,
        rhs,
        dimension_numbers=case.dimension_numbers,
        block_size=case.block_size,
        preferred_element_type=dtype,
      )
      contract.assert_dot(actual, *expected, dtype, integers=integers)

  @parameterized.product(
    lhs_order=tuple(itertools.permutations(range(3))),
    rhs_order=tuple(itertools.permutations(range(3))),
  )
  def test_every_dimension_order_is_exact(self, lhs_order, rhs_order):
    rng = np.random.default_rng(0)
    made, dims = [], []
    for rows, order in ((3, lhs_order), (5, rhs_order)):
      sizes = (2, rows, 64)  # batch, row, contracting
      batch, _, contracting = (order.index(d) for d in range(3))
      dims.append((batch, contracting))
      shape = (sizes[d] for d in order)
      case = contract.operand_case(jp.MXFP8, *shape, axis=contracting)
      made.append(contract.make_operand(rng, case, integers=True))
    (lhs_batch, lhs_k), (rhs_batch, rhs_k) = dims
    numbers = (((lhs_k,), (rhs_k,)), ((lhs_batch,), (rhs_batch,)))
    actual = self.call(*made, dimension_numbers=numbers)
    expected = contract.dot(made[0].exact, made[1].exact, numbers)
    contract.assert_dot(actual, *expected, integers=True)

  @parameterized.product(
    pair=(
      (jp.MXFP8, jp.MXFP8),
      (jp.MXFP4, contract.BF16),
      (jp.NVFP4, jp.NVFP4),
    ),
    sizes=((1, 33, 4096), (17, 33, 4096), (70, 130, 1056)),
  )
  def test_long_sums_stay_within_the_bound(self, pair, sizes):
    # Past the tiles of any kernel, and with sums that cancel.
    m, n, k = sizes
    rng = np.random.default_rng(k)
    lhs = self.operand(rng, pair[0], (m, k), integers=False)
    rhs = self.operand(rng, pair[1], (n, k), integers=False)
    expected = contract.dot(lhs.exact, rhs.exact)
    contract.assert_dot(self.call(lhs, rhs), *expected)

  @parameterized.parameters(
    (jp.MXFP8, jp.MXFP8), (jp.MXFP4, jp.MXFP8), (jp.MXFP8, jp.MXFP4)
  )
  def test_short_block_is_not_continued_by_another_contracting_dimension(
    self, *pair
  ):
    rng = np.random.default_rng(0)
    sides = []
    for format, rows in zip(pair, (3, 5), strict=True):
      case = contract.operand_case(format, rows, 6, 20)
      sides.append(contract.make_operand(rng, case, integers=True))
    numbers = (((1, 2), (1, 2)), ((), ()))
    actual = self.call(*sides, dimension_numbers=numbers, block_size=32)
    exact, _ = contract.dot(sides[0].exact, sides[1].exact, numbers)
    contract.assert_exact(actual, exact, contract.F32)

  @parameterized.product(
    kind=(
      *((jp.MXFP8, "raw"), (jp.MXFP4, "raw"), (jp.MXFP4, "packed_raw")),
      (jp.NVFP4, "packed_scaled_array"),
    ),
    shape=((64, 1), (3, 64, 1)),
  )
  def test_dimensions_of_size_1_may_follow_k(self, kind, shape):
    format, storage = kind
    axis = max(range(len(shape)), key=lambda d: shape[d])
    rng = np.random.default_rng(0)
    case = contract.operand_case(format, *shape, axis=axis, storage=storage)
    rhs = contract.make_operand(rng, case, integers=True)
    lhs = self.operand(rng, contract.BF16, (4, shape[axis]))
    numbers = (((1,), (axis,)), ((), ()))
    actual = self.call(lhs, rhs, dimension_numbers=numbers)
    exact, _ = contract.dot(lhs.exact, rhs.exact, numbers)
    contract.assert_exact(actual, exact, contract.F32)

  @parameterized.product(format=FORMATS, k=(1, 17, 47, 95))
  def test_last_block_may_be_short_where_block_size_is_given(self, format, k):
    rng = np.random.default_rng(k)
    lhs = self.operand(rng, format, (3, k), storage="padded")
    rhs = self.operand(rng, format, (5, k))
    actual = self.call(lhs, rhs, block_size=format.block_size)
    expected = contract.dot(lhs.exact, rhs.exact)
    contract.assert_dot(actual, *expected, integers=True)

  @parameterized.product(
    storage=(
      (jp.MXFP8, "raw"),
      (jp.MXFP8_E5M2, "swizzled"),
      (jp.MXFP4, "packed_raw"),
      (jp.NVFP4, "scaled_array"),
    ),
    empty=("batch", "m", "n", "k", "all"),
  )
  def test_empty_dimensions_give_empty_or_zero_results(self, storage, empty):
    format, storage = storage
    sizes = {"batch": 2, "m": 3, "n": 5, "k": 32}
    for name in sizes if empty == "all" else (empty,):
      sizes[name] = 0
    rng = np.random.default_rng(0)
    batch, m, n, k = sizes.values()
    lhs = self.operand(rng, format, (batch, m, k), storage=storage)
    rhs = self.operand(rng, format, (batch, n, k), storage=storage)
    plain = self.call(lhs, rhs)
    exact, _ = contract.dot(lhs.exact, rhs.exact)
    contract.assert_exact(plain, exact, contract.F32)
    bias = np.arange(n).astype(np.float32)
    residual = rng.integers(-9, 9, (batch, m, n)).astype(np.float32)
    options = {"bias": jnp.asarray(bias), "residual": jnp.asarray(residual)}
    options |= {"global_scale": 2.0, "preferred_element_type": jnp.bfloat16}
    actual = self.call(lhs, rhs, **options)
    contract.assert_exact(actual, 2 * exact + bias + residual, contract.BF16)
