# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The checkpoint to quantize: its shards, configuration and other files.

Each read copies a tensor into memory, so no file stays mapped.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from jaxplugin.checkpoints import (
  checkpoint_files,
  errors,
  recognition,
  safetensors_files,
  stored,
)

# Weights in other formats, which would not match the quantized ones.
OTHER_WEIGHTS: Final = (
  *(".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".onnx", ".msgpack"),
  ".npz",
)
_WEIGHT_FILES: Final = (safetensors_files.SUFFIX, *OTHER_WEIGHTS)
_REPLACED: Final = (checkpoint_files.CONFIG, checkpoint_files.QUANT_CONFIG)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceCheckpoint:
  """The checkpoint to quantize.

  Attributes:
    path: a file or a folder.
    shards: tensors of each safetensors file, by the file's name.
    index: the index file, None without one.
    config: the object in config.json, None without this file.
    copied: other files to copy, relative to the folder.
    left: other files that are not copied.
  """

  path: pathlib.Path
  shards: Mapping[str, stored.StoredTensors]
  index: pathlib.Path | None
  config: Mapping[str, Any] | None
  copied: tuple[pathlib.PurePath, ...]
  left: tuple[pathlib.PurePath, ...]

  @property
  def is_folder(self) -> bool:
    return self.path.is_dir()

  @property
  def tensors(self) -> Iterator[stored.StoredTensor]:
    for shard in self.shards.values():
      yield from shard.tensors.values()

  @property
  def model_type(self) -> str:
    """`model_type` of config.json; "" if it has none."""
    word = (self.config or {}).get("model_type")
    return word if isinstance(word, str) else ""


def unmapped(tensors: stored.StoredTensors) -> stored.StoredTensors:
  """Returns tensors whose `read` copies them into memory."""

  def own(tensor: stored.StoredTensor) -> stored.StoredTensor:
    def read() -> Any:
      data = safetensors_files.read_bytes(tensor, 0, tensor.nbytes)
      return data.view(tensor.dtype).reshape(tensor.shape)

    return dataclasses.replace(tensor, read=read)

  return dataclasses.replace(
    tensors, tensors={name: own(x) for name, x in tensors.tensors.items()}
  )


def open_source(who: str, path: pathlib.Path) -> SourceCheckpoint:
  """Opens a file or a folder of plain weights; reads no values.

  Raises:
    OSError: If a file cannot be read.
    CheckpointError: If a file breaks a rule, or a weight is quantized already.
  """
  files = checkpoint_files.paths_of(path)
  index = None
  if files[0].name.endswith(safetensors_files.INDEX_SUFFIX):
    index = files[0]
    path = index.parent
    if wrong := safetensors_files.open_index(index).misfits:
      raise errors.misfit_error(wrong)
    names = dict.fromkeys(safetensors_files.read_weight_map(index).values())
    files = [index.parent / name for name in names]
  if not all(file.suffix == safetensors_files.SUFFIX for file in files):
    raise errors.CheckpointError(
      f"{who}: the source must be safetensors files, got {files[0]}"
    )
  shards = {
    file.name: unmapped(safetensors_files.open_file(file)) for file in files
  }
  config_file = files[0].parent / checkpoint_files.CONFIG
  config = None
  if config_file.is_file():
    config = stored.read_object(config_file)
  _require_plain(who, config_file, shards, config)
  copied, left = _other_files(path, {*shards, index.name if index else ""})
  return SourceCheckpoint(
    path=path,
    shards=shards,
    index=index,
    config=config,
    copied=copied,
    left=left,
  )


def _require_plain(
  who: str,
  config_file: pathlib.Path,
  shards: Mapping[str, stored.StoredTensors],
  config: Mapping[str, Any] | None,
) -> None:
  """Raises CheckpointError if a weight is quantized already."""
  if config is not None and config.get(checkpoint_files.QUANTIZATION):
    raise errors.CheckpointError(
      f"{who}: {config_file} has a {checkpoint_files.QUANTIZATION}, so its"
      " weights are already quantized; pass the unquantized checkpoint"
    )
  together = stored.joined(
    {str(config_file.parent / name): x for name, x in shards.items()}
  )
  for entry in recognition.require_all(together).values():
    if entry.layout is not None:
      raise stored.fault(
        entry.parts[0],
        f"it is already quantized ({entry.layout}, {entry.format}); pass the"
        " unquantized checkpoint",
      )


def _other_files(
  path: pathlib.Path, taken: set[str]
) -> tuple[tuple[pathlib.PurePath, ...], tuple[pathlib.PurePath, ...]]:
  """Returns other files to copy, and other files that are not copied."""
  copied: list[pathlib.PurePath] = []
  left: list[pathlib.PurePath] = []
  if not path.is_dir():
    return (), ()
  for folder, folders, files in os.walk(path):
    base = pathlib.PurePath(os.path.relpath(folder, path))
    outside = {
      x for x in folders if x[0] == "." or (path / base / x).is_symlink()
    }
    left += [base / x for x in sorted(outside)]
    folders[:] = sorted({*folders} - outside)
    for name in sorted(files):
      is_top = base == pathlib.PurePath(".")
      if is_top and (name in taken or name in _REPLACED):
        continue
      is_weight = pathlib.PurePath(name).suffix in _WEIGHT_FILES
      is_index = name.endswith(".index.json")
      is_file = (path / base / name).is_file()
      to = copied if is_file and not is_weight and not is_index else left
      to.append(base / name)
  return tuple(copied), tuple(left)
