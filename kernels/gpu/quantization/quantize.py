# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that quantize to block-scaled formats, reading the input once.

  quantize               along one axis
  quantize_both          along both axes of a matrix, from one read

`global_scales` has the kernels that compute NVFP4's global scale, and
`prologues` the kernel that computes the statistics of a norm's rows.

Results have the bits of `jp.quantize`, which documents rounding, saturation,
NaN and zero blocks. Options of training recipes are computed in registers: the
Hadamard transform, scales of squares, the choice of a scale, stochastic
rounding.

Outputs come after inputs, as jax-triton passes them. Sizes and strides are
constexprs. As numbers at run time they would have no known divisors, and loads
would be narrow.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from jaxplugin.kernels.gpu.quantization import (
  global_scales,
  prologues,
  threefry,
)
from jaxplugin.kernels.gpu.quantization import quantize_codec as codec
from jaxplugin.kernels.gpu.quantization import quantize_tiles as tiles

from jaxplugin.kernels import formats

_TILE_ROWS = tl.constexpr(formats.SCALE_TILE_ROWS)
_TILE_COLUMNS = tl.constexpr(formats.SCALE_TILE_COLUMNS)


@triton.jit
def _store_scale(
  pointer, scale, row, column, rows, columns, QUANTIZED: tl.constexpr
):
  """Stores scales at (row, column), linear or as "swizzled_128x4".

  Byte (r, c) of a tile of 128 rows and 4 columns goes to (r % 32) * 16 +
  (r // 32) * 4 + c. The padding to whole tiles is also stored. It was quantized
  from zeros, so it is 0.
  """
  r = row[:, None]
  c = column[None, :]
  if QUANTIZED.is_swizzled:
    column_tiles = (columns + _TILE_COLUMNS - 1) // _TILE_COLUMNS
    rows = (rows + _TILE_ROWS - 1) // _TILE_ROWS * _TILE_ROWS
    columns = column_tiles * _TILE_COLUMNS
    tile = (r // _TILE_ROWS) * column_tiles + c // _TILE_COLUMNS
    place = (r % 32) * 16 + (r % _TILE_ROWS) // 32 * 4 + c % _TILE_COLUMNS
    offsets = tile * (_TILE_ROWS * _TILE_COLUMNS) + place
  else:
    offsets = r * QUANTIZED.scale_strides[1] + c * QUANTIZED.scale_strides[2]
  tl.store(pointer + offsets, scale, mask=(r < rows) & (c < columns))


@triton.jit
def quantize_and_store(tile, inputs, out, place, rows, QUANTIZED: tl.constexpr):
  """Quantizes a tile along its second axis and stores what is inside.

  Kernels of other modules call this too.

  Args:
    tile: the tile.
    inputs: pointers (global_scale, computed_scale, key); see `quantize`.
    out: pointers (values, scale); see `quantize`.
    place: (batch, first row, first k) of the tile, int64.
    rows: number of rows that are stored.
  """
  global_scale, computed_scale, key = inputs
  values, scale = out
  batch, row_start, k_start = place
  row = row_start + tl.arange(0, tile.shape[0])
  k: tl.constexpr = QUANTIZED.k
  block_k: tl.constexpr = tile.shape[1]
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  options: tl.constexpr = QUANTIZED.options
  random_bits = None
  if options.is_stochastic:
    batch_places: tl.constexpr = QUANTIZED.random_places.batch
    row_places: tl.constexpr = QUANTIZED.random_places.row
    k_places: tl.constexpr = QUANTIZED.random_places.k
    first = threefry.first_place(key, options.is_part)
    first += threefry.places_along(batch, batch_places)
    in_row = threefry.places_along(row, row_places)
    column = k_start + tl.arange(0, block_k)
    along_k = threefry.places_along(column, k_places)
    random_bits = threefry.bits(key, first + in_row[:, None] + along_k[None, :])
  tile = tiles.transform(tile, options)
  if QUANTIZED.format.is_two_level:
    divisor = global_scales.load_or_compute(
      global_scale, computed_scale, QUANTIZED
    )
    codes, scales = codec.quantize_two_level(
      tile, divisor, random_bits, QUANTIZED
    )
  else:
    codes, scales = codec.quantize_mx(tile, random_bits, QUANTIZED)
  codes, scales = codes.to(tl.uint8), scales.to(tl.uint8)
  packing: tl.constexpr = QUANTIZED.format.values_per_byte
  byte = k_start // packing + tl.arange(0, block_k // packing)
  pointers = values + batch * QUANTIZED.values_strides[0]
  pointers += row[:, None] * QUANTIZED.values_strides[1]
  pointers += byte[None, :] * QUANTIZED.values_strides[2]
  stored_rows = rows
  if QUANTIZED.pads_values:
    stored_rows = tl.cdiv(rows, _TILE_ROWS) * _TILE_ROWS
  inside = (row < stored_rows)[:, None] & (byte < k // packing)[None, :]
  tl.store(pointers, codes, mask=inside)
  _store_scale(
    scale + batch * QUANTIZED.scale_strides[0],
    scales,
    row,
    k_start // vec_size + tl.arange(0, block_k // vec_size),
    rows,
    k // vec_size,
    QUANTIZED,
  )


@triton.jit
def quantize(
  x,
  global_scale,
  key,
  other,
  weight,
  bias,
  cotangent,
  computed_scale,
  values,
  scale,
  total,
  amax,
  sums,
  TILE: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Quantizes `x` along k: one tile a program, as many programs as tiles.

  Masked: rows past TILE.rows, and k past TILE.columns.

  Args:
    x: f32, bf16 or f16[batch, rows, k]; see `prologues.load` for halves.
    global_scale: for NVFP4 the `source` of `global_scales.load_or_compute`.
      Other formats use neither this pointer nor `computed_scale`.
    key: uint32[2], of threefry2x32, for random rounding; uint32[4] for a part
      of an array, see `threefry.first_place`. Otherwise it is not read.
    other, weight, bias, cotangent: operands of a prologue, see
      `prologues.load`.
    computed_scale: f32[1], receives a global scale that is computed.
    values: uint8[batch, rows, k], or uint8[batch, rows, k / 2] for FP4. If
      QUANTIZED pads values, zeros follow up to whole scale tiles of rows.
    scale: uint8[batch, rows, k / block size] if linear. If swizzled, the bytes
      of `swizzle_scale` for each batch, with their padding.
    total: as x, `prologues.load` may write it; None to write nothing.
    amax: f32[programs], for each program the largest finite magnitude of the
      prologue's result; None to store none. Not written with sums.
    sums: f32[tiles, features], for each tile of the other dimension the sums of
      the prologue's features; None to store none.
    TILE: `quantize_config.Tile`. The grid covers x, up to whole scale tiles if
      the scale is swizzled.
    QUANTIZED: `quantize_config.QuantizeConstant`.
  """
  tl.static_assert(TILE.block_k % QUANTIZED.format.block_size == 0)
  place = tiles.of_program(TILE)
  if QUANTIZED.has_prologue:
    operands = (x, other, weight, bias, cotangent, total)
    tile, summed = prologues.load(operands, place, TILE, QUANTIZED)
  else:
    tile = tiles.load_runs(x, place, TILE)
    summed = tile
  if sums is not None:
    tiles.store_sums(summed, sums, place, TILE)
  elif amax is not None:
    global_scales.store_amax(global_scales.largest_finite(tile, True), amax)
  inputs = (global_scale, computed_scale, key)
  quantize_and_store(tile, inputs, (values, scale), place, TILE.rows, QUANTIZED)


@triton.jit
def quantize_of_m(
  x,
  m,
  global_scale,
  values,
  scale,
  TILE: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Computes `quantize` for x[m, k], whose m it reads: m is i32[1].

  Grid: any number of programs. Program i computes the tiles i, i + programs,
  and so on. The scale is linear, and the global scale is given.
  """
  tl.static_assert(TILE.block_k % QUANTIZED.format.block_size == 0)
  rows = tl.load(m)
  row_tiles = tl.cdiv(rows, TILE.block_m).to(tl.int64)
  num_tiles = row_tiles * tl.cdiv(TILE.covered_columns, TILE.block_k)
  first = tl.program_id(0).to(tl.int64)
  for number in range(first, num_tiles, tl.num_programs(0)):
    place = tiles.of_number(number, rows, TILE)
    tile = tiles.load_runs_of_rows(x, place, rows, TILE)
    inputs = (global_scale, x, x)
    quantize_and_store(tile, inputs, (values, scale), place, rows, QUANTIZED)


@triton.jit
def quantize_both(
  x,
  global_scale,
  global_scale_t,
  key,
  key_t,
  other,
  weight,
  bias,
  cotangent,
  computed_scale,
  computed_scale_t,
  values,
  scale,
  values_t,
  scale_t,
  total,
  amax,
  sums,
  TILE: tl.constexpr,
  QUANTIZED: tl.constexpr,
  QUANTIZED_T: tl.constexpr,
):
  """Quantizes the rows of `x`, and its columns, from one read.

  Grid: one program for each tile of [k_t, k], which are QUANTIZED_T.k and
  QUANTIZED.k: rows and columns, and zeros that are quantized after them, which
  make whole blocks. Masks are those of `quantize`.

  Args:
    x: f32, bf16 or f16[batch, rows, columns]; see `prologues.load` for halves.
    global_scale, global_scale_t: as for `quantize`, of the rows and of the
      columns. A NaN or an Inf removes different blocks from each, so they may
      differ.
    key, key_t, computed_scale, computed_scale_t: as for `quantize`.
    other, weight, bias, cotangent: as for `quantize`.
    values, scale: blocked along columns, uint8[batch, rows, k]; FP4 has k / 2
      bytes, and the scale k / block size.
    values_t, scale_t: the same for columns, blocked along rows: uint8[batch,
      columns, k_t], or uint8[batch, k_t, columns] by their strides.
    total, amax, sums: as for `quantize`.
    TILE: as for `quantize`.
    QUANTIZED, QUANTIZED_T: as for `quantize`; rows of `values_t` and `scale_t`
      are columns of x. Both have the same format, and may have different
      options.
  """
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  tl.static_assert(TILE.block_k % vec_size == 0)
  tl.static_assert(TILE.block_m % vec_size == 0)
  tl.static_assert(QUANTIZED.k >= TILE.columns and QUANTIZED_T.k >= TILE.rows)
  place = tiles.of_program(TILE)
  if QUANTIZED.has_prologue:
    operands = (x, other, weight, bias, cotangent, total)
    tile, summed = prologues.load(operands, place, TILE, QUANTIZED)
  else:
    tile = tiles.load(x, place, TILE)
    summed = tile
  if sums is not None:
    tiles.store_sums(summed, sums, place, TILE)
  elif amax is not None:
    global_scales.store_amax(global_scales.largest_finite(tile, True), amax)
  inputs = (global_scale, computed_scale, key)
  quantize_and_store(tile, inputs, (values, scale), place, TILE.rows, QUANTIZED)
  batch, row_start, column_start = place
  quantize_and_store(
    tl.trans(tile),
    (global_scale_t, computed_scale_t, key_t),
    (values_t, scale_t),
    (batch, column_start, row_start),
    TILE.columns,
    QUANTIZED_T,
  )


# By the names that `launching.Launch` uses.
KERNELS: Final = {
  "quantize": quantize,
  "quantize_of_m": quantize_of_m,
  "quantize_both": quantize_both,
  "global_scale_of_few": global_scales.global_scale_of_few,
  "finite_amax": global_scales.finite_amax,
  "norm_statistics": prologues.norm_statistics,
}
