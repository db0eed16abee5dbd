// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The engine of the large dot for integers and integers or E2M1 on vpdpbusd. It
// has the register tiles of engine_vnni.inl. Twice an E2M1 value is an integer.
//
// The strip's bytes are increased by 128 (int4: 8, E2M1: 12), so that they are
// unsigned.
// A sum of 32 products of bytes is below 2^20. It is exact in 32 bits, with the
// correction, and as float32. A scale of a longer block multiplies the sum of
// each piece of 32 or 16 values.
//
// Roundings (see sums.inl): 16 in the sum of 16 blocks, 1 in the product of two
// scales, 1 in the total.

// The unit of the bytes that stand for a side's values, as a power of two.
JAXPLUGIN_ALWAYS_INLINE int UnitExponent(const Operand& x) {
  return x.format == Format::kE2M1 ? -1 : -x.fraction_bits;
}

// Decodes scales [c0, c0 + count) of a row, times the unit.
inline void DecodeByteScales(const Operand& x, int64_t row, int64_t c0,
                             int64_t count, float* out) {
  const uint8_t* at = ScaleAt(x, row, c0);
  const auto decode = [&](ScaleKind kind) __attribute__((always_inline)) {
    for (int64_t i = 0; i < count; ++i) {
      out[i] = ScaleTimes(kind, at + i * ScaleSize(kind), UnitExponent(x));
    }
  };
  switch (x.scale_kind) {  // a loop for each kind, so that it is vectorized
    case ScaleKind::kE8M0: return decode(ScaleKind::kE8M0);
    case ScaleKind::kE4M3: return decode(ScaleKind::kE4M3);
    case ScaleKind::kF32: return decode(ScaleKind::kF32);
    case ScaleKind::kBF16: return decode(ScaleKind::kBF16);
    case ScaleKind::kF16: return decode(ScaleKind::kF16);
    default: return decode(x.scale_kind);
  }
}

// The same for the first `left` of 16 scales. For fewer than 64 scales compilers
// do not vectorize the loop above: 16 rows of MXFP4 then take 1.2 times as long
// (Zen 5, 2026-11).
JAXPLUGIN_ALWAYS_INLINE __m512 DecodeScales16(const Operand& x,
                                              const uint8_t* at, int64_t left) {
  const __m512i bits = _mm512_castps_si512(LoadScales(x.scale_kind, at, left));
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
  return _mm512_mul_ps(scales, _mm512_set1_ps(PowerOf(UnitExponent(x))));
}

// Decodes the scales of kCount pieces of a row from piece `first` on. Those past
// the end are any finite numbers.
template <int kPiece, int kCount>
void PieceScales(const Operand& x, int64_t row, int64_t first, float* out) {
  static_assert(kCount % 16 == 0);
  const int64_t each = x.block / kPiece;  // pieces of a block
  const int64_t present = Min(kCount, CeilDiv(x.k, kPiece) - first);
  if (kCount < 64 && each == 1 && x.scale_kind != ScaleKind::kE5M2) {
    for (int64_t i = 0; i < kCount; i += 16) {
      const __m512 some =
          DecodeScales16(x, ScaleAt(x, row, first + i), present - i);
      _mm512_store_si512(out + i, _mm512_castps_si512(some));
    }
    return;
  }
  for (int64_t i = present; i < kCount; ++i) out[i] = 0;
  if (each == 1) return DecodeByteScales(x, row, first, present, out);
  const int64_t c0 = first / each;
  float scale[kCount];
  DecodeByteScales(x, row, c0, (first + present - 1) / each + 1 - c0, scale);
  int64_t end = (c0 + 1) * each - first;  // of the pieces of scale[0]
  for (int64_t i = 0, c = 0; i < present; ++c, end += each) {
    for (; i < Min(end, present); ++i) out[i] = scale[c];
  }
}

