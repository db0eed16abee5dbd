// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of Arm's byte products, for two sides of integers or E2M1. Twice an
// E2M1 value is an integer. The sum of a block is exact in 32 bits. Once per
// block it is converted to float32 and multiplied by both scales.
//
// smmla multiplies 2 rows of 8 bytes with 2 rows of 8 bytes, and adds the four
// sums of products to a vector. So rows are stored in pairs, [8 bytes of the
// first, 8 bytes of the second]. Processors without smmla do the same with two
// sdot.
//
// A register tile is 4 x 8 sums. The loop over its blocks has 92 instructions for
// 1024 products in blocks of 32, and 67 for 512 in blocks of 16 (Zig 0.17.1).
//
// Roundings (see sums.inl): 8 in the sum of 8 blocks, 1 in the product of two
// scales, 1 in the total.

// Returns sum + {a0 b0, a0 b1, a1 b0, a1 b1}.
JAXPLUGIN_ALWAYS_INLINE int32x4_t MultiplyPairs(int32x4_t sum, int8x16_t a,
                                                int8x16_t b) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vmmlaq_s32(sum, a, b);
#else
  const int32x4_t x = vreinterpretq_s32_s8(a), y = vreinterpretq_s32_s8(b);
  sum = vdotq_s32(sum, vreinterpretq_s8_s32(vtrn1q_s32(x, x)),
                  vreinterpretq_s8_s32(vuzp1q_s32(y, y)));
  return vdotq_s32(sum, vreinterpretq_s8_s32(vtrn2q_s32(x, x)),
                   vreinterpretq_s8_s32(vuzp2q_s32(y, y)));
#endif
}

// kBlock is the smaller of both pieces (PieceOf). kIsPacked says whether the
// strip's codes have 4 bits.
template <int kBlock, bool kIsPacked>
struct EngineNeonIntegers {
  static constexpr int kTileRowsMax = 4;  // two pairs
  // A chunk of k of this many rows stays in L2.
  static constexpr int64_t kPanelRowsMax = 512;
  static constexpr int kStripRows = 16;
  static constexpr int kPairs = kStripRows / 2;
  static constexpr int kTilePairs = 4;  // of a strip
  static constexpr int kSumFloats = 2 * kStripRows;  // totals and rests
  static constexpr int64_t kTotals = kTileRowsMax * kStripRows;
  static constexpr int64_t kUnit = 32;  // values that are unpacked together
  static constexpr int64_t kUnitBytes = kIsPacked ? 16 : 32;
  static constexpr int kBlocks = kUnit / kBlock;
  static constexpr int64_t kChunk = 512;  // values of a strip row
  static constexpr int64_t kChunkBlocks = kChunk / kBlock;
  static constexpr int64_t kSumBlocks = 8;
  // A block of a tile of the panel: [pair][bytes], then [pair][scales].
  static constexpr int64_t kPairBytes = 2 * kBlock;
  static constexpr int64_t kScales = kTileRowsMax * kBlock;
  static constexpr int64_t kBlockBytes = kScales + 32;
  // A chunk of a strip: [pair][bytes], then [pair][block][scales].
  static constexpr int64_t kCodes = kStripRows * kChunk;

  const Operand& panel_operand;
  const Operand& strip_operand;
  int8_t bytes[16];  // of the codes of 4 bits

  explicit EngineNeonIntegers(const Sides& sides)
      : panel_operand(*sides.panel), strip_operand(*sides.strip) {
    for (int i = 0; i < 16; ++i) {
      bytes[i] = static_cast<int8_t>(ByteOf(strip_operand.format, i));
    }
  }

  static int64_t Units(int64_t k) { return Max(CeilDiv(k, kUnit), 1); }
  static int64_t PanelRowBytes(int64_t k) {
    return Units(k) * kBlocks * kBlockBytes / kTileRowsMax;
  }
  static int64_t StripBytes(int64_t) {
    return kCodes + kPairs * kChunkBlocks * 16;
  }

  void PackRow(int64_t row, uint8_t* tile, int64_t, int64_t i) const {
    const Operand& x = panel_operand;
    tile += i / 2 * kPairBytes + i % 2 * 8;
    uint8_t* scales = tile - i / 2 * kPairBytes + kScales + i / 2 * 16;
    float scale[kChunkBlocks];
    for (int64_t u = 0; u < Units(x.k); ++u) {
      int8_t values[kUnit];
      ReadBytes(x, row, u * kUnit, values);
      const int64_t b0 = u * kBlocks % kChunkBlocks;
      if (b0 == 0) {
        DecodePieceScales<kBlock, kChunkBlocks>(x, row, u * kBlocks, scale);
      }
      for (int b = 0; b < kBlocks; ++b) {
        for (int j = 0; j < kBlock; ++j) {
          // A packed strip has the even values of a block, then the odd ones.
          const int from = kIsPacked ? j % (kBlock / 2) * 2 + j / (kBlock / 2)
                                     : j;
          tile[j / 8 * 16 + j % 8] =
              static_cast<uint8_t>(values[b * kBlock + from]);
        }
        const float twice[2] = {scale[b0 + b], scale[b0 + b]};
        __builtin_memcpy(scales, twice, 8);
        tile += kBlockBytes;
        scales += kBlockBytes;
      }
    }
  }

