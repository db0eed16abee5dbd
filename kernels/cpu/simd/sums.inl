// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Sums of any length within the contract's 16 * 2^-24 of sum|a*b|. Each
// rounding of a partial sum costs 2^-24 of that at most, so a product may take
// part in 16 of them. So a few products are added up. These sums then join a
// total that keeps what it rounds off (TwoSum: Knuth, The Art of Computer
// Programming 2, 4.2.2).

// V: float or a vector of them.
template <typename V>
JAXPLUGIN_ALWAYS_INLINE void AddExactly(V x, V* total, V* rest) {
  const V sum = *total + x;
  const V part = sum - *total;
  *rest = *rest + ((*total - (sum - part)) + (x - part));
  *total = sum;
}

// The same to a total in memory, which begins as x where it is the first.
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

// Returns the sum of a total and its rest. If the total became Inf, the rest is
// NaN.
template <typename V>
JAXPLUGIN_ALWAYS_INLINE V TotalOf(V total, V rest) {
  return total + (rest == rest ? rest : V{});
}
