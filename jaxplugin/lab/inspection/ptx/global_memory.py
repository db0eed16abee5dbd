# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays in global memory that record which block wrote each byte."""

from __future__ import annotations

from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import faults

_FIRST: Final = 1 << 33  # above 32 bits, so that truncated addresses fault
_GAP: Final = 1 << 16
_ALIGNMENT: Final = 4096
_NOBODY: Final = -1
_FILLER: Final = 0xA5


class _ArrayBytes:
  """An array's bytes. `exists` is false for padding between its rows."""

  def __init__(self, name: str, array: np.ndarray, address: int):
    self.name = name
    self.address = address
    self.dtype, self.shape = array.dtype, array.shape
    if any(stride < 0 for stride in array.strides):
      raise ValueError(f"{name}: strides must not be negative")
    places = np.zeros((1,), np.int64)
    for size, stride in zip(array.shape, array.strides, strict=True):
      places = np.add.outer(places, np.arange(size) * stride).reshape(-1)
    places = np.add.outer(places, np.arange(array.itemsize))
    self._places = places
    size = int(places.max()) + 1 if places.size else 0
    self.bytes = np.full(size, _FILLER, np.uint8)
    self.exists = np.zeros(size, bool)
    self.writer = np.full(size, _NOBODY, np.int32)
    self.exists[places] = True
    contiguous = np.ascontiguousarray(array).reshape(-1)
    self.bytes[places] = contiguous.view(np.uint8).reshape(places.shape)

  def array(self) -> np.ndarray:
    """Returns a copy of the array with its current values."""
    found = self.bytes[self._places].reshape(-1).view(self.dtype)
    return found.reshape(self.shape)


class GlobalMemory:
  """Arrays with gaps between them.

  An access must lie in one array, be aligned to its size, and not touch the
  padding between rows. Blocks run in any order, so a block must not access a
  byte that another block wrote.
  """

  def __init__(self) -> None:
    self._buffers: list[_ArrayBytes] = []

  def add(self, name: str, array: np.ndarray) -> int:
    """Adds a copy of an array; returns the copy's address."""
    address = _FIRST
    if self._buffers:
      last = self._buffers[-1]
      end = last.address + len(last.bytes) + _GAP
      address = -(-end // _ALIGNMENT) * _ALIGNMENT
    self._buffers.append(_ArrayBytes(name, array, address))
    return address

  def array(self, address: int) -> np.ndarray:
    """Returns the array at an address that `add` returned."""
    (found,) = (x for x in self._buffers if x.address == address)
    return found.array()

  def load(self, addresses: np.ndarray, size: int, block: int) -> np.ndarray:
    """Returns uint8[threads, size] from `addresses`, int64[threads]."""
    loaded = np.empty((len(addresses), size), np.uint8)
    for buffer, lanes, places in self._found(addresses, size, block, "load of"):
      loaded[lanes] = buffer.bytes[places]
    return loaded

  def store(self, addresses: np.ndarray, data: np.ndarray, block: int) -> None:
    """Stores `data`, uint8[threads, size], at `addresses`."""
    size = data.shape[1]
    for buffer, lanes, places in self._found(
      addresses, size, block, "store to"
    ):
      buffer.writer[places] = block
      buffer.bytes[places] = data[lanes]
      if (buffer.bytes[places] != data[lanes]).any():
        raise faults.DataRace(
          f"threads store different values to one byte of {buffer.name}"
        )

  def _found(
    self, addresses: np.ndarray, size: int, block: int, what: str
  ) -> list[tuple[_ArrayBytes, np.ndarray, np.ndarray]]:
    """Returns (array, lanes that access it, byte indices) of each array."""
    name = f"{what.partition(' ')[0]} of {size} bytes"
    if (addresses % size).any():
      raise faults.Misaligned(f"global {name}")
    found, left = [], np.ones(len(addresses), bool)
    for buffer in self._buffers:
      start, end = buffer.address, buffer.address + len(buffer.bytes)
      inside = (addresses >= start) & (addresses + size <= end)
      if inside.any():
        left &= ~inside
        places = (addresses[inside] - start)[:, None] + np.arange(size)
        if not buffer.exists[places].all():
          raise faults.OutOfBounds(f"{name} between rows of {buffer.name}")
        writer = buffer.writer[places]
        if ((writer != _NOBODY) & (writer != block)).any():
          raise faults.DataRace(
            f"{what} {buffer.name} that another block wrote"
          )
        found.append((buffer, inside, places))
        if not left.any():
          return found
    if left.any():
      address = int(addresses[left][0])
      raise faults.OutOfBounds(f"global {name} at {self._described(address)}")
    return found

  def _described(self, address: int) -> str:
    for buffer in self._buffers:
      place = address - buffer.address
      if -_GAP // 2 <= place < len(buffer.bytes) + _GAP // 2:
        return f"byte {place} of {buffer.name}, which has {len(buffer.bytes)}"
    return f"address {address:#x}, near no array"
