// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot of a few rows (decoding a token) with AVX2. It is bound by reading
// the other operand, the "weights", once. Their codes are converted to float32
// in registers and multiplied with the few rows. The few rows are stored in the
// order in which codes are cheapest to expand. The scale multiplies the sum of
// a block.
//
// Two operands of E2M1, int4 or int8 are multiplied as integers instead. Twice an
// E2M1 value is an integer from -12 to 12, and vpmaddubsw adds pairs of products
// of bytes, which is exact. int8 weights are extended to words for vpmaddwd.

constexpr int kFewRowsMax = 4;  // rows of a pass; their sums are in registers
// Weight rows whose lanes are added together.
constexpr int64_t kTotaled = 4;
// Values of a row whose scales are decoded together.
constexpr int64_t kFewRowsChunk = kUnpackMax;
constexpr int64_t kScalesPerChunk = kFewRowsChunk / 16;
// The prefetch distance in values. It covers the latency of memory.
constexpr int64_t kPrefetchValues = 4096;

// The operands, and the layout of the few rows in scratch memory: groups,
// padded with zeros.
struct FewRowsProblem {
  const Operand& x;
  const Operand& weights;
  bool is_integer;  // both operands are E2M1, int4 or int8
  // Codes with one byte per value expand to the value times 2^-ValueShift. The
  // few rows are multiplied by 2^row_shift, and the weights' scales by the
  // rest. So nothing overflows, and no product is a subnormal that loses bits.
  // Floats have a larger row_shift than quantized rows, because their range is
  // checked.
  int row_shift;
  int64_t groups;  // groups of a row

  FewRowsProblem(const Operand& rows, const Operand& other)
      : x(rows), weights(other) {
    is_integer = AreBytes(ShapeOf(x), ShapeOf(weights)) &&
                 PieceOf(x) >= PieceOf(weights);
    row_shift = ValueShift(weights.format) <= 0 ? 0
                : IsPlain(x.format)             ? 90
                                                : 60;
    groups = Max(CeilDiv(x.k, GroupValues(weights.format)), 1);
  }
  int ScaleShift() const {
    return is_integer ? UnitExponent(weights)
                      : ValueShift(weights.format) - row_shift -
                            weights.fraction_bits;
  }
  // The layout of integer rows is [group][IntegerBytes], then a scale for each
  // piece of the weights. A group is [32 even bytes, 32 odd bytes, 16 words of
  // corrections], or for int8 weights [16 even words, 16 odd words].
  static constexpr int64_t IntegerBytes(Format weights) {
    return IsPacked(weights) ? 96 : 64;
  }
  int64_t ScalesOffset() const { return groups * IntegerBytes(weights.format); }
  int64_t Pieces() const {
    return groups * (GroupValues(weights.format) / PieceOf(weights));
  }
  // The number of weight rows whose scales are decoded together. Integer rows
  // repeat their scales for each of them. Over one weight row at a time, rows in
  // int8 and f32, one Zen 3 core (2026-11):
  //   1 row          k = 576   1536   4096
  //   INT4_32           0.68   0.93   1.00
  //   INT8_32           0.77   1.02   1.06
  //   f32 x MXFP4       0.79   0.93   1.00
  //   f32 x MXFP8       0.78   0.93   0.99
  //   NVFP4 pair        0.69   1.03   1.02
  int64_t ScaledTogether() const {
    const int64_t rows = kScalesPerChunk / Pieces();
    return rows >= kTotaled ? rows / kTotaled * kTotaled : 1;
  }
  int64_t RowBytes() const {
    if (!is_integer) return groups * GroupValues(weights.format) * 4;
    return ScalesOffset() + RoundUp(ScaledTogether() * Pieces() * 4, 32);
  }

  // Writes a row to `out`. Returns false if a float is outside the range that
  // row_shift allows.
  bool Prepare(int64_t row, uint8_t* out) const {
    if (is_integer) {
      PrepareIntegers(row, out);
      return true;
    }
    return PrepareFloats(row, reinterpret_cast<float*>(out));
  }

