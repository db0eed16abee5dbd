# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of torchao.

Sources: `NVFP4Tensor` and `MXTensor` of torchao 0.18, with its configurations;
`TorchAoConfig` of transformers 5.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.checkpoints import assembly, entries, records, stored
from jaxplugin.core import error_context, formats

NAME: Final = "torchao"
_ACTIVATION: Final = "act_per_tensor_scale"
_BLOCKS: Final = {
  "NVFP4Tensor": formats.NVFP4.block_size,
  "MXTensor": formats.MXFP4.block_size,
}
_VALUES: Final = {
  formats.NVFP4: "float4_e2m1fn_x2",
  formats.MXFP4: "float4_e2m1fn_x2",
  formats.MXFP8: "float8_e4m3fn",
}
_TORCH_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


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
  error_context.require_bool(who, "is_swizzled", is_swizzled)
  name = "per_tensor_scale"
  second = assembly.GlobalScale(who, name, per_tensor_scale, global_scale_range)
  if not is_swizzled:
    return assembly.from_linear(qdata, scale, second, is_optional=True)
  format = _find_format(who, qdata, scale, is_swizzled)
  assembly.require_no_global(second, format)
  scale = scale.reshape(assembly.swizzled_shape(format, qdata))
  return assembly.assemble(format, qdata, scale, second, is_swizzled=True)


def _find_format(
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
  for format in assembly.FORMATS if rows else ():
    # With padding, two formats may have as many scales. Bytes mean E8M0 then.
    if format.has_global_scale and scale.dtype == formats.PACKED:
      continue
    if assembly.fits_swizzled(format, qdata, scale):
      return format
  raise TypeError(
    f"{who}: qdata and a swizzled scale, padded to 128 rows and 4 columns,"
    f" must fit one format, got {assembly.brief(qdata)} and"
    f" {assembly.brief(scale)}"
  )


def entry(
  layout: str,
  parts: tuple[
    stored.StoredTensor, stored.StoredTensor, stored.StoredTensor | None
  ],
  is_swizzled: bool,
  **fields: Any,
) -> records.Entry:
  """Returns a weight that `from_torchao` converts."""
  format = _find_format(entries.WHO, *parts[:2], is_swizzled)
  convert = functools.partial(from_torchao, is_swizzled=is_swizzled)
  return entries.entry(layout, format, convert, parts, has_range=True, **fields)


def _recognize(
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
  block_size = _BLOCKS.get(kind) if isinstance(kind, str) else None
  if block_size is None:
    raise stored.fault(
      values,
      f"the header's metadata says that it is a {kind} of torchao, which is"
      f" not supported; {' and '.join(_BLOCKS)} are supported."
      " Dequantize it with torchao and quantize the result",
    )
  if not isinstance(data, dict) or data.get("block_size") != block_size:
    raise stored.fault(values, f"{kind} must have blocks of {block_size}")
  is_swizzled = data.get("is_swizzled_scales", False)
  if not isinstance(is_swizzled, bool):
    raise stored.fault(values, "is_swizzled_scales must be true or false")
  scale = contents.part(values, f"{prefix}scale")
  parts = (values, scale, contents.tensors.get(f"{prefix}per_tensor_scale"))
  return entry(
    *(NAME, parts, is_swizzled),
    name=name,
    activation_scale=contents.existing(f"{prefix}{_ACTIVATION}"),
  )


def _tensors(name: str, array: scaled_array.ScaledArray) -> dict[str, Any]:
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


def _refusal(decision: records.TensorDecision) -> str | None:
  if decision.axis != -1:
    return (
      "layout torchao stores k as the last dimension; transpose the weight, or"
      " choose another layout"
    )
  if "." not in decision.tensor.name:
    return (
      "layout torchao stores only names with a dot; name it"
      f" '{decision.tensor.name}.weight', or choose another layout"
    )
  return None


def _typed(kind: str, data: Any) -> dict[str, Any]:
  return {"_type": kind, "_data": data}


def _config(format: formats.BlockFormat, left: list[str]) -> dict[str, Any]:
  if format.has_global_scale:
    kind = "NVFP4WeightOnlyConfig"
    data: dict[str, Any] = {"use_dynamic_per_tensor_scale": True}
  else:
    kind = "MXDynamicActivationMXWeightConfig"
    dtype = _typed("torch.dtype", _VALUES[format])
    data = {
      "block_size": format.block_size,
      "activation_dtype": dtype,
      "weight_dtype": dtype,
      "kernel_preference": _typed("KernelPreference", "AUTO"),
      "scaling_mode": _typed("ScaleCalculationMode", "RCEIL"),
    }
  return {
    "quant_method": NAME,
    "quant_type": {"default": {"_type": kind, "_version": 1, "_data": data}},
    "modules_to_not_convert": left,
  }


def _tensor_metadata(decision: records.TensorDecision) -> dict[str, Any]:
  """Returns metadata of a copied tensor, `NVFP4Tensor` or `MXTensor`.

  `act_quant_kwargs` is None, so activations stay unquantized.
  """
  format = decision.format
  if format is None:
    return {"_type": "Tensor"}
  dtype = _typed("torch.dtype", _TORCH_DTYPES[decision.tensor.type_name])
  data: dict[str, Any] = {
    "block_size": format.block_size,
    "orig_dtype": dtype,
    "act_quant_kwargs": None,
    "is_swizzled_scales": False,
  }
  if format.has_global_scale:
    kind, parts = "NVFP4Tensor", ["per_tensor_scale", "qdata", "scale"]
    data["use_triton_kernel"] = False
  else:
    kind, parts = "MXTensor", ["qdata", "scale"]
    data["elem_dtype"] = _typed("torch.dtype", _VALUES[format])
    data["kernel_preference"] = _typed("KernelPreference", "EMULATED")
  return {**_typed(kind, data), "_tensor_data_names": parts}


def _metadata(decisions: Sequence[records.TensorDecision]) -> dict[str, str]:
  metadata = {
    x.tensor.name: json.dumps(_tensor_metadata(x))
    for x in decisions
    if "." in x.tensor.name  # torchao's reader refuses other names
  }
  return {**metadata, "tensor_names": json.dumps([*metadata])}


LAYOUT: Final = records.Layout(
  name=NAME,
  recognize=_recognize,
  activation_scale=(_ACTIVATION, False),
  formats=entries.ALL,
  tensors=_tensors,
  refusal=_refusal,
  config=_config,
  metadata=_metadata,
  has_scale_of_each=True,
)
