// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Scales and codes of blocks with AVX2. blocks.inl has the same functions as
// portable loops, which take more than twice as long with GCC 12.

template <int kCount>
JAXPLUGIN_ALWAYS_INLINE uint32_t BlockMax(const float* x) {
  const __m256i magnitude = _mm256_set1_epi32(kMagnitude);
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < kCount; i += 8) {
    const __m256i bits =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    top = _mm256_max_epi32(top, _mm256_and_si256(bits, magnitude));
  }
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(top),
                               _mm256_extracti128_si256(top, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(four));
}

// Returns the largest BlockMax among the blocks of 16 values without NaN or
// Inf. `count` is a multiple of 16. Checks all blocks together first, because
// almost always none has NaN or Inf.
JAXPLUGIN_ALWAYS_INLINE uint32_t FiniteMax(const float* x, int64_t count) {
  const __m256i magnitude = _mm256_set1_epi32(kMagnitude);
  __m256i tops[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < count; i += 16) {
    for (int h = 0; h < 2; ++h) {
      const __m256i bits = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(x + i + 8 * h));
      tops[h] = _mm256_max_epi32(tops[h], _mm256_and_si256(bits, magnitude));
    }
  }
  alignas(32) float both[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(both), tops[0]);
  _mm256_store_si256(reinterpret_cast<__m256i*>(both + 8), tops[1]);
  uint32_t amax = BlockMax<16>(both);
  if (amax < kInfinity) return amax;
  amax = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const uint32_t block = BlockMax<16>(x + i);
    if (block < kInfinity) amax = block > amax ? block : amax;
  }
  return amax;
}

// The same as Encode for 8 quotients, none of which is NaN or negative.
template <typename T>
JAXPLUGIN_ALWAYS_INLINE __m256i EncodeEight(__m256 quotient) {
  constexpr int kShift = 23 - T::kMantissaBits;
  const __m256i first = _mm256_set1_epi32((127 + T::kMinExponent) << 23);
  const __m256i bits = _mm256_min_epi32(_mm256_castps_si256(quotient),
                                        _mm256_set1_epi32(T::kMaxBits));
  // Adding 2^23 times the last place of T at this exponent rounds to a multiple
  // of it. The low bits then hold the multiple: the mantissa, with its leading
  // one unless the value is subnormal.
  const __m256i exponent = _mm256_max_epi32(
      _mm256_and_si256(bits, _mm256_set1_epi32(kInfinity)), first);
  const __m256i magic =
      _mm256_add_epi32(exponent, _mm256_set1_epi32(kShift << 23));
  const __m256 sum =
      _mm256_add_ps(_mm256_castsi256_ps(bits), _mm256_castsi256_ps(magic));
  const __m256i quanta = _mm256_sub_epi32(_mm256_castps_si256(sum), magic);
  return _mm256_add_epi32(
      quanta, _mm256_srli_epi32(_mm256_sub_epi32(exponent, first), kShift));
}

// Stores the codes of kCount values x * factor (kDivide: x / factor), masked
// with `keep`.
template <typename T, int kCount, bool kDivide>
JAXPLUGIN_ALWAYS_INLINE void EncodeRun(const float* x, float factor,
                                       uint32_t keep, uint8_t* out) {
  static_assert(kCount == 16 || kCount == 32, "one or two vectors of words");
  const __m256 factors = _mm256_set1_ps(factor);
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(keep));
  const __m256i sign =
      _mm256_set1_epi32(static_cast<int>(keep & (1u << T::kSignShift)));
  __m256i words[2];
  for (int h = 0; h < kCount / 16; ++h) {
    __m256i codes[2];
    for (int i = 0; i < 2; ++i) {
      const __m256 value = _mm256_loadu_ps(x + 16 * h + 8 * i);
      const __m256 magnitude = _mm256_and_ps(
          value, _mm256_castsi256_ps(_mm256_set1_epi32(kMagnitude)));
      const __m256 quotient = kDivide ? _mm256_div_ps(magnitude, factors)
                                      : _mm256_mul_ps(magnitude, factors);
      const __m256i signs = _mm256_and_si256(
          _mm256_srli_epi32(_mm256_castps_si256(value), 31 - T::kSignShift),
          sign);
      codes[i] = _mm256_or_si256(
          _mm256_and_si256(EncodeEight<T>(quotient), mask), signs);
    }
    words[h] = _mm256_packus_epi32(codes[0], codes[1]);
  }
  // Packing works within 128-bit lanes. The packed dwords begin with values 0,
  // 8, 16, 24, 4, 12, 20 and 28, and the permutation sorts them.
  const __m256i bytes = _mm256_permutevar8x32_epi32(
      _mm256_packus_epi16(words[0], words[kCount / 16 - 1]),
      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  if constexpr (IsPacked(T::kFormat)) {
    // Low nibble + 16 * high nibble.
    const __m256i pairs =
        _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
    const __m256i packed = _mm256_permute4x64_epi64(
        _mm256_packus_epi16(pairs, pairs), 0x08);
    const __m128i result = _mm256_castsi256_si128(packed);
    if (kCount == 32) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), result);
    } else {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out), result);
    }
  } else if (kCount == 32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm256_castsi256_si128(bytes));
  }
}

