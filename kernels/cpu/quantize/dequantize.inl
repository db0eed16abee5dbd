// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Dequantizes: (value * scale) * global scale. Each product is rounded to
// float32, and the last one to the result's type. Compile without contraction
// of a * b + c (-ffp-contract=off).

constexpr int64_t kDequantizeChunk = 1024;      // values converted at a time
constexpr int64_t kDequantizeTask = 64 * 1024;  // values of a task

#if defined(JAXPLUGIN_AVX2_QUANTIZE)
#include "simd/unpack_avx2.inl"
#include "quantize/dequantize_avx2.inl"
#else

// Returns the number of values that it dequantized. Without AVX2 it is 0, so
// that DequantizeByLoops converts all values.
JAXPLUGIN_ALWAYS_INLINE int64_t DequantizeGroups(const DequantizeArgs&, int64_t,
                                                 int64_t, int64_t) {
  return 0;
}

#endif  // JAXPLUGIN_AVX2_QUANTIZE

// Dequantizes values [k0, k0 + count) of a row in portable loops.
void DequantizeByLoops(const DequantizeArgs& args, int64_t row, int64_t k0,
                       int64_t count) {
  float buffer[kDequantizeChunk];
  DecodeValues(args.x, RowValues(args.x, row), k0, count, buffer);
  ApplyScale(args.x, row, k0, count, buffer);
  if (args.global_scale != nullptr) {
    const float global = *args.global_scale;
    for (int64_t i = 0; i < count; ++i) buffer[i] *= global;
  }
  StoreFloats(buffer, count, args.out_format, args.out, row * args.x.k + k0);
}

// Returns the same array as one row, if no row ends within a block.
DequantizeArgs AsOneRow(const DequantizeArgs& args) {
  DequantizeArgs flat = args;
  Operand& x = flat.x;
  const bool has_whole_blocks =
      x.scale_kind == ScaleKind::kNone || x.k % x.block == 0;
  if (!has_whole_blocks || x.rows <= 1) return flat;
  x.k *= x.rows;
  x.row_bytes *= x.rows;
  x.scale_cols *= x.rows;
  x.rows = 1;
  return flat;
}

bool Dequantize(const DequantizeArgs& given, const Parallel& parallel) {
  const DequantizeArgs args = AsOneRow(given);
  const int64_t k = args.x.k;
  const int64_t chunks = CeilDiv(k, kDequantizeChunk);
  const int64_t total = args.x.rows * chunks;
  constexpr int64_t kGroup = kDequantizeTask / kDequantizeChunk;
  return ParallelForInParts(
      parallel, CeilDiv(total, kGroup), [=, &args](int64_t t, int) {
        const int64_t end = Min(total, (t + 1) * kGroup);
        for (int64_t c = t * kGroup; c < end; ++c) {
          const int64_t row = c / chunks;
          const int64_t k0 = c % chunks * kDequantizeChunk;
          const int64_t count = Min(kDequantizeChunk, k - k0);
          const int64_t done = DequantizeGroups(args, row, k0, count);
          if (done < count) {
            DequantizeByLoops(args, row, k0 + done, count - done);
          }
        }
      });
}
