// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Tests each emulated intrinsic of avx512.h on random registers. The result is
// compared with
//   - the AVX-512 instruction, if the machine has it (the program prints
//     whether it has)
//   - the same AVX2 instruction on each half, if it exists
//   - otherwise a model that is written in another way
//
//   g++ -std=c++17 -O2 -mavx2 -mfma tests/emulation/avx512_test.cc
//
// The exit status is 1 if a result differs.

#include <immintrin.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#if !defined(__OPTIMIZE__)
#error "without -O some intrinsics are macros: compile with -O1 or more"
#endif

#include "avx512.h"

namespace jaxplugin {

// An argument or the result of an intrinsic.
struct Register {
  alignas(64) uint8_t bytes[64];
};

// X(name, expression of a, b and c). Each expression is compiled twice: with
// the emulated intrinsics and with those of <immintrin.h>.
#define JAXPLUGIN_I(p) _mm512_load_si512((p)->bytes)
#define JAXPLUGIN_F(p) _mm512_castsi512_ps(JAXPLUGIN_I(p))
#define JAXPLUGIN_INTEGERS(X)                                                 \
  X(and_si512, _mm512_and_si512(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))              \
  X(or_si512, _mm512_or_si512(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))                \
  X(add_epi32, _mm512_add_epi32(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))              \
  X(sub_epi32, _mm512_sub_epi32(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))              \
  X(sub_epi8, _mm512_sub_epi8(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))                \
  X(abs_epi8, _mm512_abs_epi8(JAXPLUGIN_I(a)))                                \
  X(max_epu8, _mm512_max_epu8(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))                \
  X(min_epu8, _mm512_min_epu8(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))                \
  X(srai_epi32, _mm512_srai_epi32(JAXPLUGIN_I(a), 1))                         \
  X(srai_epi32_all, _mm512_srai_epi32(JAXPLUGIN_I(a), 32))                    \
  X(dpbusd_epi32, _mm512_dpbusd_epi32(JAXPLUGIN_I(c), JAXPLUGIN_I(a),         \
                                      JAXPLUGIN_I(b)))                        \
  X(slli_epi16, _mm512_slli_epi16(JAXPLUGIN_I(a), 8))                         \
  X(slli_epi16_all, _mm512_slli_epi16(JAXPLUGIN_I(a), 16))                    \
  X(srli_epi16, _mm512_srli_epi16(JAXPLUGIN_I(a), 12))                        \
  X(srli_epi16_all, _mm512_srli_epi16(JAXPLUGIN_I(a), 16))                    \
  X(slli_epi32, _mm512_slli_epi32(JAXPLUGIN_I(a), 23))                        \
  X(slli_epi32_all, _mm512_slli_epi32(JAXPLUGIN_I(a), 32))                    \
  X(srli_epi32, _mm512_srli_epi32(JAXPLUGIN_I(a), 16))                        \
  X(srli_epi32_all, _mm512_srli_epi32(JAXPLUGIN_I(a), 32))                    \
  X(subs_epu16, _mm512_subs_epu16(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))            \
  X(unpacklo_epi8, _mm512_unpacklo_epi8(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))      \
  X(unpackhi_epi8, _mm512_unpackhi_epi8(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))      \
  X(unpacklo_epi32, _mm512_unpacklo_epi32(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))    \
  X(unpackhi_epi32, _mm512_unpackhi_epi32(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))    \
  X(unpacklo_epi64, _mm512_unpacklo_epi64(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))    \
  X(unpackhi_epi64, _mm512_unpackhi_epi64(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))    \
  X(setzero_si512, _mm512_setzero_si512())                                    \
  X(castps_si512, _mm512_castps_si512(JAXPLUGIN_F(a)))                        \
  X(set1_epi8, _mm512_set1_epi8(static_cast<char>(a->bytes[0])))              \
  X(set1_epi16, _mm512_set1_epi16(Half(a)))                                   \
  X(set1_epi32, _mm512_set1_epi32(Whole(a)))                                  \
  X(loadu_si512, _mm512_loadu_si512(a->bytes))                                \
  X(maskz_loadu_epi8, _mm512_maskz_loadu_epi8(Mask(c), a->bytes))             \
  X(cvtepu8_epi32, _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(                 \
                       static_cast<uint16_t>(Mask(c)), a->bytes)))            \
  X(cvtepi8_epi32,                                                            \
    _mm512_cvtepi8_epi32(_mm512_castsi512_si128(JAXPLUGIN_I(a))))             \
  X(mask_mov_epi16, _mm512_mask_mov_epi16(JAXPLUGIN_I(a),                     \
                                          static_cast<uint32_t>(Mask(c)),     \
                                          JAXPLUGIN_I(b)))                    \
  X(mask_mov_epi32, _mm512_mask_mov_epi32(JAXPLUGIN_I(a),                     \
                                          static_cast<uint16_t>(Mask(c)),     \
                                          JAXPLUGIN_I(b)))                    \
  X(ternarylogic_f8, JAXPLUGIN_TERNARY(0xf8))                                 \
  X(ternarylogic_d0, JAXPLUGIN_TERNARY(0xd0))                                 \
  X(ternarylogic_e4, JAXPLUGIN_TERNARY(0xe4))                                 \
  X(ternarylogic_d8, JAXPLUGIN_TERNARY(0xd8))                                 \
  X(ternarylogic_ea, JAXPLUGIN_TERNARY(0xea))                                 \
  X(ternarylogic_35, JAXPLUGIN_TERNARY(0x35))                                 \
  X(shuffle_88, _mm512_shuffle_i32x4(JAXPLUGIN_I(a), JAXPLUGIN_I(b), 0x88))   \
  X(shuffle_dd, _mm512_shuffle_i32x4(JAXPLUGIN_I(a), JAXPLUGIN_I(b), 0xdd))   \
  X(shuffle_1b, _mm512_shuffle_i32x4(JAXPLUGIN_I(a), JAXPLUGIN_I(b), 0x1b))   \
  X(permutexvar_epi8,                                                         \
    _mm512_permutexvar_epi8(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))                  \
  X(permutexvar_epi16,                                                        \
    _mm512_permutexvar_epi16(JAXPLUGIN_I(a), JAXPLUGIN_I(b)))                 \
  X(permutex2var_epi8, _mm512_permutex2var_epi8(                              \
                           JAXPLUGIN_I(a), JAXPLUGIN_I(b), JAXPLUGIN_I(c)))   \
  X(maskz_permutex2var_epi8, _mm512_maskz_permutex2var_epi8(                  \
                                 Mask(a), JAXPLUGIN_I(a), JAXPLUGIN_I(b),     \
                                 JAXPLUGIN_I(c)))                             \
  X(permutex2var_epi16, _mm512_permutex2var_epi16(                            \
                            JAXPLUGIN_I(a), JAXPLUGIN_I(b), JAXPLUGIN_I(c)))  \
  X(cmpeq_epi32_mask, _mm512_set1_epi32(_mm512_cmpeq_epi32_mask(              \
                          Nibbles(JAXPLUGIN_I(a)), Nibbles(JAXPLUGIN_I(b))))) \
  X(cmpeq_epi8_mask, _mm512_maskz_loadu_epi8(                                 \
                         _mm512_cmpeq_epi8_mask(Pairs(JAXPLUGIN_I(a)),        \
                                                Pairs(JAXPLUGIN_I(b))),       \
                         c->bytes))                                           \
  X(cmpge_epu8_mask,                                                          \
    _mm512_maskz_loadu_epi8(                                                  \
        _mm512_cmpge_epu8_mask(JAXPLUGIN_I(a), JAXPLUGIN_I(b)), c->bytes))    \
  X(mask_add_epi16, _mm512_mask_add_epi16(JAXPLUGIN_I(a),                     \
                                          static_cast<__mmask32>(Mask(c)),    \
                                          JAXPLUGIN_I(b), JAXPLUGIN_I(c)))    \
  X(test_epi16_mask, _mm512_set1_epi32(static_cast<int>(                      \
                         _mm512_test_epi16_mask(Pairs(JAXPLUGIN_I(a)),        \
                                                JAXPLUGIN_I(b)))))            \
  X(test_epi8_mask, _mm512_maskz_loadu_epi8(                                  \
                        _mm512_test_epi8_mask(Pairs(JAXPLUGIN_I(a)),          \
                                              JAXPLUGIN_I(b)),                \
                        c->bytes))                                            \
  X(cvtepu16_epi32,                                                           \
    _mm512_cvtepu16_epi32(_mm512_castsi512_si256(JAXPLUGIN_I(a))))            \
  X(cmplt_epu32_mask, _mm512_set1_epi32(_mm512_cmplt_epu32_mask(              \
                          JAXPLUGIN_I(a), JAXPLUGIN_I(b))))                   \
  X(testn_epi32_mask, _mm512_set1_epi32(_mm512_testn_epi32_mask(              \
                          Nibbles(JAXPLUGIN_I(a)), JAXPLUGIN_I(b))))
