// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Quantizes along any dimension, with the options of training recipes: Hadamard
// transform, square blocks, four over six, rounding scales up, stochastic
// rounding. The results have the bits of jaxplugin/quantization/operations.py.
//
// A lane of a vector is a row. So nothing crosses lanes, except scales that the
// rows of a square block share. A tile is 16 or 32 consecutive rows, and a
// chunk is 256 values of k of a tile. A task quantizes some chunks.

constexpr int kTileRows = 16;  // rows of a tile; a square block may have more
constexpr int kMaxTileRows = 32;
constexpr int kMaxVectors = kMaxTileRows / kLanes;
constexpr int kChunk = 256;    // values of a row that are stored together
constexpr int kMinBlock = 16;
constexpr int64_t kOperandTask = 64 * 1024;  // values of a task

// Rows of x [outer, k, inner] that are read together.
struct Tile {
  int64_t row;  // index of the first row: outer index * inner + inner index
  int rows;
  int vectors;
};

// Cuts the rows into tiles and chunks, in the order of memory.
struct Tiling {
  int64_t rows, run;  // tiles do not cross the boundaries of runs of rows
  int64_t tile_rows, tiles, chunks;  // tiles of a run, chunks of a row
  bool chunks_first;

  explicit Tiling(const OperandArgs& args)
      : rows(args.outer * args.inner),
        run(args.square > 0   ? args.square
            : args.inner == 1 ? args.outer
                              : args.inner),
        tile_rows(Max(kTileRows, args.square > 0 ? FactsOf(args.format).block
                                                 : kTileRows)),
        tiles(CeilDiv(run, tile_rows)),
        chunks(CeilDiv(args.padded, kChunk)),
        chunks_first(args.inner == 1) {}

  int64_t Count() const { return run == 0 ? 0 : rows / run * tiles * chunks; }

  Tile At(int64_t index, int64_t* begin) const {
    const int64_t rest = index % (tiles * chunks);
    const int64_t t = chunks_first ? rest / chunks : rest % tiles;
    *begin = (chunks_first ? rest % chunks : rest / tiles) * kChunk;
    const int64_t row = index / (tiles * chunks) * run + t * tile_rows;
    const int count = static_cast<int>(Min(tile_rows, run - t * tile_rows));
    return {row, count, static_cast<int>(CeilDiv(count, kLanes))};
  }
};

// Returns the index of value k of a row of an array [outer, size, inner].
JAXPLUGIN_ALWAYS_INLINE int64_t IndexOf(int64_t inner, int64_t row,
                                        int64_t size, int64_t k) {
  return (row / inner * size + k) * inner + row % inner;
}

// Memory with values of the array to quantize, [outer, k, inner]: all of them,
// or a strip (quantize/strips.inl).
struct Source {
  const void* x;
  Format format;
  int64_t k, inner;
  int64_t row, begin;  // place of the memory's first value in the array
};

// Reads values [begin, begin + count) of rows [row, row + rows), at most kLanes
// rows, to out[value * stride]. Values and rows past the end are 0.
template <Format kFormat>
void ReadColumn(const Source& from, int64_t row, int rows, int64_t begin,
                int count, int stride, Floats* out) {
  row -= from.row;
  begin -= from.begin;
  const int known = static_cast<int>(Max(0, Min(count, from.k - begin)));
  int done = 0;
  if (rows == kLanes && from.inner == 1) {
    for (; done + kLanes <= known; done += kLanes) {
      Words square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        square[i] = reinterpret_cast<Words>(
            LoadLanes<kFormat>(from.x, (row + i) * from.k + begin + done));
      }
      TurnLanes(square);
      for (int i = 0; i < kLanes; ++i) {
        out[(done + i) * stride] = reinterpret_cast<Floats>(square[i]);
      }
    }
  } else if (rows == kLanes && row % from.inner + rows <= from.inner) {
    const int64_t first = IndexOf(from.inner, row, from.k, begin);
    for (; done < known; ++done) {
      out[done * stride] =
          LoadLanes<kFormat>(from.x, first + done * from.inner);
    }
  }
  for (int i = done; i < count; ++i) out[i * stride] = Floats{};
  for (int r = 0; r < rows && done < known; ++r) {
    const int64_t first = IndexOf(from.inner, row + r, from.k, begin);
    for (int i = done; i < known; ++i) {
      out[i * stride][r] = LoadOne<kFormat>(from.x, first + i * from.inner);
    }
  }
}

