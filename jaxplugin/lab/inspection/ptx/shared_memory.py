# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A block's shared memory, which records the accesses to each byte.

If two threads access a byte, and one of them writes, a block barrier must
separate the accesses. For threads of one warp, a warp barrier is enough (PTX
ISA, "Memory Consistency Model"). Times are counted in barriers. The actor of an
access is a thread. For a collective instruction such as ldmatrix, which
accesses memory for all lanes, the actor is the warp.
"""

from __future__ import annotations

import collections
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import faults

WARP: Final = 32
_FILLER: Final = 0xCD
_NEVER: Final = -1
_NOBODY: Final = -1
_SEVERAL: Final = -2
_VECTOR_BYTES: Final = 16
MBARRIER_BYTES: Final = 8
_BANKS: Final = 32
_WORD: Final = 4  # bytes


class _Accesses:
  """The actor (or `_SEVERAL`), warp and time of the last access to a byte."""

  def __init__(self, size: int):
    self.actor = np.full(size, _NOBODY, np.int32)
    self.warp = np.full(size, _NOBODY, np.int32)
    self.time = np.full(size, _NEVER, np.int64)

  def record(
    self, places: np.ndarray, actors: np.ndarray, warps: np.ndarray, time: int
  ) -> None:
    for who, given in ((self.actor, actors), (self.warp, warps)):
      who[places] = given
      others = who[places] != given
      if others.any():  # several actors access a byte
        who[places[others]] = _SEVERAL
    self.time[places] = time


class SharedMemory:
  """A memory of `size` bytes, all initially unwritten.

  Attributes:
    now: the number of block and warp barriers so far.
    last_barrier: the time of the last block barrier. Earlier accesses have
      lower times.
  """

  def __init__(self, size: int, threads: int, counts: collections.Counter[str]):
    self._bytes = np.full(size, _FILLER, np.uint8)
    self._counts = counts
    self._threads = threads
    warps = threads // WARP
    # Actors are numbered: first the threads, then the warps.
    self._warp_of = np.concatenate(
      [np.arange(threads) // WARP, np.arange(warps)]
    )
    self.now = 0
    self.last_barrier = 0
    self._warp_barriers = np.zeros(warps, np.int64)
    self._written = np.zeros(size, bool)
    self._writes, self._reads = _Accesses(size), _Accesses(size)
    self._arriving = np.zeros(size, np.int32)  # number of cp.async in flight
    self._async_reads = np.zeros(size, np.int32)  # matmuls in flight
    self._unfenced = np.zeros(size, bool)
    self._is_barrier = np.zeros(size, bool)

  def whole_warps(self, warps: np.ndarray) -> np.ndarray:
    """Returns the actor numbers of warps."""
    return self._threads + warps

  def block_barrier(self) -> None:
    """Records that all threads have arrived at a barrier."""
    self.now += 1
    self.last_barrier = self.now

  def warp_barrier(self, warps: np.ndarray) -> None:
    """Records that all lanes of each of `warps` have arrived at a barrier."""
    self.now += 1
    self._warp_barriers[warps] = self.now

  def fence_proxy(self, actors: np.ndarray) -> None:
    """Executes fence.proxy.async.

    The fence covers writes by `actors`, and all writes before the last block
    barrier.
    """
    self._unfenced &= ~(
      np.isin(self._writes.actor, actors)
      | (self._writes.time < self.last_barrier)
    )

  def load(
    self, addresses: np.ndarray, size: int, actors: np.ndarray, kind: str
  ) -> np.ndarray:
    """Loads uint8[accesses, size]. `kind` names the counter of wavefronts."""
    places = self._places(addresses, size, actors, kind)
    self._read(places, actors[:, None])
    return self._bytes[places]

  def store(
    self, addresses: np.ndarray, data: np.ndarray, actors: np.ndarray, kind: str
  ) -> None:
    """Stores `data`, uint8[accesses, size]."""
    size = data.shape[1]
    places = self._places(addresses, size, actors, kind)
    self._check_write(places, actors[:, None])
    self._write(places, data, actors[:, None])
    if (self._bytes[places] != data).any():
      raise faults.DataRace("threads store different values to one byte")

  def begin_copy(
    self, addresses: np.ndarray, size: int, actors: np.ndarray
  ) -> np.ndarray:
    """Begins a cp.async; returns the byte indices, int64[threads, size]."""
    places = self._places(addresses, size, actors, "cp.async")
    self._check_write(places, actors[:, None])
    np.add.at(self._arriving, places, 1)
    return places

  def end_copy(
    self, places: np.ndarray, data: np.ndarray, actors: np.ndarray
  ) -> None:
    """Ends a cp.async. Other threads need a barrier before they read it."""
    np.subtract.at(self._arriving, places, 1)
    self._write(places, data, actors[:, None])

  def begin_async_read(self, places: np.ndarray, who: str) -> np.ndarray:
    """Returns the bytes that a matmul reads through the async proxy.

    The bytes must not be written until `end_async_read`.
    """
    if places.max() >= len(self._bytes):
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
    if (self._writes.time[places] >= self.last_barrier).any():
      raise faults.DataRace(f"{who} reads bytes written since the last barrier")
    unique = np.unique(places)
    self._async_reads[unique] += 1
    return self._bytes[places]

  def end_async_read(self, places: np.ndarray, by_all: bool = False) -> None:
    """Ends reads by a matmul that threads have waited for.

    If `by_all`, all threads have waited. Otherwise each thread has waited only
    for its own matmuls, so a write needs a block barrier.
    """
    unique = np.unique(places)
    self._async_reads[unique] -= 1
    if by_all:
      return
    several = np.full(len(unique), _SEVERAL)
    self._reads.record(unique, several, several, self.now)

  def place_barrier(self, address: int, actors: np.ndarray) -> None:
    """Places an mbarrier. Loads and stores of its bytes are faults."""
    self._store_barrier(address, actors)
    self._is_barrier[address : address + MBARRIER_BYTES] = True

  def use_barrier(self, address: int, actors: np.ndarray) -> None:
    """Records a use of an mbarrier, which must be ordered after its init."""
    places = address + np.arange(MBARRIER_BYTES)
    self._read(np.tile(places, (len(actors), 1)), actors[:, None])

  def remove_barrier(self, address: int, actors: np.ndarray) -> None:
    """Removes an mbarrier, and marks its bytes as unwritten."""
    self._is_barrier[address : address + MBARRIER_BYTES] = False
    self._store_barrier(address, actors)
    self._written[address : address + MBARRIER_BYTES] = False

  def _store_barrier(self, address: int, actors: np.ndarray) -> None:
    zeros = np.zeros((1, MBARRIER_BYTES), np.uint8)
    self.store(np.array([address]), zeros, actors, "")

  def _places(
    self, addresses: np.ndarray, size: int, actors: np.ndarray, kind: str
  ) -> np.ndarray:
    outside = (addresses < 0) | (addresses + size > len(self._bytes))
    if outside.any():
      raise faults.OutOfBounds(
        f"access of {size} bytes at byte {int(addresses[outside][0])} of shared"
        f" memory, which has {len(self._bytes)}"
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
      taken, least = wavefronts(addresses, size, self._warp_of[actors])
      self._counts[f"{kind} wavefronts"] += taken
      self._counts[f"{kind} least wavefronts"] += least
    return places

  def _is_before(
    self, accesses: _Accesses, places: np.ndarray, warps: np.ndarray
  ) -> np.ndarray:
    """Returns whether a barrier followed the last access of each byte."""
    time = accesses.time[places]
    in_warp = accesses.warp[places] == warps
    in_warp &= time < self._warp_barriers[warps]
    return (time < self.last_barrier) | in_warp

  def _check_order(
    self,
    before: str,
    accesses: _Accesses,
    now: str,
    places: np.ndarray,
    actors: np.ndarray,
  ) -> None:
    """Raises DataRace unless accesses are ordered after the last accesses."""
    ordered = accesses.actor[places] == actors
    ordered |= self._is_before(accesses, places, self._warp_of[actors])
    if not ordered.all():
      raise faults.DataRace(
        f"{now} of byte {int(places[~ordered][0])} of shared memory, which"
        f" another thread has {before} since the last barrier"
      )

  def _read(self, places: np.ndarray, actors: np.ndarray) -> None:
    """Records reads of bytes [accesses, size] by actors [accesses, 1]."""
    if self._arriving[places].any():
      raise faults.InFlight("read of shared bytes that a cp.async still writes")
    if not self._written[places].all():
      raise faults.Undefined("read of shared bytes that nothing has written")
    self._check_order("written", self._writes, "read", places, actors)
    warps, last = self._warp_of[actors], self._reads
    is_old = self._is_before(last, places, warps)
    is_same, in_warp = last.actor[places] == actors, last.warp[places] == warps
    last.record(
      places,
      np.where(is_old | is_same, actors, _SEVERAL),
      np.where(is_old | in_warp, warps, _SEVERAL),
      self.now,
    )

  def _check_write(self, places: np.ndarray, actors: np.ndarray) -> None:
    if self._arriving[places].any():
      raise faults.InFlight("write of bytes that a cp.async still writes")
    if self._async_reads[places].any():
      raise faults.InFlight(
        "write of bytes that a matrix product in flight reads"
      )
    self._check_order("read", self._reads, "write", places, actors)
    self._check_order("written", self._writes, "write", places, actors)

  def _write(
    self, places: np.ndarray, data: np.ndarray, actors: np.ndarray
  ) -> None:
    self._bytes[places] = data
    self._written[places] = True
    self._writes.record(places, actors, self._warp_of[actors], self.now)
    self._unfenced[places] = True


def wavefronts(
  addresses: np.ndarray, size: int, warps: np.ndarray
) -> tuple[int, int]:
  """Returns the wavefronts of an access, and the number without conflicts.

  Shared memory has 32 banks of 4 bytes (CUDA programming guide, "Shared
  memory"). If lanes access different words in one bank, the access takes a
  wavefront for each word. Lanes that access the same word share a wavefront.
  Accesses of 8 bytes are split into half warps, those of 16 bytes into quarter
  warps.

  Args:
    addresses: int64[threads], in lane order.
    size: number of bytes that each thread accesses.
    warps: int[threads], the warp of each thread, ascending.
  """
  words = max(size // _WORD, 1)
  in_turn = WARP // words  # lanes that are served together
  first = np.searchsorted(warps, warps, side="left")
  turn = warps * WARP + (np.arange(len(warps)) - first) // in_turn
  word = (addresses // _WORD)[:, None] + np.arange(words)
  span = int(word.max()) + 1
  wanted = np.unique(turn[:, None] * span + word)
  turn, word = wanted // span, wanted % span
  turns, turn = np.unique(turn, return_inverse=True)
  counts = np.zeros((len(turns), _BANKS), np.int64)
  np.add.at(counts, (turn, word % _BANKS), 1)
  least = -(-counts.sum(axis=1) // _BANKS)
  return int(counts.max(axis=1).sum()), int(least.sum())
