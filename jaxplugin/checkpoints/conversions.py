# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversions of other tools' tensors to `ScaledArray`s.

Most results are views of the bytes. In all of these layouts values and scale
factors lie along k, the last dimension, except in some experts of ModelOpt. FP4
has two values a byte. NumPy arrays give views; JAX's are bitcast.

Sources: NVIDIA Model Optimizer's unified Hugging Face export; the compressors
of compressed-tensors 0.20; the weights of openai/gpt-oss; `NVFP4Tensor` and
`MXTensor` of torchao 0.18; OCP MX v1.0, section 5;
comfy-kitchen's `float_utils.py` and `tensor/nvfp4.py` at 7d86acf, with
ComfyUI's `ops.py`; `inference/convert.py` of DeepSeek-V4; `fp_quantize` of
mlx/ops.cpp at 846d176.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.checkpoints import assembly, packed_integers
from jaxplugin.core import formats

_GPT_OSS_BYTES: Final = formats.MXFP4.block_size // 2  # of a block
# MLX: 32-bit words of values for each scale.
_MLX_FORMATS: Final = {2: formats.NVFP4, 4: formats.MXFP4, 8: formats.MXFP8}
_FP8: Final = (formats.E4M3, formats.E5M2)
_WORDS: Final = np.dtype(np.uint32)


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


def from_compressed_tensors(
  weight_packed: Any,
  weight_scale: Any,
  weight_global_scale: Any = None,
  *,
  weight_shape: Any = None,
  weight_zero_point: Any = None,
  global_scale_range: assembly.Range | None = assembly.GLOBAL_SCALE_RANGE,
) -> scaled_array.ScaledArray:
  """Converts a weight of compressed-tensors (llm-compressor, vLLM).

  Its formats are nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized,
  float-quantized, int-quantized and pack-quantized. The numbers are::

    weight[i] = value[i] * weight_scale[i // block] / weight_global_scale
    weight[i] = (integer[i] - zero_point[i // block]) * weight_scale[i // block]

  Args:
    weight_packed: same as `weight` of `from_modelopt`; or f8e4m3fn, f8e5m2 or
      int8[..., n, k]; or pack-quantized int32[..., n, k / 8], integers of 4
      bits plus 8, the first in the lowest bits. Files call it `weight` unless
      it is packed.
    weight_scale: same as in `from_modelopt`. For float-quantized, int-quantized
      and pack-quantized f32, bf16 or f16: one for the array or for each matrix,
      [n], [n, 1], [n, k / size], or one for blocks of 128 x 128 values.
    weight_global_scale: NVFP4: f32 that *divides*, one number or one for each
      leading index. MX: None.
    weight_shape: pack-quantized: [n, k], if k is not a multiple of 8, or if
      integers have 8 bits, int32[..., n, k / 4].
    weight_zero_point: zero points of integers, or None. int-quantized: int8 of
      the shape of weight_scale. pack-quantized: int32[..., n / 8, groups] (4
      bits) or int32[..., n / 4, groups].
    global_scale_range: smallest and largest reciprocal, see `from_modelopt`.

  Returns:
    A `ScaledArray` of views, blocked along the last dimension. The global scale
    of NVFP4 is the f32 reciprocal, with a relative error of at most 2^-24. One
    scale for a matrix is repeated for its rows: `FP8_ROW` or `INT8_ROW`.

  Raises:
    TypeError: If dtypes and shapes fit no format.
    CheckpointError: If 1 / weight_global_scale is out of range.

  Source: the compressors of compressed-tensors 0.20.

  Example:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> w = jp.quantize(jnp.ones((32, 64)), "nvfp4")
    >>> values, scale = np.asarray(w.values), np.asarray(w.scale)
    >>> divisor = 1 / np.asarray(w.global_scale)
    >>> w_q = jp.checkpoints.from_compressed_tensors(values, scale, divisor)
    >>> print(w_q.format, w_q.shape)
    nvfp4 (32, 64)
  """
  who, name = "checkpoints.from_compressed_tensors", "weight_global_scale"
  assembly.require_arrays(
    *(who, {"weight_packed": weight_packed, "weight_scale": weight_scale}),
    {"weight_zero_point": weight_zero_point},
  )
  given = weight_global_scale
  if given is None and weight_packed.dtype == packed_integers.INT32:
    shape = packed_integers.default_shape(weight_packed)
    if weight_shape is not None:
      shape = tuple(map(int, weight_shape))
    return packed_integers.unpack(
      who, weight_packed, weight_scale, shape, weight_zero_point
    )
  if given is None and is_scaled_by_floats(weight_packed, weight_scale):
    return assembly.assemble_scaled(
      *(who, weight_packed.dtype, weight_packed, weight_scale),
      zero_points=weight_zero_point,
    )
  if weight_zero_point is not None:
    raise TypeError(
      f"{who}: weight_zero_point must be None for floats, got"
      f" {assembly.brief(weight_zero_point)} for"
      f" {assembly.brief(weight_packed)}; leave it out"
    )
  second = assembly.GlobalScale(
    who, name, given, global_scale_range, divides=True
  )
  return assembly.from_linear(weight_packed, weight_scale, second)


