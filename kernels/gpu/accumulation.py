# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The main loop of the matmul kernels: a tile's sums of products over k."""

from __future__ import annotations

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import small_m
from jaxplugin.kernels.gpu import tiles


@triton.jit
def accumulate(lhs, rhs, k, TILING: tl.constexpr):
  """Adds a tile's products in f32, from k to the end of the split.

  Rows and k beyond the logical sizes are masked, and so are scales. If k runs
  across the blocks of rhs, decoded tiles of rhs are transposed.

  Args:
    lhs, rhs: (values, scale, batch, row): pointers, the number of the matrix,
      and the tile's first row.
    k: where the split starts.
    TILING: `configs.Tiling`.

  Returns:
    f32 in the shape of `tiles.zero_accumulator`.
  """
  lhs_tile: tl.constexpr = TILING.lhs
  rhs_tile: tl.constexpr = TILING.rhs
  path: tl.constexpr = TILING.config.path
  block_k: tl.constexpr = TILING.config.block_k
  tl.static_assert(block_k % 32 == 0, "a tile has whole blocks of k")
  is_ahead: tl.constexpr = lhs_tile.scale_is_ahead or rhs_tile.scale_is_ahead
  steps = tiles.steps_from(k, TILING)
  lhs, lhs_scale, lhs_batch, row = lhs
  rhs, rhs_scale, rhs_batch, column = rhs
  if path == "native":
    lhs_scale = _with_native_type(lhs_scale, lhs_tile)
    rhs_scale = _with_native_type(rhs_scale, rhs_tile)
  lhs = tiles.batch_of(lhs, lhs_scale, lhs_batch, lhs_tile)
  rhs = tiles.batch_of(rhs, rhs_scale, rhs_batch, rhs_tile)

  acc = tiles.zero_accumulator(TILING)
  a_ahead = tiles.first_scale(lhs, row, k, lhs_tile)
  b_ahead = tiles.first_scale(rhs, column, k, rhs_tile)
  for step in range(steps):
    k_step = k + step * block_k
    k_next = k + tl.minimum(step + 1, steps - 1) * block_k
    # The order of loads and decoding keeps the number of registers low.
    if path == "small_m":
      b_scale, b_ahead = tiles.step_scales(
        b_ahead, rhs, column, k_step, k_next, rhs_tile
      )
      b = tiles.load_values(rhs[0], rhs_batch, column, k_step, rhs_tile)
      if is_ahead:
        a = tiles.load_values(lhs[0], lhs_batch, row, k_step, lhs_tile)
        a_scale, a_ahead = tiles.step_scales(
          a_ahead, lhs, row, k_step, k_next, lhs_tile
        )
        b = small_m.dequantize(b, b_scale, rhs_tile)
        a = tiles.to_bf16(a, a_scale, lhs_tile)
      else:
        b = small_m.dequantize(b, b_scale, rhs_tile)
        a = tiles.load_bf16(lhs, lhs_batch, row, k_step, lhs_tile)
      a = small_m.order_k(a, TILING)
    elif path == "native" or is_ahead:
      a = tiles.load_values(lhs[0], lhs_batch, row, k_step, lhs_tile)
      b = tiles.load_values(rhs[0], rhs_batch, column, k_step, rhs_tile)
      a_scale, a_ahead = tiles.step_scales(
        a_ahead, lhs, row, k_step, k_next, lhs_tile
      )
      b_scale, b_ahead = tiles.step_scales(
        b_ahead, rhs, column, k_step, k_next, rhs_tile
      )
      if path == "native":
        acc = _dot_native(a, a_scale, b, b_scale, acc, TILING)
      else:
        a = tiles.to_bf16(a, a_scale, lhs_tile)
        b = tiles.to_bf16(b, b_scale, rhs_tile)
    else:
      a = tiles.load_bf16(lhs, lhs_batch, row, k_step, lhs_tile)
      if TILING.is_across:
        b = tiles.load_bf16(rhs, rhs_batch, k_step, column, rhs_tile)
        b = tl.trans(b)
      else:
        b = tiles.load_bf16(rhs, rhs_batch, column, k_step, rhs_tile)
    if path != "native":
      acc = tiles.dot_exact(a, b, acc, TILING)
      if TILING.waits and path == "upcast":
        acc = tiles.wait_for(acc)
  return acc if path == "native" else tiles.repaired(acc, TILING)


@triton.jit
def _with_native_type(scale, TILE: tl.constexpr):
  if TILE.operand.scale.name == "e4m3":
    scale = scale.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
  return scale


@triton.jit
def _dot_native(lhs, lhs_scale, rhs, rhs_scale, acc, TILING: tl.constexpr):
  """Multiplies with the block-scaled matrix instruction, f32 accumulation.

  Both operands have a block format: any pair of MX formats, or both NVFP4.
  """
  lhs_element: tl.constexpr = TILING.shape.lhs.element.name
  rhs_element: tl.constexpr = TILING.shape.rhs.element.name
  scale_name: tl.constexpr = TILING.shape.lhs.scale.name
  tl.static_assert(scale_name == TILING.shape.rhs.scale.name)
  if TILING.config.swap:
    acc = tl.dot_scaled(
      rhs, rhs_scale, rhs_element, tl.trans(lhs), lhs_scale, lhs_element, acc
    )
  else:
    acc = tl.dot_scaled(
      lhs, lhs_scale, lhs_element, tl.trans(rhs), rhs_scale, rhs_element, acc
    )
  return acc
