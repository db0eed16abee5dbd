// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Needs AVX-512 F, BW, DQ, VL, VBMI, VNNI and BF16: Zen 4, Sapphire Rapids and
// newer.

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
#include "dot/gate.inl"
#include "simd/sums.inl"
#include "dot/blocked.inl"
#include "simd/unpack_avx512.inl"
#include "dot/engine_bf16.inl"
#include "dot/engine_vnni.inl"
#include "dot/few_rows_avx512.inl"

// The engines of the instruction set below: AVX2 wherever there is AVX-512.
bool DotBelow(const DotArgs& args, const Parallel& parallel) {
#if defined(__x86_64__)
  return DotAvx2(args, parallel);
#else
  return DotBaseline(args, parallel);
#endif
}

// Rows from which two E2M1 sides are fastest in vpdpbusd: n = k = 4096, one
// Zen 4 core, ms in MXFP4 and in NVFP4, with the few rows of vdpbf16ps up to 4.
//   rows          1            2            4            5            128
//   vpdpbusd      1.00 0.94    0.82 1.01    0.98 1.23    1.07 1.33    13.8 16.2
//   vdpbf16ps     0.54 0.65    0.72 0.87    1.21 1.43    2.93 3.35    23.3 22.9
//   AVX2          0.52 0.57    0.80 0.91    1.20 1.43    1.35 1.66    18.9 22.7
// NVFP4 of up to 4 rows in vdpbf16ps has taken 0.74 to 0.82 of that since its
// scales are looked up.
// (ONE_THREAD=1 tests/compare/compare.sh, with this rule changed.)
constexpr int64_t kVnniRowsMin = 4;

bool IsE2M1Pair(const Sides& sides) {
  return sides.panel->format == Format::kE2M1 &&
         sides.strip->format == Format::kE2M1;
}
}  // namespace

bool DotAvx512Bf16(const DotArgs& args, const Parallel& parallel) {
  const Sides sides = ChooseSides(args);
  if (IsE2M1Pair(sides)) {
    if (sides.panel_rows >= kVnniRowsMin) return VnniDot(args, sides, parallel);
    const bool is_block_32 = Min(sides.panel->block, sides.strip->block) == 32;
    if (sides.panel_rows == 1 && is_block_32) return DotBelow(args, parallel);
  }
  const bool is_bf16 =
      BF16CanHold(args.lhs, parallel) && BF16CanHold(args.rhs, parallel);
  if (sides.panel_rows <= kFewRowsMax && !IsPlain(sides.strip->format) &&
      (is_bf16 || IsPacked(sides.strip->format))) {
    const Factors factors = is_bf16 ? Factors::kBF16 : Factors::kF32;
    bool is_done = false;
    const bool ok = FewRowsDot(args, sides, factors, parallel, &is_done);
    if (is_done || !ok) return ok;
  }
  if (!is_bf16) return DotBelow(args, parallel);
  return BlockedDot<EngineBF16>(args, parallel);
}

bool GateAvx512(const GateArgs& args, const Parallel& parallel) {
  return GateRows(args, parallel);
}

}  // namespace jaxplugin

#endif
