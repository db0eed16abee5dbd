# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares FP8 and integer formats with the packages that define them.

    python tools/block_references.py [GGML_FOLDER]

prints how many scales and values of `jp.quantize` have the bits of the package,
and the reason of a difference. Tests do not need these packages: pip install
jax==0.10.2 torch==2.13 torchao==0.18 compressed-tensors==0.20 gguf==0.19.
GGML_FOLDER has llama.cpp's libraries, and adds its quantizer and its matmul:
npm pack @node-llama-cpp/linux-x64@3.22.1, folder package/bins/linux-x64.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any, Final, NamedTuple

import compressed_tensors
import gguf
import ml_dtypes
import numpy as np
import torch
import torchao
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization import utils as ct_utils
from compressed_tensors.quantization.lifecycle import forward as ct_forward
from torchao.quantization import quant_primitives as ao

ROOT: Final = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jaxplugin as jp  # noqa: E402
from jaxplugin.lab.bench.libraries import ggml_dot  # noqa: E402

M, N, K = 16, 256, 1024
E4M3: Final = torch.float8_e4m3fn


class Comparison(NamedTuple):
  """Parts of a quantized weight, from a package and from jaxplugin."""

  format: str
  package: str
  scales: str
  values: str
  offsets: str  # zero points or minima
  error: float  # the largest difference of the numbers, in steps of a block
  reason: str