def is_scaled_by_floats(values: Any, scale: Any) -> bool:
  """Returns whether values are FP8 or INT8, and scales f16 or wider floats."""
  return values.dtype in (*_FP8, formats.INT8) and assembly.is_float(scale)


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
      f" {layouts.SCALE_TILE_ROWS} rows, got {rows}"
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
    and weight.shape[-1] * 8 % (format.block_size * format.value_bits) == 0
    and assembly.has_dtypes(format, weight, weight_scale)
    and math.prod(weight_scale.shape)
    == math.prod(assembly.swizzled_shape(format, weight))
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
  if weight.dtype in _FP8 and assembly.is_float(scale):
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


def from_mlx(
  weight: Any, scales: Any, biases: Any = None, *, bits: int = 4
) -> scaled_array.ScaledArray:
  """Converts a weight of MLX in mode mxfp4, mxfp8, nvfp4 or affine.

  The numbers are::

    weight[i] = value[i] * scale[i // block]
    weight[i] = code[i] * scale[i // block] + bias[i // block]   (affine)

  Args:
    weight: uint32, the first value in the lowest bits. FP4 and codes of 4 bits:
      [..., n, k / 8]. FP8 (E4M3) and codes of 8 bits: [..., n, k / 4].
    scales: uint8. mxfp4, mxfp8: E8M0[..., n, k / 32]. nvfp4: E4M3[..., n, k /
      16]. affine: f16, bf16 or f32[..., n, k / group].
    biases: affine: same dtype and shape as scales. Other modes: None.
    bits: affine: 4 or 8, the bits of a code.

  Returns:
    A `ScaledArray` of views, blocked along the last dimension. NVFP4 has the
    global scale 1. An affine weight has the biases as minima.

  Raises:
    TypeError: If dtypes and shapes fit no format.
    ValueError: If bits is not 4 or 8.

  Source: `fp_quantize` and `affine_quantize` of mlx/ops.cpp at 846d176.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> words = np.full((32, 8), 0x22222222, np.uint32)  # E2M1's 0010 is 1
    >>> scales = np.full((32, 2), 127, np.uint8)  # 2^0
    >>> w_q = jp.checkpoints.from_mlx(words, scales)
    >>> print(w_q.format, w_q.shape, jp.dequantize(w_q)[0, 0])
    mxfp4 (32, 64) 1.0
  """
  who = "checkpoints.from_mlx"
  assembly.require_arrays(
    who, {"weight": weight, "scales": scales}, {"biases": biases}
  )
  if biases is not None:
    format = mlx_affine_format(who, weight, scales, biases, bits)
    signs = packed_integers.NIBBLE_SIGNS if bits == 4 else assembly.SIGN
    values = packed_integers.bytes_of(weight) ^ np.uint8(signs)
    return assembly.assemble(format, values, scales, offset=biases)
  format = mlx_format(who, weight, scales)
  values = packed_integers.bytes_of(weight)
  one = np.float32(1) if format.has_global_scale else None
  second = assembly.GlobalScale(who, "global_scale", one, None)
  return assembly.assemble(format, values, scales, second)


