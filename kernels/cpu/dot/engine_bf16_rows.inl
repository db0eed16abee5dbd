// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// A second engine of the large dot on vdpbf16ps, in which no operand is
// transposed: the lanes of a vector are values along k. So a group of strip
// rows is only decoded, into L1, and its sums are reduced over the lanes. The
// panel has the layout of EngineBF16.

struct EngineBF16Rows {
  // A register tile of 6 x 4 sums, 4 vectors of a group and one of the panel.
  static constexpr int kTileRowsMax = 6;
  static constexpr int kTileColumns = 4;
  static constexpr int64_t kPanelRowsMax = EngineBF16::kPanelRowsMax;
  static constexpr int kStripRows = 64;
  // Strip rows that are decoded together: 16 KiB of L1.
  static constexpr int kGroupRows = 16;
  // For each panel row, [results of the strip][totals and rests of a group].
  static constexpr int kGroupFloats = kGroupRows / kTileColumns * 32;
  static constexpr int kSumFloats = kStripRows + kGroupFloats;
  static constexpr int64_t kChunkUnits = 4;  // 512 values
  static constexpr int64_t kRowVectors = 4 * kChunkUnits;
  // Roundings (see sums.inl): 15 in a part of 8 vectors (vdpbf16ps rounds
  // twice, and the first product is exact), 1 in the sum of two parts, 4 in the
  // sum of 16 lanes, 1 in the total: 21.
  static constexpr int64_t kPartVectors = 8;

  EngineBF16 base;

  explicit EngineBF16Rows(const Sides& sides) : base(sides) {}

  static int64_t PanelRowBytes(int64_t k) {
    return EngineBF16::PanelRowBytes(k);
  }
  static int64_t StripBytes(int64_t) {
    return kGroupRows * kChunkUnits * kUnitBytes;
  }
  void PackRow(int64_t row, uint8_t* tile, int64_t tile_rows,
               int64_t i) const {
    base.PackRow(row, tile, tile_rows, i);
  }

  // Unpacks units [u0, u1) of `count` rows into a group, [row][vector of k],
  // padded with zero rows.
  void PackGroup(int64_t row, int64_t count, int64_t u0, int64_t u1,
                 __m512i* group) const {
    for (int64_t r = 0; r < kGroupRows; ++r, group += kRowVectors) {
      if (r < count) {
        base.strip_unpacker.Prefetch(row + r, u1, kChunkUnits, kGroupRows);
        base.strip_unpacker.Row(row + r, u0, u1, [=](int64_t u, Unit unit) {
          for (int q = 0; q < 4; ++q) group[4 * (u - u0) + q] = unit.q[q];
        });
      } else {
        for (int64_t v = 0; v < kRowVectors; ++v) {
          group[v] = _mm512_setzero_si512();
        }
      }
    }
  }

