// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of the large dot in float32 with AVX-512. Vectors run along k, so
// nothing is transposed. A strip is decoded to float32, with its scales, in the
// order of k in which decoding leaves it (FloatPosition). The panel is permuted
// to that order when it is packed. A register tile of 4 panel rows by 4 strip
// rows has 16 accumulators: 16 multiply-adds need 8 loads. Tiles of 6 by 4 are
// not faster (Zen 5).

// Returns the index, in a unit that is decoded to float32, of its value v.
inline int FloatPosition(Order order, int v) {
  if (order == Order::kNatural) return v;
  // The even and the odd words of a vector of bf16 become two vectors.
  const int word = WordOf(order, v);
  return (word / 32 * 2 + word % 2) * 16 + word % 32 / 2;
}

// 24 KiB of strip rows in L1, next to 6 KiB of a tile and as much of the next.
constexpr int kFloatStripRows = 16;

// Converts units [u0, u1) of a row to float32 and multiplies them by their
// scales, in the native order of the format. Values behind k are 0. Prefetches
// the codes `ahead` bytes further, and the same scales of the next strip. Both
// may be outside of the array.
inline void UnpackFloats(const Unpacker& unpacker, int64_t row, int64_t u0,
                         int64_t u1, int64_t ahead, float* out) {
  const Operand& x = unpacker.x;
  const uint8_t* values = RowValues(x, row);
  const int64_t first = BytesOf(x.format, u0 * kUnit);
  const int64_t past = BytesOf(x.format, u1 * kUnit);
  for (int64_t at = first; at < past; at += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(values + at + ahead),
                 _MM_HINT_T0);
  }
  if (IsPlain(x.format)) {
    const int64_t count = Min(u1 * kUnit, x.k) - u0 * kUnit;
    DecodeValues(x, values, u0 * kUnit, count, out);
    for (int64_t i = count; i < (u1 - u0) * kUnit; ++i) out[i] = 0;
    return;
  }
  _mm_prefetch(reinterpret_cast<const char*>(ScaleAt(
                   x, row + kFloatStripRows, u0 * kUnit / x.block)),
               _MM_HINT_T1);
  const Tables tables = unpacker.table_bytes.Load();
  const __m512 unit = _mm512_set1_ps(PowerOf(-x.fraction_bits));
  const auto store = [&out](__m512i value, __m512 by) {
    const __m512 product = _mm512_mul_ps(_mm512_castsi512_ps(value), by);
    _mm512_store_si512(out, _mm512_castps_si512(product));
    out += 16;
  };
  const auto widen = [&store](__m512i pairs, __m512 by) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    store(_mm512_slli_epi32(pairs, 16), by);
    store(_mm512_and_si512(pairs, high), by);
  };
  // The units whose scales are loaded together: 16 scales, or 512 values. They
  // begin at u0 if a block does.
  const int64_t step = Min(x.block / 8, 4);
  const int64_t first_unit = kUnit % x.block == 0 ? u0 : u0 / step * step;
  for (int64_t s = first_unit; s < u1; s += step) {
    const int64_t c = s * kUnit / x.block;
    const __m512 scales = _mm512_mul_ps(
        LoadScales(x.scale_kind, ScaleAt(x, row, c), x.scale_cols - c), unit);
    const int64_t end = Min(s + step, u1);
    for (int64_t u = Max(s, u0); u < end; ++u) {
      const int64_t at = BytesOf(x.format, u * kUnit);
      if (IsPacked(x.format)) {
        const __m512i codes = LoadBytes(values + at, x.row_bytes - at);
        const __m512 by = unpacker.index.Spread(scales, u - s);
        for (int i = 0; i < 4; ++i) {
          store(Unpack4ToFloats(codes, tables.low0, i), by);
          store(Unpack4ToFloats(codes, tables.low0, i + 4), by);
        }
        continue;
      }
      for (int half = 0; half < 2; ++half) {
        const int64_t from = at + half * 64;
        const __m512i codes = LoadBytes(values + from, x.row_bytes - from);
        __m512i even, odd;
        if (x.format == Format::kInt8) {
          UnpackInt8(codes, tables, &even, &odd);
        } else {
          Unpack8(codes, tables, &even, &odd);
        }
        const __m512 by = unpacker.index.Spread(scales, 2 * (u - s) + half);
        widen(even, by);
        widen(odd, by);
      }
    }
  }
}

