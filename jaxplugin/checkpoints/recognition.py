# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint are one weight, and in which layout.

Names decide, with dtypes and shapes; nothing is read but torchao's metadata and
ComfyUI's marks. A weight's parts must fit each other. A tensor that some sign
calls quantized, and that no layout here has, is an error; all others pass
through.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import MutableMapping
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import conversions
from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import fitting
from jaxplugin.checkpoints import gguf_files
from jaxplugin.checkpoints import json_text
from jaxplugin.checkpoints import stored
from jaxplugin.checkpoints.reports import misfits as misfit_lists
from jaxplugin.checkpoints.signs import comfyui
from jaxplugin.checkpoints.signs import unsupported
from jaxplugin.core import extents
from jaxplugin.core import formats

MODELOPT: Final = "modelopt"
COMPRESSED_TENSORS: Final = "compressed-tensors"
GPT_OSS: Final = "gpt-oss"
TORCHAO: Final = "torchao"
GGUF: Final = "gguf"
COMFYUI: Final = "comfyui"
DEEPSEEK: Final = "deepseek"
MLX: Final = "mlx"
# ModelOpt's with enable_swizzle_layout: its nibbles, and scales in tiles.
MODELOPT_SWIZZLED: Final = "modelopt-swizzled"
# Layouts that may have the same names, dtypes and shapes.
OPEN_LAYOUTS: Final = (MODELOPT, COMPRESSED_TENSORS, COMFYUI, MODELOPT_SWIZZLED)

_WEIGHT: Final = ".weight"
_FUSED_SCALE: Final = "_weight_scale"
_SVDQUANT: Final = ("svdquant_lora_a", "svdquant_lora_b")
_PACKED: Final = ".weight_packed"
_VALUE_TYPES: Final = (formats.PACKED, formats.E4M3, formats.E5M2)
_SCALE_TYPES: Final = (formats.PACKED, formats.E4M3, formats.E8M0)
_INT8: Final = np.dtype(np.int8)
_WORDS: Final = np.dtype(np.uint32)
# What says that a weight of ModelOpt or compressed-tensors is quantized, even
# without its block scales.
_SECOND: Final = ("weight_scale_2", "weight_global_scale")
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
    activation_scale: the name of the calibrated global scale of its product's
      other side, None if there is none; see `conversions.activation_scale`.
    others: layouts that would read the same tensors as other numbers, if
      nothing in the file or beside it says which one it is.
  """

  name: str
  layout: str | None
  format: formats.BlockFormat | None
  shape: tuple[int, ...]
  parts: tuple[stored.StoredTensor, ...]
  make: Make
  global_scale: stored.StoredTensor | None = None
  pre_quant_scale: str | None = None
  activation_scale: str | None = None
  others: tuple[str, ...] = ()

  @property
  def nbytes(self) -> int:
    """Bytes of all parts in the file."""
    return sum(part.nbytes for part in self.parts)

  @property
  def type_name(self) -> str:
    """The format, or the file's word for a dtype."""
    return str(self.format or self.parts[0].type_name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Checkpoint:
  """What decides whose a weight is.

  Attributes:
    source: the tensors.
    marks: ComfyUI's.
    layout: the one that the caller names, None if it names none.
    config: what the configuration says, "" if nothing.
  """

  source: stored.StoredTensors
  marks: comfyui.Marks
  layout: str | None
  config: str

  @property
  def tensors(self) -> Mapping[str, stored.StoredTensor]:
    return self.source.tensors

  @property
  def is_compressed(self) -> bool:
    """Whether MX weights are those of compressed-tensors."""
    if self.layout is not None:
      return self.layout == COMPRESSED_TENSORS
    return COMPRESSED_TENSORS in self.config


def recognize(
  source: stored.StoredTensors,
  layout: str | None = None,
  misfits: MutableMapping[str, str] | None = None,
  config: str = "",
) -> dict[str, Entry]:
  """Returns all that a checkpoint has, by name, in the order of its tensors.

  Args:
    source: its tensors.
    layout: whose a weight is that several layouts have alike, None if the file
      and its configuration decide.
    config: what the configuration says, "" if nothing.
    misfits: gets the reason of each tensor that is left out, by its name. None
      raises them.

  Raises:
    CheckpointError: the header is not what tools write; or, if `misfits` is
      None, parts of some weights are missing or do not fit each other, or
      tensors are quantized in ways that are not read.
  """
  wrong: MutableMapping[str, str] = {} if misfits is None else misfits
  wrong.update(source.misfits)
  of_torchao = dict(_torchao_weights(source, wrong))
  checkpoint = _Checkpoint(
    source=source, marks=comfyui.Marks(source), layout=layout, config=config
  )
  found: list[Entry] = []
  for name, tensor in source.tensors.items():
    if name in wrong:
      continue
    try:
      entry = of_torchao.get(name) or _weight(checkpoint, tensor)
    except errors.REFUSALS as error:
      wrong[name] = str(fault(tensor, str(error)))
      continue
    if entry is not None:
      found.append(entry)
  # A part goes with its weight, wherever its file has it.
  taken = {part.name for entry in found for part in entry.parts}
  weights = {entry.parts[0].name: entry for entry in found}
  signs = unsupported.Signs(source, config)
  for name, tensor in source.tensors.items():
    if name in taken or name in wrong:
      continue
    if (reason := signs.find(tensor)) is not None:
      wrong[name] = str(fault(tensor, reason))
  entries: dict[str, Entry] = {}
  for name, tensor in source.tensors.items():
    if name in wrong or (name in taken and name not in weights):
      continue
    entry = weights.get(name) or _plain(tensor)
    if entry.name in entries:
      first = entries[entry.name].parts[0]
      rule = f"two weights have the name {entry.name!r}, this one and"
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
  checkpoint: _Checkpoint, tensor: stored.StoredTensor
) -> Entry | None:
  """Returns the weight whose values a tensor has; None if it has none's."""
  name, source = tensor.name, checkpoint.source
  if tensor.type_name in gguf_files.BLOCKS:
    return _gguf(source, tensor)
  if name.endswith(_PACKED):
    return _compressed_tensors(source, tensor, name.removesuffix(_PACKED))
  if name.endswith(_WEIGHT):
    base = name.removesuffix(_WEIGHT)
    mark = checkpoint.marks.of(base)
    if mark is not None and checkpoint.layout in (None, COMFYUI):
      return _marked(source, tensor, base, mark)
    if tensor.dtype == _WORDS and f"{base}.scales" in source.tensors:
      return _mlx(source, tensor, base)
    if tensor.dtype in _VALUE_TYPES:
      return _named_scales(checkpoint, tensor, f"{base}.") or _deepseek(
        source, tensor, f"{base}."
      )
    if tensor.dtype == _INT8:
      return _deepseek(source, tensor, f"{base}.")
  if tensor.dtype in _VALUE_TYPES:
    entry = _named_scales(checkpoint, tensor, f"{name}_")
    if entry is not None:
      return entry
  for values, scales in _GPT_OSS_SUFFIXES:
    base = name.removesuffix(values)
    if base != name and tensor.dtype == formats.PACKED:
      scale = source.tensors.get(f"{base}{scales}")
      if scale is None and len(tensor.shape) > 2:
        _part(source, tensor, f"{base}{scales}")  # an error that names it
      if scale is not None and scale.dtype == formats.PACKED:
        return _gpt_oss(tensor, scale, base)
  return None


