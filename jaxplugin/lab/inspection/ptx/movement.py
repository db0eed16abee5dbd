# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes loads, stores and asynchronous copies.

PTX ISA: "Data Movement and Conversion Instructions: ld, st, cp.async,
ldmatrix, stmatrix".
"""

from __future__ import annotations

from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import integers
from jaxplugin.lab.inspection.ptx import parsing

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


def _registers(operand: parsing.Operand) -> tuple[parsing.Operand, ...]:
  return (
    operand.items if isinstance(operand, parsing.OperandGroup) else (operand,)
  )


def _load(block: blocks.Block, instruction: parsing.Instruction) -> None:
  out, address = instruction.operands[:2]
  space = _space(instruction)
  assert isinstance(address, parsing.Address)
  if space == "param":
    assert isinstance(address.base, parsing.Symbol)
    value = block.parameters[address.base.name]
    bits = integers.bits_of(instruction.type)
    block.write(out, block.read(parsing.Immediate(value), bits))
    return
  registers = _registers(out)
  bits = integers.bits_of(instruction.type)
  width = bits // 8
  size = width * len(registers)
  addresses = block.addresses(address)[block.active]
  lanes = block.lanes()
  if space == "global":
    data = block.global_memory.load(addresses, size, block.number)
    block.counts["global bytes loaded"] += data.size
  else:
    data = block.shared.load(addresses, size, lanes, "ld.shared")
  for place, register in enumerate(registers):
    column = np.ascontiguousarray(data[:, width * place : width * (place + 1)])
    part = column.view(f"uint{bits}")[:, 0]
    if instruction.type[0] == "s":
      part = integers.signed(part).astype(np.int64).astype(np.uint64)
    whole = np.zeros(block.threads, part.dtype)
    whole[lanes] = part
    block.write(register, whole)


def _store(block: blocks.Block, instruction: parsing.Instruction) -> None:
  address, source = instruction.operands[:2]
  space = _space(instruction)
  bits = integers.bits_of(instruction.type)
  lanes = block.lanes()
  addresses = block.addresses(address)[block.active]
  columns = []
  for register in _registers(source):
    # Undefined bits must not be stored, even if no test compares them.
    value = block.read_defined(register, bits)[block.active]
    columns.append(value[:, None].view(np.uint8))
  data = np.concatenate(columns, axis=1)
  if space == "global":
    block.global_memory.store(addresses, data, block.number)
    block.counts["global bytes stored"] += data.size
  elif space == "shared":
    block.shared.store(addresses, data, lanes, "st.shared")
  else:
    raise faults.NotModelled(f"{instruction.name}: a state space")


def copy_async(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes cp.async, commit_group, wait_group and wait_all.

  A copy writes global bytes, or zeros, to shared memory. The emulator writes
  the bytes when threads wait for their group. Hardware may write the bytes
  earlier, so an access before the wait is a fault.
  """
  if instruction.name == "cp.async.commit_group":
    block.copies.append([])
    return
  if instruction.parts[2] in ("wait_group", "wait_all"):
    _wait_for_copies(block, instruction)
    return
  if instruction.parts[2] not in ("ca", "cg"):
    raise faults.NotModelled(instruction.name)
  to, source, size_operand, *rest = instruction.operands
  assert isinstance(size_operand, parsing.Immediate)
  size = size_operand.value
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


def _wait_for_copies(
  block: blocks.Block, instruction: parsing.Instruction
) -> None:
  """Executes wait_group n: waits until at most n groups are in flight."""
  if not block.all_active:
    raise faults.Divergence(f"{instruction.name}: taken by some threads alone")
  if instruction.parts[2] == "wait_all":
    block.copies.append([])
    left = 0
  else:
    (count,) = instruction.operands
    assert isinstance(count, parsing.Immediate)
    left = count.value
  while len(block.copies) - 1 > left:
    for places, data, lanes in block.copies.pop(0):
      block.shared.end_copy(places, data, lanes)


def _matrices(instruction: parsing.Instruction) -> tuple[int, bool]:
  """Returns the number of matrices, and whether each is transposed."""
  if "m8n8" not in instruction.parts or instruction.type != "b16":
    raise faults.NotModelled(instruction.name)
  (count,) = (int(x[1]) for x in instruction.parts if x in ("x1", "x2", "x4"))
  return count, "trans" in instruction.parts


def _matrix_rows(
  block: blocks.Block, address: parsing.Operand, warps: np.ndarray
) -> np.ndarray:
  """Returns the row addresses of each of four matrices, [4, warps * 8]."""
  found = block.addresses(address).reshape(-1, 4, _MATRIX_ROWS)[warps]
  return found.swapaxes(0, 1).reshape(4, -1)


def _fragment_places() -> tuple[np.ndarray, np.ndarray]:
  """Returns the row, and the first of two columns, that each lane loads."""
  lane = np.arange(blocks.WARP)
  return lane // 4, 2 * (lane % 4)


def load_matrix(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes ldmatrix, which loads matrices of 8 x 8 elements.

  Lanes 8 j to 8 j + 7 have the row addresses of matrix j. Each lane of the warp
  loads two elements of matrix j.
  """
  out, address = instruction.operands
  count, transposed = _matrices(instruction)
  warps = block.warps(instruction)
  rows = _matrix_rows(block, address, warps)
  row, column = _fragment_places()
  for pointed, register in zip(rows, _registers(out)[:count], strict=False):
    data = block.shared.load(
      pointed,
      _MATRIX_ROW_BYTES,
      np.repeat(block.shared.whole_warps(warps), _MATRIX_ROWS),
      "ldmatrix",
    )
    elements = data.view(np.uint16).reshape(-1, _MATRIX_ROWS, _MATRIX_ROWS)
    if transposed:
      elements = elements.swapaxes(1, 2)
    low = elements[:, row, column].astype(np.uint32)
    high = elements[:, row, column + 1].astype(np.uint32)
    value = np.zeros((block.threads // blocks.WARP, blocks.WARP), np.uint32)
    value[warps] = low | high << np.uint32(16)
    block.write(register, value.reshape(-1))


def store_matrix(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes stmatrix, whose layout is that of ldmatrix."""
  address, source = instruction.operands
  count, transposed = _matrices(instruction)
  warps = block.warps(instruction)
  rows = _matrix_rows(block, address, warps)
  row, column = _fragment_places()
  for pointed, register in zip(rows, _registers(source)[:count], strict=False):
    value = block.read_defined(register, 32).reshape(-1, blocks.WARP)[warps]
    elements = np.zeros((len(warps), _MATRIX_ROWS, _MATRIX_ROWS), np.uint16)
    elements[:, row, column] = value.astype(np.uint16)
    elements[:, row, column + 1] = (value >> np.uint32(16)).astype(np.uint16)
    if transposed:
      elements = np.ascontiguousarray(elements.swapaxes(1, 2))
    block.shared.store(
      pointed,
      elements.reshape(-1, _MATRIX_ROWS).view(np.uint8),
      np.repeat(block.shared.whole_warps(warps), _MATRIX_ROWS),
      "stmatrix",
    )


HANDLERS: Final[dict[str, integers.Handler]] = {
  "ld": _load,
  "st": _store,
  "cp": copy_async,
  "ldmatrix": load_matrix,
  "stmatrix": store_matrix,
}
