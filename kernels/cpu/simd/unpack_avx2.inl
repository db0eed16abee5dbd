// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Converts codes to float32 with AVX2: groups of 32 bytes in the order that is
// cheapest to decode, and rows in that order or the natural order.

constexpr int kGroupBytes = 32;  // bytes of codes in a group: one load

// Transposes 8 rows of 8 dwords.
JAXPLUGIN_ALWAYS_INLINE void Transpose8(__m256i* rows) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
  }
}

// Returns the format of `f`'s codes in a register. LoadCodes converts both
// 6-bit formats to E4M3, which represents all of their values as normal
// numbers.
constexpr Format InRegister(Format f) {
  return FactsOf(f).bits == 6 ? Format::kE4M3 : f;
}

// Moving the fields of an 8-bit code into a bf16 or float32 gives the value
// times 2^-ValueShift. Subnormal codes become subnormals. NaN and Inf become
// finite numbers, so the caller must search for them (Largest). An int8 is moved
// to the high byte of a dword, which is then converted.
constexpr int ValueShift(Format f) {
  switch (InRegister(f)) {
    case Format::kE4M3: return 127 - E4M3::kBias;
    case Format::kE5M2: return 127 - E5M2::kBias;
    case Format::kInt8: return -24;
    default: return 0;
  }
}

// Returns the number of values in a group.
constexpr int64_t GroupValues(Format f) {
  return IsPacked(f) ? 2 * kGroupBytes : kGroupBytes;
}

// Returns the number of pairs of vectors that Expanded converts a group to. A
// pair has 16 values.
constexpr int GroupPairs(Format f) { return IsPacked(f) ? 4 : 2; }

