# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random bits for a shard, equal to those of the whole array.

With jax_threefry_partitionable, the 32 bits of a value are a threefry2x32 hash
of the key and of the value's 64-bit offset in row-major order. A device
therefore draws only the bits of its shard.

The `words` of a shard are u32[4]: the key data, then the offset of the shard's
first value, high word first. Strides are those of the whole array.

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
  """Returns the row-major strides of an array, in elements."""
  return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def words(
  key_data: jax.Array, firsts: Sequence[jax.Array], strides: Sequence[int]
) -> jax.Array:
  """Returns the words of a shard.

  Args:
    key_data: u32[2], data of the key; or the words of a shard that is split
      again.
    firsts: i32[] for each dimension, the shard's first index.
  """
  offset = _offset(firsts, strides, ())
  if key_data.size > 2:
    offset = _sum(offset, (key_data[2], key_data[3]))
  return jnp.concatenate([key_data[:2], jnp.stack(offset)])


def bits(
  words: jax.Array, shape: Sequence[int], strides: Sequence[int]
) -> jax.Array:
  """Returns u32[shape]: the random bits of a shard's values."""
  indices = [
    lax.broadcasted_iota(jnp.uint32, shape, dim) for dim in range(len(shape))
  ]
  offset = _offset(indices, strides, tuple(shape))
  high, low = _sum(offset, (words[2], words[3]))
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
    high, low = _sum((high, low), _times(index.astype(jnp.uint32), stride))
  return high, low


def _sum(x: Pair, y: Pair) -> Pair:
  """Returns x + y, modulo 2^64."""
  low = x[1] + y[1]
  carry = (low < y[1]).astype(jnp.uint32)
  return x[0] + y[0] + carry, low


def _times(x: jax.Array, factor: int) -> Pair:
  """Returns u32 `x` times a constant, modulo 2^64."""
  factor_high, factor_low = divmod(factor % _WORD**2, _WORD)
  low = x * jnp.uint32(factor_low)
  # XLA has no 32 x 32 -> 64 bit multiplication, so halves are multiplied.
  top, bottom = divmod(factor_low, _HALF)
  x_top, x_bottom = x >> 16, x & _LOW_HALF
  middle = x_top * jnp.uint32(bottom) + ((x_bottom * jnp.uint32(bottom)) >> 16)
  middle_low = (middle & _LOW_HALF) + x_bottom * jnp.uint32(top)
  high = x_top * jnp.uint32(top) + (middle >> 16) + (middle_low >> 16)
  return high + x * jnp.uint32(factor_high), low
