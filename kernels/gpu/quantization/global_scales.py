# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that compute the global scale of a tensor, without atomics.

  global_scale_of_few    that of blocks along one axis, of a small array
  finite_amax, then      the same of any
  reduce_global_scale
  finite_amax_both, then those of blocks along both axes of a matrix, from one
  reduce_global_scales   read
  finite_amax_both, then what a device's part of a matrix asks for, which a
  reduce_partial_scales  maximum over the devices makes the global scales

So it has the same bits each time. What is transformed before it is quantized is
transformed here too. Arguments are as those of `quantize`'s kernels.
"""

import triton
import triton.language as tl
from jaxplugin.kernels.gpu.quantization import quantize_codec as codec
from jaxplugin.kernels.gpu.quantization import quantize_tiles as tiles

_MIN_GLOBAL_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def _finite_amax(
  tile,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """The largest magnitude of a tile's blocks without NaN or Inf, bits."""
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  tl.static_assert(BLOCK_K % vec_size == 0)
  x = tiles.transform(tile, BLOCK_M, BLOCK_K, QUANTIZED.extras)
  magnitude = codec.f32_bits(x) & codec.MAGNITUDE_MASK
  amax = tiles.block_amax(
    magnitude, BLOCK_M, BLOCK_K, vec_size, QUANTIZED.extras
  )
  amax = tl.where(amax < codec.INFINITY_BITS, amax, 0)
  return tl.max(tl.max(amax, 1), 0)


@triton.jit
def finite_amax(
  x,
  partial_amax,
  rows: tl.constexpr,
  k: tl.constexpr,
  x_strides: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Largest magnitude in the blocks of `x` without NaN or Inf, by tiles.

  Grid and masks as those of `quantize` with a linear scale.

  Args:
    x: f32, bf16 or f16[batch, rows, k].
    partial_amax: int32[number of programs], f32 bits.
  """
  batch, row_start, k_start = tiles.of_program(rows, k, BLOCK_M, BLOCK_K)
  row = row_start + tl.arange(0, BLOCK_M)
  column = k_start + tl.arange(0, BLOCK_K)

  tile = tiles.load(x, batch, row, column, rows, k, x_strides)

  amax = _finite_amax(tile, BLOCK_M, BLOCK_K, QUANTIZED)
  tl.store(partial_amax + tl.program_id(0), amax)


@triton.jit
def finite_amax_both(
  x,
  partial_amax,
  partial_amax_t,
  rows: tl.constexpr,
  columns: tl.constexpr,
  x_strides: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
  QUANTIZED_T: tl.constexpr,
):
  """As `finite_amax`, for blocks along the rows of `x` and along its columns.

  Grid of `rows` and `columns`.

  Args:
    x: f32, bf16 or f16[batch, rows, columns].
    partial_amax: int32[number of programs], f32 bits, of blocks along a row.
    partial_amax_t: likewise, of blocks along a column.
  """
  batch, row_start, column_start = tiles.of_program(
    rows, columns, BLOCK_M, BLOCK_K
  )
  row = row_start + tl.arange(0, BLOCK_M)
  column = column_start + tl.arange(0, BLOCK_K)

  tile = tiles.load(x, batch, row, column, rows, columns, x_strides)

  amax = _finite_amax(tile, BLOCK_M, BLOCK_K, QUANTIZED)
  tl.store(partial_amax + tl.program_id(0), amax)
  amax = _finite_amax(tl.trans(tile), BLOCK_K, BLOCK_M, QUANTIZED_T)
  tl.store(partial_amax_t + tl.program_id(0), amax)


@triton.jit
def _store_global_scale(
  partial_amax,
  global_scale,
  size: tl.constexpr,
  RANGE: tl.constexpr,
  CHUNK: tl.constexpr,
  NONE: tl.constexpr,
):
  amax = tl.zeros((CHUNK,), tl.int32)
  for start in range(0, size, CHUNK):
    place = start + tl.arange(0, CHUNK)
    part = tl.load(partial_amax + place, mask=place < size, other=0)
    amax = tl.maximum(amax, part)
  _store_scale_for(tl.max(amax, 0), global_scale, RANGE, NONE)


@triton.jit
def _store_scale_for(
  largest, global_scale, RANGE: tl.constexpr, NONE: tl.constexpr
):
  """Stores the global scale for a largest magnitude, f32 bits."""
  quotient = tl.div_rn(codec.from_bits(largest), RANGE)
  quotient = tl.maximum(quotient, _MIN_GLOBAL_SCALE)
  tl.store(global_scale, tl.where(largest == 0, NONE, quotient))


@triton.jit
def global_scale_of_few(
  x,
  global_scale,
  rows: tl.constexpr,
  k: tl.constexpr,
  x_strides: tl.constexpr,
  TILES: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
  RANGE: tl.constexpr,
  NONE: tl.constexpr,
):
  """`finite_amax` and `reduce_global_scale` by one program, tile by tile.

  Args:
    x: f32, bf16 or f16[batch, rows, k].
    global_scale: f32[1].
    TILES: of all x.
  """
  largest = 0
  for number in tl.static_range(TILES):
    batch, row_start, k_start = tiles.of_number(
      number, rows, k, BLOCK_M, BLOCK_K
    )
    row = row_start + tl.arange(0, BLOCK_M)
    column = k_start + tl.arange(0, BLOCK_K)
    tile = tiles.load(x, batch, row, column, rows, k, x_strides)
    amax = _finite_amax(tile, BLOCK_M, BLOCK_K, QUANTIZED)
    largest = tl.maximum(largest, amax)
  _store_scale_for(largest, global_scale, RANGE, NONE)


@triton.jit
def reduce_global_scale(
  partial_amax,
  global_scale,
  size: tl.constexpr,
  RANGE: tl.constexpr,
  CHUNK: tl.constexpr,
  NONE: tl.constexpr,
):
  """NVFP4's global scale: max(partial_amax) / RANGE, at least 2^-126.

  NONE where the maximum is 0: 1, or 0 where `x` is a part of an array. RANGE is
  the largest value times the largest scale. One program.

  Args:
    partial_amax: int32[size], f32 bits.
    global_scale: f32[1].
  """
  _store_global_scale(partial_amax, global_scale, size, RANGE, CHUNK, NONE)


@triton.jit
def reduce_global_scales(
  partial_amax,
  partial_amax_t,
  global_scale,
  global_scale_t,
  size: tl.constexpr,
  RANGE: tl.constexpr,
  CHUNK: tl.constexpr,
):
  """`reduce_global_scale` of either array. One program."""
  _store_global_scale(partial_amax, global_scale, size, RANGE, CHUNK, 1.0)
  _store_global_scale(partial_amax_t, global_scale_t, size, RANGE, CHUNK, 1.0)


@triton.jit
def reduce_partial_scales(
  partial_amax,
  partial_amax_t,
  partial_scales,
  size: tl.constexpr,
  RANGE: tl.constexpr,
  CHUNK: tl.constexpr,
  PLACE: tl.constexpr,
):
  """`reduce_global_scale` of either array of a part. One program.

  Args:
    partial_scales: f32[2]: that of rows at PLACE, 0 or 1, and that of columns.
  """
  here = partial_scales + PLACE
  there = partial_scales + (1 - PLACE)
  _store_global_scale(partial_amax, here, size, RANGE, CHUNK, 0.0)
  _store_global_scale(partial_amax_t, there, size, RANGE, CHUNK, 0.0)
