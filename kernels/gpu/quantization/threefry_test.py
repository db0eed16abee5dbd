# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random bits that kernels draw are those of `jax.random.bits`."""

import jax
import numpy as np
import triton
import triton.language as tl
from absl.testing import parameterized
from jaxplugin.kernels.gpu.quantization import threefry

from jaxplugin.testing.interpreter import interpret

setUpModule = interpret.skip_unless_supported
KEYS = (0, 1, 42, 2**31, 2**32 - 1)


@triton.jit
def _draw(key, start, out, SIZE: tl.constexpr):
  place = tl.arange(0, SIZE)
  bits = threefry.bits(key, tl.load(start) + place.to(tl.int64))
  tl.store(out + place, bits)


@triton.jit
def _first_place(key, out, IS_PART: tl.constexpr):
  tl.store(out, threefry.first_place(key, IS_PART))


def draw(key, start, size):
  out = np.zeros(size, np.int32)
  interpret.launch(_draw, 1, key, np.array([start], np.int64), out, SIZE=size)
  return out.view(np.uint32)


class BitsTest(parameterized.TestCase):
  @parameterized.parameters(*KEYS)
  def test_bits_are_those_of_jax(self, seed):
    key = jax.random.key(np.uint32(seed))
    expected = jax.random.bits(key, (8, 4, 128), np.uint32)
    actual = draw(np.asarray(jax.random.key_data(key)), 0, 8 * 4 * 128)
    np.testing.assert_array_equal(actual, np.ravel(expected))

  def test_both_words_of_a_key_and_of_a_place_count(self):
    # The algorithm's published answers (Random123, kat_vectors).
    ones = 2**32 - 1
    for key, place, words in (
      ((0, 0), 0, (0x6B200159, 0x99BA4EFE)),
      ((0x13198A2E, 0x03707344), 0x243F6A8885A308D3, (0xC4923A9C, 0x483DF7A0)),
    ):
      (actual,) = draw(np.array(key, np.uint32), place, 1)
      self.assertEqual(actual, words[0] ^ words[1])
    (zero,) = draw(np.array((0, 0), np.uint32), ones, 1)
    (carried,) = draw(np.array((0, 0), np.uint32), ones + 1, 1)
    self.assertNotEqual(zero, carried)

  def test_place_of_a_part_has_its_high_word_first(self):
    key = np.array([7, 8, 0x12, 0x89ABCDEF], np.uint32)
    out = np.zeros(1, np.int64)
    for is_part, place in ((True, 0x1289ABCDEF), (False, 0)):
      interpret.launch(_first_place, 1, key, out, IS_PART=is_part)
      self.assertEqual(out[0], place)
