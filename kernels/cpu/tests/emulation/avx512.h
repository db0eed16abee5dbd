// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Emulates the AVX-512 intrinsics that the kernels use, with the vector
// extensions of GCC and Clang. dot/avx512bf16.cc includes this header instead
// of <immintrin.h> if CMake gets -DJAXPLUGIN_EMULATE_AVX512=ON. So the kernels
// can be tested on any machine. The emulation is slow, and only for tests.
//
// The source is Intel's Software Developer's Manual, volume 2. Differences:
//   - The payload of a NaN, and the choice between two NaNs, are not emulated.
//   - An unaligned address for which the instruction would fault ends the
//     program with a message.
// SIMDe (0.8.2) cannot replace this header. It lacks six of the intrinsics, for
// example masked loads, which must not read masked bytes. Its vdpbf16ps rounds
// differently, and its aligned accesses allow any address.
//
// kernels_test.cc compares the results of the emulated kernels with float64.

#ifndef JAXPLUGIN_KERNELS_CPU_EMULATION_AVX512_H_
#define JAXPLUGIN_KERNELS_CPU_EMULATION_AVX512_H_

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the emulation needs a little-endian machine"
#endif

// The intrinsics are not inlined, because the compiler would take more than
// eight minutes: many intrinsics have hundreds of instructions and hundreds of
// calls. They are always optimized. So their callers can be compiled with -O0,
// which takes 2 s instead of 25 s with -O2. The kernels are as fast (GCC 12).
#if defined(__clang__)
#define JAXPLUGIN_EMULATED __attribute__((noinline, unused)) static
#else
#define JAXPLUGIN_EMULATED \
  __attribute__((noinline, unused, optimize("O2"))) static
#endif

namespace jaxplugin {
namespace emulated {

typedef float __m512 __attribute__((vector_size(64)));
typedef long long __m512i __attribute__((vector_size(64)));
typedef short __m512bh __attribute__((vector_size(64)));
typedef long long __m128i __attribute__((vector_size(16)));
typedef long long __m256i __attribute__((vector_size(32)));
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;
typedef uint64_t __mmask64;

// The same registers with other lanes.
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef uint16_t Words __attribute__((vector_size(64)));
typedef uint32_t Dwords __attribute__((vector_size(64)));
typedef uint64_t Qwords __attribute__((vector_size(64)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint16_t Words16 __attribute__((vector_size(32)));

// What intrinsics of several lane types share. V is one of these types.

template <typename V>
constexpr int LanesOf(const V& x) {
  return static_cast<int>(sizeof(x) / sizeof(x[0]));
}

// Returns a mask whose bit i is set if a comparison holds in lane i.
template <typename V>
JAXPLUGIN_EMULATED uint64_t MaskOf(V holds) {
  uint64_t mask = 0;
  for (int i = 0; i < LanesOf(holds); ++i) {
    mask |= uint64_t{holds[i] != 0} << i;
  }
  return mask;
}

// Returns the lanes of x whose mask bit is set, and the other lanes of `other`.
template <typename V>
JAXPLUGIN_EMULATED __m512i Select(uint64_t mask, V x, V other) {
  for (int i = 0; i < LanesOf(x); ++i) {
    if (mask >> i & 1) other[i] = x[i];
  }
  return (__m512i)other;
}

// Permutes the lanes of x and y. The lanes of y have the higher indices, which
// are taken modulo the number of lanes of both.
template <typename V>
JAXPLUGIN_EMULATED __m512i Permute(V at, V x, V y) {
  V out;
  const int lanes = LanesOf(x);
  for (int i = 0; i < lanes; ++i) {
    out[i] = (at[i] & lanes ? y : x)[at[i] & (lanes - 1)];
  }
  return (__m512i)out;
}

// Interleaves half of the lanes of x and y in each 128 bits.
template <typename V>
JAXPLUGIN_EMULATED __m512i Unpack(V x, V y, bool is_high) {
  V out;
  const int lanes = LanesOf(x) / 4;  // of 128 bits
  const int first = is_high ? lanes / 2 : 0;
  for (int i = 0; i < LanesOf(x); i += lanes) {
    for (int j = 0; j < lanes / 2; ++j) {
      out[i + 2 * j] = x[i + first + j];
      out[i + 2 * j + 1] = y[i + first + j];
    }
  }
  return (__m512i)out;
}

// Loads and stores.

// Aligned loads and stores fault if the address is not aligned.

JAXPLUGIN_EMULATED void CheckAligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64 == 0) return;
  fprintf(stderr, "AVX-512: aligned access to %p\n", p);
  abort();
}

JAXPLUGIN_EMULATED __m512i _mm512_loadu_si512(const void* p) {
  __m512i out;
  __builtin_memcpy(&out, p, 64);
  return out;
}

JAXPLUGIN_EMULATED __m512i _mm512_load_si512(const void* p) {
  CheckAligned(p);
  return _mm512_loadu_si512(p);
}

JAXPLUGIN_EMULATED void _mm512_store_si512(void* p, __m512i a) {
  CheckAligned(p);
  __builtin_memcpy(p, &a, 64);
}

// Reads only the bytes whose mask bit is set.
JAXPLUGIN_EMULATED __m512i _mm512_maskz_loadu_epi8(__mmask64 mask,
                                                   const void* p) {
  Bytes out = {};
  for (int i = 0; i < 64; ++i) {
    if (mask >> i & 1) out[i] = static_cast<const uint8_t*>(p)[i];
  }
  return (__m512i)out;
}

JAXPLUGIN_EMULATED __m128i _mm_maskz_loadu_epi8(__mmask16 mask,
                                                const void* p) {
  Bytes16 out = {};
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) out[i] = static_cast<const uint8_t*>(p)[i];
  }
  return (__m128i)out;
}

