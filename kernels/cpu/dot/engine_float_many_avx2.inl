// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of the large dot in float32 with AVX2 for many panel rows. The
// lanes of a vector are 8 panel rows. The panel is transposed once, and the
// values of a strip are broadcast, so that decoding leaves them in rows. A
// register tile of 16 panel rows by 6 strip rows has 12 accumulators, and 12
// multiply-adds need 8 loads. Without sums over lanes, such a tile is faster than
// one of EngineFloat, but a tile with fewer rows takes as long.

struct EngineFloatMany : EngineFloat {
  using EngineFloat::EngineFloat;
  static constexpr int kTileRowsMax = 16;
  // With 12 rows, the engine reads the panel from L3 twice as often.
  static constexpr int kStripRows = 24;
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  static constexpr int kColumns = 6;  // strip rows multiplied at a time
  static_assert(kStripRows % kColumns == 0);
  static constexpr int kSums = 2 * kColumns;  // accumulators of 8 lanes
  // Floats of a tile's sums: [totals, rests][strip row][kTileRowsMax].
  static constexpr int64_t kTileFloats = kTileRowsMax * kSumFloats;
  // Roundings: 16 in a part, 13 in the sum of 14 parts, 1 in the total. These 30,
  // and two for wide scales, are at most twice the 16 of sums.inl.
  static constexpr int64_t kPart = 16;
  static constexpr int64_t kSumValues = 14 * kPart;
  static constexpr int64_t kChunk = 2 * kSumValues;
  // The extra floats put rows into different cache sets.
  static constexpr int64_t kStripStride = kChunk + 8;

  // Whether this engine is faster than EngineFloat: at most an eighth of the
  // rows of its tiles are missing. Its time over that of EngineFloat, f32 *
  // MXFP4, n = 1024, k = 4096, one Zen 3 core (2026-11):
  //   rows     8    12    14    16    20    24    28    32    40    64
  //         1.50  1.18  1.04  0.97  1.32  1.12  1.01  0.88  0.98  0.89
  static bool IsFaster(int64_t rows) {
    return RoundUp(rows, kTileRowsMax) * 7 <= rows * 8;
  }

  static int64_t PanelRowBytes(int64_t k) { return PaddedK(k) * 4; }
  static int64_t StripBytes(int64_t) { return kStripRows * kStripStride * 4; }

  // Stores 8 values of each row of a tile in turn; FinishTile transposes them.
  void PackRow(int64_t row, uint8_t* tile, int64_t tile_rows,
               int64_t i) const {
    const int64_t k = panel_operand.k;
    float* out = reinterpret_cast<float*>(tile) + 8 * i;
    for (int64_t k0 = 0; k0 < k; k0 += kChunk) {
      float values[kChunk];
      const int64_t count = Min(kChunk, k - k0);
      Unpack(panel_operand, row, k0, count, CodeBytes(panel_operand, kChunk),
             values);
      for (int64_t j = 0; j < count; j += 8, out += 8 * tile_rows) {
        __builtin_memcpy(out, values + j, 32);
      }
    }
  }

