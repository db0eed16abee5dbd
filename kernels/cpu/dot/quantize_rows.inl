// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Quantizes rows of floats to int8 in blocks of 32, with float32 scales:
//   scale = max(amax / 127, 2^-126), or 0 for a block of zeros
//   value = round(x / scale), halves to even
// A block with a NaN or an Inf has the scale NaN and zeros. These are the rules
// of jax's `quantize` for int8 (docs/concepts/numerics.md). The division is
// rounded, so |x - value * scale| is at most scale / 2 * (1 + 2^-16).

// Quantizes `count` values of a block. The others are 0.
JAXPLUGIN_ALWAYS_INLINE float QuantizeBlock(const float* __restrict x,
                                            int8_t* __restrict out,
                                            int64_t count) {
  constexpr uint32_t kLeast = 1u << 23;  // the bits of 2^-126
  uint32_t amax = 0;
  for (int i = 0; i < 32; ++i) {
    const uint32_t magnitude = AsBits(x[i]) & kMagnitude;
    amax = magnitude > amax ? magnitude : amax;
  }
  const bool is_finite = amax < kInfinity;
  float scale = AsFloat(amax) / 127.0f;
  scale = AsBits(scale) < kLeast ? AsFloat(kLeast) : scale;
  // Adding 12582912 = 1.5 * 2^23 rounds to an integer, which the low bits hold.
  int8_t codes[32];
  for (int i = 0; i < 32; ++i) {
    const uint32_t bits = AsBits(x[i] / scale + 12582912.0f);
    codes[i] = static_cast<int8_t>(is_finite ? bits - 0x4b400000u : 0);
  }
  __builtin_memcpy(out, codes, count);
  return is_finite ? (amax == 0 ? 0.0f : scale) : AsFloat(kQuietNan);
}

inline void QuantizeRow(const Operand& x, int64_t row, int8_t* out,
                        float* scale) {
  constexpr int64_t kChunk = 256;
  const uint8_t* values = RowValues(x, row);
  for (int64_t k0 = 0; k0 < x.k; k0 += kChunk) {
    float floats[kChunk];
    const int64_t count = Min(kChunk, x.k - k0);
    DecodeValues(x, values, k0, count, floats);
    for (int64_t i = count; i < RoundUp(count, 32); ++i) floats[i] = 0;
    for (int64_t i = 0; i < count; i += 32) {
      *scale++ = i + 32 <= count
                     ? QuantizeBlock(floats + i, out + k0 + i, 32)
                     : QuantizeBlock(floats + i, out + k0 + i, count - i);
    }
  }
}

bool QuantizeRows(const Operand& x, const QuantizedRows& out,
                  const Parallel& parallel) {
  const int64_t columns = CeilDiv(x.k, 32);
  const int64_t group = Max(1, (int64_t{1} << 15) / Max(x.k, 1));
  // Waking a thread takes longer than 2^17 values.
  const Parallel serial{1, nullptr, nullptr};
  return ParallelFor(
      x.rows * x.k <= (1 << 17) ? serial : parallel, CeilDiv(x.rows, group),
      [&](int64_t index, int) {
        const int64_t end = Min(x.rows, (index + 1) * group);
        for (int64_t r = index * group; r < end; ++r) {
          QuantizeRow(x, r, out.values + r * x.k, out.scale + r * columns);
        }
      });
}
