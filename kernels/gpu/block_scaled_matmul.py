# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled matmuls in Triton, dense and ragged.

  out[b, m, n] = activation(g * sum_k lhs[b, m, k] rhs[b, n, k] + bias[n])
                 + residual[b, m, n]

An operand is values times the scale of their block, or plain floats. The path
of the config selects the matrix instruction (`configs.MatmulConfig`). Programs
may split k. They then write partial sums, which `reduce_kernel` adds in a fixed
order, so results do not depend on scheduling. `matmul_plans.plan` returns the
launches. `ragged_matmul` has the formula of a ragged matmul, whose launches are
those of `ragged.plans.plan`.

Pointers come first, and outputs are the last pointers, because jax-triton
passes outputs after inputs. A pointer to an array that the call does not have
is any pointer. jax-triton (0.3) passes arrays one by one, so the kernel pairs
values with scales. TILING, a `configs.Tiling`, is a compile-time constant.
RESULT is None or a `quantized_plans.ResultKind`. The kernel then quantizes its
f32 result (`epilogues.quantize_part`), and k is not split.

Except with "small_m", `lhs` and `rhs` may be TMA descriptors, which the host
writes: the tensor memory accelerator then copies the tiles. A kernel could
write descriptors (`tl.make_tensor_descriptor`), but to global memory that
jax-triton 0.3.1 does not allocate. jax-triton 0.4 with a jaxlib newer than
0.11.0 supports both ways.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import accumulation, epilogues, matmul_plans, tiles
from jaxplugin.kernels.gpu.ragged import ragged_matmul


@triton.jit(repr=matmul_plans.kernel_name_of("matmul"))
def matmul_kernel(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  layer,
  group_sizes,
  m,
  global_scale,
  second_global_scale,
  bias,
  residual,
  out_global_scale,
  key,
  out,
  scale,
  amax,
  TILING: tl.constexpr,
  RESULT: tl.constexpr,
):
  """Multiplies with f32 accumulation, along the path of the config.

  Grid: `TILING.programs`. A program computes one tile of one split. If operands
  are swapped, the accumulator is transposed: rhs is the left operand of the
  matrix instruction, which may stay in registers, and a small m is the narrow
  side. Rows and k beyond the logical sizes are masked, and so are scales.

  If TILING reads m, the number of rows is m, i32[1]. For any m the grid is any
  number of programs, and program i computes the tiles i, i + programs, and so
  on.

  If k is split, out is f32[split_k, batch, m, n], without the epilogue.
  """
  operands = ((lhs, lhs_scale), (rhs, rhs_scale), layer, group_sizes)
  epilogue = (global_scale, second_global_scale, bias, residual)
  result = (out_global_scale, key, out, scale, amax)
  tile = tl.program_id(0)
  if not TILING.shape.reads_m:
    sizes: tl.constexpr = (TILING.shape.m, TILING.tiles_m)
    _multiply_tile(tile, sizes, operands, epilogue, result, TILING, RESULT)
  else:
    rows = tl.load(m)
    tiles_m = _tiles_of_rows(rows, TILING)
    num_tiles = tiles_m * TILING.tiles_n * TILING.config.split_k
    read = (rows, tiles_m)
    # A loop needs 40 more registers (sm_90), because its invariants stay alive.
    if TILING.shape.is_for_any_m:
      for i in range(tile, num_tiles, tl.num_programs(0)):
        _multiply_tile(i, read, operands, epilogue, result, TILING, RESULT)
    elif tile < num_tiles:
      _multiply_tile(tile, read, operands, epilogue, result, TILING, RESULT)


@triton.jit
def _tiles_of_rows(rows, TILING: tl.constexpr):
  """Computes `TILING.tiles_m` for a number of rows."""
  block_m: tl.constexpr = TILING.config.block_m
  if TILING.is_ragged:
    used = tl.minimum(TILING.shape.groups + 1, rows)
    return (rows - used) // block_m + used
  else:
    return tl.cdiv(rows, block_m)


