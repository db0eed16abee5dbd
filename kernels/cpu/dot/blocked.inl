// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The loop nest of a large dot. Its terms:
//   panel  Rows of one operand, unpacked by all threads together. A panel has
//          at most kPanelBytesMax bytes, so that it stays in an outer cache.
//   tile   A few consecutive rows of a panel, which are multiplied together.
//   strip  A few rows of the other operand. One thread unpacks a strip, one
//          chunk of k at a time, into an inner cache, and multiplies it with
//          every row of the panel.
// So each byte of the strip operand is read and unpacked once per panel. No
// operand is copied as a whole unless it fits in one panel.
//
// An Engine does the arithmetic:
//   kStripRows              rows of a strip
//   kSumFloats              floats of scratch memory for sums of a panel row
//   kTileRowsMax            largest number of rows of a tile
//   kPanelRowsMax           largest number of rows of a panel
//   PanelRowBytes(k), StripBytes(k)
//   Engine(sides)                           once per call
//   PackRow(row, tile, tile_rows, i)        unpacks row i of a tile
//   FinishTile(engine, tile, tile_rows, count, k)
//       a free function that runs after the `count` rows of a tile are packed
//   TileRows(engine, rows)
//       a free function, the rows of a tile
//   Strip(row, count, panel, rows, tile_rows, strip, c)
//       c[r * kSumFloats + j] = dot of panel row r and strip row j
// The dots include the block scales. They are right only for safe rows
// (RowIsSafe).

constexpr int64_t kPanelBytesMax = int64_t{4} << 20;

// The panel side and the strip side of a dot.
struct Sides {
  const DotArgs* args;
  const Operand* panel;
  const Operand* strip;
  int64_t panel_rows, strip_rows;  // of a batch entry
  bool panel_is_lhs;

  JAXPLUGIN_ALWAYS_INLINE int PanelShift(int64_t row) const {
    return Shift(panel_is_lhs ? args->lhs_shift : args->rhs_shift, row);
  }
  JAXPLUGIN_ALWAYS_INLINE int StripShift(int64_t row) const {
    return Shift(panel_is_lhs ? args->rhs_shift : args->lhs_shift, row);
  }
  // The strip rows of a task, and the panel rows of a panel, are multiples of
  // these if they are columns of a quantized result.
  JAXPLUGIN_ALWAYS_INLINE int64_t StripMultiple() const {
    return args->quantized && panel_is_lhs ? kQuantizedColumns : 1;
  }
  JAXPLUGIN_ALWAYS_INLINE int64_t PanelMultiple() const {
    return args->quantized && !panel_is_lhs ? kQuantizedColumns : 1;
  }
  // Returns the part of the result of panel rows and strip rows of a batch
  // entry. `sums` has a float for each of its elements.
  JAXPLUGIN_ALWAYS_INLINE ResultPart PartOf(int64_t batch, int64_t panel,
                                      int64_t panel_count, int64_t strip,
                                      int64_t strip_count, float* sums) const {
    if (args->quantized == nullptr) return {};
    const int64_t row = batch * args->m;
    return panel_is_lhs
               ? ResultPart{sums, row + panel, panel_count, strip, strip_count}
               : ResultPart{sums, row + strip, strip_count, panel, panel_count};
  }
  JAXPLUGIN_ALWAYS_INLINE static int Shift(const int16_t* shift, int64_t row) {
    return shift == nullptr ? 0 : shift[row];
  }
};

// StoreTile prefetches this many rows of the result ahead. If n is a power of
// two, all rows map to the same L1 set, and a set has 8 lines.
constexpr int64_t kRowsAhead = 8;

inline Sides ChooseSides(const DotArgs& args) {
  if (PanelIsLhs(args.m, args.n)) {
    return Sides{&args, &args.lhs, &args.rhs, args.m, args.n, true};
  }
  return Sides{&args, &args.rhs, &args.lhs, args.n, args.m, false};
}

inline DotShape ShapeOf(const DotArgs& args) {
  return {ShapeOf(args.lhs), ShapeOf(args.rhs), args.m, args.n, args.k};
}

