# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules of a call's shapes and dtypes.

Each function raises TypeError, naming the argument, the rule, what was given,
and the remedy. As in `call`, arrays, tracers, abstract values and
`ShapeDtypeStruct`s all do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.arrays import interleaving
from jaxplugin.arrays import layouts
from jaxplugin.dot import call

WHO: Final = call.WHO


def validate(config: call.DotConfig, operands: call.Operands) -> None:
  """Checks every rule of a call's shapes and dtypes.

  Raises:
    TypeError: naming the argument, the rule, what was given, and the remedy.
  """
  validate_operands(config, operands)
  validate_epilogue(config, operands)


def validate_operands(config: call.DotConfig, operands: call.Operands) -> None:
  """Checks lhs, rhs and their scales; raises TypeError."""
  validate_values("lhs", config.lhs, operands.lhs)
  validate_values("rhs", config.rhs, operands.rhs)
  validate_dimension_numbers(
    WHO,
    config.dimension_numbers,
    call.operand_shape(config.lhs, operands.lhs),
    call.operand_shape(config.rhs, operands.rhs),
  )
  if not config.lhs_contracting:
    raise TypeError(
      f"{WHO}: dimension_numbers must name a contracting dimension, got"
      f" {config.dimension_numbers}"
    )
  for side, operand, values, scale in (
    ("lhs", config.lhs, operands.lhs, operands.lhs_scale),
    ("rhs", config.rhs, operands.rhs, operands.rhs_scale),
  ):
    if operand.format is not None:
      is_lhs = side == "lhs"
      contracting = config.lhs_contracting if is_lhs else config.rhs_contracting
      batch = config.lhs_batch if is_lhs else config.rhs_batch
      _validate_scale(
        side, operand, values, scale, contracting, batch, config.padded_scales
      )


def validate_epilogue(config: call.DotConfig, operands: call.Operands) -> None:
  """Checks the result's dtype and what is applied to it; raises TypeError."""
  if config.preferred_element_type not in call.RESULT_DTYPES:
    raise TypeError(
      f"{WHO}: preferred_element_type must be float32, bfloat16 or float16,"
      f" got {config.preferred_element_type.name}"
    )
  shape = call.result_shape(config, operands)
  for name, factor in (
    ("global_scale", operands.global_scale),
    ("global_power", operands.global_power),
  ):
    if factor is not None:
      if factor.dtype != np.float32:
        raise TypeError(f"{WHO}: {name} must be float32, got {factor.dtype}")
      if factor.ndim:
        _validate_broadcast(name, factor, shape)
  for name, operand in (
    ("bias", operands.bias),
    ("residual", operands.residual),
  ):
    if operand is not None:
      if operand.dtype not in call.PLAIN_DTYPES:
        raise TypeError(
          f"{WHO}: {name} must be float32, bfloat16 or float16, got"
          f" {operand.dtype}"
        )
      _validate_broadcast(name, operand, shape)


def validate_dimension_numbers(
  who: str,
  dimension_numbers: call.DimensionNumbers,
  lhs_shape: Sequence[int],
  rhs_shape: Sequence[int],
) -> None:
  """Raises TypeError unless they fit each other and the logical shapes."""
  contracting, batch = dimension_numbers
  for kind, (lhs_dims, rhs_dims) in (
    ("contracting", contracting),
    ("batch", batch),
  ):
    if len(lhs_dims) != len(rhs_dims):
      raise TypeError(
        f"{who}: dimension_numbers must have as many {kind} dimensions for lhs"
        f" as for rhs, got {lhs_dims} and {rhs_dims}"
      )
  for side, shape, dims in (
    ("lhs", lhs_shape, contracting[0] + batch[0]),
    ("rhs", rhs_shape, contracting[1] + batch[1]),
  ):
    if any(not 0 <= d < len(shape) for d in dims):
      raise TypeError(
        f"{who}: dimension_numbers name dimensions {dims} of {side}, which has"
        f" rank {len(shape)} (shape {tuple(shape)})"
      )
    if len(set(dims)) != len(dims):
      raise TypeError(
        f"{who}: dimension_numbers name a dimension of {side} twice: {dims}"
      )
  for kind, (lhs_dims, rhs_dims) in (
    ("contracting", contracting),
    ("batch", batch),
  ):
    for lhs_dim, rhs_dim in zip(lhs_dims, rhs_dims, strict=True):
      if lhs_shape[lhs_dim] != rhs_shape[rhs_dim]:
        raise TypeError(
          f"{who}: {kind} sizes must agree, got {lhs_shape[lhs_dim]} in"
          f" dimension {lhs_dim} of lhs {tuple(lhs_shape)} and"
          f" {rhs_shape[rhs_dim]} in dimension {rhs_dim} of rhs"
          f" {tuple(rhs_shape)} (logical shapes)"
        )


