# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats of FP8 and integers, whose scales are floats that multiply.

The shape of the scales determines which values share a scale. There is one
for a matrix, for each row, for groups of a row, or for square blocks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from typing import Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import assembly
from jaxplugin.core import extents
from jaxplugin.core import formats

# Sizes of groups and of square blocks, tried in this order.
_SIZES: Final = (128, 64, 32)
_SHORT_SIZE: Final = 128  # the last group of a row may be short
_SCALES: Final = (formats.F32, formats.BF16, formats.F16, formats.E8M0)
# Codes of unsigned 4-bit integers are stored minus this number.
_UNSIGNED: Final = 8
_NAMES: Final = {
  formats.E4M3: "fp8",
  formats.E5M2: "fp8_e5m2",
  formats.INT8: "int8",
  formats.INT4: "int4",
}


def find_format(
  who: str,
  dtype: np.dtype,
  shape: tuple[int, ...],
  scale: Any,
  zero_dtype: np.dtype | None = None,
) -> formats.BlockFormat:
  """Returns the format of values [..., n, k] whose scales multiply.

  Scales in bf16 or f16 become f32 if only the f32 format has a name.

  Args:
    who: the caller.
    dtype: float8_e4m3fn, float8_e5m2, int8 or int4.
    shape: the logical shape of the values.
    scale: one number for the array or for each matrix; [..., n] or [..., n, 1];
      [..., n, k / size]; or [..., n / size, k / size], rounded up.
    zero_dtype: dtype of zero points: uint8 for int4, int8 for int8; or None.

  Raises:
    TypeError: If the shape or the dtype of the scales does not fit.
  """
  block = _block(shape, tuple(scale.shape), dtype == formats.INT4)
  if block is None or scale.dtype not in _SCALES or dtype not in _NAMES:
    raise TypeError(
      f"{who}: scales must be floats, one for a matrix, a row, a group of k or"
      f" a square block of {', '.join(map(str, _SIZES))}, got"
      f" {assembly.brief(scale)} for {dtype}{list(shape)}"
    )
  rows, size = block
  name = f"{rows}x{size}" if size else "row"
  is_unsigned = zero_dtype == formats.PACKED
  if zero_dtype is not None:
    name += "_zero"
  made = formats.BlockFormat(
    name=f"{'u' if is_unsigned else ''}{_NAMES[dtype]}_{name}_{scale.dtype}",
    values_dtype=dtype,
    scale_dtype=scale.dtype,
    block_size=size,
    block_rows=rows,
    offset_dtype=zero_dtype,
    code_offset=_UNSIGNED if is_unsigned else 0,
  )
  found = formats.named(made)
  if not found.is_named and assembly.is_float(scale):
    found = formats.named(dataclasses.replace(made, scale_dtype=formats.F32))
  return found if found.is_named else made


def _block(
  shape: tuple[int, ...], scale_shape: tuple[int, ...], is_packed: bool
) -> tuple[int, int] | None:
  """Returns how many rows and values of k share a scale; 0 for all of k."""
  if len(shape) < 2 or not math.prod(shape):
    return None
  *lead, n, k = shape
  row = (1, 0)
  if scale_shape in ((), (1,), (*lead, n)):
    return row
  if lead and scale_shape in ((*lead,), (*lead, 1, 1)):
    return row
  if len(scale_shape) != len(shape) or [*scale_shape[:-2]] != lead:
    return None
  rows, columns = scale_shape[-2:]
  if rows == n and columns == 1 and not (is_packed and k in _SIZES):
    return row
  if rows == n and columns:
    for size in _SIZES:
      if size * columns == k:
        return 1, size
    if extents.divide_up(k, _SHORT_SIZE) == columns:
      return 1, _SHORT_SIZE
    return None if k % columns else (1, k // columns)
  for size in () if is_packed else _SIZES:
    if (rows, columns) == tuple(extents.divide_up(x, size) for x in (n, k)):
      return size, size
  return row if (rows, columns) == (1, 1) else None


def assemble(
  who: str, dtype: np.dtype, values: Any, scale: Any, zero_points: Any = None
) -> scaled_array.ScaledArray:
  """Returns a `ScaledArray` of values [..., n, k] and scales that multiply.

  Args:
    who: the caller.
    dtype: the dtype of the values, int4 for bytes of two.
    values: the values.
    scale: see `find_format`. A scale for a matrix is repeated for its rows.
    zero_points: uint8 (int4) or int8 (int8) of the shape of scale; or None.
  """
  *lead, n, k = values.shape
  shape = (*lead, n, k * 2) if dtype == formats.INT4 else (*lead, n, k)
  zero_dtype = None if zero_points is None else zero_points.dtype
  format = find_format(who, dtype, shape, scale, zero_dtype)
  wanted = layouts.linear_scale_shape(format, shape, len(shape) - 1)
  if scale.dtype != format.scale_dtype:
    scale = scale.astype(format.scale_dtype)
  offset = None
  if zero_points is not None:
    offset = _spread(zero_points, wanted)
  return assembly.assemble(
    format, values, _spread(scale, wanted), offset=offset
  )


def _spread(scale: Any, wanted: tuple[int, ...]) -> Any:
  """Returns scales in the shape of the result, repeated for a matrix's rows."""
  if math.prod(scale.shape) == math.prod(wanted):
    return scale.reshape(wanted)
  xp: Any = np if isinstance(scale, np.ndarray) else jnp
  lead = wanted[:-2]
  one_each = lead if math.prod(scale.shape) > 1 else (1,) * len(lead)
  return xp.broadcast_to(scale.reshape(*one_each, 1, 1), wanted).copy()
