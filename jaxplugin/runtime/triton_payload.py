# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Removes the parts of a Triton launch's payload that jaxlib does not read.

jax-triton writes a compressed `TritonAnyKernelCall` (jaxlib's
`gpu/triton.proto`) into each call. The message has the machine code and the
kernel's TTIR, and jaxlib launches only the code. The TTIR is more than half of
the bytes, and its locations depend on the folder of the kernel's source.

On NVIDIA the code is PTX. jax-triton 0.3 writes the newest PTX version that
Triton's ptxas supports. jaxlib may find an older ptxas.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Final

# Field numbers. _KERNEL is the path TritonAnyKernelCall.kernel_call,
# TritonKernelCall.kernel; _CODE and _TTIR are fields of TritonKernel.
_KERNEL: Final = (1, 1)
_CODE: Final = 4
_TTIR: Final = 5
_VARINT: Final = 0
_SIZES: Final = {1: 8, 5: 4}  # bytes of fixed-size fields, by wire type
_DELIMITED: Final = 2
_VERSION: Final = re.compile(rb"^\.version \d+\.\d+$", re.MULTILINE)


def for_launch(payload: bytes, *, ptx_version: int) -> bytes:
  """Returns a compressed payload without TTIR, and with another PTX version.

  ptxas rejects an instruction that the PTX version does not have, by its name.
  The code of an AMD GPU stays as it is.

  Args:
    payload: the payload that jax-triton wrote.
    ptx_version: the version of the payload's `launching.Launch`.
  """
  major, minor = divmod(ptx_version, 10)

  def edit(field: int, content: bytes) -> bytes | None:
    if field == _TTIR:
      return None
    if field != _CODE:
      return content
    return _VERSION.sub(b".version %d.%d" % (major, minor), content, count=1)

  return zlib.compress(_edited(zlib.decompress(payload), _KERNEL, edit))


def _edited(
  message: bytes,
  path: tuple[int, ...],
  edit: Callable[[int, bytes], bytes | None],
) -> bytes:
  """Edits the fields of a submessage of a serialized protobuf message.

  Args:
    message: the message.
    path: field numbers from the message to the submessage.
    edit: (number, content) of a field -> its new content; None removes it.
  """
  result = b""
  for field, key, content in _fields(message):
    if content is None:
      result += key
      continue
    edited: bytes | None = content
    if not path:
      edited = edit(field, content)
    elif field == path[0]:
      edited = _edited(content, path[1:], edit)
    if edited is not None:
      result += key + _varint(len(edited)) + edited
  return result


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes | None]]:
  """Yields the number, key and content of each field of a message.

  For a field without a length, the content is None and the key is all of it.
  """
  position = 0
  while position < len(message):
    start = position
    tag, position = _read_varint(message, position)
    kind = tag & 7
    if kind == _DELIMITED:
      key = message[start:position]
      size, position = _read_varint(message, position)
      yield tag >> 3, key, message[position : position + size]
      position += size
      continue
    if kind == _VARINT:
      _, position = _read_varint(message, position)
    else:
      position += _SIZES[kind]
    yield tag >> 3, message[start:position], None


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte = message[position]
    position += 1
    value |= (byte & 0x7F) << shift
    shift += 7
    if byte < 0x80:
      return value, position


def _varint(value: int) -> bytes:
  result = b""
  while value >= 0x80:
    result += bytes([value & 0x7F | 0x80])
    value >>= 7
  return result + bytes([value])
