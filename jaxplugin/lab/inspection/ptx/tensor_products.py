# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes `tcgen05.mma`: one thread issues it, sums are in tensor memory.

PTX ISA 9.0: 9.7.16.10.9.1 (tcgen05.mma), 9.7.16.10.4 (packing of elements),
9.7.16.10.5 (layouts D, of m = 128, and F, of m = 64), 9.7.16.10.7 (block
scales). Products of an instruction are summed in f64 and rounded to f32 once.
Hardware keeps fewer bits of a sum. Products are computed at once. A write to
their operands before a wait for them is a fault.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import descriptors
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import parsing
from jaxplugin.lab.inspection.ptx import products
from jaxplugin.lab.inspection.ptx import tensor_memory

_WORD_BITS: Final = 32
_PARTS: Final = 4  # parts of the lanes; each has all scale factors
_PART: Final = 32  # lanes
# 4-bit elements in an 8-bit kind, in shared memory: 16 in 8 bytes, and 8 unused
# bytes (9.7.16.10.4.4).
_PADDED: Final = 16
_PADDED_HALF: Final = 8


def split(address: int) -> tuple[int, int]:
  """Returns lane and column of an address in tensor memory (9.7.16.1.1)."""
  return address >> 16, address & 0xFFFF


def multiply(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Issues a product for each active thread."""
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
  """A product that a thread issues."""

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
    what = descriptors.product(self._value(descriptor, 32), kind, scaling)
    lane, column = split(self._address(sums))
    lanes = _lanes(what.m, lane)
    packs = kind in ("mxf4", "mxf4nvf4")
    if isinstance(lhs, parsing.Address):
      a = self._in_tensor_memory(lhs, what, lane, packs)
    else:
      a = self._in_shared(
        lhs, (what.m, what.k), what.lhs, what.lhs_k_is_minor, packs
      )
    b = self._in_shared(
      rhs, (what.n, what.k), what.rhs, what.rhs_k_is_minor, packs
    )
    with np.errstate(invalid="ignore", over="ignore"):
      if what.scale_type is not None:
        per_scale = what.k // what.scales
        for side, place, first in (
          (a, scales[0], what.lhs_scale_byte),
          (b, scales[1], what.rhs_scale_byte),
        ):
          factors = self._scales(place, len(side), first, what)
          side *= np.repeat(factors, per_scale, axis=1)
      found = a @ b.T
    product = tensor_memory.ProductInFlight(
      thread=self._thread,
      kind=f"{kind} {what.m}x{what.n}",
      sums=tensor_memory.Region(lanes=lanes, column=column, columns=what.n),
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
    return self._block.tensor.read_by_product(self._warp, region)

  def _in_tensor_memory(
    self,
    place: parsing.Operand,
    what: descriptors.ProductShape,
    sums_lane: int,
    packs: bool,
  ) -> np.ndarray:
    """Returns f64[m, k], the left operand, with a row in each lane."""
    if not what.lhs_k_is_minor:
      raise faults.NotModelled("A in tensor memory, transposed")
    lane, column = split(self._address(place))
    if lane != sums_lane:
      raise faults.NotModelled(f"A from lane {lane}, and D from {sums_lane}")
    bits = products.element_bits(what.lhs)
    if bits == 4 and not packs:
      raise faults.NotModelled("4 bits among 8 in tensor memory")
    words = self._read(
      tensor_memory.Region(
        lanes=_lanes(what.m, lane),
        column=column,
        columns=what.k * bits // _WORD_BITS,
      )
    )
    return products.unpacked(words, what.lhs).reshape(what.m, what.k)

  def _in_shared(
    self,
    operand: parsing.Operand,
    shape: tuple[int, int],
    type: str,
    k_is_minor: bool,
    packs: bool,
  ) -> np.ndarray:
    """Returns f64[rows, k], the operand of a descriptor."""
    bits = products.element_bits(type)
    rows, k = shape
    is_padded = bits == 4 and not packs
    width = k if is_padded else k * bits // 8
    if bits == 4 and not k_is_minor:
      raise faults.NotModelled(f"{type} whose k is not minor")
    places = descriptors.tcgen05_places(
      self._value(operand, 64),
      rows,
      width,
      None if k_is_minor else bits // 8,
    )
    if is_padded:
      places = places[:, np.arange(width) % _PADDED < _PADDED_HALF]
    data = self._block.shared.begin_async_read(places, "tcgen05.mma")
    self._shared.append(places.reshape(-1))
    words = np.ascontiguousarray(data).view(np.uint32)
    return products.unpacked(words, type).reshape(rows, k)

  def _scales(
    self,
    place: parsing.Operand,
    rows: int,
    first: int,
    what: descriptors.ProductShape,
  ) -> np.ndarray:
    """Returns f64[rows, scales] of one operand.

    Column j has the scales of rows 32 j to 32 j + 31, one row in each lane. All
    four parts of the lanes have equal ones (9.7.16.10.7.2, 9.7.16.10.7.3).
    """
    assert what.scale_type is not None
    lane, column = split(self._address(place))
    if lane:
      raise faults.NotModelled(f"scale factors from lane {lane}")
    found = np.empty((rows, what.scales), np.uint8)
    shifts = (8 * (first + np.arange(what.scales))).astype(np.uint32)
    for group in range(-(-rows // _PART)):
      start = _PART * group
      count = min(_PART, rows - start)
      lanes = tuple(
        _PART * part + row for part in range(_PARTS) for row in range(count)
      )
      words = self._read(
        tensor_memory.Region(lanes=lanes, column=column + group, columns=1)
      ).reshape(_PARTS, count)
      codes = words[..., None] >> shifts & np.uint32(0xFF)
      if (codes != codes[0]).any():
        raise faults.TensorMemory(
          "scale factors that differ between parts of the lanes"
        )
      found[start : start + count] = codes[0]
    return products.decoded_scales(found, what.scale_type)


def _lanes(m: int, first: int) -> tuple[int, ...]:
  """Returns the lanes of a matrix's rows: all lanes, or 16 of each 32."""
  if m == tensor_memory.LANES:
    if first:
      raise faults.NotModelled(f"tcgen05.mma of m = 128 from lane {first}")
    return tuple(range(m))
  if first not in (0, 16):
    raise faults.NotModelled(f"tcgen05.mma of m = {m} from lane {first}")
  return tuple(
    first + _PART * part + row for part in range(_PARTS) for row in range(16)
  )
