# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory of an interpreted launch: arrays in poison, accesses checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

POISON: Final = 0xFF
_ALIGNMENT_BYTES: Final = 128
_GAP_BYTES: Final = 4096
# A larger one is mapped but not filled: arrays whose strides pass 2^31 bytes
# then cost address space only.
_MAX_POISONED_BYTES: Final = 256 << 20
_NOBODY: Final = 0


class AccessError(Exception):
  """An access that the arrays do not allow; the text says which."""


class Memory:
  """Copies of arrays in one buffer, with poison before, between and after.

  An array that is passed twice has one copy.

  Strides are kept, so bytes between the elements of a strided array are poison
  as well, and no access to them is allowed.

  Attributes:
    program: who makes the accesses that follow.
  """

  def __init__(
    self, arrays: Mapping[str, np.ndarray], *, check_races: bool
  ) -> None:
    first: dict[int, str] = {}
    for name, array in arrays.items():
      first.setdefault(id(array), name)
    self._arrays = {name: arrays[name] for name in first.values()}
    self._names = ["nobody", *self._arrays]
    self._writeable = np.array(
      [False, *(array.flags.writeable for array in self._arrays.values())]
    )
    self.program: tuple[int, ...] = (0, 0, 0)
    self._programs: dict[tuple[int, ...], int] = {}
    self._starts: dict[str, int] = {}
    size = _GAP_BYTES
    for name, array in self._arrays.items():
      self._starts[name] = size
      size += _span(name, array) + _GAP_BYTES
      size += -size % _ALIGNMENT_BYTES
    for name, array in arrays.items():
      self._starts[name] = self._starts[first[id(array)]]
    buffer = np.zeros(size + _ALIGNMENT_BYTES, np.uint8)
    skip = -buffer.ctypes.data % _ALIGNMENT_BYTES
    self._buffer = buffer[skip : skip + size]
    self._base = np.uint64(self._buffer.ctypes.data)
    if size <= _MAX_POISONED_BYTES:
      self._buffer[:] = POISON
    self._owner = np.zeros(size, np.min_scalar_type(len(self._names)))
    self._writer = np.zeros(size, np.int32) if check_races else None
    for number, (name, array) in enumerate(self._arrays.items(), start=1):
      self._view(name)[...] = array
      self._bytes_of(name, self._owner)[...] = number

  def address(self, name: str) -> int:
    """Returns the address of the first element of the array `name`."""
    return int(self._base) + self._starts[name]

  def copy_back(self) -> None:
    """Brings what was written to the arrays that were given."""
    for name, array in self._arrays.items():
      if array.flags.writeable:
        array[...] = self._view(name)

  def check(
    self, pointers: np.ndarray, mask: np.ndarray, itemsize: int, write: bool
  ) -> None:
    """Checks an access of `itemsize` bytes at each of `pointers` with `mask`.

    Raises:
      AccessError: one of them is not on an element of an array, or writes a
        read-only one, or races with another program.
    """
    verb = "writes" if write else "reads"
    offsets = (pointers - self._base)[np.broadcast_to(mask, pointers.shape)]
    if not offsets.size:
      return
    # Below the buffer, the unsigned difference is huge.
    outside = offsets > self._buffer.size - itemsize
    if outside.any():
      raise AccessError(self._describe(verb, offsets[outside][0]))
    owner = self._owner[offsets]
    wrong = (owner == _NOBODY) | (owner != self._owner[offsets + itemsize - 1])
    if wrong.any():
      raise AccessError(self._describe(verb, offsets[wrong][0]))
    unaligned = offsets % itemsize != 0
    if unaligned.any():
      raise AccessError(
        f"{self._describe(verb, offsets[unaligned][0])}, which is not aligned"
        f" to {itemsize} bytes"
      )
    if write:
      frozen = ~self._writeable[owner]
      if frozen.any():
        raise AccessError(
          f"{self._describe(verb, offsets[frozen][0])}, which is read-only"
        )
    if self._writer is not None:
      self._check_race(verb, offsets, write)

  def _check_race(self, verb: str, offsets: np.ndarray, write: bool) -> None:
    assert self._writer is not None
    me = self._programs.setdefault(self.program, len(self._programs) + 1)
    writer = self._writer[offsets]
    race = (writer != 0) & (writer != me)
    if race.any():
      other = list(self._programs)[writer[race][0] - 1]
      raise AccessError(
        f"{self._describe(verb, offsets[race][0])}, which program {other} wrote"
      )
    if write:
      self._writer[offsets] = me

  def _view(self, name: str) -> np.ndarray:
    """The copy of the array `name`."""
    array = self._arrays[name]
    return np.ndarray(
      array.shape,
      array.dtype,
      buffer=self._buffer,
      offset=self._starts[name],
      strides=array.strides,
    )

  def _bytes_of(self, name: str, buffer: np.ndarray) -> np.ndarray:
    """The bytes of `buffer` where the array's elements lie."""
    array = self._arrays[name]
    return np.ndarray(
      (*array.shape, array.itemsize),
      buffer.dtype,
      buffer=buffer,
      offset=self._starts[name] * buffer.itemsize,
      strides=tuple(stride * buffer.itemsize for stride in (*array.strides, 1)),
    )

  def _describe(self, verb: str, offset: np.uint64) -> str:
    """ "reads byte 12 of x", counted from its first element."""
    place = int(np.int64(offset.astype(np.int64)))
    if 0 <= place < self._owner.size and self._owner[place] != _NOBODY:
      name = self._names[self._owner[place]]
      return f"{verb} byte {place - self._starts[name]} of {name}"
    if not self._arrays:
      return f"{verb} memory, and the launch has no array"
    name = min(
      self._arrays,
      key=lambda name: self._distance(name, place),
    )
    array = self._arrays[name]
    return (
      f"{verb} at byte {place - self._starts[name]} counted from the first"
      f" element of {name} ({array.dtype}{list(array.shape)}, byte strides"
      f" {array.strides}), the nearest array: no element lies there"
    )

  def _distance(self, name: str, place: int) -> int:
    """How many bytes lie between a place and an array's extent."""
    start = self._starts[name]
    end = start + _span(name, self._arrays[name])
    return max(start - place, place - end + 1, 0)


def _span(name: str, array: np.ndarray) -> int:
  """Bytes from the first to past the last element."""
  if array.size == 0:
    return 0
  span = array.itemsize
  for size, stride in zip(array.shape, array.strides, strict=True):
    if size > 1 and (stride < 0 or (stride == 0 and array.flags.writeable)):
      raise TypeError(
        f"launch: {name} has byte strides {array.strides}: they must be"
        " positive, or zero in a read-only array; copy it"
      )
    span += (size - 1) * stride
  return span