// Returns the index in the group of the value in lane `lane` of vector `half` of
// pair `p` (Expanded).
constexpr int ExpandedIndex(Format f, int p, int half, int lane) {
  if (!IsPacked(f)) return 4 * lane + 2 * half + 1 - p;
  const int byte = f == Format::kCodebook ? half * 4 + lane % 4
                                          : lane % 4 * 2 + half;
  return 2 * (lane / 4 * 16 + p / 2 * 8 + byte) + p % 2;
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

// The number that is added to bytes of E2M1 or int4, so that they are unsigned.
constexpr int Bias(Format f) { return f == Format::kInt4 ? 8 : 12; }

// Tables of the 16 codes of E2M1 or int4: twice the value (int4: the value) as a
// byte, and both bytes of the value as bf16. For a codebook: the bytes of the
// value as float32, the lowest first.
struct NibbleTables {
  __m256i twice;   // -12..12; int4: the value, -8..7
  __m256i biased;  // the same plus Bias: 0..24; int4: 0..15
  __m256i high, low;
  __m256i bytes[4];  // of a codebook

  JAXPLUGIN_ALWAYS_INLINE NibbleTables(Format format, const float* codebook) {
    if (format == Format::kCodebook) {
      // Moves the first bytes of four values to the first dword, and so on.
      const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10,
                                          14, 3, 7, 11, 15);
      __m128 rows[4];
      for (int i = 0; i < 4; ++i) {
        rows[i] = _mm_castsi128_ps(_mm_shuffle_epi8(
            _mm_castps_si128(_mm_loadu_ps(codebook + 4 * i)), order));
      }
      _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
      for (int i = 0; i < 4; ++i) {
        bytes[i] = _mm256_broadcastsi128_si256(_mm_castps_si128(rows[i]));
      }
      return;
    }
    if (format == Format::kInt4) {
      twice = _mm256_broadcastsi128_si256(_mm_setr_epi8(
          0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
      biased = _mm256_add_epi8(twice, _mm256_set1_epi8(Bias(format)));
      high = _mm256_broadcastsi128_si256(_mm_setr_epi8(
          0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, -63, -64, -64, -64, -64,
          -64, -64, -65));
      low = _mm256_broadcastsi128_si256(_mm_setr_epi8(
          0, -128, 0, 0x40, -128, -96, -64, -32, 0, -32, -64, -96, -128, 0x40,
          0, -128));
      return;
    }
    const __m128i magnitude =
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i high_byte = _mm_setr_epi8(
        0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64,
        -64, -64, -64);
    const __m128i low_byte = _mm_setr_epi8(0, 0, -128, -64, 0, 0x40, -128, -64,
                                           0, 0, -128, -64, 0, 0x40, -128, -64);
    twice = _mm256_broadcastsi128_si256(magnitude);
    biased = _mm256_add_epi8(twice, _mm256_set1_epi8(Bias(format)));
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

// Loads 32 bytes of codes from `bytes`, which has `count` bytes.
JAXPLUGIN_ALWAYS_INLINE __m256i LoadGroup(const uint8_t* bytes, int64_t count) {
  if (count >= kGroupBytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
  }
  alignas(32) uint8_t padded[kGroupBytes] = {};
  if (count > 0) __builtin_memcpy(padded, bytes, count);
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(padded));
}

// Reads values [k0, k0 + 64) of a row of E2M1, int4 or int8 as integers, padded
// with zeros: the 32 values of even index, then those of odd index. An E2M1
// value is doubled.
JAXPLUGIN_ALWAYS_INLINE void ReadIntegers(const Operand& x, int64_t row,
                                          int64_t k0,
                                          const NibbleTables& tables,
                                          __m256i* out) {
  const int64_t begin = BytesOf(x.format, k0);
  const uint8_t* at = RowValues(x, row) + begin;
  const int64_t left = x.row_bytes - begin;
  const __m256i codes = LoadGroup(at, left);
  if (IsPacked(x.format)) {
    out[0] = _mm256_shuffle_epi8(tables.twice, LowNibbles(codes));
    out[1] = _mm256_shuffle_epi8(tables.twice, HighNibbles(codes));
    return;
  }
  const __m256i even_first = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  __m256i halves[2] = {codes, LoadGroup(at + kGroupBytes, left - kGroupBytes)};
  for (__m256i& half : halves) {
    half = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(half, even_first),
                                    _MM_SHUFFLE(3, 1, 2, 0));
  }
  out[0] = _mm256_permute2x128_si256(halves[0], halves[1], 0x20);
  out[1] = _mm256_permute2x128_si256(halves[0], halves[1], 0x31);
}

// Broadcasts *low to the lower four lanes and *high to the upper four.
JAXPLUGIN_ALWAYS_INLINE __m256 SpreadTwo(const float* low, const float* high) {
  return _mm256_blend_ps(_mm256_broadcast_ss(low), _mm256_broadcast_ss(high),
                         0xf0);
}

// The same for two floats next to each other, in fewer instructions.
JAXPLUGIN_ALWAYS_INLINE __m256 SpreadTwo(const float* both) {
  double pair;
  __builtin_memcpy(&pair, both, sizeof(pair));
  return _mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(pair)),
                              _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

// Returns a mask of the float32 bits that hold an FP8 code's sign and fields.
template <Format kFormat>
constexpr uint32_t MovedFields() {
  static_assert(FactsOf(kFormat).bits == 8);
  return 0x80000000u | 0x7fu << (23 - FactsOf(kFormat).mantissa_bits);
}

// The words of the values of a codebook in float32: low and high ones.
struct CodebookWords {
  __m256i low, high;
};

// Looks up codes of a codebook, one in each byte. `first` has the words of the
// first 8 values of each 16, and `last` those of the others.
JAXPLUGIN_ALWAYS_INLINE void LookUpCodebook(__m256i codes,
                                            const NibbleTables& tables,
                                            CodebookWords* first,
                                            CodebookWords* last) {
  __m256i bytes[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    bytes[i] = _mm256_shuffle_epi8(tables.bytes[i], codes);
  }
  *first = {_mm256_unpacklo_epi8(bytes[0], bytes[1]),
            _mm256_unpacklo_epi8(bytes[2], bytes[3])};
  *last = {_mm256_unpackhi_epi8(bytes[0], bytes[1]),
           _mm256_unpackhi_epi8(bytes[2], bytes[3])};
}

// Stores the first 4 values of each 8 to out[0], and the others to out[1].
JAXPLUGIN_ALWAYS_INLINE void JoinWords(const CodebookWords& words,
                                       __m256* out) {
  out[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(words.low, words.high));
  out[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(words.low, words.high));
}

// A group of codes, from which Pair converts 16 values at a time to float32,
// times 2^-ValueShift, in the order of ExpandedIndex. kFormat is a result of
// InRegister.
template <Format kFormat>
struct Expanded {
  static_assert(InRegister(kFormat) == kFormat);
  __m256i pairs[GroupPairs(kFormat)];  // of bf16, except for int8

  JAXPLUGIN_ALWAYS_INLINE Expanded(__m256i codes, const NibbleTables& tables) {
    if constexpr (IsPacked(kFormat)) {
      const __m256i nibbles[2] = {LowNibbles(codes), HighNibbles(codes)};
#pragma GCC unroll 2
      for (int s = 0; s < 2; ++s) {
        const __m256i high = _mm256_shuffle_epi8(tables.high, nibbles[s]);
        const __m256i low = _mm256_shuffle_epi8(tables.low, nibbles[s]);
        pairs[s] = _mm256_unpacklo_epi8(low, high);
        pairs[2 + s] = _mm256_unpackhi_epi8(low, high);
      }
    } else if constexpr (IsInteger(kFormat)) {
      // Odd codes, then even codes, in the high bytes of words.
      pairs[0] = codes;
      pairs[1] = _mm256_slli_epi16(codes, 8);
    } else {
      // An arithmetic shift moves a code from the high byte of a word to the
      // fields of a bf16. It copies the sign into the exponent bits that the
      // code does not have, and the mask clears them. Odd codes are in high
      // bytes. Even codes are in low bytes, and a multiplication by 2^(8 -
      // kShift) moves them to the same bits.
      constexpr int kShift = 8 - FactsOf(kFormat).exponent_bits;
      const __m256i fields = _mm256_set1_epi16(
          static_cast<short>(MovedFields<kFormat>() >> 16));
      const __m256i factor = _mm256_set1_epi16(1 << (8 - kShift));
      pairs[0] = _mm256_and_si256(_mm256_srai_epi16(codes, kShift), fields);
      pairs[1] = _mm256_and_si256(_mm256_maddubs_epi16(factor, codes), fields);
    }
  }

  // Converts the values of the low halves of the dwords to out[0], and those of
  // the high halves to out[1].
  JAXPLUGIN_ALWAYS_INLINE void Pair(int p, __m256* out) const {
    if constexpr (kFormat == Format::kInt8) {
      const __m256i high = _mm256_set1_epi32(static_cast<int>(0xff000000));
      out[0] = _mm256_cvtepi32_ps(
          _mm256_and_si256(_mm256_slli_epi32(pairs[p], 16), high));
      out[1] = _mm256_cvtepi32_ps(_mm256_and_si256(pairs[p], high));
    } else {
      const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
      out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs[p], 16));
      out[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs[p], high));
    }
  }
};

