# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Indices of quantized arrays, whose blocked dimension is taken whole."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from jaxplugin.core import error_context

_WHO: Final = "ScaledArray"


def leaf_indices(
  index: Any,
  shape: Sequence[int],
  wholes: Mapping[int, str],
  global_shape: Sequence[int],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """Returns the index of values and scale, and the index of the global scale.

  Args:
    index: an index as for a NumPy array: ints, slices, one ellipsis, integer
      arrays, and boolean arrays of rank 1.
    wholes: dimensions that must be taken whole, each with its reason.
    global_shape: shape of the global scale, with the rank of `shape`.

  Raises:
    TypeError: If one of `wholes` is not taken whole, or an index is of another
      kind.
    IndexError: If there are too many indices, or if a Python or NumPy int is
      out of bounds.
  """
  items = list(index) if isinstance(index, tuple) else [index]
  if any(item is None for item in items):
    raise TypeError(
      f"{_WHO}: an index must not contain None, got"
      f" {error_context.shown(index)}; for a new first dimension call"
      " jaxplugin.stack([array])"
    )
  whole = slice(None)
  ellipses = [i for i, item in enumerate(items) if item is Ellipsis]
  if len(ellipses) > 1 or len(items) - len(ellipses) > len(shape):
    raise IndexError(
      f"{_WHO}: an index must have at most one ellipsis and {len(shape)} other"
      f" items for shape {tuple(shape)}, got {error_context.shown(index)}"
    )
  at = ellipses[0] if ellipses else len(items)
  missing = len(shape) - (len(items) - len(ellipses))
  items[at : at + 1] = [whole] * missing
  for dim, item in enumerate(items):
    if dim in wholes:
      _require_whole(item, dim, shape, wholes[dim])
    else:
      _check(item, dim, shape)
  of_global = [
    item if size != 1 or shape[dim] == 1 else _of_size_1(item)
    for dim, (item, size) in enumerate(zip(items, global_shape, strict=True))
  ]
  return tuple(items), tuple(of_global)


def is_layer(items: Sequence[Any]) -> bool:
  """Returns whether an index is a single integer for the first dimension."""
  first, *others = items
  if isinstance(first, slice) or np.ndim(first):
    return False
  dtype = first.dtype if hasattr(first, "dtype") else np.result_type(first)
  return np.issubdtype(dtype, np.integer) and all(
    isinstance(item, slice) and item == slice(None) for item in others
  )


def _require_whole(item: Any, dim: int, shape: Sequence[int], why: str) -> None:
  size = shape[dim]
  is_whole = isinstance(item, slice) and (
    item == slice(None)
    # `slice.indices` cannot read a symbolic size.
    or (isinstance(size, int) and item.indices(size) == (0, size, 1))
  )
  if not is_whole:
    raise TypeError(
      f"{_WHO}: dimension {dim} of shape {tuple(shape)} must be taken whole,"
      f" got index {error_context.shown(item)}: {why}"
    )


def _check(item: Any, dim: int, shape: Sequence[int]) -> None:
  if isinstance(item, slice):
    return
  number = _known_integer(item)
  if number is not None:
    # Without this check a loop over the array would not end. A symbolic size
    # cannot be compared with every integer.
    size = shape[dim]
    if isinstance(size, int) and not -size <= number < size:
      raise IndexError(
        f"{_WHO}: index {number} is out of bounds for dimension {dim} of"
        f" shape {tuple(shape)}"
      )
    return
  if hasattr(item, "dtype") and hasattr(item, "ndim"):
    kind = np.dtype(item.dtype).kind
    if kind in "iu" or (kind == "b" and item.ndim == 1):
      return
  raise TypeError(
    f"{_WHO}: an index must be an int, a slice, an ellipsis, an array of"
    " integers, or an array of booleans of rank 1, got for dimension"
    f" {dim} {error_context.shown(item)}; index array.dequantize()"
  )


def _known_integer(item: Any) -> int | None:
  """Returns a Python or NumPy integer as an int, else None.

  A JAX array returns None, because reading it would wait for its device.
  """
  is_array = hasattr(item, "dtype") and hasattr(item, "ndim")
  if isinstance(item, bool) or (
    is_array and not isinstance(item, (np.integer, np.ndarray))
  ):
    return None
  try:
    return operator.index(item)
  except TypeError:
    return None


def _of_size_1(item: Any) -> Any:
  """Returns an index for a dimension of size 1 with the same result shape."""
  if isinstance(item, slice):
    return slice(None)
  if np.ndim(item) == 0:
    return 0
  rank = 1 if np.dtype(item.dtype).kind == "b" else np.ndim(item)
  return np.zeros((1,) * rank, np.int32)
