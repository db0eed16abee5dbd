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
// Floats from the scales of a row to those of the next row. The 8 extra floats
// are for loads of four that begin at the last ones.
constexpr int64_t kScaleRow = kScalesPerChunk + 8;
// Bytes of several rows in a chunk: half of L1.
constexpr int64_t kChunkBytes = 16 << 10;
// The prefetch distance in values. It covers the latency of memory.
constexpr int64_t kPrefetchValues = 4096;

// Bytes of a row of x in a step. For `groups` groups of nibbles these are [pair of
// groups][group][32 even bytes, 32 odd bytes] and 8 corrections, for int8 weights
// [16 even words, 16 odd words], otherwise a group of floats.
constexpr int64_t StepBytes(Format weights, bool is_integer, int64_t groups) {
  if (!is_integer) return GroupValues(weights) * 4;
  return IsPacked(weights) ? groups * 64 + 32 : 64;
}

// The sums of blocks of nibbles, from words that each sum four products of one
// block: the even and the odd bytes of a group, which maddubs has added in pairs.
template <int kBlock>
struct BlockSums {
  static constexpr int kGroups = kBlock == 32 ? 4 : 2;  // groups of 8 blocks

  // Adds the words of two groups. A word sums 8 products, which do not overflow:
  // a biased nibble is at most 24, and an integer of x at least -128.
  JAXPLUGIN_ALWAYS_INLINE static __m256i OfTwo(__m256i a, __m256i b) {
    __m256i first, second;
    if constexpr (kBlock == 32) {
      first = _mm256_unpacklo_epi32(a, b);
      second = _mm256_unpackhi_epi32(a, b);
    } else {
      const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
      first = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88));
      second = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd));
    }
    return _mm256_madd_epi16(_mm256_add_epi16(first, second),
                             _mm256_set1_epi16(1));
  }

  // The same for what OfTwo returned. Unused for blocks of 16.
  JAXPLUGIN_ALWAYS_INLINE static __m256i OfFour(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b),
                            _mm256_unpackhi_epi64(a, b));
  }

  // Returns numbers of 8 blocks, such as scales, in the order of the sums.
  JAXPLUGIN_ALWAYS_INLINE static __m256 InOrder(__m256 blocks) {
    const __m256i order = kBlock == 32
                              ? _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)
                              : _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    return _mm256_permutevar8x32_ps(blocks, order);
  }
};