  // Adds the products of value `i` of a tile's rows and of kColumns strip rows to
  // the sums [strip row][vector].
  JAXPLUGIN_ALWAYS_INLINE static void Step(const float* a, const float* b,
                                           int64_t i, __m256 (&sum)[kSums]) {
    const float* rows = a + i * kTileRowsMax;
    const __m256 x[2] = {_mm256_load_ps(rows), _mm256_load_ps(rows + 8)};
#pragma GCC unroll 6
    for (int j = 0; j < kColumns; ++j) {
      const __m256 y = _mm256_broadcast_ss(b + j * kStripStride + i);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        __m256& s = sum[2 * j + v];
        s = i == 0 ? _mm256_mul_ps(x[v], y) : _mm256_fmadd_ps(x[v], y, s);
      }
    }
  }

  // Adds the products of a tile and kColumns strip rows over `count` values of
  // k, or over kPart values if kIsWhole. Stores the sums to `out`, or adds them
  // to it.
  template <bool kIsWhole>
  JAXPLUGIN_ALWAYS_INLINE static void Part(const float* a, const float* b,
                                           int64_t count, bool is_first,
                                           float* out) {
    __m256 sum[kSums];
    Step(a, b, 0, sum);
    if constexpr (kIsWhole) {
#pragma GCC unroll 32
      for (int i = 1; i < kPart; ++i) {
        Step(a, b, i, sum);
        // Otherwise GCC 12 loads ahead and spills sums to memory.
        asm(""
            : "+x"(sum[0]), "+x"(sum[1]), "+x"(sum[2]), "+x"(sum[3]),
              "+x"(sum[4]), "+x"(sum[5]), "+x"(sum[6]), "+x"(sum[7]),
              "+x"(sum[8]), "+x"(sum[9]), "+x"(sum[10]), "+x"(sum[11]));
      }
    } else {
#pragma GCC unroll 1
      for (int64_t i = 1; i < count; ++i) Step(a, b, i, sum);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) {
      __m256 s = sum[i];
      if (!is_first) s = _mm256_add_ps(s, _mm256_load_ps(out + 8 * i));
      _mm256_store_ps(out + 8 * i, s);
    }
  }

  // Adds the products of a tile and a strip over `count` values of k, at most
  // kSumValues, to c.
  static void Tile(const float* a, const float* b, int64_t strip_rows,
                   int64_t count, bool is_first, float* c) {
    for (int64_t j0 = 0; j0 < strip_rows; j0 += kColumns) {
      const float* strip = b + j0 * kStripStride;
      alignas(32) float sum[8 * kSums];
      int64_t i = 0;
      for (; i + kPart <= count; i += kPart) {
        Part<true>(a + i * kTileRowsMax, strip + i, kPart, i == 0, sum);
      }
      if (i < count) {
        Part<false>(a + i * kTileRowsMax, strip + i, count - i, i == 0, sum);
      }
      float* out = c + j0 * kTileRowsMax;
#pragma GCC unroll 12
      for (int v = 0; v < kSums; ++v, out += 8) {
        AddExactly(_mm256_load_ps(sum + 8 * v), is_first, out,
                   out + kStripRows * kTileRowsMax);
      }
    }
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* scratch, float* c) const {
    const int64_t k = strip_operand.k;
    float* strip = reinterpret_cast<float*>(scratch);
    if (k == 0) __builtin_memset(c, 0, rows * kSumFloats * 4);
    for (int64_t k0 = 0; k0 < k; k0 += kChunk) {
      const int64_t chunk = Min(kChunk, k - k0);
      UnpackStrip(row, count, kStripRows, k0, chunk,
                  Ahead(strip_operand, k0, kChunk, kStripRows), kStripStride,
                  strip);
      for (int64_t i = 0; i < chunk; i += kSumValues) {
        const float* a = reinterpret_cast<const float*>(panel) +
                         (k0 + i) * kTileRowsMax;
        float* tile = c;
        for (int64_t r = 0; r < rows; r += kTileRowsMax) {
          Tile(a, strip + i, count, Min(kSumValues, chunk - i), k0 + i == 0,
               tile);
          a += kTileRowsMax * PaddedK(k);
          tile += kTileFloats;
        }
      }
    }
    if (k != 0) FinishTiles<kTileRowsMax, kStripRows>(rows, tile_rows, count, c);
  }
};

JAXPLUGIN_ALWAYS_INLINE int64_t TileRows(const EngineFloatMany&, int64_t) {
  return EngineFloatMany::kTileRowsMax;
}

// Transposes a tile from [k / 8][row][8] to [k][row], in place. Rows from `count`
// on become 0.
inline void FinishTile(const EngineFloatMany&, uint8_t* tile, int64_t,
                       int64_t count, int64_t k) {
  constexpr int kRows = EngineFloatMany::kTileRowsMax;
  __m256i* values = reinterpret_cast<__m256i*>(tile);
  for (int64_t k0 = 0; k0 < k; k0 += 8, values += kRows) {
    __m256i rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      rows[r] = r < count ? values[r] : _mm256_setzero_si256();
    }
    for (int v = 0; v < 2; ++v) {
      Transpose8(rows + 8 * v);
      for (int i = 0; i < 8; ++i) values[2 * i + v] = rows[8 * v + i];
    }
  }
}
