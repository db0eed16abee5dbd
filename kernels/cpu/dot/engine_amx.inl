// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of the large dot on tdpbf16ps. Values are multiplied by their
// scales and stored as bf16, as in engine_bf16.inl. An instruction adds 32
// products to each of 16 x 16 sums. Two tile registers of strip values times
// two of panel values give four tile registers of sums.
//
// The strip is the first factor of the instruction, in rows, because it is
// unpacked more often and rows keep the order of decoding: [tile][vector of
// k][16 rows][32 bf16]. The panel is the second factor and is transposed once:
// [tile][vector of k][16 pairs][tile_rows pairs]. tdpbf16ps flushes subnormals,
// as vdpbf16ps does.

// Configures the tile registers for a strip and releases them after it. While
// they are in use, the system saves 8 KiB more at each context switch.
class ScopedTiles {
 public:
  // Tile registers 0 to 3 are sums, 4 and 5 strip values, 6 and 7 panel values.
  static constexpr int kSums = 0;

  JAXPLUGIN_ALWAYS_INLINE explicit ScopedTiles(int64_t columns) {
    alignas(64) uint8_t config[64] = {1};  // the palette
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_strip = tile == 4 || tile == 5;
      config[16 + 2 * tile] =  // bytes of a row
          static_cast<uint8_t>(is_strip ? 64 : columns * 4);
      config[48 + tile] = 16;  // rows
    }
    _tile_loadconfig(config);
  }
  JAXPLUGIN_ALWAYS_INLINE ~ScopedTiles() { _tile_release(); }
  ScopedTiles(const ScopedTiles&) = delete;
  ScopedTiles& operator=(const ScopedTiles&) = delete;
};

// Makes the compiler store all values to memory, because it does not see the
// reads of tile loads.
JAXPLUGIN_ALWAYS_INLINE void StoreAll() { asm volatile("" ::: "memory"); }

struct EngineAmx {
  static constexpr int kTileRowsMax = 16;
  // A chunk of k of the panel, and its sums, stay in L2. 256 rows are 1.20x
  // faster than 1024 rows at 2048^3 and 1.22x at 1024^3.
  static constexpr int64_t kPanelRowsMax = 256;
  // 32 rows are 1.1x slower at 1024^3. 128 rows do not divide kPartColumns of
  // the ragged dot (dot/ragged.cc).
  static constexpr int kStripRows = 64;
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  // Roundings (see sums.inl): an instruction sums its 16 pairs in two chains.
  // 15 roundings are in a chain, whose first product is exact, 1 in the sum of
  // both chains, 15 in the sum of 16 instructions, the first of which adds to
  // 0, and 1 in the total: 32.
  static constexpr int64_t kChunkUnits = 4;
  static constexpr int64_t kVectors = 4;  // vectors of 32 bf16 in a unit
  static constexpr int64_t kTileFloats = 16 * 16;
  static constexpr int64_t kTileBytes = 16 * 64;
  static constexpr int64_t kStripTileBytes =
      kChunkUnits * kVectors * kTileBytes;

  Unpacker panel_unpacker;
  Unpacker strip_unpacker;

  explicit EngineAmx(const Sides& sides)
      : panel_unpacker(*sides.panel, NativeOrder(sides.strip->format)),
        strip_unpacker(*sides.strip, NativeOrder(sides.strip->format)) {}

  static int64_t PanelRowBytes(int64_t k) {
    return Max(CeilDiv(k, kUnit), 1) * kUnitBytes;
  }
  static int64_t StripBytes(int64_t) {
    return kStripRows * kChunkUnits * kUnitBytes;
  }

  // Stores rows; FinishTile transposes them.
  void PackRow(int64_t row, uint8_t* tile, int64_t tile_rows,
               int64_t i) const {
    panel_unpacker.Row(
        row, 0, CeilDiv(panel_unpacker.x.k, kUnit), [=](int64_t u, Unit unit) {
          uint8_t* out = tile + (kVectors * u * tile_rows + i) * 64;
          for (int q = 0; q < 4; ++q) {
            _mm512_store_si512(out + q * tile_rows * 64, unit.q[q]);
          }
        });
  }

