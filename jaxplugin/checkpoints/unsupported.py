# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds tensors that are quantized in formats that are not supported.

Integers or FP8 with a scale, zero point or codebook in another tensor are not
the weight. The names come from public checkpoints.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.checkpoints import stored

# Names of values, whose other parts have names in the same module.
_VALUES: Final = frozenset(
  {
    *("weight", "weight_packed", "qweight", "q_weight", "W_q", "codes"),
    *("Qidxs", "trellis"),
  }
)
_PACKED_FLOATS: Final = ("F4", "F6_E2M3", "F6_E3M2")
_INTEGERS: Final = tuple(
  np.dtype(x) for x in ("uint8", "int8", "int16", "uint16", "int32", "uint32")
)
_SIGN: Final = re.compile(
  r"scale|absmax|quant_map|quant_state|\bSCB\b|zero_?point|zeros|g_idx|codebook"
  r"|comfy_quant|\bs[uv]h\b|\bmeta\b|\bbiases\b",
)
# Quantizations: a pattern of the values' name, a pattern of the other parts'
# names, and a description. The first that matches is used.
_FAMILIES: Final = tuple(
  (re.compile(values), re.compile(beside), name)
  for values, beside, name in (
    (r"\.qweight$", r"wscales|smooth", "integers of Nunchaku (SVDQuant)"),
    (r"\.qweight$", r"", "integers of GPTQ or AWQ"),
    (r"\.q_weight$", r"", "integers of ExLlama"),
    (r"\.W_q$", r"", "integers of HQQ"),
    (r"\.codes$", r"codebook", "codes of AQLM"),
    (r"\.Qidxs$", r"", "codes of QuIP#"),
    (r"\.trellis$", r"", "codes of EXL3"),
    (r"", r"quant_state|quant_map|absmax", "4 bits of bitsandbytes"),
    (r"", r"\bSCB\b", "INT8 of bitsandbytes"),
  )
)


class Signs:
  """The signs of quantization among a checkpoint's tensors."""

  def __init__(self, source: stored.StoredTensors, config: str = "") -> None:
    """Sorts the names.

    Args:
      source: the tensors.
      config: the quantization in the configuration files, "" if nothing.
    """
    self._tensors = source.tensors
    self._config = config
    self._names: Sequence[str] = sorted(source.tensors)

  def find(self, tensor: stored.StoredTensor) -> str | None:
    """Returns why a tensor looks quantized, and how; None if it does not.

    Args:
      tensor: a tensor that is not a part of a recognized weight.
    """
    if tensor.refusal or not _may_be_quantized(tensor):
      return None
    beside = self._beside(tensor.name)
    leaf = tensor.name.rpartition(".")[2]
    if beside:
      sign = f"it has {_quoted(beside)}"
    elif self._config and leaf in _VALUES and len(tensor.shape) > 1:
      sign = f"{self._config}, and it has no scale"
    else:
      return None
    what = _family(tensor, [self._tensors[x] for x in beside])
    return (
      f"it is quantized ({sign}): {what}. jaxplugin has no such format."
      " Dequantize it with the tool that wrote it, and quantize the result"
    )

  def _beside(self, name: str) -> list[str]:
    """Returns names of other parts of a tensor that show a quantization."""
    found = []
    for prefix in (f"{name}.", f"{name}_"):
      found += [x for x in self._starting(prefix) if _is_sign(x[len(name) :])]
    module, dot, leaf = name.rpartition(".")
    if dot and leaf in _VALUES:
      prefix = f"{module}."
      found += [
        x
        for x in self._starting(prefix)
        if x not in found
        and x != name
        and "." not in x[len(prefix) :]
        and _is_sign(x[len(prefix) :])
      ]
    return found

  def _starting(self, prefix: str) -> list[str]:
    first = bisect.bisect_left(self._names, prefix)
    found = []
    for name in self._names[first:]:
      if not name.startswith(prefix):
        break
      found.append(name)
    return found


def _may_be_quantized(tensor: stored.StoredTensor) -> bool:
  return (
    tensor.type_name in _PACKED_FLOATS
    or tensor.dtype in _INTEGERS
    or (
      tensor.dtype.itemsize == 1 and jnp.issubdtype(tensor.dtype, np.floating)
    )
  )


def _is_sign(leaf: str) -> bool:
  return bool(_SIGN.search(leaf))


def _quoted(names: Sequence[str]) -> str:
  shown = [repr(x) for x in names[:3]]
  more = len(names) - len(shown)
  return " and ".join([*shown, *([f"{more} more"] if more else [])])


def _family(
  tensor: stored.StoredTensor, beside: Sequence[stored.StoredTensor]
) -> str:
  names = " ".join(x.name for x in beside)
  for values, others, name in _FAMILIES:
    if values.search(tensor.name) and others.search(names):
      return f"{name}, {_brief(tensor)}"
  scales = [x for x in beside if "scale" in x.name]
  of = f" with {_brief(scales[0])}" if scales else ""
  if tensor.type_name in _PACKED_FLOATS:
    return f"{tensor.type_name}, {_brief(tensor)}{of}"
  if tensor.dtype == np.uint32 and any("biases" in x.name for x in beside):
    return f"integers of MLX's affine mode, {_brief(tensor)}{of}"
  kind = "FP8" if tensor.dtype not in _INTEGERS else "packed or INT8"
  return f"{kind}, {_brief(tensor)}{of}"


def _brief(x: Any) -> str:
  return f"{x.type_name}{list(x.shape)}"
