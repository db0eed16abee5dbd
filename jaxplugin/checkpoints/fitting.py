# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which format a weight's parts fit, by their dtypes and sizes alone."""

from __future__ import annotations

import math
from typing import Any
from typing import Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import formats

_FORMATS: Final = (
  *(formats.NVFP4, formats.MXFP4, formats.MXFP8, formats.MXFP8_E5M2),
)
_FP6_BITS: Final = 6 * formats.MXFP4.block_size
# NVFP4 in groups of 32 (ModelOpt's W4A8_NVFP4_FP8).
_WIDE_GROUP: Final = 2 * formats.NVFP4.block_size
# Values that a scale of FP8 covers in rows and in columns.
_SCALE_ROWS: Final = (1, 32, 128)
_SCALE_COLUMNS: Final = (32, 128)
_INT8: Final = np.dtype(np.int8)
_WORDS: Final = np.dtype(np.uint32)
# Words of a scale in MLX's files.
_MLX_FORMATS: Final = {
  2: formats.NVFP4,
  4: formats.MXFP4,
  8: formats.MXFP8,
}
_GPT_OSS_BYTES: Final = formats.MXFP4.block_size // 2  # of a block

# Of GGUF: values of a block, and bytes of scales before those of values.
GGUF_BLOCKS: Final = {formats.MXFP4: (32, 1), formats.NVFP4: (64, 4)}


def find_format(who: str, values: Any, scale: Any) -> formats.BlockFormat:
  """Returns the format whose dtypes and sizes values and linear scales have.

  Blocks lie along the last dimension; or along the one before it, k, of a stack
  [..., k, n]. NVFP4 may have groups of 32, and block scales in F32, BF16 or
  F16.

  Args:
    who: the function that speaks.
    values, scale: arrays, or what has their `shape` and `dtype`.

  Raises:
    TypeError: no format has them.
  """
  axis = blocked_axis(values, scale)
  if axis is not None:
    bits_of_scale = values.shape[axis] * 8 / scale.shape[axis]
    for format in _FORMATS:
      size = format.block_size * format.value_bits
      if bits_of_scale == size and _has_dtypes(format, values, scale):
        return format
    if values.dtype == formats.PACKED:
      nvfp4 = formats.NVFP4
      is_wide = bits_of_scale == _WIDE_GROUP * nvfp4.value_bits
      is_block = bits_of_scale == nvfp4.block_size * nvfp4.value_bits
      if is_wide and scale.dtype == nvfp4.scale_dtype:
        return nvfp4
      if is_block and is_float(scale):
        return nvfp4
    if bits_of_scale == _FP6_BITS and values.dtype == formats.PACKED:
      raise TypeError(
        f"{who}: packed FP6 (four values in three bytes) is not supported, got"
        f" {brief(values)} and {brief(scale)}; quantize the unquantized weight"
        " with jp.quantize, which stores MXFP6 as a byte per value"
      )
  raise TypeError(
    f"{who}: values and scales must be those of NVFP4 (uint8[..., n, k / 2],"
    " float8_e4m3fn[..., n, k / 16]), MXFP4 (uint8[..., n, k / 2],"
    " uint8[..., n, k / 32]) or MXFP8 (float8_e4m3fn[..., n, k],"
    f" uint8[..., n, k / 32]), got {brief(values)} and {brief(scale)}"
  )


def is_float(x: Any) -> bool:
  """Checks for F64, F32, BF16 and F16: floats of more than a byte."""
  return x.dtype.itemsize > 1 and jnp.issubdtype(x.dtype, jnp.floating)


def require_global_scale(
  who: str, name: str, given: Any, values: Any, axis: int
) -> int:
  """Returns how many equal parts of the rows have a global scale each.

  Args:
    who: the function that speaks.
    name: the argument or tensor.
    given: the global scale, an array or what has its `shape` and `dtype`.
    values: those of the weight.
    axis: the one along which blocks lie, -1 or -2.

  Returns:
    0 if one number is for all, 1 if each index of the leading dimensions has
    one, the number of parts otherwise.

  Raises:
    TypeError: the shape or the dtype does not fit.
  """
  lead = tuple(values.shape[:-2])
  shape = tuple(given.shape)
  rows = values.shape[-3 - axis] if len(values.shape) > 1 else 0
  if jnp.issubdtype(given.dtype, jnp.floating):
    if math.prod(shape) == 1:
      return 0
    if shape in (lead, (*lead, 1, 1)):
      return 1
    if shape[:-1] == lead and shape[-1:] and rows % max(shape[-1], 1) == 0:
      return shape[-1]
  raise TypeError(
    f"{who}: {name} must be one float, one for each index of the leading"
    f" dimensions {lead}, or one for each of p equal parts of the {rows} rows,"
    f" {[*lead, 'p']}, got {brief(given)}"
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
      f"{who}: rows of a stack with swizzled scales must be a multiple of"
      f" {layouts.SCALE_TILE_ROWS}, because layers would share tiles, got"
      f" {brief(qdata)}; save the scales unswizzled"
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
    f"{who}: qdata and a swizzled scale, padded to 128 rows and 4 columns,"
    f" must fit one format, got {brief(qdata)} and {brief(scale)}"
  )


