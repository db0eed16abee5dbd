# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files, mapped into memory.

A file has "GGUF", a version, and the numbers of tensors and of metadata. Then
follow the metadata as (name, type, value), the tensors as (name, sizes, type,
offset) and, from the next multiple of `general.alignment`, the tensors' bytes.
Numbers are little-endian. The fastest dimension comes first.

Strings and arrays of the metadata are skipped, because a vocabulary has 262,144
strings. The reader of the package `gguf` makes NumPy arrays of each string.

Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import pathlib
import struct
from typing import Any, Final

import ml_dtypes
import numpy as np

from jaxplugin.checkpoints import errors, gguf_blocks, stored

# Number of files of one checkpoint; `StoredTensors.metadata` has it.
SPLIT_COUNT: Final = "split.count"

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = "general.alignment"
_DEFAULT_ALIGNMENT: Final = 32
_MAX_RANK: Final = 32
_MAX_DEPTH: Final = 16  # of arrays in arrays; gguf.md has no limit
_MAX_SIZE: Final = 2**63 - 1

# Types of metadata: codes of `struct` by the numbers in a file.
_SCALARS: Final = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING: Final = 8
_ARRAY: Final = 9

_PLAIN: Final = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
  "I16": np.dtype(np.int16),
  "I8": np.dtype(np.int8),
}


def open_file(path: pathlib.Path) -> stored.StoredTensors:
  """Returns the tensors of one file; reads only its header.

  Reading a tensor whose type is not supported raises CheckpointError.

  Raises:
    OSError: If the file cannot be read.
    CheckpointError: If it breaks a rule of the format.
  """
  with errors.open_regular(path) as file:
    size = os.fstat(file.fileno()).st_size
    if not size:
      rule = "it must be a GGUF file, got 0 bytes; download it again"
      raise errors.fault(path, rule)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
      header = _Header(path, data, size)
      try:
        return _tensors(path, header, size)
      except (struct.error, OverflowError):
        raise header.cut_short() from None
      except UnicodeDecodeError as error:
        raise errors.fault(
          path, f"a name must be UTF-8: {error.reason}"
        ) from None


class _Header:
  """Reads the numbers and strings of a header in order."""

  def __init__(self, path: pathlib.Path, data: mmap.mmap, size: int) -> None:
    self._path = path
    self._data = data
    self._size = size
    self.at = 0

  def number(self, code: str) -> Any:
    at, self.at = self.at, self.at + struct.calcsize(f"<{code}")
    return struct.unpack_from(f"<{code}", self._data, at)[0]

  def bytes(self, size: int) -> bytes:
    at = self.at
    self._skip(size)
    return self._data[at : self.at]

  def string(self) -> str:
    return self.bytes(self.number("Q")).decode()

  def value(self, name: str) -> Any:
    """Returns a number of the metadata; skips a string or an array."""
    kind = self.number("I")
    if kind in _SCALARS:
      return self.number(_SCALARS[kind])
    self._skip_values(name, kind, 1)
    return None

  def cut_short(self) -> errors.CheckpointError:
    return errors.fault(
      self._path,
      f"the file ends in its header, after {self._size} bytes; it is cut short:"
      " download it again",
    )

  def _skip(self, size: int) -> None:
    self.at += size
    if self.at > self._size:
      raise self.cut_short()

  def _skip_values(
    self, name: str, kind: int, count: int, depth: int = 0
  ) -> None:
    if kind == _STRING:
      self._skip_strings(count)
    elif kind in _SCALARS:
      self._skip(count * struct.calcsize(f"<{_SCALARS[kind]}"))
    elif kind == _ARRAY and depth < _MAX_DEPTH:
      for _ in range(count):
        self._skip_values(name, self.number("I"), self.number("Q"), depth + 1)
    else:
      rule = f"arrays must be nested at most {_MAX_DEPTH} deep"
      if kind != _ARRAY:
        rule = f"metadata must have a known type, got {kind}"
      raise errors.fault(self._path, f"{name!r}: {rule}")

  def _skip_strings(self, count: int) -> None:
    unpack, data, at = struct.Struct("<Q").unpack_from, self._data, self.at
    for _ in range(count):
      at += 8 + unpack(data, at)[0]
    self.at = at
    self._skip(0)


