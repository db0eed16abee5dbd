// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Converts codes to bf16 in registers (AVX-512 VBMI), in units of 128 values:
// four vectors of 32 bf16. bf16 represents every value of a quantized format
// exactly. The conversion looks up codes in tables, which registers hold.
//
// A dot does not depend on the order of k if both operands have the same order.
// So values stay in the order in which decoding leaves them. Only the operand
// that is unpacked less often is permuted to match the other one. The orders:
//   byte order    vectors 2 g, 2 g + 1: the first and the last 8 values of each
//                 16 of 64 g + 0..63
//   nibble order  vector q: values q, 4 + q, 8 + q, ...
//   nibble blocks vector b: the dwords of nibble order that have values 32 b ..
//                 32 b + 31
//   natural order plain bf16
// In each order, a dword of a vector holds two values of one block.

constexpr int64_t kUnit = 128;
constexpr int64_t kUnitBytes = kUnit * 2;  // as bf16

enum class Order { kByte, kNibble, kNibbleBlocks, kNatural };
constexpr int kOrders = 4;

JAXPLUGIN_ALWAYS_INLINE Order NativeOrder(Format format) {
  return IsPacked(format)  ? Order::kNibble
         : IsPlain(format) ? Order::kNatural
                           : Order::kByte;
}

// Returns the index of the word that holds value v, among 128 words of a unit.
constexpr int WordOf(Order order, int v) {
  switch (order) {
    case Order::kByte:
      return (v / 64 * 2 + v % 16 / 8) * 32 + v % 64 / 16 * 8 + v % 8;
    case Order::kNibble: return v % 4 * 32 + v / 4;
    case Order::kNibbleBlocks:
      return v / 32 * 32 + (v % 32 / 8 * 4 + v % 4) * 2 + v % 8 / 4;
    case Order::kNatural: return v;
  }
  return 0;
}

// Prevents the compiler from loading a vector again for each use.
template <typename Vector>
JAXPLUGIN_ALWAYS_INLINE void KeepInRegister(Vector* x) {
#if defined(__AVX512F__)
  asm("" : "+v"(*x));
#else
  (void)x;
#endif
}

struct Unit {
  __m512i q[4];
};

// Permutes units from one order to another.
struct Reorder {
  bool needed;
  alignas(64) uint16_t index[4][32];
  uint32_t upper[4];  // masks of words that come from the last two vectors

  Reorder() = default;
  Reorder(Order from, Order to) : needed(from != to), upper{} {
    for (int v = 0; v < kUnit; ++v) {
      const int source = WordOf(from, v);
      const int target = WordOf(to, v);
      index[target / 32][target % 32] = static_cast<uint16_t>(source % 64);
      if (source >= 64) upper[target / 32] |= 1u << (target % 32);
    }
  }

  JAXPLUGIN_ALWAYS_INLINE Unit operator()(const Unit& u) const {
    if (!needed) return u;
    Unit out;
    for (int i = 0; i < 4; ++i) {
      const __m512i at = _mm512_load_si512(index[i]);
      out.q[i] = _mm512_mask_mov_epi16(
          _mm512_permutex2var_epi16(u.q[0], at, u.q[1]), upper[i],
          _mm512_permutex2var_epi16(u.q[2], at, u.q[3]));
    }
    return out;
  }
};

// Returns the permutation from one order to another. Permutations and tables
// are computed once per process: for each call that took 1.2 us (one Zen 5
// core, 2026-11).
inline const Reorder& ReorderOf(Order from, Order to) {
  static const struct All {
    Reorder of[kOrders][kOrders];
    All() {
      for (int i = 0; i < kOrders * kOrders; ++i) {
        of[i / kOrders][i % kOrders] = Reorder(
            static_cast<Order>(i / kOrders), static_cast<Order>(i % kOrders));
      }
    }
  } all;
  return all.of[static_cast<int>(from)][static_cast<int>(to)];
}

inline uint16_t CodeToBF16(Format format, int code) {
  float value = 0;
  switch (format) {
    case Format::kE4M3: value = Decode<E4M3>(code); break;
    case Format::kE5M2: value = Decode<E5M2>(code); break;
    case Format::kE2M3: value = Decode<E2M3>(code); break;
    case Format::kE3M2: value = Decode<E3M2>(code); break;
    case Format::kE2M1: value = Decode<E2M1>(code); break;
    // The index is the magnitude less 1.
    case Format::kInt8: value = static_cast<float>(code + 1); break;
    case Format::kInt4: value = static_cast<float>((code ^ 8) - 8); break;
    default: break;  // needs no table
  }
  return static_cast<uint16_t>(AsBits(value) >> 16);
}

