# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of compressed-tensors (llm-compressor, vLLM).

Sources: the compressors and the schemes NVFP4A16, MXFP8A16, MXFP4A16,
FP8_BLOCK, INT8_W8A8 and W4A16 of compressed-tensors 0.20.
"""

from __future__ import annotations

import dataclasses
import functools
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
from jaxplugin.core import formats

NAME: Final = "compressed-tensors"
ZERO_POINT: Final = "weight_zero_point"
DIVISOR: Final = "weight_global_scale"
_ACTIVATION: Final = "input_global_scale"
PACKED: Final = "weight_packed"
_VERSION: Final = "0.20.0"
_FLOAT_SCALED: Final = (
  *(formats.FP8_128X128, formats.FP8_ROW, formats.INT8_ROW),
  *(formats.INT4_128, formats.INT4_128_BF16, formats.INT4_32),
  *(formats.UINT4_128, formats.UINT4_128_BF16),
)


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
    weight_zero_point: zero points of integers, or None: int8 of the shape of
      weight_scale; pack-quantized also int32[..., n / 8, groups] (4 bits) or
      int32[..., n / 4, groups].
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
  if given is None and assembly.is_scaled_by_floats(
    weight_packed, weight_scale
  ):
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


def _recognize(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  prefix = values.name.removesuffix(PACKED)
  if prefix == values.name:
    return None
  if values.dtype == packed_integers.INT32:
    return _read_integers(contents, values, prefix)
  if values.dtype not in entries.VALUE_TYPES:
    return None
  entry = read(contents, values, prefix)
  return dataclasses.replace(entry, name=f"{prefix}weight")


def _read_integers(
  contents: records.Contents, words: stored.StoredTensor, prefix: str
) -> records.Entry:
  """Returns a weight of pack-quantized."""
  if f"{prefix}weight_g_idx" in contents.tensors:
    raise stored.fault(
      words,
      "it has a weight_g_idx (actorder), and a block has consecutive values;"
      " use a checkpoint without it, or dequantize it with compressed-tensors"
      " and quantize the result",
    )
  scale = contents.part(words, f"{prefix}weight_scale")
  size = contents.tensors.get(f"{prefix}weight_shape")
  shape = packed_integers.default_shape(words)
  if size is not None:
    if size.dtype.kind not in "iu" or size.shape != (len(words.shape),):
      raise stored.fault(
        size,
        f"it must have the {len(words.shape)} sizes of the weight, got"
        f" {assembly.brief(size)}",
      )
    shape = tuple(map(int, size.read()))
  dtype = packed_integers.find_dtype(entries.WHO, words, shape)
  zeros = contents.tensors.get(f"{prefix}{ZERO_POINT}")
  zero_dtype = None
  if zeros is not None:
    packed_integers.check_zero_points(entries.WHO, zeros, scale, dtype)
    zero_dtype = formats.PACKED if dtype == formats.INT4 else formats.INT8
  convert = from_compressed_tensors
  return entries.entry(
    NAME,
    assembly.find_scaled_format(entries.WHO, dtype, shape, scale, zero_dtype),
    lambda x, y, z: convert(x, y, weight_shape=shape, weight_zero_point=z),
    (words, scale, zeros),
    others=(size,),
    name=f"{prefix}weight",
    shape=shape,
  )


def read(
  contents: records.Contents, values: stored.StoredTensor, prefix: str
) -> records.Entry:
  """Returns a weight of floats with linear block scales."""
  if f"{prefix}{ZERO_POINT}" in contents.tensors:
    raise stored.fault(
      values,
      f"it has a {ZERO_POINT}, and only formats of integers have one",
    )
  convert = from_compressed_tensors
  entry, _ = entries.linear_entry(
    *(contents, NAME, values, prefix, DIVISOR, convert),
    activation_scale=contents.existing(f"{prefix}{_ACTIVATION}"),
  )
  return entry


def _tensors(name: str, array: scaled_array.ScaledArray) -> dict[str, Any]:
  base, format = names.base(name), array.format
  second = f"{base}.{DIVISOR}"
  found = entries.tensors_of(
    *(array, f"{base}.{PACKED}" if format.has_pairs else name),
    *(f"{base}.weight_scale", second),
    is_typed=format in _FLOAT_SCALED,
  )
  if format.has_global_scale:
    found[second] = entries.divided(found[second]).reshape(1)
  if format.values_dtype == formats.INT4:
    words = packed_integers.words_of(array.values)
    found |= {
      f"{base}.{PACKED}": words,
      f"{base}.weight_shape": np.asarray(array.shape, np.int64),
    }
  if format.has_zero_points:
    zeros = packed_integers.zero_point_words(array.offset)
    found[f"{base}.{ZERO_POINT}"] = zeros
  return found


def _numbers(
  format: formats.BlockFormat,
) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
  """Returns the format's word, and descriptions of weights and activations.

  Engines have no kernels for weights in square blocks or in INT8 with
  unquantized activations, so these formats name dynamic activations.
  """
  numbers = {
    "num_bits": format.value_bits,
    "type": "int" if format.is_integer else "float",
    "symmetric": not format.has_zero_points,
  }
  weights: dict[str, Any] = {**numbers, "dynamic": False}
  dynamic = {**numbers, "dynamic": True}
  if format == formats.FP8_128X128:
    size = format.block_size
    blocks = {"strategy": "block", "block_structure": [size, size]}
    activations = {**dynamic, "strategy": "group", "group_size": size}
    return "float-quantized", {**weights, **blocks}, activations
  if format == formats.FP8_ROW:
    return "float-quantized", {**weights, "strategy": "channel"}, None
  if format == formats.INT8_ROW:
    activations = {**dynamic, "strategy": "token"}
    return "int-quantized", {**weights, "strategy": "channel"}, activations
  weights |= {"strategy": "group", "group_size": format.block_size}
  if format.is_integer:
    return "pack-quantized", weights, None
  weights["scale_dtype"] = "torch.uint8"
  if format.has_global_scale:
    weights |= {
      "strategy": "tensor_group",
      "scale_dtype": "torch.float8_e4m3fn",
    }
  word = f"{format}-{'pack-' if format.is_fp4 else ''}quantized"
  return word, weights, None


def _config(format: formats.BlockFormat, left: list[str]) -> dict[str, Any]:
  word, weights, activations = _numbers(format)
  return {
    "version": _VERSION,
    "quant_method": NAME,
    "sparsity_config": {},
    "transform_config": {},
    "config_groups": {
      "group_0": {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": word,
      }
    },
    "kv_cache_scheme": None,
    "format": word,
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "ignore": left,
    "moe_sparsity_config": None,
  }


LAYOUT: Final = records.Layout(
  name=NAME,
  recognize=_recognize,
  activation_scale=(_ACTIVATION, True),
  formats=(*entries.ALL, *_FLOAT_SCALED),
  tensors=_tensors,
  refusal=functools.partial(entries.matrix_refusal, NAME),
  config=_config,
  divides=True,
  shares=True,
)
