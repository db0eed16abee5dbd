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
not depend on scheduling. `configs.plan` says how each is launched.

Pointers come first and `out` is the last of them: jax-triton passes outputs
behind inputs. Those that a call has not are any pointer. `tiles` states what
the constexpr arguments mean.

`lhs` and `rhs` of `upcast` and `native` may be TMA descriptors: then the tensor
memory accelerator copies the tiles. The host makes these. A kernel could do so
itself (`tl.make_tensor_descriptor`), but every program would write its own to
global memory, which jax-triton 0.3.1 does not allocate; from 0.4 on, with a
jaxlib above 0.11.0, it serves both ways.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import configs
from jaxplugin.kernels.gpu import small_m
from jaxplugin.kernels.gpu import tiles


@triton.jit(repr=configs.kernel_name_of("upcast"))
def upcast_kernel(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  global_scale,
  bias,
  residual,
  out,
  BATCH: tl.constexpr,
  M: tl.constexpr,
  N: tl.constexpr,
  K: tl.constexpr,
  LHS_FORMAT: tl.constexpr,
  LHS_STRIDES: tl.constexpr,
  LHS_SCALE_STRIDES: tl.constexpr,
  RHS_FORMAT: tl.constexpr,
  RHS_STRIDES: tl.constexpr,
  RHS_SCALE_STRIDES: tl.constexpr,
  EPILOGUE: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_N: tl.constexpr,
  BLOCK_K: tl.constexpr,
  SPLIT_K: tl.constexpr,
  GROUP_M: tl.constexpr,
  SWAP: tl.constexpr,
):
  """Dequantizes to bf16 in registers and multiplies with f32 accumulation.

  Grid: SPLIT_K * BATCH * ceil(M / BLOCK_M) * ceil(N / BLOCK_N) programs, each
  of one tile of one split. The accumulator is f32[BLOCK_M, BLOCK_N], with SWAP
  its transpose: then the rhs is the left operand of the matrix instruction, the
  one that may stay in registers, and a small M is its narrow side. Rows and k
  beyond the logical sizes are masked, scales too.

  With SPLIT_K > 1 out is f32[SPLIT_K, BATCH, M, N] and EPILOGUE is None.
  """
  tl.static_assert(BLOCK_K % 32 == 0, "a tile has whole blocks of k")
  tl.static_assert((SPLIT_K > 1) == (EPILOGUE is None))
  tiles_m: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
  tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
  steps: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
  even_k: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
  plane, tile_m, tile_n = tiles.program_tile(tiles_m, tiles_n, GROUP_M)
  index = plane % BATCH
  batch = index.to(tl.int64)
  k = plane // BATCH * steps * BLOCK_K
  row = tile_m * BLOCK_M
  column = tile_n * BLOCK_N

  if LHS_STRIDES is not None:
    lhs += batch * LHS_STRIDES[0]
  if RHS_STRIDES is not None:
    rhs += batch * RHS_STRIDES[0]
  if LHS_SCALE_STRIDES is not None:
    lhs_scale += batch * LHS_SCALE_STRIDES[0]
  if RHS_SCALE_STRIDES is not None:
    rhs_scale += batch * RHS_SCALE_STRIDES[0]

  if SWAP:
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
  else:
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
  for step in range(steps):
    lhs_tile = tiles.load_bf16(
      lhs,
      lhs_scale,
      index,
      row,
      k + step * BLOCK_K,
      LHS_FORMAT,
      LHS_STRIDES,
      LHS_SCALE_STRIDES,
      M,
      K,
      BLOCK_M,
      BLOCK_K,
      even_k,
    )
    rhs_tile = tiles.load_bf16(
      rhs,
      rhs_scale,
      index,
      column,
      k + step * BLOCK_K,
      RHS_FORMAT,
      RHS_STRIDES,
      RHS_SCALE_STRIDES,
      N,
      K,
      BLOCK_N,
      BLOCK_K,
      even_k,
    )
    acc = tiles.dot_exact(lhs_tile, rhs_tile, acc, LHS_FORMAT, RHS_FORMAT, SWAP)

  if SWAP:
    acc = tl.trans(acc)
  tiles.store_tile(
    acc,
    plane,
    row,
    column,
    global_scale,
    bias,
    residual,
    out,
    M,
    N,
    BLOCK_M,
    BLOCK_N,
    EPILOGUE,
  )


