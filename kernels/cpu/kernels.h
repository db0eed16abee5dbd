// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// What crosses the line between the FFI layer (compiled for the oldest machine
// we serve) and the kernels (each compiled once per instruction set).
//
// The kernel files include this header, what it includes, and C headers,
// nothing else: an inline function of the C++ library that was compiled with
// AVX-512 could be the copy the linker keeps for everyone, and crash an older
// machine.

#ifndef JAXPLUGIN_KERNELS_CPU_KERNELS_H_
#define JAXPLUGIN_KERNELS_CPU_KERNELS_H_

#include <stdint.h>

#include "dot/config.h"
#include "parallel.h"
#include "simd/formats.h"

namespace jaxplugin {

enum class Activation { kNone = 0, kRelu = 1, kGelu = 2, kSilu = 3 };

// A matrix of `rows` rows along the contracting dimension, all batch entries
// one after the other.
struct Operand {
  Format format;
  ScaleKind scale_kind;
  const uint8_t* values;
  const uint8_t* scale;  // [rows, scale_cols], linear; null when plain
  int64_t rows;
  int64_t k;
  int64_t row_bytes;   // bytes of one row of values
  int64_t block;       // values a scale covers: 16 or 32
  int64_t scale_cols;  // ceil(k / block)
};

// out[b, i, j] = cast(activation(sum_k lhs[b, i, k] * rhs[b, j, k] * global
//                                * power + bias[j]) + residual[b, i, j])
struct DotArgs {
  Operand lhs;  // batch * m rows
  Operand rhs;  // batch * n rows, or n rows when !rhs_batched
  int64_t batch, m, n, k;
  bool rhs_batched;
  const float* global_scale;  // null: 1
  const float* global_power;  // a power of two, multiplied after it; null: 1
  const float* bias;          // [n]; null: none
  const void* residual;       // [batch, m, n]; null: none
  Format residual_format;
  void* out;  // [batch, m, n]
  Format out_format;
  Activation activation;
  // Numbers subtracted from the exponents of each row's scales; null if none.
  const int16_t* lhs_shift;  // [lhs.rows]
  const int16_t* rhs_shift;  // [rhs.rows]
  // Null, or what is set to 1 where a row was met that the fast paths may not
  // touch (kSafeExponent): the kernel gives up then, and out is garbage.
  uint32_t* gave_up;
  DotConfig config;  // if all fields are 0, rules choose
};

// A gated activation: of n columns of f32, half are gates.
enum class Gate { kSwiglu = 0, kSwigluOai };

// out[i, j] = cast(gated(gate, value)), of gates and values [i, j] (kSwiglu), or
// [i, 2 * j] (kSwigluOai).
struct GateArgs {
  Gate gate;
  const float* gates;
  const float* values;
  int64_t row_floats;     // from a row of gates, or of values, to the next
  int64_t rows, columns;  // of the result
  void* out;
  int64_t out_columns;  // from a row of the result to the next
  Format out_format;
};

struct QuantizeArgs {
  const void* x;  // [rows, k]
  Format x_format;
  int64_t rows, k;
  QuantizedFormat format;
  bool round_up;              // MX scales: "up"; else "floor"
  bool compute_global;        // NVFP4: global = amax(x) / 2688
  const float* given_global;  // NVFP4 when !compute_global; null: 1
  uint8_t* values;            // [rows, k], or [rows, k / 2] for FP4
  uint8_t* scale;             // [rows, k / block]
  float* global_scale;        // the global scale used (1 for MX)
};

// Along any dimension, and with what recipes of training ask for. Rows are
// outer * inner, in this order; k of a row is followed by zeros up to `padded`.
struct OperandArgs {
  const void* x;  // [outer, k, inner]
  Format x_format;
  int64_t outer, k, inner;
  int64_t padded;  // whole blocks, and whole groups of the transform
  QuantizedFormat format;
  bool round_up;              // MX scales: "up"; else "floor"
  bool compute_global;        // NVFP4: global = amax / (448 * 6)
  const float* given_global;  // NVFP4 when !compute_global; null: 1
  int64_t hadamard;           // values transformed together; 1: none
  // Rows that are cut into groups of a block's size, the last of which may be
  // smaller; those of a group share their scales. 0: none do.
  int64_t square;
  bool four_over_six;   // NVFP4: scaled to 6 or to 4; global = amax / (256 * 6)
  bool scale_up;        // NVFP4: scales are rounded up, not to the nearest
  const uint32_t* key;  // [2], for stochastic rounding; null: to nearest
  uint8_t* values;      // [outer, inner, padded], FP4 two a byte
  uint8_t* scale;       // [outer, inner, padded / block]
  float* global_scale;  // the global scale used (1 for MX)
};

struct DequantizeArgs {
  Operand x;
  const float* global_scale;  // null: 1
  void* out;                  // [rows, k]
  Format out_format;
};

// All kernels return false when scratch memory could not be had.
bool DotBaseline(const DotArgs&, const Parallel&);
bool DotAvx2(const DotArgs&, const Parallel&);
bool DotAvx512Bf16(const DotArgs&, const Parallel&);
bool DotAmx(const DotArgs&, const Parallel&);  // where AmxIsCompiled
bool GateBaseline(const GateArgs&, const Parallel&);
bool GateAvx2(const GateArgs&, const Parallel&);
bool GateAvx512(const GateArgs&, const Parallel&);
bool QuantizeBaseline(const QuantizeArgs&, const Parallel&);
bool QuantizeAvx2(const QuantizeArgs&, const Parallel&);
bool QuantizeAvx512(const QuantizeArgs&, const Parallel&);
bool QuantizeOperandBaseline(const OperandArgs&, const Parallel&);
bool DequantizeBaseline(const DequantizeArgs&, const Parallel&);
bool QuantizeOperandAvx2(const OperandArgs&, const Parallel&);
bool DequantizeAvx2(const DequantizeArgs&, const Parallel&);
bool QuantizeOperandAvx512(const OperandArgs&, const Parallel&);
bool DequantizeAvx512(const DequantizeArgs&, const Parallel&);

// Whether the compiler knew AMX.
bool AmxIsCompiled();

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  bool (*dot)(const DotArgs&, const Parallel&);
  bool (*gate)(const GateArgs&, const Parallel&);
  bool (*quantize)(const QuantizeArgs&, const Parallel&);
  bool (*dequantize)(const DequantizeArgs&, const Parallel&);
  bool (*quantize_operand)(const OperandArgs&, const Parallel&);
};

// The values of the `isa` attribute. kAuto takes the best the machine has; a
// level the machine lacks is an error, never an illegal instruction.
enum class Isa { kAuto = 0, kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// The kernels of a level, or null when this build or machine lacks it.
const Kernels* GetKernels(Isa isa);

// The level of what GetKernels gave.
Isa LevelOf(const Kernels& kernels);

// kernels.dot; where rows have scales far from 1 they are rebased, so that it
// stays fast (dot/rebase.cc).
bool Dot(const Kernels& kernels, const DotArgs&, const Parallel&);

// Rows that the fast dot paths may not touch are those with a block scale
// outside 2^+-kSafeExponent and a nonzero value under it. Inside that range
// every product is a multiple of 2^-124 (E5M2: 2^(-16-46) each) and below
// 2^124, so that neither float32 nor vdpbf16ps (which flushes subnormals)
// loses anything; outside it the dot runs in float64 (dot/exact.inl).
inline constexpr int kSafeExponent = 46;

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_KERNELS_H_
