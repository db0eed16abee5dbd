# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes loads, stores, asynchronous copies and conversions.

PTX ISA: "Data Movement and Conversion Instructions: ld, st, cp.async,
ldmatrix, stmatrix, cvt, mov".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import ml_dtypes
import numpy as np

from jaxplugin.lab.inspection.ptx import (
  blocks,
  faults,
  floats,
  integers,
  parsing,
  products,
)

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
# Packed pairs of FP8 and FP4: an element's dtype, its bits, and the code that a
# conversion of NaN returns.
_NARROW: Final = {
  "e4m3x2": (np.dtype(ml_dtypes.float8_e4m3fn), 8, 0x7F),
  "e5m2x2": (np.dtype(ml_dtypes.float8_e5m2), 8, 0x7F),
  # FP4 has no NaN. cvt converts NaN to the largest number.
  "e2m1x2": (np.dtype(ml_dtypes.float4_e2m1fn), 4, 0x7),
}
_PAIRS: Final = {"bf16x2": "bf16", "f16x2": "f16"}
_ROUNDINGS: Final = {
  "rni": np.rint,
  "rzi": np.trunc,
  "rmi": np.floor,
  "rpi": np.ceil,
}
_MODIFIERS: Final = frozenset(("rn", "satfinite", *_ROUNDINGS))
_INTEGERS: Final = frozenset(
  f"{s}{bits}" for s in "us" for bits in (8, 16, 32, 64)
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


def _load_matrix(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes ldmatrix, which loads matrices of 8 x 8 elements."""
  out, address = instruction.operands
  warps = block.warps(instruction)
  actors = np.repeat(block.shared.whole_warps(warps), _MATRIX_ROWS)
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
  actors = np.repeat(block.shared.whole_warps(warps), _MATRIX_ROWS)
  for register, rows in _matrices(block, instruction, address, source):
    value = block.read_defined(register, 32).view(np.uint16)
    elements = np.zeros((len(warps), _MATRIX_ROWS, _MATRIX_ROWS), np.uint16)
    elements[:, _ROW, _COLUMNS] = value.reshape(-1, blocks.WARP, 2)[warps]
    if "trans" in instruction.parts:
      elements = np.ascontiguousarray(elements.swapaxes(1, 2))
    data = elements.reshape(-1, _MATRIX_ROWS).view(np.uint8)
    block.shared.store(rows, data, actors, "stmatrix")


def _convert(block: blocks.Block, instruction: parsing.Instruction) -> None:
  *modifiers, to, source = instruction.parts[1:]
  if unknown := set(modifiers) - _MODIFIERS:
    raise faults.NotModelled(f"{instruction.name}: {unknown}")
  out, *operands = instruction.operands
  if to in _INTEGERS and source in _INTEGERS:
    (operand,) = operands
    # cvt.s32.s8 reads the low byte of a wider register.
    bits = operand.bits if isinstance(operand, parsing.Register) else 64

    def converted(x: np.ndarray) -> np.ndarray:
      # The register may be wider than the result; extends the sign.
      return _cast(_cast(x, source), to).astype(np.uint64)

    block.rearrange(out, converted, [operand], bits)
  elif to in _NARROW and source == "f32":
    if "satfinite" not in modifiers:
      raise faults.NotModelled(f"{instruction.name}: not saturating")
    high, low = (
      _narrowed(floats.value(block, x, source), to) for x in operands
    )
    block.write(out, _joined([low, high], 2 * _NARROW[to][1]))
  elif source in _NARROW and to in _PAIRS:
    block.write(out, _widened(block.read(operands[0], 16), source, _PAIRS[to]))
  elif to in _PAIRS and source == "f32":
    high, low = (
      floats.to_bits(floats.value(block, x, source), _PAIRS[to])
      for x in operands
    )
    block.write(out, _joined([low, high], 32))
  elif to in floats.DTYPES and source in floats.DTYPES:
    value = floats.value(block, operands[0], source)
    block.write(out, floats.to_bits(value, to))
  elif to in floats.DTYPES and source in _INTEGERS:
    if source[1:] == "64":
      raise faults.NotModelled(f"cvt.{to}.{source}")
    value = _cast(block.read(operands[0], 32), source)
    block.write(out, floats.to_bits(value.astype(np.float64), to))
  elif to in _INTEGERS and source in floats.DTYPES:
    found = [_ROUNDINGS[part] for part in modifiers if part in _ROUNDINGS]
    if len(found) != 1:
      raise faults.NotModelled(f"{instruction.name}: no rounding to integers")
    value = floats.value(block, operands[0], source)
    block.write(out, _saturated(found[0](value), to))
  else:
    raise faults.NotModelled(instruction.name)


def _cast(x: np.ndarray, type: str) -> np.ndarray:
  """Cuts or extends integers to a PTX type."""
  cut = x.astype(f"uint{type[1:]}")
  return integers.signed(cut) if type[0] == "s" else cut


def _saturated(value: np.ndarray, to: str) -> np.ndarray:
  """Converts integral floats to saturated integers, and NaN to zero."""
  limits = np.iinfo(f"{'int' if to[0] == 's' else 'uint'}{to[1:]}")
  if limits.bits == 64:
    raise faults.NotModelled(f"cvt to {to}")
  inside = np.clip(np.nan_to_num(value), limits.min, limits.max)
  return inside.astype(np.int64).astype(np.uint64)


def _narrowed(value: np.ndarray, to: str) -> np.ndarray:
  """Returns uint8 codes of f32, rounded to nearest even and saturated."""
  dtype, bits, nan = _NARROW[to]
  largest = float(ml_dtypes.finfo(dtype).max)
  # ml_dtypes rounds f32 to these dtypes once.
  single = np.clip(value, -largest, largest).astype(np.float32)
  with np.errstate(invalid="ignore"):
    codes = single.astype(dtype).view(np.uint8)
  codes &= np.uint8(blocks.all_bits(bits))
  return np.where(np.isnan(value), np.uint8(nan), codes)


def _widened(codes: np.ndarray, source: str, to: str) -> np.ndarray:
  """Converts pairs of codes to pairs of bf16 or f16."""
  dtype, bits, _ = _NARROW[source]
  parts = [codes >> place & blocks.all_bits(bits) for place in (0, bits)]
  values = (part.astype(np.uint8).view(dtype) for part in parts)
  return _joined([floats.to_bits(x.astype(np.float64), to) for x in values], 32)


def _move(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Copies a register, or splits or joins the parts of one."""
  out, source = instruction.operands
  bits = instruction.bits
  if isinstance(source, parsing.OperandGroup):
    joined = lambda *parts: _joined(parts, bits)
    block.rearrange(out, joined, source.items, bits // len(source.items))
    return
  outs = parsing.items_of(out)
  for place, register in enumerate(outs):

    def part(x: np.ndarray, by: int = bits // len(outs) * place) -> np.ndarray:
      return x >> by if by else x

    block.rearrange(register, part, [source], bits)
  # LLVM copies an accumulator between wgmma.fence and wgmma. ptxas assigns the
  # copy the register of its source, or omits a source of zeros.
  if (
    isinstance(source, parsing.Register)
    and isinstance(out, parsing.Register)
    and source.name not in block.since_fence
  ):
    block.since_fence.discard(out.name)


def _joined(parts: Sequence[np.ndarray], bits: int) -> np.ndarray:
  """Returns registers of some bits from their parts, lowest bits first."""
  value = np.zeros(len(parts[0]), np.dtype(f"uint{max(bits, 8)}"))
  for place, part in enumerate(parts):
    value |= part.astype(value.dtype) << bits // len(parts) * place
  return value


HANDLERS: Final[dict[str, blocks.Handler]] = {
  "cvt": _convert,
  "mov": _move,
  "ld": _load,
  "st": _store,
  "cp.async.ca": _copy_async,
  "cp.async.cg": _copy_async,
  "cp.async.commit_group": lambda block, _: block.copies.append([]),
  "cp.async.wait_group": _wait_for_copies,
  "cp.async.wait_all": _wait_for_copies,
  "ldmatrix": _load_matrix,
  "stmatrix": _store_matrix,
}
