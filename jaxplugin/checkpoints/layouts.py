# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoint layouts: names, parts and configurations of each tool's weights.

`LAYOUTS` at the end has a record for each layout. To add one, write its record
and the functions that only this layout needs. `assembly.py`,
`conversions.py` and `packed_integers.py` compute with the arrays of a weight.

Sources of the written layouts: `hf_quant_config.json` and its conversion in
NVIDIA Model Optimizer 0.47; the schemes NVFP4A16, MXFP8A16, MXFP4A16,
FP8_BLOCK, INT8_W8A8 and W4A16 of compressed-tensors 0.20; `Mxfp4Config`,
`FineGrainedFP8Config` and `TorchAoConfig` of transformers 5, with
configurations of torchao 0.18; comfy-kitchen at 7d86acf. Source of MLX's
configuration: `load_model` of mlx-lm 0.32. Source of bitsandbytes' parts:
`QuantState` and `dequantize_4bit` of functional.py, and `Linear8bitLt` of
nn/modules.py, in bitsandbytes 0.50.2.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts as array_layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import (
  assembly,
  comfyui_marks,
  conversions,
  gguf_blocks,
  names,
  packed_integers,
  records,
  stored,
)
from jaxplugin.core import blocking, error_context, formats

MODELOPT: Final = "modelopt"
COMPRESSED_TENSORS: Final = "compressed-tensors"
TORCHAO: Final = "torchao"
COMFYUI: Final = "comfyui"
DEEPSEEK: Final = "deepseek"
# ModelOpt with enable_swizzle_layout: scales in tiles.
MODELOPT_SWIZZLED: Final = "modelopt-swizzled"

_WHO: Final = "checkpoints.load"
_SCALE_WHO: Final = "checkpoints.activation_scale"
_PACKED: Final = ".weight_packed"
_VALUE_TYPES: Final = (formats.PACKED, formats.E4M3, formats.E5M2)
SCALE_TYPES: Final = (formats.PACKED, formats.E4M3, formats.E8M0)
_WORDS: Final = np.dtype(np.uint32)
_BITSANDBYTES_TYPES: Final = ("nf4", "fp4")
_NESTED_PARTS: Final = ("nested_absmax", "nested_quant_map")
_MLX_BITS, _MLX_GROUP = "bits", "group_size"  # keys of MLX's configuration
_MLX_DEFAULT_GROUP: Final = 64
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
# Global scales. A weight with one is quantized, even without block scales.
_SECOND: Final = "weight_scale_2"
_DIVISOR: Final = "weight_global_scale"
_ZERO_POINT: Final = "weight_zero_point"
# Names of Hugging Face, and the original ones.
_GPT_OSS_SUFFIXES: Final = (("_blocks", "_scales"), (".blocks", ".scales"))
_TORCHAO_BLOCKS: Final = {
  "NVFP4Tensor": formats.NVFP4.block_size,
  "MXTensor": formats.MXFP4.block_size,
}
_TORCHAO_VALUES: Final = {
  formats.NVFP4: "float4_e2m1fn_x2",
  formats.MXFP4: "float4_e2m1fn_x2",
  formats.MXFP8: "float8_e4m3fn",
}
_TORCH_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Engines read the name. `written_by` is an addition of jaxplugin.
_PRODUCER: Final = {
  "name": "modelopt",
  "version": "0.47.0",
  "written_by": "jaxplugin",
}
_COMPRESSED_VERSION: Final = "0.20.0"
_ALL: Final = (formats.NVFP4, formats.MXFP8, formats.MXFP4)
_FLOAT_SCALED: Final = (
  *(formats.FP8_128X128, formats.FP8_ROW, formats.INT8_ROW),
  *(formats.INT4_128, formats.INT4_128_BF16, formats.INT4_32),
  *(formats.UINT4_128, formats.UINT4_128_BF16),
)


# Shared by the readers.


