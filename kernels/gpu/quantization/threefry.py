# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random bits of a tile: those of `jax.random.bits` of a threefry2x32 key.

With jax_threefry_partitionable each 32 bits are a function of the key and of
the place in the array alone: place, as two words, is hashed, and the two words
of the result are joined by an exclusive or. So a kernel draws its tile's bits
in registers, whatever its tiles are.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

import triton
import triton.language as tl

_PARITY = tl.constexpr(0x1BD11BDA)


@triton.jit
def _rounds(
  x,
  y,
  A: tl.constexpr,
  B: tl.constexpr,
  C: tl.constexpr,
  D: tl.constexpr,
):
  """Computes four rounds with the given rotations."""
  x += y
  y = ((y << A) | (y >> (32 - A))) ^ x
  x += y
  y = ((y << B) | (y >> (32 - B))) ^ x
  x += y
  y = ((y << C) | (y >> (32 - C))) ^ x
  x += y
  y = ((y << D) | (y >> (32 - D))) ^ x
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
  for i in tl.static_range(len(DIMS) - 2, 0, -2):
    if i == len(DIMS) - 2:
      places = (index % DIMS[i]) * DIMS[i + 1]
    else:
      places += (index % DIMS[i]) * DIMS[i + 1]
    index = index // DIMS[i]
  first = index * DIMS[1]
  if len(DIMS) > 2:
    first += places
  return first


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
      x, y = _rounds(x, y, 13, 15, 26, 6)
    else:
      x, y = _rounds(x, y, 17, 29, 16, 24)
    x += keys[(i + 1) % 3]
    y += keys[(i + 2) % 3] + (i + 1)
  return (x ^ y).to(tl.int32, bitcast=True)
