# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The main loop of the matmul kernels, which accumulates a tile over k."""

from __future__ import annotations

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import decode, tiles


@triton.jit
def accumulate(lhs, rhs, k, TILING: tl.constexpr):
  """Accumulates a tile in f32, from k to the end of the split.

  Values and scales beyond the logical sizes are masked. If k runs across the
  blocks of rhs, decoded tiles of rhs are transposed.

  Args:
    lhs, rhs: (values pointer, scale pointer, index of the matrix, first row of
      the tile).
    k: first k of the split.
    TILING: `configs.Tiling`.

  Returns:
    f32 of the shape of `tiles.zero_accumulator`.
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
  scales_steps: tl.constexpr = TILING.scales_steps
  a_ahead = tiles.first_scale(lhs, row, k, lhs_tile)
  b_ahead = tiles.first_scale(rhs, column, k, rhs_tile)
  if TILING.loads_factors_ahead:
    factors_ahead = tiles.load_factors(lhs, rhs, row, column, k, True, TILING)
  for step in range(steps):
    k_step = k + step * block_k
    k_next = k + tl.minimum(step + 1, steps - 1) * block_k
    if TILING.loads_factors_ahead:
      factors = factors_ahead
      factors_ahead = tiles.load_factors(
        lhs, rhs, row, column, k_next, True, TILING
      )
    elif scales_steps:
      factors = tiles.load_factors(lhs, rhs, row, column, k_step, True, TILING)
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
        b = _dequantize_reordered(b, b_scale, rhs_tile)
        a = tiles.to_bf16(a, a_scale, lhs_tile)
      else:
        b = _dequantize_reordered(b, b_scale, rhs_tile)
        a = tiles.load_bf16(lhs, lhs_batch, row, k_step, lhs_tile)
      a = _order_k(a, TILING)
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
    elif path == "fp8" or path == "int8":
      a = tiles.load_values(lhs[0], lhs_batch, row, k_step, lhs_tile)
      b = tiles.load_values(rhs[0], rhs_batch, column, k_step, rhs_tile)
    else:
      a = tiles.load_bf16(lhs, lhs_batch, row, k_step, lhs_tile)
      if TILING.is_across:
        b = tiles.load_bf16(rhs, rhs_batch, k_step, column, rhs_tile)
        b = tl.trans(b)
      else:
        b = tiles.load_bf16(rhs, rhs_batch, column, k_step, rhs_tile)
    if TILING.sums_steps:
      if path == "fp8":
        sums = tiles.dot_fp8(a, b, TILING)
      elif path == "int8":
        sums = tiles.dot_int8(a, b, None, TILING).to(tl.float32)
      else:
        sums = tiles.dot_exact(a, b, tiles.zero_accumulator(TILING), TILING)
      if scales_steps:
        sums = tiles.scaled(sums, factors, True, TILING)
      acc += sums
    elif path == "int8":
      acc = tiles.dot_int8(a, b, acc, TILING)
    elif path != "native":
      acc = tiles.dot_exact(a, b, acc, TILING)
      if TILING.waits and path == "upcast":
        acc = tiles.wait_for(acc)
  acc = acc.to(tl.float32)
  if lhs_tile.scales_total or rhs_tile.scales_total:
    factors = tiles.load_factors(lhs, rhs, row, column, k, False, TILING)
    acc = tiles.scaled(acc, factors, False, TILING)
  return acc if path == "native" else tiles.repaired(acc, TILING)


@triton.jit
def _with_native_type(scale, TILE: tl.constexpr):
  if TILE.operand.scale.name == "e4m3":
    scale = scale.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
  return scale


@triton.jit
def _dot_native(lhs, lhs_scale, rhs, rhs_scale, acc, TILING: tl.constexpr):
  """Multiplies with the block-scaled matrix instruction, accumulating in f32.

  The operands must have two MX formats, or both NVFP4.
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


# The order of k on the path "small_m", which allows wide loads of the weight.
# The weight (rhs) is the left operand of the matrix instruction and stays in
# registers. In each 16 values along k, lane t of 4 holds numbers 2t, 2t + 1,
# 2t + 8 and 2t + 9, which are loads of one or two bytes in memory order. A sum
# over k may have any order if both operands have the same one. Here lane t gets
# 32 consecutive values of 128: with FP4 one load of 128 bits. Two values that
# share a 32-bit register come from nibbles 16 bits apart, so shifts and masks
# decode two at once.
_GROUP = tl.constexpr(128)  # values of k shared by the four lanes of a row


