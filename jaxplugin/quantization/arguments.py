# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of `quantize` and similar functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts, scaled_array, validation
from jaxplugin.core import error_context, formats
from jaxplugin.quantization import integers

ScaleRounding = Literal["up", "floor"]
SCALE_ROUNDINGS: Final = get_args(ScaleRounding)

# Bytes that a B200 reads in 1 us (data sheet: 8 TB/s).
_SMALL_BYTES: Final = 1 << 23

_FLOATS: Final = ("float32", "bfloat16", "float16", "float64")


def float_array(who: str, x: Any) -> jax.Array:
  if isinstance(x, scaled_array.ScaledArray):
    raise TypeError(
      f"{who}: x must be an array of floats, got the quantized"
      f" {error_context.shown(x)}; use it without quantizing it again, or pass"
      " x.dequantize()"
    )
  x = scaled_array.as_array(who, "x", x)
  if x.dtype.name not in _FLOATS:
    raise TypeError(
      f"{who}: x must be float32, bfloat16, float16 or float64, got"
      f" {x.dtype}[{','.join(map(str, x.shape))}]; cast it first"
    )
  if x.ndim == 0:
    raise TypeError(
      f"{who}: x must have rank 1 or more, got a scalar; pass x.reshape(1)"
    )
  return x


def validate_key(
  who: str,
  key: Any,
  format: formats.BlockFormat | None = None,
  *,
  is_stack: bool = False,
) -> None:
  """Checks the key of stochastic rounding.

  Args:
    is_stack: whether the key may have leading dimensions, which a caller maps.

  Raises:
    TypeError: If `key` is neither None, a typed key nor a raw uint32 key.
    ValueError: If `format` has a codebook, whose rounding has no key.
  """
  dtype = getattr(key, "dtype", None)
  is_key = dtype is not None and (
    is_stack or key.ndim == 0
    if jnp.issubdtype(dtype, jax.dtypes.prng_key)
    else dtype == np.uint32 and (is_stack or key.ndim == 1)
  )
  if key is not None and not is_key:
    raise TypeError(
      f"{who}: key must be one jax.random key, got {error_context.shown(key)}."
      " Pass jax.random.key(seed), or map the function over keys by jax.vmap"
    )
  if key is not None and format is not None and format.codebook:
    raise ValueError(
      f"{who}: key must be None for {format}, whose values are the nearest"
      " entries of a codebook, got a key. Leave key out"
    )


def two_axes(who: str, axes: Any, ndim: int) -> tuple[int, int]:
  if ndim < 2:
    raise TypeError(
      f"{who}: x must have rank 2 or more, got rank 1. Call quantize"
    )
  given = axes if isinstance(axes, (tuple, list)) else ()
  canonical = [layouts.canonical_axis(who, axis, ndim) for axis in given]
  if len(canonical) != 2 or canonical[0] == canonical[1]:
    raise ValueError(
      f"{who}: axes must be two different axes, got"
      f" {error_context.shown(axes)} for rank"
      f" {ndim}; along one axis use quantize"
    )
  return canonical[0], canonical[1]


def validate_scale_rounding(
  who: str, scale_rounding: Any, used: Sequence[formats.BlockFormat] = ()
) -> None:
  """Raises ValueError unless `scale_rounding` is valid for one of the formats.

  Args:
    used: formats that the caller quantizes to; empty if unknown.
  """
  if not error_context.is_one_of(scale_rounding, SCALE_ROUNDINGS):
    raise ValueError(
      f"{who}: scale_rounding must be one of {SCALE_ROUNDINGS},"
      f" got {error_context.shown(scale_rounding)}"
    )
  is_ignored = used and not any(f.scale_is_power_of_two for f in used)
  if scale_rounding != "up" and is_ignored:
    raise ValueError(
      f'{who}: scale_rounding must be "up" unless a format has E8M0 scales, as'
      f" MX formats have, got {error_context.shown(scale_rounding)} for"
      f" {' and '.join(f.name for f in used)}, whose scales round to nearest;"
      " leave scale_rounding out"
    )


