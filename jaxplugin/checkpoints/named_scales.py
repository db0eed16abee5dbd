# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts whose weights have a `weight_scale`: ModelOpt, ComfyUI, DeepSeek.

They have the same names, dtypes and often shapes, so this module also decides
which one reads a weight. compressed-tensors is another of them.

Sources: `hf_quant_config.json` and its conversion in NVIDIA Model Optimizer
0.47; `FineGrainedFP8Config` of transformers 5; comfy-kitchen at 7d86acf.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.checkpoints import (
  assembly,
  comfyui_marks,
  compressed_tensors,
  conversions,
  entries,
  names,
  records,
  stored,
  torchao,
)
from jaxplugin.core import blocking, formats

MODELOPT: Final = "modelopt"
COMFYUI: Final = "comfyui"
DEEPSEEK: Final = "deepseek"
# ModelOpt with enable_swizzle_layout: scales in tiles.
MODELOPT_SWIZZLED: Final = "modelopt-swizzled"
_SECOND: Final = "weight_scale_2"
# Global scales. A weight with one is quantized, even without block scales.
_SECONDS: Final = (_SECOND, compressed_tensors.DIVISOR)
_ACTIVATION: Final = "input_scale"
_SVDQUANT: Final = ("svdquant_lora_a", "svdquant_lora_b")
_DEEPSEEK_SCALES: Final = ("weight_scale_inv", "scale", "weight_scale")
# Names of float scales and their layouts. Several layouts use the first name,
# and only the first one is also a name of scales that multiply INT8.
_FLOAT_SCALES: Final = {
  "weight_scale": None,
  "weight_scale_inv": DEEPSEEK,
  "scale_inv": DEEPSEEK,
  "scale": DEEPSEEK,
  "scale_weight": COMFYUI,
}
# Engines read the name. `written_by` is an addition of jaxplugin.
_PRODUCER: Final = {
  "name": "modelopt",
  "version": "0.47.0",
  "written_by": "jaxplugin",
}


