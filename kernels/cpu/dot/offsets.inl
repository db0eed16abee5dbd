// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// What zero points or minima of a weight add to a dot. XLA would write all
// terms to memory: for one row of bf16 x UINT4_128, 4096 x 4096, its second dot
// takes 93 of 308 us (Zen 5, 2026-11).

using Eight = float __attribute__((vector_size(32)));
using EightInts = int32_t __attribute__((vector_size(32)));

JAXPLUGIN_ALWAYS_INLINE float DecodeOffset(OffsetKind kind, const uint8_t* at,
                                           int64_t i) {
  switch (kind) {
    case OffsetKind::kF32: return LoadCode<float>(at + 4 * i);
    case OffsetKind::kBF16: return FromBF16(LoadCode<uint16_t>(at + 2 * i));
    case OffsetKind::kF16: return FromF16(LoadCode<uint16_t>(at + 2 * i));
    case OffsetKind::kUint8: return at[i];
    case OffsetKind::kInt8: return static_cast<int8_t>(at[i]);
  }
  return 0;
}

#if defined(__F16C__) && defined(__AVX2__)
JAXPLUGIN_ALWAYS_INLINE void DecodeEight(OffsetKind kind, const uint8_t* at,
                                         int64_t i, Eight* x) {
  const auto load = [&](int64_t size) {
    return reinterpret_cast<const __m128i*>(at + size * i);
  };
  switch (kind) {
    case OffsetKind::kF32:
      *x = _mm256_loadu_ps(reinterpret_cast<const float*>(load(4)));
      break;
    case OffsetKind::kBF16:
      *x = _mm256_castsi256_ps(_mm256_slli_epi32(
          _mm256_cvtepu16_epi32(_mm_loadu_si128(load(2))), 16));
      break;
    case OffsetKind::kF16:
      *x = _mm256_cvtph_ps(_mm_loadu_si128(load(2)));
      break;
    case OffsetKind::kUint8:
      *x = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(load(1))));
      break;
    case OffsetKind::kInt8:
      *x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(load(1))));
      break;
  }
}
#else
JAXPLUGIN_ALWAYS_INLINE void DecodeEight(OffsetKind kind, const uint8_t* at,
                                         int64_t i, Eight* x) {
  for (int lane = 0; lane < 8; ++lane) {
    (*x)[lane] = DecodeOffset(kind, at, i + lane);
  }
}
#endif

JAXPLUGIN_ALWAYS_INLINE void LoadFloats(const float* from, Eight* x) {
  __builtin_memcpy(x, from, sizeof(*x));
}

JAXPLUGIN_ALWAYS_INLINE float TotalOfEight(const Eight& x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

using Four = float __attribute__((vector_size(16)));

// Returns TotalOfEight of four vectors, with the same bits.
JAXPLUGIN_ALWAYS_INLINE Four TotalsOfEight(const Eight& a, const Eight& b,
                                           const Eight& c, const Eight& d) {
  const auto halves = [](const Eight& x) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) +
           __builtin_shufflevector(x, x, 4, 5, 6, 7);
  };
  const auto quarters = [&](const Eight& x, const Eight& y) {
    const Four u = halves(x), v = halves(y);
    return __builtin_shufflevector(u, v, 0, 1, 4, 5) +
           __builtin_shufflevector(u, v, 2, 3, 6, 7);
  };
  const Four ab = quarters(a, b), cd = quarters(c, d);
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) +
         __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}

// Sums in float32 are at most this many vectors long, and are added in float64.
// With one float32 sum, a row of equal values with k = 4096 in one block has an
// error of 87 units of the contract.
constexpr int64_t kPlainSums = 8;
constexpr int64_t kTermsSummed = 16 * kPlainSums;

// Returns the terms of blocks [at, at + 8). A value is code * scale plus its
// block's term. Terms from `left` on are 0.
template <OffsetKind kScale, OffsetKind kOffset>
JAXPLUGIN_ALWAYS_INLINE void EightTerms(const Operand& weights, int64_t at,
                                        int64_t left, Eight* terms) {
  constexpr bool kZeroPoints = kOffset >= OffsetKind::kUint8;
  const EightInts lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  const float shift = weights.code_offset;
  Eight scale, offset;
  DecodeEight(kScale, weights.scale, at, &scale);
  DecodeEight(kOffset, weights.offset, at, &offset);
  *terms = kZeroPoints ? (shift - offset) * scale : shift * scale + offset;
  if (left < 8) {
    *terms = reinterpret_cast<Eight>(reinterpret_cast<EightInts>(*terms) &
                                     (lanes < static_cast<int32_t>(left)));
  }
}

