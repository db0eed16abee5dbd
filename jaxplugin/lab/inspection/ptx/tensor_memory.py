# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A block's tensor memory, which tracks instructions in flight.

Tensor memory has 128 lanes of 512 columns of 32 bits, and is allocated by
columns (PTX ISA 9.0, 9.7.16.1). A warp loads and stores a quarter of the lanes
(9.7.16.8.1). `tcgen05.st` and `ld` complete when their warp waits. Other warps
also need a barrier. A `tcgen05.mma` completes when a thread has waited for the
mbarrier of its commit (9.7.16.6).
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import faults, shared_memory

LANES: Final = 128
COLUMNS: Final = 512
QUARTER: Final = 32  # number of lanes that a warp may load and store
_UNIT: Final = 32  # number of columns of the smallest allocation
_FILLER: Final = 0xCDCDCDCD
_NEVER: Final = -1
_NOBODY: Final = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
  """A region of cells: some lanes of adjacent columns."""

  lanes: tuple[int, ...]  # in the order of a matrix's rows
  column: int  # the first column
  columns: int  # the number of columns

  @property
  def cells(self) -> tuple[np.ndarray, np.ndarray]:
    """The index of the cells, [lanes, columns]."""
    return np.ix_(
      np.array(self.lanes), np.arange(self.column, self.column + self.columns)
    )  # type: ignore[return-value]

  def overlaps(self, other: Region) -> bool:
    return (
      self.column < other.column + other.columns
      and other.column < self.column + self.columns
      and not set(self.lanes).isdisjoint(other.lanes)
    )

  def __str__(self) -> str:
    last = self.column + self.columns - 1
    return f"columns {self.column} to {last} of tensor memory"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProductInFlight:
  """A tcgen05.mma in flight."""

  thread: int  # that issued the instruction
  kind: str  # kind and shape. Those of the same kind complete in order.
  sums: Region  # the accumulator
  reads: tuple[Region, ...]  # the left operand and scale factors
  shared: tuple[np.ndarray, ...]  # bytes of operands in shared memory


