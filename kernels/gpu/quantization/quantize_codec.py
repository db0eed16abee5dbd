# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes a tile in registers: functions that Triton kernels call.

Results have the bits of `jp.quantize`. Exponents and the rounding of codes are
integer operations on f32 bits. Floating-point operations are exact or correctly
rounded under IEEE 754 with subnormals. Triton compiles f32 in this way for
NVIDIA (no `.ftz`) and AMD.

ELEMENT is a `formats.Element`, QUANTIZED a `quantize_config.QuantizeConstant`.
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

# If the global scale is smaller, it and the tensor are multiplied by 2^64.
# Quotients keep their bits, and reciprocals and remainders stay in f32's range.
# A large global scale needs no factor: a step is below amax / 5, so its
# reciprocal is a normal number.
TINY_BITS = tl.constexpr(0x1F800000)  # 2^-64
# The same limit if all bits of quotients count. f32 then holds the remainder of
# each quotient that matters.
SMALL_BITS = tl.constexpr(0x3F800000)  # 1

HUGE_BITS = tl.constexpr(0x5F800000)  # 2^64

# Converts eight f32 to four bytes. The first four operands go to the low
# nibbles (PTX ISA, "cvt"; from sm_100 on).
_PAIRS_TO_E2M1 = tl.constexpr(
  """{
  .reg .b8 first, second, third, fourth;
  cvt.rn.satfinite.e2m1x2.f32 first, $5, $1;
  cvt.rn.satfinite.e2m1x2.f32 second, $6, $2;
  cvt.rn.satfinite.e2m1x2.f32 third, $7, $3;
  cvt.rn.satfinite.e2m1x2.f32 fourth, $8, $4;
  mov.b32 $0, {first, second, third, fourth};
}"""
)
_AND = tl.constexpr("and.b32 $0, $1, $2;")
_RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")

# `four_over_six` also scales blocks to this number instead of E2M1's largest.
FOUR = tl.constexpr(4.0)

_SUBNORMAL_FRACTION_BITS = tl.constexpr(22)  # resolution of random rounding


@triton.jit
def f32_bits(x):
  """Returns the f32 bits of `x` (f32, bf16 or f16), int32."""
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
  """Returns int32 codes of f32 magnitudes, to nearest even, saturating.

  An addition rounds numbers that are subnormal in the target type: adding 2^23
  quanta leaves their number in the low bits.
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
  """Encodes like `encode`, but rounds up with the probability of the remainder.

  Args:
    magnitude: see `encode`.
    random_bits: int32. A normal number adds as many low bits as it discards. A
      subnormal number adds 22 bits to its number of quanta.
    ELEMENT: see `encode`.
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
def encode_e2m1(magnitude):
  """Computes `encode` to E2M1 for magnitudes up to 6, in the low 4 bits.

  The magnitude is added to 2^22 times 1, 2 or 4, its power of two. The sum is
  rounded to the target's steps. It has their number in its low bits, and its
  exponent counts the powers. 6 more steps cancel the exponent's bias. Their
  number is even, so they do not change ties. The result's upper bits are not
  part of the code.
  """
  bits = magnitude.to(tl.int32, bitcast=True)
  power = tl.maximum(from_bits(bits & INFINITY_BITS), 1.0)
  rounded = tl.fma(power, 2.0**22 + 3.0, magnitude)
  bits = rounded.to(tl.int32, bitcast=True)
  return bits + (bits >> 22)


@triton.jit
def e2m1_bytes(quotient, bits, is_nan, QUANTIZED: tl.constexpr):
  """Returns codes of quotients, two a byte: int32 or uint8[rows, k / 2].

  Args:
    quotient: f32[rows, k], with signs if hardware casts; otherwise magnitudes
      up to 6.
    bits: int32, f32 bits that have the signs of magnitudes.
    is_nan: int1[rows, blocks], blocks whose codes are all 0.
    QUANTIZED: constexpr.
  """
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  is_nan = tiles.over_blocks(is_nan, vec_size)
  if QUANTIZED.hardware_cast:
    low, high = _pairs(quotient)
    packed = tl.inline_asm_elementwise(
      _PAIRS_TO_E2M1,
      "=r,r,r,r,r,r,r,r,r",
      [low, high],
      dtype=tl.uint8,
      is_pure=True,
      pack=4,
    )
    is_nan, _ = _pairs(is_nan)
    packed = _zeros_where(is_nan, packed)
  else:
    top = (bits.to(tl.uint32, bitcast=True) >> 28).to(tl.int32, bitcast=True)
    codes = (encode_e2m1(quotient) & 7) | (top & ~7)
    packed = pack(tl.where(is_nan, 0, codes))
  return packed


