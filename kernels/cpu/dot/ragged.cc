// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Cuts the groups of a ragged dot into tasks. All threads together compute a
// group with much work, one such group after the other. The other groups are
// cut into parts of about equal work. A part has all rows and some columns of a
// group, and one thread computes it. If all threads shared each small expert,
// starting and joining the threads would take as long as the expert (see
// README.md).

#include "dot/ragged.h"

#include <stdint.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <optional>
#include <vector>

namespace jaxplugin {
namespace {
#include "simd/codec.inl"
#include "dot/quantized.inl"

// All threads share a group with at least this many products per thread, which
// take 2 to 8 ms. With 2^28 instead, 32 groups of 64 rows, with rows and
// weights (5760, 2880) in MXFP4, took 1.08 times as long (two Zen 4 cores,
// 2026-11).
constexpr int64_t kSharedProducts = int64_t{1} << 30;
// The least work of a part, in products: 20 us of a thread.
constexpr int64_t kPartProducts = int64_t{1} << 22;
constexpr int64_t kPartsOfThread = 8;
// Up to this many rows, a dot takes the time of reading and decoding weights.
constexpr int64_t kFewRows = 4;
// The columns of a part are a multiple of kPartColumns, which is a multiple of
// the strips of all engines. A part has at least kPartColumnsMin columns, so
// that lhs is its panel side, as in the dot of all columns (PanelIsLhs).
constexpr int64_t kPartColumns = 192;
constexpr int64_t kPartColumnsMin = 2 * kPartColumns;
// A gated group that all threads share is cut into parts of at most about this
// many sums, so that they stay in cache until the gate.
constexpr int64_t kGatedFloatsMax = int64_t{1} << 19;

// Rows of a group, and columns of the result.
struct Part {
  int64_t group;
  int64_t row, rows;
  int64_t column, columns;
  RowsForm form;  // of the rows
};

int64_t Columns(const RaggedArgs& args) {
  return args.is_gated ? args.dot.n / 2 : args.dot.n;
}

int64_t SizeOf(Format format) { return format == Format::kF32 ? 4 : 2; }

// Returns the dot of a part's rows and columns [column, column + columns) of
// its group's weight. The result goes to `out`.
DotArgs PartOf(const RaggedArgs& args, const Part& part, int64_t column,
               int64_t columns, void* out) {
  DotArgs dot = args.converted[static_cast<int>(part.form)];
  dot.lhs = RowsOf(dot.lhs, part.row, part.rows);
  dot.rhs = RowsOf(dot.rhs, part.group * args.dot.n + column, columns);
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

bool QuantizedPart(const Kernels& kernels, const RaggedArgs& args,
                   const Part& part, const Parallel& parallel) {
  QuantizedResult out = *args.dot.quantized;
  const int64_t at = part.row * out.columns + part.column;
  const QuantizedFacts facts = FactsOf(out.codec.format);
  out.values += BytesOf(facts.values, at);
  out.scale += at / facts.block;
  DotArgs dot = PartOf(args, part, part.column, part.columns, nullptr);
  dot.quantized = &out;
  return Dot(kernels, dot, parallel);
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
  const QuantizedResult* quantized = args.dot.quantized;
  const int64_t columns = quantized == nullptr ? n : n + part.columns;
  Scratch scratch(part.rows * columns * sizeof(float));
  float* sums = reinterpret_cast<float*>(scratch.get());
  if (sums == nullptr) return false;
  float* results = sums + part.rows * n;
  GateArgs gate{};
  gate.gate = args.gate;
  gate.gates = sums;
  gate.values = sums + 1;
  gate.row_floats = n;
  gate.rows = part.rows;
  gate.columns = part.columns;
  gate.out = results;
  gate.out_columns = part.columns;
  if (quantized == nullptr) {
    gate.out = OutOf(args, part);
    gate.out_columns = Columns(args);
  }
  gate.out_format = args.dot.out_format;
  const auto dot = [&](int64_t column, int64_t columns, float* out) {
    DotArgs sums_args = PartOf(args, part, column, columns, out);
    sums_args.out_format = Format::kF32;
    sums_args.quantized = nullptr;
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
  if (!ok || !kernels.gate(gate, parallel)) return false;
  return quantized == nullptr ||
         ParallelFor(parallel, part.rows, [&](int64_t row, int) {
           StoreQuantized(*quantized, results + row * part.columns,
                          part.row + row, 1, part.column, part.columns);
         });
}

bool RunPart(const Kernels& kernels, const RaggedArgs& args, const Part& part,
             const Parallel& parallel) {
  if (args.is_gated) return GatedPart(kernels, args, part, parallel);
  return args.dot.quantized == nullptr
             ? PlainPart(kernels, args, part, parallel)
             : QuantizedPart(kernels, args, part, parallel);
}

// Cuts a group into at most about `count` parts.
void Cut(const RaggedArgs& args, Part group, int64_t count,
         std::vector<Part>* parts) {
  const int64_t all = Columns(args);
  int64_t columns = RoundUp(CeilDiv(all, Max(count, 1)), kPartColumns);
  columns = Max(columns, kPartColumnsMin);
  // The last part also has the columns that are too few for another part.
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

// Lists the groups that have rows. Returns the first row after the groups.
int64_t GroupsOf(const Kernels& kernels, const RaggedArgs& args,
                 std::vector<Part>* groups) {
  DotArgs dot = args.dot;
  int64_t row = 0;
  for (int64_t group = 0; group < args.groups; ++group) {
    const int64_t rows = Min(Max(args.sizes[group], 0), args.dot.m - row);
    if (rows == 0) continue;
    dot.m = rows;
    const RowsForm form = RowsFormOf(kernels, dot);
    groups->push_back({group, row, rows, 0, Columns(args), form});
    row += rows;
  }
  return row;
}

// Lists the groups that all threads share, and the parts of the other groups.
// Shared gated groups are cut into parts too (kGatedFloatsMax).
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

// Fills the rows from `row` on with zeros. With a global scale that is not valid
// their block scales are NaN, as `quantize` writes them.
void ClearRows(const RaggedArgs& args, int64_t row) {
  constexpr int kNaN = 0x7f;  // E4M3
  const int64_t columns = Columns(args), rows = args.dot.m - row;
  const auto clear = [&](void* out, int64_t row_bytes, int byte = 0) {
    std::memset(static_cast<uint8_t*>(out) + row * row_bytes, byte,
                rows * row_bytes);
  };
  if (args.dot.quantized == nullptr) {
    return clear(args.dot.out, columns * SizeOf(args.dot.out_format));
  }
  const QuantizedFacts facts = FactsOf(args.dot.quantized->codec.format);
  clear(args.dot.quantized->values, BytesOf(facts.values, columns));
  const float global_scale = args.dot.quantized->codec.global_scale;
  const bool is_valid = global_scale > 0 && std::isfinite(global_scale);
  clear(args.dot.quantized->scale, columns / facts.block, is_valid ? 0 : kNaN);
}

// `rows` is the first row after the groups.
bool Run(const Kernels& kernels, const RaggedArgs& args,
         const std::vector<Part>& groups, int64_t rows,
         const Parallel& parallel) {
  std::vector<Part> shared, parts;
  Plan(args, groups, parallel.threads, &shared, &parts);
  ClearRows(args, rows);
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
    std::vector<Part> groups;
    const int64_t rows = GroupsOf(kernels, args, &groups);
    bool uses[3] = {};
    for (const Part& group : groups) uses[static_cast<int>(group.form)] = true;
    RaggedArgs decided = args;
    decided.dot.quantize_rows = false;
    std::optional<Scratch> scratch[3];
    for (int i = 0; i < 3; ++i) {
      const RowsForm form = static_cast<RowsForm>(i);
      decided.converted[i] = decided.dot;
      if (form == RowsForm::kGiven || !uses[i]) continue;
      // All rows at once, because each part of a group would convert its rows
      // again.
      scratch[i].emplace(ConvertedRowsBytes(args.dot, form));
      if (!ConvertRows(kernels, form, scratch[i]->get(), parallel,
                       &decided.converted[i])) {
        return false;
      }
    }
    return Run(kernels, decided, groups, rows, parallel);
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace jaxplugin
