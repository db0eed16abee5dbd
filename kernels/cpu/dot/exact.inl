// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Computes one element of the dot in float64, where every product of two values
// and two scales is in range and exact. It is used for rows that cannot be
// rebased, because their scales span too many powers of two (rebase.cc). It is
// about 50 times slower than the engines.

// Requires |exponent| < 1023.
JAXPLUGIN_ALWAYS_INLINE double PowerOfTwo(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
  double power;
  __builtin_memcpy(&power, &bits, 8);
  return power;
}

// Returns the dot of two rows, times 2^exponent.
__attribute__((noinline)) float ExactDot(const Operand& lhs, int64_t lhs_row,
                                         const Operand& rhs, int64_t rhs_row,
                                         int exponent) {
  constexpr int64_t kChunk = 256;
  float a[kChunk], b[kChunk];
  double scale[kChunk];
  double sum = 0;
  for (int64_t k0 = 0; k0 < lhs.k; k0 += kChunk) {
    const int64_t count = Min(kChunk, lhs.k - k0);
    DecodeValues(lhs, RowValues(lhs, lhs_row), k0, count, a);
    DecodeValues(rhs, RowValues(rhs, rhs_row), k0, count, b);
    for (int64_t i = 0; i < count; ++i) scale[i] = 1;
    for (int side = 0; side < 2; ++side) {
      const Operand& x = side == 0 ? lhs : rhs;
      if (x.scale_kind == ScaleKind::kNone) continue;
      ForBlocks(x, side == 0 ? lhs_row : rhs_row, k0, count,
                [&scale](int64_t begin, int64_t end, float s) {
                  for (int64_t i = begin; i < end; ++i) scale[i] *= s;
                });
    }
    double lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      for (int j = 0; j < 8; ++j) {
        lanes[j] += static_cast<double>(a[i + j]) *
                    static_cast<double>(b[i + j]) * scale[i + j];
      }
    }
    for (; i < count; ++i) {
      lanes[0] += static_cast<double>(a[i]) * static_cast<double>(b[i]) *
                  scale[i];
    }
    for (int j = 0; j < 8; ++j) sum += lanes[j];
  }
  return static_cast<float>(sum * PowerOfTwo(exponent));
}
