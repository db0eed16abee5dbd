# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of bitsandbytes: 4-bit indices into a codebook, and INT8 rows.

Source: `QuantState` and `dequantize_4bit` of functional.py, and `Linear8bitLt`
of nn/modules.py, in bitsandbytes 0.50.2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import (
  assembly,
  entries,
  names,
  packed_integers,
  records,
  stored,
)
from jaxplugin.core import blocking, formats

_TYPES: Final = ("nf4", "fp4")
_NESTED_PARTS: Final = ("nested_absmax", "nested_quant_map")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NestedScales:
  """Scales of scales (double quantization).

  Attributes:
    block_size: number of scales that share an f32.
    offset: f32 that is added to each scale.
  """

  block_size: int
  offset: np.float32


def _recognize(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  """Returns a weight of bitsandbytes; None for others."""
  name = values.name
  for kind in _TYPES:
    state = contents.tensors.get(f"{name}.quant_state.bitsandbytes__{kind}")
    if state is not None:
      return _read(contents, values, state, kind)
  if f"{name}.absmax" in contents.tensors:
    rule = f"'{name}.quant_state.bitsandbytes__nf4' or __fp4 must be there too"
    raise stored.fault(values, rule)
  scale = contents.tensors.get(f"{names.base(name)}.SCB")
  if scale is None or not name.endswith(names.WEIGHT):
    return None
  order = contents.tensors.get(f"{names.base(name)}.weight_format")
  if values.dtype != formats.INT8 or len(values.shape) != 2:
    rule = f"its values must be int8[n, k], got {assembly.brief(values)}"
    raise stored.fault(values, rule)
  _require_part(scale, formats.F32, values.shape[:1])
  if order is not None and np.any(order.read()):
    rule = "it must be 0, for rows in order, because other orders are tiled"
    raise stored.fault(order, rule)
  return entries.entry(
    *("bitsandbytes", formats.INT8_ROW, _from_row_maxima, (values, scale)),
    others=(order,),
  )


def _from_row_maxima(values: Any, amax: Any) -> scaled_array.ScaledArray:
  scale = amax[:, None] / np.float32(127)
  return assembly.assemble(formats.INT8_ROW, values, scale)


def _read(
  contents: records.Contents,
  values: stored.StoredTensor,
  state: stored.StoredTensor,
  kind: str,
) -> records.Entry:
  """Returns a weight in blocks of 4-bit indices into a codebook."""
  where = f"{state.file}: {state.name!r}"
  fields = stored.parse_object(where, state.read().tobytes())
  shape, size = fields.get("shape"), _block_size(state, fields, "blocksize")
  if (
    not isinstance(shape, list)
    or len(shape) < 2
    or not all(type(x) is int and x > 0 for x in shape)
  ):
    raise stored.fault(
      state, f"shape must be the sizes of a matrix, got {shape!r}"
    )
  if fields.get("quant_type") != kind:
    raise stored.fault(
      state, f"quant_type must be {kind!r}, got {fields.get('quant_type')!r}"
    )
  if shape[-1] % size:
    raise stored.fault(
      values,
      f"its rows must have whole blocks of {size}, got k={shape[-1]}, because a"
      " block must not lie in two rows. Dequantize it with bitsandbytes and"
      " quantize the result",
    )
  count = math.prod(shape)
  if 2 * values.nbytes != count:
    raise stored.fault(
      values,
      f"it must have {count // 2} bytes, two values of {shape} in each, got"
      f" {values.nbytes}",
    )
  scales, table, *nested = (
    contents.part(values, f"{values.name}.{leaf}")
    for leaf in ("absmax", "quant_map", *_NESTED_PARTS)
    if leaf not in _NESTED_PARTS or "nested_offset" in fields
  )
  _require_part(table, formats.F32, (16,))
  double = None
  if nested:
    groups = _block_size(state, fields, "nested_blocksize")
    offset = fields["nested_offset"]
    if type(offset) not in (int, float) or not math.isfinite(offset):
      raise stored.fault(
        state, f"nested_offset must be a finite number, got {offset!r}"
      )
    double = _NestedScales(block_size=groups, offset=np.float32(offset))
    blocks = blocking.divide_up(count // size, groups)
    _require_part(nested[0], formats.F32, (blocks,))
    _require_part(nested[1], formats.F32, (256,))
  dtype = formats.F32 if double is None else formats.PACKED
  _require_part(scales, dtype, (count // size,))
  try:
    format = formats.BlockFormat(
      name=f"{kind}_{size}",
      values_dtype=formats.INT4,
      scale_dtype=formats.F32,
      block_size=size,
      codebook=tuple(map(float, table.read())),
    )
  except ValueError as error:
    raise stored.fault(table, str(error)) from None
  format = formats.named(format)
  return entries.entry(
    *("bitsandbytes", format),
    functools.partial(_from_codes, format, tuple(shape), double),
    (values, scales, *nested),
    others=(table, state),
    shape=tuple(shape),
  )


def _block_size(
  state: stored.StoredTensor, fields: Mapping[str, Any], name: str
) -> int:
  size = fields.get(name)
  if type(size) is not int or size < 2 or size % 2:
    raise stored.fault(state, f"{name} must be an even number, got {size!r}")
  return size


def _require_part(
  part: stored.StoredTensor, dtype: np.dtype, shape: tuple[int, ...]
) -> None:
  if part.dtype != dtype or part.shape != shape:
    raise stored.fault(
      part,
      f"it must be {dtype.name}{list(shape)}, got {assembly.brief(part)}",
    )


def _from_codes(
  format: formats.BlockFormat,
  shape: tuple[int, ...],
  double: _NestedScales | None,
  values: np.ndarray,
  scale: np.ndarray,
  nested_scale: np.ndarray | None = None,
  nested_table: np.ndarray | None = None,
) -> scaled_array.ScaledArray:
  # The first value is in the high nibble of a byte of any storage dtype.
  codes: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
  codes = (codes << 4 | codes >> 4) ^ packed_integers.NIBBLE_SIGNS
  if double is not None:
    assert nested_scale is not None and nested_table is not None
    factors = np.repeat(nested_scale, double.block_size)[: scale.size]
    scale = nested_table[scale] * factors + double.offset
  *lead, k = shape
  return assembly.assemble(
    format,
    codes.reshape(*lead, k // 2),
    scale.reshape(*lead, k // format.block_size),
  )


LAYOUT: Final = records.Layout(name="bitsandbytes", recognize=_recognize)
