// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// cast(activation(dot * global_scale * global_power + bias) + residual), for a
// run of one output row at a time, in float32 until the cast. There are two
// global factors because float32 may not hold their product.

#include "simd/activations.inl"

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
