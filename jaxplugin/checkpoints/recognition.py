# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint are one weight, and in which layout.

Names decide, with dtypes and shapes; nothing is read but torchao's metadata. A
weight's parts must fit each other; what is of no layout passes through.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import MutableMapping
from typing import Any
from typing import Final

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import conversions
from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import fitting
from jaxplugin.checkpoints import gguf_files
from jaxplugin.checkpoints import json_text
from jaxplugin.checkpoints import stored
from jaxplugin.checkpoints.reports import misfits as misfit_lists
from jaxplugin.core import formats

MODELOPT: Final = "modelopt"
COMPRESSED_TENSORS: Final = "compressed-tensors"
GPT_OSS: Final = "gpt-oss"
TORCHAO: Final = "torchao"
GGUF: Final = "gguf"

_WEIGHT: Final = ".weight"
_FUSED_SCALE: Final = "_weight_scale"
_SVDQUANT: Final = ("svdquant_lora_a", "svdquant_lora_b")
_PACKED: Final = ".weight_packed"
_VALUE_TYPES: Final = (formats.PACKED, formats.E4M3, formats.E5M2)
_SCALE_TYPES: Final = (formats.PACKED, formats.E4M3, formats.E8M0)
# Hugging Face's names, and the original ones.
_GPT_OSS_SUFFIXES: Final = (("_blocks", "_scales"), (".blocks", ".scales"))
_TORCHAO_BLOCKS: Final = {
  "NVFP4Tensor": formats.NVFP4.block_size,
  "MXTensor": formats.MXFP4.block_size,
}

