# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes cvt and mov (PTX ISA, "Data Movement and Conversion")."""

from __future__ import annotations

from collections.abc import Sequence
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
    high, low = (_narrowed(_floats(block, x, source), to) for x in operands)
    block.write(out, _joined([low, high], 2 * _NARROW[to][1]))
  elif source in _NARROW and to in _PAIRS:
    block.write(out, _widened(block.read(operands[0], 16), source, _PAIRS[to]))
  elif to in _PAIRS and source == "f32":
    high, low = (
      rounding.to_bits(_floats(block, x, source), _PAIRS[to]) for x in operands
    )
    block.write(out, _joined([low, high], 32))
  elif to in rounding.DTYPES and source in rounding.DTYPES:
    value = _floats(block, operands[0], source)
    block.write(out, rounding.to_bits(value, to))
  elif to in rounding.DTYPES and source in _INTEGERS:
    if source[1:] == "64":
      raise faults.NotModelled(f"cvt.{to}.{source}")
    value = _cast(block.read(operands[0], 32), source)
    block.write(out, rounding.to_bits(value.astype(np.float64), to))
  elif to in _INTEGERS and source in rounding.DTYPES:
    found = [_ROUNDINGS[part] for part in modifiers if part in _ROUNDINGS]
    if len(found) != 1:
      raise faults.NotModelled(f"{instruction.name}: no rounding to integers")
    value = _floats(block, operands[0], source)
    block.write(out, _saturated(found[0](value), to))
  else:
    raise faults.NotModelled(instruction.name)


def _floats(
  block: blocks.Block, operand: parsing.Operand, type: str
) -> np.ndarray:
  return rounding.to_float(block.read(operand, rounding.BITS[type]), type)


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
  return _joined(
    [rounding.to_bits(x.astype(np.float64), to) for x in values], 32
  )


def _move(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Copies a register, or splits or joins the parts of one."""
  out, source = instruction.operands
  bits = instruction.bits
  if isinstance(source, parsing.OperandGroup):

    def joined(*parts: np.ndarray) -> np.ndarray:
      return _joined(parts, bits)

    block.rearrange(out, joined, source.items, bits // len(source.items))
    return
  outs = parsing.items_of(out)
  for place, register in enumerate(outs):

    def part(x: np.ndarray, by: int = bits // len(outs) * place) -> np.ndarray:
      return x >> by if by else x

    block.rearrange(register, part, [source], bits)


def _joined(parts: Sequence[np.ndarray], bits: int) -> np.ndarray:
  """Returns registers of some bits from their parts, lowest bits first."""
  value = np.zeros(len(parts[0]), np.dtype(f"uint{max(bits, 8)}"))
  for place, part in enumerate(parts):
    value |= part.astype(value.dtype) << bits // len(parts) * place
  return value


HANDLERS: Final[dict[str, blocks.Handler]] = {
  "cvt": _convert,
  "mov": _move,
}