// The operands, and the layout of the few rows in scratch memory. The rows of a
// pass are interleaved: [step][row][...]. Rows at multiples of 4096 bytes would
// be slow to read. They are padded with zeros.
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
  int64_t step_groups;  // groups of a step, see FewRowsSums
  int64_t steps;        // steps of a row
  int64_t step_pieces;  // pieces of a step

  FewRowsProblem(const Operand& rows, const Operand& other)
      : x(rows), weights(other) {
    is_integer = AreBytes(ShapeOf(x), ShapeOf(weights)) &&
                 PieceOf(x) >= PieceOf(weights);
    row_shift = ValueShift(weights.format) <= 0 ? 0
                : IsPlain(x.format)             ? 90
                                                : 60;
    step_groups = !HasNibbles()              ? 1
                  : PieceOf(weights) == 32 ? BlockSums<32>::kGroups
                                           : BlockSums<16>::kGroups;
    const int64_t values = step_groups * GroupValues(weights.format);
    steps = Max(CeilDiv(x.k, values), 1);
    step_pieces = values / PieceOf(weights);
  }
  bool HasNibbles() const { return is_integer && IsPacked(weights.format); }
  int ScaleShift() const {
    return is_integer ? UnitExponent(weights)
                      : ValueShift(weights.format) - row_shift -
                            weights.fraction_bits;
  }
  int64_t StepBytes() const {
    return jaxplugin::StepBytes(weights.format, is_integer, step_groups);
  }
  int64_t Pieces() const { return steps * step_pieces; }
  // The number of weight rows whose scales are decoded together. Rows that
  // multiply int8 weights repeat their scales for each of them. Over one weight row at a time, rows in
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
  // Scales of integer rows follow the steps of all rows: [step][row][8] for
  // nibbles, otherwise a row for each of ScaledTogether.
  int64_t ScaleFloats() const {
    if (!is_integer) return 0;
    return HasNibbles() ? Pieces() : RoundUp(ScaledTogether() * Pieces(), 8);
  }
  int64_t RowBytes() const { return steps * StepBytes() + ScaleFloats() * 4; }

  // Writes row `r` of the `rows` rows of a pass to `out`. Returns false if a float
  // is outside the range that row_shift allows.
  bool Prepare(int64_t row, int64_t r, int64_t rows, uint8_t* out) const {
    if (!is_integer) return PrepareFloats(row, r, rows, out);
    const int64_t step = rows * StepBytes();
    const auto scale = reinterpret_cast<float*>(out + steps * step);
    if (!HasNibbles()) {
      PrepareBytes(row, step, out + r * StepBytes());
      PrepareScales(row, scale + r * ScaleFloats());
    } else if (step_groups == BlockSums<32>::kGroups) {
      PrepareNibbles<32>(row, r, rows, out, scale);
    } else {
      PrepareNibbles<16>(row, r, rows, out, scale);
    }
    return true;
  }

  bool PrepareFloats(int64_t row, int64_t r, int64_t rows,
                     uint8_t* to) const {
    const int64_t group = GroupValues(weights.format);
    const int pairs = GroupPairs(weights.format);
    const float factor = AsFloat(static_cast<uint32_t>(127 + row_shift) << 23);
    float* out = reinterpret_cast<float*>(to) + r * group;
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
    for (int64_t k0 = 0; k0 < steps * group; k0 += kFewRowsChunk) {
      float natural[kFewRowsChunk];
      const int64_t count = Max(Min(kFewRowsChunk, x.k - k0), 0);
      const int64_t padded = Min(kFewRowsChunk, steps * group - k0);
      UnpackRun(x, row, k0, count, Order::kNatural, 0, natural);
      for (int64_t i = count; i < padded; ++i) natural[i] = 0;
      for (int64_t i = 0; i < padded; ++i) {
        // The range is 2^-87 to 2^32; 0, Inf and NaN are allowed too.
        const uint32_t magnitude = AsBits(natural[i]) & kMagnitude;
        outside |= (magnitude - 1 < (40u << 23) - 1) |
                   ((magnitude > (159u << 23)) & (magnitude < kInfinity));
        natural[i] *= factor;
      }
      for (int64_t g = 0; g < padded; g += group, out += rows * group) {
        for (int i = 0; i < group; ++i) out[i] = natural[g + index[i]];
      }
    }
    return !IsPlain(x.format) || weights.format == Format::kE2M1 ||
           outside == 0;
  }

  void PrepareBytes(int64_t row, int64_t step, uint8_t* out) const {
    const NibbleTables tables(x.format, x.codebook);
    for (int64_t g = 0; g < steps; ++g, out += step) {
      __m256i bytes[2];
      ReadIntegers(x, row, g * GroupValues(weights.format), tables, bytes);
      for (int odd = 0; odd < 2; ++odd) {
        _mm256_store_si256(
            reinterpret_cast<__m256i*>(out) + odd,
            _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes[odd])));
      }
    }
  }

  template <int kBlock>
  void PrepareNibbles(int64_t row, int64_t r, int64_t rows, uint8_t* out,
                      float* scale_out) const {
    using Sums = BlockSums<kBlock>;
    const NibbleTables tables(x.format, x.codebook);
    const __m256i ones = _mm256_set1_epi8(1);
    for (int64_t s = 0; s < steps; ++s, out += rows * StepBytes()) {
      __m256i words[Sums::kGroups];
      for (int i = 0; i < Sums::kGroups; ++i) {
        __m256i bytes[2];
        ReadIntegers(x, row,
                     (s * Sums::kGroups + i) * GroupValues(weights.format),
                     tables, bytes);
        __m256i* at = reinterpret_cast<__m256i*>(
            out + (i / 2 * rows + r) * 128 + i % 2 * 64);
        _mm256_store_si256(at, bytes[0]);
        _mm256_store_si256(at + 1, bytes[1]);
        words[i] = _mm256_add_epi16(_mm256_maddubs_epi16(ones, bytes[0]),
                                    _mm256_maddubs_epi16(ones, bytes[1]));
      }
      // The weights' bytes are biased, so that they are unsigned.
      __m256i sums = Sums::OfTwo(words[0], words[1]);
      if constexpr (Sums::kGroups == 4) {
        sums = Sums::OfFour(sums, Sums::OfTwo(words[2], words[3]));
      }
      const __m256i bias = _mm256_set1_epi32(-Bias(weights.format));
      _mm256_store_si256(
          reinterpret_cast<__m256i*>(out + Sums::kGroups * 64 * rows + r * 32),
          _mm256_mullo_epi32(sums, bias));
      alignas(32) float scale[8];
      EightScales(row, s * 8, scale);
      _mm256_store_ps(scale_out + (s * rows + r) * 8,
                      Sums::InOrder(_mm256_load_ps(scale)));
    }
  }

  // Writes the scales of a row at 8 pieces of the weights, which are 0 past the
  // end.
  void EightScales(int64_t row, int64_t piece, float* out) const {
    const int64_t each = PieceOf(x) / PieceOf(weights);
    const int64_t column = piece / each;
    const int64_t count = Max(Min(8 / each, PiecesOf(x) - column), 0);
    float scale[8];
    DecodeScales(x, row, column, count, UnitExponent(x), scale);
    for (int64_t i = 0; i < 8; ++i) {
      out[i] = i / each < count ? scale[i / each] : 0;
    }
  }

  void PrepareScales(int64_t row, float* scale) const {
    const int64_t columns = Pieces();
    for (int64_t i = 0; i < columns; i += 8) {
      float some[8];
      EightScales(row, i, some);
      __builtin_memcpy(scale + i, some, Min(8, columns - i) * 4);
    }
    for (int64_t i = columns; i < ScaledTogether() * columns; ++i) {
      scale[i] = scale[i - columns];
    }
  }
};

