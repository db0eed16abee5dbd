// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Codes in AVX2 registers: 32 bytes of them to float32 in whatever order is
// cheapest, and rows to float32 in the natural order.

constexpr int kGroupBytes = 32;  // of codes: one load

// The format that codes of `f` have in a register. Both formats of 6 bits
// become E4M3 (LoadCodes), which has all of their values as normal numbers.
constexpr Format InRegister(Format f) {
  return FactsOf(f).bits == 6 ? Format::kE4M3 : f;
}

// An 8-bit code moved into the fields of a bf16 or float32 reads as its value
// times 2^-ValueShift: subnormal codes too, which become bf16 subnormals. NaN
// and Inf read as numbers, so whoever does this looks for them (NotFinite).
constexpr int ValueShift(Format f) {
  switch (InRegister(f)) {
    case Format::kE4M3: return 127 - E4M3::kBias;
    case Format::kE5M2: return 127 - E5M2::kBias;
    default: return 0;
  }
}

// Values in kGroupBytes of codes.
constexpr int64_t GroupValues(Format f) {
  return IsPacked(f) ? 2 * kGroupBytes : kGroupBytes;
}

// Pairs (two bf16 a dword) that a group becomes, 16 values in each.
constexpr int GroupPairs(Format f) { return IsPacked(f) ? 4 : 2; }

// The index in a group of the value in lane `lane` of the float32s that
// SplitPairs extracts from pair `p` of Expand: from the low (half 0) or the
// high halves.
constexpr int ExpandedIndex(Format f, int p, int half, int lane) {
  if (!IsPacked(f)) return 4 * lane + 2 * half + 1 - p;
  const int byte = lane / 4 * 16 + lane % 4 * 2 + half;
  return 2 * (byte + p / 2 * 8) + p % 2;
}

// The largest code seen, as if without sign, a byte.
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

// The codes of E2M1 as one byte and as the two of a bf16.
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

// The codes that E4M3 has for the 32 magnitudes of a format of 6 bits.
template <Format kFormat>
struct AsE4M3 {
  alignas(32) uint8_t codes[32] = {};

  constexpr AsE4M3() {
    using T = SmallFloat<kFormat>;
    for (int code = 1; code < 32; ++code) {
      // A significand of `top` + 1 bits, times 2^exponent.
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

// A group of codes, as InRegister says.
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
    // Bit 4 of a code chooses between them, bit 5 is the sign.
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

// Two bf16 a dword to the float32s of the low and of the high halves.
JAXPLUGIN_ALWAYS_INLINE void SplitPairs(__m256i pairs, __m256* out) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  out[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
}

// The factors of four lanes and four lanes.
JAXPLUGIN_ALWAYS_INLINE __m256 SpreadTwo(const float* low, const float* high) {
  return _mm256_blend_ps(_mm256_broadcast_ss(low), _mm256_broadcast_ss(high),
                         0xf0);
}

// The bits of a float32 that have the sign and the fields of an FP8 code.
template <Format kFormat>
constexpr uint32_t MovedFields() {
  static_assert(FactsOf(kFormat).bits == 8);
  return 0x80000000u | 0x7fu << (23 - FactsOf(kFormat).mantissa_bits);
}

// A group's values times 2^-ValueShift as bf16, in the order of ExpandedIndex.
// kFormat is one that codes have in registers.
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
    // Sign and fields: a code in the high byte of 16 bits moved down, its sign
    // smeared over the exponent bits that it lacks, which are then cleared. Odd
    // codes are in high bytes; an even one times 2^(8 - kShift) is moved down.
    constexpr int kShift = 8 - FactsOf(kFormat).exponent_bits;
    const __m256i fields = _mm256_set1_epi16(
        static_cast<short>(MovedFields<kFormat>() >> 16));
    const __m256i factor = _mm256_set1_epi16(1 << (8 - kShift));
    pairs[0] = _mm256_and_si256(_mm256_srai_epi16(codes, kShift), fields);
    pairs[1] = _mm256_and_si256(_mm256_maddubs_epi16(factor, codes), fields);
  }
}

// Eight codes in the low bytes of dwords.
JAXPLUGIN_ALWAYS_INLINE __m256i LoadEight(const uint8_t* bytes) {
  return _mm256_cvtepu8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
}

// Eight FP8 codes, in the low bytes of dwords, to float32 times 2^-ValueShift.
template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE __m256 MoveFields(__m256i codes) {
  constexpr int kShift = 8 - FactsOf(kFormat).exponent_bits;
  const __m256i fields =
      _mm256_set1_epi32(static_cast<int>(MovedFields<kFormat>()));
  return _mm256_castsi256_ps(_mm256_and_si256(
      _mm256_srai_epi32(_mm256_slli_epi32(codes, 24), kShift), fields));
}

constexpr uint32_t kMostScale = 127 + 62;

// One scale, as DecodeScales says.
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

// Whether every scale is one that DecodeScales takes the short way with.
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

// Scales [c0, c0 + count) of a row to float32, times 2^shift (0 <= shift <= 60)
// for rows that are safe. A zero block may have any scale: above 2^62 it reads
// as that, so that the product of two is finite, and zero times it is zero.
inline void DecodeScales(const Operand& x, int64_t row, int64_t c0,
                         int64_t count, int shift, float* __restrict out) {
  const uint8_t* bytes = x.scale + row * x.scale_cols + c0;
  int64_t i = 0;
  if (ScalesArePlain(x.scale_kind, bytes, count)) {
    if (x.scale_kind == ScaleKind::kE4M3) {
      // In two steps: 2^(120 + shift) may be too large.
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

// What UnpackRun has in scales of codes of a byte, as their power of two.
constexpr int kUnpackScaleShift = 60;

// The order in which UnpackRun gives values. By groups, for codes of a byte, is
// that of ExpandedIndex in each 32 values that are whole.
enum class Order { kNatural, kGroups };

// 32 values without scale; those of a byte times 2^-kUnpackScaleShift. `codes`
// are kGroupBytes, or half of them where they are packed.
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

// `groups` times 32 values times scale; `scale` is of their blocks, for 8-bit
// codes times 2^kUnpackScaleShift. Asks for what lies `ahead` bytes further.
// False, with nothing done that counts, where a code is NaN or Inf.
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

// Values [k0, k0 + count) of a row times scale, of rows that are safe (others
// give garbage); k0 is a multiple of 32, count of kUnpackMax at most. Asks for
// codes `ahead` bytes further: nothing is read there.
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