// A prefetch has no result and allows any address.
enum { _MM_HINT_T0 = 3, _MM_HINT_T1 = 2 };
JAXPLUGIN_EMULATED void _mm_prefetch(const char*, int) {}

// Constants and casts.

JAXPLUGIN_EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
JAXPLUGIN_EMULATED __m512 _mm512_setzero_ps() { return __m512{}; }

JAXPLUGIN_EMULATED __m512i _mm512_set1_epi8(char x) {
  return (__m512i)(Bytes{} + static_cast<uint8_t>(x));
}
JAXPLUGIN_EMULATED __m512i _mm512_set1_epi16(short x) {
  return (__m512i)(Words{} + static_cast<uint16_t>(x));
}
JAXPLUGIN_EMULATED __m512i _mm512_set1_epi32(int x) {
  return (__m512i)(Dwords{} + static_cast<uint32_t>(x));
}
JAXPLUGIN_EMULATED __m512 _mm512_set1_ps(float x) {
  __m512 out;
  for (int i = 0; i < 16; ++i) out[i] = x;  // + would turn -0 into 0
  return out;
}

JAXPLUGIN_EMULATED __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
JAXPLUGIN_EMULATED __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }

JAXPLUGIN_EMULATED __m512i _mm512_cvtepu8_epi32(__m128i a) {
  const Bytes16 bytes = (Bytes16)a;
  Dwords out;
  for (int i = 0; i < 16; ++i) out[i] = bytes[i];
  return (__m512i)out;
}

JAXPLUGIN_EMULATED __m512i _mm512_cvtepi8_epi32(__m128i a) {
  int8_t bytes[16];
  __builtin_memcpy(bytes, &a, 16);
  Dwords out;
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint32_t>(bytes[i]);
  return (__m512i)out;
}

JAXPLUGIN_EMULATED __m128i _mm512_castsi512_si128(__m512i a) {
  __m128i out;
  __builtin_memcpy(&out, &a, 16);
  return out;
}

JAXPLUGIN_EMULATED __m256i _mm512_castsi512_si256(__m512i a) {
  __m256i out;
  __builtin_memcpy(&out, &a, 32);
  return out;
}

