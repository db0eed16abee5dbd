// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot of a few rows (decoding a token). It is bound by reading the other
// operand, the "weights", once. Their codes are converted to bf16 in registers,
// and vdpbf16ps multiplies them with the few rows, which are prepared in bf16
// with their scales. One multiply-add per 64 bytes of codes multiplies the sums
// by the scales of the weights.
//
// Rows that bf16 cannot represent (f32, f16, values with wide scales) are
// multiplied in float32. For 64 bytes of codes of 4 bits that takes eight
// instructions and four multiplications more, and for codes of 8 bits half of
// that. Splitting an f32 into three bf16 would take eight multiplications more.

// Rows of a pass. Their sums are in registers and their values in L1. Passes of
// 6 and 8 rows of 4096 values take 1.1 to 1.5 times as long as passes of 4.
constexpr int kFewRowsMax = 4;
// The prefetch distance in bytes of codes. It covers the latency of memory. For
// 1 and 2 rows the prefetch is into L2, because L1 has the few rows. 3 and 4 rows
// leave no time to wait for L2: n = k = 4096, two Zen 5 cores, times of a prefetch
// into L1 from twice as far, over a prefetch into L2:
//   rows               3     4     8
//   bf16 * MXFP8    0.72  0.84  0.99
//   bf16 * MXFP4    0.94  0.97  0.98
//   bf16 * NVFP4    0.95  0.87  0.94
//   bf16 * INT8_32  0.78  0.85  0.92
//   f32 * MXFP4     0.96  0.82  0.87
// (tests/compare/compare.sh HEAD 'bf16*mxfp8' 4 4096 4096, and so on; 2026-11.)
constexpr int64_t FewRowsAhead(int rows) { return rows <= 2 ? 4096 : 8192; }
template <int kRows>
constexpr auto kFewRowsCache = kRows <= 2 ? _MM_HINT_T1 : _MM_HINT_T0;
// The same for scales. With it, one row against 4096 x 4096 is 1.25x faster in
// INT4_32 and 1.2x in NVFP4 (two Zen 5 cores, 2026-11).
constexpr int64_t kScalesAhead = 512;

// The type in which rows and weights are multiplied.
enum class Factors { kBF16, kF32 };

// The formats of weights whose codes are converted in the same way: by the
// table of 4 bits (kE2M1), by tables of bytes (kE4M3), or as int8.
JAXPLUGIN_ALWAYS_INLINE constexpr Format FewRowsFormat(Format format) {
  return IsPacked(format)           ? Format::kE2M1
         : format == Format::kInt8 ? Format::kInt8
                                    : Format::kE4M3;
}

// A vector of codes, converted to kParts vectors of factors. The few rows are
// stored in vectors with the same order of k. kFormat is a FewRowsFormat.
template <Format kFormat, Factors kFactors>
struct FewRowsCodes {
  static constexpr bool kIsFloats = kFactors == Factors::kF32;
  static constexpr int kBits = FactsOf(kFormat).stored_bits;
  static constexpr int kFactorBytes = kIsFloats ? 4 : 2;
  static constexpr int kParts = 8 * kFactorBytes / kBits;
  static constexpr int kPairs = kIsFloats ? kParts / 2 : kParts;  // of bf16

  __m512i part[kParts];

  FewRowsCodes() = default;
  JAXPLUGIN_ALWAYS_INLINE FewRowsCodes(__m512i codes, const Tables& tables) {
    if constexpr (kBits == 4 && kIsFloats) {
#pragma GCC unroll 8
      for (int p = 0; p < kParts; ++p) {
        part[p] = Unpack4ToFloats(codes, tables.low0, p);
      }
      return;
    }
    __m512i pairs[kPairs];
    if constexpr (kBits == 4) {
      const Unit unit = Unpack4(codes, tables.high0);
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) pairs[p] = unit.q[p];
    } else if constexpr (kFormat == Format::kInt8) {
      UnpackInt8(codes, tables, &pairs[0], &pairs[1]);
    } else {
      Unpack8(codes, tables, &pairs[0], &pairs[1]);
    }
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      if constexpr (kIsFloats) {
        part[p] = _mm512_slli_epi32(pairs[p], 16);
        part[p + kPairs] = _mm512_and_si512(pairs[p], high);
      } else {
        part[p] = pairs[p];
      }
    }
  }

  // Returns the products of part p and `factors`, added to `sum` unless
  // is_first.
  JAXPLUGIN_ALWAYS_INLINE __m512 Multiply(int p, __m512i factors,
                                          bool is_first, __m512 sum) const {
    if constexpr (kIsFloats) {
      const __m512 a = _mm512_castsi512_ps(part[p]);
      const __m512 b = _mm512_castsi512_ps(factors);
      return is_first ? _mm512_mul_ps(a, b) : _mm512_fmadd_ps(a, b, sum);
    } else {
      return Dot32(is_first ? _mm512_setzero_ps() : sum, part[p], factors);
    }
  }
};

// For E2M1 with blocks of 16: the indices, for each dword of vector v, of the
// two bytes of its scale in [low bytes, high bytes] of 32 bf16 scales.
struct ScaleLanes {
  alignas(64) uint8_t of[4][64];

  constexpr ScaleLanes() : of{} {
    for (int i = 0; i < 256; ++i) {
      const int scale = i / 8;
      of[i / 64][i % 64] =
          static_cast<uint8_t>(i % 4 == 3 ? 64 + scale : scale);
    }
  }
};
constexpr ScaleLanes kScaleLanes;

