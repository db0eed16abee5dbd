// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of the large dot for two E2M1 operands on vpdpbusd, in integers.
// Twice an E2M1 value is an integer from -12 to 12. vpdpbusd multiplies 64
// bytes and adds in 32 bits, so the sum of a block is exact. Once per block,
// the sum is converted to float32 and multiplied by both scales.
//
// vpdpbusd multiplies unsigned bytes by signed bytes. So the strip's bytes are
// increased by 12, and the sums of a panel row begin with the correction.
//
// On Zen 4, vpdpbusd, multiplications and multiply-adds share two ports, which
// together start one of them per cycle. These ports limit the speed. A block of
// 32 values needs 8 + 1 such instructions for 512 products, and a block of 16
// values 4 + 1 for 256 products. The product of two scales would need one more.
// So other ports compute it:
//   kExponents  The strip's scales are powers of two. An integer addition,
//               which has four ports, adds their exponents to the panel's
//               scales.
//   kTable      The strip's scales are E4M3, with blocks of 16. A scale of the
//               panel is a power of two times one of 8 significands. A table
//               has the strip's scales times each significand, so the product
//               is a load and an addition to the exponent.
//   kMultiplied The same formats, with a multiplication. It is faster if there
//               are too few panel rows for a table.
enum class ScaleProduct { kExponents, kTable, kMultiplied };

// kBlock is the smaller of both block sizes.
template <int kBlock, ScaleProduct kProduct>
struct EngineVnni {
  // A register tile of 6 x 2 vectors has 12 integer and 12 float accumulators.
  static constexpr int kTileRowsMax = 6;
  // A chunk of k of this many rows stays in L2.
  static constexpr int64_t kPanelRowsMax = 512;
  static constexpr int kPartRows = 32;  // strip rows of a register tile
  // Twice kPartRows, so that 256 bytes of a row of the result are stored at
  // once.
  static constexpr int kStripRows = 64;
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  // The values of one load of codes, and the values of one step of Tile.
  static constexpr int64_t kGroup = 128;
  static constexpr int64_t kStep = 32;
  static constexpr int64_t kGroupSteps = kGroup / kStep;
  static constexpr int kBlocks = kStep / kBlock;  // blocks of a step
  static constexpr int kBlockDwords = kBlock / 4;
  // Roundings (see sums.inl): 15 in the sum of 16 blocks, 1 in the total.
  static constexpr int64_t kSumSteps = 16 / kBlocks;
  // A step of a panel row: [values][initial sums][scales].
  static constexpr int64_t kStepBytes = kStep + 8 * kBlocks;
  static constexpr int64_t kChunk = 512;  // values of a strip row
  static constexpr int64_t kChunkGroups = kChunk / kGroup;
  static constexpr int64_t kStepCodes = kStep * kPartRows;
  static constexpr int64_t kCodes = kChunk * kPartRows;
  static constexpr bool kIsE4M3 = kProduct != ScaleProduct::kExponents;
  static constexpr bool kIsTable = kProduct == ScaleProduct::kTable;
  static constexpr int kSignificands = kIsTable ? 8 : 1;  // 1, 9 / 8 .. 15 / 8
  static constexpr int64_t kScalesBytes = 4 * kPartRows;  // for a significand
  static constexpr int64_t kBlockScales = kSignificands * kScalesBytes;
  static constexpr int64_t kPartBytes =
      kCodes + kChunk / kBlock * kBlockScales;
  // Exponents of E8M0 scales are clamped to +-kExponentMax, so that a product
  // of two scales is in range. Larger ones belong to zero blocks, to unsafe
  // rows or to NaN scales (see Poison).
  static constexpr int kExponentMax = 62;

  // The byte of each code. The table has 64 entries because a look-up reads 6
  // bits of an index.
  struct CodeBytes {
    alignas(64) int8_t twice[64];
    alignas(64) uint8_t twice_plus_12[64];

    CodeBytes() {
      for (int i = 0; i < 64; ++i) {
        twice[i] = static_cast<int8_t>(2 * Decode<E2M1>(i & 15));
        twice_plus_12[i] = static_cast<uint8_t>(twice[i] + 12);
      }
    }
  };

  const Operand& panel_operand;
  const Operand& strip_operand;
  const CodeBytes tables;
  const TableBytes scale_tables;

