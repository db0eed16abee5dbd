# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Strides of operands agree with the addresses of NumPy's elements."""

import itertools

import jax
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.dot import problems, sides


def side_of(shape, dtype, format, **dims):
  values = jax.ShapeDtypeStruct(shape, dtype)
  return sides.Side(name="lhs", values=values, format=format, **dims)


class StridesTest(parameterized.TestCase):
  @parameterized.product(
    shape=((2, 3, 4, 5), (2, 1, 4, 1), (1, 3, 1, 1), (4, 1, 1, 6)),
    kinds=(("b", "r", "k", "k"), ("b", "b", "r", "k"), ("r", "r", "k", "k")),
  )
  def test_elements_are_where_strides_say(self, shape, kinds):
    places = np.arange(np.prod(shape)).reshape(shape)
    for order in itertools.permutations(range(4)):
      dims = {"b": [], "r": [], "k": []}
      for dim, kind in zip(order, kinds, strict=True):
        dims[kind].append(dim)
      batch, free, contracting = (tuple(dims[kind]) for kind in "brk")
      moved = places.transpose(*batch, *free, *contracting)
      sizes = [
        int(np.prod([shape[d] for d in group]))
        for group in (batch, free, contracting)
      ]
      merged = moved.reshape(sizes)
      strides = problems.strides(
        shape, batch=batch, free=free, contracting=contracting
      )
      if not np.shares_memory(merged, places):
        self.assertIsNone(strides)
        continue
      index = np.indices(sizes)
      expected = np.tensordot(strides, index, axes=1)
      np.testing.assert_array_equal(merged, expected)

  @parameterized.parameters(
    # dtype, shape -> stride of k; None if the values are copied.
    (jp.MXFP4, formats.PACKED, (32, 1), 1),
    (jp.MXFP4, formats.PACKED, (32, 6), 6),
    (jp.MXFP4, formats.E2M1, (64, 1), None),
    (jp.MXFP8, formats.E4M3, (64, 1), 1),
    (jp.MXFP8, formats.E4M3, (64, 6), 6),
    (None, np.dtype(np.float32), (64, 6), 6),
  )
  def test_fp4_that_is_not_packed_is_copied_unless_k_is_last(
    self, format, dtype, shape, expected
  ):
    side = side_of(shape, dtype, format, contracting=(0,))
    strides = side.strides()
    self.assertEqual(None if strides is None else strides[2], expected)

  def test_fp4_is_counted_in_bytes(self):
    dims = {"batch": (1,), "contracting": (2,)}
    side = side_of((3, 5, 64), formats.E2M1, jp.MXFP4, **dims)
    self.assertEqual(side.strides(), (32, 5 * 32, 1))

  def test_symbolic_sizes_have_strides(self):
    m, k = jax.export.symbolic_shape("m, k")
    side = side_of((m, k), formats.E4M3, jp.MXFP8, contracting=(1,))
    self.assertEqual(side.strides(), (0, k, 1))


class PaddingTest(parameterized.TestCase):
  @parameterized.parameters(
    (49, (jp.MXFP8, None), 1, 49),
    (49, (None, jp.MXFP4), 1, 50),
    (50, (jp.MXFP4, jp.NVFP4), 1, 50),
    (33, (jp.MXFP8, jp.NVFP4), 2, 64),
    (49, (None, jp.NVFP4), 2, 64),
    (33, (None, jp.NVFP4), 2, 48),
  )
  def test_size_is_even_for_fp4_and_whole_blocks_where_dimensions_merge(
    self, size, formats_, num_contracting, expected
  ):
    options = {"num_contracting": num_contracting}
    self.assertEqual(problems.padded_size(size, formats_, **options), expected)
    self.assertEqual(
      problems.are_copied(size, formats_, **options),
      num_contracting > 1 or expected != size,
    )

  def test_symbolic_size_is_not_padded(self):
    sides = (jp.MXFP4, jp.MXFP4)
    self.assertFalse(problems.are_copied(None, sides, num_contracting=1))
