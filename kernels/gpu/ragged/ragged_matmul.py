# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ragged block-scaled matmuls in Triton.

With group(i) the group of row i, and 0 in rows without a group::

  out[i, n] = activation(g * sum_k lhs[i, k] rhs[group(i), n, k]
                         + bias[group(i), n])

The loop over k is that of the dense kernel (`accumulation`), so a row has the
same bits with the same config. A program computes one tile of rows of one
group, which it finds on the device (`rows_of_tile`). The grid has enough
programs for any group sizes, and spare programs return at once. The weight of a
group without rows is never read.

Pointers are those of `block_scaled_matmul`, with group_sizes, i32[groups],
after the operands. TILING is a `plans.RaggedTiling`.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import accumulation, epilogues, matmul_plans, tiles

# gpt-oss's gated activation (arXiv 2508.10925, and its reference
# implementation).
_OAI_LIMIT = tl.constexpr(7.0)
_OAI_ALPHA = tl.constexpr(1.702)


@triton.jit(repr=matmul_plans.kernel_name_of("ragged"))
def ragged_kernel(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  group_sizes,
  global_scale,
  bias,
  out,
  TILING: tl.constexpr,
):
  """Multiplies one tile of rows of a group by the group's weight.

  lhs: [m, k]; rhs: [groups, n, k], or [groups, k, n] across its blocks;
  global_scale: f32[factors] or f32[groups, factors]; bias: [groups, n]; out:
  [m, n], or [m, n / 2] with a gated activation.

  Grid: `TILING.programs`. If k is split, out is f32[split_k, m, n] without the
  epilogue, and rows without a group are not written.
  """
  groups: tl.constexpr = TILING.shape.groups
  m: tl.constexpr = TILING.shape.m
  block_m: tl.constexpr = TILING.config.block_m
  plane, batch, row, column, k = tiles.program_position(TILING)
  group, row, end = rows_of_tile(group_sizes, row // block_m, m, TILING)
  if row >= end:
    return
  if group == groups:
    if not TILING.is_split:
      _store_zeros(row, end, column, out, TILING)
    return

  left = (lhs, lhs_scale, batch, row)
  right = (rhs, rhs_scale, group, column)
  acc = accumulation.accumulate(left, right, k, TILING)
  place = (plane, group, row, end, column)
  _store_sums(acc, place, m, (global_scale, bias), out, TILING)


@triton.jit(repr=matmul_plans.kernel_name_of("ragged"))
def ragged_quantized_kernel(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  group_sizes,
  global_scale,
  bias,
  out_global_scale,
  key,
  amax,
  values,
  scale,
  TILING: tl.constexpr,
  RESULT: tl.constexpr,
):
  """Quantizes the f32 result of `ragged_kernel` without a split of k.

  For the arrays after `bias` see `epilogues.quantize_part`.
  """
  groups: tl.constexpr = TILING.shape.groups
  m: tl.constexpr = TILING.shape.m
  block_m: tl.constexpr = TILING.config.block_m
  _, batch, row, column, k = tiles.program_position(TILING)
  group, row, end = rows_of_tile(group_sizes, row // block_m, m, TILING)
  epilogue = (global_scale, bias)
  out = (out_global_scale, key, amax, values, scale)
  place = (group, row, end, column)
  if row >= end:
    epilogues.store_amax(tl.zeros((1,), tl.int32), out, RESULT)
    return
  if group == groups:
    _store_quantized(None, place, epilogue, out, TILING, RESULT)
    return

  left = (lhs, lhs_scale, batch, row)
  right = (rhs, rhs_scale, group, column)
  acc = accumulation.accumulate(left, right, k, TILING)
  _store_quantized(acc, place, epilogue, out, TILING, RESULT)


@triton.jit(repr=matmul_plans.kernel_name_of("ragged"))
def ragged_of_m_kernel(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  group_sizes,
  m,
  global_scale,
  bias,
  out,
  TILING: tl.constexpr,
):
  """Computes `ragged_kernel` for m rows, which it reads: m is i32[1].

  For the grid see `block_scaled_matmul.matmul_of_m_kernel`.
  """
  operands = (lhs, lhs_scale, rhs, rhs_scale, group_sizes)
  epilogue = (global_scale, bias)
  rows = tl.load(m)
  used = tl.minimum(TILING.shape.groups + 1, rows)
  tiles_m = (rows - used) // TILING.config.block_m + used
  num_tiles = tiles_m * TILING.tiles_n * TILING.config.split_k
  if TILING.shape.is_for_any_m:
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
      _multiply_tile(tile, tiles_m, rows, operands, epilogue, out, TILING)
  else:
    tile = tl.program_id(0)
    if tile < num_tiles:
      _multiply_tile(tile, tiles_m, rows, operands, epilogue, out, TILING)


@triton.jit
def _multiply_tile(
  tile, tiles_m, m, operands, epilogue, out, TILING: tl.constexpr
):
  """Computes one tile by its number, of `tiles_m` for m rows in each plane."""
  lhs, lhs_scale, rhs, rhs_scale, group_sizes = operands
  groups: tl.constexpr = TILING.shape.groups
  block_m: tl.constexpr = TILING.config.block_m
  plane, batch, row, column, k = tiles.position_of(tile, tiles_m, TILING)
  group, row, end = rows_of_tile(group_sizes, row // block_m, m, TILING)
  # A loop allows no early return.
  if row < end:
    if group < groups:
      left = (lhs, lhs_scale, batch, (row, end))
      right = (rhs, rhs_scale, group, column)
      acc = accumulation.accumulate(left, right, k, TILING)
      place = (plane, group, row, end, column)
      _store_sums(acc, place, m, epilogue, out, TILING)
    elif not TILING.is_split:
      _store_zeros(row, end, column, out, TILING)


@triton.jit
def _store_sums(acc, place, m, epilogue, out, TILING: tl.constexpr):
  """Stores the result of a tile, or its part of a split k.

  place: (plane, group, first row, end of the group's rows, first column).
  """
  plane, group, row, end, column = place
  global_scale, bias = epilogue
  if TILING.config.swap:
    acc = tl.trans(acc)
  if TILING.is_split:
    _store_part(acc, plane, row, end, m, column, out, TILING)
  else:
    result = _epilogue(acc, group, column, global_scale, bias, TILING)
    _store(result, row, end, column, out, TILING)


@triton.jit(repr=matmul_plans.kernel_name_of("ragged_reduce"))
def ragged_reduce_kernel(
  workspace,
  group_sizes,
  global_scale,
  bias,
  out,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
):
  """Adds the partial sums of a split k, in order, and applies the epilogue.

  workspace: f32[split_k, m, n]. For other arguments see `ragged_kernel`. Grid:
  one program for each BLOCK columns of a row of out.
  """
  m: tl.constexpr = TILING.shape.m
  operands = (workspace, group_sizes)
  epilogue = (global_scale, bias)
  _reduce(tl.program_id(0), m, operands, epilogue, out, TILING, BLOCK)


@triton.jit(repr=matmul_plans.kernel_name_of("ragged_reduce"))
def ragged_reduce_quantized_kernel(
  workspace,
  group_sizes,
  global_scale,
  bias,
  out_global_scale,
  key,
  amax,
  values,
  scale,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
  RESULT: tl.constexpr,
):
  """Quantizes the f32 result of `ragged_reduce_kernel`.

  For the arrays after `bias` see `epilogues.quantize_part`.
  """
  m: tl.constexpr = TILING.shape.m
  operands = (workspace, group_sizes)
  epilogue = (global_scale, bias)
  out = (out_global_scale, key, amax, values, scale)
  x, row, column, mask = _sum(
    tl.program_id(0), m, operands, epilogue, TILING, BLOCK
  )
  largest = tl.zeros((1,), tl.int32)
  place = (tl.zeros((), tl.int64), row, column)
  largest = epilogues.quantize_part(x, place, m, mask, largest, out, RESULT)
  epilogues.store_amax(largest, out, RESULT)


@triton.jit(repr=matmul_plans.kernel_name_of("ragged_reduce"))
def ragged_reduce_of_m_kernel(
  workspace,
  group_sizes,
  m,
  global_scale,
  bias,
  out,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
):
  """Computes `ragged_reduce_kernel` for m rows; see `ragged_of_m_kernel`."""
  chunks: tl.constexpr = (TILING.shape.out_columns + BLOCK - 1) // BLOCK
  rows = tl.load(m)
  block = tl.program_id(0)
  if block < rows * chunks:
    operands = (workspace, group_sizes)
    _reduce(block, rows, operands, (global_scale, bias), out, TILING, BLOCK)


@triton.jit
def _reduce(
  block,
  m,
  operands,
  epilogue,
  out,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
):
  """Computes one block of `ragged_reduce_kernel`, by its number."""
  out_columns: tl.constexpr = TILING.shape.out_columns
  result, row, column, mask = _sum(block, m, operands, epilogue, TILING, BLOCK)
  columns = column + tl.arange(0, BLOCK)
  out += row.to(tl.int64) * out_columns
  tl.store(out + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum(
  block, m, operands, epilogue, TILING: tl.constexpr, BLOCK: tl.constexpr
):
  """Returns (f32[1, BLOCK], row, first column, mask) of `_reduce`."""
  workspace, group_sizes = operands
  global_scale, bias = epilogue
  groups: tl.constexpr = TILING.shape.groups
  n: tl.constexpr = TILING.shape.n
  out_columns: tl.constexpr = TILING.shape.out_columns
  pair: tl.constexpr = TILING.pair
  chunks: tl.constexpr = (out_columns + BLOCK - 1) // BLOCK
  columns_of_one: tl.constexpr = n // out_columns
  split_k: tl.constexpr = TILING.config.split_k
  row = block // chunks
  column = block % chunks * BLOCK * columns_of_one
  group = group_of_row(group_sizes, row, m, TILING)

  columns = column + tl.arange(0, BLOCK * columns_of_one)
  # Partial sums of rows without a group were not written.
  mask = columns < tl.where(group < groups, n, 0)
  places = tiles.place_of(columns, pair)
  total = tl.zeros((BLOCK * columns_of_one,), tl.float32)
  for split in tl.static_range(split_k):
    part = workspace + (tl.full((), split, tl.int64) * m + row) * n
    total += tl.load(part + places, mask=mask, other=0)
  # Rows without a group become zero, so they may read any group's bias.
  of_group = tl.minimum(group, groups - 1)
  result = _epilogue(
    total[None, :], of_group, column, global_scale, bias, TILING
  )
  result = tl.where(group < groups, result, 0.0)
  column = column // columns_of_one
  columns = column + tl.arange(0, BLOCK)
  return result, row, column, (columns < out_columns)[None, :]


@triton.jit
def _epilogue(x, group, column, global_scale, bias, TILING: tl.constexpr):
  """Applies the epilogue to the sums x[rows, columns] of one group.

  column: first column, before `tiles.place_of`.

  Returns f32[rows, columns of out].
  """
  shape: tl.constexpr = TILING.shape
  n: tl.constexpr = TILING.shape.n
  activation: tl.constexpr = TILING.shape.activation
  columns = column + tl.arange(0, x.shape[1])
  places = tiles.place_of(columns, TILING.pair)[None, :]
  if shape.has_scale_of_group:
    global_scale += group * shape.global_factors
  if shape.has_bias:
    bias += group.to(tl.int64) * n
  mask = (columns < n)[None, :]
  epilogue = (global_scale, global_scale, bias, bias)
  x = epilogues.apply_epilogue(x, epilogue, places, places, mask, mask, shape)
  if not shape.is_gated:
    return x
  else:
    return _gated(x, activation)


@triton.jit
def _gated(x, ACTIVATION: tl.constexpr):
  """Applies a gated activation to gates (even columns) and values (odd)."""
  rows: tl.constexpr = x.shape[0]
  columns: tl.constexpr = x.shape[1]
  gate, value = tl.split(x.reshape(rows, columns // 2, 2))
  if ACTIVATION == "swiglu":
    return gate / (1 + tl.exp(-gate)) * value
  else:
    # Comparisons keep NaN.
    gate = tl.where(gate > _OAI_LIMIT, _OAI_LIMIT, gate)
    value = tl.where(value > _OAI_LIMIT, _OAI_LIMIT, value)
    value = tl.where(value < -_OAI_LIMIT, -_OAI_LIMIT, value)
    return gate / (1 + tl.exp(-_OAI_ALPHA * gate)) * (value + 1)


@triton.jit
def _store(x, row, end, column, out, TILING: tl.constexpr):
  """Stores rows up to `end`; `column` is as for `_epilogue`."""
  width: tl.constexpr = TILING.shape.out_columns
  columns_of_one: tl.constexpr = TILING.shape.n // width
  block_rows: tl.constexpr = x.shape[0]
  block_columns: tl.constexpr = x.shape[1]
  column = column // columns_of_one
  rows = row + tl.arange(0, block_rows)
  columns = column + tl.arange(0, block_columns)
  mask = (rows < end)[:, None] & (columns < width)[None, :]
  out += row.to(tl.int64) * width + column
  offsets = tiles.tile_offsets(block_rows, block_columns, width, 1)
  tl.store(out + offsets, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_quantized(
  acc, place, epilogue, out, TILING: tl.constexpr, RESULT: tl.constexpr
):
  """Applies the epilogue and stores rows up to `end`, quantized along n.

  It computes a part of the columns at a time, which needs fewer registers.

  Args:
    acc: the accumulator, or None for rows without a group, which become zero.
    place: (group, first row, end of the group's rows, first column).
    epilogue, out, TILING, RESULT: as for `ragged_quantized_kernel`.
  """
  group, row, end, column = place
  global_scale, bias = epilogue
  block_m: tl.constexpr = TILING.config.block_m
  width: tl.constexpr = TILING.shape.out_columns
  columns_of_one: tl.constexpr = TILING.shape.n // width
  out_columns: tl.constexpr = TILING.config.block_n // columns_of_one
  size: tl.constexpr = min(RESULT.columns_of_part, out_columns)
  row_mask = (row + tl.arange(0, block_m) < end)[:, None]
  if acc is not None and TILING.config.swap:
    acc = tl.trans(acc)
  largest = tl.zeros((block_m,), tl.int32)
  for i in tl.static_range(out_columns // size):
    if acc is None:
      x = tl.zeros((block_m, size), tl.float32)
    else:
      x = _epilogue(
        epilogues.part_of(acc, i, out_columns // size),
        group,
        column + i * size * columns_of_one,
        global_scale,
        bias,
        TILING,
      )
    first = column // columns_of_one + i * size
    mask = row_mask & (first + tl.arange(0, size) < width)[None, :]
    batch = tl.zeros((), tl.int64)
    largest = epilogues.quantize_part(
      x, (batch, row, first), end, mask, largest, out, RESULT
    )
  epilogues.store_amax(largest, out, RESULT)


@triton.jit
def _store_zeros(row, end, column, out, TILING: tl.constexpr):
  block_m: tl.constexpr = TILING.config.block_m
  block_n: tl.constexpr = TILING.config.block_n
  columns_of_one: tl.constexpr = TILING.shape.n // TILING.shape.out_columns
  zeros = tl.zeros((block_m, block_n // columns_of_one), tl.float32)
  _store(zeros, row, end, column, out, TILING)


@triton.jit
def _store_part(acc, plane, row, end, m, column, out, TILING: tl.constexpr):
  """Stores partial sums of a split of k for the reduction kernel."""
  n: tl.constexpr = TILING.shape.n
  block_m: tl.constexpr = TILING.config.block_m
  block_n: tl.constexpr = TILING.config.block_n
  rows = row + tl.arange(0, block_m)
  columns = column + tl.arange(0, block_n)
  mask = (rows < end)[:, None] & (columns < n)[None, :]
  out += (plane.to(tl.int64) * m + row) * n
  places = tiles.place_of(columns, TILING.pair)
  offsets = tl.arange(0, block_m)[:, None] * n + places[None, :]
  tl.store(out + offsets, acc, mask=mask)


# By the names that `launching.Launch` uses.
KERNELS: Final = {
  "ragged": ragged_kernel,
  "ragged_quantized": ragged_quantized_kernel,
  "ragged_of_m": ragged_of_m_kernel,
  "ragged_reduce": ragged_reduce_kernel,
  "ragged_reduce_quantized": ragged_reduce_quantized_kernel,
  "ragged_reduce_of_m": ragged_reduce_of_m_kernel,
}


@triton.jit
def _group_rows(group_sizes, m, TILING: tl.constexpr):
  """Returns i32[padded groups]: the number, first row and end of each group.

  Each program adds up the i32 sizes of all groups. Rows that belong to no group
  count as one more group, the last. Negative sizes count as zero, and rows end
  at m.
  """
  groups: tl.constexpr = TILING.shape.groups
  index = tl.arange(0, TILING.padded_groups)
  # The group of the remaining rows gets size m, which is then clipped.
  sizes = tl.load(group_sizes + index, mask=index < groups, other=m)
  sizes = tl.minimum(tl.maximum(sizes, 0), m)
  # An i32 sum of invalid sizes could wrap around.
  ends = tl.cumsum(sizes.to(tl.int64), 0)
  starts = tl.minimum(ends - sizes, m).to(tl.int32)
  return index, starts, tl.minimum(ends, m).to(tl.int32)


@triton.jit
def rows_of_tile(group_sizes, tile, m, TILING: tl.constexpr):
  """Returns (group, first row, end of the group's rows) of a tile of rows.

  A tile has rows of one group. Group `groups` has the rows after all groups.
  For a spare tile the end is not after the first row.
  """
  block_m: tl.constexpr = TILING.config.block_m
  index, starts, ends = _group_rows(group_sizes, m, TILING)
  tiles = (ends - starts + block_m - 1) // block_m
  tile_ends = tl.cumsum(tiles, 0)
  group = tl.sum((tile_ends <= tile).to(tl.int32), 0)
  # For a spare tile no group matches, so both sums are 0.
  is_own = index == group
  rows = starts + (tile - (tile_ends - tiles)) * block_m
  row = tl.sum(tl.where(is_own, rows, 0), 0)
  end = tl.sum(tl.where(is_own, ends, 0), 0)
  return group, row, end


@triton.jit
def group_of_row(group_sizes, row, m, TILING: tl.constexpr):
  """Returns the group of a row; `groups` if the row belongs to no group."""
  _, _, ends = _group_rows(group_sizes, m, TILING)
  return tl.sum((ends <= row).to(tl.int32), 0)
