# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of a checkpoint layout, and of the weights that it reads and writes.

`layouts.py` has a `Layout` for each tool's layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import assembly, comfyui_marks, stored
from jaxplugin.core import formats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
  """Tensors of a checkpoint, and descriptions that decide their layout.

  Attributes:
    source: the tensors.
    marks: ComfyUI's marks.
    layout: the layout that the caller names; None if the caller names none.
    config: the quantization in the configuration files, "" if nothing.
    mlx: the quantization in MLX's configuration, {} without one.
  """

  source: stored.StoredTensors
  marks: comfyui_marks.Marks
  layout: str | None
  config: str
  mlx: Mapping[str, Any]

  @property
  def tensors(self) -> Mapping[str, stored.StoredTensor]:
    return self.source.tensors

  @property
  def tool(self) -> str:
    """The layout in the header of files of this package, or the configuration.

    Plain tensors of such files may have names of quantized ones, so the header
    decides only between layouts.
    """
    return self.source.metadata.get(stored.LAYOUT) or self.config

  @property
  def is_own(self) -> bool:
    """Whether this package wrote all files, with all parts of each weight."""
    return stored.LAYOUT in self.source.metadata

  def existing(self, name: str) -> str | None:
    """Returns a name if there is a tensor of that name, or None."""
    return name if name in self.tensors else None

  def part(self, values: stored.StoredTensor, name: str) -> stored.StoredTensor:
    """Returns the scales of a weight.

    Raises:
      CheckpointError: If the checkpoint does not have them.
    """
    if name not in self.tensors:
      raise stored.fault(
        values,
        f"its scales, {name!r}, must be there too; add the file that has them",
      )
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
    kernel: kernel_shape, contracting and dtype if `save` was given a
      `QuantizedWeight`; None for others.
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
  kernel: tuple[Any, ...] | None = None

  @property
  def nbytes(self) -> int:
    """Bytes of all parts in the file."""
    return sum(part.nbytes for part in self.parts)

  @property
  def type_name(self) -> str:
    """The format, or the file's word for a dtype."""
    return str(self.format or self.parts[0].type_name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorDecision:
  """The decision to quantize or to copy a tensor.

  Attributes:
    tensor: the tensor of the source. A weight to quantize is [n, k], [E, n, k]
      or, for some experts, [E, k, n].
    format: the format to quantize to; None if the tensor is copied.
    axis: the axis of k, -1 or -2.
    parts: dtypes and shapes of the tensors that replace it, by their names;
      empty if it is copied.
    reason: why it is copied; "" if it is quantized.
  """

  tensor: stored.StoredTensor
  format: formats.BlockFormat | None = None
  axis: int = -1
  parts: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(
    default_factory=dict
  )
  reason: str = ""

  @property
  def nbytes(self) -> int:
    """Bytes to write."""
    if self.format is None:
      return self.tensor.nbytes
    return sum(x.size * x.dtype.itemsize for x in self.parts.values())


_Tensors = Callable[[str, scaled_array.ScaledArray], dict[str, Any]]
# Takes a format and the modules that stay unquantized.
_Config = Callable[[formats.BlockFormat, list[str]], dict[str, Any]]
_Metadata = Callable[[Sequence[TensorDecision]], Mapping[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """The way in which a tool stores quantized weights.

  Attributes:
    name: the public name, "modelopt".
    recognize: returns the weight that has a tensor as its values, or None. None
      if the first layout of `named_scales` also recognizes this one.
    activation_scale: the tensor with the global scale of an activation, and
      whether it divides; None if the layout has no such tensor.
    formats: formats that can be written; () if the layout is only read.
    tensors: returns the tensors of a quantized weight, by its name and array.
      Arrays are NumPy's, or traced to find the dtypes and shapes to write.
    refusal: returns why the layout cannot store the weight of a decision, or
      None.
    config: returns `quantization_config` of config.json, by the format and the
      unquantized modules; None if the tool reads none.
    quant_config: the same for `hf_quant_config.json`.
    metadata: returns the header's metadata of a file's tensors.
    transposes_stacks: whether a stack [E, k, n] is written as [E, n, k].
    has_scale_of_each: whether each matrix of a stack has a global scale.
    divides: whether the written global scale divides.
    shares: whether weights that engines fuse get one global scale.
  """

  name: str
  recognize: Callable[[Contents, stored.StoredTensor], Entry | None] | None = (
    None
  )
  activation_scale: tuple[str, bool] | None = None
  formats: tuple[formats.BlockFormat, ...] = ()
  tensors: _Tensors = lambda name, array: {}
  refusal: Callable[[TensorDecision], str | None] = lambda decision: None
  config: _Config | None = None
  quant_config: _Config | None = None
  metadata: _Metadata = lambda decisions: {}
  transposes_stacks: bool = False
  has_scale_of_each: bool = False
  divides: bool = False
  shares: bool = False
