# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversions of other tools' tensors to `ScaledArray`s.

Most results are views of the bytes. In all of these layouts values and scale
factors lie along k, the last dimension, except in some experts of ModelOpt. FP4
has two values a byte. NumPy arrays give views; JAX's are bitcast.

Sources: NVIDIA Model Optimizer's unified Hugging Face export; the compressors
of compressed-tensors 0.20; the weights of openai/gpt-oss; `NVFP4Tensor` and
`MXTensor` of torchao 0.18; `quants.py` of gguf 0.19; OCP MX v1.0, section 5;
comfy-kitchen's `float_utils.py` and `tensor/nvfp4.py` at 7d86acf, with
ComfyUI's `ops.py`; `inference/convert.py` of DeepSeek-V4; `fp_quantize` of
mlx/ops.cpp at 846d176.
"""

from __future__ import annotations

import math
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import fitting
from jaxplugin.core import formats

# What a global scale that multiplies is taken to be: with NVFP4's amax / 2688
# that is an amax from 2.4e-9 to 672. One that was meant to divide (2688 / amax,
# 1e3 to 1e4 for weights) lies far above it, and its reciprocal the other way.
GLOBAL_SCALE_RANGE: Final = (2.0**-40, 0.25)

# Activations' scales by layout: the tensor's name, and whether it divides.
ACTIVATION_SCALES: Final = {
  "modelopt": ("input_scale", False),
  "modelopt-swizzled": ("input_scale", False),
  "comfyui": ("input_scale", False),
  "torchao": ("act_per_tensor_scale", False),
  "compressed-tensors": ("input_global_scale", True),
}

_UE4M3_UNUSED: Final = 0x7F  # NaN in E4M3; gguf reads it as 0
_SIGN: Final = 0x80
_FP4_MAGNITUDES: Final = 0x77  # of two values in a byte

Range = tuple[float, float]


def from_modelopt(
  weight: Any,
  weight_scale: Any,
  weight_scale_2: Any = None,
  *,
  global_scale_range: Range | None = GLOBAL_SCALE_RANGE,
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
  who = "checkpoints.from_modelopt"
  return _linear(
    *(who, weight, weight_scale, "weight_scale_2", weight_scale_2),
    global_scale_range,
  )


def from_compressed_tensors(
  weight_packed: Any,
  weight_scale: Any,
  weight_global_scale: Any = None,
  *,
  global_scale_range: Range | None = GLOBAL_SCALE_RANGE,
) -> scaled_array.ScaledArray:
  """Converts a weight of compressed-tensors (llm-compressor, vLLM).

  Its formats are nvfp4-pack-quantized, mxfp4-pack-quantized and
  mxfp8-quantized. The numbers are::

    weight[i] = value[i] * weight_scale[i // block] / weight_global_scale

  Args:
    weight_packed: same as `weight` of `from_modelopt`. The file of mxfp8 calls
      it `weight`.
    weight_scale: same as in `from_modelopt`.
    weight_global_scale: NVFP4: f32 that *divides*, one number or one for each
      leading index. MX: None.
    global_scale_range: smallest and largest reciprocal, see `from_modelopt`.

  Returns:
    A `ScaledArray` of views, blocked along the last dimension. Its global scale
    is the f32 reciprocal, with a relative error of at most 2^-24.

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
  who = "checkpoints.from_compressed_tensors"
  name = "weight_global_scale"
  return _linear(
    *(who, weight_packed, weight_scale, name, weight_global_scale),
    global_scale_range,
    divides=True,
  )


def from_comfyui(
  weight: Any,
  weight_scale: Any,
  weight_scale_2: Any = None,
  *,
  rows: int | None = None,
  global_scale_range: Range | None = GLOBAL_SCALE_RANGE,
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
  format = fitting.comfyui_format(
    who, weight, weight_scale, weight_scale_2 is not None
  )
  weight_scale, weight_scale_2 = _of_zeros(
    weight, weight_scale, weight_scale_2, global_scale_range
  )
  multiplier = _multiplier(
    *(who, "weight_scale_2", weight_scale_2, weight, global_scale_range)
  )
  n = weight.shape[0]
  rows = n if rows is None else rows
  tiles = [-(-x // layouts.SCALE_TILE_ROWS) for x in (rows, n)]
  if not 0 < rows <= n or tiles[0] != tiles[1]:
    raise ValueError(
      f"{who}: rows must be at most {n} and need as many tiles of"
      f" {layouts.SCALE_TILE_ROWS} rows, got {rows}"
    )
  weight = weight[:rows]
  if format.is_fp4:
    weight = weight << 4 | weight >> 4
  scale = weight_scale.reshape(fitting.swizzled_shape(format, weight))
  return _scaled_array(format, weight, scale, multiplier, layouts.SWIZZLED)


def from_deepseek(weight: Any, scale: Any) -> scaled_array.ScaledArray:
  """Converts a weight of DeepSeek-V4, MiniMax-M3 or MiMo: MXFP4 or MXFP8.

  The numbers are::

    weight[i, j] = value[i, j] * scale[i // rows, j // columns]

  FP8 with scale factors for more than 32 values becomes MXFP8, with each scale
  factor repeated.

  Args:
    weight: FP4: int8 or uint8[..., n, k / 2], the low nibble first. FP8:
      f8e4m3fn or f8e5m2[..., n, k], k a multiple of 32.
    scale: f8e8m0fnu or its bits as uint8. FP4: [..., n, k / 32]. FP8: one for
      1, 32 or 128 rows and 32 or 128 columns.

  Returns:
    A `ScaledArray` blocked along the last dimension, of views unless scale
    factors are repeated.

  Raises:
    TypeError: If dtypes and shapes fit no format.

  Source: `inference/convert.py` of DeepSeek-V4.

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
  format = fitting.deepseek_format(who, weight, scale)
  if not format.is_fp4:
    block = fitting.scale_block(weight, scale)
    assert block is not None  # they fit a format
    n, k = weight.shape[-2:]
    for axis, times, size in (
      (-2, block[0], n),
      (-1, block[1] // format.block_size, k // format.block_size),
    ):
      scale = _repeated(scale, times, axis, size)
  return _scaled_array(format, weight, scale, None)


def from_mlx(weight: Any, scales: Any) -> scaled_array.ScaledArray:
  """Converts a weight of MLX in mode mxfp4, mxfp8 or nvfp4.

  The numbers are::

    weight[i] = value[i] * scale[i // block]

  Args:
    weight: uint32, the first value in the lowest bits. FP4: [..., n, k / 8].
      FP8 (E4M3): [..., n, k / 4].
    scales: uint8. mxfp4, mxfp8: E8M0[..., n, k / 32]. nvfp4: E4M3[..., n, k /
      16].

  Returns:
    A `ScaledArray` of views, blocked along the last dimension. NVFP4 has the
    global scale 1.

  Raises:
    TypeError: If dtypes and shapes fit no format.

  Source: `fp_quantize` of mlx/ops.cpp at 846d176.

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
  format = fitting.mlx_format(who, weight, scales)
  if isinstance(weight, np.ndarray):
    words = np.ascontiguousarray(weight).astype("<u4", copy=False)
    values: Any = words.view(np.uint8)
  else:
    values = lax.bitcast_convert_type(weight, jnp.uint8)
    values = values.reshape(*weight.shape[:-1], -1)
  one = np.float32(1) if format.has_global_scale else None
  multiplier = _multiplier(who, "global_scale", one, values, None)
  return _scaled_array(format, values, scales, multiplier)


def activation_scale(layout: str, scale: Any) -> jax.Array:
  """Returns the calibrated `global_scale` of an activation.

  ModelOpt's and ComfyUI's `input_scale` and torchao's `act_per_tensor_scale`
  multiply, as `jp.quantize(x, "nvfp4", global_scale=)` takes them.
  compressed-tensors' `input_global_scale` divides.

  Args:
    layout: "modelopt", "modelopt-swizzled", "comfyui", "torchao" or
      "compressed-tensors".
    scale: the tensor, one float.

  Returns:
    f32[], which multiplies.

  Raises:
    ValueError: If the layout has no such scale.
    TypeError: If scale is not one float.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> scale = np.float32([64])
    >>> jp.checkpoints.activation_scale("compressed-tensors", scale)
    Array(0.015625, dtype=float32)
  """
  who = "checkpoints.activation_scale"
  if layout not in ACTIVATION_SCALES:
    raise ValueError(
      f"{who}: layout must be one of {', '.join(ACTIVATION_SCALES)}, got"
      f" {layout!r}"
    )
  given = jnp.asarray(scale)
  if given.size != 1 or not jnp.issubdtype(given.dtype, jnp.floating):
    raise TypeError(
      f"{who}: scale must be one float, got {fitting.brief(given)}"
    )
  given = given.astype(jnp.float32).reshape(())
  return 1 / given if ACTIVATION_SCALES[layout][1] else given


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
  fitting.require_gpt_oss(who, blocks, scales)
  values = blocks.reshape(*blocks.shape[:-2], math.prod(blocks.shape[-2:]))
  return _scaled_array(formats.MXFP4, values, scales, None)


def from_torchao(
  qdata: Any,
  scale: Any,
  per_tensor_scale: Any = None,
  *,
  is_swizzled: bool = False,
  global_scale_range: Range | None = GLOBAL_SCALE_RANGE,
) -> scaled_array.ScaledArray:
  """Converts a weight of torchao: parts of an `NVFP4Tensor` or `MXTensor`.

  The numbers are::

    weight[i] = value[i] * scale[i // block] * per_tensor_scale

  Args:
    qdata: FP4: uint8[..., n, k / 2], the low nibble first. FP8: f8e4m3fn or
      f8e5m2[..., n, k].
    scale: NVFP4: f8e4m3fn. MX: f8e8m0fnu. [..., n, k / block], or swizzled in
      any shape of as many bytes.
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
  format = fitting.torchao_format(who, qdata, scale, is_swizzled)
  name, given = "per_tensor_scale", per_tensor_scale
  if given is not None:
    _require_global(who, format, name, given)
  if is_swizzled:
    scale = scale.reshape(fitting.swizzled_shape(format, qdata))
  scale, given = _of_zeros(qdata, scale, given, global_scale_range)
  multiplier = _multiplier(who, name, given, qdata, global_scale_range)
  layout: layouts.ScaleLayout = (
    layouts.SWIZZLED if is_swizzled else layouts.LINEAR
  )
  return _scaled_array(format, qdata, scale, multiplier, layout)


def from_gguf(
  blocks: Any,
  format: formats.BlockFormat | str,
  scale: Any = None,
  *,
  global_scale_range: Range | None = GLOBAL_SCALE_RANGE,
) -> scaled_array.ScaledArray:
  """Converts a weight of a GGUF file, of type MXFP4 or NVFP4, in one copy.

  A block of MXFP4 is an E8M0 byte and 16 bytes. Byte j has value j in the low
  and j + 16 in the high nibble. A block of NVFP4 is 4 scale factors (E4M3
  without a sign) of 16 values each, and 4 times 8 bytes. Byte j has values j
  and j + 8. The numbers are gguf's, except that MXFP4's scale byte 255 is NaN
  here.

  Args:
    blocks: MXFP4: uint8[..., n, 17 * k / 32]. NVFP4: uint8[..., n, 36 * k /
      64].
    format: `MXFP4` or `NVFP4`, or its name.
    scale: NVFP4: the tensor "NAME.scale" next to "NAME.weight", which
      multiplies. f32, one number or one for each leading index; or None.
    global_scale_range: same as in `from_modelopt`.

  Returns:
    A `ScaledArray`, blocked along the last dimension.

  Raises:
    TypeError: If a dtype or a shape differs.
    ValueError: If the format is another one.
    CheckpointError: If scale is out of range, or a block scale that is not
      traced has a sign.

  Source: `quants.py` of gguf 0.19.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> block = np.full((32, 17), 0x22, np.uint8)  # E2M1's 0010 is 1
    >>> block[:, 0] = 127  # 2^0
    >>> w_q = jp.checkpoints.from_gguf(block, "mxfp4")
    >>> print(w_q.format, w_q.shape, jp.dequantize(w_q)[0, 0])
    mxfp4 (32, 32) 1.0
  """
  who = "checkpoints.from_gguf"
  format = formats.resolve(who, format)
  shape = fitting.gguf_shape(who, blocks, format)
  xp: Any = np if isinstance(blocks, np.ndarray) else jnp
  block, scale_bytes = fitting.GGUF_BLOCKS[format]
  size = scale_bytes + block // 2
  rows = blocks.reshape(*shape[:-1], shape[-1] // block, size)
  codes = rows[..., :scale_bytes].reshape(
    *shape[:-1], shape[-1] // format.block_size
  )
  halves = rows[..., scale_bytes:].reshape(*codes.shape, format.block_size // 2)
  even, odd = halves[..., 0::2], halves[..., 1::2]
  low = (even & 15) | (odd << 4)
  high = (even >> 4) | (odd & 0xF0)
  values = xp.concatenate([low, high], axis=-1).reshape(
    *shape[:-1], shape[-1] // 2
  )
  if format == formats.MXFP4:
    if scale is not None:
      _require_global(who, format, "scale", scale)
    return _scaled_array(format, values, codes.copy(), None)
  if _is_known(codes) and bool((codes & _SIGN).any()):
    raise errors.CheckpointError(
      f"{who}: NVFP4 scales of GGUF must be bytes below {_SIGN:#x}, got a"
      " larger one; the blocks are damaged, or have another type"
    )
  codes = xp.where(codes == _UE4M3_UNUSED, xp.uint8(0), codes)
  codes, scale = _of_zeros(values, codes, scale, global_scale_range)
  multiplier = _multiplier(who, "scale", scale, values, global_scale_range)
  return _scaled_array(format, values, codes, multiplier)


def _require_global(
  who: str, format: formats.BlockFormat, name: str, given: Any
) -> None:
  fitting.require_known_global(who, format, name, given is not None)


def _scaled_array(
  format: formats.BlockFormat,
  values: Any,
  scale: Any,
  global_scale: Any,
  scale_layout: layouts.ScaleLayout = layouts.LINEAR,
) -> scaled_array.ScaledArray:
  dtype = formats.PACKED if format.is_fp4 else format.array_dtype
  return scaled_array.ScaledArray(
    _viewed(values, dtype),
    _viewed(scale, format.scale_dtype),
    global_scale,
    format,
    scale_layout=scale_layout,
  )


def _viewed(x: Any, dtype: np.dtype) -> Any:
  """The same bytes with another dtype of one byte."""
  if x.dtype == dtype:
    return x
  if isinstance(x, np.ndarray):
    return x.view(dtype)
  return lax.bitcast_convert_type(x, dtype)


def _linear(
  who: str,
  weight: Any,
  weight_scale: Any,
  name: str,
  given: Any,
  allowed: Range | None,
  *,
  divides: bool = False,
) -> scaled_array.ScaledArray:
  """Returns the array of values, linear scales and a global scale."""
  format = fitting.find_format(who, weight, weight_scale)
  _require_global(who, format, name, given)
  axis = fitting.blocked_axis(weight, weight_scale)
  assert axis is not None  # they fit a format
  if fitting.is_float(weight_scale):
    weight_scale = _as_e4m3(who, weight_scale)
  weight_scale, given = _of_zeros(
    weight, weight_scale, given, allowed, divides=divides, axis=axis
  )
  multiplier = _multiplier(
    who, name, given, weight, allowed, divides=divides, axis=axis
  )
  blocks = weight.shape[axis] * 8 // (format.block_size * format.value_bits)
  times = blocks // weight_scale.shape[axis]
  scale = _repeated(weight_scale, times, axis, blocks)
  if multiplier is not None and len(weight.shape) > 2:
    scale, multiplier = _folded(scale, multiplier)
  return _scaled_array(format, weight, scale, multiplier)


def _as_e4m3(who: str, scale: Any) -> Any:
  """Returns block scales in E4M3, which must hold them exactly."""
  if not _is_known(scale):
    raise TypeError(
      f"{who}: block scales in {scale.dtype} must be concrete arrays, so that"
      " they can be compared with E4M3, got traced ones; cast them to"
      " float8_e4m3fn"
    )
  with np.errstate(invalid="ignore", over="ignore"):
    codes = scale.astype(formats.E4M3)
  same = (codes.astype(np.float32) == scale) | (scale != scale)
  if not bool(same.all()):
    bad = float(np.asarray(scale)[~np.asarray(same)].reshape(-1)[0])
    raise errors.CheckpointError(
      f"{who}: block scales in {scale.dtype} must be representable in E4M3, as"
      f" NVFP4 requires, got {bad:g}; quantize the"
      " unquantized weight"
    )
  return codes


def _repeated(x: Any, times: int, axis: int, size: int) -> Any:
  """Returns an array with each index repeated, cut to a size."""
  if times > 1:
    x = (np if isinstance(x, np.ndarray) else jnp).repeat(x, times, axis=axis)
  if x.shape[axis] == size:
    return x
  cut = [slice(None)] * len(x.shape)
  cut[axis] = slice(size)
  return x[tuple(cut)]


def _folded(scale: Any, multiplier: Any) -> tuple[Any, Any]:
  """Returns block scales and one multiplier an expert, if both are exact.

  Products of experts take one global scale for each. The largest one stays, and
  block scales take the ratios of the others to it.
  """
  if multiplier.size in (1, math.prod(multiplier.shape[:-2])):
    return scale, multiplier
  if not (_is_known(scale) and _is_known(multiplier)):
    return scale, multiplier
  parts = np.asarray(multiplier, np.float64)
  largest = parts.max(axis=(-1, -2), keepdims=True)
  with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
    ratio = np.where(largest > 0, parts / largest, 1)
    numbers = np.asarray(_viewed(scale, formats.E4M3)).astype(np.float64)
    wanted = numbers * ratio
    codes = wanted.astype(formats.E4M3)
    is_exact = codes.astype(np.float64) == wanted
  if not bool((is_exact | np.isnan(numbers)).all()):
    return scale, multiplier
  return codes, largest.astype(np.float32)


def _multiplier(
  who: str,
  name: str,
  given: Any,
  values: Any,
  allowed: Range | None,
  *,
  divides: bool = False,
  axis: int = -1,
) -> Any:
  """Returns the f32 that multiplies, with the rank of values; None for None.

  It is [..., n, 1] if parts of the rows have one each that differ.
  """
  if given is None:
    return None
  if not isinstance(given, jax.Array):
    given = np.asarray(given)
  parts = fitting.require_global_scale(who, name, given, values, axis)
  given = given.astype(np.float32)
  if _is_known(given):
    _require_range(who, name, np.asarray(given), allowed, divides)
  with np.errstate(divide="ignore", over="ignore"):
    given = np.float32(1) / given if divides else given
  lead = tuple(values.shape[:-2])
  if parts == 0:
    return given.reshape((1,) * len(values.shape))
  if parts > 1 and _is_known(given) and bool((given == given[..., :1]).all()):
    given, parts = given[..., 0], 1
  if parts == 1:
    return given.reshape((*lead, 1, 1))
  rows = values.shape[-3 - axis]
  given = _repeated(given, rows // parts, -1, rows)
  return given.reshape((*lead, rows, 1) if axis == -1 else (*lead, 1, rows))


def _require_range(
  who: str,
  name: str,
  given: np.ndarray,
  allowed: Range | None,
  divides: bool,
) -> None:
  """Raises CheckpointError for a number that cannot be meant so."""
  if allowed is None:
    return
  is_good = _is_allowed(given, allowed, divides)
  if is_good.all():
    return
  smallest, largest = allowed
  bad = float(given[~is_good].reshape(-1)[0])
  word = "divides" if divides else "multiplies"
  bounds = [1 / largest, 1 / smallest] if divides else [smallest, largest]
  raise errors.CheckpointError(
    f"{who}: {name} {word}, and must be in [{bounds[0]:.4g}, {bounds[1]:.4g}]"
    f" or 1, got {bad:g}; ModelOpt's weight_scale_2 (about 1e-4) multiplies,"
    " compressed-tensors' weight_global_scale (1e3 to 1e4) divides; if the"
    " value is intended, pass global_scale_range=None"
  )


def _is_allowed(given: np.ndarray, allowed: Range, divides: bool) -> np.ndarray:
  smallest, largest = allowed
  with np.errstate(divide="ignore", over="ignore"):
    numbers = 1 / given.astype(np.float64) if divides else given
  return (numbers >= smallest) & (numbers <= largest) | (given == 1)


def _of_zeros(
  values: Any,
  scale: Any,
  given: Any,
  allowed: Range | None,
  *,
  divides: bool = False,
  axis: int = -1,
) -> tuple[Any, Any]:
  """Returns block scales and global scales with those of zeros replaced.

  A tensor of zeros, or one that saw no data, has a global scale of 0, infinity
  or NaN in files of some tools, and with it NaN block scales. Where all values
  of such a tensor are 0, its global scale becomes 1, and NaN scales 0, so that
  it is exactly 0. Traced arrays are not looked at.

  Args:
    values: FP4, packed: only NVFP4 has a global scale.
    scale: its block scales, with the leading dimensions of `values`.
    given: its global scale, as the file has it, or None.
    allowed: the range of global scales that multiply.
    divides: whether `given` divides.
    axis: the one along which blocks lie, -1 or -2.
  """
  if given is None or not all(map(_is_known, (values, scale))):
    return scale, given
  if not isinstance(given, jax.Array):
    given = np.asarray(given)
  if not _is_known(given) or not jnp.issubdtype(given.dtype, jnp.floating):
    return scale, given
  numbers = np.asarray(given, np.float32)
  lead = tuple(values.shape[:-2])
  is_one = numbers.size == 1
  is_each = numbers.shape in (lead, (*lead, 1, 1))
  rows = values.shape[-3 - axis] if len(values.shape) > 1 else 0
  count = numbers.shape[-1] if numbers.shape else 1
  is_parts = numbers.shape == (*lead, count) and count and rows % count == 0
  if not (is_one or is_each or is_parts):
    return scale, given  # which is refused
  limits = np.finfo(np.float32)
  usable = allowed or (float(limits.tiny), float(limits.max))
  is_odd = ~_is_allowed(numbers, usable, divides)
  if not is_odd.any():
    return scale, given
  magnitudes = np.asarray(values).view(np.uint8) & _FP4_MAGNITUDES
  codes = np.asarray(scale).view(np.uint8)
  is_zero: Any
  spread: tuple[int, ...]
  if is_one:
    is_zero, spread = ~magnitudes.any(), (1,) * codes.ndim
  elif is_each:
    is_zero, spread = ~magnitudes.any((-2, -1)), (*lead, 1, 1)
  else:  # a number for each of equal parts of the rows
    is_zero_row = ~magnitudes.any(axis)
    is_zero = is_zero_row.reshape(*lead, count, -1).all(-1)
    spread = (*lead, rows, 1) if axis == -1 else (*lead, 1, rows)
  is_replaced = is_odd & is_zero.reshape(numbers.shape)
  where = is_replaced
  if not (is_one or is_each):
    where = np.repeat(is_replaced, rows // count, axis=-1)
  is_nan = (codes & ~np.uint8(_SIGN)) == _UE4M3_UNUSED
  scale = np.where(is_nan & where.reshape(spread), np.uint8(0), codes)
  scale = scale.view(formats.E4M3)
  return scale, np.where(is_replaced, np.float32(1), numbers)


def _is_known(x: Any) -> bool:
  """Whether its numbers can be looked at."""
  if isinstance(x, np.ndarray):
    return True
  return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
