# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Program ids and masked loads of the matmul kernels.

TILING is a `configs.Tiling`, and TILE is its `lhs` or `rhs`. An operand is a
pair of pointers, (values, scale); values may be a TMA descriptor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import decode

from jaxplugin.kernels import formats

# A tile of a swizzled scale has 128 rows, 4 groups of 32, and 4 columns (PTX
# ISA, tcgen05 scale-factor layout "1X"; cuDNN's F8_128x4).
_TILE_ROWS = tl.constexpr(formats.SCALE_TILE_ROWS)
_TILE_COLUMNS = tl.constexpr(formats.SCALE_TILE_COLUMNS)
_GROUP_ROWS = tl.constexpr(32)


@triton.jit
def position_of(pid, tiles_m, TILING: tl.constexpr):
  """Returns (plane, batch, row, column, k), the start of tile number `pid`.

  Programs visit group_m rows of tiles column by column, so that programs that
  run at the same time share operands in L2. `plane` is split * batches + batch.
  """
  tiles_n: tl.constexpr = TILING.tiles_n
  group_m: tl.constexpr = TILING.config.group_m
  plane = pid // (tiles_m * tiles_n)
  pid = pid % (tiles_m * tiles_n)
  first_m = pid // (group_m * tiles_n) * group_m
  rows = min(tiles_m - first_m, group_m)
  pid = pid % (group_m * tiles_n)
  tile_m = first_m + pid % rows
  tile_n = pid // rows
  batch = plane % TILING.shape.batch
  split = plane // TILING.shape.batch
  steps = split * TILING.steps
  if TILING.longer_splits > 0:
    steps += tl.minimum(TILING.longer_splits - split, 0)
  k = steps * TILING.config.block_k
  row = tile_m * TILING.config.block_m
  column = tile_n * TILING.config.block_n
  return plane, batch, row, column, k


@triton.jit
def steps_from(k, TILING: tl.constexpr):
  """Returns the number of steps of a program whose split starts at k."""
  steps = tl.full((), TILING.steps, tl.int32)
  if TILING.longer_splits > 0:
    after_longer: tl.constexpr = TILING.longer_splits * TILING.steps
    steps -= (k >= after_longer * TILING.config.block_k).to(tl.int32)
  return steps


@triton.jit
def row_and_rows(row, TILE: tl.constexpr):
  """Returns (first row of a tile, number of rows of the operand).

  row: the first row; the pair itself if TILE `reads_rows`.
  """
  if TILE.reads_rows:
    return row
  else:
    rows: tl.constexpr = TILE.rows
    return row, rows


@triton.jit
def batch_of(values, scale, batch, TILE: tl.constexpr):
  """Returns (values, scale) of one batch; a descriptor covers all batches."""
  strides: tl.constexpr = TILE.operand.strides
  scale_strides: tl.constexpr = TILE.operand.scale_strides
  if not TILE.is_described:
    values += batch.to(tl.int64) * strides[0]
  if scale_strides is not None:
    scale += batch.to(tl.int64) * scale_strides[0]
  return values, scale


@triton.jit
def matrix_of_rhs(batch, layer, TILING: tl.constexpr):
  """Returns the index of the matrix of rhs: the batch, or the value at `layer`.

  layer: pointer to int32[1], an index in range, which is read only if rhs has
  `layers`.
  """
  if TILING.shape.layers is None:
    return batch
  else:
    return tl.load(layer)


@triton.jit
def zero_accumulator(TILING: tl.constexpr):
  """Returns zeros, [block_m, block_n] or its transpose if swapped.

  They are int32 if TILING `sums_integers`, otherwise f32.
  """
  block_m: tl.constexpr = TILING.config.block_m
  block_n: tl.constexpr = TILING.config.block_n
  dtype: tl.constexpr = tl.int32 if TILING.sums_integers else tl.float32
  if TILING.config.swap:
    return tl.zeros((block_n, block_m), dtype)
  else:
    return tl.zeros((block_m, block_n), dtype)


@triton.jit
def tile_offsets(
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLUMNS: tl.constexpr,
  ROW_STRIDE: tl.constexpr,
  COLUMN_STRIDE: tl.constexpr,
  PAIR: tl.constexpr = None,
):
  """Returns offsets of a tile's elements, in 64 bits only if necessary."""
  far: tl.constexpr = BLOCK_ROWS if PAIR is None else BLOCK_ROWS + PAIR
  rows = tl.arange(0, BLOCK_ROWS)
  columns = tl.arange(0, BLOCK_COLUMNS)
  if far * ROW_STRIDE + BLOCK_COLUMNS * COLUMN_STRIDE >= 2**31:
    rows = rows.to(tl.int64)
    columns = columns.to(tl.int64)
  rows = place_of(rows, PAIR)
  return rows[:, None] * ROW_STRIDE + columns[None, :] * COLUMN_STRIDE


