# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares `checkpoints.quantize` with the tools that own each layout.

    python tools/checkpoint_references.py

writes jaxplugin/checkpoints/writing/references_test.json. It uses these tools,
which tests do not need: pip install jax==0.10.2 torch==2.13 torchao==0.18
compressed-tensors==0.20 nvidia-modelopt==0.47 transformers==5.23 safetensors.
For each layout and format the file has the tensors that jaxplugin writes for a
weight, and the numbers that the tool reads from them. If the tool writes other
tensors for the weight, the file has these and their numbers too.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Final

import compressed_tensors
import modelopt
import torch
import torchao
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4 import helpers as ct_helpers
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization import utils as ct_utils
from compressed_tensors.quantization.lifecycle import forward as ct_forward
from modelopt.torch.quantization import qtensor
from safetensors import safe_open
from safetensors import torch as safetensors_torch
from torchao.prototype.mx_formats import config as ao_config
from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
from torchao.prototype.safetensors import safetensors_support as ao_files
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROOT: Final = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jaxplugin as jp  # noqa: E402

REFERENCES: Final = ROOT / "jaxplugin/checkpoints/writing/references_test.json"
N, K = 2, 64
WEIGHT, EXPERTS = "0.weight", "mlp.experts.gate_up_proj"
FORMATS: Final = ("nvfp4", "mxfp8", "mxfp4")
Tensors = dict[str, torch.Tensor]


