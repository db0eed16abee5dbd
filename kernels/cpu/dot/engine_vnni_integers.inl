// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of the large dot for integers and integers or E2M1 on vpdpbusd.
// Twice an E2M1 value is an integer.
//
// The lanes of a vector are rows of the panel, which is transposed once. The
// strip, mostly the weights, is only expanded to bytes, four of which are
// broadcast. So few rows do not pay for transposed weights.
//
// The strip's bytes are increased by 128 (int4: 8, E2M1: 12), so that they are
// unsigned. The sums of a panel row begin with the correction.
// A sum of 32 products of bytes is below 2^20. It is exact in 32 bits, with the
// correction, and as float32. A scale of a longer block multiplies the sum of
// each piece of 32 or 16 values.
//
// If the strip has blocks of 16 values and the panel longer ones, as NVFP4 weights
// and int8 rows, two sums are multiplied by the strip's scales and added before
// the panel's scale multiplies both. That is 3 instructions instead of 4.
//
// Roundings (see sums.inl): 16 in the sum of 16 blocks, 1 in the product of two
// scales (2 in the sum of two blocks of the strip), 1 in the total.

// The same as DecodeByteScales for the first `left` of 16 scales. Compilers do not
// vectorize its loop for fewer than 64 scales: 16 rows of MXFP4 then take 1.2
// times as long (Zen 5, 2026-11).
JAXPLUGIN_ALWAYS_INLINE __m512 DecodeScales16(ScaleKind kind, int unit_exponent,
                                              const uint8_t* at, int64_t left) {
  if (kind == ScaleKind::kE8M0) {
    // A scale that becomes 0 belongs to a block of zeros or to an unsafe row.
    const __mmask16 present =
        left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    const __m512i code =
        _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(present, at));
    const __m512i exponent = _mm512_subs_epu16(
        _mm512_min_epu8(code, _mm512_set1_epi32(127 + kMostExponent)),
        _mm512_set1_epi32(-unit_exponent));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(
        _mm512_slli_epi32(exponent, 23),
        _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(0xff)),
        _mm512_set1_epi32(static_cast<int>(kQuietNan))));
  }
  const __m512 unit = _mm512_set1_ps(PowerOf(unit_exponent));
  const __m512 some = LoadScales(kind, at, left);
  // Rows with an Inf are unsafe, and other scales of these kinds are small.
  if (kind == ScaleKind::kE4M3 || kind == ScaleKind::kF16) {
    return _mm512_mul_ps(some, unit);
  }
  const __m512i bits = _mm512_castps_si512(some);
  const __m512i most = _mm512_set1_epi32((127 + kMostExponent) << 23);
  const __m512i infinity = _mm512_set1_epi32(static_cast<int>(kInfinity));
  const __m512i magnitude = _mm512_and_si512(
      bits, _mm512_set1_epi32(static_cast<int>(kMagnitude)));
  const __m512i sign = _mm512_and_si512(
      bits, _mm512_set1_epi32(static_cast<int>(0x80000000)));
  const __mmask16 is_kept = _mm512_cmplt_epu32_mask(magnitude, most) |
                            _mm512_cmplt_epu32_mask(infinity, magnitude);
  const __m512 scales = _mm512_castsi512_ps(_mm512_mask_mov_epi32(
      _mm512_or_si512(sign, most), is_kept, bits));
  return _mm512_mul_ps(scales, unit);
}

// The scale of each of 16 pieces, for blocks of 2^shift pieces.
struct PieceLanes {
  alignas(64) int32_t of[5][16];

  constexpr PieceLanes() : of{} {
    for (int i = 0; i < 80; ++i) of[i / 16][i % 16] = i % 16 >> i / 16;
  }
};
constexpr PieceLanes kPieceLanes;