template <>
struct Expanded<Format::kCodebook> {
  CodebookWords pairs[4];

  JAXPLUGIN_ALWAYS_INLINE Expanded(__m256i codes, const NibbleTables& tables) {
    LookUpCodebook(LowNibbles(codes), tables, &pairs[0], &pairs[2]);
    LookUpCodebook(HighNibbles(codes), tables, &pairs[1], &pairs[3]);
  }
  JAXPLUGIN_ALWAYS_INLINE void Pair(int p, __m256* out) const {
    JoinWords(pairs[p], out);
  }
};

// Loads eight codes into the low bytes of dwords.
JAXPLUGIN_ALWAYS_INLINE __m256i LoadEight(const uint8_t* bytes) {
  return _mm256_cvtepu8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
}

// Converts eight codes of FP8 or int8, in the low bytes of dwords, to float32,
// times 2^-ValueShift.
template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE __m256 MoveFields(__m256i codes) {
  if constexpr (IsInteger(kFormat)) {
    return _mm256_cvtepi32_ps(_mm256_slli_epi32(codes, 24));
  } else {
  constexpr int kShift = 8 - FactsOf(kFormat).exponent_bits;
  const __m256i fields =
      _mm256_set1_epi32(static_cast<int>(MovedFields<kFormat>()));
  return _mm256_castsi256_ps(_mm256_and_si256(
      _mm256_srai_epi32(_mm256_slli_epi32(codes, 24), kShift), fields));
  }
}

