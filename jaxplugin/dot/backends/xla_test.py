# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla implementation: dtypes of dots, and scale factors of rows."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot import calls, sides
from jaxplugin.dot.backends import xla
from jaxplugin.testing import contract


def side(name, kind):
  """A block format's side, or a plain one of a dtype."""
  format = kind if isinstance(kind, jp.BlockFormat) else None
  dtype = kind if format is None else format.values_dtype
  return sides.Side(
    name=name, values=jax.ShapeDtypeStruct((8, 64), dtype), format=format
  )


class OperandDtypeTest(parameterized.TestCase):
  @parameterized.parameters(
    # bf16 has 8 significant bits. Products of E4M3 and E4M3 have 4 + 4 at most,
    # f16 has 11 and f32 has 24.
    ("h200", jp.MXFP8, jp.NVFP4, jnp.bfloat16),
    ("h200", jnp.bfloat16, jp.MXFP4, jnp.bfloat16),
    ("h200", jnp.float16, jp.MXFP4, jnp.float32),
    ("h200", jp.MXFP8, jnp.float32, jnp.float32),
    ("cpu", jnp.bfloat16, jp.MXFP4, jnp.float32),
  )
  def test_gpus_multiply_bf16_if_it_holds_both_sides(
    self, target, lhs, rhs, expected
  ):
    call = calls.DotCall(
      lhs=side("lhs", lhs),
      rhs=side("rhs", rhs),
      preferred_element_type=np.dtype(np.float32),
    )
    found = xla.operand_dtype(call, targets.named_target(target))
    self.assertEqual(np.dtype(found), np.dtype(expected))


class RowScaleTest(parameterized.TestCase):
  def operands(self, lhs, rhs):
    rng = np.random.default_rng(0)
    arrays = (rng.normal(size=(2, n, 96)).astype(np.float32) for n in (3, 5))
    return [
      contract.quantized(x, format) if format else x.astype(jnp.bfloat16)
      for x, format in zip(arrays, (lhs, rhs), strict=True)
    ]

  def dot(self, *operands, numbers=(((2,), (2,)), ((0,), (0,)))):
    return jp.block_scaled_dot(
      *operands, dimension_numbers=numbers, implementation="xla"
    )

  @parameterized.parameters(
    (jp.FP8_ROW, jp.FP8_ROW, "bf16"),
    (jp.INT8_ROW, jp.INT8_ROW, "bf16"),
    (None, jp.FP8_ROW, "bf16"),
    (jp.FP8_ROW, jp.MXFP8, "bf16"),
    # Several scale factors of a row multiply values, in f32.
    (None, jp.INT8_32, "f32"),
    (jp.FP8_ROW, jp.FP8_128X128, "bf16"),
  )
  def test_rows_of_codes_are_multiplied_in_bf16(self, lhs, rhs, dtype):
    x, w = self.operands(lhs, rhs)
    found = self.dot(x, w)
    exact = [
      contract.exact(a) if isinstance(a, jp.ScaledArray) else np.float64(a)
      for a in (x, w)
    ]
    expected = np.einsum("bmk,bnk->bmn", *exact)
    bound = 16 * 2.0**-24 * np.einsum("bmk,bnk->bmn", *map(np.abs, exact))
    self.assertTrue((np.abs(found - expected) <= bound).all())
    with jp.use_target(targets.named_target("h200")):
      lowered = (
        jax.jit(self.dot).trace(x, w).lower(lowering_platforms=("cuda",))
      )
    self.assertRegex(
      lowered.as_text(), rf"dot_general.*tensor<2x3x96x{dtype}>, "
    )

  def test_scale_factors_follow_their_dimensions_of_the_result(self):
    x, w = self.operands(jp.FP8_ROW, jp.INT8_ROW)
    found = self.dot(x, w, numbers=(((2,), (2,)), ((), ())))
    exact = [contract.exact(a) for a in (x, w)]
    expected = np.einsum("amk,bnk->ambn", *exact)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

  def test_rows_of_two_contracting_dimensions_have_several_scales(self):
    x, w = self.operands(jp.INT8_ROW, jp.INT8_ROW)
    w = jax.tree.map(lambda leaf: leaf[:, :3], w)
    found = self.dot(x, w, numbers=(((1, 2), (1, 2)), ((), ())))
    exact = [contract.exact(a) for a in (x, w)]
    expected = np.einsum("amk,bmk->ab", *exact)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