#define JAXPLUGIN_TERNARY(table)                                          \
  _mm512_ternarylogic_epi32(JAXPLUGIN_I(a), JAXPLUGIN_I(b), JAXPLUGIN_I(c), \
                            table)
#define JAXPLUGIN_FLOATS(X)                                                  \
  X(add_ps, _mm512_add_ps(JAXPLUGIN_F(a), JAXPLUGIN_F(b)))                   \
  X(sub_ps, _mm512_sub_ps(JAXPLUGIN_F(a), JAXPLUGIN_F(b)))                   \
  X(mul_ps, _mm512_mul_ps(JAXPLUGIN_F(a), JAXPLUGIN_F(b)))                   \
  X(fmadd_ps,                                                                \
    _mm512_fmadd_ps(JAXPLUGIN_F(a), JAXPLUGIN_F(b), JAXPLUGIN_F(c)))         \
  X(permutexvar_ps, _mm512_permutexvar_ps(JAXPLUGIN_I(a), JAXPLUGIN_F(b)))   \
  X(setzero_ps, _mm512_setzero_ps())                                         \
  X(castsi512_ps, _mm512_castsi512_ps(JAXPLUGIN_I(a)))                       \
  X(set1_ps, _mm512_set1_ps(First(a)))                                       \
  X(cvtepi32_ps, _mm512_cvtepi32_ps(JAXPLUGIN_I(a)))                         \
  X(cvtph_ps, _mm512_cvtph_ps(_mm512_castsi512_si256(JAXPLUGIN_I(a))))       \
  X(reduce_add_ps, _mm512_set1_ps(_mm512_reduce_add_ps(JAXPLUGIN_F(a))))     \
  X(dpbf16_ps, _mm512_dpbf16_ps(JAXPLUGIN_F(c), (__m512bh)JAXPLUGIN_I(a),    \
                                (__m512bh)JAXPLUGIN_I(b)))

