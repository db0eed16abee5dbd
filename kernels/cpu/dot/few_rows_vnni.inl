// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot of a few rows on vpdpbusd, for integers and E2M1. The weights are
// streamed as in few_rows_avx512.inl. A dword of a vector holds 4 values of one
// piece of a block (8 values if the weights are packed). Its sum is exact, and is
// multiplied by the product of both scales.
//
// One operand of vpdpbusd is unsigned. Packed weights are made unsigned as in
// engine_vnni_integers.inl, and each row has initial sums. With int8 weights the
// rows are made unsigned instead, and share initial sums of the weights. So 4
// rows of 4096 values fit in L1, and are 1.9x faster (one Zen 4 core, 2026-11).
//
// Roundings (see sums.inl): 1 in the product of two scales, 8 in a step (each of
// its vectors), 4 in the sum of the lanes and 1 in the total.

// The indices of the even bytes of two vectors.
struct EvenBytes {
  alignas(64) uint8_t of[64];

  constexpr EvenBytes() : of{} {
    for (int i = 0; i < 64; ++i) of[i] = static_cast<uint8_t>(2 * i);
  }
};
constexpr EvenBytes kEvenBytes;

// kPiece is the smaller of both pieces (PieceOf).
template <int kPiece, Format kWeights>
struct FewRowsVnni {
  static constexpr bool kIsPacked = IsPacked(kWeights);
  static constexpr int kVectors = 8;  // of codes in a step
  static constexpr int64_t kCodesAhead = 4096;  // prefetched, in bytes
  static constexpr int kValues = kIsPacked ? 128 : 64;  // of a vector of codes
  static constexpr int64_t kStep = kVectors * kValues;
  // The steps whose scales are decoded at once.
  static constexpr int64_t kChunkSteps = 4096 / kStep;
  static constexpr int kParts = kValues / 64;
  static constexpr int kPieces = kStep / kPiece;
  // The vectors whose pieces have 16 scales.
  static constexpr int kScaleVectors = 16 * kPiece / kValues;
  // The layout of a step of a row: [values][initial sums, if packed][scales].
  static constexpr int64_t kSums = kStep;
  static constexpr int64_t kScales = kSums + (kIsPacked ? kVectors * 64 : 0);
  static constexpr int64_t kStepBytes = kScales + kPieces * 4;

  const Operand& weights;
  const BiasedBytes biased{kWeights};
  const ScaleIndex index{kPiece, kValues};

  explicit FewRowsVnni(const Operand& x) : weights(x) {}

  static int64_t Steps(int64_t k) { return CeilDiv(k, kStep); }

  void PackRow(const Operand& x, int64_t row, uint8_t* out) const {
    const __m512i even = _mm512_load_si512(kEvenBytes.of);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
    const __m512i bias =
        _mm512_set1_epi8(static_cast<char>(BiasOf(kWeights)));
    for (int64_t s = 0; s < Steps(x.k); ++s, out += kStepBytes) {
      alignas(64) int8_t bytes[kStep];
      for (int64_t i = 0; i < kStep; i += 32) {
        ReadBytes(x, row, s * kStep + i, bytes + i);
      }
      for (int v = 0; v < kVectors; ++v) {
        __m512i part[kParts];
        part[0] = _mm512_load_si512(bytes + v * kValues);
        if constexpr (kIsPacked) {
          // Packed weights have the even values first, then the odd values.
          const __m512i first = part[0];
          const __m512i second = _mm512_load_si512(bytes + v * kValues + 64);
          part[0] = _mm512_permutex2var_epi8(first, even, second);
          part[1] = _mm512_permutex2var_epi8(first, odd, second);
        } else {
          _mm512_store_si512(out + v * kValues,
                             _mm512_sub_epi8(part[0], bias));
          continue;
        }
        __m512i sums = _mm512_setzero_si512();
        for (int i = 0; i < kParts; ++i) {
          _mm512_store_si512(out + v * kValues + 64 * i, part[i]);
          sums = _mm512_dpbusd_epi32(sums, bias, part[i]);
        }
        _mm512_store_si512(out + kSums + v * 64,
                           _mm512_sub_epi32(_mm512_setzero_si512(), sums));
      }
      alignas(64) float scale[kPieces];
      PieceScales<kPiece, kPieces>(x, row, s * kPieces, scale);
      __builtin_memcpy(out + kScales, scale, sizeof(scale));
    }
  }

