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
from jaxplugin.kernels.gpu import configs
from jaxplugin.kernels.gpu import decode
from jaxplugin.kernels.gpu import tiles

_GROUP = tl.constexpr(128)  # k that the four lanes of a row share


@triton.jit(repr=configs.kernel_name_of("small_m"))
def small_m_kernel(
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
):
  """Dequantizes to bf16 in registers, multiplies with swapped operands.

  rhs has a block format, and k is the minor dimension of both; FP4 values of
  rhs are given as uint32, 8 of them each, K % 8 == 0, and RHS_STRIDES still
  count bytes, but those of interleaved ones words; these take the order of k
  that FP8 has. Grid, masks and SPLIT_K as `block_scaled_matmul.upcast_kernel`;
  the accumulator is f32[BLOCK_N, BLOCK_M].
  """
  tl.static_assert(BLOCK_K % _GROUP == 0, "a tile has whole groups of k")
  tl.static_assert((SPLIT_K > 1) == (EPILOGUE is None))
  tiles_m: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
  tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
  steps: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
  even_k: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
  is_fp4: tl.constexpr = RHS_FORMAT == "mxfp4" or RHS_FORMAT == "nvfp4"
  plane, tile_m, tile_n = tiles.program_tile(tiles_m, tiles_n, GROUP_M)
  index = plane % BATCH
  batch = index.to(tl.int64)
  k = plane // BATCH * steps * BLOCK_K
  row = tile_m * BLOCK_M
  column = tile_n * BLOCK_N

  lhs += batch * LHS_STRIDES[0]
  if is_fp4:
    rhs += batch * (RHS_STRIDES[0] // 4)
  else:
    rhs += batch * RHS_STRIDES[0]
  rhs_scale += batch * RHS_SCALE_STRIDES[0]
  if LHS_SCALE_STRIDES is not None:
    lhs_scale += batch * LHS_SCALE_STRIDES[0]

  acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
  for step in range(steps):
    k_step = k + step * BLOCK_K
    weight = _load_weight(
      rhs,
      rhs_scale,
      index,
      column,
      k_step,
      RHS_FORMAT,
      RHS_STRIDES,
      RHS_SCALE_STRIDES,
      N,
      K,
      BLOCK_N,
      BLOCK_K,
      even_k,
    )
    x = tiles.load_bf16(
      lhs,
      lhs_scale,
      index,
      row,
      k_step,
      LHS_FORMAT,
      LHS_STRIDES,
      LHS_SCALE_STRIDES,
      M,
      K,
      BLOCK_M,
      BLOCK_K,
      even_k,
    )
    if is_fp4:
      x = _order_as_fp4(x)
    else:
      x = _order_as_fp8(x)
    acc = tiles.dot_exact(x, weight, acc, LHS_FORMAT, RHS_FORMAT, True)

  tiles.store_tile(
    tl.trans(acc),
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


@triton.jit
def _load_weight(
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
  """bf16[BLOCK_ROWS, BLOCK_K], dequantized, its k in this kernel's order."""
  is_nvfp4: tl.constexpr = decode.block_format(FORMAT) == "nvfp4"
  vec_size: tl.constexpr = 16 if is_nvfp4 else 32
  scale = tiles.load_scale(
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
  if FORMAT == "mxfp4" or FORMAT == "nvfp4":
    words = tiles.load_tile(
      base,
      row,
      k // 8,
      STRIDES[1] // 4,
      1,
      ROWS,
      K // 8,
      BLOCK_ROWS,
      BLOCK_K // 8,
      EVEN_K,
    )
    return _dequantize_words(words, scale, FORMAT, vec_size)
  else:
    values = tiles.load_values(
      base, batch, row, k, FORMAT, STRIDES, ROWS, K, BLOCK_ROWS, BLOCK_K, EVEN_K
    )
    return _order_as_fp8(decode.dequantize(values, scale, FORMAT, vec_size))


@triton.jit
def _dequantize_words(
  words, scale, FORMAT: tl.constexpr, VEC_SIZE: tl.constexpr
):
  """bf16[rows, 8 * words] of FP4 (uint32[rows, words]) and scale codes.

  The scale is multiplied where every block is one slice of the words.
  """
  rows: tl.constexpr = words.shape[0]
  count: tl.constexpr = words.shape[1]
  words_per_scale: tl.constexpr = VEC_SIZE // 8
  # [rows, words, b, i_high, i_low]: nibble 4 b + 2 i_high + i_low of a word.
  pair_0 = decode.e2m1_words_to_bf16(words, 0)
  pair_1 = decode.e2m1_words_to_bf16(words, 1)
  pair_2 = decode.e2m1_words_to_bf16(words, 2)
  pair_3 = decode.e2m1_words_to_bf16(words, 3)
  values = tl.join(tl.join(pair_0, pair_2), tl.join(pair_1, pair_3))
  values = values.reshape(
    rows, count // words_per_scale, words_per_scale, 2, 2, 2
  )
  factor = decode.scale_to_bf16(scale, FORMAT)
  values = values * factor[:, :, None, None, None, None]
  values = values.reshape(rows, 8 * count // _GROUP, 4, 4, 2, 2, 2)
  return _gather_lanes(values, rows, 8 * count)


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
