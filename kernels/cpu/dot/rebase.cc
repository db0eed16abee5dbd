// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Dots whose scales are far from 1, for example of gradients of 1e-12. A row is
// rebased: its scales are divided by a power of two, so that the row is safe
// (RowIsSafe), and its sums are multiplied by it. Only the scale bytes are
// copied. A kernel that finds an unsafe row stops, and runs again with rebased
// rows.

#include "dot/rule.h"
#include "kernels.h"

namespace jaxplugin {
namespace {
#include "simd/codec.inl"

// Copies the scales of a row, and rebases them if the row is then safe. Returns
// the number that was subtracted from their exponents, or 0.
int16_t RebaseRow(const Operand& x, int64_t row, uint8_t* out) {
  const uint8_t* scale = x.scale + row * x.scale_cols;
  __builtin_memcpy(out, scale, x.scale_cols);
  int low = 255, high = -1;  // range of scales, without NaN and zero blocks
  for (int64_t c = 0; c < x.scale_cols; ++c) {
    // A scale inside the range cannot extend it, so its values are not read.
    const int byte = scale[c];
    if (byte == 255 || (byte >= low && byte <= high)) continue;
    if (BlockIsZero(x, row, c)) continue;
    low = byte < low ? byte : low;
    high = byte > high ? byte : high;
  }
  if (high < 0 || high - low > 2 * kSafeExponent) return 0;
  const int shift = (low + high) / 2 - 127;
  for (int64_t c = 0; c < x.scale_cols; ++c) {
    if (scale[c] == 255) continue;
    const int byte = scale[c] - shift;
    // Blocks with scales outside of the range are zero, so any scale is right.
    const bool is_inside = scale[c] >= low && scale[c] <= high;
    out[c] = static_cast<uint8_t>(is_inside ? byte : 127);
  }
  return static_cast<int16_t>(shift);
}

int64_t ScaleBytes(const Operand& x) {
  return x.scale_kind == ScaleKind::kE8M0 ? RoundUp(x.rows * x.scale_cols, 64)
                                          : 0;
}
int64_t ShiftBytes(const Operand& x) {
  return x.scale_kind == ScaleKind::kE8M0 ? RoundUp(x.rows * 2, 64) : 0;
}

// Writes the rebased scales and shifts to `memory`, which has ScaleBytes +
// ShiftBytes, and makes `x` and `shift` point there.
bool Rebase(Operand* x, const int16_t** shift, uint8_t* memory,
            const Parallel& parallel) {
  if (x->scale_kind != ScaleKind::kE8M0) return true;
  const Operand given = *x;
  int16_t* shifts = reinterpret_cast<int16_t*>(memory + ScaleBytes(given));
  const int64_t group = Max(1, (int64_t{1} << 14) / Max(given.scale_cols, 1));
  x->scale = memory;
  *shift = shifts;
  return ParallelFor(
      parallel, CeilDiv(given.rows, group), [&](int64_t index, int) {
        const int64_t end = Min(given.rows, (index + 1) * group);
        for (int64_t r = index * group; r < end; ++r) {
          shifts[r] = RebaseRow(given, r, memory + r * given.scale_cols);
        }
      });
}

// Returns the number of threads for a dot. A small dot uses one thread, because
// it ends before another thread wakes up.
int ThreadsOf(const DotArgs& args, int all) {
  const int64_t given = args.config.threads;
  if (given > 0) return static_cast<int>(Min(given, all));
  return IsSerial(args.batch, args.m, args.n, args.k) ? 1 : all;
}

}  // namespace

bool Dot(const Kernels& kernels, const DotArgs& args, const Parallel& all) {
  Parallel parallel = all;
  parallel.threads = ThreadsOf(args, all.threads);
  uint32_t gave_up = 0;
  DotArgs first = args;
  first.gave_up = &gave_up;
  if (!kernels.dot(first, parallel)) return false;
  if (gave_up == 0) return true;
  DotArgs rebased = args;
  const int64_t lhs_bytes = ScaleBytes(args.lhs) + ShiftBytes(args.lhs);
  const int64_t rhs_bytes = ScaleBytes(args.rhs) + ShiftBytes(args.rhs);
  Scratch scratch(lhs_bytes + rhs_bytes);
  uint8_t* memory = scratch.get();
  return memory != nullptr &&
         Rebase(&rebased.lhs, &rebased.lhs_shift, memory, parallel) &&
         Rebase(&rebased.rhs, &rebased.rhs_shift, memory + lhs_bytes,
                parallel) &&
         kernels.dot(rebased, parallel);
}

}  // namespace jaxplugin
