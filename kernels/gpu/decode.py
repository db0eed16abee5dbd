# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes block-scaled values and scales to bf16 in registers.

A code's sign, exponent and mantissa are shifted to their positions in bf16. The
bf16 number is then the value times a power of two, because the exponent biases
differ. This holds for subnormal codes too, which become subnormal bf16 numbers.
A multiplication in bf16, which is exact and keeps subnormals on every GPU,
corrects the bias.

With NVFP4 the scale factor includes the correction, which saves the
multiplication. bf16 cannot represent the product of the correction and an E4M3
scale, which is up to 2^7 too large. The accumulator is therefore multiplied by
2^7 at the end (`OperandKind.missing_exponent`). E8M0 scales already use the
whole range of bf16. If an instruction converts E2M1
(`OperandKind.is_converted`), no correction is necessary.

Products of a value and its scale are exact in bf16: E4M3 and E2M3 times 2^e
have 4 significant bits, others fewer, E2M1 times E4M3 has 6, and bf16 has 8.
The products overflow bf16 only if they overflow f32, which has the same largest
exponent. Subnormal products may be rounded: bf16's smallest number is 2^-133.
Products of other values and scales are not exact in bf16: values
are then decoded without scales, which multiply f32 sums (`tiles.scaled`).

OPERAND is a `configs.OperandKind`, DECODING a `configs.Decoding`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jaxplugin.kernels import formats

_E4M3_BIAS_REPAIR = tl.constexpr(2.0 ** (127 - formats.E4M3.bias))
_E4M3_MAX = tl.constexpr(formats.E4M3.max)
_E4M3_IN_F32 = tl.constexpr(0x87F00000 - 2**32)  # sign, and bits 20 to 26
_E2M1_BIAS_REPAIR = tl.constexpr(2.0 ** (127 - formats.E2M1.bias))
_E2M1_IN_F32 = tl.constexpr(0x81C00000 - 2**32)  # sign, and bits 22 to 24
# 2^23 in f32, whose last bit is 1, and a pair of 2^7 in bf16.
_INTEGERS_IN_F32 = tl.constexpr(0x4B000000)
_PAIR_OF_INTEGERS_IN_BF16 = tl.constexpr(0x43004300)
_INT4_SHIFT = tl.constexpr(136.0)

# Inline PTX; `E2M1_TO_F32` is AMDGCN. The tests' interpreter finds the
# computation by the text.

# $0, $1: the lower and the upper half of $2.
HALVES = tl.constexpr("mov.b32 {$0, $1}, $2;")

# $0, $1: bf16 of the four E4M3 codes of $2, the lowest first; two in each.
#
# `prmt` puts a code's byte below eight copies of its sign; shifted, the sign,
# exponent and mantissa are at their places in bf16, and the number is the value
# times 2^-120. A conversion to f16 detects the NaN, which would be 480: the
# repair adds NaN to it, and 0 to all other numbers.
E4M3_TO_BF16 = tl.constexpr("""{
  .reg .b32 x, y, a, b, nan, repair;
  prmt.b32 x, $2, 0, 0x9180;
  prmt.b32 y, $2, 0, 0xB3A2;
  shl.b32 x, x, 4;
  shl.b32 y, y, 4;
  and.b32 x, x, 0x87F087F0;
  and.b32 y, y, 0x87F087F0;
  abs.f16x2 a, x;
  abs.f16x2 b, y;
  mov.b32 nan, 0x07F007F0;
  set.eq.u32.f16x2 a, a, nan;
  set.eq.u32.f16x2 b, b, nan;
  mov.b32 repair, 0x7B807B80;
  fma.rn.bf16x2 $0, x, repair, a;
  fma.rn.bf16x2 $1, y, repair, b;
}""")

# $0, $1: bf16 of the four E5M2 codes of $2, the high bytes of f16 numbers.
E5M2_TO_BF16 = tl.constexpr("""{
  .reg .b32 x;
  .reg .b16 a, b;
  .reg .f32 low, high;
  prmt.b32 x, $2, 0, 0x1404;
  mov.b32 {a, b}, x;
  cvt.f32.f16 low, a;
  cvt.f32.f16 high, b;
  cvt.rn.bf16x2.f32 $0, high, low;
  prmt.b32 x, $2, 0, 0x3424;
  mov.b32 {a, b}, x;
  cvt.f32.f16 low, a;
  cvt.f32.f16 high, b;
  cvt.rn.bf16x2.f32 $1, high, low;
}""")