def _named_scales(
  checkpoint: _Checkpoint, values: stored.StoredTensor, prefix: str
) -> Entry | None:
  """Returns the weight of values with a "weight_scale"; None if it has none.

  Args:
    checkpoint: what decides whose it is.
    values: "up.weight"; or, of experts in one tensor, "experts.up_proj".
    prefix: "up.", or "experts.up_proj_".
  """
  source = checkpoint.source
  scale = source.tensors.get(f"{prefix}weight_scale")
  seconds = [x for x in _SECOND if f"{prefix}{x}" in source.tensors]
  if scale is None:
    if seconds:
      raise fault(
        values,
        f"its block scales, {f'{prefix}weight_scale'!r}, must be there too:"
        f" {f'{prefix}{seconds[0]}'!r} says that it is NVFP4",
      )
    return None
  is_nvfp4 = values.dtype == formats.PACKED and (
    bool(seconds) or formats.NVFP4.name in checkpoint.config.lower()
  )
  if scale.dtype not in _SCALE_TYPES and not is_nvfp4:
    return None
  is_linear = fitting.blocked_axis(values, scale) is not None
  if not (is_linear or seconds) and fitting.scale_block(values, scale):
    return None  # of DeepSeek: a scale for several rows
  base = prefix.removesuffix(".")
  if _SECOND[1] in seconds:
    return _compressed_tensors(source, values, base)
  if not seconds and checkpoint.is_compressed and base != prefix:
    return _compressed_tensors(source, values, base)
  layout, others = _open_layout(checkpoint, values, scale, bool(seconds))
  if layout == COMFYUI:
    entry = _comfyui(source, values, base, None)
  else:
    is_swizzled = layout == MODELOPT_SWIZZLED
    entry = _modelopt(source, values, prefix, is_swizzled)
  return dataclasses.replace(entry, others=others)


