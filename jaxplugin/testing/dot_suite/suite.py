# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every implementation of the dot must do, as one suite of tests.

A test file of an implementation subclasses `DotSuite`:

  class CpuDotTest(suite.DotSuite):
    implementation = "cpu"

`dot_cases.DotTestCase` has the attributes that such a class may set.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.dot import reference
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import dot_cases, epilogue

FORMATS: Final = formats.FORMATS
NUM_FUZZ_TESTS: Final = dot_cases.NUM_FUZZ_TESTS


class DotShapesTestCase(dot_cases.DotTestCase):
  """Calls of any shape are exact on integers, and within the bound."""

  @parameterized.parameters(range(NUM_FUZZ_TESTS))
  def test_fuzzed_shapes_are_exact_on_integers_and_bounded_otherwise(
    self, chunk
  ):
    kinds = True, False  # whether the numbers are integers
    functions, arguments, made = {}, ({}, {}), ({}, {})
    for i in range(self.cases_per_test):
      index = chunk + i * NUM_FUZZ_TESTS
      case = dot_cases.random_case(index, self.kinds)
      rng = np.random.default_rng(index)
      name = f"random_case({index}): {case}"
      functions[name] = functools.partial(
        self.dot,
        dimension_numbers=case.dimension_numbers,
        block_size=case.block_size,
        preferred_element_type=case.dtype,
      )
      for integers, args, numbers in zip(kinds, arguments, made, strict=True):
        lhs = contract.make_operand(rng, case.lhs, integers=integers)
        rhs = contract.make_operand(rng, case.rhs, integers=integers)
        args[name] = lhs.operand, rhs.operand, lhs.scale, rhs.scale
        exact = contract.dot(lhs.exact, rhs.exact, case.dimension_numbers)
        numbers[name] = *exact, case.dtype
    results = self.results_of(functions, *arguments)
    for integers, found, numbers in zip(kinds, results, made, strict=True):
      for name, actual in found.items():
        exact, magnitude, dtype = numbers[name]
        if not integers and dtype == contract.F16:  # it lacks the range
          largest = np.finfo(dtype).max
          actual, exact = (
            np.clip(x, -largest, largest) for x in (actual, exact)
          )
        with self.subTest(name, integers=integers):
          contract.assert_dot(
            actual, exact, magnitude, dtype, integers=integers
          )

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
    self.check_dot(*made, dimension_numbers=numbers)

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
    self.check_dot(lhs, rhs, integers=False)

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
    self.check_dot(*sides, dimension_numbers=numbers, block_size=32)

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
    self.check_dot(lhs, rhs, dimension_numbers=(((1,), (axis,)), ((), ())))

  @parameterized.product(format=FORMATS, k=(1, 17, 47, 95))
  def test_last_block_may_be_short_where_block_size_is_given(self, format, k):
    rng = np.random.default_rng(k)
    lhs = self.operand(rng, format, (3, k), storage="padded")
    rhs = self.operand(rng, format, (5, k))
    self.check_dot(lhs, rhs, block_size=format.block_size)

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
    options = {
      "bias": jax.device_put(bias),
      "residual": jax.device_put(residual),
    }
    options |= {"global_scale": 2.0, "preferred_element_type": jnp.bfloat16}
    actual = self.call(lhs, rhs, **options)
    contract.assert_exact(actual, 2 * exact + bias + residual, contract.BF16)


