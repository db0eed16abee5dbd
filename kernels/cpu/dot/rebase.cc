// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Dots whose scales are far from 1. A row is brought to where the fast kernels
// are exact (RowIsSafe) by a power of two, which its sums get back: gradients
// of 1e-12 and smaller cost what others cost. Only the scale bytes are copied,
// and only where a kernel has come across a row that is not safe: it gives up
// then, and runs again.

#include "dot/rule.h"
#include "kernels.h"

namespace jaxplugin {
namespace {
#include "simd/codec.inl"

// Copies the scales of a row, rebased where all of its blocks then are safe,
// and returns what was taken off their exponents.
int16_t RebaseRow(const Operand& x, int64_t row, uint8_t* out) {
  const uint8_t* scale = x.scale + row * x.scale_cols;
  __builtin_memcpy(out, scale, x.scale_cols);
  int low = 255, high = -1;  // of blocks that count: neither NaN nor zeros
  for (int64_t c = 0; c < x.scale_cols; ++c) {
    // Those in between change nothing: their values need not be looked at.
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
    // Outside are zeros alone: any scale will do.
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

// Puts rebased scales to `memory`, of ScaleBytes + ShiftBytes.
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

// How many threads share a dot: a small one is done before another thread has
// woken up.
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