template <typename T>
T Lane(const Register* r, int i) {
  T x;
  std::memcpy(&x, r->bytes + i * sizeof(T), sizeof(T));
  return x;
}
template <typename T>
void SetLane(Register* r, int i, T x) {
  std::memcpy(r->bytes + i * sizeof(T), &x, sizeof(T));
}
short Half(const Register* r) { return Lane<short>(r, 0); }
int Whole(const Register* r) { return Lane<int>(r, 0); }
float First(const Register* r) { return Lane<float>(r, 0); }
uint64_t Mask(const Register* r) { return Lane<uint64_t>(r, 0); }

using Function = void (*)(const Register* a, const Register* b,
                          const Register* c, Register* out);
struct Intrinsic {
  const char* name;
  bool is_float;
  Function emulated;
  Function native;
};

#define JAXPLUGIN_DEFINE_I(name, expression)                            \
  JAXPLUGIN_NATIVE void name(const Register* a, const Register* b,      \
                             const Register* c, Register* out) {        \
    static_cast<void>(a), static_cast<void>(b), static_cast<void>(c);   \
    _mm512_store_si512(out->bytes, expression);                         \
  }
#define JAXPLUGIN_DEFINE_F(name, expression)                            \
  JAXPLUGIN_NATIVE void name(const Register* a, const Register* b,      \
                             const Register* c, Register* out) {        \
    static_cast<void>(a), static_cast<void>(b), static_cast<void>(c);   \
    _mm512_store_si512(out->bytes, _mm512_castps_si512(expression));    \
  }

namespace emulated {
namespace cases {
// Reduce lanes to few values, so that lanes are often equal or zero.
__m512i Nibbles(__m512i x) {
  return _mm512_and_si512(x, _mm512_set1_epi32(3));
}
__m512i Pairs(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(3)); }
#define JAXPLUGIN_NATIVE
JAXPLUGIN_INTEGERS(JAXPLUGIN_DEFINE_I)
JAXPLUGIN_FLOATS(JAXPLUGIN_DEFINE_F)
#undef JAXPLUGIN_NATIVE
}  // namespace cases
}  // namespace emulated

