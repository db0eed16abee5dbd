// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The random Hadamard transform of jaxplugin/quantization/hadamard.py: sums and
// differences of values at distances 1, 2, 4, ..., in that order, and one
// multiplication. The results have the same bits unless an intermediate is a
// subnormal.

// If bit i is set, counted from the highest bit of the first word, the sign of
// value i of a group is flipped. The bits are the fraction of pi in binary.
constexpr uint32_t kTurnedSigns[8] = {0x243f6a88, 0x85a308d3, 0x13198a2e,
                                      0x03707344, 0xa4093822, 0x299f31d0,
                                      0x082efa98, 0xec4e6c89};

JAXPLUGIN_ALWAYS_INLINE uint32_t TurnedSign(int i) {
  return kTurnedSigns[i / 32] << i % 32 & 0x80000000u;
}

// Returns 1 / sqrt(size), rounded to float32. size is a power of two.
JAXPLUGIN_ALWAYS_INLINE float InverseRoot(int size) {
  float root = 1;
  for (; size > 2; size /= 4) root *= 0.5f;
  return size == 2 ? root * 0.70710678118654752f : root;
}

// Transforms a group of kSize values, which are `stride` vectors apart.
template <int kSize>
JAXPLUGIN_ALWAYS_INLINE void TransformSmall(Floats* x, int stride) {
  Floats y[kSize];
#pragma GCC unroll 32
  for (int i = 0; i < kSize; ++i) {
    const int32_t sign = static_cast<int32_t>(TurnedSign(i));
    y[i] = FloatsOf(IntsOf(x[i * stride]) ^ sign);
  }
#pragma GCC unroll 5
  for (int distance = 1; distance < kSize; distance *= 2) {
#pragma GCC unroll 32
    for (int i = 0; i < kSize; ++i) {
      if (i & distance) continue;
      const Floats first = y[i], second = y[i + distance];
      y[i] = first + second;
      y[i + distance] = first - second;
    }
  }
  const float factor = InverseRoot(kSize);
#pragma GCC unroll 32
  for (int i = 0; i < kSize; ++i) x[i * stride] = y[i] * factor;
}

JAXPLUGIN_ALWAYS_INLINE void TransformAny(Floats* x, int stride, int size) {
  for (int i = 0; i < size; ++i) {
    const int32_t sign = static_cast<int32_t>(TurnedSign(i));
    x[i * stride] = FloatsOf(IntsOf(x[i * stride]) ^ sign);
  }
  for (int distance = 1; distance < size; distance *= 2) {
    for (int i = 0; i < size; ++i) {
      if (i & distance) continue;
      const Floats first = x[i * stride], second = x[(i + distance) * stride];
      x[i * stride] = first + second;
      x[(i + distance) * stride] = first - second;
    }
  }
  const float factor = InverseRoot(size);
  for (int i = 0; i < size; ++i) x[i * stride] *= factor;
}

// Transforms each group of `size` values, of `count` values in total. A value
// has `vectors` vectors, whose lanes are rows.
JAXPLUGIN_ALWAYS_INLINE void Transform(Floats* x, int count, int vectors,
                                       int size) {
  for (int i = 0; i < count; i += size) {
    for (int v = 0; v < vectors; ++v) {
      Floats* group = x + i * vectors + v;
      if (size == 16) {
        TransformSmall<16>(group, vectors);
      } else {
        TransformAny(group, vectors, size);
      }
    }
  }
}
