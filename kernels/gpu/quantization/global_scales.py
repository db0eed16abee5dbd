# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Global scales of tensors: of largest magnitudes, without atomics.

  finite_amax            finds those of parts of an array, in blocks along an
                         axis
  finite_amax_both       the same along both axes of a matrix, from one read
  load_or_compute        in kernels that quantize: a global scale of all of them
  global_scale_of_few    that of a small array, by one program

So the global scale has the same bits each time. The maximum over devices of
their results is the maximum of all parts. If values are transformed before they
are quantized, these kernels transform them too. Arguments are those of
`quantize`'s kernels.
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
  """Largest magnitudes of a tile's blocks, bits; 0 with a NaN or an Inf.

  int32[BLOCK_M, blocks].
  """
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  tl.static_assert(BLOCK_K % vec_size == 0)
  x = tiles.transform(tile, BLOCK_M, BLOCK_K, QUANTIZED.extras)
  magnitude = codec.f32_bits(x) & codec.MAGNITUDE_MASK
  amax = tiles.block_amax(
    magnitude, BLOCK_M, BLOCK_K, vec_size, QUANTIZED.extras
  )
  return tl.where(amax < codec.INFINITY_BITS, amax, 0)


@triton.jit
def finite_amax(
  x,
  maxima,
  rows: tl.constexpr,
  k: tl.constexpr,
  x_strides: tl.constexpr,
  PROGRAMS: tl.constexpr,
  TILES: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Largest magnitude in the blocks of `x` without NaN or Inf, by programs.

  Each program has every PROGRAMSth of the TILES that `quantize`'s grid has of a
  linear scale, with its masks.

  Args:
    x: f32, bf16 or f16[batch, rows, k].
    maxima: uint32[PROGRAMS], f32 bits.
  """
  blocks: tl.constexpr = BLOCK_K // QUANTIZED.format.block_size
  largest = tl.zeros((BLOCK_M, blocks), tl.int32)
  for start in range(0, TILES, PROGRAMS):
    tile = _tile(x, start, rows, k, x_strides, TILES, BLOCK_M, BLOCK_K)
    amax = _finite_amax(tile, BLOCK_M, BLOCK_K, QUANTIZED)
    largest = tl.maximum(largest, amax)
  _store_largest(maxima + tl.program_id(0), largest)


@triton.jit
def finite_amax_both(
  x,
  maxima,
  rows: tl.constexpr,
  columns: tl.constexpr,
  x_strides: tl.constexpr,
  ROW: tl.constexpr,
  PROGRAMS: tl.constexpr,
  TILES: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
  QUANTIZED: tl.constexpr,
  QUANTIZED_T: tl.constexpr,
):
  """As `finite_amax`, for blocks along the rows of `x` and along its columns.

  Args:
    x: f32, bf16 or f16[batch, rows, columns].
    maxima: uint32[2, PROGRAMS], f32 bits: of blocks along a row at ROW, and of
      blocks along a column at the other.
  """
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  largest = tl.zeros((BLOCK_M, BLOCK_K // vec_size), tl.int32)
  largest_t = tl.zeros((BLOCK_K, BLOCK_M // vec_size), tl.int32)
  for start in range(0, TILES, PROGRAMS):
    tile = _tile(x, start, rows, columns, x_strides, TILES, BLOCK_M, BLOCK_K)
    amax = _finite_amax(tile, BLOCK_M, BLOCK_K, QUANTIZED)
    largest = tl.maximum(largest, amax)
    amax = _finite_amax(tl.trans(tile), BLOCK_K, BLOCK_M, QUANTIZED_T)
    largest_t = tl.maximum(largest_t, amax)
  place = maxima + tl.program_id(0)
  _store_largest(place + ROW * PROGRAMS, largest)
  _store_largest(place + (1 - ROW) * PROGRAMS, largest_t)


@triton.jit
def _store_largest(place, magnitude):
  tl.store(place, tl.max(tl.max(magnitude, 1), 0))


@triton.jit
def _tile(
  x,
  start,
  rows: tl.constexpr,
  columns: tl.constexpr,
  STRIDES: tl.constexpr,
  TILES: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_K: tl.constexpr,
):
  """A program's tile from number `start` on; past the last one the last one."""
  number = tl.minimum(tl.program_id(0).to(tl.int64) + start, TILES - 1)
  batch, row_start, column_start = tiles.of_number(
    number, rows, columns, BLOCK_M, BLOCK_K
  )
  row = row_start + tl.arange(0, BLOCK_M)
  column = column_start + tl.arange(0, BLOCK_K)
  return tiles.load(x, batch, row, column, rows, columns, STRIDES)


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
):
  """The global scale of a small array, by one program.

  It is known before anything is quantized, by whatever kernels.

  Args:
    x: f32, bf16 or f16[batch, rows, k].
    global_scale: f32[1].
    TILES: of all x.
  """
  blocks: tl.constexpr = BLOCK_K // QUANTIZED.format.block_size
  largest = tl.zeros((BLOCK_M, blocks), tl.int32)
  for number in tl.static_range(TILES):
    batch, row_start, k_start = tiles.of_number(
      number, rows, k, BLOCK_M, BLOCK_K
    )
    row = row_start + tl.arange(0, BLOCK_M)
    column = k_start + tl.arange(0, BLOCK_K)
    tile = tiles.load(x, batch, row, column, rows, k, x_strides)
    amax = _finite_amax(tile, BLOCK_M, BLOCK_K, QUANTIZED)
    largest = tl.maximum(largest, amax)
  scale = _scale_for(tl.max(tl.max(largest, 1), 0), RANGE)
  tl.store(global_scale, scale)


@triton.jit
def _scale_for(largest, RANGE: tl.constexpr):
  """max / RANGE, at least 2^-126, of f32 bits; 1 of zero.

  With the bits of a division, which is many instructions: the remainder of a
  product with 1 / RANGE corrects it (Markstein, "Computation of elementary
  functions on the IBM RISC System/6000 processor"). It is exact where the
  quotient is normal.
  """
  reciprocal: tl.constexpr = 1.0 / RANGE
  amax = codec.from_bits(largest)
  quotient = amax * reciprocal
  remainder = tl.fma(quotient, -RANGE, amax)
  quotient = tl.fma(remainder, reciprocal, quotient)
  quotient = tl.maximum(quotient, _MIN_GLOBAL_SCALE)
  return tl.where(largest == 0, 1.0, quotient)


@triton.jit
def load_or_compute(source, computed_scale, QUANTIZED: tl.constexpr):
  """f32[]: a global scale that is given, or the one that maxima ask for.

  Args:
    source: f32[1], or uint32[QUANTIZED.maxima.count] in each row, f32 bits.
    computed_scale: f32[1], which the first program writes; not of a given one.
  """
  if QUANTIZED.is_bounded:
    maxima: tl.constexpr = QUANTIZED.maxima
    place = tl.arange(0, maxima.size)
    bits = tl.load(
      source + maxima.row * maxima.count + place,
      mask=place < maxima.count,
      other=0,
    )
    largest = tl.max(bits.to(tl.int32, bitcast=True), 0)
    global_scale = _scale_for(largest, maxima.range)
    is_first = tl.program_id(0) == 0
    tl.store(computed_scale, global_scale, mask=is_first)
  else:
    global_scale = tl.load(source)
  return global_scale