class TensorMemoryState:
  """The state of a tensor memory, initially without allocations."""

  def __init__(self, shared: shared_memory.SharedMemory):
    self._shared = shared  # provides the time, in barriers
    self._words = np.full((LANES, COLUMNS), _FILLER, np.uint32)
    self._written = np.zeros((LANES, COLUMNS), bool)
    self._owned = np.zeros(COLUMNS, bool)
    self._allocations: dict[int, int] = {}
    self._may_allocate = True
    # Bit w is set while warp w has a store or a load of the cell in flight.
    self._storing = np.zeros((LANES, COLUMNS), np.uint32)
    self._loading = np.zeros((LANES, COLUMNS), np.uint32)
    self._writer = np.full((LANES, COLUMNS), _NOBODY, np.int32)
    self._write_time = np.full((LANES, COLUMNS), _NEVER, np.int64)
    self._readers = np.zeros((LANES, COLUMNS), np.uint32)
    self._read_time = np.full((LANES, COLUMNS), _NEVER, np.int64)
    self._products: list[ProductInFlight] = []

  def allocate(self, columns: int) -> int:
    """Allocates columns; returns the first column."""
    if not self._may_allocate:
      raise faults.TensorMemory("tcgen05.alloc after relinquish_alloc_permit")
    if columns & columns - 1 or not _UNIT <= columns <= COLUMNS:
      raise faults.TensorMemory(
        f"tcgen05.alloc of {columns} columns: not a power of two from {_UNIT}"
        f" to {COLUMNS}"
      )
    for first in range(0, COLUMNS - columns + 1, _UNIT):
      if not self._owned[first : first + columns].any():
        self._owned[first : first + columns] = True
        self._allocations[first] = columns
        return first
    raise faults.Endless(
      f"tcgen05.alloc of {columns} columns, which never become free in the"
      " block"
    )

  def relinquish(self) -> None:
    """Forbids further allocations."""
    self._may_allocate = False

  def deallocate(self, warp: int, first: int, columns: int) -> None:
    """Deallocates columns; checks that no instruction in flight uses them."""
    if self._allocations.get(first) != columns:
      raise faults.TensorMemory(
        f"tcgen05.dealloc of {columns} columns from {first}, which are not an"
        f" allocation; allocations: {self._allocations}"
      )
    whole = Region(lanes=tuple(range(LANES)), column=first, columns=columns)
    self._check_products(whole, writes=True)
    self._check_others(warp, whole, "tcgen05.dealloc")
    del self._allocations[first]
    self._owned[first : first + columns] = False
    self._written[:, first : first + columns] = False

  def finish(self) -> None:
    """Checks at the end of the block that all columns are deallocated."""
    if self._allocations:
      raise faults.TensorMemory(
        "the kernel ends without tcgen05.dealloc of columns"
        f" {self._allocations}"
      )

  def store(self, warp: int, region: Region, words: np.ndarray) -> None:
    """Begins a tcgen05.st of uint32[lanes, columns]."""
    self._check_owned(region)
    self._check_products(region, writes=True)
    self._check_others(warp, region, "tcgen05.st")
    cells = region.cells
    self._storing[cells] |= np.uint32(1 << warp)
    self._words[cells] = words
    self._written[cells] = True

  def load(self, warp: int, region: Region) -> np.ndarray:
    """Begins a tcgen05.ld; returns uint32[lanes, columns]."""
    found = self.read(warp, region, "tcgen05.ld")
    self._loading[region.cells] |= np.uint32(1 << warp)
    return found

  def wait_for_stores(self, warp: int) -> None:
    """Completes the stores of a warp, for this warp only."""
    bit = np.uint32(1 << warp)
    ended = self._storing & bit != 0
    self._storing[ended] ^= bit
    self._writer[ended] = warp
    self._write_time[ended] = self._shared.now

  def wait_for_loads(self, warp: int) -> None:
    """Completes the loads of a warp."""
    bit = np.uint32(1 << warp)
    ended = self._loading & bit != 0
    self._loading[ended] ^= bit
    old = ended & (self._read_time < self._shared.last_barrier)
    self._readers[old] = 0
    self._readers[ended] |= bit
    self._read_time[ended] = self._shared.now

  def read(self, warp: int, region: Region, who: str) -> np.ndarray:
    """Returns uint32[lanes, columns] that the instruction `who` may read."""
    self._check_owned(region)
    self._check_products(region, writes=False)
    self._check_written(warp, region, who)
    return self._words[region.cells]

  def sums(
    self, warp: int, product: ProductInFlight, keeps: bool
  ) -> np.ndarray:
    """Returns the accumulator of a tcgen05.mma, uint32[lanes, columns].

    Checks that the instruction may write the accumulator and, if it `keeps` the
    sums, read the accumulator.
    """
    region = product.sums
    self._check_owned(region)
    for other in self._products:
      if any(region.overlaps(read) for read in other.reads):
        raise faults.InFlight(
          f"tcgen05.mma writes {region}, which one in flight reads"
        )
      in_order = other.sums == region and other.kind == product.kind
      if region.overlaps(other.sums) and not in_order:
        raise faults.InFlight(
          f"tcgen05.mma writes {region}, which one of another kind or place"
          " writes"
        )
    if any(region.overlaps(read) for read in product.reads):
      raise faults.InFlight(f"tcgen05.mma reads {region}, which it writes")
    self._check_others(warp, region, "tcgen05.mma")
    if keeps:
      self._check_written(warp, region, "tcgen05.mma")
    return self._words[region.cells]

  def begin_product(self, product: ProductInFlight, words: np.ndarray) -> None:
    """Begins a tcgen05.mma, and writes its result."""
    cells = product.sums.cells
    self._words[cells] = words
    self._written[cells] = True
    # No warp owns this write: all threads must wait for the mbarrier.
    self._writer[cells] = _NOBODY
    self._write_time[cells] = _NEVER
    self._products.append(product)

  def products_of(self, thread: int) -> list[ProductInFlight]:
    """Returns the instructions in flight that a thread issued."""
    return [x for x in self._products if x.thread == thread]

  def end_products(self, products: list[ProductInFlight]) -> None:
    """Completes tcgen05.mma instructions for all threads."""
    for product in products:
      if product in self._products:
        self._products.remove(product)
        for places in product.shared:
          self._shared.end_async_read(places, by_all=True)

  def _check_owned(self, region: Region) -> None:
    last = region.column + region.columns
    if last > COLUMNS or not self._owned[region.column : last].all():
      raise faults.TensorMemory(f"{region}, which are not allocated")

  def _check_products(self, region: Region, writes: bool) -> None:
    for product in self._products:
      if region.overlaps(product.sums):
        raise faults.InFlight(
          f"{region}, which a tcgen05.mma not waited for writes"
        )
      if writes and any(region.overlaps(read) for read in product.reads):
        raise faults.InFlight(
          f"{region}, which a tcgen05.mma not waited for reads"
        )

  def _check_written(self, warp: int, region: Region, who: str) -> None:
    """Checks that a warp may read the region."""
    cells = region.cells
    if not self._written[cells].all():
      raise faults.Undefined(f"{who} reads {region} that nothing has written")
    if self._storing[cells].any():
      raise faults.InFlight(
        f"{who} reads {region} that a tcgen05.st not waited for writes"
      )
    recent = self._write_time[cells] >= self._shared.last_barrier
    if (recent & (self._writer[cells] != warp)).any():
      raise faults.DataRace(
        f"{who} reads {region}, which another warp has written since the last"
        " barrier"
      )

  def _check_others(self, warp: int, region: Region, who: str) -> None:
    """Checks that a write conflicts with no other load or store."""
    cells = region.cells
    if self._storing[cells].any() or self._loading[cells].any():
      raise faults.InFlight(
        f"{who} of {region} that a tcgen05.st or ld not waited for uses"
      )
    last = self._shared.last_barrier
    written = self._write_time[cells] >= last
    written &= self._writer[cells] != warp
    others = self._readers[cells] & ~np.uint32(1 << warp)
    read = (self._read_time[cells] >= last) & (others != 0)
    if written.any() or read.any():
      raise faults.DataRace(
        f"{who} of {region}, which another warp has used since the last barrier"
      )
