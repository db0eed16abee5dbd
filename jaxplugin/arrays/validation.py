# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a `ScaledArray`'s leaves, with a remedy in each error."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import interleaving, layouts
from jaxplugin.core import blocking, error_context, formats

# E4M3's top binade begins here; its largest number is 448. A tensor with a
# global scale has a block scale of exactly 448. Fused layers share a global
# scale, and the largest block scale of each is a little smaller. Without the
# global scale, such block scales would mean values beyond 1000.
_FIRST_TOP_SCALE: Final = 256.0
_LARGEST_ZERO: Final = 0x80  # larger codes are negative, except 0xFF, a NaN
_NEGATIVE_NAN: Final = 0xFF

# Keyed by id, because JAX arrays have no hash. An entry is removed with its
# array.
_known: Final[dict[int, weakref.ref[Any]]] = {}


class GlobalScaleWarning(UserWarning):
  """The warning that an NVFP4 array probably lacks its global scale."""


def validate(array: Any) -> None:
  """Raises the errors of `ScaledArray` if its leaves do not fit together."""
  if not error_context.is_one_of(array.scale_layout, layouts.SCALE_LAYOUTS):
    raise ValueError(
      f"ScaledArray: scale_layout must be one of {layouts.SCALE_LAYOUTS},"
      f" got {error_context.shown(array.scale_layout)}"
    )
  if not (hasattr(array.values, "dtype") and hasattr(array.scale, "dtype")):
    return  # placeholders: a tree of specs or of shardings, or a part of one
  for name in ("global_scale", "offset", "surrogate"):
    leaf = getattr(array, name)
    if leaf is not None and not hasattr(leaf, "dtype"):
      raise TypeError(
        f"ScaledArray: {name} must be an array or None, got"
        f" {error_context.shown(leaf)}"
      )
  _require_dtypes(array.format, array.values, array.scale)
  shape, axis = _checked_shape(array)
  _validate_offset(array)
  validate_global_scale("ScaledArray", array.global_scale, shape, axis)
  if array.global_scale is None and array.format.has_global_scale:
    _warn_of_forgotten_global_scale(array.format, array.scale)
  surrogate = array.surrogate
  if surrogate is not None and not (
    tuple(surrogate.shape) == shape
    and jnp.issubdtype(surrogate.dtype, jnp.floating)
  ):
    raise TypeError(
      "ScaledArray: surrogate must be a float array of the logical shape"
      f" {shape}, got {surrogate.dtype}{list(surrogate.shape)}"
    )


def _validate_offset(array: Any) -> None:
  """Raises TypeError unless the array has an offset if its format has one."""
  format, offset = array.format, array.offset
  if format.offset_dtype is None:
    if offset is not None:
      raise TypeError(
        f"ScaledArray: offset must be None for {format}, got"
        f" {error_context.shown(offset)}. Pass a format with offset_dtype, such"
        " as jp.UINT4_128"
      )
    return
  kind = "zero point" if format.has_zero_points else "minimum"
  wanted, shape = format.offset_dtype, tuple(array.scale.shape)
  if offset is None or (offset.dtype, tuple(offset.shape)) != (wanted, shape):
    raise TypeError(
      f"ScaledArray: offset of {format} must be {wanted.name}{list(shape)}, the"
      f" {kind} of each block, got {error_context.shown(offset)}. Pass offset="
      " with the dtype of the format and the shape of scale"
    )
  if array.global_scale is not None or array.scale_layout != layouts.LINEAR:
    raise TypeError(
      f"ScaledArray: global_scale must be None and scale_layout"
      f' "{layouts.LINEAR}" for {format}, whose blocks have a {kind}, got'
      f" {error_context.shown(array.global_scale)} and {array.scale_layout!r}."
      " Multiply scale by the global scale"
    )


def _require_dtypes(
  format: formats.BlockFormat, values: Any, scale: Any
) -> None:
  is_interleaved = values.dtype == interleaving.WORDS
  if values.dtype not in format.storage_dtypes and not (
    is_interleaved and layouts.may_be_interleaved(format)
  ):
    allowed = " or ".join(dtype.name for dtype in format.storage_dtypes)
    raise TypeError(
      f"ScaledArray: {format} values must be {allowed}, got {values.dtype}"
      f"{values_remedy(values.dtype, format)}"
    )
  if scale.dtype != format.scale_dtype:
    raise TypeError(
      f"ScaledArray: {format} scale must be {format.scale_dtype.name},"
      f" got {scale.dtype}{view_remedy(scale.dtype, format.scale_dtype)}"
    )