JAXPLUGIN_EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) {
  const Words16 words = (Words16)a;
  Dwords out;
  for (int i = 0; i < 16; ++i) out[i] = words[i];
  return (__m512i)out;
}

// Converts float16 to float32, with subnormals.
JAXPLUGIN_EMULATED __m512 _mm512_cvtph_ps(__m256i a) {
  const Words16 words = (Words16)a;
  __m512 out;
  for (int i = 0; i < 16; ++i) {
    const uint32_t exponent = words[i] >> 10 & 31, mantissa = words[i] & 1023;
    const float sign = words[i] >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) {
      out[i] = sign * (mantissa != 0 ? __builtin_nanf("") : __builtin_inff());
    } else if (exponent == 0) {
      out[i] = sign * static_cast<float>(mantissa) * 0x1p-24f;
    } else {
      out[i] = sign * static_cast<float>(1024 + mantissa) * 0x1p-25f *
               static_cast<float>(uint64_t{1} << exponent);
    }
  }
  return out;
}

// Bits and integers.

JAXPLUGIN_EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) {
  return a & b;
}
JAXPLUGIN_EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) {
  return a | b;
}
JAXPLUGIN_EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return (__m512i)((Dwords)a + (Dwords)b);
}
JAXPLUGIN_EMULATED __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
  return (__m512i)((Dwords)a - (Dwords)b);
}
JAXPLUGIN_EMULATED __m512i _mm512_sub_epi8(__m512i a, __m512i b) {
  return (__m512i)((Bytes)a - (Bytes)b);
}
JAXPLUGIN_EMULATED __m512i _mm512_abs_epi8(__m512i a) {
  const Bytes x = (Bytes)a;
  return (__m512i)(x > 127 ? -x : x);
}
JAXPLUGIN_EMULATED __m512i _mm512_max_epu8(__m512i a, __m512i b) {
  return (__m512i)((Bytes)a > (Bytes)b ? (Bytes)a : (Bytes)b);
}
JAXPLUGIN_EMULATED __m512i _mm512_min_epu8(__m512i a, __m512i b) {
  return (__m512i)((Bytes)a < (Bytes)b ? (Bytes)a : (Bytes)b);
}
// Saturates at 0.
JAXPLUGIN_EMULATED __m512i _mm512_subs_epu16(__m512i a, __m512i b) {
  const Words x = (Words)a, y = (Words)b;
  return (__m512i)(x > y ? x - y : Words{});
}
// Lanes whose mask bit is clear have the value of `from`.
JAXPLUGIN_EMULATED __m512i _mm512_mask_add_epi16(__m512i from, __mmask32 mask,
                                                 __m512i a, __m512i b) {
  return Select(mask, (Words)a + (Words)b, (Words)from);
}
// Shifts by at least the width of a lane give 0.
JAXPLUGIN_EMULATED __m512i _mm512_slli_epi16(__m512i a, unsigned count) {
  return count > 15 ? __m512i{} : (__m512i)((Words)a << count);
}
JAXPLUGIN_EMULATED __m512i _mm512_srli_epi16(__m512i a, unsigned count) {
  return count > 15 ? __m512i{} : (__m512i)((Words)a >> count);
}
JAXPLUGIN_EMULATED __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
  return count > 31 ? __m512i{} : (__m512i)((Dwords)a << count);
}
JAXPLUGIN_EMULATED __m512i _mm512_srli_epi32(__m512i a, unsigned count) {
  return count > 31 ? __m512i{} : (__m512i)((Dwords)a >> count);
}
// An arithmetic shift. Shifts by at least the width of a lane give 0 or -1.
JAXPLUGIN_EMULATED __m512i _mm512_srai_epi32(__m512i a, unsigned count) {
  const Dwords x = (Dwords)a;
  Dwords out;
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<uint32_t>(static_cast<int32_t>(x[i]) >>
                                   (count > 31 ? 31 : count));
  }
  return (__m512i)out;
}