// Reads values [begin, begin + count) of a tile to out[value][vector], and
// transforms them if the arguments say so.
void ReadSpan(const OperandArgs& args, const Source& from, const Tile& tile,
              int64_t begin, int count, Floats* out) {
  for (int v = 0; v < tile.vectors; ++v) {
    const int64_t row = tile.row + v * kLanes;
    const int rows = static_cast<int>(Min(kLanes, tile.rows - v * kLanes));
    switch (from.format) {
      case Format::kBF16:
        ReadColumn<Format::kBF16>(from, row, rows, begin, count, tile.vectors,
                                  out + v);
        break;
      case Format::kF16:
        ReadColumn<Format::kF16>(from, row, rows, begin, count, tile.vectors,
                                 out + v);
        break;
      default:
        ReadColumn<Format::kF32>(from, row, rows, begin, count, tile.vectors,
                                 out + v);
    }
  }
  if (args.hadamard > 1) {
    Transform(out, count, tile.vectors, static_cast<int>(args.hadamard));
  }
}

// Computes the bits of the largest magnitudes of a block: per row, or over all
// rows if they share scales. NaN is above Inf.
template <int kBlock>
JAXPLUGIN_ALWAYS_INLINE void BlockMaxima(const OperandArgs& args,
                                         const Floats* x, int vectors,
                                         Ints* maxima) {
  for (int v = 0; v < vectors; ++v) {
    Ints top = {};
    for (int i = 0; i < kBlock; ++i) {
      const Ints bits = IntsOf(x[i * vectors + v]);
      top = MaxInts(top, bits & static_cast<int32_t>(kMagnitude));
    }
    maxima[v] = top;
  }
  if (args.square == 0) return;
  Ints top = maxima[0];
  for (int v = 1; v < vectors; ++v) top = MaxInts(top, maxima[v]);
  int32_t most = top[0];
  for (int i = 1; i < kLanes; ++i) most = top[i] > most ? top[i] : most;
  for (int v = 0; v < vectors; ++v) maxima[v] = SplatInts(most);
}

// The same as Encode for the lanes of a vector.
template <typename T>
JAXPLUGIN_ALWAYS_INLINE Ints EncodeNearest(Ints bits) {
  constexpr int kShift = 23 - T::kMantissaBits;
  constexpr int32_t kMagic =
      (127 + T::kMinExponent - T::kMantissaBits + 23) << 23;
  bits = MinInts(bits, SplatInts(T::kMaxBits));
  const Ints half = ((bits >> kShift) & 1) + ((1 << (kShift - 1)) - 1);
  const Ints normal =
      ((bits + half) >> kShift) - ((127 - T::kBias) << T::kMantissaBits);
  const Ints subnormal =
      IntsOf(FloatsOf(bits) + FloatsOf(SplatInts(kMagic))) - kMagic;
  return bits >= (127 + T::kMinExponent) << 23 ? normal : subnormal;
}

// Rounds magnitudes stochastically to one of the two nearest codes. The
// probability of rounding up is the fraction that rounding down would lose. For
// subnormal codes the fraction has 22 bits.
template <typename T>
JAXPLUGIN_ALWAYS_INLINE Ints EncodeStochastic(Ints bits, Words random) {
  constexpr int kShift = 23 - T::kMantissaBits;
  constexpr int kFraction = 22;
  constexpr int32_t kMinNormal = (127 + T::kMinExponent) << 23;
  const Ints noise = reinterpret_cast<Ints>(random);
  bits = MinInts(bits, SplatInts(T::kMaxBits));
  const Ints normal = ((bits + (noise & ((1 << kShift) - 1))) >> kShift) -
                      ((127 - T::kBias) << T::kMantissaBits);
  const Ints is_normal = bits >= kMinNormal;
  constexpr int kExponent = kFraction + T::kMantissaBits - T::kMinExponent;
  const Floats small = FloatsOf(bits & ~is_normal);
  const Floats quanta = small * FloatsOf(SplatInts((127 + kExponent) << 23));
  const Ints subnormal = (__builtin_convertvector(quanta, Ints) +
                          (noise & ((1 << kFraction) - 1))) >>
                         kFraction;
  return is_normal ? normal : subnormal;
}