// Multiplies a group of a weight row with kRows rows of floats. `scale` has the
// scales of the group's blocks.
template <Format kFormat, int kBlock, int kRows>
struct FloatStep {
  static constexpr Format kCodes = InRegister(kFormat);
  static constexpr int kGroups = 1;
  static constexpr int kPieces = GroupValues(kFormat) / kBlock;
  static constexpr int kScaleFloats = kPieces;
  static constexpr int64_t kXBytes = StepBytes(kFormat, false, kGroups);
  // E2M1 with blocks of 16 has two sections of pairs. Section s has block s in
  // the lower half of its vectors and block s + 2 in the upper half.
  static constexpr int kSections = kPieces == 4 ? 2 : 1;
  static constexpr int kPairs = GroupPairs(kCodes) / kSections;
  // The products of a block are added in two chains if the registers suffice,
  // which makes one row of MXFP4 1.1x faster. Two sections are two chains.
  static constexpr int kChains =
      IsPacked(kCodes) && kSections == 1 && kRows <= 2 ? 2 : 1;
  // Roundings of a product in the sum of its block.
  static constexpr int kRoundings = 2 * kPairs / kChains + kChains - 1;
  static constexpr int kSums = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;
  static constexpr int kTurn = kSums == 1 ? 2 : kSums;

