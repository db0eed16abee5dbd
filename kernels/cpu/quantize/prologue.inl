// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Prologues: functions of x whose f32 result is quantized. A thread computes a
// run of it in the first cache, and the codec of blocks.inl quantizes the run.
// jaxplugin/quantization/prologues.py has the formulas.

#include "simd/activations.inl"

typedef float HalfFloats __attribute__((vector_size(2 * kLanes)));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));

// Returns the mean of `count` values or of their squares. `count` is a multiple
// of 16. Sums of f32 would lose more bits with each term.
template <bool kSquares>
inline double Mean(const float* x, int64_t count) {
  constexpr int kEach = kLanes / 2, kSums = 16 / kEach;
  Doubles sums[kSums] = {};
  for (int64_t i = 0; i < count; i += 16) {
#pragma GCC unroll 8
    for (int s = 0; s < kSums; ++s) {
      HalfFloats floats;
      __builtin_memcpy(&floats, x + i + s * kEach, sizeof(floats));
      const Doubles term = __builtin_convertvector(floats, Doubles);
      sums[s] += kSquares ? term * term : term;
    }
  }
  double total = 0;
#pragma GCC unroll 8
  for (int s = 0; s < kSums; ++s) {
    for (int lane = 0; lane < kEach; ++lane) total += sums[s][lane];
  }
  return total / static_cast<double>(count);
}

inline void AddBias(const float* __restrict bias, int64_t count,
                    float* __restrict x) {
  for (int64_t j = 0; j < count; ++j) x[j] += bias[j];
}

// Returns x + residual if there is a residual, else x.
inline const void* SummedX(const QuantizeArgs& args) {
  return args.prologue.residual != nullptr ? args.prologue.sum : args.x;
}

// Reads a row of x as f32. If there is a residual, the row is their sum rounded
// to x's dtype, which is a result, too.
inline void ReadRow(const QuantizeArgs& args, int64_t row, float* out) {
  const Prologue& p = args.prologue;
  for (int64_t c = 0; c < args.k; c += kQuantizeChunk) {
    const int64_t i = row * args.k + c;
    const int64_t count = Min(kQuantizeChunk, args.k - c);
    if (p.residual != nullptr) {
      float buffer[kQuantizeChunk], other[kQuantizeChunk], sum[kQuantizeChunk];
      const float* x = ReadFloats(args.x, args.x_format, i, count, buffer);
      const float* residual =
          ReadFloats(p.residual, args.x_format, i, count, other);
      for (int64_t j = 0; j < count; ++j) sum[j] = x[j] + residual[j];
      StoreFloats(sum, count, args.x_format, p.sum, i);
    }
    CopyFloats(SummedX(args), args.x_format, i, count, out + c);
  }
}

// Prefetches values [i, i + count) of x or of the residual. Without it nothing is
// read while a row is computed: 4096 x 4096 then takes 1.35x as long (README.md).
inline void Prefetch(const void* x, Format format, int64_t i, int64_t count) {
  const int64_t size = FactsOf(format).bits / 8;
  const char* from = static_cast<const char*>(x) + i * size;
  for (int64_t b = 0; b < count * size; b += 64) __builtin_prefetch(from + b);
}

// The numbers that normalize a row.
struct Statistics {
  float mean;  // 0 for rms_norm
  float factor;
};

inline void Subtract(float mean, int64_t count, float* __restrict y) {
  for (int64_t j = 0; j < count; ++j) y[j] -= mean;
}

// Reads a row to `y`, subtracts its mean and computes its statistics.
inline Statistics ReadCentered(const QuantizeArgs& args, int64_t row,
                               float* __restrict y) {
  const Prologue& p = args.prologue;
  ReadRow(args, row, y);
  float mean = 0;
  if (p.function == PrologueFunction::kLayerNorm) {
    mean = static_cast<float>(Mean<false>(y, args.k));
    Subtract(mean, args.k, y);
  }
  return {mean, static_cast<float>(
                    1 / __builtin_sqrt(Mean<true>(y, args.k) + p.epsilon))};
}

// Normalizes `y`, values [column, column + count) of a row without its mean.
inline void Normalize(const Prologue& p, float factor, int64_t column,
                      int64_t count, float* __restrict y) {
  for (int64_t j = 0; j < count; ++j) y[j] *= factor;
  if (p.weight != nullptr) {
    const float* weight = p.weight + column;
    for (int64_t j = 0; j < count; ++j) y[j] *= weight[j];
  }
  if (p.bias != nullptr) AddBias(p.bias + column, count, y);
}

