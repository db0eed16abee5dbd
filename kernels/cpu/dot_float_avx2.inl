// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The large dot in float32 with AVX2. Vectors run along k, so nothing is
// transposed: a tile of 3 panel rows by 4 strip rows has 12 sums of 8 lanes,
// which fill the registers with what they multiply, and 7 loads for 12
// multiply-adds. A chunk of k of the panel stays in the second cache while a
// strip passes, eight rows at a time in the first.

// The sums of four vectors.
JAXPLUGIN_ALWAYS_INLINE __m128 SumFour(const __m256* v) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]),
                                      _mm256_hadd_ps(v[2], v[3]));
  return _mm_add_ps(_mm256_castps256_ps128(pairs),
                    _mm256_extractf128_ps(pairs, 1));
}

struct EngineFloat {
  static constexpr int kTileRowsMax = 3;
  static constexpr int kStripRows = 32;
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  static constexpr int kPartRows = 8;  // of a strip, unpacked at a time
  static constexpr int kColumns = 4;   // of a part, multiplied at a time
  static constexpr int64_t kChunk = 512;
  // Roundings: 32 of a sum, 3 of lanes, 1 of the total: more than sums.inl
  // asks for. Parts of 64 values, and four of them, would keep to 16, and take
  // 1.1 to 1.35 times as long: their sums do not fit in the registers.
  static constexpr int64_t kSumValues = 256;
  // The 16 extra values keep rows out of each other's cache sets.
  static constexpr int64_t kExtra = 16;
  static constexpr int64_t kPartStride = kChunk + kExtra;
  // 512 KiB of a chunk of k.
  static constexpr int64_t kPanelRowsMax = 256;

  const Operand& panel_operand;
  const Operand& strip_operand;
  // That of both sides, of which two of 8-bit codes may choose.
  Order order;

  explicit EngineFloat(const Sides& sides)
      : panel_operand(*sides.panel), strip_operand(*sides.strip) {
    order = IsEightBit(panel_operand.format) && IsEightBit(strip_operand.format)
                ? Order::kGroups
                : Order::kNatural;
  }
  static bool IsEightBit(Format f) {
    return f == Format::kE4M3 || f == Format::kE5M2;
  }

  static int64_t PaddedK(int64_t k) { return RoundUp(k, 8); }
  static int64_t PanelRowFloats(int64_t k) { return RoundUp(k, 16) + kExtra; }
  static int64_t PanelRowBytes(int64_t k) { return PanelRowFloats(k) * 4; }
  static int64_t StripBytes(int64_t) { return kPartRows * kPartStride * 4; }

  // Values [k0, k0 + count) of a row times scale, zero-padded.
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

  // From the codes at k0 to those that are unpacked after the rest of a strip:
  // the next chunk, or the first of the next strip.
  static int64_t Ahead(const Operand& x, int64_t k0) {
    if (k0 + kChunk >= x.k) {
      return kStripRows * x.row_bytes - CodeBytes(x, k0);
    }
    return CodeBytes(x, kChunk);
  }
  static int64_t CodeBytes(const Operand& x, int64_t k) {
    return x.format == Format::kE2M1 ? k / 2 : k;
  }

  // Up to kSumValues of k.
  template <int kRows>
  static void Tile(const float* a, int64_t lda, const float* b, int64_t count,
                   bool is_first, float* c) {
    for (int j0 = 0; j0 < kPartRows; j0 += kColumns) {
      __m256 sum[kRows][kColumns];
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
        for (int j = 0; j < kColumns; ++j) sum[r][j] = _mm256_setzero_ps();
      }
      const float* strip = b + j0 * kPartStride;
      for (int64_t i = 0; i < count; i += 8) {
        // kRows vectors stay, one at a time passes: 16 registers are enough.
        __m256 x[kRows];
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) x[r] = _mm256_loadu_ps(a + r * lda + i);
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; ++j) {
          const __m256 y = _mm256_loadu_ps(strip + j * kPartStride + i);
#pragma GCC unroll 3
          for (int r = 0; r < kRows; ++r) {
            sum[r][j] = _mm256_fmadd_ps(x[r], y, sum[r][j]);
          }
        }
      }
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
        float* out = c + r * kSumFloats + j0;
        AddExactly(SumFour(sum[r]), is_first, out, out + kStripRows);
      }
    }
  }

  static void TileOf(int64_t rows, const float* a, int64_t lda, const float* b,
                     int64_t count, bool is_first, float* c) {
    for (int64_t i = 0; i < count; i += kSumValues) {
      const int64_t some = Min(kSumValues, count - i);
      const bool first = is_first && i == 0;
      switch (rows) {
        case 1: Tile<1>(a + i, lda, b + i, some, first, c); break;
        case 2: Tile<2>(a + i, lda, b + i, some, first, c); break;
        case 3: Tile<3>(a + i, lda, b + i, some, first, c); break;
      }
    }
  }

  // A part of a strip times the panel, a chunk of k.
  void Part(int64_t row, int64_t count, int64_t k0, const float* a,
            int64_t rows, int64_t tile_rows, float* part, float* c) const {
    const int64_t k = strip_operand.k;
    const int64_t lda = PanelRowFloats(k);
    const int64_t chunk = Min(kChunk, k - k0);
    const int64_t ahead = Ahead(strip_operand, k0);
    for (int64_t j = 0; j < kPartRows; ++j) {
      if (j < count) {
        Unpack(strip_operand, row + j, k0, chunk, ahead,
               part + j * kPartStride);
      } else {
        __builtin_memset(part + j * kPartStride, 0, PaddedK(chunk) * 4);
      }
    }
    for (int64_t r = 0; r < rows; r += tile_rows) {
      TileOf(Min(tile_rows, rows - r), a + r * lda + k0, lda, part,
             PaddedK(chunk), k0 == 0, c + r * kSumFloats);
    }
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* scratch, float* c) const {
    const int64_t k = strip_operand.k;
    if (k == 0) {
      for (int64_t i = 0; i < rows * kSumFloats; ++i) c[i] = 0;
    }
    for (int64_t k0 = 0; k0 < k; k0 += kChunk) {
      for (int64_t j = 0; j < count; j += kPartRows) {
        Part(row + j, Min(kPartRows, count - j), k0,
             reinterpret_cast<const float*>(panel), rows, tile_rows,
             reinterpret_cast<float*>(scratch), c + j);
      }
    }
    FinishTotals<kStripRows>(rows, c);
  }
};