constexpr uint32_t kMostScale = 127 + kMostExponent;  // its E8M0 code

// A kind of scales as a type.
template <ScaleKind kKind_>
struct KindIs {
  static constexpr ScaleKind kKind = kKind_;
};

// Whether no scale of one byte needs the special cases of ScaleTimes: NaN, and
// E8M0 from 2^62 on.
inline bool ScalesArePlain(ScaleKind kind, const uint8_t* bytes,
                           int64_t count) {
  uint8_t special = 0;
  if (kind == ScaleKind::kE4M3) {
    for (int64_t i = 0; i < count; ++i) {
      special |= static_cast<uint8_t>((bytes[i] | 0x80) == 0xff);
    }
  } else if (kind == ScaleKind::kE8M0) {
    for (int64_t i = 0; i < count; ++i) {
      special |= static_cast<uint8_t>(bytes[i] >= kMostScale);
    }
  }
  return special == 0;
}

// Loads eight scales that are plain (ScalesArePlain) and converts them to
// float32. Wide ones above 2^62 become 2^62, and NaN stays NaN.
JAXPLUGIN_ALWAYS_INLINE __m256 LoadEightScales(ScaleKind kind,
                                               const uint8_t* at) {
  const __m256 most = _mm256_set1_ps(1ull << kMostExponent);
  const __m128i* halves = reinterpret_cast<const __m128i*>(at);
  __m256 scale;
  switch (kind) {
    case ScaleKind::kE8M0:
      return _mm256_castsi256_ps(_mm256_slli_epi32(LoadEight(at), 23));
    case ScaleKind::kE4M3:
      return _mm256_mul_ps(MoveFields<Format::kE4M3>(LoadEight(at)),
                           _mm256_set1_ps(PowerOf(120)));
    case ScaleKind::kF16: return _mm256_cvtph_ps(_mm_loadu_si128(halves));
    case ScaleKind::kBF16:
      scale = _mm256_castsi256_ps(_mm256_slli_epi32(
          _mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), 16));
      break;
    case ScaleKind::kF32:
      scale = _mm256_loadu_ps(reinterpret_cast<const float*>(at));
      break;
    default:  // E5M2 is the high byte of a float16
      return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(),
                                               _mm_loadl_epi64(halves)));
  }
  // If an operand is NaN, the result is the second operand.
  scale = _mm256_min_ps(most, scale);
  return _mm256_max_ps(_mm256_sub_ps(_mm256_setzero_ps(), most), scale);
}