  JAXPLUGIN_ALWAYS_INLINE static void Add(const uint8_t* codes_at,
                                          const NibbleTables& tables,
                                          const uint8_t* x, const float* scale,
                                          Largest* largest, __m256* sum) {
    constexpr int kHigh = kPieces / 2;  // offset of the upper half's block
    const __m256i codes = LoadCodes<kFormat>(codes_at);
    if (FactsOf(kFormat).has_nan) largest->See(codes);
    const Expanded<kCodes> group(codes, tables);
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
                reinterpret_cast<const float*>(x + r * kXBytes) + 16 * p +
                8 * half);
            __m256& sums = half < kChains - 1 ? chain[r] : block[r];
            sums = q == 0 && (half == 0 || kChains > 1)
                       ? _mm256_mul_ps(values[half], row)
                       : _mm256_fmadd_ps(values[half], row, sums);
          }
        }
      }
      const __m256 spread = kPieces == 1
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

// The same for int8 weights and integer rows. `scale` has products of the scales
// of both sides; those of the next row are kScaleRow floats further.
template <int kBlock, int kRows>
struct ByteStep {
  static constexpr int kGroups = 1;
  static constexpr int kPieces = 32 / kBlock;
  static constexpr int kScaleFloats = kPieces;
  static constexpr int64_t kXBytes = StepBytes(Format::kInt8, true, kGroups);
  static constexpr int kSections = 1, kRoundings = 0;
  static constexpr int kSums = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;
  static constexpr int kTurn = kSums == 1 ? 2 : kSums;

  JAXPLUGIN_ALWAYS_INLINE static void Add(const uint8_t* codes_at,
                                          const NibbleTables&, const uint8_t* x,
                                          const float* scale, Largest*,
                                          __m256* sum) {
    const __m256i codes = LoadCodes<Format::kInt8>(codes_at);
    const __m256i even =
        _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
    const __m256i odd = _mm256_srai_epi16(codes, 8);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i* row = reinterpret_cast<const __m256i*>(x + r * kXBytes);
      const __m256 block = _mm256_cvtepi32_ps(_mm256_add_epi32(
          _mm256_madd_epi16(even, _mm256_load_si256(row)),
          _mm256_madd_epi16(odd, _mm256_load_si256(row + 1))));
      const float* own = scale + r * kScaleRow;
      const __m256 spread = kBlock == 32 ? _mm256_broadcast_ss(own)
                                         : SpreadTwo(own);
      sum[r] = _mm256_fmadd_ps(block, spread, sum[r]);
    }
  }
};

// The same for 8 blocks of E2M1 or int4 weights. `scale` is [row][8], as
// BlockSums orders the blocks. To convert and scale 8 sums of 8 products each, the
// engine took 1.04 to 1.12 times as long for a row of a pair of MXFP4 or NVFP4,
// 1.2 times for two and 1.25 times for four, whose rows were not interleaved then
// (4096 x 4096, one Zen 3 core, 2026-11).
template <Format kFormat, int kBlock, int kRows>
struct NibbleStep {
  using Sums = BlockSums<kBlock>;
  static constexpr int kGroups = Sums::kGroups;
  static constexpr int kPieces = 8;
  static constexpr int kScaleFloats = 8 * kRows;
  static constexpr int64_t kXBytes = StepBytes(kFormat, true, kGroups);
  static constexpr int kSections = 1, kRoundings = 0;
  static constexpr int kSums = 1, kTurn = 1;

  // Adds the products of a row and the even and odd codes of a group.
  JAXPLUGIN_ALWAYS_INLINE static __m256i Words(const __m256i* codes,
                                               const uint8_t* x) {
    const __m256i* row = reinterpret_cast<const __m256i*>(x);
    return _mm256_add_epi16(
        _mm256_maddubs_epi16(codes[0], _mm256_load_si256(row)),
        _mm256_maddubs_epi16(codes[1], _mm256_load_si256(row + 1)));
  }

