# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes tcgen05: allocation, loads and stores of tensor memory, waits.

PTX ISA 9.0: 9.7.16.7 (alloc, dealloc, relinquish_alloc_permit), 9.7.16.8 (ld,
st, wait) with the shapes of 9.7.16.2.3.1, 9.7.16.12 (commit). The upper half of
an address is the lane, and the lower half is the column (9.7.16.1.1).
"""

from __future__ import annotations

import functools
import re
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import integers
from jaxplugin.lab.inspection.ptx import mbarriers
from jaxplugin.lab.inspection.ptx import parsing
from jaxplugin.lab.inspection.ptx import tensor_memory
from jaxplugin.lab.inspection.ptx import tensor_products

_MOVED: Final = re.compile(
  r"tcgen05\.(?:ld|st)\.sync\.aligned\.(32x32b|16x32bx2)\.x(\d+)\.b32"
)
_WORD: Final = 4
_HALF: Final = 16  # lanes of each half of 16x32bx2


def _of_warps(
  block: blocks.Block,
  instruction: parsing.Instruction,
  operand: parsing.Operand,
) -> list[tuple[int, int]]:
  """Returns active warps, and an operand's value, equal in all lanes."""
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
  block: blocks.Block,
  instruction: parsing.Instruction,
  operand: parsing.Operand,
) -> tuple[int, int]:
  found = _of_warps(block, instruction, operand)
  if len(found) > 1:
    raise faults.TensorMemory(f"{instruction.name} by {len(found)} warps")
  return found[0]


def _allocate(block: blocks.Block, instruction: parsing.Instruction) -> None:
  place, count = instruction.operands
  warp, address = _one_warp(block, instruction, place)
  _, columns = _one_warp(block, instruction, count)
  first = block.tensor.allocate(columns)
  block.shared.store(
    np.array([address]),
    np.array([[first]], np.uint32).view(np.uint8),
    block.shared.whole_warps(np.array([warp])),
    "",
  )


def _deallocate(block: blocks.Block, instruction: parsing.Instruction) -> None:
  place, count = instruction.operands
  warp, address = _one_warp(block, instruction, place)
  _, columns = _one_warp(block, instruction, count)
  lane, first = tensor_products.split(address)
  if lane:
    raise faults.TensorMemory(f"tcgen05.dealloc of lane {lane}")
  block.tensor.deallocate(warp, first, columns)


def _relinquish(block: blocks.Block, instruction: parsing.Instruction) -> None:
  block.warps(instruction)
  block.tensor.relinquish()


def _regions(
  instruction: parsing.Instruction, warp: int, address: int, half: int | None
) -> list[tuple[int, tensor_memory.Region]]:
  """Returns the first lane of the warp and the cells of each access.

  32x32b: a lane of the warp accesses columns of one lane. 16x32bx2: lanes 0 to
  15 access columns of 16 lanes, and the other lanes access other columns of
  these.
  """
  shape = _MOVED.fullmatch(instruction.name)
  assert shape is not None
  columns = int(shape[2])
  lane, column = tensor_products.split(address)
  quarter = tensor_memory.QUARTER * (warp % 4)
  if half is None:
    if lane != quarter:
      raise faults.TensorMemory(
        f"{instruction.name}: warp {warp} has lanes from {quarter}, not {lane}"
      )
    lanes = tuple(range(lane, lane + tensor_memory.QUARTER))
    region = tensor_memory.Region(lanes=lanes, column=column, columns=columns)
    return [(0, region)]
  if lane not in (quarter, quarter + _HALF):
    raise faults.TensorMemory(
      f"{instruction.name}: warp {warp} has lanes from {quarter}, not {lane}"
    )
  lanes = tuple(range(lane, lane + _HALF))
  return [
    (
      first,
      tensor_memory.Region(lanes=lanes, column=column + more, columns=columns),
    )
    for first, more in ((0, 0), (_HALF, half))
  ]


