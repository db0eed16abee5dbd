// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Chooses kernels by what the machine that runs them has.

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

namespace jaxplugin {
namespace {

constexpr Kernels kBaselineKernels = {
#if defined(__aarch64__)
    "baseline_neon",
#else
    "baseline",
#endif
    DotBaseline, GateBaseline, QuantizeBaseline, DequantizeBaseline,
    QuantizeOperandBaseline};

#if defined(__x86_64__)

constexpr Kernels kAvx2Kernels = {"avx2", DotAvx2, GateAvx2, QuantizeAvx2,
                                  DequantizeAvx2, QuantizeOperandAvx2};

// __builtin_cpu_supports asks the operating system's support too.
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

#endif

// The dot without BF16 is AVX2's: the same sources compiled for AVX-512 take
// 0.97 to 1.06 of the time, vectors of 16 floats 1.4 to 7 times as long. Which
// engine DotAvx512Bf16 takes for a problem is in dot/avx512bf16.cc.
#if defined(JAXPLUGIN_EMULATE_AVX512)

#if defined(__x86_64__)
constexpr auto kDotBelowBf16 = DotAvx2;
constexpr auto kGateBelowBf16 = GateAvx2;
#else
constexpr auto kDotBelowBf16 = DotBaseline;
constexpr auto kGateBelowBf16 = GateBaseline;
#endif
// Compiled for AVX2 on x86-64, else for any machine: see CMakeLists.txt.
constexpr Kernels kAvx512Kernels = {"avx512_emulated", kDotBelowBf16,
                                    kGateBelowBf16, QuantizeAvx512,
                                    DequantizeAvx512, QuantizeOperandAvx512};
constexpr Kernels kAvx512Bf16Kernels = {"avx512_bf16_emulated", DotAvx512Bf16,
                                        GateAvx512, QuantizeAvx512,
                                        DequantizeAvx512,
                                        QuantizeOperandAvx512};

bool HasAvx512() {
#if defined(__x86_64__)
  return HasAvx2();
#else
  return true;
#endif
}

bool HasAvx512Bf16() { return HasAvx512(); }

#elif defined(__x86_64__)

constexpr Kernels kAvx512Kernels = {"avx512", DotAvx2, GateAvx2, QuantizeAvx512,
                                    DequantizeAvx512, QuantizeOperandAvx512};
constexpr Kernels kAvx512Bf16Kernels = {"avx512_bf16", DotAvx512Bf16,
                                        GateAvx512, QuantizeAvx512,
                                        DequantizeAvx512,
                                        QuantizeOperandAvx512};

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

bool HasAvx512Bf16() {
  return HasAvx512() && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}

#endif

#if defined(__x86_64__)

// What may be the best, by JAXPLUGIN_CPU_ISA in the environment when it is first
// asked for: "baseline" or "avx2"; all else is no limit.
Isa Limit() {
  static const Isa limit = [] {
    const char* name = getenv("JAXPLUGIN_CPU_ISA");
    if (name == nullptr) return Isa::kAvx512Bf16;
    if (strcmp(name, kBaselineKernels.name) == 0) return Isa::kBaseline;
    if (strcmp(name, kAvx2Kernels.name) == 0) return Isa::kAvx2;
    return Isa::kAvx512Bf16;
  }();
  return limit;
}

#endif

// The best that the machine has; never an emulated one.
const Kernels* BestKernels() {
#if defined(__x86_64__)
#if !defined(JAXPLUGIN_EMULATE_AVX512)
  if (Limit() > Isa::kAvx2) {
    if (HasAvx512Bf16()) return &kAvx512Bf16Kernels;
    if (HasAvx512()) return &kAvx512Kernels;
  }
#endif
  if (Limit() > Isa::kBaseline && HasAvx2()) return &kAvx2Kernels;
#endif
  return &kBaselineKernels;
}

}  // namespace

const Kernels* GetKernels(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  switch (isa) {
    case Isa::kAuto: return BestKernels();
    case Isa::kBaseline: return &kBaselineKernels;
#if defined(__x86_64__)
    case Isa::kAvx2: return HasAvx2() ? &kAvx2Kernels : nullptr;
#endif
#if defined(__x86_64__) || defined(JAXPLUGIN_EMULATE_AVX512)
    case Isa::kAvx512: return HasAvx512() ? &kAvx512Kernels : nullptr;
    case Isa::kAvx512Bf16:
      return HasAvx512Bf16() ? &kAvx512Bf16Kernels : nullptr;
#endif
    default: return nullptr;
  }
}

Isa LevelOf(const Kernels& kernels) {
#if defined(__x86_64__)
  if (&kernels == &kAvx2Kernels) return Isa::kAvx2;
#endif
#if defined(__x86_64__) || defined(JAXPLUGIN_EMULATE_AVX512)
  if (&kernels == &kAvx512Kernels) return Isa::kAvx512;
  if (&kernels == &kAvx512Bf16Kernels) return Isa::kAvx512Bf16;
#endif
  return Isa::kBaseline;
}

}  // namespace jaxplugin

#if defined(JAXPLUGIN_EMULATE_AVX512)
// There in such a library alone, for its tests to tell.
extern "C" __attribute__((visibility("default"))) int
jaxplugin_cpu_emulates_avx512() {
  return jaxplugin::GetKernels(jaxplugin::Isa::kAvx512Bf16) != nullptr;
}
#endif