def package_rule(
  who: str, scale_rounding: Any, format: formats.BlockFormat
) -> str | None:
  """Returns `scale_rounding` if it is the rule of a package, or None.

  Raises:
    ValueError: If it is not a rule of `quantize`, or not one for the format.
  """
  rules = (*SCALE_ROUNDINGS, *integers.PACKAGE_RULES)
  if not error_context.is_one_of(scale_rounding, rules):
    raise ValueError(
      f"{who}: scale_rounding must be one of {rules}, got"
      f" {error_context.shown(scale_rounding)}"
    )
  if scale_rounding in SCALE_ROUNDINGS:
    return None
  if (
    not format.is_integer
    or format.fraction_bits
    or format.scale_is_power_of_two
    or not format.scales_codes
    or format.is_square
  ):
    raise ValueError(
      f'{who}: scale_rounding must be "up" or "floor" unless the format has'
      " integers with floating-point scales, in blocks of one row, without an"
      f" offset or a codebook, got {error_context.shown(scale_rounding)} for"
      f" {format}. Leave scale_rounding out"
    )
  return scale_rounding


def validate(
  who: str,
  x: jax.Array,
  format: formats.BlockFormat,
  axes: Sequence[int],
  scale_rounding: str,
) -> None:
  if isinstance(format, formats.UnquantizedFormat):
    raise TypeError(
      f"{who}: format must be one that jaxplugin can quantize to, got {format};"
      " pass a BlockFormat such as jp.MXFP8"
    )
  validate_scale_rounding(who, scale_rounding, (format,))
  if format.is_square and x.ndim < 2:
    raise TypeError(
      f"{who}: the rank must be 2 or more for {format}, whose blocks have"
      f" {format.block_rows} rows, got shape {x.shape}. Choose another format"
    )
  for axis in axes:
    if format.is_square and axis < x.ndim - 2:
      raise ValueError(
        f"{who}: axis must be one of the last two for {format}, which divides"
        f" both into blocks, got axis {axis} of rank {x.ndim}. Pass one of"
        " these axes"
      )
    if not format.fits(x.shape[axis]):
      raise TypeError(
        f"{who}: the size of axis {axis} must be a multiple of"
        f" {format.block_size} for {format.name.upper()}, got"
        f" {x.shape[axis]} in shape {x.shape}. Pad"
        f"{' x (pad=True does)' if who == 'quantize' else ' it'}, or quantize"
        " along another axis"
      )


def validate_packed(who: str, packed: Any) -> None:
  if not error_context.is_one_of(packed, (None, True, False)):
    raise ValueError(
      f"{who}: packed must be True, False or None, got"
      f" {error_context.shown(packed)}"
    )


def whether_packed(
  who: str, packed: bool | None, format: formats.BlockFormat, size: int
) -> bool:
  """Returns whether to pack two 4-bit values a byte; the default is True."""
  validate_packed(who, packed)
  can_be = can_be_packed(format.along(size))
  if format.may_be_short:
    # The shapes of one byte and one scale do not show the blocked axis.
    can_be = can_be and size % 2 == 0 and size != 2
  if packed and not can_be:
    raise ValueError(
      f"{who}: packed must be False or None unless the format has 4-bit values"
      " in blocks of 4, 6, ... values, got"
      f" {format} ({format.values_dtype.name} in blocks of"
      f" {format.block_size}) for size {size}; leave packed out"
    )
  return can_be and packed is not False


def can_be_packed(format: formats.BlockFormat) -> bool:
  # Even blocks keep a byte's two values in one block. Blocks of more than 2
  # values make values and scale differ in shape, which shows the blocked axis.
  size = format.block_size
  return format.has_pairs and size > 2 and size % 2 == 0


def validate_batch_dims(
  who: str, batch_dims: int, ndim: int, axis: int
) -> None:
  if not error_context.is_integer(batch_dims) or not 0 <= batch_dims < ndim:
    raise ValueError(
      f"{who}: batch_dims must be a number of leading dimensions, less than"
      f" x's rank {ndim}, got {error_context.shown(batch_dims)}; pass 1 for a"
      " stack of layers"
    )
  if axis < batch_dims:
    raise ValueError(
      f"{who}: axis must not be among the leading batch_dims, got axis"
      f" {axis} and batch_dims {batch_dims}; pass a later axis, or leave"
      " batch_dims out"
    )


