// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The dot for Armv8.2 with dotprod: Neoverse N1, Cortex-A76 and newer.

#include "dot/rule.h"
#include "kernels.h"

#if defined(__ARM_FEATURE_DOTPROD)

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
#include "dot/convert_rows.inl"
}  // namespace

bool DotNeonDotprod(const DotArgs& args, const Parallel& parallel) {
  return NeonDot(args, parallel);
}

bool ConvertRowsNeon(const Operand& x, const ConvertedRows& out,
                      const Parallel& parallel) {
  return ConvertRows(x, out, parallel);
}

}  // namespace jaxplugin

#endif
