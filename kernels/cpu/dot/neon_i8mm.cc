// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot for Armv8.2 with i8mm: Neoverse V1 and V2 (NVIDIA Grace), Cortex-X925
// and newer.

#include "dot/rule.h"
#include "kernels.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)

namespace jaxplugin {
namespace {
#include "simd/codec.inl"
#include "dot/exact.inl"
#include "dot/quantized.inl"
#include "dot/epilogue.inl"
#include "simd/sums.inl"
#include "dot/blocked.inl"
#include "dot/bytes.inl"
#include "dot/engine_neon_integers.inl"
}  // namespace

bool DotNeonI8mm(const DotArgs& args, const Parallel& parallel) {
  return NeonDot(args, parallel);
}

}  // namespace jaxplugin

#endif
