// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of the large dot in float32 with AVX2, for any number of panel rows
// (engine_float_many_avx2.inl is faster for many). Vectors run along k, so
// nothing is transposed. A register tile of 4 panel rows by 3 strip rows has 12
// accumulators of 8 lanes. With the factors they fill the 16 registers, and 12
// multiply-adds need 7 loads. A chunk of k of the panel stays in L2, and one
// strip at a time is in L1.

// Returns the sum of the lanes of each of four vectors.
JAXPLUGIN_ALWAYS_INLINE __m128 SumFour(const __m256* v) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]),
                                      _mm256_hadd_ps(v[2], v[3]));
  return _mm_add_ps(_mm256_castps256_ps128(pairs),
                    _mm256_extractf128_ps(pairs, 1));
}

struct EngineFloat {
  static constexpr int kTileRowsMax = 4;
  static constexpr int kStripRows = 12;
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  // Floats of a tile's sums: [totals, rests][strip row][kTileRowsMax].
  static constexpr int64_t kTileFloats = kTileRowsMax * kSumFloats;
  static constexpr int64_t kChunk = 512;
  // Roundings: 22 in a sum, 3 in the sum of the lanes, 1 in the total. These 26
  // are more than the 16 of sums.inl, but fewer than twice as many. Sums of
  // four parts of 64 values would have 16 roundings, but take 1.1 to 1.35 times
  // as long, because their accumulators do not fit in the registers. A sum is a
  // third of a chunk. Halves of a chunk have 36 roundings and take 0.97 times
  // as long.
  static constexpr int64_t kSumValues = 176;
  // The extra floats put rows into different cache sets.
  static constexpr int64_t kExtra = 16;
  static constexpr int64_t kStripStride = kChunk + kExtra;
  // A chunk of k of the panel has 512 KiB.
  static constexpr int64_t kPanelRowsMax = 256;

  const Operand& panel_operand;
  const Operand& strip_operand;
  // The order of k of both sides. kGroups requires formats with one code per
  // byte on both sides.
  Order order;

  explicit EngineFloat(const Sides& sides)
      : panel_operand(*sides.panel), strip_operand(*sides.strip) {
    order = FactsOf(panel_operand.format).stored_bits == 8 &&
                    FactsOf(strip_operand.format).stored_bits == 8
                ? Order::kGroups
                : Order::kNatural;
  }

  static int64_t PaddedK(int64_t k) { return RoundUp(k, 8); }
  static int64_t PanelRowFloats(int64_t k) { return RoundUp(k, 16) + kExtra; }
  static int64_t PanelRowBytes(int64_t k) { return PanelRowFloats(k) * 4; }
  static int64_t StripBytes(int64_t) { return kStripRows * kStripStride * 4; }

  // Unpacks values [k0, k0 + count) of a row times their scales, padded with
  // zeros to a whole vector.
  void Unpack(const Operand& x, int64_t row, int64_t k0, int64_t count,
              int64_t ahead, float* out) const {
    UnpackRun(x, row, k0, count, order, ahead, out);
    for (int64_t i = count; i < PaddedK(count); ++i) out[i] = 0;
  }

  void PackRow(int64_t row, uint8_t* tile, int64_t, int64_t i) const {
    const int64_t k = panel_operand.k;
    float* out = reinterpret_cast<float*>(tile) + i * PanelRowFloats(k);
    for (int64_t k0 = 0; k0 < k; k0 += kChunk) {
      Unpack(panel_operand, row, k0, Min(kChunk, k - k0),
             CodeBytes(panel_operand, kChunk), out + k0);
    }
  }

  // Returns the distance in bytes from the codes at k0 of a strip row to the
  // codes to prefetch: the next chunk, or the first chunk of the same row in
  // the next strip.
  static int64_t Ahead(const Operand& x, int64_t k0, int64_t chunk,
                       int64_t strip_rows) {
    if (k0 + chunk >= x.k) {
      return strip_rows * x.row_bytes - CodeBytes(x, k0);
    }
    return CodeBytes(x, chunk);
  }
  static int64_t CodeBytes(const Operand& x, int64_t k) {
    return IsPacked(x.format) ? k / 2 : k;
  }

