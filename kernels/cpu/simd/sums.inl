// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Sums of any length with an error of at most 16 * 2^-24 of sum|a*b|, as the
// contract requires. Each rounding of a partial sum adds an error of at most
// 2^-24 of sum|a*b|, so a product may take part in 16 roundings. The kernels
// therefore add only a few products plainly, and add these partial sums to a
// compensated total, which keeps its rounding errors in a rest (TwoSum: Knuth,
// The Art of Computer Programming 2, 4.2.2).

// Adds x to the total and the rounding error to the rest. V is float or a
// vector of floats.
template <typename V>
JAXPLUGIN_ALWAYS_INLINE void AddExactly(V x, V* total, V* rest) {
  const V sum = *total + x;
  const V part = sum - *total;
  *rest = *rest + ((*total - (sum - part)) + (x - part));
  *total = sum;
}

// The same for a total in memory. If is_first, x replaces the total and the
// rest becomes 0.
template <typename V>
JAXPLUGIN_ALWAYS_INLINE void AddExactly(V x, bool is_first, float* total,
                                        float* rest) {
  V sum = x, left{};
  if (!is_first) {
    __builtin_memcpy(&sum, total, sizeof(V));
    __builtin_memcpy(&left, rest, sizeof(V));
    AddExactly(x, &sum, &left);
  }
  __builtin_memcpy(total, &sum, sizeof(V));
  __builtin_memcpy(rest, &left, sizeof(V));
}

// Returns the sum of a total and its rest. The rest is ignored if it is NaN,
// which it becomes when the total becomes Inf.
template <typename V>
JAXPLUGIN_ALWAYS_INLINE V TotalOf(V total, V rest) {
  return total + (rest == rest ? rest : V{});
}
