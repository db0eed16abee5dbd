# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: what reaches the kernels of unusual operands.

Read by TMA descriptors, blocked along different dimensions, or rearranged by
`prepare_weights`; run by Triton's interpreter (`interpreted`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import reference
from jaxplugin.dot import sides
from jaxplugin.dot.backends import triton
from jaxplugin.runtime import triton_library
from jaxplugin.testing import contract
from jaxplugin.testing import interpreted
from jaxplugin.testing.dot_suite import dot_rows

needs_interpreter = interpreted.needs_interpreter


@needs_interpreter
class DescribedTest(interpreted.RecordedTestCase):
  """TMA descriptors, of operands that lie in any way with k minor."""

  @parameterized.parameters(
    ("h200", jp.MXFP8, jp.MXFP4),
    ("h200", None, jp.NVFP4),
    ("b200", jp.NVFP4, jp.NVFP4),
  )
  @pytest.mark.sample(1)
  def test_bits_are_those_of_kernels_whose_threads_load(self, name, lhs, rhs):
    rng = np.random.default_rng(0)
    # (m, batch, k) and (batch, n, k); no size is a multiple of a tile.
    x, w = (
      rng.normal(size=shape).astype(np.float32)
      for shape in ((65, 3, 96), (3, 35, 96))
    )
    x = jnp.asarray(x, jnp.bfloat16) if lhs is None else jp.quantize(x, lhs)
    w = jp.quantize(w, rhs)

    def dot(target):
      with jp.use_target(target):
        return jp.block_scaled_dot(
          x,
          w,
          dimension_numbers=(((2,), (2,)), ((1,), (0,))),
          implementation="triton",
        )

    target = targets.named_target(name)
    usual = dot(target)
    self.assertNotIn("_tma", self.names())
    self.launched.clear()
    result = dot(triton_library.with_descriptors(target))
    self.assertIn("_tma", self.names())
    np.testing.assert_array_equal(result, usual)


@needs_interpreter
class HopperRowsTest(interpreted.RecordedTestCase, dot_rows.DotRowsTestCase):
  implementation = "triton"
  target = targets.named_target("h200")
  in_leg = ("mxfp6_e2m3 by mxfp6_e3m2, 5 rows",)

  def dot(self, *args, **kwargs):
    with jp.use_target(self.target):
      return super().dot(*args, **kwargs)

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
  target = targets.named_target("b200")


