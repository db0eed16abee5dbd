// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// How a dot is computed if the caller chooses: the engine, and how its work is
// cut. Rules choose the rest (avx512bf16.cc, avx2.cc, blocked.inl,
// few_rows_*.inl). A config does not change which numbers are computed: an
// engine passes numbers that it does not support to another engine, as without
// a config.

#ifndef JAXPLUGIN_KERNELS_CPU_DOT_CONFIG_H_
#define JAXPLUGIN_KERNELS_CPU_DOT_CONFIG_H_

#include <stdint.h>

#include "simd/always_inline.h"

namespace jaxplugin {

// The values of the `engine` attribute: only append.
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
};
inline constexpr const char* kEngineNames[] = {
    "by_rule",       "f32",  "float_avx2", "integer_avx2",
    "few_rows_avx2", "bf16", "vnni",       "few_rows_avx512",
    "amx",
};
inline constexpr int kEngines = 9;

// Rules choose a field that is 0. The side with fewer rows, mostly lhs, is the
// panel. The other side is cut into tasks (ChooseSides).
struct DotConfig {
  Engine engine;
  // Rows of a panel; of an engine of few rows, of a pass over the weights.
  int64_t panel_rows;
  // Rows of the other side that a thread takes at a time; whole strips of a
  // large dot.
  int64_t task_rows;
  int64_t threads;  // at most so many
};

// Which side is the panel. The other one is unpacked once per panel, and its
// tail wastes less when it is long: it is the larger one, by preference the
// weights.
JAXPLUGIN_ALWAYS_INLINE constexpr bool PanelIsLhs(int64_t m, int64_t n) {
  return m <= n || n > 256;
}

// Rows up to which the engines of few rows may be asked for.
inline constexpr int64_t kFewRowsServed = 32;
// Rows of a pass of theirs: what the registers hold.
inline constexpr int64_t kPassRowsMax = 4;
// Which bound the scratch memory of a config.
inline constexpr int64_t kPanelRowsMost = 4096;
inline constexpr int64_t kTaskRowsMost = 16384;
inline constexpr int64_t kThreadsMost = 1024;

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_DOT_CONFIG_H_
