# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What each layout makes of a weight: its parts, by name, dtype and shape.

The inverse of `conversions` and `recognition`; sources are those of the former.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from typing import Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import recognition
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.checkpoints.signs import comfyui
from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.quantization import api

_WEIGHT: Final = ".weight"
_ALL: Final = (formats.NVFP4, formats.MXFP8, formats.MXFP4)
_WORDS: Final = {dtype: w for w, dtype in safetensors_files.DTYPES.items()}
_BYTES: Final = _WORDS[formats.PACKED]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
  """A weight that is to be quantized.

  Attributes:
    name: as its file has it, and the model.
    shape: [n, k], [E, n, k] or, of some experts, [E, k, n].
    type_name: the file's word for its dtype, "BF16".
    axis: where k lies, -1 or -2.
    format: the one that it gets.
  """

  name: str
  shape: tuple[int, ...]
  type_name: str
  axis: int
  format: formats.BlockFormat

  def divided(self, by: int, axis: int | None = None) -> tuple[int, ...]:
    """The shape with k divided."""
    shape = list(self.shape)
    shape[self.axis if axis is None else axis] //= by
    return tuple(shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A tensor of a quantized weight.

  Attributes:
    name, type_name, shape: as the file gets them.
    take: the numbers, of a `ScaledArray`.
  """

  name: str
  type_name: str
  shape: tuple[int, ...]
  take: Callable[[scaled_array.ScaledArray], Any]

  @property
  def nbytes(self) -> int:
    itemsize = safetensors_files.DTYPES[self.type_name].itemsize
    return math.prod(self.shape) * itemsize

  def data(self, array: scaled_array.ScaledArray) -> np.ndarray:
    """Its bytes, uint8[nbytes]."""
    data = np.ascontiguousarray(np.asarray(self.take(array)))
    data = data.reshape(-1).view(np.uint8)
    assert data.size == self.nbytes, (self.name, data.size, self.nbytes)
    return data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """How a tool writes weights.

  Attributes:
    name: "modelopt".
    formats: those that it has.
    parts: of a weight, in the order in which they are made.
    refusal: why it cannot hold a weight, None where it can.
    turns_stacks: whether a stack [E, k, n] is written as [E, n, k].
    has_scale_of_each: whether parts of a stack have global scales of their own.
    divides: whether the global scale is written as what divides.
    shares: whether weights that engines fuse get one global scale.
  """

  name: str
  formats: tuple[formats.BlockFormat, ...]
  parts: Callable[[Weight], list[Part]]
  refusal: Callable[[Weight], str | None]
  turns_stacks: bool = False
  has_scale_of_each: bool = False
  divides: bool = False
  shares: bool = False

  def quantize(
    self, weight: Weight, x: np.ndarray, shared: np.ndarray | None = None
  ) -> scaled_array.ScaledArray:
    """The weight as this layout means it, by `jp.quantize`.

    Where the global scale is written as what divides, it is the reciprocal of
    an f32: the one nearest to that of `jp.quantize`.

    Args:
      weight: what it is.
      x: its numbers.
      shared: a global scale to use, f32.
    """
    axis = weight.axis
    if self.turns_stacks and axis != -1:
      x, axis = x.swapaxes(-1, -2), -1
    given = jnp.asarray(x)
    batch_dims = x.ndim - 2 if self.has_scale_of_each else 0

    def quantized(scale: np.ndarray | None) -> scaled_array.ScaledArray:
      return api.quantize(
        given,
        weight.format,
        axis=axis,
        batch_dims=batch_dims,
        global_scale=None if scale is None else jnp.asarray(scale),
      )

    if not self.divides or not weight.format.has_global_scale:
      return quantized(shared)
    if shared is None:
      array = quantized(None)
      shared = np.asarray(array.global_scale).reshape(())
      if divided(divided(shared)) == shared:
        return array
    return quantized(divided(divided(shared)))


def divided(scale: np.ndarray) -> np.ndarray:
  """1 / scale, in f32."""
  return np.float32(1) / np.asarray(scale, np.float32)


def _one(array: scaled_array.ScaledArray) -> np.ndarray:
  return np.asarray(array.global_scale, np.float32).reshape(())


def _values(name: str, weight: Weight) -> Part:
  format = weight.format
  if format.is_fp4:
    return Part(
      name=name,
      type_name=_BYTES,
      shape=weight.divided(2),
      take=lambda array: array.values,
    )
  return Part(
    name=name,
    type_name=_WORDS[format.values_dtype],
    shape=weight.shape,
    take=lambda array: array.values,
  )


def _scale(name: str, weight: Weight, *, as_bytes: bool) -> Part:
  format = weight.format
  return Part(
    name=name,
    type_name=_BYTES if as_bytes else _WORDS[format.scale_dtype],
    shape=weight.divided(format.block_size),
    take=lambda array: array.scale,
  )


def _modelopt_parts(weight: Weight) -> list[Part]:
  is_own = weight.name.endswith(_WEIGHT)
  base = weight.name.removesuffix(_WEIGHT)
  prefix = f"{base}." if is_own else f"{base}_"
  has_global = weight.format.has_global_scale
  parts = [
    _values(weight.name, weight),
    _scale(f"{prefix}weight_scale", weight, as_bytes=not has_global),
  ]
  if has_global:
    parts.append(
      Part(name=f"{prefix}weight_scale_2", type_name="F32", shape=(), take=_one)
    )
  return parts


def _modelopt_refusal(weight: Weight) -> str | None:
  if len(weight.shape) == 2:
    return None
  if weight.axis == -1:
    return "layout modelopt does not store experts [E, n, k] in one tensor"
  if weight.format != formats.NVFP4:
    return f"layout modelopt does not store {weight.format} experts [E, k, n]"
  return None


def _compressed_parts(weight: Weight) -> list[Part]:
  base = weight.name.removesuffix(_WEIGHT)
  format = weight.format
  values = f"{base}.weight_packed" if format.is_fp4 else weight.name
  parts = [
    _values(values, weight),
    _scale(
      f"{base}.weight_scale", weight, as_bytes=not format.has_global_scale
    ),
  ]
  if format.has_global_scale:
    parts.append(
      Part(
        name=f"{base}.weight_global_scale",
        type_name="F32",
        shape=(1,),
        take=lambda array: divided(_one(array)),
      )
    )
  return parts


def _compressed_refusal(weight: Weight) -> str | None:
  if len(weight.shape) != 2:
    return "layout compressed-tensors does not store experts in one tensor"
  if not weight.name.endswith(_WEIGHT):
    return "layout compressed-tensors stores only weights named *.weight"
  return None


def _gpt_oss_parts(weight: Weight) -> list[Part]:
  # Original names, "mlp1_weight.blocks", and those of Hugging Face.
  dot = "." if weight.name.endswith("_weight") else "_"
  *lead, n, k = weight.shape
  if weight.axis == -2:
    n, k = k, n
  blocks = (*lead, n, k // weight.format.block_size)
  size = weight.format.block_size // 2
  return [
    Part(
      name=f"{weight.name}{dot}blocks",
      type_name=_BYTES,
      shape=(*blocks, size),
      take=lambda array: array.values,
    ),
    Part(
      name=f"{weight.name}{dot}scales",
      type_name=_BYTES,
      shape=blocks,
      take=lambda array: array.scale,
    ),
  ]


def _gpt_oss_refusal(weight: Weight) -> str | None:
  if len(weight.shape) == 2:
    return "layout gpt-oss stores only quantized experts"
  return None


def _torchao_parts(weight: Weight) -> list[Part]:
  module, _, leaf = weight.name.rpartition(".")
  prefix = f"{module}._{leaf}_"
  parts = [
    _values(f"{prefix}qdata", weight),
    _scale(f"{prefix}scale", weight, as_bytes=False),
  ]
  if weight.format.has_global_scale:
    is_stack = len(weight.shape) > 2
    parts.append(
      Part(
        name=f"{prefix}per_tensor_scale",
        type_name="F32",
        shape=(weight.shape[0], 1, 1) if is_stack else (),
        take=lambda array: array.global_scale,
      )
    )
  return parts


def _torchao_refusal(weight: Weight) -> str | None:
  if weight.axis != -1:
    return "layout torchao stores k as the last dimension"
  if "." not in weight.name:
    return "layout torchao stores only names with a dot"
  return None


def _comfyui_parts(weight: Weight) -> list[Part]:
  base = weight.name.removesuffix(_WEIGHT)
  format, (n, k) = weight.format, weight.shape
  rows = extents.round_up(n, comfyui.ROWS[format])

  def values(array: scaled_array.ScaledArray) -> np.ndarray:
    codes = np.asarray(array.values).view(np.uint8)
    if format.is_fp4:  # the first value in the high nibble
      codes = np.bitwise_or(codes << 4, codes >> 4, dtype=np.uint8)
    return np.pad(codes, ((0, rows - n), (0, 0)))

  def scale(array: scaled_array.ScaledArray) -> Any:
    return layouts.swizzle_scale(jnp.asarray(array.scale))

  mark = comfyui.mark(format, weight.shape)
  parts = [
    dataclasses.replace(
      _values(weight.name, weight),
      shape=(rows, k // 2 if format.is_fp4 else k),
      take=values,
    ),
    dataclasses.replace(
      _scale(
        f"{base}.weight_scale", weight, as_bytes=not format.has_global_scale
      ),
      shape=layouts.swizzled_shape((n, k // format.block_size)),
      take=scale,
    ),
  ]
  if format.has_global_scale:
    parts.append(
      Part(name=f"{base}.weight_scale_2", type_name="F32", shape=(), take=_one)
    )
  parts.append(
    Part(
      name=f"{base}{comfyui.SUFFIX}",
      type_name=_BYTES,
      shape=mark.shape,
      take=lambda _: mark,
    )
  )
  return parts


def _comfyui_refusal(weight: Weight) -> str | None:
  if len(weight.shape) != 2:
    return "layout comfyui does not store experts in one tensor"
  if not weight.name.endswith(_WEIGHT):
    return "layout comfyui stores only weights named *.weight"
  return None


LAYOUTS: Final = {
  layout.name: layout
  for layout in (
    Layout(
      name=recognition.MODELOPT,
      formats=_ALL,
      parts=_modelopt_parts,
      refusal=_modelopt_refusal,
      shares=True,
    ),
    Layout(
      name=recognition.COMPRESSED_TENSORS,
      formats=_ALL,
      parts=_compressed_parts,
      refusal=_compressed_refusal,
      divides=True,
      shares=True,
    ),
    Layout(
      name=recognition.GPT_OSS,
      formats=(formats.MXFP4,),
      parts=_gpt_oss_parts,
      refusal=_gpt_oss_refusal,
      turns_stacks=True,
    ),
    Layout(
      name=recognition.TORCHAO,
      formats=_ALL,
      parts=_torchao_parts,
      refusal=_torchao_refusal,
      has_scale_of_each=True,
    ),
    Layout(
      name=recognition.COMFYUI,
      formats=tuple(comfyui.FORMATS.values()),
      parts=_comfyui_parts,
      refusal=_comfyui_refusal,
    ),
  )
}

# Their names, the first of them what `quantize` takes unless told otherwise.
WRITTEN_LAYOUTS: Final = tuple(LAYOUTS)
WRITTEN_FORMATS: Final = tuple(map(str, _ALL))


def find(
  who: str, layout: str, format: formats.BlockFormat | str
) -> tuple[Layout, formats.BlockFormat]:
  """A layout and a format that it has.

  Raises:
    ValueError: there is no such layout or format, or it does not have it.
  """
  format = formats.resolve(who, format)
  if layout not in LAYOUTS:
    raise ValueError(
      f"{who}: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}"
    )
  found = LAYOUTS[layout]
  if format not in found.formats:
    raise ValueError(
      f"{who}: layout {layout} stores {', '.join(map(str, found.formats))},"
      f" got {format}; for {format} choose layout"
      f" {', '.join(x.name for x in LAYOUTS.values() if format in x.formats)}"
      if any(format in x.formats for x in LAYOUTS.values())
      else (
        f"{who}: format must be one that a layout stores, got {format};"
        f" choose {', '.join(map(str, _ALL))}"
      )
    )
  return found, format
