# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The block-scaled matmul in cuTile, NVIDIA's tile language for Python.

A load names a whole tile by its index. `padding_mode` fills the part of the
tile that lies beyond the array. The compiler chooses layouts, pipelines, tensor
memory and pairs of CTAs.

Only this file imports cuda.tile. `plans` plans launches of the kernel, and
`assembler` compiles it.

Source: cuTile Python's documentation, "Operations"; PTX ISA, tcgen05 scale
factor layout "1X".
"""

from __future__ import annotations

import cuda.tile as ct

ConstInt = ct.Constant[int]
_ZERO = ct.PaddingMode.ZERO


def _tile_of_program(program, m, n, block_m, block_n, group_m):
  """Returns (batch, row, column) of a program's tile."""
  rows, columns = ct.cdiv(m, block_m), ct.cdiv(n, block_n)
  batch, place = program // (rows * columns), program % (rows * columns)
  first = place // (group_m * columns) * group_m
  size = min(rows - first, group_m)
  within = place - first * columns
  return batch, first + within % size, within // size


def _load_values(values, batch, row, step, rows, block_k, is_packed):
  """Loads values [rows, block_k]. FP4 has two a byte, low bits first."""
  if is_packed:
    packed = ct.load(
      values,
      index=(batch, row, step),
      shape=(1, rows, block_k // 2),
      padding_mode=_ZERO,
    )
    flat = ct.unpack_from_bytes(packed.reshape((-1,)), ct.float4_e2m1fn)
    return flat.reshape((rows, block_k))
  tile = ct.load(
    values,
    index=(batch, row, step),
    shape=(1, rows, block_k),
    padding_mode=_ZERO,
  )
  return tile.reshape((rows, block_k))


def _load_scale(scale, batch, row, step, rows, columns, is_e4m3):
  """Loads scales [rows, columns] from tiles of 128 x 4 bytes.

  Bytes beyond the array are 0, which is 2^-127 in E8M0. They multiply values
  that are also 0.
  """
  tiles = ct.load(
    scale,
    index=(batch, row, step, 0, 0),
    shape=(1, rows // 128, columns // 4, 32, 16),
    padding_mode=_ZERO,
  )
  split = tiles.reshape((rows // 128, columns // 4, 32, 4, 4))
  code = split.permute((0, 3, 2, 1, 4)).reshape((rows, columns))
  return ct.bitcast(code, ct.float8_e4m3fn if is_e4m3 else ct.float8_e8m0fnu)


def _activate(x, activation):
  """Applies `configs.ACTIVATIONS[activation]`. NaN stays NaN."""
  if activation == 1:
    return ct.maximum(x, 0.0, propagate_nan=True)
  if activation == 2:  # GELU by tanh, as jax.nn.gelu
    inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + ct.tanh(inner))
  if activation == 3:
    return x / (1.0 + ct.exp(-x))
  return x


@ct.kernel
def block_scaled_matmul(
  out,
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  global_scale,
  bias,
  residual,
  block_m: ConstInt,
  block_n: ConstInt,
  block_k: ConstInt,
  group_m: ConstInt,
  vec_size: ConstInt,
  scales_are_e4m3: ConstInt,
  lhs_is_packed: ConstInt,
  rhs_is_packed: ConstInt,
  num_factors: ConstInt,
  has_bias: ConstInt,
  activation: ConstInt,
  has_residual: ConstInt,
):
  """Stores a tile of activation(lhs @ rhs^T * global_scale + bias) + residual.

  Grid: batch x tiles of rows x tiles of columns, in one dimension, rows in
  groups of `group_m`. The accumulator is f32.

  Args:
    out: f32, bf16 or f16[batch, m, n].
    lhs, rhs: [batch, m or n, k], FP8, or bytes of two FP4 values if packed.
    lhs_scale, rhs_scale: u8[batch, rows / 128, k / vec_size / 4, 32, 16],
      rounded up; bytes of columns beyond k are 0.
    global_scale: f32[num_factors], multiplied one after the other.
    bias: f32[1, 1, n].
    residual: floats[batch, m, n].

  A constant replaces an array that the call does not have.
  """
  batch, row, column = _tile_of_program(
    ct.bid(0), out.shape[1], out.shape[2], block_m, block_n, group_m
  )
  columns = block_k // vec_size
  loaded_k = block_k // 2 if lhs_is_packed else block_k
  acc = ct.zeros((block_m, block_n), ct.float32)
  for step in range(ct.num_tiles(lhs, axis=2, shape=(1, block_m, loaded_k))):
    a = _load_values(lhs, batch, row, step, block_m, block_k, lhs_is_packed)
    b = _load_values(rhs, batch, column, step, block_n, block_k, rhs_is_packed)
    # Both operands of the instruction have one type. FP8 has all FP4 values.
    if lhs_is_packed and not rhs_is_packed:
      a = a.astype(b.dtype)
    if rhs_is_packed and not lhs_is_packed:
      b = b.astype(a.dtype)
    a_scale = _load_scale(
      lhs_scale, batch, row, step, block_m, columns, scales_are_e4m3
    )
    b_scale = _load_scale(
      rhs_scale, batch, column, step, block_n, columns, scales_are_e4m3
    )
    acc = ct.mma_scaled(
      a, a_scale, b.permute((1, 0)), b_scale.permute((1, 0)), acc
    )

  if num_factors > 0:
    acc = acc * ct.load(global_scale, index=(0,), shape=(1,)).reshape((1, 1))
  if num_factors > 1:
    acc = acc * ct.load(global_scale, index=(1,), shape=(1,)).reshape((1, 1))
  if has_bias:
    tile = ct.load(
      bias,
      index=(0, 0, column),
      shape=(1, 1, block_n),
      padding_mode=_ZERO,
    )
    acc = acc + tile.reshape((1, block_n))
  acc = _activate(acc, activation)
  if has_residual:
    tile = ct.load(
      residual,
      index=(batch, row, column),
      shape=(1, block_m, block_n),
      padding_mode=_ZERO,
    )
    acc = acc + tile.reshape((block_m, block_n)).astype(ct.float32)
  ct.store(
    out,
    index=(batch, row, column),
    tile=acc.astype(out.dtype).reshape((1, block_m, block_n)),
  )
