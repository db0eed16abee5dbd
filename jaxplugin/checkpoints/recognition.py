# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the weights of a checkpoint, by names, dtypes, shapes and marks.

Only torchao's metadata and ComfyUI's marks are read. A tensor that looks
quantized and fits no layout is an error. All other tensors pass through.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.checkpoints import (
  assembly,
  comfyui_marks,
  entries,
  errors,
  layouts,
  records,
  stored,
)
from jaxplugin.core import formats

# Signs that a tensor is quantized in an unsupported format: integers or FP8
# with a scale, zero point or codebook in another tensor. The names come from
# public checkpoints. The group that matches is the prefix of other parts: a
# module, nothing, or fused experts of vLLM ("w13_qweight").
_VALUES: Final = re.compile(
  r"((?:.*\.)?)weight|((?:.*[._])?)(?:weight_packed|qweight)"
  r"|(.*\.)(?:q_weight|W_q|codes|Qidxs|trellis|B|_data)"
)
# Ends of names of block scales, and of the values that they may have.
_VALUES_OF: Final = {
  ".weight_scale": (".weight", ".weight_packed"),
  ".weight_scale_inv": (".weight",),
  "._weight_scale": ("._weight_qdata",),
  ".scales": (".qweight", ".weight", ".blocks"),
  "_scales": ("_blocks",),
  ".qzeros": (".qweight",),
}
# Names of scales by words of a configuration or a layout.
_SCALES_OF: Final = (
  (re.compile(r"modelopt|hf_quant|compressed|comfyui"), "weight_scale"),
  (re.compile(r"quant_method fp8"), "weight_scale_inv"),
)
# Parts that belong to the input of a weight.
_OF_INPUT: Final = re.compile(r"input_(global_)?scale$|pre_quant_scale$")
_PACKED_FLOATS: Final = ("F4", "F6_E2M3", "F6_E3M2")
_INTEGERS: Final = tuple(
  np.dtype(x) for x in ("uint8", "int8", "int16", "uint16", "int32", "uint32")
)
_SIGN: Final = re.compile(
  r"scale|absmax|quant_map|quant_state|\bSCB\b|zero_?point|zeros|g_idx|codebook"
  r"|comfy_quant|\bs[uv]h\b|\bmeta\b|\bbiases\b|^s$",
)
# Quantizations: a pattern of the values' name, a pattern of the other parts'
# names, and a description. The first that matches is used.
_FAMILIES: Final = tuple(
  (re.compile(values), re.compile(beside), name)
  for values, beside, name in (
    (r"qweight$", r"wscales|smooth", "integers of Nunchaku (SVDQuant)"),
    (r"qweight$", r"", "integers of GPTQ or AWQ"),
    (r"\.q_weight$", r"", "integers of ExLlama"),
    (r"\.W_q$", r"", "integers of HQQ"),
    (r"\.codes$", r"codebook", "codes of AQLM"),
    (r"\.Qidxs$", r"", "codes of QuIP#"),
    (r"\.trellis$", r"", "codes of EXL3"),
    (r"\.B$", r"", "integers of Marlin"),
    (r"\._data$", r"", "integers of quanto"),
  )
)


def recognize(
  source: stored.StoredTensors,
  layout: str | None = None,
  config: str = "",
  mlx: Mapping[str, Any] | None = None,
) -> tuple[dict[str, records.Entry], dict[str, str]]:
  """Returns the entries of a checkpoint by name, in the order of its tensors.

  The second result has the reason of each tensor that is left out, by its name:
  parts of a weight are missing or do not fit, or a quantization is not
  supported.

  Args:
    source: the tensors.
    layout: the layout of weights that fit several; None if the file and its
      configuration decide.
    config: the quantization in the configuration files, "" if nothing.
    mlx: `quantization` of MLX's config.json; None without one.

  Raises:
    CheckpointError: If the header breaks a rule.
  """
  wrong = dict(source.misfits)
  contents = records.Contents(
    source=source,
    marks=comfyui_marks.Marks(source),
    layout=layout,
    config=config,
    mlx=mlx or {},
  )
  readers = [read for x in layouts.LAYOUTS if (read := x.recognize)]
  weights: dict[str, records.Entry] = {}
  for name, tensor in source.tensors.items():
    try:
      found = (read(contents, tensor) for read in readers)
      entry = next(filter(None, found), None)
    except errors.REFUSALS as error:
      wrong[name] = str(stored.fault(tensor, str(error)))
      continue
    if entry is not None:
      weights[entry.parts[0].name] = entry
  # A part belongs to its weight, in any order of the file.
  taken = {part.name for entry in weights.values() for part in entry.parts}
  names = sorted(source.tensors.keys() - taken)
  for name, tensor in source.tensors.items():
    if name in taken or name in wrong:
      continue
    reason = _without_values(contents, wrong, tensor)
    reason = reason or _unsupported(contents, names, tensor)
    if reason is not None:
      wrong[name] = str(stored.fault(tensor, reason))
  entries: dict[str, records.Entry] = {}
  for name, tensor in source.tensors.items():
    if name in wrong or (name in taken and name not in weights):
      continue
    entry = weights.get(name) or _plain(tensor)
    if entry.name in entries:
      first = entries[entry.name].parts[0]
      rule = f"two weights have the name {entry.name!r}, this one and"
      wrong[name] = str(stored.fault(tensor, f"{rule} {first.name!r}"))
      wrong[first.name] = str(stored.fault(first, f"{rule} {name!r}"))
      continue
    entries[entry.name] = entry
  right = {n: x for n, x in entries.items() if x.parts[0].name not in wrong}
  return right, wrong


