// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot of a few rows (decoding a token): bound by reading the other operand,
// the "weights", once. Their codes become bf16 in registers, go into vdpbf16ps
// against the few rows (folded to bf16 beforehand), and the scale multiplies
// the sums of a block: one multiply-add for 64 values.

constexpr int kFewRowsMax = 4;
// From the codes in use to those that are asked for: enough to cover memory's
// latency. Into the second cache; the first has room for the few rows.
constexpr int64_t kFewRowsAhead = 4096;

// sum[r] = the part of the dots under 16 scales: kVectors vectors of codes of a
// weight row, all of them there: no masks. Asks for as many from `ahead` on.
// Roundings: 3 of a block's products (7 in E2M1; the first product is exact),
// and one a vector, of which there are 8 (4 in E2M1) at most.
template <int kBits, int kVectors, int kRows>
JAXPLUGIN_ALWAYS_INLINE void FewRowsStep(const uint8_t* values,
                                         const uint8_t* ahead, __m512 scales,
                                         const ScaleIndex& index,
                                         const Tables& tables, const uint8_t* x,
                                         int64_t x_row_bytes, __m512* sum) {
  constexpr int kParts = 16 / kBits;  // bf16 vectors of a vector of codes
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead + v * 64), _MM_HINT_T1);
    const __m512i codes = _mm512_loadu_si512(values + v * 64);
    Unit unit;
    if constexpr (kBits == 8) {
      Unpack8(codes, tables, &unit.q[0], &unit.q[1]);
    } else {
      unit = Unpack4(codes, tables.high0);
    }
    const __m512 spread = index.Spread(scales, v);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* xr = x + r * x_row_bytes + v * kParts * 64;
      __m512 block = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        block = Dot32(block, unit.q[p], _mm512_load_si512(xr + p * 64));
      }
      sum[r] = v == 0 ? _mm512_mul_ps(block, spread)
                      : _mm512_fmadd_ps(block, spread, sum[r]);
    }
  }
}