// The scales and codes of a chunk. Codes are in words of 32 bits, with the
// first code in the lowest bits.
struct Chunk {
  Words codes[kChunk / 4][kMaxVectors];
  uint8_t scale[kChunk / kMinBlock][kMaxTileRows];
};

// The numbers to encode a block of the rows of a vector: |x| is multiplied by
// factor (MX) or divided by it (NVFP4).
struct Step {
  Floats factor;
  Ints keep;  // masks of codes, 0 if the block is NaN
};

template <typename T, int kBlock, bool kDivide, bool kStochastic>
JAXPLUGIN_ALWAYS_INLINE void EncodeBlock(const Floats* x, int stride,
                                         const Step& step,
                                         const Threefry& random,
                                         const Counters& counters,
                                         int64_t inner, Words* out) {
  constexpr int kBits = T::kFacts.stored_bits;
  constexpr int kEach = 32 / kBits;
  for (int i = 0; i < kBlock; i += kEach) {
    Ints word = {};
#pragma GCC unroll 8
    for (int j = 0; j < kEach; ++j) {
      const Ints bits = IntsOf(x[(i + j) * stride]);
      const Floats magnitude =
          FloatsOf(bits & static_cast<int32_t>(kMagnitude));
      const Ints quotient = IntsOf(kDivide ? magnitude / step.factor
                                           : magnitude * step.factor);
      Ints code;
      if constexpr (kStochastic) {
        const Counters at = counters.After((i + j) * inner);
        code = EncodeStochastic<T>(quotient, random.Bits(at.high, at.low));
      } else {
        code = EncodeNearest<T>(quotient);
      }
      const Ints sign = (bits >> (31 - T::kSignShift)) & (1 << T::kSignShift);
      code = (code | sign) & step.keep;
      word |= code << (kBits * j);
    }
    out[i / kEach * kMaxVectors] = reinterpret_cast<Words>(word);
  }
}

#include "quantize/operand_scales.inl"

// Multiplies numbers by 2^64. Magnitudes saturate at float32's largest number.
JAXPLUGIN_ALWAYS_INLINE void ScaleTiny(Floats* x, int count) {
  constexpr int32_t kMost = static_cast<int32_t>(kInfinity) - 1 - (64 << 23);
  for (int i = 0; i < count; ++i) {
    const Ints bits = IntsOf(x[i]);
    const Ints magnitude = bits & static_cast<int32_t>(kMagnitude);
    const Floats scaled =
        FloatsOf(MinInts(magnitude, SplatInts(kMost))) * 0x1p64f;
    x[i] = FloatsOf(IntsOf(scaled) | (bits ^ magnitude));
  }
}

// Stores the codes and scales of a chunk in the rows of the results.
template <typename T, int kBlock>
JAXPLUGIN_ALWAYS_INLINE void StoreChunk(const OperandArgs& args,
                                        const Tile& tile, int64_t begin,
                                        int count, const Chunk& chunk) {
  constexpr int kBits = T::kFacts.stored_bits;
  const int words = count * kBits / 32;
  const int64_t row_bytes = BytesOf(T::kFormat, args.padded);
  uint8_t* values =
      args.values + tile.row * row_bytes + BytesOf(T::kFormat, begin);
  for (int v = 0; v < tile.vectors; ++v) {
    const int rows = static_cast<int>(Min(kLanes, tile.rows - v * kLanes));
    uint8_t* to = values + v * kLanes * row_bytes;
    for (int w = 0; w < words; w += kLanes) {
      Words square[kLanes];
      const int there = static_cast<int>(Min(kLanes, words - w));
      for (int i = 0; i < kLanes; ++i) {
        square[i] = chunk.codes[w + (i < there ? i : 0)][v];
      }
      TurnLanes(square);
      if (there == kLanes) {
        for (int i = 0; i < rows; ++i) {
          __builtin_memcpy(to + i * row_bytes + 4 * w, &square[i],
                           4 * kLanes);
        }
      } else {
        for (int i = 0; i < rows; ++i) {
          __builtin_memcpy(to + i * row_bytes + 4 * w, &square[i], 4 * there);
        }
      }
    }
  }
  uint8_t* scale =
      args.scale + tile.row * (args.padded / kBlock) + begin / kBlock;
  for (int i = 0; i < tile.rows; ++i) {
    for (int b = 0; b < count / kBlock; ++b) {
      scale[i * (args.padded / kBlock) + b] = chunk.scale[b][i];
    }
  }
}