def _recognize(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  """Returns the weight of values with a "weight_scale"; None for others.

  Several layouts have these names, dtypes and often shapes. ComfyUI's marks and
  the caller decide first, then a configuration, then shapes.

  Raises:
    CheckpointError: If a part is missing or does not fit.
  """
  name, tensors = values.name, contents.tensors
  prefix = names.prefix(name)
  others: tuple[str, ...] = ()
  if name.endswith(compressed_tensors.PACKED):
    return None
  if _mark(contents, name) is not None:
    layout = COMFYUI
  elif values.dtype not in entries.VALUE_TYPES:
    return None
  else:
    scale = tensors.get(f"{prefix}weight_scale")
    seconds = [x for x in _SECONDS if f"{prefix}{x}" in tensors]
    if scale is None:
      if seconds:
        raise stored.fault(
          values,
          f"its block scales, {f'{prefix}weight_scale'!r}, must be there too:"
          f" {f'{prefix}{seconds[0]}'!r} says that it is NVFP4",
        )
      return None
    is_nvfp4 = values.dtype == formats.PACKED and (
      bool(seconds) or formats.NVFP4.name in contents.config.lower()
    )
    if scale.dtype not in entries.SCALE_TYPES and not is_nvfp4:
      return None
    is_linear = assembly.blocked_axis(values, scale) is not None
    if not (is_linear or seconds) and assembly.scale_block(values, scale):
      return None  # a scale for several rows is DeepSeek's
    if contents.layout is not None:
      is_compressed = contents.layout == compressed_tensors.NAME
    else:
      is_compressed = compressed_tensors.NAME in contents.tool
    if compressed_tensors.DIVISOR in seconds or (
      not seconds and is_compressed and name.endswith(names.WEIGHT)
    ):
      layout = compressed_tensors.NAME
    else:
      layout, others = _open_layout(contents, values, scale, bool(seconds))
  entry = _READERS[layout](contents, values, prefix)
  return dataclasses.replace(entry, others=others)


def _open_layout(
  contents: records.Contents,
  values: stored.StoredTensor,
  scale: stored.StoredTensor,
  has_second: bool,
) -> tuple[str, tuple[str, ...]]:
  """Returns the layout to read a weight in, and others that it may have.

  Scales in tiles are padded to 128 rows and 4 columns. Often they need no
  padding, and shapes do not decide.
  """
  if contents.layout in (COMFYUI, MODELOPT_SWIZZLED):
    return contents.layout, ()
  try:
    conversions.comfyui_format(entries.WHO, values, scale, has_second)
  except TypeError:
    return MODELOPT, ()
  if contents.layout is not None:
    return MODELOPT, ()
  tiled = (MODELOPT_SWIZZLED, COMFYUI) if has_second else (COMFYUI,)
  is_linear = assembly.blocked_axis(values, scale) is not None
  if contents.marks.are_modelopt:
    # ModelOpt's header does not say whether scales lie in tiles.
    return (MODELOPT, tiled[:1]) if is_linear else (tiled[0], ())
  if is_linear:
    is_decided = contents.tool or not values.nbytes
    return MODELOPT, () if is_decided else tiled
  if contents.tool:
    return tiled[0], tiled[1:]
  return COMFYUI, tiled[:-1]


# ModelOpt.


def _read_modelopt(
  contents: records.Contents, values: stored.StoredTensor, prefix: str
) -> records.Entry:
  """Returns a matrix, or experts [E, n, k] or [E, k, n]."""
  entry, axis = entries.linear_entry(
    contents, MODELOPT, values, prefix, _SECOND, conversions.from_modelopt
  )
  return _with_scales_of_input(contents, entry, prefix, axis)


def _read_modelopt_swizzled(
  contents: records.Contents, values: stored.StoredTensor, prefix: str
) -> records.Entry:
  scale = contents.part(values, f"{prefix}weight_scale")
  parts = (values, scale, contents.tensors.get(f"{prefix}{_SECOND}"))
  entry = torchao.entry(MODELOPT_SWIZZLED, parts, True)
  return _with_scales_of_input(contents, entry, prefix, axis=-1)


def _with_scales_of_input(
  contents: records.Contents, entry: records.Entry, prefix: str, axis: int
) -> records.Entry:
  """Returns the entry with the scales of its input, if it has any."""
  for suffix in _SVDQUANT:
    if f"{prefix}{suffix}" in contents.tensors:
      raise stored.fault(
        entry.parts[0],
        f"{prefix}{suffix} says that the weight is one term of a sum"
        " (SVDQuant), which is not supported; use a checkpoint without"
        " SVDQuant",
      )
  awq = contents.tensors.get(f"{prefix}pre_quant_scale")
  if awq is not None and math.prod(awq.shape) != entry.shape[axis]:
    raise stored.fault(
      awq,
      f"it must have k={entry.shape[axis]} numbers, got shape"
      f" {list(awq.shape)}",
    )
  return dataclasses.replace(
    entry,
    pre_quant_scale=None if awq is None else awq.name,
    activation_scale=contents.existing(f"{prefix}{_ACTIVATION}"),
  )


def _modelopt_tensors(
  name: str, array: scaled_array.ScaledArray
) -> dict[str, Any]:
  prefix = names.prefix(name)
  return entries.tensors_of(
    array, name, f"{prefix}weight_scale", f"{prefix}{_SECOND}"
  )


def _modelopt_refusal(decision: records.TensorDecision) -> str | None:
  if len(decision.tensor.shape) == 2:
    return None
  if decision.axis == -1:
    return entries.stack_refusal(MODELOPT)
  if decision.format != formats.NVFP4:
    return (
      f"layout modelopt does not store {decision.format} experts [E, k, n];"
      " choose nvfp4, or layout gpt-oss (mxfp4)"
    )
  return None


# Engines run ModelOpt's MX formats with both operands quantized, so only NVFP4
# has a word for unquantized activations.
_MODELOPT_QUANTIZATIONS: Final[Mapping[formats.BlockFormat, Any]] = {
  formats.NVFP4: {"quant_algo": "W4A16_NVFP4", "group_size": 16},
  formats.MXFP8: {"quant_algo": "MXFP8", "group_size": 32},
  formats.MXFP4: {"quant_algo": "mxfp4"},
}


def _modelopt_file(
  format: formats.BlockFormat, left: list[str]
) -> dict[str, Any]:
  return {
    "producer": dict(_PRODUCER),
    "quantization": {
      **_MODELOPT_QUANTIZATIONS[format],
      "kv_cache_quant_algo": None,
      "exclude_modules": left,
    },
  }


def _modelopt_config(
  format: formats.BlockFormat, left: list[str]
) -> dict[str, Any]:
  config: dict[str, Any] = {}
  if format == formats.NVFP4:
    weights = {
      "dynamic": False,
      "num_bits": format.value_bits,
      "type": "float",
      "group_size": format.block_size,
    }
    config["config_groups"] = {
      "group_0": {"weights": weights, "targets": ["Linear"]}
    }
  return {
    **config,
    "ignore": left,
    "quant_algo": _MODELOPT_QUANTIZATIONS[format]["quant_algo"],
    "producer": dict(_PRODUCER),
    "quant_method": MODELOPT,
  }


# ComfyUI.


def _mark(contents: records.Contents, name: str) -> comfyui_marks.Mark | None:
  """Returns ComfyUI's mark of a weight, unless the caller names a layout."""
  if not name.endswith(names.WEIGHT):
    return None
  mark = contents.marks.find(names.base(name))
  return mark if contents.layout in (None, COMFYUI) else None


def _read_comfyui(
  contents: records.Contents, values: stored.StoredTensor, prefix: str
) -> records.Entry:
  mark = _mark(contents, values.name)
  if mark is not None and mark.format not in comfyui_marks.FORMATS:
    raise stored.fault(
      values,
      f"{mark.sign} says that it is {mark.format!r}, which jaxplugin does not"
      f" support; it reads {' and '.join(comfyui_marks.FORMATS)}. Dequantize"
      " the weight with ComfyUI and quantize the result",
    )
  if mark is not None and mark.is_rotated:
    raise stored.fault(
      values,
      f"{mark.sign} says that it is rotated (ConvRot), which needs rotated"
      " inputs and is not supported; use a checkpoint without rotation",
    )
  scale = contents.part(values, f"{prefix}weight_scale")
  second = contents.tensors.get(f"{prefix}{_SECOND}")
  format = conversions.comfyui_format(
    entries.WHO, values, scale, second is not None
  )
  rows = _comfyui_rows(contents, values, prefix, format, mark)
  entry = entries.entry(
    *(COMFYUI, format),
    functools.partial(conversions.from_comfyui, rows=rows),
    (values, scale, second),
    has_range=True,
    others=() if mark is None else (mark.tensor,),
    shape=(rows, *entries.logical_shape(format, values)[1:]),
  )
  entry = _with_scales_of_input(contents, entry, prefix, axis=-1)
  if mark is not None and format != comfyui_marks.FORMATS[mark.format]:
    raise stored.fault(
      values,
      f"{mark.sign} says that it is {mark.format}, but its parts are those of"
      f" {format}",
    )
  return entry


def _comfyui_rows(
  contents: records.Contents,
  values: stored.StoredTensor,
  prefix: str,
  format: formats.BlockFormat,
  mark: comfyui_marks.Mark | None,
) -> int:
  """Returns n without padding, from the mark or the size of the bias."""
  n, unit = values.shape[0], comfyui_marks.ROWS[format]
  bias = contents.tensors.get(f"{prefix}bias")
  rows = n
  if mark is not None and mark.rows is not None:
    rows = mark.rows
  elif bias is not None:
    # Values are padded, the bias is not.
    count = math.prod(bias.shape)
    rows = count if blocking.round_up(count, unit) == n else n
  padded = blocking.round_up(rows, unit)
  # `conversions.from_comfyui` cannot cut tiles of scales.
  tile = layouts.SCALE_TILE_ROWS
  tiles = {blocking.divide_up(x, tile) for x in (rows, n)}
  if not 0 <= rows <= n or padded not in (n, rows) or len(tiles) != 1:
    raise stored.fault(
      values, f"its {n} rows must be {rows} rows padded, as its mark says"
    )
  return rows


def _comfyui_tensors(
  name: str, array: scaled_array.ScaledArray
) -> dict[str, Any]:
  prefix, format = names.prefix(name), array.format
  scale = f"{prefix}weight_scale"
  found = entries.tensors_of(array, name, scale, f"{prefix}{_SECOND}")
  codes = assembly.viewed(array.values, formats.PACKED)
  if format.is_fp4:  # the first value in the high nibble
    codes = codes << 4 | codes >> 4
  rows = blocking.round_up(len(codes), comfyui_marks.ROWS[format])
  xp: Any = np if isinstance(codes, np.ndarray) else jnp
  codes = xp.pad(codes, ((0, rows - len(codes)), (0, 0)))
  mark = comfyui_marks.mark(format, array.shape)
  return {
    **found,
    name: assembly.viewed(codes, array.values.dtype),
    scale: layouts.swizzle_scale(jnp.asarray(found[scale])),
    f"{names.base(name)}{comfyui_marks.SUFFIX}": mark,
  }


def _comfyui_metadata(
  decisions: Sequence[records.TensorDecision],
) -> Mapping[str, str]:
  return comfyui_marks.metadata(
    (names.module_of(x.tensor.name), x.format, x.tensor.shape)
    for x in decisions
    if x.format is not None
  )


# DeepSeek.


def _recognize_deepseek(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  """Returns FP4 or FP8 with E8M0 scales, or values with float scales."""
  if values.dtype not in (*entries.VALUE_TYPES, formats.INT8):
    return None
  is_weight = values.name.endswith(names.WEIGHT)
  for leaf in _DEEPSEEK_SCALES if is_weight else ():
    scale = contents.tensors.get(f"{names.prefix(values.name)}{leaf}")
    if scale is not None and scale.dtype in (formats.PACKED, formats.E8M0):
      format = conversions.deepseek_format(entries.WHO, values, scale)
      convert = conversions.from_deepseek
      return entries.entry(DEEPSEEK, format, convert, (values, scale))
  return _recognize_float_scales(contents, values)


def _deepseek_tensors(
  name: str, array: scaled_array.ScaledArray
) -> dict[str, Any]:
  scale = f"{names.prefix(name)}weight_scale_inv"
  return entries.tensors_of(array, name, scale, is_typed=True)


def _deepseek_config(
  format: formats.BlockFormat, left: list[str]
) -> dict[str, Any]:
  return {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [format.block_rows, format.block_size],
    "modules_to_not_convert": left,
  }


# Float scales, which several layouts have.


def _recognize_float_scales(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  """Returns FP8 or INT8 with float scales that multiply; None for others."""
  prefix = names.prefix(values.name)
  for leaf, layout in _FLOAT_SCALES.items():
    scale = contents.tensors.get(f"{prefix}{leaf}")
    if scale is None or not assembly.is_scaled_by_floats(values, scale):
      continue
    is_odd = values.dtype == formats.INT8 and layout is not None
    if is_odd or f"{prefix}{_SECOND}" in contents.tensors:
      continue
    if layout is None:
      layout = MODELOPT if _is_modelopt(contents) else compressed_tensors.NAME
    zeros = contents.tensors.get(f"{prefix}{compressed_tensors.ZERO_POINT}")
    if zeros is not None and (
      {zeros.dtype, values.dtype} != {formats.INT8}
      or zeros.shape != scale.shape
    ):
      raise stored.fault(
        zeros,
        "zero points must be int8 of the shape of the scales, next to int8"
        f" values, got {assembly.brief(zeros)} for {assembly.brief(values)} and"
        f" {assembly.brief(scale)}",
      )
    format = assembly.find_scaled_format(
      *(entries.WHO, values.dtype, values.shape, scale),
      zero_dtype=None if zeros is None else zeros.dtype,
    )
    entry = entries.entry(
      *(layout, format),
      functools.partial(assembly.assemble_scaled, entries.WHO, values.dtype),
      (values, scale, zeros),
    )
    return _with_scales_of_input(contents, entry, prefix, axis=-1)
  return None


def _is_modelopt(contents: records.Contents) -> bool:
  if contents.layout is not None:
    return contents.layout == MODELOPT
  return MODELOPT in contents.tool or "hf_quant_config" in contents.tool


MODELOPT_LAYOUT: Final = records.Layout(
  name=MODELOPT,
  recognize=_recognize,  # and weights of other open layouts
  activation_scale=(_ACTIVATION, False),
  formats=entries.ALL,
  tensors=_modelopt_tensors,
  refusal=_modelopt_refusal,
  config=_modelopt_config,
  quant_config=_modelopt_file,
  shares=True,
)
COMFYUI_LAYOUT: Final = records.Layout(
  name=COMFYUI,
  activation_scale=(_ACTIVATION, False),
  formats=tuple(comfyui_marks.FORMATS.values()),
  tensors=_comfyui_tensors,
  refusal=functools.partial(entries.matrix_refusal, COMFYUI),
  metadata=_comfyui_metadata,
)
MODELOPT_SWIZZLED_LAYOUT: Final = records.Layout(
  name=MODELOPT_SWIZZLED,
  activation_scale=(_ACTIVATION, False),
)
DEEPSEEK_LAYOUT: Final = records.Layout(
  name=DEEPSEEK,
  recognize=_recognize_deepseek,
  formats=(formats.FP8_128X128,),
  tensors=_deepseek_tensors,
  refusal=functools.partial(entries.matrix_refusal, DEEPSEEK),
  config=_deepseek_config,
)
# Functions that read a weight of an open layout, by its values and the prefix
# of its other parts.
_READERS: Final[
  Mapping[
    str, Callable[[records.Contents, stored.StoredTensor, str], records.Entry]
  ]
] = {
  MODELOPT: _read_modelopt,
  compressed_tensors.NAME: compressed_tensors.read,
  COMFYUI: _read_comfyui,
  MODELOPT_SWIZZLED: _read_modelopt_swizzled,
}
# Layouts that may have the same names, dtypes and shapes.
OPEN_LAYOUTS: Final = tuple(_READERS)
