// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Quantizes along the last dimension. The loops give the same bits as
// jaxplugin/quantization, so compile this file without contraction of a * b + c
// (-ffp-contract=off).
//
// k is a multiple of the block size, so a tensor is one run of blocks.

// Converts the bits of a magnitude, not NaN, to the code of the nearest value.
// Ties round to even, and large values saturate.
template <typename T>
JAXPLUGIN_ALWAYS_INLINE uint32_t Encode(uint32_t bits) {
  constexpr int kShift = 23 - T::kMantissaBits;
  constexpr uint32_t kMinNormal = (127u + T::kMinExponent) << 23;
  // Adding 2^23 times the smallest subnormal rounds to a multiple of it, and
  // the low bits then hold the multiple.
  constexpr uint32_t kMagic =
      (127u + T::kMinExponent - T::kMantissaBits + 23) << 23;
  bits = bits < T::kMaxBits ? bits : T::kMaxBits;
  const uint32_t half = (1u << (kShift - 1)) - 1 + ((bits >> kShift) & 1);
  const uint32_t normal =
      ((bits + half) >> kShift) - ((127u - T::kBias) << T::kMantissaBits);
  const uint32_t subnormal = AsBits(AsFloat(bits) + AsFloat(kMagic)) - kMagic;
  return bits >= kMinNormal ? normal : subnormal;
}

// The global scale of an NVFP4 tensor. If it is below 2^-64 (tiny), the tensor
// and the global scale are multiplied by 2^64, which does not change quotients.
struct Nvfp4Global {
  bool invalid;    // not positive and finite: every block is NaN
  bool tiny;
  float divisor;   // the global scale, times 2^64 when tiny

  explicit Nvfp4Global(float global) {
    const uint32_t bits = AsBits(global);
    invalid = bits == 0 || bits >= kInfinity;  // also negative ones
    tiny = bits < (63u << 23);
    divisor = tiny ? global * 0x1p64f : global;
  }
};

// E4M3's smallest positive number, the lower limit of the scale of a nonzero
// block. A smaller scale would round to 0, and the block would be lost.
constexpr float kMinE4M3 = 0x1p-9f;

constexpr int kNvfp4Blocks = 16;  // blocks that are quantized together

// Divisors and masks for the values of up to 16 blocks. One vectorized loop
// computes them, because the latency of divisions would bound a loop over
// blocks.
struct Nvfp4Steps {
  float step[kNvfp4Blocks];     // the divisor of a block's values
  uint32_t keep[kNvfp4Blocks];  // masks of codes, 0 if the block is NaN
  float inverse[kNvfp4Blocks];  // 1 / step
  // Whether values can be multiplied by `inverse` (blocks_avx2.inl).
  bool has_inverse;
};

// MX blocks that are quantized together, so that each block need not wait for
// its scale.
constexpr int kMxBlocks = 8;

struct MxSteps {
  float inverse[kMxBlocks];  // the factor of a block's values
  uint32_t keep[kMxBlocks];  // masks of codes, 0 if the block is NaN
};

#if defined(JAXPLUGIN_AVX2_QUANTIZE)
#include "quantize/blocks_avx2.inl"
#else

// Returns the bits of the largest magnitude. Inf is above all numbers, and NaN
// above Inf.
template <int kCount>
JAXPLUGIN_ALWAYS_INLINE uint32_t BlockMax(const float* x) {
  int32_t amax = 0;
  for (int i = 0; i < kCount; ++i) {
    const int32_t bits = static_cast<int32_t>(AsBits(x[i]) & kMagnitude);
    amax = bits > amax ? bits : amax;
  }
  return static_cast<uint32_t>(amax);
}

// Packs E2M1 codes, from one per byte to two per byte. The first code of a pair
// is in the low nibble.
template <int kCount>
JAXPLUGIN_ALWAYS_INLINE void Pack(const uint8_t* codes, uint8_t* out) {
  // Packs eight codes at a time in a (little-endian) register. Compilers turn a
  // simple loop into one over bytes, which takes half of quantize's time.
  for (int i = 0; i < kCount; i += 8) {
    uint64_t x;
    __builtin_memcpy(&x, codes + i, 8);
    x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
    x = (x | x >> 8) & 0x0000ffff0000ffffu;
    const uint32_t packed = static_cast<uint32_t>(x | x >> 16);
    __builtin_memcpy(out + i / 2, &packed, 4);
  }
}

