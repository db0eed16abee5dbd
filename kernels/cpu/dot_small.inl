// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot of a few rows (decoding a token): bound by reading the other operand,
// the "weights", once. Their codes become bf16 in registers, go into vdpbf16ps
// against the few rows (folded to bf16 beforehand), and the scale multiplies
// the sums of a block: one multiply-add for 64 values.

constexpr int kSmallRowsMax = 4;
constexpr int kWeightRows = 4;  // read side by side: four streams a thread

// One weight row's place in memory.
struct WeightRow {
  const uint8_t* values;
  const uint8_t* scale;
};

// sum[w][r] += the part of the dots under 16 scales: kVectors vectors of codes
// a weight row. All of it is there: no masks.
template <int kBits, int kVectors, int kRows, int kWeights>
JAXPLUGIN_ALWAYS_INLINE void SmallStep(const WeightRow* weights,
                                       ScaleKind scale_kind,
                                       const ScaleIndex& index,
                                       const Tables& tables, const uint8_t* x,
                                       int64_t x_row_bytes,
                                       __m512 (*sum)[kRows]) {
  // Far enough ahead to cover memory's latency; never faults.
  constexpr int64_t kAhead = 1024;
  constexpr int kParts = 16 / kBits;  // bf16 vectors of a vector of codes
  __m512 scales[kWeights];
#pragma GCC unroll 4
  for (int w = 0; w < kWeights; ++w) {
    scales[w] = LoadScales(scale_kind, weights[w].scale, 16);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const __m512i lanes = _mm512_load_si512(index.lanes[v]);
#pragma GCC unroll 4
    for (int w = 0; w < kWeights; ++w) {
      const uint8_t* at = weights[w].values + v * 64;
      _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
      const __m512i codes = _mm512_loadu_si512(at);
      Unit unit;
      if constexpr (kBits == 8) {
        Unpack8(codes, tables, &unit.q[0], &unit.q[1]);
      } else {
        unit = Unpack4(codes, tables.high0);
      }
      const __m512 spread = _mm512_permutexvar_ps(lanes, scales[w]);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* xr = x + r * x_row_bytes + v * kParts * 64;
        __m512 block = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
          block = Dot32(block, unit.q[p], _mm512_load_si512(xr + p * 64));
        }
        sum[w][r] = _mm512_fmadd_ps(block, spread, sum[w][r]);
      }
    }
  }
}

// c[w * kRows + r] = weight row (w0 + w) . x row r, for `kWeights` rows.
template <int kBits, int kBlock, int kRows, int kWeights>
void SmallTile(const Unpacker& unpacker, int64_t w0, const uint8_t* x,
               int64_t x_row_bytes, float* c) {
  const Operand& operand = unpacker.x;
  const Tables tables = unpacker.table_bytes.Load();
  constexpr int64_t kStep = 16 * kBlock;  // values under 16 scales
  constexpr int64_t kStepBytes = kStep * kBits / 8;
  constexpr int kVectors = kStepBytes / 64;
  __m512 sum[kWeights][kRows];
  WeightRow weights[kWeights];
  for (int w = 0; w < kWeights; ++w) {
    weights[w].values = RowValues(operand, w0 + w);
    weights[w].scale = operand.scale + (w0 + w) * operand.scale_cols;
    for (int r = 0; r < kRows; ++r) sum[w][r] = _mm512_setzero_ps();
  }
  int64_t k0 = 0;
  for (; k0 + kStep <= operand.k; k0 += kStep) {
    SmallStep<kBits, kVectors, kRows, kWeights>(
        weights, operand.scale_kind, unpacker.index, tables, x, x_row_bytes,
        sum);
    for (int w = 0; w < kWeights; ++w) {
      weights[w].values += kStepBytes;
      weights[w].scale += 16;
    }
    x += kStep * 2;
  }
  if (k0 < operand.k) {
    // The rest, zero-padded; x is too.
    alignas(64) uint8_t values[kWeights][kStepBytes];
    alignas(64) uint8_t scale[kWeights][16];
    const int64_t bytes = operand.row_bytes - k0 * kBits / 8;
    const int64_t columns = operand.scale_cols - k0 / kBlock;
    for (int w = 0; w < kWeights; ++w) {
      __builtin_memset(values[w], 0, kStepBytes);
      __builtin_memset(scale[w], 0, 16);
      __builtin_memcpy(values[w], weights[w].values, bytes);
      __builtin_memcpy(scale[w], weights[w].scale, columns);
      weights[w] = WeightRow{values[w], scale[w]};
    }
    SmallStep<kBits, kVectors, kRows, kWeights>(
        weights, operand.scale_kind, unpacker.index, tables, x, x_row_bytes,
        sum);
  }
  for (int w = 0; w < kWeights; ++w) {
    for (int r = 0; r < kRows; ++r) {
      c[w * kRows + r] = _mm512_reduce_add_ps(sum[w][r]);
    }
  }
}

