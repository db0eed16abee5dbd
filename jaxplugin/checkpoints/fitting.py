# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which format a weight's parts fit, by their dtypes and sizes alone."""

from __future__ import annotations

import math
from typing import Any
from typing import Final

from jaxplugin.arrays import layouts
from jaxplugin.core import formats

_FORMATS: Final = (
  *(formats.NVFP4, formats.MXFP4, formats.MXFP8, formats.MXFP8_E5M2),
)
_FP6_BITS: Final = 6 * formats.MXFP4.block_size
_GPT_OSS_BYTES: Final = formats.MXFP4.block_size // 2  # of a block

# Of GGUF: values of a block, and bytes of scales before those of values.
GGUF_BLOCKS: Final = {formats.MXFP4: (32, 1), formats.NVFP4: (64, 4)}


def find_format(who: str, values: Any, scale: Any) -> formats.BlockFormat:
  """The format that values and linear scales have the dtypes and sizes of.

  Blocks lie along the last dimension; or along the one before it, k, of a stack
  [..., k, n].

  Args:
    who: the function that speaks.
    values, scale: arrays, or what has their `shape` and `dtype`.

  Raises:
    TypeError: there is none.
  """
  axis = blocked_axis(values, scale)
  if axis is not None:
    bits_of_scale = values.shape[axis] * 8 / scale.shape[axis]
    for format in _FORMATS:
      size = format.block_size * format.value_bits
      if bits_of_scale == size and _has_dtypes(format, values, scale):
        return format
    if bits_of_scale == _FP6_BITS and values.dtype == formats.PACKED:
      raise TypeError(
        f"{who}: packed FP6 (four values in three bytes) is not read, got"
        f" {brief(values)} and {brief(scale)}; jaxplugin's MXFP6 has a byte a"
        " value: quantize the weight that is not quantized"
      )
  raise TypeError(
    f"{who}: values and scales must be those of NVFP4 (uint8[..., n, k / 2],"
    " float8_e4m3fn[..., n, k / 16]), MXFP4 (uint8[..., n, k / 2],"
    " uint8[..., n, k / 32]) or MXFP8 (float8_e4m3fn[..., n, k],"
    f" uint8[..., n, k / 32]), got {brief(values)} and {brief(scale)}"
  )


def blocked_axis(values: Any, scale: Any) -> int | None:
  """The axis along which blocks lie, -1 or, of a stack [..., k, n], -2.

  It is the one in which sizes of values and linear scales differ; None where
  they fit each other in no axis.
  """
  of_values, of_scale = tuple(values.shape), tuple(scale.shape)
  if len(of_values) < 2 or len(of_scale) != len(of_values):
    return None
  if not all(of_scale):
    return None
  if of_values[:-1] == of_scale[:-1]:
    return -1
  is_stack = len(of_values) > 2 and of_values[:-2] == of_scale[:-2]
  return -2 if is_stack and of_values[-1] == of_scale[-1] else None


def require_gpt_oss(who: str, blocks: Any, scales: Any) -> None:
  """Raises TypeError for blocks and scales that are not gpt-oss's."""
  is_right = (
    len(blocks.shape) >= 3
    and blocks.shape[-1] == _GPT_OSS_BYTES
    and tuple(blocks.shape[:-1]) == tuple(scales.shape)
    and scales.shape[-1] > 0
    and blocks.dtype == formats.PACKED
    and scales.dtype in (formats.PACKED, formats.E8M0)
  )
  if not is_right:
    raise TypeError(
      f"{who}: blocks must be uint8[..., n, k / 32, {_GPT_OSS_BYTES}] and"
      f" scales uint8[..., n, k / 32], got {brief(blocks)} and"
      f" {brief(scales)}"
    )


def torchao_format(
  who: str, qdata: Any, scale: Any, is_swizzled: bool
) -> formats.BlockFormat:
  """The format of an `NVFP4Tensor` or an `MXTensor`, by its parts.

  Raises:
    TypeError: there is none.
    NotImplementedError: parts of a stack share tiles of scales.
  """
  if not is_swizzled:
    return find_format(who, qdata, scale)
  rows = qdata.shape[-2] if len(qdata.shape) >= 2 else 0
  if len(qdata.shape) > 2 and rows % layouts.SCALE_TILE_ROWS:
    raise NotImplementedError(
      f"{who}: swizzled scales of a stack must have rows in multiples of"
      f" {layouts.SCALE_TILE_ROWS}, else its parts share tiles, got"
      f" {brief(qdata)}; save them unswizzled"
    )
  for format in _FORMATS:
    # Padded, two formats may have as many scales: bytes are taken for E8M0.
    if format.has_global_scale and scale.dtype == formats.PACKED:
      continue
    block_bytes = format.block_size * format.value_bits // 8
    if (
      rows
      and qdata.shape[-1] % block_bytes == 0
      and _has_dtypes(format, qdata, scale)
      and math.prod(scale.shape) == math.prod(swizzled_shape(format, qdata))
    ):
      return format
  raise TypeError(
    f"{who}: qdata and swizzled scale fit no format: scales are padded to 128"
    f" rows and 4 columns, got {brief(qdata)} and {brief(scale)}"
  )


def gguf_shape(
  who: str, blocks: Any, format: formats.BlockFormat
) -> tuple[int, ...]:
  """The logical shape of blocks of GGUF.

  Raises:
    TypeError: they are no whole blocks of bytes.
    ValueError: GGUF has no such type.
  """
  if format not in GGUF_BLOCKS:
    raise ValueError(
      f"{who}: format must be mxfp4 or nvfp4, got {format}; other types of GGUF"
      " have no format here"
    )
  block, scale_bytes = GGUF_BLOCKS[format]
  size = scale_bytes + block // 2
  shape = tuple(blocks.shape)
  if (
    blocks.dtype != formats.PACKED
    or len(shape) < 2
    or shape[-1] == 0
    or shape[-1] % size
  ):
    raise TypeError(
      f"{who}: blocks of {format} must be uint8[..., n, {size} * k / {block}],"
      f" got {brief(blocks)}"
    )
  return (*shape[:-1], shape[-1] // size * block)


def require_known_global(
  who: str, format: formats.BlockFormat, name: str, is_given: bool
) -> None:
  """Raises TypeError unless there is a global scale just for NVFP4."""
  if format.has_global_scale and not is_given:
    raise TypeError(
      f"{who}: {format} needs {name}, without which its weights are off by"
      " orders of magnitude; pass 1.0 where there is none"
    )
  if is_given and not format.has_global_scale:
    raise TypeError(f"{who}: {format} has no {name}; leave it out")


def _has_dtypes(format: formats.BlockFormat, values: Any, scale: Any) -> bool:
  # FP8 as bytes is E4M3, which alone these layouts have; E5M2 says so.
  of_values = {formats.PACKED} if format.is_fp4 else {format.values_dtype}
  if format == formats.MXFP8:
    of_values.add(formats.PACKED)
  return values.dtype in of_values and scale.dtype in (
    format.scale_dtype,
    formats.PACKED,
  )


def swizzled_shape(format: formats.BlockFormat, qdata: Any) -> tuple[int, ...]:
  *lead, rows, size = qdata.shape
  columns = size * 8 // (format.block_size * format.value_bits)
  return layouts.swizzled_shape((*lead, rows, columns))


def brief(x: Any) -> str:
  """Dtype and shape, for messages."""
  return f"{x.dtype}{list(x.shape)}"
