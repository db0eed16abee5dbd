# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the ragged dot's handler with NumPy in float64, and with the dot.

The library is the same as in dot_handler_test.py.
"""

from __future__ import annotations

import concurrent.futures
import copy
import pathlib
import sys

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

BF16, E4M3, E8M0 = testing.BF16, testing.E4M3, testing.E8M0
FORMATS, QUANTIZED = testing.FORMATS, testing.QUANTIZED
integers, gaussians = testing.integers, testing.gaussians
call = testing.call_ragged

SWIGLU, SWIGLUOAI = testing.GATES
# (rhs, lhs): each format as weights; pairs of formats; rows of floats.
PAIRS = (
  *((name, "bf16") for name in QUANTIZED),
  *((name, name) for name in ("mxfp8", "mxfp4", "nvfp4")),
  ("mxfp8", "f32"),
  ("nvfp4", "f16"),
  ("mxfp4", "mxfp8"),
)
# Sizes of 5 groups: few rows, many, none, a negative number, more than m.
SIZES = (
  (1, 0, 2, 3, 1),
  (0, 0, 0, 0, 30),
  (6, 20, 0, 1, 0),
  (0, 0, 0, 0, 0),
  (-3, 9, -(2**31), 0, 4),
  (5, 28, 7, 2**31 - 1, 2**31 - 1),
)
ROWS = 30
# The least products of a part of a group (kPartProducts), and of a group that
# all threads share (kSharedProducts).
PART, SHARED = 1 << 22, 1 << 30


def taken(sizes, rows=ROWS):
  """Returns (group, first row, rows) of each group that has rows."""
  row = 0
  for group, size in enumerate(sizes):
    count = min(max(size, 0), rows - row)
    if count:
      yield group, row, count
    row += count


def part(side, at):
  """Returns some rows of a matrix, or a matrix of a stack, as a batch of 1."""
  return changed(side, lambda array: array[at][None])


def with_rows(side, n):
  """Returns matrices of n rows, which repeat the rows of a stack of matrices.

  Random numbers take most of the time of a large operand.
  """
  rows = np.arange(n) % side.exact.shape[1]
  return changed(side, lambda array: array[:, rows])


def changed(side, change):
  found = copy.copy(side)
  for name in ("values", "scale", "exact"):
    array = getattr(side, name)
    setattr(found, name, None if array is None else change(array))
  return found


def by_groups(lhs, rhs, sizes, factors=None, bias=None, **kwargs):
  """Calls the dot's handler for each group. Other rows are zeros."""
  dtype = kwargs.get("dtype", np.float32)
  out = np.zeros((len(lhs.exact), rhs.exact.shape[1]), dtype)
  for group, row, count in taken(sizes, len(lhs.exact)):
    rows = slice(row, row + count)
    out[rows] = testing.call(
      part(lhs, rows),
      part(rhs, group),
      None if factors is None else factors[..., group],
      None if bias is None else bias[group],
      **kwargs,
    )[0]
  return out


def oracle(lhs, rhs, sizes):
  out = np.zeros((len(lhs.exact), rhs.exact.shape[1]))
  for group, row, count in taken(sizes, len(lhs.exact)):
    out[row : row + count] = lhs.exact[row : row + count] @ rhs.exact[group].T
  return out


