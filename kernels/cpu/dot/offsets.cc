// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot with weights that have zero points or minima. For weights with f16
// scales, AVX2 kernels of few rows and AVX-512 BF16 kernels of few rows of bf16
// add the offsets themselves. Other few rows are multiplied with some columns in
// each task, which then adds their offsets. So the scales are read from memory
// once.

#include <stdint.h>

#include <atomic>

#include "dot/rule.h"
#include "kernels.h"

namespace jaxplugin {
namespace {
#include "simd/codec.inl"

// A thread has about this many tasks, of at least this many columns. A task has
// more columns than few rows, so that lhs is its panel side, as in the dot of
// all columns (PanelIsLhs).
constexpr int64_t kTasksOfThread = 4;
constexpr int64_t kTaskColumns = 64;

// Returns plain floats of an operand, in `memory` unless it has them already.
bool Floats(const Kernels& kernels, const Operand& x, float* memory,
            const Parallel& parallel, Operand* out) {
  *out = x;
  if (IsPlain(x.format)) return true;
  *out = Operand{};
  out->format = Format::kF32;
  out->values = reinterpret_cast<const uint8_t*>(memory);
  out->rows = x.rows;
  out->k = x.k;
  return kernels.dequantize({x, nullptr, memory, Format::kF32}, parallel);
}

}  // namespace

bool DotWithOffsets(const Kernels& kernels, const DotArgs& args,
                    const Parallel& all) {
  const Operand& weights = args.rhs;
  const int64_t m = args.m, n = args.n;
  const bool is_few = m <= kFewRowsServed;
  Parallel parallel = all;
  parallel.threads = ThreadsOf(args.config, 1, m, n, args.k, all.threads);
  const int64_t columns =
      RoundUp(CeilDiv(n, kTasksOfThread * parallel.threads), kTaskColumns);
  // The last task also has the columns that are too few for another task.
  const int64_t tasks = Max(1, n / columns);

  const int64_t sum_bytes =
      RoundUp(m * RoundUp(weights.scale_cols, kTermsMultiple) * 4, 64);
  const int64_t float_bytes = IsPlain(args.lhs.format) ? 0 : m * args.k * 4;
  // With one row, the sums of a task follow each other in the result.
  const int64_t slot_bytes = is_few && m > 1 ? RoundUp(2 * m * columns * 4, 64) : 0;
  Scratch scratch(sum_bytes + float_bytes + slot_bytes * parallel.threads);
  if (scratch.get() == nullptr) return false;
  float* const sums = reinterpret_cast<float*>(scratch.get());
  uint8_t* const slots = scratch.get() + sum_bytes + float_bytes;
  Operand floats;
  if (!Floats(kernels, args.lhs,
              reinterpret_cast<float*>(scratch.get() + sum_bytes), parallel,
              &floats)) {
    return false;
  }
  kernels.sum_blocks(floats, weights, sums);

  if (is_few && kernels.dot_of_few_rows != nullptr) {
    uint32_t gave_up = 0;
    bool is_done = false;
    DotArgs whole = args;
    whole.block_sums = sums;
    whole.gave_up = &gave_up;
    if (!kernels.dot_of_few_rows(whole, parallel, &is_done)) return false;
    if (is_done && gave_up == 0) return true;
  }

  DotArgs bare = args;
  bare.rhs.offset = nullptr;
  if (!is_few && !Dot(kernels, bare, parallel)) return false;
  const Parallel serial{1, nullptr, nullptr};
  std::atomic<bool> has_failed{false};
  const bool ok = ParallelFor(parallel, tasks, [&](int64_t task, int slot) {
    const int64_t j0 = task * columns;
    const int64_t count = (task + 1 == tasks ? n : j0 + columns) - j0;
    float* const out = static_cast<float*>(args.out) + j0;
    OffsetArgs offsets{&weights, j0, count, sums, m, out, n, out, n};
    if (is_few) {
      DotArgs part = bare;
      part.rhs = RowsOf(bare.rhs, j0, count);
      part.n = count;
      if (m > 1) {
        part.out = slots + slot * slot_bytes;
        offsets.result = static_cast<const float*>(part.out);
        offsets.result_stride = count;
      } else {
        part.out = out;
      }
      if (!Dot(kernels, part, serial)) has_failed = true;
    }
    if (!kernels.add_offsets(offsets)) has_failed = true;
  });
  return ok && !has_failed;
}

}  // namespace jaxplugin
