# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes ComfyUI's marks of quantized weights.

A tensor "NAME.comfy_quant" next to "NAME.weight" has the bytes of a JSON
object, {"format": "nvfp4"}. Or `_quantization_metadata` in the header of a
safetensors file has this object for each NAME under "layers". NAME may lack the
prefix that loaders add ("model.diffusion_model."). NVIDIA Model Optimizer also
writes `_quantization_metadata`, with a `quantization_config`, for weights in
another layout. Then the header's marks are ignored.

Sources: ComfyUI's QUANTIZATION.md, `_load_quantized_module` of comfy/ops.py and
`convert_old_quants` of comfy/utils.py; `build_layerwise_quant_metadata` and
`swizzle_nvfp4_scales` of modelopt/torch/export/diffusers_utils.py at a2fbac7.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from jaxplugin.checkpoints import errors, stored
from jaxplugin.core import formats

SUFFIX: Final = ".comfy_quant"
METADATA: Final = "_quantization_metadata"
FORMATS: Final = {"nvfp4": formats.NVFP4, "mxfp8": formats.MXFP8}
# Rows of values are padded to a multiple of this.
ROWS: Final = {formats.NVFP4: 16, formats.MXFP8: 32}
_CONFIG: Final = "quantization_config"
_FORMAT: Final = "format"
# The shape without padding, an addition that ComfyUI ignores.
_SHAPE: Final = "orig_shape"
_VERSION: Final = {"format_version": "1.0"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
  """A mark of one weight.

  Attributes:
    sign: the place of the mark, for messages.
    format: ComfyUI's word, "nvfp4".
    is_rotated: whether the weight is multiplied by a Hadamard matrix along k.
    rows: n without padding; None if the mark does not have it.
    tensor: the tensor with the mark; None if it is in the header.
  """

  sign: str
  format: str
  is_rotated: bool
  rows: int | None
  tensor: stored.StoredTensor | None


class Marks:
  """The marks of a checkpoint.

  Attributes:
    are_modelopt: whether Model Optimizer wrote the header.
  """

  def __init__(self, source: stored.StoredTensors) -> None:
    self._tensors = source.tensors
    where = "the header's"
    self._layers: Mapping[str, Any] = {}
    text = source.metadata.get(METADATA)
    if text is not None:
      layers = stored.parse_object(f"{where} {METADATA}", text).get("layers")
      if not isinstance(layers, dict):
        raise errors.CheckpointError(
          f"{where} {METADATA}: layers must be an object, got"
          f" {type(layers).__name__}"
        )
      self._layers = layers
    self.are_modelopt = "modelopt" in source.metadata.get(_CONFIG, "")

  def find(self, base: str) -> Mark | None:
    """Returns the mark of the weight "base.weight", or None.

    Raises:
      CheckpointError: If the mark breaks ComfyUI's rules.
    """
    tensor = self._tensors.get(f"{base}{SUFFIX}")
    if tensor is not None:
      where = f"{tensor.file}: {tensor.name!r}"
      mark: Any = stored.parse_object(where, tensor.read().tobytes())
    else:
      where = f"the header's {METADATA}"
      mark = self._in_header(base)
      if mark is None or self.are_modelopt:
        return None
    if isinstance(mark, str):
      mark = {_FORMAT: mark}
    word = mark.get(_FORMAT) if isinstance(mark, dict) else None
    if not isinstance(mark, dict) or not isinstance(word, str):
      raise errors.CheckpointError(
        f"{where}: it must say the format of {base!r}, got {word!r}"
      )
    more = mark.get("params")
    options = {**mark, **(more if isinstance(more, dict) else {})}
    shape = options.get(_SHAPE)
    rows = shape[0] if isinstance(shape, list) and shape else None
    return Mark(
      sign=repr(tensor.name) if tensor is not None else where,
      format=word,
      is_rotated=bool(options.get("convrot")),
      rows=rows if type(rows) is int else None,
      tensor=tensor,
    )

  def _in_header(self, base: str) -> Any:
    """Returns the header's mark of a weight, or None."""
    name = base
    while True:
      # A shorter name is this weight only if no other weight has the name.
      is_other = name != base and f"{name}.weight" in self._tensors
      if name in self._layers and not is_other:
        return self._layers[name]
      _, dot, name = name.partition(".")
      if not dot:
        return None


def mark(format: formats.BlockFormat, shape: tuple[int, ...]) -> np.ndarray:
  """Returns the bytes of a `comfy_quant` tensor, uint8[...]."""
  text = json.dumps(_object(format, shape)).encode()
  return np.frombuffer(text, np.uint8)


def metadata(
  weights: Iterable[tuple[str, formats.BlockFormat, tuple[int, ...]]],
) -> dict[str, str]:
  """Returns the header's metadata of (name, format, shape) of weights."""
  layers = {name: _object(format, shape) for name, format, shape in weights}
  return {METADATA: json.dumps({**_VERSION, "layers": layers})}


def _object(
  format: formats.BlockFormat, shape: tuple[int, ...]
) -> dict[str, Any]:
  made: dict[str, Any] = {_FORMAT: str(format)}
  if shape[0] % ROWS[format]:
    made[_SHAPE] = list(shape)
  return made