  bool PrepareFloats(int64_t row, float* out) const {
    const int64_t group = GroupValues(weights.format);
    const int pairs = GroupPairs(weights.format);
    const float factor = AsFloat(static_cast<uint32_t>(127 + row_shift) << 23);
    uint8_t index[64];
    for (int p = 0, at = 0; p < pairs; ++p) {
      for (int half = 0; half < 2; ++half) {
        for (int lane = 0; lane < 8; ++lane, ++at) {
          index[at] = static_cast<uint8_t>(
              ExpandedIndex(weights.format, p, half, lane));
        }
      }
    }
    uint32_t outside = 0;
    for (int64_t k0 = 0; k0 < groups * group; k0 += kFewRowsChunk) {
      float natural[kFewRowsChunk];
      const int64_t count = Max(Min(kFewRowsChunk, x.k - k0), 0);
      const int64_t padded = Min(kFewRowsChunk, groups * group - k0);
      UnpackRun(x, row, k0, count, Order::kNatural, 0, natural);
      for (int64_t i = count; i < padded; ++i) natural[i] = 0;
      for (int64_t i = 0; i < padded; ++i) {
        // The range is 2^-87 to 2^32; 0, Inf and NaN are allowed too.
        const uint32_t magnitude = AsBits(natural[i]) & kMagnitude;
        outside |= (magnitude - 1 < (40u << 23) - 1) |
                   ((magnitude > (159u << 23)) & (magnitude < kInfinity));
        natural[i] *= factor;
      }
      for (int64_t g = 0; g < padded; g += group) {
        for (int i = 0; i < group; ++i) out[k0 + g + i] = natural[g + index[i]];
      }
    }
    return !IsPlain(x.format) || weights.format == Format::kE2M1 ||
           outside == 0;
  }

  void PrepareIntegers(int64_t row, uint8_t* out) const {
    const NibbleTables tables(x.format, x.codebook);
    const __m256i ones = _mm256_set1_epi8(1);
    const __m256i bias =
        _mm256_set1_epi16(static_cast<short>(-Bias(weights.format)));
    for (int64_t g = 0; g < groups; ++g) {
      __m256i bytes[2];
      ReadIntegers(x, row, g * GroupValues(weights.format), tables, bytes);
      __m256i* at = reinterpret_cast<__m256i*>(
          out + IntegerBytes(weights.format) * g);
      if (!IsPacked(weights.format)) {
        for (int odd = 0; odd < 2; ++odd) {
          _mm256_store_si256(
              at + odd,
              _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes[odd])));
        }
        continue;
      }
      // The weights' bytes are biased, so that they are unsigned.
      const __m256i sums =
          _mm256_add_epi16(_mm256_maddubs_epi16(ones, bytes[0]),
                           _mm256_maddubs_epi16(ones, bytes[1]));
      _mm256_store_si256(at, bytes[0]);
      _mm256_store_si256(at + 1, bytes[1]);
      _mm256_store_si256(at + 2, _mm256_mullo_epi16(sums, bias));
    }
    float* scale = reinterpret_cast<float*>(out + ScalesOffset());
    const int64_t columns = Pieces();
    const int64_t per_scale = PieceOf(x) / PieceOf(weights);
    for (int64_t i = 0; i < columns; i += per_scale) {
      const int64_t column = i / per_scale;
      float s = 0;
      if (column < PiecesOf(x)) {
        DecodeScales(x, row, column, 1, UnitExponent(x), &s);
      }
      for (int64_t j = i; j < Min(i + per_scale, columns); ++j) scale[j] = s;
    }
    for (int64_t i = columns; i < ScaledTogether() * columns; ++i) {
      scale[i] = scale[i - columns];
    }
  }
};