// out[r * ldc] = weight row `w` . x row r. With those of a step, 4 roundings of
// lanes and 1 of the total: 16 at most (sums.inl).
template <int kBits, int kBlock, int kRows>
void FewRowsSums(const Unpacker& unpacker, int64_t w, const uint8_t* x,
                 int64_t x_row_bytes, float* out, int64_t ldc) {
  constexpr int64_t kStep = 16 * kBlock;  // values under 16 scales
  constexpr int64_t kStepBytes = kStep * kBits / 8;
  constexpr int kVectors = kStepBytes / 64;
  const Operand& operand = unpacker.x;
  const Tables tables = unpacker.table_bytes.Load();
  const uint8_t* values = RowValues(operand, w);
  const uint8_t* scale = operand.scale + w * operand.scale_cols;
  __m512 total[kRows], rest[kRows], sum[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = rest[r] = _mm512_setzero_ps();
  int64_t k0 = 0;
  for (; k0 + kStep <= operand.k; k0 += kStep) {
    FewRowsStep<kBits, kVectors, kRows>(
        values, values + kFewRowsAhead,
        LoadScales(operand.scale_kind, scale, 16), unpacker.index, tables, x,
        x_row_bytes, sum);
    for (int r = 0; r < kRows; ++r) AddExactly(sum[r], &total[r], &rest[r]);
    values += kStepBytes;
    scale += 16;
    x += kStep * 2;
  }
  if (k0 < operand.k) {
    // The rest, zero-padded; x is too.
    alignas(64) uint8_t last[kStepBytes] = {};
    __builtin_memcpy(last, values, operand.row_bytes - k0 * kBits / 8);
    FewRowsStep<kBits, kVectors, kRows>(
        last, values + kFewRowsAhead,
        LoadScales(operand.scale_kind, scale, operand.scale_cols - k0 / kBlock),
        unpacker.index, tables, x, x_row_bytes, sum);
    for (int r = 0; r < kRows; ++r) AddExactly(sum[r], &total[r], &rest[r]);
  }
  for (int r = 0; r < kRows; ++r) {
    out[r * ldc] = _mm512_reduce_add_ps(TotalOf(total[r], rest[r]));
  }
}

// Rows [w0, w0 + count) of the weights. One stream a thread: four rows side by
// side take 1.9 times as long.
template <int kBits, int kBlock, int kRows>
void FewRowsStrip(const Unpacker& unpacker, int64_t w0, int64_t count,
                  const uint8_t* x, int64_t x_row_bytes, float* c,
                  int64_t ldc) {
  for (int64_t w = 0; w < count; ++w) {
    FewRowsSums<kBits, kBlock, kRows>(unpacker, w0 + w, x, x_row_bytes, c + w,
                                      ldc);
  }
}

using FewRowsFunction = void (*)(const Unpacker&, int64_t, int64_t,
                                 const uint8_t*, int64_t, float*, int64_t);

template <int kBits, int kBlock>
FewRowsFunction FewRowsOf(int64_t rows) {
  constexpr FewRowsFunction kFunctions[kFewRowsMax] = {
      FewRowsStrip<kBits, kBlock, 1>, FewRowsStrip<kBits, kBlock, 2>,
      FewRowsStrip<kBits, kBlock, 3>, FewRowsStrip<kBits, kBlock, 4>};
  return kFunctions[rows - 1];
}

FewRowsFunction ChooseFewRows(const Operand& weights, int64_t rows) {
  if (IsPacked(weights.format)) {
    return weights.block == 16 ? FewRowsOf<4, 16>(rows)
                               : FewRowsOf<4, 32>(rows);
  }
  return weights.block == 16 ? FewRowsOf<8, 16>(rows)
                             : FewRowsOf<8, 32>(rows);
}

// The weights are the strip side, and quantized.
bool FewRowsDot(const DotArgs& args, const Sides& sides,
                const Parallel& parallel) {
  const Operand& x = *sides.panel;
  const Operand& weights = *sides.strip;
  const int64_t rows = sides.panel_rows;
  const int64_t x_rows = args.batch * rows;
  // Padded to what 16 scales of block 32 cover.
  const int64_t x_row_bytes = Max(RoundUp(args.k, 512), 512) * 2;
  // Up to 256 KiB of weights a task, as each begins with nothing asked for
  // ahead; but eight tasks a thread, so that all end together.
  const int64_t weight_bytes = sides.strip_rows * weights.row_bytes;
  int64_t chunk_bytes = weight_bytes * args.batch / (8 * parallel.threads);
  chunk_bytes = Max(int64_t{16} << 10, Min(chunk_bytes, int64_t{256} << 10));
  int64_t chunk = Max(1, chunk_bytes / Max(weights.row_bytes, 1));
  chunk = Min(RoundUp(chunk, 4), 1024);
  const int64_t chunks = CeilDiv(sides.strip_rows, chunk);

  const int64_t x_bytes = RoundUp(x_rows * x_row_bytes, 64);
  const int64_t flag_bytes = RoundUp(x_rows, 64);
  const int64_t slot_bytes = RoundUp(chunk * rows * 4 + rows * 4, 64);
  Scratch scratch(x_bytes + flag_bytes + slot_bytes * parallel.threads);
  uint8_t* x_bf16 = scratch.get();
  if (x_bf16 == nullptr) return false;
  uint8_t* unsafe = x_bf16 + x_bytes;
  uint8_t* slots = unsafe + flag_bytes;

  const EngineBF16 engine(sides);
  const FewRowsFunction function = ChooseFewRows(weights, rows);
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
        if (GaveUp(args)) return;
        float* c = reinterpret_cast<float*>(slots + slot * slot_bytes);
        function(engine.strip_unpacker, w0, count,
                 x_bf16 + batch * rows * x_row_bytes, x_row_bytes, c, chunk);
        // Stored as a panel of `rows` and a strip of `count`.
        StoreTile(sides, batch, 0, rows, j0, count, c, chunk,
                  unsafe + batch * rows, c + chunk * rows);
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