Make = Callable[[conversions.Range | None], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """What a checkpoint has under one name.

  Attributes:
    name: of the weight, as the model that is not quantized calls it.
    layout: whose it is; None of what passes through.
    format: the weight's; None of what passes through.
    shape: the logical one.
    parts: the tensors that it is made of.
    make: makes it; takes the range of global scales.
    global_scale: the part that is its global scale; None if it has none.
    pre_quant_scale: the name of what the other side of its product must be
      multiplied by first, along k (AWQ of ModelOpt); None if there is none.
  """

  name: str
  layout: str | None
  format: formats.BlockFormat | None
  shape: tuple[int, ...]
  parts: tuple[stored.StoredTensor, ...]
  make: Make
  global_scale: stored.StoredTensor | None = None
  pre_quant_scale: str | None = None

  @property
  def nbytes(self) -> int:
    """Bytes of all parts in the file."""
    return sum(part.nbytes for part in self.parts)

  @property
  def type_name(self) -> str:
    """The format, or the file's word for a dtype."""
    return str(self.format or self.parts[0].type_name)


def recognize(
  source: stored.StoredTensors,
  mx_layout: str = MODELOPT,
  misfits: MutableMapping[str, str] | None = None,
) -> dict[str, Entry]:
  """Returns all that a checkpoint has, by name, in the order of its tensors.

  Args:
    source: its tensors.
    mx_layout: whose an MX weight is that two layouts have alike.
    misfits: gets the reason of each tensor that is left out, by its name. None
      raises them.

  Raises:
    CheckpointError: parts of some weights are missing or do not fit each other,
      and `misfits` is None.
  """
  wrong: MutableMapping[str, str] = {} if misfits is None else misfits
  wrong.update(source.misfits)
  of_torchao = dict(_torchao_weights(source, wrong))
  found: list[Entry] = []
  for name, tensor in source.tensors.items():
    if name in wrong:
      continue
    try:
      entry = of_torchao.get(name) or _weight(source, tensor, mx_layout)
    except errors.REFUSALS as error:
      wrong[name] = str(fault(tensor, str(error)))
      continue
    if entry is not None:
      found.append(entry)
  # A part goes with its weight, wherever its file has it.
  taken = {part.name for entry in found for part in entry.parts}
  weights = {entry.parts[0].name: entry for entry in found}
  entries: dict[str, Entry] = {}
  for name, tensor in source.tensors.items():
    if name in wrong or (name in taken and name not in weights):
      continue
    entry = weights.get(name) or _plain(tensor)
    if entry.name in entries:
      first = entries[entry.name].parts[0]
      rule = f"two weights are called {entry.name!r}, this and"
      wrong[name] = str(fault(tensor, f"{rule} {first.name!r}"))
      wrong[first.name] = str(fault(first, f"{rule} {name!r}"))
      continue
    entries[entry.name] = entry
  entries = {
    name: entry
    for name, entry in entries.items()
    if entry.parts[0].name not in wrong
  }
  if misfits is None and wrong:
    raise misfit_lists.error(wrong)
  return entries


def fault(tensor: stored.StoredTensor, rule: str) -> errors.CheckpointError:
  """Returns an error that names the file and the tensor, each once."""
  if rule.startswith(f"{tensor.file}: "):
    return errors.CheckpointError(rule)
  return errors.CheckpointError(f"{tensor.file}: {tensor.name!r}: {rule}")


def _plain(tensor: stored.StoredTensor) -> Entry:
  return Entry(
    name=tensor.name,
    layout=None,
    format=None,
    shape=tensor.logical_shape,
    parts=(tensor,),
    make=lambda _: tensor.read(),
  )


def _weight(
  source: stored.StoredTensors, tensor: stored.StoredTensor, mx_layout: str
) -> Entry | None:
  """The weight whose values a tensor has; None if it has none's."""
  name = tensor.name
  if tensor.type_name in gguf_files.BLOCKS:
    return _gguf(source, tensor)
  if name.endswith(_PACKED):
    return _compressed_tensors(source, tensor, name.removesuffix(_PACKED))
  if name.endswith(_WEIGHT) and tensor.dtype in _VALUE_TYPES:
    base = name.removesuffix(_WEIGHT)
    scale = source.tensors.get(f"{base}.weight_scale")
    if scale is not None and scale.dtype in _SCALE_TYPES:
      is_compressed = f"{base}.weight_global_scale" in source.tensors
      has_second = f"{base}.weight_scale_2" in source.tensors
      if is_compressed or (mx_layout != MODELOPT and not has_second):
        return _compressed_tensors(source, tensor, base)
      return _modelopt(source, tensor, f"{base}.", name)
  if f"{name}{_FUSED_SCALE}" in source.tensors and tensor.dtype in _VALUE_TYPES:
    return _modelopt(source, tensor, f"{name}_", name)
  for values, scales in _GPT_OSS_SUFFIXES:
    base = name.removesuffix(values)
    if base != name and f"{base}{scales}" in source.tensors:
      scale = source.tensors[f"{base}{scales}"]
      if tensor.dtype == scale.dtype == formats.PACKED:
        return _gpt_oss(tensor, scale, base)
  return None


def _modelopt(
  source: stored.StoredTensors,
  values: stored.StoredTensor,
  prefix: str,
  name: str,
) -> Entry:
  """A weight "up.weight" with "up.weight_scale", and so on.

  Of experts in one tensor, [E, n, k] or [E, k, n], "experts.up_proj" with
  "experts.up_proj_weight_scale".
  """
  scale = _part(source, values, f"{prefix}weight_scale")
  second = source.tensors.get(f"{prefix}weight_scale_2")
  format = fitting.find_format("checkpoints.load", values, scale)
  fitting.require_known_global(
    "checkpoints.load", format, "weight_scale_2", second is not None
  )
  entry = _linear_entry(
    name=name,
    layout=MODELOPT,
    format=format,
    convert=conversions.from_modelopt,
    values=values,
    scale=scale,
    second=second,
  )
  return _with_rest_of_product(source, entry, prefix)


def _with_rest_of_product(
  source: stored.StoredTensors, entry: Entry, prefix: str
) -> Entry:
  """The entry, which knows what else of ModelOpt its product has."""
  values, scale = entry.parts[:2]
  for suffix in _SVDQUANT:
    if f"{prefix}{suffix}" in source.tensors:
      raise fault(
        values,
        f"{prefix}{suffix} says that the weight is only one term of a sum"
        " (SVDQuant), which is not read; take a checkpoint without it",
      )
  awq = source.tensors.get(f"{prefix}pre_quant_scale")
  if awq is None:
    return entry
  axis = fitting.blocked_axis(values, scale)
  assert axis is not None  # they fit a format
  if math.prod(awq.shape) != entry.shape[axis]:
    raise fault(
      awq,
      f"it must have k={entry.shape[axis]} numbers, got shape"
      f" {list(awq.shape)}",
    )
  return dataclasses.replace(entry, pre_quant_scale=awq.name)


def _compressed_tensors(
  source: stored.StoredTensors, values: stored.StoredTensor, base: str
) -> Entry | None:
  if values.dtype not in _VALUE_TYPES:
    return None  # pack-quantized: integers
  if f"{base}.weight_zero_point" in source.tensors:
    raise fault(
      values, "it has a weight_zero_point, and no format here has one"
    )
  scale = _part(source, values, f"{base}.weight_scale")
  second = source.tensors.get(f"{base}.weight_global_scale")
  format = fitting.find_format("checkpoints.load", values, scale)
  fitting.require_known_global(
    "checkpoints.load", format, "weight_global_scale", second is not None
  )
  return _linear_entry(
    name=f"{base}{_WEIGHT}",
    layout=COMPRESSED_TENSORS,
    format=format,
    convert=conversions.from_compressed_tensors,
    values=values,
    scale=scale,
    second=second,
  )


def _linear_entry(
  *,
  name: str,
  layout: str,
  format: formats.BlockFormat,
  convert: Callable[..., scaled_array.ScaledArray],
  values: stored.StoredTensor,
  scale: stored.StoredTensor,
  second: stored.StoredTensor | None,
) -> Entry:
  """A weight of values, linear scales and perhaps a global scale."""

  def make(allowed: conversions.Range | None) -> scaled_array.ScaledArray:
    of_all = None if second is None else second.read()
    return convert(
      values.read(), scale.read(), of_all, global_scale_range=allowed
    )

  parts = (values, scale) if second is None else (values, scale, second)
  return Entry(
    name=name,
    layout=layout,
    format=format,
    shape=_shape(format, values, fitting.blocked_axis(values, scale) or -1),
    parts=parts,
    make=make,
    global_scale=second,
  )


def _gpt_oss(
  blocks: stored.StoredTensor, scales: stored.StoredTensor, base: str
) -> Entry:
  fitting.require_gpt_oss("checkpoints.load", blocks, scales)
  format = formats.MXFP4
  return Entry(
    name=base,
    layout=GPT_OSS,
    format=format,
    shape=(*scales.shape[:-1], scales.shape[-1] * format.block_size),
    parts=(blocks, scales),
    make=lambda _: conversions.from_gpt_oss(blocks.read(), scales.read()),
  )


def _gguf(source: stored.StoredTensors, blocks: stored.StoredTensor) -> Entry:
  format = formats.resolve("checkpoints.load", blocks.type_name.lower())
  base = blocks.name.removesuffix(_WEIGHT)
  scale = None
  if format == formats.NVFP4:
    # llama.cpp's converter writes the first one, other tools the second.
    names = (f"{base}.scale", f"{base}{_WEIGHT}.scale")
    scales = [source.tensors[x] for x in names if x in source.tensors]
    if len(scales) > 1:
      raise fault(
        blocks,
        f"its global scale must be one tensor, got {names[0]!r} and"
        f" {names[1]!r}",
      )
    scale = scales[0] if scales else None

  def make(allowed: conversions.Range | None) -> scaled_array.ScaledArray:
    of_all = None if scale is None else scale.read()
    return conversions.from_gguf(
      blocks.read(), format, of_all, global_scale_range=allowed
    )

  return Entry(
    name=blocks.name,
    layout=GGUF,
    format=format,
    shape=fitting.gguf_shape("checkpoints.load", blocks, format),
    parts=(blocks,) if scale is None else (blocks, scale),
    make=make,
    global_scale=scale,
  )


def _torchao_weights(
  source: stored.StoredTensors, misfits: MutableMapping[str, str]
) -> Iterator[tuple[str, Entry]]:
  """Yields weights that torchao's metadata names, by the name of their values.

  For "0.weight" these are "0._weight_qdata", and the like.
  """
  for name, text in source.metadata.items():
    module, dot, leaf = name.rpartition(".")
    prefix = f"{module}._{leaf}_"
    values = source.tensors.get(f"{prefix}qdata")
    if not dot or values is None:
      continue
    try:
      entry = _torchao_entry(source, values, name, prefix, text)
    except errors.REFUSALS as error:
      misfits[values.name] = str(fault(values, str(error)))
      continue
    if entry is not None:
      yield values.name, entry


def _torchao_entry(
  source: stored.StoredTensors,
  values: stored.StoredTensor,
  name: str,
  prefix: str,
  text: str,
) -> Entry | None:
  """Returns the weight that metadata describes; None for other types."""
  told = json_text.parse_object(f"{values.file}: metadata of {name!r}", text)
  kind, data = told.get("_type"), told.get("_data")
  block_size = _TORCHAO_BLOCKS.get(kind) if isinstance(kind, str) else None
  if block_size is None:
    return None  # its tensors pass through
  if not isinstance(data, dict) or data.get("block_size") != block_size:
    raise fault(values, f"{kind} must have blocks of {block_size}")
  is_swizzled = data.get("is_swizzled_scales", False)
  if not isinstance(is_swizzled, bool):
    raise fault(values, "is_swizzled_scales must be true or false")
  return _torchao(source, values, name, prefix, is_swizzled)


def _torchao(
  source: stored.StoredTensors,
  values: stored.StoredTensor,
  name: str,
  prefix: str,
  is_swizzled: bool,
) -> Entry:
  scale = _part(source, values, f"{prefix}scale")
  second = source.tensors.get(f"{prefix}per_tensor_scale")
  format = fitting.torchao_format(
    "checkpoints.load", values, scale, is_swizzled
  )

  def make(allowed: conversions.Range | None) -> scaled_array.ScaledArray:
    return conversions.from_torchao(
      values.read(),
      scale.read(),
      None if second is None else second.read(),
      is_swizzled=is_swizzled,
      global_scale_range=allowed,
    )

  return Entry(
    name=name,
    layout=TORCHAO,
    format=format,
    shape=_shape(format, values),
    parts=(values, scale) if second is None else (values, scale, second),
    make=make,
    global_scale=second,
  )


def _part(
  source: stored.StoredTensors, values: stored.StoredTensor, name: str
) -> stored.StoredTensor:
  part = source.tensors.get(name)
  if part is None:
    raise fault(values, f"its scales, {name!r}, must be there too")
  return part


def _shape(
  format: formats.BlockFormat, values: stored.StoredTensor, axis: int = -1
) -> tuple[int, ...]:
  shape = list(values.shape)
  shape[axis] = shape[axis] * 8 // format.value_bits
  return tuple(shape)