template <typename T, int kCount>
JAXPLUGIN_ALWAYS_INLINE void StoreCodes(const uint8_t* codes, uint8_t* out) {
  if (IsPacked(T::kFormat)) {
    Pack<kCount>(codes, out);
  } else {
    __builtin_memcpy(out, codes, kCount);
  }
}

// Stores the codes of kCount values x * factor (kDivide: x / factor), masked
// with `keep`.
template <typename T, int kCount, bool kDivide>
JAXPLUGIN_ALWAYS_INLINE void EncodeRun(const float* x, float factor,
                                       uint32_t keep, uint8_t* out) {
  uint8_t codes[kCount];
  for (int i = 0; i < kCount; ++i) {
    const uint32_t bits = AsBits(x[i]);
    const float magnitude = AsFloat(bits & kMagnitude);
    const uint32_t quotient =
        AsBits(kDivide ? magnitude / factor : magnitude * factor);
    const uint32_t code = Encode<T>(quotient) | (bits >> 31) << T::kSignShift;
    codes[i] = static_cast<uint8_t>(code & keep);
  }
  StoreCodes<T, kCount>(codes, out);
}

template <bool kTiny>
JAXPLUGIN_ALWAYS_INLINE void Nvfp4Scales(const float* x, int count,
                                         const Nvfp4Global& global,
                                         uint8_t* scale, Nvfp4Steps* out) {
  uint32_t amax_bits[kNvfp4Blocks] = {};
  uint32_t code[kNvfp4Blocks];
  for (int b = 0; b < count; ++b) amax_bits[b] = BlockMax<16>(x + 16 * b);
  const uint32_t valid = global.invalid ? 0 : ~0u;
  for (int b = 0; b < kNvfp4Blocks; ++b) {
    // A mask, because GCC 12 turns a conditional expression into a branch and
    // does not vectorize the loop.
    const uint32_t not_finite = (kInfinity - 1 - amax_bits[b]) >> 31;
    const uint32_t keep = (not_finite - 1) & valid;
    float amax = AsFloat(amax_bits[b] & keep);
    if (kTiny) amax *= 0x1p64f;  // the scale saturates if this is Inf
    // Compares bits, which have the order of positive floats.
    const uint32_t ideal = AsBits(amax / 6.0f / global.divisor) & keep;
    const uint32_t e4m3 =
        Encode<E4M3>(ideal > AsBits(kMinE4M3) ? ideal : AsBits(kMinE4M3));
    out->step[b] = Decode<E4M3>(e4m3) * global.divisor;
    out->keep[b] = keep;
    // 1 if amax is 0: only 0 - 1 has the top bit set.
    const uint32_t is_zero = (amax_bits[b] - 1) >> 31;
    code[b] = (e4m3 & (is_zero - 1) & keep) | (0x7fu & ~keep);
  }
  out->has_inverse = false;
  for (int b = 0; b < count; ++b) scale[b] = static_cast<uint8_t>(code[b]);
}

// Returns the largest BlockMax among the blocks of 16 values without NaN or
// Inf. `count` is a multiple of 16.
JAXPLUGIN_ALWAYS_INLINE uint32_t FiniteMax(const float* x, int64_t count) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const uint32_t block = BlockMax<16>(x + i);
    if (block < kInfinity) amax = block > amax ? block : amax;
  }
  return amax;
}

// Never called, because has_inverse is false without AVX2.
JAXPLUGIN_ALWAYS_INLINE void EncodeTwoBlocks(const float*, const Nvfp4Steps&,
                                             int, uint8_t*) {}