// VPDPBUSD: adds four products of unsigned bytes of a and signed bytes of b to
// each dword of sum, modulo 2^32.
JAXPLUGIN_EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a,
                                               __m512i b) {
  const Bytes x = (Bytes)a, y = (Bytes)b;
  Dwords out = (Dwords)sum;
  for (int i = 0; i < 64; ++i) {
    const int product = x[i] * static_cast<int8_t>(y[i]);
    out[i / 4] += static_cast<uint32_t>(product);
  }
  return (__m512i)out;
}

// Each bit of the result is bit (4 a + 2 b + c) of `table`, where a, b and c
// are the bits of the operands.
JAXPLUGIN_EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b,
                                                     __m512i c, int table) {
  __m512i out = {};
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1) {
      out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    }
  }
  return out;
}

// Masks. Bit i belongs to lane i.

JAXPLUGIN_EMULATED __mmask16 _mm512_cmpeq_epi32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(MaskOf((Dwords)a == (Dwords)b));
}
JAXPLUGIN_EMULATED __mmask16 _mm512_cmplt_epu32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(MaskOf((Dwords)a < (Dwords)b));
}
JAXPLUGIN_EMULATED __mmask64 _mm512_cmpge_epu8_mask(__m512i a, __m512i b) {
  return MaskOf((Bytes)a >= (Bytes)b);
}
JAXPLUGIN_EMULATED __mmask64 _mm512_cmpeq_epi8_mask(__m512i a, __m512i b) {
  return MaskOf((Bytes)a == (Bytes)b);
}
JAXPLUGIN_EMULATED __mmask64 _mm512_test_epi8_mask(__m512i a, __m512i b) {
  return ~_mm512_cmpeq_epi8_mask(a & b, __m512i{});
}
// Sets the mask bits of lanes in which a & b is 0.
JAXPLUGIN_EMULATED __mmask16 _mm512_testn_epi32_mask(__m512i a, __m512i b) {
  return _mm512_cmpeq_epi32_mask(a & b, __m512i{});
}

// Sets the mask bits of lanes in which a & b is not 0.
JAXPLUGIN_EMULATED __mmask32 _mm512_test_epi16_mask(__m512i a, __m512i b) {
  return static_cast<__mmask32>(MaskOf((Words)(a & b) != 0));
}

JAXPLUGIN_EMULATED __m512i _mm512_mask_mov_epi16(__m512i other, __mmask32 mask,
                                                 __m512i a) {
  return Select(mask, (Words)a, (Words)other);
}
JAXPLUGIN_EMULATED __m512i _mm512_mask_mov_epi32(__m512i other, __mmask16 mask,
                                                 __m512i a) {
  return Select(mask, (Dwords)a, (Dwords)other);
}

// Permutations.

JAXPLUGIN_EMULATED __m512i _mm512_permutexvar_epi8(__m512i index, __m512i a) {
  return Permute((Bytes)index, (Bytes)a, (Bytes)a);
}
JAXPLUGIN_EMULATED __m512i _mm512_permutexvar_epi16(__m512i index, __m512i a) {
  return Permute((Words)index, (Words)a, (Words)a);
}
JAXPLUGIN_EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 a) {
  return (__m512)Permute((Dwords)index, (Dwords)a, (Dwords)a);
}
JAXPLUGIN_EMULATED __m512i _mm512_permutex2var_epi8(__m512i a, __m512i index,
                                                    __m512i b) {
  return Permute((Bytes)index, (Bytes)a, (Bytes)b);
}
JAXPLUGIN_EMULATED __m512i _mm512_maskz_permutex2var_epi8(__mmask64 mask,
                                                          __m512i a,
                                                          __m512i index,
                                                          __m512i b) {
  const __m512i all = _mm512_permutex2var_epi8(a, index, b);
  return Select(mask, (Bytes)all, Bytes{});
}
JAXPLUGIN_EMULATED __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index,
                                                     __m512i b) {
  return Permute((Words)index, (Words)a, (Words)b);
}

