# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled values and scales to bf16, in registers, by integer operations.

A code's sign, exponent and mantissa are shifted to their places in bf16. The
bf16 number is then the value times a power of two: the difference of the two
exponent biases. This holds for subnormal codes too, which become subnormal bf16
numbers. One multiplication in bf16, which is exact and keeps
subnormals on every GPU, repairs the bias. NVFP4 has it in its scale, which is
multiplied anyway: E4M3 leaves room for it, but for 2^7, which the accumulator
gets at last (`OperandKind.missing_exponent`). E8M0 leaves none. Where an
instruction converts E2M1 (`OperandKind.is_converted`) nothing is to be
repaired.

Products of a value and its scale are exact in bf16: E4M3 and E2M3 times 2^e
have 4 significant bits, others fewer, E2M1 times E4M3 has 6, and bf16 has 8.
They leave bf16's range only where they leave f32's, which has the same
exponents.

OPERAND is a `configs.OperandKind`, DECODING a `configs.Decoding`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import inline_ptx

from jaxplugin.kernels import formats

_E4M3_BIAS_REPAIR = tl.constexpr(2.0 ** (127 - formats.E4M3.bias))
_E4M3_MAX = tl.constexpr(formats.E4M3.max)
_E4M3_IN_F32 = tl.constexpr(0x87F00000 - 2**32)  # sign, and bits 20 to 26
_E2M1_BIAS_REPAIR = tl.constexpr(2.0 ** (127 - formats.E2M1.bias))
_E4M3_TO_BF16 = tl.constexpr(inline_ptx.E4M3_TO_BF16)
_E2M1_TO_BF16 = tl.constexpr(inline_ptx.E2M1_TO_BF16)
_E2M1_TO_F32 = tl.constexpr(inline_ptx.E2M1_TO_F32)
_PRODUCTS_OF_PAIRS = tl.constexpr(inline_ptx.PRODUCTS_OF_PAIRS)
_E5M2_TO_BF16 = tl.constexpr(inline_ptx.E5M2_TO_BF16)
_E2M1_IN_F32 = tl.constexpr(0x81C00000 - 2**32)  # sign, and bits 22 to 24
_HALVES = tl.constexpr(inline_ptx.HALVES)
_E4M3_PAIR_TO_BF16 = tl.constexpr(inline_ptx.E4M3_PAIR_TO_BF16)


@triton.jit
def e4m3_to_bf16(code, DECODING: tl.constexpr, IS_VALUE: tl.constexpr = True):
  """bf16 of E4M3 codes, exactly; NaN (S.1111.111) included.

  code: uint8[...], read by integer operations, or float8e4nv[...], which the
  GPU is asked to convert: two values an instruction from sm_89 on.
  IS_VALUE: whether threads have four of them; they have few scales.
  """
  if code.dtype.is_fp8():
    # Through f32: a conversion of f16 to bf16 is one slow instruction a value.
    return code.to(tl.float32).to(tl.bfloat16)
  elif DECODING.packs and IS_VALUE:
    return tl.inline_asm_elementwise(
      _E4M3_TO_BF16,
      "=r,=r,r",
      [code],
      dtype=tl.bfloat16,
      is_pure=True,
      pack=4,
    )
  else:
    code = code.to(tl.int8, bitcast=True).to(tl.int32)
    # The sign is extended to bit 31, the rest belongs at bit 20. In f32, where
    # one comparison finds the NaN: it reads as 480.
    bits = (code << 20) & _E4M3_IN_F32
    x = bits.to(tl.float32, bitcast=True) * _E4M3_BIAS_REPAIR
    return tl.where(tl.abs(x) > _E4M3_MAX, float("nan"), x).to(tl.bfloat16)


@triton.jit
def e5m2_to_bf16(code, DECODING: tl.constexpr, IS_VALUE: tl.constexpr = True):
  """bf16 of E5M2 codes, exactly; infinities and NaN included.

  code: uint8[...] or float8e5[...]. They are the high bytes of f16 numbers.
  IS_VALUE: see `e4m3_to_bf16`.
  """
  if DECODING.packs and IS_VALUE:
    return tl.inline_asm_elementwise(
      _E5M2_TO_BF16,
      "=r,=r,r",
      [code.to(tl.uint8, bitcast=True)],
      dtype=tl.bfloat16,
      is_pure=True,
      pack=4,
    )
  code = code.to(tl.uint8, bitcast=True).to(tl.uint16) << 8
  return code.to(tl.float16, bitcast=True).to(tl.float32).to(tl.bfloat16)


