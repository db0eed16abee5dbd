# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors: arrays that the tensor memory accelerator copies tiles of.

From compute capability 9.0 on one thread may have a whole tile of an array
copied to shared memory (PTX ISA, `cp.async.bulk.tensor`). A descriptor says how
the array lies; the host encodes it at each launch (CUDA driver API,
`cuTensorMapEncodeTiled`, whose limits are those of `descriptor_error`).
"""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final
from typing import NamedTuple

ALIGNMENT_BYTES: Final = 16
_MAX_STRIDE_BYTES: Final = 2**40
_MAX_BOX: Final = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descriptor:
  """How the values of an operand lie, and what one load of them brings.

  Attributes:
    shape: (batch, rows, columns), in stored elements. Loads are zero outside.
    strides: of these, in stored elements.
    block_shape: of a load: (1, rows of a tile, columns of a tile).
  """

  shape: tuple[int, int, int]
  strides: tuple[int, int, int]
  block_shape: tuple[int, int, int]


class Described(NamedTuple):
  """An array, of JAX or NumPy, that a kernel is given the descriptor of."""

  array: Any
  descriptor: Descriptor


def describe(
  shape: tuple[int, int, int],
  strides: tuple[int, int, int],
  tile: tuple[int, int],
  element_bytes: int,
) -> Descriptor:
  """The descriptor of an operand.

  Args:
    shape, strides: as `Descriptor` has them; the stride of a dimension of size
      1 means nothing, and becomes one that the hardware takes.
    tile: rows and columns of a tile.
    element_bytes: of a stored element.
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
  """Why the hardware does not take a descriptor, or None."""
  of_batch, of_row, of_column = descriptor.strides
  _, rows, columns = descriptor.block_shape
  # Sizes are encoded less one.
  if min(descriptor.shape) < 1:
    return f"sizes must be positive, got {descriptor.shape}"
  # Not encoded: the stride of the minor dimension is one element.
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
