// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Prepares the operands of a dot: converts rows of floats if asked, and rebases
// scales far from 1, for example of gradients of 1e-12.
//
// Rebasing divides the scales of a row by a power of two, so that the row is
// safe (RowIsSafe), and multiplies its sums by it. Only the scales are copied.
// A kernel that finds an unsafe row stops, and runs again with rebased rows.

#include <math.h>

#include "dot/rule.h"
#include "kernels.h"

namespace jaxplugin {
namespace {
#include "simd/codec.inl"

// Whether scales of this kind may be unsafe and can be rebased. The others have
// exponents in the safe range.
bool CanRebase(ScaleKind kind) {
  return kind == ScaleKind::kE8M0 || kind == ScaleKind::kF32 ||
         kind == ScaleKind::kBF16;
}

// Returns the exponent field of a scale in float32, 255 for NaN and Inf, and -1
// for zero. It is the code of an E8M0 scale.
int ExponentField(ScaleKind kind, const uint8_t* scale) {
  if (kind == ScaleKind::kE8M0) return *scale;
  const uint32_t magnitude = AsBits(DecodeScale(kind, scale)) & kMagnitude;
  return magnitude == 0 ? -1 : static_cast<int>(magnitude >> 23);
}

// Writes scale * 2^exponent, which is in the safe range.
void StoreTimesPower(ScaleKind kind, const uint8_t* scale, int exponent,
                     uint8_t* out) {
  if (kind == ScaleKind::kE8M0) {
    *out = static_cast<uint8_t>(*scale + exponent);
    return;
  }
  const uint32_t bits = AsBits(ldexpf(DecodeScale(kind, scale), exponent));
  // The low half of a bf16's bits in float32 is 0.
  const uint64_t size = static_cast<uint64_t>(ScaleSize(kind));
  const uint32_t code = kind == ScaleKind::kBF16 ? bits >> 16 : bits;
  __builtin_memcpy(out, &code, size);
}

// RebaseRow for E8M0 scales. Returns false unless the row is safe with the
// scales of its zero blocks too. The compiler vectorizes these loops (GCC 12).
// A loop over one scale at a time takes longer than a dot of one row.
bool RebaseCodes(const uint8_t* scale, int64_t count, uint8_t* out,
                 int16_t* subtracted) {
  uint8_t low = 255, above = 0;  // above: 1 more than the highest, 0 for NaN
  for (int64_t c = 0; c < count; ++c) {
    const uint8_t code = scale[c];
    const uint8_t next = static_cast<uint8_t>(code + 1);
    low = code < low ? code : low;
    above = next > above ? next : above;
  }
  const int high = above - 1;
  if (low > high || high - low > 2 * kSafeExponent) return false;
  const int shift = (low + high) / 2 - 127;
  const auto byte = static_cast<uint8_t>(shift);
  for (int64_t c = 0; c < count; ++c) {
    const uint8_t code = static_cast<uint8_t>(scale[c] - byte);
    out[c] = scale[c] == 255 ? 255 : code;
  }
  *subtracted = static_cast<int16_t>(shift);
  return true;
}

// Copies the scales of a row, and rebases them if the row is then safe. Returns
// the number that was subtracted from their exponents, or 0.
int16_t RebaseRow(const Operand& x, int64_t row, uint8_t* out) {
  const ScaleKind kind = x.scale_kind;
  const int64_t size = ScaleSize(kind);
  int16_t subtracted = 0;
  if (kind == ScaleKind::kE8M0 &&
      RebaseCodes(ScaleAt(x, row, 0), x.scale_cols, out, &subtracted)) {
    return subtracted;
  }
  __builtin_memcpy(out, ScaleAt(x, row, 0), x.scale_cols * size);
  int low = 255, high = -1;  // range of exponents, without NaN and zero blocks
  for (int64_t c = 0; c < x.scale_cols; ++c) {
    // A scale inside the range cannot extend it, so its values are not read.
    const int field = ExponentField(kind, ScaleAt(x, row, c));
    if (field == 255 || field < 0 || (field >= low && field <= high)) continue;
    if (BlockIsZero(x, row, c)) continue;
    low = field < low ? field : low;
    high = field > high ? field : high;
  }
  if (high < 0 || high - low > 2 * kSafeExponent) return 0;
  const int shift = (low + high) / 2 - 127;
  for (int64_t c = 0; c < x.scale_cols; ++c, out += size) {
    const uint8_t* scale = ScaleAt(x, row, c);
    const int field = ExponentField(kind, scale);
    if (field == 255 || field < 0) continue;
    if (field >= low && field <= high) {
      StoreTimesPower(kind, scale, -shift, out);
    } else {  // the block is zero, so any scale is right
      __builtin_memset(out, 0, size);
      if (kind == ScaleKind::kE8M0) *out = 127;
    }
  }
  return static_cast<int16_t>(shift);
}

// Returns the bytes for the rebased scales, and for the shifts of rows.
int64_t ScaleMemory(const Operand& x) {
  return CanRebase(x.scale_kind)
             ? RoundUp(x.rows * x.scale_cols * ScaleSize(x.scale_kind), 64)
             : 0;
}
int64_t ShiftMemory(const Operand& x) {
  return CanRebase(x.scale_kind) ? RoundUp(x.rows * 2, 64) : 0;
}

// Writes the rebased scales and shifts to `memory`, which has ScaleMemory
// + ShiftMemory, and makes `x` and `shift` point there.
bool Rebase(Operand* x, const int16_t** shift, uint8_t* memory,
            const Parallel& parallel) {
  if (!CanRebase(x->scale_kind)) return true;
  const Operand given = *x;
  int16_t* shifts = reinterpret_cast<int16_t*>(memory + ScaleMemory(given));
  const int64_t scale_bytes = given.scale_cols * ScaleSize(given.scale_kind);
  const int64_t group = Max(1, (int64_t{1} << 14) / Max(given.scale_cols, 1));
  x->scale = memory;
  x->scale_start = 0;
  x->scale_shift = 0;
  *shift = shifts;
  return ParallelFor(
      parallel, CeilDiv(given.rows, group), [&](int64_t index, int) {
        const int64_t end = Min(given.rows, (index + 1) * group);
        for (int64_t r = index * group; r < end; ++r) {
          shifts[r] = RebaseRow(given, r, memory + r * scale_bytes);
        }
      });
}

}  // namespace

RowsForm RowsFormOf(const Kernels& kernels, const DotArgs& args) {
  if (!args.quantize_rows) return RowsForm::kGiven;
  return RowsFormOf(
      LevelOf(kernels),
      {ShapeOf(args.lhs), ShapeOf(args.rhs), args.m, args.n, args.k},
      args.config.engine);
}

int64_t ConvertedRowsBytes(const DotArgs& args, RowsForm form) {
  const Operand& x = IsPlain(args.lhs.format) ? args.lhs : args.rhs;
  if (form == RowsForm::kBF16) return 2 * x.rows * x.k;
  return RoundUp(x.rows * x.k, 64) +
         x.rows * CeilDiv(x.k, kQuantizedRows.block) *
             static_cast<int64_t>(sizeof(float));
}

bool ConvertRows(const Kernels& kernels, RowsForm form, uint8_t* memory,
                 const Parallel& parallel, DotArgs* args) {
  if (memory == nullptr) return false;
  Operand& x = IsPlain(args->lhs.format) ? args->lhs : args->rhs;
  const Operand floats = x;
  ConvertedRows converted{form, memory, nullptr};
  x.values = memory;
  if (form == RowsForm::kBF16) {
    x.format = Format::kBF16;
    x.row_bytes = 2 * x.k;
  } else {
    x.format = kQuantizedRows.format;
    x.scale_kind = kQuantizedRows.scale;
    x.block = kQuantizedRows.block;
    x.scale_cols = CeilDiv(x.k, x.block);
    x.row_bytes = x.k;
    uint8_t* scale = memory + RoundUp(x.rows * x.k, 64);
    x.scale = scale;
    converted.scale = reinterpret_cast<float*>(scale);
  }
  return kernels.convert_rows(floats, converted, parallel);
}

bool Dot(const Kernels& kernels, const DotArgs& args, const Parallel& all) {
  const RowsForm form = RowsFormOf(kernels, args);
  if (form != RowsForm::kGiven) {
    Scratch scratch(ConvertedRowsBytes(args, form));
    DotArgs converted = args;
    return ConvertRows(kernels, form, scratch.get(), all, &converted) &&
           Dot(kernels, converted, all);
  }
  if (args.rhs.offset != nullptr) return DotWithOffsets(kernels, args, all);
  Parallel parallel = all;
  parallel.threads = ThreadsOf(args.config, args.batch, args.m, args.n, args.k,
                               all.threads);
  uint32_t gave_up = 0, amax = 0;
  DotArgs first = args;
  first.gave_up = &gave_up;
  QuantizedResult quantized{};
  if (args.quantized != nullptr) {
    // The second run may have another engine, whose sums differ in last bits.
    // So amax is only raised by the run that computes the result.
    quantized = *args.quantized;
    if (quantized.amax != nullptr) quantized.amax = &amax;
    first.quantized = &quantized;
  }
  if (!kernels.dot(first, parallel)) return false;
  if (gave_up != 0) {
    DotArgs rebased = first;
    rebased.gave_up = nullptr;
    amax = 0;
    const int64_t lhs_bytes = ScaleMemory(args.lhs) + ShiftMemory(args.lhs);
    const int64_t rhs_bytes = ScaleMemory(args.rhs) + ShiftMemory(args.rhs);
    Scratch scratch(lhs_bytes + rhs_bytes);
    uint8_t* memory = scratch.get();
    if (memory == nullptr ||
        !Rebase(&rebased.lhs, &rebased.lhs_shift, memory, parallel) ||
        !Rebase(&rebased.rhs, &rebased.rhs_shift, memory + lhs_bytes,
                parallel) ||
        !kernels.dot(rebased, parallel)) {
      return false;
    }
  }
  if (quantized.amax != nullptr) RaiseAmax(amax, args.quantized->amax);
  return true;
}

}  // namespace jaxplugin