// Quantizes values [begin, begin + count) of a tile, whole blocks and at most
// kChunk values.
template <typename T, int kBlock, bool kStochastic>
void QuantizeChunk(const OperandArgs& args, const Source& from,
                   const Nvfp4Global& global, const Tile& tile, int64_t begin,
                   int count) {
  constexpr bool kIsMx = kBlock == 32;
  const int span = static_cast<int>(Max(kBlock, args.hadamard));
  const int vectors = tile.vectors;
  constexpr uint32_t kNoKey[2] = {0, 0};
  const Threefry random(kStochastic ? args.key : kNoKey);
  Counters first[kMaxVectors];
  if constexpr (kStochastic) {
    for (int r = 0; r < vectors * kLanes; ++r) {
      const int64_t number =
          IndexOf(args.inner, tile.row + r, args.padded, begin);
      first[r / kLanes].high[r % kLanes] = static_cast<uint32_t>(number >> 32);
      first[r / kLanes].low[r % kLanes] = static_cast<uint32_t>(number);
    }
  }
  Floats x[kChunk * kMaxVectors];
  Chunk chunk;
  for (int at = 0; at < count; at += span) {
    ReadSpan(args, from, tile, begin + at, span, x);
    for (int i = 0; i < span; i += kBlock) {
      Floats* block = x + i * vectors;
      Ints maxima[kMaxVectors];
      Scales scales;
      BlockMaxima<kBlock>(args, block, vectors, maxima);
      if constexpr (kIsMx) {
        MxScales<T>(args, maxima, vectors, &scales);
      } else {
        if (global.tiny) ScaleTiny(block, kBlock * vectors);
        Nvfp4ScalesOf(args, global, block, maxima, vectors, &scales);
      }
      const int b = (at + i) / kBlock;
      for (int v = 0; v < vectors; ++v) {
        Counters counters = {};
        if (kStochastic) counters = first[v].After((at + i) * args.inner);
        EncodeBlock<T, kBlock, !kIsMx, kStochastic>(
            block + v, vectors, scales.step[v], random, counters, args.inner,
            &chunk.codes[(at + i) * T::kFacts.stored_bits / 32][v]);
        for (int r = 0; r < kLanes; ++r) {
          chunk.scale[b][v * kLanes + r] =
              static_cast<uint8_t>(scales.code[v][r]);
        }
      }
    }
  }
  StoreChunk<T, kBlock>(args, tile, begin, count, chunk);
}

using ChunkFunction = void (*)(const OperandArgs&, const Source&,
                               const Nvfp4Global&, const Tile&, int64_t begin,
                               int count);

template <typename T, int kBlock>
ChunkFunction ChunkFunctionOf(const OperandArgs& args) {
  return args.key != nullptr ? QuantizeChunk<T, kBlock, true>
                             : QuantizeChunk<T, kBlock, false>;
}

// Returns QuantizeChunk for the format and the rounding of the arguments.
ChunkFunction ChunkFunctionOf(const OperandArgs& args) {
  switch (args.format) {
    case QuantizedFormat::kMxfp8: return ChunkFunctionOf<E4M3, 32>(args);
    case QuantizedFormat::kMxfp8E5m2: return ChunkFunctionOf<E5M2, 32>(args);
    case QuantizedFormat::kMxfp4: return ChunkFunctionOf<E2M1, 32>(args);
    case QuantizedFormat::kMxfp6E2m3: return ChunkFunctionOf<E2M3, 32>(args);
    case QuantizedFormat::kMxfp6E3m2: return ChunkFunctionOf<E3M2, 32>(args);
    case QuantizedFormat::kNvfp4: return ChunkFunctionOf<E2M1, 16>(args);
  }
  return nullptr;
}