// Computes the norm of a row and quantizes it. `y` has memory for the row.
inline void QuantizeNorm(const QuantizeArgs& args, const Codec& codec,
                         int64_t row, float* __restrict y) {
  const Prologue& p = args.prologue;
  const Statistics statistics = ReadCentered(args, row, y);
  for (int64_t c = 0; c < args.k; c += kQuantizeChunk) {
    const int64_t end = Min(args.k, c + kQuantizeChunk);
    Normalize(p, statistics.factor, c, end - c, y + c);
    if (row + 1 < args.rows) {
      const int64_t next = (row + 1) * args.k + c;
      Prefetch(args.x, args.x_format, next, end - c);
      if (p.residual != nullptr) {
        Prefetch(p.residual, args.x_format, next, end - c);
      }
    }
    Store(args, codec, row * args.k + c, end - c, y + c);
  }
}

inline bool QuantizeNorms(const QuantizeArgs& args, const Codec& codec,
                          const Parallel& parallel) {
  const int64_t task_rows = Max(1, kQuantizeTask / Max(1, args.k));
  const int64_t floats = RoundUp(args.k, 16);
  Scratch scratch(static_cast<size_t>(4 * floats * parallel.threads));
  float* rows = reinterpret_cast<float*>(scratch.get());
  if (rows == nullptr) return false;
  return ParallelForInParts(
      parallel, CeilDiv(args.rows, task_rows), [=, &args](int64_t t, int slot) {
        const int64_t end = Min(args.rows, (t + 1) * task_rows);
        for (int64_t row = t * task_rows; row < end; ++row) {
          QuantizeNorm(args, codec, row, rows + slot * floats);
        }
      });
}

// Gates and factors of a run, in f32.
struct Pair {
  float gate[kQuantizeChunk], up[kQuantizeChunk];
};

// Reads `count` gates and factors from a column of a row on, and adds biases.
inline void ReadPair(const QuantizeArgs& args, int64_t row, int64_t column,
                     int64_t count, Pair* out) {
  const Prologue& p = args.prologue;
  const auto read = [&](const void* x, int64_t i, int64_t bias, int64_t values,
                        float* to) {
    CopyFloats(x, args.x_format, i, values, to);
    if (p.bias != nullptr) AddBias(p.bias + bias, values, to);
  };
  const int64_t k = args.k;
  switch (p.halves) {
    case PrologueHalves::kNone:
      read(args.x, row * k + column, column, count, out->gate);
      read(p.up, row * k + column, k + column, count, out->up);
      break;
    case PrologueHalves::kSplit:
      read(args.x, 2 * row * k + column, column, count, out->gate);
      read(args.x, (2 * row + 1) * k + column, k + column, count, out->up);
      break;
    case PrologueHalves::kInterleaved: {
      float both[2 * kQuantizeChunk];
      read(args.x, 2 * (row * k + column), 2 * column, 2 * count, both);
      for (int64_t j = 0; j < count; ++j) {
        out->gate[j] = both[2 * j];
        out->up[j] = both[2 * j + 1];
      }
    }
  }
}

// Computes `count` values of a gated activation from a column of a row on.
inline void ComputeGated(const QuantizeArgs& args, int64_t row, int64_t column,
                         int64_t count, float* __restrict y) {
  const Prologue& p = args.prologue;
  Pair pair;
  ReadPair(args, row, column, count, &pair);
  switch (p.function) {
    case PrologueFunction::kSiluAndMul:
      for (int64_t j = 0; j < count; ++j) {
        y[j] = Silu(pair.gate[j]) * pair.up[j];
      }
      break;
    case PrologueFunction::kGeluAndMul:
      for (int64_t j = 0; j < count; ++j) {
        y[j] = Gelu(pair.gate[j]) * pair.up[j];
      }
      break;
    default:
      for (int64_t j = 0; j < count; ++j) {
        y[j] = SwigluOai(pair.gate[j], pair.up[j], p.alpha, p.limit);
      }
  }
}

// Computes and quantizes values [begin, end) of a gated activation.
inline void QuantizeGated(const QuantizeArgs& args, const Codec& codec,
                          int64_t begin, int64_t end) {
  int64_t count;
  for (int64_t i = begin; i < end; i += count) {
    const int64_t column = i % args.k;
    count = Min(kQuantizeChunk, Min(args.k - column, end - i));
    float y[kQuantizeChunk];
    ComputeGated(args, i / args.k, column, count, y);
    Store(args, codec, i, count, y);
  }
}
