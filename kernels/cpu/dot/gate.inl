// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Gated activations: half of the columns of a dot are gates of the other half.
// They are computed in float32 until the cast.

JAXPLUGIN_ALWAYS_INLINE float Swiglu(float gate, float value) {
  return Silu(gate) * value;
}

JAXPLUGIN_ALWAYS_INLINE void GateRun(const GateArgs& args, int64_t row,
                                     int64_t j, int n) {
  constexpr int kRun = 64;
  float v[kRun];
  const float* gates = args.gates + row * args.row_floats;
  const float* values = args.values + row * args.row_floats;
  if (args.gate == Gate::kSwiglu) {
    for (int i = 0; i < n; ++i) v[i] = Swiglu(gates[j + i], values[j + i]);
  } else {
    gates += 2 * j;
    values += 2 * j;
    constexpr float kAlpha = 1.702f, kLimit = 7.0f;
    for (int i = 0; i < n; ++i) {
      v[i] = SwigluOai(gates[2 * i], values[2 * i], kAlpha, kLimit);
    }
  }
  StoreFloats(v, n, args.out_format, args.out, row * args.out_columns + j);
}

inline bool GateRows(const GateArgs& args, const Parallel& parallel) {
  constexpr int kRun = 64;
  // A task has 2^12 results, which read 32 KiB of sums.
  const int64_t task = Max(1, (int64_t{1} << 12) / Max(args.columns, 1));
  return ParallelFor(
      parallel, CeilDiv(args.rows, task), [&](int64_t index, int) {
        const int64_t end = Min(args.rows, (index + 1) * task);
        for (int64_t row = index * task; row < end; ++row) {
          int64_t j = 0;
          for (; j + kRun <= args.columns; j += kRun) {
            GateRun(args, row, j, kRun);
          }
          const int rest = static_cast<int>(args.columns - j);
          if (rest > 0) GateRun(args, row, j, rest);
        }
      });
}