def weight() -> torch.Tensor:
  """Returns a bf16[N, K] weight with many magnitudes."""
  i = torch.arange(N * K)
  numbers = (i * 37 % 101 - 50) / 1024 * torch.exp2(-(i // 16 % 5).float())
  return numbers.reshape(N, K).bfloat16()


def raw(tensor: torch.Tensor) -> dict[str, Any]:
  data = tensor.detach().contiguous().reshape(-1)
  if data.dtype != torch.uint8:
    data = data.view(torch.uint8)
  return {
    "dtype": str(tensor.dtype).removeprefix("torch."),
    "shape": list(tensor.shape),
    "hex": data.numpy().tobytes().hex(),
  }


def written(
  folder: pathlib.Path, layout: str, format: str, tensors: Tensors
) -> tuple[Tensors, dict[str, str], dict[str, Any]]:
  """Returns jaxplugin's tensors, metadata and quantization_config."""
  source = folder / f"{layout}.{format}.{EXPERTS in tensors}"
  source.mkdir()
  safetensors_torch.save_file(tensors, source / "model.safetensors")
  target = source.with_name(f"out.{source.name}")
  transposed = [EXPERTS] if EXPERTS in tensors else []
  jp.checkpoints.quantize(
    source, target, format, layout=layout, transposed=transposed
  )
  with safe_open(target / "model.safetensors", "pt") as file:
    metadata = file.metadata() or {}
    parts = {name: file.get_tensor(name) for name in file.offset_keys()}
  config = json.loads((target / "config.json").read_text())
  return parts, metadata, config["quantization_config"]


def fact(
  tool: str,
  ours: Tensors,
  read: Callable[[Tensors], torch.Tensor],
  theirs: Tensors | None = None,
  metadata: dict[str, str] | None = None,
) -> dict[str, Any]:
  made: dict[str, Any] = {
    "tool": tool,
    "ours": {name: raw(x) for name, x in ours.items()},
    "reading": raw(read(ours).float()),
  }
  theirs_raw = {name: raw(x) for name, x in (theirs or {}).items()}
  if theirs is not None and theirs_raw != made["ours"]:
    made["theirs"] = theirs_raw
    made["reading_of_theirs"] = raw(read(theirs).float())
    if metadata:
      made["metadata"] = metadata
  made["same"] = theirs is not None and "theirs" not in made
  return made


def of_torchao(folder: pathlib.Path, format: str) -> dict[str, Any]:
  x = weight()
  ours, metadata, _ = written(folder, "torchao", format, {WEIGHT: x})
  if format == "nvfp4":
    scale = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    made = nvfp4_tensor.NVFP4Tensor.to_nvfp4(
      x, per_tensor_scale=scale, is_swizzled_scales=True
    )
  else:
    made = mx_tensor.MXTensor.to_mx(
      x,
      torch.float8_e4m3fn if format == "mxfp8" else torch.float4_e2m1fn_x2,
      scaling_mode=ao_config.ScaleCalculationMode.RCEIL,
    )
  theirs, told = ao_files.flatten_tensor_state_dict({WEIGHT: made})

  def read(parts: Tensors) -> torch.Tensor:
    of = told if parts is theirs else metadata
    tensors, left = ao_files.unflatten_tensor_state_dict(parts, of)
    assert not left
    return tensors[WEIGHT].dequantize(torch.float32)

  return fact(f"torchao {torchao.__version__}", ours, read, theirs, told)


def of_compressed_tensors(folder: pathlib.Path, format: str) -> dict[str, Any]:
  x = weight()
  ours, _, config = written(folder, "compressed-tensors", format, {WEIGHT: x})
  parsed = QuantizationConfig.model_validate(config)
  scheme = parsed.config_groups["group_0"]
  compressor = BaseCompressor.get_value_from_registry(parsed.format)
  largest = x.float().abs().max().reshape(1)
  divisor = None
  if format == "nvfp4":
    divisor = ct_utils.generate_gparam(-largest, largest)
  blocks = x.float().reshape(N, -1, scheme.weights.group_size)
  scale, _ = ct_utils.calculate_qparams(
    blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor
  )
  state = {"weight": x, "weight_scale": scale}
  if divisor is not None:
    state["weight_global_scale"] = divisor
  theirs = {f"0.{n}": t for n, t in compressor.compress(state, scheme).items()}

  def read(parts: Tensors) -> torch.Tensor:
    # The tool's decompress() rounds to bf16 first.
    if "0.weight_packed" in parts:
      values = ct_helpers.unpack_fp4_from_uint8(
        parts["0.weight_packed"], N, K, dtype=torch.float32
      )
    else:
      values = parts[WEIGHT].float()
    scales = parts["0.weight_scale"]
    if scales.dtype == torch.uint8:
      scales = decompress_mx_scale(scales)
    return ct_forward.dequantize(
      x_q=values,
      scale=scales.float(),
      args=scheme.weights,
      global_scale=parts.get("0.weight_global_scale"),
      dtype=torch.float32,
    )

  version = compressed_tensors.__version__
  return fact(f"compressed-tensors {version}", ours, read, theirs)


def modelopt_numbers(parts: Tensors, name: str, shape: tuple[int, ...]) -> Any:
  prefix = "0." if name == WEIGHT else f"{name}_"
  values, scale = parts[name], parts[f"{prefix}weight_scale"]
  second = parts.get(f"{prefix}weight_scale_2")
  size = torch.Size(shape)
  if second is not None:
    made = qtensor.NVFP4QTensor(size, torch.float32, values)
    more = {"double_scale": second, "block_sizes": {-1: 16}}
  elif values.dtype == torch.uint8:
    made = qtensor.MXFP4QTensor(size, torch.float32, values)
    scale, more = scale.reshape(-1, 1), {"block_sizes": {-1: 32}}
  else:
    made, more = qtensor.MXFP8QTensor(size, torch.float32, values), {}
  return made.dequantize(dtype=torch.float32, scale=scale, **more)


def of_modelopt(folder: pathlib.Path, format: str) -> dict[str, Any]:
  x = weight()
  ours, _, _ = written(folder, "modelopt", format, {WEIGHT: x})
  second = None
  if format == "nvfp4":
    second = qtensor.NVFP4QTensor.get_weights_scaling_factor_2(x)
    made, scale, _ = qtensor.NVFP4QTensor.quantize(x, 16, None, second)
  elif format == "mxfp4":
    made, scale = qtensor.MXFP4QTensor.quantize(x, 32)
  else:
    made, scale = qtensor.MXFP8QTensor.quantize(x)
  theirs = {
    WEIGHT: made._quantized_data,
    "0.weight_scale": scale.reshape(N, -1),
  }
  if second is not None:
    theirs["0.weight_scale_2"] = second
  return fact(
    f"nvidia-modelopt {modelopt.__version__}",
    ours,
    lambda parts: modelopt_numbers(parts, WEIGHT, (N, K)),
    theirs,
  )


def experts() -> torch.Tensor:
  """Returns bf16[2, K, N] weights of two experts."""
  x = weight().T
  return torch.stack([x, 3 * x.flip(0)])


def of_modelopt_experts(folder: pathlib.Path) -> dict[str, Any]:
  """Quantizes experts like ModelOpt's export: transposed, then back."""
  x = experts()
  ours, _, _ = written(folder, "modelopt", "nvfp4", {EXPERTS: x})
  tensor = qtensor.NVFP4QTensor
  turned = x.transpose(-1, -2).contiguous()
  second = tensor.get_weights_scaling_factor_2(x)
  scale = tensor.get_weights_scaling_factor(
    turned, block_size=16, weights_scaling_factor_2=second
  )[0]
  values = tensor.quantize(turned, 16, scale, second)[0]._quantized_data
  theirs = {
    EXPERTS: values.transpose(-1, -2),
    f"{EXPERTS}_weight_scale": scale.transpose(-1, -2),
    f"{EXPERTS}_weight_scale_2": second,
  }

  def read(parts: Tensors) -> torch.Tensor:
    back = {
      name: part.transpose(-1, -2).contiguous() if part.ndim else part
      for name, part in parts.items()
    }
    numbers = modelopt_numbers(back, EXPERTS, (2, N, K))
    return numbers.transpose(-1, -2)

  return fact(f"nvidia-modelopt {modelopt.__version__}", ours, read, theirs)


def of_gpt_oss(folder: pathlib.Path) -> dict[str, Any]:
  ours, _, _ = written(folder, "gpt-oss", "mxfp4", {EXPERTS: experts()})
  return fact(
    f"transformers {transformers.__version__}",
    ours,
    # The model has [E, k, n]; files have [E, n, k].
    lambda parts: convert_moe_packed_tensors(
      parts[f"{EXPERTS}_blocks"],
      parts[f"{EXPERTS}_scales"],
      dtype=torch.float32,
    ).transpose(-1, -2),
  )


def main() -> None:
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    facts = {
      "weight": raw(weight()),
      "experts": raw(experts()),
      "modelopt nvfp4 experts": of_modelopt_experts(folder),
      "gpt-oss mxfp4 experts": of_gpt_oss(folder),
    }
    for format in FORMATS:
      facts[f"torchao {format}"] = of_torchao(folder, format)
      facts[f"compressed-tensors {format}"] = of_compressed_tensors(
        folder, format
      )
      facts[f"modelopt {format}"] = of_modelopt(folder, format)
  REFERENCES.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
  main()