// Decodes the scales of blocks [c0, c0 + count) of a row for DecodeScales.
JAXPLUGIN_ALWAYS_INLINE void DecodeBlockScales(const Operand& x, int64_t row,
                                               int64_t c0, int64_t count,
                                               int shift,
                                               float* __restrict out) {
  const ScaleKind kind = x.scale_kind;
  const int64_t size = ScaleSize(kind);
  const uint8_t* scales = ScaleAt(x, row, c0);
  int64_t i = 0;
  if (ScalesArePlain(kind, scales, count)) {
    const __m256 power = _mm256_set1_ps(PowerOf(shift));
    // The last eight scales overlap the ones before.
    const auto decode = [&](auto known) {
      for (; count >= 8 && i < count; i += 8) {
        const int64_t at = Min(i, count - 8);
        const __m256 s = LoadEightScales(known.kKind, scales + at * size);
        _mm256_storeu_ps(out + at, _mm256_mul_ps(s, power));
      }
    };
    switch (kind) {
      case ScaleKind::kE8M0:
        // Adding to the exponents leaves the multipliers to the dot.
        for (; shift >= 0 && count >= 8 && i < count; i += 8) {
          const int64_t at = Min(i, count - 8);
          const __m256i s =
              _mm256_castps_si256(LoadEightScales(kind, scales + at));
          _mm256_storeu_ps(out + at, _mm256_castsi256_ps(_mm256_add_epi32(
                                        s, _mm256_set1_epi32(shift << 23))));
        }
        decode(KindIs<ScaleKind::kE8M0>());
        break;
      case ScaleKind::kE4M3: decode(KindIs<ScaleKind::kE4M3>()); break;
      case ScaleKind::kF32: decode(KindIs<ScaleKind::kF32>()); break;
      case ScaleKind::kBF16: decode(KindIs<ScaleKind::kBF16>()); break;
      case ScaleKind::kF16: decode(KindIs<ScaleKind::kF16>()); break;
      default: decode(KindIs<ScaleKind::kE5M2>());
    }
  }
  for (; i < count; ++i) out[i] = ScaleTimes(kind, scales + i * size, shift);
}

// The most values and scales that are decoded at a time.
constexpr int64_t kUnpackMax = 4096;
constexpr int64_t kPiecesMax = kUnpackMax / 16;

// Decodes the scales of pieces [p0, p0 + count) (PieceOf) of a safe row to
// float32, times 2^shift (-60 <= shift <= 60). The scale of a zero block may
// have any value. Scales above 2^62 become 2^62, so that the product of two
// scales is finite and zero times it is zero. Inlined, because with a call one
// row of NVFP4 or MXFP4 takes 1.1 times as long.
JAXPLUGIN_ALWAYS_INLINE void DecodeScales(const Operand& x, int64_t row,
                                          int64_t p0, int64_t count, int shift,
                                          float* __restrict out) {
  // A block of up to 32 values is one piece.
  if (x.block <= 32) return DecodeBlockScales(x, row, p0, count, shift, out);
  if (count == 0) return;
  const int64_t each = x.block / PieceOf(x);
  float scale[kPiecesMax + 1];
  const int64_t c0 = p0 / each;
  DecodeBlockScales(x, row, c0, (p0 + count - 1) / each - c0 + 1, shift, scale);
  int64_t i = 0, c = 0;
  if (each == 4 && p0 % 4 == 0) {  // blocks of 128, or of 64 in pieces of 16
    for (; i + 8 <= count; i += 8, c += 2) {
      _mm256_storeu_ps(out + i, SpreadTwo(scale + c, scale + c + 1));
    }
  }
  int64_t end = (c0 + c + 1) * each - p0;  // the pieces before it have scale[c]
  for (; i < count; ++c, end += each) {
    for (; i < Min(end, count); ++i) out[i] = scale[c];
  }
}

// UnpackRun multiplies scales by 2^UnpackScaleShift, and values by
// 2^-UnpackScaleShift.
constexpr int UnpackScaleShift(Format f) {
  return f == Format::kE2M1 ? -1 : IsPacked(f) ? 0 : 60;
}

// The order of the values that UnpackRun writes. kGroups is the order of
// ExpandedIndex in each whole group of 32 values. It is for formats with one
// code per byte.
enum class Order { kNatural, kGroups };

