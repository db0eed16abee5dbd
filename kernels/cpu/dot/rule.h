// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Selects the engine of a dot whose config leaves it open. The rule depends on
// the formats, the sizes and the instruction set, which the machine need not
// support. Few rows are bound by reading the weights, many rows by arithmetic.
// The rule uses n only to choose the panel side. So a part of the columns of a
// dot has the same bits as the whole dot, which the ragged dot needs
// (dot/ragged.cc).
//
// "Streamed" below means a few_rows engine, which reads the weights once per
// pass of up to 4 rows and decodes them in registers. "Large" means an engine
// of blocked.inl. Tables of ratios divide the times of two engines; below 1 the
// first engine is faster.

#ifndef JAXPLUGIN_KERNELS_CPU_DOT_RULE_H_
#define JAXPLUGIN_KERNELS_CPU_DOT_RULE_H_

#include <stdint.h>

#include "kernels.h"
#include "simd/always_inline.h"
#include "simd/formats.h"

namespace jaxplugin {

// The properties of a dot of lhs[m, k] and rhs[n, k] that the rule and
// config_error.cc read. If one rhs has a batch of lhs, m counts all rows of
// lhs.
struct SideShape {
  Format format;
  ScaleKind scale;
  int64_t block;  // block size; 512 for a longer row with one scale
};
struct DotShape {
  SideShape lhs, rhs;
  int64_t m, n, k;
};

// The panel side and the strip side of a dot (PanelIsLhs).
struct ShapeSides {
  SideShape panel, strip;
  int64_t rows;  // of the panel
  bool is_block_32;  // both block sizes are 32
};

JAXPLUGIN_ALWAYS_INLINE SideShape ShapeOf(Format format, ScaleKind scale,
                                          int64_t block, int64_t k) {
  return {format, scale, block > 32 && block >= k ? 512 : block};
}

JAXPLUGIN_ALWAYS_INLINE SideShape ShapeOf(const Operand& x) {
  return ShapeOf(x.format, x.scale_kind, x.block, x.k);
}

JAXPLUGIN_ALWAYS_INLINE ShapeSides SidesOf(const DotShape& x) {
  const bool is_lhs = PanelIsLhs(x.m, x.n);
  return {is_lhs ? x.lhs : x.rhs,
          is_lhs ? x.rhs : x.lhs,
          is_lhs ? x.m : x.n,
          x.lhs.block == 32 && x.rhs.block == 32};
}

// Whether the engines of AVX-512 and AMX decode a quantized side to bf16. The
// engines of AVX2 and of the baseline decode all. Blocks of more than 32 values
// must fit in 512 values, or be a multiple of them (Unpacker). E2M1 with such
// blocks is left to AVX2, which multiplies it as integers.
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsDecodedByAvx512(SideShape x) {
  return !IsPlain(x.format) && !IsInteger(x.format) &&
         x.format != Format::kCodebook &&
         (x.scale == ScaleKind::kE8M0 || x.scale == ScaleKind::kE4M3) &&
         (x.block <= 32 || (!IsPacked(x.format) &&
                            (512 % x.block == 0 || x.block % 512 == 0)));
}

// Whether the few_rows_avx512 engine decodes a side as its weights.
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsStreamedByAvx512(SideShape x) {
  return !IsPlain(x.format) && x.scale != ScaleKind::kE5M2 &&
         (x.block <= 32 || 512 % x.block == 0 || x.block % 512 == 0);
}

// Whether the bf16 engine multiplies sums by the scales of a strip side, because
// the products of its values and scales do not fit in bf16.
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsScaledByAvx512(SideShape x) {
  return IsStreamedByAvx512(x) && !IsDecodedByAvx512(x) && x.block > 16 &&
         x.format != Format::kCodebook;
}

// Whether the float_avx512 engine supports a dot. AVX2 multiplies the others in
// float32.
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsFloatAvx512(const DotShape& x) {
  return (IsPlain(x.lhs.format) || IsStreamedByAvx512(x.lhs)) &&
         (IsPlain(x.rhs.format) || IsStreamedByAvx512(x.rhs));
}

// Whether bf16 represents the values of a side exactly, in the engines of
// AVX-512 and AMX. Plain bf16 values also need the check of BF16CanHold.
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsBF16(SideShape x) {
  return x.format == Format::kBF16 || IsDecodedByAvx512(x);
}

// Whether the engines that multiply bytes support a side: values are E2M1, and
// the product of two scales needs no rounding.
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsE2M1(SideShape x) {
  return x.format == Format::kE2M1 && !IsWide(x.scale);
}

// Up to this many rows, AVX2 streams the weights. Streamed over large, n = k =
// 4096, two Zen 4 cores limited to AVX2:
//   rows             5     8    12
//   bf16 * MXFP4  0.98  1.16  1.39
//   MXFP8         1.02  1.28  1.40
// One Zen 3 core:
//   rows             4     6     8    12
//   MXFP4         0.81  1.10  1.09  1.33
//   NVFP4         0.78        1.10
// (JAXPLUGIN_CPU_ISA=avx2 tests/compare/compare.sh HEAD mxfp4 5 4096 4096
// few_rows_avx2, and so on; 2026-11.)
inline constexpr int64_t kStreamedRowsAvx2 = 4;

// AVX-512 streams the weights for more rows, in passes of up to 4 rows, because
// its large dots take as long for 5 rows as for 8. Streamed over large, two Zen 4
// cores:
//   rows                        5     8     9    12    16
//   bf16 * MXFP4, 4096^2     0.56  0.66        0.84  0.97
//                 8192^2              0.82  0.93  1.04
//                 2880^2              0.71  0.76  0.82
//                 1024^2              0.87  0.93  1.06
//   bf16 * NVFP4, 4096^2     0.49                    0.87
//                 8192^2              0.76  0.87
//                 1024^2              0.83  0.90
//   MXFP8,        4096^2     0.63              0.93  1.14
//                 8192^2              0.96  1.07  1.19
//                 2880^2              0.80  0.89
//                 1024^2              0.90  1.00  1.17
//   MXFP6_E2M3,   4096^2     0.63  0.77        0.92
// (tests/compare/compare.sh HEAD 'bf16*mxfp4' 8 4096 4096 bf16 few_rows_avx512,
// and so on; 2026-11.) From 6 rows of FP8 and FP6, bf16_rows is faster. Streamed
// over bf16_rows, one core:
//   rows                             5     6     8    10    12
//   bf16 * MXFP8, 4096^2, Zen 5   0.92  0.98  1.04  1.15  1.16
//                         Zen 4   1.01  1.18  1.14  1.25  1.22
//                 8192^2, Zen 4   1.07  1.15  1.29
//                 1024^2, Zen 4   0.96  0.96  0.99
//   bf16 * MXFP4, 4096^2, Zen 5   0.72  0.75  0.85  0.96  0.95
//                         Zen 4   0.87  0.89  0.98  1.04  0.97
//   bf16 * NVFP4, 4096^2, Zen 5   0.64  0.68  0.86  0.91  0.92
//                         Zen 4   0.71  0.74  0.86  0.91  0.90
// (ONE_THREAD=1 tests/compare/compare.sh HEAD 'bf16*mxfp8' 5 4096 4096 bf16_rows
// few_rows_avx512, and so on; 2026-11.) 14 to 16 rows of bf16 * NVFP4 take 0.85 to
// 0.98 of the time of bf16_rows (1024^2 to 8192^2, two Zen 5 cores).
inline constexpr int64_t kStreamedByteRows = 5;

// The same for weights whose scales multiply sums: with codes of 4 bits, and of 8
// bits. Streamed over large, bf16 rows, n = k = 4096 (2026-11). Only the columns of
// 20, 32 and 40 rows, on two cores, and INT8_32 and FP8_1X128 with 16 rows on Zen 5
// have prefetches into L1 (few_rows_avx512.inl).
//   rows                16    20    32    40    64
//   INT4_32, Zen 5    0.65        0.82  0.95  1.15
//            Zen 4    0.75                    1.20
//   INT8_32, Zen 5    0.79  0.93              1.74
//            Zen 4    1.00                    1.66
//   FP8_1X128, Zen 5  0.83                    1.59
//              Zen 4  0.94                    1.52
// With 8192^2, INT4_32 has 0.81 (32 rows) and INT8_32 0.94 (16 rows) on Zen 5.
inline constexpr int64_t kScaledRows = 32;
inline constexpr int64_t kScaledByteRows = 16;
// f32 and f16 over float_avx512, one core, 2048 x 4096:
//   rows                    6     8    12
//   f32 * MXFP4, Zen 5   0.66  0.97  1.08
//                Zen 4   0.67  0.91  1.03
// (ONE_THREAD=1 tests/compare/compare.sh HEAD 'f32*mxfp4' 8 2048 4096
// float_avx512 few_rows_avx512, and so on; 2026-11.)
inline constexpr int64_t kStreamedFloatRows = 8;
// The same with codes of 8 bits, or values whose scales are wide. Streamed
// over AVX2's engine (8 rows: over float_avx512), n = k = 4096, one core
// (2026-11):
//   rows                      1     2     3     4     8
//   f32 * MXFP8, Zen 5     0.72  0.78  0.79  0.78  1.06
//                Zen 4     0.99  0.92  0.72  0.67  0.98
//   f32 * INT8_32, Zen 5   0.73  0.83  0.91  0.83  0.96
//                  Zen 4   1.01  0.99  0.85  0.83  1.15
//   FP8_1X128, Zen 5       0.70  0.76  0.74  0.72
inline constexpr int64_t kStreamedFloatByteRows = 4;

// `is_bf16`: bf16 represents the panel side.
JAXPLUGIN_ALWAYS_INLINE int64_t StreamedRowsAvx512(const ShapeSides& sides,
                                                   bool is_bf16) {
  if (!IsStreamedByAvx512(sides.strip)) return 0;
  if (!is_bf16 || sides.strip.format == Format::kCodebook) {
    return IsPlain(sides.panel.format) && IsPacked(sides.strip.format)
               ? kStreamedFloatRows
               : kStreamedFloatByteRows;
  }
  if (IsPacked(sides.strip.format)) {
    if (IsScaledByAvx512(sides.strip)) return kScaledRows;
    return sides.strip.block == 16 ? 16 : 12;
  }
  return IsBF16(sides.strip) ? kStreamedByteRows : kScaledByteRows;
}

// Up to a number of rows, bf16_rows is faster than bf16, which transposes the
// strip side. bf16_rows over bf16, one core:
//   rows                              16    24    32    48    64    96
//   bf16 * MXFP8, 4096^2, Zen 5     0.72                    0.93  1.08
//                         Zen 4     0.72  0.83  0.93  1.02  1.08  1.17
//                 8192^2, Zen 5                       0.98
//                         Zen 4           0.85        1.05
//                 2880^2, Zen 5                       0.92
//                         Zen 4                       1.03
//                 1024^2, Zen 5                       0.93
//                         Zen 4     0.76  0.86
//   bf16 * MXFP4, 4096^2, Zen 5     0.68                    0.92
//                         Zen 4     1.01  1.08  1.15  1.20  1.23  1.29
//   bf16 * NVFP4, 4096^2, Zen 5     0.71                    0.98  1.07
//                         Zen 4     0.86  0.97  1.05  1.13  1.18  1.24
//                 8192^2, Zen 5                       1.00
//                         Zen 4           0.98        1.18
//                 2880^2, Zen 5                       0.90
//                         Zen 4                       1.18
//                 1024^2, Zen 5                       0.94
//                         Zen 4     1.04  1.11
// (ONE_THREAD=1 tests/compare/compare.sh HEAD 'bf16*mxfp8' 16 4096 4096 bf16
// bf16_rows, and so on; 2026-11.) The rule does not distinguish the machines.
// With more than 48 rows of FP4, Zen 4 would lose more than Zen 5 gains.
JAXPLUGIN_ALWAYS_INLINE constexpr int64_t BF16RowsMost(SideShape strip) {
  return IsPacked(strip.format) ? 48 : 64;
}

// Up to this many rows, AVX-512 streams two E2M1 operands. Times in ms, n = k =
// 4096, one core. few_rows_avx512 is not measured with 5 and more rows on Zen 4,
// and few_rows_vnni is not measured there.
//   rows                        1     2     3     4     5     6     8
//   MXFP4, Zen 5, vnni       0.64  0.73  0.77  0.79  0.83  0.94  0.94
//          few_rows_vnni     0.27  0.32  0.42  0.54  0.70  0.77  0.96
//          few_rows_avx512   0.27  0.37  0.49  0.60  0.81  0.92  1.15
//          Zen 4, vnni       0.71  0.79  0.85  0.96  1.03
//          few_rows_avx512         0.71  0.91  1.21
//   NVFP4, Zen 5, vnni       0.86  0.95  1.06  1.02  1.11  1.12  1.22
//          few_rows_vnni     0.31  0.37  0.49  0.62  0.82  0.90  1.10
//          few_rows_avx512   0.27  0.35  0.45  0.55  0.75  0.84  1.07
//          Zen 4, vnni       0.83  0.95  1.14  1.17  1.31
//          few_rows_avx512   0.48  0.66  0.87  1.17
// (ONE_THREAD=1 tests/compare/compare.sh HEAD mxfp4 3 4096 4096 vnni few_rows_vnni
// few_rows_avx512, and so on; 2026-11.)
inline constexpr int64_t kStreamedE2M1RowsAvx512 = 4;

// Whether vpdpbusd multiplies the values of a format: integers, and twice the
// values of E2M1.
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsBytes(Format f) {
  return IsInteger(f) || f == Format::kE2M1;
}

// Whether one side is integers and the other one integers or E2M1, with scales
// of any kind.
JAXPLUGIN_ALWAYS_INLINE constexpr bool AreIntegers(const ShapeSides& sides) {
  return IsBytes(sides.panel.format) && IsBytes(sides.strip.format) &&
         (IsInteger(sides.panel.format) || IsInteger(sides.strip.format));
}

// Whether the engines of AVX2, and few_rows_vnni, multiply two sides as bytes.
JAXPLUGIN_ALWAYS_INLINE constexpr bool AreBytes(SideShape x, SideShape y) {
  return IsBytes(x.format) && IsBytes(y.format) &&
         (IsInteger(x.format) || IsInteger(y.format) || (IsE2M1(x) && IsE2M1(y)));
}

// The lowest instruction set with engines of bytes. AVX-512 without BF16 has
// those of AVX2, unless it is emulated on a machine without AVX2.
#if defined(__x86_64__)
inline constexpr Isa kLeastIsaOfBytes = Isa::kAvx2;
#else
inline constexpr Isa kLeastIsaOfBytes = Isa::kAvx512Bf16;
#endif

// Whether a dot can quantize its rows.
JAXPLUGIN_ALWAYS_INLINE constexpr bool CanQuantizeRows(Isa isa,
                                                       const DotShape& x) {
  return isa >= kLeastIsaOfBytes &&
         ((IsPlain(x.lhs.format) && IsBytes(x.rhs.format)) ||
          (IsBytes(x.lhs.format) && IsPlain(x.rhs.format)));
}

// Up to this many rows, AVX-512 multiplies rows in bf16 about as fast as rows in
// int8, and faster with small k. The error is smaller. int8 over bf16, both
// streamed and already converted, two Zen 5 cores:
//   rows                      1     2     4     6     8
//   INT4_32, 4096 x 4096   1.03  1.02  0.98  0.96  0.91
//            2048 x 2048   1.09  0.98  0.90  0.96  0.89
//            3072 x 576    1.45  1.41  1.29  1.39  1.31
//   MXFP4,   4096 x 4096   1.07  0.94  0.99  0.85  0.89
//            2048 x 2048   1.00  0.98  0.87  0.91  0.84
//            3072 x 576    1.35  1.25  1.19  1.30  1.19
//   NVFP4,   4096 x 4096   1.08  1.03  1.28  1.06  1.04
//            2048 x 2048   1.05  1.14  1.11  1.15  1.07
//            3072 x 576    1.70  1.58  1.40  1.39  1.31
//   INT8_32, 4096 x 4096   0.98  0.97  0.82  0.70  0.81
//            2048 x 2048   0.98  0.97  0.85  0.88  0.84
//            3072 x 576    1.04  1.19  1.18  1.18  1.17
// f32 rows, which are rounded to bf16 here, take 1.1 to 2.5 times as long as bf16
// rows. (tests/compare/compare.sh HEAD 'bf16*int4_32' 4 4096 4096, 'f32*int4_32',
// and 'int8_32*int4_32' with the config few_rows_vnni, and so on; 2026-11.)
JAXPLUGIN_ALWAYS_INLINE constexpr int64_t BF16RowsMostOfFastest(
    SideShape weights) {
  if (!IsStreamedByAvx512(weights)) return 0;
  return IsPacked(weights.format) ? 8 : 4;
}

// Returns the form in which a dot that may quantize its rows
// (DotArgs::quantize_rows) multiplies them. A config that names an engine is one
// for bytes. AVX2 always quantizes: of the time of bf16 rows, rows in int8 take
// 0.5 to 0.9 with one row, 0.4 to 0.8 with 4, and 0.25 to 0.7 with 16 and 64
// (weights of 4096 x 4096 in MXFP4, NVFP4, INT4_32, INT4_128 and INT8_32, two Zen 3
// cores, 2026-11; tests/compare/compare.sh HEAD 'int8_32*mxfp4' 1 4096 4096 and
// 'bf16*mxfp4', and so on). Quantizing a row takes little of that.
JAXPLUGIN_ALWAYS_INLINE RowsForm RowsFormOf(Isa isa, const DotShape& x,
                                            Engine engine) {
  if (!CanQuantizeRows(isa, x)) return RowsForm::kGiven;
  const ShapeSides sides = SidesOf(x);
  if (engine != Engine::kByRule || isa < Isa::kAvx512Bf16 ||
      isa >= Isa::kNeonDotprod || !IsPlain(sides.panel.format) ||
      sides.rows > BF16RowsMostOfFastest(sides.strip)) {
    return RowsForm::kInt8;
  }
  return sides.panel.format == Format::kBF16 ? RowsForm::kGiven
                                             : RowsForm::kBF16;
}

// The rows that a dot quantizes.
inline constexpr SideShape kQuantizedRows = {Format::kInt8, ScaleKind::kF32,
                                             32};

// Returns the dot whose rows have a form.
JAXPLUGIN_ALWAYS_INLINE constexpr DotShape WithRows(DotShape x, RowsForm form) {
  SideShape& rows = IsPlain(x.lhs.format) ? x.lhs : x.rhs;
  if (form == RowsForm::kBF16) rows.format = Format::kBF16;
  if (form == RowsForm::kInt8) rows = kQuantizedRows;
  return x;
}

// Up to this many rows, AVX-512 streams integers. few_rows_vnni over vnni, rows
// in int8, n = k = 4096, two Zen 5 cores:
//   rows         6     7     8     9    10    12    16
//   MXFP4     0.53  0.63  0.68  0.86  0.88  1.05  1.40
//   INT4_32   0.62  0.79  0.87  1.03  1.11  1.22  1.58
//   INT8_32   0.88  0.92  0.99  1.22  1.05  1.19  1.40
// (tests/compare/compare.sh HEAD 'int8_32*mxfp4' 8 4096 4096 vnni few_rows_vnni,
// and so on; 2026-11.)
inline constexpr int64_t kStreamedIntegerRowsAvx512 = 8;

// From this many rows, AMX is the fastest engine. AMX over few_rows_avx512 (for
// two E2M1 operands: over vpdpbusd), n = k = 4096, one Sapphire Rapids core:
//   rows               4     5     6     8    12
//   MXFP8           1.16  0.86  0.77  0.62  0.43
//     8192^2, 1024^2      0.83        0.67
//   bf16 * MXFP4    1.11  0.82  0.72  0.57  0.39
//   bf16 * NVFP4    1.36  1.00  0.93  0.71  0.53
//   rows              16    20    24    32    64
//   MXFP4           1.07  1.04  0.96  0.80  0.63
//   NVFP4           1.08  0.97  0.98  0.75  0.56
// (ONE_THREAD=1 tests/compare/compare.sh HEAD mxfp8 5 4096 4096 few_rows_avx512
// amx, and so on; 2026-11.)
inline constexpr int64_t kAmxRowsMin = 5;
inline constexpr int64_t kAmxIntegerRowsMin = 24;

JAXPLUGIN_ALWAYS_INLINE Engine RuleAvx2(const DotShape& x) {
  const ShapeSides sides = SidesOf(x);
  if (!IsPlain(sides.strip.format) && sides.rows <= kStreamedRowsAvx2) {
    return Engine::kFewRowsAvx2;
  }
  return AreBytes(sides.panel, sides.strip) ? Engine::kIntegerAvx2
                                            : Engine::kFloatAvx2;
}

JAXPLUGIN_ALWAYS_INLINE Engine RuleBelowBF16(const DotShape& x) {
#if defined(__x86_64__)
  return RuleAvx2(x);
#else
  (void)x;
  return Engine::kF32;  // AVX-512 is emulated on a machine without AVX2
#endif
}

// Returns the engine of a dot that bf16 cannot represent, and that is not
// streamed. With two sides of f32, AVX2 takes 1.65 to 1.75 times as long as
// float_avx512 (1 to 4 rows, 2048 x 4096, one Zen 5 core, 2026-11).
JAXPLUGIN_ALWAYS_INLINE Engine RuleFloatAvx512(const DotShape& x) {
  return IsFloatAvx512(x) ? Engine::kFloatAvx512 : RuleBelowBF16(x);
}

JAXPLUGIN_ALWAYS_INLINE Engine RuleAvx512Bf16(const DotShape& x) {
  const ShapeSides sides = SidesOf(x);
  const bool is_bf16 = IsBF16(sides.panel) && IsBF16(sides.strip);
  if (is_bf16 && IsE2M1(sides.panel) && IsE2M1(sides.strip)) {
    if (sides.rows > kStreamedE2M1RowsAvx512) return Engine::kVnni;
    if (sides.rows > 1 && sides.is_block_32) return Engine::kFewRowsVnni;
  }
  if (AreIntegers(sides)) {
    return sides.rows <= kStreamedIntegerRowsAvx512 ? Engine::kFewRowsVnni
                                                    : Engine::kVnni;
  }
  if (sides.rows <= StreamedRowsAvx512(sides, IsBF16(sides.panel))) {
    return Engine::kFewRowsAvx512;
  }
  if (!is_bf16) {
    const bool is_scaled =
        IsBF16(sides.panel) && IsScaledByAvx512(sides.strip);
    return is_scaled ? Engine::kBF16 : RuleFloatAvx512(x);
  }
  return sides.rows <= BF16RowsMost(sides.strip) ? Engine::kBF16Rows
                                                 : Engine::kBF16;
}

JAXPLUGIN_ALWAYS_INLINE Engine RuleAmx(const DotShape& x) {
  const ShapeSides sides = SidesOf(x);
  const bool is_integer = IsE2M1(sides.panel) && IsE2M1(sides.strip);
  const int64_t least = is_integer ? kAmxIntegerRowsMin : kAmxRowsMin;
  const bool is_bf16 = IsBF16(sides.panel) && IsBF16(sides.strip);
  return is_bf16 && sides.rows >= least ? Engine::kAmx : RuleAvx512Bf16(x);
}

// Arm multiplies all bytes as integers, and everything else in float32.
JAXPLUGIN_ALWAYS_INLINE Engine RuleNeon(const DotShape& x) {
  return IsBytes(x.lhs.format) && IsBytes(x.rhs.format) ? Engine::kNeonIntegers
                                                        : Engine::kF32;
}

// The largest work of a dot that one thread computes, in products; decoding a
// weight counts as four. One row of 150 KB of E2M1 weights takes 8 us on a Zen
// 5 core, and 5 us with another thread of XLA's pool (README.md).
inline constexpr int64_t kSerialWork = int64_t{3} << 19;

JAXPLUGIN_ALWAYS_INLINE bool IsSerial(int64_t batch, int64_t m, int64_t n,
                                      int64_t k) {
  const int64_t rows = PanelIsLhs(m, n) ? m : n;
  const int64_t others = PanelIsLhs(m, n) ? n : m;
  if (rows > kSerialWork || others > kSerialWork || k > kSerialWork ||
      others * k > kSerialWork) {
    return false;
  }
  const int64_t each = others * k * (rows + 4);
  return each == 0 || batch <= kSerialWork / each;
}

// Returns the number of threads for a dot. A small dot uses one thread, because
// it ends before another thread wakes up.
JAXPLUGIN_ALWAYS_INLINE int ThreadsOf(const DotConfig& config, int64_t batch,
                                      int64_t m, int64_t n, int64_t k,
                                      int all) {
  if (config.threads > 0 && config.threads < all) {
    return static_cast<int>(config.threads);
  }
  if (config.threads > 0) return all;
  return IsSerial(batch, m, n, k) ? 1 : all;
}

JAXPLUGIN_ALWAYS_INLINE Engine EngineByRule(Isa isa, const DotShape& x) {
  switch (isa) {
    case Isa::kAvx2:
    case Isa::kAvx512: return RuleBelowBF16(x);
    case Isa::kAvx512Bf16: return RuleAvx512Bf16(x);
    case Isa::kAmx: return RuleAmx(x);
    case Isa::kNeonDotprod:
    case Isa::kNeonI8mm: return RuleNeon(x);
    default: return Engine::kF32;
  }
}

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_DOT_RULE_H_
