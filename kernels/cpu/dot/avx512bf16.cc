// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot for AVX-512 F, BW, DQ, VL, VBMI, VNNI and BF16: Zen 4, Sapphire
// Rapids and newer.

#include "dot/rule.h"
#include "kernels.h"

#if defined(__x86_64__) || defined(JAXPLUGIN_EMULATE_AVX512)

#if defined(JAXPLUGIN_EMULATE_AVX512)
#include "tests/emulation/avx512.h"
#else
#include <immintrin.h>
#endif

namespace jaxplugin {
namespace {
#if defined(JAXPLUGIN_EMULATE_AVX512)
using namespace emulated;
#endif
#include "simd/codec.inl"
#include "dot/exact.inl"
#include "dot/quantized.inl"
#include "dot/epilogue.inl"
#include "dot/gate.inl"
#include "simd/sums.inl"
#include "dot/blocked.inl"
#include "simd/unpack_avx512.inl"
#include "dot/engine_bf16.inl"
#include "dot/engine_bf16_rows.inl"
#include "dot/engine_float_avx512.inl"
#include "dot/engine_vnni.inl"
#include "dot/bytes.inl"
#include "dot/engine_vnni_integers.inl"
#include "dot/few_rows_avx512.inl"
#include "dot/few_rows_vnni.inl"
#include "dot/convert_rows.inl"
#include "dot/bf16_factors.inl"

// Runs the engines of the next lower instruction set: AVX2, or the baseline if
// AVX-512 is emulated on another architecture.
bool DotBelow(const DotArgs& args, const Parallel& parallel) {
#if defined(__x86_64__)
  return DotAvx2(args, parallel);
#else
  return DotBaseline(args, parallel);
#endif
}

// Returns the config's engine, or the rule's engine if the config has none.
Engine EngineOf(const DotArgs& args) {
  return args.config.engine == Engine::kByRule ? RuleAvx512Bf16(ShapeOf(args))
                                               : args.config.engine;
}

}  // namespace

bool DotAvx512Bf16(const DotArgs& args, const Parallel& parallel) {
  const Sides sides = ChooseSides(args);
  const Engine engine = EngineOf(args);
  if (engine == Engine::kFewRowsVnni) {
    return FewRowsVnniDot(args, sides, parallel);
  }
  if (engine == Engine::kVnni) {
    return AreIntegers(SidesOf(ShapeOf(args)))
               ? VnniIntegerDot(args, sides, parallel)
               : VnniDot(args, sides, parallel);
  }
  if (engine == Engine::kFloatAvx512) {
    return BlockedDot<EngineFloat>(args, parallel);
  }
  if (engine != Engine::kBF16 && engine != Engine::kBF16Rows &&
      engine != Engine::kFewRowsAvx512) {
    return DotBelow(args, parallel);
  }
  // Codebooks are decoded to float32.
  const bool panel_is_bf16 = sides.strip->format != Format::kCodebook &&
                             BF16CanHold(*sides.panel, parallel);
  bool is_few = engine == Engine::kFewRowsAvx512;
  if (is_few && !panel_is_bf16) {
    // The rule does not see the numbers, and may have assumed that bf16
    // represents all of them.
    is_few = args.config.engine == engine ||
             sides.panel_rows <=
                 StreamedRowsAvx512(SidesOf(ShapeOf(args)), false);
  }
  if (is_few) {
    const Factors factors = panel_is_bf16 ? Factors::kBF16 : Factors::kF32;
    bool is_done = false;
    const bool ok = FewRowsDot(args, sides, factors, parallel, &is_done);
    if (is_done || !ok) return ok;
  }
  if (panel_is_bf16 && IsScaledByAvx512(ShapeOf(*sides.strip))) {
    return BlockedDot<EngineBF16Of<true>>(args, parallel);
  }
  if (!panel_is_bf16 || !BF16CanHold(*sides.strip, parallel)) {
    return RuleFloatAvx512(ShapeOf(args)) == Engine::kFloatAvx512
               ? BlockedDot<EngineFloat>(args, parallel)
               : DotBelow(args, parallel);
  }
  return engine == Engine::kBF16Rows
             ? BlockedDot<EngineBF16Rows>(args, parallel)
             : BlockedDot<EngineBF16>(args, parallel);
}

bool DotOfFewRowsAvx512(const DotArgs& args, const Parallel& parallel,
                        bool* is_done) {
  const Sides sides = ChooseSides(args);
  // Weights with f16 scales are always safe. Other weights are not given up for
  // a whole call: which columns a call has depends on the number of threads.
  if (!sides.panel_is_lhs || args.rhs.scale_kind != ScaleKind::kF16 ||
      args.rhs.fraction_bits != 0 ||
      EngineOf(args) != Engine::kFewRowsAvx512 ||
      !BF16CanHold(*sides.panel, parallel)) {
    return true;
  }
  return FewRowsDot(args, sides, Factors::kBF16, parallel, is_done);
}

bool ConvertRowsAvx512(const Operand& x, const ConvertedRows& out,
                        const Parallel& parallel) {
  return ConvertRows(x, out, parallel);
}

bool GateAvx512(const GateArgs& args, const Parallel& parallel) {
  return GateRows(args, parallel);
}

}  // namespace jaxplugin

#endif
