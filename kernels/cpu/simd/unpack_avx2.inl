// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Converts codes to float32 with AVX2: groups of 32 bytes in the order that is
// cheapest to decode, and rows in that order or the natural order.

constexpr int kGroupBytes = 32;  // bytes of codes in a group: one load

// Returns the format of `f`'s codes in a register. LoadCodes converts both
// 6-bit formats to E4M3, which represents all of their values as normal
// numbers.
constexpr Format InRegister(Format f) {
  return FactsOf(f).bits == 6 ? Format::kE4M3 : f;
}

// Moving the fields of an 8-bit code into a bf16 or float32 gives the value
// times 2^-ValueShift. Subnormal codes become subnormals. NaN and Inf become
// finite numbers, so the caller must search for them (Largest).
constexpr int ValueShift(Format f) {
  switch (InRegister(f)) {
    case Format::kE4M3: return 127 - E4M3::kBias;
    case Format::kE5M2: return 127 - E5M2::kBias;
    default: return 0;
  }
}

// Returns the number of values in a group.
constexpr int64_t GroupValues(Format f) {
  return IsPacked(f) ? 2 * kGroupBytes : kGroupBytes;
}

// Returns the number of vectors of bf16 pairs that Expand converts a group to.
// A vector has 16 values, two per dword.
constexpr int GroupPairs(Format f) { return IsPacked(f) ? 4 : 2; }

// Expand converts a group to vectors of pairs, and SplitPairs converts vector
// `p` to two vectors of float32, from the low (half 0) or the high halves of
// the dwords. Returns the index in the group of the value in lane `lane`.
constexpr int ExpandedIndex(Format f, int p, int half, int lane) {
  if (!IsPacked(f)) return 4 * lane + 2 * half + 1 - p;
  const int byte = lane / 4 * 16 + lane % 4 * 2 + half;
  return 2 * (byte + p / 2 * 8) + p % 2;
}

// The largest magnitude of the codes seen in each byte, with the sign bit set.
struct Largest {
  __m256i bytes = _mm256_setzero_si256();

  JAXPLUGIN_ALWAYS_INLINE void See(__m256i codes) {
    const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
    bytes = _mm256_max_epu8(bytes, _mm256_or_si256(codes, sign));
  }
  // Whether a code of `f` was NaN or Inf.
  JAXPLUGIN_ALWAYS_INLINE bool NotFinite(Format f) const {
    if (!FactsOf(f).has_nan) return false;
    const __m256i first =
        _mm256_set1_epi8(static_cast<char>(0x80 | (FactsOf(f).max_code + 1)));
    const __m256i found =
        _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, first), bytes);
    return _mm256_movemask_epi8(found) != 0;
  }
};

// Tables of the 16 E2M1 codes: twice the value as a byte, and both bytes of the
// value as bf16.
struct NibbleTables {
  __m256i twice_plus_12;  // 0..24
  __m256i twice;          // -12..12
  __m256i high, low;

  JAXPLUGIN_ALWAYS_INLINE NibbleTables() {
    const __m128i magnitude =
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i high_byte = _mm_setr_epi8(
        0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64,
        -64, -64, -64);
    const __m128i low_byte = _mm_setr_epi8(0, 0, -128, -64, 0, 0x40, -128, -64,
                                           0, 0, -128, -64, 0, 0x40, -128, -64);
    twice = _mm256_broadcastsi128_si256(magnitude);
    twice_plus_12 = _mm256_add_epi8(twice, _mm256_set1_epi8(12));
    high = _mm256_broadcastsi128_si256(high_byte);
    low = _mm256_broadcastsi128_si256(low_byte);
  }
};

// The E4M3 codes of the 32 magnitudes of a 6-bit format.
template <Format kFormat>
struct AsE4M3 {
  alignas(32) uint8_t codes[32] = {};

  constexpr AsE4M3() {
    using T = SmallFloat<kFormat>;
    for (int code = 1; code < 32; ++code) {
      // The value is significand * 2^exponent; `top` is the significand's
      // highest bit.
      int significand = code & ((1 << T::kMantissaBits) - 1);
      int exponent = T::kMinExponent - T::kMantissaBits;
      if (const int field = code >> T::kMantissaBits; field != 0) {
        significand += 1 << T::kMantissaBits;
        exponent += field - 1;
      }
      int top = 0;
      while (significand >> (top + 1) != 0) ++top;
      codes[code] = static_cast<uint8_t>(
          ((exponent + top + E4M3::kBias) << E4M3::kMantissaBits) +
          ((significand - (1 << top)) << (E4M3::kMantissaBits - top)));
    }
  }
};