// Computes the scales of `count` blocks, and the steps to encode their values.
template <typename T>
JAXPLUGIN_ALWAYS_INLINE void MxScales(const float* x, int count, bool round_up,
                                      uint8_t* scale, MxSteps* out) {
  constexpr uint32_t kMaxMantissa = T::kMaxBits & 0x7fffff;
  for (int b = 0; b < count; ++b) {
    const uint32_t amax = BlockMax<32>(x + 32 * b);
    const bool is_nan = amax >= kInfinity;
    int byte = static_cast<int>(amax >> 23) - T::kMaxExponent;
    if (round_up) byte += (amax & 0x7fffff) > kMaxMantissa;
    byte = byte < 0 ? 0 : byte;
    // 1 / scale. The mask makes all codes of a NaN block 0.
    out->inverse[b] = AsFloat(static_cast<uint32_t>(254 - byte) << 23);
    out->keep[b] = is_nan ? 0 : ~0u;
    scale[b] = is_nan ? 255 : static_cast<uint8_t>(byte);
  }
}

#endif  // JAXPLUGIN_AVX2_QUANTIZE

template <typename T>
JAXPLUGIN_ALWAYS_INLINE void MxValues(const float* x, int count,
                                      const MxSteps& steps, uint8_t* values) {
  constexpr int64_t kBytes = BytesOf(T::kFormat, 32);
  for (int b = 0; b < count; ++b) {
    EncodeRun<T, 32, false>(x + 32 * b, steps.inverse[b], steps.keep[b],
                            values + b * kBytes);
  }
}

template <bool kTiny>
JAXPLUGIN_ALWAYS_INLINE void Nvfp4Values(const float* x, int count,
                                         const Nvfp4Steps& steps,
                                         uint8_t* values) {
  int b = 0;
  if (!kTiny && steps.has_inverse) {
    for (; b + 2 <= count; b += 2) {
      EncodeTwoBlocks(x + 16 * b, steps, b, values + 8 * b);
    }
  }
  for (; b < count; ++b) {
    const float* from = x + 16 * b;
    float scaled[16];
    if (kTiny) {
      for (int i = 0; i < 16; ++i) scaled[i] = from[i] * 0x1p64f;
      from = scaled;
    }
    EncodeRun<E2M1, 16, true>(from, steps.step[b], steps.keep[b],
                              values + 8 * b);
  }
}

template <typename T>
void QuantizeMx(const Codec& codec, const float* x, int64_t count,
                uint8_t* values, uint8_t* scale) {
  constexpr int64_t kValues = 32 * kMxBlocks;
  for (int64_t i = 0; i < count; i += kValues) {
    MxSteps steps;
    const int blocks = static_cast<int>(Min(kValues, count - i)) / 32;
    MxScales<T>(x + i, blocks, codec.round_up, scale + i / 32, &steps);
    MxValues<T>(x + i, blocks, steps, values + BytesOf(T::kFormat, i));
  }
}

template <bool kTiny>
void QuantizeNvfp4(const Nvfp4Global& global, const float* x, int64_t count,
                   uint8_t* values, uint8_t* scale) {
  constexpr int64_t kValues = 16 * kNvfp4Blocks;
  for (int64_t i = 0; i < count; i += kValues) {
    Nvfp4Steps steps;
    const int blocks = static_cast<int>(Min(kValues, count - i)) / 16;
    Nvfp4Scales<kTiny>(x + i, blocks, global, scale + i / 16, &steps);
    Nvfp4Values<kTiny>(x + i, blocks, steps, values + i / 2);
  }
}

// Quantizes x[0, count), which has whole blocks. kernels.h has the contract.
inline void QuantizeRun(const Codec& codec, const float* x, int64_t count,
                        uint8_t* values, uint8_t* scale) {
  switch (codec.format) {
    case QuantizedFormat::kMxfp8:
      return QuantizeMx<E4M3>(codec, x, count, values, scale);
    case QuantizedFormat::kMxfp8E5m2:
      return QuantizeMx<E5M2>(codec, x, count, values, scale);
    case QuantizedFormat::kMxfp4:
      return QuantizeMx<E2M1>(codec, x, count, values, scale);
    case QuantizedFormat::kMxfp6E2m3:
      return QuantizeMx<E2M3>(codec, x, count, values, scale);
    case QuantizedFormat::kMxfp6E3m2:
      return QuantizeMx<E3M2>(codec, x, count, values, scale);
    case QuantizedFormat::kNvfp4: {
      const Nvfp4Global global(codec.global_scale);
      return global.tiny
                 ? QuantizeNvfp4<true>(global, x, count, values, scale)
                 : QuantizeNvfp4<false>(global, x, count, values, scale);
    }
  }
}