# $0: bf16 of the two INT8 codes in the 16 bits of $1, the lowest first.
#
# `prmt` puts a code below 0x43. With its lower 7 bits the bf16 number is 128
# plus these bits. With its sign bit alone it is 128, or 256 if the bit is set.
# `lop3` masks and negates the latter, so the sum of both is the integer.
INT8_PAIR_TO_BF16 = tl.constexpr("""{
  .reg .b32 x, low, high, one;
  mov.b32 x, {$1, $1};
  prmt.b32 x, x, 0x43, 0x4140;
  and.b32 low, x, 0x437F437F;
  lop3.b32 high, x, 0x43804380, 0x80008000, 0x6A;
  mov.b32 one, 0x3F803F80;
  fma.rn.bf16x2 $0, low, one, high;
}""")

# $0, $1: bf16 of the four INT8 codes of $2, the lowest first; two in each.
INT8_TO_BF16 = tl.constexpr("""{
  .reg .b32 x, y, low, high, one;
  prmt.b32 x, $2, 0x43, 0x4140;
  prmt.b32 y, $2, 0x43, 0x4342;
  mov.b32 one, 0x3F803F80;
  and.b32 low, x, 0x437F437F;
  lop3.b32 high, x, 0x43804380, 0x80008000, 0x6A;
  fma.rn.bf16x2 $0, low, one, high;
  and.b32 low, y, 0x437F437F;
  lop3.b32 high, y, 0x43804380, 0x80008000, 0x6A;
  fma.rn.bf16x2 $1, low, one, high;
}""")

# $0 to $3: bf16 of the four pairs of E2M1 codes of $4, the lowest first; two in
# each. PTX ISA 9.2, "cvt".
E2M1_TO_BF16 = tl.constexpr("""{
  .reg .b8 a, b, c, d;
  mov.b32 {a, b, c, d}, $4;
  cvt.rn.bf16x2.e2m1x2 $0, a;
  cvt.rn.bf16x2.e2m1x2 $1, b;
  cvt.rn.bf16x2.e2m1x2 $2, c;
  cvt.rn.bf16x2.e2m1x2 $3, d;
}""")

# AMD's, of CDNA 4. $0: f32 of the two E2M1 codes in the lowest byte of $1, the
# lower one first, times the scale 1 (LLVM, "llvm.amdgcn.cvt.scalef32.pk").
E2M1_TO_F32 = tl.constexpr("v_cvt_scalef32_pk_f32_fp4 $0, $1, 1.0")

# $0: the products of the pairs of bf16 numbers $1 and $2.
PRODUCTS_OF_PAIRS = tl.constexpr("""{
  .reg .b32 zeros;
  mov.b32 zeros, 0x80008000;
  fma.rn.bf16x2 $0, $1, $2, zeros;
}""")

# $0, $1: bf16 of the lower and the upper E4M3 code of $2.
E4M3_PAIR_TO_BF16 = tl.constexpr("""{
  .reg .b32 x;
  .reg .b16 a, b;
  .reg .f32 low, high;
  cvt.rn.f16x2.e4m3x2 x, $2;
  mov.b32 {a, b}, x;
  cvt.f32.f16 low, a;
  cvt.f32.f16 high, b;
  cvt.rn.bf16x2.f32 x, high, low;
  mov.b32 {$0, $1}, x;
}""")


@triton.jit
def e4m3_to_bf16(code, DECODING: tl.constexpr, IS_VALUE: tl.constexpr = True):
  """Converts E4M3 codes to bf16, exactly, including NaN (S.1111.111).

  code: uint8[...], decoded by integer operations, or float8e4nv[...], converted
  by the GPU: two values an instruction from sm_89 on.
  IS_VALUE: whether the codes are values. A thread has at least four values, but
  may have fewer scales.
  """
  if code.dtype.is_fp8():
    # Through f32, because converting f16 to bf16 is a slow instruction.
    return code.to(tl.float32).to(tl.bfloat16)
  elif DECODING.packs and IS_VALUE:
    return _four_to_bf16(code, E4M3_TO_BF16)
  else:
    code = code.to(tl.int8, bitcast=True).to(tl.int32)
    # The shift by 20 puts exponent and mantissa in place, and the extended sign
    # bit at bit 31. In f32 one comparison finds the NaN, which becomes 480.
    bits = (code << 20) & _E4M3_IN_F32
    x = bits.to(tl.float32, bitcast=True) * _E4M3_BIAS_REPAIR
    return tl.where(tl.abs(x) > _E4M3_MAX, float("nan"), x).to(tl.bfloat16)