@triton.jit(repr=configs.kernel_name_of("native"))
def native_kernel(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  global_scale,
  bias,
  residual,
  out,
  BATCH: tl.constexpr,
  M: tl.constexpr,
  N: tl.constexpr,
  K: tl.constexpr,
  LHS_FORMAT: tl.constexpr,
  LHS_STRIDES: tl.constexpr,
  LHS_SCALE_STRIDES: tl.constexpr,
  RHS_FORMAT: tl.constexpr,
  RHS_STRIDES: tl.constexpr,
  RHS_SCALE_STRIDES: tl.constexpr,
  EPILOGUE: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_N: tl.constexpr,
  BLOCK_K: tl.constexpr,
  SPLIT_K: tl.constexpr,
  GROUP_M: tl.constexpr,
  SWAP: tl.constexpr,
):
  """Multiplies with the block-scaled matrix instruction, f32 accumulation.

  Both operands have a block format, MX ones in any pair, or both NVFP4. Grid,
  accumulator, masks and SPLIT_K as `upcast_kernel`.

  """
  tl.static_assert((LHS_FORMAT == "nvfp4") == (RHS_FORMAT == "nvfp4"))
  tl.static_assert((SPLIT_K > 1) == (EPILOGUE is None))
  vec_size: tl.constexpr = 16 if LHS_FORMAT == "nvfp4" else 32
  tiles_m: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
  tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
  steps: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
  even_k: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
  lhs_element: tl.constexpr = _dot_scaled_element(LHS_FORMAT)
  rhs_element: tl.constexpr = _dot_scaled_element(RHS_FORMAT)
  plane, tile_m, tile_n = tiles.program_tile(tiles_m, tiles_n, GROUP_M)
  index = plane % BATCH
  batch = index.to(tl.int64)
  k = plane // BATCH * steps * BLOCK_K
  row = tile_m * BLOCK_M
  column = tile_n * BLOCK_N

  if LHS_STRIDES is not None:
    lhs += batch * LHS_STRIDES[0]
  if RHS_STRIDES is not None:
    rhs += batch * RHS_STRIDES[0]
  lhs_scale += batch * LHS_SCALE_STRIDES[0]
  rhs_scale += batch * RHS_SCALE_STRIDES[0]
  if LHS_FORMAT == "nvfp4":
    lhs_scale = lhs_scale.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    rhs_scale = rhs_scale.to(tl.pointer_type(tl.float8e4nv), bitcast=True)

  if SWAP:
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
  else:
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
  for step in range(steps):
    k_step = k + step * BLOCK_K
    a = tiles.load_values(
      lhs,
      index,
      row,
      k_step,
      LHS_FORMAT,
      LHS_STRIDES,
      M,
      K,
      BLOCK_M,
      BLOCK_K,
      even_k,
    )
    b = tiles.load_values(
      rhs,
      index,
      column,
      k_step,
      RHS_FORMAT,
      RHS_STRIDES,
      N,
      K,
      BLOCK_N,
      BLOCK_K,
      even_k,
    )
    a_scale = tiles.load_scale(
      lhs_scale,
      row,
      k_step,
      LHS_SCALE_STRIDES,
      M,
      K,
      BLOCK_M,
      BLOCK_K,
      vec_size,
      even_k,
    )
    b_scale = tiles.load_scale(
      rhs_scale,
      column,
      k_step,
      RHS_SCALE_STRIDES,
      N,
      K,
      BLOCK_N,
      BLOCK_K,
      vec_size,
      even_k,
    )
    if SWAP:
      acc = tl.dot_scaled(
        b, b_scale, rhs_element, tl.trans(a), a_scale, lhs_element, acc
      )
    else:
      acc = tl.dot_scaled(
        a, a_scale, lhs_element, tl.trans(b), b_scale, rhs_element, acc
      )

  if SWAP:
    acc = tl.trans(acc)
  tiles.store_tile(
    acc,
    plane,
    row,
    column,
    global_scale,
    bias,
    residual,
    out,
    M,
    N,
    BLOCK_M,
    BLOCK_N,
    EPILOGUE,
  )


@triton.constexpr_function
def _dot_scaled_element(FORMAT):
  """`tl.dot_scaled`'s name of a format's values."""
  return {"mxfp8": "e4m3", "mxfp8_e5m2": "e5m2"}.get(FORMAT, "e2m1")


@triton.jit(repr=configs.kernel_name_of("reduce"))
def reduce_kernel(
  workspace,
  global_scale,
  bias,
  residual,
  out,
  BATCH: tl.constexpr,
  M: tl.constexpr,
  N: tl.constexpr,
  EPILOGUE: tl.constexpr,
  SPLIT_K: tl.constexpr,
  BLOCK: tl.constexpr,
):
  """Adds the partial sums of a split k, in order, and applies the epilogue.

  workspace: f32[SPLIT_K, BATCH, M, N]; out: [BATCH, M, N]. Grid: one program
  for each BLOCK consecutive elements of out.
  """
  size: tl.constexpr = BATCH * M * N
  offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
  mask = offsets < size
  total = tl.zeros((BLOCK,), tl.float32)
  for split in range(SPLIT_K):
    plane = workspace + tl.full((), split, tl.int64) * size
    total += tl.load(plane + offsets, mask=mask, other=0)
  total = tiles.apply_epilogue(
    total,
    global_scale,
    bias,
    residual,
    offsets % N,
    offsets,
    mask,
    mask,
    EPILOGUE,
  )
  tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


# By the names that `configs.Launch` uses.
KERNELS: Final = {
  "upcast": upcast_kernel,
  "native": native_kernel,
  "small_m": small_m.small_m_kernel,
  "reduce": reduce_kernel,
}
