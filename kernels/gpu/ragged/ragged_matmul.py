# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiles of ragged block-scaled matmuls, for `block_scaled_matmul`.

With group(i) the group of row i, and 0 in rows without a group::

  out[i, n] = activation(g * sum_k lhs[i, k] rhs[group(i), n, k]
                         + bias[group(i), n])

lhs: [m, k]; rhs: [groups, n, k], or [groups, k, n] across its blocks;
group_sizes: i32[groups]; global_scale: f32[factors] or f32[groups, factors];
bias: [groups, n]; out: [m, n], or [m, n / 2] with a gated activation. If k is
split, out is f32[split_k, m, n] without the epilogue, and rows without a group
are not written.

The loop over k is that of the dense kernel (`accumulation`), so a row has the
same bits with the same config. A program computes one tile of rows of one
group, which it finds on the device (`rows_of_tile`). The grid has enough
programs for any group sizes, and spare programs return at once. The weight of a
group without rows is never read. TILING is a `plans.RaggedTiling`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import accumulation, epilogues, tiles

# gpt-oss's gated activation (arXiv 2508.10925, and its reference
# implementation).
_OAI_LIMIT = tl.constexpr(7.0)
_OAI_ALPHA = tl.constexpr(1.702)


@triton.jit
def multiply_tile(
  position,
  m,
  operands,
  epilogue,
  out,
  TILING: tl.constexpr,
  RESULT: tl.constexpr,
):
  """Multiplies one tile of rows of a group by the group's weight.

  Args:
    position: see `tiles.position_of`.
    m: number of rows.
    operands: pointers ((lhs, its scale), (rhs, its scale), group_sizes).
    epilogue, out: pointers; see `epilogues.store_quantized_tile`.
    TILING, RESULT: constexprs.
  """
  lhs, rhs, group_sizes = operands
  groups: tl.constexpr = TILING.shape.groups
  block_m: tl.constexpr = TILING.config.block_m
  plane, batch, row, column, k = position
  group, row, end = rows_of_tile(group_sizes, row // block_m, m, TILING)
  place = (group, row, end, column)
  # A loop allows no early return.
  if row < end:
    if group < groups:
      rows = row
      if TILING.shape.reads_m:
        rows = (row, end)
      left = (lhs[0], lhs[1], batch, rows)
      right = (rhs[0], rhs[1], group, column)
      acc = accumulation.accumulate(left, right, k, TILING)
      if RESULT is None:
        _store_sums(acc, plane, place, m, epilogue, out[2], TILING)
      else:
        _store_quantized(acc, place, epilogue, out, TILING, RESULT)
    elif RESULT is not None:
      _store_quantized(None, place, epilogue, out, TILING, RESULT)
    elif not TILING.is_split:
      _store_zeros(row, end, column, out[2], TILING)
  elif RESULT is not None:
    epilogues.store_amax(tl.zeros((1,), tl.int32), out, RESULT)


@triton.jit
def _store_sums(acc, plane, place, m, epilogue, out, TILING: tl.constexpr):
  """Stores the result of a tile, or its part of a split k.

  place: (group, first row, end of the group's rows, first column).
  """
  group, row, end, column = place
  if TILING.config.swap:
    acc = tl.trans(acc)
  if TILING.is_split:
    _store_part(acc, plane, row, end, m, column, out, TILING)
  else:
    result = _epilogue(acc, group, column, epilogue, TILING)
    _store(result, row, end, column, out, TILING)


@triton.jit
def reduce(
  block,
  m,
  operands,
  epilogue,
  out,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
  RESULT: tl.constexpr,
):
  """Adds the partial sums of one block of a row, by its number.

  Args:
    block: the number.
    m: number of rows.
    operands: pointers (workspace, group_sizes).
    epilogue, out, TILING, BLOCK, RESULT: as for `multiply_tile`.
  """
  workspace, group_sizes = operands
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
  result = _epilogue(total[None, :], of_group, column, epilogue, TILING)
  result = tl.where(group < groups, result, 0.0)
  column = column // columns_of_one
  columns = (column + tl.arange(0, BLOCK))[None, :]
  mask = columns < out_columns
  if RESULT is None:
    pointers = out[2] + tl.full((), row, tl.int64) * out_columns + columns
    tl.store(pointers, result.to(pointers.dtype.element_ty), mask=mask)
  else:
    largest = tl.zeros((1,), tl.int32)
    place = (tl.zeros((), tl.int64), row, column)
    largest = epilogues.quantize_part(
      result, place, m, mask, largest, out, RESULT
    )
    epilogues.store_amax(largest, out, RESULT)


@triton.jit
def _epilogue(x, group, column, epilogue, TILING: tl.constexpr):
  """Applies the epilogue to the sums x[rows, columns] of one group.

  column: first column, before `tiles.place_of`.

  Returns f32[rows, columns of out].
  """
  shape: tl.constexpr = TILING.shape
  n: tl.constexpr = TILING.shape.n
  activation: tl.constexpr = TILING.shape.activation
  global_scale, second_global_scale, bias, residual = epilogue
  columns = column + tl.arange(0, x.shape[1])
  places = tiles.place_of(columns, TILING.pair)[None, :]
  if shape.has_scale_of_group:
    global_scale += group * shape.global_factors
  if shape.has_bias:
    bias += group.to(tl.int64) * n
  mask = (columns < n)[None, :]
  epilogue = (global_scale, second_global_scale, bias, residual)
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
    epilogue, out, TILING, RESULT: as for `multiply_tile`.
  """
  group, row, end, column = place
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
        epilogue,
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