// Multiplies a group of a weight row with kRows rows. `scale` has the scales of
// the group's blocks.
template <Format kFormat, int kBlock, int kRows>
struct FloatGroup {
  static constexpr int kScales = GroupValues(kFormat) / kBlock;
  // E2M1 with blocks of 16 has two sections of pairs. Section s has block s in
  // the lower half of its vectors and block s + 2 in the upper half.
  static constexpr int kSections = kScales == 4 ? 2 : 1;
  static constexpr int kPairs = GroupPairs(kFormat) / kSections;
  // The products of a block are added in two chains if the registers suffice,
  // which makes one row of MXFP4 1.1x faster. Two sections are two chains.
  static constexpr int kChains =
      IsPacked(kFormat) && kSections == 1 && kRows <= 2 ? 2 : 1;
  // Roundings of a product in the sum of its block.
  static constexpr int kRoundings = 2 * kPairs / kChains + kChains - 1;

  JAXPLUGIN_ALWAYS_INLINE static void Add(__m256i codes,
                                          const NibbleTables& tables,
                                          const uint8_t* x, int64_t x_row_bytes,
                                          const float* scale, int64_t,
                                          __m256* sum) {
    constexpr int kHigh = kScales / 2;  // offset of the upper half's block
    const Expanded<kFormat> group(codes, tables);
#pragma GCC unroll 2
    for (int s = 0; s < kSections; ++s) {
      __m256 block[kRows], chain[kRows];
#pragma GCC unroll 4
      for (int q = 0; q < kPairs; ++q) {
        const int p = s * kPairs + q;
        __m256 values[2];
        group.Pair(p, values);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const __m256 row = _mm256_load_ps(
                reinterpret_cast<const float*>(x + r * x_row_bytes) + 16 * p +
                8 * half);
            __m256& sums = half < kChains - 1 ? chain[r] : block[r];
            sums = q == 0 && (half == 0 || kChains > 1)
                       ? _mm256_mul_ps(values[half], row)
                       : _mm256_fmadd_ps(values[half], row, sums);
          }
        }
      }
      const __m256 spread = kScales == 1
                                ? _mm256_broadcast_ss(scale)
                                : SpreadTwo(scale + s, scale + s + kHigh);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        if (kChains > 1) block[r] = _mm256_add_ps(block[r], chain[r]);
        sum[r] = _mm256_fmadd_ps(block[r], spread, sum[r]);
      }
    }
  }
};

// The same for integers. `scale` has products of the scales of both sides; those
// of the next row are `scale_row` floats further.
template <Format kFormat, int kBlock, int kRows>
struct IntegerGroup {
  JAXPLUGIN_ALWAYS_INLINE static void Add(__m256i codes,
                                          const NibbleTables& tables,
                                          const uint8_t* x, int64_t x_row_bytes,
                                          const float* scale,
                                          int64_t scale_row, __m256* sum) {
    if constexpr (IsPacked(kFormat)) {
      AddNibbles(codes, tables, x, x_row_bytes, scale, scale_row, sum);
    } else {
      AddBytes(codes, x, x_row_bytes, scale, scale_row, sum);
    }
  }

