# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes tcgen05: matmuls, and loads and stores of tensor memory.

PTX ISA 9.0: 9.7.16.7 (alloc, dealloc, relinquish_alloc_permit), 9.7.16.8 (ld,
st, wait) with the shapes of 9.7.16.2.3.1, 9.7.16.12 (commit). The upper half of
an address is the lane, and the lower half is the column (9.7.16.1.1).

Matmuls: 9.7.16.10.9.1 (tcgen05.mma), 9.7.16.10.4 (packing of elements),
9.7.16.10.5 (layout D for m = 128, layout F for m = 64), 9.7.16.10.7 (block
scales). One thread issues a tcgen05.mma, whose accumulator is in tensor memory.
The emulator sums in f64 and rounds to f32 once. Hardware keeps fewer bits of a
sum. The emulator computes the result immediately. A write to the operands
before a wait for the matmul is a fault.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import (
  blocks,
  descriptors,
  faults,
  parsing,
  products,
  synchronization,
  tensor_memory,
)

# Parts of the lanes, each with a copy of the scale factors, and their size.
_PARTS: Final = 4
_PART: Final = 32
# In an 8-bit kind, 16 elements of 4 bits occupy 16 bytes of shared memory. Only
# the first 8 bytes are used (9.7.16.10.4.4).
_PADDED: Final = 16
_PADDED_HALF: Final = 8


def _split(address: int) -> tuple[int, int]:
  """Returns the lane and column of a tensor memory address (9.7.16.1.1)."""
  return address >> 16, address & 0xFFFF


