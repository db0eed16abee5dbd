// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The groups of a ragged dot, as tasks. A group of much work is computed by all
// threads together, as a dot is, one group after the other. All others are cut
// into parts of about equal work, a group's rows and some of its columns, each
// of which a thread computes alone: small experts would be a fork and a join
// each, which takes as long as one of them (see README.md).

#include "dot/ragged.h"

#include <stdint.h>

#include <atomic>
#include <cstring>
#include <new>
#include <vector>

namespace jaxplugin {
namespace {
#include "simd/codec.inl"

// Products of a group for each thread from which all threads share it: 2 to 8
// ms. With 2^28, 32 groups of 64 rows of MXFP4 pairs, each (5760, 2880), took
// 1.08 times as long as in parts (two Zen 4 cores, 2026-11).
constexpr int64_t kSharedProducts = int64_t{1} << 30;
// The least work of a part, in products: 20 us of a thread.
constexpr int64_t kPartProducts = int64_t{1} << 22;
constexpr int64_t kPartsOfThread = 8;
// Up to so many rows the time is that of reading and decoding the weight.
constexpr int64_t kFewRows = 4;
// Columns of a part: a multiple of all engines' strips. With the minimum, the
// rows are the panel, as in the dot of all columns (ChooseSides).
constexpr int64_t kPartColumns = 192;
constexpr int64_t kPartColumnsMin = 2 * kPartColumns;
// Floats in front of a gate: they are to stay in the caches.
constexpr int64_t kGatedFloatsMax = int64_t{1} << 19;

// Rows of a group, and columns of the result.
struct Part {
  int64_t group;
  int64_t row, rows;
  int64_t column, columns;
};

int64_t Columns(const RaggedArgs& args) {
  return args.is_gated ? args.dot.n / 2 : args.dot.n;
}

int64_t SizeOf(Format format) { return format == Format::kF32 ? 4 : 2; }

// Rows [start, start + count) of an operand.
Operand Rows(Operand x, int64_t start, int64_t count) {
  x.values += start * x.row_bytes;
  if (x.scale != nullptr) x.scale += start * x.scale_cols;
  x.rows = count;
  return x;
}

// The dot of a part's rows and `columns` of its group's n, to `out`.
DotArgs PartOf(const RaggedArgs& args, const Part& part, int64_t column,
               int64_t columns, void* out) {
  DotArgs dot = args.dot;
  dot.lhs = Rows(dot.lhs, part.row, part.rows);
  dot.rhs = Rows(dot.rhs, part.group * args.dot.n + column, columns);
  dot.m = part.rows;
  dot.n = columns;
  if (args.factors != nullptr) dot.global_scale = args.factors + part.group;
  if (args.powers != nullptr) dot.global_power = args.powers + part.group;
  if (args.bias != nullptr) {
    dot.bias = args.bias + part.group * args.dot.n + column;
  }
  dot.out = out;
  return dot;
}

uint8_t* OutOf(const RaggedArgs& args, const Part& part) {
  return static_cast<uint8_t*>(args.dot.out) +
         (part.row * Columns(args) + part.column) *
             SizeOf(args.dot.out_format);
}

bool PlainPart(const Kernels& kernels, const RaggedArgs& args, const Part& part,
               const Parallel& parallel) {
  uint8_t* out = OutOf(args, part);
  if (part.columns == args.dot.n) {
    return Dot(kernels, PartOf(args, part, 0, part.columns, out), parallel);
  }
  const int64_t size = SizeOf(args.dot.out_format);
  const int64_t bytes = part.columns * size;
  Scratch scratch(part.rows * bytes);
  const uint8_t* rows = scratch.get();
  if (rows == nullptr ||
      !Dot(kernels, PartOf(args, part, part.column, part.columns,
                           scratch.get()),
           parallel)) {
    return false;
  }
  for (int64_t r = 0; r < part.rows; ++r) {
    std::memcpy(out + r * args.dot.n * size, rows + r * bytes, bytes);
  }
  return true;
}

bool GatedPart(const Kernels& kernels, const RaggedArgs& args, const Part& part,
               const Parallel& parallel) {
  const int64_t n = 2 * part.columns;
  Scratch scratch(part.rows * n * sizeof(float));
  float* sums = reinterpret_cast<float*>(scratch.get());
  if (sums == nullptr) return false;
  GateArgs gate{};
  gate.gate = args.gate;
  gate.gates = sums;
  gate.values = sums + 1;
  gate.row_floats = n;
  gate.rows = part.rows;
  gate.columns = part.columns;
  gate.out = OutOf(args, part);
  gate.out_columns = Columns(args);
  gate.out_format = args.dot.out_format;
  const auto dot = [&](int64_t column, int64_t columns, float* out) {
    DotArgs sums_args = PartOf(args, part, column, columns, out);
    sums_args.out_format = Format::kF32;
    return Dot(kernels, sums_args, parallel);
  };
  bool ok = true;
  if (args.gate == Gate::kSwigluOai || part.columns == Columns(args)) {
    ok = dot(2 * part.column, n, sums);
    if (args.gate == Gate::kSwiglu) gate.values = sums + part.columns;
  } else {
    gate.row_floats = part.columns;
    gate.values = sums + part.rows * part.columns;
    ok = dot(part.column, part.columns, sums) &&
         dot(Columns(args) + part.column, part.columns,
             sums + part.rows * part.columns);
  }
  return ok && kernels.gate(gate, parallel);
}

bool RunPart(const Kernels& kernels, const RaggedArgs& args, const Part& part,
             const Parallel& parallel) {
  return args.is_gated ? GatedPart(kernels, args, part, parallel)
                       : PlainPart(kernels, args, part, parallel);
}

// Cuts a group into `count` parts, or fewer.
void Cut(const RaggedArgs& args, Part group, int64_t count,
         std::vector<Part>* parts) {
  const int64_t all = Columns(args);
  int64_t columns = RoundUp(CeilDiv(all, Max(count, 1)), kPartColumns);
  columns = Max(columns, kPartColumnsMin);
  // What would be too short for a part joins the one before it.
  int64_t column = 0;
  while (all - column >= columns + kPartColumnsMin) {
    group.column = column;
    group.columns = columns;
    parts->push_back(group);
    column += columns;
  }
  group.column = column;
  group.columns = all - column;
  parts->push_back(group);
}

// Groups that have rows; returns the row after the last of them.
int64_t GroupsOf(const RaggedArgs& args, std::vector<Part>* groups) {
  int64_t row = 0;
  for (int64_t group = 0; group < args.groups; ++group) {
    const int64_t rows = Min(Max(args.sizes[group], 0), args.dot.m - row);
    if (rows == 0) continue;
    groups->push_back({group, row, rows, 0, Columns(args)});
    row += rows;
  }
  return row;
}

// The groups that all threads share, and the parts of the others.
void Plan(const RaggedArgs& args, const std::vector<Part>& groups, int threads,
          std::vector<Part>* shared, std::vector<Part>* parts) {
  const int64_t weight = args.dot.n * args.dot.k;
  const auto is_shared = [&](const Part& group) {
    return group.rows * weight >= threads * kSharedProducts;
  };
  int64_t all = 0;
  for (const Part& group : groups) {
    if (!is_shared(group)) all += Max(group.rows, kFewRows) * weight;
  }
  const int64_t least =
      Max(all / (kPartsOfThread * threads), kPartProducts);
  for (const Part& group : groups) {
    if (is_shared(group)) {
      const int64_t floats = group.rows * args.dot.n;
      Cut(args, group, args.is_gated ? CeilDiv(floats, kGatedFloatsMax) : 1,
          shared);
    } else {
      Cut(args, group, Max(group.rows, kFewRows) * weight / least, parts);
    }
  }
}

bool Run(const Kernels& kernels, const RaggedArgs& args,
         const Parallel& parallel) {
  std::vector<Part> groups, shared, parts;
  const int64_t rows = GroupsOf(args, &groups);
  Plan(args, groups, parallel.threads, &shared, &parts);
  const int64_t row_bytes = Columns(args) * SizeOf(args.dot.out_format);
  std::memset(static_cast<uint8_t*>(args.dot.out) + rows * row_bytes, 0,
              (args.dot.m - rows) * row_bytes);
  for (const Part& part : shared) {
    if (!RunPart(kernels, args, part, parallel)) return false;
  }
  if (parts.size() == 1) return RunPart(kernels, args, parts[0], parallel);
  const Parallel serial{1, nullptr, nullptr};
  std::atomic<bool> has_failed{false};
  const bool ok = ParallelFor(
      parallel, static_cast<int64_t>(parts.size()), [&](int64_t i, int) {
        if (!RunPart(kernels, args, parts[i], serial)) has_failed = true;
      });
  return ok && !has_failed;
}

}  // namespace

bool RaggedDot(const Kernels& kernels, const RaggedArgs& args,
               const Parallel& parallel) {
  try {
    return Run(kernels, args, parallel);
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace jaxplugin
