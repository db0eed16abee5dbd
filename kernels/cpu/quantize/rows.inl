// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Quantizes all rows along the last dimension, or a prologue's result for them.

constexpr int64_t kQuantizeChunk = 1024;      // values converted at a time
constexpr int64_t kQuantizeTask = 64 * 1024;  // values of a task

// Returns `count` values from `begin` on as float32. Values of other types are
// converted to `buffer`.
JAXPLUGIN_ALWAYS_INLINE const float* ReadFloats(const void* x, Format format,
                                                int64_t begin, int64_t count,
                                                float* buffer) {
  if (format == Format::kF32) return static_cast<const float*>(x) + begin;
  const uint16_t* halves = static_cast<const uint16_t*>(x) + begin;
  if (format == Format::kBF16) {
    for (int64_t i = 0; i < count; ++i) buffer[i] = FromBF16(halves[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) buffer[i] = FromF16(halves[i]);
  }
  return buffer;
}

// ReadFloats to memory of the caller.
JAXPLUGIN_ALWAYS_INLINE void CopyFloats(const void* x, Format format,
                                        int64_t begin, int64_t count,
                                        float* out) {
  const float* floats = ReadFloats(x, format, begin, count, out);
  if (floats != out) __builtin_memcpy(out, floats, count * sizeof(float));
}

// Copies `y`, values [i, i + count) of x or of the prologue's result, and finds
// their amax, if the call asks for it.
inline void Report(const Prologue& prologue, int64_t i, int64_t count,
                   const float* y) {
  if (prologue.y != nullptr) {
    __builtin_memcpy(prologue.y + i, y, count * sizeof(float));
  }
  if (prologue.amax != nullptr) RaiseAmax(FiniteAmax(y, count), prologue.amax);
}

// Quantizes `y`, values [i, i + count) of x or of the prologue's result.
inline void Store(const QuantizeArgs& args, const Codec& codec, int64_t i,
                  int64_t count, const float* y) {
  Report(args.prologue, i, count, y);
  const QuantizedFacts facts = FactsOf(args.format);
  QuantizeRun(codec, y, count, args.values + BytesOf(facts.values, i),
              args.scale + i / facts.block);
}

#include "quantize/prologue.inl"
#include "quantize/strips.inl"

// Computes amax / (448 * 6), with amax over the blocks without NaN or Inf.
bool ComputeGlobalScale(const QuantizeArgs& args, const Parallel& parallel,
                        float* result) {
  const int64_t total = args.rows * args.k;
  const int64_t tasks = CeilDiv(total, kQuantizeTask);
  Scratch scratch(static_cast<size_t>(Max(tasks, 1)) * 4);
  uint32_t* maxima = reinterpret_cast<uint32_t*>(scratch.get());
  if (maxima == nullptr) return false;
  const bool ok = ParallelFor(parallel, tasks, [=, &args](int64_t t, int) {
    uint32_t amax = 0;
    const int64_t begin = t * kQuantizeTask;
    const int64_t end = Min(total, begin + kQuantizeTask);
    for (int64_t i = begin; i < end; i += kQuantizeChunk) {
      float buffer[kQuantizeChunk];
      const int64_t count = Min(kQuantizeChunk, end - i);
      const uint32_t chunk = FiniteMax(
          ReadFloats(args.x, args.x_format, i, count, buffer), count);
      amax = chunk > amax ? chunk : amax;
    }
    maxima[t] = amax;
  });
  uint32_t amax = 0;
  for (int64_t t = 0; t < tasks; ++t) {
    amax = maxima[t] > amax ? maxima[t] : amax;
  }
  *result = GlobalScaleOf(amax, 448.0f * 6);
  return ok;
}

bool Quantize(const QuantizeArgs& args, const Parallel& parallel) {
  if (args.sides != nullptr) return QuantizeStrips(args, parallel);
  float global = args.given_global ? *args.given_global : 1.0f;
  if (args.format == QuantizedFormat::kNvfp4 && args.compute_global &&
      !ComputeGlobalScale(args, parallel, &global)) {
    return false;
  }
  *args.global_scale = global;
  const Codec codec = {args.format, args.round_up, global};
  if (args.prologue.IsNorm()) return QuantizeNorms(args, codec, parallel);
  const bool is_activation = args.prologue.function != PrologueFunction::kNone;
  const int64_t total = args.rows * args.k;
  return ParallelForInParts(
      parallel, CeilDiv(total, kQuantizeTask), [=, &args](int64_t t, int) {
        const int64_t begin = t * kQuantizeTask;
        const int64_t end = Min(total, begin + kQuantizeTask);
        if (is_activation) return QuantizeActivation(args, codec, begin, end);
        for (int64_t i = begin; i < end; i += kQuantizeChunk) {
          float buffer[kQuantizeChunk];
          const int64_t count = Min(kQuantizeChunk, end - i);
          Store(args, codec, i, count,
                ReadFloats(args.x, args.x_format, i, count, buffer));
        }
      });
}
