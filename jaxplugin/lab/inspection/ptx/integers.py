# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes integer, logic, shift and permute instructions.

PTX ISA: "Integer Arithmetic Instructions", "Logic and Shift Instructions",
"Comparison and Selection Instructions", "Data Movement: prmt".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import parsing

Handler = Callable[[blocks.Block, parsing.Instruction], None]

_COMPARISONS: Final[dict[str, Callable[..., np.ndarray]]] = {
  "eq": np.equal,
  "ne": np.not_equal,
  "lt": np.less,
  "le": np.less_equal,
  "gt": np.greater,
  "ge": np.greater_equal,
  "lo": np.less,
  "ls": np.less_equal,
  "hi": np.greater,
  "hs": np.greater_equal,
}
# Operations on packed pairs.
_PACKED: Final[dict[str, Callable[..., np.ndarray]]] = {
  "add": np.add,
  "min": np.minimum,
  "max": np.maximum,
}
_LOGIC: Final[dict[str, Callable[..., np.ndarray]]] = {
  "and": np.bitwise_and,
  "or": np.bitwise_or,
  "xor": np.bitwise_xor,
}
PACKED_TYPES: Final = ("u16x2", "s16x2")


def bits_of(type: str) -> int:
  """Returns the number of bits of a register with a PTX type."""
  if type not in parsing.REGISTER_BITS:
    raise faults.NotModelled(f"an instruction of type {type}")
  return parsing.REGISTER_BITS[type]


def signed(x: np.ndarray) -> np.ndarray:
  """Returns the bits as signed integers in two's complement."""
  return x.view(np.dtype(f"int{8 * x.itemsize}"))


def unsigned(x: np.ndarray) -> np.ndarray:
  return x.view(np.dtype(f"uint{8 * x.itemsize}"))


def _as_numbers(x: np.ndarray, type: str) -> np.ndarray:
  return signed(x) if type[0] == "s" else x


def _two(
  block: blocks.Block, instruction: parsing.Instruction
) -> tuple[np.ndarray, np.ndarray]:
  bits = bits_of(instruction.type)
  _, x, y = instruction.operands
  return block.read(x, bits), block.read(y, bits)


def _add_sub(block: blocks.Block, instruction: parsing.Instruction) -> None:
  x, y = _two(block, instruction)
  found = x + y if instruction.parts[0] == "add" else x - y
  block.write(instruction.operands[0], found)


def _product(x: np.ndarray, y: np.ndarray, part: str, type: str) -> np.ndarray:
  """Computes mul.lo, mul.hi or mul.wide."""
  bits = 8 * x.itemsize
  if part == "lo":
    return x * y
  x, y = _as_numbers(x, type), _as_numbers(y, type)
  if bits == 64:  # "hi"
    high = [
      (int(a) * int(b) >> bits) & blocks.all_bits(bits)
      for a, b in zip(x, y, strict=True)
    ]
    return np.array(high, np.uint64)
  wide = np.dtype(f"{x.dtype.kind}{2 * x.itemsize}")
  whole = unsigned(x.astype(wide) * y.astype(wide))
  if part == "wide":
    return whole
  return (whole >> whole.dtype.type(bits)).astype(f"uint{bits}")


def _mul(block: blocks.Block, instruction: parsing.Instruction) -> None:
  x, y = _two(block, instruction)
  product = _product(x, y, instruction.parts[1], instruction.type)
  block.write(instruction.operands[0], product)


def _mad(block: blocks.Block, instruction: parsing.Instruction) -> None:
  bits = bits_of(instruction.type)
  out, first, second, third = instruction.operands
  x, y = block.read(first, bits), block.read(second, bits)
  product = _product(x, y, instruction.parts[1], instruction.type)
  block.write(out, product + block.read(third, 8 * product.itemsize))


def _min_max(block: blocks.Block, instruction: parsing.Instruction) -> None:
  x, y = (_as_numbers(a, instruction.type) for a in _two(block, instruction))
  choose = np.minimum if instruction.parts[0] == "min" else np.maximum
  block.write(instruction.operands[0], unsigned(choose(x, y)))


