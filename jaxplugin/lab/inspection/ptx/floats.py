# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes instructions on f32, f16, bf16, and packed pairs of each.

PTX ISA: "Floating Point Instructions", "Half Precision Floating Point
Instructions", "Mixed Precision Floating Point Instructions". Results are
rounded to nearest even. Subnormals are kept, except with ".ftz". Instructions
compute in f64 and round again, which is innocuous because f64 has enough bits
(Figueroa: "When is double rounding innocuous?", 1995). Approximations (ex2,
div.full, ...) are also computed in f64, so hardware's last bits may differ.

NumPy has no fused multiply-add, so `a * b + c` rounds twice. ml_dtypes also
rounds twice: from f64 to f32, and then to bf16. If the first rounding is to
odd, the second rounding gives the correctly rounded result (Boldo, Melquiond:
"Emulation of a FMA and correctly rounded sums", 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import ml_dtypes
import numpy as np

from jaxplugin.lab.inspection.ptx import (
  blocks,
  faults,
  integers,
  parsing,
)

BF16: Final = np.dtype(ml_dtypes.bfloat16)
F16: Final = np.dtype(np.float16)
F32: Final = np.dtype(np.float32)
F64: Final = np.dtype(np.float64)
DTYPES: Final = {"bf16": BF16, "f16": F16, "f32": F32, "f64": F64}
BITS: Final = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}
# The NaN that instructions return (PTX ISA, "Floating Point Instructions").
_NAN: Final = {"bf16": 0x7FFF, "f16": 0x7FFF, "f32": 0x7FFFFFFF}


def to_float(bits: np.ndarray, type: str) -> np.ndarray:
  """Converts a register's bits to f64, which is exact."""
  with np.errstate(invalid="ignore"):  # signaling NaN
    return bits.view(DTYPES[type]).astype(np.float64)


def to_bits(x: np.ndarray, type: str) -> np.ndarray:
  """Rounds f64 once, to nearest even, and returns a register's bits."""
  dtype = DTYPES[type]
  unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
  with np.errstate(over="ignore", under="ignore", invalid="ignore"):
    if dtype in (BF16, F16):
      x = _odd_single(x)
    bits: np.ndarray = x.astype(dtype).view(unsigned)
  if type in _NAN:
    bits = np.where(np.isnan(x), unsigned.type(_NAN[type]), bits)
  return bits


def truncated_single(x: np.ndarray) -> np.ndarray:
  """Rounds f64 to f32 toward zero. Values that overflow become infinite."""
  single = x.astype(np.float32)
  exceeds = np.isfinite(single) & (
    np.abs(single.astype(np.float64)) > np.abs(x)
  )
  return np.where(exceeds, np.nextafter(single, np.float32(0)), single)


def _odd_single(x: np.ndarray) -> np.ndarray:
  """Rounds f64 to f32 to odd: the last bit of an inexact result is one."""
  single = x.astype(np.float32)
  back = single.astype(np.float64)
  bits = single.view(np.uint32)
  finite = np.isfinite(x)
  # Saturates at the largest f32, which still overflows in bf16 and f16.
  single = np.where(
    finite & np.isinf(single),
    np.copysign(np.finfo(np.float32).max, x).astype(np.float32),
    single,
  )
  wrong = finite & np.isfinite(back) & (back != x) & ((bits & 1) == 0)
  toward = np.where(x > back, np.float32(np.inf), np.float32(-np.inf))
  return np.where(wrong, np.nextafter(single, toward), single)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  """Returns a * b + c in f64, rounded to odd.

  The inputs are f32 or narrower, so their product is exact. If the sum is
  inexact, its last bit becomes one. `to_bits` then rounds to nearest even.
  """
  with np.errstate(over="ignore", invalid="ignore", under="ignore"):
    product = a * b
    total = product + c
    part = total - product
    dropped = (product - (total - part)) + (c - part)
  bits = total.view(np.int64)
  wrong = np.isfinite(total) & (dropped != 0) & ((bits & 1) == 0)
  toward = np.where(dropped > 0, np.inf, -np.inf)
  return np.where(wrong, np.nextafter(total, toward), total)


# The element type of each type, and the bits of a register.
TYPES: Final = {
  "f16": ("f16", 16),
  "bf16": ("bf16", 16),
  "f32": ("f32", 32),
  "f16x2": ("f16", 32),
  "bf16x2": ("bf16", 32),
  "f32x2": ("f32", 64),
}

_Function = Callable[..., np.ndarray]
_MODIFIERS: Final = frozenset(
  ("rn", "ftz", "approx", "full", "NaN", "xorsign", "abs", *TYPES)
)
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


