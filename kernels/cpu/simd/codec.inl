// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Converts codes to float32 and float32 to 16-bit floats, in loops that any
// compiler vectorizes, and finds unsafe rows (kSafeExponent). Each instruction
// set includes the file inside an anonymous namespace.

JAXPLUGIN_ALWAYS_INLINE float AsFloat(uint32_t bits) {
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

JAXPLUGIN_ALWAYS_INLINE uint32_t AsBits(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  return bits;
}

JAXPLUGIN_ALWAYS_INLINE int64_t Min(int64_t a, int64_t b) {
  return a < b ? a : b;
}
JAXPLUGIN_ALWAYS_INLINE int64_t Max(int64_t a, int64_t b) {
  return a > b ? a : b;
}
JAXPLUGIN_ALWAYS_INLINE int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
JAXPLUGIN_ALWAYS_INLINE int64_t RoundUp(int64_t a, int64_t b) {
  return CeilDiv(a, b) * b;
}

constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kQuietNan = 0x7fc00000;

// Returns the bits of the largest finite magnitude.
inline uint32_t FiniteAmax(const float* x, int64_t count) {
  int32_t amax = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<int32_t>(AsBits(x[i]) & kMagnitude);
    const int32_t finite = bits < static_cast<int32_t>(kInfinity) ? bits : 0;
    amax = finite > amax ? finite : amax;
  }
  return static_cast<uint32_t>(amax);
}