// How the scales of a step are decoded. kAny decodes 16 scales of any kind, or
// as many as 512 values have. kE4M3 looks up 32 E4M3 scales in a table, for
// NVFP4 with its blocks of 16. kF16 and kF16Minima are for 16 blocks of 32
// values with f16 scales, and f16 minima, as GGUF files have them: a row of 576
// values takes fewer instructions than with kAny.
enum class Scales { kAny, kE4M3, kF16, kF16Minima };

// The zero points or minima of weights (kernels.h, Operand). They add
// sum_b sums[r, b] * term[w, b] to a dot. These products are the first addends
// of a step, so the products of codes are not rounded more often.
struct FewRowsOffsets {
  const float* sums;  // over blocks, of the few rows; null: no offsets
  int64_t stride;     // of `sums`, a multiple of kTermsMultiple
  int64_t blocks;     // in a step of kAny, at least 1

  explicit FewRowsOffsets(const DotArgs& args)
      : sums(args.block_sums),
        stride(RoundUp(args.rhs.scale_cols, kTermsMultiple)),
        blocks(Max(1, Min(16, 512 / Max(1, args.rhs.block)))) {}

  // Returns the sums of 16 blocks of a row. A row ends with zeros.
  JAXPLUGIN_ALWAYS_INLINE __m512 Sums(int64_t row, int64_t column) const {
    return _mm512_castsi512_ps(
        _mm512_loadu_si512(sums + row * stride + column));
  }
  // Returns the sums of `count` blocks of a row, and zeros.
  JAXPLUGIN_ALWAYS_INLINE __m512 Sums(int64_t row, int64_t column,
                                      int64_t count) const {
    const float* from = sums + row * stride + column;
    return _mm512_castsi512_ps(
        LoadBytes(reinterpret_cast<const uint8_t*>(from), 4 * count));
  }
};

template <Scales kScales>
struct FewRowsScales {
  static constexpr int kCount = 16;

  // The scales of a step.
  struct Some {
    __m512 scales;
  };

  const ScaleIndex& index;
  ScaleKind kind;
  uint64_t tail_mask;  // of the bytes of f16 scales in a short last step

  JAXPLUGIN_ALWAYS_INLINE explicit FewRowsScales(const Unpacker& weights)
      : index(weights.index),
        kind(weights.x.scale_kind),
        tail_mask((uint64_t{1} << 2 * (weights.x.scale_cols % kCount)) - 1) {}
  JAXPLUGIN_ALWAYS_INLINE Some Load(const uint8_t* scale, int64_t left) const {
    if constexpr (kScales != Scales::kAny) return {LoadF16(scale, left)};
    return {LoadScales(kind, scale, left)};
  }
  // Returns 16 f16 numbers, or those that are left and zeros.
  JAXPLUGIN_ALWAYS_INLINE __m512 LoadF16(const uint8_t* at,
                                         int64_t left) const {
    const uint64_t mask = left >= kCount ? 0xffffffff : tail_mask;
    return _mm512_cvtph_ps(
        _mm512_castsi512_si256(_mm512_maskz_loadu_epi8(mask, at)));
  }
  // The starts of the sums of a step: sum_b of the block's offset times the
  // sums of the block in kRows rows, or zeros.
  template <int kRows>
  JAXPLUGIN_ALWAYS_INLINE void Start(const Operand& weights, int64_t w,
                                     int64_t k0, int64_t column, __m512 scales,
                                     const FewRowsOffsets& offsets,
                                     __m512* sums) const {
    for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_ps();
    const int64_t left = weights.scale_cols - column;
    const int64_t at = w * weights.scale_cols + column;
    const __m512 shift = _mm512_set1_ps(weights.code_offset);
    if constexpr (kScales == Scales::kF16Minima) {
      const uint8_t* minima = weights.offset + 2 * at;
      _mm_prefetch(reinterpret_cast<const char*>(minima + kScalesAhead),
                   _MM_HINT_T1);
      const __m512 terms =
          _mm512_fmadd_ps(shift, scales, LoadF16(minima, left));
      for (int r = 0; r < kRows; ++r) {
        sums[r] = _mm512_mul_ps(terms, offsets.Sums(r, column));
      }
    } else if constexpr (kScales == Scales::kAny) {
      if (offsets.sums == nullptr) return;
      if (offsets.blocks == 1 && k0 % weights.block != 0) return;
      const int64_t count = Min(offsets.blocks, left);
      const __m512 terms = Terms(weights, at, count, shift, scales);
      for (int r = 0; r < kRows; ++r) {
        sums[r] = _mm512_mul_ps(terms, offsets.Sums(r, column, count));
      }
    }
  }
  // Returns the terms of `count` blocks, whose offsets begin at block `at`.
  JAXPLUGIN_ALWAYS_INLINE static __m512 Terms(const Operand& weights,
                                              int64_t at, int64_t count,
                                              __m512 shift, __m512 scales) {
    const OffsetKind kind = weights.offset_kind;
    const int64_t size = OffsetSize(kind);
    const __m512i bytes = LoadBytes(weights.offset + at * size, count * size);
    if (kind >= OffsetKind::kUint8) {
      const __m128i low = _mm512_castsi512_si128(bytes);
      const __m512i point = kind == OffsetKind::kUint8
                                ? _mm512_cvtepu8_epi32(low)
                                : _mm512_cvtepi8_epi32(low);
      return _mm512_mul_ps(_mm512_sub_ps(shift, _mm512_cvtepi32_ps(point)),
                           scales);
    }
    const __m256i low = _mm512_castsi512_si256(bytes);
    const __m512 minimum =
        kind == OffsetKind::kF32   ? _mm512_castsi512_ps(bytes)
        : kind == OffsetKind::kF16 ? _mm512_cvtph_ps(low)
                                   : _mm512_castsi512_ps(_mm512_slli_epi32(
                                         _mm512_cvtepu16_epi32(low), 16));
    return _mm512_fmadd_ps(shift, scales, minimum);
  }
  // Returns the scale of each dword of vector v of the step.
  JAXPLUGIN_ALWAYS_INLINE __m512 Spread(const Some& some, int v) const {
    return index.Spread(some.scales, v);
  }
};