namespace native {
#define JAXPLUGIN_NATIVE                                                     \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,"     \
                        "avx512vnni,avx512bf16")))
JAXPLUGIN_NATIVE inline __m512i Nibbles(__m512i x) {
  return _mm512_and_si512(x, _mm512_set1_epi32(3));
}
JAXPLUGIN_NATIVE inline __m512i Pairs(__m512i x) {
  return _mm512_and_si512(x, _mm512_set1_epi8(3));
}
JAXPLUGIN_INTEGERS(JAXPLUGIN_DEFINE_I)
JAXPLUGIN_FLOATS(JAXPLUGIN_DEFINE_F)
#undef JAXPLUGIN_NATIVE
}  // namespace native

#define JAXPLUGIN_ENTRY_I(name, _) \
  {#name, false, emulated::cases::name, native::name},
#define JAXPLUGIN_ENTRY_F(name, _) \
  {#name, true, emulated::cases::name, native::name},
const Intrinsic kIntrinsics[] = {JAXPLUGIN_INTEGERS(JAXPLUGIN_ENTRY_I)
                                     JAXPLUGIN_FLOATS(JAXPLUGIN_ENTRY_F)};

bool MachineHasThem() {
  return __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}

// AVX2 instructions that compute a half of the result.

using HalfFunction = __m256i (*)(__m256i a, __m256i b);
struct HalfIntrinsic {
  const char* name;
  HalfFunction function;
};

#define JAXPLUGIN_HALF(name, expression)         \
  {#name, [](__m256i a, __m256i b) {             \
     static_cast<void>(a), static_cast<void>(b); \
     return expression;                          \
   }}
#define JAXPLUGIN_PS(function) \
  _mm256_castps_si256(         \
      function(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)))
const HalfIntrinsic kHalves[] = {
    JAXPLUGIN_HALF(and_si512, _mm256_and_si256(a, b)),
    JAXPLUGIN_HALF(or_si512, _mm256_or_si256(a, b)),
    JAXPLUGIN_HALF(add_epi32, _mm256_add_epi32(a, b)),
    JAXPLUGIN_HALF(sub_epi8, _mm256_sub_epi8(a, b)),
    JAXPLUGIN_HALF(abs_epi8, _mm256_abs_epi8(a)),
    JAXPLUGIN_HALF(max_epu8, _mm256_max_epu8(a, b)),
    JAXPLUGIN_HALF(min_epu8, _mm256_min_epu8(a, b)),
    JAXPLUGIN_HALF(srai_epi32, _mm256_srai_epi32(a, 1)),
    JAXPLUGIN_HALF(srai_epi32_all, _mm256_srai_epi32(a, 32)),
    JAXPLUGIN_HALF(cvtepi32_ps, _mm256_castps_si256(_mm256_cvtepi32_ps(a))),
    JAXPLUGIN_HALF(slli_epi16, _mm256_slli_epi16(a, 8)),
    JAXPLUGIN_HALF(slli_epi16_all, _mm256_slli_epi16(a, 16)),
    JAXPLUGIN_HALF(srli_epi16, _mm256_srli_epi16(a, 12)),
    JAXPLUGIN_HALF(srli_epi16_all, _mm256_srli_epi16(a, 16)),
    JAXPLUGIN_HALF(slli_epi32, _mm256_slli_epi32(a, 23)),
    JAXPLUGIN_HALF(slli_epi32_all, _mm256_slli_epi32(a, 32)),
    JAXPLUGIN_HALF(srli_epi32, _mm256_srli_epi32(a, 16)),
    JAXPLUGIN_HALF(srli_epi32_all, _mm256_srli_epi32(a, 32)),
    JAXPLUGIN_HALF(sub_epi32, _mm256_sub_epi32(a, b)),
    JAXPLUGIN_HALF(subs_epu16, _mm256_subs_epu16(a, b)),
    JAXPLUGIN_HALF(unpacklo_epi8, _mm256_unpacklo_epi8(a, b)),
    JAXPLUGIN_HALF(unpackhi_epi8, _mm256_unpackhi_epi8(a, b)),
    JAXPLUGIN_HALF(unpacklo_epi32, _mm256_unpacklo_epi32(a, b)),
    JAXPLUGIN_HALF(unpackhi_epi32, _mm256_unpackhi_epi32(a, b)),
    JAXPLUGIN_HALF(unpacklo_epi64, _mm256_unpacklo_epi64(a, b)),
    JAXPLUGIN_HALF(unpackhi_epi64, _mm256_unpackhi_epi64(a, b)),
    JAXPLUGIN_HALF(add_ps, JAXPLUGIN_PS(_mm256_add_ps)),
    JAXPLUGIN_HALF(sub_ps, JAXPLUGIN_PS(_mm256_sub_ps)),
    JAXPLUGIN_HALF(mul_ps, JAXPLUGIN_PS(_mm256_mul_ps)),
};