  // Adds the products of kRows panel rows and a strip over `count` values of k,
  // at most kSumValues.
  template <int kRows>
  static void Tile(const float* a, int64_t lda, const float* b,
                   int64_t strip_rows, int64_t count, bool is_first, float* c) {
    // Enough accumulators to hide the latency of multiply-adds.
    constexpr int kColumns = kRows <= 2 ? 6 : 12 / kRows;
    static_assert(kStripRows % kColumns == 0);
    for (int64_t j0 = 0; j0 < strip_rows; j0 += kColumns) {
      __m256 sum[kColumns][kTileRowsMax];
#pragma GCC unroll 6
      for (int j = 0; j < kColumns; ++j) {
#pragma GCC unroll 4
        for (int r = 0; r < kTileRowsMax; ++r) sum[j][r] = _mm256_setzero_ps();
      }
      const float* strip = b + j0 * kStripStride;
      for (int64_t i = 0; i < count; i += 8) {
        // The vectors of the side with fewer rows stay in registers. The other
        // side's vectors are loaded one at a time, so 16 registers are enough.
        __m256 stay[kRows < kColumns ? kRows : kColumns];
        if constexpr (kRows < kColumns) {
#pragma GCC unroll 3
          for (int r = 0; r < kRows; ++r) {
            stay[r] = _mm256_loadu_ps(a + r * lda + i);
          }
#pragma GCC unroll 6
          for (int j = 0; j < kColumns; ++j) {
            const __m256 y = _mm256_loadu_ps(strip + j * kStripStride + i);
#pragma GCC unroll 3
            for (int r = 0; r < kRows; ++r) {
              sum[j][r] = _mm256_fmadd_ps(stay[r], y, sum[j][r]);
            }
          }
        } else {
#pragma GCC unroll 3
          for (int j = 0; j < kColumns; ++j) {
            stay[j] = _mm256_loadu_ps(strip + j * kStripStride + i);
          }
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const __m256 x = _mm256_loadu_ps(a + r * lda + i);
#pragma GCC unroll 3
            for (int j = 0; j < kColumns; ++j) {
              sum[j][r] = _mm256_fmadd_ps(x, stay[j], sum[j][r]);
            }
          }
        }
      }
#pragma GCC unroll 6
      for (int j = 0; j < kColumns; ++j) {
        float* out = c + (j0 + j) * kTileRowsMax;
        AddExactly(SumFour(sum[j]), is_first, out,
                   out + kStripRows * kTileRowsMax);
      }
    }
  }

  static void TileOf(int64_t rows, const float* a, int64_t lda, const float* b,
                     int64_t strip_rows, int64_t count, bool is_first,
                     float* c) {
    for (int64_t i = 0; i < count; i += kSumValues) {
      const int64_t some = Min(kSumValues, count - i);
      const bool first = is_first && i == 0;
      const float* x = a + i;
      const float* y = b + i;
      switch (rows) {
        case 1: Tile<1>(x, lda, y, strip_rows, some, first, c); break;
        case 2: Tile<2>(x, lda, y, strip_rows, some, first, c); break;
        case 3: Tile<3>(x, lda, y, strip_rows, some, first, c); break;
        case 4: Tile<4>(x, lda, y, strip_rows, some, first, c); break;
      }
    }
  }

  // Unpacks values [k0, k0 + chunk) of `count` rows. They are `stride` floats
  // apart, and the missing rows of a strip of `strip_rows` become 0.
  void UnpackStrip(int64_t row, int64_t count, int64_t strip_rows, int64_t k0,
                   int64_t chunk, int64_t ahead, int64_t stride,
                   float* strip) const {
    for (int64_t j = 0; j < strip_rows; ++j, strip += stride) {
      if (j < count) {
        Unpack(strip_operand, row + j, k0, chunk, ahead, strip);
      } else {
        __builtin_memset(strip, 0, PaddedK(chunk) * 4);
      }
    }
  }

  // Unpacks a chunk of k of a strip to `strip` and multiplies it with the
  // panel.
  void Chunk(int64_t row, int64_t count, int64_t k0, const float* a,
             int64_t rows, int64_t tile_rows, float* strip, float* c) const {
    const int64_t k = strip_operand.k;
    const int64_t lda = PanelRowFloats(k);
    const int64_t chunk = Min(kChunk, k - k0);
    UnpackStrip(row, count, kStripRows, k0, chunk,
                Ahead(strip_operand, k0, kChunk, kStripRows), kStripStride,
                strip);
    for (int64_t r = 0; r < rows; r += tile_rows, c += kTileFloats) {
      TileOf(Min(tile_rows, rows - r), a + r * lda + k0, lda, strip, count,
             PaddedK(chunk), k0 == 0, c);
    }
  }

  // Converts the sums of tiles of kTileRows rows and strips of kRows rows to
  // sums of rows, in place. The sums of a row never lie behind the sums of its
  // tile.
  template <int kTileRows, int kRows>
  static void FinishTiles(int64_t rows, int64_t tile_rows, int64_t count,
                          float* c) {
    const float* tile = c;
    for (int64_t r0 = 0; r0 < rows; r0 += tile_rows) {
      float sums[kTileRows][kRows];
      const float* rest = tile + kRows * kTileRows;
      for (int64_t j = 0; j < count; ++j) {
        for (int r = 0; r < kTileRows; ++r) {
          const int64_t at = j * kTileRows + r;
          sums[r][j] = TotalOf(tile[at], rest[at]);
        }
      }
      const int64_t some = Min(tile_rows, rows - r0);
      for (int64_t r = 0; r < some; ++r) {
        __builtin_memcpy(c + (r0 + r) * 2 * kRows, sums[r], count * 4);
      }
      tile += 2 * kTileRows * kRows;
    }
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* scratch, float* c) const {
    const int64_t k = strip_operand.k;
    if (k == 0) {
      __builtin_memset(c, 0, rows * kSumFloats * 4);
      return;
    }
    for (int64_t k0 = 0; k0 < k; k0 += kChunk) {
      Chunk(row, count, k0, reinterpret_cast<const float*>(panel), rows,
            tile_rows, reinterpret_cast<float*>(scratch), c);
    }
    FinishTiles<kTileRowsMax, kStripRows>(rows, tile_rows, count, c);
  }
};