template <>
struct FewRowsScales<Scales::kE4M3> {
  static constexpr int kCount = 32;

  struct Some {
    __m512i low, high;
  };

  Tables tables;

  JAXPLUGIN_ALWAYS_INLINE explicit FewRowsScales(const Unpacker&)
      : tables(TablesOf(Format::kE4M3).Load()) {}
  JAXPLUGIN_ALWAYS_INLINE Some Load(const uint8_t* scale, int64_t left) const {
    const int64_t count = Min(left, kCount);
    const __m512i codes = _mm512_maskz_loadu_epi8(
        (uint64_t{1} << count) - 1, scale);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i high =
        _mm512_permutex2var_epi8(tables.high0, codes, tables.high1);
    return {_mm512_permutex2var_epi8(tables.low0, codes, tables.low1),
            // a | (b & c)
            _mm512_ternarylogic_epi32(high, codes, sign, 0xf8)};
  }
  JAXPLUGIN_ALWAYS_INLINE __m512 Spread(const Some& some, int v) const {
    return _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi8(
        0xcccccccccccccccc, some.low, _mm512_load_si512(kScaleLanes.of[v]),
        some.high));
  }
};

// sum[w][r] += the dots over one step of k, for kWeights weight rows and kRows
// rows. A step has kVectors vectors of codes per weight row. If !kIsWhole, it
// has only the last `left` bytes. Prefetches the same number of bytes `ahead`
// further.
//
// Roundings: 3 in a block's products (7 for E2M1; the first product is exact),
// and one for each of at most 8 vectors (4 for E2M1). In float32 there are 4
// roundings in a block's products, the first of which rounds too. E2M1 has 5:
// each of two chains has four products, and the chains are added. The product of
// a row's value and its wide scale is rounded, too. So 8 vectors are added in
// two halves, with 5 roundings.
template <Format kFormat, Factors kFactors, int kVectors, int kRows, int kWeights,
          bool kIsWhole, typename Spread>
JAXPLUGIN_ALWAYS_INLINE void FewRowsStep(const uint8_t* values,
                                         int64_t row_bytes, int64_t ahead,
                                         int64_t left,
                                         const Spread& scales,
                                         const typename Spread::Some* some,
                                         const Tables& tables, const uint8_t* x,
                                         int64_t x_row_bytes,
                                         __m512 (*sum)[kRows]) {
  using Codes = FewRowsCodes<kFormat, kFactors>;
  constexpr int kParts = Codes::kParts;
  constexpr int kChains = kParts > 4 ? 2 : 1;
  constexpr int kHalf = Codes::kIsFloats && kVectors == 8 ? 4 : kVectors;
  __m512 last[kWeights][kRows];  // the sums of the second half
  for (int w = 0; w < kWeights; ++w) {
    for (int r = 0; r < kRows; ++r) last[w][r] = _mm512_setzero_ps();
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    if (!kIsWhole && v * 64 >= left) break;
    Codes codes[kWeights];
    __m512 spread[kWeights];
#pragma GCC unroll 2
    for (int w = 0; w < kWeights; ++w) {
      const uint8_t* at = values + w * row_bytes + v * 64;
      _mm_prefetch(reinterpret_cast<const char*>(at + ahead),
                   kFewRowsCache<kRows>);
      __m512i bytes = kIsWhole ? _mm512_loadu_si512(at)
                               : LoadBytes(at, left - v * 64);
      KeepInRegister(&bytes);
      codes[w] = Codes(bytes, tables);
      spread[w] = scales.Spread(some[w], v);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* xr = x + r * x_row_bytes + v * kParts * 64;
      __m512 chain[kWeights][kChains];
#pragma GCC unroll 8
      for (int p = 0; p < kParts; ++p) {
        __m512i factors = _mm512_load_si512(xr + p * 64);
        if constexpr (kWeights > 1) KeepInRegister(&factors);
#pragma GCC unroll 2
        for (int w = 0; w < kWeights; ++w) {
          chain[w][p % kChains] = codes[w].Multiply(p, factors, p < kChains,
                                                    chain[w][p % kChains]);
        }
      }
#pragma GCC unroll 2
      for (int w = 0; w < kWeights; ++w) {
        __m512 block = chain[w][0];
        if constexpr (kChains == 2) block = _mm512_add_ps(block, chain[w][1]);
        __m512& to = v < kHalf ? sum[w][r] : last[w][r];
        to = _mm512_fmadd_ps(block, spread[w], to);
      }
    }
  }
  if constexpr (kHalf < kVectors) {
    for (int w = 0; w < kWeights; ++w) {
      for (int r = 0; r < kRows; ++r) {
        sum[w][r] = _mm512_add_ps(sum[w][r], last[w][r]);
      }
    }
  }
}