// Look-up tables of the bf16 values of a format. For formats with one code per
// byte, they hold the high bytes and the low bytes of 128 codes. These are the
// 8-bit codes without sign, or the 64 codes of 6 bits with sign, repeated. For
// codes of 4 bits, high0 holds the 16 values, repeated: vpermw reads 5 bits of
// an index, so the bit above the nibble needs no mask. low0 has them in float32.
struct Tables {
  __m512i high0, high1, low0, low1;
};

// The tables in memory.
struct TableBytes {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];

  TableBytes() = default;
  // `bits_of` returns 16 bits for a code.
  explicit TableBytes(Format format,
                      uint16_t (*bits_of)(Format, int) = CodeToBF16) {
    if (IsPacked(format)) {
      for (int i = 0; i < 32; ++i) {
        const uint16_t bits = bits_of(format, i & 15);
        high[2 * i] = static_cast<uint8_t>(bits);
        high[2 * i + 1] = static_cast<uint8_t>(bits >> 8);
        const float value = AsFloat(static_cast<uint32_t>(bits) << 16);
        if (i < 16) __builtin_memcpy(low + 4 * i, &value, 4);
      }
      return;
    }
    for (int i = 0; i < 128; ++i) {
      const uint16_t bits = bits_of(format, i);
      high[i] = static_cast<uint8_t>(bits >> 8);
      low[i] = static_cast<uint8_t>(bits);
    }
  }
  explicit TableBytes(const float (&codebook)[16]) : high{}, low{} {
    __builtin_memcpy(low, codebook, sizeof(codebook));
  }

  JAXPLUGIN_ALWAYS_INLINE Tables Load() const {
    return Tables{_mm512_load_si512(high), _mm512_load_si512(high + 64),
                  _mm512_load_si512(low), _mm512_load_si512(low + 64)};
  }
};

// Returns the tables of a format, computed once per process.
template <uint16_t (*kBitsOf)(Format, int) = CodeToBF16>
inline const TableBytes& TablesOf(Format format) {
  static const struct All {
    TableBytes of[kFormats];
    All() {
      for (int i = 0; i < kFormats; ++i) {
        of[i] = TableBytes(static_cast<Format>(i), kBitsOf);
      }
    }
  } all;
  return all.of[static_cast<int>(format)];
}

// Returns 64 bf16 values in byte order, from the high bytes without signs, the
// low bytes, and the signs in bit 7 of `codes`.
JAXPLUGIN_ALWAYS_INLINE void Interleave(__m512i high, __m512i low,
                                        __m512i codes, __m512i* first,
                                        __m512i* last) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);  // a | (b & c)
  *first = _mm512_unpacklo_epi8(low, high);
  *last = _mm512_unpackhi_epi8(low, high);
}

// Converts 64 codes, one per byte, to two vectors in byte order. Bit 7 of an
// 8-bit code is its sign. A 6-bit code has 0 there, and the tables include its
// sign.
JAXPLUGIN_ALWAYS_INLINE void Unpack8(__m512i codes, const Tables& t,
                                     __m512i* first, __m512i* last) {
  Interleave(_mm512_permutex2var_epi8(t.high0, codes, t.high1),
             _mm512_permutex2var_epi8(t.low0, codes, t.low1), codes, first,
             last);
}

// The same for int8. The magnitude less 1 has 7 bits, except for 0. The low
// bytes of 0 and 128 are the same.
JAXPLUGIN_ALWAYS_INLINE void UnpackInt8(__m512i codes, const Tables& t,
                                        __m512i* first, __m512i* last) {
  const __m512i index =
      _mm512_sub_epi8(_mm512_abs_epi8(codes), _mm512_set1_epi8(1));
  Interleave(_mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(codes, codes),
                                            t.high0, index, t.high1),
             _mm512_permutex2var_epi8(t.low0, index, t.low1), codes, first,
             last);
}

