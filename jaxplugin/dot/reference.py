# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The meaning of a block-scaled dot, twice.

`oracle` states it in NumPy and f64, for tests and notebooks. `unfused` states
it in plain JAX operations, for every backend: it is what the xla implementation
emits, and what runs where no kernel serves.
"""

from __future__ import annotations

import functools
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.dot import call
from jaxplugin.dot import global_scales
from jaxplugin.dot import problems
from jaxplugin.quantization import operations

# In units of sum(|a * b|), before the final cast: 16 roundings of f32.
ERROR_BOUND: Final = 16 * 2.0**-24


def rounding_error(dtype: np.typing.DTypeLike) -> float:
  """Largest relative error of one rounding to normal numbers of `dtype`.

  With p significant bits neighbours are at most 2^(1 - p) of their value apart
  (`eps`), and a number is at most half of that from the nearest: 2^-p.
  """
  return float(jnp.finfo(dtype).eps) / 2


def oracle_dequantize(
  values: np.ndarray,
  scale: np.ndarray,
  format: formats.BlockFormat,
  *,
  axis: int = -1,
) -> np.ndarray:
  """f64 `values * repeat(scale, block_size, axis)`, exactly.

  Args:
    values: format.values_dtype[..., k, ...], or uint8 packed along `axis`.
    scale: format.scale_dtype, linear, at least ceil(k / block_size) in `axis`.
    format: the block format.
    axis: the blocked axis.
  """
  values, scale = np.asarray(values), np.asarray(scale)
  axis %= values.ndim
  if format.is_fp6:
    values = (values & 0x3F).view(format.values_dtype)
  elif values.dtype == formats.PACKED:
    values = np.moveaxis(values, axis, -1)
    nibbles = np.stack([values & 15, values >> 4], axis=-1)
    nibbles = nibbles.reshape(*values.shape[:-1], 2 * values.shape[-1])
    values = np.moveaxis(nibbles, -1, axis).view(formats.E2M1)
  blocks = extents.divide_up(values.shape[axis], format.block_size)
  scale = np.take(scale, np.arange(blocks), axis=axis).astype(np.float64)
  scale = np.repeat(scale, format.block_size, axis=axis)
  scale = np.take(scale, np.arange(values.shape[axis]), axis=axis)
  with np.errstate(invalid="ignore"):
    return values.astype(np.float64) * scale


def oracle_dot(
  lhs: np.ndarray,
  rhs: np.ndarray,
  dimension_numbers: call.DimensionNumbers,
) -> tuple[np.ndarray, np.ndarray]:
  """f64 dot of dequantized operands, and the same of their magnitudes.

  Returns:
    (dot, magnitude): f64 with batch dimensions first, then those of lhs, then
    those of rhs. `magnitude` is sum(|a * b|), the unit of `ERROR_BOUND`.
  """
  (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers

  def to_3d(
    x: np.ndarray, contracting: call.Dims, batch: call.Dims
  ) -> tuple[np.ndarray, list[int], list[int]]:
    free = call.free_dims(x.ndim, contracting, batch)
    kinds = [[x.shape[d] for d in dims] for dims in (batch, free, contracting)]
    flat = [int(np.prod(kind, dtype=np.int64)) for kind in kinds]
    x = x.transpose(*batch, *free, *contracting).reshape(flat)
    return x, kinds[0], kinds[1]

  lhs, batch, rows = to_3d(lhs, lhs_contracting, lhs_batch)
  rhs, _, columns = to_3d(rhs, rhs_contracting, rhs_batch)
  rhs = rhs.transpose(0, 2, 1)
  with np.errstate(invalid="ignore"):
    results = (lhs @ rhs, np.abs(lhs) @ np.abs(rhs))
  shape = (*batch, *rows, *columns)
  return results[0].reshape(shape), results[1].reshape(shape)


def exact_in_bf16(operand: call.OperandConfig, dtype: np.dtype) -> bool:
  """Whether bf16 holds every value of the (dequantized) operand."""
  if operand.format is None:
    return dtype == formats.BF16
  return operand.format.exact_in_bf16


def plain_dot(
  lhs: jax.Array,
  rhs: jax.Array,
  dimension_numbers: call.DimensionNumbers,
  dtype: Any,
  precision: Any = None,
) -> jax.Array:
  """`dot_general` of unscaled operands, accumulated in f32 and cast once.

  Args:
    lhs, rhs: any dtypes that f32 holds.
    dimension_numbers: as `lax.dot_general`'s.
    dtype: the result's.
    precision: as `lax.dot_general`'s; None is HIGHEST: no TF32 on a GPU, no
      bf16 on a TPU.
  """

  def multiply(
    operand_dtype: Any, precision: Any, lhs: jax.Array, rhs: jax.Array
  ) -> jax.Array:
    return lax.dot_general(
      lhs.astype(operand_dtype),
      rhs.astype(operand_dtype),
      dimension_numbers,
      precision=precision,
      preferred_element_type=jnp.float32,
    )

  if precision is None:
    precision = lax.Precision.HIGHEST
  in_f32 = functools.partial(multiply, jnp.float32, precision)
  if lhs.dtype == rhs.dtype == formats.BF16:
    # The same products; but XLA:CPU refuses some layouts of bf16 at run time.
    in_bf16 = functools.partial(multiply, jnp.bfloat16, None)
    result = lax.platform_dependent(lhs, rhs, cpu=in_f32, default=in_bf16)
  else:
    result = in_f32(lhs, rhs)
  return result.astype(dtype)


def unfused(
  operands: call.Operands, config: call.DotConfig, operand_dtype: Any
) -> jax.Array:
  """Dequantizes both operands, multiplies, and applies the epilogue.

  Args:
    operands: the call's arrays.
    config: its description.
    operand_dtype: what the dot multiplies: bf16 where `exact_in_bf16` holds
      for both operands, else f32. Accumulation is in f32 always.
  """
  lhs = _dequantized(config.lhs, operands.lhs, operands.lhs_scale)
  rhs = _dequantized(config.rhs, operands.rhs, operands.rhs_scale)
  # Without HIGHEST a GPU multiplies f32 in TF32 and a TPU in bf16.
  precision = lax.Precision.HIGHEST
  if operand_dtype == formats.BF16:
    precision = lax.Precision.DEFAULT
  result = lax.dot_general(
    lhs.astype(operand_dtype),
    rhs.astype(operand_dtype),
    config.dimension_numbers,
    precision=precision,
    preferred_element_type=jnp.float32,
  )
  return apply_epilogue(result, operands, config)


def _dequantized(
  operand: call.OperandConfig, values: jax.Array, scale: jax.Array | None
) -> jax.Array:
  if operand.format is None:
    return values
  assert operand.axis is not None and scale is not None
  scale = exact_scale(operand, values, scale)
  return operations.dequantize_raw(
    values, scale, operand.format, axis=operand.axis
  )


def exact_scale(
  operand: call.OperandConfig, values: jax.Array, scale: jax.Array
) -> jax.Array:
  """The linear scale without padding, whatever layout it came in."""
  shape = call.scale_shape(operand, call.operand_shape(operand, values))
  if operand.scale_layout == layouts.SWIZZLED:
    return layouts.unswizzle_scale(scale, shape[-2:])
  if tuple(scale.shape) == shape:
    return scale
  return lax.slice(scale, (0,) * scale.ndim, shape)


def apply_epilogue(
  result: jax.Array, operands: call.Operands, config: call.DotConfig
) -> jax.Array:
  """activation(result * global_scale + bias) + residual in f32, then cast."""
  if operands.global_scale is not None:
    result = global_scales.multiply(
      result, operands.global_scale, operands.global_power
    )
  if operands.bias is not None:
    result = result + operands.bias.astype(jnp.float32)
  result = activate(result, config.activation)
  if operands.residual is not None:
    result = result + operands.residual.astype(jnp.float32)
  return result.astype(config.preferred_element_type)


def activate(x: jax.Array, activation: problems.Activation | None) -> jax.Array:
  """An activation by its name; None is the identity."""
  if activation is None:
    return x
  functions = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,  # the tanh approximation, its default
    "silu": jax.nn.silu,
  }
  return functions[activation](x)
