# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The order of k for few rows of lhs, when reading the weight takes the time.

Decoding must keep pace with memory, so the path "small_m" differs from "upcast"
in the order of k. The weight (rhs) is the left operand of the matrix
instruction and stays in registers. Lane t of 4 holds, of every 16 k, numbers
2t, 2t + 1, 2t + 8 and 2t + 9. In memory order these would be loads of one or
two bytes. A sum over k may have any order if both operands have the same order.
Here lane t gets 32 consecutive k of 128: with FP4 one load of 128 bits. Two
values that share a 32-bit register come from nibbles 16 bits apart, so shifts
and masks decode two at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxplugin.kernels.gpu import decode

_GROUP = tl.constexpr(128)  # k that the four lanes of a row share


@triton.jit
def order_k(x, TILING: tl.constexpr):
  """Reorders the k of x[rows, k] as `dequantize` orders the weight's k.

  FP4 that is interleaved, or that an instruction converts in pairs of
  neighbours, uses the order of FP8.
  """
  tl.static_assert(x.shape[1] % _GROUP == 0, "a tile has whole groups of k")
  tl.static_assert(TILING.config.swap)
  if TILING.shape.rhs.in_words and not TILING.shape.rhs.is_converted:
    return _order_as_fp4(x)
  else:
    return _order_as_fp8(x)


@triton.jit
def dequantize(values, scale, TILE: tl.constexpr):
  """Returns bf16[block_rows, block_k] of the weight, in this path's order.

  The weight has a block format, and k is its minor dimension. FP4 comes in
  words of 8 values, k % 8 == 0.
  """
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