@triton.jit
def _four_to_bf16(code, PTX: tl.constexpr):
  """Converts uint8 codes by inline PTX, four codes of a register at a time."""
  return tl.inline_asm_elementwise(
    PTX, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4
  )


@triton.jit
def e5m2_to_bf16(code, DECODING: tl.constexpr, IS_VALUE: tl.constexpr = True):
  """Converts E5M2 codes to bf16, exactly, including infinities and NaN.

  code: uint8[...] or float8e5[...], the high bytes of f16 numbers.
  IS_VALUE: see `e4m3_to_bf16`.
  """
  if DECODING.packs and IS_VALUE:
    return _four_to_bf16(code.to(tl.uint8, bitcast=True), E5M2_TO_BF16)
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
def int8_to_bf16(code, ELEMENT: tl.constexpr, DECODING: tl.constexpr):
  """Returns exact bf16 of codes (uint8[...]) of 8-bit integers.

  Without inline PTX, the code plus 128 becomes the low bits of an f32 number.
  """
  unit: tl.constexpr = ELEMENT.min_positive
  if DECODING.has_ptx:
    if DECODING.reads_words:
      integers = _four_to_bf16(code, INT8_TO_BF16)
    else:
      integers = tl.inline_asm_elementwise(
        INT8_PAIR_TO_BF16,
        "=r,h",
        [code],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
      )
    return integers if unit == 1 else integers * unit
  offset: tl.constexpr = (2.0**23 + 128) * ELEMENT.min_positive
  bits = (code ^ 0x80).to(tl.uint32) | _INTEGERS_IN_F32
  return (bits.to(tl.float32, bitcast=True) * unit - offset).to(tl.bfloat16)


@triton.jit
def _shifted_int4(words, DECODING: tl.constexpr):
  """Returns bf16[..., 2]: 136 plus the integers in bits 0-3 and 16-19 of words.

  The code plus 8 becomes the low bits of a bf16 number.
  """
  bits = ((words & 0x000F000F) ^ 0x00080008) | _PAIR_OF_INTEGERS_IN_BF16
  return _pair(bits, DECODING)


@triton.jit
def int4_pairs_to_bf16(packed, DECODING: tl.constexpr):
  """Computes `values_to_bf16` of packed INT4, uint8[rows, columns].

  Returns bf16[rows, 2 * columns]. The low nibble is the first value.
  """
  word = packed.to(tl.uint32)
  values = _shifted_int4(word | (word << 12), DECODING)
  # Triton moves a last reshape behind the copy to shared memory, and then finds
  # no layout for steps of 32 values on sm_90 ("Illegal shared layout").
  return values.reshape(packed.shape[0], 2 * packed.shape[1]) - _INT4_SHIFT


