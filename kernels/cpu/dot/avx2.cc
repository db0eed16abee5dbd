// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#include "dot/rule.h"
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

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
#include "simd/unpack_avx2.inl"
#include "dot/bytes.inl"
#include "dot/engine_float_avx2.inl"
#include "dot/engine_float_many_avx2.inl"
#include "dot/few_rows_avx2.inl"
#include "dot/engine_integer_avx2.inl"
#include "dot/convert_rows.inl"

// Returns the config's engine if it is an AVX2 engine, else the rule's engine.
Engine EngineOf(const DotArgs& args) {
  switch (args.config.engine) {
    case Engine::kFloatAvx2:
    case Engine::kIntegerAvx2:
    case Engine::kFewRowsAvx2: return args.config.engine;
    default: return RuleAvx2(ShapeOf(args));
  }
}

bool Dot(const DotArgs& args, const Parallel& parallel) {
  Engine engine = EngineOf(args);
  if (engine == Engine::kFewRowsAvx2) {
    bool is_done = false;
    const bool ok =
        FewRowsDot(args, ChooseSides(args), parallel, &is_done);
    if (is_done || !ok) return ok;
    engine = Engine::kFloatAvx2;  // a float is too large or too small
  }
  if (engine == Engine::kFloatAvx2) {
    return EngineFloatMany::IsFaster(ChooseSides(args).panel_rows)
               ? BlockedDot<EngineFloatMany>(args, parallel)
               : BlockedDot<EngineFloat>(args, parallel);
  }
  return IntegerDot(args, parallel);
}

}  // namespace

bool DotAvx2(const DotArgs& args, const Parallel& parallel) {
  return Dot(args, parallel);
}

bool DotOfFewRowsAvx2(const DotArgs& args, const Parallel& parallel,
                      bool* is_done) {
  const Sides sides = ChooseSides(args);
  // Weights with f16 scales are always safe, as for DotOfFewRowsAvx512.
  if (!sides.panel_is_lhs || args.rhs.scale_kind != ScaleKind::kF16 ||
      args.rhs.fraction_bits != 0 || EngineOf(args) != Engine::kFewRowsAvx2) {
    return true;
  }
  return FewRowsDot(args, sides, parallel, is_done);
}

bool ConvertRowsAvx2(const Operand& x, const ConvertedRows& out,
                      const Parallel& parallel) {
  return ConvertRows(x, out, parallel);
}

bool GateAvx2(const GateArgs& args, const Parallel& parallel) {
  return GateRows(args, parallel);
}

void SumBlocksAvx2(const Operand& x, const Operand& weights, float* sums) {
  SumBlocks(x, weights, sums);
}

bool AddOffsetsAvx2(const OffsetArgs& args) { return AddOffsets(args); }

}  // namespace jaxplugin

#endif  // defined(__x86_64__)
