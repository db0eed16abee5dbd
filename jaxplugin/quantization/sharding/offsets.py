# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random bits of a part of an array: the bits of that part of the whole array.

With jax_threefry_partitionable, 32 bits of a threefry2x32 key are a hash of the
key and of the value's offset, its number in row-major order, as two words. A
device therefore draws only the bits of its part.

The `words` of a part are u32[4]: the data of the key, and the offset of the
part's first value, the high word first. Strides are those of the whole array.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random as extend_random

_WORD = 1 << 32
_HALF = 1 << 16
_LOW_HALF = 0xFFFF

Pair = tuple[jax.Array, jax.Array]  # u32, the high word first


def strides(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the strides of an array in row-major order, in values."""
  return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def words(
  key_data: jax.Array, firsts: Sequence[jax.Array], strides: Sequence[int]
) -> jax.Array:
  """Returns the words of a part.

  Args:
    key_data: u32[2].
    firsts: i32[], the part's first index in each dimension.
    strides: strides of the whole array.
  """
  offset = _offset(firsts, strides, ())
  return jnp.concatenate([key_data, jnp.stack(offset)])


def bits(
  words: jax.Array, shape: Sequence[int], strides: Sequence[int]
) -> jax.Array:
  """Returns u32[shape]: the bits of a part's values.

  Args:
    words: words of the part.
    shape: shape of the part.
    strides: strides of the whole array.
  """
  indices = [
    lax.broadcasted_iota(jnp.uint32, shape, dim) for dim in range(len(shape))
  ]
  high, low = _offset(indices, strides, tuple(shape))
  first_high, first_low = words[2], words[3]
  low = low + first_low
  high = high + first_high + (low < first_low).astype(jnp.uint32)
  first, second = extend_random.threefry2x32_p.bind(
    *(jnp.broadcast_to(word, shape) for word in words[:2]), high, low
  )
  return first ^ second


def _offset(
  indices: Sequence[jax.Array], strides: Sequence[int], shape: tuple[int, ...]
) -> Pair:
  """Returns the sum of indices times strides, modulo 2^64."""
  high = low = jnp.zeros(shape, jnp.uint32)
  for index, stride in zip(indices, strides, strict=True):
    more_high, more_low = _times(index.astype(jnp.uint32), stride)
    low = low + more_low
    carry = (low < more_low).astype(jnp.uint32)
    high = high + more_high + carry
  return high, low


def _times(x: jax.Array, factor: int) -> Pair:
  """Returns u32 x times a constant, modulo 2^64."""
  factor_high, factor_low = divmod(factor % _WORD**2, _WORD)
  low = x * jnp.uint32(factor_low)
  # It multiplies halves of words, because XLA has no product of two words.
  top, bottom = divmod(factor_low, _HALF)
  x_top, x_bottom = x >> 16, x & _LOW_HALF
  middle = x_top * jnp.uint32(bottom) + ((x_bottom * jnp.uint32(bottom)) >> 16)
  middle_low = (middle & _LOW_HALF) + x_bottom * jnp.uint32(top)
  high = x_top * jnp.uint32(top) + (middle >> 16) + (middle_low >> 16)
  return high + x * jnp.uint32(factor_high), low
