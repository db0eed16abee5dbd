# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`load`: a checkpoint's tensors by name, each read when it is used."""

from __future__ import annotations

import collections
import os
import pathlib
import re
import warnings
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin.checkpoints import conversions
from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import gguf_files
from jaxplugin.checkpoints import json_text
from jaxplugin.checkpoints import progress as reporting
from jaxplugin.checkpoints import recognition
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.checkpoints import stored

SAFETENSORS: Final = ".safetensors"
_GGUF: Final = ".gguf"
# Where a folder says who quantized it: the file, the object in it, its words.
_CONFIGS: Final = (
  ("hf_quant_config.json", "quantization", ("quant_algo",)),
  (
    "config.json",
    "quantization_config",
    ("quant_method", "quant_algo", "format"),
  ),
)

_Key = tuple[str, str, str, str]  # layout, format, shape and name


class Checkpoint(Mapping[str, Any]):
  """A checkpoint's tensors by name; what `load` returns.

  Indexing makes the array anew: a `ScaledArray` of each quantized weight under
  the name it has in the model, and plain NumPy arrays of all else. They are
  views of the mapped file (of GGUF's blocks: one copy), which the system reads
  as their numbers are used. `str` is a table of what was found.

  Attributes:
    path: what was loaded.
    config: what the configuration beside it says, "" if nothing.
    entries: what there is under each name; nothing of it is read.
  """

  def __init__(
    self,
    path: pathlib.Path,
    config: str,
    entries: Mapping[str, recognition.Entry],
    global_scale_range: conversions.Range | None,
  ) -> None:
    self.path = path
    self.config = config
    self.entries = entries
    self._global_scale_range = global_scale_range

  def __getitem__(self, name: str) -> Any:
    """The array of a name.

    Raises:
      KeyError: there is none.
      CheckpointError: its global scale is out of range, or it is of a type of
        GGUF that has no format here.
    """
    entry = self.entries[name]
    try:
      return entry.make(self._global_scale_range)
    except errors.CheckpointError as error:
      raise recognition.fault(entry.parts[0], str(error)) from None

  def __iter__(self) -> Iterator[str]:
    return iter(self.entries)

  def __len__(self) -> int:
    return len(self.entries)

  def read(
    self, progress: reporting.Progress | bool | None = None
  ) -> dict[str, Any]:
    """All of it as arrays of JAX, each brought to its device once.

    Numbers of 64 bits become what `jnp.asarray` makes of them.

    Args:
      progress: called after each name with the bytes read and all of them. Or
        True for a bar on standard error, False for none; None is True where
        standard error is a terminal.

    Raises:
      CheckpointError: as of indexing.
    """
    total = sum(entry.nbytes for entry in self.entries.values())
    report = reporting.reporter(progress)
    done, tree = 0, {}
    for name, entry in self.entries.items():
      tree[name] = jax.tree.map(jnp.asarray, self[name])
      done += entry.nbytes
      report(done, total)
    return tree

  def __str__(self) -> str:
    """A table: layout, format, shape, bytes and name; a line for like ones."""
    bytes_of: collections.Counter[_Key] = collections.Counter()
    count_of: collections.Counter[_Key] = collections.Counter()
    for entry in self.entries.values():
      key = (
        entry.layout or "-",
        entry.type_name,
        str(list(entry.shape)),
        # Names are anybody's, and a terminal obeys some characters.
        re.sub(r"\d+", "*", repr(entry.name)[1:-1]),
      )
      bytes_of[key] += entry.nbytes
      count_of[key] += 1
    rows = [("layout", "format", "shape", "bytes", "count", "name")]
    for key, count in count_of.items():
      layout, format, shape, name = key
      rows.append(
        (layout, format, shape, f"{bytes_of[key]:,}", str(count), name)
      )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{self.path}: {self.config or 'no quantization_config'}"]
    for row in rows:
      cells = [x.ljust(w) for x, w in zip(row[:3], widths[:3], strict=True)]
      cells += [x.rjust(w) for x, w in zip(row[3:5], widths[3:5], strict=True)]
      lines.append("  ".join([*cells, row[5]]))
    total = sum(bytes_of.values())
    lines.append(f"{len(self.entries)} names, {total:,} bytes")
    if awq := _with_pre_quant_scale(self.entries):
      lines.append(
        f"{len(awq)} weights want their inputs multiplied by pre_quant_scale"
      )
    return "\n".join(lines)

  def __repr__(self) -> str:
    return f"Checkpoint({str(self.path)!r}, {len(self.entries)} names)"