JAXPLUGIN_EMULATED __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
  return Unpack((Bytes)a, (Bytes)b, false);
}
JAXPLUGIN_EMULATED __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
  return Unpack((Bytes)a, (Bytes)b, true);
}
JAXPLUGIN_EMULATED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
  return Unpack((Dwords)a, (Dwords)b, false);
}
JAXPLUGIN_EMULATED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
  return Unpack((Dwords)a, (Dwords)b, true);
}
JAXPLUGIN_EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  return Unpack((Qwords)a, (Qwords)b, false);
}
JAXPLUGIN_EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  return Unpack((Qwords)a, (Qwords)b, true);
}

// Selects two 128-bit lanes of a, then two of b. Each has two bits of
// `quarters`.
JAXPLUGIN_EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b,
                                                int quarters) {
  const Qwords x = (Qwords)a, y = (Qwords)b;
  Qwords out;
  for (int i = 0; i < 8; ++i) {
    const int from = (quarters >> (i / 2 * 2) & 3) * 2 + i % 2;
    out[i] = i < 4 ? x[from] : y[from];
  }
  return (__m512i)out;
}

// Floats.

JAXPLUGIN_EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
JAXPLUGIN_EMULATED __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
JAXPLUGIN_EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
JAXPLUGIN_EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  __m512 out;
  for (int i = 0; i < 16; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
}

// Rounds to nearest even.
JAXPLUGIN_EMULATED __m512 _mm512_cvtepi32_ps(__m512i a) {
  const Dwords x = (Dwords)a;
  __m512 out;
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>(static_cast<int32_t>(x[i]));
  }
  return out;
}

// Not one instruction. Compilers add the halves of the vector four times.
JAXPLUGIN_EMULATED float _mm512_reduce_add_ps(__m512 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a[i] += a[i + width];
  }
  return a[0];
}

// Converts the bits of a float32 to float64. Subnormals become zero.
JAXPLUGIN_EMULATED double FlushedInput(uint32_t bits) {
  if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return static_cast<double>(value);
}

// Returns a * b + sum, rounded once to float32 (to nearest even). A subnormal
// sum or result becomes zero in any floating-point mode. The computation is in
// float64, and its rounding does not change the float32 result: the product has
// 16 bits and the sum 24. If both together span more than 53 bits, the smaller
// one is less than a quarter of the larger one's last place in float32.
JAXPLUGIN_EMULATED float FlushingFma(double a, double b, float sum) {
  uint32_t sum_bits;
  __builtin_memcpy(&sum_bits, &sum, 4);
  const double exact = a * b + FlushedInput(sum_bits);
  // Whether the result is below 2^-126 after rounding to 24 bits. (A tie rounds
  // to 2^-126.)
  const bool is_tiny = __builtin_fabs(exact) < 0x1p-126 - 0x1p-151;
  const float result = static_cast<float>(exact);
  return is_tiny ? __builtin_copysignf(0.0f, result) : result;
}

// VDPBF16PS: sum + odd * odd, then + even * even. Each step is a fused
// multiply-add, rounded to nearest even. Subnormal inputs and outputs become
// zero, whatever MXCSR contains.
JAXPLUGIN_EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a,
                                           __m512bh b) {
  const Dwords x = (Dwords)a, y = (Dwords)b;
  __m512 out;
  for (int i = 0; i < 16; ++i) {
    const float odd = FlushingFma(FlushedInput(x[i] & 0xffff0000),
                                  FlushedInput(y[i] & 0xffff0000), sum[i]);
    out[i] = FlushingFma(FlushedInput(x[i] << 16), FlushedInput(y[i] << 16),
                         odd);
  }
  return out;
}

}  // namespace emulated
}  // namespace jaxplugin

#undef JAXPLUGIN_EMULATED

#endif  // JAXPLUGIN_KERNELS_CPU_EMULATION_AVX512_H_