JAXPLUGIN_ALWAYS_INLINE __m512 LoadFloats(const float* p) {
  return _mm512_castsi512_ps(_mm512_load_si512(p));
}

// Returns the sum of the lanes of each of 16 vectors.
JAXPLUGIN_ALWAYS_INLINE __m512 SumSixteen(const __m512* v) {
  const auto add = [](__m512i a, __m512i b) {
    return _mm512_castps_si512(
        _mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
  };
  __m512i pairs[8], fours[4], eights[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512i a = _mm512_castps_si512(v[2 * i]);
    const __m512i b = _mm512_castps_si512(v[2 * i + 1]);
    pairs[i] = add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    fours[i] = add(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                   _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    eights[i] = add(_mm512_shuffle_i32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                    _mm512_shuffle_i32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  }
  return _mm512_castsi512_ps(
      add(_mm512_shuffle_i32x4(eights[0], eights[1], 0x88),
          _mm512_shuffle_i32x4(eights[0], eights[1], 0xdd)));
}

struct EngineFloat {
  static constexpr int kTileRowsMax = 4;
  static constexpr int kStripRows = kFloatStripRows;
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  // Roundings: 24 in a sum, which is a chunk, 4 in the sum of the lanes, 1 in
  // the total, and 1 in the product with each scale that is wide.
  static constexpr int64_t kChunkUnits = 3;
  static constexpr int64_t kChunk = kChunkUnits * kUnit;
  static constexpr int64_t kPanelRowsMax = 512;
  // Strip rows that are multiplied at a time with `rows` panel rows, for 16
  // accumulators or, with fewer rows, enough to hide the latency.
  static constexpr int Columns(int rows) { return rows <= 2 ? 8 : 4; }
  // Floats of a tile's sums: for each group of Columns strip rows, 16 totals and
  // 16 rests.
  static constexpr int64_t kTileFloats = kTileRowsMax * kSumFloats;

  Unpacker panel_unpacker;
  Unpacker strip_unpacker;
  int32_t source[kUnit];  // the panel's index of each value of a strip's unit

  explicit EngineFloat(const Sides& sides)
      : panel_unpacker(*sides.panel, Order::kNatural),
        strip_unpacker(*sides.strip, Order::kNatural) {
    for (int v = 0; v < kUnit; ++v) {
      source[FloatPosition(NativeOrder(sides.strip->format), v)] =
          FloatPosition(NativeOrder(sides.panel->format), v);
    }
  }

  // The layout of a panel tile is [chunk][row][kChunk].
  static int64_t PanelRowBytes(int64_t k) {
    return Max(CeilDiv(k, kChunk), 1) * kChunk * 4;
  }
  static int64_t StripBytes(int64_t) { return kStripRows * kChunk * 4; }

  void PackRow(int64_t row, uint8_t* tile, int64_t tile_rows,
               int64_t i) const {
    const int64_t units = CeilDiv(panel_unpacker.x.k, kUnit);
    for (int64_t u = 0; u < units; ++u) {
      float* out = reinterpret_cast<float*>(tile) +
                   (u / kChunkUnits * tile_rows + i) * kChunk +
                   u % kChunkUnits * kUnit;
      alignas(64) float native[kUnit];
      UnpackFloats(panel_unpacker, row, u, u + 1, 0, native);
      for (int p = 0; p < kUnit; ++p) out[p] = native[source[p]];
    }
  }

  // Adds the products of kRows panel rows and a strip over `count` values of k.
  // Prefetches the next tile: 512 x 2048 x 2048 is then 1.05x faster (Zen 5,
  // 2026-11).
  template <int kRows>
  static void Tile(const float* a, const float* next, const float* b,
                   int64_t strip_rows, int64_t count, bool is_first, float* c) {
    constexpr int kColumns = Columns(kRows);
    for (int64_t j0 = 0; j0 < strip_rows; j0 += kColumns, c += 32) {
      __m512 sum[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) sum[i] = _mm512_setzero_ps();
      const float* strip = b + j0 * kChunk;
      for (int64_t i = 0; i < count; i += 16, next += 16) {
        _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
        __m512 y[kColumns];
#pragma GCC unroll 8
        for (int j = 0; j < kColumns; ++j) {
          y[j] = LoadFloats(strip + j * kChunk + i);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          __m512 x = LoadFloats(a + r * kChunk + i);
          KeepInRegister(&x);
#pragma GCC unroll 8
          for (int j = 0; j < kColumns; ++j) {
            sum[r * kColumns + j] =
                _mm512_fmadd_ps(x, y[j], sum[r * kColumns + j]);
          }
        }
      }
      AddExactly(SumSixteen(sum), is_first, c, c + 16);
    }
  }

  static void TileOf(int64_t rows, const float* a, const float* next,
                     const float* b, int64_t strip_rows, int64_t count,
                     bool is_first, float* c) {
    switch (rows) {
#define JAXPLUGIN_TILE(n) \
  case n: return Tile<n>(a, next, b, strip_rows, count, is_first, c)
      JAXPLUGIN_TILE(1);
      JAXPLUGIN_TILE(2);
      JAXPLUGIN_TILE(3);
      JAXPLUGIN_TILE(4);
#undef JAXPLUGIN_TILE
    }
  }

  // Converts the sums of tiles to sums of rows, in place. The sums of a row
  // never lie behind the sums of its tile.
  static void FinishTiles(int64_t rows, int64_t tile_rows, int64_t strip_rows,
                          float* c) {
    const float* tile = c;
    for (int64_t r0 = 0; r0 < rows; r0 += tile_rows, tile += kTileFloats) {
      const int some = static_cast<int>(Min(tile_rows, rows - r0));
      const int columns = Columns(some);
      float sums[kTileRowsMax][kStripRows];
      for (int64_t j = 0; j < strip_rows; ++j) {
        const float* at = tile + j / columns * 32 + j % columns;
        for (int r = 0; r < some; ++r) {
          sums[r][j] = TotalOf(at[r * columns], at[16 + r * columns]);
        }
      }
      for (int64_t r = 0; r < some; ++r) {
        __builtin_memcpy(c + (r0 + r) * kSumFloats, sums[r], strip_rows * 4);
      }
    }
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* scratch, float* c) const {
    const Operand& x = strip_unpacker.x;
    if (x.k == 0) {
      __builtin_memset(c, 0, rows * kSumFloats * 4);
      return;
    }
    const int64_t units = CeilDiv(x.k, kUnit);
    float* strip = reinterpret_cast<float*>(scratch);
    for (int64_t u0 = 0; u0 < units; u0 += kChunkUnits) {
      const int64_t u1 = Min(u0 + kChunkUnits, units);
      // The distance to the next chunk or to the next strip's first chunk.
      const int64_t ahead =
          u1 == units
              ? kStripRows * x.row_bytes - BytesOf(x.format, u0 * kUnit)
              : BytesOf(x.format, kChunk);
      for (int64_t j = 0; j < kStripRows; ++j) {
        float* out = strip + j * kChunk;
        if (j < count) {
          UnpackFloats(strip_unpacker, row + j, u0, u1, ahead, out);
        } else {
          __builtin_memset(out, 0, (u1 - u0) * kUnit * 4);
        }
      }
      const float* a =
          reinterpret_cast<const float*>(panel) + u0 * kUnit * tile_rows;
      float* tile = c;
      for (int64_t r = 0; r < rows; r += tile_rows, tile += kTileFloats) {
        const float* next = a + tile_rows * PanelRowBytes(x.k) / 4;
        // Behind the last tile is memory that another thread writes.
        const bool is_last = r + tile_rows >= rows;
        TileOf(Min(tile_rows, rows - r), a, is_last ? a : next, strip, count,
               (u1 - u0) * kUnit, u0 == 0, tile);
        a = next;
      }
    }
    FinishTiles(rows, tile_rows, count, c);
  }
};
