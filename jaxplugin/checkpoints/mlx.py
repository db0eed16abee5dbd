# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of MLX.

Sources: `fp_quantize` and `affine_quantize` of mlx/ops.cpp at 846d176;
`load_model` of mlx-lm 0.32.
"""

from __future__ import annotations

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
from jaxplugin.core import error_context, formats

_WORDS: Final = np.dtype(np.uint32)
# MLX: 32-bit words of values for each scale.
_FORMATS: Final = {2: formats.NVFP4, 4: formats.MXFP4, 8: formats.MXFP8}
_BITS, _GROUP = "bits", "group_size"  # keys of MLX's configuration
_DEFAULT_GROUP: Final = 64


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
    format = _find_affine_format(who, weight, scales, biases, bits)
    signs = packed_integers.NIBBLE_SIGNS if bits == 4 else assembly.SIGN
    values = packed_integers.bytes_of(weight) ^ np.uint8(signs)
    return assembly.assemble(format, values, scales, offset=biases)
  format = _find_format(who, weight, scales)
  values = packed_integers.bytes_of(weight)
  one = np.float32(1) if format.has_global_scale else None
  second = assembly.GlobalScale(who, "global_scale", one, None)
  return assembly.assemble(format, values, scales, second)


def _find_format(who: str, weight: Any, scales: Any) -> formats.BlockFormat:
  """Returns the format that an MLX weight fits, or raises TypeError."""
  if (
    weight.dtype == _WORDS
    and scales.dtype == formats.PACKED
    and assembly.blocked_axis(weight, scales) == -1
    and weight.shape[-1] % scales.shape[-1] == 0
  ):
    format = _FORMATS.get(weight.shape[-1] // scales.shape[-1])
    if format is not None:
      return format
  raise TypeError(
    f"{who}: weight and scales must be MLX's mxfp4 (uint32[..., n, k / 8],"
    " uint8[..., n, k / 32]), mxfp8 (uint32[..., n, k / 4], uint8[..., n,"
    " k / 32]) or nvfp4 (uint32[..., n, k / 8], uint8[..., n, k / 16]), got"
    f" {assembly.brief(weight)} and {assembly.brief(scales)}"
  )


def _find_affine_format(
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


def _recognize(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  """Returns a weight of MLX; None for affine ones of other than 4 or 8 bits."""
  base = names.base(values.name)
  scales, biases = (
    contents.tensors.get(f"{base}.{x}") for x in ("scales", "biases")
  )
  if base == values.name or values.dtype != _WORDS or scales is None:
    return None
  if biases is not None:
    return _read_affine(contents, values, scales, biases)
  if scales.dtype != formats.PACKED:
    return None
  if (name := f"{base}.global_scale") in contents.tensors:
    raise stored.fault(
      values,
      f"it has the global scale {name!r} of MLX, which is not supported;"
      " quantize the unquantized checkpoint",
    )
  format = _find_format(entries.WHO, values, scales)
  sizes = {_BITS: format.value_bits, _GROUP: format.block_size}
  given = _sizes(contents, values, str(format))
  if {**sizes, **given} != sizes:
    raise stored.fault(
      values, f"{format} must have {sizes} in config.json, got {given}"
    )
  return entries.entry("mlx", format, from_mlx, (values, scales))


def _sizes(
  contents: records.Contents, values: stored.StoredTensor, mode: str
) -> dict[str, int]:
  """Returns bits and group_size that MLX's configuration has for a weight.

  The settings of a layer replace those of the model. A size may be missing.

  Raises:
    CheckpointError: If a size is not a positive integer, or if the
      configuration has another mode.
  """
  own = contents.mlx.get(names.base(values.name), True)
  settings = contents.mlx if own is True else own
  if not isinstance(settings, Mapping):
    raise stored.fault(
      values,
      "its layer must be an object with mode, bits and group_size in"
      " config.json, because it is quantized, got"
      f" {error_context.shown(settings)}",
    )
  if settings.get("mode", mode) != mode:
    raise stored.fault(
      values,
      f"its mode in config.json must be {mode!r}, which its parts have, got"
      f" {error_context.shown(settings['mode'])}",
    )
  sizes = {x: settings[x] for x in (_BITS, _GROUP) if x in settings}
  for name, size in sizes.items():
    if type(size) is not int or size < 1:
      raise stored.fault(
        values,
        f"its {name} in config.json must be a positive integer, got"
        f" {error_context.shown(size)}",
      )
  return sizes


def _read_affine(
  contents: records.Contents,
  values: stored.StoredTensor,
  scales: stored.StoredTensor,
  biases: stored.StoredTensor,
) -> records.Entry | None:
  """Returns an affine weight of MLX, or None if codes have other bits.

  Shapes do not decide between, for example, 4 bits in groups of 64 and 8 bits
  in groups of 32, so the configuration does.

  Raises:
    CheckpointError: If the configuration does not fit the shapes.
  """
  given = _sizes(contents, values, "affine")
  words, groups = (math.prod(x.shape[-1:]) for x in (values, scales))
  bits_of_group, rest = divmod(32 * words, groups or 1)
  bits, size = given.get(_BITS), given.get(_GROUP)
  if size is None:
    size = bits_of_group // bits if bits else _DEFAULT_GROUP
  if bits is None:
    bits = bits_of_group // size
  if rest or bits * size != bits_of_group:
    if not given:
      return None
    raise stored.fault(
      values,
      f"its {words} words of 32 bits a row must be bits * group_size *"
      f" {groups} groups, got {given} in config.json",
    )
  if bits not in (4, 8):
    return None
  format = _find_affine_format(entries.WHO, values, scales, biases, bits)
  convert = functools.partial(from_mlx, bits=bits)
  return entries.entry("mlx", format, convert, (values, scales, biases))


LAYOUT: Final = records.Layout(name="mlx", recognize=_recognize)
