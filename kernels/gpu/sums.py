# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The main loops of the matmul kernels: a tile's sums of products over k.

A side is (values, scale, batch, row): pointers, the batch that is meant and the
tile's first row. TILING is a `configs.Tiling`. Accumulators are those of
`tiles.zero_accumulator`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import tiles


@triton.jit
def upcast(lhs, rhs, k, TILING: tl.constexpr):
  """Dequantizes to bf16 in registers; exact products, added in f32.

  Rows and k beyond the logical sizes are masked, scales too. Where k runs
  across the blocks of rhs its tiles are transposed once they are decoded.
  """
  lhs_tile: tl.constexpr = TILING.lhs
  rhs_tile: tl.constexpr = TILING.rhs
  steps = tiles.steps_from(k, TILING)
  block_k: tl.constexpr = TILING.config.block_k
  tl.static_assert(block_k % 32 == 0, "a tile has whole blocks of k")
  lhs, lhs_scale, lhs_batch, row = lhs
  rhs, rhs_scale, rhs_batch, column = rhs
  lhs = tiles.batch_of(lhs, lhs_scale, lhs_batch, lhs_tile)
  rhs = tiles.batch_of(rhs, rhs_scale, rhs_batch, rhs_tile)

  acc = tiles.zero_accumulator(TILING)
  a_ahead = tiles.first_scale(lhs, row, k, lhs_tile)
  b_ahead = tiles.first_scale(rhs, column, k, rhs_tile)
  for step in range(steps):
    k_step = k + step * block_k
    k_next = k + tl.minimum(step + 1, steps - 1) * block_k
    if TILING.is_across:
      a = tiles.load_bf16(lhs, lhs_batch, row, k_step, lhs_tile)
      b = tl.trans(tiles.load_bf16(rhs, rhs_batch, k_step, column, rhs_tile))
    elif lhs_tile.scale_is_ahead or rhs_tile.scale_is_ahead:
      a = tiles.load_values(lhs[0], lhs_batch, row, k_step, lhs_tile)
      b = tiles.load_values(rhs[0], rhs_batch, column, k_step, rhs_tile)
      a_scale, a_ahead = tiles.step_scales(
        a_ahead, lhs, row, k_step, k_next, lhs_tile
      )
      b_scale, b_ahead = tiles.step_scales(
        b_ahead, rhs, column, k_step, k_next, rhs_tile
      )
      a = tiles.to_bf16(a, a_scale, lhs_tile)
      b = tiles.to_bf16(b, b_scale, rhs_tile)
    else:
      a = tiles.load_bf16(lhs, lhs_batch, row, k_step, lhs_tile)
      b = tiles.load_bf16(rhs, rhs_batch, column, k_step, rhs_tile)
    acc = tiles.dot_exact(a, b, acc, TILING)
    if TILING.waits:
      acc = tiles.wait_for(acc)
  return tiles.repaired(acc, TILING)


@triton.jit
def native(lhs, rhs, k, TILING: tl.constexpr):
  """Multiplies with the block-scaled matrix instruction, f32 accumulation.

  Both operands have a block format: any pair of MX formats, or both NVFP4. For
  masks see `upcast`.
  """
  lhs_tile: tl.constexpr = TILING.lhs
  rhs_tile: tl.constexpr = TILING.rhs
  steps = tiles.steps_from(k, TILING)
  block_k: tl.constexpr = TILING.config.block_k
  lhs_element: tl.constexpr = TILING.shape.lhs.element.name
  rhs_element: tl.constexpr = TILING.shape.rhs.element.name
  scale_name: tl.constexpr = TILING.shape.lhs.scale.name
  tl.static_assert(scale_name == TILING.shape.rhs.scale.name)
  lhs, lhs_scale, lhs_batch, row = lhs
  rhs, rhs_scale, rhs_batch, column = rhs
  lhs, lhs_scale = tiles.batch_of(lhs, lhs_scale, lhs_batch, lhs_tile)
  rhs, rhs_scale = tiles.batch_of(rhs, rhs_scale, rhs_batch, rhs_tile)
  if scale_name == "e4m3":
    lhs_scale = lhs_scale.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    rhs_scale = rhs_scale.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
  lhs = (lhs, lhs_scale)
  rhs = (rhs, rhs_scale)

  acc = tiles.zero_accumulator(TILING)
  a_ahead = tiles.first_scale(lhs, row, k, lhs_tile)
  b_ahead = tiles.first_scale(rhs, column, k, rhs_tile)
  for step in range(steps):
    k_step = k + step * block_k
    k_next = k + tl.minimum(step + 1, steps - 1) * block_k
    a = tiles.load_values(lhs[0], lhs_batch, row, k_step, lhs_tile)
    b = tiles.load_values(rhs[0], rhs_batch, column, k_step, rhs_tile)
    a_scale, a_ahead = tiles.step_scales(
      a_ahead, lhs, row, k_step, k_next, lhs_tile
    )
    b_scale, b_ahead = tiles.step_scales(
      b_ahead, rhs, column, k_step, k_next, rhs_tile
    )
    if TILING.config.swap:
      acc = tl.dot_scaled(
        b, b_scale, rhs_element, tl.trans(a), a_scale, lhs_element, acc
      )
    else:
      acc = tl.dot_scaled(
        a, a_scale, lhs_element, tl.trans(b), b_scale, rhs_element, acc
      )
  return acc
