// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of the large dot for two operands of E2M1, int4 or int8 with AVX2,
// in integers. Twice an E2M1 value is an integer from -12 to 12. The sum of a
// block is exact. Once per block, the sum is converted to float32 and multiplied
// by both scales. For 256 products of a block of 32 values, float32 needs 32
// multiplications.
//
// A strip of E2M1 or int4 needs 8: vpmaddubsw multiplies unsigned bytes by signed
// bytes and adds in 16 bits. So the strip's bytes are increased (Bias), and the
// panel holds the correction of each block's sum. The 16 bits may wrap before the
// sum is complete. The corrected sum of 16 products fits: for E2M1 and int8 it
// is at most 12 * 128 * 16 = 24576.
//
// A strip of int8 needs 16, because both sides are extended to words for
// vpmaddwd.
//
// Roundings (see sums.inl): 15 in the sum of 16 blocks, 1 in the total. If a
// scale is f32, bf16 or f16, also 1 in the product of two scales and 1 in the
// first block of a sum.

// kBlock is the smaller of both pieces (PieceOf). kIsPacked says whether the
// strip has four bits per value.
template <int kBlock, bool kIsPacked>
struct EngineInteger {
  static constexpr int kTileRowsMax = 4;
  static constexpr int64_t kPanelRowsMax = int64_t{1} << 62;
  static constexpr int kStripRows = 16;  // two vectors
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  static constexpr int64_t kGroup = 64;        // values
  static constexpr int64_t kChunkGroups = kIsPacked ? 16 : 8;
  static constexpr int kBlocks = kGroup / kBlock;
  // Dwords of the values of even index in a group, and in a block: four bytes,
  // or two words.
  static constexpr int kDwords = kIsPacked ? 8 : 16;
  static constexpr int kBlockDwords = kDwords / kBlocks;
  static constexpr int64_t kCodeBytes = kIsPacked ? 32 : 64;  // of a group
  static constexpr int64_t kMaxBlocks = kChunkGroups * kBlocks;
  // Roundings (see sums.inl): 15 in the sum of 16 blocks, 1 in the total.
  static constexpr int64_t kSumGroups = 16 / kBlocks;
  // A group of a panel row: [even values][odd values][the correction of each
  // block, in two words; only if kIsPacked][scales].
  static constexpr int64_t kCorrections = 8 * kDwords;
  static constexpr int64_t kPanelScales =
      kCorrections + (kIsPacked ? 4 * kBlocks : 0);
  static constexpr int64_t kPanelGroupBytes = kPanelScales + 4 * kBlocks;
  static constexpr int64_t kGroupCodes = 8 * kDwords * kStripRows;
  static constexpr int64_t kGroupScales = kBlocks * kStripRows;
  static constexpr int64_t kCodes = kChunkGroups * kGroupCodes;  // 16 KiB

  const Operand& panel_operand;
  const Operand& strip_operand;
  const NibbleTables panel_tables, strip_tables;

  explicit EngineInteger(const Sides& sides)
      : panel_operand(*sides.panel),
        strip_operand(*sides.strip),
        panel_tables(sides.panel->format, sides.panel->codebook),
        strip_tables(sides.strip->format, sides.strip->codebook) {}

  static int64_t Groups(int64_t k) { return Max(CeilDiv(k, kGroup), 1); }
  static int64_t PanelRowBytes(int64_t k) {
    return Groups(k) * kPanelGroupBytes;
  }
  static int64_t StripBytes(int64_t) {
    return kCodes + kChunkGroups * kGroupScales * 4;
  }

