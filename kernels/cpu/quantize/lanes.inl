// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Vectors whose lanes are different rows. They use the vector extensions of GCC
// and Clang, so that one source supports every instruction set.

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

JAXPLUGIN_ALWAYS_INLINE Ints IntsOf(Floats x) {
  return reinterpret_cast<Ints>(x);
}
JAXPLUGIN_ALWAYS_INLINE Floats FloatsOf(Ints x) {
  return reinterpret_cast<Floats>(x);
}
JAXPLUGIN_ALWAYS_INLINE Ints SplatInts(int32_t x) { return Ints{} + x; }
JAXPLUGIN_ALWAYS_INLINE Floats SplatFloats(float x) { return Floats{} + x; }
JAXPLUGIN_ALWAYS_INLINE Ints MinInts(Ints a, Ints b) { return a < b ? a : b; }
JAXPLUGIN_ALWAYS_INLINE Ints MaxInts(Ints a, Ints b) { return a > b ? a : b; }

// Loads kLanes numbers from x[index] on, and converts them to float32.
template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE Floats LoadLanes(const void* x, int64_t index) {
  if constexpr (kFormat == Format::kF32) {
    Floats result;
    __builtin_memcpy(&result, static_cast<const float*>(x) + index,
                     sizeof(result));
    return result;
  } else {
    Halves halves;
    __builtin_memcpy(&halves, static_cast<const uint16_t*>(x) + index,
                     sizeof(halves));
    const Ints half = __builtin_convertvector(halves, Ints);
    if constexpr (kFormat == Format::kBF16) return FloatsOf(half << 16);
    const Ints magnitude = (half & 0x7fff) << 13;  // same as in FromF16
    Ints normal = magnitude + (112 << 23);
    normal |= (magnitude >= (31 << 23)) & static_cast<int32_t>(kInfinity);
    const Ints subnormal =
        IntsOf(FloatsOf(magnitude + (113 << 23)) -
               FloatsOf(SplatInts(113 << 23)));
    const Ints bits = magnitude < (1 << 23) ? subnormal : normal;
    return FloatsOf(bits | (half & 0x8000) << 16);
  }
}

template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE float LoadOne(const void* x, int64_t index) {
  if constexpr (kFormat == Format::kF32) {
    return static_cast<const float*>(x)[index];
  }
  const uint16_t half = static_cast<const uint16_t*>(x)[index];
  return kFormat == Format::kBF16 ? FromBF16(half) : FromF16(half);
}

// Returns a[0], b[0], a[1], b[1], ... from the lower halves of a and b.
// InterleaveHigh does the same with the upper halves.
JAXPLUGIN_ALWAYS_INLINE Words InterleaveLow(Words a, Words b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                 6, 22, 7, 23);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

JAXPLUGIN_ALWAYS_INLINE Words InterleaveHigh(Words a, Words b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Transposes a square of kLanes x kLanes words. Each round interleaves the
// first half of the vectors with the second half. That rotates the bits of the
// indices of all words by one.
JAXPLUGIN_ALWAYS_INLINE void TurnLanes(Words* x) {
#pragma GCC unroll 4
  for (int size = kLanes; size > 1; size /= 2) {
    Words turned[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      turned[2 * i] = InterleaveLow(x[i], x[i + kLanes / 2]);
      turned[2 * i + 1] = InterleaveHigh(x[i], x[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) x[i] = turned[i];
  }
}
