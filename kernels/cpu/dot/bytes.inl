// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The bytes that integer instructions multiply: integers, and twice the values
// of E2M1. Their scales include the unit of the bytes.

// The unit of the bytes that stand for a side's values, as a power of two.
JAXPLUGIN_ALWAYS_INLINE int UnitExponent(const Operand& x) {
  return x.format == Format::kE2M1 ? -1 : -x.fraction_bits;
}

// Decodes scales [c0, c0 + count) of a row, times the unit.
inline void DecodeByteScales(const Operand& x, int64_t row, int64_t c0,
                             int64_t count, float* out) {
  const uint8_t* at = ScaleAt(x, row, c0);
  const auto decode = [&](ScaleKind kind) __attribute__((always_inline)) {
    for (int64_t i = 0; i < count; ++i) {
      out[i] = ScaleTimes(kind, at + i * ScaleSize(kind), UnitExponent(x));
    }
  };
  switch (x.scale_kind) {  // a loop for each kind, so that it is vectorized
    case ScaleKind::kE8M0: return decode(ScaleKind::kE8M0);
    case ScaleKind::kE4M3: return decode(ScaleKind::kE4M3);
    case ScaleKind::kF32: return decode(ScaleKind::kF32);
    case ScaleKind::kBF16: return decode(ScaleKind::kBF16);
    case ScaleKind::kF16: return decode(ScaleKind::kF16);
    default: return decode(x.scale_kind);
  }
}

// Decodes the scales of kCount pieces of a row from piece `first` on. Those past
// the end are any finite numbers.
template <int kPiece, int kCount>
void DecodePieceScales(const Operand& x, int64_t row, int64_t first,
                       float* out) {
  const int64_t each = x.block / kPiece;  // pieces of a block
  const int64_t present = Min(kCount, CeilDiv(x.k, kPiece) - first);
  for (int64_t i = present; i < kCount; ++i) out[i] = 0;
  if (each == 1) return DecodeByteScales(x, row, first, present, out);
  const int64_t c0 = first / each;
  float scale[kCount];
  DecodeByteScales(x, row, c0, (first + present - 1) / each + 1 - c0, scale);
  int64_t end = (c0 + 1) * each - first;  // of the pieces of scale[0]
  for (int64_t i = 0, c = 0; i < present; ++c, end += each) {
    for (; i < Min(end, present); ++i) out[i] = scale[c];
  }
}

// The byte of a code of four bits: an int4 value, or twice an E2M1 value.
inline int ByteOf(Format format, int code) {
  return format == Format::kInt4
             ? (code ^ 8) - 8
             : static_cast<int>(2 * Decode<E2M1>(static_cast<uint32_t>(code)));
}

// Reads the bytes of values [k0, k0 + 32) of a row; they are 0 past the end.
inline void ReadBytes(const Operand& x, int64_t row, int64_t k0, int8_t* out) {
  alignas(64) uint8_t codes[32] = {};
  const int64_t begin = BytesOf(x.format, k0);
  const int64_t count = Min(BytesOf(x.format, 32), x.row_bytes - begin);
  if (count > 0) __builtin_memcpy(codes, RowValues(x, row) + begin, count);
  if (x.format == Format::kInt8) {
    __builtin_memcpy(out, codes, 32);
    return;
  }
  for (int i = 0; i < 16; ++i) {
    out[2 * i] = static_cast<int8_t>(ByteOf(x.format, codes[i] & 15));
    out[2 * i + 1] = static_cast<int8_t>(ByteOf(x.format, codes[i] >> 4));
  }
}
