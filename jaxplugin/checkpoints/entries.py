# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps that layouts share to read and to write the parts of a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import assembly, names, records, stored
from jaxplugin.core import formats

WHO: Final = "checkpoints.load"
VALUE_TYPES: Final = (formats.PACKED, formats.E4M3, formats.E5M2)
SCALE_TYPES: Final = (formats.PACKED, formats.E4M3, formats.E8M0)
ALL: Final = (formats.NVFP4, formats.MXFP8, formats.MXFP4)


# Readers.


def entry(
  layout: str,
  format: formats.BlockFormat,
  convert: Callable[..., scaled_array.ScaledArray],
  parts: Sequence[stored.StoredTensor | None],
  *,
  has_range: bool = False,
  others: Sequence[stored.StoredTensor | None] = (),
  axis: int = -1,
  **fields: Any,
) -> records.Entry:
  """Returns an entry.

  Args:
    layout, format: the layout's name, and the format.
    convert: takes the arrays of the parts, None for a missing one.
    parts: the tensors that hold the numbers, the values first.
    has_range: whether the last part is a global scale, and `convert` takes
      global_scale_range.
    others: other tensors that belong to the weight.
    axis: the axis along which blocks lie.
    **fields: other fields of the entry. By default the name is the name of the
      values.

  Raises:
    TypeError: If the global scale does not fit the format or the shape.
  """
  values, second = parts[0], parts[-1] if has_range else None
  assert values is not None
  shape = fields.pop("shape", logical_shape(format, values, axis))
  if second is not None:
    name = second.name
    assembly.require_no_global(
      assembly.GlobalScale(WHO, name, second, None), format
    )
    assembly.require_global_scale(WHO, name, second, shape, axis)

  def make(allowed: assembly.Range | None) -> scaled_array.ScaledArray:
    options = {"global_scale_range": allowed} if has_range else {}
    return convert(*(x and x.read() for x in parts), **options)

  return records.Entry(
    **{"name": values.name, **fields},
    shape=shape,
    layout=layout,
    format=format,
    parts=tuple(x for x in (*parts, *others) if x is not None),
    make=make,
    global_scale=second,
  )


def logical_shape(
  format: formats.BlockFormat, values: stored.StoredTensor, axis: int = -1
) -> tuple[int, ...]:
  shape = list(values.shape)
  bits = shape[axis] * 8 * values.dtype.itemsize
  shape[axis] = bits // format.value_bits
  return tuple(shape)


def linear_entry(
  contents: records.Contents,
  layout: str,
  values: stored.StoredTensor,
  prefix: str,
  second_name: str,
  convert: Callable[..., scaled_array.ScaledArray],
  **fields: Any,
) -> tuple[records.Entry, int]:
  """Returns a weight with linear "weight_scale", and the axis of its blocks."""
  scale = contents.part(values, f"{prefix}weight_scale")
  second = contents.tensors.get(f"{prefix}{second_name}")
  format = assembly.find_format(WHO, values, scale)
  assembly.require_known_global(
    assembly.GlobalScale(WHO, second_name, second, None), format
  )
  axis = assembly.blocked_axis(values, scale)
  assert axis is not None  # they fit a format
  found = entry(
    *(layout, format, convert, (values, scale, second)),
    has_range=True,
    axis=axis,
    **fields,
  )
  return found, axis


# Writers.


def divided(scale: Any) -> Any:
  """Returns 1 / scale of an f32."""
  return np.float32(1) / scale


def tensors_of(
  array: scaled_array.ScaledArray,
  values: str,
  scale: str,
  second: str = "",
  *,
  is_typed: bool = False,
) -> dict[str, Any]:
  """Returns values, block scales and, of NVFP4, a global scale f32[].

  Args:
    array: the weight.
    values, scale, second: names of the tensors.
    is_typed: whether E8M0 scales have their dtype; otherwise they are bytes.
  """
  if array.format.has_global_scale:
    given = array.global_scale.astype(np.float32).reshape(())
    return {values: array.values, scale: array.scale, second: given}
  dtype = array.scale.dtype if is_typed else formats.PACKED
  return {values: array.values, scale: assembly.viewed(array.scale, dtype)}


def stack_refusal(layout: str) -> str:
  return (
    f"layout {layout} does not store a stack of layers or experts [..., n, k]"
    " in one tensor; store each under its own name, such as layers.0.up.weight,"
    " or choose layout torchao (nvfp4, mxfp8 and mxfp4)"
  )


def matrix_refusal(layout: str, decision: records.TensorDecision) -> str | None:
  if len(decision.tensor.shape) != 2:
    return stack_refusal(layout)
  if not decision.tensor.name.endswith(names.WEIGHT):
    return (
      f"layout {layout} stores only weights named *.weight; name it"
      f" '{decision.tensor.name}.weight', or choose another layout"
    )
  return None