def mlx_format(who: str, weight: Any, scales: Any) -> formats.BlockFormat:
  """Returns the format that an MLX weight fits, or raises TypeError."""
  if (
    weight.dtype == _WORDS
    and scales.dtype == formats.PACKED
    and assembly.blocked_axis(weight, scales) == -1
    and weight.shape[-1] % scales.shape[-1] == 0
  ):
    format = _MLX_FORMATS.get(weight.shape[-1] // scales.shape[-1])
    if format is not None:
      return format
  raise TypeError(
    f"{who}: weight and scales must be MLX's mxfp4 (uint32[..., n, k / 8],"
    " uint8[..., n, k / 32]), mxfp8 (uint32[..., n, k / 4], uint8[..., n,"
    " k / 32]) or nvfp4 (uint32[..., n, k / 8], uint8[..., n, k / 16]), got"
    f" {assembly.brief(weight)} and {assembly.brief(scales)}"
  )


def mlx_affine_format(
  who: str, weight: Any, scales: Any, biases: Any, bits: int
) -> formats.BlockFormat:
  """Returns the format of an affine MLX weight.

  Raises:
    TypeError: If dtypes and shapes do not fit.
    ValueError: If bits is not 4 or 8.
  """
  if bits not in (4, 8):
    raise ValueError(
      f"{who}: bits must be 4 or 8, got {bits}; dequantize the weight with MLX,"
      " and quantize the result"
    )
  k = weight.shape[-1] * 32 // bits if weight.shape else 0
  groups = scales.shape[-1] if scales.shape else 0
  if (
    weight.dtype != _WORDS
    or scales.dtype not in formats.FLOAT_DTYPES
    or assembly.blocked_axis(weight, scales) != -1
    or k % groups
    or (biases.dtype, tuple(biases.shape))
    != (scales.dtype, tuple(scales.shape))
  ):
    raise TypeError(
      f"{who}: weight, scales and biases must be uint32[..., n, k * {bits} /"
      " 32] and floats [..., n, k / group] of one dtype, got"
      f" {assembly.brief(weight)}, {assembly.brief(scales)} and"
      f" {assembly.brief(biases)}"
    )
  size = k // groups
  return formats.named(
    formats.BlockFormat(
      name=f"uint{bits}_{size}_min_{scales.dtype}",
      values_dtype=formats.INT4 if bits == 4 else formats.INT8,
      scale_dtype=scales.dtype,
      block_size=size,
      offset_dtype=scales.dtype,
      code_offset=1 << (bits - 1),
    )
  )


def from_gpt_oss(blocks: Any, scales: Any) -> scaled_array.ScaledArray:
  """Converts expert weights of gpt-oss: MXFP4, for `ragged_dot`.

  The numbers are::

    weight[e, i, j] = ldexp(value[e, i, j], scales[e, i, j // 32] - 127)

  The first weight of an expert has interleaved rows of gate and up, for
  `ragged_dot(..., activation="swigluoai")`.

  Args:
    blocks: uint8[..., n, k / 32, 16], the low nibble first.
    scales: uint8[..., n, k / 32], E8M0.

  Returns:
    A `ScaledArray` of views, [..., n, k].

  Raises:
    TypeError: If a dtype or a shape differs.

  Source: the weights of openai/gpt-oss.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> blocks = np.full((4, 32, 2, 16), 0x22, np.uint8)  # E2M1's 0010 is 1
    >>> scales = np.full((4, 32, 2), 127, np.uint8)  # 2^0
    >>> experts = jp.checkpoints.from_gpt_oss(blocks, scales)
    >>> print(experts.format, experts.shape, jp.dequantize(experts)[0, 0, 0])
    mxfp4 (4, 32, 64) 1.0
  """
  who = "checkpoints.from_gpt_oss"
  assembly.require_arrays(who, {"blocks": blocks, "scales": scales})
  require_gpt_oss(who, blocks, scales)
  values = blocks.reshape(*blocks.shape[:-2], math.prod(blocks.shape[-2:]))
  return assembly.assemble(formats.MXFP4, values, scales)


def require_gpt_oss(who: str, blocks: Any, scales: Any) -> None:
  """Raises TypeError unless blocks and scales are those that gpt-oss has."""
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
      f" scales uint8[..., n, k / 32], got {assembly.brief(blocks)} and"
      f" {assembly.brief(scales)}"
    )


