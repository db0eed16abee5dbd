// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Needs AVX-512 F, BW, DQ, VL, VBMI and BF16: Zen 4, Sapphire Rapids, newer.

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
#include "dot/epilogue.inl"
#include "simd/sums.inl"
#include "dot/blocked.inl"
#include "simd/unpack_avx512.inl"
#include "dot/engine_bf16.inl"
#include "dot/few_rows_avx512.inl"

// The engines of the instruction set below: AVX2 wherever there is AVX-512.
bool DotBelow(const DotArgs& args, const Parallel& parallel) {
#if defined(__x86_64__)
  return DotAvx2(args, parallel);
#else
  return DotBaseline(args, parallel);
#endif
}

// Whether two E2M1 sides are faster in AVX2's integers (two Zen 4 cores; all
// engines compared by isa_testing.py). 2048 x 4096 against 16 rows takes 0.66
// of the time; one row 0.85 to 0.9; 128 rows 0.8 in MXFP4, 0.95 in NVFP4.
bool IsForIntegers(const Sides& sides) {
  if (sides.panel->format != Format::kE2M1 ||
      sides.strip->format != Format::kE2M1) {
    return false;
  }
  if (sides.panel_rows <= kFewRowsMax) return sides.panel_rows == 1;
  const bool is_block_16 = Min(sides.panel->block, sides.strip->block) == 16;
  return !is_block_16 || sides.panel_rows <= 256;
}
}  // namespace

bool DotAvx512Bf16(const DotArgs& args, const Parallel& parallel) {
  const Sides sides = ChooseSides(args);
  if (IsForIntegers(sides) || !BF16CanHold(args.lhs, parallel) ||
      !BF16CanHold(args.rhs, parallel)) {
    return DotBelow(args, parallel);
  }
  if (sides.panel_rows <= kFewRowsMax && !IsPlain(sides.strip->format)) {
    return FewRowsDot(args, sides, parallel);
  }
  return BlockedDot<EngineBF16>(args, parallel);
}

}  // namespace jaxplugin

#endif