@triton.jit
def _pairs(x):
  """Returns x[rows, k] at even places along k, and at odd places."""
  return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _zeros_where(condition, codes):
  """Replaces uint8 codes by 0 if the condition is true, four at once."""
  return tl.inline_asm_elementwise(
    _AND,
    "=r,r,r",
    [codes, tl.where(condition, 0, 255).to(tl.uint8)],
    dtype=tl.uint8,
    is_pure=True,
    pack=4,
  )


@triton.jit
def decode_e4m3(code):
  """Converts E4M3 codes without sign, int32, to f32."""
  normal = from_bits((code << 20) + (120 << 23))
  return tl.where(code < 8, code.to(tl.float32) * 2.0**-9, normal)


@triton.jit
def decode_e2m1(code):
  """Converts E2M1 codes without sign, int32, to f32."""
  normal = from_bits((code << 22) + (126 << 23))
  return tl.where(code < 2, code.to(tl.float32) * 0.5, normal)


@triton.jit
def with_sign(codes, bits, ELEMENT: tl.constexpr):
  """Adds the sign of f32 `bits` to codes, also to the code of -0."""
  sign_shift: tl.constexpr = ELEMENT.sign_shift
  return codes | ((bits >> (31 - sign_shift)) & (1 << sign_shift))


@triton.jit
def pack(codes):
  """Packs two FP4 codes in a byte, the first in the low nibble."""
  low, high = _pairs(codes)
  return low | (high << 4)


@triton.jit
def _block_amax(x, magnitude, QUANTIZED: tl.constexpr):
  """Computes `tiles.block_amax`, at least f32's Inf for a block with a NaN.

  If the hardware casts, the values of one load are compared as floats, which
  needs no mask for signs. Otherwise all are integers, because AMD needs more
  instructions for a NaN.
  """
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  rounds: tl.constexpr = 3 if x.dtype.primitive_bitwidth == 16 else 2
  options: tl.constexpr = QUANTIZED.options
  if QUANTIZED.hardware_cast and not options.is_square:
    largest = tl.abs(from_bits(f32_bits(x)))
    for _ in tl.static_range(rounds):
      first, second = _pairs(largest)
      largest = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    bits = largest.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
    amax = tl.max(tiles.in_blocks(bits, vec_size >> rounds), axis=2)
  else:
    amax = tiles.block_amax(magnitude, vec_size, options)
  return amax


@triton.jit
def quantize_mx(x, random_bits, QUANTIZED: tl.constexpr):
  """Quantizes a tile to a format with E8M0 scales.

  Args:
    x: f32, bf16 or f16[rows, k].
    random_bits: int32[rows, k]; not read if values are rounded to nearest.
    QUANTIZED: constexpr.

  Returns:
    codes: int or uint8[rows, k]. A byte [rows, k / 2] of FP4 has two codes, the
      first in the low nibble.
    scale: int32[rows, k / block size].
  """
  element: tl.constexpr = QUANTIZED.format.element
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  max_bits: tl.constexpr = QUANTIZED.format.element.max_f32_bits
  bits = f32_bits(x)
  magnitude = bits & MAGNITUDE_MASK
  amax = _block_amax(x, magnitude, QUANTIZED)
  scale = (amax >> 23) - ((max_bits >> 23) - 127)
  if QUANTIZED.rounds_up:
    exceeds = (amax & MANTISSA_MASK) > (max_bits & MANTISSA_MASK)
    scale += exceeds.to(tl.int32)
  scale = tl.minimum(tl.maximum(scale, 0), E8M0_NAN - 1)
  is_nan = amax >= INFINITY_BITS
  # A block without NaN has a scale of at most 253 (E2M1, f32 max), so the
  # factor is a normal number. The product is exact unless it is subnormal.
  factor = tiles.over_blocks(from_bits((E8M0_NAN - 1 - scale) << 23), vec_size)
  if QUANTIZED.hardware_cast:
    tl.static_assert(not QUANTIZED.options.is_stochastic)
    quotient = from_bits(bits) * factor
  else:
    quotient = from_bits(magnitude) * factor
  if element.name == "e2m1" and not QUANTIZED.options.is_stochastic:
    if not (QUANTIZED.rounds_up or QUANTIZED.hardware_cast):
      quotient = tl.minimum(quotient, element.max)
    codes = e2m1_bytes(quotient, bits, is_nan, QUANTIZED)
  else:
    if QUANTIZED.hardware_cast:
      if element.name == "e4m3":
        codes = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
      else:
        tl.static_assert(element.name == "e5m2")
        codes = quotient.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
      if QUANTIZED.options.is_stochastic:
        codes = encode_at_random(quotient, random_bits, element)
      else:
        codes = encode(quotient, element)
      codes = with_sign(codes, bits, element)
    codes = _stored(codes, is_nan, QUANTIZED)
  return codes, tl.where(is_nan, E8M0_NAN, scale)


