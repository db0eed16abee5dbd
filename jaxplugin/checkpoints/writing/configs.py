# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What each layout's own tool says of its weights in a folder's JSON files.

Weights alone are quantized here, and so it is said where a layout has a word
for it. Not ModelOpt's MX formats, which engines take with both sides quantized.

Sources: `hf_quant_config.json` and its conversion of NVIDIA Model Optimizer
0.47; the schemes NVFP4A16, MXFP8A16 and MXFP4A16 of compressed-tensors 0.20;
`Mxfp4Config` and `TorchAoConfig` of transformers 5, with configurations of
torchao 0.18. ComfyUI reads no JSON file: the weights' own file says it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

from jaxplugin.checkpoints import recognition
from jaxplugin.checkpoints.signs import comfyui
from jaxplugin.checkpoints.writing import layouts
from jaxplugin.checkpoints.writing import selection
from jaxplugin.checkpoints.writing import sources
from jaxplugin.core import formats

# Whose rules these are; engines look at the name. `written_by` is ours.
_PRODUCER: Final = {
  "name": "modelopt",
  "version": "0.47.0",
  "written_by": "jaxplugin",
}
_COMPRESSED_VERSION: Final = "0.20.0"
# Left as it is where it is there, and where it is an embedding's other name.
_HEAD: Final = "lm_head"
_TORCH_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_TORCHAO_VALUES: Final = {
  formats.NVFP4: "float4_e2m1fn_x2",
  formats.MXFP4: "float4_e2m1fn_x2",
  formats.MXFP8: "float8_e4m3fn",
}


def left_modules(decisions: Iterable[selection.Decision]) -> list[str]:
  """Modules whose weights stay as they are, and the head."""
  taken = {
    selection.module_of(x.tensor.name)
    for x in decisions
    if x.weight is not None
  }
  left = {
    selection.module_of(x.tensor.name)
    for x in decisions
    if x.weight is None
    and len(x.tensor.shape) > 1
    and not x.tensor.name.endswith("bias")
  }
  if _HEAD not in taken:
    left.add(_HEAD)
  return sorted(left - taken)


def files(
  layout: str,
  format: formats.BlockFormat,
  decisions: Sequence[selection.Decision],
  config: Mapping[str, Any] | None,
) -> dict[str, dict[str, Any]]:
  """Objects of the JSON files that say how weights are quantized, by name."""
  left = left_modules(decisions)
  made = {sources.CONFIG: {**(config or {})}}
  if layout == recognition.MODELOPT:
    made[sources.QUANT_CONFIG] = _hf_quant_config(format, left)
  if layout in _CONFIGS:
    made[sources.CONFIG][sources.QUANTIZATION] = _CONFIGS[layout](format, left)
  return made


def metadata(
  layout: str, decisions: Iterable[selection.Decision]
) -> dict[str, str]:
  """Returns what a safetensors file says of its tensors."""
  if layout == recognition.COMFYUI:
    weights = [x.weight for x in decisions if x.weight is not None]
    return comfyui.metadata(
      (selection.module_of(x.name), x.format, x.shape) for x in weights
    )
  if layout != recognition.TORCHAO:
    return {}
  told: dict[str, str] = {}
  for decision in decisions:
    name = decision.tensor.name
    if "." not in name:
      continue  # its reader cannot have such names, and hands them through
    if decision.weight is None:
      told[name] = json.dumps({"_type": "Tensor"})
    else:
      told[name] = json.dumps(_torchao_tensor(decision.weight))
  return {**told, "tensor_names": json.dumps([*told])}


def _modelopt_quantization(format: formats.BlockFormat) -> dict[str, Any]:
  if format == formats.NVFP4:
    return {"quant_algo": "W4A16_NVFP4", "group_size": format.block_size}
  if format == formats.MXFP8:
    return {"quant_algo": "MXFP8", "group_size": format.block_size}
  return {"quant_algo": str(format)}


def _hf_quant_config(
  format: formats.BlockFormat, left: list[str]
) -> dict[str, Any]:
  return {
    "producer": dict(_PRODUCER),
    "quantization": {
      **_modelopt_quantization(format),
      "kv_cache_quant_algo": None,
      "exclude_modules": left,
    },
  }


def _modelopt(format: formats.BlockFormat, left: list[str]) -> dict[str, Any]:
  made: dict[str, Any] = {}
  if format == formats.NVFP4:
    weights = {
      "dynamic": False,
      "num_bits": format.value_bits,
      "type": "float",
      "group_size": format.block_size,
    }
    made["config_groups"] = {
      "group_0": {"weights": weights, "targets": ["Linear"]}
    }
  return {
    **made,
    "ignore": left,
    "quant_algo": _modelopt_quantization(format)["quant_algo"],
    "producer": dict(_PRODUCER),
    "quant_method": recognition.MODELOPT,
  }


def _compressed_tensors(
  format: formats.BlockFormat, left: list[str]
) -> dict[str, Any]:
  is_mx = not format.has_global_scale
  word = f"{format}-{'pack-' if format.is_fp4 else ''}quantized"
  return {
    "version": _COMPRESSED_VERSION,
    "quant_method": recognition.COMPRESSED_TENSORS,
    "sparsity_config": {},
    "transform_config": {},
    "config_groups": {
      "group_0": {
        "targets": ["Linear"],
        "weights": {
          "num_bits": format.value_bits,
          "type": "float",
          "symmetric": True,
          "group_size": format.block_size,
          "strategy": "group" if is_mx else "tensor_group",
          "dynamic": False,
          "scale_dtype": "torch.uint8" if is_mx else "torch.float8_e4m3fn",
        },
        "input_activations": None,
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


def _gpt_oss(format: formats.BlockFormat, left: list[str]) -> dict[str, Any]:
  return {"quant_method": str(format), "modules_to_not_convert": left}


def _typed(kind: str, data: Any) -> dict[str, Any]:
  return {"_type": kind, "_data": data}


def _torchao(format: formats.BlockFormat, left: list[str]) -> dict[str, Any]:
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
    "quant_method": recognition.TORCHAO,
    "quant_type": {"default": {"_type": kind, "_version": 1, "_data": data}},
    "modules_to_not_convert": left,
  }


def _torchao_tensor(weight: layouts.Weight) -> dict[str, Any]:
  """`NVFP4Tensor` or `MXTensor`, of weights alone: without act_quant_kwargs."""
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


_CONFIGS: Final[
  Mapping[str, Callable[[formats.BlockFormat, list[str]], dict[str, Any]]]
] = {
  recognition.MODELOPT: _modelopt,
  recognition.COMPRESSED_TENSORS: _compressed_tensors,
  recognition.GPT_OSS: _gpt_oss,
  recognition.TORCHAO: _torchao,
}