def from_torchao(
  qdata: Any,
  scale: Any,
  per_tensor_scale: Any = None,
  *,
  is_swizzled: bool = False,
  global_scale_range: assembly.Range | None = assembly.GLOBAL_SCALE_RANGE,
) -> scaled_array.ScaledArray:
  """Converts a weight of torchao: parts of an `NVFP4Tensor` or `MXTensor`.

  The numbers are::

    weight[i] = value[i] * scale[i // block] * per_tensor_scale

  Args:
    qdata: FP4: uint8[..., n, k / 2], the low nibble first. FP8: f8e4m3fn or
      f8e5m2[..., n, k].
    scale: NVFP4: f8e4m3fn, or same as in `from_modelopt`. MX: f8e8m0fnu. [...,
      n, k / block], or swizzled in any shape of as many bytes.
    per_tensor_scale: NVFP4: f32[], f32[E, 1, 1] or None. MX: None.
    is_swizzled: the attribute `is_swizzled_scales`. The result then has
      scale_layout "swizzled_128x4".
    global_scale_range: same as in `from_modelopt`.

  Returns:
    A `ScaledArray` of views, blocked along the last dimension.

  Raises:
    TypeError: If dtypes and shapes fit no format.
    CheckpointError: If per_tensor_scale is out of range.
    NotImplementedError: If a stack was swizzled as rows of one matrix, and n is
      not a multiple of 128.

  Source: `NVFP4Tensor` and `MXTensor` of torchao 0.18.

  Example:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> w = jp.quantize(jnp.ones((32, 64)), "mxfp8")
    >>> w_q = jp.checkpoints.from_torchao(
    ...   np.asarray(w.values), np.asarray(w.scale))
    >>> print(w_q.format, w_q.shape)
    mxfp8 (32, 64)
  """
  who = "checkpoints.from_torchao"
  assembly.require_arrays(who, {"qdata": qdata, "scale": scale})
  name = "per_tensor_scale"
  second = assembly.GlobalScale(who, name, per_tensor_scale, global_scale_range)
  if not is_swizzled:
    return assembly.from_linear(qdata, scale, second, is_optional=True)
  format = torchao_format(who, qdata, scale, is_swizzled)
  assembly.require_no_global(second, format)
  scale = scale.reshape(assembly.swizzled_shape(format, qdata))
  return assembly.assemble(format, qdata, scale, second, is_swizzled=True)


def torchao_format(
  who: str, qdata: Any, scale: Any, is_swizzled: bool
) -> formats.BlockFormat:
  """Returns the format that an `NVFP4Tensor` or an `MXTensor` fits.

  Raises:
    TypeError: If the parts fit no format.
    NotImplementedError: If matrices of a stack share tiles of scales.
  """
  if not is_swizzled:
    return assembly.find_format(who, qdata, scale)
  rows = qdata.shape[-2] if len(qdata.shape) >= 2 else 0
  if len(qdata.shape) > 2 and rows % layouts.SCALE_TILE_ROWS:
    raise NotImplementedError(
      f"{who}: rows of a stack with swizzled scales must be a multiple of"
      f" {layouts.SCALE_TILE_ROWS}, because layers would share tiles, got"
      f" {assembly.brief(qdata)}; save the scales unswizzled"
    )
  for format in assembly.FORMATS:
    # With padding, two formats may have as many scales. Bytes mean E8M0 then.
    if format.has_global_scale and scale.dtype == formats.PACKED:
      continue
    block_bytes = format.block_size * format.value_bits // 8
    if (
      rows
      and qdata.shape[-1] % block_bytes == 0
      and assembly.has_dtypes(format, qdata, scale)
      and math.prod(scale.shape)
      == math.prod(assembly.swizzled_shape(format, qdata))
    ):
      return format
  raise TypeError(
    f"{who}: qdata and a swizzled scale, padded to 128 rows and 4 columns,"
    f" must fit one format, got {assembly.brief(qdata)} and"
    f" {assembly.brief(scale)}"
  )
