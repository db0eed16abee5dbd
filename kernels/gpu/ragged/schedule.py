# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows a program has, found on the device from the sizes of groups.

No other launch and no host code runs first: each program reads the i32 sizes of
all groups and adds them up. Rows that belong to no group count as one more
group, the last. Sizes below zero count as zero, and rows end at m.

TILING is a `plans.RaggedTiling`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _group_rows(group_sizes, TILING: tl.constexpr):
  """i32[padded groups] of each group: its number, its first row, its end."""
  groups: tl.constexpr = TILING.shape.groups
  m: tl.constexpr = TILING.shape.m
  index = tl.arange(0, TILING.padded_groups)
  # The rest's size is more than is left.
  sizes = tl.load(group_sizes + index, mask=index < groups, other=m)
  sizes = tl.minimum(tl.maximum(sizes, 0), m)
  # In 64 bits: in 32 the sum of sizes that do not fit may wrap around.
  ends = tl.cumsum(sizes.to(tl.int64), 0)
  starts = tl.minimum(ends - sizes, m).to(tl.int32)
  return index, starts, tl.minimum(ends, m).to(tl.int32)


@triton.jit
def rows_of_tile(group_sizes, tile, TILING: tl.constexpr):
  """(group, first row, end of the group's rows) of a tile of rows.

  A tile has rows of one group. Group `groups` is the rest; where there is no
  such tile any more, the end is not after the row.
  """
  block_m: tl.constexpr = TILING.config.block_m
  index, starts, ends = _group_rows(group_sizes, TILING)
  tiles = (ends - starts + block_m - 1) // block_m
  tile_ends = tl.cumsum(tiles, 0)
  group = tl.sum((tile_ends <= tile).to(tl.int32), 0)
  # Beyond the last tile no group is it, and both sums are 0.
  is_own = index == group
  rows = starts + (tile - (tile_ends - tiles)) * block_m
  row = tl.sum(tl.where(is_own, rows, 0), 0)
  end = tl.sum(tl.where(is_own, ends, 0), 0)
  return group, row, end


@triton.jit
def group_of_row(group_sizes, row, TILING: tl.constexpr):
  """Returns the group of a row; `groups` if the row belongs to no group."""
  _, _, ends = _group_rows(group_sizes, TILING)
  return tl.sum((ends <= row).to(tl.int32), 0)