  // The last step of a row: codes_at has `bytes` bytes.
  JAXPLUGIN_ALWAYS_INLINE static void AddLast(const uint8_t* codes_at,
                                              int64_t bytes,
                                              const NibbleTables& tables,
                                              const uint8_t* x,
                                              const float* scale, __m256* sum) {
    if constexpr (kGroups == 4) {
      if (bytes > 2 * kGroupBytes) {
        return Add<2, true>(codes_at, tables, x, scale, nullptr, sum, bytes);
      }
    }
    Add<1, true>(codes_at, tables, x, scale, nullptr, sum, bytes);
  }

  // Only the first kPairs pairs of groups have codes.
  template <int kPairs = kGroups / 2, bool kIsLast = false>
  JAXPLUGIN_ALWAYS_INLINE static void Add(const uint8_t* codes_at,
                                          const NibbleTables& tables,
                                          const uint8_t* x, const float* scale,
                                          Largest*, __m256* sum,
                                          int64_t bytes = 0) {
    __m256i part[kRows];
#pragma GCC unroll 2
    for (int pair = 0; pair < kPairs; ++pair) {
      __m256i codes[2][2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const int64_t at = (2 * pair + i) * kGroupBytes;
        __m256i group = kIsLast ? LoadGroup(codes_at + at, bytes - at)
                                : LoadCodes<kFormat>(codes_at + at);
        if constexpr (kFormat == Format::kInt4) {
          // A code plus Bias is the code with its sign flipped.
          group = _mm256_xor_si256(group, _mm256_set1_epi8(-0x78));
          codes[i][0] = LowNibbles(group);
          codes[i][1] = HighNibbles(group);
        } else {
          codes[i][0] = _mm256_shuffle_epi8(tables.biased, LowNibbles(group));
          codes[i][1] = _mm256_shuffle_epi8(tables.biased, HighNibbles(group));
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* row = x + (pair * kRows + r) * 128;
        __m256i blocks =
            Sums::OfTwo(Words(codes[0], row), Words(codes[1], row + 64));
        if (pair + 1 < kPairs) {
          part[r] = blocks;
          continue;
        }
        if constexpr (kGroups == 4) {
          blocks = kPairs == 1 ? Sums::OfFour(blocks, _mm256_setzero_si256())
                               : Sums::OfFour(part[r], blocks);
        }
        blocks = _mm256_add_epi32(
            blocks, _mm256_load_si256(reinterpret_cast<const __m256i*>(
                        x + kGroups * 64 * kRows + r * 32)));
        sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(blocks),
                                 _mm256_loadu_ps(scale + 8 * r), sum[r]);
      }
    }
  }
};

