# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts of values and scales: packed, interleaved, linear or swizzled."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import interleaving
from jaxplugin.core import blocking, error_context, formats
from jaxplugin.jaxext import mesh_axes

ScaleLayout = Literal["linear", "swizzled_128x4"]
LINEAR: Final = "linear"
SWIZZLED: Final = "swizzled_128x4"
SCALE_LAYOUTS: Final = (LINEAR, SWIZZLED)
LAYER: Final = "layer"  # an rhs that is one layer of a stack of weights
# Two global scales for a backend that multiplies by their product.
TWO_GLOBAL_SCALES: Final = "two_global_scales"

# One 512-byte tile of the swizzled layout covers 128 rows and 4 scale columns:
# 4 groups of 32 rows, interleaved so that 16 consecutive bytes hold the same
# row of each group (PTX ISA, "tcgen05.mma: scale factor 1X layout"; cuDNN
# calls it F8_128x4).
SCALE_TILE_ROWS: Final = 128
SCALE_TILE_COLUMNS: Final = 4
_ROW_GROUP: Final = 32


def blocked_axis(
  values_shape: Sequence[int],
  scale_shape: Sequence[int],
  *,
  is_one_each: bool = False,
) -> int:
  """Returns the axis in which the shapes differ.

  If the blocked axis has at most one value, the shapes do not differ. The
  result is then the last axis of size 0, or else of size 1, or the last axis.
  If each stored value has a scale, it is the last axis.

  Args:
    values_shape, scale_shape: shapes of the stored values and of the scales.
    is_one_each: whether the shapes may be equal because each stored value has a
      scale.
  """
  axes = range(len(values_shape))
  pairs = list(zip(values_shape, scale_shape, strict=True))
  different = [axis for axis in axes if pairs[axis][0] != pairs[axis][1]]
  if different:
    return different[0]
  for size in () if is_one_each else (0, 1):
    for axis in reversed(axes):
      if pairs[axis][0] == size:
        return axis
  return len(values_shape) - 1


def logical_shape(values: Any, axis: int) -> tuple[int, ...]:
  """Returns the shape of `values`, with `axis` counted in 4-bit values."""
  shape = tuple(values.shape)
  per_element = 1
  if values.dtype == formats.PACKED:
    per_element = 2
  elif values.dtype == interleaving.WORDS:
    per_element = interleaving.VALUES_PER_WORD
  return (*shape[:axis], per_element * shape[axis], *shape[axis + 1 :])


def array_shape(
  format: formats.BlockFormat, values: Any, axis: int
) -> tuple[int, ...]:
  # A byte of FP8 is one value.
  return (
    logical_shape(values, axis) if format.has_pairs else tuple(values.shape)
  )


def linear_scale_shape(
  format: formats.BlockFormat, shape: Sequence[Any], axis: int
) -> tuple[Any, ...]:
  """Returns the shape of the linear scales of values of a logical shape."""
  divisors = {axis: format.along(shape[axis]).block_size}
  if format.is_square:
    divisors = dict.fromkeys((len(shape) - 2, len(shape) - 1), divisors[axis])
  return tuple(
    blocking.divide_up(size, divisors.get(d, 1)) for d, size in enumerate(shape)
  )


def scale_of_rows(
  scale: jax.Array, axis: int, size: int, rows: int
) -> jax.Array:
  """Repeats the scales of square blocks along `axis`, one for each row.

  Args:
    scale: [..., n / rows, ...].
    size: the size n of the values along `axis`.
  """
  # `jnp.repeat` does not support a mesh with explicit axes.
  each = jnp.expand_dims(scale, axis + 1)
  shape = list(each.shape)
  shape[axis + 1] = rows
  each = jnp.broadcast_to(each, shape)
  shape = list(scale.shape)
  shape[axis] *= rows
  repeated = each.reshape(shape)
  if shape[axis] == size:
    return repeated
  return lax.slice_in_dim(repeated, 0, size, axis=axis)


def may_be_interleaved(format: formats.BlockFormat) -> bool:
  """Returns whether FP4 values of a format may be interleaved words."""
  return format.is_fp4 and format.block_size % interleaving.UNIT == 0


def pack_fp4(values: jax.Array, *, axis: int = -1) -> jax.Array:
  """Packs pairs of 4-bit values along `axis` into bytes.

  The first value of a pair is the low nibble.

  Args:
    values: float4_e2m1fn or int4[..., k, ...], k even.
    axis: the axis to halve.

  Returns:
    uint8[..., k / 2, ...].

  Raises:
    TypeError: If the dtype is another one, k is odd, or axis is not an integer.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> jp.pack_fp4(jnp.array([1.0, 6.0], jnp.float4_e2m1fn))
    Array([114], dtype=uint8)
  """
  _require_array("pack_fp4", "values", values)
  if values.dtype not in formats.FOUR_BITS:
    raise TypeError(
      f"pack_fp4: values must be float4_e2m1fn or int4, got {values.dtype};"
      " jaxplugin.quantize rounds floats, and values.astype(dtype) converts"
      " codes"
    )
  axis = canonical_axis("pack_fp4", axis, values.ndim)
  size = values.shape[axis]
  if size % 2:
    raise TypeError(
      f"pack_fp4: the size of axis {axis} must be even, got shape"
      f" {values.shape}; pad it"
    )
  return _packed(values, axis)