// Converts 128 codes of 4 bits. The first code of a byte is in the low nibble.
JAXPLUGIN_ALWAYS_INLINE Unit Unpack4(__m512i codes, __m512i table) {
  return Unit{{_mm512_permutexvar_epi16(codes, table),
               _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table),
               _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table),
               _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table)}};
}

// Converts the same codes to float32, part p: the values of the low (p < 4) or
// the high words of q[p % 4].
JAXPLUGIN_ALWAYS_INLINE __m512i Unpack4ToFloats(__m512i codes, __m512i table,
                                                int p) {
  const __m512i index = _mm512_srli_epi32(codes, 4 * (p % 4) + 16 * (p / 4));
  return _mm512_castps_si512(
      _mm512_permutexvar_ps(index, _mm512_castsi512_ps(table)));
}

// Loads the first `left` of 64 bytes; the others are 0, which is the code of
// value 0 in every format.
JAXPLUGIN_ALWAYS_INLINE __m512i LoadBytes(const uint8_t* p, int64_t left) {
  if (left >= 64) return _mm512_loadu_si512(p);
  if (left <= 0) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - left), p);
}

// The bytes of E4M3's codes without signs as bf16, and the index of the byte that
// is repeated in each dword. They are constants, unlike TablesOf, so that loops
// that store need not load them again.
struct E4M3Tables {
  alignas(64) uint8_t low[128], high[128], dword[64];

  constexpr E4M3Tables() : low{}, high{}, dword{} {
    for (int i = 1; i < 128; ++i) {
      int bits = (i << 4) + (120 << 7);
      if (i < 8) {  // subnormals
        const int lead = i < 2 ? 0 : i < 4 ? 1 : 2;
        bits = ((118 + lead) << 7) + ((i << (7 - lead)) & 0x7f);
      }
      if (i == 127) bits = kQuietNan >> 16;
      low[i] = static_cast<uint8_t>(bits);
      high[i] = static_cast<uint8_t>(bits >> 8);
    }
    for (int i = 0; i < 64; ++i) dword[i] = static_cast<uint8_t>(i / 4);
  }
};
constexpr E4M3Tables kE4M3Tables;

// Loads the first `left` of 16 scales (the others are 0), and converts them to
// float32. E4M3's tables take half of the instructions of its arithmetic.
JAXPLUGIN_ALWAYS_INLINE __m512 LoadScales(ScaleKind kind, const uint8_t* scale,
                                          int64_t left) {
  if (IsWide(kind)) {
    const __m512i codes =
        LoadBytes(scale, Min(left, 16) * ScaleSize(kind));
    if (kind == ScaleKind::kF32) return _mm512_castsi512_ps(codes);
    const __m256i words = _mm512_castsi512_si256(codes);
    if (kind == ScaleKind::kF16) return _mm512_cvtph_ps(words);
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  if (kind == ScaleKind::kE4M3) {
    const E4M3Tables& tables = kE4M3Tables;
    const __m512i codes = _mm512_permutexvar_epi8(
        _mm512_load_si512(tables.dword), LoadBytes(scale, Min(left, 16)));
    const auto look_up = [&](uint64_t mask, const uint8_t* table) {
      return _mm512_maskz_permutex2var_epi8(mask, _mm512_load_si512(table),
                                            codes,
                                            _mm512_load_si512(table + 64));
    };
    const __m512i low = look_up(0x4444444444444444, tables.low);
    const __m512i high = look_up(0x8888888888888888, tables.high);
    const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000));
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_or_si512(low, high), codes, sign, 0xf8));  // a | (b & c)
  }
  const __mmask16 mask =
      left >= 16  ? 0xffff
      : left <= 0 ? 0
                  : static_cast<__mmask16>((1u << left) - 1);
  const __m512i code =
      _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, scale));
  const __m512i nan = _mm512_set1_epi32(static_cast<int>(kQuietNan));
  __m512i bits = _mm512_slli_epi32(code, 23);
  bits = _mm512_mask_mov_epi32(
      bits, mask & _mm512_testn_epi32_mask(code, code),
      _mm512_set1_epi32(0x00400000));
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(
      bits, _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(255)), nan));
}

