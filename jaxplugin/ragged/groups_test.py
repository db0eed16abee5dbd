# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What group sizes mean, against loops in Python."""

import jax
import numpy as np
from absl.testing import absltest

from jaxplugin.ragged import groups

_ROWS = 12
_LARGEST = 2**31 - 1


# Sizes, and the row after the last one of each group.
ENDS = (
  ([5, 0, 4], [5, 5, 9]),
  ([0, 0, 0], [0, 0, 0]),
  ([0, 12, 0], [0, 12, 12]),
  ([9, 9, 9], [9, 12, 12]),
  ([-3, 4, -1], [0, 4, 4]),
  ([_LARGEST, _LARGEST, 2], [12, 12, 12]),
  ([2, _LARGEST, _LARGEST], [2, 12, 12]),
)


class GroupsTest(absltest.TestCase):
  def test_ends_starts_and_rows(self):
    @jax.jit
    def compute(sizes):
      ends = groups.ends(sizes, _ROWS)
      within = groups.sizes_within(sizes, _ROWS)
      return ends, groups.starts(ends), within, groups.of_rows(ends, _ROWS)

    for sizes, ends in ENDS:
      starts = [0, *ends[:-1]]
      own = np.array(ends) - starts
      of_row = np.repeat([0, 1, 2], own)
      of_row = np.pad(of_row, (0, _ROWS - len(of_row)), constant_values=3)
      with self.subTest(sizes=sizes):
        found = compute(np.array(sizes, np.int32))
        for actual, expected in zip(
          found, (ends, starts, own, of_row), strict=True
        ):
          np.testing.assert_array_equal(actual, expected)

  def test_only_groups_with_rows_are_used(self):
    compute = jax.jit(groups.used)
    for ends, expected in (
      ([5, 5, 9], [0, 2]),
      ([0, 0, 0], []),
      ([0, 12, 12], [1]),
      ([1, 2, 3], [0, 1, 2]),
    ):
      with self.subTest(ends=ends):
        used, count = compute(np.array(ends, np.int32))
        self.assertEqual(used.shape, (3,))
        self.assertEqual(int(count), len(expected))
        np.testing.assert_array_equal(used[: len(expected)], expected)

  def test_rows_of_no_group_get_zeros_and_are_in_no_sum(self):
    of_row = np.array([0, 0, 2, 3, 3], np.int32)
    x = np.array([[1.0], [2.0], [4.0]], np.float32)
    rows = groups.per_row(x, of_row)
    np.testing.assert_array_equal(rows[:, 0], [1, 1, 4, 0, 0])
    y = np.array([1, 2, 4, 8, np.nan], np.float32)
    np.testing.assert_array_equal(groups.sums(y, of_row, 3), [3, 0, 4])