@triton.jit
def place_of(rows, PAIR: tl.constexpr):
  """Returns the rows in memory of `rows`, which alternate between two halves.

  Row 2 i is row i of the first half and row 2 i + 1 is row i of the second,
  PAIR rows later. If PAIR is None, rows are consecutive.
  """
  if PAIR is None:
    return rows
  else:
    return rows // 2 + rows % 2 * PAIR


@triton.jit
def load_tile(
  base,
  row,
  column,
  ROW_STRIDE: tl.constexpr,
  COLUMN_STRIDE: tl.constexpr,
  rows_end,
  COLUMNS: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLUMNS: tl.constexpr,
  EVEN_ROWS: tl.constexpr,
  EVEN_COLUMNS: tl.constexpr,
  PAIR: tl.constexpr = None,
  skipped=0,
  SKIPS: tl.constexpr = False,
):
  """Loads [BLOCK_ROWS, BLOCK_COLUMNS] elements from (row, column) on.

  Elements outside [rows_end, COLUMNS] are zero and are not read. EVEN_ROWS and
  EVEN_COLUMNS mean that no tile exceeds these sizes. With PAIR (`place_of`),
  row must be even. If SKIPS is true, the first `skipped` columns are zero, and
  EVEN_COLUMNS must be true.
  """
  dtype: tl.constexpr = base.dtype.element_ty
  if dtype.is_fp8() and (SKIPS or not (EVEN_ROWS and EVEN_COLUMNS)):
    # Masked loads need zeros, and not every GPU can convert a number to an FP8
    # zero. Other loads are not cast, because a cast tile would leave shared
    # memory, from which tensor memory is filled.
    base = base.to(tl.pointer_type(tl.uint8), bitcast=True)
  place = place_of(row, PAIR).to(tl.int64)
  base += place * ROW_STRIDE + column.to(tl.int64) * COLUMN_STRIDE
  offsets = tile_offsets(
    BLOCK_ROWS, BLOCK_COLUMNS, ROW_STRIDE, COLUMN_STRIDE, PAIR
  )
  rows = row + tl.arange(0, BLOCK_ROWS)
  columns = tl.arange(0, BLOCK_COLUMNS)
  if SKIPS:
    mask = (columns >= skipped)[None, :]
    if not EVEN_ROWS:
      mask &= (rows < rows_end)[:, None]
    tile = tl.load(base + offsets, mask=mask, other=0)
  else:
    tile = _masked_load(
      base + offsets,
      rows,
      column + columns,
      rows_end,
      COLUMNS,
      EVEN_ROWS,
      EVEN_COLUMNS,
    )
  return tile.to(dtype, bitcast=True)


