# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_both` is `quantize` along each axis, bit by bit.

api_mx_test.py and api_nvfp4_test.py compare `quantize` with NumPy.
"""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.core import blocking
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing import quantization_lowerings

MXFP8 = formats.MXFP8
MXFP4, NVFP4 = formats.MXFP4, formats.NVFP4
FLOOR = {"scale_rounding": "floor"}
PER_16 = formats.BlockFormat(
  name="mxfp8_per_16",
  values_dtype=formats.E4M3,
  scale_dtype=formats.E8M0,
  block_size=16,
)
assert_same_bits = contract.assert_same_bits


def each(x, format, *, axes=(-1, -2), **kwargs):
  return tuple(
    quantization.quantize(x, format, axis=axis, **kwargs) for axis in axes
  )


def numbers(shape, dtype=np.float32):
  """With NaN and Inf, and next to them the largest of the array.

  So blocks of one axis leave out of NVFP4's global scale what those of another
  do not.
  """
  x = np.random.default_rng(21).normal(size=shape)
  x[..., 3, 5], x[..., 3, 6] = np.nan, 60.0
  x[..., 40, 9], x[..., 45, 9] = -np.inf, -40.0
  x[..., 50, :] = 0.0
  x[..., 51, 2] = -0.0
  return jnp.asarray(x.astype(dtype))


class BitwiseTest(parameterized.TestCase):
  @parameterized.parameters(
    *(
      (format, {"axes": axes}, shape, dtype)
      for format in formats.FORMATS
      for shape, axes, dtype in (
        ((64, 96), (-1, -2), np.float32),
        ((64, 32), (0, 1), jnp.bfloat16),
        ((32, 64, 64), (0, 2), np.float16),
      )
    ),
    *((format, FLOOR, (64, 64), np.float32) for format in (MXFP8, MXFP4)),
    (NVFP4, {"global_scale": 0.37}, (64, 64), np.float32),
    (PER_16, {}, (80, 64), np.float32),  # no kernel has this format
  )
  @pytest.mark.sample(1)
  def test_quantize_both_is_quantize_along_each_axis(
    self, format, options, shape, dtype
  ):
    x = numbers(shape, dtype)
    result = quantization.quantize_both(x, format, **options)
    self.assertIsInstance(result, tuple)
    assert_same_bits(result, each(x, format, **options))
    axes = options.get("axes", (-1, -2))
    for q, axis in zip(result, axes, strict=True):
      self.assertEqual((q.shape, q.axis), (x.shape, axis % x.ndim))
    if options == FLOOR:
      up = each(x, format)
      self.assertTrue((result[0].scale != up[0].scale).any())
      self.assertTrue((result[1].scale != up[1].scale).any())
    if given := options.get("global_scale"):
      self.assertEqual(
        [q.global_scale for q in result], [np.float32(given)] * 2
      )

  def test_numbers_spoil_global_scales_of_each_axis_differently(self):
    row, column = quantization.quantize_both(numbers((64, 96)), NVFP4)
    # 60 is in the row's bad block, -40 in the column's.
    self.assertEqual(row.global_scale, np.float32(40) / np.float32(2688))
    self.assertEqual(column.global_scale, np.float32(60) / np.float32(2688))

  @parameterized.parameters(
    (MXFP8, (0, 64)), (NVFP4, (64, 0)), (NVFP4, (0, 32, 64))
  )
  @pytest.mark.sample(1)
  def test_empty_arrays_stay_empty(self, format, shape):
    x = jnp.zeros(shape)
    assert_same_bits(quantization.quantize_both(x, format), each(x, format))

  @parameterized.parameters(MXFP8, NVFP4)
  @pytest.mark.sample(1)
  def test_blockings_merge_and_pad_first(self, format):
    x = np.random.default_rng(22).normal(size=(3, 5, 40)).astype(np.float32)
    blockings = [
      blocking.Blocking(dims=(2,), lead=(0, 1), multiple=64),
      blocking.Blocking(dims=(0, 1), lead=(2,), multiple=32),
    ]
    first, second = quantization.quantize_blocked(
      x, format, blockings, scale_rounding="up"
    )
    padded = np.pad(x, ((0, 0), (0, 0), (0, 24)))
    quantize = functools.partial(
      quantization.quantize, format=format, packed=False
    )
    assert_same_bits(first, quantize(padded))
    merged = np.pad(x.transpose(2, 0, 1).reshape(40, 15), ((0, 0), (0, 17)))
    assert_same_bits(second, quantize(merged))


class TransformTest(parameterized.TestCase):
  @parameterized.parameters((MXFP8, "b, a, 64"), (NVFP4, "a*32, 64"))
  @pytest.mark.full
  def test_exported_module_serves_symbolic_sizes(self, format, shape):
    (*lead, rows, columns) = jax.export.symbolic_shape(shape)
    if lead:
      rows = 32 * rows
    x = jax.ShapeDtypeStruct((*lead, rows, columns), jnp.float32)
    exported = jax.export.export(
      jax.jit(lambda x: quantization.quantize_both(x, format)),
      platforms=("cpu", "cuda"),
    )(x)
    x = numbers((*(3 for _ in lead), 64, 64))
    assert_same_bits(exported.call(x), each(x, format))


class UnusedTest(parameterized.TestCase):
  """Results that nobody uses are not computed."""

  def kernel_calls(self, function):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return quantization_lowerings.calls(function, x)[0]

  @quantization_lowerings.needs_library
  def test_fp4_calls_a_kernel_for_each_axis_that_is_used(self):
    both = lambda x: quantization.quantize_both(x, MXFP4)
    self.assertEqual(self.kernel_calls(both), 2)
    for i in range(2):
      for leaf in ("values", "scale"):
        one = lambda x, i=i, leaf=leaf: getattr(both(x)[i], leaf)
        self.assertEqual(self.kernel_calls(one), 1)
    self.assertEqual(self.kernel_calls(lambda x: (both(x), x)[1]), 0)

  @quantization_lowerings.needs_library
  def test_the_one_that_is_used_is_right(self):
    x = numbers((64, 96))
    for i, expected in enumerate(each(x, NVFP4)):
      one = jax.jit(lambda x, i=i: quantization.quantize_both(x, NVFP4)[i])
      assert_same_bits(one(x), expected)

  def test_the_one_that_is_used_has_its_own_global_scale(self):
    x, scales = numbers((64, 96)), np.float32([0.3, 7])
    blockings = [blocking.Blocking.along(d, 2, 16) for d in (1, 0)]
    for i, axis in enumerate((1, 0)):
      one = jax.jit(
        lambda x, g, i=i: quantization.quantize_blocked(
          x, NVFP4, blockings, scale_rounding="up", global_scale=g
        )[i]
      )
      expected = quantization.quantize(
        x, NVFP4, axis=axis, global_scale=scales[i], packed=False
      )
      assert_same_bits(one(x, scales), expected)
