# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiles of the quantize kernels: positions, loads, reductions, transforms.

Float sums have the order of `jp.quantize`: the second half of the terms is
added to the first, recursively.

TILE is a `quantize_config.Tile`, OPTIONS a `quantize_config.QuantizeOptions`.
"""

import triton
import triton.language as tl

_MAX_ROUNDS = tl.constexpr(8)  # rounds of a tree sum or of butterflies


@triton.jit
def of_program(TILE: tl.constexpr):
  """Returns int64 (batch, first row, first column) of this program's tile.

  Programs with consecutive ids have tiles along columns.
  """
  program = tl.program_id(0).to(tl.int64)
  return of_number(program, TILE.covered_rows, TILE)


@triton.jit
def of_number(program, rows, TILE: tl.constexpr):
  """Returns (batch, first row, first column) of a tile by its number."""
  column_tiles = tl.cdiv(TILE.covered_columns, TILE.block_k)
  row_tiles = tl.cdiv(rows, TILE.block_m)
  column_tile = program % column_tiles
  row_tile = program // column_tiles % row_tiles
  batch = program // column_tiles // row_tiles
  return batch, row_tile * TILE.block_m, column_tile * TILE.block_k


@triton.jit
def positions(place, TILE: tl.constexpr):
  """Returns the rows and columns of a tile, and which elements x has."""
  _, row_start, column_start = place
  row = row_start + tl.arange(0, TILE.block_m)
  column = column_start + tl.arange(0, TILE.block_k)
  return row, column, _inside(row, column, TILE.rows, TILE)


@triton.jit
def _inside(row, column, rows, TILE: tl.constexpr):
  return (row < rows)[:, None] & (column < TILE.columns)[None, :]


@triton.jit
def load(x, place, TILE: tl.constexpr):
  """Loads a tile of x, with zeros outside of its sizes."""
  row, column, _ = positions(place, TILE)
  return _load(x, place[0], row, column, TILE.rows, TILE)


@triton.jit
def _load(x, batch, row, column, rows, TILE: tl.constexpr):
  pointers = x + batch * TILE.strides[0]
  pointers += row[:, None] * TILE.strides[1] + column[None, :] * TILE.strides[2]
  inside = _inside(row, column, rows, TILE)
  return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_runs(x, place, TILE: tl.constexpr):
  """Loads a tile, 16 consecutive columns for each thread; see `load`."""
  return load_runs_of_rows(x, place, TILE.rows, TILE)


@triton.jit
def load_runs_of_rows(x, place, rows, TILE: tl.constexpr):
  """Computes `load_runs` for a number of rows that TILE does not have.

  A thread then reduces a block of 16 without other threads. The compiler gives
  a thread the 16 bytes of one load, so 16 values take several joined loads.
  """
  block_m: tl.constexpr = TILE.block_m
  block_k: tl.constexpr = TILE.block_k
  batch, row_start, k_start = place
  row = row_start + tl.arange(0, block_m)
  if not TILE.is_row_major or block_k < 16:
    column = k_start + tl.arange(0, block_k)
    tile = _load(x, batch, row, column, rows, TILE)
  else:
    loads: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    size: tl.constexpr = 16 // loads
    tl.static_assert(loads == 2 or loads == 4)
    i = tl.arange(0, block_k // loads)
    column = k_start + i // size * 16 + i % size
    tile = _two_runs(x, batch, row, column, size, rows, TILE)
    if loads == 2:
      tile = tl.reshape(tile, (block_m, block_k // 16, size, 2))
      tile = tl.permute(tile, (0, 1, 3, 2))
    else:
      others = _two_runs(x, batch, row, column + 2 * size, size, rows, TILE)
      tile = tl.join(tile, others)
      tile = tl.reshape(tile, (block_m, block_k // 16, size, 2, 2))
      tile = tl.permute(tile, (0, 1, 4, 3, 2))
    tile = tl.reshape(tile, (block_m, block_k))
  return tile


@triton.jit
def _two_runs(
  x, batch, row, column, APART: tl.constexpr, rows, TILE: tl.constexpr
):
  """Joins two loads whose columns are APART from each other."""
  return tl.join(
    _load(x, batch, row, column, rows, TILE),
    _load(x, batch, row, column + APART, rows, TILE),
  )


@triton.jit
def store_sums(tile, sums, place, TILE: tl.constexpr):
  """Stores the sum of each feature of a tile, which is zero outside of x.

  Args:
    sums: f32[tiles, features], with the tiles of the other dimension of each
      matrix of the batch.
  """
  batch, row_start, column_start = place
  row, column, _ = positions(place, TILE)
  if TILE.is_row_major:
    feature = column
    number = batch * tl.cdiv(TILE.covered_rows, TILE.block_m)
    number += row_start // TILE.block_m
    total = tl.sum(tile, axis=0)
  else:
    feature = row
    number = batch * tl.cdiv(TILE.covered_columns, TILE.block_k)
    number += column_start // TILE.block_k
    total = tl.sum(tile, axis=1)
  features: tl.constexpr = TILE.features
  tl.store(sums + number * features + feature, total, mask=feature < features)


@triton.jit
def block_amax(magnitude, VEC_SIZE: tl.constexpr, OPTIONS: tl.constexpr):
  """Returns int32[rows, blocks]: f32 bits of each scale block's amax.

  With square blocks, all rows of a square have the amax of the square.
  """
  amax = tl.max(in_blocks(magnitude, VEC_SIZE), axis=2)
  if OPTIONS.is_square:
    amax = _over_squares(tl.max(_squares(amax, VEC_SIZE), axis=1), VEC_SIZE)
  return amax


@triton.jit
def block_sum(x, VEC_SIZE: tl.constexpr, OPTIONS: tl.constexpr):
  """Returns f32[rows, blocks]: the sum of each scale block or square."""
  total = _tree_sum(in_blocks(x, VEC_SIZE))
  if OPTIONS.is_square:
    squares = tl.permute(_squares(total, VEC_SIZE), (0, 2, 1))
    total = _over_squares(_tree_sum(squares), VEC_SIZE)
  return total


@triton.jit
def in_blocks(x, VEC_SIZE: tl.constexpr):
  """Returns x[rows, k] as [rows, blocks, values of a block]."""
  return tl.reshape(x, (x.shape[0], x.shape[1] // VEC_SIZE, VEC_SIZE))


@triton.jit
def _squares(x, VEC_SIZE: tl.constexpr):
  """Returns x[rows, blocks] as [squares, rows of a square, blocks]."""
  tl.static_assert(x.shape[0] % VEC_SIZE == 0)
  return tl.reshape(x, (x.shape[0] // VEC_SIZE, VEC_SIZE, x.shape[1]))


@triton.jit
def over_blocks(block_values, VEC_SIZE: tl.constexpr):
  """Repeats the element of each scale block for each of its values."""
  rows: tl.constexpr = block_values.shape[0]
  blocks: tl.constexpr = block_values.shape[1]
  repeated = tl.broadcast_to(block_values[:, :, None], (rows, blocks, VEC_SIZE))
  return tl.reshape(repeated, (rows, blocks * VEC_SIZE))


@triton.jit
def _over_squares(square_values, VEC_SIZE: tl.constexpr):
  """Repeats the element of each square for each of its rows."""
  squares: tl.constexpr = square_values.shape[0]
  blocks: tl.constexpr = square_values.shape[1]
  repeated = tl.broadcast_to(
    square_values[:, None, :], (squares, VEC_SIZE, blocks)
  )
  return tl.reshape(repeated, (squares * VEC_SIZE, blocks))


@triton.jit
def _tree_sum(x):
  """Sums the last dimension of f32[rows, columns, size], halves at a time."""
  rows: tl.constexpr = x.shape[0]
  columns: tl.constexpr = x.shape[1]
  size: tl.constexpr = x.shape[2]
  for i in tl.static_range(_MAX_ROUNDS):
    if size >> (i + 1) > 0:
      halves = tl.reshape(x, (rows, columns, 2, size >> (i + 1)))
      first, second = tl.split(tl.permute(halves, (0, 1, 3, 2)))
      x = first + second
  return tl.reshape(x, (rows, columns))


@triton.jit
def _butterfly(x, APART: tl.constexpr):
  """Replaces pairs of values that are APART by their sum and difference."""
  rows: tl.constexpr = x.shape[0]
  columns: tl.constexpr = x.shape[1]
  pairs = tl.reshape(x, (rows, columns // (2 * APART), 2, APART))
  first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
  pairs = tl.join(first + second, first - second)
  return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (rows, columns))


@triton.jit
def transform(x, OPTIONS: tl.constexpr):
  """Returns the random Hadamard transform of groups of values along k, in f32.

  It computes butterflies of values 1, 2, 4, ... apart and then multiplies by
  the factor, in the order of `jp.quantize`. Without a transform it returns x.
  """
  size: tl.constexpr = OPTIONS.hadamard
  columns: tl.constexpr = x.shape[1]
  if size > 1:
    tl.static_assert(columns % size == 0)
    place = tl.arange(0, columns) % size
    signs = tl.full((columns,), OPTIONS.sign_words[0], tl.int32)
    for i in tl.static_range(1, size // 32):
      signs = tl.where(place // 32 == i, OPTIONS.sign_words[i], signs)
    flip = (signs >> (place % 32)) << 31
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) ^ flip[None, :]
    x = bits.to(tl.float32, bitcast=True)
    for i in tl.static_range(_MAX_ROUNDS):
      if 1 << i < size:
        x = _butterfly(x, 1 << i)
    x = x * OPTIONS.factor
  return x