@triton.jit
def e2m1_pairs_to_bf16(packed, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """Computes `values_to_bf16` of packed FP4, uint8[rows, columns].

  Returns bf16[rows, 2 * columns]. The low nibble is the first value.
  """
  if OPERAND.is_converted:
    pairs = tl.inline_asm_elementwise(
      E2M1_TO_BF16,
      "=r,=r,=r,=r,r",
      [packed],
      dtype=tl.uint32,
      is_pure=True,
      pack=4,
    )
    values = _pair(pairs, DECODING)
    return values.reshape(packed.shape[0], 2 * packed.shape[1])
  # A byte's two values share a 32-bit word, so each operation decodes both.
  word = packed.to(tl.uint32)
  word = word | (word << 12)
  bits = ((word & 0x00080008) << 12) | ((word & 0x00070007) << 6)
  values = _pair(bits, DECODING).reshape(packed.shape[0], 2 * packed.shape[1])
  return _repaired(values, OPERAND)  # last, as in `int4_pairs_to_bf16`


@triton.jit
def words_to_bf16(
  words, I: tl.constexpr, OPERAND: tl.constexpr, DECODING: tl.constexpr
):
  """Returns bf16[..., 2]: `values_to_bf16` of nibbles I and I + 4 of words.

  words: uint32[...], eight FP4 or INT4 values each.
  """
  if OPERAND.element.name == "int4":
    return _shifted_int4(words >> (4 * I), DECODING) - _INT4_SHIFT
  else:
    return _e2m1_words_to_bf16(words, I, OPERAND, DECODING)


@triton.jit
def _e2m1_words_to_bf16(
  words, I: tl.constexpr, OPERAND: tl.constexpr, DECODING: tl.constexpr
):
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
  """Converts E2M1 words, uint32[rows, words], to bf16[rows, 8 * words].

  Requires `configs.OperandKind.is_converted`. Keeps the order of values.
  """
  pair_0, pair_1, pair_2, pair_3 = tl.inline_asm_elementwise(
    E2M1_TO_BF16,
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
  """Computes `values_to_bf16` of interleaved FP4, uint32[rows, words].

  Two words, a and b, hold 16 values. The bits of a value have the same distance
  from each other as in bf16: the sign, 6 bits between, then exponent and
  mantissa. A shift and one mask therefore decode a pair of values. 16 values
  take 18 operations, and 30 without interleaving. Each word has three of pairs
  0 to 5. For pairs 6 and 7, a has the sign and the upper exponent bit, and b
  the rest. Bits that would leave a half word continue in the other half.

  Returns bf16[rows, 8 * words].
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
  # values[rows, units, value, i_2, i_1, i_0] is of pair 4 i_2 + 2 i_1 + i_0.
  values = tl.join(even, odd).permute(0, 1, 3, 4, 5, 2)
  return _repaired(values.reshape(rows, 16 * units), OPERAND)


@triton.jit
def _rotated(x, BITS: tl.constexpr):
  """Rotates uint32 `x` to the right."""
  return (x >> BITS) | (x << (32 - BITS))


@triton.jit
def _repaired(values, OPERAND: tl.constexpr):
  """Corrects the exponent bias of E2M1 values unless `factor_of` does."""
  if OPERAND.folds_repair:
    return values
  else:
    return values * _E2M1_BIAS_REPAIR


@triton.jit
def _pair(bits, DECODING: tl.constexpr):
  """Returns bf16[..., 2]: the halves of words uint32[...], low half first."""
  if DECODING.has_ptx:
    # Inline PTX hides the halves from LLVM, which would shift and mask each
    # half separately, with three times the operations (Triton 3.9).
    return _two_of(bits, HALVES, "=h,=h,r")
  else:
    low = (bits & 0xFFFF).to(tl.uint16)
    high = (bits >> 16).to(tl.uint16)
    return tl.join(low, high).to(tl.bfloat16, bitcast=True)


@triton.jit
def _two_of(bits, PTX: tl.constexpr, CONSTRAINTS: tl.constexpr):
  """Returns bf16[..., 2], two results of inline PTX for each element."""
  low, high = tl.inline_asm_elementwise(
    PTX,
    CONSTRAINTS,
    [bits],
    dtype=(tl.uint16, tl.uint16),
    is_pure=True,
    pack=1,
  )
  return tl.join(low, high).to(tl.bfloat16, bitcast=True)


@triton.jit
def e8m0_to_bf16(code):
  """Converts E8M0 codes uint8[...] to bf16: 2^(code - 127), NaN for 255.

  Code 0 becomes the subnormal 2^-127.
  """
  code = code.to(tl.uint16)
  bits = tl.where(code == 0, 0x0040, code << 7)
  bits = tl.where(code == 0xFF, 0x7FC0, bits)
  return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def scale_to_bf16(code, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """Converts scale codes, uint8[...] or E4M3 as FP8, to bf16."""
  if OPERAND.scale.name == "e4m3":
    return e4m3_to_bf16(code, DECODING, False)
  elif OPERAND.scale.name == "e5m2":
    return e5m2_to_bf16(code, DECODING, False)
  else:
    tl.static_assert(OPERAND.scale.name == "e8m0")
    return e8m0_to_bf16(code)


@triton.jit
def scale_to_f32(code, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """Converts scales to f32: floats, or codes as for `scale_to_bf16`."""
  if OPERAND.scale.bits > 8:
    return code.to(tl.float32)
  else:
    return scale_to_bf16(code, OPERAND, DECODING).to(tl.float32)


@triton.jit
def factor_of(scale, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """Returns bf16[rows, blocks], the factor of values in `dequantize`.

  scale: as for `scale_to_bf16`.
  """
  if OPERAND.is_converted:
    return _neighbours_to_bf16(scale, OPERAND, DECODING)
  if not OPERAND.folds_repair:
    return scale_to_bf16(scale, OPERAND, DECODING)
  repair: tl.constexpr = _E2M1_BIAS_REPAIR / 2.0**OPERAND.missing_exponent
  return _neighbours_to_bf16(scale, OPERAND, DECODING) * repair


@triton.jit
def _neighbours_to_bf16(scale, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """Computes `scale_to_bf16`, with adjacent E4M3 codes converted in pairs."""
  if DECODING.has_ptx and scale.dtype.is_fp8() and scale.shape[1] % 2 == 0:
    return _e4m3_pairs_to_bf16(scale)
  else:
    return scale_to_bf16(scale, OPERAND, DECODING)


@triton.jit
def _e4m3_pairs_to_bf16(code):
  """Converts E4M3 codes, float8e4nv[rows, columns], to bf16, exactly.

  It converts adjacent codes of a row in pairs. Triton 3.9 would pair codes that
  are adjacent in its layout, perhaps of different rows, and would have to split
  bytes that were loaded together.
  """
  rows: tl.constexpr = code.shape[0]
  pairs: tl.constexpr = code.shape[1] // 2
  code = code.to(tl.uint8, bitcast=True).reshape(rows, pairs, 2)
  low, high = tl.split(code)
  codes = low.to(tl.uint16) | (high.to(tl.uint16) << 8)
  values = _two_of(codes, E4M3_PAIR_TO_BF16, "=h,=h,h")
  return values.reshape(rows, 2 * pairs)


@triton.jit
def values_to_bf16(code, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """Converts a block format's values to bf16[rows, k], exactly.

  If OPERAND `folds_repair`, the result is 2^-126 times the values, and
  `factor_of` includes the rest.

  code: uint8 or FP8[rows, k]; packed FP4 or INT4 uint8[rows, k / 2];
    interleaved FP4 uint32[rows, k / 8].
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
  elif OPERAND.element.name == "int4":
    return int4_pairs_to_bf16(code, DECODING)
  elif OPERAND.element.is_twos_complement:
    integer: tl.constexpr = OPERAND.element
    return int8_to_bf16(code, integer, DECODING)
  else:
    tl.static_assert(OPERAND.element.name == "e2m1")
    return e2m1_pairs_to_bf16(code, OPERAND, DECODING)


@triton.jit
def dequantize(code, scale, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """Returns bf16[rows, k]: values * scale / 2^missing_exponent.

  Args:
    code: as for `values_to_bf16`.
    scale: as for `scale_to_bf16`, [rows, k / block size].
    OPERAND: `OperandKind` with a block format, which has missing_exponent.
  """
  if DECODING.in_f32:
    return _dequantize_in_f32(code, scale, OPERAND, DECODING)
  values = values_to_bf16(code, OPERAND, DECODING)
  return scaled(values, scale, OPERAND, DECODING)


@triton.jit
def scaled(values, scale, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """Multiplies bf16 `values_to_bf16` by the factors of their blocks."""
  block_size: tl.constexpr = OPERAND.values_per_scale
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
  """Computes `dequantize` with exact products in f32, then rounds to bf16.

  Products of FP4 are bf16 numbers (the smallest, 2^-128, is subnormal), so the
  conversion only drops zero bits.
  """
  tl.static_assert(not OPERAND.is_interleaved, "only NVIDIA's GPUs read it")
  is_e2m1: tl.constexpr = OPERAND.element.name == "e2m1"
  block_size: tl.constexpr = OPERAND.values_per_scale
  rows: tl.constexpr = code.shape[0]
  columns: tl.constexpr = OPERAND.values_per_element * code.shape[1]
  if OPERAND.is_converted:
    # Codes become words, because LLVM has no byte registers and would drop the
    # instruction.
    pairs = tl.inline_asm_elementwise(
      E2M1_TO_F32,
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
    # The arithmetic right shift extends a nibble's sign.
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
  """Returns bf16 `x * y`, with `y` broadcast to the shape of `x`."""
  if OPERAND.is_interleaved or not DECODING.packs:
    return x * y
  else:
    return tl.inline_asm_elementwise(
      PRODUCTS_OF_PAIRS,
      "=r,r,r",
      [x, y],
      dtype=tl.bfloat16,
      is_pure=True,
      pack=2,
    )


@triton.jit
def leading_bf16(x):
  """Truncates f32 `x` to bf16, its leading 8 significant bits."""
  bits = x.to(tl.uint32, bitcast=True) & 0xFFFF0000
  return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def without_leading_bf16(x):
  """Returns f32 `x - leading_bf16(x)`, exactly; 0 if x is infinite."""
  leading = leading_bf16(x).to(tl.float32)
  return tl.where(x == leading, 0.0, x - leading)