@triton.jit
def _stored(codes, is_nan, QUANTIZED: tl.constexpr):
  """Returns codes as stored, with zeros in blocks that are NaN."""
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  is_nan = tiles.over_blocks(is_nan, vec_size)
  if QUANTIZED.hardware_cast:
    codes = _zeros_where(is_nan, codes)
  else:
    codes = tl.where(is_nan, 0, codes)
  if QUANTIZED.format.is_packed:
    codes = pack(codes)
  return codes


@triton.jit
def _ideal_scale(
  amax, divisor, reciprocal, LARGEST: tl.constexpr, LEAST: tl.constexpr
):
  """Returns f32 amax / LARGEST / divisor, rounded twice.

  At least LEAST, E4M3's least positive number: a scale that rounds to 0 would
  lose all values of its block.

  It uses Newton's steps. They round correctly if the result is not an E4M3
  zero: one step for 6, checked with all 2^23 significands, and two steps for
  the divisor (see `_divided`).

  Args:
    divisor: scalar of 2^-85 to 2^64.
    reciprocal: of the divisor, correctly rounded.
  """
  # More than E4M3 has: no quotient leaves f32's range.
  amax = tl.minimum(amax, divisor * 4096.0)
  inverse: tl.constexpr = 1.0 / LARGEST
  part = amax * inverse
  part = tl.fma(tl.fma(part, -LARGEST, amax), inverse, part)
  ideal = part * reciprocal
  ideal = tl.fma(tl.fma(-ideal, divisor, part), reciprocal, ideal)
  ideal = tl.fma(tl.fma(-ideal, divisor, part), reciprocal, ideal)
  return tl.maximum(ideal, LEAST)


