# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes integer, logic, shift and permute instructions.

PTX ISA: "Integer Arithmetic Instructions", "Logic and Shift Instructions",
"Comparison and Selection Instructions", "Data Movement: prmt".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks, faults, parsing

COMPARISONS: Final[dict[str, np.ufunc]] = {
  "eq": np.equal,
  "ne": np.not_equal,
  "lt": np.less,
  "le": np.less_equal,
  "gt": np.greater,
  "ge": np.greater_equal,
}
_UNSIGNED: Final = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
LOGIC: Final[dict[str, np.ufunc]] = {
  "and": np.bitwise_and,
  "or": np.bitwise_or,
  "xor": np.bitwise_xor,
}
ARITHMETIC: Final[dict[str, np.ufunc]] = {
  "add": np.add,
  "sub": np.subtract,
  "min": np.minimum,
  "max": np.maximum,
  "neg": np.negative,
  "abs": np.absolute,
}


def signed(x: np.ndarray) -> np.ndarray:
  """Returns the bits as signed integers in two's complement."""
  return x.view(np.dtype(f"int{8 * x.itemsize}"))


def unsigned(x: np.ndarray) -> np.ndarray:
  return x.view(np.dtype(f"uint{8 * x.itemsize}"))


def _numbers(
  block: blocks.Block, operands: Iterable[parsing.Operand], type: str
) -> list[np.ndarray]:
  """Returns integers of a type; a packed pair is two successive integers."""
  element, is_pair, _ = type.partition("x2")
  bits = parsing.bits_of(element)
  dtype = np.dtype(f"{'int' if type[0] == 's' else 'uint'}{bits}")
  register_bits = 2 * bits if is_pair else bits
  return [block.read(x, register_bits).view(dtype) for x in operands]


def _elementwise(function: Callable[..., np.ndarray]) -> blocks.Handler:
  """Returns a handler that applies a function to integers."""

  def handler(block: blocks.Block, instruction: parsing.Instruction) -> None:
    out, *operands = instruction.operands
    found = function(*_numbers(block, operands, instruction.type))
    block.write(out, found.view(f"u{found.nbytes // block.threads}"))

  return handler


def _high_product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  bits = 8 * x.itemsize
  if bits == 64:
    ones = blocks.all_bits(bits)
    high = [int(a) * int(b) >> bits & ones for a, b in zip(x, y, strict=True)]
    return np.array(high, np.uint64)
  return (_wide_product(x, y) >> bits).astype(x.dtype)


def _wide_product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  wide = np.dtype(f"{x.dtype.kind}{2 * x.itemsize}")
  return x.astype(wide) * y.astype(wide)


_PRODUCTS: Final[dict[str, Callable[..., np.ndarray]]] = {
  "lo": np.multiply,
  "hi": _high_product,
  "wide": _wide_product,
}


def _mad(block: blocks.Block, instruction: parsing.Instruction) -> None:
  out, *factors, addend = instruction.operands
  x, y = _numbers(block, factors, instruction.type)
  product = unsigned(_PRODUCTS[instruction.parts[1]](x, y))
  block.write(out, product + block.read(addend, 8 * product.itemsize))


def _logic(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes and, or and xor."""
  out, *operands = instruction.operands
  name, bits = instruction.parts[0], instruction.bits
  x, y = (block.read(operand, bits) for operand in operands)
  undefined = None
  if block.is_doubtful:
    x_unknown, y_unknown = (block.undefined_bits(o, bits) for o in operands)
    undefined = x_unknown | y_unknown
    if name == "and":
      # A defined zero in one operand makes the result a defined zero.
      undefined &= (x_unknown | x) & (y_unknown | y)
  block.write(out, LOGIC[name](x, y), undefined)


def _not(block: blocks.Block, instruction: parsing.Instruction) -> None:
  out, operand = instruction.operands
  value = ~block.read(operand, instruction.bits)
  block.write(out, value, block.undefined_bits(operand, instruction.bits))


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
  shifted = functools.partial(
    _shifted, name=instruction.parts[0], type=instruction.type
  )
  block.rearrange(out, shifted, [operand], instruction.bits, [amount])


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


def _field(
  place: np.ndarray, length: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the first bit and the number of bits of a bit field."""
  start, count = (np.minimum(x & 0xFF, bits) for x in (place, length))
  return start.astype(np.uint32), count.astype(np.uint32)


def _extract(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes bfe: extracts a bit field, and sign-extends it if it is signed."""
  out, operand, *selectors = instruction.operands
  type, bits = instruction.type, instruction.bits

  def extracted(
    x: np.ndarray, place: np.ndarray, length: np.ndarray
  ) -> np.ndarray:
    start, count = _field(place, length, bits)
    if type[0] == "s" and ((start + count > bits) & block.active).any():
      raise faults.NotModelled("bfe of signed bits beyond the register")
    # The field's highest bit is shifted to the sign bit, and back.
    field = _shifted(x, start, "shr", f"u{bits}")
    top = _shifted(field, bits - count, "shl", type)
    down = _shifted(top, bits - count, "shr", type)
    return np.where(count == 0, x.dtype.type(0), down)

  block.rearrange(out, extracted, [operand], bits, selectors)


def _insert(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes bfi: inserts the low bits of one word into another."""
  out, source, into, *selectors = instruction.operands
  bits = instruction.bits
  place, length = (block.read(selector, 32) for selector in selectors)
  start, count = _field(place, length, bits)
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
  out, low, high, by = instruction.operands
  block.rearrange(out, _permuted, [low, high], 32, [by])


def _lop3(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes lop3: looks up bit `4 a + 2 b + c` of a table."""
  out, *operands, table = instruction.operands
  a, b, c = (block.read(operand, 32) for operand in operands)
  value = np.zeros_like(a)
  for row in range(8):
    if parsing.constant(table) >> row & 1:
      value |= (
        (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
      )
  block.write(out, value)


def _divide(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes div and rem, which truncate. x / 0 and x % 0 are undefined."""
  out, *operands = instruction.operands
  x, y = _numbers(block, operands, instruction.type)
  unknown = y == 0
  for operand in operands:
    unknown |= block.undefined_bits(operand, instruction.bits) != 0
  y = np.where(y == 0, x.dtype.type(1), y)
  with np.errstate(over="ignore"):
    found = np.fmod(x, y)
    if instruction.parts[0] == "div":
      found = (x - found) // y
  found = found.view(f"u{x.itemsize}")
  block.write(out, found, np.where(unknown, ~np.zeros_like(found), 0))


def _count(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes popc (counts ones) and clz (counts leading zeros)."""
  out, operand = instruction.operands
  x = block.read(operand, instruction.bits)
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
  out, *operands = instruction.operands
  x, y = _numbers(block, operands, instruction.type)
  name = instruction.parts[1]
  block.write(out, COMPARISONS[_UNSIGNED.get(name, name)](x, y))


def _select(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes selp of any type."""
  out, first, second, condition = instruction.operands
  chosen = block.read_defined(condition, 1)

  def selected(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(chosen, x, y)

  block.rearrange(out, selected, [first, second], instruction.bits)


HANDLERS: Final[dict[str, blocks.Handler]] = {
  **{name: _elementwise(f) for name, f in ARITHMETIC.items()},
  **{f"mul.{part}": _elementwise(f) for part, f in _PRODUCTS.items()},
  "mad": _mad,
  "div": _divide,
  "rem": _divide,
  **dict.fromkeys(LOGIC, _logic),
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
  "selp": _select,
}
