// Copyright 2026 The jaxplugin Authors.
// SPDX-License-Identifier: Apache-2.0
//
// The ragged dot: each group of rows has its own weight.

#ifndef JAXPLUGIN_KERNELS_CPU_DOT_RAGGED_H_
#define JAXPLUGIN_KERNELS_CPU_DOT_RAGGED_H_

#include <stdint.h>

#include "kernels.h"

namespace jaxplugin {

// The sizes[g] rows of group g follow the rows of the groups before it. They
// are
//   cast(activation(lhs . rhs[g] * factors[g] * powers[g] + bias[g]))
// Rows outside of all groups are zeros. A negative size counts as 0, and rows
// end at m. So no size causes an access outside of the arrays.
struct RaggedArgs {
  // The dot of all rows. rhs has n rows per group. global_scale, global_power,
  // bias and residual are ignored.
  DotArgs dot;
  int64_t groups;
  const int32_t* sizes;  // [groups]
  const float* factors;  // [groups]; null: 1
  const float* powers;   // [groups]; null: 1
  const float* bias;     // [groups, n]; null: none
  // With a gate the result has n / 2 columns, and dot.activation is kNone.
  bool is_gated;
  Gate gate;
  // The dot of all rows in each RowsForm that a group uses.
  DotArgs converted[3];
};

// The rows of a group have the same bits as in a Dot of only that group.
// Returns false if memory cannot be allocated.
bool RaggedDot(const Kernels& kernels, const RaggedArgs&, const Parallel&);

}  // namespace jaxplugin

#endif  // JAXPLUGIN_KERNELS_CPU_DOT_RAGGED_H_
