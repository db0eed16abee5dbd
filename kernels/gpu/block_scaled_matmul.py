# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled matmuls in Triton.

  out[b, m, n] = activation(g * sum_k lhs[b, m, k] rhs[b, n, k] + bias[n])
                 + residual[b, m, n]

An operand is values times the scale of their block, or plain floats. The path
of the config selects the matrix instruction (`configs.MatmulConfig`). Programs
may split k. They then write partial sums, which `reduce_kernel` adds in a fixed
order, so results do not depend on scheduling. `matmul_plans.plan` returns the
launches.

Pointers come first, and `out` is the last pointer, because jax-triton passes
outputs after inputs. A pointer to an array that the call does not have is any
pointer. jax-triton (0.3) passes arrays one by one, so the kernel pairs values
with scales. TILING, a `configs.Tiling`, is the one compile-time constant.

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


@triton.jit(repr=matmul_plans.kernel_name_of("matmul"))
def matmul_kernel(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  layer,
  global_scale,
  second_global_scale,
  bias,
  residual,
  out,
  TILING: tl.constexpr,
):
  """Multiplies with f32 accumulation, along the path of the config.

  Grid: `TILING.programs`. A program computes one tile of one split. If operands
  are swapped, the accumulator is transposed: rhs is the left operand of the
  matrix instruction, which may stay in registers, and a small m is the narrow
  side. Rows and k beyond the logical sizes are masked, and so are scales.

  If k is split, out is f32[split_k, batch, m, n], without the epilogue.
  """
  left, right = (lhs, lhs_scale), (rhs, rhs_scale, layer)
  epilogue = (global_scale, second_global_scale, bias, residual)
  position = tiles.program_position(TILING)
  acc = _accumulate(position, left, right, TILING)
  epilogues.store_tile(acc, position, epilogue, out, TILING)


@triton.jit(repr=matmul_plans.kernel_name_of("matmul"))
def matmul_quantized_kernel(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  layer,
  global_scale,
  second_global_scale,
  bias,
  residual,
  out_global_scale,
  key,
  amax,
  values,
  scale,
  TILING: tl.constexpr,
  RESULT: tl.constexpr,
):
  """Quantizes the f32 result of `matmul_kernel` without a split of k.

  For the arrays after `residual` see `epilogues.quantize_part`.
  """
  left, right = (lhs, lhs_scale), (rhs, rhs_scale, layer)
  epilogue = (global_scale, second_global_scale, bias, residual)
  out = (out_global_scale, key, amax, values, scale)
  position = tiles.program_position(TILING)
  acc = _accumulate(position, left, right, TILING)
  epilogues.store_quantized_tile(acc, position, epilogue, out, TILING, RESULT)


@triton.jit(repr=matmul_plans.kernel_name_of("matmul"))
def matmul_of_m_kernel(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  layer,
  m,
  global_scale,
  second_global_scale,
  bias,
  residual,
  out,
  TILING: tl.constexpr,
):
  """Computes `matmul_kernel` for m rows, which it reads: m is i32[1].

  Grid: `TILING.programs`, each for one tile. For any m it is any number of
  programs, and program i computes the tiles i, i + programs, and so on.
  """
  left, right = (lhs, lhs_scale), (rhs, rhs_scale, layer)
  epilogue = (global_scale, second_global_scale, bias, residual)
  rows = tl.load(m)
  tiles_m = tl.cdiv(rows, TILING.config.block_m)
  num_tiles = tiles_m * TILING.tiles_n * TILING.config.split_k
  # A loop needs 40 more registers (sm_90), because its invariants stay alive.
  if TILING.shape.is_for_any_m:
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
      _multiply_tile(tile, rows, left, right, epilogue, out, TILING)
  else:
    tile = tl.program_id(0)
    if tile < num_tiles:
      _multiply_tile(tile, rows, left, right, epilogue, out, TILING)


@triton.jit
def _multiply_tile(tile, rows, lhs, rhs, epilogue, out, TILING: tl.constexpr):
  """Computes one tile of `rows` rows, by its number."""
  tiles_m = tl.cdiv(rows, TILING.config.block_m)
  plane, batch, row, column, k = tiles.position_of(tile, tiles_m, TILING)
  position = (plane, batch, (row, rows), column, k)
  acc = _accumulate(position, lhs, rhs, TILING)
  epilogues.store_tile(acc, position, epilogue, out, TILING)


