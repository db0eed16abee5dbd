// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#include "kernels.h"

#if defined(__x86_64__) || defined(JAXPLUGIN_EMULATE_AVX512)

#if defined(__x86_64__)
#include <immintrin.h>

#define JAXPLUGIN_AVX2_QUANTIZE  // quantize/blocks_avx2.inl
#endif

namespace jaxplugin {
namespace {
#include "simd/codec.inl"
#include "quantize/blocks.inl"
#include "quantize/lanes.inl"
#include "quantize/threefry.inl"
#include "quantize/hadamard.inl"
#include "quantize/operand.inl"
#include "quantize/dequantize.inl"
}  // namespace

bool QuantizeAvx512(const QuantizeArgs& args, const Parallel& parallel) {
  return Quantize(args, parallel);
}

bool QuantizeOperandAvx512(const OperandArgs& args, const Parallel& parallel) {
  return QuantizeOperand(args, parallel);
}

bool DequantizeAvx512(const DequantizeArgs& args, const Parallel& parallel) {
  return Dequantize(args, parallel);
}

}  // namespace jaxplugin

#endif