  // The constants of the loops.
  struct Constants {
    __m512i table, bias;
    __m512i lanes[kScaleVectors];  // the index of the scale of each dword

    explicit Constants(const FewRowsVnni& x)
        : table(_mm512_load_si512(x.biased.bytes)),
          bias(_mm512_set1_epi8(static_cast<char>(BiasOf(kWeights)))) {
      for (int v = 0; v < kScaleVectors; ++v) {
        lanes[v] = _mm512_load_si512(x.index.lanes[v]);
      }
    }
  };

  JAXPLUGIN_ALWAYS_INLINE static __m512 Floats(const void* p) {
    return _mm512_castsi512_ps(_mm512_load_si512(p));
  }

  // Adds the dots of one step to the totals. If !kIsWhole, the weights have only
  // the last `left` bytes.
  template <int kRows, bool kIsWhole>
  JAXPLUGIN_ALWAYS_INLINE static void Step(const Constants& constants,
                                           const uint8_t* values, int64_t left,
                                           const float* scale, const uint8_t* x,
                                           int64_t x_row_bytes, __m512* total,
                                           __m512* rest) {
    __m512 scales[kRows], sum[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if (!kIsWhole && v * 64 >= left) break;
      const uint8_t* at = values + v * 64;
      // Into L1: of a prefetch into L2, 4 rows take 0.92 to 0.97 of the time
      // (4096 x 4096, two Zen 5 cores, 2026-11).
      _mm_prefetch(reinterpret_cast<const char*>(at + kCodesAhead),
                   _MM_HINT_T0);
      __m512i codes = kIsWhole ? _mm512_loadu_si512(at)
                               : LoadBytes(at, left - v * 64);
      KeepInRegister(&codes);
      __m512i y[kParts], start = _mm512_setzero_si512();
      if constexpr (kIsPacked) {
        y[0] = _mm512_permutexvar_epi8(codes, constants.table);
        y[1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4),
                                       constants.table);
      } else {
        y[0] = codes;
        start = _mm512_sub_epi32(
            start, _mm512_dpbusd_epi32(start, constants.bias, codes));
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* xr = x + r * x_row_bytes;
        if (v % kScaleVectors == 0) {
          const int i = v / kScaleVectors;
          scales[r] = _mm512_mul_ps(Floats(scale + 16 * i),
                                    Floats(xr + kScales + 64 * i));
        }
        __m512i dot =
            kIsPacked ? _mm512_load_si512(xr + kSums + v * 64) : start;
#pragma GCC unroll 2
        for (int i = 0; i < kParts; ++i) {
          const __m512i row = _mm512_load_si512(xr + v * kValues + i * 64);
          dot = kIsPacked ? _mm512_dpbusd_epi32(dot, y[i], row)
                          : _mm512_dpbusd_epi32(dot, row, y[i]);
        }
        const __m512 spread = _mm512_permutexvar_ps(
            constants.lanes[v % kScaleVectors], scales[r]);
        sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), spread, sum[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) AddExactly(sum[r], &total[r], &rest[r]);
  }