  // Loads the bytes of 32 values of the strip: 16 even ones and 16 odd ones if
  // they are packed. `left` is the number of bytes up to the end of the row.
  JAXPLUGIN_ALWAYS_INLINE static int8x16x2_t LoadUnit(const uint8_t* codes,
                                                      int64_t left,
                                                      int8x16_t table) {
    uint8_t padded[kUnitBytes];
    if (left < kUnitBytes) {
      __builtin_memset(padded, 0, kUnitBytes);
      if (left > 0) __builtin_memcpy(padded, codes, left);
      codes = padded;
    }
    if constexpr (kIsPacked) {
      const uint8x16_t both = vld1q_u8(codes);
      return {{vqtbl1q_s8(table, vandq_u8(both, vdupq_n_u8(15))),
               vqtbl1q_s8(table, vshrq_n_u8(both, 4))}};
    } else {
      const int8_t* values = reinterpret_cast<const int8_t*>(codes);
      return {{vld1q_s8(values), vld1q_s8(values + 16)}};
    }
  }

  JAXPLUGIN_ALWAYS_INLINE static void StoreHalves(int8x16_t a, int8x16_t b,
                                                  uint8_t* low, uint8_t* high) {
    const int64x2_t x = vreinterpretq_s64_s8(a), y = vreinterpretq_s64_s8(b);
    vst1q_u8(low, vreinterpretq_u8_s64(vzip1q_s64(x, y)));
    vst1q_u8(high, vreinterpretq_u8_s64(vzip2q_s64(x, y)));
  }