// The same as DecodePieceScales, faster for blocks of 1, 2, 4, 8 or 16 pieces.
// `first` is a multiple of 16. Writes no pieces after the 16 that have the last
// value.
template <int kPiece, int kCount>
void PieceScales(const Operand& x, int64_t row, int64_t first, float* out) {
  static_assert(kCount % 16 == 0);
  const int64_t each = x.block / kPiece;
  if (each > 16 || (each & (each - 1)) != 0 ||
      x.scale_kind == ScaleKind::kE5M2) {
    return DecodePieceScales<kPiece, kCount>(x, row, first, out);
  }
  const int shift = __builtin_ctzll(each);
  const __m512i lanes = _mm512_load_si512(kPieceLanes.of[shift]);
  const int64_t count = Min(kCount, CeilDiv(x.k, kPiece) - first);
  const auto decode = [&](ScaleKind kind) __attribute__((always_inline)) {
    const int unit = UnitExponent(x);
    for (int64_t i = 0; i < count; i += 16) {
      const int64_t column = (first + i) >> shift;
      const int64_t left = x.scale_cols - column;
      const uint8_t* at = ScaleAt(x, row, column);
      // The constant 16 saves the masks of loads.
      const __m512 some = left >= 16 ? DecodeScales16(kind, unit, at, 16)
                                     : DecodeScales16(kind, unit, at, left);
      _mm512_store_si512(
          out + i, _mm512_castps_si512(_mm512_permutexvar_ps(lanes, some)));
    }
  };
  switch (x.scale_kind) {  // a loop for each kind
    case ScaleKind::kE8M0: return decode(ScaleKind::kE8M0);
    case ScaleKind::kE4M3: return decode(ScaleKind::kE4M3);
    case ScaleKind::kF16: return decode(ScaleKind::kF16);
    default: return decode(x.scale_kind);
  }
}

// The number that makes the bytes of a format unsigned when it is added.
constexpr int BiasOf(Format format) {
  return format == Format::kInt8 ? 128 : format == Format::kInt4 ? 8 : 12;
}

// The unsigned bytes of the codes of four bits, repeated, because a look-up
// reads 6 bits.
struct BiasedBytes {
  alignas(64) uint8_t bytes[64];

  explicit BiasedBytes(Format format) {
    for (int i = 0; i < 64; ++i) {
      bytes[i] = static_cast<uint8_t>(ByteOf(format, i & 15) + BiasOf(format));
    }
  }
};

// kBlock is the smaller of both pieces (PieceOf), and kPanelBlock a multiple of it
// that is at most the panel's piece. kIsPacked says whether the strip's codes
// have 4 bits.
template <int kBlock, int kPanelBlock, bool kIsPacked>
struct EngineVnniIntegers {
  static constexpr int kTileRowsMax = 16;  // the lanes of a vector
  // A chunk of k of this many rows stays in L2.
  static constexpr int64_t kPanelRowsMax = 512;
  // A register tile has 12 integer and 12 float accumulators: 12 strip rows and
  // one tile of the panel, or 6 strip rows and two tiles. With sums of two blocks
  // it has three times 8.
  static constexpr int kPartRows = kPanelBlock == kBlock ? 12 : 8;
  static constexpr int kStripRows = 48;
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  static constexpr int64_t kChunk = 512;  // values of a strip row
  static constexpr int64_t kChunkBlocks = kChunk / kBlock;
  // The values of a group of the panel. Its layout in a tile is
  // [16 dwords][row], [initial sums of a block][row], [scale of a panel
  // block][row].
  static constexpr int64_t kGroup = 64;
  static constexpr int kBlocks = kGroup / kBlock;
  static constexpr int kPanelBlocks = kGroup / kPanelBlock;
  static constexpr bool kIsPaired = kPanelBlock == 2 * kBlock;
  static constexpr int kDwords = kBlock / 4;
  static constexpr int64_t kRowBytes = kGroup + 4 * (kBlocks + kPanelBlocks);
  static constexpr int64_t kGroupBytes = kTileRowsMax * kRowBytes;
  static constexpr int64_t kSums = kTileRowsMax * kGroup;
  static constexpr int64_t kScales = kSums + 64 * kBlocks;
  static constexpr int64_t kSumGroups = 16 / kPanelBlocks;
  // A part of a strip: [row][kChunk bytes], then [row][scales].
  static constexpr int64_t kCodes = kPartRows * kChunk;