def require_all(source: stored.StoredTensors) -> dict[str, records.Entry]:
  """Returns the entries of tensors; raises CheckpointError for a misfit."""
  entries, misfits = recognize(source)
  if misfits:
    raise errors.misfit_error(misfits)
  return entries


def _without_values(
  contents: records.Contents,
  wrong: Collection[str],
  tensor: stored.StoredTensor,
) -> str | None:
  """Returns why block scales belong to no weight; None for other tensors.

  Args:
    contents: the tensors.
    wrong: names of weights that cannot be read for another reason.
    tensor: a tensor that belongs to no weight.
  """
  end = next((x for x in _VALUES_OF if tensor.name.endswith(x)), "")
  base = tensor.name.removesuffix(end)
  if not end or not base or len(tensor.shape) < 2:
    return None
  if end.endswith("scales") and not _are_scales(contents, tensor, base):
    return None
  names = [f"{base}{x}" for x in _VALUES_OF[end]]
  found = [contents.tensors[x] for x in names if x in contents.tensors]
  if not found and not any(x in wrong for x in names):
    return f"its values, {' or '.join(map(repr, names))}, must be there too"
  for values in found:
    if assembly.is_float(values) and tensor.dtype in entries.SCALE_TYPES:
      return (
        f"its values, {values.name!r}, must be quantized, got"
        f" {values.type_name}{list(values.shape)}"
      )
  return None


def _are_scales(
  contents: records.Contents, tensor: stored.StoredTensor, base: str
) -> bool:
  """Returns whether a tensor called "scales" has block scales.

  F32 parameters of some models have the same name, and AQLM has other values.
  """
  if tensor.dtype == formats.PACKED:
    return True
  if tensor.name.endswith("_scales") or f"{base}.codes" in contents.tensors:
    return False
  return tensor.dtype in (formats.F16, formats.BF16) or any(
    f"{base}.{x}" in contents.tensors for x in ("qzeros", "g_idx", "biases")
  )


def _plain(tensor: stored.StoredTensor) -> records.Entry:
  return records.Entry(
    name=tensor.name,
    layout=None,
    format=None,
    shape=tensor.logical_shape,
    parts=(tensor,),
    make=lambda _: tensor.read(),
  )


def _unsupported(
  contents: records.Contents, names: Sequence[str], tensor: stored.StoredTensor
) -> str | None:
  """Returns why a tensor looks quantized, and how; None if it does not.

  The names, of all tensors that belong to no weight, are sorted.
  """
  if tensor.refusal or not _may_be_quantized(tensor):
    return None
  beside = _signs(names, tensor.name)
  if missing := _missing_scales(contents, tensor, beside):
    return f"its scales, {missing!r}, must be there too"
  if beside:
    sign = f"it has {_quoted(beside)}"
  elif (
    contents.config
    and not contents.is_own
    and _VALUES.fullmatch(tensor.name)
    and len(tensor.shape) > 1
  ):
    sign = f"{contents.config}, and it has no scale"
  elif tensor.type_name in _PACKED_FLOATS:
    sign = "it has no scale"
  else:
    return None
  what = _family(tensor, [contents.tensors[x] for x in beside])
  return (
    f"it is quantized ({sign}): {what}. jaxplugin has no such format."
    " Dequantize it with the tool that wrote it, and quantize the result"
  )


def _missing_scales(
  contents: records.Contents,
  tensor: stored.StoredTensor,
  beside: Sequence[str],
) -> str:
  """Returns the name of scales that a weight of a layout lacks, or ""."""
  leaf = tensor.name.rpartition(".")[2]
  prefix = tensor.name.removesuffix(leaf)
  is_words = tensor.dtype == np.uint32 and leaf == "weight"
  is_gptq = tensor.dtype == np.int32 and leaf == "qweight"
  is_mlx = is_words and beside == [f"{prefix}biases"]
  if is_gptq or is_mlx:
    scales = f"{prefix}scales"
    is_there = scales in contents.tensors or any("wscales" in x for x in beside)
    return "" if is_there else scales
  is_weight = leaf == "weight" and len(tensor.shape) > 1 and not is_words
  parts = [x for x in beside if not _OF_INPUT.search(x)]
  if not is_weight or parts:
    return ""
  tool = "" if contents.is_own else contents.layout or contents.config
  found = [name for word, name in _SCALES_OF if word.search(tool)]
  if not found and beside:
    found = ["weight_scale"]
  return f"{prefix}{found[0]}" if found else ""


def _signs(names: Sequence[str], name: str) -> list[str]:
  """Returns names of other parts of a tensor that show a quantization."""
  found = []
  for prefix in (f"{name}.", f"{name}_"):
    its = _starting(names, prefix)
    found += [x for x in its if _SIGN.search(x[len(name) :])]
  if values := _VALUES.fullmatch(name):
    prefix = values[values.lastindex or 0]
    found += [
      x
      for x in _starting(names, prefix)
      if x not in found
      and x != name
      and "." not in x[len(prefix) :]
      and _SIGN.search(x[len(prefix) :])
    ]
  return found


def _starting(names: Sequence[str], prefix: str) -> Sequence[str]:
  if not prefix:
    return names
  after = prefix[:-1] + chr(ord(prefix[-1]) + 1)  # sorted after all of them
  first, last = (bisect.bisect_left(names, x) for x in (prefix, after))
  return names[first:last]


def _may_be_quantized(tensor: stored.StoredTensor) -> bool:
  return (
    tensor.type_name in _PACKED_FLOATS
    or tensor.dtype in _INTEGERS
    or (
      tensor.dtype.itemsize == 1 and jnp.issubdtype(tensor.dtype, np.floating)
    )
  )


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


def _brief(x: stored.StoredTensor) -> str:
  return f"{x.type_name}{list(x.shape)}"
