# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes global scales from the largest magnitudes, without atomics.

  finite_amax            finds partial amax values in blocks along one axis, or
                         along both axes of a matrix, from one read
  load_or_compute        computes a global scale in kernels that quantize
  global_scale_of_few    computes the global scale of a small array

The kernels compute the prologue and the transform of the values before they
compare magnitudes. For their arguments see `quantize.quantize`.
"""

import triton
import triton.language as tl
from jaxplugin.kernels.gpu.quantization import prologues
from jaxplugin.kernels.gpu.quantization import quantize_codec as codec
from jaxplugin.kernels.gpu.quantization import quantize_tiles as tiles

_MIN_GLOBAL_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def _finite_amax(tile, QUANTIZED: tl.constexpr):
  """Returns int32[rows, blocks]: f32 bits of each block's amax.

  It is 0 for a block with a NaN or an Inf.
  """
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  options: tl.constexpr = QUANTIZED.options
  tl.static_assert(tile.shape[1] % vec_size == 0)
  x = tiles.transform(tile, options)
  magnitude = codec.f32_bits(x) & codec.MAGNITUDE_MASK
  amax = tiles.block_amax(magnitude, vec_size, options)
  return tl.where(amax < codec.INFINITY_BITS, amax, 0)


@triton.jit
def finite_amax(
  x,
  other,
  weight,
  bias,
  cotangent,
  maxima,
  PROGRAMS: tl.constexpr,
  TILES: tl.constexpr,
  TILE: tl.constexpr,
  QUANTIZED: tl.constexpr,
  ROW: tl.constexpr,
  QUANTIZED_T: tl.constexpr,
):
  """Stores each program's partial amax of the blocks without NaN or Inf.

  A program reads every PROGRAMSth of TILES tiles. Tiles and masks are those of
  `quantize` with a linear scale, or those of `quantize_both`.

  Args:
    x: f32, bf16 or f16[batch, rows, columns].
    maxima: uint32[1, PROGRAMS], f32 bits of the partial amax values of blocks
      along columns. With QUANTIZED_T, uint32[2, PROGRAMS]: index ROW has these
      values, and 1 - ROW those of blocks along rows.
    QUANTIZED_T: the constant of blocks along rows, or None.
  """
  vec_size: tl.constexpr = QUANTIZED.format.block_size
  block_m: tl.constexpr = TILE.block_m
  block_k: tl.constexpr = TILE.block_k
  largest = tl.zeros((block_m, block_k // vec_size), tl.int32)
  if QUANTIZED_T is not None:
    largest_t = tl.zeros((block_k, block_m // vec_size), tl.int32)
  operands = (x, other, weight, bias, cotangent, None)
  for start in range(0, TILES, PROGRAMS):
    tile = _tile(operands, start, TILES, TILE, QUANTIZED)
    largest = tl.maximum(largest, _finite_amax(tile, QUANTIZED))
    if QUANTIZED_T is not None:
      amax = _finite_amax(tl.trans(tile), QUANTIZED_T)
      largest_t = tl.maximum(largest_t, amax)
  place = maxima + tl.program_id(0)
  _store_largest(place + ROW * PROGRAMS, largest)
  if QUANTIZED_T is not None:
    _store_largest(place + (1 - ROW) * PROGRAMS, largest_t)


@triton.jit
def _store_largest(place, magnitude):
  tl.store(place, tl.max(tl.max(magnitude, 1), 0))


@triton.jit
def largest_finite(x, mask):
  """Returns int32[rows]: f32 bits of each row's largest finite magnitude."""
  bits = codec.f32_bits(x) & codec.MAGNITUDE_MASK
  bits = tl.where(mask & (bits < codec.INFINITY_BITS), bits, 0)
  return tl.max(bits, axis=1)


@triton.jit
def store_amax(largest, amax):
  """Stores the largest of int32[rows], f32 bits, to amax[program], f32."""
  largest = codec.from_bits(tl.max(largest, axis=0))
  tl.store(amax + tl.program_id(0), largest)


@triton.jit
def _tile(
  operands,
  start,
  TILES: tl.constexpr,
  TILE: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Loads tile `start` + program id, or the last tile if there are fewer."""
  number = tl.minimum(tl.program_id(0).to(tl.int64) + start, TILES - 1)
  place = tiles.of_number(number, TILE.rows, TILE)
  if QUANTIZED.has_prologue:
    tile, _ = prologues.load(operands, place, TILE, QUANTIZED)
  else:
    tile = tiles.load(operands[0], place, TILE)
  return tile


@triton.jit
def global_scale_of_few(
  x,
  global_scale,
  TILES: tl.constexpr,
  TILE: tl.constexpr,
  QUANTIZED: tl.constexpr,
  RANGE: tl.constexpr,
):
  """Computes the global scale of a small array with one program.

  The global scale is then available to any kernel that quantizes x.

  Args:
    x: f32, bf16 or f16[batch, rows, k].
    global_scale: f32[1], the result.
    TILES: number of tiles of x.
  """
  block_m: tl.constexpr = TILE.block_m
  blocks: tl.constexpr = TILE.block_k // QUANTIZED.format.block_size
  largest = tl.zeros((block_m, blocks), tl.int32)
  for number in tl.static_range(TILES):
    place = tiles.of_number(number, TILE.rows, TILE)
    amax = _finite_amax(tiles.load(x, place, TILE), QUANTIZED)
    largest = tl.maximum(largest, amax)
  scale = _scale_for(tl.max(tl.max(largest, 1), 0), RANGE)
  tl.store(global_scale, scale)


@triton.jit
def _scale_for(largest, RANGE: tl.constexpr):
  """Returns amax / RANGE, at least 2^-126, or 1 for an amax of 0.

  `largest` is the f32 bits of amax. A division would take many instructions.
  Multiplying by 1 / RANGE and correcting by the remainder gives the same bits
  if the quotient is normal (Markstein, "Computation of elementary functions on
  the IBM RISC System/6000 processor").
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
  """Loads a given global scale, or computes it from partial amax values.

  Args:
    source: f32[1], the given global scale; or uint32[rows, count], f32 bits of
      the partial amax values (QUANTIZED.maxima).
    computed_scale: f32[1], to which the first program stores a computed scale.
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