  const Operand& panel_operand;
  const Operand& strip_operand;
  const BiasedBytes biased;
  alignas(64) uint8_t order[64];  // the values of a group in a panel row

  explicit EngineVnniIntegers(const Sides& sides)
      : panel_operand(*sides.panel),
        strip_operand(*sides.strip),
        biased(strip_operand.format) {
    for (int i = 0; i < 64; ++i) {
      // A block of a packed strip has its even values, then its odd values.
      const int at = i % kBlock;
      order[i] = static_cast<uint8_t>(
          kIsPacked ? i - at + at % (kBlock / 2) * 2 + at / (kBlock / 2) : i);
    }
  }

  // Returns the distance in bytes from the strip bytes of block b in a chunk,
  // to those of its dword i.
  static constexpr int64_t PlaceOf(int64_t b, int i) {
    if (!kIsPacked) return b * kBlock + 4 * i;
    // 128 values have 64 bytes of even values, then 64 bytes of odd values.
    const int64_t k = b * kBlock;
    return k / 128 * 128 + k % 128 / 2 + i % (kDwords / 2) * 4 +
           i / (kDwords / 2) * 64;
  }

  static int64_t Groups(int64_t k) { return Max(CeilDiv(k, kGroup), 1); }
  static int64_t PanelRowBytes(int64_t k) { return Groups(k) * kRowBytes; }
  static int64_t StripBytes(int64_t) {
    return kCodes + kPartRows * kChunkBlocks * 4;
  }

  // Stores [row][64 bytes] instead of [16 dwords][row], until Transpose.
  void PackRow(int64_t row, uint8_t* tile, int64_t, int64_t i) const {
    const Operand& x = panel_operand;
    const __m512i index = _mm512_load_si512(order);
    constexpr int kScaleCount = kChunk / kPanelBlock;
    alignas(64) float scale[kScaleCount];
    for (int64_t g = 0; g < Groups(x.k); ++g, tile += kGroupBytes) {
      __m512i values;
      if (x.format == Format::kInt8) {
        values = LoadBytes(RowValues(x, row) + g * 64, x.k - g * 64);
      } else {
        alignas(64) int8_t bytes[64];
        for (int j = 0; j < 64; j += 32) {
          ReadBytes(x, row, g * kGroup + j, bytes + j);
        }
        values = _mm512_load_si512(bytes);
      }
      _mm512_store_si512(tile + 64 * i, _mm512_permutexvar_epi8(index, values));
      const int64_t b0 = g * kPanelBlocks % kScaleCount;
      if (b0 == 0) {
        PieceScales<kPanelBlock, kScaleCount>(x, row, g * kPanelBlocks, scale);
      }
      for (int b = 0; b < kPanelBlocks; ++b) {
        __builtin_memcpy(tile + kScales + 64 * b + 4 * i, scale + b0 + b, 4);
      }
    }
  }

  // Transposes the values of a tile with `count` rows, and adds initial sums.
  void Transpose(uint8_t* tile, int64_t count) const {
    const __m512i bias =
        _mm512_set1_epi8(static_cast<char>(BiasOf(strip_operand.format)));
    for (int64_t g = 0; g < Groups(panel_operand.k); ++g, tile += kGroupBytes) {
      __m512i in[16], out[16];
      for (int r = 0; r < 16; ++r) {
        in[r] = r < count ? _mm512_load_si512(tile + 64 * r)
                          : _mm512_setzero_si512();
      }
      Transpose16(in, out);
      for (int b = 0; b < kBlocks; ++b) {
        __m512i sum = _mm512_setzero_si512();
        for (int d = b * kDwords; d < (b + 1) * kDwords; ++d) {
          _mm512_store_si512(tile + 64 * d, out[d]);
          sum = _mm512_dpbusd_epi32(sum, bias, out[d]);
        }
        _mm512_store_si512(tile + kSums + 64 * b,
                           _mm512_sub_epi32(_mm512_setzero_si512(), sum));
      }
      float* scale = reinterpret_cast<float*>(tile + kScales);
      for (int b = 0; b < kPanelBlocks; ++b, scale += 16) {
        for (int64_t r = count; r < 16; ++r) scale[r] = 0;
      }
    }
  }

