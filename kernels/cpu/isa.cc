// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// Selects kernels by the instruction sets of the machine at run time.

#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#endif

#include "kernels.h"

namespace jaxplugin {
namespace {

constexpr Kernels kBaselineKernels = {
#if defined(__aarch64__)
    "baseline_neon",
#else
    "baseline",
#endif
    DotBaseline, GateBaseline, SumBlocksBaseline, AddOffsetsBaseline,
    QuantizeBaseline, DequantizeBaseline, QuantizeOperandBaseline,
    QuantizeRunBaseline, nullptr};

#if defined(__x86_64__)

constexpr Kernels kAvx2Kernels = {
    "avx2", DotAvx2, GateAvx2, SumBlocksAvx2, AddOffsetsAvx2, QuantizeAvx2,
    DequantizeAvx2, QuantizeOperandAvx2, QuantizeRunAvx2,
    ConvertRowsAvx2, DotOfFewRowsAvx2};

// __builtin_cpu_supports also checks that the operating system supports AVX.
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

#endif

// AVX-512 without BF16 uses AVX2's dot, because no AVX-512 dot is faster. The
// same sources compiled for AVX-512 take 0.97 to 1.06 times as long, and
// vectors of 16 floats take 1.4 to 7 times as long. For AVX-512 with BF16,
// dot/avx512bf16.cc selects the engine of each dot.
#if defined(JAXPLUGIN_EMULATE_AVX512)

#if defined(__x86_64__)
constexpr auto kDotBelowBf16 = DotAvx2;
constexpr auto kGateBelowBf16 = GateAvx2;
constexpr auto kSumBlocks = SumBlocksAvx2;
constexpr auto kAddOffsets = AddOffsetsAvx2;
constexpr auto kConvertRows = ConvertRowsAvx2;
#else
constexpr auto kDotBelowBf16 = DotBaseline;
constexpr auto kGateBelowBf16 = GateBaseline;
constexpr auto kSumBlocks = SumBlocksBaseline;
constexpr auto kAddOffsets = AddOffsetsBaseline;
constexpr bool (*kConvertRows)(const Operand&, const ConvertedRows&,
                                const Parallel&) = nullptr;
#endif
// CMakeLists.txt compiles the emulated kernels for AVX2 on x86-64, and without
// instruction set flags on other machines.
constexpr Kernels kAvx512Kernels = {
    "avx512_emulated", kDotBelowBf16, kGateBelowBf16, kSumBlocks, kAddOffsets,
    QuantizeAvx512, DequantizeAvx512, QuantizeOperandAvx512, QuantizeRunAvx512,
    kConvertRows};
constexpr Kernels kAvx512Bf16Kernels = {
    "avx512_bf16_emulated", DotAvx512Bf16, GateAvx512, kSumBlocks, kAddOffsets,
    QuantizeAvx512, DequantizeAvx512, QuantizeOperandAvx512, QuantizeRunAvx512,
    ConvertRowsAvx512, DotOfFewRowsAvx512};

bool HasAvx512() {
#if defined(__x86_64__)
  return HasAvx2();
#else
  return true;
#endif
}

bool HasAvx512Bf16() { return HasAvx512(); }

#elif defined(__x86_64__)

constexpr Kernels kAvx512Kernels = {
    "avx512", DotAvx2, GateAvx2, SumBlocksAvx2, AddOffsetsAvx2, QuantizeAvx512,
    DequantizeAvx512, QuantizeOperandAvx512, QuantizeRunAvx512,
    ConvertRowsAvx2, DotOfFewRowsAvx2};
constexpr Kernels kAvx512Bf16Kernels = {
    "avx512_bf16", DotAvx512Bf16, GateAvx512, SumBlocksAvx2, AddOffsetsAvx2,
    QuantizeAvx512, DequantizeAvx512, QuantizeOperandAvx512, QuantizeRunAvx512,
    ConvertRowsAvx512, DotOfFewRowsAvx512};

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

constexpr Kernels kAmxKernels = {
    "amx_bf16", DotAmx, GateAvx512, SumBlocksAvx2, AddOffsetsAvx2,
    QuantizeAvx512, DequantizeAvx512, QuantizeOperandAvx512, QuantizeRunAvx512,
    ConvertRowsAvx512, DotOfFewRowsAvx512};

// Asks Linux for permission to use the AMX tile registers (8 KiB per thread); a
// process must ask once. Linux refuses if a thread's alternate signal stack is
// too small.
bool MayUseTiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool HasAmx() {
  static const bool has = [] {
    unsigned a, b, c, d;
    if (!AmxIsCompiled() || !HasAvx512Bf16() ||
        !__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
      return false;
    }
    constexpr unsigned kBF16 = 1u << 22, kTile = 1u << 24;
    if ((d & kBF16) == 0 || (d & kTile) == 0) return false;
    unsigned low, high;  // XCR0: register states that the system saves
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr unsigned kTiles = 3u << 17;
    return (low & kTiles) == kTiles && MayUseTiles();
  }();
  return has;
}

#endif

#if defined(__aarch64__)

// Except for dots, Arm's instruction sets have the baseline's kernels.
constexpr Kernels ArmKernels(const char* name,
                             bool (*dot)(const DotArgs&, const Parallel&)) {
  Kernels kernels = kBaselineKernels;
  kernels.name = name;
  kernels.dot = dot;
  kernels.convert_rows = ConvertRowsNeon;
  return kernels;
}
constexpr Kernels kNeonDotprodKernels =
    ArmKernels("neon_dotprod", DotNeonDotprod);
constexpr Kernels kNeonI8mmKernels = ArmKernels("neon_i8mm", DotNeonI8mm);

// Whether Linux reports a feature (asm/hwcap.h). Both also need dotprod.
bool HasFeature(bool is_i8mm) {
#if defined(__linux__)
  constexpr unsigned long kDotprod = 1ul << 20, kI8mm = 1ul << 13;
  return (getauxval(AT_HWCAP) & kDotprod) != 0 &&
         (!is_i8mm || (getauxval(AT_HWCAP2) & kI8mm) != 0);
#else
  return false;
#endif
}
bool HasNeonDotprod() { return HasFeature(false); }
bool HasNeonI8mm() { return HasFeature(true); }

#endif

#if defined(__x86_64__) || defined(__aarch64__)

// Returns the upper limit of the instruction set, from the environment variable
// JAXPLUGIN_CPU_ISA at the first call: the name of kernels. Other values set no
// limit.
Isa Limit() {
  constexpr struct {
    const Kernels& kernels;
    Isa isa;
  } kLimits[] = {{kBaselineKernels, Isa::kBaseline},
#if defined(__x86_64__)
                 {kAvx2Kernels, Isa::kAvx2},
                 {kAvx512Bf16Kernels, Isa::kAvx512Bf16},
#else
                 {kNeonDotprodKernels, Isa::kNeonDotprod},
#endif
  };
  static const Isa limit = [&] {
    const char* name = getenv("JAXPLUGIN_CPU_ISA");
    for (const auto& each : kLimits) {
      if (name != nullptr && strcmp(name, each.kernels.name) == 0) {
        return each.isa;
      }
    }
    return Isa::kNeonI8mm;
  }();
  return limit;
}

#endif

// Returns the best kernels that the machine and the limit allow. Emulated
// kernels are never returned.
const Kernels* BestKernels() {
#if defined(__x86_64__)
#if !defined(JAXPLUGIN_EMULATE_AVX512)
  if (Limit() > Isa::kAvx2) {
    if (Limit() > Isa::kAvx512Bf16 && HasAmx()) return &kAmxKernels;
    if (HasAvx512Bf16()) return &kAvx512Bf16Kernels;
    if (HasAvx512()) return &kAvx512Kernels;
  }
#endif
  if (Limit() > Isa::kBaseline && HasAvx2()) return &kAvx2Kernels;
#elif defined(__aarch64__)
  if (Limit() > Isa::kNeonDotprod && HasNeonI8mm()) return &kNeonI8mmKernels;
  if (Limit() > Isa::kBaseline && HasNeonDotprod()) return &kNeonDotprodKernels;
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
#if defined(__x86_64__) && !defined(JAXPLUGIN_EMULATE_AVX512)
    case Isa::kAmx: return HasAmx() ? &kAmxKernels : nullptr;
#endif
#if defined(__aarch64__)
    case Isa::kNeonDotprod:
      return HasNeonDotprod() ? &kNeonDotprodKernels : nullptr;
    case Isa::kNeonI8mm: return HasNeonI8mm() ? &kNeonI8mmKernels : nullptr;
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
#if defined(__x86_64__) && !defined(JAXPLUGIN_EMULATE_AVX512)
  if (&kernels == &kAmxKernels) return Isa::kAmx;
#endif
#if defined(__aarch64__)
  if (&kernels == &kNeonDotprodKernels) return Isa::kNeonDotprod;
  if (&kernels == &kNeonI8mmKernels) return Isa::kNeonI8mm;
#endif
  return Isa::kBaseline;
}

}  // namespace jaxplugin

#if defined(JAXPLUGIN_EMULATE_AVX512)
// Only an emulating library has this function; tests check for it.
extern "C" __attribute__((visibility("default"))) int
jaxplugin_cpu_emulates_avx512() {
  return jaxplugin::GetKernels(jaxplugin::Isa::kAvx512Bf16) != nullptr;
}
#endif