def validate_values(
  side: str, operand: call.OperandConfig, values: Any
) -> None:
  """Checks the dtype of one operand's values; raises TypeError."""
  format = operand.format
  if format is None:
    if values.dtype not in call.PLAIN_DTYPES:
      raise TypeError(
        f"{WHO}: {side} without a scale must be float32, bfloat16 or float16,"
        f" got {values.dtype}; pass {side}_scale for quantized values"
      )
    return
  if values.dtype == interleaving.WORDS and (
    layouts.may_be_interleaved(format)
  ):
    return
  if values.dtype not in format.storage_dtypes:
    allowed = " or ".join(dtype.name for dtype in format.storage_dtypes)
    raise TypeError(
      f"{WHO}: {side} values of {format} must be {allowed}, got {values.dtype}"
    )


def _validate_scale(
  side: str,
  operand: call.OperandConfig,
  values: Any,
  scale: Any,
  contracting: call.Dims,
  batch: call.Dims,
  padded: bool,
) -> None:
  format, axis = operand.format, operand.axis
  assert format is not None and axis is not None
  name = f"{side}_scale"
  if scale.dtype != format.scale_dtype:
    raise TypeError(
      f"{WHO}: {name} of {format} must be {format.scale_dtype.name}, got"
      f" {scale.dtype}"
    )
  shape = call.operand_shape(operand, values)
  if scale.ndim != len(shape):
    raise TypeError(
      f"{WHO}: {name} must have the rank of {side}, got {name}"
      f" {tuple(scale.shape)} for {side} {shape}"
    )
  if axis not in contracting:
    raise TypeError(
      f"{WHO}: {side} must be blocked along a contracting dimension, got blocks"
      f" along dimension {axis} and contraction over {contracting}; quantize"
      f" {side} with axis={contracting[-1]}"
    )
  block = format.block_size
  expected = call.scale_shape(operand, shape)
  if operand.scale_layout == layouts.SWIZZLED:
    if axis != len(shape) - 1 or len(shape) < 2:
      raise TypeError(
        f"{WHO}: a swizzled {name} needs the contracting dimension last, got"
        f" dimension {axis} of {side} {shape}; use a linear scale"
      )
    expected = layouts.swizzled_shape(expected)
  if padded and operand.scale_layout == layouts.LINEAR:
    _validate_padded_scale(name, side, scale, shape, expected, batch)
    return
  if expected[axis] * block != shape[axis] and (
    operand.scale_layout == layouts.LINEAR
  ):
    raise TypeError(
      f"{WHO}: {side} contracting size must be a multiple of {block} for"
      f" {format.name.upper()}, got k={shape[axis]}; pad lhs and rhs"
    )
  if tuple(scale.shape) != expected:
    raise TypeError(
      f"{WHO}: {name} of {format} for {side} {shape} must have shape"
      f" {expected} (one scale per {block} values of dimension {axis}), got"
      f" {tuple(scale.shape)}; for a padded scale pass block_size={block}"
    )


def _validate_padded_scale(
  name: str,
  side: str,
  scale: Any,
  shape: Sequence[int],
  expected: Sequence[int],
  batch: call.Dims,
) -> None:
  if any(
    have != need if d in batch else have < need
    for d, (have, need) in enumerate(zip(scale.shape, expected, strict=True))
  ):
    raise TypeError(
      f"{WHO}: padded {name} for {side} {tuple(shape)} must have shape"
      f" {tuple(expected)}, or more in dimensions that are not batch, got"
      f" {tuple(scale.shape)}"
    )


def _validate_broadcast(name: str, operand: Any, shape: Sequence[int]) -> None:
  if len(operand.shape) != len(shape) or any(
    have != 1 and have != want
    for have, want in zip(operand.shape, shape, strict=True)
  ):
    raise TypeError(
      f"{WHO}: {name} of shape {tuple(operand.shape)} does not broadcast to the"
      f" result's shape {tuple(shape)}"
    )
