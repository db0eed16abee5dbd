// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Gated activations: half of the columns of a product are gates of the others.
// In float32 until the cast, by the Silu and the casts of the epilogue.

JAXPLUGIN_ALWAYS_INLINE float Swiglu(float gate, float value) {
  return Silu(gate) * value;
}

// gpt-oss's. A NaN passes both clamps, as it does jnp.minimum and jnp.clip.
JAXPLUGIN_ALWAYS_INLINE float SwigluOai(float gate, float value) {
  constexpr float kLimit = 7.0f, kAlpha = 1.702f;
  gate = gate > kLimit ? kLimit : gate;
  value = value > kLimit ? kLimit : value;
  value = value < -kLimit ? -kLimit : value;
  return gate / (1.0f + Exp(-kAlpha * gate)) * (value + 1.0f);
}

JAXPLUGIN_ALWAYS_INLINE void StoreGated(const GateArgs& args, int64_t at, int n,
                                        const float* v) {
  if (args.out_format == Format::kF32) {
    __builtin_memcpy(static_cast<float*>(args.out) + at, v, n * sizeof(float));
    return;
  }
  uint16_t* halves = static_cast<uint16_t*>(args.out) + at;
  if (args.out_format == Format::kBF16) {
    for (int i = 0; i < n; ++i) halves[i] = ToBF16(v[i]);
  } else {
    for (int i = 0; i < n; ++i) halves[i] = ToF16(v[i]);
  }
}

JAXPLUGIN_ALWAYS_INLINE void GateRun(const GateArgs& args, int64_t row,
                                     int64_t j, int n) {
  constexpr int kRun = 64;
  float v[kRun];
  const int64_t half = args.n / 2;
  const float* x = args.x + row * args.n;
  if (args.gate == Gate::kSwiglu) {
    for (int i = 0; i < n; ++i) v[i] = Swiglu(x[j + i], x[half + j + i]);
  } else {
    const float* pairs = x + 2 * j;
    for (int i = 0; i < n; ++i) {
      v[i] = SwigluOai(pairs[2 * i], pairs[2 * i + 1]);
    }
  }
  StoreGated(args, row * half + j, n, v);
}

inline bool GateRows(const GateArgs& args, const Parallel& parallel) {
  constexpr int kRun = 64;
  const int64_t half = args.n / 2;
  // About 32 KiB of x for a task.
  const int64_t task = Max(1, (int64_t{1} << 13) / Max(args.n, 1));
  return ParallelFor(
      parallel, CeilDiv(args.rows, task), [&](int64_t index, int) {
        const int64_t end = Min(args.rows, (index + 1) * task);
        for (int64_t row = index * task; row < end; ++row) {
          int64_t j = 0;
          for (; j + kRun <= half; j += kRun) GateRun(args, row, j, kRun);
          if (j < half) GateRun(args, row, j, static_cast<int>(half - j));
        }
      });
}
