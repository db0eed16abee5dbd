# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes instructions on f32, f16, bf16, and packed pairs of each.

PTX ISA: "Floating Point Instructions", "Half Precision Floating Point
Instructions". Results are rounded to nearest even. Subnormals are kept, except
with ".ftz". Instructions compute in f64 and round again, which is innocuous
because f64 has enough bits (Figueroa: "When is double rounding innocuous?",
1995). fma uses `rounding.fused`. Approximations (ex2, div.full, ...) are also
computed in f64, so hardware's last bits may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import integers
from jaxplugin.lab.inspection.ptx import parsing
from jaxplugin.lab.inspection.ptx import rounding

# The element type of each type, and the number of elements in a register.
ELEMENTS: Final = {
  "f16": ("f16", 1),
  "bf16": ("bf16", 1),
  "f32": ("f32", 1),
  "f16x2": ("f16", 2),
  "bf16x2": ("bf16", 2),
  "f32x2": ("f32", 2),
}
TYPES: Final = tuple(ELEMENTS)

_Function = Callable[..., np.ndarray]
_MODIFIERS: Final = frozenset(
  ("rn", "ftz", "approx", "full", "NaN", "xorsign", "abs", *ELEMENTS)
)
_SIGN: Final = {16: 0x8000, 32: 0x80000000}
_SMALLEST_NORMAL: Final = float(np.finfo(np.float32).tiny)


def _larger(
  x: np.ndarray, y: np.ndarray, z: np.ndarray | None = None
) -> np.ndarray:
  """Returns the maximum. It ignores NaN, and +0 is larger than -0."""
  if z is not None:
    y = _larger(y, z)
  larger = np.fmax(x, y)
  zeros = (x == 0) & (y == 0)
  return np.where(zeros & ~(np.signbit(x) & np.signbit(y)), 0.0, larger)


def _smaller(*values: np.ndarray) -> np.ndarray:
  return -_larger(*(-x for x in values))


_ARITHMETIC: Final[dict[str, _Function]] = {
  "add": np.add,
  "sub": np.subtract,
  "mul": np.multiply,
  "fma": rounding.fused,
  "div": np.divide,
  "max": _larger,
  "min": _smaller,
  "ex2": np.exp2,
  "lg2": np.log2,
  "rcp": np.reciprocal,
  "sqrt": np.sqrt,
  "rsqrt": lambda x: 1 / np.sqrt(x),
  "tanh": np.tanh,
}
_ORDERED: Final[dict[str, _Function]] = {
  "eq": np.equal,
  "ne": lambda x, y: (x < y) | (x > y),
  "lt": np.less,
  "le": np.less_equal,
  "gt": np.greater,
  "ge": np.greater_equal,
}
_COMPARISONS: Final[dict[str, _Function]] = {
  **_ORDERED,
  # equ to geu are true if an operand is NaN.
  "equ": lambda x, y: ~((x < y) | (x > y)),
  "neu": np.not_equal,
  "ltu": lambda x, y: ~(x >= y),
  "leu": lambda x, y: ~(x > y),
  "gtu": lambda x, y: ~(x <= y),
  "geu": lambda x, y: ~(x < y),
  "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
  "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}


def _elements(
  block: blocks.Block, operand: parsing.Operand, type: str
) -> list[np.ndarray]:
  """Returns the bits of each element in a register."""
  element, count = ELEMENTS[type]
  value = block.read(operand, count * rounding.BITS[element])
  return [value] if count == 1 else list(rounding.halves(value))


def _write(
  block: blocks.Block, operand: parsing.Operand, elements: list[np.ndarray]
) -> None:
  block.write(
    operand, elements[0] if len(elements) == 1 else rounding.joined(*elements)
  )


def _flushed(x: np.ndarray) -> np.ndarray:
  """Replaces f32 subnormals with zeros of the same sign."""
  return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(0.0, x), x)


def _arithmetic(block: blocks.Block, instruction: parsing.Instruction) -> None:
  name, type = instruction.parts[0], instruction.type
  if unknown := set(instruction.parts[1:]) - _MODIFIERS:
    raise faults.NotModelled(f"{instruction.name}: {unknown}")
  flushes = "ftz" in instruction.parts
  element = ELEMENTS[type][0]
  out, *operands = instruction.operands
  columns = [_elements(block, operand, type) for operand in operands]
  results = []
  for bits in zip(*columns, strict=True):
    values = [rounding.to_float(x, element) for x in bits]
    if flushes:
      values = [_flushed(x) for x in values]
    negative = np.logical_xor.reduce([np.signbit(x) for x in values])
    if "abs" in instruction.parts:
      values = [np.abs(x) for x in values]
    with np.errstate(all="ignore"):
      result = _ARITHMETIC[name](*values)
    if "xorsign" in instruction.parts:
      result = np.where(negative, -result, result)
    if "NaN" in instruction.parts:  # min.NaN and max.NaN propagate NaN
      result = np.where(np.isnan(values).any(axis=0), np.nan, result)
    results.append(
      rounding.to_bits(_flushed(result) if flushes else result, element)
    )
  _write(block, out, results)


def _sign(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes neg and abs, which change only the sign bit."""
  out, operand = instruction.operands
  results = []
  for bits in _elements(block, operand, instruction.type):
    sign = bits.dtype.type(_SIGN[8 * bits.itemsize])
    is_neg = instruction.parts[0] == "neg"
    results.append(bits ^ sign if is_neg else bits & ~sign)
  _write(block, out, results)


def _setp(block: blocks.Block, instruction: parsing.Instruction) -> None:
  if len(instruction.parts) != 3:
    raise faults.NotModelled(f"{instruction.name}: a combining setp")
  out, *operands = instruction.operands
  element = ELEMENTS[instruction.type][0]
  columns = [_elements(block, x, instruction.type) for x in operands]
  found = [
    _COMPARISONS[instruction.parts[1]](
      *(rounding.to_float(x, element) for x in bits)
    )
    for bits in zip(*columns, strict=True)
  ]
  outs = out.items if isinstance(out, parsing.OperandGroup) else (out,)
  for register, value in zip(outs, found, strict=True):
    block.write(register, value)


def _set(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes set, which sets all bits of an element if a comparison holds."""
  _, comparison, to, type = instruction.parts
  if ELEMENTS[type][1] != 2 or to != "u32":
    raise faults.NotModelled(f"{instruction.name}: set of no pair")
  out, *operands = instruction.operands
  element = ELEMENTS[type][0]
  columns = [_elements(block, x, type) for x in operands]
  results = []
  for bits in zip(*columns, strict=True):
    found = _COMPARISONS[comparison](
      *(rounding.to_float(x, element) for x in bits)
    )
    results.append(np.where(found, 0xFFFF, 0).astype(bits[0].dtype))
  _write(block, out, results)


HANDLERS: Final[dict[str, integers.Handler]] = {
  **dict.fromkeys(_ARITHMETIC, _arithmetic),
  "neg": _sign,
  "abs": _sign,
  "set": _set,
  "setp": _setp,
}