@triton.jit
def _accumulate(position, lhs, rhs, TILING: tl.constexpr):
  """Returns the accumulator of one tile, see `accumulation.accumulate`.

  Args:
    position: see `tiles.position_of`; its row as for `tiles.row_and_rows`.
    lhs: pointers (values, scale).
    rhs: pointers (values, scale, layer).
    TILING: constexpr.
  """
  _, batch, row, column, k = position
  matrix = tiles.matrix_of_rhs(batch, rhs[2], TILING)
  return accumulation.accumulate(
    (lhs[0], lhs[1], batch, row),
    (rhs[0], rhs[1], matrix, column),
    k,
    TILING,
  )


@triton.jit(repr=matmul_plans.kernel_name_of("reduce"))
def reduce_kernel(
  workspace,
  global_scale,
  second_global_scale,
  bias,
  residual,
  out,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
):
  """Adds the partial sums of a split k, in order, and applies the epilogue.

  workspace: f32[split_k, batch, m, n]; out: [batch, m, n]. Grid: one program
  for each BLOCK consecutive elements of out.
  """
  size: tl.constexpr = TILING.shape.batch * TILING.shape.m * TILING.shape.n
  epilogue = (global_scale, second_global_scale, bias, residual)
  i = tl.program_id(0).to(tl.int64)
  _reduce(i, workspace, size, epilogue, out, TILING, BLOCK)


@triton.jit(repr=matmul_plans.kernel_name_of("reduce"))
def reduce_quantized_kernel(
  workspace,
  global_scale,
  second_global_scale,
  bias,
  residual,
  out_global_scale,
  key,
  amax,
  values,
  scale,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
  RESULT: tl.constexpr,
):
  """Quantizes the f32 result of `reduce_kernel`, which is one long row.

  For the arrays after `residual` see `epilogues.quantize_part`.
  """
  size: tl.constexpr = TILING.shape.batch * TILING.shape.m * TILING.shape.n
  epilogue = (global_scale, second_global_scale, bias, residual)
  i = tl.program_id(0).to(tl.int64)
  total, _, mask = _sum(i, workspace, size, epilogue, TILING, BLOCK)
  out = (out_global_scale, key, amax, values, scale)
  zero = tl.zeros((), tl.int64)
  largest = epilogues.quantize_part(
    total[None, :],
    (zero, zero, i * BLOCK),
    1,
    mask[None, :],
    tl.zeros((1,), tl.int32),
    out,
    RESULT,
  )
  epilogues.store_amax(largest, out, RESULT)


@triton.jit(repr=matmul_plans.kernel_name_of("reduce"))
def reduce_of_m_kernel(
  workspace,
  m,
  global_scale,
  second_global_scale,
  bias,
  residual,
  out,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
):
  """Computes `reduce_kernel` for m rows; see `matmul_of_m_kernel`."""
  size = tl.load(m).to(tl.int64) * TILING.shape.n
  epilogue = (global_scale, second_global_scale, bias, residual)
  first = tl.program_id(0).to(tl.int64)
  for i in range(first, tl.cdiv(size, BLOCK), tl.num_programs(0)):
    _reduce(i, workspace, size, epilogue, out, TILING, BLOCK)


@triton.jit
def _reduce(
  i,
  workspace,
  size,
  epilogue,
  out,
  TILING: tl.constexpr,
  BLOCK: tl.constexpr,
):
  """Computes block i, int64, of `reduce_kernel`; out has `size` elements."""
  total, offsets, mask = _sum(i, workspace, size, epilogue, TILING, BLOCK)
  tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum(
  i, workspace, size, epilogue, TILING: tl.constexpr, BLOCK: tl.constexpr
):
  """Returns (f32[BLOCK], offsets, mask) of `_reduce`."""
  shape: tl.constexpr = TILING.shape
  split_k: tl.constexpr = TILING.config.split_k
  offsets = i * BLOCK + tl.arange(0, BLOCK)
  mask = offsets < size
  total = tl.zeros((BLOCK,), tl.float32)
  for split in tl.static_range(split_k):
    plane = workspace + tl.full((), split, tl.int64) * size
    total += tl.load(plane + offsets, mask=mask, other=0)
  columns = offsets % shape.n
  total = epilogues.apply_epilogue(
    total, epilogue, columns, offsets, mask, mask, shape
  )
  return total, offsets, mask


# By the names that `launching.Launch` uses.
KERNELS: Final = {
  "matmul": matmul_kernel,
  "matmul_quantized": matmul_quantized_kernel,
  "matmul_of_m": matmul_of_m_kernel,
  "reduce": reduce_kernel,
  "reduce_quantized": reduce_quantized_kernel,
  "reduce_of_m": reduce_of_m_kernel,
}
