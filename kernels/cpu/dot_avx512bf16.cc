// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Needs AVX-512 F, BW, DQ, VL, VBMI and BF16: Zen 4, Sapphire Rapids, newer.

#include "kernels.h"

#if defined(__x86_64__) || defined(JAXPLUGIN_EMULATE_AVX512)

#if defined(JAXPLUGIN_EMULATE_AVX512)
#include "emulation/avx512.h"
#else
#include <immintrin.h>
#endif

#define JAXPLUGIN_F32_LANES 16

namespace jaxplugin {
namespace {
#if defined(JAXPLUGIN_EMULATE_AVX512)
using namespace emulated;
#endif
#include "codec.inl"
#include "dot_exact.inl"
#include "epilogue.inl"
#include "sums.inl"
#include "dot_blocked.inl"
#include "dot_f32.inl"
#include "unpack_avx512.inl"
#include "dot_bf16.inl"
#include "dot_small.inl"
}  // namespace

bool DotAvx512Bf16(const DotArgs& args, const Parallel& parallel) {
  return DotBF16(args, parallel);
}

}  // namespace jaxplugin

#endif
