# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A device's part of an array draws the random bits of its offset there."""

import jax
import jax.extend
import numpy as np
from absl.testing import absltest

from jaxplugin.quantization.sharding import offsets


class BitsTest(absltest.TestCase):
  def test_offset_carries_into_the_high_word(self):
    bits = jax.jit(lambda words: offsets.bits(words, (2, 4), (4, 1)))
    key = np.array([0x87654321, 5], np.uint32)
    for first in (0, 2**32 - 3, 2**40 + 2**32 - 1):
      words = [*key, first >> 32, first % 2**32]
      actual = bits(np.array(words, np.uint32))
      offset = first + np.arange(8)
      pair = np.concatenate([offset >> 32, offset % 2**32]).astype(np.uint32)
      hashed = jax.extend.random.threefry_2x32(key, pair)
      np.testing.assert_array_equal(
        actual, (hashed[:8] ^ hashed[8:]).reshape(2, 4)
      )