_ARITHMETIC: Final[dict[str, _Function]] = {
  "add": np.add,
  "sub": np.subtract,
  "mul": np.multiply,
  "fma": fused,
  "div": np.divide,
  "max": _larger,
  "min": lambda *values: -_larger(*(-x for x in values)),
  "ex2": np.exp2,
  "lg2": np.log2,
  "rcp": np.reciprocal,
  "sqrt": np.sqrt,
  "rsqrt": lambda x: 1 / np.sqrt(x),
  "tanh": np.tanh,
}


def _compared(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Compares numbers. equ to geu are true if an operand is NaN."""
  nan = np.isnan(x) | np.isnan(y)
  if name in ("nan", "num"):
    return nan if name == "nan" else ~nan
  found: np.ndarray = integers.COMPARISONS[name[:2]](x, y)
  return found | nan if name.endswith("u") else found & ~nan


def _bits(
  block: blocks.Block, operand: parsing.Operand, type: str
) -> np.ndarray:
  """Returns the bits of the elements of all registers."""
  element, bits = TYPES[type]
  return block.read(operand, bits).view(f"uint{BITS[element]}")


def _values(
  block: blocks.Block, operands: Iterable[parsing.Operand], type: str
) -> list[np.ndarray]:
  return [value(block, operand, type) for operand in operands]


def value(
  block: blocks.Block, operand: parsing.Operand, type: str
) -> np.ndarray:
  """Returns the elements of all registers, in f64."""
  return to_float(_bits(block, operand, type), TYPES[type][0])


def _write(
  block: blocks.Block,
  out: parsing.Operand,
  bits: np.ndarray,
  operands: Iterable[parsing.Operand],
) -> None:
  """Writes the bits of the elements of all registers.

  An element of a pair is undefined if its element of an operand has undefined
  bits: LLVM computes a single number in one half of a pair.
  """
  dtype = f"u{bits.nbytes // block.threads}"
  undefined = None
  if block.is_doubtful and bits.size > block.threads:
    size = 8 * bits.nbytes // block.threads
    unknown = [block.undefined_bits(x, size).view(bits.dtype) for x in operands]
    is_unknown = np.any(unknown, axis=0)
    undefined = np.where(is_unknown, ~bits.dtype.type(0), bits.dtype.type(0))
    undefined = undefined.view(dtype)
  block.write(out, bits.view(dtype), undefined)


def _flushed(x: np.ndarray) -> np.ndarray:
  """Replaces f32 subnormals with zeros of the same sign."""
  return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(0.0, x), x)


def _arithmetic(block: blocks.Block, instruction: parsing.Instruction) -> None:
  name, type = instruction.parts[0], instruction.type
  if unknown := set(instruction.parts[1:]) - _MODIFIERS:
    raise faults.NotModelled(f"{instruction.name}: {unknown}")
  flushes = "ftz" in instruction.parts
  out, *operands, last = instruction.operands
  # With two types, the result and the last operand have the first one.
  result_type = next(part for part in instruction.parts if part in TYPES)
  values = _values(block, operands, type) + [value(block, last, result_type)]
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
  if flushes:
    result = _flushed(result)
  bits = to_bits(result, TYPES[result_type][0])
  _write(block, out, bits, [*operands, last])


def _sign(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes neg and abs, which change only the sign bit."""
  out, operand = instruction.operands
  bits = _bits(block, operand, instruction.type)
  sign = bits.dtype.type(1 << 8 * bits.itemsize - 1)
  is_neg = instruction.parts[0] == "neg"
  _write(block, out, bits ^ sign if is_neg else bits & ~sign, [operand])


def _setp(block: blocks.Block, instruction: parsing.Instruction) -> None:
  if len(instruction.parts) != 3:
    raise faults.NotModelled(f"{instruction.name}: a combining setp")
  _, comparison, type = instruction.parts
  out, *operands = instruction.operands
  found = _compared(comparison, *_values(block, operands, type))
  columns = found.reshape(block.threads, -1).T
  for register, value in zip(parsing.items_of(out), columns, strict=True):
    block.write(register, value)


def _set(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes set, which sets all bits of an element if a comparison holds."""
  _, comparison, to, type = instruction.parts
  if type not in ("f16x2", "bf16x2") or to != "u32":
    raise faults.NotModelled(f"{instruction.name}: set of no pair")
  out, *operands = instruction.operands
  found = _compared(comparison, *_values(block, operands, type))
  _write(block, out, np.where(found, 0xFFFF, 0).astype(np.uint16), operands)


HANDLERS: Final[dict[str, blocks.Handler]] = {
  **dict.fromkeys(_ARITHMETIC, _arithmetic),
  "neg": _sign,
  "abs": _sign,
  "set": _set,
  "setp": _setp,
}