  // The codes to prefetch: the next chunk of the rows of a part, or the first
  // chunk of these rows in the next strip. Null: none.
  struct Next {
    const uint8_t* codes;
    int64_t row_bytes;
  };
  Next NextOf(int64_t row, int64_t k0) const {
    const Operand& x = strip_operand;
    const int64_t at = k0 + 2 * kChunk;
    const int64_t past = at - RoundUp(x.k, kChunk);
    const uint8_t* codes =
        past < 0 ? RowValues(x, row) + BytesOf(x.format, at)
                 : RowValues(x, row + kStripRows) + BytesOf(x.format, past);
    return {codes, x.row_bytes};
  }

  // Expands values [k0, k0 + kChunk) of `count` rows to bytes, with their
  // scales.
  void PackPart(int64_t row, int64_t count, int64_t k0, uint8_t* part) const {
    const Operand& x = strip_operand;
    const __m512i table = _mm512_load_si512(biased.bytes);
    const __m512i bias = _mm512_set1_epi8(static_cast<char>(0x80));
    const int64_t past = BytesOf(x.format, k0);
    const int64_t end = Min(x.row_bytes - past, BytesOf(x.format, kChunk));
    float* scale = reinterpret_cast<float*>(part + kCodes);
    for (int64_t r = 0; r < kPartRows;
         ++r, part += kChunk, scale += kChunkBlocks) {
      if (r >= count) {
        for (int64_t b = 0; b < kChunkBlocks; ++b) scale[b] = 0;
        continue;
      }
      const uint8_t* codes = RowValues(x, row + r) + past;
      for (int64_t at = 0; at < end; at += 64) {
        const __m512i in = LoadBytes(codes + at, end - at);
        if constexpr (kIsPacked) {
          _mm512_store_si512(part + 2 * at,
                             _mm512_permutexvar_epi8(in, table));
          _mm512_store_si512(
              part + 2 * at + 64,
              _mm512_permutexvar_epi8(_mm512_srli_epi16(in, 4), table));
        } else {
          _mm512_store_si512(part + at, _mm512_sub_epi8(in, bias));
        }
      }
      _mm_prefetch(reinterpret_cast<const char*>(
                       ScaleAt(x, row + r + kStripRows, k0 / x.block)),
                   _MM_HINT_T1);
      PieceScales<kBlock, kChunkBlocks>(x, row + r, k0 / kBlock, scale);
    }
  }