// The sums of a whole FewRowsStep, with the same bits, for two rows of weights
// in codes of 8 bits and for floats. `numbers` are FoldNumbers of the E8M0
// scales, and are subtracted from the exponents of the weights. Returns false if
// a code is not finite; the sums are then invalid.
template <int kRows>
JAXPLUGIN_ALWAYS_INLINE bool FewRowsFoldStep(const uint8_t* values,
                                             int64_t row_bytes, int64_t ahead,
                                             const __m512* numbers,
                                             const ScaleIndex& index,
                                             const Tables& tables, __m512i sign,
                                             const uint8_t* x,
                                             int64_t x_row_bytes,
                                             __m512 (*sum)[kRows]) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  __m512i flags = _mm512_setzero_si512();
  __m512 first[2][kRows];  // the sums of the first half
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) {
    __m512 part[2][4];
#pragma GCC unroll 2
    for (int w = 0; w < 2; ++w) {
      const uint8_t* at = values + w * row_bytes + v * 64;
      _mm_prefetch(reinterpret_cast<const char*>(at + ahead),
                   kFewRowsCache<kRows>);
      __m512i codes = _mm512_loadu_si512(at);
      KeepInRegister(&codes);
      __m512i pairs[2];
      UnpackFold8(codes, tables, sign,
                  _mm512_castps_si512(index.Spread(numbers[w], v)), &flags,
                  &pairs[0], &pairs[1]);
      KeepInRegister(&flags);
      for (int p = 0; p < 2; ++p) {
        part[w][p] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[p], 16));
        part[w][p + 2] = _mm512_castsi512_ps(_mm512_and_si512(pairs[p], high));
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* xr = x + r * x_row_bytes + v * 256;
      __m512 chain[2];
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) {
        __m512i bits = _mm512_load_si512(xr + p * 64);
        KeepInRegister(&bits);
        const __m512 factors = _mm512_castsi512_ps(bits);
        for (int w = 0; w < 2; ++w) {
          chain[w] = p == 0 ? _mm512_mul_ps(part[w][p], factors)
                            : _mm512_fmadd_ps(part[w][p], factors, chain[w]);
        }
      }
      for (int w = 0; w < 2; ++w) {
        if (v == 4) first[w][r] = sum[w][r];
        sum[w][r] =
            v % 4 == 0 ? chain[w] : _mm512_add_ps(chain[w], sum[w][r]);
        KeepInRegister(&sum[w][r]);
      }
    }
  }
  for (int w = 0; w < 2; ++w) {
    for (int r = 0; r < kRows; ++r) {
      sum[w][r] = _mm512_add_ps(first[w][r], sum[w][r]);
    }
  }
  return AreFinite(flags);
}

// Floats are multiplied by 2^kFloatShift, and their sums are divided by it. So
// all floats from 2^-87 to 2^38 are supported with codes of 4 bits, and up to
// 2^25 with codes of 8 bits and codebooks. Their products with E5M2's smallest
// value and the smallest safe scale are multiples of 2^-149, float32's smallest
// number. The largest products are below 2^110.
constexpr int kFloatShift = 23;

JAXPLUGIN_ALWAYS_INLINE constexpr bool MagnitudesAreSmall(Format format) {
  return IsPacked(format) && format != Format::kCodebook;
}

// The position of each value of a unit of floats, for weights with codes of 8
// bits and of 4 bits.
struct FloatPositions {
  uint8_t of[2][kUnit];

  constexpr FloatPositions() : of{} {
    for (int is_packed = 0; is_packed < 2; ++is_packed) {
      const int pairs = is_packed ? 4 : 2;  // bf16 vectors of a vector
      for (int v = 0; v < kUnit; ++v) {
        const int word = WordOf(is_packed ? Order::kNibble : Order::kByte, v);
        const int part = word % 2 * pairs + word / 32 % pairs;
        const int vector = word / 32 / pairs;
        of[is_packed][v] = static_cast<uint8_t>(
            (vector * 2 * pairs + part) * 16 + word % 32 / 2);
      }
    }
  }
};
constexpr FloatPositions kFloatPositions;

// Stores rows of floats, or of values times their scales, in the order in which
// codes are decoded.
struct FloatRows {
  const uint8_t* position;
  uint32_t too_large;

  explicit FloatRows(Format weights)
      : position(kFloatPositions.of[IsPacked(weights)]),
        too_large((127u + (MagnitudesAreSmall(weights) ? 38 : 25)) << 23) {}

  // Returns false if a float is out of range and not 0, NaN or Inf.
  bool Pack(const Operand& x, int64_t row, int64_t padded, float* out) const {
    constexpr uint32_t kLeast = (127 - 87) << 23;
    constexpr float kFactor = 1 << kFloatShift;
    uint32_t outside = 0;
    for (int64_t k0 = 0; k0 < padded; k0 += kUnit) {
      float natural[kUnit] = {};
      const int64_t count = Max(Min(kUnit, x.k - k0), 0);
      DecodeValues(x, RowValues(x, row), k0, count, natural);
      ApplyScale(x, row, k0, count, natural);
      for (int i = 0; i < kUnit; ++i) {
        const uint32_t magnitude = AsBits(natural[i]) & kMagnitude;
        outside |= (magnitude - 1 < kLeast - 1) |
                   ((magnitude >= too_large) & (magnitude < kInfinity));
        natural[i] *= kFactor;
      }
      for (int i = 0; i < kUnit; ++i) out[k0 + position[i]] = natural[i];
    }
    return outside == 0;
  }
};

// Distances in bytes from which codes and scales are prefetched.
struct FewRowsDistance {
  int64_t codes, scales;
};

// The sums of a weight row and each of kRows rows.
template <int kRows>
struct FewRowsTotals {
  __m512 total[kRows], rest[kRows];

  JAXPLUGIN_ALWAYS_INLINE void Clear() {
    for (int r = 0; r < kRows; ++r) total[r] = rest[r] = _mm512_setzero_ps();
  }
};

// Whether a row has at most two steps. The plain sum of two is rounded once, as
// their exact sum would be.
template <int kBlock, typename Spread>
JAXPLUGIN_ALWAYS_INLINE bool IsShort(const Operand& weights) {
  return weights.k <= 2 * Spread::kCount * kBlock;
}