template <int kBits, int kBlock, int kRows>
void SmallRows(const Unpacker& unpacker, int64_t w0, int64_t count,
               const uint8_t* x, int64_t x_row_bytes, float* c) {
  int64_t w = 0;
  for (; w + kWeightRows <= count; w += kWeightRows) {
    SmallTile<kBits, kBlock, kRows, kWeightRows>(unpacker, w0 + w, x,
                                                 x_row_bytes, c + w * kRows);
  }
  for (; w < count; ++w) {
    SmallTile<kBits, kBlock, kRows, 1>(unpacker, w0 + w, x, x_row_bytes,
                                       c + w * kRows);
  }
}

using SmallFunction = void (*)(const Unpacker&, int64_t, int64_t,
                               const uint8_t*, int64_t, float*);

template <int kBits, int kBlock>
SmallFunction SmallRowsOf(int64_t rows) {
  constexpr SmallFunction kFunctions[kSmallRowsMax] = {
      SmallRows<kBits, kBlock, 1>, SmallRows<kBits, kBlock, 2>,
      SmallRows<kBits, kBlock, 3>, SmallRows<kBits, kBlock, 4>};
  return kFunctions[rows - 1];
}

SmallFunction ChooseSmall(const Operand& weights, int64_t rows) {
  if (weights.format == Format::kE2M1) {
    return weights.block == 16 ? SmallRowsOf<4, 16>(rows)
                               : SmallRowsOf<4, 32>(rows);
  }
  return weights.block == 16 ? SmallRowsOf<8, 16>(rows)
                             : SmallRowsOf<8, 32>(rows);
}

