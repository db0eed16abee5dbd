# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-scaled matrix products in Triton.

  out[b, m, n] = activation(g * sum_k lhs[b, m, k] rhs[b, n, k] + bias[n])
                 + residual[b, m, n]

where an operand is values times the scale of their block, or plain floats. Two
kernels compute it: `upcast` dequantizes in registers, exactly, to bf16, for
GPUs without block-scaled matrix instructions and for what those do not take;
`native` leaves it to the instruction. Either may split k over programs, which
then write partial sums for `reduce_kernel` to add in a fixed order: results do
not depend on scheduling. `matmul_plans.plan` says how each is launched.

Pointers come first and `out` is the last of them: jax-triton passes outputs
behind inputs. Those that a call has not are any pointer. Kernels take pointers
one by one, as jax-triton (0.3) passes arrays, and pair them themselves; all
else is one compile-time constant, TILING, a `configs.Tiling`.

`lhs` and `rhs` of `upcast` and `native` may be TMA descriptors: then the tensor
memory accelerator copies the tiles. The host makes these. A kernel could do so
itself (`tl.make_tensor_descriptor`), but every program would write its own to
global memory, which jax-triton 0.3.1 does not allocate. jax-triton 0.4 with a
jaxlib newer than 0.11.0 supports both ways.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import epilogues
from jaxplugin.kernels.gpu import matmul_plans
from jaxplugin.kernels.gpu import small_m
from jaxplugin.kernels.gpu import sums
from jaxplugin.kernels.gpu import tiles


@triton.jit(repr=matmul_plans.kernel_name_of("upcast"))
def upcast_kernel(
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
  """Dequantizes to bf16 in registers and multiplies with f32 accumulation.

  Grid: `TILING.programs`, each of one tile of one split. Where operands are
  swapped the accumulator is transposed: then rhs is the left operand of the
  matrix instruction, the one that may stay in registers, and a small m is its
  narrow side. Rows and k beyond the logical sizes are masked, scales too.

  Where k is split out is f32[split_k, batch, m, n], without the epilogue.
  """
  plane, batch, row, column, k = tiles.program_position(TILING)
  matrix = tiles.matrix_of_rhs(batch, layer, TILING)
  acc = sums.upcast(
    (lhs, lhs_scale, batch, row), (rhs, rhs_scale, matrix, column), k, TILING
  )
  position = (plane, batch, row, column, k)
  epilogue = (global_scale, second_global_scale, bias, residual)
  epilogues.store_tile(acc, position, epilogue, out, TILING)


@triton.jit(repr=matmul_plans.kernel_name_of("native"))
def native_kernel(
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
  """Multiplies with the block-scaled matrix instruction, f32 accumulation.

  Both operands have a block format, MX ones in any pair, or both NVFP4. Grid,
  accumulator, masks and the split of k as `upcast_kernel`.
  """
  plane, batch, row, column, k = tiles.program_position(TILING)
  matrix = tiles.matrix_of_rhs(batch, layer, TILING)
  acc = sums.native(
    (lhs, lhs_scale, batch, row), (rhs, rhs_scale, matrix, column), k, TILING
  )
  position = (plane, batch, row, column, k)
  epilogue = (global_scale, second_global_scale, bias, residual)
  epilogues.store_tile(acc, position, epilogue, out, TILING)


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
  shape: tl.constexpr = TILING.shape
  size: tl.constexpr = TILING.shape.batch * TILING.shape.m * TILING.shape.n
  split_k: tl.constexpr = TILING.config.split_k
  offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
  mask = offsets < size
  total = tl.zeros((BLOCK,), tl.float32)
  for split in tl.static_range(split_k):
    plane = workspace + tl.full((), split, tl.int64) * size
    total += tl.load(plane + offsets, mask=mask, other=0)
  epilogue = (global_scale, second_global_scale, bias, residual)
  columns = offsets % shape.n
  total = epilogues.apply_epilogue(
    total, epilogue, columns, offsets, mask, mask, shape
  )
  tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


# By the names that `launching.Launch` uses.
KERNELS: Final = {
  "upcast": upcast_kernel,
  "native": native_kernel,
  "small_m": small_m.small_m_kernel,
  "reduce": reduce_kernel,
}
