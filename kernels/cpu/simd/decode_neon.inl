// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Converts E2M1, FP8 and codes of codebooks to float32 with NEON. Instructions of
// a loop, compiled by Zig 0.17.1 (Clang 22):
//                     this file    codec.inl
//   32 codes of E2M1         37          104
//   16 codes of E4M3         26           59
//   16 codes of E5M2         14           63
// The loop of codec.inl for int4 has 38 for 32 codes.

JAXPLUGIN_ALWAYS_INLINE void StoreBits(uint8x16_t bits, float* out) {
  vst1q_f32(out, vreinterpretq_f32_u8(bits));
}

// Stores 8 bf16 numbers as float32: the low halves are 0.
JAXPLUGIN_ALWAYS_INLINE void StoreBF16(uint8x16_t numbers, float* out) {
  const uint16x8_t zero = vdupq_n_u16(0), x = vreinterpretq_u16_u8(numbers);
  StoreBits(vreinterpretq_u8_u16(vzip1q_u16(zero, x)), out);
  StoreBits(vreinterpretq_u8_u16(vzip2q_u16(zero, x)), out + 4);
}

JAXPLUGIN_ALWAYS_INLINE void DecodeE2M1(const uint8_t* codes, int64_t count,
                                        float* out) {
  // The bytes of the 16 values as bf16.
  constexpr uint8_t kHigh[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40,
                                 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf,
                                 0xc0, 0xc0, 0xc0, 0xc0};
  constexpr uint8_t kLow[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0,
                                0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
  const uint8x16_t high = vld1q_u8(kHigh), low = vld1q_u8(kLow);
  for (int64_t i = 0; i < count; i += 32) {
    const uint8x16_t both = vld1q_u8(codes + i / 2);
    const uint8x16_t even = vandq_u8(both, vdupq_n_u8(15));
    const uint8x16_t odd = vshrq_n_u8(both, 4);
    const uint8x16_t nibbles[2] = {vzip1q_u8(even, odd), vzip2q_u8(even, odd)};
    for (int h = 0; h < 2; ++h) {
      const uint8x16_t x = vqtbl1q_u8(low, nibbles[h]);
      const uint8x16_t y = vqtbl1q_u8(high, nibbles[h]);
      StoreBF16(vzip1q_u8(x, y), out + i + 16 * h);
      StoreBF16(vzip2q_u8(x, y), out + i + 16 * h + 8);
    }
  }
}

// Stores 16 values from their low words and their high words.
JAXPLUGIN_ALWAYS_INLINE void StoreWords(uint8x16x2_t low, uint8x16x2_t high,
                                        float* out) {
  for (int h = 0; h < 2; ++h) {
    const uint16x8_t x = vreinterpretq_u16_u8(low.val[h]);
    const uint16x8_t y = vreinterpretq_u16_u8(high.val[h]);
    StoreBits(vreinterpretq_u8_u16(vzip1q_u16(x, y)), out + 8 * h);
    StoreBits(vreinterpretq_u8_u16(vzip2q_u16(x, y)), out + 8 * h + 4);
  }
}

JAXPLUGIN_ALWAYS_INLINE void DecodeCodebook(const float* codebook,
                                            const uint8_t* codes,
                                            int64_t count, float* out) {
  // val[i] has byte i of each of the 16 values.
  const uint8x16x4_t bytes =
      vld4q_u8(reinterpret_cast<const uint8_t*>(codebook));
  for (int64_t i = 0; i < count; i += 32) {
    const uint8x16_t both = vld1q_u8(codes + i / 2);
    const uint8x16_t even = vandq_u8(both, vdupq_n_u8(15));
    const uint8x16_t odd = vshrq_n_u8(both, 4);
    const uint8x16_t nibbles[2] = {vzip1q_u8(even, odd), vzip2q_u8(even, odd)};
    for (int h = 0; h < 2; ++h) {
      uint8x16_t found[4];
      for (int b = 0; b < 4; ++b) {
        found[b] = vqtbl1q_u8(bytes.val[b], nibbles[h]);
      }
      StoreWords(vzipq_u8(found[0], found[1]), vzipq_u8(found[2], found[3]),
                 out + i + 16 * h);
    }
  }
}

// Converts eight FP8 codes in the high bytes of words. E5M2 is the high byte of
// a float16. E4M3, shifted right by one bit, has a float16's fields times 2^8.
template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE void DecodeEight(uint8x16_t words, float* out) {
  uint16x8_t halves = vreinterpretq_u16_u8(words);
  float unit = 1;
  if constexpr (kFormat == Format::kE4M3) {
    const uint16x8_t is_nan = vceqq_u16(
        vandq_u16(halves, vdupq_n_u16(0x7f00)), vdupq_n_u16(0x7f00));
    // The shift copies the sign to the highest exponent bit.
    const int16x8_t shifted = vshrq_n_s16(vreinterpretq_s16_u16(halves), 1);
    halves = vandq_u16(vreinterpretq_u16_s16(shifted), vdupq_n_u16(0xbfff));
    halves = vorrq_u16(halves, is_nan);
    unit = 256;
  }
  const float16x8_t numbers = vreinterpretq_f16_u16(halves);
  const float32x4_t low = vcvt_f32_f16(vget_low_f16(numbers));
  const float32x4_t high = vcvt_high_f32_f16(numbers);
  vst1q_f32(out, unit == 1 ? low : vmulq_n_f32(low, unit));
  vst1q_f32(out + 4, unit == 1 ? high : vmulq_n_f32(high, unit));
}

template <Format kFormat>
JAXPLUGIN_ALWAYS_INLINE void DecodeFP8(const uint8_t* codes, int64_t count,
                                       float* out) {
  const uint8x16_t zero = vdupq_n_u8(0);
  for (int64_t i = 0; i < count; i += 16) {
    const uint8x16_t some = vld1q_u8(codes + i);
    DecodeEight<kFormat>(vzip1q_u8(zero, some), out + i);
    DecodeEight<kFormat>(vzip2q_u8(zero, some), out + i + 8);
  }
}

// Converts the first values of a row from k0 on, and returns their number. It is
// 0 for other formats.
inline int64_t DecodeVectors(const Operand& x, const uint8_t* row, int64_t k0,
                             int64_t count, float* out) {
  const int64_t done = count - count % 32;
  switch (x.format) {
    case Format::kE2M1: DecodeE2M1(row + k0 / 2, done, out); return done;
    case Format::kCodebook:
      DecodeCodebook(x.codebook, row + k0 / 2, done, out);
      return done;
    case Format::kE4M3: DecodeFP8<Format::kE4M3>(row + k0, done, out); return done;
    case Format::kE5M2: DecodeFP8<Format::kE5M2>(row + k0, done, out); return done;
    default: return 0;
  }
}
