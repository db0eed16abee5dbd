# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""From any dimension numbers to [batch, rows, k], which kernels take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxplugin.arrays import interleaving
from jaxplugin.arrays import layouts
from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.core import striding
from jaxplugin.dot import call
from jaxplugin.dot import problems
from jaxplugin.dot import reference
from jaxplugin.quantization import operations


def with_bytes(
  operands: call.Operands, config: call.DotConfig
) -> tuple[call.Operands, call.DotConfig]:
  """The same call with FP4 values that come as words given as their bytes."""
  for side in ("lhs", "rhs"):
    values, operand = getattr(operands, side), getattr(config, side)
    if operand.format is not None and values.dtype == interleaving.WORDS:
      values = interleaving.to_bytes(values)
      operands = operands._replace(**{side: values})
      operand = dataclasses.replace(operand, is_interleaved=True)
      config = config.replace(**{side: operand})
  return operands, config


def in_usual_order(
  operands: call.Operands, config: call.DotConfig
) -> tuple[call.Operands, call.DotConfig]:
  """The same call with FP4 values that were interleaved put back in order."""
  operands, config = with_bytes(operands, config)
  for side in ("lhs", "rhs"):
    values, operand = getattr(operands, side), getattr(config, side)
    if operand.is_interleaved:
      words = interleaving.from_bytes(values)
      values = interleaving.deinterleave(words)
      operands = operands._replace(**{side: values})
      operand = dataclasses.replace(operand, is_interleaved=False)
      config = config.replace(**{side: operand})
  return operands, config


def blocked_position(
  operand: call.OperandConfig, contracting: call.Dims
) -> int | None:
  """Which contracting dimension is blocked; None for a plain operand."""
  if operand.format is None:
    return None
  assert operand.axis is not None
  return contracting.index(operand.axis)


def last(contracting: call.Dims, position: int) -> call.Dims:
  """The contracting dimensions in order, but that of `position` last."""
  others = contracting[:position] + contracting[position + 1 :]
  return (*others, contracting[position])


def merge(
  x: jax.Array, *, batch: call.Dims, contracting: call.Dims
) -> jax.Array:
  """Transposes and reshapes to [batch, rows, contracting].

  Args:
    x: values, packed or not, or a linear scale of the same rank.
    batch: its batch dimensions.
    contracting: its contracting dimensions, the blocked one last.
  """
  free = call.free_dims(x.ndim, contracting, batch)
  sizes = [math.prod(x.shape[d] for d in dims) for dims in (batch, free)]
  x = jnp.transpose(x, (*batch, *free, *contracting))
  return x.reshape(*sizes, math.prod(x.shape[len(batch) + len(free) :]))


def stays_swizzled(
  operand: call.OperandConfig,
  values: jax.Array,
  contracting: call.Dims,
  batch: call.Dims,
) -> bool:
  """Whether the scale is swizzled, and stays so when dimensions merge.

  Its rows are those of the last but one dimension, in tiles of 128. Other rows
  come before them without a gap where 128 divides their number.
  """
  if operand.scale_layout != layouts.SWIZZLED:
    return False
  ndim = values.ndim
  free = call.free_dims(ndim, contracting, batch)
  in_order = (*batch, *free, *contracting) == tuple(range(ndim))
  if not (in_order and free and len(contracting) == 1):
    return False
  rows = values.shape[ndim - 2]
  return len(free) == 1 or rows % layouts.SCALE_TILE_ROWS == 0


def with_epilogue(
  dot: Callable[..., jax.Array],
  operands: call.Operands,
  config: call.DotConfig,
  problem: problems.DotProblem,
) -> jax.Array:
  """A dot of kernels that fuse one global scale, and a bias over n.

  Args:
    dot: (operands, config, problem) -> the result. Where the global scale or
      the bias varies otherwise, it is asked for the bare dot in f32, and the
      epilogue follows.
    operands, config, problem: the call.
  """
  if _fuses_epilogue(operands, config, problem):
    return dot(operands, config, problem)
  bare, without = call.bare_config(config), call.bare_operands(operands)
  result = dot(without, bare, call.problem_of(bare, without))
  return reference.apply_epilogue(result, operands, config)