class DotValuesTestCase(dot_cases.DotTestCase):
  """Special values reach what they multiply, and every scale counts."""

  @parameterized.product(format=FORMATS, side=("lhs", "rhs"), value=(0.0, 1.0))
  def test_block_under_a_nan_scale_is_nan_in_its_row_alone(
    self, format, side, value
  ):
    # Zeros too. A scale that became Inf would pass with zeros, and one that
    # became finite with ones. NaNs of E4M3 have either sign.
    rng = np.random.default_rng(0)
    made = self.operand(rng, format, (5, 96))
    other = self.operand(rng, format, (4, 96))
    if value:  # of one sign, so that Inf would stay Inf
      positive = np.ones((4, 96), format.values_dtype)
      other = dataclasses.replace(
        other,
        operand=jax.device_put(positive),
        exact=reference.oracle_dequantize(
          positive, np.asarray(other.scale), format
        ),
      )
    values = np.asarray(made.operand).copy()
    scale = np.asarray(made.scale).copy()
    block = format.block_size
    values[3, block : 2 * block] = value
    is_negative = side == "rhs" or format.scale_is_power_of_two
    scale.view(np.uint8)[3, 1] = 0xFF if is_negative else 0x7F
    operands = [
      (jax.device_put(values), other.operand),
      (jax.device_put(scale), other.scale),
    ]
    exact = [reference.oracle_dequantize(values, scale, format), other.exact]
    if side == "rhs":
      operands = [pair[::-1] for pair in operands]
      exact.reverse()
    actual = self.dot(*operands[0], *operands[1])
    expected, _ = contract.dot(*exact)
    nans = np.isnan(np.asarray(actual))
    nans = nans if side == "lhs" else nans.T
    row = np.zeros((5, 4), bool)
    row[3] = True
    np.testing.assert_array_equal(nans, row)
    contract.assert_exact(actual, expected, contract.F32)

  @parameterized.product(
    special=(
      *((jp.MXFP8_E5M2, code) for code in (0x7E, 0x7C, 0xFC)),
      *((jp.MXFP8, code) for code in (0x7F, 0xFF)),
    ),
    side=("lhs", "rhs"),
  )
  def test_codes_of_nan_and_inf_propagate(self, special, side):
    rng = np.random.default_rng(0)
    format, code = special
    made = self.operand(rng, format, (3, 32))
    other = self.operand(rng, jp.MXFP4, (7, 32))
    values = np.asarray(made.operand).copy()
    values.view(np.uint8)[1, 5] = code
    exact = reference.oracle_dequantize(values, np.asarray(made.scale), format)
    made = dataclasses.replace(
      made, operand=jax.device_put(values), exact=exact
    )
    self.check_dot(*((made, other) if side == "lhs" else (other, made)))

  @parameterized.product(lhs=FORMATS[:3], rhs=FORMATS[:3])
  def test_every_e8m0_scale_counts(self, lhs, rhs):
    # Row b of lhs has scale 2^(b - 127), row b of rhs the reciprocal, so the
    # diagonal of the product is exact. Byte 0 is 2^-127, an f32 subnormal: its
    # values are 2 where they might be flushed.
    code = np.arange(255, dtype=np.uint8)
    smallest = 1.0 if self.exact_beyond_f32 else 2.0
    rows = []
    for format, codes in ((lhs, code), (rhs, 254 - code)):
      values = np.where(codes == 0, smallest, 1.0)[:, None] * np.ones((1, 32))
      scale = codes[:, None].copy().view(formats.E8M0)
      rows += [values.astype(format.values_dtype), scale]
    lhs_values, lhs_scale, rhs_values, rhs_scale = map(jax.device_put, rows)
    args = lhs_values, rhs_values, lhs_scale, rhs_scale
    expected = np.full(255, 32.0)
    expected[[0, 254]] = 32 * smallest
    actual = np.diagonal(np.asarray(self.dot(*args)))
    np.testing.assert_array_equal(actual, expected)
    if self.exact_beyond_f32:  # one row at a time
      actual = self.dot(*(x[:, None] for x in args))[:, 0, 0]
      np.testing.assert_array_equal(actual, expected)

  @parameterized.parameters(*FORMATS[:3])
  def test_largest_and_smallest_scale_bytes_are_exact_in_normal_range(
    self, format
  ):
    # Against a plain f32 identity, so each result is one dequantized value.
    codes = np.arange(16 if format.is_fp4 else 256, dtype=np.uint8)
    values = np.tile(codes.view(format.values_dtype)[:, None], (1, 32))
    for byte in (0, 1, 2, 253, 254):
      scale = np.full((len(codes), 1), byte, np.uint8).view(formats.E8M0)
      actual = np.asarray(
        self.dot(
          jax.device_put(values),
          jax.device_put(np.eye(1, 32, dtype=np.float32)),
          jax.device_put(scale),
        )
      )[:, 0].astype(np.float64)
      exact = reference.oracle_dequantize(values, scale, format)[:, 0]
      f32 = np.finfo(np.float32)
      magnitude = np.abs(exact)
      in_range = (exact == 0) | (magnitude >= float(f32.tiny))
      in_range &= magnitude <= float(f32.max)
      # 0 * Inf and 0 * NaN of the identity's zeros make the rest NaN.
      in_range |= np.isnan(exact)
      np.testing.assert_array_equal(actual[in_range], exact[in_range])
      small = ~in_range & (magnitude < 1)
      error = np.abs(actual - exact)
      flushed = (actual == 0) | (error <= self.subnormal_spacing / 2)
      self.assertTrue(flushed[small].all(), "below 2^-126: exact or 0")
      large = ~in_range & (magnitude > 1) & np.isfinite(exact)
      self.assertTrue((~np.isfinite(actual[large])).all(), "above: Inf or NaN")

  def test_values_beyond_f32_are_exact_where_promised(self):
    if not self.exact_beyond_f32:
      self.skipTest("this implementation leaves them to the platform")
    code = np.arange(255, dtype=np.uint8)
    values = np.full((255, 32), 448, formats.E4M3)
    scale = code[:, None].copy().view(formats.E8M0)
    back = code[::-1, None].copy().view(formats.E8M0)
    actual = self.dot(*map(jax.device_put, (values, values, scale, back)))
    np.testing.assert_array_equal(
      np.diagonal(np.asarray(actual)), np.full(255, 448.0 * 448 * 32)
    )


def same_bits(x: Any, y: Any) -> bool:
  x, y = np.asarray(x), np.asarray(y)
  return (
    x.dtype == y.dtype and x.shape == y.shape and (x.tobytes() == y.tobytes())
  )