def _multiply(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes tcgen05.mma, which each active thread issues."""
  _, _, group, kind, *scaling = instruction.parts
  if (
    group != "cta_group::1"
    or not kind.startswith("kind::")
    or (scaling and (len(scaling) != 2 or scaling[0] != "block_scale"))
  ):
    raise faults.NotModelled(instruction.name)
  if len(instruction.operands) != (7 if scaling else 5):
    raise faults.NotModelled(instruction.text)
  for thread in block.lanes():
    _Issue(block, instruction, int(thread)).run(
      kind.removeprefix("kind::"), scaling[1] if scaling else None
    )


class _Issue:
  """A tcgen05.mma that a thread issues."""

  def __init__(
    self, block: blocks.Block, instruction: parsing.Instruction, thread: int
  ):
    self._block, self._instruction = block, instruction
    self._thread, self._warp = thread, thread // blocks.WARP
    self._reads: list[tensor_memory.Region] = []
    self._shared: list[np.ndarray] = []

  def run(self, kind: str, scaling: str | None) -> None:
    block = self._block
    sums, lhs, rhs, descriptor, *scales, keeps = self._instruction.operands
    shape = descriptors.product(self._value(descriptor, 32), kind, scaling)
    lane, column = _split(self._address(sums))
    packs = kind in ("mxf4", "mxf4nvf4")
    if isinstance(lhs, parsing.Address):
      a = self._in_tensor_memory(lhs, shape, lane, packs)
    else:
      a = self._in_shared(lhs, shape.lhs, shape.k, packs)
    b = self._in_shared(rhs, shape.rhs, shape.k, packs)
    with np.errstate(invalid="ignore", over="ignore"):
      if shape.scales:
        a *= self._scales(scales[0], shape.lhs, shape)
        b *= self._scales(scales[1], shape.rhs, shape)
      found = a @ b.T
    product = tensor_memory.ProductInFlight(
      thread=self._thread,
      kind=f"{kind} {shape.lhs.rows}x{shape.rhs.rows}",
      sums=tensor_memory.Region(
        lanes=_lanes(shape.lhs.rows, lane),
        column=column,
        columns=shape.rhs.rows,
      ),
      reads=tuple(self._reads),
      shared=tuple(self._shared),
    )
    keeps_sums = bool(self._value(keeps, 1))
    old = block.tensor.sums(self._warp, product, keeps_sums)
    with np.errstate(invalid="ignore", over="ignore"):
      if keeps_sums:
        found = found + old.view(np.float32).astype(np.float64)
      words = found.astype(np.float32).view(np.uint32)
    block.tensor.begin_product(product, words)
    block.counts["matrix products"] += 1

  def _value(self, operand: parsing.Operand, bits: int) -> int:
    return int(self._block.read_defined(operand, bits)[self._thread])

  def _address(self, operand: parsing.Operand) -> int:
    return int(self._block.addresses(operand)[self._thread])

  def _read(self, region: tensor_memory.Region) -> np.ndarray:
    self._reads.append(region)
    return self._block.tensor.read(self._warp, region, "tcgen05.mma")

  def _in_tensor_memory(
    self,
    place: parsing.Operand,
    shape: descriptors.ProductShape,
    sums_lane: int,
    packs: bool,
  ) -> np.ndarray:
    """Returns the left operand, f64[m, k]. Each lane has a row."""
    side = shape.lhs
    if not side.k_is_minor:
      raise faults.NotModelled("A in tensor memory, transposed")
    lane, column = _split(self._address(place))
    if lane != sums_lane:
      raise faults.NotModelled(f"A from lane {lane}, and D from {sums_lane}")
    bits = products.element_bits(side.type)
    if bits == 4 and not packs:
      raise faults.NotModelled("4 bits among 8 in tensor memory")
    words = self._read(
      tensor_memory.Region(
        lanes=_lanes(side.rows, lane),
        column=column,
        columns=shape.k * bits // 32,
      )
    )
    return products.unpacked(words, side.type).reshape(side.rows, shape.k)

  def _in_shared(
    self,
    operand: parsing.Operand,
    side: descriptors.SideShape,
    k: int,
    packs: bool,
  ) -> np.ndarray:
    """Returns the operand of a matrix descriptor, f64[rows, k]."""
    bits = products.element_bits(side.type)
    is_padded = bits == 4 and not packs
    width = k if is_padded else k * bits // 8
    if bits == 4 and not side.k_is_minor:
      raise faults.NotModelled(f"{side.type} whose k is not minor")
    places = descriptors.tcgen05_places(
      self._value(operand, 64),
      side.rows,
      width,
      None if side.k_is_minor else bits // 8,
    )
    if is_padded:
      places = places[:, np.arange(width) % _PADDED < _PADDED_HALF]
    data = self._block.shared.begin_async_read(places, "tcgen05.mma")
    self._shared.append(places.reshape(-1))
    words = np.ascontiguousarray(data).view(np.uint32)
    return products.unpacked(words, side.type).reshape(side.rows, k)

  def _scales(
    self,
    place: parsing.Operand,
    side: descriptors.SideShape,
    shape: descriptors.ProductShape,
  ) -> np.ndarray:
    """Returns the scale factor of each element of an operand, f64[rows, k].

    Column j has the scale factors of rows 32 j to 32 j + 31, one row in each
    lane. The four parts of the lanes must have equal scale factors
    (9.7.16.10.7.2, 9.7.16.10.7.3).
    """
    lane, column = _split(self._address(place))
    if lane:
      raise faults.NotModelled(f"scale factors from lane {lane}")
    found = np.empty((side.rows, shape.scales), np.uint8)
    shifts = 8 * (side.scale_byte + np.arange(shape.scales, dtype=np.uint32))
    for start in range(0, side.rows, _PART):
      rows = range(min(_PART, side.rows - start))
      region = tensor_memory.Region(
        lanes=tuple(
          _PART * part + row for part in range(_PARTS) for row in rows
        ),
        column=column + start // _PART,
        columns=1,
      )
      words = self._read(region).reshape(_PARTS, len(rows), 1)
      codes = words >> shifts & np.uint32(0xFF)
      if (codes != codes[0]).any():
        raise faults.TensorMemory(
          "scale factors that differ between parts of the lanes"
        )
      found[start : start + len(rows)] = codes[0]
    factors = products.decoded_scales(found, shape.scale_type)
    return np.repeat(factors, shape.k // shape.scales, axis=1)


def _lanes(m: int, first: int) -> tuple[int, ...]:
  """Returns the lanes of a matrix's rows: all, or 16 of each 32 if m = 64."""
  if m == tensor_memory.LANES:
    if first:
      raise faults.NotModelled(f"tcgen05.mma of m = 128 from lane {first}")
    return tuple(range(m))
  if first not in (0, 16):
    raise faults.NotModelled(f"tcgen05.mma of m = {m} from lane {first}")
  return tuple(
    first + _PART * part + row for part in range(_PARTS) for row in range(16)
  )


_MOVED: Final = re.compile(
  r"tcgen05\.(?:ld|st)\.sync\.aligned\.(32x32b|16x32bx2)\.x(\d+)\.b32"
)
_HALF: Final = 16  # lanes of each half of 16x32bx2


def _of_warps(
  block: blocks.Block,
  instruction: parsing.Instruction,
  operand: parsing.Operand,
) -> list[tuple[int, int]]:
  """Returns (warp, operand) of each active warp.

  Raises:
    faults.Divergence: If lanes of a warp have different values.
  """
  if isinstance(operand, parsing.Address):
    values = block.addresses(operand)
  else:
    values = block.read_defined(operand, 32).astype(np.int64)
  found = []
  for warp in block.warps(instruction):
    lanes = values[blocks.WARP * warp : blocks.WARP * (warp + 1)]
    if (lanes != lanes[0]).any():
      raise faults.Divergence(f"{instruction.name}: lanes differ in {operand}")
    found.append((int(warp), int(lanes[0])))
  return found


def _one_warp(
  block: blocks.Block, instruction: parsing.Instruction
) -> tuple[int, int, int]:
  """Returns the only warp that executes alloc or dealloc, and its operands."""
  place, count = instruction.operands
  (warp, address), *others = _of_warps(block, instruction, place)
  (_, columns), *_ = _of_warps(block, instruction, count)
  if others:
    raise faults.TensorMemory(f"{instruction.name} by {len(others) + 1} warps")
  return warp, address, columns


def _allocate(block: blocks.Block, instruction: parsing.Instruction) -> None:
  warp, address, columns = _one_warp(block, instruction)
  first = np.array([[block.tensor.allocate(columns)]], np.uint32)
  actors = block.shared.whole_warps(np.array([warp]))
  block.shared.store(np.array([address]), first.view(np.uint8), actors, "")


def _deallocate(block: blocks.Block, instruction: parsing.Instruction) -> None:
  warp, address, columns = _one_warp(block, instruction)
  lane, first = _split(address)
  if lane:
    raise faults.TensorMemory(f"tcgen05.dealloc of lane {lane}")
  block.tensor.deallocate(warp, first, columns)


def _relinquish(block: blocks.Block, instruction: parsing.Instruction) -> None:
  block.warps(instruction)
  block.tensor.relinquish()


def _columns(
  instruction: parsing.Instruction,
  operand: parsing.Operand,
  address: parsing.Operand,
  rest: Sequence[parsing.Operand],
) -> tuple[tuple[parsing.Operand, ...], int | None]:
  """Returns the registers, and the column offset of lanes 16 to 31.

  The offset is None for shape 32x32b, in which each lane of the warp accesses
  one lane of tensor memory.
  """
  shape = _MOVED.fullmatch(instruction.name)
  if shape is None or not isinstance(address, parsing.Address):
    raise faults.NotModelled(instruction.name)
  assert isinstance(operand, parsing.OperandGroup)
  if len(operand.items) != int(shape[2]):
    raise faults.NotModelled(f"{instruction.name}: {len(operand.items)} items")
  offsets = [x.value for x in rest if isinstance(x, parsing.Immediate)]
  expected = 1 if shape[1] == "16x32bx2" else 0
  if (len(rest), len(offsets)) != (expected, expected):
    raise faults.NotModelled(instruction.text)
  return operand.items, offsets[0] if offsets else None


def _regions(
  instruction: parsing.Instruction,
  warp: int,
  address: int,
  columns: int,
  offset: int | None,
) -> list[tuple[slice, tensor_memory.Region]]:
  """Returns the lanes of the warp, and the cells, of each access.

  With shape 16x32bx2, lanes 0 to 15 of the warp access 16 lanes of tensor
  memory. Lanes 16 to 31 access other columns of the same 16 lanes.
  """
  lane, column = _split(address)
  quarter = tensor_memory.QUARTER * (warp % 4)
  if lane != quarter and (offset is None or lane != quarter + _HALF):
    raise faults.TensorMemory(
      f"{instruction.name}: warp {warp} has lanes from {quarter}, not {lane}"
    )
  count, offsets = (
    (blocks.WARP, [0]) if offset is None else (_HALF, [0, offset])
  )
  return [
    (
      slice(count * part, count * (part + 1)),
      tensor_memory.Region(
        lanes=tuple(range(lane, lane + count)),
        column=column + more,
        columns=columns,
      ),
    )
    for part, more in enumerate(offsets)
  ]


def _store(block: blocks.Block, instruction: parsing.Instruction) -> None:
  address, *rest, source = instruction.operands
  items, offset = _columns(instruction, source, address, rest)
  words = products.words(block, source)
  for warp, base in _of_warps(block, instruction, address):
    regions = _regions(instruction, warp, base, len(items), offset)
    if offset == 0:  # both halves access the same cells
      (lanes, _), (others, _) = regions
      if (words[warp, lanes] != words[warp, others]).any():
        raise faults.DataRace("lanes store different values to one column")
      regions = regions[:1]
    elif len(regions) > 1 and regions[0][1].overlaps(regions[1][1]):
      raise faults.NotModelled(f"{instruction.text}: halves that overlap")
    for lanes, region in regions:
      block.tensor.store(warp, region, words[warp, lanes])


def _load(block: blocks.Block, instruction: parsing.Instruction) -> None:
  out, address, *rest = instruction.operands
  items, offset = _columns(instruction, out, address, rest)
  warps = block.threads // blocks.WARP
  words = np.zeros((warps, blocks.WARP, len(items)), np.uint32)
  for warp, base in _of_warps(block, instruction, address):
    for lanes, region in _regions(instruction, warp, base, len(items), offset):
      words[warp, lanes] = block.tensor.load(warp, region)
  for place, register in enumerate(items):
    block.write(register, words[:, :, place].reshape(-1))


def _wait(block: blocks.Block, instruction: parsing.Instruction) -> None:
  for warp in block.warps(instruction):
    if instruction.parts[1] == "wait::st":
      block.tensor.wait_for_stores(int(warp))
    else:
      block.tensor.wait_for_loads(int(warp))


def _commit(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Adds an arrival that completes all earlier matmuls of the thread."""
  (place,) = instruction.operands
  for thread in block.lanes():
    products = block.tensor.products_of(int(thread))
    synchronization.arrive_later(
      block,
      int(block.addresses(place)[thread]),
      int(thread),
      functools.partial(block.tensor.end_products, products),
    )


HANDLERS: Final[dict[str, blocks.Handler]] = {
  "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32": _allocate,
  "tcgen05.dealloc.cta_group::1.sync.aligned.b32": _deallocate,
  "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned": _relinquish,
  "tcgen05.wait::ld.sync.aligned": _wait,
  "tcgen05.wait::st.sync.aligned": _wait,
  "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64": (
    _commit
  ),
  "tcgen05.ld": _load,
  "tcgen05.st": _store,
  "tcgen05.mma": _multiply,
}