// Loads a group of codes and converts them to InRegister(kFormat).
template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE __m256i LoadCodes(const uint8_t* bytes) {
  const __m256i codes =
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
  if constexpr (InRegister(kFormat) == kFormat) {
    return codes;
  } else {
    static constexpr AsE4M3<kFormat> kTable;
    const __m128i* halves = reinterpret_cast<const __m128i*>(kTable.codes);
    const __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128(halves));
    const __m256i high =
        _mm256_broadcastsi128_si256(_mm_load_si128(halves + 1));
    // Bit 4 of a code selects the half of the table, bit 5 is the sign.
    const __m256i magnitudes = _mm256_blendv_epi8(
        _mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes),
        _mm256_slli_epi16(codes, 3));
    const __m256i signs =
        _mm256_and_si256(_mm256_slli_epi16(codes, 2),
                         _mm256_set1_epi8(static_cast<char>(0x80)));
    return _mm256_or_si256(magnitudes, signs);
  }
}

JAXPLUGIN_ALWAYS_INLINE __m256i LowNibbles(__m256i codes) {
  return _mm256_and_si256(codes, _mm256_set1_epi8(15));
}
JAXPLUGIN_ALWAYS_INLINE __m256i HighNibbles(__m256i codes) {
  return LowNibbles(_mm256_srli_epi16(codes, 4));
}

// Converts pairs of bf16 to float32: out[0] has the low halves of the dwords,
// out[1] the high halves.
JAXPLUGIN_ALWAYS_INLINE void SplitPairs(__m256i pairs, __m256* out) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  out[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
}

// Broadcasts *low to the lower four lanes and *high to the upper four.
JAXPLUGIN_ALWAYS_INLINE __m256 SpreadTwo(const float* low, const float* high) {
  return _mm256_blend_ps(_mm256_broadcast_ss(low), _mm256_broadcast_ss(high),
                         0xf0);
}

// Returns a mask of the float32 bits that hold an FP8 code's sign and fields.
template <Format kFormat>
constexpr uint32_t MovedFields() {
  static_assert(FactsOf(kFormat).bits == 8);
  return 0x80000000u | 0x7fu << (23 - FactsOf(kFormat).mantissa_bits);
}

// Converts a group to bf16, times 2^-ValueShift, in the order of ExpandedIndex.
// kFormat is a result of InRegister.
template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE void Expand(__m256i codes, const NibbleTables& tables,
                                    __m256i* pairs) {
  static_assert(InRegister(kFormat) == kFormat);
  if constexpr (IsPacked(kFormat)) {
    const __m256i nibbles[2] = {LowNibbles(codes), HighNibbles(codes)};
#pragma GCC unroll 2
    for (int s = 0; s < 2; ++s) {
      const __m256i high = _mm256_shuffle_epi8(tables.high, nibbles[s]);
      const __m256i low = _mm256_shuffle_epi8(tables.low, nibbles[s]);
      pairs[s] = _mm256_unpacklo_epi8(low, high);
      pairs[2 + s] = _mm256_unpackhi_epi8(low, high);
    }
  } else {
    // An arithmetic shift moves a code from the high byte of a word to the
    // fields of a bf16. It copies the sign into the exponent bits that the code
    // does not have, and the mask clears them. Odd codes are in high bytes.
    // Even codes are in low bytes, and a multiplication by 2^(8 - kShift) moves
    // them to the same bits.
    constexpr int kShift = 8 - FactsOf(kFormat).exponent_bits;
    const __m256i fields = _mm256_set1_epi16(
        static_cast<short>(MovedFields<kFormat>() >> 16));
    const __m256i factor = _mm256_set1_epi16(1 << (8 - kShift));
    pairs[0] = _mm256_and_si256(_mm256_srai_epi16(codes, kShift), fields);
    pairs[1] = _mm256_and_si256(_mm256_maddubs_epi16(factor, codes), fields);
  }
}

// Loads eight codes into the low bytes of dwords.
JAXPLUGIN_ALWAYS_INLINE __m256i LoadEight(const uint8_t* bytes) {
  return _mm256_cvtepu8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
}

// Converts eight FP8 codes, in the low bytes of dwords, to float32, times
// 2^-ValueShift.
template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE __m256 MoveFields(__m256i codes) {
  constexpr int kShift = 8 - FactsOf(kFormat).exponent_bits;
  const __m256i fields =
      _mm256_set1_epi32(static_cast<int>(MovedFields<kFormat>()));
  return _mm256_castsi256_ps(_mm256_and_si256(
      _mm256_srai_epi32(_mm256_slli_epi32(codes, 24), kShift), fields));
}

constexpr uint32_t kMostScale = 127 + 62;  // the E8M0 code of 2^62

