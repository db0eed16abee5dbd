# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A block's shared memory, which remembers who touched each byte, and when.

Two accesses of a byte by different threads, at least one of them a write, are
ordered only by a barrier between them: of the block, or of the warp where both
are of one warp (PTX ISA, "Memory Consistency Model"). Time is the number of
barriers passed. A collective instruction, as ldmatrix, acts for all lanes of
its warp at once; its actor is the warp.
"""

from __future__ import annotations

import collections
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import banks
from jaxplugin.lab.inspection.ptx import faults

WARP: Final = 32
_FILLER: Final = 0xCD
_NEVER: Final = -1
_NOBODY: Final = -1
_SEVERAL: Final = -2
_VECTOR_BYTES: Final = 16
MBARRIER_BYTES: Final = 8


class SharedMemory:
  """`size` bytes, of which none is written yet."""

  def __init__(self, size: int, threads: int, counts: collections.Counter[str]):
    self._bytes = np.full(size, _FILLER, np.uint8)
    self._counts = counts
    self._threads = threads
    warps = threads // WARP
    # Actors are threads and, after them, warps.
    self._warp_of = np.concatenate(
      [np.arange(threads) // WARP, np.arange(warps)]
    )
    self._clock = 0
    self._block_barrier = 0
    self._warp_barriers = np.zeros(warps, np.int64)
    self._written = np.zeros(size, bool)
    self._writer = np.full(size, _NOBODY, np.int32)
    self._writer_warp = np.full(size, _NOBODY, np.int32)
    self._write_time = np.full(size, _NEVER, np.int64)
    self._reader = np.full(size, _NOBODY, np.int32)
    self._reader_warp = np.full(size, _NOBODY, np.int32)
    self._read_time = np.full(size, _NEVER, np.int64)
    self._arriving = np.zeros(size, np.int32)  # copies in flight
    self._async_reads = np.zeros(size, np.int32)  # matrix units in flight
    self._unfenced = np.zeros(size, bool)
    self._is_barrier = np.zeros(size, bool)

  def whole_warps(self, warps: np.ndarray) -> np.ndarray:
    """The actors that warps are, by their numbers."""
    return self._threads + warps

  def block_barrier(self) -> None:
    """All threads have arrived at a barrier."""
    self._clock += 1
    self._block_barrier = self._clock

  def warp_barrier(self, warps: np.ndarray) -> None:
    """The lanes of each of `warps` have."""
    self._clock += 1
    self._warp_barriers[warps] = self._clock

  @property
  def now(self) -> int:
    """Barriers passed, of warps or of the block."""
    return self._clock

  @property
  def last_barrier(self) -> int:
    """The time of the block's last one: what is older is before it."""
    return self._block_barrier

  def fence_proxy(self, actors: np.ndarray) -> None:
    """fence.proxy.async by threads: for their writes, and those before."""
    self._unfenced &= ~(
      np.isin(self._writer, actors) | (self._write_time < self._block_barrier)
    )

  def load(
    self, addresses: np.ndarray, size: int, actors: np.ndarray, kind: str
  ) -> np.ndarray:
    """uint8[accesses, size]; `kind` names what is counted."""
    places = self._places(addresses, size, actors, kind)
    self._read(places, np.repeat(actors, size).reshape(places.shape))
    return self._bytes[places]

  def store(
    self, addresses: np.ndarray, data: np.ndarray, actors: np.ndarray, kind: str
  ) -> None:
    """Stores uint8[accesses, size]."""
    size = data.shape[1]
    places = self._places(addresses, size, actors, kind)
    actor = np.repeat(actors, size).reshape(places.shape)
    self._check_write(places, actor)
    self._write(places, data, actor)
    if (self._bytes[places] != data).any():
      raise faults.Race("threads store different values to one byte")

  def begin_copy(
    self, addresses: np.ndarray, size: int, actors: np.ndarray
  ) -> np.ndarray:
    """cp.async begins to write; returns the bytes, int64[threads, size]."""
    places = self._places(addresses, size, actors, "cp.async")
    self._check_write(places, np.repeat(actors, size).reshape(places.shape))
    np.add.at(self._arriving, places, 1)
    return places

  def end_copy(
    self, places: np.ndarray, data: np.ndarray, actors: np.ndarray
  ) -> None:
    """The threads that copied have waited: for them alone it is written."""
    np.subtract.at(self._arriving, places, 1)
    actor = np.repeat(actors, places.shape[1]).reshape(places.shape)
    self._write(places, data, actor)

  def begin_async_read(self, places: np.ndarray, who: str) -> np.ndarray:
    """A matrix unit reads bytes by the asynchronous proxy; what they hold."""
    if places.min() < 0 or places.max() >= len(self._bytes):
      raise faults.OutOfBounds(
        f"{who} reads byte {int(places.max())} of shared memory, which has"
        f" {len(self._bytes)}"
      )
    if self._arriving[places].any():
      raise faults.InFlight(f"{who} reads bytes that a cp.async still writes")
    if not self._written[places].all():
      raise faults.Undefined(f"{who} reads shared memory never written")
    if self._unfenced[places].any():
      raise faults.MissingFence(
        f"{who} reads what threads wrote without fence.proxy.async"
      )
    if (self._write_time[places] >= self._block_barrier).any():
      raise faults.Race(f"{who} reads bytes written since the last barrier")
    unique = np.unique(places)
    self._async_reads[unique] += 1
    return self._bytes[places]

  def end_async_read(self, places: np.ndarray, by_all: bool = False) -> None:
    """The warps that multiplied have waited; others, too, where `by_all`."""
    unique = np.unique(places)
    self._async_reads[unique] -= 1
    if by_all:
      return
    self._reader[unique] = _SEVERAL
    self._reader_warp[unique] = _SEVERAL
    self._read_time[unique] = self._clock

  def place_barrier(self, address: int, actors: np.ndarray) -> None:
    """A thread makes bytes an mbarrier, which none may load or store."""
    places = self._barrier_places(address)
    self.store(
      np.array([address]), np.zeros((1, MBARRIER_BYTES), np.uint8), actors, ""
    )
    self._is_barrier[places] = True

  def use_barrier(self, address: int, actors: np.ndarray) -> None:
    """Threads use an mbarrier: after whoever made it."""
    places = self._barrier_places(address)
    self._read(
      np.broadcast_to(places, (len(actors), MBARRIER_BYTES)),
      np.repeat(actors, MBARRIER_BYTES).reshape(-1, MBARRIER_BYTES),
    )

  def remove_barrier(self, address: int, actors: np.ndarray) -> None:
    """A thread ends an mbarrier, after all uses; its bytes mean nothing."""
    places = self._barrier_places(address)
    self._is_barrier[places] = False
    self.store(
      np.array([address]), np.zeros((1, MBARRIER_BYTES), np.uint8), actors, ""
    )
    self._written[places] = False

  def _barrier_places(self, address: int) -> np.ndarray:
    if not 0 <= address <= len(self._bytes) - MBARRIER_BYTES:
      raise faults.OutOfBounds(
        f"an mbarrier at byte {address} of shared memory, which has"
        f" {len(self._bytes)}"
      )
    return address + np.arange(MBARRIER_BYTES)

  def _places(
    self, addresses: np.ndarray, size: int, actors: np.ndarray, kind: str
  ) -> np.ndarray:
    if (addresses < 0).any() or (addresses + size > len(self._bytes)).any():
      bad = addresses[(addresses < 0) | (addresses + size > len(self._bytes))]
      raise faults.OutOfBounds(
        f"access of {size} bytes at byte {int(bad[0])} of shared memory, which"
        f" has {len(self._bytes)}"
      )
    if (addresses % min(size, _VECTOR_BYTES)).any():
      raise faults.Misaligned(f"access of {size} bytes of shared memory")
    places: np.ndarray = addresses[:, None] + np.arange(size)
    if self._is_barrier[places].any():
      raise faults.Barrier(
        f"access of byte {int(addresses[0])} of shared memory, where an"
        " mbarrier is"
      )
    if kind:
      taken, least = banks.wavefronts(addresses, size, self._warp_of[actors])
      self._counts[f"{kind} wavefronts"] += taken
      self._counts[f"{kind} least wavefronts"] += least
    return places

  def _before(
    self, time: np.ndarray, warp: np.ndarray, now_warp: np.ndarray
  ) -> np.ndarray:
    """Whether a barrier separates accesses of `time` by `warp` from now."""
    in_warp = (warp == now_warp) & (time < self._warp_barriers[now_warp])
    return (time < self._block_barrier) | in_warp

  def _read(self, places: np.ndarray, actors: np.ndarray) -> None:
    if self._arriving[places].any():
      raise faults.InFlight("read of shared bytes that a cp.async still writes")
    if not self._written[places].all():
      raise faults.Undefined("read of shared bytes that nothing has written")
    warps = self._warp_of[actors]
    writer = self._writer[places]
    ordered = (writer == actors) | self._before(
      self._write_time[places], self._writer_warp[places], warps
    )
    if not ordered.all():
      self._raise_race("read", "written", places, ordered)
    reader, reader_warp = self._reader[places], self._reader_warp[places]
    time = self._read_time[places]
    old = self._before(time, reader_warp, warps)
    self._note(
      self._reader, places, np.where(old | (reader == actors), actors, _SEVERAL)
    )
    self._note(
      self._reader_warp,
      places,
      np.where(old | (reader_warp == warps), warps, _SEVERAL),
    )
    self._read_time[places] = self._clock

  def _check_write(self, places: np.ndarray, actors: np.ndarray) -> None:
    if self._arriving[places].any():
      raise faults.InFlight("write of bytes that a cp.async still writes")
    if self._async_reads[places].any():
      raise faults.InFlight(
        "write of bytes that a matrix product in flight reads"
      )
    warps = self._warp_of[actors]
    reader = self._reader[places]
    ordered = (reader == actors) | self._before(
      self._read_time[places], self._reader_warp[places], warps
    )
    if not ordered.all():
      self._raise_race("write", "read", places, ordered)
    writer = self._writer[places]
    ordered = (writer == actors) | self._before(
      self._write_time[places], self._writer_warp[places], warps
    )
    if not ordered.all():
      self._raise_race("write", "written", places, ordered)

  def _write(
    self, places: np.ndarray, data: np.ndarray, actors: np.ndarray
  ) -> None:
    self._bytes[places] = data
    self._written[places] = True
    self._note(self._writer, places, actors)
    self._note(self._writer_warp, places, self._warp_of[actors])
    self._write_time[places] = self._clock
    self._unfenced[places] = True

  def _note(
    self, who: np.ndarray, places: np.ndarray, actors: np.ndarray
  ) -> None:
    """Sets who touched each byte, which may be several at once."""
    who[places] = actors
    others = who[places] != actors
    if others.any():
      who[places[others]] = _SEVERAL

  def _raise_race(
    self, now: str, before: str, places: np.ndarray, ordered: np.ndarray
  ) -> None:
    raise faults.Race(
      f"{now} of byte {int(places[~ordered][0])} of shared memory, which"
      f" another thread has {before} since the last barrier"
    )
