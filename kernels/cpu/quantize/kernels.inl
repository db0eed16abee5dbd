// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The kernels of one instruction set. JAXPLUGIN_NAME(f) is the name of its
// function f.

#include "kernels.h"

namespace jaxplugin {
namespace {
#include "simd/codec.inl"
#include "quantize/blocks.inl"
#include "quantize/lanes.inl"
#include "quantize/threefry.inl"
#include "quantize/hadamard.inl"
#include "quantize/operand.inl"
#include "quantize/rows.inl"
#include "quantize/dequantize.inl"
}  // namespace

bool JAXPLUGIN_NAME(Quantize)(const QuantizeArgs& args,
                              const Parallel& parallel) {
  return Quantize(args, parallel);
}

void JAXPLUGIN_NAME(QuantizeRun)(const Codec& codec, const float* x,
                                 int64_t count, uint8_t* values,
                                 uint8_t* scale) {
  QuantizeRun(codec, x, count, values, scale);
}

bool JAXPLUGIN_NAME(QuantizeOperand)(const OperandArgs& args,
                                     const Parallel& parallel) {
  return QuantizeOperand(args, parallel);
}

bool JAXPLUGIN_NAME(Dequantize)(const DequantizeArgs& args,
                                const Parallel& parallel) {
  return Dequantize(args, parallel);
}

}  // namespace jaxplugin
