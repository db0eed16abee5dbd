# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors and JSON of untrusted files, and functions that read them."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from jaxplugin.checkpoints import errors
from jaxplugin.core import strict_json

# The safetensors package has the same limit for a header.
MAX_JSON_BYTES: Final = 100_000_000
# Limit on objects, lists and their items, counted by braces, brackets and
# commas. Python uses up to 200 bytes for an item of 3 bytes of text, so 400 MB.
# The header of a tensor has about ten.
MAX_JSON_ITEMS: Final = 2_000_000
# A key of a header's metadata: the layout that this package wrote.
LAYOUT: Final = "jaxplugin.layout"
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
  """A tensor of a file.

  Attributes:
    file: the path, for messages.
    name: the name in the file.
    type_name: the file's word for its dtype, "BF16".
    dtype, shape: dtype and shape of the array that `read` returns.
    read: returns the array, a view of the mapped file.
    begin: offset of its first byte in the file; None for an array in memory.
    values_shape: the shape of its values; None if it is `shape`.
    refusal: why `read` raises CheckpointError, "" if it does not.
  """

  file: str
  name: str
  type_name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]
  begin: int | None = None
  values_shape: tuple[int, ...] | None = None
  refusal: str = ""

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  @property
  def logical_shape(self) -> tuple[int, ...]:
    """The shape of its values, which may share bytes."""
    return self.shape if self.values_shape is None else self.values_shape


def fault(tensor: StoredTensor, rule: str) -> errors.CheckpointError:
  """Returns an error that names the file and the tensor, each once."""
  if rule.startswith(f"{tensor.file}: "):
    return errors.CheckpointError(rule)
  return errors.CheckpointError(f"{tensor.file}: {tensor.name!r}: {rule}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensors:
  """The tensors of a checkpoint by name, and metadata of its files.

  Attributes:
    tensors: tensors by name, in the order of the files.
    metadata: `__metadata__` of all safetensors files.
    misfits: reasons why tensors cannot be read, by names that are not in
      `tensors`.
  """

  tensors: Mapping[str, StoredTensor]
  metadata: Mapping[str, str]
  misfits: Mapping[str, str] = dataclasses.field(default_factory=dict)


def joined(files: Mapping[str, StoredTensors]) -> StoredTensors:
  """Returns the tensors of several files, given by their paths.

  Raises:
    CheckpointError: If two files have a tensor of the same name.
  """
  tensors: dict[str, StoredTensor] = {}
  metadata: dict[str, str] = {}
  misfits: dict[str, str] = {}
  file_of: dict[str, str] = {}
  twice: dict[tuple[str, str], list[str]] = {}
  for file, source in files.items():
    for name in (*source.tensors, *source.misfits):
      if name in file_of:
        twice.setdefault((file_of[name], file), []).append(name)
      file_of[name] = file
    tensors |= source.tensors
    metadata |= source.metadata
    misfits |= source.misfits
  if len({source.metadata.get(LAYOUT) for source in files.values()}) > 1:
    metadata.pop(LAYOUT)  # files of other tools are among them
  if twice:
    pairs = [
      f"{second} and {first} both have a tensor {names[0]!r}"
      + (f" (and {len(names) - 1} more names)" if names[1:] else "")
      for (first, second), names in twice.items()
    ]
    raise errors.CheckpointError(
      f"{'; '.join(pairs)}; pass the path of one file, or an index that maps"
      " each name to a file"
    )
  return StoredTensors(tensors=tensors, metadata=metadata, misfits=misfits)


class MappedFile:
  """The bytes of a file, mapped into memory at the first read."""

  def __init__(self, path: pathlib.Path, size: int) -> None:
    self._path = path
    self._size = size

  @functools.cached_property
  def _bytes(self) -> np.ndarray:
    mapped = np.memmap(self._path, np.uint8, mode="r")
    if mapped.size != self._size:
      raise errors.fault(
        self._path,
        f"it must not change while it is read: it had {self._size} bytes, and"
        f" now has {mapped.size}",
      )
    return np.asarray(mapped)

  def read(
    self, begin: int, dtype: np.dtype, shape: tuple[int, ...]
  ) -> np.ndarray:
    """Returns a view of some bytes as an array."""
    if not (size := math.prod(shape) * dtype.itemsize):
      return np.zeros(shape, dtype)
    return self._bytes[begin : begin + size].view(dtype).reshape(shape)


def parse_object(
  where: str, data: bytes | str, *, allow_nonfinite: bool = False
) -> dict[str, Any]:
  """Returns a JSON object, whose names must be unique.

  Raises:
    CheckpointError: If it is not an object, or has too many items.
  """
  items = _count_items(data)
  if items > MAX_JSON_ITEMS:
    raise errors.CheckpointError(
      f"{where}: it must have at most {MAX_JSON_ITEMS} objects, lists and"
      f" commas, got {items}"
    )
  try:
    result = strict_json.loads(data, allow_nonfinite=allow_nonfinite)
  except ValueError as error:
    raise errors.CheckpointError(
      f"{where}: it must be JSON in UTF-8: {error}"
    ) from None
  if not isinstance(result, dict):
    raise errors.CheckpointError(
      f"{where}: it must be a JSON object, got {type(result).__name__}"
    )
  return result


def _count_items(data: bytes | str) -> int:
  """Returns the number of braces, brackets and commas outside of strings.

  Those in strings count too if all together are few.
  """
  if isinstance(data, str):
    data = data.encode(errors="surrogatepass")
  items = sum(data.count(sign) for sign in (b"{", b"[", b","))
  if items <= MAX_JSON_ITEMS:
    return items
  # One string at a time, to save memory.
  for string in _STRING.finditer(data):
    text = string.group()
    items -= len(text) - len(text.translate(None, b"{[,"))
  return items


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object of a file of at most `MAX_JSON_BYTES`.

  It may have NaN and Infinity: transformers writes `"time_step_limit": [0.0,
  Infinity]` into the config.json of models with Mamba 2.

  Raises:
    OSError: If the file cannot be read.
    CheckpointError: If it is longer, does not have a JSON object, or is not a
      regular file.
  """
  with errors.open_regular(path) as file:
    size = os.fstat(file.fileno()).st_size
    if size > MAX_JSON_BYTES:
      rule = f"it must have at most {MAX_JSON_BYTES} bytes, got {size}"
      raise errors.fault(path, rule)
    data = file.read(MAX_JSON_BYTES)
    return parse_object(str(path), data, allow_nonfinite=True)
