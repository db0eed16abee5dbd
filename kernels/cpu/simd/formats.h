// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Facts of number formats as compile-time constants, same as in
// kernels/formats.py. Sources: OCP Microscaling Formats (MX) v1.0, section 5.3;
// OCP 8-bit Floating Point Specification (OFP8).

#ifndef JAXPLUGIN_KERNELS_CPU_SIMD_FORMATS_H_
#define JAXPLUGIN_KERNELS_CPU_SIMD_FORMATS_H_

#include <stdint.h>

#include "simd/always_inline.h"

namespace jaxplugin {

// Only append: other builds (compare.cc) and Python
// (jaxplugin/runtime/cpu_library.py) use these numbers.
enum class Format {
  kE4M3,
  kE5M2,
  kE2M1,
  kF32,
  kBF16,
  kF16,
  kE2M3,
  kE3M2,
  kInt8,
  kInt4,
  kCodebook,  // codes of 4 bits, which index Operand::codebook
};
inline constexpr int kFormats = 11;
enum class ScaleKind { kNone, kE8M0, kE4M3, kE5M2, kF32, kBF16, kF16 };
inline constexpr int kScaleKinds = 7;

struct FormatFacts {
  int bits;         // of a code
  int stored_bits;  // of a code in memory; unused high bits are 0
  int exponent_bits;
  int mantissa_bits;
  int max_code;     // code of the largest finite value; NaN and Inf are above
  bool has_nan;
  bool has_infinity;
};

JAXPLUGIN_ALWAYS_INLINE constexpr FormatFacts FactsOf(Format f) {
  switch (f) {
    case Format::kE4M3: return {8, 8, 4, 3, 0x7e, true, false};
    case Format::kE5M2: return {8, 8, 5, 2, 0x7b, true, true};
    case Format::kE2M3: return {6, 8, 2, 3, 0x1f, false, false};
    case Format::kE3M2: return {6, 8, 3, 2, 0x1f, false, false};
    case Format::kE2M1: return {4, 4, 2, 1, 0x7, false, false};
    case Format::kF32: return {32, 32, 8, 23, 0x7f7fffff, true, true};
    case Format::kBF16: return {16, 16, 8, 7, 0x7f7f, true, true};
    case Format::kF16: return {16, 16, 5, 10, 0x7bff, true, true};
    case Format::kInt8: return {8, 8, 0, 7, 0x7f, false, false};
    case Format::kInt4: return {4, 4, 0, 3, 0x7, false, false};
    case Format::kCodebook: return {4, 4, 0, 3, 0x7, false, false};
  }
  return {};
}

// Whether the format is an unquantized float, which has no scales.
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsPlain(Format f) {
  return FactsOf(f).bits > 8;
}

// Whether codes are two's complement. They have no exponent: `mantissa_bits` are
// all bits except the sign.
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsInteger(Format f) {
  return f == Format::kInt8 || f == Format::kInt4;
}

// Whether a byte holds two codes; the first one is in the low half.
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsPacked(Format f) {
  return FactsOf(f).stored_bits == 4;
}

// Returns the size of `values` values. The number must be even if packed.
JAXPLUGIN_ALWAYS_INLINE constexpr int64_t BytesOf(Format f, int64_t values) {
  return values * FactsOf(f).stored_bits / 8;
}

// Returns a mask of the bits in a byte of codes that are 0 only for zeros: all
// bits except the signs of floats.
JAXPLUGIN_ALWAYS_INLINE constexpr int MagnitudeBits(Format f) {
  if (IsInteger(f)) return 0xff;
  const int code = (1 << (FactsOf(f).bits - 1)) - 1;
  return IsPacked(f) ? code << 4 | code : code;
}

// Returns the bytes of a scale.
JAXPLUGIN_ALWAYS_INLINE constexpr int64_t ScaleSize(ScaleKind kind) {
  switch (kind) {
    case ScaleKind::kF32: return 4;
    case ScaleKind::kBF16:
    case ScaleKind::kF16: return 2;
    default: return 1;
  }
}

// Whether the product of a value and a scale may need rounding to float32, or a
// sum of such products an additional rounding (simd/sums.inl).
JAXPLUGIN_ALWAYS_INLINE constexpr bool IsWide(ScaleKind kind) {
  return ScaleSize(kind) > 1;
}

// The values of the `format` attribute of quantize.
enum class QuantizedFormat {
  kMxfp8 = 0,
  kMxfp8E5m2,
  kMxfp4,
  kNvfp4,
  kMxfp6E2m3,
  kMxfp6E3m2,
};
inline constexpr int kQuantizedFormats = 6;

struct QuantizedFacts {
  const char* name;
  Format values;
  ScaleKind scale;
  int block;              // values that share a scale
  bool has_global_scale;  // one float32 for all blocks
};

JAXPLUGIN_ALWAYS_INLINE constexpr QuantizedFacts FactsOf(QuantizedFormat f) {
  switch (f) {
    case QuantizedFormat::kMxfp8:
      return {"mxfp8", Format::kE4M3, ScaleKind::kE8M0, 32, false};
    case QuantizedFormat::kMxfp8E5m2:
      return {"mxfp8_e5m2", Format::kE5M2, ScaleKind::kE8M0, 32, false};
    case QuantizedFormat::kMxfp4:
      return {"mxfp4", Format::kE2M1, ScaleKind::kE8M0, 32, false};
    case QuantizedFormat::kNvfp4:
      return {"nvfp4", Format::kE2M1, ScaleKind::kE4M3, 16, true};
    case QuantizedFormat::kMxfp6E2m3:
      return {"mxfp6_e2m3", Format::kE2M3, ScaleKind::kE8M0, 32, false};
    case QuantizedFormat::kMxfp6E3m2:
      return {"mxfp6_e3m2", Format::kE3M2, ScaleKind::kE8M0, 32, false};
  }
  return {};
}

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_SIMD_FORMATS_H_