// Models of the other intrinsics. They follow the manual's pseudocode for lane
// i.

bool Bit(uint64_t mask, int i) { return (mask >> i & 1) != 0; }

// Returns a register whose lanes of type T are lane(i).
template <typename T>
Register Fill(const std::function<T(int)>& lane) {
  Register out;
  for (int i = 0; i < static_cast<int>(64 / sizeof(T)); ++i) {
    SetLane<T>(&out, i, lane(i));
  }
  return out;
}

Register Ternary(const Register* a, const Register* b, const Register* c,
                 bool (*bit)(bool, bool, bool)) {
  Register out = {};
  for (int i = 0; i < 512; ++i) {
    const auto at = [i](const Register* r) {
      return Bit(r->bytes[i / 8], i % 8);
    };
    out.bytes[i / 8] |= bit(at(a), at(b), at(c)) << (i % 8);
  }
  return out;
}

Register Quarters(const Register* a, const Register* b,
                  const int (&quarters)[4]) {
  Register out;
  for (int i = 0; i < 4; ++i) {
    std::memcpy(out.bytes + 16 * i, (i < 2 ? a : b)->bytes + 16 * quarters[i],
                16);
  }
  return out;
}

// Returns the mask of a comparison, in every lane.
Register Compare(const std::function<bool(int)>& holds) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask += holds(i) ? 1u << i : 0;
  return Fill<uint32_t>([=](int) { return mask; });
}

float Flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

float BF16(const Register* r, int i) {
  const uint32_t bits = uint32_t{Lane<uint16_t>(r, i)} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return Flushed(value);
}

float PairDot(const Register* a, const Register* b, const Register* c, int i) {
  float sum = Flushed(Lane<float>(c, i));
  for (int j : {2 * i + 1, 2 * i}) {
    sum = Flushed(std::fma(BF16(a, j), BF16(b, j), sum));
  }
  return sum;
}

// Returns the lane of a (lower indices) or c that lane i of b selects.
template <typename T>
T OfBoth(const Register* a, const Register* b, const Register* c, int i) {
  const int lanes = static_cast<int>(64 / sizeof(T));
  const int from = Lane<T>(b, i) % (2 * lanes);
  return Lane<T>(from < lanes ? a : c, from % lanes);
}

using Model = Register (*)(const Register* a, const Register* b,
                           const Register* c);
struct NamedModel {
  const char* name;
  Model model;
};
#define JAXPLUGIN_MODEL(name, ...)                          \
  {#name, [](const Register* a, const Register* b,          \
             const Register* c) -> Register {               \
     static_cast<void>(a), static_cast<void>(b);            \
     static_cast<void>(c);                                  \
     __VA_ARGS__                                            \
   }}
// A model whose lanes have a type and a value.
#define JAXPLUGIN_LANES(name, type, value) \
  JAXPLUGIN_MODEL(name, return Fill<type>( \
      [=]([[maybe_unused]] int i) { return static_cast<type>(value); });)
