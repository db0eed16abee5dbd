// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Dequantizes 32 values at a time with AVX2 and F16C.
//
// E5M2 is the high byte of a float16, and E5M2 represents all values of E2M1.
// Moving the fields of E4M3 into a float16 gives the value times 2^-8. So one
// instruction of F16C converts all three to float32, including subnormals, NaN
// and Inf.

// Whether LoadHighBytes converts codes to high bytes of float16. If not, it
// converts them to E4M3.
constexpr bool AreHighBytes(Format f) {
  return f == Format::kE5M2 || f == Format::kE2M1;
}

// Values are converted times 2^-HalfShift, and scales times 2^HalfShift.
constexpr int HalfShift(Format f) { return AreHighBytes(f) ? 0 : 8; }

// Converts E4M3 codes in the high bytes of words to float16, times 2^-8.
JAXPLUGIN_ALWAYS_INLINE __m128i HalvesOfE4M3(__m128i words) {
  return _mm_and_si128(_mm_srai_epi16(words, 1),
                       _mm_set1_epi16(static_cast<short>(0xbf80)));
}

// Loads 32 codes as bytes: high bytes of float16, or E4M3 (AreHighBytes).
template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE __m256i LoadHighBytes(const uint8_t* codes) {
  if constexpr (IsPacked(kFormat)) {
    const __m128i table =
        _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, -128, -72,
                      -68, -66, -64, -62, -60, -58);
    const __m128i nibbles = _mm_set1_epi8(15);
    const __m128i bytes =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(bytes, nibbles));
    const __m128i high = _mm_shuffle_epi8(
        table, _mm_and_si128(_mm_srli_epi16(bytes, 4), nibbles));
    return _mm256_set_m128i(_mm_unpackhi_epi8(low, high),
                            _mm_unpacklo_epi8(low, high));
  } else {
    return LoadCodes<kFormat>(codes);
  }
}

// Converts 32 values without scale to float32, times 2^-HalfShift.
template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE void LoadValues(const uint8_t* codes, __m256* values) {
  const __m256i bytes = LoadHighBytes<kFormat>(codes);
  const __m128i halves[2] = {_mm256_castsi256_si128(bytes),
                             _mm256_extracti128_si256(bytes, 1)};
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const __m128i zero = _mm_setzero_si128();
    __m128i words = q % 2 ? _mm_unpackhi_epi8(zero, halves[q / 2])
                          : _mm_unpacklo_epi8(zero, halves[q / 2]);
    if (!AreHighBytes(kFormat)) words = HalvesOfE4M3(words);
    values[q] = _mm256_cvtph_ps(words);
  }
}

// The conversion of float32 to the result's type. kExactBF16 truncates, because
// each value is a bf16.
enum class Result { kF32, kBF16, kExactBF16, kF16 };

template <Result kResult>
struct ResultIs {
  static constexpr Result value = kResult;
};

// Converts two vectors to 16 words of bf16. Rounding keeps NaN, because the low
// bits of each NaN are 0.
template <bool kRound>
JAXPLUGIN_ALWAYS_INLINE __m256i PackBF16(__m256 a, __m256 b) {
  __m256i words[2] = {_mm256_castps_si256(a), _mm256_castps_si256(b)};
#pragma GCC unroll 2
  for (__m256i& x : words) {
    __m256i high = _mm256_srli_epi32(x, 16);
    if (kRound) {
      const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
      high = _mm256_srli_epi32(
          _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd),
          16);
    }
    x = high;
  }
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(words[0], words[1]),
                                  0xd8);
}

// Converts to float16. As in ToF16, every NaN becomes the quiet NaN of its
// sign.
JAXPLUGIN_ALWAYS_INLINE __m128i HalvesOf(__m256 x) {
  const __m256 nan = _mm256_or_ps(
      _mm256_and_ps(x, _mm256_set1_ps(-0.0f)),
      _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kQuietNan))));
  x = _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

template <Result kResult>
JAXPLUGIN_ALWAYS_INLINE void StoreGroup(const __m256* values, void* out,
                                        int64_t at) {
  uint16_t* words = static_cast<uint16_t*>(out) + at;
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    if constexpr (kResult == Result::kF32) {
      _mm256_storeu_ps(static_cast<float*>(out) + at + 8 * q, values[q]);
    } else if constexpr (kResult == Result::kF16) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(words + 8 * q),
                       HalvesOf(values[q]));
    } else if (q % 2 == 0) {
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(words + 8 * q),
          PackBF16<kResult == Result::kBF16>(values[q], values[q + 1]));
    }
  }
}

// Dequantizes `groups` groups of 32 values. `scale` has `each` scales per
// group.
template <Format kFormat, Result kResult, bool kHasGlobal>
inline void WriteGroups(const uint8_t* codes, int64_t groups,
                        const float* scale, int64_t each, float global,
                        void* out, int64_t at) {
  for (int64_t g = 0; g < groups; ++g) {
    __m256 values[4];
    LoadValues<kFormat>(codes + g * BytesOf(kFormat, 32), values);
    const float* first = scale + g * each;
    const __m256 scales[2] = {_mm256_broadcast_ss(first),
                              _mm256_broadcast_ss(first + each - 1)};
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      values[q] = _mm256_mul_ps(values[q], scales[q / 2]);
      if (kHasGlobal) {
        values[q] = _mm256_mul_ps(values[q], _mm256_set1_ps(global));
      }
    }
    StoreGroup<kResult>(values, out, at + 32 * g);
  }
}

// The range of a chunk's scales.
struct ScaleBytes {
  uint8_t least = 255, most = 0;  // only for E8M0
  bool has_nan = false;

