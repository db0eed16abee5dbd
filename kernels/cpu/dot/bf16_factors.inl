// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Checks whether the engines that multiply in bf16 support an operand.

// Whether every bf16 value is 0, NaN, Inf or of a magnitude from 2^-55 to below
// 2^62. Products of such values are exact, as those of safe rows
// (kSafeExponent).
bool AllSafeBF16(const Operand& x, const Parallel& parallel) {
  const int64_t rows_per_task = Max(1, (int64_t{1} << 18) / Max(x.k, 1));
  uint32_t unsafe = 0;
  const bool ok = ParallelFor(
      parallel, CeilDiv(x.rows, rows_per_task), [&](int64_t index, int) {
        uint32_t found = 0;
        const int64_t end = Min(x.rows, (index + 1) * rows_per_task);
        for (int64_t r = index * rows_per_task; r < end; ++r) {
          const uint8_t* row = RowValues(x, r);
          for (int64_t i = 0; i < x.k; ++i) {
            uint16_t bits;
            __builtin_memcpy(&bits, row + 2 * i, 2);
            const uint32_t magnitude = bits & 0x7fffu;
            const uint32_t exponent = magnitude >> 7;
            found |= (magnitude != 0) &
                     ((exponent < 127 - 55) |
                      ((exponent > 127 + 61) & (exponent < 255)));
          }
        }
        if (found) __atomic_store_n(&unsafe, 1, __ATOMIC_RELAXED);
      });
  return ok && unsafe == 0;
}

bool BF16CanHold(const Operand& x, const Parallel& parallel) {
  if (x.format == Format::kBF16) return AllSafeBF16(x, parallel);
  return IsBF16(ShapeOf(x));
}