def _entry(
  layout: str,
  format: formats.BlockFormat,
  convert: Callable[..., scaled_array.ScaledArray],
  parts: Sequence[stored.StoredTensor | None],
  *,
  has_range: bool = False,
  others: Sequence[stored.StoredTensor | None] = (),
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
    **fields: other fields of the entry. By default the name is the name of the
      values, and values lie along the last axis.
  """
  values = parts[0]
  assert values is not None

  def make(allowed: assembly.Range | None) -> scaled_array.ScaledArray:
    options = {"global_scale_range": allowed} if has_range else {}
    return convert(*(x and x.read() for x in parts), **options)

  return records.Entry(
    **{"name": values.name, "shape": _shape(format, values), **fields},
    layout=layout,
    format=format,
    parts=tuple(x for x in (*parts, *others) if x is not None),
    make=make,
    global_scale=parts[-1] if has_range else None,
  )


def _shape(
  format: formats.BlockFormat, values: stored.StoredTensor, axis: int = -1
) -> tuple[int, ...]:
  shape = list(values.shape)
  bits = shape[axis] * 8 * values.dtype.itemsize
  shape[axis] = bits // format.value_bits
  return tuple(shape)


def _activation(
  contents: records.Contents, layout: str, prefix: str
) -> str | None:
  """Returns the name of the global scale of the activation, if it exists."""
  leaf, _ = BY_NAME[layout].activation_scale or ("", False)
  return f"{prefix}{leaf}" if f"{prefix}{leaf}" in contents.tensors else None


def _base(name: str) -> str:
  return name.removesuffix(names.WEIGHT)


def _prefix(name: str) -> str:
  """Returns the prefix of a weight's other parts.

  It is "up." for "up.weight", and "experts.up_proj_" for "experts.up_proj".
  """
  return f"{_base(name)}." if name.endswith(names.WEIGHT) else f"{name}_"


def _linear_entry(
  contents: records.Contents,
  layout: str,
  values: stored.StoredTensor,
  prefix: str,
  second_name: str,
  convert: Callable[..., scaled_array.ScaledArray],
) -> tuple[records.Entry, int]:
  """Returns a weight with linear "weight_scale", and the axis of its blocks."""
  scale = contents.part(values, f"{prefix}weight_scale")
  second = contents.tensors.get(f"{prefix}{second_name}")
  format = assembly.find_format(_WHO, values, scale)
  assembly.require_known_global(
    assembly.GlobalScale(_WHO, second_name, second, None), format
  )
  axis = assembly.blocked_axis(values, scale)
  assert axis is not None  # they fit a format
  if second is not None:
    assembly.require_global_scale(_WHO, second.name, second, values, axis)
  entry = _entry(
    *(layout, format, convert, (values, scale, second)),
    has_range=True,
    shape=_shape(format, values, axis),
    activation_scale=_activation(contents, layout, prefix),
  )
  return entry, axis


def _torchao_entry(
  layout: str,
  parts: tuple[
    stored.StoredTensor, stored.StoredTensor, stored.StoredTensor | None
  ],
  is_swizzled: bool,
  **fields: Any,
) -> records.Entry:
  """Returns a weight that `from_torchao` converts."""
  format = conversions.torchao_format(_WHO, *parts[:2], is_swizzled)
  convert = functools.partial(conversions.from_torchao, is_swizzled=is_swizzled)
  return _entry(layout, format, convert, parts, has_range=True, **fields)


def _recognize_named_scales(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  """Returns the weight of values with a "weight_scale"; None for others.

  Several layouts have these names, dtypes and often shapes. ComfyUI's marks and
  the caller decide first, then a configuration, then shapes.

  Raises:
    CheckpointError: If a part is missing or does not fit.
  """
  name, tensors = values.name, contents.tensors
  prefix = _prefix(name)
  others: tuple[str, ...] = ()
  if name.endswith(_PACKED):
    return None
  if _mark(contents, name) is not None:
    layout = COMFYUI
  elif values.dtype not in _VALUE_TYPES:
    return None
  else:
    scale = tensors.get(f"{prefix}weight_scale")
    seconds = [x for x in (_SECOND, _DIVISOR) if f"{prefix}{x}" in tensors]
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
    if scale.dtype not in SCALE_TYPES and not is_nvfp4:
      return None
    is_linear = assembly.blocked_axis(values, scale) is not None
    if not (is_linear or seconds) and assembly.scale_block(values, scale):
      return None  # a scale for several rows is DeepSeek's
    if contents.layout is not None:
      is_compressed = contents.layout == COMPRESSED_TENSORS
    else:
      is_compressed = COMPRESSED_TENSORS in contents.tool
    if _DIVISOR in seconds or (
      not seconds and is_compressed and name.endswith(names.WEIGHT)
    ):
      layout = COMPRESSED_TENSORS
    else:
      layout, others = _open_layout(contents, values, scale, bool(seconds))
  read = BY_NAME[layout].read
  assert read is not None, layout
  return dataclasses.replace(read(contents, values, prefix), others=others)


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
    conversions.comfyui_format(_WHO, values, scale, has_second)
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


# Shared by the writers.


def divided(scale: Any) -> Any:
  """Returns 1 / scale of an f32."""
  return np.float32(1) / scale


def _tensors(
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


def _stack_refusal(layout: str) -> str:
  return (
    f"layout {layout} does not store a stack of layers or experts [..., n, k]"
    " in one tensor; store each under its own name, such as layers.0.up.weight,"
    " or choose layout torchao (nvfp4, mxfp8 and mxfp4)"
  )


def _matrix_refusal(layout: str, weight: records.WeightToWrite) -> str | None:
  if len(weight.shape) != 2:
    return _stack_refusal(layout)
  if not weight.name.endswith(names.WEIGHT):
    return f"layout {layout} stores only weights named *.weight"
  return None


# ModelOpt.


def _read_modelopt(
  contents: records.Contents, values: stored.StoredTensor, prefix: str
) -> records.Entry:
  """Returns a matrix, or experts [E, n, k] or [E, k, n]."""
  entry, axis = _linear_entry(
    *(contents, MODELOPT, values, prefix, _SECOND, conversions.from_modelopt)
  )
  return _with_rest_of_product(contents, entry, prefix, axis)


def _read_modelopt_swizzled(
  contents: records.Contents, values: stored.StoredTensor, prefix: str
) -> records.Entry:
  scale = contents.part(values, f"{prefix}weight_scale")
  parts = (values, scale, contents.tensors.get(f"{prefix}{_SECOND}"))
  activation = _activation(contents, MODELOPT_SWIZZLED, prefix)
  entry = _torchao_entry(
    MODELOPT_SWIZZLED, parts, True, activation_scale=activation
  )
  return _with_rest_of_product(contents, entry, prefix, axis=-1)


def _with_rest_of_product(
  contents: records.Contents, entry: records.Entry, prefix: str, axis: int
) -> records.Entry:
  """Returns the entry with ModelOpt's pre_quant_scale if it has one."""
  for suffix in _SVDQUANT:
    if f"{prefix}{suffix}" in contents.tensors:
      raise stored.fault(
        entry.parts[0],
        f"{prefix}{suffix} says that the weight is one term of a sum"
        " (SVDQuant), which is not supported; use a checkpoint without"
        " SVDQuant",
      )
  awq = contents.tensors.get(f"{prefix}pre_quant_scale")
  if awq is None:
    return entry
  if math.prod(awq.shape) != entry.shape[axis]:
    raise stored.fault(
      awq,
      f"it must have k={entry.shape[axis]} numbers, got shape"
      f" {list(awq.shape)}",
    )
  return dataclasses.replace(entry, pre_quant_scale=awq.name)


def _modelopt_tensors(
  name: str, array: scaled_array.ScaledArray
) -> dict[str, Any]:
  prefix = _prefix(name)
  return _tensors(array, name, f"{prefix}weight_scale", f"{prefix}{_SECOND}")


def _modelopt_refusal(weight: records.WeightToWrite) -> str | None:
  if len(weight.shape) == 2:
    return None
  if weight.axis == -1:
    return _stack_refusal(MODELOPT)
  if weight.format != formats.NVFP4:
    return f"layout modelopt does not store {weight.format} experts [E, k, n]"
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


# compressed-tensors.


def _recognize_compressed_tensors(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  if not values.name.endswith(_PACKED):
    return None
  prefix = f"{values.name.removesuffix(_PACKED)}."
  if values.dtype == packed_integers.INT32:
    return _read_packed_integers(contents, values, prefix)
  if values.dtype not in _VALUE_TYPES:
    return None
  return _read_compressed_tensors(contents, values, prefix)


def _read_packed_integers(
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
  dtype = packed_integers.find_dtype(_WHO, words, shape)
  zeros = contents.tensors.get(f"{prefix}{_ZERO_POINT}")
  zero_dtype = None
  if zeros is not None:
    zero_dtype = formats.PACKED if dtype == formats.INT4 else formats.INT8
  convert = conversions.from_compressed_tensors
  return _entry(
    COMPRESSED_TENSORS,
    assembly.find_scaled_format(_WHO, dtype, shape, scale, zero_dtype),
    lambda x, y, z: convert(x, y, weight_shape=shape, weight_zero_point=z),
    (words, scale, zeros),
    others=(size,),
    name=f"{prefix}weight",
    shape=shape,
  )


def _read_compressed_tensors(
  contents: records.Contents, values: stored.StoredTensor, prefix: str
) -> records.Entry:
  if f"{prefix}{_ZERO_POINT}" in contents.tensors:
    raise stored.fault(
      values, f"it has a {_ZERO_POINT}, and only formats of integers have one"
    )
  base = prefix.removesuffix(".")
  convert = conversions.from_compressed_tensors
  entry, _ = _linear_entry(
    contents, COMPRESSED_TENSORS, values, f"{base}.", _DIVISOR, convert
  )
  return dataclasses.replace(entry, name=f"{base}{names.WEIGHT}")


def _compressed_tensors(
  name: str, array: scaled_array.ScaledArray
) -> dict[str, Any]:
  base, format = _base(name), array.format
  second = f"{base}.{_DIVISOR}"
  found = _tensors(
    *(array, f"{base}{_PACKED}" if format.has_pairs else name),
    *(f"{base}.weight_scale", second),
    is_typed=format in _FLOAT_SCALED,
  )
  if format.has_global_scale:
    found[second] = divided(found[second]).reshape(1)
  if format.values_dtype == formats.INT4:
    words = packed_integers.words_of(array.values)
    found |= {
      f"{base}{_PACKED}": words,
      f"{base}.weight_shape": np.asarray(array.shape, np.int64),
    }
  if format.has_zero_points:
    zeros = packed_integers.zero_point_words(array.offset)
    found[f"{base}.{_ZERO_POINT}"] = zeros
  return found


def _compressed_numbers(
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


def _compressed_config(
  format: formats.BlockFormat, left: list[str]
) -> dict[str, Any]:
  word, weights, activations = _compressed_numbers(format)
  return {
    "version": _COMPRESSED_VERSION,
    "quant_method": COMPRESSED_TENSORS,
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


# gpt-oss.


def _recognize_gpt_oss(
  contents: records.Contents, blocks: stored.StoredTensor
) -> records.Entry | None:
  if blocks.dtype != formats.PACKED:
    return None
  for values, scales_suffix in _GPT_OSS_SUFFIXES:
    base = blocks.name.removesuffix(values)
    name = f"{base}{scales_suffix}"
    if base == blocks.name:
      continue
    scales = contents.tensors.get(name)
    if scales is None and len(blocks.shape) > 2:
      contents.part(blocks, name)  # raises an error that names it
    if scales is not None and scales.dtype == formats.PACKED:
      conversions.require_gpt_oss(_WHO, blocks, scales)
      format = formats.MXFP4
      return _entry(
        *("gpt-oss", format, conversions.from_gpt_oss, (blocks, scales)),
        name=base,
        shape=(*scales.shape[:-1], scales.shape[-1] * format.block_size),
      )
  return None


def _gpt_oss_tensors(
  name: str, array: scaled_array.ScaledArray
) -> dict[str, Any]:
  # The original name "mlp1_weight" has a dot, names of Hugging Face do not.
  dot = "." if name.endswith("_weight") else "_"
  found = _tensors(array, f"{name}{dot}blocks", f"{name}{dot}scales")
  shape = (*array.scale.shape, array.block_size // 2)
  return {**found, f"{name}{dot}blocks": array.values.reshape(shape)}


def _gpt_oss_refusal(weight: records.WeightToWrite) -> str | None:
  if len(weight.shape) == 2:
    return "layout gpt-oss stores only quantized experts"
  return None


def _gpt_oss_config(
  format: formats.BlockFormat, left: list[str]
) -> dict[str, Any]:
  return {"quant_method": str(format), "modules_to_not_convert": left}


# torchao.


def _recognize_torchao(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  """Returns the weight of values "0._weight_qdata"; metadata has "0.weight"."""
  module, _, leaf = values.name.rpartition(".")
  leaf = leaf.removeprefix("_").removesuffix("_qdata")
  name = f"{module}.{leaf}"
  prefix = f"{module}._{leaf}_"
  text = contents.source.metadata.get(name)
  if text is None or values.name != f"{prefix}qdata":
    return None
  where = f"{values.file}: metadata of {name!r}"
  metadata = stored.parse_object(where, text)
  kind, data = metadata.get("_type"), metadata.get("_data")
  block_size = _TORCHAO_BLOCKS.get(kind) if isinstance(kind, str) else None
  if block_size is None:
    raise stored.fault(
      values,
      f"the header's metadata says that it is a {kind} of torchao, which is"
      f" not supported; {' and '.join(_TORCHAO_BLOCKS)} are supported."
      " Dequantize it with torchao and quantize the result",
    )
  if not isinstance(data, dict) or data.get("block_size") != block_size:
    raise stored.fault(values, f"{kind} must have blocks of {block_size}")
  is_swizzled = data.get("is_swizzled_scales", False)
  if not isinstance(is_swizzled, bool):
    raise stored.fault(values, "is_swizzled_scales must be true or false")
  scale = contents.part(values, f"{prefix}scale")
  parts = (values, scale, contents.tensors.get(f"{prefix}per_tensor_scale"))
  activation = _activation(contents, TORCHAO, prefix)
  return _torchao_entry(
    *(TORCHAO, parts, is_swizzled),
    name=name,
    activation_scale=activation,
  )


def _torchao_tensors(
  name: str, array: scaled_array.ScaledArray
) -> dict[str, Any]:
  module, _, leaf = name.rpartition(".")
  prefix = f"{module}._{leaf}_"
  found: dict[str, Any] = {
    f"{prefix}qdata": array.values,
    f"{prefix}scale": array.scale,
  }
  if array.format.has_global_scale:
    count = array.shape[0] if array.ndim > 2 else 1
    scale = array.global_scale.astype(np.float32).reshape(-1)
    scale = scale.repeat(count // scale.size)
    shape = (count, 1, 1) if array.ndim > 2 else ()
    found[f"{prefix}per_tensor_scale"] = scale.reshape(shape)
  return found


def _torchao_refusal(weight: records.WeightToWrite) -> str | None:
  if weight.axis != -1:
    return "layout torchao stores k as the last dimension"
  if "." not in weight.name:
    return "layout torchao stores only names with a dot"
  return None


def _typed(kind: str, data: Any) -> dict[str, Any]:
  return {"_type": kind, "_data": data}


def _torchao_config(
  format: formats.BlockFormat, left: list[str]
) -> dict[str, Any]:
  if format.has_global_scale:
    kind = "NVFP4WeightOnlyConfig"
    data: dict[str, Any] = {"use_dynamic_per_tensor_scale": True}
  else:
    kind = "MXDynamicActivationMXWeightConfig"
    dtype = _typed("torch.dtype", _TORCHAO_VALUES[format])
    data = {
      "block_size": format.block_size,
      "activation_dtype": dtype,
      "weight_dtype": dtype,
      "kernel_preference": _typed("KernelPreference", "AUTO"),
      "scaling_mode": _typed("ScaleCalculationMode", "RCEIL"),
    }
  return {
    "quant_method": TORCHAO,
    "quant_type": {"default": {"_type": kind, "_version": 1, "_data": data}},
    "modules_to_not_convert": left,
  }


def _torchao_tensor(weight: records.WeightToWrite) -> dict[str, Any]:
  """Returns metadata of an `NVFP4Tensor` or an `MXTensor`.

  `act_quant_kwargs` is None, so activations stay unquantized.
  """
  format = weight.format
  dtype = _typed("torch.dtype", _TORCH_DTYPES[weight.type_name])
  if format.has_global_scale:
    return {
      **_typed(
        "NVFP4Tensor",
        {
          "is_swizzled_scales": False,
          "use_triton_kernel": False,
          "act_quant_kwargs": None,
          "block_size": format.block_size,
          "orig_dtype": dtype,
        },
      ),
      "_tensor_data_names": ["per_tensor_scale", "qdata", "scale"],
    }
  return {
    **_typed(
      "MXTensor",
      {
        "elem_dtype": _typed("torch.dtype", _TORCHAO_VALUES[format]),
        "block_size": format.block_size,
        "orig_dtype": dtype,
        "kernel_preference": _typed("KernelPreference", "EMULATED"),
        "act_quant_kwargs": None,
        "is_swizzled_scales": False,
      },
    ),
    "_tensor_data_names": ["qdata", "scale"],
  }


def _torchao_metadata(
  tensors: Sequence[tuple[str, records.WeightToWrite | None]],
) -> dict[str, str]:
  metadata = {
    name: json.dumps(
      {"_type": "Tensor"} if weight is None else _torchao_tensor(weight)
    )
    for name, weight in tensors
    if "." in name  # torchao's reader refuses other names
  }
  return {**metadata, "tensor_names": json.dumps([*metadata])}


# ComfyUI.


def _mark(contents: records.Contents, name: str) -> comfyui_marks.Mark | None:
  """Returns ComfyUI's mark of a weight, unless the caller names a layout."""
  if not name.endswith(names.WEIGHT):
    return None
  mark = contents.marks.find(_base(name))
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
  prefix = f"{prefix.removesuffix('.')}."
  scale = contents.part(values, f"{prefix}weight_scale")
  second = contents.tensors.get(f"{prefix}{_SECOND}")
  format = conversions.comfyui_format(_WHO, values, scale, second is not None)
  rows = _comfyui_rows(contents, values, prefix, format, mark)
  entry = _entry(
    *(COMFYUI, format),
    functools.partial(conversions.from_comfyui, rows=rows),
    (values, scale, second),
    has_range=True,
    others=() if mark is None else (mark.tensor,),
    shape=(rows, *_shape(format, values)[1:]),
    activation_scale=_activation(contents, COMFYUI, prefix),
  )
  entry = _with_rest_of_product(contents, entry, prefix, axis=-1)
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
  tile = array_layouts.SCALE_TILE_ROWS
  tiles = {blocking.divide_up(x, tile) for x in (rows, n)}
  if not 0 <= rows <= n or padded not in (n, rows) or len(tiles) != 1:
    raise stored.fault(
      values, f"its {n} rows must be {rows} rows padded, as its mark says"
    )
  return rows


def _comfyui_tensors(
  name: str, array: scaled_array.ScaledArray
) -> dict[str, Any]:
  prefix, format = _prefix(name), array.format
  scale = f"{prefix}weight_scale"
  found = _tensors(array, name, scale, f"{prefix}{_SECOND}")
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
    scale: array_layouts.swizzle_scale(jnp.asarray(found[scale])),
    f"{_base(name)}{comfyui_marks.SUFFIX}": mark,
  }


def _comfyui_metadata(
  tensors: Sequence[tuple[str, records.WeightToWrite | None]],
) -> Mapping[str, str]:
  return comfyui_marks.metadata(
    (names.module_of(weight.name), weight.format, weight.shape)
    for _, weight in tensors
    if weight is not None
  )


# DeepSeek.


def _recognize_deepseek(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  """Returns FP4 or FP8 with E8M0 scales, or values with float scales."""
  if values.dtype not in (*_VALUE_TYPES, formats.INT8):
    return None
  is_weight = values.name.endswith(names.WEIGHT)
  for leaf in _DEEPSEEK_SCALES if is_weight else ():
    scale = contents.tensors.get(f"{_prefix(values.name)}{leaf}")
    if scale is not None and scale.dtype in (formats.PACKED, formats.E8M0):
      format = conversions.deepseek_format(_WHO, values, scale)
      convert = conversions.from_deepseek
      return _entry(DEEPSEEK, format, convert, (values, scale))
  return _recognize_float_scales(contents, values)


def _deepseek_tensors(
  name: str, array: scaled_array.ScaledArray
) -> dict[str, Any]:
  scale = f"{_prefix(name)}weight_scale_inv"
  return _tensors(array, name, scale, is_typed=True)


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
  prefix = _prefix(values.name)
  for leaf, layout in _FLOAT_SCALES.items():
    scale = contents.tensors.get(f"{prefix}{leaf}")
    if scale is None or not conversions.is_scaled_by_floats(values, scale):
      continue
    is_odd = values.dtype == formats.INT8 and layout is not None
    if is_odd or f"{prefix}{_SECOND}" in contents.tensors:
      continue
    if layout is None:
      layout = MODELOPT if _is_modelopt(contents) else COMPRESSED_TENSORS
    zeros = contents.tensors.get(f"{prefix}{_ZERO_POINT}")
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
      *(_WHO, values.dtype, values.shape, scale),
      zero_dtype=None if zeros is None else zeros.dtype,
    )
    activation = f"{prefix}input_scale"
    entry = _entry(
      *(layout, format),
      functools.partial(assembly.assemble_scaled, _WHO, values.dtype),
      (values, scale, zeros),
      activation_scale=activation if activation in contents.tensors else None,
    )
    return _with_rest_of_product(contents, entry, prefix, axis=-1)
  return None


def _is_modelopt(contents: records.Contents) -> bool:
  if contents.layout is not None:
    return contents.layout == MODELOPT
  return MODELOPT in contents.tool or "hf_quant_config" in contents.tool


# Layouts that are only read.


def _recognize_words(
  contents: records.Contents, words: stored.StoredTensor, *, layout: str
) -> records.Entry | None:
  """Returns a weight of GPTQ or AWQ; None for other layouts."""
  base = words.name.removesuffix(".qweight")
  scale, zeros, order = (
    contents.tensors.get(f"{base}.{x}") for x in ("scales", "qzeros", "g_idx")
  )
  if words.dtype != packed_integers.INT32 or base == words.name:
    return None
  is_awq = scale is not None and packed_integers.is_awq(words, scale)
  if words.shape[-1:] == (0,):  # without rows, both layouts have these shapes
    is_awq = "awq" in contents.config
  if scale is None or is_awq != (layout == "awq"):
    return None
  n, k = packed_integers.word_shape(
    *(_WHO, words, scale, zeros, order), is_awq=is_awq
  )
  across = dataclasses.replace(scale, shape=scale.shape[::-1])
  is_v2 = "gptq_v2" in contents.config

  # Symmetric weights have zero points too, so their numbers decide.
  points = packed_integers.zero_points_of(
    zeros and zeros.read(), is_awq=is_awq, is_smaller=not (is_awq or is_v2)
  )
  zero_dtype = None if points is None else points.dtype
  convert: Any = functools.partial(packed_integers.from_gptq, is_v2=is_v2)
  if is_awq:
    convert = lambda x, y, z, _: packed_integers.from_awq(x, y, z)
  return _entry(
    layout,
    assembly.find_scaled_format(_WHO, formats.INT4, (n, k), across, zero_dtype),
    convert,
    (words, scale, zeros, order),
    name=f"{base}{names.WEIGHT}",
    shape=(n, k),
  )


def _recognize_mlx(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  """Returns a weight of MLX; None for affine ones of other than 4 or 8 bits."""
  base = _base(values.name)
  scales, biases = (
    contents.tensors.get(f"{base}.{x}") for x in ("scales", "biases")
  )
  if base == values.name or values.dtype != _WORDS or scales is None:
    return None
  if biases is not None:
    return _mlx_affine(contents, values, scales, biases)
  if scales.dtype != formats.PACKED:
    return None
  if (name := f"{base}.global_scale") in contents.tensors:
    raise stored.fault(
      values, f"it has the global scale {name!r} of MLX, which is not supported"
    )
  format = conversions.mlx_format(_WHO, values, scales)
  sizes = {_MLX_BITS: format.value_bits, _MLX_GROUP: format.block_size}
  given = _mlx_sizes(contents, values, str(format))
  if {**sizes, **given} != sizes:
    raise stored.fault(
      values, f"{format} must have {sizes} in config.json, got {given}"
    )
  return _entry("mlx", format, conversions.from_mlx, (values, scales))


def _mlx_sizes(
  contents: records.Contents, values: stored.StoredTensor, mode: str
) -> dict[str, int]:
  """Returns bits and group_size that MLX's configuration has for a weight.

  The settings of a layer replace those of the model. A size may be missing.

  Raises:
    CheckpointError: If a size is not a positive integer, or if the
      configuration has another mode.
  """
  own = contents.mlx.get(_base(values.name), True)
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
  sizes = {x: settings[x] for x in (_MLX_BITS, _MLX_GROUP) if x in settings}
  for name, size in sizes.items():
    if type(size) is not int or size < 1:
      raise stored.fault(
        values,
        f"its {name} in config.json must be a positive integer, got"
        f" {error_context.shown(size)}",
      )
  return sizes


def _mlx_affine(
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
  given = _mlx_sizes(contents, values, "affine")
  words, groups = (math.prod(x.shape[-1:]) for x in (values, scales))
  bits_of_group, rest = divmod(32 * words, groups or 1)
  bits, size = given.get(_MLX_BITS), given.get(_MLX_GROUP)
  if size is None:
    size = bits_of_group // bits if bits else _MLX_DEFAULT_GROUP
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
  format = conversions.mlx_affine_format(_WHO, values, scales, biases, bits)
  convert = functools.partial(conversions.from_mlx, bits=bits)
  return _entry("mlx", format, convert, (values, scales, biases))


# bitsandbytes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NestedScales:
  """Scales of scales (double quantization).

  Attributes:
    block_size: number of scales that share an f32.
    offset: f32 that is added to each scale.
  """

  block_size: int
  offset: np.float32


def _recognize_bitsandbytes(
  contents: records.Contents, values: stored.StoredTensor
) -> records.Entry | None:
  """Returns a weight of bitsandbytes; None for others."""
  name = values.name
  for kind in _BITSANDBYTES_TYPES:
    state = contents.tensors.get(f"{name}.quant_state.bitsandbytes__{kind}")
    if state is not None:
      return _read_bitsandbytes(contents, values, state, kind)
  if f"{name}.absmax" in contents.tensors:
    rule = f"'{name}.quant_state.bitsandbytes__nf4' or __fp4 must be there too"
    raise stored.fault(values, rule)
  scale = contents.tensors.get(f"{_base(name)}.SCB")
  if scale is None or not name.endswith(names.WEIGHT):
    return None
  order = contents.tensors.get(f"{_base(name)}.weight_format")
  if values.dtype != formats.INT8 or len(values.shape) != 2:
    rule = f"its values must be int8[n, k], got {assembly.brief(values)}"
    raise stored.fault(values, rule)
  _require_part(scale, formats.F32, values.shape[:1])
  if order is not None and np.any(order.read()):
    rule = "it must be 0, for rows in order, because other orders are tiled"
    raise stored.fault(order, rule)
  return _entry(
    *("bitsandbytes", formats.INT8_ROW, _from_row_maxima, (values, scale)),
    others=(order,),
  )


def _from_row_maxima(values: Any, amax: Any) -> scaled_array.ScaledArray:
  scale = amax[:, None] / np.float32(127)
  return assembly.assemble(formats.INT8_ROW, values, scale)


def _read_bitsandbytes(
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
  return _entry(
    *("bitsandbytes", format),
    functools.partial(_from_bitsandbytes, format, tuple(shape), double),
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


def _from_bitsandbytes(
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


def _recognize_gguf(
  contents: records.Contents, blocks: stored.StoredTensor
) -> records.Entry | None:
  name = blocks.type_name
  if name not in gguf_blocks.TYPES:
    return None
  format = gguf_blocks.TYPES[name].format
  scale = None
  if format == formats.NVFP4:
    base = _base(blocks.name)
    # llama.cpp's converter writes the first name, other tools the second.
    scale_names = (f"{base}.scale", f"{base}{names.WEIGHT}.scale")
    scales = [x for name in scale_names if (x := contents.tensors.get(name))]
    if len(scales) > 1:
      raise stored.fault(
        blocks,
        f"its global scale must be one tensor, got {scale_names[0]!r} and"
        f" {scale_names[1]!r}",
      )
    scale = scales[0] if scales else None
  return _entry(
    *("gguf", format),
    lambda x, y, **options: gguf_blocks.from_gguf(x, name, y, **options),
    (blocks, scale),
    has_range=True,
    shape=gguf_blocks.shape_of(_WHO, blocks, name),
  )


# The first layout that recognizes a weight reads it.
LAYOUTS: Final = (
  records.Layout(name="gguf", recognize=_recognize_gguf),
  records.Layout(name="bitsandbytes", recognize=_recognize_bitsandbytes),
  records.Layout(
    name=MODELOPT,
    recognize=_recognize_named_scales,  # and weights of other open layouts
    read=_read_modelopt,
    activation_scale=("input_scale", False),
    formats=_ALL,
    tensors=_modelopt_tensors,
    refusal=_modelopt_refusal,
    config=_modelopt_config,
    quant_config=_modelopt_file,
    shares=True,
  ),
  records.Layout(
    name=COMPRESSED_TENSORS,
    recognize=_recognize_compressed_tensors,
    read=_read_compressed_tensors,
    activation_scale=("input_global_scale", True),
    formats=(*_ALL, *_FLOAT_SCALED),
    tensors=_compressed_tensors,
    refusal=functools.partial(_matrix_refusal, COMPRESSED_TENSORS),
    config=_compressed_config,
    divides=True,
    shares=True,
  ),
  records.Layout(
    name="gpt-oss",
    recognize=_recognize_gpt_oss,
    formats=(formats.MXFP4,),
    tensors=_gpt_oss_tensors,
    refusal=_gpt_oss_refusal,
    config=_gpt_oss_config,
    transposes_stacks=True,
  ),
  records.Layout(
    name=TORCHAO,
    recognize=_recognize_torchao,
    activation_scale=("act_per_tensor_scale", False),
    formats=_ALL,
    tensors=_torchao_tensors,
    refusal=_torchao_refusal,
    config=_torchao_config,
    metadata=_torchao_metadata,
    has_scale_of_each=True,
  ),
  records.Layout(
    name=COMFYUI,
    read=_read_comfyui,
    activation_scale=("input_scale", False),
    formats=tuple(comfyui_marks.FORMATS.values()),
    tensors=_comfyui_tensors,
    refusal=functools.partial(_matrix_refusal, COMFYUI),
    metadata=_comfyui_metadata,
  ),
  records.Layout(
    name=MODELOPT_SWIZZLED,
    read=_read_modelopt_swizzled,
    activation_scale=("input_scale", False),
  ),
  records.Layout(
    name=DEEPSEEK,
    recognize=_recognize_deepseek,
    formats=(formats.FP8_128X128,),
    tensors=_deepseek_tensors,
    refusal=functools.partial(_matrix_refusal, DEEPSEEK),
    config=_deepseek_config,
  ),
  *(
    records.Layout(
      name=name, recognize=functools.partial(_recognize_words, layout=name)
    )
    for name in ("gptq", "awq")
  ),
  records.Layout(name="mlx", recognize=_recognize_mlx),
)
BY_NAME: Final = {layout.name: layout for layout in LAYOUTS}

# Layouts that may have the same names, dtypes and shapes.
OPEN_LAYOUTS: Final = tuple(x.name for x in LAYOUTS if x.read is not None)
# `quantize` uses the first one by default.
WRITTEN_LAYOUTS: Final = tuple(x.name for x in LAYOUTS if x.formats)
WRITTEN_FORMATS: Final = tuple(map(str, (*_ALL, *_FLOAT_SCALED)))


def find_written(who: str, layout: str) -> records.Layout:
  """Returns a layout that can be written.

  Raises:
    ValueError: If there is no such layout.
  """
  if layout not in WRITTEN_LAYOUTS:
    raise ValueError(
      f"{who}: layout must be one of {', '.join(WRITTEN_LAYOUTS)}, got"
      f" {layout!r}"
    )
  return BY_NAME[layout]


def require_format(
  who: str, layout: records.Layout, format: formats.BlockFormat
) -> None:
  """Raises ValueError unless a layout stores a format."""
  if format in layout.formats:
    return
  others = [x.name for x in LAYOUTS if format in x.formats]
  if not others:
    raise ValueError(
      f"{who}: format must be one that a layout stores, got {format};"
      f" choose {', '.join(WRITTEN_FORMATS)}"
    )
  raise ValueError(
    f"{who}: layout {layout.name} stores"
    f" {', '.join(map(str, layout.formats))}, got {format}; for {format} choose"
    f" layout {', '.join(others)}"
  )


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
  found = {x.name: x.activation_scale for x in LAYOUTS if x.activation_scale}
  if layout not in found:
    raise ValueError(
      f"{_SCALE_WHO}: layout must be one of {', '.join(found)}, got {layout!r}"
    )
  return _multiplier(scale, found[layout][1])


def read_activation_scale(
  entry: records.Entry, scale: stored.StoredTensor
) -> jax.Array:
  """Returns f32[] that multiplies, of the tensor `entry.activation_scale`.

  The `input_scale` of FP8 and INT8 multiplies in each layout.
  """
  assert entry.layout is not None
  leaf, divides = BY_NAME[entry.layout].activation_scale or ("", False)
  return _multiplier(scale.read(), divides and scale.name.endswith(leaf))


def _multiplier(scale: Any, divides: bool) -> jax.Array:
  if not isinstance(scale, float):
    assembly.require_arrays(_SCALE_WHO, {"scale": scale})
  given = jnp.asarray(scale)
  if given.size != 1 or not jnp.issubdtype(given.dtype, jnp.floating):
    raise TypeError(
      f"{_SCALE_WHO}: scale must be one float, got {assembly.brief(given)}"
    )
  given = given.astype(jnp.float32).reshape(())
  return 1 / given if divides else given