// Decodes one scale for DecodeScales.
JAXPLUGIN_ALWAYS_INLINE float ScaleTimes(ScaleKind kind, uint32_t byte,
                                         int shift) {
  if (kind == ScaleKind::kE4M3) {
    return Decode<E4M3>(byte) *
           AsFloat(static_cast<uint32_t>(127 + shift) << 23);
  }
  const uint32_t exponent = byte < kMostScale ? byte : kMostScale;
  const uint32_t bits = (exponent + static_cast<uint32_t>(shift)) << 23;
  return AsFloat(byte == 255 ? kQuietNan : bits);
}

// Whether no scale needs the special cases of ScaleTimes: NaN, and E8M0 from
// 2^62 on.
inline bool ScalesArePlain(ScaleKind kind, const uint8_t* bytes,
                           int64_t count) {
  uint8_t special = 0;
  if (kind == ScaleKind::kE4M3) {
    for (int64_t i = 0; i < count; ++i) {
      special |= static_cast<uint8_t>((bytes[i] | 0x80) == 0xff);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      special |= static_cast<uint8_t>(bytes[i] >= kMostScale);
    }
  }
  return special == 0;
}

// Decodes scales [c0, c0 + count) of a safe row to float32, times 2^shift (0 <=
// shift <= 60). The scale of a zero block may have any value. Scales above 2^62
// become 2^62, so that the product of two scales is finite and zero times it is
// zero.
inline void DecodeScales(const Operand& x, int64_t row, int64_t c0,
                         int64_t count, int shift, float* __restrict out) {
  const uint8_t* bytes = x.scale + row * x.scale_cols + c0;
  int64_t i = 0;
  if (ScalesArePlain(x.scale_kind, bytes, count)) {
    if (x.scale_kind == ScaleKind::kE4M3) {
      // Two multiplications, because 2^(120 + shift) may overflow.
      const __m256 whole = _mm256_set1_ps(AsFloat((127u + 120u) << 23));
      const __m256 rest =
          _mm256_set1_ps(AsFloat(static_cast<uint32_t>(127 + shift) << 23));
      for (; i + 8 <= count; i += 8) {
        const __m256 s = MoveFields<Format::kE4M3>(LoadEight(bytes + i));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(s, whole), rest));
      }
    } else {
      const __m256i bias = _mm256_set1_epi32(shift << 23);
      for (; i + 8 <= count; i += 8) {
        const __m256i s = _mm256_slli_epi32(LoadEight(bytes + i), 23);
        _mm256_storeu_ps(out + i,
                         _mm256_castsi256_ps(_mm256_add_epi32(s, bias)));
      }
    }
  }
  for (; i < count; ++i) out[i] = ScaleTimes(x.scale_kind, bytes[i], shift);
}

// UnpackRun multiplies the scales of formats with one code per byte by
// 2^kUnpackScaleShift, and their values by 2^-kUnpackScaleShift.
constexpr int kUnpackScaleShift = 60;

// The order of the values that UnpackRun writes. kGroups is the order of
// ExpandedIndex in each whole group of 32 values. It is for formats with one
// code per byte.
enum class Order { kNatural, kGroups };

// Converts 32 values without scale. Values of formats with one code per byte
// are multiplied by 2^-kUnpackScaleShift. `codes` has 32 bytes, or 16 if
// packed.
template <Format kFormat, Order kOrder>
JAXPLUGIN_ALWAYS_INLINE void UnpackValues(const uint8_t* codes,
                                          const NibbleTables& tables,
                                          __m256* values) {
  if constexpr (IsPacked(kFormat)) {
    const __m128i bytes =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i high =
        _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    const __m128i table = _mm256_castsi256_si128(tables.twice);
    const __m128i halves[2] = {
        _mm_shuffle_epi8(table, _mm_unpacklo_epi8(low, high)),
        _mm_shuffle_epi8(table, _mm_unpackhi_epi8(low, high))};
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const __m128i at =
          q & 1 ? _mm_srli_si128(halves[q / 2], 8) : halves[q / 2];
      values[q] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(at)),
                                _mm256_set1_ps(0.5f));
    }
  } else {
    constexpr Format kFp8 = InRegister(kFormat);
    if constexpr (kOrder == Order::kGroups) {
      __m256i pairs[2];
      Expand<kFp8>(LoadCodes<kFormat>(codes), tables, pairs);
      SplitPairs(pairs[0], values);
      SplitPairs(pairs[1], values + 2);
    } else {
      alignas(32) uint8_t fp8[kGroupBytes];
      if constexpr (kFp8 != kFormat) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(fp8),
                           LoadCodes<kFormat>(codes));
        codes = fp8;
      }
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        values[q] = MoveFields<kFp8>(LoadEight(codes + 8 * q));
      }
    }
    constexpr int kShift = ValueShift(kFormat) - kUnpackScaleShift;
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      values[q] = _mm256_mul_ps(
          values[q], _mm256_set1_ps(AsFloat((127u + kShift) << 23)));
    }
  }
}

