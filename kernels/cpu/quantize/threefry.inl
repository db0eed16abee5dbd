// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The random bits that JAX draws from a threefry2x32 key under
// jax_threefry_partitionable. The bits of a value are a hash of the key and the
// value's index in row-major order.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1,
// 2, 3" (SC 2011): Threefry-2x32 with 20 rounds.

struct Threefry {
  uint32_t keys[3];

  explicit Threefry(const uint32_t* key)
      : keys{key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bdau} {}

  template <int kDistance>
  static JAXPLUGIN_ALWAYS_INLINE void Round(Words* a, Words* b) {
    *a += *b;
    *b = (*b << kDistance | *b >> (32 - kDistance)) ^ *a;
  }

  // Returns 32 bits for each of the values with indices high * 2^32 + low.
  JAXPLUGIN_ALWAYS_INLINE Words Bits(Words high, Words low) const {
    Words a = high + keys[0];
    Words b = low + keys[1];
#pragma GCC unroll 5
    for (uint32_t group = 0; group < 5; ++group) {
      if (group % 2 == 0) {
        Round<13>(&a, &b), Round<15>(&a, &b);
        Round<26>(&a, &b), Round<6>(&a, &b);
      } else {
        Round<17>(&a, &b), Round<29>(&a, &b);
        Round<16>(&a, &b), Round<24>(&a, &b);
      }
      a += keys[(group + 1) % 3];
      b += keys[(group + 2) % 3] + (group + 1);
    }
    return a ^ b;
  }
};

// The indices of one value of each of kLanes rows.
struct Counters {
  Words high, low;

  // Returns the indices of the values `distance` further.
  JAXPLUGIN_ALWAYS_INLINE Counters After(int64_t distance) const {
    const Words sum = low + static_cast<uint32_t>(distance);
    const Words carry = reinterpret_cast<Words>(sum < low) & 1u;
    return {high + static_cast<uint32_t>(distance >> 32) + carry, sum};
  }
};