// Adds the dots of weight row w + j and each row of x over values [k0, k1) to
// the lanes of sums[j], for j < kWeights. k0 is a multiple of a step. In
// addition to the roundings of a step there are 4 in the sum of the lanes and 1
// in the total: at most 16 (see sums.inl).
template <Format kFormat, Factors kFactors, int kBlock, int kRows, int kWeights,
          typename Spread>
JAXPLUGIN_ALWAYS_INLINE void FewRowsSums(const Unpacker& weights, int64_t w,
                                         int64_t k0, int64_t k1,
                                         const Tables& tables,
                                         const Spread& scales, const uint8_t* x,
                                         int64_t x_row_bytes,
                                         FewRowsDistance ahead,
                                         const FewRowsOffsets& offsets,
                                         FewRowsTotals<kRows>* sums) {
  constexpr int64_t kStep = Spread::kCount * kBlock;  // values
  constexpr int64_t kStepBytes = BytesOf(kFormat, kStep);
  constexpr int kVectors = kStepBytes / 64;
  constexpr int kFactorBytes = FewRowsCodes<kFormat, kFactors>::kFactorBytes;
  const Operand& operand = weights.x;
  const uint8_t* values = RowValues(operand, w) + BytesOf(kFormat, k0);
  x += k0 * kFactorBytes;
  typename Spread::Some some[kWeights];
  FewRowsTotals<kRows> totals[kWeights];
  __m512 sum[kWeights][kRows];
  for (int i = 0; i < kWeights; ++i) totals[i] = sums[i];
  const bool is_short = IsShort<kBlock, Spread>(operand);
  const auto start_step = [&] {
    const int64_t column =
        operand.block > kBlock ? k0 / operand.block : k0 / kBlock;
    for (int i = 0; i < kWeights; ++i) {
      const uint8_t* scale = ScaleAt(operand, w + i, column);
      _mm_prefetch(reinterpret_cast<const char*>(scale + ahead.scales),
                   _MM_HINT_T1);
      some[i] = scales.Load(scale, operand.scale_cols - column);
      if constexpr (kFactors == Factors::kBF16 && Spread::kCount == 16) {
        scales.template Start<kRows>(operand, w + i, k0, column,
                                     some[i].scales, offsets, sum[i]);
      } else {
        for (int r = 0; r < kRows; ++r) sum[i][r] = _mm512_setzero_ps();
      }
    }
  };
  // The sums of one row are added to its totals after the next step's products.
  // They are ready then, and the additions do not wait in the scheduler: MXFP4
  // and INT4_32 are 1.04x faster (4096 x 4096, one Zen 4 core, 2026-11). Four
  // rows of MXFP4 would be 1.1x slower.
  constexpr bool kIsLate = kRows == 1 && kWeights == 1;
  __m512 late = _mm512_setzero_ps();
  const auto add_sums = [&] {
    for (int i = 0; i < kWeights; ++i) {
      for (int r = 0; r < kRows; ++r) {
        const __m512 some = kIsLate ? late : sum[i][r];
        if (is_short) {
          totals[i].total[r] = _mm512_add_ps(totals[i].total[r], some);
        } else {
          AddExactly(some, &totals[i].total[r], &totals[i].rest[r]);
        }
        late = sum[i][r];
      }
    }
  };
  for (; k0 + kStep <= k1; k0 += kStep) {
    start_step();
    FewRowsStep<kFormat, kFactors, kVectors, kRows, kWeights, true>(
        values, operand.row_bytes, ahead.codes, 0, scales, some, tables, x,
        x_row_bytes, sum);
    add_sums();
    values += kStepBytes;
    x += kStep * kFactorBytes;
  }
  if (k0 < k1) {
    start_step();
    FewRowsStep<kFormat, kFactors, kVectors, kRows, kWeights, false>(
        values, operand.row_bytes, ahead.codes,
        operand.row_bytes - BytesOf(kFormat, k0), scales, some, tables, x,
        x_row_bytes, sum);
    add_sums();
  }
  if constexpr (kIsLate) add_sums();
  for (int i = 0; i < kWeights; ++i) sums[i] = totals[i];
}

// FewRowsSums of two rows of weights in codes of 8 bits and of floats, with the
// same bits. Uses FewRowsFoldStep, except for steps with NaN or Inf and for the
// tail. 4 rows of f32 and MXFP8 are 1.1x faster (4096 x 4096, one Zen 4 core,
// 2026-11).
template <int kRows, typename Spread>
JAXPLUGIN_ALWAYS_INLINE void FewRowsFoldSums(const Unpacker& weights, int64_t w,
                                             int64_t k0, int64_t k1,
                                             const Tables& tables,
                                             const Spread& scales,
                                             const uint8_t* x,
                                             int64_t x_row_bytes,
                                             FewRowsDistance ahead,
                                             const FewRowsOffsets& offsets,
                                             FewRowsTotals<kRows>* sums) {
  const Operand& operand = weights.x;
  const Tables fold = weights.fold_bytes.Load();
  const __m512i sign = FoldSign(operand.format);
  for (; k0 < k1; k0 += 512) {
    const int64_t column = k0 / operand.block;
    __m512 numbers[2], sum[2][kRows];
    bool is_folded = k0 + 512 <= k1;
    for (int i = 0; i < 2; ++i) {
      const uint8_t* scale = ScaleAt(operand, w + i, column);
      _mm_prefetch(reinterpret_cast<const char*>(scale + ahead.scales),
                   _MM_HINT_T1);
      const __m512 some =
          scales.Load(scale, operand.scale_cols - column).scales;
      is_folded &= !HasNan(some);
      numbers[i] = _mm512_castsi512_ps(FoldNumbers(some));
    }
    if (!is_folded ||
        !FewRowsFoldStep<kRows>(RowValues(operand, w) + k0, operand.row_bytes,
                                ahead.codes, numbers, weights.index, fold, sign,
                                x + k0 * 4, x_row_bytes, sum)) {
      FewRowsSums<Format::kE4M3, Factors::kF32, 32, kRows, 2>(
          weights, w, k0, Min(k0 + 512, k1), tables, scales, x, x_row_bytes,
          ahead, offsets, sums);
      continue;
    }
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < kRows; ++r) {
        AddExactly(sum[i][r], &sums[i].total[r], &sums[i].rest[r]);
      }
    }
  }
}

