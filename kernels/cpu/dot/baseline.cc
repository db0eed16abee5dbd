// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot for any machine. Compilers use SSE2 on x86-64 and NEON on aarch64.

#include "dot/rule.h"
#include "kernels.h"

namespace jaxplugin {
namespace {
#include "simd/codec.inl"
#include "dot/exact.inl"
#include "dot/quantized.inl"
#include "dot/epilogue.inl"
#include "dot/gate.inl"
#include "dot/offsets.inl"
#include "simd/sums.inl"
#include "dot/blocked.inl"
#include "dot/engine_f32.inl"
}  // namespace

bool DotBaseline(const DotArgs& args, const Parallel& parallel) {
  return BlockedDot<EngineF32>(args, parallel);
}

bool GateBaseline(const GateArgs& args, const Parallel& parallel) {
  return GateRows(args, parallel);
}

void SumBlocksBaseline(const Operand& x, const Operand& weights, float* sums) {
  SumBlocks(x, weights, sums);
}

bool AddOffsetsBaseline(const OffsetArgs& args) { return AddOffsets(args); }

}  // namespace jaxplugin

