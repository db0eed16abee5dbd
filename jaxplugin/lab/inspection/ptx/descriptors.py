# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes matrix descriptors, and instruction descriptors of tcgen05.

PTX ISA 9.0: "Matrix Descriptor" (9.7.15.5.1.2) of wgmma; "Shared memory
descriptor" (9.7.16.4.1), "Canonical Layouts" (9.7.16.3.3) and "Instruction
descriptor" (9.7.16.4.2, tables 42 to 44) of tcgen05.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import faults

_UNIT: Final = 16  # bytes; offsets are in units, and swizzling permutes units
_ROWS: Final = 8  # rows of a core matrix
_LINE: Final = 128  # bytes of a line, within which swizzling permutes units
# A swizzling mode: bytes of a matrix row, and lines after which it repeats.
_SWIZZLE_128: Final = (128, 8)
_SWIZZLE_64: Final = (64, 4)
_SWIZZLE_32: Final = (32, 2)
_OF_WGMMA: Final = {1: _SWIZZLE_128, 2: _SWIZZLE_64, 3: _SWIZZLE_32}
_OF_TCGEN05: Final = {2: _SWIZZLE_128, 4: _SWIZZLE_64, 6: _SWIZZLE_32}
# Element types by code (tables 42 to 44).
_TYPES_16: Final = {0: "f16", 1: "bf16"}
_TYPES_8: Final = {0: "e4m3", 1: "e5m2", 5: "e2m1"}
_TYPES_4: Final = {1: "e2m1"}
# By kind and block size: k, element types, number of scale factors along k, and
# scale types by bit 23 (tables 54 and 55).
_KINDS: Final[
  dict[tuple[str, str | None], tuple[int, dict[int, str], int, dict[int, str]]]
] = {
  ("f16", None): (16, _TYPES_16, 0, {}),
  ("mxf8f6f4", "block32"): (32, _TYPES_8, 1, {1: "ue8m0"}),
  ("mxf4", "block32"): (64, _TYPES_4, 2, {1: "ue8m0"}),
  ("mxf4nvf4", "block32"): (64, _TYPES_4, 2, {1: "ue8m0"}),
  ("mxf4nvf4", "block16"): (64, _TYPES_4, 4, {0: "ue4m3", 1: "ue8m0"}),
}
# Fields (first bit, last bit, name) that must be 0: in descriptors of matrices,
# in all descriptors of instructions, in those without block scales (table 42),
# and in those with block scales (table 43 for mxf8f6f4, else 44; in table 44
# the type of B has one bit less, and bit 31 selects k = 96).
_RESERVED: Final = (
  (14, 15, "bits 14-15"),
  (30, 31, "bits 30-31"),
  (49, 51, "a base offset"),
  (52, 52, "an absolute leading address"),
  (53, 60, "bits 53-60"),
)
_COMMON: Final = (
  (2, 2, "sparsity"),
  (3, 3, "saturation"),
  (6, 6, "bit 6"),
  (13, 14, "negated operands"),
)
_PLAIN: Final = (
  (0, 1, "a sparsity selector"),
  (23, 23, "bit 23"),
  (29, 29, "bit 29"),
  (30, 31, "a shift of B"),
)
_SCALED: Final = (
  (0, 1, "bits 0-1"),
  (24, 26, "bits 24-26"),
  (31, 31, "bit 31"),
)
_LEAST_N: Final = 8  # n is a multiple of 8 (table 39)
_MOST_N: Final = 256


def _field(descriptor: int, first: int, last: int) -> int:
  """Returns bits `first` to `last`, inclusive."""
  return descriptor >> first & (1 << last - first + 1) - 1


def wgmma_places(descriptor: int, rows: int, width: int) -> np.ndarray:
  """Returns the byte addresses of a k-major wgmma operand, int64[rows, width].

  `width` is the number of bytes of a row that one instruction reads.
  """
  if _field(descriptor, 49, 51):
    raise faults.NotModelled("a descriptor with a base offset")
  return _places(
    descriptor, _OF_WGMMA.get(_field(descriptor, 62, 63)), rows, width
  )


def _refuse(
  what: str, descriptor: int, fields: Sequence[tuple[int, int, str]]
) -> None:
  """Raises NotModelled if one of the fields (first bit, last bit) is not 0."""
  for first, last, name in fields:
    if _field(descriptor, first, last):
      raise faults.NotModelled(f"{what} with {name}")


def tcgen05_places(
  descriptor: int, rows: int, width: int, element_bytes: int | None = None
) -> np.ndarray:
  """Returns the byte addresses of a tcgen05 operand, int64[rows, width].

  `element_bytes` is None if the operand is K-major.
  """
  if _field(descriptor, 46, 48) != 1:
    raise faults.NotModelled("a descriptor whose bits 46-48 are not 0b001")
  _refuse("a descriptor", descriptor, _RESERVED)
  mode = _field(descriptor, 61, 63)
  if mode and mode not in _OF_TCGEN05:
    raise faults.NotModelled(f"a descriptor of swizzling mode {mode}")
  swizzle = _OF_TCGEN05.get(mode)
  if element_bytes is not None:
    return _places_along_rows(descriptor, swizzle, rows, width, element_bytes)
  return _places(descriptor, swizzle, rows, width)