def _open_layout(
  checkpoint: _Checkpoint,
  values: stored.StoredTensor,
  scale: stored.StoredTensor,
  has_second: bool,
) -> tuple[str, tuple[str, ...]]:
  """Returns whose a weight is, and whose it may be as well.

  The caller decides; else what describes the checkpoint; else shapes. Scales in
  tiles are padded to 128 rows and 4 columns, and often need no padding.
  """
  tiled: tuple[str, ...] = (COMFYUI,)
  if has_second:
    tiled = (MODELOPT_SWIZZLED, COMFYUI)
  try:
    fitting.comfyui_format("checkpoints.load", values, scale, has_second)
  except TypeError:
    tiled = ()
  is_linear = fitting.blocked_axis(values, scale) is not None
  if checkpoint.layout in (COMFYUI, MODELOPT_SWIZZLED):
    return checkpoint.layout, ()
  if checkpoint.layout is not None or not tiled:
    return MODELOPT, ()
  if checkpoint.marks.are_modelopt:
    # Its header does not say whether scales are in tiles.
    if not is_linear:
      return tiled[0], ()
    return MODELOPT, tiled[:1]
  if is_linear:
    return MODELOPT, () if checkpoint.config else tiled
  if checkpoint.config:
    return tiled[0], tiled[1:]
  return COMFYUI, tiled[:-1]


def _marked(
  source: stored.StoredTensors,
  values: stored.StoredTensor,
  base: str,
  mark: comfyui.Mark,
) -> Entry:
  """Returns the weight that ComfyUI's mark describes."""
  if mark.format not in comfyui.FORMATS:
    raise fault(
      values,
      f"{mark.sign} says that it is {mark.format!r}, which jaxplugin does not"
      f" support; it reads {' and '.join(comfyui.FORMATS)}. Dequantize the"
      " weight with ComfyUI and quantize the result",
    )
  if mark.is_rotated:
    raise fault(
      values,
      f"{mark.sign} says that it is rotated (ConvRot), which needs rotated"
      " inputs and is not supported; use a checkpoint without rotation",
    )
  entry = _comfyui(source, values, base, mark)
  if entry.format != comfyui.FORMATS[mark.format]:
    raise fault(
      values,
      f"{mark.sign} says that it is {mark.format}, but its parts are those of"
      f" {entry.format}",
    )
  return entry


def _comfyui(
  source: stored.StoredTensors,
  values: stored.StoredTensor,
  base: str,
  mark: comfyui.Mark | None,
) -> Entry:
  scale = _part(source, values, f"{base}.weight_scale")
  second = source.tensors.get(f"{base}.{_SECOND[0]}")
  format = fitting.comfyui_format(
    "checkpoints.load", values, scale, second is not None
  )
  n = values.shape[0]
  rows = n if mark is None or mark.rows is None else mark.rows
  bias = source.tensors.get(f"{base}.bias")
  if (mark is None or mark.rows is None) and bias is not None:
    # Values are padded, and what is added to their products is not.
    count = math.prod(bias.shape)
    if extents.round_up(count, comfyui.ROWS[format]) == n:
      rows = count
  padded = extents.round_up(rows, comfyui.ROWS[format])
  # Tiles of scales, which `conversions.from_comfyui` cannot leave out.
  tiles = {extents.divide_up(x, layouts.SCALE_TILE_ROWS) for x in (rows, n)}
  if not 0 < rows <= n or padded not in (n, rows) or len(tiles) != 1:
    raise fault(
      values, f"its {n} rows must be {rows} rows padded, as its mark says"
    )

  def make(allowed: conversions.Range | None) -> scaled_array.ScaledArray:
    return conversions.from_comfyui(
      values.read(),
      scale.read(),
      None if second is None else second.read(),
      rows=rows,
      global_scale_range=allowed,
    )

  others = (second, None if mark is None else mark.tensor)
  entry = Entry(
    name=values.name,
    layout=COMFYUI,
    format=format,
    shape=(rows, *_shape(format, values)[1:]),
    parts=(values, scale, *(x for x in others if x is not None)),
    make=make,
    activation_scale=_activation_scale(source, f"{base}.", COMFYUI),
  )
  return _with_rest_of_product(source, entry, f"{base}.", axis=-1)


def _activation_scale(
  source: stored.StoredTensors, prefix: str, layout: str
) -> str | None:
  name = f"{prefix}{conversions.ACTIVATION_SCALES[layout][0]}"
  return name if name in source.tensors else None


def _deepseek(
  source: stored.StoredTensors, values: stored.StoredTensor, prefix: str
) -> Entry | None:
  """Returns FP4 or FP8 with E8M0 scales; None for other scales."""
  for leaf in ("weight_scale_inv", "scale", "weight_scale"):
    name = f"{prefix}{leaf}"
    scale = source.tensors.get(name)
    if scale is not None and scale.dtype in (formats.PACKED, formats.E8M0):
      break
  else:
    return None
  format = fitting.deepseek_format("checkpoints.load", values, scale)
  return Entry(
    name=values.name,
    layout=DEEPSEEK,
    format=format,
    shape=_shape(format, values),
    parts=(values, scale),
    make=lambda _: conversions.from_deepseek(values.read(), scale.read()),
  )