// Inverses are used for steps from kLeastStep to 1 / kLeastStep. With them no
// intermediate of E2M1Cells overflows, and underflow does not change a code.
constexpr float kLeastStep = 0x1p-64f;

// Returns the cell of each of 8 quotients x / step, plus 499. The E2M1 code of
// a quotient is looked up by its cell. Cells begin at 1, 1.25, 1.5 and 1.75
// times a power of two. The middle between two values of E2M1 is such a
// beginning, but belongs to the cell whose code is even. Small quotients have
// negative cells.
//
// The quotient is x * inverse, corrected once. It was compared with the rounded
// quotient for all 2^23 significands of a step, and the seven values of x on
// either side of each of the seven middles, and was equal. Other values of x
// are too far from a middle for a rounding error to cross it.
JAXPLUGIN_ALWAYS_INLINE __m256i E2M1Cells(__m256 x, __m256 step,
                                          __m256 inverse) {
  const __m256 close = _mm256_mul_ps(x, inverse);
  const __m256 rest = _mm256_fnmadd_ps(close, step, x);
  const __m256i bits = _mm256_and_si256(
      _mm256_castps_si256(_mm256_fmadd_ps(rest, inverse, close)),
      _mm256_set1_epi32(kMagnitude));
  // Subtracting one puts the beginning of a cell into the cell below. One is
  // not subtracted if the upper one of the cell's two mantissa bits is set. The
  // middles 0.75, 1.75 and 3.5 have that bit, and they round up.
  const __m256i upper = _mm256_srai_epi32(_mm256_slli_epi32(bits, 9), 31);
  const __m256i below = _mm256_sub_epi32(
      _mm256_add_epi32(bits, _mm256_set1_epi32(-1)), upper);
  return _mm256_srai_epi32(below, 21);
}

// Stores the codes of blocks b and b + 1, which begin at x.
JAXPLUGIN_ALWAYS_INLINE void EncodeTwoBlocks(const float* x,
                                             const Nvfp4Steps& steps, int b,
                                             uint8_t* out) {
  const __m256i low = _mm256_setr_epi8(0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4,
                                       5, 5, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3,
                                       4, 4, 5, 5);
  const __m256i high = _mm256_setr_epi8(6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
                                        7, 7, 7, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7,
                                        7, 7, 7, 7, 7, 7);
  __m256i cells[2], signs[2];
  for (int h = 0; h < 2; ++h) {
    const __m256 step = _mm256_set1_ps(steps.step[b + h]);
    const __m256 inverse = _mm256_set1_ps(steps.inverse[b + h]);
    const __m256 first = _mm256_loadu_ps(x + 16 * h);
    const __m256 second = _mm256_loadu_ps(x + 16 * h + 8);
    cells[h] = _mm256_packs_epi32(E2M1Cells(first, step, inverse),
                                  E2M1Cells(second, step, inverse));
    cells[h] = _mm256_sub_epi16(cells[h], _mm256_set1_epi16(499));
    // Packing saturates, which keeps signs.
    signs[h] = _mm256_packs_epi32(_mm256_castps_si256(first),
                                  _mm256_castps_si256(second));
  }
  const __m256i cell = _mm256_min_epu8(_mm256_packus_epi16(cells[0], cells[1]),
                                       _mm256_set1_epi8(31));
  // A look-up gives 0 if the top bit of its index is set.
  __m256i codes = _mm256_or_si256(
      _mm256_shuffle_epi8(low, _mm256_add_epi8(cell, _mm256_set1_epi8(0x70))),
      _mm256_shuffle_epi8(high, _mm256_sub_epi8(cell, _mm256_set1_epi8(16))));
  const __m256i sign = _mm256_packs_epi16(signs[0], signs[1]);
  codes = _mm256_or_si256(codes, _mm256_and_si256(_mm256_srli_epi16(sign, 4),
                                                  _mm256_set1_epi8(8)));
  // Low nibble + 16 * high nibble. Each word of `packed` has four codes. The
  // words of the lower lane begin with values 0, 8, 16 and 24, and those of the
  // upper lane with values 4, 12, 20 and 28.
  const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
  const __m256i packed = _mm256_packus_epi16(pairs, pairs);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_unpacklo_epi16(_mm256_castsi256_si128(packed),
                                      _mm256_extracti128_si256(packed, 1)));
}