# One program packs or unpacks outside of jit. A trace has the operations
# themselves.
@functools.partial(jax.jit, static_argnums=1, inline=True)
def _packed(values: jax.Array, axis: int) -> jax.Array:
  values = jnp.moveaxis(mesh_axes.divided(values, axis, 2), axis, -1)
  pairs = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
  packed = lax.bitcast_convert_type(pairs, jnp.uint8)
  return jnp.moveaxis(packed, -1, axis)


def unpack_fp4(
  packed: jax.Array, *, axis: int = -1, dtype: Any = formats.E2M1
) -> jax.Array:
  """Unpacks bytes into pairs of 4-bit values along `axis`.

  It is the inverse of `pack_fp4`.

  Args:
    packed: uint8[..., k / 2, ...].
    axis: the axis to double.
    dtype: float4_e2m1fn or int4.

  Returns:
    dtype[..., k, ...].

  Raises:
    TypeError: If packed is not uint8, dtype is not listed above, or axis is not
      an integer.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> jp.unpack_fp4(jnp.array([0x72], jnp.uint8))
    Array([1, 6], dtype=float4_e2m1fn)
  """
  _require_array("unpack_fp4", "packed", packed)
  if packed.dtype != formats.PACKED:
    raise TypeError(
      f"unpack_fp4: packed must be uint8, got {packed.dtype}; pass"
      " packed.view(jnp.uint8) of an array of bytes"
    )
  if formats.as_dtype(dtype) not in formats.FOUR_BITS:
    raise TypeError(
      "unpack_fp4: dtype must be float4_e2m1fn or int4, got"
      f" {error_context.shown(dtype)}"
    )
  axis = canonical_axis("unpack_fp4", axis, packed.ndim)
  return _unpacked(packed, axis, formats.as_dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _unpacked(packed: jax.Array, axis: int, dtype: Any) -> jax.Array:
  packed = jnp.moveaxis(packed, axis, -1)
  # XLA of jaxlib 0.10.2 folds this cast of a constant to other numbers.
  packed = lax.optimization_barrier(packed)
  if jax.export.is_symbolic_dim(math.prod(packed.shape)):
    # XLA cannot refine the sizes of a bitcast that changes the rank.
    nibbles = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.uint4)
    values = lax.bitcast_convert_type(nibbles, dtype)
  else:
    values = lax.bitcast_convert_type(packed, dtype)
  values = values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
  return jnp.moveaxis(values, -1, axis)


def _require_array(who: str, name: str, x: Any) -> None:
  if not hasattr(x, "dtype") or not hasattr(x, "shape"):
    raise TypeError(
      f"{who}: {name} must be an array, got {error_context.shown(x)}"
    )


def canonical_axis(who: str, axis: int, ndim: int) -> int:
  axis = error_context.require_integer(who, "axis", axis)
  if not -ndim <= axis < ndim:
    raise ValueError(
      f"{who}: axis must be from {-ndim} to {ndim - 1} for rank {ndim}, got"
      f" {axis}. Pass an axis of the array"
    )
  return axis % ndim


