# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every implementation of the dot must do, as one suite of tests.

A test file of an implementation subclasses `DotSuite`:

  class CpuDotTest(dot_suite.DotSuite):
    implementation = "cpu"
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import formats
from jaxplugin import testing

FORMATS: Final = formats.FORMATS
PAIRS: Final = tuple(itertools.product(FORMATS, FORMATS))
# Every pair of operands: formats by formats, and one side plain.
KINDS: Final = (
  *PAIRS,
  *itertools.product(FORMATS, testing.RESULT_DTYPES),
  *itertools.product(testing.RESULT_DTYPES, FORMATS),
)
NUM_FUZZ_TESTS: Final = 20
MAX_ROWS: Final = 9
# f32 evaluation of an activation: gelu is 9 operations and a tanh good to 4
# units in the last place, none of them larger than its argument; silu is less.
EPILOGUE_BOUND: Final = 20 * 2.0**-24


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotCase:
  """A call to be made; `dimension_numbers` None is the default contraction."""

  lhs: testing.OperandCase
  rhs: testing.OperandCase
  dimension_numbers: Any
  block_size: int | None
  dtype: np.dtype


def random_case(
  index: int, all_kinds: Sequence[tuple[Any, Any]] = KINDS
) -> DotCase:
  """Case `index` of an endless sweep; `len(all_kinds)` in a row hold all."""
  rng = np.random.default_rng([20261121, index])
  kinds = all_kinds[index % len(all_kinds)]
  formats_ = [k if isinstance(k, formats.BlockFormat) else None for k in kinds]
  blocks = {f.block_size for f in formats_ if f is not None}
  block = max(blocks)

  is_default = rng.random() < 0.25
  num_batch = int(rng.integers(0, 4))
  num_free = [1, 1] if is_default else list(rng.choice(3, 2, p=[0.1, 0.7, 0.2]))
  num_k = 1 if is_default else int(rng.choice([1, 2, 3], p=[0.75, 0.2, 0.05]))
  batch_sizes = rng.integers(1, 4, num_batch).tolist()
  k_sizes = rng.integers(1, 4, num_k).tolist()
  blocked = int(rng.integers(num_k))
  k_sizes[blocked] = block * int(rng.integers(1, 4))

  block_size = None
  if len(blocks) == 1 and rng.random() < 0.4:
    block_size = block
    if (
      num_k == 1 and rng.random() < 0.6
    ):  # ragged; even, so that FP4 can be packed
      k_sizes[blocked] -= 2 * int(rng.integers(1, block // 2))

  operands, dims = [], []
  for side in (0, 1):
    free_sizes = _row_sizes(rng, int(num_free[side]))
    sizes = batch_sizes + free_sizes + k_sizes
    order = np.arange(len(sizes))
    if not is_default:
      order = rng.permutation(len(sizes))
    position = np.argsort(order)  # where each of `sizes` is
    shape = tuple(sizes[d] for d in order)
    batch = tuple(int(d) for d in position[:num_batch])
    contracting = tuple(int(d) for d in position[len(sizes) - num_k :])
    dims.append((batch, contracting))
    format = formats_[side]
    dtype = kinds[side] if format is None else format.values_dtype
    operands.append(
      testing.OperandCase(
        format=format,
        dtype=np.dtype(dtype),
        shape=shape,
        axis=contracting[blocked],
        storage=_storage(rng, format, shape, contracting[blocked], block_size),
        # Several contracting dimensions: only the blocked one may be padded,
        # or the others could not be told from it.
        unpadded=batch + contracting[:blocked] + contracting[blocked + 1 :],
      )
    )
  numbers = None
  if not is_default:
    (lhs_batch, lhs_k), (rhs_batch, rhs_k) = dims
    numbers = ((lhs_k, rhs_k), (lhs_batch, rhs_batch))
  return DotCase(
    lhs=operands[0],
    rhs=operands[1],
    dimension_numbers=numbers,
    block_size=block_size,
    dtype=testing.RESULT_DTYPES[int(rng.choice(3, p=[0.5, 0.35, 0.15]))],
  )


def _row_sizes(rng: np.random.Generator, num: int) -> list[int]:
  """Sizes of m or n, a third of them 1."""
  return [
    1 if rng.random() < 0.33 else int(rng.integers(2, MAX_ROWS + 1))
    for _ in range(num)
  ]


def _storage(
  rng: np.random.Generator,
  format: formats.BlockFormat | None,
  shape: tuple[int, ...],
  axis: int,
  block_size: int | None,
) -> str:
  """One of the ways to pass this operand."""
  if format is None:
    return "raw"
  options = ["raw"]
  if block_size is not None:
    options.append("padded")
  if shape[axis] % format.block_size == 0:
    options.append("scaled_array")
  if format.is_fp4:
    options += ["packed_" + option for option in options]
  if axis == len(shape) - 1 and len(shape) > 1:
    options += ["swizzled", "packed_swizzled" if format.is_fp4 else "swizzled"]
  return options[int(rng.integers(len(options)))]


def same_bits(x: Any, y: Any) -> bool:
  x, y = np.asarray(x), np.asarray(y)
  return (
    x.dtype == y.dtype and x.shape == y.shape and (x.tobytes() == y.tobytes())
  )


class DotSuite(parameterized.TestCase):
  """The numerical contract of one implementation.

  Attributes:
    implementation: the one to force; None tests the choice.
    kinds: pairs of operands of the fuzzed shapes.
    cases_per_test: fuzzed shapes in each of `NUM_FUZZ_TESTS` tests.
    exact_beyond_f32: whether a dequantized value outside f32's normal range
      still counts exactly; else it may be flushed, or be Inf.
    subnormal_spacing: what dequantized values below 2^-126 are rounded to
      multiples of, where they are not flushed.
    keeps_global_scale_f32: whether the global scale stays f32 for a 16-bit
      result even without precision="highest".
  """

  implementation: str | None = None
  kinds: Sequence[tuple[Any, Any]] = KINDS
  cases_per_test: int = 25
  exact_beyond_f32: bool = False
  subnormal_spacing: float = 0.0
  keeps_global_scale_f32: bool = True

  def dot(self, *args: Any, **kwargs: Any) -> Any:
    """The call under test. Override it to run elsewhere, or to skip."""
    return jp.block_scaled_dot(
      *args, implementation=self.implementation, **kwargs
    )

  def operand(
    self,
    rng: np.random.Generator,
    format: formats.BlockFormat | np.dtype,
    shape: tuple[int, ...],
    *,
    integers: bool = True,
    storage: str = "raw",
  ) -> testing.Operand:
    """An operand blocked along its last dimension."""
    is_format = isinstance(format, formats.BlockFormat)
    case = testing.OperandCase(
      format=format if is_format else None,
      dtype=format.values_dtype if is_format else np.dtype(format),
      shape=shape,
      axis=len(shape) - 1,
      storage=storage if is_format else "raw",
      unpadded=tuple(range(len(shape) - 2)),
    )
    return testing.make_operand(rng, case, integers=integers)

  def call(self, lhs: testing.Operand, rhs: testing.Operand, **kwargs: Any):
    return self.dot(lhs.operand, rhs.operand, lhs.scale, rhs.scale, **kwargs)

  # Fuzzed shapes.

  @parameterized.parameters(range(NUM_FUZZ_TESTS))
  def test_fuzzed_shapes_are_exact_on_integers_and_bounded_otherwise(
    self, chunk
  ):
    for i in range(self.cases_per_test):
      index = chunk + i * NUM_FUZZ_TESTS
      case = random_case(index, self.kinds)
      with self.subTest(f"random_case({index})", case=case):
        self._check_case(case, np.random.default_rng(index))

  def _check_case(self, case: DotCase, rng: np.random.Generator) -> None:
    for integers in (True, False):
      lhs = testing.make_operand(rng, case.lhs, integers=integers)
      rhs = testing.make_operand(rng, case.rhs, integers=integers)
      exact, magnitude = testing.dot(
        lhs.exact, rhs.exact, case.dimension_numbers
      )
      dtype = case.dtype
      if not integers and dtype == testing.F16:
        dtype = testing.BF16  # f16 does not have the range
      actual = self.call(
        lhs,
        rhs,
        dimension_numbers=case.dimension_numbers,
        block_size=case.block_size,
        preferred_element_type=dtype,
      )
      if integers:
        testing.assert_exact(actual, exact, dtype)
      else:
        bound = testing.DOT_BOUND * magnitude
        testing.assert_within(actual, exact, bound, dtype)

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
      case = testing.OperandCase(
        format=jp.MXFP8,
        dtype=formats.E4M3,
        shape=tuple(sizes[d] for d in order),
        axis=contracting,
      )
      made.append(testing.make_operand(rng, case, integers=True))
    (lhs_batch, lhs_k), (rhs_batch, rhs_k) = dims
    numbers = (((lhs_k,), (rhs_k,)), ((lhs_batch,), (rhs_batch,)))
    actual = self.call(*made, dimension_numbers=numbers)
    exact, _ = testing.dot(made[0].exact, made[1].exact, numbers)
    testing.assert_exact(actual, exact, testing.F32)

  @parameterized.product(
    pair=((jp.MXFP8, jp.MXFP8), (jp.MXFP4, testing.BF16), (jp.NVFP4, jp.NVFP4)),
    sizes=((1, 33, 4096), (17, 33, 4096), (70, 130, 1056)),
  )
  def test_long_sums_stay_within_the_bound(self, pair, sizes):
    # Past the tiles of any kernel, and with sums that cancel.
    m, n, k = sizes
    rng = np.random.default_rng(k)
    lhs = self.operand(rng, pair[0], (m, k), integers=False)
    rhs = self.operand(rng, pair[1], (n, k), integers=False)
    exact, magnitude = testing.dot(lhs.exact, rhs.exact)
    bound = testing.DOT_BOUND * magnitude
    testing.assert_within(self.call(lhs, rhs), exact, bound, testing.F32)

  @parameterized.parameters(
    (jp.MXFP8, jp.MXFP8), (jp.MXFP4, jp.MXFP8), (jp.MXFP8, jp.MXFP4)
  )
  def test_short_block_is_not_continued_by_another_contracting_dimension(
    self, *pair
  ):
    rng = np.random.default_rng(0)
    sides = []
    for format, rows in zip(pair, (3, 5), strict=True):
      case = testing.OperandCase(
        format=format,
        dtype=format.values_dtype,
        shape=(rows, 6, 20),
        axis=2,
      )
      sides.append(testing.make_operand(rng, case, integers=True))
    numbers = (((1, 2), (1, 2)), ((), ()))
    actual = self.call(*sides, dimension_numbers=numbers, block_size=32)
    exact, _ = testing.dot(sides[0].exact, sides[1].exact, numbers)
    testing.assert_exact(actual, exact, testing.F32)

  @parameterized.product(
    kind=(
      (jp.MXFP8, "raw"),
      (jp.MXFP4, "raw"),
      (jp.MXFP4, "packed_raw"),
      (jp.NVFP4, "packed_scaled_array"),
    ),
    shape=((64, 1), (3, 64, 1)),
  )
  def test_dimensions_of_size_1_may_follow_k(self, kind, shape):
    format, storage = kind
    axis = max(range(len(shape)), key=lambda d: shape[d])
    rng = np.random.default_rng(0)
    case = testing.OperandCase(
      format=format,
      dtype=format.values_dtype,
      shape=shape,
      axis=axis,
      storage=storage,
    )
    rhs = testing.make_operand(rng, case, integers=True)
    lhs = self.operand(rng, testing.BF16, (4, shape[axis]))
    numbers = (((1,), (axis,)), ((), ()))
    actual = self.call(lhs, rhs, dimension_numbers=numbers)
    exact, _ = testing.dot(lhs.exact, rhs.exact, numbers)
    testing.assert_exact(actual, exact, testing.F32)

  @parameterized.product(format=FORMATS, k=(1, 17, 47, 95))
  def test_last_block_may_be_short_where_block_size_is_given(self, format, k):
    rng = np.random.default_rng(k)
    lhs = self.operand(rng, format, (3, k), storage="padded")
    rhs = self.operand(rng, format, (5, k))
    actual = self.call(lhs, rhs, block_size=format.block_size)
    testing.assert_exact(
      actual, testing.dot(lhs.exact, rhs.exact)[0], testing.F32
    )

  @parameterized.product(format=FORMATS, k=(64, 50))
  def test_garbage_in_scale_padding_changes_no_bit(self, format, k):
    rng = np.random.default_rng(k)
    lhs = self.operand(rng, format, (2, 5, k), integers=False)
    rhs = self.operand(rng, format, (2, 7, k), integers=False)
    block = format.block_size
    clean = self.call(lhs, rhs, block_size=block)
    self.assertTrue(np.isfinite(clean).all())
    for code in (0xFF, 0x7F, 0x00, 0x7E):
      widths = ((0, 0), (0, 3), (0, 2))
      poisoned = [
        jnp.asarray(
          np.pad(
            np.asarray(x.scale).view(np.uint8), widths, constant_values=code
          ).view(format.scale_dtype)
        )
        for x in (lhs, rhs)
      ]
      padded = self.dot(lhs.operand, rhs.operand, *poisoned, block_size=block)
      self.assertTrue(same_bits(clean, padded), f"padding with {code:#x}")

  def test_negative_codes_in_nvfp4_scale_padding_are_not_refused(self):
    # Garbage may look like a negative scale; only real scales are checked.
    rng = np.random.default_rng(0)
    lhs = self.operand(rng, jp.NVFP4, (3, 32))
    rhs = self.operand(rng, jp.NVFP4, (5, 32))
    scale = np.full((8, 4), 0xB8, np.uint8)
    scale[:3, :2] = np.asarray(lhs.scale).view(np.uint8)
    actual = self.dot(
      lhs.operand,
      rhs.operand,
      jnp.asarray(scale.view(formats.E4M3)),
      rhs.scale,
      block_size=16,
    )
    exact, _ = testing.dot(lhs.exact, rhs.exact)
    testing.assert_exact(actual, exact, testing.F32)

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

  # NaN, Inf and extreme scales.

  @parameterized.product(format=FORMATS, side=("lhs", "rhs"), value=(0.0, 1.0))
  def test_block_under_a_nan_scale_is_nan_in_its_row_alone(
    self, format, side, value
  ):
    # Zeros too. A scale that became Inf would pass with zeros, and one that
    # became finite with ones.
    rng = np.random.default_rng(0)
    made = self.operand(rng, format, (5, 96))
    other = self.operand(rng, format, (4, 96))
    if value:  # of one sign, so that Inf would stay Inf
      positive = np.ones((4, 96), format.values_dtype)
      other = dataclasses.replace(
        other,
        operand=jnp.asarray(positive),
        exact=testing.dequantize(positive, np.asarray(other.scale), format, 1),
      )
    values = np.asarray(made.operand).copy()
    scale = np.asarray(made.scale).copy()
    block = format.block_size
    values[3, block : 2 * block] = value
    scale.view(np.uint8)[3, 1] = 0xFF if format.scale_is_power_of_two else 0x7F
    operands = [
      (jnp.asarray(values), other.operand),
      (jnp.asarray(scale), other.scale),
    ]
    exact = [testing.dequantize(values, scale, format, 1), other.exact]
    if side == "rhs":
      operands = [pair[::-1] for pair in operands]
      exact.reverse()
    actual = self.dot(*operands[0], *operands[1])
    expected, _ = testing.dot(*exact)
    nans = np.isnan(np.asarray(actual))
    nans = nans if side == "lhs" else nans.T
    row = np.zeros((5, 4), bool)
    row[3] = True
    np.testing.assert_array_equal(nans, row)
    testing.assert_exact(actual, expected, testing.F32)

  def test_zeros_under_negative_nan_e4m3_scale_are_nan(self):
    rng = np.random.default_rng(0)
    rhs = self.operand(rng, jp.NVFP4, (4, 32))
    scale = np.array([[0xFF, 0x38], [0x38, 0x38]], np.uint8)
    actual = self.dot(
      jnp.zeros((2, 32), formats.E2M1),
      rhs.operand,
      jnp.asarray(scale.view(formats.E4M3)),
      rhs.scale,
    )
    np.testing.assert_array_equal(
      np.asarray(actual), np.array([[np.nan] * 4, [0] * 4], np.float32)
    )

  @parameterized.product(
    value=(float("nan"), float("inf"), float("-inf")), side=("lhs", "rhs")
  )
  def test_special_values_propagate(self, value, side):
    rng = np.random.default_rng(0)
    format = jp.MXFP8_E5M2
    made = self.operand(rng, format, (3, 32))
    other = self.operand(rng, jp.MXFP4, (7, 32))
    values = np.asarray(made.operand).copy()
    values[1, 5] = value
    exact = testing.dequantize(values, np.asarray(made.scale), format, 1)
    made = dataclasses.replace(made, operand=jnp.asarray(values), exact=exact)
    pair = (made, other) if side == "lhs" else (other, made)
    actual = self.call(*pair)
    testing.assert_exact(
      actual, testing.dot(pair[0].exact, pair[1].exact)[0], testing.F32
    )

  @parameterized.parameters(
    (jp.MXFP8, 0x7F), (jp.MXFP8, 0xFF), (jp.MXFP8_E5M2, 0x7E)
  )
  def test_nan_codes_propagate(self, format, code):
    rng = np.random.default_rng(0)
    made = self.operand(rng, format, (3, 32))
    other = self.operand(rng, jp.MXFP8, (7, 32))
    values = np.asarray(made.operand).copy()
    values.view(np.uint8)[1, 5] = code
    actual = np.asarray(
      self.dot(jnp.asarray(values), other.operand, made.scale, other.scale)
    )
    self.assertTrue(np.isnan(actual[1]).all())
    self.assertTrue(np.isfinite(actual[[0, 2]]).all())

  @parameterized.product(lhs=FORMATS[:3], rhs=FORMATS[:3])
  def test_every_e8m0_scale_counts(self, lhs, rhs):
    # Row b of lhs has scale 2^(b - 127), row b of rhs the reciprocal, so the
    # diagonal of the product is exact. Byte 0 is 2^-127, an f32 subnormal: its
    # values are 2, so that what XLA:CPU would flush does not come up.
    code = np.arange(255, dtype=np.uint8)
    rows = []
    for format, codes in ((lhs, code), (rhs, 254 - code)):
      values = np.where(codes == 0, 2.0, 1.0)[:, None] * np.ones((1, 32))
      scale = codes[:, None].copy().view(formats.E8M0)
      rows += [values.astype(format.values_dtype), scale]
    lhs_values, lhs_scale, rhs_values, rhs_scale = map(jnp.asarray, rows)
    actual = self.dot(lhs_values, rhs_values, lhs_scale, rhs_scale)
    expected = np.full(255, 32.0)
    expected[[0, 254]] = 64.0
    np.testing.assert_array_equal(np.diagonal(np.asarray(actual)), expected)

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
          jnp.asarray(values),
          jnp.asarray(np.eye(1, 32, dtype=np.float32)),
          jnp.asarray(scale),
        )
      )[:, 0].astype(np.float64)
      exact = testing.dequantize(values, scale, format, 1)[:, 0]
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
    actual = self.dot(*map(jnp.asarray, (values, values, scale, back)))
    np.testing.assert_array_equal(
      np.diagonal(np.asarray(actual)), np.full(255, 448.0 * 448 * 32)
    )

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
    exact, _ = testing.dot(
      testing.dequantize(np.asarray(x_values), x_scale, lhs, 1),
      testing.dequantize(np.asarray(w_values), w_scale, rhs, 1),
    )
    x_scale, w_scale = jnp.asarray(x_scale), jnp.asarray(w_scale)

    def all_constant():
      return self.dot(x_values, w_values, x_scale, w_scale)

    def constant_scales(a, b):
      return self.dot(a, b, x_scale, w_scale)

    def constant_weight(a, s):
      return self.dot(a, w_values, s, w_scale)

    testing.assert_exact(all_constant(), exact, testing.F32)
    testing.assert_exact(jax.jit(all_constant)(), exact, testing.F32)
    testing.assert_exact(
      jax.jit(constant_scales)(x_values, w_values), exact, testing.F32
    )
    testing.assert_exact(
      jax.jit(constant_weight)(x_values, x_scale), exact, testing.F32
    )

  # Global scales.

  @parameterized.product(
    given=((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)),
    dtype=testing.RESULT_DTYPES,
  )
  def test_global_scales_multiply(self, given, dtype):
    rng = np.random.default_rng(0)
    numbers = [
      np.float32(x) if g else None
      for x, g in zip((1.2345, 0.777, 3.21), given, strict=True)
    ]
    made = [
      self.operand(rng, jp.NVFP4, (rows, 64), storage="scaled_array")
      for rows in (3, 5)
    ]
    operands = [
      jp.ScaledArray(
        x.operand.values,
        x.operand.scale,
        None if g is None else jnp.float32(g),
        jp.NVFP4,
      )
      for x, g in zip(made, numbers, strict=False)
    ]
    exact, magnitude = testing.dot(made[0].exact, made[1].exact)
    factor = np.prod([np.float64(g) for g in numbers if g is not None])
    explicit = numbers[2]
    for passed in (
      explicit,
      None if explicit is None else float(explicit),
      None if explicit is None else jnp.full((1,), explicit),
    ):
      actual = self.dot(
        *operands,
        global_scale=passed,
        preferred_element_type=dtype,
        precision="highest",
      )
      bound = testing.DOT_BOUND * magnitude * factor
      testing.assert_within(actual, exact * factor, bound, dtype)

  @parameterized.parameters(
    # (result dtype, integer dot, global scale that the dtype would round to 1)
    # 257 * (1 + 2^-9) = 257.50 rounds to 258; 257 alone is a tie, to 256.
    (testing.BF16, 257, 1 + 2**-9, 258),
    # 2049 * (1 + 2^-12) = 2049.5 rounds to 2050; 2049 is a tie, to 2048.
    (testing.F16, 2049, 1 + 2**-12, 2050),
  )
  def test_global_scale_is_f32_with_a_16_bit_result(
    self, dtype, total, global_scale, expected
  ):
    self.assertEqual(np.float32(global_scale).astype(dtype), 1)
    lhs, rhs, scale = self._dot_of(total)
    for precision in (None, "highest", jax.lax.Precision.HIGHEST):
      if precision is None and not self.keeps_global_scale_f32:
        continue
      actual = self.dot(
        lhs,
        rhs,
        scale,
        scale,
        global_scale,
        preferred_element_type=dtype,
        precision=precision,
      )
      np.testing.assert_array_equal(
        np.asarray(actual, np.float64), [[expected]]
      )

  @parameterized.parameters("lhs", "rhs", "both")
  def test_one_global_scale_per_batch_entry(self, side):
    rng = np.random.default_rng(0)
    quantize = jax.vmap(lambda x: jp.quantize(x, jp.NVFP4))
    exact, operands = [], []
    for name, rows in (("lhs", 3), ("rhs", 5)):
      x = quantize(jnp.asarray(rng.normal(size=(4, rows, 32)), jnp.float32))
      self.assertEqual(x.global_scale.shape, (4,))
      values = testing.dequantize(
        np.asarray(x.values), np.asarray(x.scale), jp.NVFP4, 2
      )
      if side in (name, "both"):
        values = values * np.float64(x.global_scale)[:, None, None]
      else:
        x = jp.ScaledArray(x.values, x.scale, None, jp.NVFP4)
      operands.append(x)
      exact.append(values)
    actual = self.dot(*operands)
    expected, magnitude = testing.dot(*exact)
    bound = testing.DOT_BOUND * magnitude
    testing.assert_within(actual, expected, bound, testing.F32)

  def test_global_scales_follow_their_dimensions(self):
    # lhs (i, b, k) with a global scale for every (i, b), b the batch dimension;
    # rhs (n, b, k) with one for every n.
    rng = np.random.default_rng(0)
    lhs = self.operand(rng, jp.NVFP4, (2, 3, 32), storage="scaled_array")
    rhs = self.operand(rng, jp.NVFP4, (5, 3, 32), storage="scaled_array")
    lhs_global = rng.uniform(1, 2, (2, 3)).astype(np.float32)
    rhs_global = rng.uniform(1, 2, (5,)).astype(np.float32)
    numbers = (((2,), (2,)), ((1,), (1,)))
    operands = [
      jp.ScaledArray(
        x.operand.values, x.operand.scale, jnp.asarray(g), jp.NVFP4
      )
      for x, g in ((lhs, lhs_global), (rhs, rhs_global))
    ]
    actual = self.dot(*operands, dimension_numbers=numbers)
    expected, magnitude = testing.dot(
      lhs.exact * lhs_global[..., None].astype(np.float64),
      rhs.exact * rhs_global[:, None, None].astype(np.float64),
      numbers,
    )
    bound = testing.DOT_BOUND * magnitude
    testing.assert_within(actual, expected, bound, testing.F32)

  @parameterized.parameters(
    ((4, 1, 1),), ((1, 3, 1),), ((1, 1, 5),), ((4, 3, 5),), ((1, 1, 1),)
  )
  def test_global_scale_may_vary_over_the_result(self, shape):
    rng = np.random.default_rng(0)
    lhs = self.operand(rng, jp.MXFP8, (4, 3, 32))
    rhs = self.operand(rng, jp.MXFP8, (4, 5, 32))
    scale = np.exp2(rng.integers(-3, 4, shape)).astype(np.float32)
    actual = self.call(lhs, rhs, global_scale=jnp.asarray(scale))
    exact, _ = testing.dot(lhs.exact, rhs.exact)
    testing.assert_exact(actual, exact * scale, testing.F32)

  # The epilogue.

  @parameterized.product(
    activation=(None, "relu", "gelu", "silu"),
    present=tuple(itertools.product((False, True), repeat=3)),
  )
  def test_epilogue_is_activation_of_biased_scaled_dot_plus_residual(
    self, activation, present
  ):
    rng = np.random.default_rng(0)
    has_global, has_bias, has_residual = present
    lhs = self.operand(rng, jp.MXFP4, (2, 7, 32))
    rhs = self.operand(rng, jp.MXFP4, (2, 5, 32))
    dot, _ = testing.dot(lhs.exact, rhs.exact)  # exact in f32 too
    global_scale = np.float32(0.0371) if has_global else None
    for dtype in self._some_dtypes(activation, present):
      # Every dtype for bias and residual as well, never the result's.
      others = [d for d in testing.RESULT_DTYPES if d != dtype]
      bias = residual = None
      if has_bias:
        bias = rng.normal(size=5).astype(others[0])
      if has_residual:
        residual = (3 * rng.normal(size=(2, 7, 5))).astype(others[1])
      actual = self.call(
        lhs,
        rhs,
        global_scale=global_scale,
        bias=None if bias is None else jnp.asarray(bias),
        activation=activation,
        residual=None if residual is None else jnp.asarray(residual),
        preferred_element_type=dtype,
      )
      expected = dot * (np.float64(global_scale) if has_global else 1)
      largest = np.abs(expected)
      if has_bias:
        largest = largest + np.abs(bias.astype(np.float64))
        expected = expected + bias.astype(np.float64)
      expected = _activate(expected, activation)
      if has_residual:
        largest = largest + np.abs(residual.astype(np.float64))
        expected = expected + residual.astype(np.float64)
      bound = EPILOGUE_BOUND * largest
      testing.assert_within(actual, expected, bound, dtype)

  def _some_dtypes(self, activation, present) -> tuple[np.dtype, ...]:
    """Every dtype for the full epilogue, and one in turn for the others."""
    if all(present):
      return testing.RESULT_DTYPES
    turn = len(activation or "") + sum(b << i for i, b in enumerate(present))
    return (testing.RESULT_DTYPES[turn % 3],)

  def test_epilogue_of_nan_is_nan(self):
    lhs = np.zeros((2, 32), formats.E4M3)
    scale = np.array([[0xFF], [0x7F]], np.uint8).view(formats.E8M0)
    for activation in (None, "relu", "gelu", "silu"):
      actual = self.dot(
        *map(jnp.asarray, (lhs, lhs[:1], scale, scale[1:])),
        activation=activation,
      )
      np.testing.assert_array_equal(
        np.asarray(actual), np.array([[np.nan], [0]], np.float32)
      )

  def test_bias_may_have_all_dimensions_of_rhs_or_the_last(self):
    rng = np.random.default_rng(0)
    lhs = self.operand(rng, jp.MXFP8, (3, 32))
    rhs = self.operand(rng, jp.MXFP8, (2, 5, 32))
    numbers = (((1,), (2,)), ((), ()))
    exact, _ = testing.dot(lhs.exact, rhs.exact, numbers)
    for shape in ((2, 5), (5,)):
      bias = rng.integers(-9, 9, shape).astype(np.float32)
      actual = self.call(
        lhs, rhs, dimension_numbers=numbers, bias=jnp.asarray(bias)
      )
      testing.assert_exact(actual, exact + bias, testing.F32)

  # One rounding, to the result's dtype, at the very end.

  @parameterized.named_parameters(
    # 257 is no bf16; rounded before the bias it would give 256 + 1 = 257 = 256.
    ("before_bias", 257, dict(bias=1.0), testing.BF16, 258),
    # 100000 is beyond f16.
    (
      "before_global_scale",
      3200,
      dict(global_scale=32.0, residual=-60000.0),
      testing.F16,
      42400,
    ),
    # bf16(1 + 2^-8 + 2^-13) is 1 + 2^-7, but 1 by way of f16.
    (
      "not_through_f16",
      2**13 // 2**8 + 2**13 + 1,
      dict(global_scale=2.0**-13),
      testing.BF16,
      1 + 2**-7,
    ),
    # f16(1 + 2^-11 + 2^-13) is 1 + 2^-10, but 1 by way of bf16.
    (
      "not_through_bf16",
      2**13 + 2**2 + 1,
      dict(global_scale=2.0**-13),
      testing.F16,
      1 + 2**-10,
    ),
  )
  def test_result_is_rounded_once(self, total, epilogue, dtype, expected):
    lhs, rhs, scale = self._dot_of(total)
    epilogue = dict(epilogue)
    for name in ("bias", "residual"):
      if name in epilogue:
        shape = (1,) if name == "bias" else (1, 1)
        epilogue[name] = jnp.full(shape, epilogue[name], jnp.float32)
    actual = self.dot(
      lhs, rhs, scale, scale, preferred_element_type=dtype, **epilogue
    )
    np.testing.assert_array_equal(np.asarray(actual, np.float64), [[expected]])

  def _dot_of(self, total: int) -> tuple[Any, Any, Any]:
    """MXFP8 (lhs, rhs, scale of both) whose exact product is `total`."""
    lhs, rhs = np.zeros((1, 32)), np.zeros((1, 32))
    for bit in range(total.bit_length()):
      if total >> bit & 1:
        lhs[0, bit] = 2.0 ** (bit // 2)
        rhs[0, bit] = 2.0 ** (bit - bit // 2)
    values = [x.astype(formats.E4M3) for x in (lhs, rhs)]
    exact = values[0].astype(np.float64) @ values[1].astype(np.float64).T
    np.testing.assert_array_equal(exact, [[total]])
    scale = jnp.ones((1, 1), formats.E8M0)
    return jnp.asarray(values[0]), jnp.asarray(values[1]), scale

  def test_f16_result_overflows_to_inf(self):
    lhs, rhs, scale = self._dot_of(65536)
    actual = self.dot(
      lhs, rhs, scale, scale, preferred_element_type=jnp.float16
    )
    np.testing.assert_array_equal(np.asarray(actual), [[np.float16(np.inf)]])

  # Empty dimensions.

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
    exact, _ = testing.dot(lhs.exact, rhs.exact)
    testing.assert_exact(plain, exact, testing.F32)
    bias = np.arange(n).astype(np.float32)
    residual = rng.integers(-9, 9, (batch, m, n)).astype(np.float32)
    actual = self.call(
      lhs,
      rhs,
      global_scale=2.0,
      bias=jnp.asarray(bias),
      residual=jnp.asarray(residual),
      preferred_element_type=jnp.bfloat16,
    )
    testing.assert_exact(actual, 2 * exact + bias + residual, testing.BF16)

  # The same bits every time.

  @parameterized.parameters(*KINDS[::3])
  def test_jit_and_eager_and_repeated_calls_give_the_same_bits(self, lhs, rhs):
    rng = np.random.default_rng(0)
    x = self.operand(rng, lhs, (2, 9, 96), integers=False)
    w = self.operand(rng, rhs, (2, 7, 96), integers=False)
    bias = jnp.asarray(rng.normal(size=7), jnp.float32)

    def f(x, w, x_scale, w_scale, bias):
      return self.dot(x, w, x_scale, w_scale, 0.3, bias=bias, activation="silu")

    args = (x.operand, w.operand, x.scale, w.scale, bias)
    eager = f(*args)
    self.assertTrue(np.isfinite(eager).all())
    self.assertTrue(same_bits(eager, f(*args)))
    self.assertTrue(same_bits(eager, jax.jit(f)(*args)))


def _activate(x: np.ndarray, activation: str | None) -> np.ndarray:
  """The activations' definitions in f64."""
  if activation == "relu":
    return np.maximum(x, 0)
  if activation == "gelu":  # the tanh approximation
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner))
  if activation == "silu":
    with np.errstate(over="ignore"):
      return x / (1 + np.exp(-x))
  return x