def values_remedy(given: Any, format: formats.BlockFormat) -> str:
  if jnp.issubdtype(given, jnp.floating) and given.itemsize > 1:
    return "; call jp.quantize for an array that is not quantized"
  if given == format.values_dtype:  # 6-bit; only NumPy arrays have this dtype
    return f"; view it as {format.array_dtype.name}: array.view(np.uint8)"
  return view_remedy(given, format.array_dtype)


def _checked_shape(array: Any) -> tuple[tuple[int, ...], int]:
  """Returns the logical shape and the blocked axis.

  The blocked axis of swizzled or interleaved arrays is the last one.

  Raises:
    TypeError: If the scale fits no axis.
  """
  format, values, scale = array.format, array.values, array.scale
  is_swizzled = array.scale_layout == layouts.SWIZZLED
  min_rank = 2 if is_swizzled or format.is_square else 1
  if scale.ndim != values.ndim or values.ndim < min_rank:
    raise TypeError(
      f"ScaledArray: {array.scale_layout} scale must have the rank of values"
      f" (at least {min_rank}), got values {tuple(values.shape)} and scale"
      f" {tuple(scale.shape)}"
    )
  axis = array.axis
  shape = layouts.array_shape(format, values, axis)
  block = array.block_size
  expected: tuple[int, ...] | None = None
  if is_swizzled:
    columns = blocking.divide_up(shape[-1], block)
    expected = layouts.swizzled_shape((*shape[:-1], columns))
  elif format.may_be_short or scale.shape[axis] * block == shape[axis]:
    expected = layouts.linear_scale_shape(format, shape, axis)
  if tuple(scale.shape) != expected:
    divided = "the last two axes" if format.is_square else "one axis"
    remedy = ""
    if not is_swizzled and scale.size * block > math.prod(shape):
      remedy = (
        "; slice off the padding, or pass scale_layout="
        f'"{layouts.SWIZZLED}" if the scale is swizzled'
      )
    raise TypeError(
      f"ScaledArray: {format} {array.scale_layout} scale must have the logical"
      f" shape of values with {divided} divided by"
      f" {format.block_size or 'its size'}"
      f"{' (padded to 128 x 4)' if is_swizzled else ''}"
      f"{' and rounded up' if format.may_be_short else ''},"
      f" got values of logical shape {shape} and scale {tuple(scale.shape)}"
      f"{remedy}"
    )
  return shape, axis


def _warn_of_forgotten_global_scale(
  format: formats.BlockFormat, scale: Any
) -> None:
  """Warns if scales are known on this host and reach the top of E4M3."""
  if scale.dtype != formats.E4M3 or not _is_on_host(scale):
    return
  codes = np.asarray(scale).view(np.uint8)
  limits = np.array([_FIRST_TOP_SCALE, np.inf]).astype(formats.E4M3)
  first, nan = limits.view(np.uint8)
  top = codes[(codes >= first) & (codes < nan)]
  if top.size:
    largest = float(top.max().reshape(1).view(formats.E4M3)[0])
    warnings.warn(
      f"ScaledArray: {format} without global_scale, but block scales reach"
      f" {largest:g}, so values reach beyond 1000. A checkpoint stores the"
      " global scale next to the block scales (weight_scale_2, or the inverse"
      " of weight_global_scale). Pass it, or pass global_scale=1.0 if there is"
      " none",
      GlobalScaleWarning,
      stacklevel=4,
    )


def _is_on_host(x: Any) -> bool:
  """Returns whether reading `x` needs no copy from a device."""
  if isinstance(x, np.ndarray):
    return True
  return (
    isinstance(x, jax.Array)
    and not isinstance(x, jax.core.Tracer)
    and x.is_fully_addressable
    and all(device.platform == "cpu" for device in x.devices())
  )