  JAXPLUGIN_ALWAYS_INLINE static void AddBytes(__m256i codes, const uint8_t* x,
                                               int64_t x_row_bytes,
                                               const float* scale,
                                               int64_t scale_row, __m256* sum) {
    const __m256i even =
        _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
    const __m256i odd = _mm256_srai_epi16(codes, 8);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i* row =
          reinterpret_cast<const __m256i*>(x + r * x_row_bytes);
      const __m256 block = _mm256_cvtepi32_ps(_mm256_add_epi32(
          _mm256_madd_epi16(even, _mm256_load_si256(row)),
          _mm256_madd_epi16(odd, _mm256_load_si256(row + 1))));
      const float* own = scale + r * scale_row;
      const __m256 spread = kBlock == 32 ? _mm256_broadcast_ss(own)
                                         : SpreadTwo(own);
      sum[r] = _mm256_fmadd_ps(block, spread, sum[r]);
    }
  }

  JAXPLUGIN_ALWAYS_INLINE static void AddNibbles(
      __m256i codes, const NibbleTables& tables, const uint8_t* x,
      int64_t x_row_bytes, const float* scale, int64_t scale_row,
      __m256* sum) {
    __m256i even, odd;
    if constexpr (kFormat == Format::kInt4) {
      // A code plus Bias is the code with its sign flipped.
      const __m256i flipped = _mm256_xor_si256(codes, _mm256_set1_epi8(-0x78));
      even = LowNibbles(flipped);
      odd = HighNibbles(flipped);
    } else {
      even = _mm256_shuffle_epi8(tables.biased, LowNibbles(codes));
      odd = _mm256_shuffle_epi8(tables.biased, HighNibbles(codes));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i* row =
          reinterpret_cast<const __m256i*>(x + r * x_row_bytes);
      const __m256i words = _mm256_add_epi16(
          _mm256_add_epi16(_mm256_maddubs_epi16(even, _mm256_load_si256(row)),
                           _mm256_load_si256(row + 2)),
          _mm256_maddubs_epi16(odd, _mm256_load_si256(row + 1)));
      const __m256 block = _mm256_cvtepi32_ps(
          _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
      const float* own = scale + r * scale_row;
      // A lane sums 8 products.
      const __m256 spread =
          kBlock == 32
              ? SpreadTwo(own)
              : _mm256_permutevar8x32_ps(
                    _mm256_castps128_ps256(_mm_loadu_ps(own)),
                    _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
      sum[r] = _mm256_fmadd_ps(block, spread, sum[r]);
    }
  }
};

// The scales of a chunk of a weight row: [block], or for integers [row of x]
// [block]. The 8 extra floats are for loads of four that begin at the last
// ones.
template <int kScaleRows>
using ChunkScales = float[kScaleRows][kScalesPerChunk + 8];

// Decodes the scales of pieces [c0, c0 + count) of weight rows [row, row +
// some); past the end they are 0. For integers, multiplies them with the scales
// of the rows x.
template <int kScaleRows, bool kIntegers>
__attribute__((noinline)) void ReadScales(
    const FewRowsProblem& rows, int64_t row, int64_t some, const uint8_t* x,
    int64_t c0, int64_t count, ChunkScales<kScaleRows>& scale) {
  float* own = scale[0];
  const Operand& weights = rows.weights;
  const int64_t all = some * count;
  if (count == weights.scale_cols && weights.block <= 32 &&
      weights.scale_shift == 0) {
    DecodeScales(weights, row, 0, all, rows.ScaleShift(), own);
  } else {
    const int64_t present = Max(Min(count, PiecesOf(weights) - c0), 0);
    for (int64_t i = 0; i < some; ++i) {
      DecodeScales(weights, row + i, c0, present, rows.ScaleShift(),
                   own + i * count);
      for (int64_t j = present; j < count; ++j) own[i * count + j] = 0;
    }
  }
  // The first row's product comes last, because it overwrites its operand.
  for (int r = kScaleRows - 1; kIntegers && r >= 0; --r) {
    const float* theirs =
        reinterpret_cast<const float*>(x + r * rows.RowBytes() +
                                       rows.ScalesOffset()) +
        c0;
    for (int64_t i = 0; i < all; ++i) scale[r][i] = own[i] * theirs[i];
  }
}

// Multiplies one weight row with kRows rows. A thread reads one weight row at a
// time, because reading 2 or 4 rows at a time takes 1.3 times as long.
template <Format kFormat, int kBlock, int kRows, bool kIntegers>
struct FewRowsSums {
  using FloatStep = FloatGroup<InRegister(kFormat), kBlock, kRows>;
  using IntegerStep = IntegerGroup<kFormat, kBlock, kRows>;
  static constexpr int kScales = FloatStep::kScales;  // scales of a group
  static constexpr int kScaleRows = kIntegers ? kRows : 1;
  static constexpr int64_t kChunkGroups = kFewRowsChunk / kBlock / kScales;
  // Consecutive groups are added to kSums accumulators in turn. After
  // kSumGroups groups each, the accumulators are added to the total. A product
  // has at most 16 roundings (see sums.inl): those in its block, one for each
  // section in its accumulator, log2(kSums) in the sum of the accumulators, 3 in
  // the sum of the lanes, and 1 in the total. A product of a value and a wide
  // scale, or of a codebook's value and any scale, is rounded, too (GroupsOfSum).
  static constexpr int kSums = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;
  static constexpr int kOtherRoundings =
      (kIntegers ? 0 : FloatStep::kRoundings) + kSums / 2 + 4;
  static constexpr int64_t kSumGroups =
      (16 - kOtherRoundings) / (kIntegers ? 1 : FloatStep::kSections);
  static constexpr int64_t kTurn = kSums == 1 ? 2 : kSums;
  static constexpr int64_t kXBytes =
      kIntegers ? FewRowsProblem::IntegerBytes(kFormat)
                : GroupValues(kFormat) * 4;  // bytes of x in a group
  static constexpr int64_t kPrefetchBytes =
      kPrefetchValues * kGroupBytes / GroupValues(kFormat);
  // For one or two rows of floats the weights are prefetched into L2, because
  // the rows leave too little room in L1. 1 x 8192 x 8192 in MXFP8 takes 3.0 ms
  // instead of 3.9 ms. More rows are read from L2 themselves. With them,
  // prefetching into L2 would take 1.1 times as long (4 x 4096).
  static constexpr auto kPrefetchInto =
      !kIntegers && kRows <= 2 ? _MM_HINT_T1 : _MM_HINT_T0;

  __m256 total[kRows], rest[kRows];
  bool is_first = true;  // nothing has been added to the totals
  Largest largest;
  const NibbleTables tables;

  JAXPLUGIN_ALWAYS_INLINE explicit FewRowsSums(const Operand& weights)
      : tables(kFormat, weights.codebook) {}

  JAXPLUGIN_ALWAYS_INLINE void Add(const uint8_t* codes_at, const uint8_t* x,
                                   int64_t x_row_bytes, const float* scale,
                                   __m256* sum) {
    constexpr int64_t kStride = kScalesPerChunk + 8;
    const __m256i codes = LoadCodes<kFormat>(codes_at);
    if constexpr (kIntegers) {
      IntegerStep::Add(codes, tables, x, x_row_bytes, scale, kStride, sum);
    } else {
      if (FactsOf(kFormat).has_nan) largest.See(codes);
      FloatStep::Add(codes, tables, x, x_row_bytes, scale, kStride, sum);
    }
  }

  // Returns the groups that are added to the accumulators before these are added
  // to the total, a multiple of kTurn. It is one per accumulator less for each
  // operand with wide scales, except for weights that floats multiply: their
  // scales multiply the sum of a block and are rounded with it.
  static int64_t GroupsOfSum(const FewRowsProblem& rows) {
    const int wide =
        static_cast<int>(IsWide(rows.x.scale_kind) ||
                         rows.x.format == Format::kCodebook) +
        static_cast<int>(kIntegers && IsWide(rows.weights.scale_kind));
    return Max(kSums * (kSumGroups - wide) / kTurn, 1) * kTurn;
  }

  // Adds `count` groups to the totals.
  JAXPLUGIN_ALWAYS_INLINE void AddGroups(const uint8_t* codes, const uint8_t* x,
                                         int64_t x_row_bytes,
                                         const float* scale, int64_t count,
                                         int64_t most) {
    for (int64_t g0 = 0; g0 < count; g0 += most) {
      const int64_t some = Min(most, count - g0);
      __m256 sum[kSums][kRows];
      for (int i = 0; i < kSums; ++i) {
        for (int r = 0; r < kRows; ++r) sum[i][r] = _mm256_setzero_ps();
      }
      int64_t g = 0;
      for (; g + kTurn <= some; g += kTurn) {
#pragma GCC unroll 4
        for (int i = 0; i < kTurn; ++i) {
          if (i % 2 == 0) {  // once per cache line
            _mm_prefetch(reinterpret_cast<const char*>(
                             codes + i * kGroupBytes + kPrefetchBytes),
                         kPrefetchInto);
          }
          Add(codes + i * kGroupBytes, x + i * kXBytes, x_row_bytes,
              scale + i * kScales, sum[i % kSums]);
        }
        codes += kTurn * kGroupBytes;
        x += kTurn * kXBytes;
        scale += kTurn * kScales;
      }
#pragma GCC unroll 4
      for (int i = 0; i < kTurn - 1; ++i) {
        if (g + i >= some) break;
        Add(codes + i * kGroupBytes, x + i * kXBytes, x_row_bytes,
            scale + i * kScales, sum[i % kSums]);
      }
      for (int r = 0; r < kRows; ++r) {
        __m256 all = sum[0][r];
        if constexpr (kSums > 1) all = _mm256_add_ps(all, sum[1][r]);
        if constexpr (kSums > 2) {
          all = _mm256_add_ps(all, _mm256_add_ps(sum[2][r], sum[3][r]));
        }
        if (is_first) {
          // As AddExactly to a total of 0 does.
          total[r] = _mm256_add_ps(all, _mm256_setzero_ps());
          rest[r] = _mm256_setzero_ps();
        } else {
          AddExactly(all, &total[r], &rest[r]);
        }
      }
      is_first = false;
    }
  }

  // Returns the groups of a weight row if they are added to the total at once:
  // whole groups, and one chunk of scales. Otherwise returns 0.
  static int64_t ShortGroups(const FewRowsProblem& rows) {
    const bool is_short = rows.groups <= Min(kChunkGroups, GroupsOfSum(rows)) &&
                          rows.weights.row_bytes == rows.groups * kGroupBytes;
    return is_short ? rows.groups : 0;
  }

  // The same as Run, for weight rows with ShortGroups. With it, 1 x 3072 x
  // 576 of pairs in INT4_32 or MXFP4 is 1.2x faster (one Zen 3 core, 2026-11).
  JAXPLUGIN_ALWAYS_INLINE static bool RunShort(
      const Operand& weights, int64_t groups, const uint8_t* codes,
      const uint8_t* x, int64_t x_row_bytes, const float* scale,
      __m256* lanes) {
    FewRowsSums sums(weights);
    sums.AddGroups(codes, x, x_row_bytes, scale, groups, groups);
    for (int r = 0; r < kRows; ++r) lanes[r] = sums.total[r];
    return !sums.largest.NotFinite(kFormat);
  }

  // The sum of lanes[r] is the dot of weight row w and row r. The scales of the
  // weight row begin at scale[][first], unless it has more than one chunk.
  // Returns false if a weight is NaN or Inf; the sums are then invalid.
  static bool Run(const FewRowsProblem& rows, int64_t w, const uint8_t* x,
                  ChunkScales<kScaleRows>& scale, int64_t first,
                  __m256* lanes) {
    const int64_t x_row_bytes = rows.RowBytes();
    const uint8_t* codes = RowValues(rows.weights, w);
    const int64_t whole = rows.weights.row_bytes / kGroupBytes;
    const int64_t most = GroupsOfSum(rows);
    FewRowsSums sums(rows.weights);
    for (int r = 0; r < kRows; ++r) {
      sums.total[r] = sums.rest[r] = _mm256_setzero_ps();
    }
    for (int64_t g0 = 0; g0 < rows.groups; g0 += kChunkGroups) {
      const int64_t count = Min(kChunkGroups, rows.groups - g0);
      if (rows.groups > kChunkGroups) {
        ReadScales<kScaleRows, kIntegers>(rows, w, 1, x, g0 * kScales,
                                          count * kScales, scale);
      }
      const int64_t here = Min(count, whole - g0);
      sums.AddGroups(codes + g0 * kGroupBytes, x + g0 * kXBytes, x_row_bytes,
                     scale[0] + first, here, most);
      if (here < count) {  // the last group; it and x are padded with zeros
        alignas(32) uint8_t last[kGroupBytes] = {};
        __builtin_memcpy(last, codes + whole * kGroupBytes,
                         rows.weights.row_bytes - whole * kGroupBytes);
        sums.AddGroups(last, x + whole * kXBytes, x_row_bytes,
                       scale[0] + first + here * kScales, 1, most);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      lanes[r] = TotalOf(sums.total[r], sums.rest[r]);
    }
    return !sums.largest.NotFinite(kFormat);
  }
};

// Computes the dots of weight rows [w0, w0 + count) and kRows rows, the first
// of which is row x_row of the operand.
template <Format kFormat, int kBlock, int kRows, bool kIntegers>
void FewRowsStrip(const FewRowsProblem& rows, int64_t w0, int64_t count,
                  const uint8_t* x, int64_t x_row, float* out, int64_t ldc) {
  using Sums = FewRowsSums<kFormat, kBlock, kRows, kIntegers>;
  const int64_t pieces = rows.Pieces();
  const int64_t together = rows.ScaledTogether();
  const int64_t x_row_bytes = rows.RowBytes();
  const int64_t groups = Sums::ShortGroups(rows);
  ChunkScales<Sums::kScaleRows> scale;
  for (int64_t begin = 0; begin < count; begin += together) {
    const int64_t some = Min(together, count - begin);
    if (pieces <= kScalesPerChunk) {
      ReadScales<Sums::kScaleRows, kIntegers>(rows, w0 + begin, some, x, 0,
                                              pieces, scale);
    }
    for (int64_t i = 0; i < some; i += kTotaled) {
      const int64_t count_here = Min(kTotaled, some - i);
      __m256 lanes[kTotaled][kRows];
      bool is_finite[kTotaled];
      for (int64_t j = 0; j < count_here; ++j) {
        const int64_t w = w0 + begin + i + j, first = (i + j) * pieces;
        is_finite[j] =
            groups > 0
                ? Sums::RunShort(rows.weights, groups,
                                 RowValues(rows.weights, w), x, x_row_bytes,
                                 scale[0] + first, lanes[j])
                : Sums::Run(rows, w, x, scale, first, lanes[j]);
      }
      for (int r = 0; r < kRows; ++r) {
        float* at = out + r * ldc + begin + i;
        if (count_here == kTotaled) {
          const Four totals = TotalsOfEight(lanes[0][r], lanes[1][r],
                                            lanes[2][r], lanes[3][r]);
          __builtin_memcpy(at, &totals, sizeof(totals));
        } else {
          for (int64_t j = 0; j < count_here; ++j) {
            at[j] = TotalOfEight(lanes[j][r]);
          }
        }
        for (int64_t j = 0; j < count_here; ++j) {
          if (is_finite[j]) continue;
          // The exponent is 0 because the result is NaN or Inf.
          at[j] = ExactDot(rows.x, x_row + r, rows.weights, w0 + begin + i + j,
                           0);
        }
      }
    }
  }
}

using FewRowsFunction = void (*)(const FewRowsProblem&, int64_t, int64_t,
                                 const uint8_t*, int64_t, float*, int64_t);

template <Format kFormat, int kBlock, bool kIntegers>
FewRowsFunction FewRowsOfCount(int64_t count) {
  constexpr FewRowsFunction kFunctions[kFewRowsMax] = {
      FewRowsStrip<kFormat, kBlock, 1, kIntegers>,
      FewRowsStrip<kFormat, kBlock, 2, kIntegers>,
      FewRowsStrip<kFormat, kBlock, 3, kIntegers>,
      FewRowsStrip<kFormat, kBlock, 4, kIntegers>};
  return kFunctions[count - 1];
}

template <int kBlock>
FewRowsFunction FewRowsOfBlock(const FewRowsProblem& rows, int64_t count) {
  if (rows.is_integer) {
    switch (rows.weights.format) {
      case Format::kInt8:
        return FewRowsOfCount<Format::kInt8, kBlock, true>(count);
      case Format::kInt4:
        return FewRowsOfCount<Format::kInt4, kBlock, true>(count);
      default: return FewRowsOfCount<Format::kE2M1, kBlock, true>(count);
    }
  }
  switch (rows.weights.format) {
    case Format::kE4M3:
      return FewRowsOfCount<Format::kE4M3, kBlock, false>(count);
    case Format::kE5M2:
      return FewRowsOfCount<Format::kE5M2, kBlock, false>(count);
    case Format::kE2M3:
      return FewRowsOfCount<Format::kE2M3, kBlock, false>(count);
    case Format::kE3M2:
      return FewRowsOfCount<Format::kE3M2, kBlock, false>(count);
    case Format::kInt8:
      return FewRowsOfCount<Format::kInt8, kBlock, false>(count);
    case Format::kInt4:
      return FewRowsOfCount<Format::kInt4, kBlock, false>(count);
    case Format::kCodebook:
      return FewRowsOfCount<Format::kCodebook, kBlock, false>(count);
    default:
      return FewRowsOfCount<Format::kE2M1, kBlock, false>(count);
  }
}

// The dot of few rows (the panel side) and quantized weights (the strip side).
// If a float of the rows is too large or too small for this engine, it writes
// nothing and *is_done stays false.
bool FewRowsDot(const DotArgs& args, const Sides& sides,
                const Parallel& parallel, bool* is_done) {
  const FewRowsProblem rows(*sides.panel, *sides.strip);
  const int64_t count = sides.panel_rows;
  const int64_t x_rows = args.batch * count;
  const int64_t x_row_bytes = rows.RowBytes();
  const int64_t chunk = StreamedRows(sides, parallel);
  const int64_t chunks = CeilDiv(sides.strip_rows, chunk);
  const int64_t pass = PassRows(sides, kFewRowsMax);

  const int64_t x_bytes = RoundUp(x_rows * x_row_bytes, 64);
  const int64_t flag_bytes = RoundUp(x_rows, 64);
  const int64_t part_floats = args.quantized == nullptr ? 0 : chunk * count;
  const int64_t slot_bytes =
      RoundUp((chunk * count + count + part_floats) * 4, 64);
  Scratch scratch(x_bytes + flag_bytes + slot_bytes * parallel.threads);
  uint8_t* prepared = scratch.get();
  if (prepared == nullptr) return false;
  uint8_t* unsafe = prepared + x_bytes;
  uint8_t* slots = unsafe + flag_bytes;

  const Parallel serial{1, nullptr, nullptr};
  const int64_t x_group = Max(1, (int64_t{1} << 16) / Max(args.k, 1));
  const bool x_is_small = x_rows * args.k <= (1 << 17);
  uint32_t outside = 0;
  bool ok = ParallelFor(
      x_is_small ? serial : parallel, CeilDiv(x_rows, x_group),
      [&](int64_t index, int) {
        const int64_t end = Min(x_rows, (index + 1) * x_group);
        for (int64_t r = index * x_group; r < end; ++r) {
          if (!rows.Prepare(r, prepared + r * x_row_bytes)) {
            __atomic_store_n(&outside, 1, __ATOMIC_RELAXED);
          }
          unsafe[r] = !RowIsSafe(*sides.panel, r);
        }
      });
  if (!ok || outside != 0) return ok;
  *is_done = true;
  uint32_t has_failed = 0;
  return ParallelForInParts(
      parallel, args.batch * chunks, [&](int64_t index, int slot) {
        const int64_t batch = index / chunks;
        const int64_t j0 = index % chunks * chunk;
        const int64_t strip = Min(chunk, sides.strip_rows - j0);
        if (GaveUp(args)) return;
        float* c = reinterpret_cast<float*>(slots + slot * slot_bytes);
        for (int64_t r0 = 0; r0 < count; r0 += pass) {
          const int64_t r = batch * count + r0;
          const int64_t some = Min(pass, count - r0);
          const FewRowsFunction function =
              PieceOf(rows.weights) == 16 ? FewRowsOfBlock<16>(rows, some)
                                          : FewRowsOfBlock<32>(rows, some);
          function(rows, batch * sides.strip_rows + j0, strip,
                   prepared + r * x_row_bytes, r, c + r0 * chunk, chunk);
        }
        float* line = c + chunk * count;
        const ResultPart part =
            sides.PartOf(batch, 0, count, j0, strip, line + count);
        StoreTile(sides, batch, 0, count, j0, strip, c, chunk,
                  unsafe + batch * count, line, part);
        part.Store(args);
        if (args.block_sums == nullptr) return;
        float* out = static_cast<float*>(args.out) + j0;
        if (!AddOffsets({&args.rhs, j0, strip, args.block_sums, count, out,
                         args.n, out, args.n})) {
          __atomic_store_n(&has_failed, 1, __ATOMIC_RELAXED);
        }
      }) && has_failed == 0;
}