def validate_global_scale(
  who: str, global_scale: Any, format: formats.BlockFormat
) -> None:
  """Checks a `global_scale` argument, except for its shape."""
  if global_scale is None:
    return
  if not format.has_global_scale:
    raise ValueError(
      f"{who}: global_scale must be None for {format}, which has none, got"
      f" {error_context.shown(global_scale)}; leave global_scale out"
    )
  dtype = scaled_array.as_array(who, "global_scale", global_scale).dtype
  is_number = jnp.issubdtype(dtype, np.signedinteger)
  if not is_number and not jnp.issubdtype(dtype, np.floating):
    raise ValueError(
      f"{who}: global_scale must be a float32, got"
      f" {error_context.shown(global_scale)}; leave it out to have it computed"
    )
  wrong = validation.first_not_positive(global_scale)
  if wrong is not None:
    raise ValueError(
      f"{who}: global_scale must be positive and finite, got {wrong}."
      " Divide the largest magnitude by the largest value of the format"
      " times that of its scales, or pass 1 for zeros"
    )


def given_global_scale(
  who: str,
  global_scale: jax.Array | float | None,
  format: formats.BlockFormat,
  batch: Sequence[int] = (),
) -> jax.Array | None:
  """Returns a `global_scale` argument as f32[] or f32[batch]."""
  if global_scale is None:
    return None
  validate_global_scale(who, global_scale, format)
  global_scale = scaled_array.as_array(who, "global_scale", global_scale)
  shape = tuple(global_scale.shape)
  is_one = global_scale.size == 1
  follows = shape[: len(batch)] == tuple(batch) and set(
    shape[len(batch) :]
  ) <= {1}
  if not (is_one or follows):
    wanted = "one float32"
    if batch:
      wanted += f", or have the leading dimensions {tuple(batch)} of x"
    raise ValueError(
      f"{who}: global_scale must be {wanted}, got"
      f" {global_scale.dtype}{list(shape)}; leave it out to have it computed"
    )
  global_scale = global_scale.reshape(() if is_one else tuple(batch))
  return global_scale.astype(jnp.float32)


def float_dtype(dtype: Any) -> np.dtype:
  result = formats.as_dtype(dtype)
  if result is None or result not in map(np.dtype, _FLOATS):
    given = error_context.shown(dtype) if result is None else str(result)
    raise TypeError(
      "dequantize: dtype must be float32, bfloat16, float16 or float64, got"
      f" {given}"
    )
  return result


def is_small(x: jax.Array) -> bool:
  """Returns whether reading x takes less time than a kernel launch."""
  is_static = all(isinstance(size, int) for size in x.shape)
  return is_static and x.dtype.itemsize <= 4 and x.nbytes <= _SMALL_BYTES


def validate_scale_layout(
  who: str,
  scale_layout: layouts.ScaleLayout,
  format: formats.BlockFormat,
  ndim: int,
  axis: int,
  batch_dims: int,
) -> None:
  """Raises ValueError if the scale of x cannot have the layout."""
  if not error_context.is_one_of(scale_layout, layouts.SCALE_LAYOUTS):
    raise ValueError(
      f"{who}: scale_layout must be one of {layouts.SCALE_LAYOUTS}, got"
      f" {error_context.shown(scale_layout)}"
    )
  if scale_layout == layouts.SWIZZLED and (
    ndim - batch_dims < 2 or axis != ndim - 1
  ):
    raise ValueError(
      f'{who}: scale_layout must be "linear" unless x has rank 2 or more'
      " without batch_dims and is blocked along its last axis, got axis"
      f" {axis}, rank {ndim} and batch_dims={batch_dims}; leave scale_layout"
      " out"
    )
  if scale_layout == layouts.SWIZZLED and (
    format.is_square or format.scale_dtype.itemsize > 1
  ):
    raise ValueError(
      f'{who}: scale_layout must be "linear" for {format}, because only scales'
      " of one byte in blocks of one row can be swizzled, got"
      f" {scale_layout!r}; leave scale_layout out"
    )
