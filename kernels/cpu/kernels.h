// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The interface between the FFI layer, which is compiled for the oldest
// supported machine, and the kernels, which are compiled once per instruction
// set.
//
// Kernel files include only this header and C headers. Inline functions of the
// C++ library are forbidden there: the linker keeps one copy of such a function
// for the whole library, and a copy compiled for AVX-512 would crash an older
// machine.

#ifndef JAXPLUGIN_KERNELS_CPU_KERNELS_H_
#define JAXPLUGIN_KERNELS_CPU_KERNELS_H_

#include <stdint.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "dot/config.h"
#include "parallel.h"
#include "simd/formats.h"

namespace jaxplugin {

enum class Activation { kNone = 0, kRelu = 1, kGelu = 2, kSilu = 3 };

// The dtypes of floats, and of zero points (integers).
enum class OffsetKind { kF32, kBF16, kF16, kUint8, kInt8 };

JAXPLUGIN_ALWAYS_INLINE int64_t OffsetSize(OffsetKind kind) {
  return kind == OffsetKind::kF32 ? 4 : kind >= OffsetKind::kUint8 ? 1 : 2;
}

// A matrix [rows, k], with the contracting dimension last. The rows of all
// batch entries follow each other.
struct Operand {
  Format format;
  ScaleKind scale_kind;
  const uint8_t* values;
  const uint8_t* scale;  // [*, scale_cols], linear; null if plain floats
  int64_t rows;
  int64_t k;
  int64_t row_bytes;   // bytes of one row of values
  int64_t block;       // values that share a scale; a multiple of 16
  int64_t scale_cols;  // ceil(k / block)
  int fraction_bits;   // integers count units of 2^-fraction_bits
  // The values of a codebook, by the 4 stored bits of a code. Magnitudes are 0
  // or 2^-16 to 2^16. Only dots read it.
  float codebook[16];
  // Row r has row (r + scale_start) >> scale_shift of `scale`.
  int scale_shift;
  int64_t scale_start;
  // The zero point or minimum of each block. A value is code * scale, plus
  // (code_offset - zero point) * scale or code_offset * scale + minimum. Only
  // AddOffsets and the kernels of a few rows read it.
  const uint8_t* offset;  // [rows, scale_cols]; null: none
  OffsetKind offset_kind;
  float code_offset;
};

// Returns rows [start, start + count) of an operand.
JAXPLUGIN_ALWAYS_INLINE Operand RowsOf(Operand x, int64_t start, int64_t count) {
  x.values += start * x.row_bytes;
  if (x.scale != nullptr) {
    const int64_t first = x.scale_start + start;
    const int64_t scale_row = first >> x.scale_shift;
    x.scale += scale_row * x.scale_cols * ScaleSize(x.scale_kind);
    x.scale_start = first - (scale_row << x.scale_shift);
  }
  if (x.offset != nullptr) {
    x.offset += start * x.scale_cols * OffsetSize(x.offset_kind);
  }
  x.rows = count;
  return x;
}

// How the blocks of a run of values are quantized.
struct Codec {
  QuantizedFormat format;
  bool round_up;       // rounding of MX scales: "up"; else "floor"
  float global_scale;  // of NVFP4
};

// The columns of each run of a QuantizedResult are a multiple of this many, or
// end with the row.
inline constexpr int64_t kQuantizedColumns = 32;

// A result that is quantized along its columns (dot/quantized.inl).
struct QuantizedResult {
  Codec codec;
  // The function of Kernels.
  void (*quantize_run)(const Codec&, const float* x, int64_t count,
                       uint8_t* values, uint8_t* scale);
  uint8_t* values;
  uint8_t* scale;
  int64_t columns;  // of a row, whole blocks
  // Bits of the largest finite magnitude, 0 at first. Null: not computed.
  uint32_t* amax;
};

// out[b, i, j] = cast(activation(sum_k lhs[b, i, k] * rhs[b, j, k] * global
//                                * power + bias[j]) + residual[b, i, j])
struct DotArgs {
  Operand lhs;  // batch * m rows
  Operand rhs;  // batch * n rows, or n rows if !rhs_batched
  int64_t batch, m, n, k;
  bool rhs_batched;
  const float* global_scale;  // null: 1
  const float* global_power;  // a second factor, multiplied next; null: 1
  const float* bias;          // [n]; null: none
  const void* residual;       // [batch, m, n]; null: none
  Format residual_format;
  void* out;  // [batch, m, n]
  Format out_format;
  // If not null, out_format is f32, and the result goes there instead of `out`.
  const QuantizedResult* quantized;
  Activation activation;
  // The number that was subtracted from the exponents of a row's scales
  // (dot/rebase.cc); null if the rows are not rebased.
  const int16_t* lhs_shift;  // [lhs.rows]
  const int16_t* rhs_shift;  // [rhs.rows]
  // If not null, the kernel sets it to 1 and stops when it finds an unsafe row
  // (kSafeExponent). The result is then invalid.
  uint32_t* gave_up;
  DotConfig config;  // the rules choose every field that is 0
  // Whether the side of plain floats may be converted (RowsFormOf).
  bool quantize_rows;
  // The sums of each row of lhs over the blocks of rhs, as in OffsetArgs. If
  // not null, the kernel adds the offsets of rhs (Kernels::dot_of_few_rows).
  const float* block_sums;
};

// The form in which a dot multiplies its side of plain floats.
enum class RowsForm { kGiven = 0, kBF16, kInt8 };

// That side in another form.
struct ConvertedRows {
  RowsForm form;    // kBF16 or kInt8
  uint8_t* values;  // [rows, k]
  float* scale;     // kInt8: [rows, ceil(k / 32)]
};

// A gated activation: half of the n columns (f32) are gates, half are values.
enum class Gate { kSwiglu = 0, kSwigluOai };

// out[i, j] = cast(f(gates[i, j'], values[i, j'])), where f is the activation
// and j' is j (kSwiglu) or 2 * j (kSwigluOai).
struct GateArgs {
  Gate gate;
  const float* gates;
  const float* values;
  int64_t row_floats;     // row stride of gates and values, in floats
  int64_t rows, columns;  // of the result
  void* out;
  int64_t out_columns;  // row stride of the result, in elements
  Format out_format;
};

// Rows of block sums are padded with zeros to a multiple of this many.
inline constexpr int64_t kTermsMultiple = 16;

// The offsets of `n` rows of weights, and the block sums of `m` rows of x.
struct OffsetArgs {
  const Operand* weights;
  int64_t row, n;       // rows [row, row + n) of the weights
  const float* sums;    // [m, scale_cols rounded up to kTermsMultiple]
  int64_t m;
  const float* result;  // [m, n], whose rows are `result_stride` floats apart
  int64_t result_stride;
  float* out;           // may be `result`
  int64_t out_stride;
};

// The values of the attributes `prologue` and `halves` of quantize.
enum class PrologueFunction {
  kNone = 0,
  kRmsNorm,
  kLayerNorm,
  kSiluAndMul,
  kGeluAndMul,
  kSwigluOai,
  kExactGeluAndMul,
  kSilu,
  kGelu,
  kRelu,
  kExactGelu,
};
enum class PrologueHalves { kNone = 0, kSplit, kInterleaved };
// The value of its attribute `gradient`: with respect to x or to up.
enum class PrologueGradient { kNone = 0, kX, kUp };

// A function of x, whose f32 result is quantized (quantize/prologue.inl).
struct Prologue {
  PrologueFunction function;
  PrologueHalves halves;  // rows of x are 2 * k gates and factors
  PrologueGradient gradient;  // then k is that of x
  float epsilon;          // of norms
  float alpha, limit;     // of swigluoai
  const void* up;         // factors without halves, like x; null: none
  const float* weight;    // [k], of norms; null: 1
  const float* bias;      // [k], or [2 * k] of gates and factors; null: none
  const void* residual;   // of norms, like x; null: none
  void* sum;              // x + residual, or a norm's gradient, like x
  const void* cotangent;  // of gradients: of the function, in x's dtype
  float* y;               // [rows, k] for the f32 result; null: not wanted
  // Bits of the result's largest finite magnitude, 0 at first; null: not wanted.
  uint32_t* amax;
  // [entries, k]: sums of the f32 result over the rows of each entry, or those of
  // the gradient of a norm's weight; null: not wanted.
  float* column_sums;
  int64_t entries;