  // sums[r] = the lanes of weight row w . x row r
  template <int kRows>
  JAXPLUGIN_ALWAYS_INLINE void Sums(const Constants& constants, int64_t w,
                                    const uint8_t* x, int64_t x_row_bytes,
                                    __m512* sums) const {
    constexpr int64_t kCodes = kVectors * 64;  // bytes of a step
    const uint8_t* values = RowValues(weights, w);
    const int64_t whole = weights.k / kStep;
    const int64_t left = weights.row_bytes - whole * kCodes;
    const int64_t steps = Steps(weights.k);
    const int64_t scale_bytes =
        weights.scale_cols * ScaleSize(weights.scale_kind);
    const uint8_t* ahead = ScaleAt(weights, w, 0) + kScalesAhead;
    for (int64_t i = 0; i < scale_bytes; i += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T1);
    }
    __m512 total[kRows], rest[kRows];
    for (int r = 0; r < kRows; ++r) total[r] = rest[r] = _mm512_setzero_ps();
    for (int64_t s0 = 0; s0 < steps; s0 += kChunkSteps) {
      alignas(64) float scale[kChunkSteps * kPieces];
      PieceScales<kPiece, kChunkSteps * kPieces>(weights, w, s0 * kPieces,
                                                 scale);
      const int64_t end = Min(s0 + kChunkSteps, whole);
      int64_t s = s0;
      for (; s < end; ++s) {
        Step<kRows, true>(constants, values + s * kCodes, 0,
                          scale + (s - s0) * kPieces, x + s * kStepBytes,
                          x_row_bytes, total, rest);
      }
      if (s == whole && left > 0 && s < s0 + kChunkSteps) {
        Step<kRows, false>(constants, values + s * kCodes, left,
                           scale + (s - s0) * kPieces, x + s * kStepBytes,
                           x_row_bytes, total, rest);
      }
    }
    for (int r = 0; r < kRows; ++r) sums[r] = TotalOf(total[r], rest[r]);
  }

  template <int kRows>
  void Strip(int64_t w0, int64_t count, const uint8_t* x, int64_t x_row_bytes,
             float* c, int64_t ldc) const {
    const Constants constants(*this);
    __m512 sums[4][kRows];
    for (int64_t w = 0; w < count; w += 4) {
      const int64_t group = Min(4, count - w);
      for (int64_t j = 0; j < group; ++j) {
        Sums<kRows>(constants, w0 + w + j, x, x_row_bytes, sums[j]);
      }
      StoreSums<kRows>(sums, group, 1, c + w, ldc);
    }
  }
};

template <int kPiece, Format kWeights>
bool FewRowsVnniDot(const DotArgs& args, const Sides& sides,
                    const Parallel& parallel) {
  using Engine = FewRowsVnni<kPiece, kWeights>;
  const Engine engine(*sides.strip);
  const int64_t x_row_bytes = Engine::Steps(args.k) * Engine::kStepBytes;
  bool is_done = false;
  return StreamWeights(
      args, sides, x_row_bytes, parallel,
      [&](int64_t r, uint8_t* row) {
        engine.PackRow(*sides.panel, r, row);
        return true;
      },
      [&](int64_t, int64_t rows, int64_t w0, int64_t count, const uint8_t* x,
          float* c, int64_t ldc) {
        switch (rows) {
          case 1:
            return engine.template Strip<1>(w0, count, x, x_row_bytes, c, ldc);
          case 2:
            return engine.template Strip<2>(w0, count, x, x_row_bytes, c, ldc);
          case 3:
            return engine.template Strip<3>(w0, count, x, x_row_bytes, c, ldc);
          default:
            return engine.template Strip<4>(w0, count, x, x_row_bytes, c, ldc);
        }
      },
      &is_done);
}

template <Format kWeights>
bool FewRowsVnniDot(const DotArgs& args, const Sides& sides,
                    const Parallel& parallel) {
  return PieceOf(args.lhs) == 32 && PieceOf(args.rhs) == 32
             ? FewRowsVnniDot<32, kWeights>(args, sides, parallel)
             : FewRowsVnniDot<16, kWeights>(args, sides, parallel);
}

// Requires operands of integers and E2M1.
bool FewRowsVnniDot(const DotArgs& args, const Sides& sides,
                    const Parallel& parallel) {
  switch (sides.strip->format) {
    case Format::kInt8:
      return FewRowsVnniDot<Format::kInt8>(args, sides, parallel);
    case Format::kInt4:
      return FewRowsVnniDot<Format::kInt4>(args, sides, parallel);
    default: return FewRowsVnniDot<Format::kE2M1>(args, sides, parallel);
  }
}
