# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The epilogue of the matmul kernels: global scale, bias, activation, residual.

A kernel may quantize its f32 result afterwards, before the result leaves
registers.

The product of two f32 global scales may underflow f32. A kernel is therefore
passed two factors, f32[2], or both scales, from which it computes these factors
itself. In the latter case no kernel runs between quantize and matmul.
`jaxplugin/dot/epilogue.py` computes the same in XLA ops.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import tiles
from jaxplugin.kernels.gpu.quantization import global_scales, quantize

# Bits of an f32. An exponent "in place" is one times 2^23.
_MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_EXPONENT_MASK = tl.constexpr(0x7F800000)
_IN_PLACE = tl.constexpr(1 << 23)
_BIAS = tl.constexpr(127)
_MIN_EXPONENT = tl.constexpr(-126)  # of normal numbers
_MAX_EXPONENT = tl.constexpr(127)
_MAX_HALVINGS = tl.constexpr(5)  # of a tile's columns


@triton.jit
def apply_epilogue(
  x, epilogue, columns, offsets, column_mask, mask, SHAPE: tl.constexpr
):
  """Returns activation(x * global_scale + bias) + residual, in f32.

  Args:
    x: f32.
    epilogue: pointers (global_scale, second_global_scale, bias, residual) to
      f32[1] or f32[2] (factors that multiply one after the other), f32[1], [n]
      and [batch, m, n]; only those that SHAPE, a `configs.MatmulShape`, has are
      read.
    columns, column_mask: of the bias, shapes that broadcast to that of x.
    offsets, mask: of the residual, of the shape of x.
  """
  global_scale, second_global_scale, bias, residual = epilogue
  if SHAPE.has_two_global_scales:
    x = _multiply_by_both(
      x, tl.load(global_scale), tl.load(second_global_scale)
    )
  elif SHAPE.has_global_scale:
    x = x * tl.load(global_scale)
  if SHAPE.has_global_power:
    x = x * tl.load(global_scale + 1)
  if SHAPE.has_bias:
    x = x + tl.load(bias + columns, mask=column_mask, other=0).to(tl.float32)
  if SHAPE.activation == "relu":
    x = tl.where(x < 0, 0.0, x)  # keeps NaN
  elif SHAPE.activation == "silu":
    x = x / (1 + tl.exp(-x))
  elif SHAPE.activation == "gelu":
    x = _gelu(x)
  if SHAPE.has_residual:
    x = x + tl.load(residual + offsets, mask=mask, other=0).to(tl.float32)
  return x


@triton.jit
def _multiply_by_both(x, first, second):
  """Returns `x * (first * second)`, even if f32 cannot hold `first * second`.

  It multiplies by two factors in turn. The second is a power of two, and the
  first has NaN, Inf and zeros of both scales. If f32 holds `first * second`,
  the result is rounded as x times this product.
  """
  first_exponent = _exponent_in_place(first)
  second_exponent = _exponent_in_place(second)
  exponent = first_exponent + second_exponent
  power = tl.minimum(
    tl.maximum(exponent, (_MIN_EXPONENT - 2) * _IN_PLACE),
    (_MAX_EXPONENT - 2) * _IN_PLACE,
  )
  power += (_BIAS + 2) * _IN_PLACE
  # 2^(exponent + 2 * bias - power's field), which is in [2^-126, 2^127].
  rest = exponent - power + 2 * _BIAS * _IN_PLACE
  factor = _without(first, first_exponent) * _without(second, second_exponent)
  factor = factor * rest.to(tl.float32, bitcast=True)
  return x * factor * power.to(tl.float32, bitcast=True)


@triton.jit
def _exponent_in_place(x):
  """Returns int32 e * 2^23 with 2^e <= |x| < 2^(e+1); 0 unless x is normal."""
  bits = x.to(tl.int32, bitcast=True)
  # Adding one to the exponent field overflows 31 bits for Inf and NaN.
  is_normal = ((bits + _IN_PLACE) & _MAGNITUDE_MASK) >= 2 * _IN_PLACE
  return tl.where(is_normal, (bits & _EXPONENT_MASK) - _BIAS * _IN_PLACE, 0)


@triton.jit
def _without(x, exponent):
  """Divides `x` by a power of two, given by its exponent times 2^23."""
  bits = x.to(tl.int32, bitcast=True) - exponent
  return bits.to(tl.float32, bitcast=True)