  // Adds the products of kTiles tiles and kPartRows / kTiles strip rows, over
  // `groups` groups of a chunk, to c. The prefetches are spread over the
  // groups, because a burst of them waits for memory. They are into L1: of the
  // time with a prefetch into L2, 16 rows of int8 take 0.83 to 0.86, and 64 rows
  // 0.95 (MXFP4 and INT8_32, 4096 x 4096, two Zen 5 cores, 2026-11).
  template <int kTiles>
  static void Tile(const uint8_t* a, int64_t tile_bytes, const uint8_t* b,
                   const float* scale, int64_t groups, bool is_first, Next next,
                   float* c) {
    constexpr int kRows = kPartRows / kTiles;
    for (int64_t g0 = 0; g0 < groups; g0 += kSumGroups) {
      __m512 sum[kRows][kTiles];
#pragma GCC unroll 12
      for (int w = 0; w < kRows; ++w) {
#pragma GCC unroll 2
        for (int t = 0; t < kTiles; ++t) sum[w][t] = _mm512_setzero_ps();
      }
      for (int64_t g = g0; g < Min(groups, g0 + kSumGroups); ++g) {
        const uint8_t* y = b + PlaceOf(g * kBlocks, 0);
        __m512 first[kRows][kTiles];  // products of the first block of two
        if (next.codes != nullptr && (!kIsPacked || g % 2 == 0)) {
#pragma GCC unroll 12
          for (int w = 0; w < kRows; ++w) {
            _mm_prefetch(reinterpret_cast<const char*>(
                             next.codes + w * next.row_bytes +
                             (kIsPacked ? g / 2 : g) * 64),
                         _MM_HINT_T0);
          }
        }
#pragma GCC unroll 4
        for (int block = 0; block < kBlocks; ++block) {
          __m512i dot[kRows][kTiles];
#pragma GCC unroll 2
          for (int t = 0; t < kTiles; ++t) {
            const __m512i initial =
                _mm512_load_si512(a + t * tile_bytes + kSums + 64 * block);
#pragma GCC unroll 12
            for (int w = 0; w < kRows; ++w) dot[w][t] = initial;
          }
#pragma GCC unroll 8
          for (int d = 0; d < kDwords; ++d) {
            __m512i x[kTiles];
#pragma GCC unroll 2
            for (int t = 0; t < kTiles; ++t) {
              x[t] = _mm512_load_si512(a + t * tile_bytes +
                                       64 * (block * kDwords + d));
              KeepInRegister(&x[t]);
            }
#pragma GCC unroll 12
            for (int w = 0; w < kRows; ++w) {
              const __m512i four =
                  Broadcast(y + w * kChunk + PlaceOf(block, d));
#pragma GCC unroll 2
              for (int t = 0; t < kTiles; ++t) {
                dot[w][t] = _mm512_dpbusd_epi32(dot[w][t], four, x[t]);
              }
            }
          }
          __m512 x_scale[kTiles];
#pragma GCC unroll 2
          for (int t = 0; t < kTiles; ++t) {
            x_scale[t] = Floats(a + t * tile_bytes + kScales +
                                64 * (block * kBlock / kPanelBlock));
          }
#pragma GCC unroll 12
          for (int w = 0; w < kRows; ++w) {
            const __m512 y_scale = _mm512_set1_ps(
                scale[w * kChunkBlocks + g * kBlocks + block]);
#pragma GCC unroll 2
            for (int t = 0; t < kTiles; ++t) {
              const __m512 floats = _mm512_cvtepi32_ps(dot[w][t]);
              if constexpr (!kIsPaired) {
                sum[w][t] = _mm512_fmadd_ps(
                    floats, _mm512_mul_ps(x_scale[t], y_scale), sum[w][t]);
              } else if (block % 2 == 0) {
                first[w][t] = _mm512_mul_ps(floats, y_scale);
              } else {
                const __m512 both =
                    _mm512_fmadd_ps(floats, y_scale, first[w][t]);
                sum[w][t] = _mm512_fmadd_ps(both, x_scale[t], sum[w][t]);
              }
            }
          }
        }
        a += kGroupBytes;
      }
      for (int w = 0; w < kRows; ++w) {
        for (int t = 0; t < kTiles; ++t) {
          float* out = c + t * kTileRowsMax * kSumFloats + 16 * w;
          AddExactly(sum[w][t], is_first && g0 == 0, out,
                     out + 16 * kStripRows);
        }
      }
    }
  }

  // c has, for each tile of the panel, [totals of a strip row][16 rows], then
  // the rests.
  static void PartTimesPanel(const uint8_t* panel, int64_t tiles,
                             int64_t tile_bytes, const uint8_t* part,
                             int64_t groups, bool is_first, Next next,
                             float* c) {
    const float* scale = reinterpret_cast<const float*>(part + kCodes);
    for (int64_t t = 0; t < tiles; t += 2, panel += 2 * tile_bytes) {
      float* out = c + t * kTileRowsMax * kSumFloats;
      if (t + 1 == tiles) {
        return Tile<1>(panel, 0, part, scale, groups, is_first, next, out);
      }
      for (int w = 0; w < kPartRows; w += kPartRows / 2) {
        Tile<2>(panel, tile_bytes, part + w * kChunk, scale + w * kChunkBlocks,
                groups, is_first, next, out + 16 * w);
        if (next.codes != nullptr) next.codes += kPartRows / 2 * next.row_bytes;
      }
      next.codes = nullptr;
    }
  }