  // out[i] = the scale of block b0 + i times the unit of the integers, or 0 past
  // the end, for i < count.
  // `count` is at most kMaxBlocks.
  static void Scales(const Operand& x, int64_t row, int64_t b0, int64_t count,
                     float* out) {
    if (PieceOf(x) == kBlock) {
      const int64_t present = Max(Min(count, PiecesOf(x) - b0), 0);
      DecodeScales(x, row, b0, present, UnitExponent(x), out);
      for (int64_t i = present; i < count; ++i) out[i] = 0;
      return;
    }
    // A scale of 32 values covers two blocks.
    float scale[kMaxBlocks / 2];
    const int64_t c0 = b0 / 2;
    const int64_t present = Max(Min(count / 2, PiecesOf(x) - c0), 0);
    DecodeScales(x, row, c0, present, UnitExponent(x), scale);
    for (int64_t i = 0; i < count / 2; ++i) {
      out[2 * i] = out[2 * i + 1] = i < present ? scale[i] : 0;
    }
  }

  void PackRow(int64_t row, uint8_t* tile, int64_t tile_rows,
               int64_t i) const {
    const Operand& x = panel_operand;
    const __m256i bias =
        _mm256_set1_epi8(static_cast<char>(Bias(strip_operand.format)));
    for (int64_t g = 0; g < Groups(x.k); ++g) {
      uint8_t* out = tile + (g * tile_rows + i) * kPanelGroupBytes;
      __m256i bytes[2];
      ReadIntegers(x, row, g * kGroup, panel_tables, bytes);
      if constexpr (kIsPacked) {
        __m256i words = _mm256_setzero_si256();
        for (int s = 0; s < 2; ++s) {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * s),
                              bytes[s]);
          words = _mm256_add_epi16(words, _mm256_maddubs_epi16(bias, bytes[s]));
        }
        int16_t sums[16];
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), words);
        for (int b = 0; b < kBlocks; ++b) {
          int16_t correction[2] = {0, 0};  // of a dword's low and high word
          for (int j = 0; j < 2 * kBlockDwords; ++j) {
            correction[j % 2] -= sums[b * 2 * kBlockDwords + j];
          }
          __builtin_memcpy(out + kCorrections + 4 * b, correction, 4);
        }
      } else {
        for (int s = 0; s < 2; ++s) {
          __m256i* words = reinterpret_cast<__m256i*>(out + 64 * s);
          _mm256_storeu_si256(words, _mm256_cvtepi8_epi16(
                                         _mm256_castsi256_si128(bytes[s])));
          _mm256_storeu_si256(
              words + 1,
              _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes[s], 1)));
        }
      }
      float scale[kBlocks];
      Scales(x, row, g * kBlocks, kBlocks, scale);
      __builtin_memcpy(out + kPanelScales, scale, sizeof(scale));
    }
  }

  // Returns the distance in bytes from the codes of group g0 of a strip row to
  // the codes to prefetch: the next chunk, or the first chunk of the same row
  // in the next strip.
  int64_t Ahead(int64_t g0) const {
    return g0 + kChunkGroups < Groups(strip_operand.k)
               ? kChunkGroups * kCodeBytes
               : kStripRows * strip_operand.row_bytes - g0 * kCodeBytes;
  }

  // Unpacks groups [g0, g0 + groups) of `count` rows. The layout of the codes
  // is [group][even dwords, odd dwords][16 rows], and of the scales
  // [group][block][16 rows].
  void PackStrip(int64_t row, int64_t count, int64_t g0, int64_t groups,
                 uint8_t* strip) const {
    PackScales(row, count, g0, groups,
               reinterpret_cast<float*>(strip + kCodes));
    const Operand& x = strip_operand;
    const int64_t ahead = Ahead(g0);
    constexpr int64_t kLoads = kCodeBytes / kGroupBytes;  // of a group
    for (int64_t load = 0; load < groups * kLoads; ++load) {
      const int64_t begin = g0 * kCodeBytes + load * kGroupBytes;
      uint8_t* group = strip + load / kLoads * kGroupCodes;
      for (int v = 0; v < 2; ++v) {
        __m256i codes[8];
        for (int r = 0; r < 8; ++r) {
          const int64_t past = 8 * v + r;
          const uint8_t* at = RowValues(x, row + past) + begin;
          if (load % 2 == 0) {  // once per cache line
            _mm_prefetch(reinterpret_cast<const char*>(at + ahead),
                         _MM_HINT_T1);
          }
          codes[r] = past < count ? LoadGroup(at, x.row_bytes - begin)
                                  : _mm256_setzero_si256();
        }
        Transpose8(codes);
        // The rows of dword d of the even values, and of the odd values.
        __m256i* even = reinterpret_cast<__m256i*>(
            group + load % kLoads * 8 * 64 + 32 * v);
        __m256i* odd = even + kDwords * 2;
        for (int d = 0; d < 8; ++d) {
          __m256i both[2];
          if constexpr (kIsPacked) {
            both[0] =
                _mm256_shuffle_epi8(strip_tables.biased, LowNibbles(codes[d]));
            both[1] =
                _mm256_shuffle_epi8(strip_tables.biased, HighNibbles(codes[d]));
          } else {
            both[0] = _mm256_srai_epi16(_mm256_slli_epi16(codes[d], 8), 8);
            both[1] = _mm256_srai_epi16(codes[d], 8);
          }
          _mm256_store_si256(even + 2 * d, both[0]);
          _mm256_store_si256(odd + 2 * d, both[1]);
        }
      }
    }
  }

  void PackScales(int64_t row, int64_t count, int64_t g0, int64_t groups,
                  float* out) const {
    alignas(32) float scale[kStripRows][kMaxBlocks];
    const int64_t blocks = groups * kBlocks;
    for (int64_t r = 0; r < kStripRows; ++r) {
      const int64_t done = r < count ? blocks : 0;
      Scales(strip_operand, row + Min(r, count - 1), g0 * kBlocks, done,
             scale[r]);
      for (int64_t b = done; b < RoundUp(blocks, 8); ++b) scale[r][b] = 0;
    }
    for (int64_t b = 0; b < blocks; b += 8) {
      for (int v = 0; v < 2; ++v) {
        __m256i rows[8];
        for (int r = 0; r < 8; ++r) {
          rows[r] = _mm256_load_si256(
              reinterpret_cast<const __m256i*>(scale[8 * v + r] + b));
        }
        Transpose8(rows);
        for (int i = 0; i < 8; ++i) {
          _mm256_store_si256(
              reinterpret_cast<__m256i*>(out + (b + i) * kStripRows + 8 * v),
              rows[i]);
        }
      }
    }
  }

  // Prevents GCC 12 from adding in another order, in which it spills sums to
  // memory and takes three times as long.
  JAXPLUGIN_ALWAYS_INLINE static void KeepInRegisters(__m256i* two) {
    asm("" : "+x"(two[0]), "+x"(two[1]));
  }

  // Adds the products of four bytes, or of two words, to each lane.
  JAXPLUGIN_ALWAYS_INLINE static __m256i AddProducts(__m256i sum, __m256i y,
                                                     __m256i x) {
    return kIsPacked ? _mm256_add_epi16(sum, _mm256_maddubs_epi16(y, x))
                     : _mm256_add_epi32(sum, _mm256_madd_epi16(y, x));
  }

  // Adds the products of kRows panel rows and a strip over `groups` groups of k
  // to c.
  template <int kRows>
  static void Tile(const uint8_t* a, int64_t tile_rows, const uint8_t* b,
                   const float* strip_scale, int64_t groups, bool is_first,
                   float* c) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 sum[kRows][2];
    for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 4
      for (int block = 0; block < kBlocks; ++block) {
        __m256i dots[kRows][2];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          dots[r][0] = dots[r][1] =
              kIsPacked ? _mm256_set1_epi32(ReadDword(
                              a + r * kPanelGroupBytes + kCorrections +
                              4 * block))
                        : _mm256_setzero_si256();
        }