def _offsets(descriptor: int) -> tuple[int, int, int]:
  """Returns the start, the leading offset and the stride, in bytes."""
  return (
    _field(descriptor, 0, 13) * _UNIT,
    _field(descriptor, 16, 29) * _UNIT,
    _field(descriptor, 32, 45) * _UNIT,
  )


def _places(
  descriptor: int, swizzle: tuple[int, int] | None, rows: int, width: int
) -> np.ndarray:
  """Returns the byte addresses of a K-major operand.

  The stride is the offset between core matrices along rows. Without swizzling,
  the leading offset is the offset between core matrices along k. With swizzling
  it is not used.
  """
  start, leading, stride = _offsets(descriptor)
  row = np.arange(rows)[:, None]
  column = np.arange(width)[None, :]
  if swizzle is None:
    inside = row % _ROWS * _UNIT + column % _UNIT
    return start + row // _ROWS * stride + column // _UNIT * leading + inside
  row_bytes, period = swizzle
  place = start + row // _ROWS * stride + row % _ROWS * row_bytes + column
  return _swizzled(place, period)


def _places_along_rows(
  descriptor: int,
  swizzle: tuple[int, int] | None,
  rows: int,
  width: int,
  element_bytes: int,
) -> np.ndarray:
  """Returns the byte addresses of an MN-major operand.

  A core matrix has 8 successive k and a line of rows. With swizzling, the
  stride is the offset to the next core matrix along k, and the leading offset
  is the offset along rows. Without swizzling, the two are exchanged.
  """
  start, leading, stride = _offsets(descriptor)
  if swizzle is None:
    leading, stride = stride, leading
  k, byte = np.divmod(np.arange(width)[None, :], element_bytes)
  along = np.arange(rows)[:, None] * element_bytes + byte
  line, period = swizzle or (_UNIT, 1)
  place = start + along % line + along // line * leading
  return _swizzled(place + k % _ROWS * line + k // _ROWS * stride, period)


def _swizzled(place: np.ndarray, period: int) -> np.ndarray:
  """Returns addresses after permuting the 16-byte units of each line."""
  return place ^ (place // _LINE % period) * _UNIT


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideShape:
  """One operand of a matmul."""

  rows: int  # m or n
  type: str
  k_is_minor: bool  # whether an operand in shared memory is K-major
  scale_byte: int  # of a 32-bit word, where the scales of a row start


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductShape:
  """The sizes and types of a dense matmul in an instruction descriptor."""

  k: int
  lhs: SideShape
  rhs: SideShape
  scales: int  # of a row along k; 0 without block scales
  scale_type: str  # "ue8m0" or "ue4m3"; "" without block scales


def product(descriptor: int, kind: str, blocks: str | None) -> ProductShape:
  """Decodes an instruction descriptor of a kind and blocks in `_KINDS`.

  Raises:
    faults.NotModelled: If the kind, a size or a type is not modelled, or if
      reserved bits or bits of features that are not modelled are set.
  """
  if (kind, blocks) not in _KINDS:
    raise faults.NotModelled(f"tcgen05.mma of kind {kind} with {blocks}")
  k, types, scales, scale_types = _KINDS[kind, blocks]
  _refuse(
    "an instruction descriptor",
    descriptor,
    (*_COMMON, *(_SCALED if scales else _PLAIN)),
  )
  if not scales and _field(descriptor, 4, 5) != 1:
    raise faults.NotModelled("sums of tcgen05.mma that are not f32")
  if scales:
    m = _field(descriptor, 27, 28) << 7
  else:
    m = _field(descriptor, 24, 28) << 4
  if m != 128 and (scales or m != 64):
    what = " with block scales" if scales else ""
    raise faults.NotModelled(f"tcgen05.mma of m = {m}{what}")
  scale_bit, scale_bytes = _field(descriptor, 23, 23), (0, 0)
  if scales:
    if scale_bit not in scale_types:
      raise faults.NotModelled(f"kind {kind} with scales of type {scale_bit}")
    scale_bytes = _field(descriptor, 29, 30), _field(descriptor, 4, 5)
    if any(byte % scales for byte in scale_bytes):
      raise faults.NotModelled(
        f"{scales} scales of a word from byte {scale_bytes}"
      )
  codes = _field(descriptor, 7, 9), _field(descriptor, 10, 12)
  for code in codes:
    if code not in types:
      raise faults.NotModelled(f"an instruction descriptor with type {code}")
  n = _field(descriptor, 17, 22) << 3
  if not _LEAST_N <= n <= _MOST_N:
    raise faults.NotModelled(f"tcgen05.mma of n = {n}")
  lhs, rhs = (
    SideShape(
      rows=rows,
      type=types[code],
      k_is_minor=not _field(descriptor, bit, bit),
      scale_byte=scale_byte,
    )
    for rows, code, bit, scale_byte in zip(
      (m, n), codes, (15, 16), scale_bytes, strict=True
    )
  )
  return ProductShape(
    k=k,
    lhs=lhs,
    rhs=rhs,
    scales=scales,
    scale_type=scale_types.get(scale_bit, ""),
  )