@triton.jit
def _gelu(x):
  """Returns x / 2 (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
  u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
  return x / (1 + tl.exp(-2 * u))


@triton.jit
def store_tile(acc, place, epilogue, out, TILING: tl.constexpr):
  """Stores the accumulator in out[planes, m, n].

  Without a split of k the epilogue is applied first. With a split, a plane has
  partial sums, and the reduction kernel applies the epilogue.

  Args:
    acc: see `zero_accumulator`.
    place: (plane, row, column) of `tiles.position_of`; row as for
      `tiles.row_and_rows`.
    epilogue: pointers; see `apply_epilogue`.
    out: pointer to the result, or to f32 parts if k is split.
    TILING: constexpr.
  """
  n: tl.constexpr = TILING.shape.n
  block_m: tl.constexpr = TILING.config.block_m
  block_n: tl.constexpr = TILING.config.block_n
  shape: tl.constexpr = TILING.shape
  lhs: tl.constexpr = TILING.lhs
  plane, row, column = place
  row, m = tiles.row_and_rows(row, lhs)
  if TILING.config.swap:
    acc = tl.trans(acc)
  rows = row + tl.arange(0, block_m)
  columns = column + tl.arange(0, block_n)
  start = (plane.to(tl.int64) * m + row) * n + column
  out += start
  offsets = tiles.tile_offsets(block_m, block_n, n, 1)
  column_mask = (columns < n)[None, :]
  mask = (rows < m)[:, None] & column_mask
  if not TILING.is_split:
    global_scale, second_global_scale, bias, residual = epilogue
    if shape.has_residual:
      residual += start
    acc = apply_epilogue(
      acc,
      (global_scale, second_global_scale, bias, residual),
      columns[None, :],
      offsets,
      column_mask,
      mask,
      shape,
    )
  tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_quantized_tile(
  acc, place, epilogue, out, TILING: tl.constexpr, RESULT: tl.constexpr
):
  """Applies the epilogue to an accumulator and stores it quantized along n.

  It computes a part of the columns at a time, which needs fewer registers.

  Args:
    acc, place, epilogue: as for `store_tile`.
    out: pointers; see `quantize_part`.
    TILING, RESULT: constexprs.
  """
  m: tl.constexpr = TILING.shape.m
  n: tl.constexpr = TILING.shape.n
  block_m: tl.constexpr = TILING.config.block_m
  block_n: tl.constexpr = TILING.config.block_n
  size: tl.constexpr = min(RESULT.columns_of_part, block_n)
  shape: tl.constexpr = TILING.shape
  plane, row, column = place
  global_scale, second_global_scale, bias, residual = epilogue
  if TILING.config.swap:
    acc = tl.trans(acc)
  row_mask = (row + tl.arange(0, block_m) < m)[:, None]
  offsets = tiles.tile_offsets(block_m, size, n, 1)
  if shape.has_residual:
    residual += (plane.to(tl.int64) * m + row) * n + column
  largest = tl.zeros((block_m,), tl.int32)
  for i in tl.static_range(block_n // size):
    columns = column + i * size + tl.arange(0, size)
    column_mask = (columns < n)[None, :]
    mask = row_mask & column_mask
    x = apply_epilogue(
      part_of(acc, i, block_n // size),
      (global_scale, second_global_scale, bias, residual + i * size),
      columns[None, :],
      offsets,
      column_mask,
      mask,
      shape,
    )
    start = (plane, row, column + i * size)
    largest = quantize_part(x, start, m, mask, largest, out, RESULT)
  store_amax(largest, out, RESULT)


@triton.jit
def part_of(x, INDEX: tl.constexpr, COUNT: tl.constexpr):
  """Returns part INDEX of COUNT, a power of two, of the columns of x."""
  rows: tl.constexpr = x.shape[0]
  for i in tl.static_range(_MAX_HALVINGS):
    if COUNT >> (i + 1) > 0:
      halves = tl.reshape(x, (rows, 2, x.shape[1] // 2))
      first, second = tl.split(tl.permute(halves, (0, 2, 1)))
      if INDEX // (COUNT >> (i + 1)) % 2 == 1:
        x = second
      else:
        x = first
  return x


@triton.jit
def quantize_part(x, place, rows, mask, largest, out, RESULT: tl.constexpr):
  """Quantizes f32 x[rows, columns] along the columns, and stores the result.

  Args:
    x: a part of the result.
    place: (batch, first row, first column).
    rows: end of the rows that are stored.
    mask: elements that exist.
    largest: int32[rows], the result for earlier parts; zeros at first.
    out: pointers (out_global_scale, key, values, scale, amax): f32[1],
      uint32[2], and those of `quantize.quantize`. Those that RESULT does not
      need are not read.
    RESULT: constexpr, a `quantized_plans.ResultKind`.

  Returns:
    Bits of the rows' largest finite magnitudes, for `store_amax`.
  """
  out_global_scale, key, values, scale, _ = out
  batch, row, column = place
  if RESULT.has_amax:
    largest = tl.maximum(largest, global_scales.largest_finite(x, mask))
  place = (batch.to(tl.int64), row.to(tl.int64), column.to(tl.int64))
  inputs = (out_global_scale, out_global_scale, key)
  quantized: tl.constexpr = RESULT.quantized
  quantize.quantize_and_store(
    x, inputs, (values, scale), place, rows, quantized
  )
  return largest


@triton.jit
def store_amax(largest, out, RESULT: tl.constexpr):
  """Stores the largest of `largest` for this program, if RESULT has an amax."""
  if RESULT.has_amax:
    global_scales.store_amax(largest, out[4])