  // Unpacks `units` units of a strip from value k0 on. The last row stands for
  // missing rows.
  void PackStrip(int64_t row, int64_t count, int64_t k0, int64_t units,
                 uint8_t* strip) const {
    const Operand& x = strip_operand;
    const int8x16_t table = vld1q_s8(bytes);
    const int64_t past = BytesOf(x.format, k0);
    float* scales = reinterpret_cast<float*>(strip + kCodes);
    // The second of four vectors has the odd values of a block of 16.
    constexpr int kSecond = kBlock == 16 && kIsPacked ? 32 : 16;
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      const int64_t rows[2] = {row + Min(2 * pair, count - 1),
                               row + Min(2 * pair + 1, count - 1)};
      const uint8_t* codes[2];
      float scale[2][kChunkBlocks];
      for (int h = 0; h < 2; ++h) {
        codes[h] = RowValues(x, rows[h]) + past;
        DecodePieceScales<kBlock, kChunkBlocks>(x, rows[h], k0 / kBlock,
                                                scale[h]);
      }
      for (int64_t b = 0; b < kChunkBlocks; ++b, scales += 4) {
        for (int h = 0; h < 2; ++h) scales[h] = scales[2 + h] = scale[h][b];
      }
      uint8_t* out = strip + pair * 2 * kChunk;
      for (int64_t u = 0; u < units; ++u, out += 64) {
        const int64_t at = u * kUnitBytes, left = x.row_bytes - past - at;
        const int8x16x2_t a = LoadUnit(codes[0] + at, left, table);
        const int8x16x2_t b = LoadUnit(codes[1] + at, left, table);
        StoreHalves(a.val[0], b.val[0], out, out + kSecond);
        StoreHalves(a.val[1], b.val[1], out + 48 - kSecond, out + 48);
      }
    }
  }

  // Adds the products of kRowPairs pairs of panel rows and 4 pairs of strip rows
  // over `blocks` blocks to c.
  template <int kRowPairs>
  static void Tile(const uint8_t* a, const uint8_t* b, const float* b_scale,
                   int64_t blocks, bool is_first, float* c) {
    for (int64_t b0 = 0; b0 < blocks; b0 += kSumBlocks) {
      float32x4_t sum[kRowPairs][kTilePairs];
      for (int p = 0; p < kRowPairs; ++p) {
        for (int q = 0; q < kTilePairs; ++q) sum[p][q] = vdupq_n_f32(0);
      }
      for (int64_t i = 0; i < Min(kSumBlocks, blocks - b0); ++i) {
        int32x4_t dot[kRowPairs][kTilePairs];
        for (int p = 0; p < kRowPairs; ++p) {
          for (int q = 0; q < kTilePairs; ++q) dot[p][q] = vdupq_n_s32(0);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kBlock / 8; ++v) {
          int8x16_t x[kRowPairs];
          for (int p = 0; p < kRowPairs; ++p) {
            x[p] = vreinterpretq_s8_u8(vld1q_u8(a + p * kPairBytes + 16 * v));
          }
#pragma GCC unroll 4
          for (int q = 0; q < kTilePairs; ++q) {
            const int8x16_t y = vreinterpretq_s8_u8(
                vld1q_u8(b + q * 2 * kChunk + 16 * v));
            for (int p = 0; p < kRowPairs; ++p) {
              dot[p][q] = MultiplyPairs(dot[p][q], x[p], y);
            }
          }
        }
        float32x4_t x_scale[kRowPairs];
        for (int p = 0; p < kRowPairs; ++p) {
          x_scale[p] = vreinterpretq_f32_u8(vld1q_u8(a + kScales + 16 * p));
        }
#pragma GCC unroll 4
        for (int q = 0; q < kTilePairs; ++q) {
          const float32x4_t y_scale =
              vld1q_f32(b_scale + q * 4 * kChunkBlocks + 4 * (b0 + i));
          for (int p = 0; p < kRowPairs; ++p) {
            sum[p][q] = vfmaq_f32(sum[p][q], vcvtq_f32_s32(dot[p][q]),
                                  vmulq_f32(x_scale[p], y_scale));
          }
        }
        a += kBlockBytes;
        b += kPairBytes;
      }
      for (int p = 0; p < kRowPairs; ++p) {
        for (int q = 0; q < kTilePairs; ++q) {
          float* out = c + 4 * (p * kPairs + q);
          AddExactly(sum[p][q], is_first && b0 == 0, out, out + kTotals);
        }
      }
    }
  }

  // Replaces the totals and rests of a tile by results, [row][strip row].
  static void Finish(int64_t rows, float* c) {
    float totals[kTotals];
    for (int64_t i = 0; i < CeilDiv(rows, 2) * 4 * kPairs; ++i) {
      totals[i] = TotalOf(c[i], c[kTotals + i]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < kStripRows; ++j) {
        c[r * kSumFloats + j] =
            totals[4 * (r / 2 * kPairs + j / 2) + r % 2 * 2 + j % 2];
      }
    }
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t, uint8_t* strip, float* c) const {
    const int64_t k = strip_operand.k;
    const int64_t tile_bytes = kTileRowsMax * PanelRowBytes(k);
    const float* scales = reinterpret_cast<const float*>(strip + kCodes);
    for (int64_t k0 = 0; k0 == 0 || k0 < k; k0 += kChunk) {
      const int64_t units = Units(Min(k - k0, kChunk));
      PackStrip(row, count, k0, units, strip);
      const uint8_t* a = panel + k0 / kBlock * kBlockBytes;
      for (int64_t r = 0; r < rows; r += kTileRowsMax, a += tile_bytes) {
        const auto tile = rows - r <= 2 ? Tile<1> : Tile<2>;
        for (int64_t q = 0; q < kPairs; q += kTilePairs) {
          tile(a, strip + q * 2 * kChunk, scales + q * 4 * kChunkBlocks,
               units * kBlocks, k0 == 0, c + r * kSumFloats + 4 * q);
        }
      }
    }
    for (int64_t r = 0; r < rows; r += kTileRowsMax) {
      Finish(Min(kTileRowsMax, rows - r), c + r * kSumFloats);
    }
  }
};

template <int kBlock, bool kIsPacked>
JAXPLUGIN_ALWAYS_INLINE int64_t
TileRows(const EngineNeonIntegers<kBlock, kIsPacked>&, int64_t) {
  return EngineNeonIntegers<kBlock, kIsPacked>::kTileRowsMax;
}

template <int kBlock>
bool NeonIntegerDot(const DotArgs& args, const Parallel& parallel) {
  return IsPacked(ChooseSides(args).strip->format)
             ? BlockedDot<EngineNeonIntegers<kBlock, true>>(args, parallel)
             : BlockedDot<EngineNeonIntegers<kBlock, false>>(args, parallel);
}

// Runs the config's engine, or the rule's engine if the config has none.
bool NeonDot(const DotArgs& args, const Parallel& parallel) {
  const Engine engine = args.config.engine == Engine::kByRule
                            ? RuleNeon(ShapeOf(args))
                            : args.config.engine;
  if (engine != Engine::kNeonIntegers) return DotBaseline(args, parallel);
  return PieceOf(args.lhs) == 32 && PieceOf(args.rhs) == 32
             ? NeonIntegerDot<32>(args, parallel)
             : NeonIntegerDot<16>(args, parallel);
}