inline void RaiseAmax(uint32_t amax, uint32_t* out) {
  uint32_t known = __atomic_load_n(out, __ATOMIC_RELAXED);
  while (known < amax &&
         !__atomic_compare_exchange_n(out, &known, amax, true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Compile-time constants of a small float format.
template <Format kFormat_>
struct SmallFloat {
  static constexpr Format kFormat = kFormat_;
  static constexpr FormatFacts kFacts = FactsOf(kFormat);
  static constexpr int kMantissaBits = kFacts.mantissa_bits;
  static constexpr int kBias = (1 << (kFacts.exponent_bits - 1)) - 1;
  static constexpr int kMinExponent = 1 - kBias;
  static constexpr int kMaxExponent =
      (kFacts.max_code >> kMantissaBits) - kBias;
  static constexpr int kSignShift = kFacts.bits - 1;
  static constexpr uint32_t kMagnitudeMask = (1u << kSignShift) - 1;
  // The bits of the largest finite value in float32.
  static constexpr uint32_t kMaxBits =
      (static_cast<uint32_t>(kFacts.max_code) << (23 - kMantissaBits)) +
      ((127u - kBias) << 23);
};
using E4M3 = SmallFloat<Format::kE4M3>;
using E5M2 = SmallFloat<Format::kE5M2>;
using E2M3 = SmallFloat<Format::kE2M3>;
using E3M2 = SmallFloat<Format::kE3M2>;
using E2M1 = SmallFloat<Format::kE2M1>;

// Decodes a code without branches and without float32 subnormals as
// intermediates, which cost a microcode assist on many machines.
template <typename T>
JAXPLUGIN_ALWAYS_INLINE float Decode(uint32_t code) {
  const uint32_t magnitude = (code & T::kMagnitudeMask)
                             << (23 - T::kMantissaBits);
  uint32_t normal = magnitude + ((127u - T::kBias) << 23);
  // With the exponent field of the smallest normal number, the bits are
  // (1 + mantissa) * 2^kMinExponent. Subtracting 2^kMinExponent is exact.
  const uint32_t subnormal =
      AsBits(AsFloat(magnitude + ((128u - T::kBias) << 23)) -
             AsFloat((127u + T::kMinExponent) << 23));
  constexpr uint32_t kNotFinite = static_cast<uint32_t>(T::kFacts.max_code + 1)
                                  << (23 - T::kMantissaBits);
  if (T::kFacts.has_infinity) {  // the codes above Inf are NaN
    normal = magnitude >= kNotFinite ? normal | kInfinity : normal;
  } else if (T::kFacts.has_nan) {  // only the last code is NaN
    normal = magnitude == kNotFinite ? kQuietNan : normal;
  }
  const uint32_t bits = magnitude < (1u << 23) ? subnormal : normal;
  return AsFloat(bits | ((code >> T::kSignShift) & 1u) << 31);
}

JAXPLUGIN_ALWAYS_INLINE float DecodeE8M0(uint32_t byte) {
  const uint32_t bits = byte == 0 ? 0x00400000u : byte << 23;
  return AsFloat(byte == 255 ? kQuietNan : bits);
}

JAXPLUGIN_ALWAYS_INLINE float FromBF16(uint16_t bits) {
  return AsFloat(static_cast<uint32_t>(bits) << 16);
}

JAXPLUGIN_ALWAYS_INLINE float FromF16(uint16_t half) {
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  uint32_t normal = magnitude + (112u << 23);
  normal = magnitude >= (31u << 23) ? normal | kInfinity : normal;
  const uint32_t subnormal =
      AsBits(AsFloat(magnitude + (113u << 23)) - AsFloat(113u << 23));
  const uint32_t bits = magnitude < (1u << 23) ? subnormal : normal;
  return AsFloat(bits | (half & 0x8000u) << 16);
}

// Loads a code of two or four bytes from any address.
template <typename Code>
JAXPLUGIN_ALWAYS_INLINE Code LoadCode(const uint8_t* at) {
  Code code;
  __builtin_memcpy(&code, at, sizeof(code));
  return code;
}

JAXPLUGIN_ALWAYS_INLINE float DecodeScale(ScaleKind kind, const uint8_t* at) {
  switch (kind) {
    case ScaleKind::kE8M0: return DecodeE8M0(*at);
    case ScaleKind::kE4M3: return Decode<E4M3>(*at);
    case ScaleKind::kE5M2: return Decode<E5M2>(*at);
    case ScaleKind::kF32: return LoadCode<float>(at);
    case ScaleKind::kBF16: return FromBF16(LoadCode<uint16_t>(at));
    case ScaleKind::kF16: return FromF16(LoadCode<uint16_t>(at));
    case ScaleKind::kNone: break;
  }
  return 1;
}

JAXPLUGIN_ALWAYS_INLINE float PowerOf(int exponent) {
  return AsFloat(static_cast<uint32_t>(127 + exponent) << 23);
}

constexpr int kMostExponent = 62;

// Decodes one scale, times 2^shift. A larger scale than 2^62 becomes 2^62, so
// that the product of two scales is finite.
JAXPLUGIN_ALWAYS_INLINE float ScaleTimes(ScaleKind kind, const uint8_t* at,
                                         int shift) {
  constexpr float kMost = 1ull << kMostExponent;
  float scale = DecodeScale(kind, at);
  scale = scale > kMost ? kMost : scale < -kMost ? -kMost : scale;
  return scale * PowerOf(shift);
}

// Rounds to nearest even. NaN stays NaN (quiet, with its sign).
JAXPLUGIN_ALWAYS_INLINE uint16_t ToBF16(float f) {
  const uint32_t bits = AsBits(f);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & kMagnitude) > kInfinity ? nan : rounded);
}

// Rounds to nearest even, with subnormals. Overflow gives Inf.
JAXPLUGIN_ALWAYS_INLINE uint16_t ToF16(float f) {
  const uint32_t bits = AsBits(f);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t capped = magnitude < 0x47800000u ? magnitude : 0x47800000u;
  const uint32_t normal =
      (capped + 0xfff + ((capped >> 13) & 1) - (112u << 23)) >> 13;
  // An ulp of float32 at 0.5 is 2^-24, float16's smallest subnormal, so the
  // addition rounds to it.
  const uint32_t subnormal = AsBits(AsFloat(capped) + 0.5f) - 0x3f000000u;
  uint32_t code = magnitude < 0x38800000u ? subnormal : normal;
  code = magnitude > kInfinity ? 0x7e00u : code;
  return static_cast<uint16_t>(code | (bits >> 16 & 0x8000u));
}

// Stores `count` floats in an array of f32, bf16 or f16 from element `at` on.
template <typename Count>
JAXPLUGIN_ALWAYS_INLINE void StoreFloats(const float* v, Count count,
                                         Format format, void* out,
                                         int64_t at) {
  if (format == Format::kF32) {
    __builtin_memcpy(static_cast<float*>(out) + at, v, count * sizeof(float));
    return;
  }
  uint16_t* halves = static_cast<uint16_t*>(out) + at;
  if (format == Format::kBF16) {
    for (Count i = 0; i < count; ++i) halves[i] = ToBF16(v[i]);
  } else {
    for (Count i = 0; i < count; ++i) halves[i] = ToF16(v[i]);
  }
}

template <typename T>
JAXPLUGIN_ALWAYS_INLINE void DecodeBytes(const uint8_t* codes, int64_t count,
                                         float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = Decode<T>(codes[i]);
}

#if defined(__aarch64__)
#include "simd/decode_neon.inl"
#else
inline int64_t DecodeVectors(const Operand&, const uint8_t*, int64_t, int64_t,
                             float*) {
  return 0;
}
#endif

// Decodes values [k0, k0 + count) of a row to float32, without their scales. If
// the codes are packed, k0 and count are even.
inline void DecodeValues(const Operand& x, const uint8_t* row, int64_t k0,
                         int64_t count, float* __restrict out) {
  const int64_t done = DecodeVectors(x, row, k0, count, out);
  k0 += done;
  count -= done;
  out += done;
  switch (x.format) {
    case Format::kE4M3: return DecodeBytes<E4M3>(row + k0, count, out);
    case Format::kE5M2: return DecodeBytes<E5M2>(row + k0, count, out);
    case Format::kE2M3: return DecodeBytes<E2M3>(row + k0, count, out);
    case Format::kE3M2: return DecodeBytes<E3M2>(row + k0, count, out);
    case Format::kE2M1: {
      const uint8_t* bytes = row + k0 / 2;
      for (int64_t i = 0; i < count / 2; ++i) {
        out[2 * i] = Decode<E2M1>(bytes[i] & 15u);
        out[2 * i + 1] = Decode<E2M1>(bytes[i] >> 4);
      }
      break;
    }
    case Format::kInt8: {
      const float unit = AsFloat((127u - x.fraction_bits) << 23);
      const int8_t* codes = reinterpret_cast<const int8_t*>(row) + k0;
      for (int64_t i = 0; i < count; ++i) {
        out[i] = static_cast<float>(codes[i]) * unit;
      }
      break;
    }
    case Format::kInt4: {
      const float unit = AsFloat((127u - x.fraction_bits) << 23);
      const uint8_t* bytes = row + k0 / 2;
      for (int64_t i = 0; i < count / 2; ++i) {
        // A shift of the whole code to the left moves its sign to the top.
        const int low = static_cast<int8_t>(bytes[i] << 4) >> 4;
        const int high = static_cast<int8_t>(bytes[i]) >> 4;
        out[2 * i] = static_cast<float>(low) * unit;
        out[2 * i + 1] = static_cast<float>(high) * unit;
      }
      break;
    }
    case Format::kCodebook: {
      const uint8_t* bytes = row + k0 / 2;
      for (int64_t i = 0; i < count / 2; ++i) {
        out[2 * i] = x.codebook[bytes[i] & 15u];
        out[2 * i + 1] = x.codebook[bytes[i] >> 4];
      }
      break;
    }
    case Format::kF32:
      __builtin_memcpy(out, row + k0 * 4, count * 4);
      break;
    case Format::kBF16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = FromBF16(LoadCode<uint16_t>(row + (k0 + i) * 2));
      }
      break;
    case Format::kF16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = FromF16(LoadCode<uint16_t>(row + (k0 + i) * 2));
      }
      break;
  }
}