def _fuses_epilogue(
  operands: call.Operands,
  config: call.DotConfig,
  problem: problems.DotProblem,
) -> bool:
  bias = operands.bias
  num_n = len(call.rhs_free(config, operands.rhs.ndim))
  is_over_n = bias is None or all(
    size == 1 for size in bias.shape[: bias.ndim - num_n]
  )
  return is_over_n and problem.global_scale != "array"


def bias_row(bias: jax.Array, shape: tuple[int, ...], num_n: int) -> jax.Array:
  """f32[n] of a bias over the last `num_n` dimensions of `shape` alone."""
  columns = shape[len(shape) - num_n :]
  ones = (1,) * (len(shape) - num_n)
  bias = jnp.broadcast_to(bias.astype(jnp.float32), ones + columns)
  return bias.reshape(math.prod(columns))


class Dense(NamedTuple):
  """An operand, row-major. scale is None where format is: a plain operand.

  values: [batch, rows, k], of packed FP4 [batch, rows, k / 2].
  scale: linear [batch, rows, ceil(k / block)].
  """

  values: jax.Array
  scale: jax.Array | None
  format: formats.BlockFormat | None


def dense_operands(
  operands: call.Operands, config: call.DotConfig
) -> tuple[Dense, Dense]:
  """Both operands row-major, [batch, rows, k], with the blocks contiguous.

  The blocked contracting dimension goes last, in both alike; k is padded with
  zeros to a whole block where another dimension would follow it otherwise, and
  to an even size for FP4. Where the two sides are blocked along different
  dimensions, lhs is dequantized: it then is a plain f32 operand, whose
  subnormals XLA:CPU flushes. Scales are linear and exact.
  """
  lhs, rhs = config.lhs, config.rhs
  lhs_values, rhs_values = operands.lhs, operands.rhs
  lhs_scale = _exact_scale(lhs, lhs_values, operands.lhs_scale)
  rhs_scale = _exact_scale(rhs, rhs_values, operands.rhs_scale)
  lhs_blocked = blocked_position(lhs, config.lhs_contracting)
  rhs_blocked = blocked_position(rhs, config.rhs_contracting)
  if None not in (lhs_blocked, rhs_blocked) and lhs_blocked != rhs_blocked:
    assert lhs.format is not None and lhs.axis is not None
    assert lhs_scale is not None
    lhs_values = operations.dequantize_raw(
      lhs_values, lhs_scale, lhs.format, axis=lhs.axis
    )
    lhs, lhs_scale, lhs_blocked = call.OperandConfig(), None, None
  blocked = rhs_blocked if lhs_blocked is None else lhs_blocked
  assert blocked is not None

  size = call.operand_shape(lhs, lhs_values)[config.lhs_contracting[blocked]]
  padded = striding.padded_size(
    size,
    (lhs.format, rhs.format),
    num_contracting=len(config.lhs_contracting),
  )
  sides = []
  for operand, values, scale, contracting, batch in (
    (lhs, lhs_values, lhs_scale, config.lhs_contracting, config.lhs_batch),
    (rhs, rhs_values, rhs_scale, config.rhs_contracting, config.rhs_batch),
  ):
    axis = contracting[blocked]
    values, scale = _pad(operand, values, scale, axis, size, padded)
    order = last(contracting, blocked)
    values = merge(values, batch=batch, contracting=order)
    if scale is not None:
      scale = merge(scale, batch=batch, contracting=order)
    sides.append(Dense(values, scale, operand.format))
  return sides[0], sides[1]


def _exact_scale(
  operand: call.OperandConfig, values: jax.Array, scale: jax.Array | None
) -> jax.Array | None:
  if scale is None:
    return None
  return reference.exact_scale(operand, values, scale)


def _pad(
  operand: call.OperandConfig,
  values: jax.Array,
  scale: jax.Array | None,
  axis: int,
  size: int,
  padded: int,
) -> tuple[jax.Array, jax.Array | None]:
  """Pads values with zeros, and scales with zeros or 2^-127, along `axis`."""
  if padded == size:
    return values, scale
  per_byte = 1
  is_fp4 = operand.format is not None and operand.format.is_fp4
  if is_fp4 and values.dtype == formats.PACKED:
    per_byte = 2
  values = extents.pad_axis(values, axis, padded // per_byte)
  if scale is not None:
    assert operand.format is not None
    scale = extents.pad_axis(
      scale, axis, extents.divide_up(padded, operand.format.block_size)
    )
  return values, scale