  // Unpacks units [u0, u1) of `count` rows into a strip, padded with zero rows
  // to whole tiles.
  void PackStrip(int64_t row, int64_t count, int64_t u0, int64_t u1,
                 uint8_t* strip) const {
    for (int64_t r = 0; r < RoundUp(count, 16); ++r) {
      uint8_t* out = strip + r / 16 * kStripTileBytes + r % 16 * 64;
      if (r < count) {
        strip_unpacker.Prefetch(row + r, u1, kChunkUnits, kStripRows);
        strip_unpacker.Row(row + r, u0, u1, [=](int64_t u, Unit unit) {
          uint8_t* at = out + (u - u0) * kVectors * kTileBytes;
          for (int q = 0; q < 4; ++q) {
            _mm512_store_si512(at + q * kTileBytes, unit.q[q]);
          }
        });
        continue;
      }
      for (int64_t v = 0; v < (u1 - u0) * kVectors; ++v) {
        _mm512_store_si512(out + v * kTileBytes, _mm512_setzero_si512());
      }
    }
  }

  // sums[strip tile][panel tile] = kStrips tiles of a strip times kPanels tiles
  // of a panel, over `vectors` vectors of k. Panel tiles are `panel_bytes`
  // apart.
  template <int kStrips, int kPanels>
  JAXPLUGIN_ALWAYS_INLINE static void Multiply(const uint8_t* strip,
                                               const uint8_t* panel,
                                               int64_t panel_bytes,
                                               int64_t columns,
                                               int64_t vectors,
                                               float sums[2][2][kTileFloats]) {
    const int64_t row = columns * 4;
    _tile_zero(0);
    if (kPanels == 2) _tile_zero(1);
    if (kStrips == 2) _tile_zero(2);
    if (kStrips == 2 && kPanels == 2) _tile_zero(3);
    for (int64_t v = 0; v < vectors; ++v) {
      _tile_loadd(6, panel, row);
      _tile_loadd(4, strip, 64);
      _tile_dpbf16ps(0, 4, 6);
      if (kPanels == 2) {
        _tile_loadd(7, panel + panel_bytes, row);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (kStrips == 2) {
        _tile_loadd(5, strip + kStripTileBytes, 64);
        _tile_dpbf16ps(2, 5, 6);
        if (kPanels == 2) _tile_dpbf16ps(3, 5, 7);
      }
      strip += kTileBytes;
      panel += 16 * row;
    }
    _tile_stored(0, sums[0][0], 64);
    if (kPanels == 2) _tile_stored(1, sums[0][1], 64);
    if (kStrips == 2) _tile_stored(2, sums[1][0], 64);
    if (kStrips == 2 && kPanels == 2) _tile_stored(3, sums[1][1], 64);
  }

  // Returns the totals of a strip tile times a panel tile. The rests follow.
  static float* TotalsOf(float* c, int64_t panel_tile, int64_t strip_tile) {
    return c + panel_tile * 16 * kSumFloats + strip_tile * 2 * kTileFloats;
  }

  static void AddTile(const float* sums, bool is_first, float* totals) {
    for (int64_t i = 0; i < kTileFloats; i += 16) {
      AddExactly(_mm512_load_ps(sums + i), is_first, totals + i,
                 totals + kTileFloats + i);
    }
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* strip, float* c) const {
    const int64_t k = strip_unpacker.x.k;
    const int64_t units = CeilDiv(k, kUnit);
    if (k == 0) {
      for (int64_t i = 0; i < rows * kSumFloats; ++i) c[i] = 0;
      return;
    }
    const int64_t tile_bytes = tile_rows * PanelRowBytes(k);
    const int64_t panel_tiles = CeilDiv(rows, tile_rows);
    const int64_t strip_tiles = CeilDiv(count, 16);
    alignas(64) float sums[2][2][kTileFloats];
    ScopedTiles tiles(tile_rows);
    for (int64_t u0 = 0; u0 < units; u0 += kChunkUnits) {
      const int64_t u1 = Min(units, u0 + kChunkUnits);
      const int64_t vectors = (u1 - u0) * kVectors;
      PackStrip(row, count, u0, u1, strip);
      StoreAll();
      for (int64_t p = 0; p < panel_tiles; p += 2) {
        const uint8_t* b =
            panel + p * tile_bytes + u0 * tile_rows * kUnitBytes;
        const int64_t panels = Min(2, panel_tiles - p);
        for (int64_t s = 0; s < strip_tiles; s += 2) {
          const uint8_t* a = strip + s * kStripTileBytes;
          const int64_t strips = Min(2, strip_tiles - s);
          switch (strips * 2 + panels) {
#define JAXPLUGIN_MULTIPLY(a_tiles, b_tiles)                               \
  case a_tiles * 2 + b_tiles:                                              \
    Multiply<a_tiles, b_tiles>(a, b, tile_bytes, tile_rows, vectors, sums); \
    break
            JAXPLUGIN_MULTIPLY(1, 1);
            JAXPLUGIN_MULTIPLY(1, 2);
            JAXPLUGIN_MULTIPLY(2, 1);
            JAXPLUGIN_MULTIPLY(2, 2);
#undef JAXPLUGIN_MULTIPLY
          }
          for (int64_t i = 0; i < strips; ++i) {
            for (int64_t j = 0; j < panels; ++j) {
              AddTile(sums[i][j], u0 == 0, TotalsOf(c, p + j, s + i));
            }
          }
        }
      }
    }
    for (int64_t p = 0; p < panel_tiles; ++p) {
      FinishSums(p, strip_tiles, Min(tile_rows, rows - p * tile_rows),
                 c + p * tile_rows * kSumFloats, c);
    }
  }

  // Writes the sums of a panel tile to out[panel row][strip row]. `out` may
  // overlap the totals of this panel tile and of earlier ones.
  static void FinishSums(int64_t panel_tile, int64_t strip_tiles,
                         int64_t panel_rows, float* out, float* c) {
    alignas(64) __m512i turned[kStripRows / 16][16];
    for (int64_t s = 0; s < strip_tiles; ++s) {
      const float* totals = TotalsOf(c, panel_tile, s);
      __m512i sums[16];
      for (int i = 0; i < 16; ++i) {
        sums[i] = _mm512_castps_si512(
            TotalOf(_mm512_load_ps(totals + 16 * i),
                    _mm512_load_ps(totals + kTileFloats + 16 * i)));
      }
      Transpose16(sums, turned[s]);
    }
    for (int64_t r = 0; r < panel_rows; ++r) {
      for (int64_t s = 0; s < strip_tiles; ++s) {
        _mm512_store_si512(out + r * kSumFloats + s * 16, turned[s][r]);
      }
    }
  }
};

// Transposes each vector of k of a panel tile in place, from [tile_rows
// rows][16 pairs] to [16 pairs][tile_rows rows].
inline void FinishTile(const EngineAmx&, uint8_t* tile, int64_t tile_rows,
                       int64_t count, int64_t k) {
  const auto mask = static_cast<__mmask16>((1u << tile_rows) - 1);
  const int64_t vectors = CeilDiv(k, kUnit) * EngineAmx::kVectors;
  for (int64_t v = 0; v < vectors; ++v, tile += tile_rows * 64) {
    __m512i in[16], out[16];
    for (int64_t r = 0; r < 16; ++r) {
      in[r] = r < count ? _mm512_load_si512(tile + r * 64)
                        : _mm512_setzero_si512();
    }
    Transpose16(in, out);
    for (int64_t d = 0; d < 16; ++d) {
      _mm512_mask_storeu_epi32(tile + d * tile_rows * 4, mask, out[d]);
    }
  }
}
