// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// cast(activation(dot * global_scale * global_power + bias) + residual), for a
// run of one output row at a time, in float32 until the cast. There are two
// global factors because float32 may not hold their product.

#include "simd/activations.inl"

// Whether a thread has found an unsafe row (DotArgs::gave_up).
JAXPLUGIN_ALWAYS_INLINE bool GaveUp(const DotArgs& args) {
  return args.gave_up != nullptr &&
         __atomic_load_n(args.gave_up, __ATOMIC_RELAXED) != 0;
}

// The part of the result that a task computes at a time.
struct ResultPart {
  // If the result is quantized, its f32 [rows, columns]; else null.
  float* sums;
  int64_t row, rows;  // a row is batch entry * m + i
  int64_t column, columns;

  // After a thread gave up, sums may be missing.
  JAXPLUGIN_ALWAYS_INLINE void Store(const DotArgs& args) const {
    if (sums == nullptr || GaveUp(args)) return;
    StoreQuantized(*args.quantized, sums, row, rows, column, columns);
  }
};

// Stores n sums of columns j, j + 1, ... of a row to `out` from index `to` on.
// Their index in a result that is not quantized is `at`. StoreRow passes n as a
// constant, except for the tail.
JAXPLUGIN_ALWAYS_INLINE void StoreRun(const DotArgs& args, int64_t at,
                                      int64_t j, int n, float global,
                                      float power, const float* dot, void* out,
                                      int64_t to) {
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
  StoreFloats(v, n, args.out_format, out, to);
}

// Stores `count` sums to out[row, j0...], where row = batch entry * m + i.
inline void StoreRow(const DotArgs& args, int64_t row, int64_t j0,
                     int64_t count, const float* dot, const ResultPart& part) {
  constexpr int kRun = 64, kShortRun = 16;
  const float global = args.global_scale ? *args.global_scale : 1.0f;
  const float power = args.global_power ? *args.global_power : 1.0f;
  const int64_t at = row * args.n + j0;
  void* out = args.out;
  int64_t to = at;
  if (part.sums != nullptr) {
    out = part.sums;
    to = (row - part.row) * part.columns + j0 - part.column;
  }
  int64_t c = 0;
  for (; c + kRun <= count; c += kRun) {
    StoreRun(args, at + c, j0 + c, kRun, global, power, dot + c, out, to + c);
  }
  for (; c + kShortRun <= count; c += kShortRun) {
    StoreRun(args, at + c, j0 + c, kShortRun, global, power, dot + c, out,
             to + c);
  }
  if (c < count) {
    StoreRun(args, at + c, j0 + c, static_cast<int>(count - c), global, power,
             dot + c, out, to + c);
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