// Converts 32 values without scale, times 2^-UnpackScaleShift. `codes` has 32
// bytes, or 16 if packed.
template <Format kFormat, Order kOrder>
JAXPLUGIN_ALWAYS_INLINE void UnpackValues(const uint8_t* codes,
                                          const NibbleTables& tables,
                                          __m256* values) {
  if constexpr (kFormat == Format::kCodebook) {
    const __m256i words = _mm256_cvtepu8_epi16(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i natural =
        LowNibbles(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)));
    // The lower half has the first 4 codes of each 8.
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    CodebookWords halves[2];
    LookUpCodebook(_mm256_permutevar8x32_epi32(natural, order), tables,
                   &halves[0], &halves[1]);
    JoinWords(halves[0], values);
    JoinWords(halves[1], values + 2);
  } else if constexpr (IsPacked(kFormat)) {
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
      values[q] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(at));
    }
  } else {
    constexpr Format kFp8 = InRegister(kFormat);
    if constexpr (kOrder == Order::kGroups) {
      const Expanded<kFp8> group(LoadCodes<kFormat>(codes), tables);
      group.Pair(0, values);
      group.Pair(1, values + 2);
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
    constexpr int kShift = ValueShift(kFormat) - UnpackScaleShift(kFormat);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      values[q] = _mm256_mul_ps(
          values[q], _mm256_set1_ps(AsFloat((127u + kShift) << 23)));
    }
  }
}

// Converts `groups` groups of 32 values and multiplies them by their scales.
// `scale` has the scales of their blocks, times 2^UnpackScaleShift. Prefetches
// the codes `ahead` bytes further. Returns false if a code is NaN or Inf; the
// output is then invalid.
template <Format kFormat, int kBlock, Order kOrder>
inline bool UnpackGroups(const uint8_t* codes, int64_t groups,
                         const float* codebook, const float* scale,
                         int64_t ahead, float* out) {
  constexpr int64_t kBytes = BytesOf(kFormat, 32);
  const NibbleTables tables(kFormat, codebook);
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

// A format as a type.
template <Format kFormat_>
struct FormatIs {
  static constexpr Format kFormat = kFormat_;
};

template <Format kFormat>
inline bool UnpackOfFormat(const uint8_t* codes, int64_t groups, int64_t block,
                           Order order, const float* codebook,
                           const float* scale, int64_t ahead, float* out) {
  if (!IsPacked(kFormat) && order == Order::kGroups) {
    return block == 16
               ? UnpackGroups<kFormat, 16, Order::kGroups>(
                     codes, groups, codebook, scale, ahead, out)
               : UnpackGroups<kFormat, 32, Order::kGroups>(
                     codes, groups, codebook, scale, ahead, out);
  }
  return block == 16 ? UnpackGroups<kFormat, 16, Order::kNatural>(
                           codes, groups, codebook, scale, ahead, out)
                     : UnpackGroups<kFormat, 32, Order::kNatural>(
                           codes, groups, codebook, scale, ahead, out);
}

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
    const int64_t piece = PieceOf(x);
    float scale[kPiecesMax];
    DecodeScales(x, row, k0 / piece, groups * 32 / piece,
                 UnpackScaleShift(x.format) - x.fraction_bits, scale);
    const auto unpack = [&](auto format) {
      constexpr Format kFormat = decltype(format)::kFormat;
      is_done = UnpackOfFormat<kFormat>(codes + BytesOf(kFormat, k0), groups,
                                        piece, order, x.codebook, scale,
                                        ahead, out);
    };
    switch (x.format) {
      case Format::kE4M3: unpack(E4M3()); break;
      case Format::kE5M2: unpack(E5M2()); break;
      case Format::kE2M3: unpack(E2M3()); break;
      case Format::kE3M2: unpack(E3M2()); break;
      case Format::kInt8: unpack(FormatIs<Format::kInt8>()); break;
      case Format::kInt4: unpack(FormatIs<Format::kInt4>()); break;
      case Format::kCodebook: unpack(FormatIs<Format::kCodebook>()); break;
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