#pragma GCC unroll 16
        for (int i = 0; i < 2 * kBlockDwords; ++i) {
          const int d = i / kBlockDwords * kDwords + block * kBlockDwords +
                        i % kBlockDwords;
          const __m256i* at = reinterpret_cast<const __m256i*>(b + d * 64);
          const __m256i y0 = _mm256_load_si256(at);
          const __m256i y1 = _mm256_load_si256(at + 1);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const __m256i x =
                _mm256_set1_epi32(ReadDword(a + r * kPanelGroupBytes + 4 * d));
            dots[r][0] = AddProducts(dots[r][0], y0, x);
            dots[r][1] = AddProducts(dots[r][1], y1, x);
            KeepInRegisters(dots[r]);
          }
        }
        const __m256 y_scale[2] = {_mm256_load_ps(strip_scale),
                                   _mm256_load_ps(strip_scale + 8)};
        strip_scale += kStripRows;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256 x_scale = _mm256_broadcast_ss(
              reinterpret_cast<const float*>(a + r * kPanelGroupBytes +
                                             kPanelScales) +
              block);
          for (int v = 0; v < 2; ++v) {
            const __m256 dot = _mm256_cvtepi32_ps(
                kIsPacked ? _mm256_madd_epi16(dots[r][v], ones) : dots[r][v]);
            sum[r][v] = _mm256_fmadd_ps(
                dot, _mm256_mul_ps(x_scale, y_scale[v]), sum[r][v]);
          }
        }
      }
      a += tile_rows * kPanelGroupBytes;
      b += kGroupCodes;
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < 2; ++v) {
        float* out = c + r * kSumFloats + 8 * v;
        AddExactly(sum[r][v], is_first, out, out + kStripRows);
      }
    }
  }

  // The same as Tile for any number of groups.
  template <int kRows>
  static void TileOf(const uint8_t* a, int64_t tile_rows, const uint8_t* b,
                     int64_t groups, bool is_first, float* c) {
    const float* strip_scale = reinterpret_cast<const float*>(b + kCodes);
    for (int64_t g = 0; g < groups; g += kSumGroups) {
      Tile<kRows>(a + g * tile_rows * kPanelGroupBytes, tile_rows,
                  b + g * kGroupCodes, strip_scale + g * kGroupScales,
                  Min(kSumGroups, groups - g), is_first && g == 0, c);
    }
  }

  JAXPLUGIN_ALWAYS_INLINE static int ReadDword(const uint8_t* bytes) {
    int dword;
    __builtin_memcpy(&dword, bytes, 4);
    return dword;
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* strip, float* c) const {
    const int64_t groups = Groups(strip_operand.k);
    const int64_t tile_bytes = tile_rows * PanelRowBytes(strip_operand.k);
    for (int64_t g0 = 0; g0 < groups; g0 += kChunkGroups) {
      const int64_t some = Min(kChunkGroups, groups - g0);
      PackStrip(row, count, g0, some, strip);
      for (int64_t r = 0, tile = 0; r < rows; r += tile_rows, ++tile) {
        const uint8_t* a = panel + tile * tile_bytes +
                           g0 * tile_rows * kPanelGroupBytes;
        float* out = c + r * kSumFloats;
        switch (Min(tile_rows, rows - r)) {
          case 1: TileOf<1>(a, tile_rows, strip, some, g0 == 0, out); break;
          case 2: TileOf<2>(a, tile_rows, strip, some, g0 == 0, out); break;
          case 3: TileOf<3>(a, tile_rows, strip, some, g0 == 0, out); break;
          case 4: TileOf<4>(a, tile_rows, strip, some, g0 == 0, out); break;
        }
      }
    }
    FinishTotals<kStripRows>(rows, c);
  }
};

// Requires two operands of E2M1, int4 or int8.
bool IntegerDot(const DotArgs& args, const Parallel& parallel) {
  const bool is_32 = PieceOf(args.lhs) == 32 && PieceOf(args.rhs) == 32;
  if (IsPacked(ChooseSides(args).strip->format)) {
    return is_32 ? BlockedDot<EngineInteger<32, true>>(args, parallel)
                 : BlockedDot<EngineInteger<16, true>>(args, parallel);
  }
  return is_32 ? BlockedDot<EngineInteger<32, false>>(args, parallel)
               : BlockedDot<EngineInteger<16, false>>(args, parallel);
}
