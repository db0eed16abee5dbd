// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Quantizes the result of a prologue along k and along runs of rows, from one
// read of x. A thread computes the statistics of a strip's rows, and then some
// columns of the strip at a time, in f32 in its cache, for both results. It also
// sums the columns of the strip.

constexpr int kStripRows = 64;      // whole blocks along the rows
constexpr int kStripColumns = 256;  // whole blocks along k
static_assert(kStripRows + kMostPadding <= kChunk, "a strip fits a chunk");

// Some columns of a strip: y[row][column].
struct Strip {
  int64_t row, column;  // the first ones
  int rows, columns;
  float (*y)[kStripColumns];
};

// Computes `count` values of the prologue's result from a column of a row on.
// Returns the values that column sums add: y, or those of `of_weight`.
inline const float* ComputeColumns(const QuantizeArgs& args,
                                   const Statistics& statistics, int64_t row,
                                   int64_t column, int64_t count, float* y,
                                   float* of_weight) {
  const Prologue& p = args.prologue;
  if (!p.IsNorm()) {
    ComputeActivation(args, row, column, count, y);
    return y;
  }
  if (p.IsNormGradient()) {
    ComputeNormGradient(args, statistics, row, column, count, y, of_weight);
    return of_weight;
  }
  CopyFloats(SummedX(args), args.x_format, row * args.k + column, count, y);
  if (p.function == PrologueFunction::kLayerNorm) {
    Subtract(statistics.mean, count, y);
  }
  Normalize(p, statistics.factor, column, count, y);
  return y;
}

// Calls use(tile, source, begin, count) for the chunks of a strip along k.
template <typename F>
void ForChunksOfColumns(const Strip& strip, const F& use) {
  const Source from = {strip.y, Format::kF32, kStripColumns, 1, strip.row,
                       strip.column};
  for (int r = 0; r < strip.rows; r += kTileRows) {
    const int rows = static_cast<int>(Min(kTileRows, strip.rows - r));
    use(Tile{strip.row + r, rows, static_cast<int>(CeilDiv(rows, kLanes))},
        from, strip.column, strip.columns);
  }
}

// The same along the rows, which are values of the rows of `args`.
template <typename F>
void ForChunksOfRows(const OperandArgs& args, const Strip& strip,
                     const F& use) {
  const int64_t run = strip.row / args.k, begin = strip.row % args.k;
  const int64_t row = run * args.inner + strip.column;
  const Source from = {strip.y, Format::kF32, strip.rows, kStripColumns, row,
                       begin};
  const bool is_end = begin + strip.rows == args.k;  // then it has the padding
  const int count =
      static_cast<int>(is_end ? args.padded - begin : strip.rows);
  for (int c = 0; c < strip.columns; c += kTileRows) {
    const int rows = static_cast<int>(Min(kTileRows, strip.columns - c));
    use(Tile{row + c, rows, static_cast<int>(CeilDiv(rows, kLanes))}, from,
        begin, count);
  }
}

// Returns the bits of the amax of a strip's blocks without NaN or Inf, along k
// if `side` is 0 and else along the rows.
inline uint32_t StripMax(const OperandArgs& args, int side,
                         const Strip& strip) {
  int32_t amax = 0;
  const auto use = [&](const Tile& tile, const Source& from, int64_t begin,
                       int count) {
    amax = Max(amax, ChunkMax(args, from, tile, begin, count));
  };
  side == 0 ? ForChunksOfColumns(strip, use)
            : ForChunksOfRows(args, strip, use);
  return static_cast<uint32_t>(amax);
}

// Quantizes a strip along k if `side` is 0 and else along the rows.
inline void QuantizeStrip(const OperandArgs& args, int side, float global,
                          const Strip& strip) {
  if (side == 0 && args.key == nullptr) {  // QuantizeRun is faster
    const Codec codec = {args.format, args.round_up, global};
    const QuantizedFacts facts = FactsOf(args.format);
    for (int r = 0; r < strip.rows; ++r) {
      const int64_t i = (strip.row + r) * args.k + strip.column;
      QuantizeRun(codec, strip.y[r], strip.columns,
                  args.values + BytesOf(facts.values, i),
                  args.scale + i / facts.block);
    }
    return;
  }
  const Nvfp4Global shared(global);
  const ChunkFunction quantize = ChunkFunctionOf(args);
  const auto use = [&](const Tile& tile, const Source& from, int64_t begin,
                       int count) {
    quantize(args, from, shared, tile, begin, count);
  };
  side == 0 ? ForChunksOfColumns(strip, use)
            : ForChunksOfRows(args, strip, use);
}

// Memory of a call.
struct StripMemory {
  static constexpr int64_t kStripFloats = kStripRows * kStripColumns;

  int64_t row_floats;
  Scratch scratch;
  float* slots;            // of each thread: a strip, and a row, or two
  Statistics* statistics;  // of each row
  uint32_t* maxima;        // of each strip and side
  float* sums;             // of each strip and column

  StripMemory(const QuantizeArgs& args, int64_t strips, int threads)
      : row_floats(RoundUp(args.k, 16) *
                   (args.prologue.IsNormGradient() ? 2 : 1)),
        scratch(static_cast<size_t>(
            4 * threads * (kStripFloats + row_floats) +
            static_cast<int64_t>(sizeof(Statistics)) * args.rows +
            4 * 2 * strips +
            (args.prologue.column_sums != nullptr ? 4 * strips * args.k : 0))),
        slots(reinterpret_cast<float*>(scratch.get())),
        statistics(reinterpret_cast<Statistics*>(
            slots + threads * (kStripFloats + row_floats))),
        maxima(reinterpret_cast<uint32_t*>(statistics + args.rows)),
        sums(reinterpret_cast<float*>(maxima + 2 * strips)) {}

