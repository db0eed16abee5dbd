// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Chooses kernels by what the machine that runs them has.

#include "kernels.h"

namespace jaxplugin {
namespace {

constexpr Kernels kBaselineKernels = {
#if defined(__aarch64__)
    "baseline_neon",
#else
    "baseline",
#endif
    DotBaseline, QuantizeBaseline, DequantizeBaseline};

#if defined(__x86_64__)

constexpr Kernels kAvx2Kernels = {"avx2", DotAvx2, QuantizeAvx2,
                                  DequantizeAvx2};
constexpr Kernels kAvx512Kernels = {"avx512", DotAvx512, QuantizeAvx512,
                                    DequantizeAvx512};
constexpr Kernels kAvx512Bf16Kernels = {"avx512_bf16", DotAvx512Bf16,
                                        QuantizeAvx512, DequantizeAvx512};

// __builtin_cpu_supports asks the operating system's support too.
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

bool HasAvx512Bf16() {
  return HasAvx512() && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512bf16");
}

#endif

}  // namespace

const Kernels* GetKernels(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (isa) {
    case Isa::kAuto:
      if (HasAvx512Bf16()) return &kAvx512Bf16Kernels;
      if (HasAvx512()) return &kAvx512Kernels;
      if (HasAvx2()) return &kAvx2Kernels;
      return &kBaselineKernels;
    case Isa::kBaseline: return &kBaselineKernels;
    case Isa::kAvx2: return HasAvx2() ? &kAvx2Kernels : nullptr;
    case Isa::kAvx512: return HasAvx512() ? &kAvx512Kernels : nullptr;
    case Isa::kAvx512Bf16:
      return HasAvx512Bf16() ? &kAvx512Bf16Kernels : nullptr;
  }
  return nullptr;
#else
  const bool known = isa == Isa::kAuto || isa == Isa::kBaseline;
  return known ? &kBaselineKernels : nullptr;
#endif
}

}  // namespace jaxplugin