def gated(x, activation):
  """Computes the gates' formulas in float64."""
  with np.errstate(over="ignore", invalid="ignore"):
    if activation == SWIGLU:
      gate, value = np.split(x, 2, axis=1)
      return gate / (1 + np.exp(-gate)) * value
    gate, value = np.minimum(x[:, 0::2], 7), np.clip(x[:, 1::2], -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (value + 1)


class RaggedDotTest(parameterized.TestCase):
  @testing.rows(pair=PAIRS)
  def test_sizes_of_any_kind_are_exact_on_integers(self, pair):
    rng = np.random.default_rng(0)
    rhs = integers(pair[0], (5, 70, 160), rng, packed=True)
    lhs = integers(pair[1], (ROWS, 160), rng)
    for sizes in SIZES:
      expected = oracle(lhs, rhs, sizes)
      for isa in testing.ISAS:
        got = call(lhs, rhs, sizes, isa=isa)
        np.testing.assert_array_equal(got, expected, f"{isa} {sizes}")

  @testing.each(
    pair=(
      *PAIRS,
      *(
        (name, "mxfp8" if name in testing.CODEBOOKS else name)
        for name in testing.CHECKPOINTS
      ),
    )
  )
  def test_groups_have_the_bits_of_their_dots(self, pair, isa):
    rng = np.random.default_rng(1)
    rhs, lhs = (
      testing.checkpoint(name, shape, rng, packed=True)
      if name in testing.CHECKPOINTS
      else gaussians(name, shape, rng, 20, packed=True)
      for name, shape in zip(pair, ((5, 45, 544), (ROWS, 544)), strict=True)
    )
    bias = rng.standard_normal((5, 45)).astype(np.float32)
    factors = rng.uniform(0.5, 2, (2, 5)).astype(np.float32)
    for i, sizes in enumerate(SIZES[:4]):
      given = (factors[: i % 3], bias) if i % 3 else ()
      options = {"activation": i, "isa": isa, "dtype": (BF16, "f4")[i % 2]}
      got = call(lhs, rhs, sizes, *given, **options)
      expected = by_groups(lhs, rhs, sizes, *given, **options)
      np.testing.assert_array_equal(got, expected, str(sizes))

  @testing.rows(m=(4, 21), rhs=("mxfp8", "nvfp4"))
  def test_parts_of_groups_have_the_bits_of_the_whole(self, m, rhs):
    """A group is cut into parts; the last has another number of columns."""
    n, parts = 1700, 3
    k = parts * PART // (m * n) // 32 * 32 + 96
    rng = np.random.default_rng(2)
    lhs = gaussians("bf16", (2 * m, k), rng)
    rhs = with_rows(gaussians(rhs, (3, 171, k), rng, 8, packed=True), n)
    bias = rng.standard_normal((3, n)).astype(np.float32)
    sizes = (m, 0, m)
    given = lhs, rhs, sizes, np.float32([[0.5, 0, 3]]), bias
    for isa in testing.ISAS:
      got = call(*given, isa=isa, dtype=BF16)
      sums = by_groups(*given, isa=isa)
      np.testing.assert_array_equal(got, sums.astype(BF16), isa)
      for activation in testing.GATES:
        got = call(*given, activation=activation, isa=isa)
        error = np.abs(got - gated(sums.astype(np.float64), activation))
        bound = 32 * 2.0**-24 * self.magnitude(sums, activation)
        self.assertTrue(np.all(error <= bound), (isa, np.max(error / bound)))

  @testing.each()
  def test_rows_that_share_scales_have_the_bits_of_repeated_ones(self, isa):
    m, n, rows, parts = 21, 1664, 128, 3  # the second part begins at 576
    k = parts * PART // (m * n) // 32 * 32 + 96
    rng = np.random.default_rng(3)
    lhs = gaussians("bf16", (2 * m, k), rng)
    rhs = testing.checkpoint("fp8_1x128", (3, n, k), rng)
    shared = rhs.scale[:, ::rows].copy()
    rhs.scale = np.repeat(shared, rows, axis=1)
    expected = call(lhs, rhs, (m, 0, m), isa=isa)
    rhs.scale = shared
    attributes = {"rhs_scale_rows": rows}
    got = call(lhs, rhs, (m, 0, m), isa=isa, attributes=attributes)
    np.testing.assert_array_equal(got, expected)

  def magnitude(self, x, activation):
    """Returns an upper limit of each result's terms, for error bounds."""
    x = np.abs(x.astype(np.float64))
    if activation == SWIGLU:
      gate, value = np.split(x, 2, axis=1)
    else:
      gate, value = x[:, 0::2], np.minimum(x[:, 1::2], 7)
    # The slope of a gate is below 1.2, and the error of e^x is 1.7 x units.
    return (1 + gate) * (1 + value) * (1 + np.minimum(gate, 20))

  @testing.each(activation=testing.GATES, dtype=testing.FLOATS)
  def test_gates_are_f32_before_one_cast(self, isa, activation, dtype):
    rng = np.random.default_rng(3)
    rhs = integers("nvfp4", (5, 140, 64), rng, packed=True)
    lhs = integers("mxfp8", (ROWS, 64), rng)
    bias = rng.standard_normal((5, 140)).astype(np.float32)
    factors = np.float32([[0.02, 0.7, 0.1, 0.03, 0.01]])
    for sizes in SIZES:
      options = {"activation": activation, "dtype": dtype, "isa": isa}
      got = call(lhs, rhs, sizes, factors, bias, **options)
      sums = oracle(lhs, rhs, sizes)
      for group, row, count in taken(sizes):
        rows = slice(row, row + count)
        sums[rows] = sums[rows] * np.float64(factors[0, group]) + bias[group]
      expected = gated(sums, activation)
      eps = float(ml_dtypes.finfo(dtype).eps) / 2
      bound = 32 * 2.0**-24 * self.magnitude(sums, activation)
      bound = bound + 1.01 * eps * np.abs(expected)
      error = np.abs(got.astype(np.float64) - expected)
      self.assertTrue(np.all(error <= bound), np.max(error / bound))
      self.assertFalse(got[sum(c for *_, c in taken(sizes)) :].any())

  @testing.each(activation=testing.GATES)
  def test_nan_and_infinity_pass_gates(self, isa, activation):
    ones = testing.constant("mxfp8", (2, 32))
    rhs = testing.constant("mxfp8", (1, 12, 32), 0)
    bias = np.zeros((1, 12), np.float32)
    bias[0, :5] = np.nan, 1, np.inf, -np.inf, 3
    bias[0, 6:9] = 2, np.nan, -1
    got = call(ones, rhs, (2,), None, bias, activation=activation, isa=isa)
    expected = gated(np.float64([bias[0]] * 2), activation)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-12)
    self.assertTrue(np.isnan(got).any())

  @testing.each()
  def test_what_no_row_belongs_to_is_not_read(self, isa):
    rng = np.random.default_rng(4)
    rhs = integers("mxfp8", (5, 70, 64), rng)
    lhs = integers("bf16", (ROWS, 64), rng)
    sizes = SIZES[0]
    expected = call(lhs, rhs, sizes, isa=isa)
    rhs.values[1] = np.nan
    rhs.scale.view(np.uint8)[1] = 255
    lhs.values[sum(sizes) :] = np.nan
    bias = np.zeros((5, 70), np.float32)
    bias[1] = np.nan
    factors = np.float32([[1, np.nan, 1, 1, 1]])
    got = call(lhs, rhs, sizes, factors, bias, isa=isa)
    np.testing.assert_array_equal(got, expected)
    self.assertFalse(got[sum(sizes) :].any())

  @parameterized.product(activation=(0, SWIGLU, SWIGLUOAI))
  def test_group_that_all_threads_share(self, activation):
    n, k = 3200, 2048
    m = testing.frames.THREADS * SHARED // (n * k) + 1
    rng = np.random.default_rng(5)
    lhs = gaussians("mxfp4", (m + 40, k), rng, 2)
    rhs = with_rows(gaussians("mxfp4", (2, 171, k), rng, 2, packed=True), n)
    sizes = (40, m)
    got = call(lhs, rhs, sizes, activation=activation)
    sums = by_groups(lhs, rhs, sizes)
    if not activation:
      np.testing.assert_array_equal(got, sums)
      return
    error = np.abs(got - gated(sums.astype(np.float64), activation))
    bound = 32 * 2.0**-24 * self.magnitude(sums, activation)
    self.assertTrue(np.all(error <= bound), np.max(error / bound))

  @testing.each(name=QUANTIZED)
  def test_bytes_are_what_their_attributes_say(self, isa, name):
    rng = np.random.default_rng(6)
    lhs = integers("f32", (ROWS, 96), rng)
    rhs = integers(name, (5, 33, 96), rng, packed=True)
    element = {"mxfp8": 3, "mxfp8_e5m2": 4}.get(name)
    expected = call(lhs, rhs, SIZES[2], isa=isa)
    rhs.values, rhs.scale = (x.view(np.uint8) for x in (rhs.values, rhs.scale))
    scales = {E8M0: 1, E4M3: 2}
    attributes = {"rhs_scale_element": (scales[FORMATS[name][1]])}
    if name in ("mxfp6_e2m3", "mxfp6_e3m2"):
      element = testing.ELEMENTS[FORMATS[name][0]]
    if element is not None:
      attributes["rhs_element"] = element
    got = call(lhs, rhs, SIZES[2], isa=isa, attributes=attributes)
    np.testing.assert_array_equal(got, expected)

  @testing.each(
    shape=((0, 5, 3, 64), (4, 0, 3, 64), (4, 5, 0, 64), (4, 5, 3, 0))
  )
  def test_zero_sizes_give_empty_or_zero_results(self, shape, isa):
    m, groups, n, k = shape
    rng = np.random.default_rng(7)
    lhs = integers("nvfp4", (m, k), rng, packed=True)
    rhs = integers("mxfp8", (groups, n, k), rng)
    bias = np.arange(groups * n, dtype=np.float32).reshape(groups, n)
    sizes = np.ones(groups, np.int32)
    got = call(lhs, rhs, sizes, None, bias, isa=isa)
    expected = np.zeros((m, n))
    for group, row, _ in taken(sizes, m):
      expected[row] = bias[group]
    np.testing.assert_array_equal(got, expected)

  @testing.each()
  def test_calls_from_many_threads_give_the_same_bits(self, isa):
    rng = np.random.default_rng(8)
    cases = []
    for m, n, k, activation in ((6, 2048, 1024, 0), (40, 600, 512, SWIGLU)):
      lhs = gaussians("bf16", (m, k), rng)
      rhs = gaussians("nvfp4", (3, n, k), rng, packed=True)
      given = lhs, rhs, (m // 3, 1, m - m // 3 - 1)
      options = {"activation": activation, "isa": isa}
      cases.append((given, options, call(*given, **options)))

    def once(i):
      given, options, expected = cases[i % len(cases)]
      return np.array_equal(call(*given, **options), expected)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
      self.assertTrue(all(pool.map(once, range(20))))


class RaggedErrorTest(parameterized.TestCase):
  """Malformed calls are errors that name the rule and what was given."""

  def good(self):
    scale = np.full((3, 4, 2), 127, np.uint8).view(E8M0)
    return {
      "lhs": np.ones((5, 64), E4M3),
      "lhs_scale": np.full((5, 2), 127, np.uint8).view(E8M0),
      "rhs": np.ones((3, 4, 64), E4M3),
      "rhs_scale": scale,
      "group_sizes": np.array([2, 0, 2], np.int32),
    }

  def test_the_good_call_is_good(self):
    expected = np.zeros((5, 4), np.float32)
    expected[:4] = 64
    got = np.asarray(testing.ragged_dot(**self.good()))
    np.testing.assert_array_equal(got, expected)

  @parameterized.named_parameters(
    ("lhs_rank", {"lhs": np.ones((1, 5, 64), E4M3), "shape": (5, 4)}, "rank 2"),
    ("rhs_rank", {"rhs": np.ones((4, 64), E4M3), "shape": (5, 4)}, "rank 3"),
    ("lhs_dtype", {"lhs": np.ones((5, 64), np.int32)}, "lhs must be"),
    ("rhs_dtype", {"rhs": np.ones((3, 4, 64), np.int32)}, "rhs must be"),
    ("k", {"rhs": np.ones((3, 4, 32), E4M3)}, "rhs_scale must have"),
    (
      "k_both",
      {"rhs": np.ones((3, 4, 32), E4M3), "rhs_scale": np.ones((3, 4, 1), E8M0)},
      r"same k, got f8e4m3fn\[5,64\] and f8e4m3fn\[3,4,32\]",
    ),
    ("scale_groups", {"rhs_scale": np.ones((2, 4, 2), E8M0)}, "rhs_scale must"),
    ("scale_dtype", {"lhs_scale": np.ones((5, 2), "i4")}, "must be f8e8m0fnu"),
    ("scale_of_bytes", {"lhs_scale": np.ones((5, 2), "u1")}, "element 1 .e8m0"),
    (
      "scale_element",
      {"lhs_scale_element": 1},
      "lhs_scale_element must be 0, .* got 1 for f8e8m0fnu",
    ),
    ("block_size", {"rhs_block_size": 24}, "must be a multiple of 16"),
    (
      "sizes_shape",
      {"group_sizes": np.zeros(4, np.int32)},
      r"group_sizes must be i32\[groups\], got",
    ),
    (
      "sizes_dtype",
      {"group_sizes": np.zeros(3, np.uint32)},
      r"group_sizes must be i32\[groups\], got",
    ),
    ("global_shape", {"global_scale": np.ones(3, "f4")}, "global_scale must"),
    ("global_three", {"global_scale": np.ones((3, 3), "f4")}, "global_scale m"),
    ("global_dtype", {"global_scale": np.ones((1, 3), BF16)}, "global_scale m"),
    ("bias_shape", {"bias": np.ones((4, 3), "f4")}, "bias must be"),
    ("bias_dtype", {"bias": np.ones((3, 4), BF16)}, "bias must be"),
    ("activation", {"activation": 6}, "activation must be .*, got 6"),
    ("activation_negative", {"activation": -1}, "activation must be"),
    (
      "result_of_a_gate",
      {"activation": 4, "shape": (5, 4)},
      "half the columns",
    ),
    (
      "odd_gate",
      {
        "rhs": np.ones((3, 3, 64), E4M3),
        "rhs_scale": np.ones((3, 3, 2), E8M0),
        "activation": 5,
      },
      r"n must be even for a gated activation, got f8e4m3fn\[3,3,64\]",
    ),
    ("isa", {"isa": 6}, "isa must be"),
    ("attribute", {"x": 1}, "no other attributes are"),
    ("quantize_rows", {"quantize_rows": 2}, "must be 0 or 1, got 2"),
    ("result_shape", {"shape": (4, 4)}, "the result must be"),
    ("result_rank", {"shape": (20,)}, "the result must be"),
    ("result_dtype", {"dtype": np.int32}, "the result must be"),
  )
  def test_malformed_call_is_an_error(self, change, message):
    arguments = self.good() | change
    with self.assertRaisesRegex(
      testing.HandlerError, f"jaxplugin_ragged_dot: .*{message}"
    ):
      testing.ragged_dot(**arguments)


if __name__ == "__main__":
  absltest.main()