const NamedModel kModels[] = {
    JAXPLUGIN_LANES(set1_epi8, uint8_t, a->bytes[0]),
    JAXPLUGIN_LANES(set1_epi16, short, Half(a)),
    JAXPLUGIN_LANES(set1_epi32, int, Whole(a)),
    JAXPLUGIN_LANES(set1_ps, int, Whole(a)),
    JAXPLUGIN_MODEL(loadu_si512, return *a;),
    JAXPLUGIN_MODEL(castps_si512, return *a;),
    JAXPLUGIN_MODEL(castsi512_ps, return *a;),
    JAXPLUGIN_MODEL(setzero_si512, return Register{};),
    JAXPLUGIN_MODEL(setzero_ps, return Register{};),
    JAXPLUGIN_LANES(maskz_loadu_epi8, uint8_t,
                    Bit(Mask(c), i) ? a->bytes[i] : 0),
    JAXPLUGIN_LANES(cvtepu8_epi32, uint32_t,
                    Bit(Mask(c), i) ? a->bytes[i] : 0),
    JAXPLUGIN_LANES(cvtepi8_epi32, int32_t, Lane<int8_t>(a, i)),
    JAXPLUGIN_LANES(cvtepu16_epi32, uint32_t, Lane<uint16_t>(a, i)),
    JAXPLUGIN_MODEL(cvtph_ps, return Fill<float>([=](int i) {
      const int code = Lane<uint16_t>(a, i), exponent = code >> 10 & 31;
      const int mantissa = code & 1023;
      const double magnitude =
          exponent == 31 ? (mantissa ? NAN : INFINITY)
          : exponent == 0
              ? std::ldexp(mantissa, -24)
              : std::ldexp(1 + mantissa / 1024.0, exponent - 15);
      return static_cast<float>(code >> 15 ? -magnitude : magnitude);
    });),
    JAXPLUGIN_LANES(mask_mov_epi16, uint16_t,
                    Lane<uint16_t>(Bit(Mask(c), i) ? b : a, i)),
    JAXPLUGIN_LANES(mask_mov_epi32, uint32_t,
                    Lane<uint32_t>(Bit(Mask(c), i) ? b : a, i)),
    JAXPLUGIN_MODEL(ternarylogic_f8, return Ternary(
        a, b, c, [](bool x, bool y, bool z) { return x || (y && z); });),
    JAXPLUGIN_MODEL(ternarylogic_d0, return Ternary(
        a, b, c, [](bool x, bool y, bool z) { return x && (y || !z); });),
    JAXPLUGIN_MODEL(ternarylogic_e4, return Ternary(
        a, b, c, [](bool x, bool y, bool z) { return z ? x : y; });),
    JAXPLUGIN_MODEL(ternarylogic_d8, return Ternary(
        a, b, c, [](bool x, bool y, bool z) { return z ? y : x; });),
    JAXPLUGIN_MODEL(ternarylogic_ea, return Ternary(
        a, b, c, [](bool x, bool y, bool z) { return (x && y) || z; });),
    JAXPLUGIN_MODEL(ternarylogic_35, return Ternary(
        a, b, c, [](bool x, bool y, bool z) { return x ? !y : !z; });),
    JAXPLUGIN_MODEL(shuffle_88, return Quarters(a, b, {0, 2, 0, 2});),
    JAXPLUGIN_MODEL(shuffle_dd, return Quarters(a, b, {1, 3, 1, 3});),
    JAXPLUGIN_MODEL(shuffle_1b, return Quarters(a, b, {3, 2, 1, 0});),
    JAXPLUGIN_MODEL(dpbusd_epi32, return Fill<int32_t>([=](int i) {
      int64_t sum = Lane<int32_t>(c, i);
      for (int j = 4 * i; j < 4 * i + 4; ++j) {
        sum += int64_t{Lane<uint8_t>(a, j)} * Lane<int8_t>(b, j);
      }
      return static_cast<int32_t>(sum);
    });),
    JAXPLUGIN_LANES(permutexvar_epi8, uint8_t, b->bytes[a->bytes[i] % 64]),
    JAXPLUGIN_LANES(permutexvar_epi16, uint16_t,
                    Lane<uint16_t>(b, Lane<uint16_t>(a, i) % 32)),
    JAXPLUGIN_LANES(permutexvar_ps, uint32_t,
                    Lane<uint32_t>(b, Lane<uint32_t>(a, i) % 16)),
    JAXPLUGIN_LANES(permutex2var_epi8, uint8_t, OfBoth<uint8_t>(a, b, c, i)),
    JAXPLUGIN_LANES(maskz_permutex2var_epi8, uint8_t,
                    Bit(Mask(a), i) ? OfBoth<uint8_t>(a, b, c, i) : 0),
    JAXPLUGIN_LANES(permutex2var_epi16, uint16_t,
                    OfBoth<uint16_t>(a, b, c, i)),
    JAXPLUGIN_LANES(cmpeq_epi8_mask, uint8_t,
                    a->bytes[i] % 4 == b->bytes[i] % 4 ? c->bytes[i] : 0),
    JAXPLUGIN_MODEL(cmpeq_epi32_mask, return Compare([=](int i) {
      return Lane<uint32_t>(a, i) % 4 == Lane<uint32_t>(b, i) % 4;
    });),
    JAXPLUGIN_LANES(cmpge_epu8_mask, uint8_t,
                    a->bytes[i] >= b->bytes[i] ? c->bytes[i] : 0),
    JAXPLUGIN_LANES(mask_add_epi16, uint16_t,
                    Bit(Mask(c), i)
                        ? Lane<uint16_t>(b, i) + Lane<uint16_t>(c, i)
                        : Lane<uint16_t>(a, i)),
    JAXPLUGIN_LANES(test_epi8_mask, uint8_t,
                    a->bytes[i] & b->bytes[i] & 3 ? c->bytes[i] : 0),
    JAXPLUGIN_MODEL(
        test_epi16_mask, uint32_t mask = 0; for (int i = 0; i < 32; ++i) {
          const uint16_t some = Lane<uint16_t>(a, i) & Lane<uint16_t>(b, i);
          mask |= uint32_t{(some & 0x0303) != 0} << i;
        } return Fill<uint32_t>([=](int) { return mask; });),
    JAXPLUGIN_MODEL(cmplt_epu32_mask, return Compare([=](int i) {
      return Lane<uint32_t>(a, i) < Lane<uint32_t>(b, i);
    });),
    JAXPLUGIN_MODEL(testn_epi32_mask, return Compare([=](int i) {
      return (Lane<uint32_t>(a, i) & Lane<uint32_t>(b, i) & 3) == 0;
    });),
    JAXPLUGIN_LANES(fmadd_ps, float,
                    std::fma(Lane<float>(a, i), Lane<float>(b, i),
                             Lane<float>(c, i))),
    JAXPLUGIN_MODEL(reduce_add_ps, std::vector<float> lanes;
                    for (int i = 0; i < 16; ++i) {
                      lanes.push_back(Lane<float>(a, i));
                    } while (lanes.size() > 1) {
                      const size_t half = lanes.size() / 2;
                      for (size_t i = 0; i < half; ++i) {
                        lanes[i] += lanes[i + half];
                      }
                      lanes.resize(half);
                    } return Fill<float>([&](int) { return lanes[0]; });),
    JAXPLUGIN_LANES(dpbf16_ps, float, PairDot(a, b, c, i)),
};