// Decodes the scales of pieces [c0, c0 + count) of weight rows [row, row +
// some) to `out`; past the end they are 0. For integers, multiplies them with
// `x_scale`, the scales of the rows of x.
template <class Step, int kRows, bool kIntegers>
__attribute__((noinline)) void ReadScales(const FewRowsProblem& rows,
                                          int64_t row, int64_t some,
                                          const float* x_scale, int64_t c0,
                                          int64_t count, float* out) {
  constexpr bool kNibbles = kIntegers && Step::kPieces == 8;
  alignas(32) float buffer[kNibbles ? kScalesPerChunk + 8 : 1];
  float* own = kNibbles ? buffer : out;
  const Operand& weights = rows.weights;
  const int64_t present = Max(Min(count, PiecesOf(weights) - c0), 0);
  int64_t stride = count;
  if (present == weights.scale_cols && (kNibbles || present == count) &&
      weights.block <= 32 && weights.scale_shift == 0) {
    stride = present;
    DecodeScales(weights, row, 0, some * present, rows.ScaleShift(), own);
  } else {
    for (int64_t i = 0; i < some; ++i) {
      DecodeScales(weights, row + i, c0, present, rows.ScaleShift(),
                   own + i * count);
      for (int64_t j = present; j < count; ++j) own[i * count + j] = 0;
    }
  }
  if constexpr (kNibbles) {
    // Past the end of its row, `own` has scales of the next row.
    const __m256 is_present = _mm256_castsi256_ps(_mm256_cmpgt_epi32(
        _mm256_set1_epi32(static_cast<int>(present - (count - 8))),
        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
    for (int64_t i = 0; i < some; ++i) {
      const float* theirs = x_scale + c0 * kRows;
      for (int64_t j = 0; j < count; j += 8) {
        __m256 scale = _mm256_loadu_ps(own + i * stride + j);
        if (j == count - 8) scale = _mm256_and_ps(scale, is_present);
        scale = Step::Sums::InOrder(scale);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r, theirs += 8, out += 8) {
          _mm256_storeu_ps(out, _mm256_mul_ps(scale, _mm256_load_ps(theirs)));
        }
      }
    }
  } else if constexpr (kIntegers) {
    // The first row's product comes last, because it overwrites its operand.
    for (int r = kRows - 1; r >= 0; --r) {
      const float* theirs = x_scale + r * rows.ScaleFloats() + c0;
      for (int64_t i = 0; i < some * count; ++i) {
        out[r * kScaleRow + i] = own[i] * theirs[i];
      }
    }
  }
}

// The sums of one weight row and kRows rows. A thread reads one weight row at a
// time, because reading 2 or 4 rows at a time takes 1.3 times as long.
template <class Step, Format kFormat, int kBlock, int kRows, bool kIntegers>
struct FewRowsSums {
  // Consecutive steps are added to kSums accumulators in turn. After
  // kSumSteps steps each, the accumulators are added to the total. A product
  // has at most 16 roundings (see sums.inl): those in its block, one for each
  // section in its accumulator, log2(kSums) in the sum of the accumulators, 3 in
  // the sum of the lanes, and 1 in the total. A product of a value and a wide
  // scale, or of a codebook's value and any scale, is rounded, too (StepsOfSum).
  static constexpr int kSums = Step::kSums;
  static constexpr int64_t kTurn = Step::kTurn;
  static constexpr int64_t kSumSteps =
      (16 - (Step::kRoundings + kSums / 2 + 4)) / Step::kSections;
  static constexpr int64_t kCodeBytes = Step::kGroups * kGroupBytes;
  static constexpr int64_t kXBytes = kRows * Step::kXBytes;
  static constexpr int64_t kPrefetchBytes =
      kPrefetchValues * kGroupBytes / GroupValues(kFormat);
  // For one or two rows of floats the weights are prefetched into L2, because
  // the rows leave too little room in L1. 1 x 8192 x 8192 in MXFP8 takes 3.0 ms
  // instead of 3.9 ms. For more rows, prefetching into L2 took 1.1 times as long
  // (4 x 4096).
  static constexpr auto kPrefetchInto =
      !kIntegers && kRows <= 2 ? _MM_HINT_T1 : _MM_HINT_T0;

  __m256 total[kRows], rest[kRows];
  Largest largest;

  // Returns the steps that are added to the accumulators before these are added
  // to the total, a multiple of kTurn. It is one per accumulator less for each
  // operand with wide scales, except for weights that floats multiply: their
  // scales multiply the sum of a block and are rounded with it.
  static int64_t StepsOfSum(const FewRowsProblem& rows) {
    const int wide =
        static_cast<int>(IsWide(rows.x.scale_kind) ||
                         rows.x.format == Format::kCodebook) +
        static_cast<int>(kIntegers && IsWide(rows.weights.scale_kind));
    return Max(kSums * (kSumSteps - wide) / kTurn, 1) * kTurn;
  }

  // Returns the steps of a chunk. kTotaled weight rows are multiplied with a
  // chunk of x before the next chunk. So most reads of x are from L1.
  static int64_t ChunkSteps(const FewRowsProblem& rows) {
    constexpr int64_t kMost = kFewRowsChunk / kBlock / Step::kPieces;
    if (kRows == 1) return kMost;
    const int64_t some = StepsOfSum(rows);
    return Max(Min(kMost, kChunkBytes / kXBytes) / some, 1) * some;
  }

  // Adds steps [s0, s0 + count) of weight row w. `scale` has their scales.
  JAXPLUGIN_ALWAYS_INLINE void AddSteps(const FewRowsProblem& rows,
                                        const NibbleTables& tables, int64_t w,
                                        const uint8_t* x, const float* scale,
                                        int64_t s0, int64_t count,
                                        int64_t most) {
    const uint8_t* codes = RowValues(rows.weights, w) + s0 * kCodeBytes;
    const int64_t bytes = rows.weights.row_bytes - s0 * kCodeBytes;
    const int64_t whole = Min(count, bytes / kCodeBytes);
    Largest seen = largest;
    x += s0 * kXBytes;
    for (int64_t begin = 0; begin < count; begin += most) {
      const int64_t some = Min(most, whole - begin);
      __m256 sum[kSums][kRows];
      for (int i = 0; i < kSums; ++i) {
        for (int r = 0; r < kRows; ++r) sum[i][r] = _mm256_setzero_ps();
      }
      const auto add = [&](const uint8_t* at, int64_t i)
                           __attribute__((always_inline)) {
        Step::Add(at, tables, x + i * kXBytes, scale + i * Step::kScaleFloats,
                  &seen, sum[i % kSums]);
      };
      const auto advance = [&](int64_t i) __attribute__((always_inline)) {
        codes += i * kCodeBytes;
        x += i * kXBytes;
        scale += i * Step::kScaleFloats;
      };
      int64_t s = 0;
      for (; s + kTurn <= some; s += kTurn) {
        for (int64_t i = 0; i < kTurn * kCodeBytes; i += 64) {
          _mm_prefetch(reinterpret_cast<const char*>(codes + i +
                                                     kPrefetchBytes),
                       kPrefetchInto);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kTurn; ++i) add(codes + i * kCodeBytes, i);
        advance(kTurn);
      }
      const int64_t left = some - s;
#pragma GCC unroll 4
      for (int i = 0; i < kTurn - 1; ++i) {
        if (i < left) add(codes + i * kCodeBytes, i);
      }
      if (kTurn > 1) advance(Max(left, 0));
      if (begin + most >= count && whole < count) {
        // The last step; x is padded with zeros.
        const int64_t past = bytes - whole * kCodeBytes;
        if constexpr (Step::kGroups > 1) {
          Step::AddLast(codes, past, tables, x, scale, sum[0]);
        } else {
          alignas(32) uint8_t last[kCodeBytes] = {};
          __builtin_memcpy(last, codes, past);
          add(last, 0);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        __m256 all = sum[0][r];
        if constexpr (kSums > 1) all = _mm256_add_ps(all, sum[1][r]);
        if constexpr (kSums > 2) {
          all = _mm256_add_ps(all, _mm256_add_ps(sum[2][r], sum[3][r]));
        }
        if (s0 + begin == 0) {
          // As AddExactly to a total of 0 does.
          total[r] = _mm256_add_ps(all, _mm256_setzero_ps());
          rest[r] = _mm256_setzero_ps();
        } else {
          AddExactly(all, &total[r], &rest[r]);
        }
      }
    }
    largest = seen;
  }

  // The same, in parts of StepsOfSum, without a copy of the code at each call.
  __attribute__((noinline)) void AddChunk(const FewRowsProblem& rows,
                                          const NibbleTables& tables, int64_t w,
                                          const uint8_t* x, const float* scale,
                                          int64_t s0, int64_t count) {
    AddSteps(rows, tables, w, x, scale, s0, count, StepsOfSum(rows));
  }

  // The sum of lanes[r] is the dot of the weight row and row r. Returns false if
  // a weight is NaN or Inf; the sums are then invalid.
  JAXPLUGIN_ALWAYS_INLINE bool Lanes(__m256* lanes) const {
    for (int r = 0; r < kRows; ++r) lanes[r] = TotalOf(total[r], rest[r]);
    return !largest.NotFinite(kFormat);
  }
};

template <Format kFormat, int kBlock, int kRows, bool kIntegers>
struct StepOf {
  using Type = FloatStep<kFormat, kBlock, kRows>;
};
template <Format kFormat, int kBlock, int kRows>
struct StepOf<kFormat, kBlock, kRows, true> {
  using Type = NibbleStep<kFormat, kBlock, kRows>;
};
template <int kBlock, int kRows>
struct StepOf<Format::kInt8, kBlock, kRows, true> {
  using Type = ByteStep<kBlock, kRows>;
};

// Computes the dots of weight rows [w0, w0 + count) and kRows rows, the first
// of which is row x_row of the operand.
template <Format kFormat, int kBlock, int kRows, bool kIntegers>
void FewRowsStrip(const FewRowsProblem& rows, int64_t w0, int64_t count,
                  const uint8_t* x, int64_t x_row, float* out, int64_t ldc) {
  using Step = typename StepOf<kFormat, kBlock, kRows, kIntegers>::Type;
  using Sums = FewRowsSums<Step, kFormat, kBlock, kRows, kIntegers>;
  const NibbleTables tables(kFormat, rows.weights.codebook);
  const int64_t steps = rows.steps, pieces = rows.Pieces();
  const float* x_scale =
      reinterpret_cast<const float*>(x + steps * Sums::kXBytes);
  const int64_t chunk = Sums::ChunkSteps(rows);
  // The scales of many short weight rows are decoded together.
  const bool has_scales = steps <= chunk && rows.ScaledTogether() > 1;
  const bool is_short = has_scales && steps <= Sums::StepsOfSum(rows);
  const int64_t together = has_scales ? rows.ScaledTogether() : kTotaled;
  alignas(32) float scale[kIntegers ? kRows * kScaleRow : kScaleRow];
  for (int64_t begin = 0; begin < count; begin += together) {
    const int64_t some = Min(together, count - begin);
    if (has_scales) {
      ReadScales<Step, kRows, kIntegers>(rows, w0 + begin, some, x_scale, 0,
                                         pieces, scale);
    }
    for (int64_t i = 0; i < some; i += kTotaled) {
      const int64_t w = w0 + begin + i;
      const int64_t count_here = Min(kTotaled, some - i);
      Sums sums[kTotaled];
      const float* row_scale = scale + i * steps * Step::kScaleFloats;
      if (is_short) {
        // 1 x 3072 x 576 of pairs in INT4_32 or MXFP4 is 1.2x faster so (one
        // Zen 3 core, 2026-11).
        for (int64_t j = 0; j < count_here; ++j) {
          sums[j].AddSteps(rows, tables, w + j, x,
                           row_scale + j * steps * Step::kScaleFloats, 0, steps,
                           steps);
        }
      } else {
        for (int64_t s0 = 0; s0 < steps; s0 += chunk) {
          const int64_t here = Min(chunk, steps - s0);
          for (int64_t j = 0; j < count_here; ++j) {
            if (!has_scales) {
              ReadScales<Step, kRows, kIntegers>(
                  rows, w + j, 1, x_scale, s0 * Step::kPieces,
                  here * Step::kPieces, scale);
            }
            sums[j].AddChunk(
                rows, tables, w + j, x,
                has_scales ? row_scale + j * steps * Step::kScaleFloats : scale,
                s0, here);
          }
        }
      }
      __m256 lanes[kTotaled][kRows];
      bool is_finite[kTotaled];
      for (int64_t j = 0; j < count_here; ++j) {
        is_finite[j] = sums[j].Lanes(lanes[j]);
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
          at[j] = ExactDot(rows.x, x_row + r, rows.weights, w + j, 0);
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
          const int64_t in_pass = r % count % pass;
          const int64_t first = r - in_pass;
          if (!rows.Prepare(r, in_pass, Min(pass, count - first % count),
                            prepared + first * x_row_bytes)) {
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