  JAXPLUGIN_ALWAYS_INLINE bool IsNorm() const {
    return function == PrologueFunction::kRmsNorm ||
           function == PrologueFunction::kLayerNorm;
  }
  JAXPLUGIN_ALWAYS_INLINE bool IsNormGradient() const {
    return IsNorm() && gradient != PrologueGradient::kNone;
  }
  JAXPLUGIN_ALWAYS_INLINE bool IsGated() const {
    return function >= PrologueFunction::kSiluAndMul &&
           function <= PrologueFunction::kExactGeluAndMul;
  }
};

struct OperandArgs;

struct QuantizeArgs {
  const void* x;  // [rows, k], unless the prologue has halves
  Format x_format;
  int64_t rows, k;
  Prologue prologue;
  QuantizedFormat format;
  bool round_up;              // rounding of MX scales: "up"; else "floor"
  bool compute_global;        // NVFP4: global scale = amax(x) / 2688
  const float* given_global;  // NVFP4 if !compute_global; null: 1
  uint8_t* values;            // [rows, k], or [rows, k / 2] for FP4
  uint8_t* scale;             // [rows, k / block]
  float* global_scale;        // the global scale used (1 for MX)
  // With a prologue: its result is quantized along k, as an array [rows, k, 1],
  // and along runs of rows, as [rows / run, run, k]. Values are null if a result
  // is not wanted. The two replace the fields from `format` on; their x is not
  // used. Null: along k, as these fields say.
  const OperandArgs* sides;
};

// Limit of `padded` - `k` of the second one.
inline constexpr int64_t kMostPadding = 128;

// Quantization along any dimension, with the options of training recipes. A row
// is one (outer, inner) pair. Its k values are followed by zeros up to
// `padded`.
struct OperandArgs {
  const void* x;  // [outer, k, inner]
  Format x_format;
  int64_t outer, k, inner;
  int64_t padded;  // whole blocks, and whole groups of the transform
  QuantizedFormat format;
  bool round_up;              // rounding of MX scales: "up"; else "floor"
  bool compute_global;        // NVFP4: global scale = amax / (448 * 6)
  const float* given_global;  // NVFP4 if !compute_global; null: 1
  int64_t hadamard;           // group size of the transform; 1: no transform
  // Each run of `square` rows is cut into groups of `block` rows; the last
  // group may be smaller. The rows of a group share their scales. 0: no
  // sharing.
  int64_t square;
  // NVFP4: scale each block to 6 or 4; global scale = amax / (256 * 6).
  bool four_over_six;
  bool scale_up;        // NVFP4: round scales up instead of to nearest
  const uint32_t* key;  // [2], for stochastic rounding; null: to nearest
  uint8_t* values;      // [outer, inner, padded]; FP4: two values a byte
  uint8_t* scale;       // [outer, inner, padded / block]
  float* global_scale;  // the global scale used (1 for MX)
};

struct DequantizeArgs {
  Operand x;
  const float* global_scale;  // null: 1
  void* out;                  // [rows, k]
  Format out_format;
};

// All kernels return false if they cannot allocate scratch memory.
bool DotBaseline(const DotArgs&, const Parallel&);
bool DotAvx2(const DotArgs&, const Parallel&);
bool DotAvx512Bf16(const DotArgs&, const Parallel&);
bool DotAmx(const DotArgs&, const Parallel&);  // requires AmxIsCompiled()
bool DotOfFewRowsAvx2(const DotArgs&, const Parallel&, bool* is_done);
bool DotOfFewRowsAvx512(const DotArgs&, const Parallel&, bool* is_done);
bool DotNeonDotprod(const DotArgs&, const Parallel&);
bool DotNeonI8mm(const DotArgs&, const Parallel&);
bool ConvertRowsAvx2(const Operand&, const ConvertedRows&, const Parallel&);
bool ConvertRowsAvx512(const Operand&, const ConvertedRows&, const Parallel&);
bool ConvertRowsNeon(const Operand&, const ConvertedRows&, const Parallel&);
bool GateBaseline(const GateArgs&, const Parallel&);
bool GateAvx2(const GateArgs&, const Parallel&);
bool GateAvx512(const GateArgs&, const Parallel&);
// Writes the sums over the blocks of `weights` of each row of plain floats.
void SumBlocksBaseline(const Operand& x, const Operand& weights, float* sums);
void SumBlocksAvx2(const Operand& x, const Operand& weights, float* sums);
// out[i, j] = result[i, j] + sum_b sums[i, b] * offset of block b of row j.
bool AddOffsetsBaseline(const OffsetArgs&);
bool AddOffsetsAvx2(const OffsetArgs&);
bool QuantizeBaseline(const QuantizeArgs&, const Parallel&);
void QuantizeRunBaseline(const Codec&, const float* x, int64_t count,
                         uint8_t* values, uint8_t* scale);
bool QuantizeAvx2(const QuantizeArgs&, const Parallel&);
void QuantizeRunAvx2(const Codec&, const float* x, int64_t count,
                     uint8_t* values, uint8_t* scale);
bool QuantizeAvx512(const QuantizeArgs&, const Parallel&);
void QuantizeRunAvx512(const Codec&, const float* x, int64_t count,
                       uint8_t* values, uint8_t* scale);
bool QuantizeOperandBaseline(const OperandArgs&, const Parallel&);
bool DequantizeBaseline(const DequantizeArgs&, const Parallel&);
bool QuantizeOperandAvx2(const OperandArgs&, const Parallel&);
bool DequantizeAvx2(const DequantizeArgs&, const Parallel&);
bool QuantizeOperandAvx512(const OperandArgs&, const Parallel&);
bool DequantizeAvx512(const DequantizeArgs&, const Parallel&);

// Whether the compiler that built the library supports AMX.
bool AmxIsCompiled();

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  bool (*dot)(const DotArgs&, const Parallel&);
  bool (*gate)(const GateArgs&, const Parallel&);
  void (*sum_blocks)(const Operand& x, const Operand& weights, float* sums);
  bool (*add_offsets)(const OffsetArgs&);
  bool (*quantize)(const QuantizeArgs&, const Parallel&);
  bool (*dequantize)(const DequantizeArgs&, const Parallel&);
  bool (*quantize_operand)(const OperandArgs&, const Parallel&);
  // Quantizes x[0, count), whole blocks along a row, to the codes from `values`
  // on and the scales from `scale` on. The bits are those of `quantize`. Call it
  // in a parallel loop, because its float mode is that of the loop's bodies.
  void (*quantize_run)(const Codec&, const float* x, int64_t count,
                       uint8_t* values, uint8_t* scale);
  // Null if no dot of the instruction set converts rows (RowsFormOf).
  bool (*convert_rows)(const Operand&, const ConvertedRows&, const Parallel&);
  // Computes a dot with offsets and block sums. *is_done stays false if it
  // cannot. Null if the instruction set has no such kernels.
  bool (*dot_of_few_rows)(const DotArgs&, const Parallel&,
                          bool* is_done) = nullptr;
};

