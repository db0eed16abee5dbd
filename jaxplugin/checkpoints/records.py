# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of a checkpoint layout, and of the weights that it reads and writes.

`layouts.py` has a `Layout` for each tool's layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxplugin.arrays import layouts as array_layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import assembly
from jaxplugin.checkpoints import comfyui_marks
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.checkpoints import stored
from jaxplugin.core import formats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
  """Tensors of a checkpoint, and descriptions that decide their layout.

  Attributes:
    source: the tensors.
    marks: ComfyUI's marks.
    layout: the layout that the caller names; None if the caller names none.
    config: the quantization in the configuration files, "" if nothing.
  """

  source: stored.StoredTensors
  marks: comfyui_marks.Marks
  layout: str | None
  config: str

  @property
  def tensors(self) -> Mapping[str, stored.StoredTensor]:
    return self.source.tensors

  def part(self, values: stored.StoredTensor, name: str) -> stored.StoredTensor:
    """Returns the scales of a weight.

    Raises:
      CheckpointError: If the checkpoint does not have them.
    """
    if name not in self.tensors:
      raise stored.fault(values, f"its scales, {name!r}, must be there too")
    return self.tensors[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """The contents of a checkpoint under one name.

  Attributes:
    name: the weight's name in the unquantized model.
    layout: the layout; None for a plain tensor.
    format: the weight's format; None for a plain tensor.
    shape: the logical shape.
    parts: the tensors that hold the weight, the values first.
    make: makes the array; takes the range of global scales.
    global_scale: the part with the global scale; None if it has none.
    pre_quant_scale: the name of a scale along k by which the activation must be
      multiplied first (AWQ of ModelOpt); None if it has none.
    activation_scale: the name of the calibrated global scale of the activation,
      see `layouts.activation_scale`; None if it has none.
    others: layouts that would read other numbers from the same tensors, if
      neither the file nor a configuration decides.
  """

  name: str
  layout: str | None
  format: formats.BlockFormat | None
  shape: tuple[int, ...]
  parts: tuple[stored.StoredTensor, ...]
  make: Callable[[assembly.Range | None], Any]
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
class WeightToWrite:
  """A weight to quantize and write.

  Attributes:
    name: its name in the model and in the source's file.
    shape: [n, k], [E, n, k] or, for some experts, [E, k, n].
    type_name: the file's word for its dtype, "BF16".
    axis: the axis of k, -1 or -2.
    format: the format to quantize to.
  """

  name: str
  shape: tuple[int, ...]
  type_name: str
  axis: int
  format: formats.BlockFormat

  def divided(self, by: int) -> tuple[int, ...]:
    """Returns the shape with k divided."""
    shape = list(self.shape)
    shape[self.axis] //= by
    return tuple(shape)

  @property
  def scale_shape(self) -> tuple[int, ...]:
    axis = self.axis % len(self.shape)
    return array_layouts.linear_scale_shape(self.format, self.shape, axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A tensor to write for a quantized weight.

  Attributes:
    name, type_name, shape: name, dtype and shape of the tensor in the file.
    take: returns its numbers from a `ScaledArray`.
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
    """Returns its bytes, uint8[nbytes]."""
    data = np.ascontiguousarray(np.asarray(self.take(array)))
    data = data.reshape(-1).view(np.uint8)
    assert data.size == self.nbytes, (self.name, data.size, self.nbytes)
    return data


# Takes a format and the modules that stay unquantized.
_Config = Callable[[formats.BlockFormat, list[str]], dict[str, Any]]
# Takes the names of a file's tensors and, for quantized ones, the weight.
_Metadata = Callable[
  [Sequence[tuple[str, WeightToWrite | None]]], Mapping[str, str]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """The way in which a tool stores quantized weights.

  Attributes:
    name: the public name, "modelopt".
    recognize: returns the weight that has a tensor as its values, or None. None
      if names do not identify the layout.
    read: returns a weight whose parts have the names that several layouts use
      ("weight_scale"), by its values and the prefix of these names. None if the
      layout uses other names.
    activation_scale: the tensor with the global scale of an activation, and
      whether it divides; None if the layout has no such tensor.
    formats: formats that can be written; () if the layout is only read.
    parts: returns the tensors to write for a weight.
    refusal: returns why the layout cannot store a weight, or None.
    config: returns `quantization_config` of config.json, by the format and the
      unquantized modules; None if the tool reads none.
    quant_config: the same for `hf_quant_config.json`.
    metadata: returns the header's metadata of a file's tensors, by their names
      and, of quantized ones, the weight.
    transposes_stacks: whether a stack [E, k, n] is written as [E, n, k].
    has_scale_of_each: whether each matrix of a stack has a global scale.
    divides: whether the written global scale divides.
    shares: whether weights that engines fuse get one global scale.
  """

  name: str
  recognize: Callable[[Contents, stored.StoredTensor], Entry | None] | None = (
    None
  )
  read: Callable[[Contents, stored.StoredTensor, str], Entry] | None = None
  activation_scale: tuple[str, bool] | None = None
  formats: tuple[formats.BlockFormat, ...] = ()
  parts: Callable[[WeightToWrite], list[Part]] = lambda weight: []
  refusal: Callable[[WeightToWrite], str | None] = lambda weight: None
  config: _Config | None = None
  quant_config: _Config | None = None
  metadata: _Metadata = lambda tensors: {}
  transposes_stacks: bool = False
  has_scale_of_each: bool = False
  divides: bool = False
  shares: bool = False
