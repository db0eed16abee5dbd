// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Results that are quantized from float32 in cache.

// Quantizes x[rows, columns] to the rows from `row` on and the columns from
// `column` on. The order of the calls changes no bit.
inline void StoreQuantized(const QuantizedResult& out, const float* x,
                           int64_t row, int64_t rows, int64_t column,
                           int64_t columns) {
  // Rows are quantized together, because quantize_run is slow for few blocks.
  constexpr int64_t kTogether = 1024;
  uint8_t codes[kTogether], codes_of_scales[kTogether / 16];
  const QuantizedFacts facts = FactsOf(out.codec.format);
  const int64_t row_bytes = BytesOf(facts.values, columns);
  const int64_t row_scales = columns / facts.block;
  const int64_t some = Max(1, kTogether / columns);
  for (int64_t r0 = 0; r0 < rows; r0 += some) {
    const int64_t count = Min(some, rows - r0);
    const int64_t at = (row + r0) * out.columns + column;
    uint8_t* values = out.values + BytesOf(facts.values, at);
    uint8_t* scale = out.scale + at / facts.block;
    const float* from = x + r0 * columns;
    if (count == 1 || columns == out.columns) {
      out.quantize_run(out.codec, from, count * columns, values, scale);
      continue;
    }
    // The rows of a column may be in the same set of a cache.
    const int64_t stride = BytesOf(facts.values, out.columns);
    for (int64_t r = 0; r < count; ++r) {
      __builtin_prefetch(values + r * stride, 1);
      __builtin_prefetch(scale + r * (out.columns / facts.block), 1);
    }
    out.quantize_run(out.codec, from, count * columns, codes, codes_of_scales);
    for (int64_t r = 0; r < count; ++r) {
      __builtin_memcpy(values + r * stride, codes + r * row_bytes, row_bytes);
      __builtin_memcpy(scale + r * (out.columns / facts.block),
                       codes_of_scales + r * row_scales, row_scales);
    }
  }
  if (out.amax != nullptr) RaiseAmax(FiniteAmax(x, rows * columns), out.amax);
}
