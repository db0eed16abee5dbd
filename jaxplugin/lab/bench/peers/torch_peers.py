# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Peers in PyTorch: bf16 `linear`, and torchao's MX and NVFP4.

torch    `torch.nn.functional.linear` of bf16 operands.
torchao  `torch.mm` of two `MXTensor`s or `NVFP4Tensor`s (without a global
         scale), which torchao quantizes. On a CPU, and on a GPU before
         Blackwell, torchao dequantizes both tensors at every call.

Both peers return bf16. torch and torchao are imported at their first use.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.core import formats
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.bench.peers import operand_sets
from jaxplugin.lab.bench.peers import variants
from jaxplugin.lab.bench.peers import verification

NAMES: Final = ("torch", "torchao")

# torch's dtype names of the formats that `MXTensor` supports.
_MX_DTYPES: Final = {
  formats.MXFP8: "float8_e4m3fn",
  formats.MXFP8_E5M2: "float8_e5m2",
  formats.MXFP4: "float4_e2m1fn_x2",
}
_BLACKWELL: Final = (10, 0)


def variant(
  name: str,
  row: workloads.BenchRow,
  pair: workloads.Pair,
  data: operand_sets.DotOperands,
  is_gpu: bool,
) -> variants.Variant | variants.Unavailable:
  """Returns the variant `name`, an element of `NAMES`, for one dot."""
  unavailable = functools.partial(variants.missing_peer, name)
  for package in ("torch", name):
    if importlib.util.find_spec(package) is None:
      return unavailable(f"{package} is not installed")
  if name == "torchao" and (pair.lhs is None or pair.lhs != pair.rhs):
    return unavailable("takes operands of one format")
  if name == "torchao" and pair.rhs not in (*_MX_DTYPES, formats.NVFP4):
    return unavailable(f"has no {pair.rhs}")
  import torch  # optional, and slow

  if is_gpu and not torch.cuda.is_available():
    return unavailable(f"torch {torch.__version__} sees no GPU")
  device = torch.device("cuda" if is_gpu else "cpu")
  convert: Any = functools.partial(_to_torch, device=device)
  function = torch.nn.functional.linear
  if name == "torchao":
    quantize = _torchao_quantizer(pair.rhs, is_gpu)
    function = lambda lhs, rhs: torch.mm(lhs, rhs.t())
    convert = lambda x: quantize(_to_torch(x, device=device))

  def operands(i: int) -> Any:
    return tuple(map(convert, data.ready(i, jnp.bfloat16)))

  @functools.lru_cache(maxsize=2)
  def expected(i: int) -> Any:
    return verification.expected_dot(*map(_f32, operands(i)))

  def check(i: int, result: Any) -> Any:
    return verification.check_dot(
      _f32(result).astype(formats.BF16),
      expected(i),
      bound=verification.PEER_BOUND,
    )

  return variants.Variant(
    name=name,
    role="peer",
    function=torch.no_grad()(function),
    operands=operands,
    check=check,
    num_bytes=sum(map(_num_bytes, operands(0)))
    + row.m * row.n * formats.BF16.itemsize,
    flops=2 * row.m * row.n * row.k,
    on_host=True,
    wait=torch.cuda.synchronize if is_gpu else None,
  )


def _to_torch(x: jax.Array, device: Any) -> Any:
  import torch

  bits = np.array(x).view(np.uint16)
  return torch.from_numpy(bits).view(torch.bfloat16).to(device)


def _torchao_quantizer(format: formats.BlockFormat | None, is_gpu: bool) -> Any:
  """Returns a function that quantizes a bf16 tensor."""
  import torch
  from torchao.prototype.mx_formats import mx_tensor
  from torchao.prototype.mx_formats import nvfp4_tensor

  is_native = is_gpu and torch.cuda.get_device_capability() >= _BLACKWELL
  if format == formats.NVFP4:
    return functools.partial(
      nvfp4_tensor.NVFP4Tensor.to_nvfp4, is_swizzled_scales=is_native
    )
  assert format is not None
  preference = mx_tensor.KernelPreference
  return functools.partial(
    mx_tensor.MXTensor.to_mx,
    elem_dtype=getattr(torch, _MX_DTYPES[format]),
    block_size=format.block_size,
    kernel_preference=preference.AUTO if is_native else preference.EMULATED,
    is_swizzled_scales=is_native,
  )


def _f32(x: Any) -> np.ndarray:
  """Returns a tensor in f32. A quantized tensor is dequantized first."""
  dense = x.dequantize() if hasattr(x, "qdata") else x
  return dense.float().cpu().numpy()


def _num_bytes(x: Any) -> int:
  parts = (x.qdata, x.scale) if hasattr(x, "qdata") else (x,)
  return sum(part.numel() * part.element_size() for part in parts)