def weight() -> np.ndarray:
  """Returns f32[N, K]: blocks of many magnitudes, of zeros, and with ties."""
  draw = np.random.default_rng(0)
  x = draw.standard_normal((N, K), np.float32) / 50
  x *= np.exp2(draw.integers(-8, 8, (N, K // 32))).repeat(32, 1)
  x[3, :128], x[5, :512] = 0, np.arange(512) / 64
  return x.astype(np.float32)


def same(ours: Any, theirs: Any) -> str:
  a, b = (np.asarray(x, np.float32).reshape(-1) for x in (ours, theirs))
  assert a.size == b.size, (a.size, b.size)
  return f"{int((a == b).sum())} of {a.size}"


def compare(
  format: str,
  package: str,
  scale: Any,
  values: Any,
  reason: str = "",
  offset: Any = None,
  rule: str = "up",
) -> Comparison:
  """Compares the parts of a package with those of jaxplugin.

  Args:
    format: the format that jaxplugin quantizes to.
    package: the package's name.
    scale, values: its scales, and its values or codes.
    reason: why parts differ.
    offset: its zero points or minima.
    rule: `scale_rounding` of `jp.quantize`.
  """
  x_q = jp.quantize(weight(), format, scale_rounding=rule).unpack()
  scale, values = (np.asarray(x, np.float32) for x in (scale, values))
  scale = scale.reshape(x_q.scale.shape)
  numbers = [values, scale]
  if offset is not None:
    numbers.append(np.asarray(offset, np.float32).reshape(scale.shape))
  for i, part in enumerate(numbers[1:], 1):
    for axis, size in enumerate(values.shape):
      part = part.repeat(-(-size // part.shape[axis]), axis)
    numbers[i] = part[:N, :K]
  codes, steps, *offsets = numbers
  if not offsets:
    theirs = codes * steps
  elif x_q.format.has_zero_points:
    theirs = (codes - offsets[0]) * steps
  else:
    theirs = codes * steps + offsets[0]
  with np.errstate(divide="ignore", invalid="ignore"):
    error = np.abs(np.asarray(jp.dequantize(x_q)) - theirs)
    error /= np.where(steps, steps, 1)
  ours = np.asarray(x_q.values, np.float32) + x_q.format.code_offset
  return Comparison(
    format=format,
    package=package,
    scales=same(x_q.scale, scale),
    values=same(ours, values),
    offsets="-" if offset is None else same(x_q.offset, offset),
    error=float(np.nanmax(error)),
    reason=reason,
  )


def of_compressed_tensors() -> list[Comparison]:
  """Compares with `calculate_qparams` and `quantize`."""
  package = f"compressed-tensors {compressed_tensors.__version__}"
  x = torch.from_numpy(weight())
  found = []
  for format, options, dtype, reason in (
    ("fp8_row", {"num_bits": 8, "type": "float"}, torch.float32, ""),
    ("int8_row", {"num_bits": 8}, torch.float32, ""),
    (
      "int4_128",
      {"num_bits": 4},
      torch.float16,
      "a block of zeros has another scale",
    ),
    (
      "uint4_128",
      {"num_bits": 4, "symmetric": False},
      torch.float16,
      "a block of zeros has another scale and zero point",
    ),
    (
      "fp8_128x128",
      {"num_bits": 8, "type": "float", "block_structure": [128, 128]},
      torch.float32,
      "",
    ),
  ):
    strategy, blocks = "channel", x
    if "int4_128" in format:
      strategy, blocks = "group", x.reshape(N, -1, 128)
      options = {**options, "group_size": 128}
    elif "block_structure" in options:
      strategy = "block"
      blocks = x.reshape(N // 128, 128, K // 128, 128).permute(0, 2, 1, 3)
      blocks = blocks.reshape(N // 128, K // 128, -1)
    args = QuantizationArgs(
      **{"symmetric": True, **options, "strategy": strategy}
    )
    scale, zeros = ct_utils.calculate_qparams(
      blocks.amin(-1, keepdim=strategy == "channel"),
      blocks.amax(-1, keepdim=strategy == "channel"),
      args,
    )
    scale = scale.to(dtype)
    values = ct_forward.quantize(
      x, scale.float(), zeros, args, dtype=torch.float32
    )
    offset = None
    if not args.symmetric:  # codes from -8 to 7
      values, offset = values + 8, zeros.float() + 8
    rule = "compressed_tensors" if format.startswith("int") else "up"
    found.append(
      compare(format, package, scale.float(), values, reason, offset, rule)
    )
  return found


def of_torchao() -> list[Comparison]:
  """Compares with `choose_qparams_affine` and float8's functions."""
  package = f"torchao {torchao.__version__}"
  x = torch.from_numpy(weight())
  found = []
  for format, block, dtype, limits in (
    ("int8_row", (1, K), torch.float32, (-127, 127)),
    ("int8_32", (1, 32), torch.float16, (-127, 127)),
    ("int4_128", (1, 128), torch.float16, (-7, 7)),
  ):
    scale, zeros = ao.choose_qparams_affine(
      *(x, ao.MappingType.SYMMETRIC, block, torch.int8, *limits),
      eps=torch.finfo(torch.float32).tiny,
      scale_dtype=dtype,
    )
    values = ao.quantize_affine(
      *(x, block, scale.float(), zeros, torch.int8, *limits)
    )
    found.append(
      compare(
        *(format, package, scale.float(), values),
        f"with values from {limits[0]} to {limits[1]}",
      )
    )
  block = (1, 128)
  scale, zeros = ao.choose_qparams_affine(
    *(x, ao.MappingType.ASYMMETRIC, block, torch.uint8, 0, 15),
    eps=torch.finfo(torch.float32).tiny,
    scale_dtype=torch.float16,
  )
  values = ao.quantize_affine(
    *(x, block, scale.float(), zeros, torch.uint8, 0, 15)
  )
  found.append(
    compare(
      *("uint4_128", package, scale.float(), values),
      reason="blocks of zeros have another zero point",
      offset=zeros,
    )
  )
  for format, block in (
    ("fp8_row", (1, K)),
    ("fp8_1x128", (1, 128)),
    ("fp8_128x128", (128, 128)),
  ):
    scale = ao._choose_scale_float8(x, block, E4M3)
    values = ao._quantize_affine_float8(x, scale, E4M3)
    found.append(
      compare(
        *(format, package, scale, values.float()),
        "values of a block of zeros are NaN" if format == "fp8_1x128" else "",
      )
    )
  return found


def of_deepseek() -> list[Comparison]:
  """Compares with DeepSeek-V3's `act_quant`, and its `weight_dequant`.

  Source: inference/kernel.py of DeepSeek-V3 and, with power-of-two scales,
  DeepSeek-V3.1.
  """
  x = torch.from_numpy(weight())
  found = []
  for format, round_scale in (("fp8_1x128", False), ("fp8_1x128_e8m0", True)):
    blocks = x.reshape(N, -1, 128)
    scale = blocks.abs().amax(-1) / 448.0
    if round_scale:
      scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (blocks / scale[..., None]).nan_to_num().to(E4M3).float()
    found.append(
      compare(
        *(format, "DeepSeek act_quant", scale, values.reshape(N, K)),
        "E8M0 has no 0; a block of zeros has the scale 2^-127"
        if round_scale
        else "",
      )
    )
  draw = np.random.default_rng(1)
  codes = draw.integers(0, 127, (N, K), np.uint8).view(ml_dtypes.float8_e4m3fn)
  scales = draw.random((N // 128, K // 128), np.float32)
  w_q = jp.checkpoints.from_deepseek(codes, scales)
  wide = scales.repeat(128, 0).repeat(128, 1)
  wanted = codes.astype(np.float32) * wide
  found.append(
    Comparison(
      *("fp8_128x128", "DeepSeek weight_dequant", "-"),
      *(same(jp.dequantize(w_q), wanted), "-"),
      float(np.abs(np.asarray(jp.dequantize(w_q)) - wanted).max()),
      "numbers instead of values",
    )
  )
  return found


# jaxplugin's format and rule of each type.
GGML: Final = {
  "Q8_0": ("int8_32", "ggml"),
  "Q4_0": ("int4_32", "ggml"),
  "Q4_1": ("uint4_32_min", "up"),
}


def of_ggml(folder: str) -> tuple[list[Comparison], list[str]]:
  """Compares blocks and matmuls with ggml's."""
  os.environ[ggml_dot.DIRECTORY] = folder
  ggml = ggml_dot.Ggml(threads=1)
  x = np.random.default_rng(2).standard_normal((M, K)).astype(np.float32)
  found, lines = [], []
  for name, (format, rule) in GGML.items():
    kind = gguf.GGMLQuantizationType[name]
    blocks = ggml.quantize(weight(), kind)
    w_q = jp.checkpoints.from_gguf(blocks, name)
    theirs = gguf.dequantize(blocks, kind)
    numbers = np.asarray(jp.dequantize(w_q))
    assert (numbers == theirs).all(), name
    parts = w_q.unpack()
    codes = np.asarray(parts.values, np.float32) + parts.format.code_offset
    found.append(
      compare(
        *(format, f"ggml {name}", parts.scale, codes, "", parts.offset, rule)
      )
    )
    exact = x.astype(np.float64) @ theirs.astype(np.float64).T
    sums = np.abs(x).astype(np.float64) @ np.abs(theirs).astype(np.float64).T

    def error(y: Any, exact: Any = exact, sums: Any = sums) -> str:
      return f"{float((np.abs(np.asarray(y) - exact) / sums).max()):.1e}"

    x_q = jp.quantize(x, "int8_32")
    run, result = ggml.products(x, blocks, kind)
    run(0)
    lines.append(
      f"{name}: largest error over sum |x * w|: ggml"
      f" {error(result())}, jp.linear(f32)"
      f" {error(jp.linear(x, w_q))}, jp.linear(int8_32)"
      f" {error(jp.linear(x_q, w_q))}"
    )
  return found, lines


def main(arguments: list[str]) -> None:
  found = [*of_compressed_tensors(), *of_torchao(), *of_deepseek()]
  lines: list[str] = []
  if arguments:
    more, lines = of_ggml(arguments[0])
    found += more
  for row in found:
    print(
      f"{row.format:16}{row.package:26} scales {row.scales:16} values"
      f" {row.values:18} offsets {row.offsets:14} error {row.error:.3g}"
      f"  {row.reason}"
    )
  for line in lines:
    print(line)


if __name__ == "__main__":
  main(sys.argv[1:])