// The index, among 16 scales, of the scale of each dword of a vector. `values`
// is the number of values that the 16 dwords of a vector cover: 64 in byte
// order, 128 in nibble order.
struct ScaleIndex {
  alignas(64) int32_t lanes[8][16];
  ScaleIndex(int64_t block, int values) {
    int32_t scale = 0;
    int64_t end = block;
    for (int i = 0; i < 128; ++i) {
      const bool is_next = values / 16 * i >= end;  // of a dword's first value
      scale += is_next;
      end += is_next ? block : 0;
      lanes[i / 16][i % 16] = scale & 15;
    }
  }
  JAXPLUGIN_ALWAYS_INLINE __m512 Spread(__m512 scales, int64_t g) const {
    return _mm512_permutexvar_ps(_mm512_load_si512(lanes[g]), scales);
  }
};

// Multiplies 32 bf16 values by the scale of their dword, exactly. The low value
// of a dword becomes a float32 by a shift, the high value by a mask.
JAXPLUGIN_ALWAYS_INLINE __m512i Fold(__m512i values, __m512 scale) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512 even = _mm512_mul_ps(
      _mm512_castsi512_ps(_mm512_slli_epi32(values, 16)), scale);
  const __m512 odd = _mm512_mul_ps(
      _mm512_castsi512_ps(_mm512_and_si512(values, high)), scale);
  // (high & odd) | (even >> 16)
  return _mm512_ternarylogic_epi32(
      high, _mm512_castps_si512(odd),
      _mm512_srli_epi32(_mm512_castps_si512(even), 16), 0xea);
}

// Codes whose scales are folded in by a subtraction. Their tables have values
// times 2^kFoldExponent, and the subtracted number, as bits of bf16, divides by
// 2^kFoldExponent / scale. A subtraction that saturates at 0 keeps zeros, which
// have no sign then. In unsafe rows an exponent can overflow; the value is then
// arbitrary, but zeros stay zeros.
constexpr int kFoldExponent = 64;
// In the low byte of 8-bit codes that are not finite, which a subtraction would
// change. The values of a format have no bit there.
constexpr int kFoldNonFinite = 1;
// Mantissa bit of E2M1's values 1.5, 3 and 6 in bf16.
constexpr int kFoldHalf = 1 << 6;

// The sign is a bit of E2M1's and 6-bit values. For 8-bit codes, it is set for
// all values except 0, and an AND with the code clears it.
inline uint16_t CodeToFold(Format format, int code) {
  const int bits = CodeToBF16(format, code);
  const int sign = FactsOf(format).bits == 8 ? 0x8000 : 0;
  if ((bits & 0x7fff) == 0) return 0;
  const bool is_finite = (bits & 0x7f80) != 0x7f80;
  return static_cast<uint16_t>(
      sign | (is_finite ? bits + (kFoldExponent << 7) : kFoldNonFinite));
}

// Converts 64 codes like Unpack8, from the tables of CodeToFold, and subtracts
// `number` from each. `sign` has bit 7 of each byte if the codes have 8 bits.
// Sets bit 0 of a byte of `flags` if a code is not finite.
JAXPLUGIN_ALWAYS_INLINE void UnpackFold8(__m512i codes, const Tables& t,
                                         __m512i sign, __m512i number,
                                         __m512i* flags, __m512i* first,
                                         __m512i* last) {
  __m512i high = _mm512_permutex2var_epi8(t.high0, codes, t.high1);
  const __m512i low = _mm512_permutex2var_epi8(t.low0, codes, t.low1);
  high = _mm512_ternarylogic_epi32(high, codes, sign, 0xd0);  // a & (b | ~c)
  *flags = _mm512_or_si512(*flags, low);
  *first = _mm512_subs_epu16(_mm512_unpacklo_epi8(low, high), number);
  *last = _mm512_subs_epu16(_mm512_unpackhi_epi8(low, high), number);
}

JAXPLUGIN_ALWAYS_INLINE __m512i FoldSign(Format format) {
  return _mm512_set1_epi8(
      static_cast<char>(FactsOf(format).bits == 8 ? 0x80 : 0));
}

JAXPLUGIN_ALWAYS_INLINE bool AreFinite(__m512i flags) {
  return _mm512_test_epi8_mask(flags, _mm512_set1_epi8(kFoldNonFinite)) == 0;
}

JAXPLUGIN_ALWAYS_INLINE bool HasNan(__m512 scales) {
  const __m512i nan = _mm512_set1_epi32(static_cast<int>(kQuietNan));
  return _mm512_cmpeq_epi32_mask(_mm512_castps_si512(scales), nan) != 0;
}