def swizzled_shape(scale_shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the shape of a swizzled scale: rows padded to 128, columns to 4."""
  *batch, rows, columns = scale_shape
  return (
    *batch,
    blocking.round_up(rows, SCALE_TILE_ROWS),
    blocking.round_up(columns, SCALE_TILE_COLUMNS),
  )


def _validate_scale_array(who: str, scale: jax.Array) -> None:
  _require_array(who, "scale", scale)
  if scale.dtype.itemsize != 1 or scale.dtype == formats.E2M1:
    raise TypeError(
      f"{who}: scale must have a dtype of one byte, got {scale.dtype.name};"
      " only MX formats and NVFP4 have a swizzled scale"
    )
  if scale.ndim < 2:
    raise TypeError(
      f"{who}: scale must have rank 2 or more (..., rows, columns), got shape"
      f" {scale.shape}; pass scale[None] for one row"
    )


def swizzle_scale(scale: jax.Array) -> jax.Array:
  """Reorders a linear scale for Blackwell's tensor cores and cuDNN.

  Call it once for a constant weight, when it is loaded. Tiles of 128 rows and 4
  columns follow each other row by row. Byte (r, c) of a tile is at offset::

    (r % 32) * 16 + (r // 32) * 4 + c

  Padding is zero.

  Args:
    scale: 1-byte dtype[..., rows, columns], linear; columns = k / block size.

  Returns:
    The same dtype[..., rows padded to 128, columns padded to 4].

  Raises:
    TypeError: If the rank is below 2.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> scale = jnp.arange(256, dtype=jnp.uint8).reshape(64, 4)
    >>> swizzled = jp.swizzle_scale(scale)
    >>> swizzled.shape, swizzled.reshape(-1)[:8]
    ((128, 4), Array([  0,   1,   2,   3, 128, 129, 130, 131], dtype=uint8))

  Source: PTX ISA, tcgen05 scale-factor layout "1X"; cuDNN F8_128x4.
  """
  _validate_scale_array("swizzle_scale", scale)
  return _jitted_swizzle(scale)


def _swizzled(scale: jax.Array) -> jax.Array:
  batch = scale.shape[:-2]
  padded = swizzled_shape(scale.shape)
  code = lax.bitcast_convert_type(scale, jnp.uint8)
  widths = [(0, p - s) for p, s in zip(padded, scale.shape, strict=True)]
  code = jnp.pad(code, widths)
  groups = SCALE_TILE_ROWS // _ROW_GROUP
  code = code.reshape(
    *batch,
    padded[-2] // SCALE_TILE_ROWS,
    groups,
    _ROW_GROUP,
    padded[-1] // SCALE_TILE_COLUMNS,
    SCALE_TILE_COLUMNS,
  )
  lead = len(batch)
  order = (*range(lead), *(lead + d for d in (0, 3, 2, 1, 4)))
  code = code.transpose(order).reshape(padded)
  return lax.bitcast_convert_type(code, scale.dtype)


_swizzled.__name__ = "swizzle_scale"  # names the function in modules
_jitted_swizzle: Final = jax.jit(_swizzled)


def unswizzle_scale(swizzled: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Returns a swizzled scale in linear order, without padding.

  It is the inverse of `swizzle_scale`.

  Args:
    swizzled: dtype[..., rows padded to 128, columns padded to 4].
    shape: (rows, columns) of the linear scale.

  Returns:
    dtype[..., rows, columns].

  Raises:
    TypeError: If the shape of swizzled is not (rows, columns) with padding.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> swizzled = jp.swizzle_scale(jnp.ones((64, 2), jnp.uint8))
    >>> jp.unswizzle_scale(swizzled, (64, 2)).shape
    (64, 2)
  """
  who = "unswizzle_scale"
  _validate_scale_array(who, swizzled)
  if not isinstance(shape, Sequence) or len(shape) != 2:
    raise TypeError(
      f"{who}: shape must be (rows, columns) of the linear scale, got"
      f" {error_context.shown(shape)}"
    )
  sizes: Any = (
    size
    if jax.export.is_symbolic_dim(size)
    else error_context.require_integer(who, "shape", size)
    for size in shape
  )
  rows, columns = sizes
  if swizzled.shape[-2:] != swizzled_shape((rows, columns)):
    raise TypeError(
      f"{who}: a scale of shape {(rows, columns)} swizzles to"
      f" {swizzled_shape((rows, columns))}, got {swizzled.shape[-2:]}; pass the"
      " shape of the linear scale, (n, k / block_size)"
    )
  return _jitted_unswizzle(swizzled, rows, columns)


def _unswizzled(swizzled: jax.Array, rows: int, columns: int) -> jax.Array:
  *batch, padded_rows, padded_columns = swizzled.shape
  code = lax.bitcast_convert_type(swizzled, jnp.uint8)
  code = code.reshape(
    *batch,
    padded_rows // SCALE_TILE_ROWS,
    padded_columns // SCALE_TILE_COLUMNS,
    _ROW_GROUP,
    SCALE_TILE_ROWS // _ROW_GROUP,
    SCALE_TILE_COLUMNS,
  )
  lead = len(batch)
  order = (*range(lead), *(lead + d for d in (0, 3, 2, 1, 4)))
  code = code.transpose(order).reshape(*batch, padded_rows, padded_columns)
  code = code[..., :rows, :columns]
  return lax.bitcast_convert_type(code, swizzled.dtype)


_unswizzled.__name__ = "unswizzle_scale"
_jitted_unswizzle: Final = jax.jit(_unswizzled, static_argnums=(1, 2))


# Bytes for collectives, which do not support FP4. XLA:CPU widens collectives of
# 8-bit floats to 16 or 32 bits.


def packed_pairs(values: jax.Array, axis: int) -> jax.Array:
  """Packs two 4-bit values a byte along an axis; returns others unchanged."""
  if values.dtype not in formats.FOUR_BITS:
    return values
  return pack_fp4(values, axis=axis)


def to_bytes(x: jax.Array) -> jax.Array:
  """Views an array of one-byte elements as bytes.

  Only the xla implementation supports formats with wider elements. Such an
  array is returned unchanged.
  """
  return from_bytes(x, np.dtype(jnp.uint8))


def from_bytes(x: jax.Array, dtype: Any) -> jax.Array:
  """Undoes `to_bytes`."""
  if x.dtype == dtype or x.dtype.itemsize != np.dtype(dtype).itemsize:
    return x
  return lax.bitcast_convert_type(x, dtype)
