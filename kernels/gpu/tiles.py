# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the matmul kernels share: program ids, masked loads, the epilogue.

Constexpr arguments have the same meaning in every kernel:

  BATCH, M, N, K: logical sizes.
  FORMAT: "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "bf16", "f16" or "f32"; FP4
    whose values are interleaved has `configs.INTERLEAVED` behind it.
  STRIDES: (batch, row, k) of an operand in stored elements; those of FP4 are
    bytes, each of two values along k, or interleaved words, each of eight. None
    where a TMA descriptor stands in the pointer's place: it knows them.
  SCALE_STRIDES: (batch, row, column) of a linear scale; (batch, row tile) of a
    swizzled one, a row tile being 128 rows; None for a plain operand.
  EPILOGUE: (num_global_scales, has_bias, activation, has_residual).
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import decode

from jaxplugin.kernels import formats

# One tile of a swizzled scale: 128 rows, as 4 groups of 32, and 4 columns. See
# the PTX ISA, tcgen05 scale-factor layout "1X"; cuDNN's F8_128x4.
_TILE_ROWS = tl.constexpr(formats.SCALE_TILE_ROWS)
_TILE_COLUMNS = tl.constexpr(formats.SCALE_TILE_COLUMNS)
_GROUP_ROWS = tl.constexpr(32)


@triton.jit
def program_tile(
  TILES_M: tl.constexpr, TILES_N: tl.constexpr, GROUP_M: tl.constexpr
):
  """(plane, tile_m, tile_n) of this program.

  Programs of GROUP_M rows of tiles follow each other column by column, so that
  those that run together share operands in L2. `plane` counts split and batch,
  the batch fastest.
  """
  pid = tl.program_id(0)
  plane = pid // (TILES_M * TILES_N)
  pid = pid % (TILES_M * TILES_N)
  first_m = pid // (GROUP_M * TILES_N) * GROUP_M
  rows = min(TILES_M - first_m, GROUP_M)
  pid = pid % (GROUP_M * TILES_N)
  return plane, first_m + pid % rows, pid // rows


@triton.jit
def tile_offsets(
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLUMNS: tl.constexpr,
  ROW_STRIDE: tl.constexpr,
  COLUMN_STRIDE: tl.constexpr,
):
  """Offsets of a tile's elements from its first, 64-bit only where needed."""
  rows = tl.arange(0, BLOCK_ROWS)
  columns = tl.arange(0, BLOCK_COLUMNS)
  if BLOCK_ROWS * ROW_STRIDE + BLOCK_COLUMNS * COLUMN_STRIDE >= 2**31:
    rows = rows.to(tl.int64)
    columns = columns.to(tl.int64)
  return rows[:, None] * ROW_STRIDE + columns[None, :] * COLUMN_STRIDE


@triton.jit
def load_tile(
  base,
  row,
  column,
  ROW_STRIDE: tl.constexpr,
  COLUMN_STRIDE: tl.constexpr,
  ROWS: tl.constexpr,
  COLUMNS: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLUMNS: tl.constexpr,
  EVEN_COLUMNS: tl.constexpr,
):
  """[BLOCK_ROWS, BLOCK_COLUMNS] elements from (row, column) on.

  Zero outside [ROWS, COLUMNS], where nothing is read. EVEN_COLUMNS promises
  that no tile reaches beyond COLUMNS.
  """
  dtype: tl.constexpr = base.dtype.element_ty
  if dtype.is_fp8() and not (ROWS % BLOCK_ROWS == 0 and EVEN_COLUMNS):
    # Not every GPU can make the FP8 zero of masked elements from a number. A
    # tile that is cast back does not stay in shared memory, where tensor memory
    # takes it from.
    base = base.to(tl.pointer_type(tl.uint8), bitcast=True)
  base += row.to(tl.int64) * ROW_STRIDE + column.to(tl.int64) * COLUMN_STRIDE
  tile = _masked_load(
    base + tile_offsets(BLOCK_ROWS, BLOCK_COLUMNS, ROW_STRIDE, COLUMN_STRIDE),
    row + tl.arange(0, BLOCK_ROWS),
    column + tl.arange(0, BLOCK_COLUMNS),
    ROWS,
    COLUMNS,
    BLOCK_ROWS,
    EVEN_COLUMNS,
  )
  return tile.to(dtype, bitcast=True)