  ScaleBytes(ScaleKind kind, const uint8_t* bytes, int64_t count) {
    if (kind == ScaleKind::kE8M0) {
      for (int64_t i = 0; i < count; ++i) {
        least = bytes[i] < least ? bytes[i] : least;
        most = bytes[i] > most ? bytes[i] : most;
      }
      has_nan = most == 255;
    } else {
      uint8_t nan = 0;
      for (int64_t i = 0; i < count; ++i) {
        nan |= static_cast<uint8_t>((bytes[i] | 0x80) == 0xff);
      }
      has_nan = nan != 0;
    }
  }
};

// Decodes scales, none of which is NaN, and multiplies them by 2^shift. The
// products must be in float32's range.
inline void ScalesTimes(ScaleKind kind, const uint8_t* bytes, int64_t count,
                        int shift, float* out) {
  const float power = AsFloat(static_cast<uint32_t>(127 + shift) << 23);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i eight =
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + i));
    __m256 scale;
    if (kind == ScaleKind::kE8M0) {
      // Byte 0 is 2^-127, a subnormal float32.
      const __m256i bits = _mm256_max_epi32(
          _mm256_slli_epi32(_mm256_cvtepu8_epi32(eight), 23),
          _mm256_set1_epi32(0x00400000));
      scale = _mm256_castsi256_ps(bits);
    } else {
      scale = _mm256_mul_ps(
          _mm256_cvtph_ps(
              HalvesOfE4M3(_mm_unpacklo_epi8(_mm_setzero_si128(), eight))),
          _mm256_set1_ps(256));
    }
    _mm256_storeu_ps(out + i, _mm256_mul_ps(scale, _mm256_set1_ps(power)));
  }
  for (; i < count; ++i) out[i] = DecodeScale(kind, bytes + i) * power;
}

// Whether an E4M3 code is NaN. Other formats need no search: F16C converts the
// NaN of E5M2, and the other formats have none.
template <Format kFormat>
inline bool HasNanCodes(const uint8_t* codes, int64_t groups) {
  if (kFormat != Format::kE4M3) return false;
  Largest largest;
  for (int64_t g = 0; g < groups; ++g) {
    largest.See(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * g)));
  }
  return largest.NotFinite(kFormat);
}

template <Format kFormat>
inline bool DequantizeFormat(const DequantizeArgs& args, const uint8_t* codes,
                             const uint8_t* scale_bytes, int64_t groups,
                             int64_t at) {
  const Operand& x = args.x;
  const int64_t each = 32 / x.block;
  const ScaleBytes bytes(x.scale_kind, scale_bytes, groups * each);
  constexpr int kShift = HalfShift(kFormat);
  if (bytes.has_nan || bytes.most > 254 - kShift ||
      HasNanCodes<kFormat>(codes, groups)) {
    return false;
  }
  float scale[kDequantizeChunk / 16];
  ScalesTimes(x.scale_kind, scale_bytes, groups * each, kShift, scale);
  const auto write = [&](auto result) {
    constexpr Result kResult = decltype(result)::value;
    if (args.global_scale != nullptr) {
      WriteGroups<kFormat, kResult, true>(codes, groups, scale, each,
                                          *args.global_scale, args.out, at);
    } else {
      WriteGroups<kFormat, kResult, false>(codes, groups, scale, each, 1,
                                           args.out, at);
    }
  };
  // From this scale on, the product of a value, which has at most 4 significant
  // bits, and a power of two is a normal bf16.
  constexpr uint8_t kLeastExact = 32;
  const bool is_exact = x.scale_kind == ScaleKind::kE8M0 &&
                        args.global_scale == nullptr &&
                        bytes.least >= kLeastExact;
  if (args.out_format == Format::kF32) {
    write(ResultIs<Result::kF32>());
  } else if (args.out_format == Format::kF16) {
    write(ResultIs<Result::kF16>());
  } else if (is_exact) {
    WriteGroups<kFormat, Result::kExactBF16, false>(codes, groups, scale, each,
                                                    1, args.out, at);
  } else {
    write(ResultIs<Result::kBF16>());
  }
  return true;
}

// Dequantizes the whole groups of values [k0, k0 + count) of a row, where k0 is
// a multiple of 32. Returns the number of their values. Returns 0 if it cannot,
// for example because of a NaN code or scale.
inline int64_t DequantizeGroups(const DequantizeArgs& args, int64_t row,
                                int64_t k0, int64_t count) {
  const Operand& x = args.x;
  const float* global = args.global_scale;
  if (IsPlain(x.format) || IsInteger(x.format) || count < 32 ||
      (x.block != 16 && x.block != 32) ||
      (x.scale_kind != ScaleKind::kE8M0 && x.scale_kind != ScaleKind::kE4M3) ||
      (global != nullptr && (AsBits(*global) & kMagnitude) > kInfinity)) {
    return 0;
  }
  const int64_t groups = count / 32;
  const uint8_t* codes = RowValues(x, row) + BytesOf(x.format, k0);
  const uint8_t* scale = x.scale + row * x.scale_cols + k0 / x.block;
  const int64_t at = row * x.k + k0;
  bool done = false;
  const auto run = [&](auto format) {
    done = DequantizeFormat<decltype(format)::kFormat>(args, codes, scale,
                                                       groups, at);
  };
  switch (x.format) {
    case Format::kE4M3: run(E4M3()); break;
    case Format::kE5M2: run(E5M2()); break;
    case Format::kE2M3: run(E2M3()); break;
    case Format::kE3M2: run(E3M2()); break;
    default: run(E2M1());
  }
  return done ? groups * 32 : 0;
}