  explicit EngineVnni(const Sides& sides)
      : panel_operand(*sides.panel),
        strip_operand(*sides.strip),
        scale_tables(ScaleTables()) {}

  // Returns the tables that decode the strip's scales. An exponent cannot be
  // added to a zero scale. So kTable decodes a zero scale as 1, and the values
  // of its block become zero (ZeroValues).
  static TableBytes ScaleTables() {
    TableBytes tables(Format::kE4M3);
    if constexpr (kIsTable) {
      tables.high[0] = 0x3f;  // 1 as bf16
      tables.low[0] = 0x80;
    }
    return tables;
  }

  static int64_t Groups(int64_t k) { return Max(CeilDiv(k, kGroup), 1); }
  // Includes a float that Poison adds to all sums of the row: 0 or NaN.
  static int64_t PanelRowBytes(int64_t k) {
    return Groups(k) * kGroupSteps * kStepBytes + 4;
  }
  static int64_t StripBytes(int64_t) { return kPartBytes; }

  // Converts 128 codes to two vectors of bytes. The 128-bit lane i of `low` has
  // values 32 i .. 32 i + 15, and that of `high` the next 16 values. Each lane
  // has the even values, then the odd values.
  JAXPLUGIN_ALWAYS_INLINE static void Expand(__m512i codes, __m512i table,
                                             __m512i* low, __m512i* high) {
    const __m512i even = _mm512_permutexvar_epi8(codes, table);
    const __m512i odd =
        _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), table);
    *low = _mm512_unpacklo_epi64(even, odd);
    *high = _mm512_unpackhi_epi64(even, odd);
  }

  static constexpr int64_t kScales = 64;  // scales that are decoded together

  // Decodes the scales of blocks [b0, b0 + kScales) of a panel row to the bits
  // of float32, divided by 4 because the bytes of both sides are twice their
  // values. Returns whether a scale is NaN.
  bool PanelScales(int64_t row, int64_t b0, uint32_t* out) const {
    const Operand& x = panel_operand;
    const int64_t each = x.block / kBlock;  // blocks of kBlock per scale
    const int64_t c0 = b0 / each;
    const int64_t count = Min(kScales / each, x.scale_cols - c0);
    const uint8_t* scale = ScaleAt(x, row, c0);
    uint32_t nan = 0;
    for (int64_t i = 0; i < kScales; ++i) out[i] = 0;
    if (x.scale_kind == ScaleKind::kE8M0) {
      for (int64_t i = 0; i < count; ++i) {
        int byte = scale[i];
        nan |= byte == 255;
        byte = byte < 127 - kExponentMax ? 127 - kExponentMax : byte;
        byte = byte > 127 + kExponentMax ? 127 + kExponentMax : byte;
        out[i] = static_cast<uint32_t>(byte - 2) << 23;
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        nan |= (scale[i] & 0x7f) == 0x7f;
        out[i] = AsBits(0.25f * Decode<E4M3>(scale[i]));
      }
    }
    if (each == 2) {
      for (int64_t i = kScales / 2 - 1; i >= 0; --i) {
        out[2 * i] = out[2 * i + 1] = out[i];
      }
    }
    return nan != 0;
  }

  // Encodes a panel row's scale for kTable. The bits kPlaces are the byte
  // offset of the table entries for its significand. The higher bits add its
  // exponent and sign to these entries. The addition also adds the offset,
  // which StoreScales has subtracted from the entries.
  static constexpr uint32_t kPlaces = 7 * kScalesBytes;
  static uint32_t TablePlace(uint32_t bits) {
    return (bits & 0xff800000) - AsBits(1.0f) +
           (bits >> 20 & 7) * static_cast<uint32_t>(kScalesBytes);
  }

  // The layout of a panel tile is [step][row][kStepBytes], then a float per
  // row.
  void PackRow(int64_t row, uint8_t* tile, int64_t tile_rows,
               int64_t i) const {
    const Operand& x = panel_operand;
    const uint8_t* values = RowValues(x, row);
    const __m512i table = _mm512_load_si512(tables.twice);
    const int64_t groups = Groups(x.k);
    uint32_t scale[kScales];
    bool has_nan = false;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t b0 = g * kGroupSteps * kBlocks;
      if (b0 % kScales == 0) has_nan |= PanelScales(row, b0, scale);
      alignas(64) uint8_t bytes[2][64];
      alignas(64) uint32_t sums[16];
      __m512i low, high;
      Expand(LoadBytes(values + g * 64, x.row_bytes - g * 64), table, &low,
             &high);
      _mm512_store_si512(bytes[0], low);
      _mm512_store_si512(bytes[1], high);
      // sums[4 i] and sums[4 i + 1] become 12 times the sums of values 32 i ..
      // 32 i + 15 and of the next 16 values.
      const __m512i twelve = _mm512_set1_epi8(12);
      low = _mm512_dpbusd_epi32(_mm512_setzero_si512(), twelve, low);
      high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), twelve, high);
      const __m512i both = _mm512_add_epi32(_mm512_unpacklo_epi32(low, high),
                                            _mm512_unpackhi_epi32(low, high));
      _mm512_store_si512(
          sums, _mm512_add_epi32(_mm512_unpacklo_epi64(both, both),
                                 _mm512_unpackhi_epi64(both, both)));
      for (int64_t s = 0; s < kGroupSteps; ++s) {
        uint8_t* out =
            tile + ((g * kGroupSteps + s) * tile_rows + i) * kStepBytes;
        __builtin_memcpy(out, bytes[0] + 16 * s, 16);
        __builtin_memcpy(out + 16, bytes[1] + 16 * s, 16);
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t sum = sums[4 * s + b];
          if (kBlocks == 1) sum += sums[4 * s + 1];
          uint32_t bits = scale[(b0 + s * kBlocks + b) % kScales];
          // An exponent cannot be added to a zero scale. So the scale becomes 1
          // and the values become zero.
          if ((bits & kMagnitude) == 0) {
            __builtin_memset(out + kBlock * b, 0, kBlock);
            sum = 0;
            bits = AsBits(1.0f);
          }
          if constexpr (kIsTable) bits = TablePlace(bits);
          sum = 0 - sum;
          __builtin_memcpy(out + kStep + 4 * b, &sum, 4);
          __builtin_memcpy(out + kStep + 4 * (kBlocks + b), &bits, 4);
        }
      }
    }
    const float poison = has_nan ? AsFloat(kQuietNan) : 0.0f;
    __builtin_memcpy(
        tile + groups * kGroupSteps * tile_rows * kStepBytes + 4 * i, &poison,
        4);
  }

  // Returns the distance in bytes from the codes of group g0 of a strip row to
  // the codes to prefetch: the next chunk, or the first chunk of the same row
  // in the next strip.
  int64_t Ahead(int64_t g0) const {
    return g0 + kChunkGroups < Groups(strip_operand.k)
               ? kChunkGroups * 64
               : kStripRows * strip_operand.row_bytes - g0 * 64;
  }

  // Unpacks groups [g0, g0 + groups) of up to 32 rows to [dword][32 rows].
  void PackPart(int64_t row, int64_t count, int64_t g0, int64_t groups,
                 uint8_t* strip) const {
    const Operand& x = strip_operand;
    const __m512i table = _mm512_load_si512(tables.twice_plus_12);
    const int64_t ahead = Ahead(g0);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t past = (g0 + g) * 64;
      const int64_t left = x.row_bytes - past;
      for (int64_t r0 = 0; r0 < kPartRows; r0 += 16) {
        __m512i in[16], out[16];
        for (int64_t r = 0; r < 16; ++r) {
          const uint8_t* at = RowValues(x, row + r0 + r) + past;
          _mm_prefetch(reinterpret_cast<const char*>(at + ahead), _MM_HINT_T1);
          in[r] = r0 + r < count ? LoadBytes(at, left) : _mm512_setzero_si512();
        }
        Transpose16(in, out);
        uint8_t* to = strip + g * kGroupSteps * kStepCodes + 4 * r0;
        for (int d = 0; d < 16; ++d) {
          // The same order as in Expand: even values, then odd values.
          const int even = d / 2 * 4 + d % 2;
          _mm512_store_si512(to + even * 4 * kPartRows,
                             _mm512_permutexvar_epi8(out[d], table));
          _mm512_store_si512(
              to + (even + 2) * 4 * kPartRows,
              _mm512_permutexvar_epi8(_mm512_srli_epi16(out[d], 4), table));
        }
      }
    }
  }

  // Sets the values of blocks of strip row r to zero (which is stored as 12):
  // the blocks whose bit in `scales` is set, among the first `present`.
  void ZeroValues(uint64_t scales, int64_t present, int64_t r,
                  uint8_t* strip) const {
    const int64_t dwords = strip_operand.block / 4;
    for (int64_t c = 0; c < present; ++c) {
      if ((scales >> c & 1) == 0) continue;
      for (int64_t d = c * dwords; d < (c + 1) * dwords; ++d) {
        __builtin_memset(strip + (d * kPartRows + r) * 4, 12, 4);
      }
    }
  }

  // Unpacks the scales of a chunk that begins at value k0 to [block][32 rows].
  // They are floats (kMultiplied), table entries (kTable), or numbers to add to
  // the bits of the panel's scales (kExponents). poison[r] becomes NaN if row r
  // has a NaN scale.
  void PackScales(int64_t row, int64_t count, int64_t k0, uint8_t* strip,
                  float* poison) const {
    const Operand& x = strip_operand;
    uint8_t* to = strip + kCodes;
    const int64_t c0 = k0 / x.block;
    const int64_t present = Min(kChunk / x.block, x.scale_cols - c0);
    const __m512i is_code =
        _mm512_set1_epi8(static_cast<char>(kIsE4M3 ? 0x7f : 0xff));
    const auto load = [&](int64_t r) {
      return r < count
                 ? LoadBytes(ScaleAt(x, row + r, c0), present)
                 : _mm512_setzero_si512();
    };
    __m512i in[16], out[16];
    for (int64_t r = 0; r < 16; ++r) {
      // 32 scales of row r, and 32 scales of row r + 16.
      in[r] = _mm512_shuffle_i32x4(load(r), load(r + 16), 0x44);
      const uint64_t nans = _mm512_cmpeq_epi8_mask(
          _mm512_and_si512(in[r], is_code), is_code);
      if constexpr (kIsTable) {
        const uint64_t zeros = _mm512_cmpeq_epi8_mask(
            _mm512_and_si512(in[r], is_code), _mm512_setzero_si512());
        if (zeros != 0) {
          ZeroValues(zeros & 0xffffffff, present, r, strip);
          ZeroValues(zeros >> 32, present, r + 16, strip);
        }
      }
      if (nans == 0) continue;
      if (nans << 32 != 0) poison[r] = AsFloat(kQuietNan);
      if (nans >> 32 != 0) poison[r + 16] = AsFloat(kQuietNan);
    }
    Transpose16(in, out);
    const int64_t each = x.block / kBlock;  // blocks of kBlock per scale
    // Also stores scales past the end: zero values times garbage might be NaN.
    for (int64_t c = 0; c < kChunk / x.block / 4; ++c) {
      for (int v = 0; v < 2; ++v) {
        __m512i four[4];
        ExpandScales(out[c + 8 * v], four);
        for (int64_t i = 0; i < 4 * each; ++i) {
          StoreScales(four[i / each],
                      to + (4 * c * each + i) * kBlockScales + 64 * v);
        }
      }
    }
  }

  JAXPLUGIN_ALWAYS_INLINE static void StoreScales(__m512i scales, uint8_t* to) {
    if constexpr (kIsTable) {
#pragma GCC unroll 8
      for (int i = 0; i < kSignificands; ++i) {
        const __m512 product = _mm512_mul_ps(
            _mm512_castsi512_ps(scales), _mm512_set1_ps(1.0f + 0.125f * i));
        _mm512_store_si512(
            to + i * kScalesBytes,
            _mm512_add_epi32(
                _mm512_castps_si512(product),
                _mm512_set1_epi32(-i * static_cast<int>(kScalesBytes))));
      }
    } else {
      _mm512_store_si512(to, scales);
    }
  }

  // Converts four scales of each of 16 rows; a dword has those of a row.
  JAXPLUGIN_ALWAYS_INLINE void ExpandScales(__m512i codes, __m512i* out) const {
    if constexpr (kIsE4M3) {
      const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
      const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
      const __m512i low_byte = _mm512_set1_epi16(0x00ff);
      const Tables t = scale_tables.Load();
      const __m512i low_bytes =  // of bf16
          _mm512_permutex2var_epi8(t.low0, codes, t.low1);
      const __m512i high_bytes = _mm512_ternarylogic_epi32(  // a | (b & c)
          _mm512_permutex2var_epi8(t.high0, codes, t.high1), codes, sign, 0xf8);
      // c ? a : b
      const __m512i even = _mm512_ternarylogic_epi32(
          low_bytes, _mm512_slli_epi16(high_bytes, 8), low_byte, 0xe4);
      // c ? b : a
      const __m512i odd = _mm512_ternarylogic_epi32(
          high_bytes, _mm512_srli_epi16(low_bytes, 8), low_byte, 0xd8);
      out[0] = _mm512_slli_epi32(even, 16);
      out[1] = _mm512_slli_epi32(odd, 16);
      out[2] = _mm512_and_si512(even, high);
      out[3] = _mm512_and_si512(odd, high);
    } else {
      const __m512i top = _mm512_set1_epi32(static_cast<int>(0xff000000));
      codes = _mm512_max_epu8(codes, _mm512_set1_epi8(127 - kExponentMax));
      codes = _mm512_min_epu8(
          codes, _mm512_set1_epi8(static_cast<char>(127 + kExponentMax)));
      codes = _mm512_sub_epi8(codes, _mm512_set1_epi8(127));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        // Moves the signed top byte to the exponent of a float.
        const __m512i byte =
            _mm512_and_si512(_mm512_slli_epi32(codes, 24 - 8 * j), top);
        out[j] = _mm512_srai_epi32(byte, 1);
      }
    }
  }

  JAXPLUGIN_ALWAYS_INLINE static __m512i Broadcast(const uint8_t* bytes) {
    int dword;
    __builtin_memcpy(&dword, bytes, 4);
    return _mm512_set1_epi32(dword);
  }

  // Adds the products of kRows panel rows and 32 strip rows over `steps` steps
  // of k to c.
  template <int kRows>
  static void Tile(const uint8_t* a, int64_t tile_rows, const uint8_t* b,
                   const uint8_t* scale, int64_t steps, bool is_first,
                   float* c) {
    __m512 sum[kRows][2];
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    }
    for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 2
      for (int block = 0; block < kBlocks; ++block) {
        __m512i dot[kRows][2];
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          dot[r][0] = dot[r][1] =
              Broadcast(a + r * kStepBytes + kStep + 4 * block);
        }
