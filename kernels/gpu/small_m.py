# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The matmul kernel for few rows of lhs: bound by reading the weight once.

Decoding must keep pace with memory, so this kernel differs from `upcast` in the
order of k. The weight (rhs) is the left operand of the matrix instruction and
stays in registers. There lane t of 4 holds, of every 16 k, numbers 2t, 2t + 1,
2t + 8 and 2t + 9; in memory order these would be loads of one or two bytes. The
sum over k may be taken in any order as long as both operands agree, so here
lane t gets 32 consecutive k of 128: with FP4 one load of 128 bits. And two
values that share a 32-bit register come from nibbles 16 bits apart, so that
shifts and masks decode two at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import decode
from jaxplugin.kernels.gpu import epilogues
from jaxplugin.kernels.gpu import matmul_plans
from jaxplugin.kernels.gpu import tiles

_GROUP = tl.constexpr(128)  # k that the four lanes of a row share


@triton.jit(repr=matmul_plans.kernel_name_of("small_m"))
def small_m_kernel(
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
  """Dequantizes to bf16 in registers, multiplies with swapped operands.

  rhs has a block format, and k is the minor dimension of both; FP4 of rhs is
  given in words of 8 values, k % 8 == 0, interleaved or not; interleaved ones
  and those that an instruction converts, which makes neighbours a pair, take
  the order of k that FP8 has. Grid, masks and the split of k as those of
  `block_scaled_matmul.upcast_kernel`; the accumulator is f32[block_n, block_m].
  """
  plane, batch, row, column, k = tiles.program_position(TILING)
  matrix = tiles.matrix_of_rhs(batch, layer, TILING)
  acc = sums(
    (lhs, lhs_scale, batch, row), (rhs, rhs_scale, matrix, column), k, TILING
  )
  position = (plane, batch, row, column, k)
  epilogue = (global_scale, second_global_scale, bias, residual)
  epilogues.store_tile(acc, position, epilogue, out, TILING)


@triton.jit
def sums(lhs, rhs, k, TILING: tl.constexpr):
  """The main loop; arguments and result as of those in `sums`."""
  lhs_tile: tl.constexpr = TILING.lhs
  rhs_tile: tl.constexpr = TILING.rhs
  steps = tiles.steps_from(k, TILING)
  block_k: tl.constexpr = TILING.config.block_k
  tl.static_assert(block_k % _GROUP == 0, "a tile has whole groups of k")
  tl.static_assert(TILING.config.swap)
  lhs, lhs_scale, lhs_batch, row = lhs
  rhs, rhs_scale, rhs_batch, column = rhs
  lhs = tiles.batch_of(lhs, lhs_scale, lhs_batch, lhs_tile)
  rhs = tiles.batch_of(rhs, rhs_scale, rhs_batch, rhs_tile)

  acc = tiles.zero_accumulator(TILING)
  x_ahead = tiles.first_scale(lhs, row, k, lhs_tile)
  ahead = tiles.first_scale(rhs, column, k, rhs_tile)
  for step in range(steps):
    k_step = k + step * block_k
    k_next = k + tl.minimum(step + 1, steps - 1) * block_k
    scale, ahead = tiles.step_scales(
      ahead, rhs, column, k_step, k_next, rhs_tile
    )
    weight = tiles.load_values(rhs[0], rhs_batch, column, k_step, rhs_tile)
    if lhs_tile.scale_is_ahead or rhs_tile.scale_is_ahead:
      x = tiles.load_values(lhs[0], lhs_batch, row, k_step, lhs_tile)
      x_scale, x_ahead = tiles.step_scales(
        x_ahead, lhs, row, k_step, k_next, lhs_tile
      )
      weight = _dequantize(weight, scale, rhs_tile)
      x = tiles.to_bf16(x, x_scale, lhs_tile)
    else:
      weight = _dequantize(weight, scale, rhs_tile)
      x = tiles.load_bf16(lhs, lhs_batch, row, k_step, lhs_tile)
    if TILING.shape.rhs.in_words and not TILING.shape.rhs.is_converted:
      x = _order_as_fp4(x)
    else:
      x = _order_as_fp8(x)
    acc = tiles.dot_exact(x, weight, acc, TILING)
  return tiles.repaired(acc, TILING)


@triton.jit
def _dequantize(values, scale, TILE: tl.constexpr):
  """bf16[block_rows, block_k] of the weight, its k in this kernel's order."""
  kind: tl.constexpr = TILE.operand
  decoding: tl.constexpr = TILE.decoding
  if kind.in_words and kind.is_converted:
    return _convert_words(values, scale, kind, decoding)
  elif kind.in_words:
    return _dequantize_words(values, scale, kind, decoding)
  else:
    values = decode.dequantize(values, scale, kind, decoding)
    return _order_as_fp8(values)


@triton.jit
def _dequantize_words(
  words, scale, OPERAND: tl.constexpr, DECODING: tl.constexpr
):
  """bf16[rows, 8 * words] of FP4 (uint32[rows, words]) and scale codes.

  As of `decode.dequantize`. The scale is multiplied where every block is one
  slice of the words.
  """
  rows: tl.constexpr = words.shape[0]
  count: tl.constexpr = words.shape[1]
  words_per_scale: tl.constexpr = OPERAND.values_per_scale // 8
  # [rows, words, b, i_high, i_low]: nibble 4 b + 2 i_high + i_low of a word.
  pair_0 = decode.e2m1_words_to_bf16(words, 0, OPERAND, DECODING)
  pair_1 = decode.e2m1_words_to_bf16(words, 1, OPERAND, DECODING)
  pair_2 = decode.e2m1_words_to_bf16(words, 2, OPERAND, DECODING)
  pair_3 = decode.e2m1_words_to_bf16(words, 3, OPERAND, DECODING)
  values = tl.join(tl.join(pair_0, pair_2), tl.join(pair_1, pair_3))
  values = values.reshape(
    rows, count // words_per_scale, words_per_scale, 2, 2, 2
  )
  factor = decode.factor_of(scale, OPERAND, DECODING)
  values = values * factor[:, :, None, None, None, None]
  values = values.reshape(rows, 8 * count // _GROUP, 4, 4, 2, 2, 2)
  return _gather_lanes(values, rows, 8 * count)


@triton.jit
def _convert_words(words, scale, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """`_dequantize_words` by conversions, of neighbours: in FP8's order of k."""
  values = decode.converted_e2m1_words(words, DECODING)
  rows: tl.constexpr = values.shape[0]
  k: tl.constexpr = values.shape[1]
  block_size: tl.constexpr = OPERAND.values_per_scale
  blocks = values.reshape(rows, k // block_size, block_size)
  blocks = blocks * decode.factor_of(scale, OPERAND, DECODING)[:, :, None]
  return _order_as_fp8(blocks.reshape(rows, k))


@triton.jit
def _gather_lanes(x, ROWS: tl.constexpr, K: tl.constexpr):
  """[ROWS, K] of [ROWS, group, lane, word, b, i, j]: b and lane go last."""
  return x.permute(0, 1, 3, 5, 6, 2, 4).reshape(ROWS, K)


@triton.jit
def _order_as_fp4(x):
  """Reorders the k of x[rows, k] as `_dequantize_words` has it."""
  rows: tl.constexpr = x.shape[0]
  k: tl.constexpr = x.shape[1]
  return _gather_lanes(x.reshape(rows, k // _GROUP, 4, 4, 2, 2, 2), rows, k)


@triton.jit
def _order_as_fp8(x):
  """Reorders the k of x[rows, k]: neighbours stay pairs of one register."""
  rows: tl.constexpr = x.shape[0]
  k: tl.constexpr = x.shape[1]
  x = x.reshape(rows, k // _GROUP, 4, 8, 2, 2)
  return x.permute(0, 1, 3, 4, 2, 5).reshape(rows, k)
