# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: its numbers, its choices and its errors.

The numbers are those of Triton's interpreter (`interpreted`), through the whole
lowering. Expected values are products in f64 of numbers that ml_dtypes decodes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.arrays import layouts
from jaxplugin.core import formats, targets
from jaxplugin.dot import backends, calls, sides
from jaxplugin.dot.backends import triton
from jaxplugin.kernels.gpu import configs
from jaxplugin.runtime import triton_library
from jaxplugin.testing import contract, dot_problems, interpreted
from jaxplugin.testing.dot_suite import dot_rows, suite

E8M0, E4M3, E5M2, E2M1 = formats.E8M0, formats.E4M3, formats.E5M2, formats.E2M1
INT8, INT4 = formats.INT8, formats.INT4
F32, F16, BF16 = formats.F32, formats.F16, formats.BF16
H200, B200 = targets.named_target("h200"), targets.named_target("b200")
needs_interpreter = interpreted.needs_interpreter


def by_triton(target, *args, **options):
  if isinstance(target, str):
    target = targets.named_target(target).with_library(targets.JAX_TRITON)
  with jp.use_target(target):
    return jp.block_scaled_dot(*args, implementation="triton", **options)


def normal(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quantized(format, *shape, seed=0):
  """Random numbers; in bf16 if there is no format."""
  x = normal(*shape, seed=seed)
  if format is None:
    return jax.device_put(x.astype(BF16))
  return contract.quantized(x, format)


class TritonDotSuite(interpreted.RecordedTestCase, suite.DotSuite):
  """The contract's suite; a call that triton refuses goes to xla."""

  implementation = "triton"
  cases_per_test = 2
  subnormal_spacing = 2.0**-133  # of bf16
  target = H200

  def dot(self, *args, **kwargs):
    try:
      return by_triton(self.target, *args, **kwargs)
    except NotImplementedError as error:
      if "needs sizes of at least 1" not in str(error):
        raise
    with jp.use_target(self.target):
      return jp.block_scaled_dot(*args, implementation="xla", **kwargs)


@needs_interpreter
@pytest.mark.full
class HopperDotTest(TritonDotSuite):
  """Dequantizes in registers."""


@needs_interpreter
@pytest.mark.sample(1)
class BlackwellDotTest(TritonDotSuite):
  """Leaves it to the matrix instruction where that takes the formats."""

  target = B200
  kinds = (
    *((a, b) for a in formats.FORMATS[:3] for b in formats.FORMATS[:3]),
    (jp.NVFP4, jp.NVFP4),
  )


del TritonDotSuite


@needs_interpreter
class SymbolicRowsTest(interpreted.RecordedTestCase):
  """Every call has a problem as if m were symbolic."""

  def setUp(self):
    super().setUp()
    static = calls.DotCall._problem
    self.enter_context(
      mock.patch.object(
        calls.DotCall,
        "_problem",
        lambda call: dataclasses.replace(static(call), m=None),
      )
    )

  @parameterized.parameters(
    (jp.NVFP4, jp.NVFP4, (3, 2), {"bias": np.ones(5), "activation": "relu"}),
    (None, jp.NVFP4, (70,), {"residual": np.ones((70, 5), np.float32)}),
    # The kernels do not fuse a global scale for each row.
    (None, jp.MXFP8, (17,), {"global_scale": np.full((17, 1), 0.5)}),
    (jp.FP8_128X128, jp.INT4_32, (1,), {}),
  )
  def test_result_is_that_of_the_oracle(self, lhs, rhs, rows, options):
    x, w = quantized(lhs, *rows, 128), quantized(rhs, 5, 128, seed=1)
    options = {
      name: jax.device_put(v) if name != "activation" else v
      for name, v in options.items()
    }
    result = by_triton("h100", x, w, **options)
    with jp.use_target(targets.named_target("h100")):
      expected = jp.block_scaled_dot(x, w, implementation="xla", **options)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
    self.assertIn("_of_m", self.names())


@needs_interpreter
class HopperRowsTest(interpreted.RecordedTestCase, dot_rows.DotRowsTestCase):
  implementation = "triton"
  target = H200
  in_leg = (
    "mxfp6_e2m3 by mxfp6_e3m2, 5 rows",
    "fp8_128x128 by fp8_128x128, 70 rows",
    "bfloat16 by int4_32, 5 rows",
    "mxfp8 by int8_row, 5 rows",
    "float32 by int8_row, 4 rows",
    "bfloat16 by int4_32, 4 rows",
  )

  def dot(self, *args, **kwargs):
    return by_triton(self.target, *args, **kwargs)

  def test_lhs_is_dequantized_and_short_blocks_of_rhs_are_padded(self):
    for axes, other in (((1, 2), 6), ((2, 1), 20)):
      self.launched.clear()
      self.check(f"short blocks in k{axes[0]} and in k{axes[1]}")
      (launch,) = self.launched
      # The blocked dimension is padded to 32.
      tiling = dict(launch.constexprs)["TILING"]
      self.assertEqual(tiling.shape.k, 32 * other)
      self.assertIn("_f32_mxfp8_", launch.name)


@needs_interpreter
class BlackwellRowsTest(HopperRowsTest):
  target = B200


@needs_interpreter
class DescribedTest(interpreted.RecordedTestCase):
  """TMA descriptors, of operands that lie in any way with k minor."""

  @parameterized.parameters(
    (H200, jp.MXFP8, jp.MXFP4),
    (H200, None, jp.NVFP4),
    (B200, jp.NVFP4, jp.NVFP4),
  )
  @pytest.mark.sample(1)
  def test_bits_are_those_of_kernels_whose_threads_load(self, target, lhs, rhs):
    # (m, batch, k) and (batch, n, k); no size is a multiple of a tile.
    args = quantized(lhs, 65, 3, 96), quantized(rhs, 3, 35, 96, seed=1)
    numbers = (((2,), (2,)), ((1,), (0,)))
    usual = by_triton(target, *args, dimension_numbers=numbers)
    self.assertNotIn("_tma", self.names())
    self.launched.clear()
    described = triton_library.with_descriptors(target)
    result = by_triton(described, *args, dimension_numbers=numbers)
    self.assertIn("_tma", self.names())
    np.testing.assert_array_equal(result, usual)


@needs_interpreter
class PreparedTest(interpreted.RecordedTestCase):
  """Weights that `prepare_weights` rearranged."""

  def both(self, name, x, w, *, prepared_for=None, **options):
    """Results by the weight as it is prepared, and by the weight itself."""
    target = targets.named_target(prepared_for or name)
    prepared = jp.prepare_weights(w, target)
    return [by_triton(name, x, each, **options) for each in (prepared, w)]

  @parameterized.product(
    # Order of k is the same on sm_80; small_m's own on sm_90, of a weight that
    # is prepared another one.
    name=("a100", "h200"),
    format=(jp.MXFP4, jp.NVFP4),
    shapes=(((3, 160), (35, 160)), ((2, 19, 96), (2, 33, 96))),
  )
  @pytest.mark.sample(1)
  def test_prepared_weight_is_read_as_it_is(self, name, format, shapes):
    x = np.random.default_rng(1).integers(-4, 5, shapes[0]).astype(BF16)
    w = quantized(format, *shapes[1])
    result, of_weight = self.both(name, x, w)
    self.assertIn(f"_bf16_{format.name}_interleaved_", self.names())
    if name == "a100":
      np.testing.assert_array_equal(result, of_weight)
    expected = contract.dot(x.astype(np.float64), contract.exact(w))
    contract.assert_dot(result, *expected, result.dtype)

  @parameterized.parameters((jp.MXFP8, 130), (jp.NVFP4, 5))
  @pytest.mark.sample(1)
  def test_swizzled_scale_of_a_prepared_weight_changes_no_bit(
    self, format, rows
  ):
    w = quantized(format, 140, 160)
    prepared = jp.prepare_weights(w, B200)
    self.assertEqual(prepared.scale_layout, "swizzled_128x4")
    args = quantized(format, rows, 160, seed=1), w
    np.testing.assert_array_equal(*self.both("b200", *args))
    first, second = (
      dict(launch.constexprs)["TILING"].shape.rhs.scale_strides
      for launch in self.launched
    )
    self.assertEqual((len(first), len(second)), (2, 3))

  @parameterized.product(format=dot_rows.FP6, name=("h200", "b200"))
  def test_prepared_mxfp6_gives_the_same_bits(self, format, name):
    w = quantized(format, 33, 160)
    prepared = jp.prepare_weights(w, targets.named_target(name))
    is_swizzled = prepared.scale_layout == "swizzled_128x4"
    self.assertEqual(is_swizzled, name == "b200")
    np.testing.assert_array_equal(*self.both(name, normal(5, 160), w))

  def test_lhs_may_be_the_prepared_one(self):
    w, x = quantized(jp.MXFP4, 35, 96), quantized(jp.MXFP8, 3, 96, seed=1)
    prepared = jp.prepare_weights(w, targets.named_target("a100"))
    results = (by_triton("a100", lhs, x) for lhs in (prepared, w))
    np.testing.assert_array_equal(*results)
    self.assertIn("_mxfp4_interleaved_mxfp8_", self.names())

  @parameterized.parameters("b200", "mi300x")
  @pytest.mark.full
  def test_where_kernels_want_the_usual_order_it_is_put_back(self, name):
    args = quantized(jp.NVFP4, 3, 96, seed=1), quantized(jp.NVFP4, 35, 96)
    np.testing.assert_array_equal(*self.both(name, *args, prepared_for="h200"))
    self.assertNotIn("interleaved", self.names())
    self.assertLen(set(self.launched), len(self.launched) // 2)

  def test_several_contracting_dimensions_are_put_back(self):
    numbers = (((0, 2), (0, 2)), ((), ()))
    args = quantized(jp.MXFP4, 2, 3, 96, seed=1), quantized(jp.MXFP4, 2, 33, 96)
    results = self.both("a100", *args, dimension_numbers=numbers)
    np.testing.assert_array_equal(*results)
    self.assertNotIn("interleaved", self.names())


NATIVE, UPCAST, SMALL_M = "native", "upcast", "small_m"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A format that has no name, and which kernel of a B200 multiplies it."""

  values: np.dtype
  scale: np.dtype
  size: int
  kernel: str
  k: int = 192
  q: int = 0

  @property
  def has_int8_sums(self) -> bool:
    """Whether scales multiply sums of INT8 matrix instructions of an H100."""
    return self.values == INT8 and self.scale != E8M0

  @property
  def format(self) -> formats.BlockFormat:
    return contract.block_format(
      f"own {self.values} {self.scale} {self.size}",
      self.values,
      self.scale,
      self.size,
      fraction_bits=self.q,
    )


CASES = {
  "E8M0 of 64": Case(values=E4M3, scale=E8M0, size=64, kernel=NATIVE),
  "E8M0 of 128": Case(values=E5M2, scale=E8M0, size=128, kernel=NATIVE, k=256),
  "FP4, E8M0 of 64": Case(values=E2M1, scale=E8M0, size=64, kernel=NATIVE),
  "MXFP4 of 16": Case(values=E2M1, scale=E8M0, size=16, kernel=SMALL_M),
  "MXFP8 of 16": Case(values=E4M3, scale=E8M0, size=16, kernel=SMALL_M),
  "E4M3 on E4M3": Case(values=E4M3, scale=E4M3, size=32, kernel=SMALL_M),
  "E4M3 on E5M2": Case(values=E5M2, scale=E4M3, size=64, kernel=SMALL_M),
  "E5M2 on E4M3": Case(values=E4M3, scale=E5M2, size=32, kernel=SMALL_M),
  "E5M2 on E5M2": Case(
    values=E5M2, scale=E5M2, size=128, kernel=SMALL_M, k=256
  ),
  "FP4, E4M3 of 32": Case(values=E2M1, scale=E4M3, size=32, kernel=SMALL_M),
  "FP4, E5M2 of 16": Case(values=E2M1, scale=E5M2, size=16, kernel=SMALL_M),
  "MXINT8": Case(values=INT8, scale=E8M0, size=32, kernel=SMALL_M, q=6),
  "E4M3 on f32": Case(values=E4M3, scale=F32, size=128, kernel=SMALL_M),
  "E5M2 on bf16": Case(values=E5M2, scale=BF16, size=64, kernel=UPCAST),
  "INT8 on f16": Case(values=INT8, scale=F16, size=32, kernel=UPCAST),
  "INT8 on E4M3": Case(values=INT8, scale=E4M3, size=128, kernel=SMALL_M),
  "INT4 on bf16": Case(values=INT4, scale=BF16, size=128, kernel=SMALL_M),
  "INT4 on f16": Case(values=INT4, scale=F16, size=32, kernel=UPCAST),
  "INT8, rows": Case(values=INT8, scale=F32, size=200, kernel=SMALL_M, k=200),
  "E4M3, rows": Case(values=E4M3, scale=E8M0, size=104, kernel=SMALL_M, k=104),
}


def operand(rng, case, rows):
  """Small integers under scales 1/4 to 4, and what they mean, f64."""
  numbers = rng.choice([-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6], (rows, case.k))
  values = numbers.astype(case.values)
  powers = 2.0 ** rng.integers(-2, 3, (rows, -(-case.k // case.size)))
  if case.scale != E8M0:  # others than powers of two
    powers *= rng.choice([1, 1.5, 1.75], powers.shape)
  if case.scale == E4M3:
    powers *= rng.choice([-1, 1], powers.shape)
  scale = powers.astype(np.float32).astype(case.scale)
  exact = (
    values.astype(np.float64)
    * np.repeat(scale.astype(np.float64), case.size, axis=1)[:, : case.k]
    * 2.0**-case.q
  )
  values, scale = jax.device_put((values, scale))
  if case.values in formats.FOUR_BITS:
    values = jp.pack_fp4(values)
  return jp.ScaledArray(values, scale, None, case.format), exact


@needs_interpreter
class ScalesTest(interpreted.RecordedTestCase):
  @pytest.mark.full
  def test_products_of_integers_are_exact(self):
    for name, case in CASES.items():
      rng = np.random.default_rng(len(name))
      for target, rows in (("b200", 5), ("h100", 5), ("h100", 70)):
        with self.subTest(name, target=target, rows=rows):
          x, x_exact = operand(rng, case, rows)
          w, w_exact = operand(rng, case, 40)
          self.launched.clear()
          result = by_triton(target, x, w)
          np.testing.assert_array_equal(result, x_exact @ w_exact.T)
          is_upcast = target == "h100" and case.kernel == NATIVE
          kernel = SMALL_M if is_upcast else case.kernel
          kernel = UPCAST if rows > 64 else kernel
          if target == "h100" and case.has_int8_sums:
            kernel = "int8"
          self.assertRegex(self.names(), f"^block_scaled_{kernel}_")

  @parameterized.parameters(
    (E8M0, E8M0, 70, "fp8_e4m3_e8m0_128_e4m3_e8m0_128"),
    (F32, E8M0, 70, "fp8_e4m3_f32_128_e4m3_e8m0_128"),
    (E8M0, E8M0, 5, "small_m_mxfp8_mxfp8"),
  )
  def test_fp8_instructions_sum_whole_blocks(
    self, lhs_scale, rhs_scale, rows, kernel
  ):
    rng = np.random.default_rng(0)
    (x, x_exact), (w, w_exact) = (
      operand(
        rng, Case(values=E4M3, scale=s, size=128, kernel="fp8", k=256), count
      )
      for s, count in ((lhs_scale, rows), (rhs_scale, 40))
    )
    result = by_triton("h100", x, w, precision="fastest")
    np.testing.assert_array_equal(result, x_exact @ w_exact.T)
    self.assertRegex(self.names(), f"^block_scaled_{kernel}_")

  @parameterized.parameters(
    ("fp8_1x128", 70, "fp8_e4m3_f32_128_e4m3_f32_128_square"),
    ("fp8_128x128", 140, "fp8_e4m3_f32_128_square_e4m3_f32_128_square"),
    ("fp8_1x128_e8m0", 70, "fp8_e4m3_e8m0_128_e4m3_f32_128_square"),
    ("fp8_1x128", 5, "small_m_e4m3_f32_128_e4m3_f32_128_square"),
    (None, 70, "upcast_bf16_e4m3_f32_128_square"),
  )
  def test_square_blocks_give_the_bits_of_repeated_scales(
    self, format, rows, kernel
  ):
    n, k = 168, 208  # tails of tiles and of blocks
    batch = (2,) if format == "fp8_128x128" or rows == 5 else ()
    x = quantized(format, *batch, rows, k)
    w = quantized("fp8_128x128", *batch, n, k, seed=1)
    result = by_triton("h100", x, w, precision="fastest")
    self.assertRegex(self.names(), f"^block_scaled_{kernel}_")
    x, w = (y if isinstance(y, jax.Array) else y.in_rows() for y in (x, w))
    wanted = by_triton("h100", x, w, precision="fastest")
    np.testing.assert_array_equal(result, wanted)

  def test_scale_of_a_square_block_is_nan_in_its_columns_only(self):
    w = quantized("fp8_128x128", 264, 128)
    scale = np.array(w.scale)
    scale[1, 0] = np.nan
    w = jp.ScaledArray(w.values, jnp.asarray(scale), None, w.format)
    x = quantized("fp8_1x128", 70, 128)
    result = by_triton("h100", x, w, precision="fastest")
    wanted = np.zeros((70, 264), bool)
    wanted[:, 128:256] = True
    np.testing.assert_array_equal(np.isnan(result), wanted)

  def test_square_blocks_are_contracted_along_their_rows(self):
    x, w = quantized(None, 70, 208), quantized("fp8_128x128", 208, 168)
    numbers = (((1,), (0,)), ((), ()))
    result = by_triton("h100", x, w, dimension_numbers=numbers)
    self.assertRegex(self.names(), "upcast_bf16_e4m3_f32_128_square_")
    np.testing.assert_array_equal(result, by_triton("h100", x, w.T))

  def test_square_blocks_whose_rows_merge_have_repeated_scales(self):
    x = quantized("fp8_128x128", 2, 40, 256)
    w = quantized("fp8_1x128", 40, 256)
    result = by_triton("h100", x, w, precision="fastest")
    self.assertRegex(self.names(), "fp8_e4m3_f32_128_e4m3_f32_128_64")
    wanted = by_triton("h100", x.in_rows(), w, precision="fastest")
    np.testing.assert_array_equal(result, wanted)

  @parameterized.parameters("E5M2 on E4M3", "INT4 on f16", "INT8, rows")
  def test_scales_of_a_ragged_dot(self, name):
    rng = np.random.default_rng(1)
    case = CASES[name]
    w, exact = operand(rng, case, 2 * 24)
    w = jp.ScaledArray(
      w.values.reshape(2, 24, -1), w.scale.reshape(2, 24, -1), None, case.format
    )
    x = rng.integers(-4, 5, (7, case.k)).astype(np.float32)
    args = jnp.asarray(x, jnp.bfloat16), w, jnp.array([3, 4])
    with jp.use_target(targets.named_target("h100")):
      result = jp.ragged_dot(*args, implementation="triton")
    exact = exact.reshape(2, 24, case.k)
    wanted = np.concatenate([x[:3] @ exact[0].T, x[3:] @ exact[1].T])
    np.testing.assert_array_equal(result, wanted)


M, N, K = 16, 32, 64
# Products are positive, so a sum is sum(|a * b|). Two more roundings come from
# the product of both scales, and from the multiplication by it.
RTOL = contract.DOT_BOUND + 2 * 2.0**-24
# A sum over the result, too, whatever its order.
RTOL_OF_SUM = RTOL + M * N * 2.0**-24


@needs_interpreter
class TwoGlobalScalesTest(interpreted.RecordedTestCase):
  """Two global scales, which the kernels take one by one.

  A product of both that is another one (mapped, or a tangent) must not be
  computed of the old ones.
  """

  def setUp(self):
    super().setUp()
    jax.clear_caches()  # what is launched is seen as it is lowered
    rng = np.random.default_rng(0)
    x, w = (
      jp.quantize(rng.integers(1, 5, (rows, K)).astype(np.float32), jp.NVFP4)
      for rows in (M, N)
    )
    # Without global scales, which no f32 loses.
    self.exact_x, self.exact_w = (
      np.float64(jp.dequantize(self.scaled(a, 1))) for a in (x, w)
    )
    self.x, self.w = self.scaled(x, 1.7e-20), self.scaled(w, 3.1e19)
    factors = np.float64(self.x.global_scale) * np.float64(self.w.global_scale)
    self.exact = self.exact_x @ self.exact_w.T * factors

  def scaled(self, x, global_scale):
    return jp.ScaledArray(
      x.values, x.scale, jnp.float32(global_scale), x.format
    )

  def dot(self, x, w, **options):
    return by_triton(H200, x, w, **options)

  @pytest.mark.full
  def test_mapped_global_scale(self):
    factors = jnp.float32([1, -3, 0.5])
    x = jax.tree.map(lambda a: jnp.stack([a] * 3), self.x)
    scales = self.x.global_scale * factors
    stacked = jp.ScaledArray(x.values, x.scale, scales, jp.NVFP4)
    expected = np.float64(factors)[:, None, None] * self.exact
    for result in (
      jax.vmap(self.dot, in_axes=(0, None))(stacked, self.w),
      jax.vmap(lambda s: self.dot(self.scaled(self.x, s), self.w))(scales),
    ):
      np.testing.assert_allclose(result, expected, rtol=RTOL)

  @pytest.mark.full
  def test_derivative_by_a_global_scale(self):
    scale = jnp.float32(0.37)
    bare = self.scaled(self.w, 1)
    weight = jp.ScaledArray(bare.values, bare.scale, None, jp.NVFP4)

    def f(scale):
      return self.dot(self.x, weight, global_scale=scale)

    result, tangent = jax.jvp(f, (scale,), (jnp.float32(-2),))
    exact = self.exact / np.float64(self.w.global_scale)
    np.testing.assert_allclose(result, exact * np.float64(scale), rtol=RTOL)
    tiling = dict(self.launched[0].constexprs)["TILING"]
    self.assertTrue(tiling.shape.has_two_global_scales)
    np.testing.assert_allclose(tangent, exact * -2, rtol=RTOL)
    gradient = jax.grad(lambda scale: f(scale).sum())(scale)
    np.testing.assert_allclose(gradient, exact.sum(), rtol=RTOL_OF_SUM)


class FactsTest(absltest.TestCase):
  """Facts that the package states a second time."""

  def test_tiles_of_swizzled_scales_are_the_packages(self):
    # 130 x 5 scales are two tiles of rows, each of two tiles.
    kind = configs.operand("nvfp4", 130, 80, swizzled=True)
    padded = layouts.swizzled_shape((130, 5))
    self.assertEqual(kind.scale_strides[0], math.prod(padded))
    self.assertEqual(kind.scale_strides[1], 128 * padded[1])

  def test_swizzled_scales_of_all_batches_lie_one_after_another(self):
    for batch in ((), (3,), (2, 3)):
      ndim = len(batch) + 2
      shape = (*batch, 256, 12)  # 2 x 3 tiles
      side = sides.Side(
        name="rhs",
        values=jax.ShapeDtypeStruct((*batch, 140, 320), formats.E4M3),
        scale=jax.ShapeDtypeStruct(shape, formats.E8M0),
        format=jp.MXFP8,
        axis=ndim - 1,
        scale_layout="swizzled_128x4",
        contracting=(ndim - 1,),
        batch=tuple(range(len(batch))),
      )
      _, strides = triton._strided_scale(side)
      # From a batch to the next one, and from a row of tiles, in bytes.
      self.assertEqual(strides, (256 * 12, 3 * 512), batch)


class ConversionTest(parameterized.TestCase):
  """Notes about the decoding of FP4."""

  def notes(self, target, *, lhs=None, rhs=jp.NVFP4, ragged=False):
    x = jax.ShapeDtypeStruct((4, 256), np.dtype("bfloat16"))
    if lhs is not None:
      x = jax.eval_shape(lambda x: jp.quantize(x, lhs), x)
    w = jax.ShapeDtypeStruct((2, 512, 256), np.dtype("bfloat16"))
    w = jax.eval_shape(lambda w: jp.quantize(w, rhs), w)
    if ragged:
      dot = jp.ragged_dot
      args = x, w, jax.ShapeDtypeStruct((2,), np.dtype("int32"))
    else:
      dot, args = jp.block_scaled_dot, (x, jax.eval_shape(lambda w: w[0], w))
    dot = functools.partial(dot, implementation="triton")
    (told,) = jp.explain(dot, *args, target=target)
    return [note for note in told.decision.notes if "FP4" in note]

  @parameterized.product(name=("b200", "rtx5090"), ragged=(False, True))
  def test_which_and_why(self, name, ragged):
    needs = (
      "decoded by integer operations: its conversion needs ptxas 13.2, and the"
      " target's is "
    )
    unknown = "not known (name it with --ptxas or ptxas='13.2')"
    for ptxas, expected in (
      ("13.4.59", "converted by cvt.rn.bf16x2.e2m1x2 (ptxas 13.4.59)"),
      *(("13.1", f"{needs}13.1.0"), (None, needs + unknown)),
    ):
      target = targets.named_target(name, ptxas=ptxas)
      (note,) = self.notes(target, ragged=ragged)
      self.assertEqual(note, f"FP4 is {expected}")

  @parameterized.parameters(
    ("h200", None, jp.NVFP4),
    ("rtx5090", None, jp.MXFP8),
    ("rtx5090", jp.NVFP4, jp.NVFP4),
  )
  def test_nothing_where_there_is_one_way(self, name, lhs, rhs):
    target = targets.named_target(name, ptxas="13.4")
    self.assertEmpty(self.notes(target, lhs=lhs, rhs=rhs))


class OwnFormatsTest(parameterized.TestCase):
  def choose(self, format, target, k=512):
    problem = dot_problems.problem(format, k=k)
    return backends.choose(problem, targets.named_target(target))

  def test_gpus_read_them(self):
    for name, case in CASES.items():
      for target in ("a100", "h100", "b200", "rtx5090"):
        with self.subTest(name, target=target):
          decision = self.choose(case.format, target, case.k)
          self.assertEqual(decision.implementation, "triton", str(decision))
          notes = " ".join(decision.notes)
          is_exact = case.scale.itemsize == 1 and case.values not in (
            INT8,
            INT4,
          )
          is_repeated = is_exact and case.size in (64, 128)
          self.assertEqual("is repeated" in notes, is_repeated, notes)
          scales_sums = case.size == 104 or not (is_exact or case.q)
          is_int8 = case.has_int8_sums and target in ("a100", "h100")
          self.assertEqual("INT8 matrix instructions" in notes, is_int8, notes)
          is_decoded = scales_sums and not is_int8
          self.assertEqual("multiplies f32 sums" in notes, is_decoded, notes)

  @parameterized.parameters(
    ("h100", jp.FP8_1X128, 128, "fp8"),
    ("l40s", jp.FP8_1X128, 128, "fp8"),
    ("h100", jp.FP8_1X128_E8M0, 128, "fp8"),
    ("l40s", jp.FP8_1X128_E8M0, 128, "fp8"),
    ("h100", jp.FP8_1X128, 16, "small_m"),
    ("h100", jp.FP8_1X128_E8M0, 16, "small_m"),
    ("a100", jp.FP8_1X128, 128, "upcast"),
    ("a100", jp.FP8_1X128_E8M0, 128, "upcast"),
    ("h100", jp.INT4_32, 128, "upcast"),
  )
  def test_fastest_precision_sums_by_fp8_instructions(
    self, target, format, m, path
  ):
    target = targets.named_target(target)
    for is_fastest in (True, False):
      problem = dot_problems.problem(format, m=m, fastest_precision=is_fastest)
      notes = " ".join(backends.choose(problem, target).notes)
      is_fp8 = is_fastest and path == "fp8"
      self.assertEqual(triton.plan(problem, target).is_native, is_fp8)
      scales = (
        "is repeated 4" if format.scale_is_power_of_two else "decoded to bf16"
      )
      self.assertEqual(scales in notes, not is_fp8, notes)
      name = f"block_scaled_{path}_" if is_fastest else "block_scaled_"
      self.assertIn(name, notes)
      self.assertEqual("14 significant bits" in notes, is_fp8, notes)

  def test_blocks_of_another_size_are_refused_with_the_reason(self):
    format = dataclasses.replace(CASES["E8M0 of 64"].format, block_size=24)
    decision = self.choose(format, "h100")
    self.assertEqual(decision.implementation, "xla")
    reason = dot_problems.reasons(decision)["triton"]
    self.assertIn("blocks of lhs must have a multiple of 32 values", reason)


class ErrorTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.x = jp.quantize(np.ones((16, 64), np.float32), jp.MXFP8)

  def refusal(self, target, rows=16, k=64):
    x = jp.quantize(np.ones((rows, k), np.float32), jp.MXFP8)
    (dot,) = jp.explain(jp.block_scaled_dot, x, x, target=target)
    self.assertEqual(dot.decision.implementation, "xla")
    return dot_problems.reasons(dot.decision)["triton"]

  def assert_lowering_refused(self, target, platform, words):
    with jp.use_target(target):
      traced = jax.jit(jp.block_scaled_dot).trace(self.x, self.x)
      with self.assertRaisesRegex(NotImplementedError, words):
        traced.lower(lowering_platforms=(platform,))

  def test_amd_gpu_by_name_is_told(self):
    target = targets.named_target("mi300x")
    self.assertRegex(self.refusal(target), "AMD GPUs only if one is attached")
    forced = functools.partial(by_triton, target)
    with self.assertRaisesRegex(NotImplementedError, "only if one is attached"):
      jax.jit(forced).trace(self.x, self.x)

  @parameterized.parameters(("gfx950", "gfx950"), (None, "none"))
  def test_amd_gpu_of_another_architecture_is_told_by_lowering(
    self, architecture, gpu
  ):
    # jax-triton compiles for the device that it finds, whatever is asked for.
    local = targets.Target(
      name="local", platform="rocm", architecture=architecture
    )
    target = targets.named_target("mi300x").with_library(targets.JAX_TRITON)
    with mock.patch.object(targets, "detect_target", lambda *_: local):
      self.assert_lowering_refused(
        *(target, "rocm", rf"only for the attached AMD GPU \({gpu}\).* mi300x")
      )

  def test_missing_jax_triton_is_told(self):
    triton_library._import_error.cache_clear()
    self.addCleanup(triton_library._import_error.cache_clear)
    with mock.patch.dict(sys.modules, {"jax_triton": None}):
      self.assert_lowering_refused(H200, "cuda", "needs jax-triton")

  def test_target_with_too_little_memory_is_refused_with_the_numbers(self):
    target = dataclasses.replace(H200, shared_memory_bytes=1024)
    # The least tile, twice 16 x 32: a byte a value, a scale a row, and bf16.
    needed = 2 * (16 * 32 + 16 + 2 * 16 * 32)
    text = f"may need {needed} bytes of shared memory, sm_90 has 1024"
    self.assertEndsWith(self.refusal(target, 256, 256), text)
