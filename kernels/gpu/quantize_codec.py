# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes a tile in registers: functions that Triton kernels call.

All of them give the bits of `jp.quantize`. Exponents and the rounding of codes
are integer operations on f32 bits. Floating-point operations are used where
they are exact or correctly rounded under IEEE 754 with subnormals honoured,
which is how Triton compiles f32 for NVIDIA (no `.ftz`) and AMD.

Constexprs that describe the values' type, from `quantize_config.Encoding`:
MANTISSA_BITS, BIAS, and MAX_BITS, the f32 bits of the largest value.
"""

import triton
import triton.language as tl

MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)
MANTISSA_MASK = tl.constexpr(0x007FFFFF)
E8M0_NAN = tl.constexpr(255)
E4M3_NAN = tl.constexpr(0x7F)
E4M3_MANTISSA_BITS = tl.constexpr(3)
E4M3_BIAS = tl.constexpr(7)
E4M3_MAX_BITS = tl.constexpr(0x43E00000)  # 448
E2M1_MAX = tl.constexpr(6.0)

# Where the global scale is smaller, it and the tensor are multiplied by 2^64:
# quotients keep their bits, and no reciprocal or remainder leaves f32's range.
# Large ones need no factor: a step is below amax / 5, so its reciprocal is a
# normal number.
TINY_BITS = tl.constexpr(0x1F800000)  # 2^-64


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
def encode(
  magnitude,
  MANTISSA_BITS: tl.constexpr,
  BIAS: tl.constexpr,
  MAX_BITS: tl.constexpr,
):
  """Codes without sign of f32 magnitudes, to nearest even, saturating; int32.

  The adder rounds what is subnormal in the target type: adding 2^23 quanta
  leaves their number in the low bits.
  """
  shift: tl.constexpr = 23 - MANTISSA_BITS
  magic_exponent: tl.constexpr = 24 - BIAS - MANTISSA_BITS
  magic: tl.constexpr = 2.0**magic_exponent
  bits = tl.minimum(magnitude.to(tl.int32, bitcast=True), MAX_BITS)
  to_even = ((bits >> shift) & 1) + ((1 << (shift - 1)) - 1)
  normal = ((bits + to_even) >> shift) - ((127 - BIAS) << MANTISSA_BITS)
  subnormal = (from_bits(bits) + magic).to(tl.int32, bitcast=True) - (
    (magic_exponent + 127) << 23
  )
  return tl.where(bits >= (128 - BIAS) << 23, normal, subnormal)


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
def block_amax(
  magnitude,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  VEC_SIZE: tl.constexpr,
):
  """Largest magnitude bits of each scale block, int32[BLOCK_M, blocks]."""
  blocks = tl.reshape(magnitude, (BLOCK_M, BLOCK_K // VEC_SIZE, VEC_SIZE))
  return tl.max(blocks, axis=2)


@triton.jit
def over_blocks(
  block_values,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  VEC_SIZE: tl.constexpr,
):
  """Repeats what each scale block has for each of its values."""
  shape: tl.constexpr = (BLOCK_M, BLOCK_K // VEC_SIZE, VEC_SIZE)
  repeated = tl.broadcast_to(block_values[:, :, None], shape)
  return tl.reshape(repeated, (BLOCK_M, BLOCK_K))


@triton.jit
def with_sign(codes, bits, SIGN_SHIFT: tl.constexpr):
  """Adds the sign of f32 `bits` to codes; -0 keeps its own."""
  return codes | ((bits >> (31 - SIGN_SHIFT)) & (1 << SIGN_SHIFT))


@triton.jit
def pack(codes, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
  """Two FP4 codes a byte, the first in the low nibble."""
  low, high = tl.split(tl.reshape(codes, (BLOCK_M, BLOCK_K // 2, 2)))
  return low | (high << 4)


@triton.jit
def quantize_mx(
  x,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  VEC_SIZE: tl.constexpr,
  MANTISSA_BITS: tl.constexpr,
  BIAS: tl.constexpr,
  MAX_BITS: tl.constexpr,
  ROUNDS_UP: tl.constexpr,
  HARDWARE_CAST: tl.constexpr,
):
  """Codes of a tile and of its E8M0 scales.

  Args:
    x: f32, bf16 or f16[BLOCK_M, BLOCK_K].
    HARDWARE_CAST: the target casts f32 to the (FP8) values' type, to nearest
      even and saturating.

  Returns:
    codes: int or uint8[BLOCK_M, BLOCK_K], one a value.
    scale: int32[BLOCK_M, BLOCK_K / VEC_SIZE].
  """
  bits = f32_bits(x)
  magnitude = bits & MAGNITUDE_MASK
  amax = block_amax(magnitude, BLOCK_M, BLOCK_K, VEC_SIZE)
  scale = (amax >> 23) - ((MAX_BITS >> 23) - 127)
  if ROUNDS_UP:
    exceeds = (amax & MANTISSA_MASK) > (MAX_BITS & MANTISSA_MASK)
    scale += exceeds.to(tl.int32)
  scale = tl.minimum(tl.maximum(scale, 0), E8M0_NAN - 1)
  is_nan = amax >= INFINITY_BITS
  # A block without NaN has a scale of at most 253 (E2M1, f32 max): the factor
  # is a normal number, and the product is exact where it matters.
  factor = over_blocks(
    from_bits((E8M0_NAN - 1 - scale) << 23), BLOCK_M, BLOCK_K, VEC_SIZE
  )
  if HARDWARE_CAST:
    quotient = from_bits(bits) * factor
    if MANTISSA_BITS == 3:
      codes = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
      codes = quotient.to(tl.float8e5).to(tl.uint8, bitcast=True)
  else:
    quotient = from_bits(magnitude) * factor
    if MANTISSA_BITS == 1 and x.dtype != tl.float32:
      codes = encode_e2m1_of_short(quotient, not ROUNDS_UP)
    else:
      codes = encode(quotient, MANTISSA_BITS, BIAS, MAX_BITS)
    sign_shift: tl.constexpr = 3 if MANTISSA_BITS == 1 else 7
    codes = with_sign(codes, bits, sign_shift)
  codes = tl.where(over_blocks(is_nan, BLOCK_M, BLOCK_K, VEC_SIZE), 0, codes)
  return codes, tl.where(is_nan, E8M0_NAN, scale)


@triton.jit
def quantize_nvfp4(
  x,
  global_scale,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  VEC_SIZE: tl.constexpr,
):
  """Codes of a tile in E2M1 and of its E4M3 scales.

  The quotient of a value is correctly rounded by one step of Newton from the
  correctly rounded reciprocal (Markstein, "Computation of elementary functions
  on the IBM RISC System/6000 processor", 1990): 3 operations in the place of a
  division.

  Args:
    x: f32, bf16 or f16[BLOCK_M, BLOCK_K].
    global_scale: f32 scalar. Where it is not positive and finite, all is NaN.

  Returns:
    As `quantize_mx`.
  """
  bits = f32_bits(x)
  magnitude = bits & MAGNITUDE_MASK
  amax = block_amax(magnitude, BLOCK_M, BLOCK_K, VEC_SIZE)
  global_bits = global_scale.to(tl.int32, bitcast=True)
  is_nan = amax >= INFINITY_BITS
  is_nan = is_nan | (global_bits <= 0) | (global_bits >= INFINITY_BITS)

  factor = tl.where(global_bits < TINY_BITS, 2.0**64, 1.0)
  divisor = global_scale * factor
  ideal = tl.div_rn(tl.div_rn(from_bits(amax) * factor, E2M1_MAX), divisor)
  scale = encode(ideal, E4M3_MANTISSA_BITS, E4M3_BIAS, E4M3_MAX_BITS)
  step = tl.where(scale == 0, 1.0, decode_e4m3(scale) * divisor)
  # All of a block is zero where its scale is.
  ceiling = tl.where(scale == 0, 0.0, step * 8.0)
  reciprocal = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)

  steps = over_blocks(step, BLOCK_M, BLOCK_K, VEC_SIZE)
  reciprocals = over_blocks(reciprocal, BLOCK_M, BLOCK_K, VEC_SIZE)
  ceilings = over_blocks(ceiling, BLOCK_M, BLOCK_K, VEC_SIZE)
  # What exceeds 8 steps saturates all the same.
  numerator = tl.minimum(from_bits(magnitude) * factor, ceilings)
  guess = numerator * reciprocals
  remainder = tl.fma(-guess, steps, numerator)
  quotient = tl.fma(remainder, reciprocals, guess)
  codes = encode(quotient, 1, 1, 0x40C00000)
  codes = with_sign(codes, bits, 3)
  codes = tl.where(over_blocks(is_nan, BLOCK_M, BLOCK_K, VEC_SIZE), 0, codes)
  return codes, tl.where(is_nan, E4M3_NAN, scale)