@triton.jit
def _masked_load(
  pointers,
  rows,
  columns,
  rows_end,
  COLUMNS: tl.constexpr,
  EVEN_ROWS: tl.constexpr,
  EVEN_COLUMNS: tl.constexpr,
):
  if EVEN_ROWS and EVEN_COLUMNS:
    return tl.load(pointers)
  elif EVEN_COLUMNS:
    return tl.load(pointers, mask=(rows < rows_end)[:, None], other=0)
  elif EVEN_ROWS:
    return tl.load(pointers, mask=(columns < COLUMNS)[None, :], other=0)
  else:
    mask = (rows < rows_end)[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def start_of_step(k, TILE: tl.constexpr):
  """Returns the first k of a step's tile.

  If the last step would exceed k and TILE `overlaps`, it reads the last block_k
  values of k, some of which the previous step has read.
  """
  if TILE.overlaps:
    last: tl.constexpr = TILE.k - TILE.block_k
    alignment: tl.constexpr = TILE.k & -TILE.k
    return tl.multiple_of(tl.minimum(k, last), alignment)
  else:
    return k


@triton.jit
def load_values(base, batch, row, k, TILE: tl.constexpr):
  """Loads the values of a tile: [block_rows, block_k / values per element].

  Elements are uint8, the pointer's float dtype (plain ones, E4M3, E5M2), or
  uint32 if FP4 is interleaved. `base` points to the matrix of the batch, or is
  a descriptor of all batches, which loads zeros outside [batch, rows, k].
  """
  per_element: tl.constexpr = TILE.operand.values_per_element
  strides: tl.constexpr = TILE.operand.strides
  if TILE.is_described:
    box = base.load([batch, row, k // per_element])
    return box.reshape(TILE.block_rows, TILE.block_k // per_element)
  else:
    return _load_linear(
      base,
      row,
      k,
      1,
      per_element,
      strides,
      TILE.skips_overlap,
      TILE,
    )


@triton.jit
def load_scale(base, row, k, TILE: tl.constexpr):
  """Loads scale codes of a tile: uint8 or FP8[block_rows, block_k / VEC_SIZE].

  If scales multiply sums, a tile has one scale for each row, of any dtype, or
  one scale if its rows are in one square block.
  Codes outside the logical scale are 0, which means 2^-127 or 0, never NaN. If
  TILE `shrinks_overlap`, codes are also 0 in blocks that the previous step has
  read. The other operand is 0 there, and values times 2^-127 are finite.
  """
  # A tile may be longer than a row that has one scale.
  least: tl.constexpr = TILE.block_k if TILE.operand.scales_sums else 1
  vec_size: tl.constexpr = max(TILE.operand.values_per_scale, least)
  strides: tl.constexpr = TILE.operand.scale_strides
  columns: tl.constexpr = TILE.block_k // vec_size
  if not TILE.operand.is_swizzled:
    return _load_linear(
      base,
      row,
      k,
      TILE.operand.rows_per_scale,
      vec_size,
      strides,
      TILE.shrinks_overlap,
      TILE,
    )
  elif (
    TILE.takes_scale_tiles
    and TILE.block_rows % _TILE_ROWS == 0
    and columns % _TILE_COLUMNS == 0
    and (TILE.k + vec_size - 1) // vec_size % _TILE_COLUMNS == 0
  ):
    return _load_swizzled_tiles(base, row, k // vec_size, TILE)
  else:
    dtype: tl.constexpr = base.dtype.element_ty
    bytes = base.to(tl.pointer_type(tl.uint8), bitcast=True)
    codes = _load_swizzled(bytes, row, k // vec_size, TILE)
    return codes.to(dtype, bitcast=True)


@triton.jit
def _load_linear(
  base,
  row,
  k,
  ROWS_PER_ELEMENT: tl.constexpr,
  PER_ELEMENT: tl.constexpr,
  STRIDES: tl.constexpr,
  SKIPS: tl.constexpr,
  TILE: tl.constexpr,
):
  """Loads a tile of elements, each for PER_ELEMENT values of k.

  If an element is for several rows, the rows of a tile share it.
  """
  start = start_of_step(k, TILE)
  row, rows = row_and_rows(row, TILE)
  columns: tl.constexpr = (TILE.k + PER_ELEMENT - 1) // PER_ELEMENT
  block_rows: tl.constexpr = TILE.block_rows if ROWS_PER_ELEMENT == 1 else 1
  block_columns: tl.constexpr = max(TILE.block_k // PER_ELEMENT, 1)
  return load_tile(
    base,
    row // ROWS_PER_ELEMENT,
    start // PER_ELEMENT,
    STRIDES[1],
    STRIDES[2],
    rows,
    columns,
    block_rows,
    block_columns,
    # The first row of a tile exists.
    TILE.even_rows or ROWS_PER_ELEMENT > 1,
    TILE.even_k,
    TILE.pair,
    (k - start) // PER_ELEMENT,
    SKIPS,
  )


@triton.jit
def _load_swizzled_tiles(base, row, column, TILE: tl.constexpr):
  """Loads a swizzled scale in whole tiles of 512 consecutive bytes.

  Tensor memory can copy them from shared memory (`tcgen05.cp`) if block_rows is
  128 and nothing is masked. Triton 3.9 copies more tiles of rows through
  registers (`tcgen05.st`). Rows beyond the logical rows may be any padding,
  because they scale nothing that is stored.
  """
  vec_size: tl.constexpr = TILE.operand.values_per_scale
  tile_bytes: tl.constexpr = _TILE_ROWS * _TILE_COLUMNS
  tiles_m: tl.constexpr = TILE.block_rows // _TILE_ROWS
  tiles_k: tl.constexpr = TILE.block_k // vec_size // _TILE_COLUMNS
  row_tiles: tl.constexpr = (TILE.rows + _TILE_ROWS - 1) // _TILE_ROWS
  codes = load_tile(
    base,
    row // _TILE_ROWS,
    (column // _TILE_COLUMNS).to(tl.int64) * tile_bytes,
    TILE.operand.scale_strides[1],
    1,
    row_tiles,
    (TILE.k + vec_size - 1) // vec_size // _TILE_COLUMNS * tile_bytes,
    tiles_m,
    tiles_k * tile_bytes,
    row_tiles % tiles_m == 0,
    TILE.even_k,
  )
  codes = codes.reshape(tiles_m, tiles_k, _GROUP_ROWS, 4, _TILE_COLUMNS)
  return codes.permute(0, 3, 2, 1, 4).reshape(
    TILE.block_rows, tiles_k * _TILE_COLUMNS
  )


@triton.jit
def _load_swizzled(base, row, column, TILE: tl.constexpr):
  """Loads single bytes of a swizzled scale.

  Byte (r, c) of a tile of 128 x 4 is at (r % 32) * 16 + (r // 32) * 4 + c.
  """
  vec_size: tl.constexpr = TILE.operand.values_per_scale
  rows = row + tl.arange(0, TILE.block_rows)
  columns = column + tl.arange(0, TILE.block_k // vec_size)
  places = place_of(rows, TILE.pair)
  in_tile = places % _TILE_ROWS
  row_offsets = (
    (places // _TILE_ROWS).to(tl.int64) * TILE.operand.scale_strides[1]
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
    TILE.rows,
    (TILE.k + vec_size - 1) // vec_size,
    TILE.even_rows,
    TILE.even_k,
  )


@triton.jit
def load_bf16(operand, batch, row, k, TILE: tl.constexpr):
  """Loads a tile for `dot_exact`: bf16, or f32 for plain f16 and f32."""
  values = load_values(operand[0], batch, row, k, TILE)
  return to_bf16(values, load_scale_of(operand, row, k, TILE), TILE)


@triton.jit
def load_scale_of(operand, row, k, TILE: tl.constexpr):
  """Calls `load_scale` if scales multiply values; otherwise returns 0."""
  if TILE.operand.scales_values:
    return load_scale(operand[1], row, k, TILE)
  else:
    return 0


@triton.jit
def first_scale(operand, row, k, TILE: tl.constexpr):
  """Returns the scale for `step_scales` in the first step.

  It is 0 if scales are not loaded a step ahead.
  """
  if TILE.scale_is_ahead:
    return load_scale_of(operand, row, k, TILE)
  else:
    return 0


@triton.jit
def step_scales(ahead, operand, row, k, k_next, TILE: tl.constexpr):
  """Returns (scale of this step, `ahead` of the next step).

  k and k_next are the starts of this step and of the next one.
  """
  if TILE.scale_is_ahead:
    return ahead, load_scale_of(operand, row, k_next, TILE)
  else:
    return load_scale_of(operand, row, k, TILE), ahead


@triton.jit
def load_factors(
  lhs, rhs, row, column, k, OF_STEP: tl.constexpr, TILING: tl.constexpr
):
  """Loads scales that multiply sums: [block_m, 1] or [1, 1], and of block_n.

  Args:
    lhs, rhs: operands.
    row, column: first rows of the tiles of lhs and rhs.
    k: first k of the step.
    OF_STEP: whether to load scales for the sums of a step, or for those over k.
    TILING: constexpr.

  Returns:
    The stored scales of lhs and rhs; 0 for an operand without such scales.
  """
  lhs_tile: tl.constexpr = TILING.lhs
  rhs_tile: tl.constexpr = TILING.rhs
  lhs_factor = _load_factor(lhs, row, k, OF_STEP, lhs_tile)
  rhs_factor = _load_factor(rhs, column, k, OF_STEP, rhs_tile)
  return lhs_factor, rhs_factor


@triton.jit
def _load_factor(operand, row, k, OF_STEP: tl.constexpr, TILE: tl.constexpr):
  if TILE.scales_steps if OF_STEP else TILE.scales_total:
    return load_scale(operand[1], row, k, TILE)
  else:
    return 0


@triton.jit
def scaled(sums, factors, OF_STEP: tl.constexpr, TILING: tl.constexpr):
  """Multiplies sums of products by the result of `load_factors`."""
  lhs: tl.constexpr = TILING.lhs
  rhs: tl.constexpr = TILING.rhs
  # The product of both factors may leave f32's range when the result does not.
  if lhs.scales_steps if OF_STEP else lhs.scales_total:
    factor = _factor_of(factors[0], lhs)
    sums *= tl.trans(factor) if TILING.config.swap else factor
  if rhs.scales_steps if OF_STEP else rhs.scales_total:
    factor = _factor_of(factors[1], rhs)
    sums *= factor if TILING.config.swap else tl.trans(factor)
  return sums


@triton.jit
def _factor_of(scale, TILE: tl.constexpr):
  kind: tl.constexpr = TILE.operand
  decoding: tl.constexpr = TILE.decoding
  return decode.scale_to_f32(scale, kind, decoding)


@triton.jit
def to_bf16(values, scale, TILE: tl.constexpr):
  """Converts loaded values and scale to the result of `load_bf16`."""
  kind: tl.constexpr = TILE.operand
  decoding: tl.constexpr = TILE.decoding
  if kind.scales_sums:
    return decode.values_to_bf16(values, kind, decoding)
  elif kind.is_quantized:
    return decode.dequantize(values, scale, kind, decoding)
  elif kind.pieces == 1:
    return values
  else:
    return values.to(tl.float32)


@triton.jit
def dot_exact(lhs, rhs, acc, TILING: tl.constexpr):
  """Returns acc + lhs rhs^T in f32 with exact products, transposed if swapped.

  lhs, rhs: [rows, k], bf16, or f32 for a plain f16 or f32 operand, which is
  split into 2 or 3 bf16 pieces of 8 significant bits.
  """
  lhs_pieces: tl.constexpr = TILING.shape.lhs.pieces
  rhs_pieces: tl.constexpr = TILING.shape.rhs.pieces
  swap: tl.constexpr = TILING.config.swap
  # Lower pieces come first, while the sum is small: a matrix instruction
  # truncates the sum.
  if lhs_pieces > 1:
    finite = _zero_unless_finite(rhs)
    rest = decode.without_leading_bf16(lhs)
    if lhs_pieces > 2:
      lowest = decode.without_leading_bf16(rest)
      acc = _dot(decode.leading_bf16(lowest), finite, acc, swap)
    acc = _dot(decode.leading_bf16(rest), finite, acc, swap)
    acc = _dot(decode.leading_bf16(lhs), rhs, acc, swap)
  elif rhs_pieces > 1:
    finite = _zero_unless_finite(lhs)
    rest = decode.without_leading_bf16(rhs)
    if rhs_pieces > 2:
      lowest = decode.without_leading_bf16(rest)
      acc = _dot(finite, decode.leading_bf16(lowest), acc, swap)
    acc = _dot(finite, decode.leading_bf16(rest), acc, swap)
    acc = _dot(lhs, decode.leading_bf16(rhs), acc, swap)
  else:
    acc = _dot(lhs, rhs, acc, swap)
  return acc


@triton.jit
def dot_fp8(lhs, rhs, TILING: tl.constexpr):
  """Returns lhs rhs^T of FP8 [rows, k], summed by FP8 matrix instructions."""
  steps: tl.constexpr = TILING.config.block_k
  if TILING.config.swap:
    return tl.dot(rhs, tl.trans(lhs), max_num_imprecise_acc=steps)
  else:
    return tl.dot(lhs, tl.trans(rhs), max_num_imprecise_acc=steps)


@triton.jit
def dot_int8(lhs, rhs, acc, TILING: tl.constexpr):
  """Returns acc + lhs rhs^T in int32 of INT8 codes [rows, k].

  The result is transposed if swapped. acc: int32, or None for 0.
  """
  lhs = lhs.to(tl.int8, bitcast=True)
  rhs = rhs.to(tl.int8, bitcast=True)
  if TILING.config.swap:
    return tl.dot(rhs, tl.trans(lhs), acc, out_dtype=tl.int32)
  else:
    return tl.dot(lhs, tl.trans(rhs), acc, out_dtype=tl.int32)


@triton.jit
def _zero_unless_finite(x):
  """Replaces Inf and NaN by 0, because Inf times a lower piece of 0 is NaN."""
  return tl.where(tl.abs(x) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _dot(lhs, rhs, acc, SWAP: tl.constexpr):
  if SWAP:
    return tl.dot(rhs, tl.trans(lhs), acc)
  else:
    return tl.dot(lhs, tl.trans(rhs), acc)


@triton.jit
def wait_for(acc):
  """Waits for the matrix instructions that write `acc`, and returns it.

  Inline PTX without an instruction uses `acc`, so the compiler must wait.
  """
  return tl.inline_asm_elementwise(
    "// $0", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1
  )


@triton.jit
def repaired(acc, TILING: tl.constexpr):
  """Multiplies `acc` by the factor that `decode.dequantize` leaves out."""
  repair: tl.constexpr = TILING.repair
  return acc if repair == 1 else acc * repair