def _moved(
  instruction: parsing.Instruction,
  address: parsing.Operand,
  rest: tuple[parsing.Operand, ...],
) -> int | None:
  """Returns the column offset of the second half; None if there is none."""
  shape = _MOVED.fullmatch(instruction.name)
  if shape is None or not isinstance(address, parsing.Address):
    raise faults.NotModelled(instruction.name)
  if shape[1] == "32x32b":
    if rest:
      raise faults.NotModelled(instruction.text)
    return None
  if len(rest) != 1 or not isinstance(rest[0], parsing.Immediate):
    raise faults.NotModelled(instruction.text)
  return rest[0].value


def _items(
  instruction: parsing.Instruction, operand: parsing.Operand
) -> tuple[parsing.Operand, ...]:
  shape = _MOVED.fullmatch(instruction.name)
  assert shape is not None and isinstance(operand, parsing.OperandGroup)
  if len(operand.items) != int(shape[2]):
    raise faults.NotModelled(f"{instruction.name}: {len(operand.items)} items")
  return operand.items


def _store(block: blocks.Block, instruction: parsing.Instruction) -> None:
  address, *rest, source = instruction.operands
  half = _moved(instruction, address, tuple(rest))
  columns = [block.read_defined(x, 32) for x in _items(instruction, source)]
  words = np.stack(columns, axis=1).reshape(-1, blocks.WARP, len(columns))
  for warp, base in _of_warps(block, instruction, address):
    regions = _regions(instruction, warp, base, half)
    given = [
      words[warp, first : first + len(region.lanes)]
      for first, region in regions
    ]
    if half == 0:  # both halves access the same cells
      if (given[0] != given[1]).any():
        raise faults.Race("lanes store different values to one column")
      regions = regions[:1]
    elif len(regions) > 1 and regions[0][1].overlaps(regions[1][1]):
      raise faults.NotModelled(f"{instruction.text}: halves that overlap")
    for (_, region), part in zip(regions, given, strict=False):
      block.tensor.store(warp, region, part)


def _load(block: blocks.Block, instruction: parsing.Instruction) -> None:
  out, address, *rest = instruction.operands
  half = _moved(instruction, address, tuple(rest))
  items = _items(instruction, out)
  words = np.zeros(
    (block.threads // blocks.WARP, blocks.WARP, len(items)), np.uint32
  )
  for warp, base in _of_warps(block, instruction, address):
    for first, region in _regions(instruction, warp, base, half):
      last = first + len(region.lanes)
      words[warp, first:last] = block.tensor.load(warp, region)
  for place, register in enumerate(items):
    block.write(register, words[:, :, place].reshape(-1))


def _wait(block: blocks.Block, instruction: parsing.Instruction) -> None:
  for warp in block.warps(instruction):
    if instruction.parts[1] == "wait::st":
      block.tensor.wait_for_stores(int(warp))
    else:
      block.tensor.wait_for_loads(int(warp))


def _commit(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Adds an arrival after all products of the thread so far."""
  (place,) = instruction.operands
  for thread in block.lanes():
    products = block.tensor.products_of(int(thread))
    mbarriers.arrive_later(
      block,
      int(block.addresses(place)[thread]),
      int(thread),
      functools.partial(block.tensor.end_products, products),
    )


_FORMS: Final[dict[str, integers.Handler]] = {
  "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32": _allocate,
  "tcgen05.dealloc.cta_group::1.sync.aligned.b32": _deallocate,
  "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned": _relinquish,
  "tcgen05.wait::ld.sync.aligned": _wait,
  "tcgen05.wait::st.sync.aligned": _wait,
  "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64": (
    _commit
  ),
}
_FAMILIES: Final[dict[str, integers.Handler]] = {
  "ld": _load,
  "st": _store,
  "mma": tensor_products.multiply,
}


def _tcgen05(block: blocks.Block, instruction: parsing.Instruction) -> None:
  handler = _FORMS.get(instruction.name) or _FAMILIES.get(instruction.parts[1])
  if handler is None:
    raise faults.NotModelled(instruction.name)
  handler(block, instruction)


HANDLERS: Final[dict[str, integers.Handler]] = {"tcgen05": _tcgen05}
