# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors files, mapped into memory.

A file has the header's size as 8 bytes, little-endian; the header, JSON in
UTF-8; and the tensors' bytes. The header has {"dtype", "shape",
"data_offsets"} for each name, and strings by name under "__metadata__". Offsets
start after the header. Tensors follow each other without holes.

Every size is checked against the file's size before memory is allocated. If a
mapped file shrinks, the next read ends the process.

The reader of the package `safetensors` supports no BF16, FP8, FP6 or FP4 in
NumPy.

Source: safetensors' README, "Format".
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np

from jaxplugin.checkpoints import errors, stored

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
SIZE_BYTES: Final = 8
METADATA: Final = "__metadata__"
_FIELDS: Final = {"dtype", "shape", "data_offsets"}
_MAX_RANK: Final = 32
_MAX_SIZE: Final = 2**63 - 1

# NumPy dtypes by the names in a file.
DTYPES: Final = {
  "BOOL": np.dtype(np.bool_),
  "U8": np.dtype(np.uint8),
  "I8": np.dtype(np.int8),
  "U16": np.dtype(np.uint16),
  "I16": np.dtype(np.int16),
  "U32": np.dtype(np.uint32),
  "I32": np.dtype(np.int32),
  "U64": np.dtype(np.uint64),
  "I64": np.dtype(np.int64),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F32": np.dtype(np.float32),
  "F64": np.dtype(np.float64),
  "C64": np.dtype(np.complex64),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
  "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
  "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
TYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
# Bits of narrower dtypes. FP4 is read packed, FP6 as bytes.
BITS: Final = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def open_file(path: pathlib.Path) -> stored.StoredTensors:
  """Returns the tensors of one file; reads only its header.

  The last dimension of "F4" is halved, and FP6's is multiplied by 6 / 8. Both
  are uint8.

  Raises:
    OSError: If the file cannot be read.
    CheckpointError: If it breaks a rule of the format.
  """
  with errors.open_regular(path) as file:
    size = os.fstat(file.fileno()).st_size
    head = file.read(SIZE_BYTES)
    if len(head) < SIZE_BYTES:
      rule = f"it must have at least 8 bytes, got {size}; download it again"
      raise errors.fault(path, rule)
    length = int.from_bytes(head, "little")
    limit = min(size - SIZE_BYTES, stored.MAX_JSON_BYTES)
    if length > limit:
      raise errors.fault(
        path,
        f"the header's size must be at most {limit} (the size of the rest of"
        f" the file, and {stored.MAX_JSON_BYTES}), got {length}; the file is"
        " cut short or has another format: download it again",
      )
    text = file.read(length)
  header = stored.parse_object(f"{path}: the header", text)
  metadata = header.pop(METADATA, None)
  metadata = {} if metadata is None else metadata  # MLX writes null
  if not _is_strings(metadata):
    raise errors.malformed(path, f"{METADATA} must be an object of strings")
  start = SIZE_BYTES + length
  mapped = stored.MappedFile(path, size)
  spans: dict[str, tuple[int, int]] = {}
  tensors: dict[str, stored.StoredTensor] = {}
  misfits: dict[str, str] = {}
  for name, entry in header.items():
    spans[name] = _span(path, name, entry)
    if entry["dtype"] in {*DTYPES, *BITS}:
      tensors[name] = _tensor(path, name, entry, start, mapped)
    else:
      misfits[name] = str(_unknown_dtype(path, name, entry["dtype"]))
  _require_no_holes(path, spans, size - start)
  return stored.StoredTensors(
    tensors=tensors, metadata=metadata, misfits=misfits
  )


def read_bytes(
  tensor: stored.StoredTensor, start: int, size: int
) -> np.ndarray:
  """Returns a copy of some bytes of a tensor, uint8[size]; maps no file.

  Raises:
    OSError: If the file cannot be read.
    CheckpointError: If the file became shorter.
  """
  assert tensor.begin is not None
  data = np.empty(size, np.uint8)
  with open(tensor.file, "rb", buffering=0) as file:
    file.seek(tensor.begin + start)
    done = 0
    while done < size:
      count = file.readinto(data.data[done:])
      if not count:
        rule = "the file must not change while it is read, got a shorter one"
        raise stored.fault(tensor, rule)
      done += count
  return data


def read_weight_map(path: pathlib.Path) -> dict[str, str]:
  """Returns an index file's map from tensors to files in the same folder.

  Raises:
    OSError: If it cannot be read.
    CheckpointError: If it breaks a rule, or does not name a tensor.
  """
  weight_map: Any = stored.read_object(path).get("weight_map")
  if not _is_strings(weight_map):
    raise errors.malformed(path, "weight_map must be an object of strings")
  if not weight_map:
    raise errors.malformed(
      path, "weight_map must name at least one tensor, got none"
    )
  return {name: _beside(path, file) for name, file in weight_map.items()}


def open_index(path: pathlib.Path) -> stored.StoredTensors:
  """Returns the tensors of the files that an index file names.

  These files also give tensors that the index does not name. If a file cannot
  be read, or lacks a tensor that the index assigns to it, the tensor is a
  misfit.

  Raises:
    OSError: If the index cannot be read.
    CheckpointError: If the index breaks a rule, or two files have a tensor that
      the index does not name.
  """
  weight_map = read_weight_map(path)
  files: dict[str, stored.StoredTensors] = {}
  faults: dict[str, str] = {}
  for file in dict.fromkeys(weight_map.values()):
    try:
      source = open_file(path.parent / file)
    except FileNotFoundError:
      faults[file] = str(
        errors.fault(path, f"weight_map names {file}, which does not exist")
      )
    except errors.CheckpointError as error:
      faults[file] = str(error)
    else:
      other = {name for name, its in weight_map.items() if its != file}
      files[str(path.parent / file)] = stored.StoredTensors(
        tensors={n: x for n, x in source.tensors.items() if n not in other},
        metadata=source.metadata,
        misfits={n: x for n, x in source.misfits.items() if n not in other},
      )
  found = stored.joined(files)
  misfits: dict[str, str] = {}
  for name, file in weight_map.items():
    if name not in found.tensors:
      rule = f"{name!r} must be in {file}, which has no such tensor"
      reason = found.misfits.get(name) or faults.get(file)
      misfits[name] = reason or str(errors.fault(path, rule))
  order = [*weight_map, *found.tensors]
  return stored.StoredTensors(
    tensors={n: found.tensors[n] for n in order if n in found.tensors},
    metadata=found.metadata,
    misfits={**misfits, **found.misfits},
  )


def _beside(path: pathlib.Path, file: str) -> str:
  """Returns a file's name, which must be in the index's folder."""
  if (
    pathlib.PurePath(file).name != file
    or "\\" in file
    or not file.endswith(SUFFIX)
  ):
    raise errors.malformed(
      path,
      "weight_map must have names of safetensors files in its own folder, got"
      f" {file!r}",
    )
  return file


def _is_strings(x: Any) -> bool:
  return isinstance(x, dict) and all(isinstance(v, str) for v in x.values())


def _unknown_dtype(
  path: pathlib.Path, name: str, dtype: Any
) -> errors.CheckpointError:
  known = ", ".join([*DTYPES, *BITS])
  rule = f"{name!r}: dtype must be one of {known}, got {_short(dtype)}"
  return errors.fault(path, rule)


def _span(path: pathlib.Path, name: str, entry: Any) -> tuple[int, int]:
  """Returns first and last offset of a tensor, after checks of its fields."""
  if not isinstance(entry, dict) or set(entry) != _FIELDS:
    raise errors.malformed(
      path, f"{name!r}: it must have exactly {sorted(_FIELDS)}"
    )
  dtype, shape, span = (entry[x] for x in ("dtype", "shape", "data_offsets"))
  if not isinstance(dtype, str):
    raise _unknown_dtype(path, name, dtype)
  if not _is_sizes(shape) or len(shape) > _MAX_RANK:
    raise errors.malformed(
      path,
      f"{name!r}: shape must have at most {_MAX_RANK} sizes, each 0 or more,"
      f" got {_short(shape)}",
    )
  if not _is_sizes(span) or len(span) != 2 or span[0] > span[1]:
    raise errors.malformed(
      path,
      f"{name!r}: data_offsets must be [begin, end] with 0 <= begin <= end, got"
      f" {_short(span)}",
    )
  return span[0], span[1]


def _is_sizes(x: Any) -> bool:
  return isinstance(x, list) and all(
    type(size) is int and 0 <= size <= _MAX_SIZE for size in x
  )


def _require_no_holes(
  path: pathlib.Path, spans: Mapping[str, tuple[int, int]], size: int
) -> None:
  """Raises CheckpointError unless the tensors fill all bytes, each once."""
  end = 0
  for name, span in sorted(spans.items(), key=lambda item: item[1]):
    if span[0] != end:
      raise errors.malformed(
        path,
        f"{name!r}: tensors must be contiguous, and the previous one ends at"
        f" {end}, got data_offsets {list(span)}",
      )
    end = span[1]
  if end != size:
    fault = "is cut short" if end > size else "has other bytes after them"
    raise errors.fault(
      path,
      f"its tensors must end with the file, at {size}, got {end}; the file"
      f" {fault}: download it again",
    )


def _tensor(
  path: pathlib.Path,
  name: str,
  entry: Mapping[str, Any],
  start: int,
  mapped: stored.MappedFile,
) -> stored.StoredTensor:
  """Returns a tensor whose shape has as many bytes as its offsets."""
  type_name, sizes, span = (
    entry[x] for x in ("dtype", "shape", "data_offsets")
  )
  dtype = DTYPES.get(type_name, np.dtype(np.uint8))
  bits = BITS.get(type_name, 8 * dtype.itemsize)
  # NumPy refuses shapes beyond 2^63 even if another size is 0.
  if math.prod(size for size in sizes if size) * bits > _MAX_SIZE:
    raise errors.malformed(
      path, f"{name!r}: shape must have less than 2^63 bits, got {sizes}"
    )
  count = math.prod(sizes) * bits
  if count != 8 * (span[1] - span[0]):
    raise errors.malformed(
      path,
      f"{name!r}: {type_name}{sizes} must have {count / 8:g} bytes, got"
      f" data_offsets {span}",
    )
  shape = tuple(sizes)
  if type_name in BITS:
    if not sizes or sizes[-1] * bits % 8:
      raise errors.malformed(
        path,
        f"{name!r}: rows of {type_name} must be whole bytes, got shape {sizes}",
      )
    shape = (*shape[:-1], shape[-1] * bits // 8)
  begin = start + span[0]
  return stored.StoredTensor(
    file=str(path),
    name=name,
    type_name=type_name,
    dtype=dtype,
    shape=shape,
    read=functools.partial(mapped.read, begin, dtype, shape),
    begin=begin,
    values_shape=tuple(sizes),
  )


def _short(x: Any) -> str:
  text = repr(x)
  return text if len(text) < 80 else f"{text[:77]}..."
