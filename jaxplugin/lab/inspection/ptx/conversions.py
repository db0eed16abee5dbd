# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes cvt and mov (PTX ISA, "Data Movement and Conversion")."""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import integers
from jaxplugin.lab.inspection.ptx import parsing
from jaxplugin.lab.inspection.ptx import rounding

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


def _convert(block: blocks.Block, instruction: parsing.Instruction) -> None:
  *modifiers, to, source = instruction.parts[1:]
  if unknown := set(modifiers) - _MODIFIERS:
    raise faults.NotModelled(f"{instruction.name}: {unknown}")
  out, *operands = instruction.operands
  if to in _INTEGERS and source in _INTEGERS:
    _integer_to_integer(block, instruction)
  elif to in _NARROW and source == "f32":
    if "satfinite" not in modifiers:
      raise faults.NotModelled(f"{instruction.name}: not saturating")
    high, low = (_narrowed(block, operand, to) for operand in operands)
    bits = _NARROW[to][1]
    block.write(out, low | high << np.uint16(bits))
  elif source in _NARROW and to in _PAIRS:
    _widen(block, instruction)
  elif to in _PAIRS and source == "f32":
    high, low = (
      rounding.to_bits(
        rounding.to_float(block.read(operand, 32), "f32"), _PAIRS[to]
      )
      for operand in operands
    )
    block.write(out, rounding.joined(low, high))
  elif to in rounding.DTYPES and source in rounding.DTYPES:
    value = block.read(operands[0], rounding.BITS[source])
    wide = rounding.to_float(value, source)
    block.write(out, rounding.to_bits(wide, to))
  elif to in rounding.DTYPES and source in _INTEGERS:
    _integer_to_float(block, instruction)
  elif to in _INTEGERS and source in rounding.DTYPES:
    found = [_ROUNDINGS[part] for part in modifiers if part in _ROUNDINGS]
    if len(found) != 1:
      raise faults.NotModelled(f"{instruction.name}: no rounding to integers")
    value = rounding.to_float(
      block.read(operands[0], rounding.BITS[source]), source
    )
    block.write(out, _saturated(found[0](value), to))
  else:
    raise faults.NotModelled(instruction.name)


def _integer_to_integer(
  block: blocks.Block, instruction: parsing.Instruction
) -> None:
  """Truncates, or extends with sign bits or zeros."""
  out, operand = instruction.operands
  *_, to, source = instruction.parts
  bits, to_bits = int(source[1:]), int(to[1:])
  # cvt.s32.s8 reads the low byte of a wider register.
  register = operand.bits if isinstance(operand, parsing.Register) else bits

  def converted(x: np.ndarray) -> np.ndarray:
    cut = x.astype(f"uint{bits}")
    wide = cut.astype(np.int64 if source[0] == "u" else np.uint64)
    if source[0] == "s":
      wide = integers.signed(cut).astype(np.int64)
    kept = wide.astype(f"uint{min(to_bits, 64)}")
    if to[0] == "s" and to_bits < 64:
      # The register may be wider than the result; extend the sign.
      return integers.signed(kept).astype(np.int64).astype(np.uint64)
    return kept.astype(np.uint64)

  value = block.read(operand, register)
  unknown = block.unknown(operand, register)
  block.write(
    out, converted(value), None if unknown is None else converted(unknown)
  )


def _integer_to_float(
  block: blocks.Block, instruction: parsing.Instruction
) -> None:
  out, operand = instruction.operands
  *_, to, source = instruction.parts
  bits = int(source[1:])
  value = block.read(operand, max(bits, 16)).astype(f"uint{bits}")
  if source[0] == "s":
    value = integers.signed(value)
  if bits == 64:
    raise faults.NotModelled(f"cvt.{to}.{source}")
  block.write(out, rounding.to_bits(value.astype(np.float64), to))


def _saturated(value: np.ndarray, to: str) -> np.ndarray:
  """Converts integral floats to saturated integers, and NaN to zero."""
  limits = np.iinfo(f"{'int' if to[0] == 's' else 'uint'}{to[1:]}")
  if limits.bits == 64:
    raise faults.NotModelled(f"cvt to {to}")
  inside = np.clip(np.nan_to_num(value), limits.min, limits.max)
  return inside.astype(np.int64).astype(np.uint64)


def _narrowed(
  block: blocks.Block, operand: parsing.Operand, to: str
) -> np.ndarray:
  """Returns uint16 codes of f32, rounded to nearest even and saturated."""
  dtype, bits, nan = _NARROW[to]
  value = rounding.to_float(block.read(operand, 32), "f32")
  largest = float(ml_dtypes.finfo(dtype).max)
  # ml_dtypes rounds f32 to these dtypes once.
  single = np.clip(value, -largest, largest).astype(np.float32)
  with np.errstate(invalid="ignore"):
    codes = single.astype(dtype).view(np.uint8).astype(np.uint16)
  codes &= np.uint16(blocks.all_bits(bits))
  return np.where(np.isnan(value), np.uint16(nan), codes)


def _widen(block: blocks.Block, instruction: parsing.Instruction) -> None:
  out, operand = instruction.operands
  *_, to, source = instruction.parts
  dtype, bits, _ = _NARROW[source]
  codes = block.read(operand, 16)
  halves = []
  for place in (0, bits):
    code = codes >> np.uint16(place) & np.uint16(blocks.all_bits(bits))
    value = code.astype(np.uint8).view(dtype).astype(np.float64)
    halves.append(rounding.to_bits(value, _PAIRS[to]))
  block.write(out, rounding.joined(*halves))


def _move(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Copies a register, or splits or joins the parts of one."""
  out, source = instruction.operands
  bits = integers.bits_of(instruction.type)
  if isinstance(out, parsing.OperandGroup):
    value = block.read(source, bits)
    unknown = block.unknown(source, bits)
    width = bits // len(out.items)
    for place, register in enumerate(out.items):
      by = value.dtype.type(width * place)
      block.write(
        register, value >> by, None if unknown is None else unknown >> by
      )
    return
  if not isinstance(source, parsing.OperandGroup):
    value = block.read(source, bits)
    block.write(out, value, block.unknown(source, bits))
    return
  width = bits // len(source.items)
  parts = [block.read(item, width) for item in source.items]
  unknown = None
  if block.is_doubtful:
    unknown = _packed(
      [block.undefined_bits(item, width) for item in source.items], bits
    )
  block.write(out, _packed(parts, bits), unknown)


def _packed(parts: list[np.ndarray], bits: int) -> np.ndarray:
  whole = np.dtype(f"uint{bits}")
  value = np.zeros(len(parts[0]), whole)
  for place, part in enumerate(parts):
    value |= part.astype(whole) << whole.type(bits // len(parts) * place)
  return value


HANDLERS: Final[dict[str, integers.Handler]] = {
  "cvt": _convert,
  "mov": _move,
}