@triton.jit
def _order_k(x, TILING: tl.constexpr):
  """Reorders the k of x[rows, k] as `_dequantize_reordered` reorders weights.

  FP4 that is interleaved, or that an instruction converts in adjacent pairs,
  uses the order of FP8. INT4 in words uses the order of FP4.
  """
  tl.static_assert(x.shape[1] % _GROUP == 0, "a tile has whole groups of k")
  tl.static_assert(TILING.config.swap)
  if TILING.shape.rhs.in_words and not TILING.shape.rhs.is_converted:
    return _order_as_fp4(x)
  else:
    return _order_as_fp8(x)


@triton.jit
def _dequantize_reordered(values, scale, TILE: tl.constexpr):
  """Returns bf16[block_rows, block_k] of the weight, in this path's order.

  The weight has a block format, and k is its minor dimension. FP4 and INT4 come
  in words of 8 values, k % 8 == 0.
  """
  kind: tl.constexpr = TILE.operand
  decoding: tl.constexpr = TILE.decoding
  if kind.in_words and kind.is_converted:
    return _convert_words(values, scale, kind, decoding)
  elif kind.in_words:
    return _dequantize_words(values, scale, kind, decoding)
  else:
    return _order_as_fp8(tiles.to_bf16(values, scale, TILE))


@triton.jit
def _dequantize_words(
  words, scale, OPERAND: tl.constexpr, DECODING: tl.constexpr
):
  """Dequantizes FP4 or INT4 words, uint32[rows, words], to bf16[rows, 8 words].

  The result is that of `decode.dequantize`, with k reordered. The scale is
  applied before the reordering, while a block is a slice of words.
  """
  rows: tl.constexpr = words.shape[0]
  count: tl.constexpr = words.shape[1]
  # values[rows, words, b, i_high, i_low] is nibble 4 b + 2 i_high + i_low.
  pair_0 = decode.words_to_bf16(words, 0, OPERAND, DECODING)
  pair_1 = decode.words_to_bf16(words, 1, OPERAND, DECODING)
  pair_2 = decode.words_to_bf16(words, 2, OPERAND, DECODING)
  pair_3 = decode.words_to_bf16(words, 3, OPERAND, DECODING)
  values = tl.join(tl.join(pair_0, pair_2), tl.join(pair_1, pair_3))
  if not OPERAND.scales_sums:
    words_per_scale: tl.constexpr = OPERAND.values_per_scale // 8
    values = values.reshape(
      rows, count // words_per_scale, words_per_scale, 2, 2, 2
    )
    factor = decode.factor_of(scale, OPERAND, DECODING)
    values = values * factor[:, :, None, None, None, None]
  values = values.reshape(rows, 8 * count // _GROUP, 4, 4, 2, 2, 2)
  return _gather_lanes(values, rows, 8 * count)


@triton.jit
def _convert_words(words, scale, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """Computes `_dequantize_words` by an instruction, in the k order of FP8."""
  values = decode.converted_e2m1_words(words, DECODING)
  if not OPERAND.scales_sums:
    values = decode.scaled(values, scale, OPERAND, DECODING)
  return _order_as_fp8(values)


@triton.jit
def _gather_lanes(x, ROWS: tl.constexpr, K: tl.constexpr):
  """Moves b and lane of [ROWS, group, lane, word, b, i, j] to the end of k."""
  return x.permute(0, 1, 3, 5, 6, 2, 4).reshape(ROWS, K)


@triton.jit
def _order_as_fp4(x):
  """Reorders the k of x[rows, k] like `_dequantize_words`."""
  rows: tl.constexpr = x.shape[0]
  k: tl.constexpr = x.shape[1]
  return _gather_lanes(x.reshape(rows, k // _GROUP, 4, 4, 2, 2, 2), rows, k)


@triton.jit
def _order_as_fp8(x):
  """Reorders the k of x[rows, k]; adjacent values stay in one register."""
  rows: tl.constexpr = x.shape[0]
  k: tl.constexpr = x.shape[1]
  x = x.reshape(rows, k // _GROUP, 4, 8, 2, 2)
  return x.permute(0, 1, 3, 4, 2, 5).reshape(rows, k)
