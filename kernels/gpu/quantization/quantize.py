# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that quantize to block-scaled formats, reading the input once.

  quantize               along one axis
  quantize_both          along both axes of a matrix, from one read

`global_scales` has those that find what NVFP4's global scale is computed of,
and `prologues` the one that computes the statistics of a norm's rows.
Each gives the bits of `jp.quantize`: rounding, saturation, NaN and zero blocks
are as documented there. What recipes of training add is done to the tile in
registers: the Hadamard transform before, scales of squares, the choice of a
scale, random rounding. `quantize_config` has what a launch takes. Outputs come
after inputs, as jax-triton passes them; sizes and strides are constexprs, since
of a number given at run time jax-triton does not say what divides it, and loads
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
  pointer,
  scale,
  row,
  column,
  rows,
  columns,
  STRIDES: tl.constexpr,
  SWIZZLED: tl.constexpr,
):
  """Stores scales at (row, column), linear or as "swizzled_128x4".

  Byte (r, c) of a tile of 128 rows and 4 columns goes to (r % 32) * 16 +
  (r // 32) * 4 + c. The padding to whole tiles is stored as well: what lies
  there was quantized from zeros, and is 0.
  """
  r = row[:, None]
  c = column[None, :]
  if SWIZZLED:
    column_tiles = (columns + _TILE_COLUMNS - 1) // _TILE_COLUMNS
    rows = (rows + _TILE_ROWS - 1) // _TILE_ROWS * _TILE_ROWS
    columns = column_tiles * _TILE_COLUMNS
    tile = (r // _TILE_ROWS) * column_tiles + c // _TILE_COLUMNS
    place = (r % 32) * 16 + (r % _TILE_ROWS) // 32 * 4 + c % _TILE_COLUMNS
    offsets = tile * (_TILE_ROWS * _TILE_COLUMNS) + place
  else:
    offsets = r * STRIDES[1] + c * STRIDES[2]
  tl.store(pointer + offsets, scale, mask=(r < rows) & (c < columns))


@triton.jit
def quantize_and_store(
  tile,
  global_scale,
  computed_scale,
  key,
  values,
  scale,
  batch,
  row,
  k_start,
  rows,
  k,
  RANDOM_PLACES: tl.constexpr,
  VALUES_STRIDES: tl.constexpr,
  SCALE_STRIDES: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Quantizes a tile along its second axis and stores what is inside.

  `batch` is that of the tile, `row` its rows and `k_start` its first k. The
  rest is as for `quantize`. Kernels of other modules call this too.
  """
  block_k: tl.constexpr = tile.shape[1]
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  swizzled: tl.constexpr = QUANTIZED.is_swizzled
  options: tl.constexpr = QUANTIZED.options
  random_bits = None
  if options.is_stochastic:
    batch_places: tl.constexpr = RANDOM_PLACES.batch
    row_places: tl.constexpr = RANDOM_PLACES.row
    k_places: tl.constexpr = RANDOM_PLACES.k
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
  place = k_start // packing + tl.arange(0, block_k // packing)
  pointers = values + batch * VALUES_STRIDES[0]
  pointers += row[:, None] * VALUES_STRIDES[1]
  pointers += place[None, :] * VALUES_STRIDES[2]
  stored_rows = rows
  if QUANTIZED.pads_values:
    stored_rows = tl.cdiv(rows, _TILE_ROWS) * _TILE_ROWS
  inside = (row < stored_rows)[:, None] & (place < k // packing)[None, :]
  tl.store(pointers, codes, mask=inside)
  _store_scale(
    scale + batch * SCALE_STRIDES[0],
    scales,
    row,
    k_start // vec_size + tl.arange(0, block_k // vec_size),
    rows,
    k // vec_size,
    SCALE_STRIDES,
    swizzled,
  )


@triton.jit
def quantize(
  x,
  global_scale,
  key,
  other,
  weight,
  bias,
  computed_scale,
  values,
  scale,
  total,
  amax,
  rows: tl.constexpr,
  k: tl.constexpr,
  grid_rows: tl.constexpr,
  grid_k: tl.constexpr,
  x_strides: tl.constexpr,
  random_places: tl.constexpr,
  values_strides: tl.constexpr,
  scale_strides: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Quantizes `x` along k: one tile a program, `launch_grid` programs.

  Masked: rows past `rows`, and k past `k`.

  Args:
    x: f32, bf16 or f16[batch, rows, k]; see `prologues.load` for halves.
    global_scale: for NVFP4 f32[1], or what `global_scales.load_or_compute`
      computes one of; else any pointer or None, not read.
    key: uint32[2], of threefry2x32, for random rounding; of a part of an array
      uint32[4], see `threefry.first_place`; else as before.
    other, weight, bias: of a prologue, see `prologues.load`; else as before.
    computed_scale: f32[1], the global scale if it is computed; else as before.
    values: uint8[batch, rows, k], FP4 uint8[batch, rows, k / 2]; rows up to
      whole scale tiles, zeros past `rows`, where QUANTIZED pads them.
    scale: uint8[batch, rows, k / block size] where linear; swizzled, batch
      times `swizzle_scale`'s bytes, its padding included, without gaps.
    total: x + residual, as x; not written without a residual.
    amax: f32[programs], for each program the largest finite magnitude of the
      prologue's result; None if it is not wanted.
    rows, k: sizes; k has whole blocks.
    grid_rows, grid_k: sizes that the grid covers (`covered`): those of `x`, up
      to whole scale tiles where the scale is swizzled.
    QUANTIZED: `quantize_config.QuantizeConstant`.
    *_strides: (batch, row, k) in elements; of `scale` only that of the batch
      is used where swizzled.
    random_places: `quantize_config.Places`, for random rounding.
  """
  tl.static_assert(BLOCK_K % QUANTIZED.format.block_size == 0)
  batch, row_start, k_start = tiles.of_program(
    grid_rows, grid_k, BLOCK_M, BLOCK_K
  )
  row = row_start + tl.arange(0, BLOCK_M)

  if QUANTIZED.has_prologue:
    tile = prologues.load(
      x,
      other,
      weight,
      bias,
      total,
      batch,
      row_start,
      k_start,
      rows,
      k,
      x_strides,
      BLOCK_M,
      BLOCK_K,
      QUANTIZED,
    )
  else:
    tile = tiles.load_runs(
      x, batch, row, k_start, rows, k, x_strides, BLOCK_M, BLOCK_K
    )
  if amax is not None:
    global_scales.store_amax(global_scales.largest_finite(tile, True), amax)

  quantize_and_store(
    tile,
    global_scale,
    computed_scale,
    key,
    values,
    scale,
    batch,
    row,
    k_start,
    rows,
    k,
    random_places,
    values_strides,
    scale_strides,
    QUANTIZED,
  )


@triton.jit
def quantize_of_m(
  x,
  m,
  global_scale,
  values,
  scale,
  k: tl.constexpr,
  x_strides: tl.constexpr,
  values_strides: tl.constexpr,
  scale_strides: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Computes `quantize` for x[m, k], whose m it reads: m is i32[1].

  Grid: any number of programs. Program i computes the tiles i, i + programs,
  and so on. The scale is linear, and the global scale is given.
  """
  tl.static_assert(BLOCK_K % QUANTIZED.format.block_size == 0)
  rows = tl.load(m)
  num_tiles = tl.cdiv(rows, BLOCK_M).to(tl.int64) * tl.cdiv(k, BLOCK_K)
  first = tl.program_id(0).to(tl.int64)
  for number in range(first, num_tiles, tl.num_programs(0)):
    batch, row_start, k_start = tiles.of_number(
      number, rows, k, BLOCK_M, BLOCK_K
    )
    row = row_start + tl.arange(0, BLOCK_M)
    tile = tiles.load_runs(
      x, batch, row, k_start, rows, k, x_strides, BLOCK_M, BLOCK_K
    )
    quantize_and_store(
      tile,
      global_scale,
      x,
      x,
      values,
      scale,
      batch,
      row,
      k_start,
      rows,
      k,
      (),
      values_strides,
      scale_strides,
      QUANTIZED,
    )


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
  computed_scale,
  computed_scale_t,
  values,
  scale,
  values_t,
  scale_t,
  amax,
  rows: tl.constexpr,
  columns: tl.constexpr,
  k: tl.constexpr,
  k_t: tl.constexpr,
  x_strides: tl.constexpr,
  random_places: tl.constexpr,
  random_places_t: tl.constexpr,
  values_strides: tl.constexpr,
  scale_strides: tl.constexpr,
  values_t_strides: tl.constexpr,
  scale_t_strides: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
  QUANTIZED_T: tl.constexpr,
):
  """Quantizes the rows of `x`, and its columns, from one read.

  Grid, tiles and masks as those of `quantize`, for sizes k_t and k.

  Args:
    x: f32, bf16 or f16[batch, rows, columns]; see `prologues.load` for halves.
    global_scale, global_scale_t: as for `quantize`; of the rows and of the
      columns. They differ where a NaN or an Inf takes other numbers with it in
      a block of the one than in that of the other.
    key, key_t, computed_scale, computed_scale_t: as for `quantize`.
    other, weight, bias: as for `quantize`.
    values, scale: blocked along columns, uint8[batch, rows, k]; FP4 has k / 2
      bytes, and the scale k / block size.
    values_t, scale_t: the same of columns, blocked along rows: uint8[batch,
      columns, k_t], or uint8[batch, k_t, columns] by their strides.
    amax: as for `quantize`.
    rows, columns: of `x`.
    k, k_t: columns and rows, and zeros that are quantized after them, which
      make whole blocks.
    x_strides: (batch, row, column) in elements.
    random_places, random_places_t: see `quantize`; for (batch, row, column) and
      for (batch, column, row).
    *_strides: (batch, row, k) of outputs in elements; rows of `values_t` and
      `scale_t` are columns.
    QUANTIZED, QUANTIZED_T: they have the same format, and may have different
      options.
  """
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  tl.static_assert(BLOCK_K % vec_size == 0 and BLOCK_M % vec_size == 0)
  tl.static_assert(k >= columns and k_t >= rows)
  batch, row_start, column_start = tiles.of_program(k_t, k, BLOCK_M, BLOCK_K)
  row = row_start + tl.arange(0, BLOCK_M)
  column = column_start + tl.arange(0, BLOCK_K)

  if QUANTIZED.has_prologue:
    tile = prologues.load(
      x,
      other,
      weight,
      bias,
      None,
      batch,
      row_start,
      column_start,
      rows,
      columns,
      x_strides,
      BLOCK_M,
      BLOCK_K,
      QUANTIZED,
    )
  else:
    tile = tiles.load(x, batch, row, column, rows, columns, x_strides)
  if amax is not None:
    global_scales.store_amax(global_scales.largest_finite(tile, True), amax)

  quantize_and_store(
    tile,
    global_scale,
    computed_scale,
    key,
    values,
    scale,
    batch,
    row,
    column_start,
    rows,
    k,
    random_places,
    values_strides,
    scale_strides,
    QUANTIZED,
  )

  quantize_and_store(
    tl.trans(tile),
    global_scale_t,
    computed_scale_t,
    key_t,
    values_t,
    scale_t,
    batch,
    column,
    row_start,
    columns,
    k_t,
    random_places_t,
    values_t_strides,
    scale_t_strides,
    QUANTIZED_T,
  )


# By the names that `launching.Launch` uses.
KERNELS: Final = {
  "quantize": quantize,
  "quantize_of_m": quantize_of_m,
  "quantize_both": quantize_both,
  "global_scale_of_few": global_scales.global_scale_of_few,
  "finite_amax": global_scales.finite_amax,
  "finite_amax_both": global_scales.finite_amax_both,
  "norm_statistics": prologues.norm_statistics,
}
