// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of the large dot on vdpbf16ps, with 32 products per instruction.
// The values of both operands are multiplied by their scales and stored as
// bf16, which is exact for safe rows (RowIsSafe). If the product of a value of
// the strip and its scale does not fit in bf16 (kScaled), the values are stored
// alone, and the scales multiply sums of 16 products.
//
// vdpbf16ps flushes subnormal inputs and results, whatever MXCSR contains.

JAXPLUGIN_ALWAYS_INLINE __m512 Dot32(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

template <bool kScaled>
struct EngineBF16Of {
  // A register tile of 7 x 2 vectors has 14 parts and 14 sums.
  static constexpr int kTileRowsMax = 7;
  static constexpr int64_t kPanelRowsMax = int64_t{1} << 62;
  static constexpr int kPartRows = 32;  // strip rows of a register tile
  // Twice kPartRows, so that each panel tile is used twice when it has been
  // read from an outer cache.
  static constexpr int kStripRows = 64;
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  static constexpr int64_t kChunkUnits = 4;  // 512 values: 64 KiB of strip
  // Roundings (see sums.inl): 15 in a part (vdpbf16ps rounds twice, and the
  // first product is exact), 15 in the sum of the parts of two units (16 if
  // kScaled), 1 in the total: 31 or 32. A limit of 16 needs one more level of
  // sums, for which there are no registers.
  static constexpr int kPartDwords = 8;
  static constexpr int64_t kUnitParts = 64 / kPartDwords;
  static constexpr int64_t kSumUnits = 2;

  static constexpr int64_t kPartBytes = kPartRows * kChunkUnits * kUnitBytes;
  // The scales of a strip follow its values: [part of 32 rows][part of k][32
  // rows].
  static constexpr int64_t kScaleBytes =
      kScaled ? kChunkUnits * kUnitParts * kPartRows * 4 : 0;
  static constexpr int64_t kScales = kStripRows * kChunkUnits * kUnitBytes;

  Unpacker panel_unpacker;
  Unpacker strip_unpacker;
  const bool is_packed;  // the strip
  // The index, among 16 scales, of the scale of each 32 values of a chunk.
  const ScaleIndex scale_index;

  explicit EngineBF16Of(const Sides& sides)
      : panel_unpacker(*sides.panel,
                       kScaled && IsPacked(sides.strip->format)
                           ? Order::kNibbleBlocks
                           : NativeOrder(sides.strip->format)),
        strip_unpacker(*sides.strip, NativeOrder(sides.strip->format)),
        is_packed(IsPacked(sides.strip->format)),
        scale_index(sides.strip->block, kChunkUnits * kUnit) {}

  // The layout of a panel tile is [vector of k][row][16 dwords], and of a strip
  // [part of 32 rows][dword][32 rows].
  static int64_t PanelRowBytes(int64_t k) {
    return Max(CeilDiv(k, kUnit), 1) * kUnitBytes;
  }
  static int64_t StripBytes(int64_t) {
    return kScales + kStripRows / kPartRows * kScaleBytes;
  }

  void PackRow(int64_t row, uint8_t* tile, int64_t tile_rows,
               int64_t i) const {
    panel_unpacker.Row(
        row, 0, CeilDiv(panel_unpacker.x.k, kUnit), [=](int64_t u, Unit unit) {
          uint8_t* out = tile + (4 * u * tile_rows + i) * 64;
          for (int q = 0; q < 4; ++q) {
            _mm512_store_si512(out + q * tile_rows * 64, unit.q[q]);
          }
        });
  }

  // Unpacks units [u0, u1) of `count` rows into a strip, padded with zero rows.
  void PackStrip(int64_t row, int64_t count, int64_t u0, int64_t u1,
                 uint8_t* strip) const {
    constexpr int64_t kVectors = 4 * kChunkUnits;
    alignas(64) __m512i rows[16][kVectors];
    const int64_t vectors = 4 * (u1 - u0);
    const int64_t parts = CeilDiv(count, kPartRows);
    for (int64_t r0 = 0; r0 < parts * kPartRows; r0 += 16) {
      uint8_t* part = strip + r0 / kPartRows * kPartBytes;
      for (int64_t r = 0; r < 16; ++r) {
        __m512i* out = rows[r];
        if (r0 + r < count) {
          strip_unpacker.Row(row + r0 + r, u0, u1, [=](int64_t u, Unit unit) {
            for (int q = 0; q < 4; ++q) out[4 * (u - u0) + q] = unit.q[q];
          });
        } else {
          for (int64_t v = 0; v < vectors; ++v) out[v] = _mm512_setzero_si512();
        }
      }
      for (int64_t v = 0; v < vectors; ++v) {
        __m512i in[16], out[16];
        for (int r = 0; r < 16; ++r) in[r] = rows[r][v];
        Transpose16(in, out);
        for (int d = 0; d < 16; ++d) {
          // kNibbleBlocks gathers the dwords of 32 values.
          const int64_t at = kScaled && is_packed
                                 ? (v / 4 * 4 + d / 4) * 16 + d % 4 * 4 + v % 4
                                 : 16 * v + d;
          _mm512_store_si512(part + (at * kPartRows + r0 % kPartRows) * 4,
                             out[d]);
        }
      }
    }
  }

  // Unpacks the scales of the chunk of `count` rows that begins at value k0.
  void PackScales(int64_t row, int64_t count, int64_t k0,
                  uint8_t* strip) const {
    const Operand& x = strip_unpacker.x;
    const int64_t column = k0 / x.block;
    const __m512 unit = _mm512_set1_ps(PowerOf(-x.fraction_bits));
    for (int64_t r0 = 0; r0 < RoundUp(count, kPartRows); r0 += 16) {
      __m512i in[16], out[16];
      for (int64_t r = 0; r < 16; ++r) {
        const int64_t left = r0 + r < count ? x.scale_cols - column : 0;
        const __m512 scales = LoadScales(
            x.scale_kind, ScaleAt(x, row + r0 + r, column), left);
        in[r] = _mm512_castps_si512(
            _mm512_mul_ps(scale_index.Spread(scales, 0), unit));
      }
      Transpose16(in, out);
      uint8_t* to = strip + kScales + r0 / kPartRows * kScaleBytes +
                    r0 % kPartRows * 4;
      for (int64_t p = 0; p < kChunkUnits * kUnitParts; ++p) {
        // The block of 32 values of a part. In byte order, the parts of two
        // vectors alternate.
        const int64_t block = is_packed ? p / 2 : p / 4 * 2 + p % 2;
        _mm512_store_si512(to + p * kPartRows * 4, out[block]);
      }
    }
  }

  // Adds the products of kRows panel rows and 32 strip rows to c. k has `parts`
  // parts of kPartDwords dwords, with scales at `scale` if kScaled. Prefetches
  // the same parts of kRows rows at `next`: 512 x 512 x 4096 is 1.08x faster
  // (one Zen 4 core, 2026-11). The loops over r and v are unrolled explicitly,
  // or the compiler keeps the sums in memory.
  template <int kRows>
  static void Tile(const uint8_t* a, int64_t tile_rows, const uint8_t* next,
                   const uint8_t* b, const uint8_t* scale, int64_t parts,
                   bool is_first, float* c) {
    __m512 sum[kRows][2];
#pragma GCC unroll 7
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    }
    for (int64_t p = 0; p < parts; ++p, next += kRows * kPartDwords * 4) {
      __m512 part[kRows][2];
#pragma GCC unroll 7
      for (int r = 0; r < kRows; ++r) {
        part[r][0] = part[r][1] = _mm512_setzero_ps();
      }
      for (int i = 0; i < kRows * kPartDwords * 4; i += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(next + i), _MM_HINT_T0);
      }
      for (int d = 0; d < kPartDwords; ++d) {
        const __m512i b0 = _mm512_load_si512(b + d * 128);
        const __m512i b1 = _mm512_load_si512(b + d * 128 + 64);
#pragma GCC unroll 7
        for (int r = 0; r < kRows; ++r) {
          int32_t pair;
          __builtin_memcpy(&pair, a + r * 64 + d * 4, 4);
          const __m512i x = _mm512_set1_epi32(pair);
          part[r][0] = Dot32(part[r][0], x, b0);
          part[r][1] = Dot32(part[r][1], x, b1);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        __m512 factor;
        if constexpr (kScaled) {
          factor = _mm512_castsi512_ps(
              _mm512_load_si512(scale + (2 * p + v) * 64));
        }
#pragma GCC unroll 7
        for (int r = 0; r < kRows; ++r) {
          sum[r][v] = kScaled ? _mm512_fmadd_ps(part[r][v], factor, sum[r][v])
                              : _mm512_add_ps(sum[r][v], part[r][v]);
        }
      }
      // A vector of a panel row holds two parts.
      a += p % 2 == 0 ? kPartDwords * 4 : tile_rows * 64 - kPartDwords * 4;
      b += kPartDwords * 128;
    }
#pragma GCC unroll 7
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        float* out = c + r * kSumFloats + 16 * v;
        AddExactly(sum[r][v], is_first, out, out + kStripRows);
      }
    }
  }

  static void TileOf(int64_t rows, const uint8_t* a, int64_t tile_rows,
                     const uint8_t* next, const uint8_t* b,
                     const uint8_t* scale, int64_t parts, bool is_first,
                     float* c) {
    switch (rows) {
#define JAXPLUGIN_TILE(n) \
  case n:                 \
    return Tile<n>(a, tile_rows, next, b, scale, parts, is_first, c)
      JAXPLUGIN_TILE(1);
      JAXPLUGIN_TILE(2);
      JAXPLUGIN_TILE(3);
      JAXPLUGIN_TILE(4);
      JAXPLUGIN_TILE(5);
      JAXPLUGIN_TILE(6);
      JAXPLUGIN_TILE(7);
#undef JAXPLUGIN_TILE
    }
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* strip, float* c) const {
    const int64_t k = strip_unpacker.x.k;
    const int64_t units = CeilDiv(k, kUnit);
    if (k == 0) {
      for (int64_t i = 0; i < rows * kSumFloats; ++i) c[i] = 0;
    }
    const int64_t tile_bytes = tile_rows * PanelRowBytes(k);
    for (int64_t u0 = 0; u0 < units; u0 += kChunkUnits) {
      const int64_t u1 = Min(units, u0 + kChunkUnits);
      PackStrip(row, count, u0, u1, strip);
      if constexpr (kScaled) PackScales(row, count, u0 * kUnit, strip);
      for (int64_t r = 0, tile = 0; r < rows; r += tile_rows, ++tile) {
        const uint8_t* a =
            panel + tile * tile_bytes + u0 * tile_rows * kUnitBytes;
        for (int64_t j = 0; j * kPartRows < count; ++j) {
          for (int64_t u = u0; u < u1; u += kSumUnits) {
            const int64_t past = (u - u0) * kUnitBytes;
            const uint8_t* here = a + past * tile_rows;
            // Behind the last tile is memory that another thread writes.
            const bool is_last = r + tile_rows >= rows;
            TileOf(Min(tile_rows, rows - r), here, tile_rows,
                   is_last ? here : here + tile_bytes,
                   strip + j * kPartBytes + past * kPartRows,
                   strip + kScales + j * kScaleBytes +
                       (u - u0) * kUnitParts * kPartRows * 4,
                   Min(kSumUnits, u1 - u) * kUnitParts, u == 0,
                   c + r * kSumFloats + j * kPartRows);
          }
        }
      }
    }
    FinishTotals<kStripRows>(rows, c);
  }
};

using EngineBF16 = EngineBF16Of<false>;
