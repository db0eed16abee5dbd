// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot for AMX-TILE and AMX-BF16, in addition to the instruction sets of
// avx512bf16.cc: Sapphire Rapids and newer. If the compiler does not support
// AMX, this file has no kernels.

#include "dot/rule.h"
#include "kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)

#include <immintrin.h>

namespace jaxplugin {
namespace {
#include "simd/codec.inl"
#include "dot/exact.inl"
#include "dot/quantized.inl"
#include "dot/epilogue.inl"
#include "simd/sums.inl"
#include "dot/blocked.inl"
#include "simd/unpack_avx512.inl"
#include "dot/engine_amx.inl"
#include "dot/bf16_factors.inl"
}  // namespace

bool AmxIsCompiled() { return true; }

bool DotAmx(const DotArgs& args, const Parallel& parallel) {
  const Engine engine = args.config.engine == Engine::kByRule
                            ? RuleAmx(ShapeOf(args))
                            : args.config.engine;
  if (engine != Engine::kAmx || !BF16CanHold(args.lhs, parallel) ||
      !BF16CanHold(args.rhs, parallel)) {
    return DotAvx512Bf16(args, parallel);
  }
  return BlockedDot<EngineAmx>(args, parallel);
}

}  // namespace jaxplugin

#else

namespace jaxplugin {

bool AmxIsCompiled() { return false; }

bool DotAmx(const DotArgs&, const Parallel&) { return false; }

}  // namespace jaxplugin

#endif
