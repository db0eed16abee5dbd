# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes small floating-point types with integer operations.

XLA backends differ in f32 subnormals (XLA:CPU flushes them). They may remove
`f32 -> e2m1 -> f32` casts or replace a division by a multiply with a
reciprocal. Integer operations on the bits have the same results on every
platform, so a tensor quantizes to the same bits everywhere.

*Extended bits* represent magnitudes in `int32`: the bits of a non-negative f32
with a normalized mantissa, whose exponent field may be zero or negative.
Multiplying by a power of two is then an integer addition, and f32 subnormals
need no special case.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import formats

F32_MANTISSA_BITS: Final = 23
F32_BIAS: Final = 127
F32_ONE_ULP_EXPONENT: Final = 149  # the smallest f32 subnormal is 2^-149
INFINITY_BITS: Final = 0x7F800000
MIN_NORMAL_BITS: Final = 1 << F32_MANTISSA_BITS
MAX_FINITE_BITS: Final = INFINITY_BITS - 1
_MAGNITUDE_MASK: Final = 0x7FFFFFFF
_F32_SIGN_SHIFT: Final = 31
_F32_BITS: Final = 32
_BYTE_BITS: Final = 8
_HALF_EXPONENT: Final = 126  # biased exponent of 0.5; that of 1.0 is 127
_QUIET_NAN_BITS: Final = 0x7FC00000
_SUBNORMAL_FRACTION_BITS: Final = 22  # resolution of stochastic rounding


def f32_bits(x: jax.Array) -> jax.Array:
  """Returns int32[...]: the bits of `x` cast to f32."""
  return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def magnitude_bits(x: jax.Array) -> jax.Array:
  """Returns f32 bits of |x|. Their order is that of |x|, with NaN above Inf."""
  return f32_bits(x) & _MAGNITUDE_MASK


