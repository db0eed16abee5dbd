# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes loads, stores and asynchronous copies.

PTX ISA: "Data Movement and Conversion Instructions: ld, st, cp.async,
ldmatrix, stmatrix".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import integers
from jaxplugin.lab.inspection.ptx import parsing
from jaxplugin.lab.inspection.ptx import products

_MATRIX_ROWS: Final = 8
_MATRIX_ROW_BYTES: Final = 16
_VECTORS: Final = {"v2": 2, "v4": 4, "v8": 8}
# Qualifiers of loads and stores that do not change the values.
_CACHING: Final = frozenset(
  ("global", "shared", "shared::cta", "ca", "cg", "cs", "lu", "cv", "wb", "wt")
  + ("nc", "L1::evict_last", "L1::evict_first", "L1::no_allocate")
  + ("L1::evict_normal", "L1::evict_unchanged", "b128", "param")
  + ("L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", *_VECTORS)
)


def _space(instruction: parsing.Instruction) -> str:
  if unknown := set(instruction.parts[1:-1]) - _CACHING:
    raise faults.NotModelled(f"{instruction.name}: {sorted(unknown)}")
  space = instruction.parts[1].partition("::")[0]
  if space not in ("global", "shared", "param"):
    raise faults.NotModelled(f"{instruction.name}: a state space")
  return space


def _load(block: blocks.Block, instruction: parsing.Instruction) -> None:
  out, address = instruction.operands[:2]
  space = _space(instruction)
  assert isinstance(address, parsing.Address)
  bits = instruction.bits
  if space == "param":
    assert isinstance(address.base, parsing.Symbol)
    value = parsing.Immediate(block.parameters[address.base.name])
    block.write(out, block.read(value, bits))
    return
  registers = parsing.items_of(out)
  size = bits // 8 * len(registers)
  addresses = block.addresses(address)[block.active]
  lanes = block.lanes()
  if space == "global":
    data = block.global_memory.load(addresses, size, block.number)
    block.counts["global bytes loaded"] += data.size
  else:
    data = block.shared.load(addresses, size, lanes, "ld.shared")
  for register, part in zip(
    registers, data.view(f"u{bits // 8}").T, strict=True
  ):
    if instruction.type[0] == "s":
      part = integers.signed(part).astype(np.int64).astype(np.uint64)
    whole = np.zeros(block.threads, part.dtype)
    whole[lanes] = part
    block.write(register, whole)


def _store(block: blocks.Block, instruction: parsing.Instruction) -> None:
  address, source = instruction.operands[:2]
  space = _space(instruction)
  lanes = block.lanes()
  addresses = block.addresses(address)[block.active]
  # Undefined bits must not be stored, even if no test compares them.
  columns = [
    block.read_defined(register, instruction.bits)[block.active]
    for register in parsing.items_of(source)
  ]
  data = np.stack(columns, axis=1).view(np.uint8)
  if space == "global":
    block.global_memory.store(addresses, data, block.number)
    block.counts["global bytes stored"] += data.size
  elif space == "shared":
    block.shared.store(addresses, data, lanes, "st.shared")
  else:
    raise faults.NotModelled(f"{instruction.name}: a state space")