// Returns the largest lane of each of 8 vectors, none of which is negative.
JAXPLUGIN_ALWAYS_INLINE __m256i MaxOfEight(const __m256i* x) {
  __m256i pairs[4], fours[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                                _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    fours[i] =
        _mm256_max_epi32(_mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                         _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  }
  return _mm256_max_epi32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20),
                          _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

template <bool kTiny>
JAXPLUGIN_ALWAYS_INLINE void Nvfp4Scales(const float* x, int count,
                                         const Nvfp4Global& global,
                                         uint8_t* scale, Nvfp4Steps* out) {
  const __m256i magnitude = _mm256_set1_epi32(kMagnitude);
  const __m256i valid = _mm256_set1_epi32(global.invalid ? 0 : -1);
  const __m256 divisor = _mm256_set1_ps(global.divisor);
  uint8_t codes[kNvfp4Blocks];
  out->has_inverse = true;
  for (int b = 0; b < count; b += 8) {
    __m256i tops[8];
    for (int i = 0; i < 8; ++i) {
      tops[i] = _mm256_setzero_si256();
      if (b + i >= count) continue;
      const __m256i* from =
          reinterpret_cast<const __m256i*>(x + 16 * (b + i));
      tops[i] = _mm256_max_epi32(
          _mm256_and_si256(_mm256_loadu_si256(from), magnitude),
          _mm256_and_si256(_mm256_loadu_si256(from + 1), magnitude));
    }
    const __m256i bits = MaxOfEight(tops);
    const __m256i keep = _mm256_and_si256(
        _mm256_cmpgt_epi32(_mm256_set1_epi32(kInfinity), bits), valid);
    __m256 amax = _mm256_castsi256_ps(_mm256_and_si256(bits, keep));
    if (kTiny) amax = _mm256_mul_ps(amax, _mm256_set1_ps(0x1p64f));
    // The maximum is its second operand if the first is NaN. Only blocks that
    // are not kept have a NaN.
    const __m256 ideal = _mm256_max_ps(
        _mm256_div_ps(_mm256_div_ps(amax, _mm256_set1_ps(6)), divisor),
        _mm256_set1_ps(kMinE4M3));
    const __m256i e4m3 = EncodeEight<E4M3>(ideal);
    const __m256 decoded =
        _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(e4m3, 20)),
                      _mm256_set1_ps(0x1p120f));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->keep + b), keep);
    const __m256 step = _mm256_mul_ps(decoded, divisor);
    _mm256_storeu_ps(out->step + b, step);
    _mm256_storeu_ps(out->inverse + b,
                     _mm256_div_ps(_mm256_set1_ps(1), step));
    const __m256 in_range = _mm256_and_ps(
        _mm256_cmp_ps(step, _mm256_set1_ps(kLeastStep), _CMP_GE_OQ),
        _mm256_cmp_ps(step, _mm256_set1_ps(1 / kLeastStep), _CMP_LE_OQ));
    const __m256i usable =
        _mm256_and_si256(keep, _mm256_castps_si256(in_range));
    out->has_inverse &= _mm256_movemask_epi8(usable) == -1;
    const __m256i is_zero = _mm256_cmpeq_epi32(bits, _mm256_setzero_si256());
    const __m256i code =
        _mm256_blendv_epi8(_mm256_set1_epi32(0x7f),
                           _mm256_andnot_si256(is_zero, e4m3), keep);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(code),
                                           _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + b),
                     _mm_packus_epi16(words, words));
  }
  __builtin_memcpy(scale, codes, count);
}

// Computes the scales of `count` blocks, and the steps to encode their values.
template <typename T>
JAXPLUGIN_ALWAYS_INLINE void MxScales(const float* x, int count, bool round_up,
                                      uint8_t* scale, MxSteps* out) {
  static_assert(kMxBlocks == 8, "one vector");
  const __m256i magnitude = _mm256_set1_epi32(kMagnitude);
  __m256i tops[8];
  for (int b = 0; b < 8; ++b) {
    tops[b] = _mm256_setzero_si256();
    if (b >= count) continue;
    const __m256i* from = reinterpret_cast<const __m256i*>(x + 32 * b);
    for (int i = 0; i < 4; ++i) {
      tops[b] = _mm256_max_epi32(
          tops[b], _mm256_and_si256(_mm256_loadu_si256(from + i), magnitude));
    }
  }
  const __m256i bits = MaxOfEight(tops);
  __m256i byte = _mm256_sub_epi32(_mm256_srli_epi32(bits, 23),
                                  _mm256_set1_epi32(T::kMaxExponent));
  if (round_up) {
    const __m256i mantissa =
        _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff));
    byte = _mm256_sub_epi32(
        byte, _mm256_cmpgt_epi32(
                  mantissa, _mm256_set1_epi32(T::kMaxBits & 0x7fffff)));
  }
  byte = _mm256_max_epi32(byte, _mm256_setzero_si256());
  const __m256i keep = _mm256_cmpgt_epi32(_mm256_set1_epi32(kInfinity), bits);
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(out->inverse),
      _mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(254), byte), 23));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->keep), keep);
  uint8_t codes[8];
  const __m256i code = _mm256_blendv_epi8(_mm256_set1_epi32(255), byte, keep);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(code),
                                         _mm256_extracti128_si256(code, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(codes),
                   _mm_packus_epi16(words, words));
  __builtin_memcpy(scale, codes, count);
}
