// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// cast(activation(dot * global_scale * global_power + bias) + residual), for a
// run of one output row at a time, in float32 until the cast. There are two
// global factors because float32 may not hold their product.

// Returns e^x to about 2 ulp: 0 below and Inf above float32's range, NaN for
// NaN.
JAXPLUGIN_ALWAYS_INLINE float Exp(float x) {
  // Outside of these limits the result is 0 or Inf. The clamp keeps both powers
  // of two below in range.
  float clamped = x < -110.0f ? -110.0f : x;
  clamped = clamped > 100.0f ? 100.0f : clamped;
  // Adding 12582912 = 1.5 * 2^23 rounds to an integer, which the low bits hold.
  const float shifted = clamped * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const int32_t exponent = static_cast<int32_t>(AsBits(shifted)) - 0x4b400000;
  float r = clamped - n * 0.693359375f;   // ln 2 in two parts
  r = r - n * -2.12194440054690583e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t half = exponent >> 1;
  const float low = AsFloat(static_cast<uint32_t>(half + 127) << 23);
  const float high = AsFloat(static_cast<uint32_t>(exponent - half + 127)
                             << 23);
  return x != x ? x : p * low * high;
}

// 0.5 x (1 + tanh(u)) equals x / (1 + e^-2u), which has no cancellation.
JAXPLUGIN_ALWAYS_INLINE float Gelu(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x / (1.0f + Exp(-2.0f * u));
}

JAXPLUGIN_ALWAYS_INLINE float Silu(float x) { return x / (1.0f + Exp(-x)); }

// Stores n sums of columns j, j + 1, ... at flat index `at` of the result.
// StoreRow passes n as a constant, except for the tail.
JAXPLUGIN_ALWAYS_INLINE void StoreRun(const DotArgs& args, int64_t at,
                                      int64_t j, int n, float global,
                                      float power, const float* dot) {
  constexpr int kRun = 64;
  float v[kRun];
  for (int i = 0; i < n; ++i) v[i] = dot[i] * global * power;
  if (args.bias) {
    for (int i = 0; i < n; ++i) v[i] += args.bias[j + i];
  }
  switch (args.activation) {
    case Activation::kNone: break;
    case Activation::kRelu:
      // max(x, 0), except that NaN stays NaN, as in jax.nn.relu.
      for (int i = 0; i < n; ++i) v[i] = v[i] <= 0.0f ? 0.0f : v[i];
      break;
    case Activation::kGelu:
      for (int i = 0; i < n; ++i) v[i] = Gelu(v[i]);
      break;
    case Activation::kSilu:
      for (int i = 0; i < n; ++i) v[i] = Silu(v[i]);
      break;
  }
  if (args.residual) {
    if (args.residual_format == Format::kF32) {
      const float* floats = static_cast<const float*>(args.residual) + at;
      for (int i = 0; i < n; ++i) v[i] += floats[i];
    } else {
      const uint16_t* halves = static_cast<const uint16_t*>(args.residual) + at;
      if (args.residual_format == Format::kBF16) {
        for (int i = 0; i < n; ++i) v[i] += FromBF16(halves[i]);
      } else {
        for (int i = 0; i < n; ++i) v[i] += FromF16(halves[i]);
      }
    }
  }
  StoreFloats(v, n, args.out_format, args.out, at);
}

// Stores `count` sums to out[row, j0...], where row = batch entry * m + i.
inline void StoreRow(const DotArgs& args, int64_t row, int64_t j0,
                     int64_t count, const float* dot) {
  constexpr int kRun = 64, kShortRun = 16;
  const float global = args.global_scale ? *args.global_scale : 1.0f;
  const float power = args.global_power ? *args.global_power : 1.0f;
  int64_t c = 0;
  for (; c + kRun <= count; c += kRun) {
    StoreRun(args, row * args.n + j0 + c, j0 + c, kRun, global, power, dot + c);
  }
  for (; c + kShortRun <= count; c += kShortRun) {
    StoreRun(args, row * args.n + j0 + c, j0 + c, kShortRun, global, power,
             dot + c);
  }
  if (c < count) {
    StoreRun(args, row * args.n + j0 + c, j0 + c, static_cast<int>(count - c),
             global, power, dot + c);
  }
}

// Prefetches the part of the result that StoreRow will write.
inline void PrefetchRow(const DotArgs& args, int64_t row, int64_t j0,
                        int64_t count) {
  const int64_t bytes = args.out_format == Format::kF32 ? 4 : 2;
  const char* out =
      static_cast<const char*>(args.out) + (row * args.n + j0) * bytes;
  for (int64_t i = 0; i < count * bytes; i += 64) {
    __builtin_prefetch(out + i, 1);
  }
}