#pragma GCC unroll 8
        for (int d = 0; d < kBlockDwords; ++d) {
          const __m512i y0 = _mm512_load_si512(b);
          const __m512i y1 = _mm512_load_si512(b + 64);
          b += 128;
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r) {
            const __m512i x =
                Broadcast(a + r * kStepBytes + block * kBlock + 4 * d);
            dot[r][0] = _mm512_dpbusd_epi32(dot[r][0], y0, x);
            dot[r][1] = _mm512_dpbusd_epi32(dot[r][1], y1, x);
          }
        }
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          const __m512i x_scale =
              Broadcast(a + r * kStepBytes + kStep + 4 * (kBlocks + block));
          const uint8_t* y_scales = scale;
          if constexpr (kIsTable) {
            uint32_t place;
            __builtin_memcpy(
                &place, a + r * kStepBytes + kStep + 4 * (kBlocks + block), 4);
            y_scales += place & kPlaces;
          }
          for (int v = 0; v < 2; ++v) {
            const __m512i y_scale = _mm512_load_si512(y_scales + 64 * v);
            const __m512 both =
                kProduct == ScaleProduct::kMultiplied
                    ? _mm512_mul_ps(_mm512_castsi512_ps(x_scale),
                                    _mm512_castsi512_ps(y_scale))
                    : _mm512_castsi512_ps(_mm512_add_epi32(x_scale, y_scale));
            sum[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][v]), both,
                                        sum[r][v]);
          }
        }
        scale += kBlockScales;
      }
      a += tile_rows * kStepBytes;
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < 2; ++v) {
        float* out = c + r * kSumFloats + 16 * v;
        AddExactly(sum[r][v], is_first, out, out + kStripRows);
      }
    }
  }

  // The same as Tile for any number of panel rows.
  static void TileOf(int64_t rows, const uint8_t* a, int64_t tile_rows,
                     const uint8_t* b, const uint8_t* scale, int64_t steps,
                     bool is_first, float* c) {
    switch (rows) {
#define JAXPLUGIN_TILE(n) \
  case n: return Tile<n>(a, tile_rows, b, scale, steps, is_first, c)
      JAXPLUGIN_TILE(1);
      JAXPLUGIN_TILE(2);
      JAXPLUGIN_TILE(3);
      JAXPLUGIN_TILE(4);
      JAXPLUGIN_TILE(5);
      JAXPLUGIN_TILE(6);
#undef JAXPLUGIN_TILE
    }
  }

  // Multiplies all tiles of a panel with a part of a strip, over `steps` steps
  // of k. With a table, kSumSteps steps of the part and their scales fill L1.
  // So all tiles are multiplied with them before the next steps.
  static void PartTimesPanel(const uint8_t* panel, int64_t rows,
                             int64_t tile_rows, int64_t tile_bytes,
                             const uint8_t* part, int64_t steps, bool is_first,
                             float* c) {
    const int64_t each = kIsTable ? kSumSteps : steps;
    for (int64_t s0 = 0; s0 < steps; s0 += each) {
      for (int64_t r = 0; r < rows; r += tile_rows) {
        const uint8_t* tile = panel + r / tile_rows * tile_bytes;
        for (int64_t s = s0; s < Min(steps, s0 + each); s += kSumSteps) {
          TileOf(Min(tile_rows, rows - r), tile + s * tile_rows * kStepBytes,
                 tile_rows, part + s * kStepCodes,
                 part + kCodes + s * kBlocks * kBlockScales,
                 Min(kSumSteps, steps - s), is_first && s == 0,
                 c + r * kSumFloats);
        }
      }
    }
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* strip, float* c) const {
    const int64_t k = strip_operand.k;
    const int64_t groups = Groups(k);
    const int64_t tile_bytes = tile_rows * PanelRowBytes(k);
    float poison[kStripRows] = {};
    for (int64_t g0 = 0; g0 < groups; g0 += kChunkGroups) {
      const int64_t some = Min(kChunkGroups, groups - g0);
      for (int64_t j = 0; j < count; j += kPartRows) {
        PackPart(row + j, count - j, g0, some, strip);
        PackScales(row + j, count - j, g0 * kGroup, strip, poison + j);
        PartTimesPanel(panel + g0 * kGroupSteps * tile_rows * kStepBytes, rows,
                       tile_rows, tile_bytes, strip, some * kGroupSteps,
                       g0 == 0, c + j);
      }
    }
    FinishTotals<kStripRows>(rows, c);
    Poison(rows, panel, tile_rows, poison, c);
  }

  // Adds NaN to the sums of panel rows and strip rows that have a NaN scale.
  void Poison(int64_t rows, const uint8_t* panel, int64_t tile_rows,
              const float* strip_poison, float* c) const {
    bool is_any = false;
    for (int j = 0; j < kStripRows; ++j) is_any |= strip_poison[j] != 0;
    const int64_t row_bytes = PanelRowBytes(strip_operand.k);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t tile = r / tile_rows;
      float row_poison;
      __builtin_memcpy(&row_poison,
                       panel + (tile + 1) * tile_rows * row_bytes -
                           (tile_rows - r % tile_rows) * 4,
                       4);
      if (!is_any && row_poison == 0) continue;
      for (int j = 0; j < kStripRows; ++j) {
        c[r * kSumFloats + j] += row_poison + strip_poison[j];
      }
    }
  }
};

// From this many panel rows, kTable is faster than kMultiplied. It takes 1.05
// times as long at 48 x 4096 x 4096, 0.99 times at 64 rows and 0.95 times at
// 128 rows (two Zen 4 cores).
constexpr int64_t kTableRowsMin = 64;

// Requires two E2M1 operands.
bool VnniDot(const DotArgs& args, const Sides& sides,
             const Parallel& parallel) {
  using P = ScaleProduct;
  if (sides.strip->scale_kind == ScaleKind::kE4M3) {
    return sides.panel_rows < kTableRowsMin
               ? BlockedDot<EngineVnni<16, P::kMultiplied>>(args, parallel)
               : BlockedDot<EngineVnni<16, P::kTable>>(args, parallel);
  }
  return args.lhs.block == 32 && args.rhs.block == 32
             ? BlockedDot<EngineVnni<32, P::kExponents>>(args, parallel)
             : BlockedDot<EngineVnni<16, P::kExponents>>(args, parallel);
}