def from_bits(bits: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(bits, jnp.float32)


def finite_amax(x: jax.Array) -> jax.Array:
  """Returns f32[]: the largest finite magnitude of x, or 0.

  It has no derivative, as a global scale that is computed from it has none.
  """
  bits = magnitude_bits(lax.stop_gradient(x))
  finite = jnp.where(bits < INFINITY_BITS, bits, 0)
  return from_bits(jnp.max(finite, initial=0))


def static_bits(value: float) -> int:
  """Returns the f32 bits of a Python number."""
  return int(np.float32(value).view(np.int32))


def extend(bits: jax.Array) -> jax.Array:
  """Returns extended bits of finite magnitudes, given as f32 bits.

  Zero has no extended bits. It becomes the smallest subnormal, so that exponent
  arithmetic does not overflow int32. The caller must mask it.
  """
  subnormal = lax.bitcast_convert_type(
    jnp.maximum(bits, 1).astype(jnp.float32), jnp.int32
  ) - (F32_ONE_ULP_EXPONENT << F32_MANTISSA_BITS)
  return jnp.where(bits < MIN_NORMAL_BITS, subnormal, bits)


def times_power_of_two(
  extended: jax.Array, exponent: jax.Array | int
) -> jax.Array:
  """Returns extended bits of x * 2^exponent."""
  return extended + (exponent << F32_MANTISSA_BITS)


def flush(extended: jax.Array) -> jax.Array:
  """Returns f32 bits of `extended`; below 2^-126 they are zero."""
  return jnp.where(extended < MIN_NORMAL_BITS, 0, extended)


def divide(numerator: jax.Array, denominator: jax.Array | float) -> jax.Array:
  """Returns the f32 quotient, correctly rounded; 0 / x is 0, also for x = 0.

  XLA rewrites `a / constant` and `a / broadcast(b)` to a multiply by a rounded
  reciprocal, which is off by an ulp in a third of all cases. A select around
  the denominator prevents this. XLA also rewrites `(a / b) / c` to
  `a / (b * c)`, which rounds differently and may overflow. A select around the
  quotient prevents that.
  """
  is_zero = numerator == 0
  quotient = numerator / jnp.where(is_zero, jnp.float32(1), denominator)
  return jnp.where(is_zero, jnp.float32(0), quotient)


def encode(
  bits: jax.Array,
  encoding: formats.Element,
  random_bits: jax.Array | None = None,
) -> jax.Array:
  """Rounds magnitudes to codes, to nearest even or stochastically, saturating.

  Args:
    bits: int32[...], f32 bits of finite normal magnitudes or of zero.
    random_bits: uint32[...] for stochastic rounding, or None. It rounds a value
      up with the probability of the discarded fraction (to 22 bits).

  Returns:
    uint8[...]: codes without sign; uint16 or uint32 for wider types.
  """
  if encoding.bits == _F32_BITS:
    return lax.bitcast_convert_type(bits, jnp.uint32)
  mantissa_bits = encoding.mantissa_bits
  shift = F32_MANTISSA_BITS - mantissa_bits
  bits = jnp.minimum(bits, static_bits(encoding.max))
  rebias = (F32_BIAS - encoding.bias) << mantissa_bits
  value = from_bits(bits)
  if random_bits is None:
    to_even = ((bits >> shift) & 1) + ((1 << (shift - 1)) - 1)
    normal = ((bits + to_even) >> shift) - rebias
    # Adding 2^23 quanta rounds the value to whole quanta, to nearest even, and
    # leaves their number in the low mantissa bits.
    quantum = encoding.min_exponent - mantissa_bits
    magic = 2.0 ** (quantum + F32_MANTISSA_BITS)
    subnormal = lax.bitcast_convert_type(
      value + jnp.float32(magic), jnp.int32
    ) - static_bits(magic)
  else:
    noise = lax.bitcast_convert_type(random_bits, jnp.int32)
    normal = ((bits + (noise & ((1 << shift) - 1))) >> shift) - rebias
    fraction = _SUBNORMAL_FRACTION_BITS
    fixed_point = value * jnp.float32(
      2.0 ** (fraction + mantissa_bits - encoding.min_exponent)
    )
    subnormal = (
      jnp.where(
        bits < static_bits(2.0**encoding.min_exponent), fixed_point, 0
      ).astype(jnp.int32)
      + (noise & ((1 << fraction) - 1))
    ) >> fraction
  is_normal = bits >= static_bits(2.0**encoding.min_exponent)
  dtype = jnp.uint8 if encoding.bits <= _BYTE_BITS else jnp.uint16
  return jnp.where(is_normal, normal, subnormal).astype(dtype)


def with_sign(
  codes: jax.Array, x: jax.Array, encoding: formats.Element
) -> jax.Array:
  """Adds the sign of `x`, also of -0, to the codes of |x|.

  An integer has no -0.
  """
  negative = (f32_bits(x) < 0).astype(jnp.uint8)
  if encoding.is_twos_complement:
    mask = jnp.uint8((1 << encoding.bits) - 1)
    return jnp.where(negative > 0, (0 - codes) & mask, codes)
  return codes | (negative << encoding.sign_shift)


def from_codes(codes: jax.Array, dtype: np.dtype) -> jax.Array:
  """Bitcasts unsigned codes, one value each, to `dtype`."""
  if dtype in formats.FOUR_BITS:
    return lax.bitcast_convert_type(codes.astype(jnp.uint4), dtype)
  return lax.bitcast_convert_type(codes, dtype)


def decode(codes: jax.Array, encoding: formats.Element) -> jax.Array:
  """Decodes uint8 codes of a signed type without NaN and Inf to f32.

  Bits above the sign are ignored. Every result is zero or a normal f32.
  """
  magnitude = (codes & ((1 << encoding.sign_shift) - 1)).astype(jnp.int32)
  shift = F32_MANTISSA_BITS - encoding.mantissa_bits
  normal = (magnitude << shift) + (
    (F32_BIAS - encoding.bias) << F32_MANTISSA_BITS
  )
  quantum = 2.0 ** (encoding.min_exponent - encoding.mantissa_bits)
  subnormal = f32_bits(magnitude.astype(jnp.float32) * jnp.float32(quantum))
  bits = jnp.where(magnitude < (1 << encoding.mantissa_bits), subnormal, normal)
  sign = ((codes >> encoding.sign_shift) & 1).astype(jnp.int32)
  return from_bits(bits | (sign << _F32_SIGN_SHIFT))


def decode_e8m0(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Splits E8M0 scales into two f32 factors, neither of them subnormal.

  `scale == first * second` for every code. Code 0 gives 2^-126 * 2^-1, because
  its value 2^-127 is an f32 subnormal, which some backends flush. Code 255 is
  NaN.
  """
  # Without a barrier XLA would multiply the factors of a constant scale. XLA
  # does not fuse across a barrier. The barrier is on the bytes, because they
  # are in memory already.
  code = lax.optimization_barrier(lax.bitcast_convert_type(scale, jnp.uint8))
  code = code.astype(jnp.int32)
  bits = jnp.maximum(code, 1) << F32_MANTISSA_BITS
  bits = jnp.where(code == formats.E8M0_NAN, _QUIET_NAN_BITS, bits)
  half = (_HALF_EXPONENT + jnp.minimum(code, 1)) << F32_MANTISSA_BITS
  return from_bits(bits), from_bits(half)