def comfyui_format(
  who: str, weight: Any, weight_scale: Any, has_second: bool
) -> formats.BlockFormat:
  """Returns the format of a ComfyUI weight, by its parts.

  Raises:
    TypeError: no format of ComfyUI has them.
  """
  format = formats.NVFP4 if has_second else formats.MXFP8
  # Bytes may be MXFP8 too, or NVFP4 whose weight_scale_2 is missing.
  stored = formats.PACKED if format.is_fp4 else format.values_dtype
  if (
    len(weight.shape) == 2
    and math.prod(weight.shape)
    and weight.dtype == stored
    and weight.shape[-1] * 8 % (format.block_size * format.value_bits) == 0
    and _has_dtypes(format, weight, weight_scale)
    and math.prod(weight_scale.shape)
    == math.prod(swizzled_shape(format, weight))
  ):
    return format
  raise TypeError(
    f"{who}: weight and weight_scale must be ComfyUI's NVFP4 (uint8[n, k / 2],"
    " float8_e4m3fn[n, k / 16], with weight_scale_2) or MXFP8"
    " (float8_e4m3fn[n, k], uint8[n, k / 32]), the scales in tiles of 128 rows"
    f" and 4 columns, got {brief(weight)} and {brief(weight_scale)}"
    f" {'with' if has_second else 'without'} weight_scale_2"
  )


def deepseek_format(who: str, weight: Any, scale: Any) -> formats.BlockFormat:
  """Returns the format of FP4 or FP8 with E8M0 scales, by dtypes and sizes.

  FP4 has one scale for 32 values of a row. FP8 has one for 1, 32 or 128 rows
  and 32 or 128 columns.

  Raises:
    TypeError: no format has them.
  """
  if scale.dtype in (formats.E8M0, formats.PACKED):
    fp4 = formats.MXFP4
    if (
      weight.dtype in (_INT8, formats.PACKED)
      and blocked_axis(weight, scale) == -1
      and weight.shape[-1] * 8
      == scale.shape[-1] * fp4.block_size * fp4.value_bits
    ):
      return fp4
    for format in (formats.MXFP8, formats.MXFP8_E5M2):
      if weight.dtype == format.values_dtype and scale_block(weight, scale):
        return format
  raise TypeError(
    f"{who}: weight and scale must be FP4 (int8 or uint8[..., n, k / 2]) with"
    " E8M0 scales [..., n, k / 32], or FP8 [..., n, k] with E8M0 scales, each"
    " of 1, 32 or 128 rows and 32 or 128 columns, got"
    f" {brief(weight)} and"
    f" {brief(scale)}"
  )


def scale_block(weight: Any, scale: Any) -> tuple[int, int] | None:
  """Returns how many rows and columns of FP8 share a scale; None if unclear."""
  if len(weight.shape) < 2 or len(scale.shape) != len(weight.shape):
    return None
  *lead, n, k = weight.shape
  *scale_lead, rows, columns = scale.shape
  if lead != scale_lead or not n or not k or k % formats.MXFP8.block_size:
    return None
  for size in _SCALE_ROWS:
    for width in _SCALE_COLUMNS:
      if -(-n // size) == rows and -(-k // width) == columns:
        return size, width
  return None


def mlx_format(who: str, weight: Any, scales: Any) -> formats.BlockFormat:
  """Returns the format of an MLX weight, by the words that share a scale.

  Raises:
    TypeError: no format has them.
  """
  if (
    weight.dtype == _WORDS
    and scales.dtype == formats.PACKED
    and blocked_axis(weight, scales) == -1
    and weight.shape[-1] % scales.shape[-1] == 0
  ):
    format = _MLX_FORMATS.get(weight.shape[-1] // scales.shape[-1])
    if format is not None:
      return format
  raise TypeError(
    f"{who}: weight and scales must be MLX's mxfp4 (uint32[..., n, k / 8],"
    " uint8[..., n, k / 32]), mxfp8 (uint32[..., n, k / 4], uint8[..., n,"
    " k / 32]) or nvfp4 (uint32[..., n, k / 8], uint8[..., n, k / 16]), got"
    f" {brief(weight)} and {brief(scales)}"
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
      f"{who}: format must be mxfp4 or nvfp4, got {format}; dequantize other"
      " types of GGUF and call jp.quantize"
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
      f"{who}: {name} must be given for {format}, because without it weights"
      " are wrong by orders of magnitude, got None; pass 1.0 if the"
      " checkpoint has none"
    )
  if is_given and not format.has_global_scale:
    raise TypeError(
      f"{who}: {name} must be None for {format}, which has none; leave"
      f" {name} out"
    )


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
