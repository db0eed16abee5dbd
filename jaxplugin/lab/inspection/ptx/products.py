# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes mma.sync, with and without block scales.

PTX ISA: "Warp Level Matrix Multiply-Accumulate Instructions", the fragments of
m16n8k16 (16-bit elements), m16n8k32 (8-bit) and m16n8k64 (4-bit), and "Block
Scaling for mma.sync". The accumulator and the products are summed in f64. Each
instruction truncates the sum to f32, as tensor cores do. Hardware also
truncates each product, to a little more than f32's precision. FP8 without block
scales is summed by `fp8_sum` instead, and INT8 exactly in int32.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from jaxplugin.lab.inspection.ptx import (
  blocks,
  faults,
  floats,
  parsing,
)

_LANE: Final = np.arange(blocks.WARP)
GROUP: Final = _LANE // 4  # a lane's row in a fragment
PLACE: Final = _LANE % 4  # a lane's position in this row
_M: Final = 16
_N: Final = 8
FP8_SUM_BITS: Final = 13  # bits kept after the leading bit

# The NumPy dtype and the number of bits of each PTX element type.
_ELEMENTS: Final = {
  "bf16": (floats.BF16, 16),
  "f16": (floats.F16, 16),
  "e4m3": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
  "e5m2": (np.dtype(ml_dtypes.float8_e5m2), 8),
  "e2m1": (np.dtype(ml_dtypes.float4_e2m1fn), 4),
  "s8": (np.dtype(np.int8), 8),
}
_SCALES: Final = {
  "ue8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
  "ue4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
# k of the instruction, by the bits of an element.
_K: Final = {16: 16, 8: 32, 4: 64}
# The type of sums by element type, without block scales.
SUM_TYPES: Final = {"bf16": "f32", "f16": "f32", "e4m3": "f32", "s8": "s32"}
# The bits of an element by kind, with block scales.
_SCALED_BITS: Final = {
  "kind::mxf8f6f4": 8,
  "kind::mxf4": 4,
  "kind::mxf4nvf4": 4,
}


def element_bits(type: str) -> int:
  """Returns the number of bits of a PTX element type."""
  return _ELEMENTS[type][1]


def _shape(type: str) -> str:
  return f"m{_M}n{_N}k{_K[element_bits(type)]}"


def unpacked(words: np.ndarray, type: str) -> np.ndarray:
  """Unpacks uint32[...] to f64[..., elements], lowest bits first."""
  dtype, bits = _ELEMENTS[type]
  shifts = np.arange(0, 32, bits, dtype=np.uint32)
  codes = words[..., None] >> shifts & np.uint32(blocks.all_bits(bits))
  narrow = codes.astype(np.uint16 if bits == 16 else np.uint8)
  with np.errstate(invalid="ignore"):
    return narrow.view(dtype).astype(np.float64)


def fragment(words: np.ndarray, type: str) -> np.ndarray:
  """Returns the operand of uint32[warps, 32, registers], f64[warps, rows, k].

  The left operand has 16 rows and 4 registers. The transposed right operand has
  8 rows and 2 registers.
  """
  _, bits = _ELEMENTS[type]
  k, held = _K[bits], 32 // bits
  registers = words.shape[2]
  row_parts = registers // 2
  values = unpacked(words, type)
  found = np.empty((len(words), _N * row_parts, k))
  for register in range(registers):
    row = GROUP + _N * (register % row_parts)
    column = held * PLACE + k // 2 * (register // row_parts)
    for element in range(held):
      found[:, row, column + element] = values[:, :, register, element]
  return found


def registers(operand: parsing.Operand) -> tuple[parsing.Register, ...]:
  """Returns the registers of a fragment."""
  assert isinstance(operand, parsing.OperandGroup)
  items = operand.items
  if not all(isinstance(item, parsing.Register) for item in items):
    raise faults.NotModelled(f"a fragment of {operand}")
  return items  # type: ignore[return-value]


def words(block: blocks.Block, operand: parsing.Operand) -> np.ndarray:
  """Returns a fragment's registers, uint32[warps, 32, registers].

  Raises:
    faults.Undefined: If an active thread has undefined bits in a register.
  """
  columns = [block.read_defined(x, 32) for x in registers(operand)]
  return np.stack(columns, axis=1).reshape(-1, blocks.WARP, len(columns))


def fp8_sum(products: np.ndarray, old: np.ndarray) -> np.ndarray:
  """Adds FP8 products f64[..., k] to f64[...] as Hopper's instructions do.

  Terms are truncated to 13 bits after the leading bit of the largest term
  (DeepSeek-V3, arXiv 2412.19437, section 3.5.2; SageAttention2, arXiv
  2411.10958, section 3.2). NVIDIA does not document this.
  """
  terms = np.concatenate([products, old[..., None]], axis=-1)
  largest = np.abs(terms).max(axis=-1, keepdims=True)
  is_normal = (largest > 0) & np.isfinite(largest)
  exponent = np.frexp(np.where(is_normal, largest, 1.0))[1] - 1
  unit = np.exp2(exponent - FP8_SUM_BITS)
  cut = np.where(is_normal, np.trunc(terms / unit) * unit, terms)
  return cut.sum(axis=-1)


def int32_sum(sums: np.ndarray) -> np.ndarray:
  """Returns f64 sums of integers as int32; a sum beyond it is not modelled."""
  if np.abs(sums).max(initial=0) >= 2**31:
    raise faults.NotModelled("a sum of integers that leaves int32")
  return sums.astype(np.int32)


def _places(count: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the row and column of accumulators, int[32, count].

  Four registers of a lane belong to an accumulator of 16 rows and 8 columns.
  More registers belong to further columns.
  """
  register = np.arange(count)
  row = GROUP[:, None] + _N * (register // 2 % 2)
  column = 2 * PLACE[:, None] + register % 2 + _N * (register // 4)
  return row, column


def accumulators(
  block: blocks.Block, operand: parsing.Operand, type: str
) -> np.ndarray:
  """Returns f64[warps, 16, columns], sums of products of a PTX type."""
  found = words(block, operand).view(np.int32 if type == "s8" else np.float32)
  count = found.shape[2]
  sums = np.empty((len(found), _M, 2 * count))
  sums[:, *_places(count)] = found
  return sums


def write_accumulators(
  block: blocks.Block, operand: parsing.Operand, sums: np.ndarray
) -> None:
  """Writes f32 or int32[warps, 16, columns]."""
  outs = registers(operand)
  found = sums.view(np.uint32)[:, *_places(len(outs))]
  for place, register in enumerate(outs):
    block.write(register, found[:, :, place].reshape(-1))


def multiply(
  a: np.ndarray, b: np.ndarray, sums: np.ndarray, type: str
) -> np.ndarray:
  """Returns f64 a @ b.T + sums as f32, or as int32 for element type s8."""
  with np.errstate(invalid="ignore", over="ignore"):
    if type == "e4m3":
      total = fp8_sum(a[..., :, None, :] * b[..., None, :, :], sums)
    else:
      total = a @ b.swapaxes(-1, -2) + sums
    if type == "s8":
      return int32_sum(total)
    return floats.truncated_single(total)


def _multiply(block: blocks.Block, instruction: parsing.Instruction) -> None:
  parts = instruction.parts
  if parts[1:3] != ("sync", "aligned") or "row" not in parts:
    raise faults.NotModelled(instruction.name)
  block.warps(instruction)
  block.counts["matrix products"] += block.threads // blocks.WARP
  if "block_scale" in parts:
    _multiply_scaled(block, instruction)
    return
  out_type, type, rhs_type, sum_type = parts[-4:]
  # .satfinite has no effect: see `int32_sum`.
  if (
    SUM_TYPES.get(type) != sum_type
    or parts[3] != _shape(type)
    or (rhs_type, out_type) != (type, sum_type)
    or parts[6:-4] not in ((), ("satfinite",))
  ):
    raise faults.NotModelled(instruction.name)
  out, left, right, sums = instruction.operands
  a = fragment(words(block, left), type)
  b = fragment(words(block, right), type)
  total = multiply(a, b, accumulators(block, sums, type), type)
  write_accumulators(block, out, total)


def _multiply_scaled(
  block: blocks.Block, instruction: parsing.Instruction
) -> None:
  parts = instruction.parts
  shape, kind = parts[3], parts[6]
  vector = next(x for x in parts if x.startswith("scale_vec::"))
  blocks_of_k = int(vector[len("scale_vec::")])
  _, left_type, right_type, _, scale_type = parts[-5:]
  if any(
    element_bits(type) != _SCALED_BITS.get(kind) or shape != _shape(type)
    for type in (left_type, right_type)
  ):
    raise faults.NotModelled(instruction.name)
  out, left, right, sums, *scales = instruction.operands
  sides = []
  for operand, type, scale, selector, rows in (
    (left, left_type, scales[0], scales[1], _M),
    (right, right_type, scales[2], scales[3], _N),
  ):
    codes = _scale(block, scale, selector, rows, blocks_of_k)
    values = fragment(words(block, operand), type)
    factors = decoded_scales(codes, scale_type)
    with np.errstate(invalid="ignore", over="ignore"):
      per_scale = values.shape[2] // blocks_of_k
      sides.append(values * np.repeat(factors, per_scale, axis=2))
  a, b = sides
  total = multiply(a, b, accumulators(block, sums, "f32"), "f32")
  write_accumulators(block, out, total)


def decoded_scales(codes: np.ndarray, type: str) -> np.ndarray:
  """Decodes uint8 scale factors of a PTX type to f64."""
  if type == "ue4m3":
    codes = codes & np.uint8(0x7F)  # ue4m3 has no sign
  return codes.view(_SCALES[type]).astype(np.float64)


def _scale(
  block: blocks.Block,
  operand: parsing.Operand,
  selector: parsing.Operand,
  rows: int,
  count: int,
) -> np.ndarray:
  """Returns the scale factors of one operand, uint8[warps, rows, count].

  PTX calls the elements of `selector` byte-id and thread-id, t. A row's scale
  factors start at byte-id in the 32-bit register of a lane. For the left
  operand, lanes 2 t and 2 t + 1 of quad g have rows g and g + 8. For the right
  operand, lane t of quad g has column g.
  """
  first, thread = map(parsing.constant, parsing.items_of(selector))
  (operand,) = parsing.items_of(operand)
  row = np.arange(rows)
  if rows == _M:
    lane = 4 * (row % _N) + 2 * thread + row // _N
  else:
    lane = 4 * row + thread
  shifts = (8 * (first + np.arange(count))).astype(np.uint32)
  codes, undefined = (
    bits.reshape(-1, blocks.WARP)[:, lane, None] >> shifts & np.uint32(0xFF)
    for bits in block.read_bits(operand, 32)
  )
  if undefined.any():
    raise faults.Undefined("a scale is used, but not written")
  return codes.astype(np.uint8)


HANDLERS: Final[dict[str, blocks.Handler]] = {"mma": _multiply}