  // Lanes 4 i + w of the result have a quarter of the sum of the lanes of s[w].
  JAXPLUGIN_ALWAYS_INLINE static __m512 SumQuarters(const __m512* s) {
    const auto sum = [](__m512 a, __m512 b) {
      const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
      return _mm512_castps_si512(
          _mm512_add_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi32(x, y)),
                        _mm512_castsi512_ps(_mm512_unpackhi_epi32(x, y))));
    };
    const __m512i p = sum(s[0], s[1]), q = sum(s[2], s[3]);
    return _mm512_add_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi64(p, q)),
                         _mm512_castsi512_ps(_mm512_unpackhi_epi64(p, q)));
  }

  // Adds the products of kRows panel rows and 4 rows of a group to c. k has at
  // most two parts. One loop computes both, because the compiler then keeps the
  // sums in registers.
  template <int kRows>
  static void Tile(const uint8_t* a, int64_t tile_rows, const __m512i* b,
                   int64_t vectors, bool is_first, float* c) {
    __m512 other[kRows][kTileColumns];  // sums of the first part, in memory
    for (int64_t first = 0; first < vectors; first += kPartVectors) {
      __m512 part[kRows][kTileColumns];
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int w = 0; w < kTileColumns; ++w) part[r][w] = _mm512_setzero_ps();
      }
      const int64_t end = Min(vectors, first + kPartVectors);
      for (int64_t v = first; v < end; ++v, a += tile_rows * 64) {
        __m512i y[kTileColumns];
#pragma GCC unroll 4
        for (int w = 0; w < kTileColumns; ++w) {
          y[w] = _mm512_load_si512(b + w * kRowVectors + v);
        }
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          __m512i x = _mm512_load_si512(a + r * 64);
          KeepInRegister(&x);
#pragma GCC unroll 4
          for (int w = 0; w < kTileColumns; ++w) {
            part[r][w] = Dot32(part[r][w], x, y[w]);
          }
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int w = 0; w < kTileColumns; ++w) {
          if (first > 0) part[r][w] = _mm512_add_ps(part[r][w], other[r][w]);
          if (end < vectors) other[r][w] = part[r][w];
        }
        if (end < vectors) continue;
        float* out = c + r * kSumFloats;
        AddExactly(SumQuarters(part[r]), is_first, out, out + 16);
      }
    }
  }

  static void TileOf(int64_t rows, const uint8_t* a, int64_t tile_rows,
                     const __m512i* b, int64_t vectors, bool is_first,
                     float* c) {
    switch (rows) {
#define JAXPLUGIN_TILE(n) \
  case n: return Tile<n>(a, tile_rows, b, vectors, is_first, c)
      JAXPLUGIN_TILE(1);
      JAXPLUGIN_TILE(2);
      JAXPLUGIN_TILE(3);
      JAXPLUGIN_TILE(4);
      JAXPLUGIN_TILE(5);
      JAXPLUGIN_TILE(6);
#undef JAXPLUGIN_TILE
    }
  }

  // Sums the quarters of 16 strip rows.
  JAXPLUGIN_ALWAYS_INLINE static __m512 SumGroup(const float* sums) {
    const auto load = [](const float* from) {
      return _mm512_castsi512_ps(_mm512_load_si512(from));
    };
    const auto sum = [](__m512 a, __m512 b) {
      const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
      return _mm512_add_ps(
          _mm512_castsi512_ps(_mm512_shuffle_i32x4(x, y, 0x88)),
          _mm512_castsi512_ps(_mm512_shuffle_i32x4(x, y, 0xdd)));
    };
    __m512 quarters[4];
    for (int i = 0; i < 4; ++i) {
      quarters[i] = TotalOf(load(sums + 32 * i), load(sums + 32 * i + 16));
    }
    return sum(sum(quarters[0], quarters[1]), sum(quarters[2], quarters[3]));
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* strip, float* c) const {
    const int64_t k = base.strip_unpacker.x.k;
    const int64_t units = CeilDiv(k, kUnit);
    const int64_t tile_bytes = tile_rows * PanelRowBytes(k);
    __m512i* group = reinterpret_cast<__m512i*>(strip);
    for (int64_t j = 0; j < count; j += kGroupRows) {
      for (int64_t u0 = 0; u0 < units; u0 += kChunkUnits) {
        const int64_t u1 = Min(units, u0 + kChunkUnits);
        PackGroup(row + j, Min(kGroupRows, count - j), u0, u1, group);
        for (int64_t r = 0, tile = 0; r < rows; r += tile_rows, ++tile) {
          const uint8_t* a =
              panel + tile * tile_bytes + u0 * tile_rows * kUnitBytes;
          for (int w = 0; w < kGroupRows / kTileColumns; ++w) {
            TileOf(Min(tile_rows, rows - r), a, tile_rows,
                   group + w * kTileColumns * kRowVectors, 4 * (u1 - u0),
                   u0 == 0, c + r * kSumFloats + kStripRows + 32 * w);
          }
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        float* out = c + r * kSumFloats;
        const __m512 results =
            units == 0 ? _mm512_setzero_ps() : SumGroup(out + kStripRows);
        __builtin_memcpy(out + j, &results, sizeof(results));
      }
    }
  }
};