// Returns the number of weight rows (the strip side) in a task of the few_rows
// engines. A thread has about two tasks of 16 to 256 KiB of weights, or more
// tasks of 256 KiB. With eight tasks for each thread, the matmuls of a SmolLM2
// layer took 1.2 to 1.4 times as long (one bf16 row, two Zen 5 cores, 2026-11).
// Threads took the tasks in turns then, and prefetched weights of each other.
inline int64_t StreamedRows(const Sides& sides, const Parallel& parallel) {
  const DotArgs& args = *sides.args;
  const int64_t multiple = sides.StripMultiple();
  if (args.config.task_rows > 0) {
    return Min(RoundUp(Min(args.config.task_rows, kTaskRowsMost), multiple),
               sides.strip_rows);
  }
  const int64_t row_bytes = Max(sides.strip->row_bytes, 1);
  int64_t bytes =
      sides.strip_rows * row_bytes * args.batch / (2 * parallel.threads);
  bytes = Max(int64_t{16} << 10, Min(bytes, int64_t{256} << 10));
  return Min(RoundUp(Max(1, bytes / row_bytes), Max(4, multiple)), 1024);
}

// Returns the number of panel rows in one pass over the weights. Passes are
// about equal, so that the last one is not small.
inline int64_t PassRows(const Sides& sides, int64_t most) {
  const int64_t given = sides.args->config.panel_rows;
  if (given > 0) return Min(given, most);
  return CeilDiv(sides.panel_rows, CeilDiv(sides.panel_rows, most));
}

// Stores the sums c[r * ldc + j] of panel rows and strip rows to the result.
// First multiplies the sums of rebased rows by their power of two, and computes
// the sums of unsafe rows again in float64. `line` is scratch memory of
// `panel_count` floats. If the result is quantized, the sums go to `part`. If it
// gives up, it stores nothing.
inline void StoreTile(const Sides& sides, int64_t batch, int64_t panel0,
                      int64_t panel_count, int64_t strip0, int64_t strip_count,
                      float* c, int64_t ldc, const uint8_t* panel_unsafe,
                      float* line, const ResultPart& part) {
  const DotArgs& args = *sides.args;
  const int64_t panel_row0 = batch * sides.panel_rows + panel0;
  const int64_t strip_row0 = batch * sides.strip_rows + strip0;
  const bool has_shifts =
      args.lhs_shift != nullptr || args.rhs_shift != nullptr;
  uint8_t any_unsafe = 0;
  for (int64_t r = 0; r < panel_count; ++r) any_unsafe |= panel_unsafe[r];
  const bool all_safe = !any_unsafe && !has_shifts &&
                        ScalesAreSafe(*sides.strip, strip_row0, strip_count);
  for (int64_t j = 0; j < (all_safe ? 0 : strip_count); ++j) {
    const bool strip_safe = RowIsSafe(*sides.strip, strip_row0 + j);
    if (strip_safe && !any_unsafe && !has_shifts) continue;
    for (int64_t r = 0; r < panel_count; ++r) {
      const bool is_safe = strip_safe && !panel_unsafe[r];
      if (is_safe && !has_shifts) continue;
      if (!is_safe && args.gave_up != nullptr) {
        __atomic_store_n(args.gave_up, 1, __ATOMIC_RELAXED);
        return;
      }
      float* out = c + r * ldc + j;
      const int shift = sides.PanelShift(panel_row0 + r) +
                        sides.StripShift(strip_row0 + j);
      *out = is_safe ? static_cast<float>(*out * PowerOfTwo(shift))
                     : ExactDot(*sides.panel, panel_row0 + r, *sides.strip,
                                strip_row0 + j, shift);
    }
  }
  if (sides.panel_is_lhs) {
    for (int64_t r = 0; r < panel_count; ++r) {
      if (part.sums == nullptr && r + kRowsAhead < panel_count) {
        PrefetchRow(args, panel_row0 + r + kRowsAhead, strip0, strip_count);
      }
      StoreRow(args, panel_row0 + r, strip0, strip_count, c + r * ldc, part);
    }
    return;
  }
  for (int64_t j = 0; j < strip_count; ++j) {
    for (int64_t r = 0; r < panel_count; ++r) line[r] = c[r * ldc + j];
    StoreRow(args, strip_row0 + j, panel0, panel_count, line, part);
  }
}

