// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of the large dot for any machine. It multiplies and adds in
// float32, with the vector extensions of GCC and Clang. Vectors run along k, so
// nothing is transposed.

constexpr int kLanes = 4;  // SSE2, NEON
typedef float Vector __attribute__((vector_size(kLanes * 4)));

JAXPLUGIN_ALWAYS_INLINE Vector LoadVector(const float* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

JAXPLUGIN_ALWAYS_INLINE float SumLanes(Vector v) {
  float lanes[kLanes];
  __builtin_memcpy(lanes, &v, sizeof(v));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

struct EngineF32 {
  static constexpr int kTileRowsMax = 3;  // 3 x 4 accumulators, 16 registers
  static constexpr int64_t kPanelRowsMax = int64_t{1} << 62;
  static constexpr int kStripRows = 8;
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  static constexpr int kColumns = 4;  // strip rows multiplied at a time
  static constexpr int64_t kChunk = 512;
  // Roundings (see sums.inl): 7 in a part of 8 products, 3 in a sum of 4 parts,
  // 2 in the sum of the lanes, 1 in the product (without fused multiply-add, or
  // if an operand has floats), 1 in the total.
  static constexpr int64_t kPartValues = 8 * kLanes;
  static constexpr int64_t kSumValues = 4 * kPartValues;

  const Operand& panel_operand;
  const Operand& strip_operand;

  explicit EngineF32(const Sides& sides)
      : panel_operand(*sides.panel), strip_operand(*sides.strip) {}

  static int64_t PaddedK(int64_t k) { return RoundUp(k, kLanes); }
  // The 16 extra floats put the rows of a tile into different cache sets.
  static int64_t PanelRowFloats(int64_t k) { return RoundUp(k, 16) + 16; }
  // Whether the panel holds only row numbers instead of unpacked rows. It does
  // if a row exceeds kPanelBytesMax, so that scratch memory stays bounded for
  // any k. Each strip then unpacks the panel rows again, one chunk at a time.
  static bool HoldsNumbers(int64_t k) {
    return PanelRowFloats(k) * 4 > kPanelBytesMax;
  }
  static int64_t PanelRowBytes(int64_t k) {
    return HoldsNumbers(k) ? sizeof(int64_t) : PanelRowFloats(k) * 4;
  }
  static int64_t StripBytes(int64_t k) {
    const int panel_rows = HoldsNumbers(k) ? kTileRowsMax : 0;
    return (kStripRows + panel_rows) * kChunk * 4;
  }

  // Unpacks values [k0, k0 + count) of a row times their scales, padded with
  // zeros to a whole vector.
  static void Unpack(const Operand& x, int64_t row, int64_t k0, int64_t count,
                     float* out) {
    DecodeValues(x, RowValues(x, row), k0, count, out);
    ApplyScale(x, row, k0, count, out);
    for (int64_t i = count; i < PaddedK(count); ++i) out[i] = 0;
  }

  void PackRow(int64_t row, uint8_t* tile, int64_t, int64_t i) const {
    const int64_t k = panel_operand.k;
    if (HoldsNumbers(k)) {
      __builtin_memcpy(tile + i * PanelRowBytes(k), &row, sizeof(row));
      return;
    }
    float* out = reinterpret_cast<float*>(tile) + i * PanelRowFloats(k);
    for (int64_t k0 = 0; k0 < k; k0 += kChunk) {
      Unpack(panel_operand, row, k0, Min(kChunk, k - k0), out + k0);
    }
  }

  // Unpacks a chunk of `rows` panel rows, given by their numbers. The rows of
  // the result are kChunk floats apart.
  void UnpackTile(const uint8_t* numbers, int64_t rows, int64_t k0,
                  int64_t count, float* out) const {
    for (int64_t r = 0; r < rows; ++r) {
      int64_t row;
      __builtin_memcpy(&row, numbers + r * sizeof(row), sizeof(row));
      Unpack(panel_operand, row, k0, count, out + r * kChunk);
    }
  }

  // Adds the products of kRows panel rows and a strip over `count` values of k,
  // at most kSumValues.
  template <int kRows>
  static void Tile(const float* a, int64_t lda, const float* b, int64_t count,
                   bool is_first, float* c) {
    for (int j0 = 0; j0 < kStripRows; j0 += kColumns) {
      Vector sum[kRows][kColumns] = {};
      const float* strip = b + j0 * kChunk;
      for (int64_t i0 = 0; i0 < count; i0 += kPartValues) {
        Vector part[kRows][kColumns] = {};
        const int64_t end = Min(i0 + kPartValues, count);
        for (int64_t i = i0; i < end; i += kLanes) {
          // kRows vectors stay in registers. The strip's vectors are loaded one
          // at a time, so 16 registers are enough.
          Vector x[kRows];
          for (int r = 0; r < kRows; ++r) x[r] = LoadVector(a + r * lda + i);
          for (int j = 0; j < kColumns; ++j) {
            const Vector y = LoadVector(strip + j * kChunk + i);
            for (int r = 0; r < kRows; ++r) part[r][j] += x[r] * y;
          }
        }
        for (int r = 0; r < kRows; ++r) {
          for (int j = 0; j < kColumns; ++j) sum[r][j] += part[r][j];
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int j = 0; j < kColumns; ++j) {
          float* out = c + r * kSumFloats + j0 + j;
          AddExactly(SumLanes(sum[r][j]), is_first, out, out + kStripRows);
        }
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

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* scratch, float* c) const {
    const int64_t k = strip_operand.k;
    const bool holds_numbers = HoldsNumbers(k);
    const float* a = reinterpret_cast<const float*>(panel);
    float* strip = reinterpret_cast<float*>(scratch);
    float* tile = strip + kStripRows * kChunk;
    const int64_t lda = holds_numbers ? kChunk : PanelRowFloats(k);
    if (k == 0) {
      for (int64_t i = 0; i < rows * kSumFloats; ++i) c[i] = 0;
    }
    for (int64_t k0 = 0; k0 < k; k0 += kChunk) {
      const int64_t chunk = Min(kChunk, k - k0);
      for (int64_t j = 0; j < kStripRows; ++j) {
        if (j < count) {
          Unpack(strip_operand, row + j, k0, chunk, strip + j * kChunk);
        } else {
          __builtin_memset(strip + j * kChunk, 0, PaddedK(chunk) * 4);
        }
      }
      for (int64_t r = 0; r < rows; r += tile_rows) {
        const int64_t some = Min(tile_rows, rows - r);
        const float* from = a + r * lda + k0;
        if (holds_numbers) {
          UnpackTile(panel + r * PanelRowBytes(k), some, k0, chunk, tile);
          from = tile;
        }
        TileOf(some, from, lda, strip, PaddedK(chunk), k0 == 0,
               c + r * kSumFloats);
      }
    }
    FinishTotals<kStripRows>(rows, c);
  }
};