@triton.jit
def _scaled_to(
  amax,
  divisor,
  divisor_reciprocal,
  unit,
  LARGEST: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Returns scales that map amax to LARGEST: codes, steps and reciprocals.

  Values are divided by the step, which is the scale times `unit`. The scale of
  a block of zeros is positive, too.
  """
  scale_element: tl.constexpr = QUANTIZED.format.scale
  least: tl.constexpr = QUANTIZED.format.scale.min_positive
  ideal = _ideal_scale(amax, divisor, divisor_reciprocal, LARGEST, least)
  if QUANTIZED.hardware_cast:
    code = ideal.to(tl.float8e4nv)
    scale = code.to(tl.uint8, bitcast=True).to(tl.int32)
    number = code.to(tl.float32)
  else:
    scale = encode(ideal, scale_element)
    number = decode_e4m3(scale)
  if QUANTIZED.options.scale_up:
    scale += ((number < ideal) & (number < scale_element.max)).to(tl.int32)
    number = decode_e4m3(scale)
  step = number * unit
  return scale, step, _reciprocal(step, QUANTIZED.hardware_cast)


@triton.jit
def approximate_reciprocal(x, BY_INSTRUCTION: tl.constexpr):
  """Returns 1 / x within 2 ulp, if x and 1 / x are normal numbers."""
  if BY_INSTRUCTION:
    result = tl.inline_asm_elementwise(
      _RECIPROCAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
  else:
    result = 1.0 / x
  return result


@triton.jit
def _reciprocal(x, IS_APPROXIMATE: tl.constexpr):
  """Returns 1 / x, correctly rounded, if x and 1 / x are normal numbers.

  Newton's steps round correctly except for a significand of all ones, whose
  result has the significand 1 + 2^-23 (Markstein, see `_divided`).
  """
  result = approximate_reciprocal(x, IS_APPROXIMATE)
  for _ in tl.static_range(2):
    result = tl.fma(tl.fma(-x, result, 1.0), result, result)
  ones = ((x.to(tl.int32, bitcast=True) & MANTISSA_MASK) + 1) >> 23
  return from_bits(result.to(tl.int32, bitcast=True) | ones)


@triton.jit
def _divided(numerator, step, reciprocal, QUANTIZED: tl.constexpr):
  """Divides magnitudes, or signed numbers if hardware casts, by their steps.

  It multiplies by the correctly rounded reciprocal, and corrects the quotient
  by a Newton step. The quotient is then within an ulp, which suffices to round
  it to a code. If all bits count, a second step rounds it correctly (Markstein,
  "Computation of elementary functions on the IBM RISC System/6000 processor",
  1990). Both steps take 5 operations, fewer than a division.
  """
  is_exact: tl.constexpr = QUANTIZED.options.needs_all_bits
  # Quotients above 6 saturate in any case. With a computed scale none exceeds
  # 9.
  ceiling = step * (16.0 if is_exact else 6.0)
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  steps = tiles.over_blocks(step, vec_size)
  reciprocals = tiles.over_blocks(reciprocal, vec_size)
  ceilings = tiles.over_blocks(ceiling, vec_size)
  if not QUANTIZED.hardware_cast:
    numerator = tl.minimum(numerator, ceilings)
  elif not QUANTIZED.is_bounded:
    numerator = tl.clamp(numerator, -ceilings, ceilings)
  quotient = numerator * reciprocals
  # This keeps the sign of a zero: -0 - 0 is -0, but -0 + 0 is 0.
  excess = tl.fma(quotient, steps, -numerator)
  quotient = tl.fma(-excess, reciprocals, quotient)
  if is_exact:
    excess = tl.fma(quotient, steps, -numerator)
    quotient = tl.fma(-excess, reciprocals, quotient)
  return quotient


@triton.jit
def _error(quotient, scale, QUANTIZED: tl.constexpr):
  """Returns sums of ((x - rounded) * scale)^2 over blocks, or squares."""
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  element: tl.constexpr = QUANTIZED.format.element
  options: tl.constexpr = QUANTIZED.options
  rounded = decode_e2m1(encode(quotient, element))
  scales = tiles.over_blocks(decode_e4m3(scale), vec_size)
  error = (quotient - rounded) * scales
  error = error * error
  # Some of XLA's platforms flush subnormals to zero.
  is_zero = error.to(tl.int32, bitcast=True) < MIN_NORMAL_BITS
  error = tl.where(is_zero, 0.0, error)
  return tiles.block_sum(error, vec_size, options)


@triton.jit
def quantize_two_level(x, global_scale, random_bits, QUANTIZED: tl.constexpr):
  """Quantizes a tile to a format with a global scale, NVFP4.

  Args:
    x: f32, bf16 or f16[rows, k].
    global_scale: f32 scalar. All blocks are NaN unless it is positive and
      finite. With `four_over_six` it is computed from x.
    random_bits, QUANTIZED: see `quantize_mx`.

  Returns:
    The values and scales of `quantize_mx`.
  """
  element: tl.constexpr = QUANTIZED.format.element
  scale_element: tl.constexpr = QUANTIZED.format.scale
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  largest: tl.constexpr = QUANTIZED.format.element.max
  options: tl.constexpr = QUANTIZED.options
  # The bounds of steps and the decoding of scales below assume these elements.
  tl.static_assert(element.name == "e2m1" and scale_element.name == "e4m3")
  bits = f32_bits(x)
  magnitude = bits & MAGNITUDE_MASK
  amax = _block_amax(x, magnitude, QUANTIZED)
  is_zero = amax == 0
  global_bits = global_scale.to(tl.int32, bitcast=True)
  is_nan = amax >= INFINITY_BITS
  is_nan = is_nan | (global_bits <= 0) | (global_bits >= INFINITY_BITS)

  factor = tl.where(global_bits < TINY_BITS, 2.0**64, 1.0)
  divisor_factor = tl.where(global_bits >= HUGE_BITS, 2.0**-64, factor)
  divisor = global_scale * divisor_factor
  divisor_reciprocal = _reciprocal(divisor, QUANTIZED.hardware_cast)
  amax = from_bits(amax) * divisor_factor
  if options.needs_all_bits:
    factor = tl.where(global_bits < SMALL_BITS, 2.0**64, 1.0)
  unit = global_scale * factor
  numerator = from_bits(bits if QUANTIZED.hardware_cast else magnitude) * factor
  scale, step, reciprocal = _scaled_to(
    amax, divisor, divisor_reciprocal, unit, largest, QUANTIZED
  )
  quotient = _divided(numerator, step, reciprocal, QUANTIZED)
  if QUANTIZED.options.four_over_six:
    other, step, reciprocal = _scaled_to(
      amax, divisor, divisor_reciprocal, unit, FOUR, QUANTIZED
    )
    other_quotient = _divided(numerator, step, reciprocal, QUANTIZED)
    error = _error(quotient, scale, QUANTIZED)
    other_error = _error(other_quotient, other, QUANTIZED)
    is_other = other_error < error
    scale = tl.where(is_other, other, scale)
    is_other = tiles.over_blocks(is_other, vec_size)
    quotient = tl.where(is_other, other_quotient, quotient)
  if QUANTIZED.options.is_stochastic:
    codes = encode_at_random(quotient, random_bits, element)
    codes = with_sign(codes, bits, element)
    codes = _stored(codes, is_nan, QUANTIZED)
  else:
    if options.needs_all_bits:
      quotient = tl.minimum(quotient, largest)
    codes = e2m1_bytes(quotient, bits, is_nan, QUANTIZED)
  scale = tl.where(is_zero, 0, scale)
  return codes, tl.where(is_nan, scale_element.nan_code, scale)
