// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#include "kernels.h"

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

bool QuantizeBaseline(const QuantizeArgs& args, const Parallel& parallel) {
  return Quantize(args, parallel);
}

bool QuantizeOperandBaseline(const OperandArgs& args, const Parallel& parallel) {
  return QuantizeOperand(args, parallel);
}

bool DequantizeBaseline(const DequantizeArgs& args, const Parallel& parallel) {
  return Dequantize(args, parallel);
}

}  // namespace jaxplugin