@triton.jit
def finite_to_bf16(code, ELEMENT: tl.constexpr):
  """Returns exact bf16 of codes (uint8[...]) of a type without NaN and Inf.

  A byte has one code. Its upper bits are ignored.
  """
  sign: tl.constexpr = 1 << ELEMENT.sign_shift
  to_sign: tl.constexpr = 15 - ELEMENT.sign_shift
  to_mantissa: tl.constexpr = 7 - ELEMENT.mantissa_bits
  exponent: tl.constexpr = 127 - ELEMENT.bias
  bias_repair: tl.constexpr = 2.0**exponent
  code = code.to(tl.uint16)
  bits = ((code & sign) << to_sign) | ((code & (sign - 1)) << to_mantissa)
  return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True) * bias_repair


@triton.jit
def e2m1_pairs_to_bf16(packed, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """`values_to_bf16` of FP4 pairs (uint8[rows, columns]): bf16[.., 2 columns].

  The first of a pair is in the low nibble.
  """
  if OPERAND.is_converted:
    pairs = tl.inline_asm_elementwise(
      _E2M1_TO_BF16,
      "=r,=r,=r,=r,r",
      [packed],
      dtype=tl.uint32,
      is_pure=True,
      pack=4,
    )
    values = _pair(pairs, DECODING)
    return values.reshape(packed.shape[0], 2 * packed.shape[1])
  # Both values of a byte in one 32-bit word, four operations on both at once.
  word = packed.to(tl.uint32)
  word = word | (word << 12)
  bits = ((word & 0x00080008) << 12) | ((word & 0x00070007) << 6)
  values = _repaired(_pair(bits, DECODING), OPERAND)
  return values.reshape(packed.shape[0], 2 * packed.shape[1])


@triton.jit
def e2m1_words_to_bf16(
  words, I: tl.constexpr, OPERAND: tl.constexpr, DECODING: tl.constexpr
):
  """bf16[..., 2]: nibbles I and I + 4 of words of eight (uint32[...]).

  As of `values_to_bf16`.
  """
  if I == 0:
    bits = ((words << 12) & 0x80008000) | ((words << 6) & 0x01C001C0)
  elif I == 1:
    bits = ((words << 8) & 0x80008000) | ((words << 2) & 0x01C001C0)
  elif I == 2:
    bits = ((words << 4) & 0x80008000) | ((words >> 2) & 0x01C001C0)
  else:
    bits = (words & 0x80008000) | ((words >> 6) & 0x01C001C0)
  return _repaired(_pair(bits, DECODING), OPERAND)


@triton.jit
def converted_e2m1_words(words, DECODING: tl.constexpr):
  """bf16[rows, 8 * words] of E2M1 (uint32[rows, words]), in its usual order.

  Where an instruction converts it: `configs.OperandKind.is_converted`.
  """
  pair_0, pair_1, pair_2, pair_3 = tl.inline_asm_elementwise(
    _E2M1_TO_BF16,
    "=r,=r,=r,=r,r",
    [words],
    dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
    is_pure=True,
    pack=1,
  )
  pairs = tl.join(tl.join(pair_0, pair_2), tl.join(pair_1, pair_3))
  values = _pair(pairs, DECODING)
  return values.reshape(words.shape[0], 8 * words.shape[1])


@triton.jit
def interleaved_to_bf16(words, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """`values_to_bf16` of interleaved FP4 (uint32[rows, words]): [.., 8 words].

  16 values share two words, a and b. Bits of a value lie in the order that bf16
  has for them, sign, 6 others, exponent and mantissa, so that one mask finds
  them once a shift has brought them to their place: 18 operations for 16 values
  that in their usual order take 30. Pairs 0 to 5 are three in each word; of 6
  and 7, a has the sign and the upper bit of the exponent, b the rest. Where a
  value's bits pass the end of a half word, they go on in the other half.
  """
  rows: tl.constexpr = words.shape[0]
  units: tl.constexpr = words.shape[1] // 2
  a, b = tl.split(words.reshape(rows, units, 2))
  pair_0 = _pair(a & 0x81C081C0, DECODING)
  pair_1 = _pair((a << 4) & 0x81C081C0, DECODING)
  pair_2 = _pair(_rotated(a, 6) & 0x81C081C0, DECODING)
  pair_3 = _pair(b & 0x81C081C0, DECODING)
  pair_4 = _pair((b << 3) & 0x81C081C0, DECODING)
  pair_5 = _pair((b << 6) & 0x81C081C0, DECODING)
  bits = (_rotated(a, 1) & 0x81008100) | ((b >> 4) & 0x00C000C0)
  pair_6 = _pair(bits, DECODING)
  bits = (_rotated(a, 2) & 0x81008100) | ((b >> 7) & 0x00C000C0)
  pair_7 = _pair(bits, DECODING)
  even = tl.join(tl.join(pair_0, pair_4), tl.join(pair_2, pair_6))
  odd = tl.join(tl.join(pair_1, pair_5), tl.join(pair_3, pair_7))
  # [rows, units, value, i_2, i_1, i_0]: of the pair 4 i_2 + 2 i_1 + i_0.
  values = tl.join(even, odd).permute(0, 1, 3, 4, 5, 2)
  return _repaired(values.reshape(rows, 16 * units), OPERAND)


@triton.jit
def _rotated(x, BITS: tl.constexpr):
  """uint32 x, rotated to the right."""
  return (x >> BITS) | (x << (32 - BITS))


@triton.jit
def _repaired(values, OPERAND: tl.constexpr):
  """E2M1 of bf16 numbers with its bits, but for what `factor_of` repairs."""
  if OPERAND.folds_repair:
    return values
  else:
    return values * _E2M1_BIAS_REPAIR


@triton.jit
def _pair(bits, DECODING: tl.constexpr):
  """bf16[..., 2]: the halves of words (uint32[...]), the lower one first."""
  if DECODING.has_ptx:
    # What LLVM does not see it cannot take apart: it would shift and mask each
    # half for itself, at three times the operations (Triton 3.9).
    low, high = tl.inline_asm_elementwise(
      _HALVES,
      "=h,=h,r",
      [bits],
      dtype=(tl.uint16, tl.uint16),
      is_pure=True,
      pack=1,
    )
  else:
    low = (bits & 0xFFFF).to(tl.uint16)
    high = (bits >> 16).to(tl.uint16)
  return tl.join(low, high).to(tl.bfloat16, bitcast=True)


@triton.jit
def e8m0_to_bf16(code):
  """bf16 of E8M0 codes (uint8[...]): 2^(code - 127), NaN for 255.

  Code 0 is 2^-127, which bf16 and f32 have as a subnormal.
  """
  code = code.to(tl.uint16)
  bits = tl.where(code == 0, 0x0040, code << 7)
  bits = tl.where(code == 0xFF, 0x7FC0, bits)
  return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def scale_to_bf16(code, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """bf16 of a block format's scale codes (uint8[...], or E4M3 as FP8)."""
  if OPERAND.scale.name == "e4m3":
    return e4m3_to_bf16(code, DECODING, False)
  elif OPERAND.scale.name == "e5m2":
    return e5m2_to_bf16(code, DECODING, False)
  else:
    tl.static_assert(OPERAND.scale.name == "e8m0")
    return e8m0_to_bf16(code)


@triton.jit
def factor_of(scale, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """bf16[rows, blocks] that `dequantize` multiplies values by.

  scale: see `scale_to_bf16`.
  """
  if OPERAND.is_converted:
    return _neighbours_to_bf16(scale, OPERAND, DECODING)
  if not OPERAND.folds_repair:
    return scale_to_bf16(scale, OPERAND, DECODING)
  repair: tl.constexpr = _E2M1_BIAS_REPAIR / 2.0**OPERAND.missing_exponent
  return _neighbours_to_bf16(scale, OPERAND, DECODING) * repair


@triton.jit
def _neighbours_to_bf16(scale, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """`scale_to_bf16`; of E4M3, neighbours of a row together where they can."""
  if DECODING.has_ptx and scale.dtype.is_fp8() and scale.shape[1] % 2 == 0:
    return _e4m3_pairs_to_bf16(scale)
  else:
    return scale_to_bf16(scale, OPERAND, DECODING)


@triton.jit
def _e4m3_pairs_to_bf16(code):
  """bf16[rows, columns] of E4M3 (float8e4nv[rows, columns]), exactly.

  Neighbours of a row are converted together. Triton 3.9 instead converts values
  that are adjacent in its layout, which may be in different rows. It then
  splits bytes that were loaded together, and joins others.
  """
  rows: tl.constexpr = code.shape[0]
  pairs: tl.constexpr = code.shape[1] // 2
  code = code.to(tl.uint8, bitcast=True).reshape(rows, pairs, 2)
  low, high = tl.split(code)
  low, high = tl.inline_asm_elementwise(
    _E4M3_PAIR_TO_BF16,
    "=h,=h,h",
    [low.to(tl.uint16) | (high.to(tl.uint16) << 8)],
    dtype=(tl.uint16, tl.uint16),
    is_pure=True,
    pack=1,
  )
  values = tl.join(low, high).to(tl.bfloat16, bitcast=True)
  return values.reshape(rows, 2 * pairs)


@triton.jit
def values_to_bf16(code, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """bf16[rows, k] of a block format's values, exactly.

  Of NVFP4 they are 2^-126 times these: `factor_of` has the rest.

  code: uint8 or FP8[rows, k], for FP4 formats uint8[rows, k / 2], for those
    that are interleaved uint32[rows, k / 8].
  """
  if OPERAND.is_interleaved:
    return interleaved_to_bf16(code, OPERAND, DECODING)
  elif OPERAND.element.name == "e4m3":
    return e4m3_to_bf16(code, DECODING)
  elif OPERAND.element.name == "e5m2":
    return e5m2_to_bf16(code, DECODING)
  elif OPERAND.element.bits == 6:
    element: tl.constexpr = OPERAND.element
    return finite_to_bf16(code, element)
  else:
    tl.static_assert(OPERAND.element.name == "e2m1")
    return e2m1_pairs_to_bf16(code, OPERAND, DECODING)


@triton.jit
def dequantize(code, scale, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """bf16[rows, k]: values times scale, divided by 2^missing_exponent.

  Args:
    code: see `values_to_bf16`.
    scale: see `scale_to_bf16`; [rows, k / block size].
    OPERAND: an operand in a block format; it has the missing_exponent.
  """
  block_size: tl.constexpr = OPERAND.values_per_scale
  if DECODING.in_f32:
    return _dequantize_in_f32(code, scale, OPERAND, DECODING)
  values = values_to_bf16(code, OPERAND, DECODING)
  rows: tl.constexpr = values.shape[0]
  columns: tl.constexpr = values.shape[1]
  blocks = values.reshape(rows, columns // block_size, block_size)
  factor = factor_of(scale, OPERAND, DECODING)[:, :, None]
  blocks = _products(blocks, factor, OPERAND, DECODING)
  return blocks.reshape(rows, columns)


@triton.jit
def _dequantize_in_f32(
  code, scale, OPERAND: tl.constexpr, DECODING: tl.constexpr
):
  """`dequantize` by products in f32, which are exact; rounded to bf16 at last.

  Those of FP4 are bf16 numbers: the smallest, 2^-128, is one of its subnormals,
  and what is cut off is 0.
  """
  tl.static_assert(not OPERAND.is_interleaved, "only NVIDIA's GPUs read it")
  is_e2m1: tl.constexpr = OPERAND.element.name == "e2m1"
  block_size: tl.constexpr = OPERAND.values_per_scale
  rows: tl.constexpr = code.shape[0]
  columns: tl.constexpr = OPERAND.values_per_element * code.shape[1]
  if OPERAND.is_converted:
    # Words: LLVM has no register for bytes, and leaves the instruction out.
    pairs = tl.inline_asm_elementwise(
      _E2M1_TO_F32,
      "=v,v",
      [code.to(tl.uint32)],
      dtype=tl.uint64,
      is_pure=True,
      pack=1,
    )
    low = (pairs & 0xFFFFFFFF).to(tl.uint32)
    high = (pairs >> 32).to(tl.uint32)
    values = tl.join(low, high).to(tl.float32, bitcast=True)
  elif is_e2m1:
    # A nibble's sign is extended by the shift to the right.
    nibbles = code.to(tl.int32)
    low = ((nibbles << 28) >> 6) & _E2M1_IN_F32
    high = ((nibbles << 24) >> 6) & _E2M1_IN_F32
    values = tl.join(low, high).to(tl.float32, bitcast=True)
    values = _repaired(values, OPERAND)
  else:
    values = values_to_bf16(code, OPERAND, DECODING).to(tl.float32)
  blocks = values.reshape(rows, columns // block_size, block_size)
  factor = factor_of(scale, OPERAND, DECODING).to(tl.float32)
  blocks = blocks * factor[:, :, None]
  if is_e2m1:
    bits = (blocks.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
    blocks = bits.to(tl.bfloat16, bitcast=True)
  return blocks.to(tl.bfloat16).reshape(rows, columns)


@triton.jit
def _products(x, y, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """bf16 x * y, which is broadcast to the shape of x."""
  if OPERAND.is_interleaved or not DECODING.packs:
    return x * y
  else:
    return tl.inline_asm_elementwise(
      _PRODUCTS_OF_PAIRS,
      "=r,r,r",
      [x, y],
      dtype=tl.bfloat16,
      is_pure=True,
      pack=2,
    )


@triton.jit
def leading_bf16(x):
  """bf16 with the leading 8 significant bits of f32 `x`, the rest cut off."""
  bits = x.to(tl.uint32, bitcast=True) & 0xFFFF0000
  return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def without_leading_bf16(x):
  """f32 `x - leading_bf16(x)`, exactly; 0 where x is infinite."""
  leading = leading_bf16(x).to(tl.float32)
  return tl.where(x == leading, 0.0, x - leading)