// The weights are the strip side, and quantized.
bool SmallDot(const DotArgs& args, const Sides& sides,
              const Parallel& parallel) {
  const Operand& x = *sides.panel;
  const Operand& weights = *sides.strip;
  const int64_t rows = sides.panel_rows;
  const int64_t x_rows = args.batch * rows;
  // Padded to what 16 scales of block 32 cover.
  const int64_t x_row_bytes = Max(RoundUp(args.k, 512), 512) * 2;
  // About 64 KiB of weights a task: a few microseconds.
  int64_t chunk = Max(1, (int64_t{64} << 10) / Max(weights.row_bytes, 1));
  chunk = Min(Max(RoundUp(chunk, kWeightRows), 8), 1024);
  const int64_t chunks = CeilDiv(sides.strip_rows, chunk);

  const int64_t x_bytes = RoundUp(x_rows * x_row_bytes, 64);
  const int64_t flag_bytes = RoundUp(x_rows, 64);
  const int64_t slot_bytes = RoundUp(chunk * rows * 8 + rows * 4, 64);
  Scratch scratch(x_bytes + flag_bytes + slot_bytes * parallel.threads);
  uint8_t* x_bf16 = scratch.get();
  if (x_bf16 == nullptr) return false;
  uint8_t* unsafe = x_bf16 + x_bytes;
  uint8_t* slots = unsafe + flag_bytes;

  const EngineBF16 engine(sides);
  const SmallFunction function = ChooseSmall(weights, rows);
  const Parallel serial{1, nullptr, nullptr};
  const int64_t x_groups = Max(1, (int64_t{1} << 16) / Max(args.k, 1));
  const bool x_is_small = x_rows * args.k <= (1 << 17);
  bool ok = ParallelFor(
      x_is_small ? serial : parallel, CeilDiv(x_rows, x_groups),
      [&](int64_t index, int) {
        const int64_t end = Min(x_rows, (index + 1) * x_groups);
        for (int64_t r = index * x_groups; r < end; ++r) {
          uint8_t* row = x_bf16 + r * x_row_bytes;
          const int64_t packed = CeilDiv(x.k, kUnit) * kUnitBytes;
          engine.PackRow(r, row, 1, 0);
          __builtin_memset(row + packed, 0, x_row_bytes - packed);
          unsafe[r] = !RowIsSafe(x, r);
        }
      });
  return ok && ParallelFor(
      parallel, args.batch * chunks, [&](int64_t index, int slot) {
        const int64_t batch = index / chunks;
        const int64_t j0 = index % chunks * chunk;
        const int64_t count = Min(chunk, sides.strip_rows - j0);
        const int64_t w0 = batch * sides.strip_rows + j0;
        float* c = reinterpret_cast<float*>(slots + slot * slot_bytes);
        float* turned = c + chunk * rows;  // [row][weight]
        const uint8_t* xs = x_bf16 + batch * rows * x_row_bytes;
        function(engine.strip_unpacker, w0, count, xs, x_row_bytes, c);
        for (int64_t j = 0; j < count; ++j) {
          for (int64_t r = 0; r < rows; ++r) {
            turned[r * chunk + j] = c[j * rows + r];
          }
        }
        // Stored as a panel of `rows` and a strip of `count`.
        StoreTile(sides, batch, 0, rows, j0, count, turned, chunk,
                  unsafe + batch * rows, turned + chunk * rows);
      });
}

// Whether every value can be a bf16 factor: 0, NaN, Inf, or in the range of
// kSafeExponent.
bool AllSafeBF16(const Operand& x, const Parallel& parallel) {
  const int64_t rows_per_task = Max(1, (int64_t{1} << 18) / Max(x.k, 1));
  uint32_t unsafe = 0;
  const bool ok = ParallelFor(
      parallel, CeilDiv(x.rows, rows_per_task), [&](int64_t index, int) {
        uint32_t found = 0;
        const int64_t end = Min(x.rows, (index + 1) * rows_per_task);
        for (int64_t r = index * rows_per_task; r < end; ++r) {
          const uint8_t* row = RowValues(x, r);
          for (int64_t i = 0; i < x.k; ++i) {
            uint16_t bits;
            __builtin_memcpy(&bits, row + 2 * i, 2);
            const uint32_t magnitude = bits & 0x7fffu;
            const uint32_t exponent = magnitude >> 7;
            found |= (magnitude != 0) &
                     ((exponent < 127 - 55) |
                      ((exponent > 127 + 61) & (exponent < 255)));
          }
        }
        if (found) __atomic_store_n(&unsafe, 1, __ATOMIC_RELAXED);
      });
  return ok && unsafe == 0;
}

bool BF16CanHold(const Operand& x, const Parallel& parallel) {
  if (!IsPlain(x.format)) return true;
  return x.format == Format::kBF16 && AllSafeBF16(x, parallel);
}

bool DotBF16(const DotArgs& args, const Parallel& parallel) {
  if (!BF16CanHold(args.lhs, parallel) || !BF16CanHold(args.rhs, parallel)) {
    return BlockedDot<EngineF32>(args, parallel);
  }
  const Sides sides = ChooseSides(args);
  if (sides.panel_rows <= kSmallRowsMax && !IsPlain(sides.strip->format)) {
    return SmallDot(args, sides, parallel);
  }
  return BlockedDot<EngineBF16>(args, parallel);
}
