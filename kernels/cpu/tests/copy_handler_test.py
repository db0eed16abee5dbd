# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The copy has the same bytes, and is in huge pages if the system has them."""

from __future__ import annotations

import itertools
import pathlib
import re
import sys

import jax
import numpy as np
import pytest
from absl.testing import absltest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

SMAPS = pathlib.Path("/proc/self/smaps")
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_page_bytes(x: jax.Array) -> int:
  """Returns the bytes in huge pages of the mapping around the middle of `x`."""
  middle = x.unsafe_buffer_pointer() + x.nbytes // 2
  is_inside = False
  for line in SMAPS.read_text().splitlines():
    if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
      is_inside = int(found[1], 16) <= middle < int(found[2], 16)
    elif is_inside and line.startswith("AnonHugePages:"):
      return int(line.split()[1]) << 10
  return 0


class CopyTest(absltest.TestCase):
  def test_bytes_are_the_same(self):
    rng = np.random.default_rng(0)
    for dtype, shape in itertools.product(
      (np.uint8, testing.E4M3, testing.E8M0, testing.BF16, np.float32),
      ((), (0, 3), (7,), (3, 4, 5), (3001, 3000)),
    ):
      with self.subTest(dtype=dtype, shape=shape):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        x = rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)
        got = testing.copy(x)
        self.assertEqual((got.dtype, got.shape), (x.dtype, x.shape))
        self.assertEqual(got.tobytes(), x.tobytes())

  @pytest.mark.full
  def test_megabytes_lie_in_huge_pages(self):
    if not SMAPS.exists() or not HUGE_PAGES.exists():
      self.skipTest("not on Linux")
    if "[never]" in HUGE_PAGES.read_text():
      self.skipTest("huge pages are switched off here")
    # So large that no allocator reuses memory.
    x = jax.device_put(np.ones((64 << 20,), np.uint8))
    got = jax.block_until_ready(jax.jit(testing.copy)(x))
    self.assertGreater(huge_page_bytes(got), x.nbytes // 2)

  def test_another_result_is_an_error(self):
    for shape, dtype, to_shape, to_dtype in (
      ((3, 4), np.uint8, (4, 3), np.uint8),
      ((3, 4), np.uint8, (3, 4), np.int8),
      ((4,), testing.E2M1, (4,), testing.E2M1),
    ):
      result = jax.ShapeDtypeStruct(to_shape, to_dtype)
      with (
        self.subTest(shape=shape, to_shape=to_shape, to_dtype=to_dtype),
        self.assertRaisesRegex(testing.HandlerError, "copy: the result must"),
      ):
        testing.copy(np.zeros(shape, dtype), result)


if __name__ == "__main__":
  absltest.main()