@triton.jit
def _multiply_tile(
  tile,
  sizes,
  operands,
  epilogue,
  out,
  TILING: tl.constexpr,
  RESULT: tl.constexpr,
):
  """Computes one tile by its number.

  Args:
    tile: the number.
    sizes: (m, number of tiles of rows).
    operands: pointers ((lhs, its scale), (rhs, its scale), layer, group_sizes).
    epilogue, out: pointers; see `epilogues.store_quantized_tile`.
    TILING, RESULT: constexprs.
  """
  m, tiles_m = sizes
  lhs, rhs, layer, group_sizes = operands
  position = tiles.position_of(tile, tiles_m, TILING)
  if TILING.is_ragged:
    ragged_matmul.multiply_tile(
      position, m, (lhs, rhs, group_sizes), epilogue, out, TILING, RESULT
    )
  else:
    plane, batch, row, column, k = position
    if TILING.shape.reads_m:
      row = (row, m)
    matrix = tiles.matrix_of_rhs(batch, layer, TILING)
    acc = accumulation.accumulate(
      (lhs[0], lhs[1], batch, row), (rhs[0], rhs[1], matrix, column), k, TILING
    )
    place = (plane, row, column)
    if RESULT is None:
      epilogues.store_tile(acc, place, epilogue, out[2], TILING)
    else:
      epilogues.store_quantized_tile(acc, place, epilogue, out, TILING, RESULT)


@triton.jit(repr=matmul_plans.kernel_name_of("reduce"))
def reduce_kernel(
  workspace,
  group_sizes,
  m,
  global_scale,
  second_global_scale,
  bias,
  residual,
  out_global_scale,
  key,
  out,
  scale,
  amax,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
  RESULT: tl.constexpr,
):
  """Adds the partial sums of a split k, in order, and applies the epilogue.

  workspace: f32[split_k, batch, m, n]; out: [batch, m, n]. Grid: one program
  for each BLOCK consecutive elements of out, which are in one row of a ragged
  result. If TILING reads m, it is any number of programs. A quantized dense
  result is one long row.
  """
  operands = (workspace, group_sizes)
  epilogue = (global_scale, second_global_scale, bias, residual)
  result = (out_global_scale, key, out, scale, amax)
  block = tl.program_id(0)
  if not TILING.shape.reads_m:
    size: tl.constexpr = TILING.shape.m
    _reduce(block, size, operands, epilogue, result, TILING, BLOCK, RESULT)
  else:
    rows = tl.load(m)
    num_blocks = _blocks_of_rows(rows, TILING, BLOCK)
    for i in range(block, num_blocks, tl.num_programs(0)):
      _reduce(i, rows, operands, epilogue, result, TILING, BLOCK, RESULT)


@triton.jit
def _blocks_of_rows(rows, TILING: tl.constexpr, BLOCK: tl.constexpr):
  """Returns the number of blocks of a result of `rows` rows."""
  if TILING.is_ragged:
    chunks: tl.constexpr = (TILING.shape.out_columns + BLOCK - 1) // BLOCK
    return rows * chunks
  else:
    return tl.cdiv(rows.to(tl.int64) * TILING.shape.n, BLOCK).to(tl.int32)


@triton.jit
def _reduce(
  block,
  m,
  operands,
  epilogue,
  out,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
  RESULT: tl.constexpr,
):
  """Computes one block of `reduce_kernel`, by its number, for m rows."""
  if TILING.is_ragged:
    ragged_matmul.reduce(
      block, m, operands, epilogue, out, TILING, BLOCK, RESULT
    )
    return
  shape: tl.constexpr = TILING.shape
  split_k: tl.constexpr = TILING.config.split_k
  size = shape.batch * shape.m * shape.n
  if shape.reads_m:
    size = m.to(tl.int64) * shape.n
  first = tl.full((), block, tl.int64) * BLOCK
  offsets = first + tl.arange(0, BLOCK)
  mask = offsets < size
  total = tl.zeros((BLOCK,), tl.float32)
  for split in tl.static_range(split_k):
    plane = operands[0] + tl.full((), split, tl.int64) * size
    total += tl.load(plane + offsets, mask=mask, other=0)
  columns = offsets % shape.n
  total = epilogues.apply_epilogue(
    total, epilogue, columns, offsets, mask, mask, shape
  )
  if RESULT is None:
    pointers = out[2] + offsets
    tl.store(pointers, total.to(pointers.dtype.element_ty), mask=mask)
  else:
    zero = tl.zeros((), tl.int64)
    largest = tl.zeros((1,), tl.int32)
    largest = epilogues.quantize_part(
      total[None, :],
      (zero, zero, first),
      1,
      mask[None, :],
      largest,
      out,
      RESULT,
    )
    epilogues.store_amax(largest, out, RESULT)


# By the names that `launching.Launch` uses.
KERNELS: Final = {"matmul": matmul_kernel, "reduce": reduce_kernel}
