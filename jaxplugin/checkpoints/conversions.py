# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversions of the layouts of `named_scales.py` to `ScaledArray`s.

Most results are views of the bytes. Values and scale factors lie along k, the
last dimension, except in some experts of ModelOpt. FP4 has two values a byte.
NumPy arrays give views; JAX's are bitcast.

Sources: NVIDIA Model Optimizer's unified Hugging Face export; comfy-kitchen's
`float_utils.py` and `tensor/nvfp4.py` at 7d86acf, with ComfyUI's `ops.py`;
`inference/convert.py` of DeepSeek-V4.
"""

from __future__ import annotations

from typing import Any

from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.checkpoints import assembly
from jaxplugin.core import formats


def from_modelopt(
  weight: Any,
  weight_scale: Any,
  weight_scale_2: Any = None,
  *,
  global_scale_range: assembly.Range | None = assembly.GLOBAL_SCALE_RANGE,
) -> scaled_array.ScaledArray:
  """Converts a weight that NVIDIA Model Optimizer exported.

  The numbers are::

    weight[i] = value[i] * weight_scale[i // block] * weight_scale_2

  Experts of llama4 and gpt-oss have k before n. The last two dimensions are
  then (k, n), and k is the one that is halved or divided.

  Args:
    weight: NVFP4, MXFP4: uint8[..., n, k / 2], the low nibble first. MXFP8:
      f8e4m3fn[..., n, k] or its bits as uint8.
    weight_scale: NVFP4: f8e4m3fn[..., n, k / 16]. MX: f8e8m0fnu[..., n, k /
      32]. Bits as uint8 are accepted. NVFP4's may be f32, bf16 or f16 that E4M3
      holds exactly, or have groups of 32.
    weight_scale_2: NVFP4: f32, one number, one for each leading index, or one
      for each of p equal parts of the rows, [..., p]. MX: None.
    global_scale_range: smallest and largest weight_scale_2; None accepts any.
      1.0 is always accepted. Traced values are not checked.

  Returns:
    A `ScaledArray` blocked along k, of views unless scale factors are cast or
    repeated. Its global scale is [n, 1] if parts of a matrix differ. For
    experts it is one number each if E4M3 holds the ratios exactly. Otherwise it
    is [..., n, 1], which `ragged_dot` refuses.

  Raises:
    TypeError: If dtypes and shapes fit no format.
    CheckpointError: If weight_scale_2 is out of range, or a block scale is not
      a number of E4M3.

  Source: NVIDIA Model Optimizer, unified Hugging Face export.

  Example:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> w = jp.quantize(jnp.ones((32, 64)), "nvfp4")
    >>> parts = map(np.asarray, (w.values, w.scale, w.global_scale))
    >>> w_q = jp.checkpoints.from_modelopt(*parts)
    >>> print(w_q.format, w_q.shape, jp.dequantize(w_q)[0, 0])
    nvfp4 (32, 64) 1.0
  """
  who, name = "checkpoints.from_modelopt", "weight_scale_2"
  assembly.require_arrays(who, {"weight": weight, "weight_scale": weight_scale})
  second = assembly.GlobalScale(who, name, weight_scale_2, global_scale_range)
  return assembly.from_linear(weight, weight_scale, second)


def from_comfyui(
  weight: Any,
  weight_scale: Any,
  weight_scale_2: Any = None,
  *,
  rows: int | None = None,
  global_scale_range: assembly.Range | None = assembly.GLOBAL_SCALE_RANGE,
) -> scaled_array.ScaledArray:
  """Converts a weight of ComfyUI (comfy-kitchen): NVFP4 or MXFP8.

  It has the names, dtypes and often the shapes of ModelOpt's. But the first of
  two FP4 values is in the high nibble, and scale factors lie in cuBLAS's tiles.

  Args:
    weight: NVFP4: uint8[n, k / 2]. MXFP8: f8e4m3fn[n, k]. Rows may be padded by
      zeros.
    weight_scale: NVFP4: f8e4m3fn. MXFP8: f8e8m0fnu. Bits as uint8 are accepted.
      Tiles of 128 rows and 4 columns, in any shape of as many bytes.
    weight_scale_2: NVFP4: f32, one number that multiplies. MXFP8: None.
    rows: n without padding; None for all rows.
    global_scale_range: same as in `from_modelopt`.

  Returns:
    A `ScaledArray` blocked along k with scale_layout "swizzled_128x4". Scale
    factors are views; FP4 values are a copy.

  Raises:
    TypeError: If dtypes and shapes fit no format.
    ValueError: If rows is out of range.
    CheckpointError: If weight_scale_2 is out of range.

  Source: comfy-kitchen's `float_utils.py` and `tensor/nvfp4.py` at 7d86acf.

  Example:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> w = jp.quantize(
    ...   jnp.ones((128, 64)), "mxfp8", scale_layout="swizzled_128x4")
    >>> w_q = jp.checkpoints.from_comfyui(
    ...   np.asarray(w.values), np.asarray(w.scale))
    >>> print(w_q.format, w_q.scale_layout)
    mxfp8 swizzled_128x4
  """
  who = "checkpoints.from_comfyui"
  assembly.require_arrays(who, {"weight": weight, "weight_scale": weight_scale})
  format = comfyui_format(who, weight, weight_scale, weight_scale_2 is not None)
  n = weight.shape[0]
  rows = n if rows is None else rows
  tiles = [-(-x // layouts.SCALE_TILE_ROWS) for x in (rows, n)]
  if not 0 <= rows <= n or tiles[0] != tiles[1]:
    raise ValueError(
      f"{who}: rows must be at most {n} and need as many tiles of"
      f" {layouts.SCALE_TILE_ROWS} rows, got {rows}; pass the rows that the"
      " weight had before it was padded"
    )
  weight = weight[:rows]
  if format.is_fp4:
    weight = weight << 4 | weight >> 4
  scale = weight_scale.reshape(assembly.swizzled_shape(format, weight))
  name = "weight_scale_2"
  second = assembly.GlobalScale(who, name, weight_scale_2, global_scale_range)
  return assembly.assemble(format, weight, scale, second, is_swizzled=True)


def comfyui_format(
  who: str, weight: Any, weight_scale: Any, has_second: bool
) -> formats.BlockFormat:
  """Returns the format that a ComfyUI weight fits, or raises TypeError."""
  format = formats.NVFP4 if has_second else formats.MXFP8
  # Bytes may be MXFP8 too, or NVFP4 whose weight_scale_2 is missing.
  stored = formats.PACKED if format.is_fp4 else format.values_dtype
  if (
    len(weight.shape) == 2
    and weight.shape[-1]
    and weight.dtype == stored
    and assembly.fits_swizzled(format, weight, weight_scale)
  ):
    return format
  raise TypeError(
    f"{who}: weight and weight_scale must be ComfyUI's NVFP4 (uint8[n, k / 2],"
    " float8_e4m3fn[n, k / 16], with weight_scale_2) or MXFP8"
    " (float8_e4m3fn[n, k], uint8[n, k / 32]), the scales in tiles of 128 rows"
    f" and 4 columns, got {assembly.brief(weight)} and"
    f" {assembly.brief(weight_scale)}"
    f" {'with' if has_second else 'without'} weight_scale_2"
  )


def from_deepseek(weight: Any, scale: Any) -> scaled_array.ScaledArray:
  """Converts a weight of DeepSeek, Qwen, GLM, MiniMax-M3 or MiMo.

  The numbers are::

    weight[i, j] = value[i, j] * scale[i // rows, j // columns]

  FP8 with f32 scale factors of 128 x 128 values becomes `FP8_128X128`. FP8 with
  E8M0 scale factors becomes MXFP8, with each scale factor repeated, because
  every backend multiplies MXFP8. f32 scale factors stay f32 even if all of them
  are powers of two; cast them to E8M0 before the call to get MXFP8.

  Args:
    weight: FP4: int8 or uint8[..., n, k / 2], the low nibble first. FP8:
      f8e4m3fn or f8e5m2[..., n, k].
    scale: `weight_scale_inv`, which multiplies despite its name. f8e8m0fnu or
      its bits as uint8: FP4 [..., n, k / 32]; FP8 one for 1, 32 or 128 rows and
      32 or 128 columns, k a multiple of 32. f32, bf16 or f16: FP8 with one for
      128 x 128 values, a row, or 1 x 128 values.

  Returns:
    A `ScaledArray` blocked along the last dimension, of views unless scale
    factors are cast or repeated.

  Raises:
    TypeError: If dtypes and shapes fit no format.

  Source: `inference/convert.py` of DeepSeek-V4, `kernel.py` of DeepSeek-V3.

  Example:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> values = np.ones((128, 256)).astype(jnp.float8_e4m3fn)
    >>> scale = np.full((1, 2), 126, np.uint8)  # 2^-1 for 128 x 128 values
    >>> w_q = jp.checkpoints.from_deepseek(values, scale)
    >>> print(w_q.format, w_q.scale.shape, jp.dequantize(w_q)[0, 0])
    mxfp8 (128, 8) 0.5
  """
  who = "checkpoints.from_deepseek"
  assembly.require_arrays(who, {"weight": weight, "scale": scale})
  if weight.dtype in assembly.FP8 and assembly.is_float(scale):
    return assembly.assemble_scaled(who, weight.dtype, weight, scale)
  format = deepseek_format(who, weight, scale)
  if not format.is_fp4:
    block = assembly.scale_block(weight, scale)
    assert block is not None  # they fit a format
    n, k = weight.shape[-2:]
    for axis, times, size in (
      (-2, block[0], n),
      (-1, block[1] // format.block_size, k // format.block_size),
    ):
      scale = assembly.repeated(scale, times, axis, size)
  return assembly.assemble(format, weight, scale)


def deepseek_format(who: str, weight: Any, scale: Any) -> formats.BlockFormat:
  """Returns the format that a DeepSeek weight fits, or raises TypeError."""
  if scale.dtype in (formats.E8M0, formats.PACKED):
    fp4 = formats.MXFP4
    if (
      weight.dtype in (formats.INT8, formats.PACKED)
      and assembly.blocked_axis(weight, scale) == -1
      and weight.shape[-1] * 8
      == scale.shape[-1] * fp4.block_size * fp4.value_bits
    ):
      return fp4
    for format in (formats.MXFP8, formats.MXFP8_E5M2):
      if weight.dtype == format.values_dtype and assembly.scale_block(
        weight, scale
      ):
        return format
  raise TypeError(
    f"{who}: weight and scale must be FP4 (int8 or uint8[..., n, k / 2]) with"
    " E8M0 scales [..., n, k / 32], or FP8 [..., n, k] with E8M0 scales, each"
    " of 1, 32 or 128 rows and 32 or 128 columns, got"
    f" {assembly.brief(weight)} and"
    f" {assembly.brief(scale)}"
  )