def _tensors(
  path: pathlib.Path, header: _Header, size: int
) -> stored.StoredTensors:
  """Returns the tensors that a header describes."""
  if header.bytes(len(_MAGIC)) != _MAGIC:
    raise errors.malformed(
      path, f"a GGUF file must begin with {_MAGIC.decode()}"
    )
  version = header.number("I")
  if version not in _VERSIONS:
    form = "version 3" if version & 0xFFFF else "little-endian"
    hint = f"; convert it to {form}"
    raise errors.fault(path, f"version must be 2 or 3, got {version}{hint}")
  tensor_count, value_count = header.number("Q"), header.number("Q")
  values: dict[str, Any] = {}
  for _ in range(value_count):
    name = header.string()
    if name in values:
      raise errors.malformed(
        path, f"{name!r}: metadata must have one value, got two"
      )
    values[name] = header.value(name)
  infos = [_info(path, header) for _ in range(tensor_count)]
  alignment = values.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
  # bit_count ignores the sign, and a negative alignment rounds the first byte
  # of the tensors down, into the header.
  if not _is_count(alignment) or alignment.bit_count() != 1:
    raise errors.malformed(
      path, f"{_ALIGNMENT} must be a positive power of two, got {alignment!r}"
    )
  metadata: dict[str, str] = {}
  if SPLIT_COUNT in values:
    count = values[SPLIT_COUNT]
    if not _is_count(count):
      rule = f"{SPLIT_COUNT} must be an integer from 0, got {count!r}"
      raise errors.malformed(path, rule)
    metadata[SPLIT_COUNT] = str(count)
  start = -(-header.at // alignment) * alignment
  tensors: dict[str, stored.StoredTensor] = {}
  misfits: dict[str, str] = {}
  for name, shape, number, offset in infos:
    if name in tensors or name in misfits:
      raise errors.malformed(path, f"two tensors are called {name!r}")
    try:
      tensors[name] = _tensor(path, name, shape, number, start + offset, size)
    except errors.CheckpointError as error:
      misfits[name] = str(error)
  return stored.StoredTensors(
    tensors=tensors, metadata=metadata, misfits=misfits
  )


def _is_count(value: Any) -> bool:
  """Checks for an integer from 0, which a boolean is not."""
  return type(value) is int and value >= 0


def _info(
  path: pathlib.Path, header: _Header
) -> tuple[str, tuple[int, ...], int, int]:
  """Returns a tensor's name, sizes, type and offset."""
  name, rank = header.string(), header.number("I")
  if rank > _MAX_RANK:
    raise errors.malformed(
      path, f"{name!r}: rank must be at most {_MAX_RANK}, got {rank}"
    )
  shape = [header.number("Q") for _ in range(rank)]
  return name, tuple(shape[::-1]), header.number("I"), header.number("Q")


def _tensor(
  path: pathlib.Path,
  name: str,
  shape: tuple[int, ...],
  number: int,
  begin: int,
  file_size: int,
) -> stored.StoredTensor:
  if number not in gguf_blocks.ALL_TYPES:
    raise errors.fault(
      path,
      f"{name!r}: its type must be known, got {number}; write the file again"
      " with a type that jaxplugin reads",
    )
  type_name, block, block_bytes = gguf_blocks.ALL_TYPES[number]
  count = math.prod(shape)
  if math.prod(x for x in shape if x) * block_bytes > _MAX_SIZE:
    raise errors.malformed(
      path, f"{name!r}: shape must have less than 2^63 bytes, got {list(shape)}"
    )
  if (shape[-1] if shape else 1) % block:
    raise errors.malformed(
      path,
      f"{name!r}: rows of {type_name} must have whole blocks of {block}, got"
      f" shape {list(shape)}",
    )
  nbytes = count // block * block_bytes
  if begin + nbytes > file_size:
    raise errors.fault(
      path,
      f"{name!r}: {type_name}{list(shape)} must end with the file, at"
      f" {file_size}, got an end at {begin + nbytes}; the file is cut short:"
      " download it again",
    )
  dtype = _PLAIN.get(type_name, np.dtype(np.uint8))
  stored_shape = shape
  if type_name not in _PLAIN:
    stored_shape = (*shape[:-1], shape[-1] // block * block_bytes)
  refusal = ""
  if type_name not in (*_PLAIN, *gguf_blocks.TYPES):
    refusal = (
      f"jaxplugin has no format for {type_name}; it reads"
      f" {', '.join((*gguf_blocks.TYPES, *_PLAIN))}. Quantize the model to one"
      " of them with llama-quantize"
    )
  return stored.StoredTensor(
    file=str(path),
    name=name,
    type_name=type_name,
    dtype=dtype,
    shape=stored_shape,
    read=functools.partial(
      _read, refusal, path, file_size, begin, dtype, stored_shape
    ),
    begin=begin,
    values_shape=shape,
    refusal=refusal,
  )


def _read(
  refusal: str, path: pathlib.Path, file_size: int, *where: Any
) -> np.ndarray:
  if refusal:
    raise errors.CheckpointError(refusal)
  # Each tensor maps the file: pages that were read count as memory of the
  # process until their map is closed, and blocks are copied out of them.
  return stored.MappedFile(path, file_size).read(*where)