def _packed_pair(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Computes add, min and max of pairs of 16-bit integers."""
  out, first, second = instruction.operands
  x, y = (
    _as_numbers(block.read(operand, 32).view(np.uint16), instruction.type)
    for operand in (first, second)
  )
  found = _PACKED[instruction.parts[0]](x, y)
  block.write(out, unsigned(found).view(np.uint32))


def _neg_abs(block: blocks.Block, instruction: parsing.Instruction) -> None:
  out, operand = instruction.operands
  x = block.read(operand, bits_of(instruction.type))
  negative = ~x + x.dtype.type(1)
  if instruction.parts[0] == "abs":
    negative = np.where(signed(x) < 0, negative, x)
  block.write(out, negative)


def _logic(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes and, or and xor."""
  out, first, second = instruction.operands
  x, y = _two(block, instruction)
  name, undefined = instruction.parts[0], None
  if block.is_doubtful:
    bits = bits_of(instruction.type)
    x_unknown = block.undefined_bits(first, bits)
    y_unknown = block.undefined_bits(second, bits)
    undefined = x_unknown | y_unknown
    if name == "and":
      # A defined zero in one operand makes the result a defined zero.
      undefined &= (x_unknown | x) & (y_unknown | y)
  block.write(out, _LOGIC[name](x, y), undefined)


def _not(block: blocks.Block, instruction: parsing.Instruction) -> None:
  out, operand = instruction.operands
  bits = bits_of(instruction.type)
  value = ~block.read(operand, bits)
  block.write(out, value, block.undefined_bits(operand, bits))


def _shifted(x: np.ndarray, by: np.ndarray, name: str, type: str) -> np.ndarray:
  """Computes shl and shr, which clamp the shift to the register's bits."""
  bits = 8 * x.itemsize
  inside = np.minimum(by, bits - 1).astype(x.dtype)
  if type[0] == "s" and name == "shr":
    return unsigned(signed(x) >> signed(inside))
  found = x << inside if name == "shl" else x >> inside
  return np.where(by >= bits, x.dtype.type(0), found)


def _shift(block: blocks.Block, instruction: parsing.Instruction) -> None:
  out, operand, amount = instruction.operands
  name, type = instruction.parts[0], instruction.type
  bits = bits_of(type)
  x, by = block.read(operand, bits), block.read(amount, 32)
  undefined = None
  if block.is_doubtful and not block.undefined_bits(amount, 32).any():
    undefined = _shifted(block.undefined_bits(operand, bits), by, name, type)
  block.write(out, _shifted(x, by, name, type), undefined)


def _funnel(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes shf: the high (.l) or low (.r) word of the shifted pair."""
  out, low, high, amount = instruction.operands
  _, direction, mode, _ = instruction.parts
  whole = block.read(low, 32).astype(np.uint64)
  whole |= block.read(high, 32).astype(np.uint64) << np.uint64(32)
  by = block.read(amount, 32).astype(np.uint64)
  by = by & np.uint64(31) if mode == "wrap" else np.minimum(by, np.uint64(32))
  if direction == "l":
    found = (whole << by) >> np.uint64(32)
  else:
    found = whole >> by
  block.write(out, (found & np.uint64(0xFFFFFFFF)).astype(np.uint32))


def _extract(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes bfe: extracts a bit field, and sign-extends it if it is signed."""
  out, operand, place, length = instruction.operands
  type = instruction.type
  bits = bits_of(type)
  x = block.read(operand, bits)
  start = np.minimum(block.read(place, 32) & 0xFF, bits).astype(np.uint32)
  count = np.minimum(block.read(length, 32) & 0xFF, bits).astype(np.uint32)

  def extracted(x: np.ndarray) -> np.ndarray:
    # The field's highest bit is shifted to the sign bit, and back.
    field = _shifted(x, start, "shr", f"u{bits}")
    top = _shifted(field, bits - count, "shl", type)
    down = _shifted(top, bits - count, "shr", type)
    return np.where(count == 0, x.dtype.type(0), down)

  if type[0] == "s" and ((start + count > bits) & block.active).any():
    raise faults.NotModelled("bfe of signed bits beyond the register")
  unknown = block.unknown(operand, bits)
  block.write(
    out, extracted(x), None if unknown is None else extracted(unknown)
  )


def _insert(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes bfi: inserts the low bits of one word into another."""
  out, source, into, place, length = instruction.operands
  bits = bits_of(instruction.type)
  start = np.minimum(block.read(place, 32) & 0xFF, bits).astype(np.uint32)
  count = np.minimum(block.read(length, 32) & 0xFF, bits).astype(np.uint32)
  x, y = block.read(source, bits), block.read(into, bits)
  ones = np.full_like(x, blocks.all_bits(bits))
  field = ones ^ _shifted(ones, count, "shl", "b")
  mask = _shifted(field, start, "shl", "b")
  block.write(out, (_shifted(x, start, "shl", "b") & mask) | (y & ~mask))


def _permuted(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
  """Executes prmt: each nibble of `by` selects a byte, or a byte's sign."""
  pool = np.stack([low, high], axis=1).view(np.uint8)
  taken = np.empty((len(low), 4), np.uint8)
  for place in range(4):
    nibble = by >> np.uint32(4 * place) & np.uint32(15)
    byte = pool[np.arange(len(low)), nibble & 7]
    sign = np.where(byte >> 7, np.uint8(255), np.uint8(0))
    taken[:, place] = np.where(nibble >> 3, sign, byte)
  return taken.view(np.uint32)[:, 0]


def _permute(block: blocks.Block, instruction: parsing.Instruction) -> None:
  if instruction.type != "b32":
    raise faults.NotModelled(f"{instruction.name}: a mode of prmt")
  out, *operands = instruction.operands
  low, high, by = (block.read(operand, 32) for operand in operands)
  undefined = None
  if block.is_doubtful and not block.undefined_bits(operands[2], 32).any():
    undefined = _permuted(
      block.undefined_bits(operands[0], 32),
      block.undefined_bits(operands[1], 32),
      by,
    )
  block.write(out, _permuted(low, high, by), undefined)


def _lop3(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes lop3: looks up bit `4 a + 2 b + c` of a table."""
  out, *operands, table = instruction.operands
  assert isinstance(table, parsing.Immediate)
  a, b, c = (block.read(operand, 32) for operand in operands)
  value = np.zeros_like(a)
  for row in range(8):
    if table.value >> row & 1:
      value |= (
        (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
      )
  block.write(out, value)


def _count(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes popc (counts ones) and clz (counts leading zeros)."""
  out, operand = instruction.operands
  x = block.read(operand, bits_of(instruction.type))
  planes = np.unpackbits(x[:, None].view(np.uint8), axis=1, bitorder="little")
  if instruction.parts[0] == "popc":
    found = planes.sum(axis=1)
  else:
    descending = planes[:, ::-1]
    found = np.where(
      planes.any(axis=1), descending.argmax(axis=1), planes.shape[1]
    )
  block.write(out, found.astype(np.uint32))


def _setp(block: blocks.Block, instruction: parsing.Instruction) -> None:
  if len(instruction.parts) != 3:
    raise faults.NotModelled(f"{instruction.name}: a combining setp")
  x, y = (_as_numbers(a, instruction.type) for a in _two(block, instruction))
  found = _COMPARISONS[instruction.parts[1]](x, y)
  block.write(instruction.operands[0], found)


def select(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes selp of any type."""
  out, first, second, condition = instruction.operands
  bits = bits_of(instruction.type)
  chosen = block.read_defined(condition, 1)
  value = np.where(chosen, block.read(first, bits), block.read(second, bits))
  undefined = None
  if block.is_doubtful:
    undefined = np.where(
      chosen,
      block.undefined_bits(first, bits),
      block.undefined_bits(second, bits),
    )
  block.write(out, value, undefined)


PACKED_HANDLERS: Final[dict[str, Handler]] = dict.fromkeys(
  _PACKED, _packed_pair
)
HANDLERS: Final[dict[str, Handler]] = {
  "add": _add_sub,
  "sub": _add_sub,
  "mul": _mul,
  "mad": _mad,
  "min": _min_max,
  "max": _min_max,
  "neg": _neg_abs,
  "abs": _neg_abs,
  **dict.fromkeys(_LOGIC, _logic),
  "not": _not,
  "shl": _shift,
  "shr": _shift,
  "shf": _funnel,
  "bfe": _extract,
  "bfi": _insert,
  "prmt": _permute,
  "lop3": _lop3,
  "popc": _count,
  "clz": _count,
  "setp": _setp,
  "selp": select,
}