// The byte of a code of four bits: an int4 value, or twice an E2M1 value.
inline int ByteOf(Format format, int code) {
  return format == Format::kInt4
             ? (code ^ 8) - 8
             : static_cast<int>(2 * Decode<E2M1>(static_cast<uint32_t>(code)));
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

// Reads the bytes of values [k0, k0 + 32) of a row; they are 0 past the end.
inline void ReadBytes(const Operand& x, int64_t row, int64_t k0, int8_t* out) {
  alignas(64) uint8_t codes[32] = {};
  const int64_t begin = BytesOf(x.format, k0);
  const int64_t count = Min(BytesOf(x.format, 32), x.row_bytes - begin);
  if (count > 0) __builtin_memcpy(codes, RowValues(x, row) + begin, count);
  if (x.format == Format::kInt8) {
    __builtin_memcpy(out, codes, 32);
    return;
  }
  for (int i = 0; i < 16; ++i) {
    out[2 * i] = static_cast<int8_t>(ByteOf(x.format, codes[i] & 15));
    out[2 * i + 1] = static_cast<int8_t>(ByteOf(x.format, codes[i] >> 4));
  }
}

// kBlock is the smaller of both pieces (PieceOf). kStrip is the strip's format.
template <int kBlock, Format kStrip>
struct EngineVnniIntegers {
  using Tiles = EngineVnni<kBlock, ScaleProduct::kMultiplied>;
  static constexpr int kTileRowsMax = Tiles::kTileRowsMax;
  static constexpr int64_t kPanelRowsMax = Tiles::kPanelRowsMax;
  static constexpr int kPartRows = Tiles::kPartRows;
  static constexpr int kStripRows = Tiles::kStripRows;
  static constexpr int kSumFloats = Tiles::kSumFloats;
  static constexpr int64_t kStep = Tiles::kStep;
  static constexpr int kBlocks = Tiles::kBlocks;  // blocks of a step
  static constexpr int64_t kStepBytes = Tiles::kStepBytes;
  static constexpr int64_t kChunkBlocks = Tiles::kChunk / kBlock;
  static constexpr bool kIsPacked = IsPacked(kStrip);
  // The values of one load of the strip's codes.
  static constexpr int64_t kGroup = kIsPacked ? 128 : 64;
  static constexpr int64_t kGroupSteps = kGroup / kStep;
  static constexpr int64_t kChunkGroups = Tiles::kChunk / kGroup;
  static constexpr int kBias = BiasOf(kStrip);

  const Operand& panel_operand;
  const Operand& strip_operand;
  const BiasedBytes biased{kStrip};

  explicit EngineVnniIntegers(const Sides& sides)
      : panel_operand(*sides.panel), strip_operand(*sides.strip) {}

  static int64_t Groups(int64_t k) { return Max(CeilDiv(k, kGroup), 1); }
  static int64_t PanelRowBytes(int64_t k) {
    return Groups(k) * kGroupSteps * kStepBytes;
  }
  static int64_t StripBytes(int64_t) { return Tiles::kPartBytes; }

  // Returns the index in 16 values of the byte at place i, in the order in which
  // PackPart stores the strip.
  static constexpr int Index(int i) {
    return !kIsPacked ? i : i < 8 ? 2 * i : 2 * i - 15;
  }

  // The layout of a panel tile is [step][row][kStepBytes].
  void PackRow(int64_t row, uint8_t* tile, int64_t tile_rows,
               int64_t i) const {
    const Operand& x = panel_operand;
    for (int64_t s = 0; s < Groups(x.k) * kGroupSteps; ++s) {
      uint8_t* out = tile + (s * tile_rows + i) * kStepBytes;
      int8_t values[kStep];
      ReadBytes(x, row, s * kStep, values);
      for (int b = 0; b < kBlocks; ++b) {
        int sum = 0;
        for (int j = b * kBlock; j < (b + 1) * kBlock; ++j) {
          sum -= kBias * values[j];
          out[j] = static_cast<uint8_t>(values[j / 16 * 16 + Index(j % 16)]);
        }
        const int64_t k0 = s * kStep + b * kBlock;
        float scale = 0;
        if (k0 < x.k) DecodeByteScales(x, row, k0 / x.block, 1, &scale);
        __builtin_memcpy(out + kStep + 4 * b, &sum, 4);
        __builtin_memcpy(out + kStep + 4 * (kBlocks + b), &scale, 4);
      }
    }
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
    const __m512i table = _mm512_load_si512(biased.bytes);
    const __m512i bias = _mm512_set1_epi8(static_cast<char>(0x80));
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
        uint8_t* to = strip + g * kGroupSteps * Tiles::kStepCodes + 4 * r0;
        for (int d = 0; d < 16; ++d) {
          if constexpr (kIsPacked) {
            // Even values, then odd values.
            const int even = d / 2 * 4 + d % 2;
            _mm512_store_si512(to + even * 4 * kPartRows,
                               _mm512_permutexvar_epi8(out[d], table));
            _mm512_store_si512(
                to + (even + 2) * 4 * kPartRows,
                _mm512_permutexvar_epi8(_mm512_srli_epi16(out[d], 4), table));
          } else {
            _mm512_store_si512(to + d * 4 * kPartRows,
                               _mm512_sub_epi8(out[d], bias));
          }
        }
      }
    }
  }

  // Unpacks the scales of a chunk that begins at value k0 to [block][32 rows].
  void PackScales(int64_t row, int64_t count, int64_t k0,
                  uint8_t* strip) const {
    float* to = reinterpret_cast<float*>(strip + Tiles::kCodes);
    alignas(64) float scale[16][kChunkBlocks];
    for (int64_t r0 = 0; r0 < kPartRows; r0 += 16) {
      for (int64_t r = 0; r < 16; ++r) {
        if (r0 + r < count) {
          const int64_t at = row + r0 + r;
          const uint8_t* next = ScaleAt(strip_operand, at + kStripRows,
                                        k0 / strip_operand.block);
          _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
          PieceScales<kBlock, kChunkBlocks>(strip_operand, at, k0 / kBlock,
                                            scale[r]);
        } else {
          for (float& zero : scale[r]) zero = 0;
        }
      }
      for (int64_t b = 0; b < kChunkBlocks; b += 16) {
        __m512i in[16], out[16];
        for (int r = 0; r < 16; ++r) in[r] = _mm512_load_si512(scale[r] + b);
        Transpose16(in, out);
        for (int i = 0; i < 16; ++i) {
          _mm512_store_si512(to + (b + i) * kPartRows + r0, out[i]);
        }
      }
    }
  }

  void Strip(int64_t row, int64_t count, const uint8_t* panel, int64_t rows,
             int64_t tile_rows, uint8_t* strip, float* c) const {
    const int64_t k = strip_operand.k;
    const int64_t groups = Groups(k);
    const int64_t tile_bytes = tile_rows * PanelRowBytes(k);
    for (int64_t g0 = 0; g0 < groups; g0 += kChunkGroups) {
      const int64_t some = Min(kChunkGroups, groups - g0);
      for (int64_t j = 0; j < count; j += kPartRows) {
        PackPart(row + j, count - j, g0, some, strip);
        PackScales(row + j, count - j, g0 * kGroup, strip);
        Tiles::PartTimesPanel(panel + g0 * kGroupSteps * tile_rows * kStepBytes,
                              rows, tile_rows, tile_bytes, strip,
                              some * kGroupSteps, g0 == 0, c + j);
      }
    }
    FinishTotals<kStripRows>(rows, c);
  }
};

// Requires operands of integers, or of integers and E2M1.
template <Format kStrip>
bool VnniIntegerDot(const DotArgs& args, const Parallel& parallel) {
  return PieceOf(args.lhs) == 32 && PieceOf(args.rhs) == 32
             ? BlockedDot<EngineVnniIntegers<32, kStrip>>(args, parallel)
             : BlockedDot<EngineVnniIntegers<16, kStrip>>(args, parallel);
}

bool VnniIntegerDot(const DotArgs& args, const Sides& sides,
                    const Parallel& parallel) {
  switch (sides.strip->format) {
    case Format::kInt8: return VnniIntegerDot<Format::kInt8>(args, parallel);
    case Format::kInt4: return VnniIntegerDot<Format::kInt4>(args, parallel);
    default: return VnniIntegerDot<Format::kE2M1>(args, parallel);
  }
}