// Adds the rests to the totals of a strip, for engines that keep
// [totals][rests] for each panel row.
template <int kStripRows>
inline void FinishTotals(int64_t rows, float* c) {
  for (int64_t r = 0; r < rows; ++r, c += 2 * kStripRows) {
    for (int j = 0; j < kStripRows; ++j) {
      c[j] = TotalOf(c[j], c[kStripRows + j]);
    }
  }
}

template <typename Engine>
JAXPLUGIN_ALWAYS_INLINE void FinishTile(const Engine&, uint8_t*, int64_t,
                                        int64_t, int64_t) {}

// Returns the number of rows of a tile of a panel with `rows` rows. Tiles are
// about equal, so that the last one is not small.
template <typename Engine>
JAXPLUGIN_ALWAYS_INLINE int64_t TileRows(const Engine&, int64_t rows) {
  return CeilDiv(rows, CeilDiv(rows, Engine::kTileRowsMax));
}

template <typename Engine>
struct Blocked {
  Sides sides;
  Engine engine;
  int64_t k;
  int64_t panel_block;  // rows of the largest panel
  int64_t part_strips;  // strips that are stored together
  int64_t panel_bytes, unsafe_bytes, strip_bytes, c_bytes, line_bytes;
  int64_t part_bytes;

  explicit Blocked(const DotArgs& args)
      : sides(ChooseSides(args)), engine(sides), k(args.k) {
    const int64_t row_bytes = Engine::PanelRowBytes(k);
    int64_t rows = Max(Engine::kTileRowsMax, kPanelBytesMax / row_bytes);
    rows = Min(rows, Engine::kPanelRowsMax);
    if (args.config.panel_rows > 0) {
      rows = Min(args.config.panel_rows, kPanelRowsMost);
    }
    rows = Min(rows, Max(sides.panel_rows, 1));
    // Panels are about equal, so that the last one is not small.
    const int64_t blocks = CeilDiv(Max(sides.panel_rows, 1), rows);
    panel_block = RoundUp(CeilDiv(Max(sides.panel_rows, 1), blocks),
                          sides.PanelMultiple());
    const int64_t padded = panel_block + Engine::kTileRowsMax;
    // Tiles have the same size in memory; the last one may have fewer rows.
    const int64_t tiles = CeilDiv(panel_block, Engine::kTileRowsMax);
    panel_bytes =
        RoundUp(tiles * TileRows(engine, panel_block) * row_bytes, 64);
    unsafe_bytes = RoundUp(panel_block, 64);
    strip_bytes = RoundUp(Engine::StripBytes(k), 64);
    c_bytes = RoundUp(padded * Engine::kSumFloats * 4, 64);
    line_bytes = RoundUp(panel_block * 4, 64);
    // StripMultiple and kPower are powers of two.
    constexpr int64_t kPower = Engine::kStripRows & -Engine::kStripRows;
    part_strips = Max(1, sides.StripMultiple() / kPower);
    part_bytes = args.quantized == nullptr
                     ? 0
                     : panel_block * part_strips * Engine::kStripRows * 4;
  }
  int64_t SharedBytes() const { return panel_bytes + unsafe_bytes; }
  int64_t SlotBytes() const {
    return RoundUp(strip_bytes + c_bytes + line_bytes + part_bytes, 64);
  }

  // Computes one batch entry. `shared` has SharedBytes(), `slots` has
  // SlotBytes() per thread.
  bool Entry(int64_t batch, const Parallel& parallel, uint8_t* shared,
             uint8_t* slots) const {
    for (int64_t p0 = 0; p0 < sides.panel_rows; p0 += panel_block) {
      const int64_t rows = Min(panel_block, sides.panel_rows - p0);
      if (!PanelTimesStrips(batch, p0, rows, parallel, shared, slots)) {
        return false;
      }
    }
    return true;
  }