// Adds the 16 lanes of each vector, in the order of _mm512_reduce_add_ps. The
// first four lanes of the result are the four sums. Four at a time make 1 x 512
// x 1536 in MXFP4 1.3x faster (one Zen 5 core, 2026-11).
JAXPLUGIN_ALWAYS_INLINE __m512 AddLanes(__m512 a, __m512 b, __m512 c,
                                        __m512 d) {
  const auto add = [](__m512i x, __m512i y) {
    return _mm512_castps_si512(
        _mm512_add_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y)));
  };
  const auto add_halves = [&](__m512 x, __m512 y) {
    const __m512i low = _mm512_castps_si512(x), high = _mm512_castps_si512(y);
    return add(_mm512_shuffle_i32x4(low, high, 0x44),
               _mm512_shuffle_i32x4(low, high, 0xee));
  };
  const __m512i ab = add_halves(a, b), cd = add_halves(c, d);
  // Each quarter has four sums of the same vector.
  const __m512i four = add(_mm512_shuffle_i32x4(ab, cd, 0x88),
                           _mm512_shuffle_i32x4(ab, cd, 0xdd));
  const __m512i two = add(four, _mm512_unpackhi_epi64(four, four));
  const __m512i pairs = _mm512_unpacklo_epi32(two, two);
  const __m512i one = add(pairs, _mm512_unpackhi_epi64(pairs, pairs));
  alignas(64) static constexpr int32_t kQuarters[16] = {0, 4, 8, 12};
  return _mm512_permutexvar_ps(_mm512_load_si512(kQuarters),
                               _mm512_castsi512_ps(one));
}

// The size of L1. The rows of a pass should fit.
constexpr int64_t kFirstCacheBytes = int64_t{32} << 10;
// If they do not fit, this many of their values are multiplied with this many
// weight rows of 8 bits before the next values. With weights of 4 bits, 3 rows
// would take 1.07 times as long.
constexpr int64_t kSharedValues = 1024;
constexpr int64_t kSharedWeights = 8;

// Returns the number by which the lanes of sums are multiplied.
template <Factors kFactors>
JAXPLUGIN_ALWAYS_INLINE float FewRowsUnit(const Operand& weights) {
  return PowerOf(-weights.fraction_bits -
                 (kFactors == Factors::kF32 ? kFloatShift : 0));
}

// Stores the sums of up to four weight rows: c[r * ldc + j].
template <int kRows>
JAXPLUGIN_ALWAYS_INLINE void StoreSums(const __m512 (*sums)[kRows],
                                       int64_t count, float unit, float* c,
                                       int64_t ldc) {
  if (count >= 4) {
    for (int r = 0; r < kRows; ++r) {
      const __m512 four = _mm512_mul_ps(
          AddLanes(sums[0][r], sums[1][r], sums[2][r], sums[3][r]),
          _mm512_set1_ps(unit));
      __builtin_memcpy(c + r * ldc, &four, 16);
    }
    return;
  }
  for (int64_t j = 0; j < count; ++j) {
    for (int r = 0; r < kRows; ++r) {
      c[r * ldc + j] = _mm512_reduce_add_ps(sums[j][r]) * unit;
    }
  }
}

// As FewRowsStrip, for rows that do not fit in L1. Two weight rows share each
// load of a row's values. 3 and 4 rows of bf16 against MXFP8 at 4096 x 8192 are
// 1.45x faster than without pieces of k (one Zen 5 core, 2026-11).
template <Format kFormat, Factors kFactors, int kBlock, Scales kScales,
          int kRows>