@triton.jit
def _masked_load(
  pointers,
  rows,
  columns,
  ROWS: tl.constexpr,
  COLUMNS: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  EVEN_COLUMNS: tl.constexpr,
):
  even_rows: tl.constexpr = ROWS % BLOCK_ROWS == 0
  if even_rows and EVEN_COLUMNS:
    return tl.load(pointers)
  elif EVEN_COLUMNS:
    return tl.load(pointers, mask=(rows < ROWS)[:, None], other=0)
  elif even_rows:
    return tl.load(pointers, mask=(columns < COLUMNS)[None, :], other=0)
  else:
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def load_values(
  base,
  batch,
  row,
  k,
  FORMAT: tl.constexpr,
  STRIDES: tl.constexpr,
  ROWS: tl.constexpr,
  K: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_K: tl.constexpr,
  EVEN_K: tl.constexpr,
):
  """Stored values of a tile: [BLOCK_ROWS, BLOCK_K], of FP4 [.., BLOCK_K / 2].

  uint8, or the float dtype that the pointer has: plain ones, E4M3, E5M2. Of FP4
  that is interleaved uint32[BLOCK_ROWS, BLOCK_K / 8].

  `base` points to the batch's matrix, or is a descriptor of all batches, whose
  loads are zero outside of [BATCH, ROWS, K].
  """
  packed: tl.constexpr = FORMAT == "mxfp4" or FORMAT == "nvfp4"
  words: tl.constexpr = decode.is_interleaved(FORMAT)
  per_element: tl.constexpr = 8 if words else 2 if packed else 1
  if STRIDES is None:
    box = base.load([batch, row, k // per_element])
    return box.reshape(BLOCK_ROWS, BLOCK_K // per_element)
  else:
    return load_tile(
      base,
      row,
      k // per_element,
      STRIDES[1],
      STRIDES[2],
      ROWS,
      K // per_element,
      BLOCK_ROWS,
      BLOCK_K // per_element,
      EVEN_K,
    )


@triton.jit
def load_scale(
  base,
  row,
  k,
  SCALE_STRIDES: tl.constexpr,
  ROWS: tl.constexpr,
  K: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_K: tl.constexpr,
  VEC_SIZE: tl.constexpr,
  EVEN_K: tl.constexpr,
):
  """Scale codes of a tile: [BLOCK_ROWS, BLOCK_K / VEC_SIZE], uint8 or FP8.

  Code 0 outside the logical scale: 2^-127 or 0, never NaN.
  """
  columns: tl.constexpr = (K + VEC_SIZE - 1) // VEC_SIZE
  block_columns: tl.constexpr = BLOCK_K // VEC_SIZE
  if len(SCALE_STRIDES) == 3:
    return load_tile(
      base,
      row,
      k // VEC_SIZE,
      SCALE_STRIDES[1],
      SCALE_STRIDES[2],
      ROWS,
      columns,
      BLOCK_ROWS,
      block_columns,
      EVEN_K,
    )
  elif (
    BLOCK_ROWS % _TILE_ROWS == 0
    and block_columns % _TILE_COLUMNS == 0
    and columns % _TILE_COLUMNS == 0
  ):
    return _load_swizzled_tiles(
      base,
      row,
      k // VEC_SIZE,
      SCALE_STRIDES[1],
      ROWS,
      columns,
      BLOCK_ROWS,
      block_columns,
      EVEN_K,
    )
  else:
    dtype: tl.constexpr = base.dtype.element_ty
    codes = _load_swizzled(
      base.to(tl.pointer_type(tl.uint8), bitcast=True),
      row,
      k // VEC_SIZE,
      SCALE_STRIDES[1],
      ROWS,
      columns,
      BLOCK_ROWS,
      block_columns,
      EVEN_K,
    )
    return codes.to(dtype, bitcast=True)


@triton.jit
def _load_swizzled_tiles(
  base,
  row,
  column,
  TILE_STRIDE: tl.constexpr,
  ROWS: tl.constexpr,
  COLUMNS: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLUMNS: tl.constexpr,
  EVEN_COLUMNS: tl.constexpr,
):
  """As `_load_swizzled`, in whole tiles of 512 consecutive bytes.

  From shared memory tensor memory copies them as they are (`tcgen05.cp`), where
  BLOCK_ROWS is 128 and nothing is masked. Several tiles of rows Triton 3.9
  brings there through registers (`tcgen05.st`), however they are loaded. Rows
  beyond ROWS may be any padding: they scale nothing that is stored.
  """
  tile_bytes: tl.constexpr = _TILE_ROWS * _TILE_COLUMNS
  tiles_m: tl.constexpr = BLOCK_ROWS // _TILE_ROWS
  tiles_k: tl.constexpr = BLOCK_COLUMNS // _TILE_COLUMNS
  codes = load_tile(
    base,
    row // _TILE_ROWS,
    (column // _TILE_COLUMNS).to(tl.int64) * tile_bytes,
    TILE_STRIDE,
    1,
    (ROWS + _TILE_ROWS - 1) // _TILE_ROWS,
    COLUMNS // _TILE_COLUMNS * tile_bytes,
    tiles_m,
    tiles_k * tile_bytes,
    EVEN_COLUMNS,
  )
  codes = codes.reshape(tiles_m, tiles_k, _GROUP_ROWS, 4, _TILE_COLUMNS)
  return codes.permute(0, 3, 2, 1, 4).reshape(BLOCK_ROWS, BLOCK_COLUMNS)


@triton.jit
def _load_swizzled(
  base,
  row,
  column,
  TILE_STRIDE: tl.constexpr,
  ROWS: tl.constexpr,
  COLUMNS: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLUMNS: tl.constexpr,
  EVEN_COLUMNS: tl.constexpr,
):
  """A tile of a swizzled scale: byte (r, c) of 128 x 4 is at
  (r % 32) * 16 + (r // 32) * 4 + c.
  """
  rows = row + tl.arange(0, BLOCK_ROWS)
  columns = column + tl.arange(0, BLOCK_COLUMNS)
  in_tile = rows % _TILE_ROWS
  row_offsets = (
    (rows // _TILE_ROWS).to(tl.int64) * TILE_STRIDE
    + in_tile % _GROUP_ROWS * (_TILE_ROWS // _GROUP_ROWS * _TILE_COLUMNS)
    + in_tile // _GROUP_ROWS * _TILE_COLUMNS
  )
  column_offsets = (columns // _TILE_COLUMNS).to(tl.int64) * (
    _TILE_ROWS * _TILE_COLUMNS
  ) + columns % _TILE_COLUMNS
  return _masked_load(
    base + row_offsets[:, None] + column_offsets[None, :],
    rows,
    columns,
    ROWS,
    COLUMNS,
    BLOCK_ROWS,
    EVEN_COLUMNS,
  )


@triton.jit
def load_bf16(
  base,
  scale_base,
  batch,
  row,
  k,
  FORMAT: tl.constexpr,
  STRIDES: tl.constexpr,
  SCALE_STRIDES: tl.constexpr,
  ROWS: tl.constexpr,
  K: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_K: tl.constexpr,
  EVEN_K: tl.constexpr,
):
  """A tile for `dot_exact`: bf16, or f32 where it is plain f16 or f32."""
  values = load_values(
    base, batch, row, k, FORMAT, STRIDES, ROWS, K, BLOCK_ROWS, BLOCK_K, EVEN_K
  )
  if SCALE_STRIDES is None:
    if FORMAT == "bf16":
      return values
    else:
      return values.to(tl.float32)
  else:
    is_nvfp4: tl.constexpr = decode.block_format(FORMAT) == "nvfp4"
    vec_size: tl.constexpr = 16 if is_nvfp4 else 32
    scale = load_scale(
      scale_base,
      row,
      k,
      SCALE_STRIDES,
      ROWS,
      K,
      BLOCK_ROWS,
      BLOCK_K,
      vec_size,
      EVEN_K,
    )
    return decode.dequantize(values, scale, FORMAT, vec_size)


@triton.jit
def dot_exact(
  lhs,
  rhs,
  acc,
  LHS_FORMAT: tl.constexpr,
  RHS_FORMAT: tl.constexpr,
  SWAP: tl.constexpr,
):
  """acc + lhs rhs^T in f32, every product exact; transposed with SWAP.

  lhs, rhs: [rows, k], bf16, or f32 where the operand is plain f16 or f32: that
  one is cut in pieces of 8 significant bits, 2 or 3 of them.
  """
  if LHS_FORMAT == "f32" or LHS_FORMAT == "f16":
    pieces: tl.constexpr = 3 if LHS_FORMAT == "f32" else 2
    for _ in tl.static_range(pieces):
      acc = _dot(decode.leading_bf16(lhs), rhs, acc, SWAP)
      lhs = decode.without_leading_bf16(lhs)
      rhs = _zero_unless_finite(rhs)
  elif RHS_FORMAT == "f32" or RHS_FORMAT == "f16":
    pieces: tl.constexpr = 3 if RHS_FORMAT == "f32" else 2
    for _ in tl.static_range(pieces):
      acc = _dot(lhs, decode.leading_bf16(rhs), acc, SWAP)
      rhs = decode.without_leading_bf16(rhs)
      lhs = _zero_unless_finite(lhs)
  else:
    acc = _dot(lhs, rhs, acc, SWAP)
  return acc


@triton.jit
def _zero_unless_finite(x):
  """Infinity times the lower pieces of a number, which may be 0, is no NaN."""
  return tl.where(tl.abs(x) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _dot(lhs, rhs, acc, SWAP: tl.constexpr):
  if SWAP:
    return tl.dot(rhs, tl.trans(lhs), acc)
  else:
    return tl.dot(lhs, tl.trans(rhs), acc)


@triton.jit
def apply_epilogue(
  x,
  global_scale,
  bias,
  residual,
  columns,
  offsets,
  column_mask,
  mask,
  EPILOGUE: tl.constexpr,
):
  """activation(x * global_scale + bias) + residual, in f32.

  Args:
    x: f32.
    global_scale, bias, residual: pointers to f32[1] or f32[2] (factors that
      multiply one after the other), [N] and [BATCH, M, N]; only those that
      EPILOGUE names are read.
    columns, column_mask: of the bias, shapes that broadcast to that of x.
    offsets, mask: of the residual, of the shape of x.
  """
  if EPILOGUE[0]:
    x = x * tl.load(global_scale)
  if EPILOGUE[0] == 2:
    x = x * tl.load(global_scale + 1)
  if EPILOGUE[1]:
    x = x + tl.load(bias + columns, mask=column_mask, other=0).to(tl.float32)
  if EPILOGUE[2] == "relu":
    x = tl.where(x < 0, 0.0, x)  # keeps NaN
  elif EPILOGUE[2] == "silu":
    x = x / (1 + tl.exp(-x))
  elif EPILOGUE[2] == "gelu":
    x = _gelu(x)
  if EPILOGUE[3]:
    x = x + tl.load(residual + offsets, mask=mask, other=0).to(tl.float32)
  return x


@triton.jit
def _gelu(x):
  """x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
  u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
  return x / (1 + tl.exp(-2 * u))


@triton.jit
def store_tile(
  acc,
  plane,
  row,
  column,
  global_scale,
  bias,
  residual,
  out,
  M: tl.constexpr,
  N: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_N: tl.constexpr,
  EPILOGUE: tl.constexpr,
):
  """Writes [BLOCK_M, BLOCK_N] to plane `plane` of out[planes, M, N].

  EPILOGUE None: the plane is one of a split, whose sum gets the epilogue.
  """
  rows = row + tl.arange(0, BLOCK_M)
  columns = column + tl.arange(0, BLOCK_N)
  start = (plane.to(tl.int64) * M + row) * N + column
  out += start
  offsets = tile_offsets(BLOCK_M, BLOCK_N, N, 1)
  column_mask = (columns < N)[None, :]
  mask = (rows < M)[:, None] & column_mask
  if EPILOGUE is not None:
    if EPILOGUE[3]:
      residual += start
    acc = apply_epilogue(
      acc,
      global_scale,
      bias,
      residual,
      columns[None, :],
      offsets,
      column_mask,
      mask,
      EPILOGUE,
    )
  tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)