  bool PanelTimesStrips(int64_t batch, int64_t p0, int64_t rows,
                        const Parallel& parallel, uint8_t* shared,
                        uint8_t* slots) const {
    uint8_t* unsafe = shared + panel_bytes;
    const int64_t tile_rows = TileRows(engine, rows);
    const int64_t tile_bytes = tile_rows * Engine::PanelRowBytes(k);
    const bool small = rows * k < 16384;  // too small to wake a thread
    const Parallel serial{1, nullptr, nullptr};
    bool ok = ParallelFor(
        small ? serial : parallel, CeilDiv(rows, tile_rows),
        [&](int64_t tile, int) {
          const int64_t r0 = tile * tile_rows;
          const int64_t end = Min(r0 + tile_rows, rows);
          for (int64_t r = r0; r < end; ++r) {
            const int64_t row = batch * sides.panel_rows + p0 + r;
            engine.PackRow(row, shared + tile * tile_bytes, tile_rows, r - r0);
            unsafe[r] = !RowIsSafe(*sides.panel, row);
          }
          FinishTile(engine, shared + tile * tile_bytes, tile_rows, end - r0,
                     k);
        });
    const int64_t strips = CeilDiv(sides.strip_rows, Engine::kStripRows);
    int64_t group = Max(1, strips / (parallel.threads * 16));
    if (sides.args->config.task_rows > 0) {
      group = CeilDiv(sides.args->config.task_rows, Engine::kStripRows);
    }
    group = RoundUp(group, part_strips);
    ok = ok && ParallelForInParts(
        parallel, CeilDiv(strips, group), [&](int64_t index, int slot) {
          uint8_t* strip = slots + slot * SlotBytes();
          float* c = reinterpret_cast<float*>(strip + strip_bytes);
          float* line = reinterpret_cast<float*>(strip + strip_bytes + c_bytes);
          const int64_t last = Min(strips, (index + 1) * group);
          ResultPart part = {};
          for (int64_t s = index * group; s < last; ++s) {
            if (GaveUp(*sides.args)) return;
            const int64_t s0 = s * Engine::kStripRows;
            const int64_t left = sides.strip_rows - s0;
            if (s % part_strips == 0) {
              part = sides.PartOf(batch, p0, rows, s0,
                                  Min(part_strips * Engine::kStripRows, left),
                                  line + line_bytes / 4);
            }
            const int64_t count = Min(Engine::kStripRows, left);
            engine.Strip(batch * sides.strip_rows + s0, count, shared, rows,
                         tile_rows, strip, c);
            StoreTile(sides, batch, p0, rows, s0, count, c, Engine::kSumFloats,
                      unsafe, line, part);
            if (s + 1 == last || (s + 1) % part_strips == 0) {
              part.Store(*sides.args);
            }
          }
        });
    return ok;
  }
};

template <typename Engine>
bool BlockedDot(const DotArgs& args, const Parallel& parallel) {
  const Blocked<Engine> blocked(args);
  const int64_t shared_bytes = blocked.SharedBytes();
  const int64_t slot_bytes = blocked.SlotBytes();
  const int threads = parallel.threads;
  // Many small batch entries: one task per entry, which is serial inside.
  const bool over_batch =
      args.batch >= 2 * threads &&
      args.m * args.n <= (int64_t{1} << 24) / Max(args.k, 1);
  if (over_batch) {
    const int64_t each = shared_bytes + slot_bytes;
    Scratch scratch(each * threads);
    uint8_t* base = scratch.get();
    if (base == nullptr) return false;
    const Parallel serial{1, nullptr, nullptr};
    return ParallelFor(parallel, args.batch, [&](int64_t batch, int slot) {
      uint8_t* shared = base + slot * each;
      blocked.Entry(batch, serial, shared, shared + shared_bytes);
    });
  }
  Scratch scratch(shared_bytes + slot_bytes * threads);
  uint8_t* base = scratch.get();
  if (base == nullptr) return false;
  for (int64_t batch = 0; batch < args.batch; ++batch) {
    if (!blocked.Entry(batch, parallel, base, base + shared_bytes)) {
      return false;
    }
  }
  return true;
}