__attribute__((noinline)) void FewRowsShared(const Unpacker& weights,
                                             int64_t w0, int64_t count,
                                             const uint8_t* x,
                                             int64_t x_row_bytes,
                                             const FewRowsOffsets& offsets,
                                             float* c, int64_t ldc) {
  const Operand& operand = weights.x;
  const Tables tables = weights.table_bytes.Load();
  const FewRowsScales<kScales> scales(weights);
  const int64_t piece = IsPacked(kFormat) ? operand.k : kSharedValues;
  const FewRowsDistance ahead =
      IsPacked(kFormat)
          ? FewRowsDistance{FewRowsAhead(kRows), kScalesAhead}
          : FewRowsDistance{kSharedWeights * operand.row_bytes,
                            kSharedWeights * operand.scale_cols *
                                ScaleSize(operand.scale_kind)};
  for (int64_t w = 0; w < count; w += kSharedWeights) {
    const int64_t group = Min(kSharedWeights, count - w);
    FewRowsTotals<kRows> totals[kSharedWeights];
    for (int64_t j = 0; j < group; ++j) totals[j].Clear();
    for (int64_t k0 = 0; k0 < operand.k; k0 += piece) {
      const int64_t k1 = Min(k0 + piece, operand.k);
      int64_t j = 0;
      for (; j + 2 <= group; j += 2) {
        if constexpr (kFormat == Format::kE4M3 && kFactors == Factors::kF32 &&
                      kBlock == 32) {
          if (operand.scale_kind == ScaleKind::kE8M0) {
            FewRowsFoldSums<kRows>(weights, w0 + w + j, k0, k1, tables, scales,
                                   x, x_row_bytes, ahead, offsets, totals + j);
            continue;
          }
        }
        FewRowsSums<kFormat, kFactors, kBlock, kRows, 2>(
            weights, w0 + w + j, k0, k1, tables, scales, x, x_row_bytes, ahead,
            offsets, totals + j);
      }
      if (j < group) {
        FewRowsSums<kFormat, kFactors, kBlock, kRows, 1>(
            weights, w0 + w + j, k0, k1, tables, scales, x, x_row_bytes, ahead,
            offsets, totals + j);
      }
    }
    __m512 sums[kSharedWeights][kRows];
    for (int64_t j = 0; j < group; ++j) {
      for (int r = 0; r < kRows; ++r) {
        sums[j][r] = TotalOf(totals[j].total[r], totals[j].rest[r]);
      }
    }
    for (int64_t j = 0; j < group; j += 4) {
      StoreSums<kRows>(sums + j, group - j, FewRowsUnit<kFactors>(operand),
                       c + w + j, ldc);
    }
  }
}

// Computes the dots of weight rows [w0, w0 + count) and kRows rows. A thread
// reads one weight row at a time: two at a time take up to 1.25 times as long,
// and four 1.9 times. FewRowsShared multiplies rows that do not fit in L1.
template <Format kFormat, Factors kFactors, int kBlock, Scales kScales,
          int kRows>
void FewRowsStrip(const Unpacker& weights, int64_t w0, int64_t count,
                  const uint8_t* x, int64_t x_row_bytes,
                  const FewRowsOffsets& offsets, float* c, int64_t ldc) {
  if (kRows > 2 && kRows * x_row_bytes > kFirstCacheBytes) {
    return FewRowsShared<kFormat, kFactors, kBlock, kScales, kRows>(
        weights, w0, count, x, x_row_bytes, offsets, c, ldc);
  }
  // Loaded before the loops: the compiler would load the tables again in the
  // loops, because stores of results might overwrite them.
  const Tables tables = weights.table_bytes.Load();
  const FewRowsScales<kScales> scales(weights);
  __m512 sums[4][kRows];
  for (int64_t w = 0; w < count; w += 4) {
    const int64_t group = Min(4, count - w);
    for (int64_t j = 0; j < group; ++j) {
      FewRowsTotals<kRows> totals;
      totals.Clear();
      FewRowsSums<kFormat, kFactors, kBlock, kRows, 1>(
          weights, w0 + w + j, 0, weights.x.k, tables, scales, x, x_row_bytes,
          {FewRowsAhead(kRows), kScalesAhead}, offsets, &totals);
      for (int r = 0; r < kRows; ++r) {
        sums[j][r] = TotalOf(totals.total[r], totals.rest[r]);
      }
    }
    StoreSums<kRows>(sums, group, FewRowsUnit<kFactors>(weights.x), c + w, ldc);
  }
}

using FewRowsFunction = void (*)(const Unpacker&, int64_t, int64_t,
                                 const uint8_t*, int64_t, const FewRowsOffsets&,
                                 float*, int64_t);

template <Format kFormat, Factors kFactors, int kBlock,
          Scales kScales = Scales::kAny>
FewRowsFunction FewRowsOf(int64_t rows) {
  constexpr FewRowsFunction kFunctions[kFewRowsMax] = {
      FewRowsStrip<kFormat, kFactors, kBlock, kScales, 1>,
      FewRowsStrip<kFormat, kFactors, kBlock, kScales, 2>,
      FewRowsStrip<kFormat, kFactors, kBlock, kScales, 3>,
      FewRowsStrip<kFormat, kFactors, kBlock, kScales, 4>};
  return kFunctions[rows - 1];
}

// Returns the function of weights with blocks of 16 values, or of more.
template <Format kFormat, Factors kFactors>
FewRowsFunction FewRowsOf(const Operand& weights, int64_t rows) {
  if constexpr (kFormat != Format::kE4M3) {
    if (weights.block == 32 && weights.scale_kind == ScaleKind::kF16) {
      if (weights.offset == nullptr) {
        return FewRowsOf<kFormat, kFactors, 32, Scales::kF16>(rows);
      }
      if constexpr (kFactors == Factors::kBF16) {
        if (weights.offset_kind == OffsetKind::kF16) {
          return FewRowsOf<kFormat, kFactors, 32, Scales::kF16Minima>(rows);
        }
      }
    }
  }
  if (weights.block != 16) return FewRowsOf<kFormat, kFactors, 32>(rows);
  if constexpr (IsPacked(kFormat)) {
    if (weights.format == Format::kE2M1 &&
        weights.scale_kind == ScaleKind::kE4M3) {
      return FewRowsOf<kFormat, kFactors, 16, Scales::kE4M3>(rows);
    }
  }
  return FewRowsOf<kFormat, kFactors, 16>(rows);
}

FewRowsFunction ChooseFewRows(const Operand& weights, Factors factors,
                              int64_t rows) {
  switch (FewRowsFormat(weights.format)) {
    case Format::kE2M1:
      return factors == Factors::kF32
                 ? FewRowsOf<Format::kE2M1, Factors::kF32>(weights, rows)
                 : FewRowsOf<Format::kE2M1, Factors::kBF16>(weights, rows);
    case Format::kInt8:
      return factors == Factors::kF32
                 ? FewRowsOf<Format::kInt8, Factors::kF32>(weights, rows)
                 : FewRowsOf<Format::kInt8, Factors::kBF16>(weights, rows);
    default:
      return factors == Factors::kF32
                 ? FewRowsOf<Format::kE4M3, Factors::kF32>(weights, rows)
                 : FewRowsOf<Format::kE4M3, Factors::kBF16>(weights, rows);
  }
}