def first_not_positive(x: Any) -> np.float32 | None:
  """Returns a number that is not positive and finite in f32, or None.

  Args:
    x: an argument before its conversion to an array, which would be a tracer in
      a trace. The result is None if x is traced.
  """
  if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
    return None
  with np.errstate(over="ignore"):
    numbers = np.asarray(x).astype(np.float32)
  wrong = numbers[~((numbers > 0) & (numbers < np.inf))]
  return wrong[0] if wrong.size else None


def require_unconverted(who: str, x: Any) -> None:
  """Raises TypeError if a cast gave values or scale another float dtype.

  Casting all float leaves of a tree with `astype` causes this. Leaves that are
  not arrays pass, because JAX's transformations put other objects into a
  `ScaledArray`.
  """
  format = x.format
  leaves = {
    "scale": (x.scale, (format.scale_dtype,)),
    "values": (x.values, (*format.storage_dtypes, format.values_dtype)),
    "offset": (x.offset, (format.offset_dtype,)),
  }
  for name, (leaf, allowed) in leaves.items():
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or dtype in allowed:
      continue
    if jnp.issubdtype(dtype, jnp.floating):
      wanted = format.array_dtype if name == "values" else allowed[0]
      raise TypeError(
        f"{who}: dtype of the {name} of {format} must be {wanted.name},"
        f" got {error_context.shown(leaf)}. Cast other leaves only:"
        " jax.tree.map(lambda x: x if isinstance(x, jp.ScaledArray) else"
        " x.astype(dtype), tree, is_leaf=lambda x: isinstance(x,"
        " jp.ScaledArray))"
      )


def validate_global_scale(
  who: str, global_scale: Any, shape: Sequence[int], axis: int
) -> None:
  """Checks a global scale for values of logical `shape`; raises TypeError."""
  if global_scale is None:
    return
  given = tuple(global_scale.shape)
  if len(given) == len(shape):
    allowed = [{1, size} for size in shape]
    allowed[axis] = {1}
    fits = all(size in a for size, a in zip(given, allowed, strict=True))
  else:
    fits = global_scale.size == 1 or given == tuple(shape[: len(given)])
  if global_scale.dtype != np.float32 or not fits:
    raise TypeError(
      f"{who}: global_scale must be float32 with one element, with the leading"
      " dimensions of values, or with their rank and size 1 along the blocked"
      " dimension (elsewhere 1 or the size of values), got"
      f" {global_scale.dtype}{list(given)} for values {tuple(shape)} blocked"
      f" along dimension {axis}; to join arrays call jaxplugin.concatenate or"
      " jaxplugin.stack"
    )


def view_remedy(given: Any, dtype: np.dtype) -> str:
  """Returns the remedy if bytes were passed as values or scales of `dtype`."""
  if given not in (np.uint8, np.int8):
    return ""
  return f"; view it as {dtype.name}: array.view(jnp.{dtype.name})"


# Negative E4M3 scales. The check copies the scale to the host and waits for its
# computation. It takes 2.1 of the 2.9 ms of an eager NVFP4 dot of 1x4096x4096.
# A JAX array is immutable, so its result stays valid while the array lives. A
# NumPy array may change, so it is checked each time.


def has_negative_code(scale: Any) -> bool:
  """Returns whether any code of a concrete E4M3 `scale` is below zero.

  Zeros and NaNs of either sign do not count.
  """
  if is_known_positive(scale):
    return False
  found = bool(negative_codes(scale).any())
  if not found:
    remember_positive(scale)
  return found


def negative_codes(scale: Any) -> np.ndarray:
  """Returns bool[scale.shape] that marks codes below zero."""
  codes = np.asarray(scale).view(np.uint8)
  return (codes > _LARGEST_ZERO) & (codes < _NEGATIVE_NAN)


def is_known_positive(scale: Any) -> bool:
  known = _known.get(id(scale))
  return known is not None and known() is scale


def remember_positive(scale: Any) -> None:
  """Records that an array has no negative code, as after `quantize`."""
  if not isinstance(scale, jax.Array) or isinstance(scale, jax.core.Tracer):
    return
  key = id(scale)

  def forget(gone: weakref.ref[Any]) -> None:
    if _known.get(key) is gone:  # not a later array's at the same address
      del _known[key]

  _known[key] = weakref.ref(scale, forget)