// The values of the `isa` attribute. kAuto selects the best instruction set of
// the machine. Only append: an instruction set has the engines of those before it
// on the same architecture. From kNeonDotprod on they are of aarch64.
enum class Isa {
  kAuto = 0,
  kBaseline,
  kAvx2,
  kAvx512,
  kAvx512Bf16,
  kAmx,
  kNeonDotprod,
  kNeonI8mm,
};
inline constexpr int kIsas = 8;

// Returns the kernels of an instruction set, or null if the build or the
// machine does not support it.
const Kernels* GetKernels(Isa isa);

// Returns the instruction set of kernels that GetKernels returned.
Isa LevelOf(const Kernels& kernels);

// Returns the form in which a dot multiplies its side of floats.
RowsForm RowsFormOf(const Kernels& kernels, const DotArgs&);

// Converts that side to a form other than kGiven, in `memory`, which has
// ConvertedRowsBytes, and replaces it in `args`. The dot then has the bits of a
// dot of a converted operand. Returns false if `memory` is null.
int64_t ConvertedRowsBytes(const DotArgs&, RowsForm);
bool ConvertRows(const Kernels& kernels, RowsForm, uint8_t* memory,
                 const Parallel&, DotArgs* args);

// Converts rows if asked, and runs kernels.dot. If rows have scales far from
// 1, it rebases them and runs kernels.dot again (dot/rebase.cc). If rhs has
// offsets, the result must be f32 without an epilogue, and batch must be 1.
bool Dot(const Kernels& kernels, const DotArgs&, const Parallel&);

// Dot for an rhs with offsets (dot/offsets.cc).
bool DotWithOffsets(const Kernels& kernels, const DotArgs&, const Parallel&);

// A row is safe if the exponent of each of its scales is within
// +-kSafeExponent. NaN, scale 0, and finite scales of all-zero blocks do not
// count. With E8M0 scales, the product of two values of safe rows is a multiple
// of 2^-124 (E5M2: each value is a multiple of 2^(-16-46)) and below 2^124. So
// neither float32 nor vdpbf16ps, which flushes subnormals, loses anything. With
// other scales, products are rounded but are not subnormal. Dot rebases unsafe
// rows; rows that stay unsafe, as those with an Inf scale, are computed in
// float64 (dot/exact.inl).
inline constexpr int kSafeExponent = 46;

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_KERNELS_H_