JAXPLUGIN_ALWAYS_INLINE const uint8_t* RowValues(const Operand& x,
                                                 int64_t row) {
  return x.values + row * x.row_bytes;
}

// Returns the address of scale `c` of a row.
JAXPLUGIN_ALWAYS_INLINE const uint8_t* ScaleAt(const Operand& x, int64_t row,
                                               int64_t c) {
  const int64_t scale_row = (row + x.scale_start) >> x.scale_shift;
  return x.scale + (scale_row * x.scale_cols + c) * ScaleSize(x.scale_kind);
}

// Kernels read a scale for each piece of a block, 32 or 16 values.
JAXPLUGIN_ALWAYS_INLINE int64_t PieceOf(const Operand& x) {
  return x.block % 32 == 0 ? 32 : 16;
}

// Returns the number of pieces of a row.
JAXPLUGIN_ALWAYS_INLINE int64_t PiecesOf(const Operand& x) {
  return CeilDiv(x.k, PieceOf(x));
}

// Calls visit(begin, end, scale) for the blocks of values [k0, k0 + count) of a
// row. `begin` and `end` count from k0.
template <typename Visit>
JAXPLUGIN_ALWAYS_INLINE void ForBlocks(const Operand& x, int64_t row,
                                       int64_t k0, int64_t count,
                                       const Visit& visit) {
  int64_t c = k0 / x.block;
  for (int64_t begin = 0; begin < count; ++c) {
    const int64_t end = Min((c + 1) * x.block - k0, count);
    visit(begin, end, DecodeScale(x.scale_kind, ScaleAt(x, row, c)));
    begin = end;
  }
}