// Converts E8M0 scales, none of which is NaN, to the numbers to subtract, twice
// in each dword.
JAXPLUGIN_ALWAYS_INLINE __m512i FoldNumbers(__m512 scales) {
  const __m512i words = _mm512_sub_epi32(
      _mm512_set1_epi32((127 + kFoldExponent) << 7),
      _mm512_srli_epi32(_mm512_castps_si512(scales), 16));
  return _mm512_or_si512(_mm512_slli_epi32(words, 16),
                         _mm512_and_si512(words, _mm512_set1_epi32(0xffff)));
}

// Transposes 16 rows of 16 dwords: out[i] has dword i of every row.
JAXPLUGIN_ALWAYS_INLINE void Transpose16(const __m512i* in, __m512i* out) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  // Lane l of b[4 q + d] has dword 4 l + d of rows 4 q .. 4 q + 3.
  for (int d = 0; d < 4; ++d) {
    const __m512i p = _mm512_shuffle_i32x4(b[d], b[4 + d], 0x88);
    const __m512i q = _mm512_shuffle_i32x4(b[d], b[4 + d], 0xdd);
    const __m512i r = _mm512_shuffle_i32x4(b[8 + d], b[12 + d], 0x88);
    const __m512i s = _mm512_shuffle_i32x4(b[8 + d], b[12 + d], 0xdd);
    out[d] = _mm512_shuffle_i32x4(p, r, 0x88);
    out[4 + d] = _mm512_shuffle_i32x4(q, s, 0x88);
    out[8 + d] = _mm512_shuffle_i32x4(p, r, 0xdd);
    out[12 + d] = _mm512_shuffle_i32x4(q, s, 0xdd);
  }
}

// E2M1 times E4M3's scales that are finite and not negative, for blocks of 16
// values. A number v has the bits of its exponent and mantissa added to those
// of the scale, which multiplies them if v has no mantissa. If it has (1.5, 3
// and 6), a correction that depends on the scale is added.
struct FoldE4M3 {
  alignas(64) uint8_t low[128], high[128];  // numbers to subtract
  alignas(64) uint8_t correction[128];
  // For each dword of vector v of a step of 32 scales, the indices of the bytes
  // of its scale in [low bytes, high bytes].
  alignas(64) uint8_t lanes[4][64];

  static const FoldE4M3& Get() {
    static const FoldE4M3 fold;
    return fold;
  }
  FoldE4M3() {
    for (int i = 0; i < 128; ++i) {
      const float scale = Decode<E4M3>(static_cast<uint32_t>(i));
      const uint32_t bits = AsBits(scale) >> 16;
      const uint32_t number = ((127 + kFoldExponent) << 7) - bits;
      low[i] = static_cast<uint8_t>(number);
      high[i] = static_cast<uint8_t>(number >> 8);
      correction[i] = static_cast<uint8_t>((AsBits(1.5f * scale) >> 16) - bits -
                                           kFoldHalf);
    }
    low[0] = high[0] = 0xff;  // scale 0: any difference is 0
    correction[0] = 0;
    for (int i = 0; i < 256; ++i) {
      lanes[i / 64][i % 64] = static_cast<uint8_t>(i / 8 + i % 2 * 64);
    }
  }

  // The numbers and corrections of 32 scales.
  struct Some {
    __m512i low, high, correction;
  };

  JAXPLUGIN_ALWAYS_INLINE Some Load(__m512i scales) const {
    const auto look_up = [scales](const uint8_t* table) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), scales,
                                      _mm512_load_si512(table + 64));
    };
    return {look_up(low), look_up(high), look_up(correction)};
  }

  // Multiplies the values of vector v of the step, which are CodeToFold's.
  JAXPLUGIN_ALWAYS_INLINE Unit operator()(const Unit& unit, const Some& some,
                                          int64_t v) const {
    const __m512i at = _mm512_load_si512(lanes[v]);
    const __m512i number = _mm512_permutex2var_epi8(some.low, at, some.high);
    const __m512i correction = _mm512_maskz_permutex2var_epi8(
        0x5555555555555555, some.correction, at, some.correction);
    Unit out;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i product = _mm512_subs_epu16(unit.q[i], number);
      out.q[i] = _mm512_mask_add_epi16(
          product,
          _mm512_test_epi16_mask(unit.q[i], _mm512_set1_epi16(kFoldHalf)),
          product, correction);
    }
    return out;
  }
};

