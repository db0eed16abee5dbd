# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the random bits of a tile, those of `jax.random.bits` of threefry2x32.

With jax_threefry_partitionable, 32 bits are a function of the key and of the
place in the array. The place is hashed as two words, and the bits are the
exclusive or of both words of the result. So a kernel can draw a tile's bits in
registers for tiles of any size.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

import triton
import triton.language as tl

_PARITY = tl.constexpr(0x1BD11BDA)
# Rotations of four rounds. Groups of four rounds alternate between both rows.
_ROTATIONS = tl.constexpr((13, 15, 26, 6))
_OTHER_ROTATIONS = tl.constexpr((17, 29, 16, 24))


@triton.jit
def _rounds(x, y, ROTATIONS: tl.constexpr):
  """Computes one round for each of the given rotations."""
  for i in tl.static_range(len(ROTATIONS)):
    x += y
    y = ((y << ROTATIONS[i]) | (y >> (32 - ROTATIONS[i]))) ^ x
  return x, y


@triton.jit
def places_along(index, DIMS: tl.constexpr):
  """Returns the offset in an array of an index along merged dimensions.

  Args:
    index: int64, index along the merged dimension.
    DIMS: size and stride of each dimension, major to minor, in one tuple.
      Strides are those of the array that bits are drawn for. The first size is
      not used.
  """
  places = tl.zeros_like(index)
  for i in tl.static_range(len(DIMS) - 2, 0, -2):
    places += (index % DIMS[i]) * DIMS[i + 1]
    index = index // DIMS[i]
  return index * DIMS[1] + places


@triton.jit
def first_place(key, IS_PART: tl.constexpr):
  """Returns int64: the offset of x's first value in the whole array.

  Args:
    key: as for `bits`. For a shard it is uint32[4], whose last two words are
      the offset, high word first.
    IS_PART: whether x is a shard.
  """
  if IS_PART:
    high = tl.load(key + 2).to(tl.int64)
    place = (high << 32) | tl.load(key + 3).to(tl.int64)
  else:
    place = tl.zeros((), tl.int64)
  return place


@triton.jit
def bits(key, place):
  """Returns int32: 32 random bits for each offset.

  Args:
    key: pointer to key data, uint32[2].
    place: int64, row-major offset in the array, at least 0.
  """
  first = tl.load(key)
  second = tl.load(key + 1)
  keys = (first, second, first ^ second ^ _PARITY)
  x = (place >> 32).to(tl.uint32) + first
  y = place.to(tl.uint32) + second
  for i in tl.static_range(5):
    if i % 2 == 0:
      x, y = _rounds(x, y, _ROTATIONS)
    else:
      x, y = _rounds(x, y, _OTHER_ROTATIONS)
    x += keys[(i + 1) % 3]
    y += keys[(i + 2) % 3] + (i + 1)
  return (x ^ y).to(tl.int32, bitcast=True)