// Multiplies values [k0, k0 + count) of a row by their block scales.
inline void ApplyScale(const Operand& x, int64_t row, int64_t k0,
                       int64_t count, float* __restrict out) {
  if (x.scale_kind == ScaleKind::kNone) return;
  if (x.block == 32 && k0 % 32 == 0 && count % 32 == 0) {
    const uint8_t* scale = ScaleAt(x, row, k0 / 32);
    for (int64_t i = 0; i < count; i += 32) {
      const float s = DecodeScale(x.scale_kind, scale);
      for (int j = 0; j < 32; ++j) out[i + j] *= s;
      scale += ScaleSize(x.scale_kind);
    }
    return;
  }
  ForBlocks(x, row, k0, count, [=](int64_t begin, int64_t end, float s) {
    for (int64_t j = begin; j < end; ++j) out[j] *= s;
  });
}

// Returns 1 or 0 as a byte, so that compilers vectorize loops with bytes.
JAXPLUGIN_ALWAYS_INLINE uint8_t UnsafeScaleByte(uint8_t byte) {
  constexpr int kLow = 127 - kSafeExponent;
  const uint8_t above = static_cast<uint8_t>(byte - kLow);
  return static_cast<uint8_t>(above > 2 * kSafeExponent) &
         static_cast<uint8_t>(byte != 255);
}

// Whether all values of block c of a quantized row are zero.
inline bool BlockIsZero(const Operand& x, int64_t row, int64_t c) {
  if (x.format == Format::kCodebook) return false;
  const uint8_t* values = RowValues(x, row);
  const int magnitudes = MagnitudeBits(x.format);
  const int64_t begin = BytesOf(x.format, c * x.block);
  const int64_t end = BytesOf(x.format, Min((c + 1) * x.block, x.k));
  for (int64_t i = begin; i < end; ++i) {
    if ((values[i] & magnitudes) != 0) return false;
  }
  return true;
}