  // Replaces the totals and rests of a tile by results, [row][strip row].
  static void Finish(float* c) {
    __m512i in[kStripRows], out[16];
    for (int w = 0; w < kStripRows; ++w) {
      const __m512 total =
          TotalOf(Floats(c + 16 * w), Floats(c + 16 * (kStripRows + w)));
      in[w] = _mm512_castps_si512(total);
    }
    for (int w = 0; w < kStripRows; w += 16) {
      Transpose16(in + w, out);
      for (int r = 0; r < 16; ++r) {
        _mm512_store_si512(c + r * kSumFloats + w, out[r]);
      }
    }
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t, uint8_t* strip, float* c) const {
    const int64_t k = strip_operand.k;
    const int64_t tiles = CeilDiv(rows, kTileRowsMax);
    const int64_t tile_bytes = kTileRowsMax * PanelRowBytes(k);
    for (int64_t k0 = 0; k0 == 0 || k0 < k; k0 += kChunk) {
      for (int64_t j = 0; j < count; j += kPartRows) {
        PackPart(row + j, count - j, k0, strip);
        PartTimesPanel(panel + k0 / kGroup * kGroupBytes, tiles, tile_bytes,
                       strip, Groups(Min(k - k0, kChunk)), k0 == 0,
                       NextOf(row + j, k0), c + 16 * j);
      }
    }
    for (int64_t t = 0; t < tiles; ++t) {
      Finish(c + t * kTileRowsMax * kSumFloats);
    }
  }

  JAXPLUGIN_ALWAYS_INLINE static __m512 Floats(const void* p) {
    return _mm512_castsi512_ps(_mm512_load_si512(p));
  }
  JAXPLUGIN_ALWAYS_INLINE static __m512i Broadcast(const uint8_t* bytes) {
    int dword;
    __builtin_memcpy(&dword, bytes, 4);
    return _mm512_set1_epi32(dword);
  }
};

template <int kBlock, int kPanelBlock, bool kIsPacked>
JAXPLUGIN_ALWAYS_INLINE int64_t TileRows(
    const EngineVnniIntegers<kBlock, kPanelBlock, kIsPacked>&, int64_t) {
  return EngineVnniIntegers<kBlock, kPanelBlock, kIsPacked>::kTileRowsMax;
}

template <int kBlock, int kPanelBlock, bool kIsPacked>
JAXPLUGIN_ALWAYS_INLINE void FinishTile(
    const EngineVnniIntegers<kBlock, kPanelBlock, kIsPacked>& engine,
    uint8_t* tile, int64_t, int64_t count, int64_t) {
  engine.Transpose(tile, count);
}

// Requires operands of integers, or of integers and E2M1.
template <int kBlock, int kPanelBlock>
bool VnniIntegerDot(const DotArgs& args, const Sides& sides,
                    const Parallel& parallel) {
  return IsPacked(sides.strip->format)
             ? BlockedDot<EngineVnniIntegers<kBlock, kPanelBlock, true>>(
                   args, parallel)
             : BlockedDot<EngineVnniIntegers<kBlock, kPanelBlock, false>>(
                   args, parallel);
}

bool VnniIntegerDot(const DotArgs& args, const Sides& sides,
                    const Parallel& parallel) {
  const bool panel_is_32 = PieceOf(*sides.panel) == 32;
  if (PieceOf(*sides.strip) == 32 && panel_is_32) {
    return VnniIntegerDot<32, 32>(args, sides, parallel);
  }
  return panel_is_32 ? VnniIntegerDot<16, 32>(args, sides, parallel)
                     : VnniIntegerDot<16, 16>(args, sides, parallel);
}
