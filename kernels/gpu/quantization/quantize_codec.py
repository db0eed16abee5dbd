# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes a tile in registers: functions that Triton kernels call.

All of them give the bits of `jp.quantize`. Exponents and the rounding of codes
are integer operations on f32 bits. Floating-point operations are used where
they are exact or correctly rounded under IEEE 754 with subnormals honoured,
which is how Triton compiles f32 for NVIDIA (no `.ftz`) and AMD.

ELEMENT is a `formats.Element`, QUANTIZED a `quantize_config.Quantized`.
"""

import triton
import triton.language as tl
from jaxplugin.kernels.gpu.quantization import quantize_tiles as tiles

from jaxplugin.kernels import formats

MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)
MANTISSA_MASK = tl.constexpr(0x007FFFFF)
MIN_NORMAL_BITS = tl.constexpr(0x00800000)  # 2^-126
E8M0_NAN = tl.constexpr(formats.E8M0_NAN)

# Where the global scale is smaller, it and the tensor are multiplied by 2^64:
# quotients keep their bits, and no reciprocal or remainder leaves f32's range.
# Large ones need no factor: a step is below amax / 5, so its reciprocal is a
# normal number.
TINY_BITS = tl.constexpr(0x1F800000)  # 2^-64
# So it is below 1 where all bits of quotients count: then no remainder of a
# quotient whose bits are seen is too small for f32.
SMALL_BITS = tl.constexpr(0x3F800000)  # 1

# What scales are chosen from instead of E2M1's largest value alone.
FOUR = tl.constexpr(4.0)

_SUBNORMAL_FRACTION_BITS = tl.constexpr(22)  # resolution of random rounding


@triton.jit
def f32_bits(x):
  """Bits of `x` (f32, bf16 or f16) as f32, int32."""
  if x.dtype == tl.bfloat16:
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
  else:
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
  return bits


@triton.jit
def from_bits(bits):
  return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode(magnitude, ELEMENT: tl.constexpr):
  """Codes without sign of f32 magnitudes, to nearest even, saturating; int32.

  The adder rounds what is subnormal in the target type: adding 2^23 quanta
  leaves their number in the low bits.
  """
  mantissa_bits: tl.constexpr = ELEMENT.mantissa_bits
  bias: tl.constexpr = ELEMENT.bias
  shift: tl.constexpr = 23 - mantissa_bits
  magic_exponent: tl.constexpr = 24 - bias - mantissa_bits
  magic: tl.constexpr = 2.0**magic_exponent
  bits = magnitude.to(tl.int32, bitcast=True)
  bits = tl.minimum(bits, ELEMENT.max_f32_bits)
  to_even = ((bits >> shift) & 1) + ((1 << (shift - 1)) - 1)
  normal = ((bits + to_even) >> shift) - ((127 - bias) << mantissa_bits)
  subnormal = (from_bits(bits) + magic).to(tl.int32, bitcast=True) - (
    (magic_exponent + 127) << 23
  )
  return tl.where(bits >= (128 - bias) << 23, normal, subnormal)


@triton.jit
def encode_at_random(magnitude, random_bits, ELEMENT: tl.constexpr):
  """As `encode`, but up with a probability equal to what is discarded.

  Args:
    random_bits: int32. As many of the lowest are added as are discarded of a
      normal number; 22 to a subnormal's number of quanta.
  """
  mantissa_bits: tl.constexpr = ELEMENT.mantissa_bits
  bias: tl.constexpr = ELEMENT.bias
  shift: tl.constexpr = 23 - mantissa_bits
  quanta: tl.constexpr = 2.0 ** (
    _SUBNORMAL_FRACTION_BITS + mantissa_bits - ELEMENT.min_exponent
  )
  bits = magnitude.to(tl.int32, bitcast=True)
  bits = tl.minimum(bits, ELEMENT.max_f32_bits)
  is_normal = bits >= (128 - bias) << 23
  normal = bits + (random_bits & ((1 << shift) - 1))
  normal = (normal >> shift) - ((127 - bias) << mantissa_bits)
  # Down, to whole quanta of 2^-22 of a code.
  subnormal = from_bits(tl.where(is_normal, 0, bits)) * quanta
  subnormal = subnormal.to(tl.int32) + (
    random_bits & ((1 << _SUBNORMAL_FRACTION_BITS) - 1)
  )
  subnormal = subnormal >> _SUBNORMAL_FRACTION_BITS
  return tl.where(is_normal, normal, subnormal)


@triton.jit
def encode_e2m1_of_short(magnitude, SATURATES: tl.constexpr):
  """As `encode` to E2M1, for magnitudes of at most 11 significant bits; int32.

  Times 2^-126 the subnormals of E2M1 are those of f32, and one rounding serves
  both ranges. A longer significand would lose bits there.
  """
  bits = (magnitude * 2.0**-126).to(tl.int32, bitcast=True)
  if SATURATES:
    bits = tl.minimum(bits, 0x01C00000)  # 6 * 2^-126
  return (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22


@triton.jit
def decode_e4m3(code):
  """Values of E4M3 codes without sign, int32 to f32."""
  normal = from_bits((code << 20) + (120 << 23))
  return tl.where(code < 8, code.to(tl.float32) * 2.0**-9, normal)


@triton.jit
def decode_e2m1(code):
  """Values of E2M1 codes without sign, int32 to f32."""
  normal = from_bits((code << 22) + (126 << 23))
  return tl.where(code < 2, code.to(tl.float32) * 0.5, normal)


@triton.jit
def with_sign(codes, bits, ELEMENT: tl.constexpr):
  """Adds the sign of f32 `bits` to codes; -0 keeps its own."""
  sign_shift: tl.constexpr = ELEMENT.sign_shift
  return codes | ((bits >> (31 - sign_shift)) & (1 << sign_shift))


@triton.jit
def pack(codes, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
  """Two FP4 codes a byte, the first in the low nibble."""
  low, high = tl.split(tl.reshape(codes, (BLOCK_M, BLOCK_K // 2, 2)))
  return low | (high << 4)


@triton.jit
def quantize_mx(
  x,
  random_bits,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Codes of a tile and of its E8M0 scales.

  Args:
    x: f32, bf16 or f16[BLOCK_M, BLOCK_K].
    random_bits: int32[BLOCK_M, BLOCK_K]; not used where values are rounded to
      nearest.

  Returns:
    codes: int or uint8[BLOCK_M, BLOCK_K], one a value.
    scale: int32[BLOCK_M, BLOCK_K / block size].
  """
  element: tl.constexpr = QUANTIZED.format.element
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  max_bits: tl.constexpr = QUANTIZED.format.element.max_f32_bits
  bits = f32_bits(x)
  magnitude = bits & MAGNITUDE_MASK
  amax = tiles.block_amax(
    magnitude, BLOCK_M, BLOCK_K, vec_size, QUANTIZED.extras
  )
  scale = (amax >> 23) - ((max_bits >> 23) - 127)
  if QUANTIZED.rounds_up:
    exceeds = (amax & MANTISSA_MASK) > (max_bits & MANTISSA_MASK)
    scale += exceeds.to(tl.int32)
  scale = tl.minimum(tl.maximum(scale, 0), E8M0_NAN - 1)
  is_nan = amax >= INFINITY_BITS
  # A block without NaN has a scale of at most 253 (E2M1, f32 max): the factor
  # is a normal number, and the product is exact where it matters.
  factor = tiles.over_blocks(
    from_bits((E8M0_NAN - 1 - scale) << 23), BLOCK_M, BLOCK_K, vec_size
  )
  if QUANTIZED.hardware_cast:
    tl.static_assert(not QUANTIZED.extras.is_stochastic)
    quotient = from_bits(bits) * factor
    if element.name == "e4m3":
      codes = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
      tl.static_assert(element.name == "e5m2")
      codes = quotient.to(tl.float8e5).to(tl.uint8, bitcast=True)
  else:
    quotient = from_bits(magnitude) * factor
    if QUANTIZED.extras.is_stochastic:
      codes = encode_at_random(quotient, random_bits, element)
    elif element.name == "e2m1" and x.dtype != tl.float32:
      codes = encode_e2m1_of_short(quotient, not QUANTIZED.rounds_up)
    else:
      codes = encode(quotient, element)
    codes = with_sign(codes, bits, element)
  is_nan_value = tiles.over_blocks(is_nan, BLOCK_M, BLOCK_K, vec_size)
  codes = tl.where(is_nan_value, 0, codes)
  return codes, tl.where(is_nan, E8M0_NAN, scale)