// The dot of few rows (the panel side) and quantized weights (the strip side).
// pack_row(row, out) writes a row's x_row_bytes. If it returns false for a row,
// nothing is written to the result and *is_done stays false.
// multiply(r, rows, w0, count, x, c, ldc) computes the dots of up to kFewRowsMax
// packed rows from r on and of weight rows [w0, w0 + count): c[i * ldc + j].
template <typename PackRow, typename Multiply>
bool StreamWeights(const DotArgs& args, const Sides& sides, int64_t x_row_bytes,
                   const Parallel& parallel, const PackRow& pack_row,
                   const Multiply& multiply, bool* is_done) {
  const Operand& x = *sides.panel;
  const int64_t rows = sides.panel_rows;
  const int64_t x_rows = args.batch * rows;
  const int64_t chunk = StreamedRows(sides, parallel);
  const int64_t chunks = CeilDiv(sides.strip_rows, chunk);
  const int64_t pass = PassRows(sides, kFewRowsMax);

  const int64_t x_bytes = RoundUp(x_rows * x_row_bytes, 64);
  const int64_t flag_bytes = RoundUp(x_rows, 64);
  const int64_t part_floats = args.quantized == nullptr ? 0 : chunk * rows;
  const int64_t slot_bytes =
      RoundUp((chunk * rows + rows + part_floats) * 4, 64);
  Scratch scratch(x_bytes + flag_bytes + slot_bytes * parallel.threads);
  uint8_t* packed = scratch.get();
  if (packed == nullptr) return false;
  uint8_t* unsafe = packed + x_bytes;
  uint8_t* slots = unsafe + flag_bytes;

  const Parallel serial{1, nullptr, nullptr};
  const int64_t x_groups = Max(1, (int64_t{1} << 16) / Max(args.k, 1));
  const bool x_is_small = x_rows * args.k <= (1 << 17);
  uint32_t outside = 0;
  const bool ok = ParallelFor(
      x_is_small ? serial : parallel, CeilDiv(x_rows, x_groups),
      [&](int64_t index, int) {
        const int64_t end = Min(x_rows, (index + 1) * x_groups);
        for (int64_t r = index * x_groups; r < end; ++r) {
          if (!pack_row(r, packed + r * x_row_bytes)) {
            __atomic_store_n(&outside, 1, __ATOMIC_RELAXED);
          }
          unsafe[r] = !RowIsSafe(x, r);
        }
      });
  if (!ok || outside != 0) return ok;
  *is_done = true;
  return ParallelForInParts(
      parallel, args.batch * chunks, [&](int64_t index, int slot) {
        const int64_t batch = index / chunks;
        const int64_t j0 = index % chunks * chunk;
        const int64_t count = Min(chunk, sides.strip_rows - j0);
        const int64_t w0 = batch * sides.strip_rows + j0;
        if (GaveUp(args)) return;
        float* c = reinterpret_cast<float*>(slots + slot * slot_bytes);
        const uint8_t* x_rows_packed = packed + batch * rows * x_row_bytes;
        for (int64_t r = 0; r < rows; r += pass) {
          multiply(batch * rows + r, Min(pass, rows - r), w0, count,
                   x_rows_packed + r * x_row_bytes, c + r * chunk, chunk);
        }
        // The task is a panel of `rows` rows and a strip of `count` rows.
        float* line = c + chunk * rows;
        const ResultPart part =
            sides.PartOf(batch, 0, rows, j0, count, line + rows);
        StoreTile(sides, batch, 0, rows, j0, count, c, chunk,
                  unsafe + batch * rows, line, part);
        part.Store(args);
      });
}

// If `factors` is kF32 and a float of the rows is too large or too small, it
// writes nothing and *is_done stays false. Adds the offsets of the weights if
// the args have block sums; `factors` is then kBF16.
bool FewRowsDot(const DotArgs& args, const Sides& sides, Factors factors,
                const Parallel& parallel, bool* is_done) {
  const Operand& x = *sides.panel;
  // Padded to 512 values, a step of FewRowsSums.
  const int64_t x_padded = Max(RoundUp(args.k, 512), 512);
  const int64_t x_row_bytes = x_padded * (factors == Factors::kF32 ? 4 : 2);
  const EngineBF16 engine(sides);
  const FloatRows floats(sides.strip->format);
  const FewRowsOffsets offsets(args);
  return StreamWeights(
      args, sides, x_row_bytes, parallel,
      [&](int64_t r, uint8_t* row) {
        if (factors == Factors::kF32) {
          return floats.Pack(x, r, x_padded, reinterpret_cast<float*>(row));
        }
        const int64_t bytes = CeilDiv(x.k, kUnit) * kUnitBytes;
        engine.PackRow(r, row, 1, 0);
        __builtin_memset(row + bytes, 0, x_row_bytes - bytes);
        return true;
      },
      [&](int64_t r, int64_t rows, int64_t w0, int64_t count,
          const uint8_t* packed, float* c, int64_t ldc) {
        FewRowsOffsets some = offsets;
        if (some.sums != nullptr) some.sums += r * some.stride;
        ChooseFewRows(*sides.strip, factors, rows)(
            engine.strip_unpacker, w0, count, packed, x_row_bytes, some, c,
            ldc);
      },
      is_done);
}