// Converts `groups` groups of 32 values and multiplies them by their scales.
// `scale` has the scales of their blocks, times 2^kUnpackScaleShift for formats
// with one code per byte. Prefetches the codes `ahead` bytes further. Returns
// false if a code is NaN or Inf; the output is then invalid.
template <Format kFormat, int kBlock, Order kOrder>
inline bool UnpackGroups(const uint8_t* codes, int64_t groups,
                         const float* scale, int64_t ahead, float* out) {
  constexpr int64_t kBytes = BytesOf(kFormat, 32);
  const NibbleTables tables;
  Largest largest;
  for (int64_t g = 0; g < groups; ++g, codes += kBytes, out += 32) {
    __m256 values[4];
    _mm_prefetch(reinterpret_cast<const char*>(codes + ahead),
                 _MM_HINT_T0);
    if (FactsOf(kFormat).has_nan) {
      largest.See(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    }
    UnpackValues<kFormat, kOrder>(codes, tables, values);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const __m256 s = kBlock == 32 ? _mm256_broadcast_ss(scale)
                       : kOrder == Order::kGroups
                           ? SpreadTwo(scale, scale + 1)
                           : _mm256_broadcast_ss(scale + q / 2);
      _mm256_storeu_ps(out + 8 * q, _mm256_mul_ps(values[q], s));
    }
    scale += 32 / kBlock;
  }
  return !largest.NotFinite(kFormat);
}

template <Format kFormat>
inline bool UnpackOfFormat(const uint8_t* codes, int64_t groups, int64_t block,
                           Order order, const float* scale, int64_t ahead,
                           float* out) {
  if (!IsPacked(kFormat) && order == Order::kGroups) {
    return block == 16
               ? UnpackGroups<kFormat, 16, Order::kGroups>(codes, groups, scale,
                                                           ahead, out)
               : UnpackGroups<kFormat, 32, Order::kGroups>(codes, groups, scale,
                                                           ahead, out);
  }
  return block == 16 ? UnpackGroups<kFormat, 16, Order::kNatural>(
                           codes, groups, scale, ahead, out)
                     : UnpackGroups<kFormat, 32, Order::kNatural>(
                           codes, groups, scale, ahead, out);
}

constexpr int64_t kUnpackMax = 4096;

// Converts values [k0, k0 + count) of a safe row and multiplies them by their
// scales. (The result of an unsafe row is invalid.) k0 is a multiple of 32, and
// count is at most kUnpackMax. Prefetches the codes `ahead` bytes further,
// which may be outside of the array.
inline void UnpackRun(const Operand& x, int64_t row, int64_t k0, int64_t count,
                      Order order, int64_t ahead, float* out) {
  const uint8_t* codes = RowValues(x, row);
  const int64_t groups = IsPlain(x.format) ? 0 : count / 32;
  bool is_done = false;
  if (groups != 0) {
    float scale[kUnpackMax / 16];
    DecodeScales(x, row, k0 / x.block, groups * 32 / x.block,
                 IsPacked(x.format) ? 0 : kUnpackScaleShift, scale);
    const auto unpack = [&](auto format) {
      constexpr Format kFormat = decltype(format)::kFormat;
      is_done = UnpackOfFormat<kFormat>(codes + BytesOf(kFormat, k0), groups,
                                        x.block, order, scale, ahead, out);
    };
    switch (x.format) {
      case Format::kE4M3: unpack(E4M3()); break;
      case Format::kE5M2: unpack(E5M2()); break;
      case Format::kE2M3: unpack(E2M3()); break;
      case Format::kE3M2: unpack(E3M2()); break;
      default: unpack(E2M1());
    }
  }
  const int64_t done = is_done ? groups * 32 : 0;
  DecodeValues(x, codes, k0 + done, count - done, out + done);
  ApplyScale(x, row, k0 + done, count - done, out + done);
  if (is_done || order == Order::kNatural) return;
  for (int64_t g = 0; g < groups; ++g) {
    float natural[32];
    __builtin_memcpy(natural, out + 32 * g, sizeof(natural));
    for (int i = 0; i < 32; ++i) {
      out[32 * g + i] =
          natural[ExpandedIndex(x.format, i / 16, i / 8 % 2, i % 8)];
    }
  }
}
