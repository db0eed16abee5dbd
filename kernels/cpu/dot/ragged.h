// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The ragged dot: each group of rows has its own weight.

#ifndef JAXPLUGIN_KERNELS_CPU_DOT_RAGGED_H_
#define JAXPLUGIN_KERNELS_CPU_DOT_RAGGED_H_

#include <stdint.h>

#include "kernels.h"

namespace jaxplugin {

// Rows [sum of the sizes before, + sizes[g]) of the result are
//   cast(activation(lhs . rhs[g] * factors[g] * powers[g] + bias[g]))
// and rows of no group are zeros. Whatever the sizes are, nothing outside of
// the arrays is touched: those below 0 count as 0, and rows end at m.
struct RaggedArgs {
  // The dot of all rows. rhs has all groups, with n rows each. global_scale,
  // global_power, bias and residual are not used.
  DotArgs dot;
  int64_t groups;
  const int32_t* sizes;  // [groups]
  const float* factors;  // [groups]; null: 1
  const float* powers;   // [groups]; null: 1
  const float* bias;     // [groups, n]; null: none
  // With a gate the result has n / 2 columns, and dot.activation is kNone.
  bool is_gated;
  Gate gate;
};

// Rows of a group have the bits that Dot gives them alone. False when scratch
// memory could not be had.
bool RaggedDot(const Kernels& kernels, const RaggedArgs&, const Parallel&);

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_DOT_RAGGED_H_
