# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""FP4 values in the order that GPUs decode fastest.

16 values along k share two 32-bit words. In bf16 the sign of an E2M1 value is
in bit 15, and its other three bits are in bits 8, 7 and 6. The 32 bits of two
bf16 values hold the pair (2 i, 2 i + 1), with the first value in the lower
half. One rotation and one mask extract such a pair from a word. Each word holds
three whole pairs. The last two pairs are split over the remaining bits of both
words.
`decode.interleaved_to_bf16` of the kernels reads this order.

Interleaved values have dtype uint32. Code that expects FP4 or bytes therefore
refuses them.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import formats

INTERLEAVED: Final = "interleaved"  # name of the layout
WORDS: Final = np.dtype(np.uint32)
VALUES_PER_WORD: Final = 8
UNIT: Final = 16  # number of values that share two words

_BITS: Final = 32
_WHOLE: Final = np.uint32(0x81C081C0)
_UPPER: Final = np.uint32(0x81008100)  # sign and upper bit of the exponent
_LOWER: Final = np.uint32(0x00C000C0)  # lower bit of the exponent, mantissa
# The parts of each of the 8 pairs: (word, bits to rotate it right, mask).
_PARTS: Final = (
  ((0, 0, _WHOLE),),
  ((0, 28, _WHOLE),),
  ((0, 6, _WHOLE),),
  ((1, 0, _WHOLE),),
  ((1, 29, _WHOLE),),
  ((1, 26, _WHOLE),),
  ((0, 1, _UPPER), (1, 4, _LOWER)),
  ((0, 2, _UPPER), (1, 7, _LOWER)),
)


def interleave(packed: jax.Array) -> jax.Array:
  """Returns packed FP4 values in the order of this module.

  Args:
    packed: uint8[..., k / 2], two values a byte along k, the first in the low
      nibble; k divisible by 16.

  Returns:
    uint32[..., k / 8].

  Raises:
    TypeError: If the dtype is another one, or k is not divisible by 16.
  """
  if packed.dtype != formats.PACKED or packed.ndim == 0:
    raise TypeError(
      "interleave: packed must be uint8 of rank 1 or more, got"
      f" {packed.dtype}{list(packed.shape)}"
    )
  *lead, size = packed.shape
  if size % (UNIT // 2):
    raise TypeError(
      f"interleave: k must be a multiple of {UNIT}, got k={2 * size}"
    )
  pairs = packed.reshape(*lead, size // len(_PARTS), len(_PARTS))
  words = [jnp.zeros(pairs.shape[:-1], WORDS) for _ in range(2)]
  for i, parts in enumerate(_PARTS):
    code = pairs[..., i].astype(WORDS)
    first, second = code & 0x0F, code >> 4
    bits = _in_bf16_places(first) | (_in_bf16_places(second) << 16)
    for word, rotation, mask in parts:
      words[word] |= _rotated_right(bits & mask, _BITS - rotation)
  return jnp.stack(words, axis=-1).reshape(*lead, size // 4)


def deinterleave(words: jax.Array) -> jax.Array:
  """Inverts `interleave`: uint32[..., k / 8] to uint8[..., k / 2].

  Raises:
    TypeError: If the dtype is another one, or the number of words is odd.
  """
  if words.dtype != WORDS or words.ndim == 0:
    raise TypeError(
      "deinterleave: words must be uint32 of rank 1 or more, got"
      f" {words.dtype}{list(words.shape)}"
    )
  *lead, size = words.shape
  if size % 2:
    raise TypeError(
      "deinterleave: the number of words along k must be even, got shape"
      f" {tuple(words.shape)}"
    )
  units = words.reshape(*lead, size // 2, 2)
  pairs = []
  for parts in _PARTS:
    bits = jnp.zeros(units.shape[:-1], WORDS)
    for word, rotation, mask in parts:
      bits |= _rotated_right(units[..., word], rotation) & mask
    code = _from_bf16_places(bits) | (_from_bf16_places(bits >> 16) << 4)
    pairs.append(code.astype(formats.PACKED))
  return jnp.stack(pairs, axis=-1).reshape(*lead, 4 * size)


def to_bytes(words: jax.Array) -> jax.Array:
  """Returns the bytes of uint32[..., k / 8], in order, as uint8[..., k / 2]."""
  return lax.bitcast_convert_type(words, jnp.uint8).reshape(
    *words.shape[:-1], WORDS.itemsize * words.shape[-1]
  )


def from_bytes(data: jax.Array) -> jax.Array:
  """Inverts `to_bytes`."""
  *lead, size = data.shape
  quadruples = data.reshape(*lead, size // WORDS.itemsize, WORDS.itemsize)
  return lax.bitcast_convert_type(quadruples, WORDS)


def _in_bf16_places(code: jax.Array) -> jax.Array:
  return ((code & 8) << 12) | ((code & 7) << 6)


def _from_bf16_places(bits: jax.Array) -> jax.Array:
  return ((bits >> 12) & 8) | ((bits >> 6) & 7)


def _rotated_right(x: jax.Array, bits: int) -> jax.Array:
  bits %= _BITS
  return (x >> bits) | (x << (_BITS - bits)) if bits else x