  float* slot(int index) const {
    return slots + index * (kStripFloats + row_floats);
  }
};

// Computes strip `index` of args.rows / run * run_strips, and calls use(strip)
// for some columns after the others. The first call for a strip finds the
// statistics of its rows.
template <typename F>
void ForColumns(const QuantizeArgs& args, const StripMemory& memory,
                int64_t index, int slot, bool is_first, const F& use) {
  const int64_t run = args.sides[1].k, run_strips = CeilDiv(run, kStripRows);
  const int64_t begin = index % run_strips * kStripRows;
  const int64_t first = index / run_strips * run + begin;
  const int rows = static_cast<int>(Min(kStripRows, run - begin));
  const Prologue& p = args.prologue;
  float* const floats = memory.slot(slot);
  if (is_first && p.IsNorm()) {
    for (int64_t row = first; row < first + rows; ++row) {
      float* const y = floats + memory.kStripFloats;
      Statistics* const statistics = memory.statistics + row;
      *statistics = ReadCentered(args, row, y);
      if (!p.IsNormGradient()) continue;
      ReadMeans(args, row, y, y + memory.row_floats / 2, statistics);
    }
  }
  const auto y = reinterpret_cast<float(*)[kStripColumns]>(floats);
  for (int64_t c = 0; c < args.k; c += kStripColumns) {
    const int columns = static_cast<int>(Min(kStripColumns, args.k - c));
    float of_weight[kStripColumns];
    float* const sums = is_first && p.column_sums != nullptr
                            ? memory.sums + index * args.k + c
                            : nullptr;
    if (sums != nullptr) __builtin_memset(sums, 0, columns * sizeof(float));
    for (int r = 0; r < rows; ++r) {
      const int64_t row = first + r, i = row * args.k + c;
      const float* const summed = ComputeColumns(
          args, memory.statistics[row], row, c, columns, y[r], of_weight);
      if (!is_first) continue;
      Report(p, i, columns, y[r]);
      if (p.IsNormGradient()) {
        StoreFloats(y[r], columns, args.x_format, p.sum, i);
      }
      if (sums != nullptr) AddBias(summed, columns, sums);
    }
    use(Strip{first, c, rows, columns, y});
  }
}

// Adds the sums of the strips of each entry, in order and in f64. So the bits do
// not depend on the threads, and the roundings are those of a strip's rows.
inline bool AddColumnSums(const QuantizeArgs& args, const StripMemory& memory,
                          int64_t strips, const Parallel& parallel) {
  const Prologue& p = args.prologue;
  const int64_t each = strips / p.entries;
  const int64_t chunks = CeilDiv(args.k, kStripColumns);
  return ParallelFor(parallel, p.entries * chunks, [&](int64_t i, int) {
    const int64_t entry = i / chunks, c = i % chunks * kStripColumns;
    const int64_t columns = Min(kStripColumns, args.k - c);
    double sums[kStripColumns] = {};
    for (int64_t s = entry * each; s < (entry + 1) * each; ++s) {
      const float* strip = memory.sums + s * args.k + c;
      for (int64_t j = 0; j < columns; ++j) sums[j] += strip[j];
    }
    float* out = p.column_sums + entry * args.k + c;
    for (int64_t j = 0; j < columns; ++j) out[j] = static_cast<float>(sums[j]);
  });
}

bool QuantizeStrips(const QuantizeArgs& args, const Parallel& parallel) {
  const OperandArgs* const sides = args.sides;
  const int64_t run = sides[1].k;
  const int64_t strips =
      run == 0 ? 0 : args.rows / run * CeilDiv(run, kStripRows);
  const StripMemory memory(args, strips, parallel.threads);
  if (memory.slots == nullptr) return false;
  const bool is_computed = sides[0].compute_global || sides[1].compute_global;
  if (is_computed &&
      !ParallelFor(parallel, strips, [&](int64_t i, int slot) {
        uint32_t* const maxima = memory.maxima + 2 * i;
        maxima[0] = maxima[1] = 0;
        ForColumns(args, memory, i, slot, true, [=](const Strip& strip) {
          for (int side = 0; side < 2; ++side) {
            if (sides[side].values == nullptr) continue;
            const uint32_t amax = StripMax(sides[side], side, strip);
            maxima[side] = amax > maxima[side] ? amax : maxima[side];
          }
        });
      })) {
    return false;
  }
  float global[2];
  for (int side = 0; side < 2; ++side) {
    const OperandArgs& each = sides[side];
    global[side] = each.given_global ? *each.given_global : 1.0f;
    if (is_computed) {
      uint32_t amax = 0;
      for (int64_t i = side; i < 2 * strips; i += 2) {
        amax = memory.maxima[i] > amax ? memory.maxima[i] : amax;
      }
      global[side] = GlobalScaleOf(amax, 448.0f * 6);
    }
    if (each.values != nullptr) *each.global_scale = global[side];
  }
  const auto quantize = [&](int64_t i, int slot) {
    ForColumns(args, memory, i, slot, !is_computed, [&](const Strip& strip) {
      for (int side = 0; side < 2; ++side) {
        if (sides[side].values == nullptr) continue;
        QuantizeStrip(sides[side], side, global[side], strip);
      }
    });
  };
  return ParallelForInParts(parallel, strips, quantize) &&
         (args.prologue.column_sums == nullptr ||
          AddColumnSums(args, memory, strips, parallel));
}