def load(
  path: str | os.PathLike[str],
  *,
  global_scale_range: conversions.Range | None = conversions.GLOBAL_SCALE_RANGE,
) -> Checkpoint:
  """Opens a checkpoint; reads no more of it than what describes its tensors.

  Layouts are recognized by names, dtypes and shapes: ModelOpt, compressed-
  tensors, gpt-oss, torchao and GGUF. A quantized weight is one `ScaledArray`,
  called as in the model ("layers.0.up_proj.weight"); its parts are no names of
  their own. A `pre_quant_scale` keeps its own, and `entries[name]` of its
  weight knows that. All else passes through: what is not quantized,
  `input_scale` and `input_global_scale`, and weights in formats that are none
  here (INT4, FP8 with one scale a tensor), whose parts keep their names.

  Args:
    path: a .safetensors file, a .safetensors.index.json, a .gguf file, or a
      folder with one of these, or with several .safetensors files.
    global_scale_range: smallest and largest global scale that may multiply, or
      None for any. One that is used the wrong way round is off by millions.

  Returns:
    A `Checkpoint`, a mapping of names to arrays. `print` shows what was found.

  Raises:
    TypeError: path is none.
    OSError: a file cannot be read.
    CheckpointError: a file breaks a rule of its format, a weight's parts are
      missing or do not fit each other, it is of packed FP6 or of SVDQuant, or
      there is nothing to load.

  Warns:
    PreQuantScaleWarning: inputs of some weights are to be multiplied first.
  """
  errors.require_path("checkpoints.load", "path", path)
  path = pathlib.Path(path)
  files = files_of(path)
  source = _open(files)
  folder = path if path.is_dir() else path.parent
  config = "" if files[0].suffix == _GGUF else _config(folder)
  is_compressed = recognition.COMPRESSED_TENSORS in config
  layout = (
    recognition.COMPRESSED_TENSORS if is_compressed else recognition.MODELOPT
  )
  entries = recognition.recognize(source, layout)
  if awq := _with_pre_quant_scale(entries):
    warnings.warn(
      f"{path}: {len(awq)} weights, {awq[0].name!r} the first, are right only"
      " where what they are multiplied by is itself multiplied by their"
      f" pre_quant_scale, {awq[0].pre_quant_scale!r} (AWQ); Entry."
      "pre_quant_scale has its name",
      errors.PreQuantScaleWarning,
      stacklevel=2,
    )
  return Checkpoint(path, config, entries, global_scale_range)


def _with_pre_quant_scale(
  entries: Mapping[str, recognition.Entry],
) -> list[recognition.Entry]:
  return [x for x in entries.values() if x.pre_quant_scale is not None]


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
  """The files to open: one, or several safetensors files."""
  if not path.is_dir():
    return [path]
  for pattern in (f"*{safetensors_files.INDEX_SUFFIX}", f"*{SAFETENSORS}"):
    if found := sorted(path.glob(pattern)):
      break
  else:
    found = sorted(path.glob(f"*{_GGUF}"))
  is_one = len(found) == 1 or (found and found[0].suffix == SAFETENSORS)
  if not is_one:
    names = ", ".join(file.name for file in found) or "none of them"
    raise errors.CheckpointError(
      f"{path}: a checkpoint is one .safetensors.index.json, .safetensors files"
      f" or one .gguf file, got {names}; name the file"
    )
  return found


def _open(files: list[pathlib.Path]) -> stored.StoredTensors:
  tensors: dict[str, stored.StoredTensor] = {}
  metadata: dict[str, str] = {}
  for file in files:
    source = _open_one(file)
    for name, tensor in source.tensors.items():
      if name in tensors:
        raise recognition.fault(
          tensor, f"{tensors[name].file} has a tensor of this name too"
        )
      tensors[name] = tensor
    metadata |= source.metadata
  return stored.StoredTensors(tensors=tensors, metadata=metadata)


def _open_one(file: pathlib.Path) -> stored.StoredTensors:
  if file.name.endswith(safetensors_files.INDEX_SUFFIX):
    return safetensors_files.open_index(file)
  if file.suffix == SAFETENSORS:
    return safetensors_files.open_file(file)
  if file.suffix == _GGUF:
    return gguf_files.open_file(file)
  raise errors.CheckpointError(
    f"{file}: a checkpoint is a folder, or a file that ends in .safetensors,"
    f" {safetensors_files.INDEX_SUFFIX} or .gguf"
  )


def _config(folder: pathlib.Path) -> str:
  """What the configurations in a folder say of its quantization."""
  said = []
  for file, key, words in _CONFIGS:
    path = folder / file
    if path.is_file():
      told = json_text.read_object(path).get(key)
      if isinstance(told, dict):
        values = [f"{w} {told[w]}" for w in words if told.get(w)]
        said.append(f"{file} says {', '.join(values)}")
  return "; ".join(said)