// Unpacks rows of one operand. It is created once per call.
struct Unpacker {
  const Operand& x;
  const TableBytes codebook_bytes;
  const TableBytes& table_bytes;
  const TableBytes& fold_bytes;
  const FoldE4M3& fold_e4m3;
  ScaleIndex index;
  const Reorder& reorder;
  bool is_nvfp4;

  Unpacker(const Operand& operand, Order order)
      : x(operand),
        codebook_bytes(operand.codebook),
        table_bytes(operand.format == Format::kCodebook
                        ? codebook_bytes
                        : TablesOf(operand.format)),
        fold_bytes(TablesOf<CodeToFold>(operand.format)),
        fold_e4m3(FoldE4M3::Get()),
        index(operand.block, IsPacked(operand.format) ? 128 : 64),
        reorder(ReorderOf(NativeOrder(operand.format), order)),
        is_nvfp4(operand.format == Format::kE2M1 && operand.block == 16 &&
                 operand.scale_kind == ScaleKind::kE4M3) {}
  Unpacker(const Unpacker&) = delete;  // table_bytes may be of this object

  // Prefetches into L2 the codes of `units` units of a row from unit u on, or,
  // at the end of the row, the first ones of the row `next` rows further. The
  // hardware does not prefetch such short runs.
  JAXPLUGIN_ALWAYS_INLINE void Prefetch(int64_t row, int64_t u, int64_t units,
                                        int64_t next) const {
    const int64_t unit_bytes = IsPacked(x.format)  ? kUnit / 2
                               : IsPlain(x.format) ? kUnit * 2
                                                   : kUnit;
    int64_t at = u * unit_bytes;
    if (at >= x.row_bytes) {
      row += next;
      at = 0;
    }
    if (row >= x.rows) return;
    const uint8_t* codes = RowValues(x, row) + at;
    const int64_t bytes = Min(units * unit_bytes, x.row_bytes - at);
    for (int64_t i = 0; i < bytes; i += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(codes + i), _MM_HINT_T1);
    }
  }

  // Calls emit(index of the unit, Unit) for units [u0, u1) of a row. Values are
  // multiplied by their scales if bf16 holds the products (IsBF16), and are in
  // the constructor's `order`.
  template <typename Emit>
  JAXPLUGIN_ALWAYS_INLINE void Row(int64_t row, int64_t u0, int64_t u1,
                                   const Emit& emit) const {
    const uint8_t* values = RowValues(x, row);
    if (x.format == Format::kBF16) {
      for (int64_t u = u0; u < u1; ++u) {
        Unit unit;
        for (int i = 0; i < 4; ++i) {
          const int64_t at = u * kUnitBytes + i * 64;
          unit.q[i] = LoadBytes(values + at, x.k * 2 - at);
        }
        emit(u, reorder(unit));
      }
      return;
    }
    if (!IsBF16(ShapeOf(x))) {
      const Tables tables = table_bytes.Load();
      for (int64_t u = u0; u < u1; ++u) {
        Unit unit;
        if (IsPacked(x.format)) {
          unit = Unpack4(LoadBytes(values + u * 64, x.k / 2 - u * 64),
                         tables.high0);
        } else {
          for (int half = 0; half < 2; ++half) {
            const int64_t at = u * kUnit + half * 64;
            const __m512i codes = LoadBytes(values + at, x.k - at);
            __m512i* q = unit.q + 2 * half;
            if (x.format == Format::kInt8) {
              UnpackInt8(codes, tables, q, q + 1);
            } else {
              Unpack8(codes, tables, q, q + 1);
            }
          }
        }
        emit(u, reorder(unit));
      }
      return;
    }
    const uint8_t* scale = ScaleAt(x, row, 0);
    // The units whose scales are loaded together: 512 values, or 16 scales.
    const int64_t step = is_nvfp4 ? 4 : Min(x.block / 8, 4);
    for (int64_t s = u0 / step * step; s < u1; s += step) {
      const int64_t c = s * kUnit / x.block;
      const int64_t begin = Max(s, u0), end = Min(s + step, u1);
      const bool is_done =
          is_nvfp4 ? FoldStepOfNVFP4(values, scale + c, x.scale_cols - c, s,
                                     begin, end, emit)
          : x.scale_kind == ScaleKind::kE8M0
              ? FoldStep(values, scale + c, x.scale_cols - c, s, begin, end,
                         emit)
              : false;
      if (!is_done) MultiplyStep(values, scale, begin, end, emit);
    }
  }

 private:
  // Calls emit for units [begin, end) of a step that starts at unit s. Returns
  // false if a scale or a code is not finite; the units are then arbitrary.
  template <typename Emit>
  JAXPLUGIN_ALWAYS_INLINE bool FoldStep(const uint8_t* values,
                                        const uint8_t* scale, int64_t count,
                                        int64_t s, int64_t begin, int64_t end,
                                        const Emit& emit) const {
    const __m512 scales = LoadScales(ScaleKind::kE8M0, scale, count);
    if (HasNan(scales)) return false;
    const __m512 numbers = _mm512_castsi512_ps(FoldNumbers(scales));
    const Tables tables = fold_bytes.Load();
    if (IsPacked(x.format)) {
      for (int64_t u = begin; u < end; ++u) {
        Unit unit = Unpack4(LoadBytes(values + u * 64, x.k / 2 - u * 64),
                            tables.high0);
        const __m512i number = _mm512_castps_si512(index.Spread(numbers, u - s));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          unit.q[i] = _mm512_subs_epu16(unit.q[i], number);
        }
        emit(u, reorder(unit));
      }
      return true;
    }
    const __m512i sign = FoldSign(x.format);
    __m512i flags = _mm512_setzero_si512();
    for (int64_t u = begin; u < end; ++u) {
      Unit unit;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const int64_t at = u * kUnit + half * 64;
        const __m512i codes = LoadBytes(values + at, x.k - at);
        const __m512i number = _mm512_castps_si512(
            index.Spread(numbers, 2 * (u - s) + half));
        UnpackFold8(codes, tables, sign, number, &flags, &unit.q[2 * half],
                    &unit.q[2 * half + 1]);
      }
      emit(u, reorder(unit));
    }
    return AreFinite(flags);
  }

  // The same for E2M1 with E4M3 scales. Also returns false if a scale is
  // negative.
  template <typename Emit>
  JAXPLUGIN_ALWAYS_INLINE bool FoldStepOfNVFP4(
      const uint8_t* values, const uint8_t* scale, int64_t count, int64_t s,
      int64_t begin, int64_t end, const Emit& emit) const {
    const __m512i codes = LoadBytes(scale, Min(count, 32));
    if (_mm512_cmpge_epu8_mask(codes, _mm512_set1_epi8(0x7f)) != 0) {
      return false;
    }
    const FoldE4M3::Some some = fold_e4m3.Load(codes);
    const __m512i table = fold_bytes.Load().high0;
    for (int64_t u = begin; u < end; ++u) {
      const Unit unit =
          Unpack4(LoadBytes(values + u * 64, x.k / 2 - u * 64), table);
      emit(u, reorder(fold_e4m3(unit, some, u - s)));
    }
    return true;
  }

  // The same for any scales and codes, by multiplications in float32.
  template <typename Emit>
  __attribute__((noinline)) void MultiplyStep(const uint8_t* values,
                                              const uint8_t* scale,
                                              int64_t begin, int64_t end,
                                              const Emit& emit) const {
    const Tables tables = table_bytes.Load();
    for (int64_t u = begin; u < end; ++u) {
      const int64_t c = u * kUnit / x.block;
      const __m512 scales =
          LoadScales(x.scale_kind, scale + c, x.scale_cols - c);
      Unit unit;
      if (IsPacked(x.format)) {
        unit = Unpack4(LoadBytes(values + u * 64, x.k / 2 - u * 64),
                       tables.high0);
        const __m512 spread = index.Spread(scales, 0);
        for (int i = 0; i < 4; ++i) unit.q[i] = Fold(unit.q[i], spread);
      } else {
        for (int half = 0; half < 2; ++half) {
          const int64_t at = u * kUnit + half * 64;
          __m512i* q = unit.q + 2 * half;
          Unpack8(LoadBytes(values + at, x.k - at), tables, q, q + 1);
          const __m512 spread = index.Spread(scales, half);
          for (int i = 0; i < 2; ++i) q[i] = Fold(q[i], spread);
        }
      }
      emit(u, reorder(unit));
    }
  }
};