@needs_interpreter
class PreparedTest(interpreted.RecordedTestCase):
  """Weights that `prepare_weights` rearranged, through the whole lowering."""

  def weight(self, format, shape, seed=0):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jp.quantize(x, format)

  def dot(self, x, w, name, **options):
    target = targets.named_target(name).with_library(targets.JAX_TRITON)
    with jp.use_target(target):
      return jp.block_scaled_dot(x, w, implementation="triton", **options)

  @parameterized.product(
    # Order of k is the same on sm_80; small_m's own on sm_90, of a weight that
    # is prepared another one.
    name=("a100", "h200"),
    format=(jp.MXFP4, jp.NVFP4),
    shapes=(((3, 160), (35, 160)), ((2, 19, 96), (2, 33, 96))),
  )
  @pytest.mark.sample(1)
  def test_prepared_weight_is_read_as_it_is(self, name, format, shapes):
    x_shape, w_shape = shapes
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, x_shape).astype(jnp.bfloat16)
    w = self.weight(format, w_shape)
    prepared = jp.prepare_weights(w, targets.named_target(name))
    result = self.dot(x, prepared, name)
    self.assertIn(f"_bf16_{format.name}_interleaved_", self.names())
    expected = self.dot(x, w, name)
    if name == "a100":
      np.testing.assert_array_equal(result, expected)
    exact = reference.oracle_dequantize(
      np.asarray(w.unpack().values), np.asarray(w.scale), format
    )
    x = np.asarray(x, np.float64)
    last = x.ndim - 1
    batch = tuple(range(last - 1))
    numbers = (((last,), (last,)), (batch, batch))
    exact, magnitude = reference.oracle_dot(x, exact, numbers)
    if w.global_scale is not None:
      exact = exact * np.float64(w.global_scale)
      magnitude = magnitude * np.float64(w.global_scale)
    contract.assert_within(
      result, exact, contract.DOT_BOUND * magnitude, result.dtype
    )

  @parameterized.product(format=dot_rows.FP6, name=("h200", "b200"))
  @pytest.mark.sample(1)
  def test_prepared_mxfp6_gives_the_same_bits(self, format, name):
    x = np.random.default_rng(5).normal(size=(5, 160)).astype(np.float32)
    w = self.weight(format, (33, 160))
    prepared = jp.prepare_weights(w, targets.named_target(name))
    is_swizzled = prepared.scale_layout == "swizzled_128x4"
    self.assertEqual(is_swizzled, name == "b200")
    np.testing.assert_array_equal(
      self.dot(x, prepared, name), self.dot(x, w, name)
    )

  @parameterized.parameters((jp.MXFP8, 130), (jp.NVFP4, 5))
  @pytest.mark.sample(1)
  def test_swizzled_scale_of_a_prepared_weight_changes_no_bit(
    self, format, rows
  ):
    w = self.weight(format, (140, 160))
    x = self.weight(format, (rows, 160), 1)
    prepared = jp.prepare_weights(w, targets.named_target("b200"))
    self.assertEqual(prepared.scale_layout, "swizzled_128x4")
    np.testing.assert_array_equal(
      self.dot(x, prepared, "b200"), self.dot(x, w, "b200")
    )
    first, second = (
      dict(launch.constexprs)["TILING"].shape.rhs.scale_strides
      for launch in self.launched
    )
    self.assertEqual((len(first), len(second)), (2, 3))

  def test_epilogue_vmap_and_jit(self):
    w = self.weight(jp.MXFP4, (2, 33, 96))
    prepared = jp.prepare_weights(w, targets.named_target("a100"))
    x = np.random.default_rng(1).normal(size=(2, 3, 96)).astype(np.float32)
    bias = np.linspace(-1, 1, 33, dtype=np.float32)

    @jax.jit
    @jax.vmap
    def f(x, w):
      return self.dot(x, w, "a100", bias=bias, activation="silu")

    np.testing.assert_array_equal(f(x, prepared), f(x, w))
    self.assertIn("_f32_mxfp4_interleaved_", self.names())

  def test_lhs_may_be_the_prepared_one(self):
    w = self.weight(jp.MXFP4, (35, 96))
    x = self.weight(jp.MXFP8, (3, 96), 1)
    prepared = jp.prepare_weights(w, targets.named_target("a100"))
    np.testing.assert_array_equal(
      self.dot(prepared, x, "a100"), self.dot(w, x, "a100")
    )
    self.assertIn("_mxfp4_interleaved_mxfp8_", self.names())

  @parameterized.parameters("b200", "mi300x")
  @pytest.mark.full
  def test_where_kernels_want_the_usual_order_it_is_put_back(self, name):
    w = self.weight(jp.NVFP4, (35, 96))
    x = self.weight(jp.NVFP4, (3, 96), 1)
    prepared = jp.prepare_weights(w, targets.named_target("h200"))
    np.testing.assert_array_equal(
      self.dot(x, prepared, name), self.dot(x, w, name)
    )
    self.assertNotIn("interleaved", self.names())
    self.assertLen(set(self.launched), len(self.launched) // 2)

  def test_several_contracting_dimensions_are_put_back(self):
    numbers = (((0, 2), (0, 2)), ((), ()))
    w = self.weight(jp.MXFP4, (2, 33, 96))
    x = self.weight(jp.MXFP4, (2, 3, 96), 1)
    prepared = jp.prepare_weights(w, targets.named_target("a100"))
    np.testing.assert_array_equal(
      self.dot(x, prepared, "a100", dimension_numbers=numbers),
      self.dot(x, w, "a100", dimension_numbers=numbers),
    )
    self.assertNotIn("interleaved", self.names())


class StridesTest(absltest.TestCase):
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


if __name__ == "__main__":
  absltest.main()
