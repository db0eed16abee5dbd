// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0

#include "kernels.h"

#if defined(__x86_64__) || defined(JAXPLUGIN_EMULATE_AVX512)

#define JAXPLUGIN_F32_LANES 16

namespace jaxplugin {
namespace {
#include "codec.inl"
#include "dot_exact.inl"
#include "epilogue.inl"
#include "sums.inl"
#include "dot_blocked.inl"
#include "dot_f32.inl"
}  // namespace

bool DotAvx512(const DotArgs& args, const Parallel& parallel) {
  return BlockedDot<EngineF32>(args, parallel);
}

}  // namespace jaxplugin

#endif