// Returns the bits of the largest magnitude of values [begin, begin + count) of
// a tile, over the blocks without NaN or Inf.
int32_t ChunkMax(const OperandArgs& args, const Source& from, const Tile& tile,
                 int64_t begin, int count) {
  const int span = static_cast<int>(Max(kMinBlock, args.hadamard));
  Floats x[kChunk * kMaxVectors];
  Ints top = {};
  for (int at = 0; at < count; at += span) {
    ReadSpan(args, from, tile, begin + at, span, x);
    for (int i = 0; i < span; i += kMinBlock) {
      Ints maxima[kMaxVectors];
      BlockMaxima<kMinBlock>(args, x + i * tile.vectors, tile.vectors, maxima);
      for (int v = 0; v < tile.vectors; ++v) {
        const Ints is_finite = maxima[v] < static_cast<int32_t>(kInfinity);
        top = MaxInts(top, maxima[v] & is_finite);
      }
    }
  }
  int32_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = top[i] > most ? top[i] : most;
  return most;
}

// Returns amax / range for the bits of amax, or 1 if amax is 0.
float GlobalScaleOf(uint32_t amax, float range) {
  // A quotient below 2^-126 becomes 2^-126, also if the caller's float mode has
  // flushed it to 0.
  const float quotient = AsFloat(amax) / range;
  return amax == 0 ? 1.0f : quotient < 0x1p-126f ? 0x1p-126f : quotient;
}

// Returns the tile of chunk `index` of a tiling, and the chunk's values.
Tile ChunkAt(const OperandArgs& args, const Tiling& tiling, int64_t index,
             int64_t* begin, int* count) {
  const Tile tile = tiling.At(index, begin);
  *count = static_cast<int>(Min(kChunk, args.padded - *begin));
  return tile;
}

// Computes amax / range, with amax over the blocks without NaN or Inf.
bool OperandGlobalScale(const OperandArgs& args, const Tiling& tiling,
                        const Source& from, int64_t each,
                        const Parallel& parallel, float* result) {
  const int64_t chunks = tiling.Count();
  const int64_t tasks = CeilDiv(chunks, each);
  Scratch scratch(static_cast<size_t>(Max(tasks, 1)) * 4);
  int32_t* maxima = reinterpret_cast<int32_t*>(scratch.get());
  if (maxima == nullptr) return false;
  const bool ok = ParallelFor(
      parallel, tasks, [=, &args, &tiling, &from](int64_t t, int) {
        int32_t amax = 0;
        for (int64_t i = t * each; i < Min(chunks, (t + 1) * each); ++i) {
          int64_t begin;
          int count;
          const Tile tile = ChunkAt(args, tiling, i, &begin, &count);
          const int32_t most = ChunkMax(args, from, tile, begin, count);
          amax = most > amax ? most : amax;
        }
        maxima[t] = amax;
      });
  int32_t amax = 0;
  for (int64_t t = 0; t < tasks; ++t) amax = Max(amax, maxima[t]);
  // With four_over_six, scales go up to 256, because 1.5 * 256 is a scale too.
  *result = GlobalScaleOf(static_cast<uint32_t>(amax),
                          (args.four_over_six ? 256.0f : 448.0f) * 6);
  return ok;
}

bool QuantizeOperand(const OperandArgs& args, const Parallel& parallel) {
  const Tiling tiling(args);
  const int64_t each = Max(1, kOperandTask / (tiling.tile_rows * kChunk));
  const Source from = {args.x, args.x_format, args.k, args.inner, 0, 0};
  float global = args.given_global ? *args.given_global : 1.0f;
  if (args.compute_global &&
      !OperandGlobalScale(args, tiling, from, each, parallel, &global)) {
    return false;
  }
  *args.global_scale = global;
  const ChunkFunction quantize = ChunkFunctionOf(args);
  const int64_t chunks = tiling.Count();
  return ParallelFor(
      parallel, CeilDiv(chunks, each),
      [=, &args, &tiling, &from](int64_t t, int) {
        // Computed in the task, which runs in the default float mode.
        const Nvfp4Global shared(global);
        for (int64_t i = t * each; i < Min(chunks, (t + 1) * each); ++i) {
          int64_t begin;
          int count;
          const Tile tile = ChunkAt(args, tiling, i, &begin, &count);
          quantize(args, from, shared, tile, begin, count);
        }
      });
}