// Draws registers of random bits, or, if is_near_one, of words that are bf16
// near 1, so that sums round. (Dwords then are floats near 1.) Every tenth of
// these words is extreme.
class Random {
 public:
  Register Next(bool is_near_one) {
    Register out;
    for (int i = 0; i < 32; ++i) {
      uint16_t word = static_cast<uint16_t>(Draw());
      if (is_near_one) word = (word & 0x87ff) | (0x3c00 + (Draw() & 0x700));
      constexpr uint16_t kExtremes[] = {0,      0x8000, 0x0001, 0x007f, 0x0080,
                                        0x7f7f, 0xff7f, 0x7f80, 0x7fc0, 0x3f80};
      if (is_near_one && Draw() % 10 == 0) word = kExtremes[Draw() % 10];
      SetLane<uint16_t>(&out, i, word);
    }
    return out;
  }

 private:
  uint32_t Draw() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 40);
  }
  uint64_t state_ = 1;
};

// Whether all lanes have the same bits. Two NaNs in a lane of floats are equal.
bool Same(const Register& x, const Register& y, bool is_float) {
  for (int i = 0; i < 16; ++i) {
    const bool nans = is_float && std::isnan(Lane<float>(&x, i)) &&
                      std::isnan(Lane<float>(&y, i));
    if (!nans && Lane<uint32_t>(&x, i) != Lane<uint32_t>(&y, i)) return false;
  }
  return true;
}

