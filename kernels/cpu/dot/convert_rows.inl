// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Converts rows of floats for precision="fastest". One form is bf16, rounded to
// nearest even. The other one is int8 in blocks of 32, with float32 scales:
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

// Quantizes up to 256 values of a row, from a multiple of 32 on.
JAXPLUGIN_ALWAYS_INLINE void QuantizeChunk(float* floats, int64_t count,
                                           int8_t* out, float* scale) {
  for (int64_t i = count; i < RoundUp(count, 32); ++i) floats[i] = 0;
  for (int64_t i = 0; i < count; i += 32) {
    *scale++ = i + 32 <= count ? QuantizeBlock(floats + i, out + i, 32)
                               : QuantizeBlock(floats + i, out + i, count - i);
  }
}

// Rounds to nearest even. A finite value stays finite.
JAXPLUGIN_ALWAYS_INLINE uint16_t ToFiniteBF16(float x) {
  constexpr uint16_t kInfinityBF16 = 0x7f80;
  const uint16_t rounded = ToBF16(x);
  const bool overflows = (rounded & 0x7fff) == kInfinityBF16 &&
                         (AsBits(x) & kMagnitude) < kInfinity;
  return static_cast<uint16_t>(rounded - overflows);
}

inline void ConvertRow(const Operand& x, int64_t row,
                       const ConvertedRows& out) {
  constexpr int64_t kChunk = 256;
  const uint8_t* values = RowValues(x, row);
  for (int64_t k0 = 0; k0 < x.k; k0 += kChunk) {
    float floats[kChunk];
    const int64_t count = Min(kChunk, x.k - k0);
    DecodeValues(x, values, k0, count, floats);
    const int64_t at = row * x.k + k0;
    if (out.form == RowsForm::kInt8) {
      QuantizeChunk(floats, count, reinterpret_cast<int8_t*>(out.values) + at,
                    out.scale + row * CeilDiv(x.k, 32) + k0 / 32);
    } else {
      uint16_t* bf16 = reinterpret_cast<uint16_t*>(out.values) + at;
      for (int64_t i = 0; i < count; ++i) bf16[i] = ToFiniteBF16(floats[i]);
    }
  }
}

bool ConvertRows(const Operand& x, const ConvertedRows& out,
                 const Parallel& parallel) {
  const int64_t group = Max(1, (int64_t{1} << 15) / Max(x.k, 1));
  // Waking a thread takes longer than 2^17 values.
  const Parallel serial{1, nullptr, nullptr};
  return ParallelFor(
      x.rows * x.k <= (1 << 17) ? serial : parallel, CeilDiv(x.rows, group),
      [&](int64_t index, int) {
        const int64_t end = Min(x.rows, (index + 1) * group);
        for (int64_t r = index * group; r < end; ++r) {
          ConvertRow(x, r, out);
        }
      });
}