def _mlx(
  source: stored.StoredTensors, values: stored.StoredTensor, base: str
) -> Entry | None:
  """Returns a weight of MLX's modes of floats; None for affine ones."""
  scales = _part(source, values, f"{base}.scales")
  if scales.dtype != formats.PACKED or f"{base}.biases" in source.tensors:
    return None
  if (name := f"{base}.global_scale") in source.tensors:
    raise fault(
      values, f"it has the global scale {name!r} of MLX, which is not supported"
    )
  format = fitting.mlx_format("checkpoints.load", values, scales)
  return Entry(
    name=values.name,
    layout=MLX,
    format=format,
    shape=(*scales.shape[:-1], scales.shape[-1] * format.block_size),
    parts=(values, scales),
    make=lambda _: conversions.from_mlx(values.read(), scales.read()),
  )


def _modelopt(
  source: stored.StoredTensors,
  values: stored.StoredTensor,
  prefix: str,
  is_swizzled: bool,
) -> Entry:
  """Returns a weight "up.weight" with "up.weight_scale", and so on.

  Of experts in one tensor, [E, n, k] or [E, k, n], "experts.up_proj" with
  "experts.up_proj_weight_scale".
  """
  scale = _part(source, values, f"{prefix}weight_scale")
  second = source.tensors.get(f"{prefix}weight_scale_2")
  if is_swizzled:  # torchao's parts, by other names
    entry = _torchao_parts(values, values.name, (scale, second), is_swizzled)
    entry = dataclasses.replace(entry, layout=MODELOPT_SWIZZLED)
    axis: int | None = -1
  else:
    format = fitting.find_format("checkpoints.load", values, scale)
    fitting.require_known_global(
      "checkpoints.load", format, "weight_scale_2", second is not None
    )
    entry = _linear_entry(
      name=values.name,
      layout=MODELOPT,
      format=format,
      convert=conversions.from_modelopt,
      values=values,
      scale=scale,
      second=second,
    )
    axis = fitting.blocked_axis(values, scale)
  assert axis is not None  # they fit a format
  entry = dataclasses.replace(
    entry, activation_scale=_activation_scale(source, prefix, MODELOPT)
  )
  return _with_rest_of_product(source, entry, prefix, axis)


def _with_rest_of_product(
  source: stored.StoredTensors, entry: Entry, prefix: str, axis: int
) -> Entry:
  """Returns the entry with what else of ModelOpt its product has."""
  values = entry.parts[0]
  for suffix in _SVDQUANT:
    if f"{prefix}{suffix}" in source.tensors:
      raise fault(
        values,
        f"{prefix}{suffix} says that the weight is one term of a sum"
        " (SVDQuant), which is not supported; use a checkpoint without"
        " SVDQuant",
      )
  awq = source.tensors.get(f"{prefix}pre_quant_scale")
  if awq is None:
    return entry
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
      values, "it has a weight_zero_point, and no block format has one"
    )
  scale = _part(source, values, f"{base}.weight_scale")
  second = source.tensors.get(f"{base}.weight_global_scale")
  format = fitting.find_format("checkpoints.load", values, scale)
  fitting.require_known_global(
    "checkpoints.load", format, "weight_global_scale", second is not None
  )
  entry = _linear_entry(
    name=f"{base}{_WEIGHT}",
    layout=COMPRESSED_TENSORS,
    format=format,
    convert=conversions.from_compressed_tensors,
    values=values,
    scale=scale,
    second=second,
  )
  name = _activation_scale(source, f"{base}.", COMPRESSED_TENSORS)
  return dataclasses.replace(entry, activation_scale=name)


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
  """Returns a weight of values, linear scales and perhaps a global scale."""
  axis = fitting.blocked_axis(values, scale)
  assert axis is not None  # they fit a format
  if second is not None:
    fitting.require_global_scale(
      "checkpoints.load", second.name, second, values, axis
    )

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
    shape=_shape(format, values, axis),
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
    raise fault(
      values,
      f"the header's metadata says that it is a {kind} of torchao, which is"
      f" not supported; {' and '.join(_TORCHAO_BLOCKS)} are supported."
      " Dequantize it with torchao and quantize the result",
    )
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
  entry = _torchao_parts(values, name, (scale, second), is_swizzled)
  return dataclasses.replace(
    entry, activation_scale=_activation_scale(source, prefix, TORCHAO)
  )


def _torchao_parts(
  values: stored.StoredTensor,
  name: str,
  scales: tuple[stored.StoredTensor, stored.StoredTensor | None],
  is_swizzled: bool,
) -> Entry:
  """Returns a weight of values, perhaps swizzled scales, and a global scale."""
  scale, second = scales
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
