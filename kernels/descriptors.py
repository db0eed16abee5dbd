# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors, which the tensor memory accelerator needs to copy tiles.

From compute capability 9.0 on, one thread can start the copy of a whole tile to
shared memory (PTX ISA, `cp.async.bulk.tensor`). A descriptor has the layout of
the array. The host encodes it at each launch (CUDA driver API,
`cuTensorMapEncodeTiled`; `descriptor_error` checks its limits).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, NamedTuple

ALIGNMENT_BYTES: Final = 16
_MAX_STRIDE_BYTES: Final = 2**40
_MAX_BOX: Final = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descriptor:
  """The layout of an operand's values, and the tile that one load copies.

  Attributes:
    shape: (batch, rows, columns) in stored elements. Loads outside are zero.
    strides: strides of these dimensions in stored elements.
    block_shape: shape of a load: (1, rows of a tile, columns of a tile).
  """

  shape: tuple[int, int, int]
  strides: tuple[int, int, int]
  block_shape: tuple[int, int, int]


class Described(NamedTuple):
  """A JAX or NumPy array whose descriptor is passed to a kernel."""

  array: Any
  descriptor: Descriptor


def describe(
  shape: tuple[int, int, int],
  strides: tuple[int, int, int],
  tile: tuple[int, int],
  element_bytes: int,
) -> Descriptor:
  """Returns the descriptor of an operand.

  Args:
    shape, strides: values of the `Descriptor`'s attributes. The stride of a
      dimension of size 1 has no effect, so it is replaced by a valid stride.
    tile: rows and columns of a tile.
    element_bytes: bytes of a stored element.
  """
  batch, rows, columns = shape
  unit = ALIGNMENT_BYTES // element_bytes
  of_row = strides[1] if rows > 1 else -(-columns // unit) * unit
  of_batch = strides[0] if batch > 1 else rows * of_row
  return Descriptor(
    shape=shape,
    strides=(of_batch, of_row, strides[2]),
    block_shape=(1, *tile),
  )


def descriptor_error(descriptor: Descriptor, element_bytes: int) -> str | None:
  """Returns why the hardware does not support a descriptor, or None."""
  of_batch, of_row, of_column = descriptor.strides
  _, rows, columns = descriptor.block_shape
  # The hardware encodes size - 1.
  if min(descriptor.shape) < 1:
    return f"sizes must be positive, got {descriptor.shape}"
  # The stride of the minor dimension is not encoded. It is one element.
  if of_column != 1:
    return f"k must be the minor dimension, got strides {descriptor.strides}"
  for stride in (of_batch * element_bytes, of_row * element_bytes):
    if stride % ALIGNMENT_BYTES:
      return (
        f"strides must be multiples of {ALIGNMENT_BYTES} bytes, got {stride}"
      )
    if stride >= _MAX_STRIDE_BYTES:
      return f"strides must be below 2^40 bytes, got {stride}"
  if rows > _MAX_BOX:
    return f"a tile may have {_MAX_BOX} rows, got {rows}"
  if columns * element_bytes % ALIGNMENT_BYTES:
    return (
      f"rows of a tile must be multiples of {ALIGNMENT_BYTES} bytes, got"
      f" {columns * element_bytes}"
    )
  return None
