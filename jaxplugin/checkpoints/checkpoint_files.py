# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds and opens the files of a checkpoint, and reads its configurations."""

from __future__ import annotations

import errno
import pathlib
import re
from collections.abc import Sequence
from typing import Any, Final

from jaxplugin.checkpoints import (
  errors,
  gguf_files,
  safetensors_files,
  stored,
)

CONFIG: Final = "config.json"
QUANTIZATION: Final = "quantization_config"  # a key of config.json
QUANT_CONFIG: Final = "hf_quant_config.json"
_GGUF: Final = ".gguf"
_FILES: Final = (safetensors_files.SUFFIX, _GGUF, ".json")
# Owner and name of a repository of Hugging Face.
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+")
# One of several files that gguf-split wrote.
_SPLIT: Final = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf$")
_MLX: Final = "quantization"  # the key of MLX's config.json
# Descriptions of a folder's quantization: the file, its object, and the keys.
_CONFIGS: Final = (
  (QUANT_CONFIG, "quantization", ("quant_algo",)),
  (
    CONFIG,
    QUANTIZATION,
    (
      *("quant_method", "quant_algo", "format", "checkpoint_format"),
      *("bits", "expert_dtype"),
    ),
  ),
  (CONFIG, _MLX, ("mode", "bits", "group_size")),
)


def paths_of(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files to open: one, or several of safetensors or of GGUF.

  Raises:
    FileNotFoundError: If the path does not exist.
    CheckpointError: If a folder has no such file, or several checkpoints.
  """
  if not path.exists():
    message = "no such file or directory"
    if _REPOSITORY.fullmatch(str(path)) and path.suffix not in _FILES:
      message += (
        "; for a repository of Hugging Face, pass the folder that"
        " huggingface_hub.snapshot_download returns"
      )
    raise FileNotFoundError(errno.ENOENT, message, str(path))
  if not path.is_dir():
    return _parts(path)
  for pattern in (
    f"*{safetensors_files.INDEX_SUFFIX}",
    f"*{safetensors_files.SUFFIX}",
  ):
    if found := sorted(path.glob(pattern)):
      break
  else:
    found = sorted(path.glob(f"*{_GGUF}"))
  if found and found[0].suffix == safetensors_files.SUFFIX:
    return found
  if not found or not {*found} <= {*(parts := _parts(found[0]))}:
    names = ", ".join(file.name for file in found) or "none of them"
    raise errors.fault(
      path,
      "a folder must contain one .safetensors.index.json, .safetensors files"
      f" or one .gguf file, got {names}; pass the path of the file",
    )
  return parts


def _parts(file: pathlib.Path) -> list[pathlib.Path]:
  """Returns a file, or the files that gguf-split wrote together with it.

  Raises:
    CheckpointError: If one of them is missing.
  """
  if not (split := _SPLIT.match(file.name)):
    return [file]
  name, count = split[1], int(split[2])
  found = []
  for i in range(1, count + 1):
    found.append(part := file.with_name(f"{name}-{i:05d}-of-{split[2]}{_GGUF}"))
    if not part.exists():
      raise errors.fault(
        part, f"it is one of {count} files, and does not exist; download it"
      )
  return found


def open_all(paths: Sequence[pathlib.Path]) -> stored.StoredTensors:
  """Returns the tensors of the files of one checkpoint.

  Raises:
    OSError: If a file cannot be read.
    CheckpointError: If a file breaks a rule, or is missing.
  """
  found = stored.joined({str(path): _open_one(path) for path in paths})
  if paths[0].suffix != _GGUF:
    return found
  count = int(found.metadata.get(gguf_files.SPLIT_COUNT, 1))
  if count > 1 and count != len(paths):
    raise errors.fault(
      paths[0],
      f"it is one of {count} files, whose names must be"
      f" NAME-00001-of-{count:05d}{_GGUF} and so on; rename them",
    )
  return found


def _open_one(file: pathlib.Path) -> stored.StoredTensors:
  if file.name.endswith(safetensors_files.INDEX_SUFFIX):
    return safetensors_files.open_index(file)
  if file.suffix == safetensors_files.SUFFIX:
    return safetensors_files.open_file(file)
  if file.suffix == _GGUF:
    return gguf_files.open_file(file)
  raise errors.fault(
    file,
    "a checkpoint must be a folder or a file that ends in .safetensors,"
    f" {safetensors_files.INDEX_SUFFIX} or .gguf",
  )


def unread(
  path: pathlib.Path,
  paths: Sequence[pathlib.Path],
  source: stored.StoredTensors,
) -> list[str]:
  """Returns the names of a folder's files of weights that were not opened."""
  if not path.is_dir():
    return []
  opened = {*map(str, paths), *(x.file for x in source.tensors.values())}
  return sorted(
    file.name
    for suffix in (safetensors_files.SUFFIX, _GGUF)
    for file in path.glob(f"*{suffix}")
    if str(file) not in opened
  )


def read_config(
  paths: Sequence[pathlib.Path],
) -> tuple[str, dict[str, Any]]:
  """Returns the quantization in the configurations next to files.

  Returns:
    A description for messages, "" without a quantization, and the object of
    MLX, {} without one. Files of GGUF have no configurations.
  """
  if paths[0].suffix == _GGUF:
    return "", {}
  found, mlx = [], {}
  for file, key, words in _CONFIGS:
    path = paths[0].parent / file
    if path.is_file():
      section = stored.read_object(path).get(key)
      if isinstance(section, dict):
        if (file, key) == (CONFIG, _MLX):
          mlx = section
        values = [f"{w} {section[w]}" for w in words if section.get(w)]
        found.append(
          f"{file} says {', '.join(values)}"
          if values
          else f"{file} has a {key}"
        )
  return "; ".join(found), mlx
