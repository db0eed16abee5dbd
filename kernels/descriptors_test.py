# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Descriptors of operands, their limits, and loads of the interpreter.

`gpu/block_scaled_matmul_test.py` compares kernels with and without descriptors.
"""

import numpy as np
import triton
import triton.language as tl
from absl.testing import absltest, parameterized
from jaxplugin.kernels.gpu import configs, matmul_plans

from jaxplugin.kernels import descriptors
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import matmul_shapes


@triton.jit
def copy_kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
  box = x.load([0, tl.program_id(0) * ROWS, 0]).reshape(ROWS, COLUMNS)
  rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  offsets = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
  tl.store(out + offsets, box)


@absltest.skipIf(interpret.unsupported(), interpret.unsupported() or "-")
class InterpretTest(parameterized.TestCase):
  def copy(self, x, shape, strides=(512, 32, 1)):
    descriptor = descriptors.Descriptor(
      shape=shape, strides=strides, block_shape=(1, 4, 32)
    )
    out = np.full((8, 32), 9, np.uint8)
    interpret.launch(
      copy_kernel,
      2,
      descriptors.Described(x, descriptor),
      out,
      ROWS=4,
      COLUMNS=32,
    )
    return out

  def test_beyond_the_shape_are_zeros_not_neighbours(self):
    x = np.arange(1, 257, dtype=np.uint8).reshape(1, 8, 32)
    expected = np.zeros((8, 32), np.uint8)
    expected[:5, :17] = x[0, :5, :17]
    np.testing.assert_array_equal(self.copy(x, (1, 5, 17)), expected)

  def test_shape_beyond_the_array_is_seen(self):
    x = np.zeros((1, 7, 32), np.uint8)
    with self.assertRaisesRegex(
      interpret.InterpretError,
      r"program \(1, 0, 0\) .* reads at byte 224 counted .* of x",
    ):
      self.copy(x, (1, 8, 32))

  def test_column_between_the_rows_is_seen(self):
    x = np.zeros((1, 8, 48), np.uint8)[:, :, :31]
    with self.assertRaisesRegex(interpret.InterpretError, "reads at byte 31"):
      self.copy(x, (1, 8, 32), (512, 48, 1))

  def test_what_the_hardware_does_not_take_is_refused(self):
    x = np.zeros((1, 8, 40), np.uint8)
    with self.assertRaisesRegex(TypeError, "of x: strides .*16 bytes, got 40"):
      self.copy(x, (1, 8, 32), (320, 40, 1))
    with self.assertRaisesRegex(TypeError, "x must describe a NumPy array"):
      self.copy([1], (1, 8, 32))


class DescriptorTest(parameterized.TestCase):
  def test_of_an_operand_counts_stored_elements(self):
    shape = configs.MatmulShape(
      batch=3,
      m=20,
      n=40,
      k=128,
      lhs=configs.operand("bf16", 20, 128),
      rhs=configs.operand("nvfp4", 40, 128),
    )
    lhs, rhs = matmul_plans.operand_descriptors(shape, matmul_shapes.UPCAST)
    self.assertEqual(lhs.shape, (3, 20, 128))
    self.assertEqual(lhs.strides, (2560, 128, 1))
    self.assertEqual(lhs.block_shape, (1, 16, 64))
    self.assertEqual(rhs.shape, (3, 40, 64))
    self.assertEqual(rhs.strides, (2560, 64, 1))
    self.assertEqual(rhs.block_shape, (1, 32, 32))

  @parameterized.parameters(
    # bytes of an element, stride of the only row, in elements
    (1, 48),
    (2, 40),
    (4, 36),
  )
  def test_stride_of_one_row_becomes_a_valid_one(self, element_bytes, stride):
    descriptor = descriptors.describe(
      (1, 1, 35), (0, 35, 1), (16, 32), element_bytes
    )
    self.assertEqual(descriptor.strides, (stride, stride, 1))
    self.assertIsNone(descriptors.descriptor_error(descriptor, element_bytes))

  @parameterized.parameters(
    ((0, 64, 1), 1, (1, 16, 64), None),
    ((2**39, 64, 1), 1, (1, 256, 16), None),
    ((0, 1, 64), 1, (1, 16, 64), "k must be the minor dimension"),
    ((0, 72, 1), 1, (1, 16, 64), "multiples of 16 bytes, got 72"),
    ((0, 72, 1), 2, (1, 16, 64), None),
    ((40, 64, 1), 2, (1, 16, 64), None),
    ((40, 64, 1), 1, (1, 16, 64), "multiples of 16 bytes, got 40"),
    ((2**40, 64, 1), 1, (1, 16, 64), "below 2\\^40 bytes, got 1099511627776"),
    ((0, 64, 1), 1, (1, 512, 64), "256 rows, got 512"),
    ((0, 64, 1), 1, (1, 16, 8), "multiples of 16 bytes, got 8"),
    ((0, 64, 1), 2, (1, 16, 8), None),
  )
  def test_limits_of_strides_and_tiles(
    self, strides, element_bytes, block_shape, message
  ):
    descriptor = descriptors.Descriptor(
      shape=(2, 64, 64), strides=strides, block_shape=block_shape
    )
    error = descriptors.descriptor_error(descriptor, element_bytes)
    self.assertRegex(str(error), str(message))

  def test_array_without_elements_is_refused(self):
    for k in (0, 64):
      descriptor = descriptors.describe((1, 64, k), (0, 64, 1), (16, 64), 1)
      message = "None" if k else r"sizes must be positive, got \(1, 64, 0\)"
      error = descriptors.descriptor_error(descriptor, 1)
      self.assertRegex(str(error), message)
