// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Prologues: functions of x whose f32 result is quantized. A thread computes a
// run of it in the first cache, and the codec of blocks.inl quantizes the run.
// jaxplugin/quantization/prologues.py has the formulas.

#include "simd/activations.inl"

typedef float HalfFloats __attribute__((vector_size(2 * kLanes)));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));

// Returns the mean of `count` values or of their products with those of y.
// `count` is a multiple of 16. Sums of f32 would lose more bits with each term.
template <bool kProducts>
inline double Mean(const float* x, const float* y, int64_t count) {
  constexpr int kEach = kLanes / 2, kSums = 16 / kEach;
  Doubles sums[kSums] = {};
  for (int64_t i = 0; i < count; i += 16) {
#pragma GCC unroll 8
    for (int s = 0; s < kSums; ++s) {
      HalfFloats floats, others;
      __builtin_memcpy(&floats, x + i + s * kEach, sizeof(floats));
      __builtin_memcpy(&others, y + i + s * kEach, sizeof(others));
      const Doubles term = __builtin_convertvector(floats, Doubles);
      const Doubles factor = __builtin_convertvector(others, Doubles);
      sums[s] += kProducts ? term * factor : term;
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

// Whether a norm is that of x + residual.
inline bool AddsFirst(const Prologue& p) {
  return p.residual != nullptr && p.gradient == PrologueGradient::kNone;
}

// Returns x + residual if a norm reads it, else x.
inline const void* SummedX(const QuantizeArgs& args) {
  return AddsFirst(args.prologue) ? args.prologue.sum : args.x;
}

// Reads a row of x as f32. If there is a residual, the row is their sum rounded
// to x's dtype, which is a result, too. A gradient adds the residual later.
inline void ReadRow(const QuantizeArgs& args, int64_t row, float* out) {
  const Prologue& p = args.prologue;
  for (int64_t c = 0; c < args.k; c += kQuantizeChunk) {
    const int64_t i = row * args.k + c;
    const int64_t count = Min(kQuantizeChunk, args.k - c);
    if (AddsFirst(p)) {
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

// The numbers that normalize a row. A gradient has the means of d, the cotangent
// times the weight, and of the products of d with the normalized row.
struct Statistics {
  float mean;  // 0 for rms_norm
  float factor;
  float mean_d, mean_product;
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
    mean = static_cast<float>(Mean<false>(y, y, args.k));
    Subtract(mean, args.k, y);
  }
  return {mean, static_cast<float>(
                    1 / __builtin_sqrt(Mean<true>(y, y, args.k) + p.epsilon)),
          0, 0};
}

inline void Multiply(const float* __restrict factors, int64_t count,
                     float* __restrict x) {
  for (int64_t j = 0; j < count; ++j) x[j] *= factors[j];
}

// Computes the means of a row's gradient, from `y` of ReadCentered. `d` has
// memory for the row.
inline void ReadMeans(const QuantizeArgs& args, int64_t row, const float* y,
                      float* d, Statistics* out) {
  const Prologue& p = args.prologue;
  CopyFloats(p.cotangent, args.x_format, row * args.k, args.k, d);
  if (p.weight != nullptr) Multiply(p.weight, args.k, d);
  if (p.function == PrologueFunction::kLayerNorm) {
    out->mean_d = static_cast<float>(Mean<false>(d, d, args.k));
  }
  out->mean_product =
      static_cast<float>(Mean<true>(d, y, args.k) * out->factor);
}

// Normalizes `y`, values [column, column + count) of a row without its mean.
inline void Normalize(const Prologue& p, float factor, int64_t column,
                      int64_t count, float* __restrict y) {
  for (int64_t j = 0; j < count; ++j) y[j] *= factor;
  if (p.weight != nullptr) Multiply(p.weight + column, count, y);
  if (p.bias != nullptr) AddBias(p.bias + column, count, y);
}

// Computes `count` values of a norm's gradient from a column of a row on, and the
// gradients of the weight there.
inline void ComputeNormGradient(const QuantizeArgs& args,
                                const Statistics& s, int64_t row,
                                int64_t column, int64_t count,
                                float* __restrict y,
                                float* __restrict of_weight) {
  const Prologue& p = args.prologue;
  const int64_t i = row * args.k + column;
  float h[kQuantizeChunk];
  CopyFloats(args.x, args.x_format, i, count, h);
  CopyFloats(p.cotangent, args.x_format, i, count, y);
  for (int64_t j = 0; j < count; ++j) {
    h[j] = (h[j] - s.mean) * s.factor;
    of_weight[j] = y[j] * h[j];
  }
  if (p.weight != nullptr) Multiply(p.weight + column, count, y);
  for (int64_t j = 0; j < count; ++j) {
    y[j] = s.factor * (y[j] - h[j] * s.mean_product - s.mean_d);
  }
  if (p.residual == nullptr) return;
  CopyFloats(p.residual, args.x_format, i, count, h);
  AddBias(h, count, y);
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

// Returns the number of gates of a row.
inline int64_t GatesOf(const QuantizeArgs& args) {
  const Prologue& p = args.prologue;
  const bool is_gradient = p.gradient != PrologueGradient::kNone;
  return is_gradient && p.halves != PrologueHalves::kNone ? args.k / 2 : args.k;
}

// Gates and factors of a run, in f32.
struct Pair {
  float gate[kQuantizeChunk], up[kQuantizeChunk];
};

// Reads `count` gates and factors from a column of a row on, and adds biases.
// The factors of an activation that is not gated are 1.
inline void ReadPair(const QuantizeArgs& args, int64_t row, int64_t column,
                     int64_t count, Pair* out) {
  const Prologue& p = args.prologue;
  const auto read = [&](const void* x, int64_t i, int64_t bias, int64_t values,
                        float* to) {
    CopyFloats(x, args.x_format, i, values, to);
    if (p.bias != nullptr) AddBias(p.bias + bias, values, to);
  };
  const int64_t k = GatesOf(args);
  switch (p.halves) {
    case PrologueHalves::kNone:
      read(args.x, row * k + column, column, count, out->gate);
      if (p.IsGated()) {
        read(p.up, row * k + column, k + column, count, out->up);
      } else {
        for (int64_t j = 0; j < count; ++j) out->up[j] = 1.0f;
      }
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

// A gate g and a factor u of the activation (g * s(g)) * u, after the limits:
// s(g), g times the derivative of s, and the derivatives of both limits.
struct GatedTerms {
  float gate, up, share, change, gate_passes, up_passes;
};

// Returns the terms with s = sigmoid(z), from z and its derivative.
JAXPLUGIN_ALWAYS_INLINE GatedTerms TermsOfSigmoid(float gate, float up, float z,
                                                  float slope) {
  const float decay = Exp(z < 0 ? z : -z);
  const float inverse = 1.0f / (1.0f + decay);
  const float derivative = decay * inverse * inverse;
  // The slope may be infinite where the derivative is 0.
  const float change = derivative == 0 ? 0.0f : gate * slope * derivative;
  return {gate, up, z < 0 ? decay * inverse : inverse, change, 1.0f, 1.0f};
}

// Returns the derivative of the smaller one of x and a limit.
JAXPLUGIN_ALWAYS_INLINE float Passes(float x, float limit) {
  return x < limit ? 1.0f : x == limit ? 0.5f : 0.0f;
}

JAXPLUGIN_ALWAYS_INLINE GatedTerms TermsOfSilu(float gate, float up) {
  return TermsOfSigmoid(gate, up, gate, 1.0f);
}

JAXPLUGIN_ALWAYS_INLINE GatedTerms TermsOfGelu(float gate, float up) {
  constexpr float kFactor = 1.5957691216057308f, kCubic = 0.044715f;
  const float square = gate * gate;
  return TermsOfSigmoid(gate, up, kFactor * (gate + kCubic * (square * gate)),
                        kFactor * (1.0f + 3.0f * kCubic * square));
}

JAXPLUGIN_ALWAYS_INLINE GatedTerms TermsOfExactGelu(float gate, float up) {
  const NormalTerms terms = NormalTermsOf(gate);
  return {gate, up, terms.probability, terms.change, 1.0f, 1.0f};
}

JAXPLUGIN_ALWAYS_INLINE GatedTerms TermsOfSwigluOai(float gate, float up,
                                                    float alpha, float limit) {
  const float size = up < 0 ? -up : up;
  const float gate_passes = Passes(gate, limit), up_passes = Passes(size, limit);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  GatedTerms terms = TermsOfSigmoid(gate, up + 1.0f, alpha * gate, alpha);
  terms.gate_passes = gate_passes;
  terms.up_passes = up_passes;
  return terms;
}

// Returns the gradient with respect to the factor, or else to the gate.
template <bool kOfUp>
JAXPLUGIN_ALWAYS_INLINE float GradientOf(const GatedTerms& t, float cotangent) {
  if constexpr (kOfUp) return cotangent * (t.gate * t.share) * t.up_passes;
  return cotangent * t.up * (t.share + t.change) * t.gate_passes;
}

// Computes the gradients of a run of `count` gates or factors.
template <bool kOfUp>
inline void GradientsOf(const QuantizeArgs& args, int64_t row, int64_t column,
                        int64_t count, float* __restrict y) {
  const Prologue& p = args.prologue;
  Pair pair;
  float cotangent[kQuantizeChunk];
  ReadPair(args, row, column, count, &pair);
  CopyFloats(p.cotangent, args.x_format, row * GatesOf(args) + column, count,
             cotangent);
  // Functions that are always inlined are called, and not passed: with sanitizers
  // the compiler would not inline them.
  const auto compute = [&](const auto& terms_of) {
    for (int64_t j = 0; j < count; ++j) {
      y[j] = GradientOf<kOfUp>(terms_of(pair.gate[j], pair.up[j]), cotangent[j]);
    }
  };
  switch (p.function) {
    case PrologueFunction::kSiluAndMul:
    case PrologueFunction::kSilu:
      return compute([](float gate, float up) {
        return TermsOfSilu(gate, up);
      });
    case PrologueFunction::kGeluAndMul:
    case PrologueFunction::kGelu:
      return compute([](float gate, float up) {
        return TermsOfGelu(gate, up);
      });
    case PrologueFunction::kExactGeluAndMul:
    case PrologueFunction::kExactGelu:
      return compute([](float gate, float up) {
        return TermsOfExactGelu(gate, up);
      });
    case PrologueFunction::kRelu:
      for (int64_t j = 0; j < count; ++j) {
        y[j] = pair.gate[j] > 0 ? cotangent[j] : 0.0f;
      }
      return;
    default:
      const float alpha = p.alpha, limit = p.limit;
      return compute([=](float gate, float up) {
        return TermsOfSwigluOai(gate, up, alpha, limit);
      });
  }
}

// Computes `count` values of the gradient from a column of a row on.
inline void ComputeGradient(const QuantizeArgs& args, int64_t row,
                            int64_t column, int64_t count,
                            float* __restrict y) {
  const Prologue& p = args.prologue;
  const int64_t k = GatesOf(args);
  switch (p.halves) {
    case PrologueHalves::kNone:
      if (p.gradient == PrologueGradient::kX) {
        return GradientsOf<false>(args, row, column, count, y);
      }
      return GradientsOf<true>(args, row, column, count, y);
    case PrologueHalves::kSplit: {
      const int64_t gates = Max(0, Min(count, k - column));
      if (gates > 0) GradientsOf<false>(args, row, column, gates, y);
      if (gates < count) {
        const int64_t first = Max(0, column - k);
        GradientsOf<true>(args, row, first, count - gates, y + gates);
      }
      return;
    }
    case PrologueHalves::kInterleaved: {
      float gates[kQuantizeChunk], factors[kQuantizeChunk];
      GradientsOf<false>(args, row, column / 2, count / 2, gates);
      GradientsOf<true>(args, row, column / 2, count / 2, factors);
      for (int64_t j = 0; j < count / 2; ++j) {
        y[2 * j] = gates[j];
        y[2 * j + 1] = factors[j];
      }
    }
  }
}

// Computes `count` values of an activation, or of its gradient, from a column of
// a row on.
inline void ComputeActivation(const QuantizeArgs& args, int64_t row,
                              int64_t column, int64_t count,
                              float* __restrict y) {
  const Prologue& p = args.prologue;
  if (p.gradient != PrologueGradient::kNone) {
    return ComputeGradient(args, row, column, count, y);
  }
  Pair pair;
  ReadPair(args, row, column, count, &pair);
  switch (p.function) {
    case PrologueFunction::kSiluAndMul:
    case PrologueFunction::kSilu:
      for (int64_t j = 0; j < count; ++j) {
        y[j] = Silu(pair.gate[j]) * pair.up[j];
      }
      break;
    case PrologueFunction::kGeluAndMul:
    case PrologueFunction::kGelu:
      for (int64_t j = 0; j < count; ++j) {
        y[j] = Gelu(pair.gate[j]) * pair.up[j];
      }
      break;
    case PrologueFunction::kExactGeluAndMul:
    case PrologueFunction::kExactGelu:
      for (int64_t j = 0; j < count; ++j) {
        y[j] = ExactGelu(pair.gate[j]) * pair.up[j];
      }
      break;
    case PrologueFunction::kRelu:  // NaN passes, as in jax.nn.relu
      for (int64_t j = 0; j < count; ++j) {
        y[j] = pair.gate[j] <= 0 ? 0.0f : pair.gate[j];
      }
      break;
    default:
      for (int64_t j = 0; j < count; ++j) {
        y[j] = SwigluOai(pair.gate[j], pair.up[j], p.alpha, p.limit);
      }
  }
}

// Computes and quantizes values [begin, end) of an activation.
inline void QuantizeActivation(const QuantizeArgs& args, const Codec& codec,
                               int64_t begin, int64_t end) {
  int64_t count;
  for (int64_t i = begin; i < end; i += count) {
    const int64_t column = i % args.k;
    count = Min(kQuantizeChunk, Min(args.k - column, end - i));
    float y[kQuantizeChunk];
    ComputeActivation(args, i / args.k, column, count, y);
    Store(args, codec, i, count, y);
  }
}
