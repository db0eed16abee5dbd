# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""PTX and AMDGCN that `decode` has in its kernels, as text.

The interpreter knows by the text what it computes, and `decode_compiled_test`
executes it.
"""

from __future__ import annotations

from typing import Final

# $0, $1: the lower and the upper half of $2.
HALVES: Final = "mov.b32 {$0, $1}, $2;"

# $0, $1: bf16 of the four E4M3 codes of $2, the lowest first; two in each.
#
# `prmt` puts a code's byte below eight copies of its sign; shifted, the sign,
# exponent and mantissa are at their places in bf16, and the number is the value
# times 2^-120. A conversion to f16 detects the NaN, which would be 480: the
# repair adds NaN to it, and 0 to all other numbers.
E4M3_TO_BF16: Final = """{
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
}"""

# $0, $1: bf16 of the four E5M2 codes of $2, the high bytes of f16 numbers.
E5M2_TO_BF16: Final = """{
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
}"""

# $0: bf16 of the two INT8 codes in the 16 bits of $1, the lowest first.
#
# `prmt` puts a code below 0x43. With its lower 7 bits the bf16 number is 128
# plus these bits. With its sign bit alone it is 128, or 256 if the bit is set.
# `lop3` masks and negates the latter, so the sum of both is the integer.
INT8_PAIR_TO_BF16: Final = """{
  .reg .b32 x, low, high, one;
  mov.b32 x, {$1, $1};
  prmt.b32 x, x, 0x43, 0x4140;
  and.b32 low, x, 0x437F437F;
  lop3.b32 high, x, 0x43804380, 0x80008000, 0x6A;
  mov.b32 one, 0x3F803F80;
  fma.rn.bf16x2 $0, low, one, high;
}"""

# $0, $1: bf16 of the four INT8 codes of $2, the lowest first; two in each.
INT8_TO_BF16: Final = """{
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
}"""

# $0 to $3: bf16 of the four pairs of E2M1 codes of $4, the lowest first; two in
# each. PTX ISA 9.2, "cvt".
E2M1_TO_BF16: Final = """{
  .reg .b8 a, b, c, d;
  mov.b32 {a, b, c, d}, $4;
  cvt.rn.bf16x2.e2m1x2 $0, a;
  cvt.rn.bf16x2.e2m1x2 $1, b;
  cvt.rn.bf16x2.e2m1x2 $2, c;
  cvt.rn.bf16x2.e2m1x2 $3, d;
}"""

# AMD's, of CDNA 4. $0: f32 of the two E2M1 codes in the lowest byte of $1, the
# lower one first, times the scale 1 (LLVM, "llvm.amdgcn.cvt.scalef32.pk").
E2M1_TO_F32: Final = "v_cvt_scalef32_pk_f32_fp4 $0, $1, 1.0"

# $0: the products of the pairs of bf16 numbers $1 and $2.
PRODUCTS_OF_PAIRS: Final = """{
  .reg .b32 zeros;
  mov.b32 zeros, 0x80008000;
  fma.rn.bf16x2 $0, $1, $2, zeros;
}"""

# $0, $1: bf16 of the lower and the upper E4M3 code of $2.
E4M3_PAIR_TO_BF16: Final = """{
  .reg .b32 x;
  .reg .b16 a, b;
  .reg .f32 low, high;
  cvt.rn.f16x2.e4m3x2 x, $2;
  mov.b32 {a, b}, x;
  cvt.f32.f16 low, a;
  cvt.f32.f16 high, b;
  cvt.rn.bf16x2.f32 x, high, low;
  mov.b32 {$0, $1}, x;
}"""