@triton.jit
def _scaled_to(
  amax,
  divisor,
  unit,
  LARGEST: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Scales that take amax to LARGEST: codes, steps and their reciprocals.

  A step is what a value is divided by: its scale times the unit, or 1 where the
  scale is 0, and so are all values.
  """
  scale_element: tl.constexpr = QUANTIZED.format.scale
  ideal = tl.div_rn(tl.div_rn(amax, LARGEST), divisor)
  scale = encode(ideal, scale_element)
  if QUANTIZED.extras.scale_up:
    number = decode_e4m3(scale)
    ideal = tl.where(
      ideal.to(tl.int32, bitcast=True) < MIN_NORMAL_BITS, 0.0, ideal
    )
    scale += ((number < ideal) & (number < scale_element.max)).to(tl.int32)
  step = tl.where(scale == 0, 1.0, decode_e4m3(scale) * unit)
  reciprocal = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
  return scale, step, reciprocal


@triton.jit
def _divided(
  magnitude,
  scale,
  step,
  reciprocal,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  VEC_SIZE: tl.constexpr,
  IS_EXACT: tl.constexpr,
):
  """Magnitudes divided by their block's step; 0 where its scale is.

  By Newton's steps from the correctly rounded reciprocal: one where the codes
  next to ties are all that counts. IS_EXACT takes a second one, which makes
  the quotient correctly rounded, as that before is within an ulp (Markstein,
  "Computation of elementary functions on the IBM RISC System/6000 processor",
  1990): 5 operations in the place of a division.
  """
  # All of a block is zero where its scale is. What exceeds 8 steps saturates
  # all the same; no value of a scale that is computed exceeds 9.
  limit: tl.constexpr = 16.0 if IS_EXACT else 8.0
  ceiling = tl.where(scale == 0, 0.0, step * limit)
  steps = tiles.over_blocks(step, BLOCK_M, BLOCK_K, VEC_SIZE)
  reciprocals = tiles.over_blocks(reciprocal, BLOCK_M, BLOCK_K, VEC_SIZE)
  ceilings = tiles.over_blocks(ceiling, BLOCK_M, BLOCK_K, VEC_SIZE)
  numerator = tl.minimum(magnitude, ceilings)
  quotient = numerator * reciprocals
  remainder = tl.fma(-quotient, steps, numerator)
  quotient = tl.fma(remainder, reciprocals, quotient)
  if IS_EXACT:
    remainder = tl.fma(-quotient, steps, numerator)
    quotient = tl.fma(remainder, reciprocals, quotient)
  return quotient


@triton.jit
def _error(
  quotient,
  scale,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Sums of ((x - rounded) * scale)^2 over blocks, or squares."""
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  rounded = decode_e2m1(encode(quotient, QUANTIZED.format.element))
  scales = tiles.over_blocks(decode_e4m3(scale), BLOCK_M, BLOCK_K, vec_size)
  error = (quotient - rounded) * scales
  error = error * error
  # Subnormals are zeros to some of XLA's platforms.
  is_zero = error.to(tl.int32, bitcast=True) < MIN_NORMAL_BITS
  error = tl.where(is_zero, 0.0, error)
  return tiles.block_sum(error, BLOCK_M, BLOCK_K, vec_size, QUANTIZED.extras)


@triton.jit
def quantize_two_level(
  x,
  global_scale,
  random_bits,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Codes of a tile, and of its scales of a two-level format: NVFP4's.

  Args:
    x: f32, bf16 or f16[BLOCK_M, BLOCK_K].
    global_scale: f32 scalar. Where it is not positive and finite, all is NaN.
      Where scales are chosen, that which is computed from x.
    random_bits: as of `quantize_mx`.

  Returns:
    As `quantize_mx`.
  """
  element: tl.constexpr = QUANTIZED.format.element
  scale_element: tl.constexpr = QUANTIZED.format.scale
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  largest: tl.constexpr = QUANTIZED.format.element.max
  extras: tl.constexpr = QUANTIZED.extras
  # All bits of a quotient count in an error, and beside random ones.
  is_exact: tl.constexpr = (
    QUANTIZED.extras.is_stochastic or QUANTIZED.extras.four_over_six
  )
  # What the bounds of steps and the decoding of scales below hold for.
  tl.static_assert(element.name == "e2m1" and scale_element.name == "e4m3")
  bits = f32_bits(x)
  magnitude = bits & MAGNITUDE_MASK
  amax = tiles.block_amax(magnitude, BLOCK_M, BLOCK_K, vec_size, extras)
  global_bits = global_scale.to(tl.int32, bitcast=True)
  is_nan = amax >= INFINITY_BITS
  is_nan = is_nan | (global_bits <= 0) | (global_bits >= INFINITY_BITS)

  factor = tl.where(global_bits < TINY_BITS, 2.0**64, 1.0)
  divisor = global_scale * factor
  amax = from_bits(amax) * factor
  if is_exact:
    factor = tl.where(global_bits < SMALL_BITS, 2.0**64, 1.0)
  unit = global_scale * factor
  numerator = from_bits(magnitude) * factor
  scale, step, reciprocal = _scaled_to(amax, divisor, unit, largest, QUANTIZED)
  quotient = _divided(
    numerator, scale, step, reciprocal, BLOCK_M, BLOCK_K, vec_size, is_exact
  )
  if QUANTIZED.extras.four_over_six:
    other, step, reciprocal = _scaled_to(amax, divisor, unit, FOUR, QUANTIZED)
    other_quotient = _divided(
      numerator, other, step, reciprocal, BLOCK_M, BLOCK_K, vec_size, is_exact
    )
    error = _error(quotient, scale, BLOCK_M, BLOCK_K, QUANTIZED)
    other_error = _error(other_quotient, other, BLOCK_M, BLOCK_K, QUANTIZED)
    # A scale of 0 makes all values 0, which is no error of rounding.
    is_other = (other_error < error) | (scale == 0)
    scale = tl.where(is_other, other, scale)
    is_other = tiles.over_blocks(is_other, BLOCK_M, BLOCK_K, vec_size)
    quotient = tl.where(is_other, other_quotient, quotient)
  if QUANTIZED.extras.is_stochastic:
    codes = encode_at_random(quotient, random_bits, element)
  else:
    codes = encode(quotient, element)
  codes = with_sign(codes, bits, element)
  is_nan_value = tiles.over_blocks(is_nan, BLOCK_M, BLOCK_K, vec_size)
  codes = tl.where(is_nan_value, 0, codes)
  return codes, tl.where(is_nan, scale_element.nan_code, scale)