def _copy_async(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes cp.async.

  A copy writes global bytes, or zeros, to shared memory. The emulator writes
  the bytes when threads wait for their group. Hardware may write the bytes
  earlier, so an access before the wait is a fault.
  """
  to, source, size_operand, *rest = instruction.operands
  size = parsing.constant(size_operand)
  given = np.full(block.threads, size)
  if rest:
    given = block.read_defined(rest[0], 32).astype(np.int64)
  if len(rest) > 1 or ((given != 0) & (given != size))[block.active].any():
    raise faults.NotModelled(f"{instruction.text}: a part of a copy")
  addresses = block.addresses(to)[block.active]
  sources = block.addresses(source)
  data = np.zeros((block.threads, size), np.uint8)
  whole = block.active & (given == size)
  if whole.any():
    data[whole] = block.global_memory.load(sources[whole], size, block.number)
  block.counts["global bytes loaded"] += int(whole.sum()) * size
  lanes = block.lanes()
  places = block.shared.begin_copy(addresses, size, lanes)
  block.copies[-1].append((places, data[block.active], lanes))


def _commit_copies(
  block: blocks.Block, instruction: parsing.Instruction
) -> None:
  del instruction
  block.copies.append([])


def _wait_for_copies(
  block: blocks.Block, instruction: parsing.Instruction
) -> None:
  """Executes wait_group n: waits until at most n groups are in flight."""
  if not block.all_active:
    raise faults.Divergence(f"{instruction.name}: taken by some threads alone")
  left = 0
  if instruction.parts[2] == "wait_all":
    block.copies.append([])
  else:
    left = parsing.constant(instruction.operands[0])
  while len(block.copies) - 1 > left:
    for places, data, lanes in block.copies.pop(0):
      block.shared.end_copy(places, data, lanes)


# The row of each lane's two elements of a matrix, and their columns.
_ROW: Final = products.GROUP[:, None]
_COLUMNS: Final = products.PLACE[:, None] * 2 + np.arange(2)


def _matrices(
  block: blocks.Block,
  instruction: parsing.Instruction,
  address: parsing.Operand,
  operand: parsing.Operand,
) -> Iterator[tuple[parsing.Operand, np.ndarray]]:
  """Yields the register and the row addresses of each matrix.

  Lanes 8 j to 8 j + 7 of a warp have the row addresses of matrix j.
  """
  if "m8n8" not in instruction.parts or instruction.type != "b16":
    raise faults.NotModelled(instruction.name)
  (count,) = (int(x[1]) for x in instruction.parts if x in ("x1", "x2", "x4"))
  found = block.addresses(address).reshape(-1, 4, _MATRIX_ROWS)
  rows = found[block.warps(instruction)].swapaxes(0, 1)
  for register, addresses in zip(
    parsing.items_of(operand)[:count], rows, strict=False
  ):
    yield register, addresses.reshape(-1)


def _row_actors(block: blocks.Block, warps: np.ndarray) -> np.ndarray:
  return np.repeat(block.shared.whole_warps(warps), _MATRIX_ROWS)


def _load_matrix(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes ldmatrix, which loads matrices of 8 x 8 elements."""
  out, address = instruction.operands
  warps = block.warps(instruction)
  actors = _row_actors(block, warps)
  for register, rows in _matrices(block, instruction, address, out):
    data = block.shared.load(rows, _MATRIX_ROW_BYTES, actors, "ldmatrix")
    elements = data.view(np.uint16).reshape(-1, _MATRIX_ROWS, _MATRIX_ROWS)
    if "trans" in instruction.parts:
      elements = elements.swapaxes(1, 2)
    value = np.zeros((block.threads // blocks.WARP, blocks.WARP, 2), np.uint16)
    value[warps] = elements[:, _ROW, _COLUMNS]
    block.write(register, value.view(np.uint32).reshape(-1))


def _store_matrix(
  block: blocks.Block, instruction: parsing.Instruction
) -> None:
  """Executes stmatrix, whose layout is that of ldmatrix."""
  address, source = instruction.operands
  warps = block.warps(instruction)
  actors = _row_actors(block, warps)
  for register, rows in _matrices(block, instruction, address, source):
    value = block.read_defined(register, 32).view(np.uint16)
    elements = np.zeros((len(warps), _MATRIX_ROWS, _MATRIX_ROWS), np.uint16)
    elements[:, _ROW, _COLUMNS] = value.reshape(-1, blocks.WARP, 2)[warps]
    if "trans" in instruction.parts:
      elements = np.ascontiguousarray(elements.swapaxes(1, 2))
    data = elements.reshape(-1, _MATRIX_ROWS).view(np.uint8)
    block.shared.store(rows, data, actors, "stmatrix")


HANDLERS: Final[dict[str, blocks.Handler]] = {
  "ld": _load,
  "st": _store,
  "cp.async.ca": _copy_async,
  "cp.async.cg": _copy_async,
  "cp.async.commit_group": _commit_copies,
  "cp.async.wait_group": _wait_for_copies,
  "cp.async.wait_all": _wait_for_copies,
  "ldmatrix": _load_matrix,
  "stmatrix": _store_matrix,
}