// Writes the terms of a row of weights. Zeros follow up to a multiple of
// kTermsMultiple. The last vector of a row reads the start of the next row, too.
// Vectors are stored, because loads of vectors wait for stores of single floats.
template <OffsetKind kScale, OffsetKind kOffset>
JAXPLUGIN_ALWAYS_INLINE void TermsOf(const Operand& weights, int64_t row,
                                     float* terms) {
  constexpr bool kZeroPoints = kOffset >= OffsetKind::kUint8;
  const float shift = weights.code_offset;
  const int64_t count = weights.scale_cols;
  const int64_t padded = RoundUp(count, kTermsMultiple);
  const int64_t first = row * count;
  const int64_t end = weights.rows * count;
  int64_t i = 0;
  for (; i < count && first + i + 8 <= end; i += 8) {
    Eight term;
    EightTerms<kScale, kOffset>(weights, first + i, count - i, &term);
    __builtin_memcpy(terms + i, &term, sizeof(term));
  }
  for (; i < count; ++i) {  // the last values of the last row
    const float scale = DecodeOffset(kScale, weights.scale, first + i);
    const float offset = DecodeOffset(kOffset, weights.offset, first + i);
    terms[i] = kZeroPoints ? (shift - offset) * scale : shift * scale + offset;
  }
  for (; i % 8 != 0; ++i) terms[i] = 0;
  const Eight zeros{};
  for (; i < padded; i += 8) __builtin_memcpy(terms + i, &zeros, sizeof(zeros));
}

// Writes sum_b sums[b] * terms[b] in eight parts. `count` is a multiple of
// kTermsMultiple, and at most kTermsSummed.
JAXPLUGIN_ALWAYS_INLINE void PartsOfTerms(const float* sums, const float* terms,
                                          int64_t count, Eight* parts) {
  Eight low{}, high{};
  for (int64_t i = 0; i < count; i += 16) {
    Eight x, term;
    LoadFloats(sums + i, &x);
    LoadFloats(terms + i, &term);
    low += x * term;
    LoadFloats(sums + i + 8, &x);
    LoadFloats(terms + i + 8, &term);
    high += x * term;
  }
  *parts = low + high;
}

// The same for the terms of a row of weights that is followed by at least 8
// blocks, for one row of sums. Storing the terms would take longer than that.
template <OffsetKind kScale, OffsetKind kOffset>
JAXPLUGIN_ALWAYS_INLINE void PartsOfRow(const Operand& weights, int64_t row,
                                        const float* sums, Eight* parts) {
  const int64_t count = weights.scale_cols;
  const int64_t first = row * count;
  Eight low{}, high{};
  for (int64_t i = 0; i < count; i += 16) {
    Eight x, term;
    LoadFloats(sums + i, &x);
    EightTerms<kScale, kOffset>(weights, first + i, count - i, &term);
    low += x * term;
    if (i + 8 >= count) break;
    LoadFloats(sums + i + 8, &x);
    EightTerms<kScale, kOffset>(weights, first + i + 8, count - i - 8, &term);
    high += x * term;
  }
  *parts = low + high;
}

// Returns sum_b sums[b] * terms[b]. `count` is a multiple of kTermsMultiple.
JAXPLUGIN_ALWAYS_INLINE float DotOfTerms(const float* sums, const float* terms,
                                         int64_t count) {
  double result = 0;
  for (int64_t i = 0; i < count; i += kTermsSummed) {
    Eight parts;
    PartsOfTerms(sums + i, terms + i, Min(count - i, kTermsSummed), &parts);
    result += TotalOfEight(parts);
  }
  return static_cast<float>(result);
}