class DotBitsTestCase(dot_cases.DotTestCase):
  """The same operands give the same bits, however and whenever they come."""

  @parameterized.product(format=FORMATS, k=(64, 50))
  def test_garbage_in_scale_padding_changes_no_bit(self, format, k):
    rng = np.random.default_rng(k)
    lhs = self.operand(rng, format, (2, 5, k), integers=False)
    rhs = self.operand(rng, format, (2, 7, k), integers=False)
    block = format.block_size
    clean = self.call(lhs, rhs, block_size=block)
    self.assertTrue(np.isfinite(clean).all())
    # 0xB8 is -1 as E4M3. Only a scale of values must not be negative.
    for code in (0xFF, 0x7F, 0x00, 0x7E, 0xB8):
      widths = ((0, 0), (0, 3), (0, 2))
      poisoned = [
        jax.device_put(
          np.pad(
            np.asarray(x.scale).view(np.uint8), widths, constant_values=code
          ).view(format.scale_dtype)
        )
        for x in (lhs, rhs)
      ]
      padded = self.dot(lhs.operand, rhs.operand, *poisoned, block_size=block)
      self.assertTrue(same_bits(clean, padded), f"padding with {code:#x}")

  @parameterized.product(format=FORMATS, storage=("scaled_array", "swizzled"))
  def test_storage_changes_no_bit(self, format, storage):
    rows = 130  # more than a tile of the swizzled layout, as 5 columns are
    shape = (rows, 5 * 32)
    rng = np.random.default_rng(rows)
    raw = self.operand(rng, format, shape, integers=False)
    other = self.operand(
      np.random.default_rng(rows),
      format,
      shape,
      integers=False,
      storage=storage,
    )
    rhs = self.operand(rng, format, (3, 160), integers=False)
    expected = self.call(raw, rhs)
    self.assertTrue(same_bits(expected, self.call(other, rhs)))
    if format.is_fp4:
      packed = self.operand(
        np.random.default_rng(rows),
        format,
        shape,
        integers=False,
        storage=f"packed_{storage}",
      )
      self.assertTrue(same_bits(expected, self.call(packed, rhs)))

  @parameterized.parameters(
    (jp.MXFP8, jp.MXFP8),
    (jp.MXFP4, jp.MXFP8_E5M2),
    (jp.MXFP8, jp.NVFP4),
    (jp.NVFP4, jp.NVFP4),
  )
  def test_scales_folded_as_constants_change_no_bit(self, lhs, rhs):
    # XLA may fold constant scales together; byte 0 must survive it.
    rng = np.random.default_rng(0)
    x = self.operand(rng, lhs, (4, 32))
    w = self.operand(rng, rhs, (4, 32))
    x_scale, w_scale = np.asarray(x.scale).copy(), np.asarray(w.scale).copy()
    x_values, w_values = x.operand, w.operand
    if lhs.scale_is_power_of_two and rhs.scale_is_power_of_two:
      x_scale.view(np.uint8)[...] = 0
      w_scale.view(np.uint8)[...] = 254
      x_values = jnp.full((4, 32), 2, lhs.values_dtype)
      w_values = jnp.ones((4, 32), rhs.values_dtype)
    exact, _ = contract.dot(
      reference.oracle_dequantize(np.asarray(x_values), x_scale, lhs),
      reference.oracle_dequantize(np.asarray(w_values), w_scale, rhs),
    )
    x_scale, w_scale = jax.device_put(x_scale), jax.device_put(w_scale)

    @jax.jit
    def run(x, w, scale):
      return (
        self.dot(x_values, w_values, x_scale, w_scale),
        self.dot(x, w, x_scale, w_scale),
        self.dot(x, w_values, scale, w_scale),
      )

    args = x_values, w_values, x_scale, w_scale
    for actual in (self.dot(*args), *run(*args[:3])):
      contract.assert_exact(actual, exact, contract.F32)

  @parameterized.parameters(*dot_cases.KINDS[::3])
  def test_jit_and_eager_and_repeated_calls_give_the_same_bits(self, lhs, rhs):
    rng = np.random.default_rng(0)
    x = self.operand(rng, lhs, (2, 9, 96), integers=False)
    w = self.operand(rng, rhs, (2, 7, 96), integers=False)
    bias = jax.device_put(rng.normal(size=7))

    def f(x, w, x_scale, w_scale, bias):
      return self.dot(x, w, x_scale, w_scale, 0.3, bias=bias, activation="silu")

    args = (x.operand, w.operand, x.scale, w.scale, bias)
    eager = f(*args)
    self.assertTrue(np.isfinite(eager).all())
    self.assertTrue(same_bits(eager, f(*args)))
    self.assertTrue(same_bits(eager, jax.jit(f)(*args)))


class DotSuite(
  DotShapesTestCase,
  DotValuesTestCase,
  DotBitsTestCase,
  epilogue.DotEpilogueTestCase,
):
  """The numerical contract of one implementation."""