// A case of VDPBF16PS that is computed by hand.
struct WorkedPair {
  const char* claim;
  float sum, odd_a, odd_b, even_a, even_b, expected;
};
const WorkedPair kWorkedPairs[] = {
    {"the odd product comes first", 0x1p24f, 1, 1, -0x1p24f, 1, 0},
    {"a product may leave float32's range", -0x1p127f, 0x1p127f, 2, 0, 0,
     0x1p127f},
    {"a small product is not flushed by itself", 0x1p-126f, 0x1.8p-70f,
     0x1p-79f, 0, 0, 0x1.000004p-126f},
    {"a subnormal factor is zero", 1, 0x1p-130f, 0x1p127f, 0, 0, 1},
    {"a subnormal sum is zero", 0x1p-130f, 0, 0, 0x1p-60f, 0x1p-60f,
     0x1p-120f},
    {"a subnormal result is zero", 0x1.8p-126f, -0x1p-63f, 0x1p-63f, 0, 0, 0},
    {"and zero when the other product is added", 0x1.8p-126f, -0x1p-63f,
     0x1p-63f, 0x1p-63f, 0x1p-63f, 0x1p-126f},
    {"a result that rounds up to 2^-126 stays", 0x1p-126f, -0x1p-100f,
     0x1p-52f, 0, 0, 0x1p-126f},
    {"ties go to even, upwards too", 0x1.000002p0f, 0x1p-12f, 0x1p-12f, 0, 0,
     0x1.000004p0f},
};

int WorkedFailures(Function dpbf16, const char* whose) {
  int failures = 0;
  for (const WorkedPair& pair : kWorkedPairs) {
    const auto both = [](float odd, float even) {
      uint32_t high, low;
      std::memcpy(&high, &odd, 4);
      std::memcpy(&low, &even, 4);
      return high | low >> 16;
    };
    const Register a = Fill<uint32_t>(
        [&](int) { return both(pair.odd_a, pair.even_a); });
    const Register b = Fill<uint32_t>(
        [&](int) { return both(pair.odd_b, pair.even_b); });
    const Register c = Fill<float>([&](int) { return pair.sum; });
    const Register expected = Fill<float>([&](int) { return pair.expected; });
    Register out;
    dpbf16(&a, &b, &c, &out);
    if (Same(out, expected, true)) continue;
    ++failures;
    std::printf("%s dpbf16_ps: %s: got %a\n", whose, pair.claim, First(&out));
  }
  return failures;
}

// Whether `intrinsic` agrees with its model or AVX2's instruction, and with the
// machine's AVX-512 instruction if there is one.
bool Agrees(const Intrinsic& intrinsic, bool machine_has_them) {
  Random random;
  for (int round = 0; round < 20000; ++round) {
    const bool near = round % 4 != 0;
    const Register a = random.Next(near);
    const Register b = random.Next(near);
    const Register c = random.Next(near);
    Register got, expected;
    intrinsic.emulated(&a, &b, &c, &got);
    int found = 0;
    for (const HalfIntrinsic& half : kHalves) {
      if (std::strcmp(half.name, intrinsic.name) != 0) continue;
      for (int i = 0; i < 64; i += 32) {
        const auto load = [i](const Register& r) {
          return _mm256_load_si256(
              reinterpret_cast<const __m256i*>(r.bytes + i));
        };
        _mm256_store_si256(reinterpret_cast<__m256i*>(expected.bytes + i),
                           half.function(load(a), load(b)));
      }
      ++found;
    }
    for (const NamedModel& model : kModels) {
      if (std::strcmp(model.name, intrinsic.name) != 0) continue;
      expected = model.model(&a, &b, &c);
      ++found;
    }
    if (found != 1 || !Same(got, expected, intrinsic.is_float)) {
      std::printf("%s: %d models, another result in round %d\n",
                  intrinsic.name, found, round);
      return false;
    }
    if (!machine_has_them) continue;
    intrinsic.native(&a, &b, &c, &expected);
    if (!Same(got, expected, intrinsic.is_float)) {
      std::printf("%s: the machine has another result in round %d\n",
                  intrinsic.name, round);
      return false;
    }
  }
  return true;
}

int Main() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    std::printf("left out: this machine has no AVX2\n");
    return 0;
  }
  const bool machine_has_them = MachineHasThem();
  int failures = 0, count = 0;
  for (const Intrinsic& intrinsic : kIntrinsics) {
    failures += !Agrees(intrinsic, machine_has_them);
    ++count;
  }
  failures += WorkedFailures(emulated::cases::dpbf16_ps, "emulated");
  if (machine_has_them) {
    failures += WorkedFailures(native::dpbf16_ps, "the machine's");
  }
  std::printf("%d intrinsics, %d failures; %s\n", count, failures,
              machine_has_them ? "compared with this machine's"
                               : "this machine has none to compare with");
  return failures != 0;
}

}  // namespace jaxplugin

int main() { return jaxplugin::Main(); }
