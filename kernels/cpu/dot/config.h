// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The config of a dot: the engine, and how its work is cut. Rules choose what
// the config leaves open (rule.h, blocked.inl). With any config, an engine
// passes numbers that it cannot represent to another engine.

#ifndef JAXPLUGIN_KERNELS_CPU_DOT_CONFIG_H_
#define JAXPLUGIN_KERNELS_CPU_DOT_CONFIG_H_

#include <stdint.h>

#include "simd/always_inline.h"

namespace jaxplugin {

// The values of the `engine` attribute. Only append.
enum class Engine : int64_t {
  kByRule = 0,
  kF32,
  kFloatAvx2,
  kIntegerAvx2,
  kFewRowsAvx2,
  kBF16,
  kVnni,
  kFewRowsAvx512,
  kAmx,
  kFewRowsVnni,
  kBF16Rows,
  kFloatAvx512,
  kNeonIntegers,
};
inline constexpr const char* kEngineNames[] = {
    "by_rule",       "f32",  "float_avx2", "integer_avx2",
    "few_rows_avx2", "bf16", "vnni",       "few_rows_avx512",
    "amx",           "few_rows_vnni", "bf16_rows",  "float_avx512",
    "neon_integers",
};
inline constexpr int kEngines = 13;

// The panel side of a dot is mostly the operand with fewer rows (PanelIsLhs).
// The other operand, mostly the weights, is the strip side and is cut into
// tasks. The terms panel and strip are defined in blocked.inl. The rules choose
// every field that is 0.
struct DotConfig {
  Engine engine;
  // Rows of a panel. For the few_rows engines: rows of a pass over the weights.
  int64_t panel_rows;
  // Rows of the strip side in a task of one thread. The large dot rounds them
  // up to whole strips.
  int64_t task_rows;
  int64_t threads;  // upper limit
};

// Whether lhs is the panel side. The strip side is unpacked once per panel, and
// its incomplete last strip matters less if it has many rows. So the strip side
// is the operand with more rows. If n > 256 it is always rhs, mostly the
// weights.
JAXPLUGIN_ALWAYS_INLINE constexpr bool PanelIsLhs(int64_t m, int64_t n) {
  return m <= n || n > 256;
}

// Largest number of panel rows that the few_rows engines support.
inline constexpr int64_t kFewRowsServed = 32;
// Largest number of rows in one of their passes; the registers hold no more.
inline constexpr int64_t kPassRowsMax = 4;
// Upper limits of a config, which bound the scratch memory and the threads.
inline constexpr int64_t kPanelRowsMost = 4096;
inline constexpr int64_t kTaskRowsMost = 16384;
inline constexpr int64_t kThreadsMost = 1024;

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_DOT_CONFIG_H_