// The last block of a row may be short. Zeros follow the sums of a row up to a
// multiple of kTermsMultiple.
inline void SumBlocks(const Operand& x, const Operand& weights, float* sums) {
  const OffsetKind kind = x.format == Format::kF32    ? OffsetKind::kF32
                          : x.format == Format::kBF16 ? OffsetKind::kBF16
                                                      : OffsetKind::kF16;
  const int64_t padded = RoundUp(weights.scale_cols, kTermsMultiple);
  for (int64_t row = 0; row < x.rows; ++row, sums += padded) {
    for (int64_t b = 0; b < padded; ++b) {
      int64_t i = row * x.k + Min(x.k, b * weights.block);
      const int64_t end = row * x.k + Min(x.k, (b + 1) * weights.block);
      double sum = 0;
      while (i + 8 <= end) {
        Eight total{};
        const int64_t chunk_end = Min(end, i + 8 * kPlainSums);
        for (; i + 8 <= chunk_end; i += 8) {
          Eight eight;
          DecodeEight(kind, x.values, i, &eight);
          total += eight;
        }
        sum += TotalOfEight(total);
      }
      for (; i < end; ++i) sum += DecodeOffset(kind, x.values, i);
      sums[b] = static_cast<float>(sum);
    }
  }
}

// Adds the totals of four weight rows to columns [j, j + 4) of row i.
JAXPLUGIN_ALWAYS_INLINE void AddTotals(const OffsetArgs& args, int64_t i,
                                       int64_t j, const Eight* parts) {
  Four result;
  __builtin_memcpy(&result, args.result + i * args.result_stride + j,
                   sizeof(result));
  result += TotalsOfEight(parts[0], parts[1], parts[2], parts[3]);
  __builtin_memcpy(args.out + i * args.out_stride + j, &result,
                   sizeof(result));
}

template <OffsetKind kScale, OffsetKind kOffset>
inline bool AddOffsetsOf(const OffsetArgs& args) {
  const Operand& weights = *args.weights;
  const int64_t padded = RoundUp(weights.scale_cols, kTermsMultiple);
  Scratch scratch(4 * padded * sizeof(float));
  float* const terms = reinterpret_cast<float*>(scratch.get());
  if (terms == nullptr) return false;
  int64_t j = 0;
  // Four rows of weights at a time have their lanes added together.
  for (; j + 4 <= args.n && padded <= kTermsSummed; j += 4) {
    const int64_t row = args.row + j;
    Eight parts[4];
    if (args.m == 1 && (weights.rows - row - 4) * weights.scale_cols >= 8) {
      for (int64_t r = 0; r < 4; ++r) {
        PartsOfRow<kScale, kOffset>(weights, row + r, args.sums, parts + r);
      }
      AddTotals(args, 0, j, parts);
      continue;
    }
    for (int64_t r = 0; r < 4; ++r) {
      TermsOf<kScale, kOffset>(weights, row + r, terms + r * padded);
    }
    for (int64_t i = 0; i < args.m; ++i) {
      const float* const sums = args.sums + i * padded;
      for (int64_t r = 0; r < 4; ++r) {
        PartsOfTerms(sums, terms + r * padded, padded, parts + r);
      }
      AddTotals(args, i, j, parts);
    }
  }
  for (; j < args.n; ++j) {
    TermsOf<kScale, kOffset>(weights, args.row + j, terms);
    for (int64_t i = 0; i < args.m; ++i) {
      args.out[i * args.out_stride + j] =
          args.result[i * args.result_stride + j] +
          DotOfTerms(args.sums + i * padded, terms, padded);
    }
  }
  return true;
}

template <OffsetKind kScale>
inline bool AddOffsetsOfScale(const OffsetArgs& args) {
  switch (args.weights->offset_kind) {
    case OffsetKind::kF32: return AddOffsetsOf<kScale, OffsetKind::kF32>(args);
    case OffsetKind::kBF16:
      return AddOffsetsOf<kScale, OffsetKind::kBF16>(args);
    case OffsetKind::kF16: return AddOffsetsOf<kScale, OffsetKind::kF16>(args);
    case OffsetKind::kUint8:
      return AddOffsetsOf<kScale, OffsetKind::kUint8>(args);
    default: return AddOffsetsOf<kScale, OffsetKind::kInt8>(args);
  }
}

inline bool AddOffsets(const OffsetArgs& args) {
  switch (args.weights->scale_kind) {
    case ScaleKind::kF32: return AddOffsetsOfScale<OffsetKind::kF32>(args);
    case ScaleKind::kBF16: return AddOffsetsOfScale<OffsetKind::kBF16>(args);
    default: return AddOffsetsOfScale<OffsetKind::kF16>(args);
  }
}
