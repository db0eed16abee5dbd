# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors files whose layout is computed before any values.

Tensors with the largest elements come first, as in the safetensors package, so
each offset is a multiple of the element's size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import json_text
from jaxplugin.checkpoints import records
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.checkpoints import stored

_ALIGNMENT: Final = 8
# Errors of a file system that cannot preallocate.
_NO_PREALLOCATION: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)

# A tensor's name, an offset in the tensor, and uint8[...] bytes from there.
Piece = tuple[str, int, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """A file to write.

  Attributes:
    name: the file's name.
    decisions: a decision for each tensor of the source's file of this name.
    head: the header's size and the header.
    begins: the offset of each tensor in the file.
    size: bytes of the file.
  """

  name: str
  decisions: tuple[records.TensorDecision, ...]
  head: bytes
  begins: Mapping[str, int]
  size: int


def lay_out(
  name: str,
  decisions: Iterable[records.TensorDecision],
  metadata: Mapping[str, str],
) -> Shard:
  """Returns the layout of a file.

  Raises:
    CheckpointError: If its header is longer than readers accept.
  """
  decisions = tuple(decisions)
  tensors: list[tuple[str, str, tuple[int, ...], int]] = []
  for decision in decisions:
    if decision.weight is None:
      x = decision.tensor
      tensors.append((x.name, x.type_name, x.logical_shape, x.nbytes))
    for name_of_part, part in decision.parts.items():
      type_name = safetensors_files.TYPE_NAMES[part.dtype]
      nbytes = part.size * part.dtype.itemsize
      tensors.append((name_of_part, type_name, part.shape, nbytes))
  tensors.sort(key=lambda x: -_itemsize(x[1]))
  header: dict[str, object] = {}
  if metadata:
    header[safetensors_files.METADATA] = dict(metadata)
  begins: dict[str, int] = {}
  end = 0
  for tensor, type_name, shape, nbytes in tensors:
    begins[tensor], end = end, end + nbytes
    header[tensor] = {
      "dtype": type_name,
      "shape": list(shape),
      "data_offsets": [begins[tensor], end],
    }
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  if len(text) > json_text.MAX_BYTES:
    raise errors.CheckpointError(
      f"{name}: its header must have at most {json_text.MAX_BYTES} bytes, got"
      f" {len(text)}; split the file into several"
    )
  head = len(text).to_bytes(safetensors_files.SIZE_BYTES, "little") + text
  return Shard(
    name=name,
    decisions=decisions,
    head=head,
    begins={tensor: len(head) + x for tensor, x in begins.items()},
    size=len(head) + end,
  )


def _itemsize(type_name: str) -> int:
  dtype = safetensors_files.DTYPES.get(type_name)
  return dtype.itemsize if dtype is not None else 0


def is_finished(path: pathlib.Path, shard: Shard) -> bool:
  """Returns whether a file exists and has this head and size."""
  try:
    if path.stat().st_size != shard.size:
      return False
    with open(path, "rb") as file:
      return file.read(len(shard.head)) == shard.head
  except FileNotFoundError:
    return False


def write(path: pathlib.Path, shard: Shard, pieces: Iterable[Piece]) -> None:
  """Writes a complete file or nothing.

  It writes to a temporary file and renames that when it is on the disk. Pieces
  have all bytes of the tensors, each once, in any order.

  Raises:
    OSError: If it cannot be written.
  """
  unfinished = path.with_name(f".{path.name}.unfinished")
  try:
    with open(unfinished, "wb") as file:
      _preallocate(file.fileno(), shard.size)
      file.write(shard.head)
      done = len(shard.head)
      for name, start, data in pieces:
        file.seek(shard.begins[name] + start)
        file.write(data.data)
        done += data.size
      assert done == shard.size, (path, done, shard.size)
      file.flush()
      os.fsync(file.fileno())
    os.replace(unfinished, path)
  except BaseException:
    with contextlib.suppress(FileNotFoundError):
      unfinished.unlink()
    raise
  sync_folder(path.parent)


def _preallocate(descriptor: int, size: int) -> None:
  """Reserves the file's bytes, so a full disk is an error before any work."""
  if not hasattr(os, "posix_fallocate") or not size:
    return
  try:
    os.posix_fallocate(descriptor, 0, size)
  except OSError as error:
    if error.errno not in _NO_PREALLOCATION:
      raise


def sync_folder(path: pathlib.Path) -> None:
  """Syncs a folder's entries to the disk, if the system supports it."""
  if os.name != "posix":
    return
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def whole(name: str, x: Any) -> Piece:
  """Returns a tensor's bytes in one piece."""
  data = np.ascontiguousarray(np.asarray(x)).reshape(-1)
  return name, 0, data.view(np.uint8)


def chunks(tensor: stored.StoredTensor, size: int) -> Iterable[Piece]:
  """Yields a tensor's bytes in pieces."""
  for start in range(0, tensor.nbytes, size):
    count = min(size, tensor.nbytes - start)
    yield (
      tensor.name,
      start,
      safetensors_files.read_bytes(tensor, start, count),
    )