// Whether one of `count` scales of two or four bytes is outside of the safe
// range. kF is the format of the scales.
template <typename Code, Format kF>
inline bool AnyIsUnsafe(const uint8_t* scale, int64_t count) {
  constexpr FormatFacts kFacts = FactsOf(kF);
  constexpr int kBias = (1 << (kFacts.exponent_bits - 1)) - 1;
  constexpr Code kInf = static_cast<Code>(kFacts.max_code + 1);
  constexpr bool kIsShort = kBias < kSafeExponent;  // no finite one is unsafe
  constexpr Code kLow = static_cast<Code>(
      kIsShort ? 0 : (kBias - kSafeExponent) << kFacts.mantissa_bits);
  constexpr Code kHigh = static_cast<Code>(
      kIsShort ? kInf : (kBias + kSafeExponent + 1) << kFacts.mantissa_bits);
  constexpr Code kNotSign = static_cast<Code>(~0u) >> 1;
  // Codes, not bool or int, so that a vector has many of them.
  Code unsafe = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Code code = LoadCode<Code>(scale + i * sizeof(Code));
    const Code magnitude = code & kNotSign;
    unsafe |= static_cast<Code>((magnitude != 0) & (magnitude < kLow)) |
              static_cast<Code>((magnitude >= kHigh) & (magnitude <= kInf));
  }
  return unsafe != 0;
}

// Whether one of `count` scales is outside of the safe range (kSafeExponent).
inline bool ScalesAreUnsafe(ScaleKind kind, const uint8_t* scale,
                            int64_t count) {
  uint8_t unsafe = 0;
  switch (kind) {
    case ScaleKind::kE8M0:
      for (int64_t i = 0; i < count; ++i) unsafe |= UnsafeScaleByte(scale[i]);
      break;
    case ScaleKind::kE5M2:
      for (int64_t i = 0; i < count; ++i) {
        unsafe |= static_cast<uint8_t>((scale[i] & 0x7f) == 0x7c);  // Inf
      }
      break;
    case ScaleKind::kF32:
      return AnyIsUnsafe<uint32_t, Format::kF32>(scale, count);
    case ScaleKind::kBF16:
      return AnyIsUnsafe<uint16_t, Format::kBF16>(scale, count);
    case ScaleKind::kF16:
      return AnyIsUnsafe<uint16_t, Format::kF16>(scale, count);
    default: break;
  }
  return unsafe != 0;
}

// The slow half of RowIsSafe, for a row that has scales outside of the range.
__attribute__((noinline, unused)) bool ExtremeBlocksAreZero(const Operand& x,
                                                            int64_t row) {
  for (int64_t c = 0; c < x.scale_cols; ++c) {
    const uint8_t* scale = ScaleAt(x, row, c);
    if (!ScalesAreUnsafe(x.scale_kind, scale, 1)) continue;
    const bool is_infinite =
        (AsBits(DecodeScale(x.scale_kind, scale)) & kMagnitude) == kInfinity;
    if (is_infinite || !BlockIsZero(x, row, c)) return false;
  }
  return true;
}

// Whether all scales of rows [row, row + count) are within the safe range. If
// so, RowIsSafe is true for each row. One pass over the scales of many rows is
// faster than one pass per row, because a row has few scales.
inline bool ScalesAreSafe(const Operand& x, int64_t row, int64_t count) {
  const int64_t first = row + x.scale_start;
  const int64_t rows = ((first + count - 1) >> x.scale_shift) -
                       (first >> x.scale_shift) + 1;
  return !ScalesAreUnsafe(x.scale_kind, ScaleAt(x, row, 0),
                          rows * x.scale_cols);
}

// Whether the row is safe (see kSafeExponent). All-zero blocks, which have MX
// scale byte 0, are safe with any finite scale.
inline bool RowIsSafe(const Operand& x, int64_t row) {
  return ScalesAreSafe(x, row, 1) || ExtremeBlocksAreZero(x, row);
}
