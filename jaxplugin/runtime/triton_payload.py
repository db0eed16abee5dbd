# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a module says of a Triton kernel's launch, without what no launch reads.

jax-triton writes a compressed `TritonAnyKernelCall` into each call, of jaxlib's
`gpu/triton.proto`: beside the machine code the kernel's TTIR with the places of
its lines, which is more than half, and differs with the folder that the kernel
was installed in. jaxlib launches the code alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

# Fields of messages, by their numbers: TritonAnyKernelCall.kernel_call,
# TritonKernelCall.kernel, TritonKernel.ttir.
_TTIR: Final = (1, 1, 5)
_VARINT: Final = 0
_SIZES: Final = {1: 8, 5: 4}  # of fixed-size fields, by their wire types
_DELIMITED: Final = 2


def without_ttir(payload: bytes) -> bytes:
  """The compressed payload of a launch, without TTIR."""
  return zlib.compress(_without(zlib.decompress(payload), _TTIR))


def _without(message: bytes, path: tuple[int, ...]) -> bytes:
  """A serialized protobuf message without the field at the end of a path."""
  number, *rest = path
  result = b""
  for field, key, content in _fields(message):
    if field == number and content is not None:
      if not rest:
        continue
      inner = _without(content, tuple(rest))
      result += key + _varint(len(inner)) + inner
    else:
      result += key
      if content is not None:
        result += _varint(len(content)) + content
  return result


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes | None]]:
  """Number, key and content of each; without content, key has all of it."""
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
