# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes wgmma, the asynchronous matmul of four warps.

PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions":
fragments of m64nNk16 and m64nNk32, matrix descriptors, swizzling modes,
wgmma.fence and wait_group. The async proxy reads operands in shared memory.

The emulator computes results immediately. Before a wait for the group, a write
to the operands or a use of the results is a fault.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import descriptors
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import integers
from jaxplugin.lab.inspection.ptx import parsing
from jaxplugin.lab.inspection.ptx import products
from jaxplugin.lab.inspection.ptx import rounding

_WARPS: Final = 4
_THREADS: Final = _WARPS * blocks.WARP
_M: Final = 64
_ROW_BYTES: Final = 32  # bytes along k of one instruction
_ROWS: Final = 8  # rows of a core matrix
_SHAPE: Final = re.compile(r"m64n(\d+)k(16|32)")


def _wgmma(block: blocks.Block, instruction: parsing.Instruction) -> None:
  if not block.all_active:
    raise faults.Divergence(f"{instruction.name}: taken by some threads alone")
  if block.threads % _THREADS:
    raise faults.Divergence("wgmma by warps that are not a group of four")
  what = instruction.parts[1]
  if what == "fence":
    block.since_fence.clear()
  elif what == "commit_group":
    block.products.append([])
  elif what == "wait_group":
    _wait(block, instruction)
  elif what == "mma_async":
    _multiply(block, instruction)
  else:
    raise faults.NotModelled(instruction.name)


def _wait(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes wait_group n: waits until at most n groups are in flight."""
  count = instruction.operands[0]
  assert isinstance(count, parsing.Immediate)
  while len(block.products) - 1 > count.value:
    for _, reads in block.products.pop(0):
      for places in reads:
        block.shared.end_async_read(places)
  names = {
    name: how
    for group in block.products
    for used, _ in group
    for name, how in ((x[1:], x[0]) for x in used)
  }
  block.busy = {
    name: "read" if how == "<" else "written" for name, how in names.items()
  }


def _multiply(block: blocks.Block, instruction: parsing.Instruction) -> None:
  parts = instruction.parts
  shape = _SHAPE.fullmatch(parts[4])
  if shape is None or parts[6] != parts[7]:
    raise faults.NotModelled(instruction.name)
  n, k, type = int(shape[1]), int(shape[2]), parts[6]
  is_integer = type == "s8"
  if parts[5] != ("s32" if is_integer else "f32") or type not in (
    *("bf16", "f16", "e4m3", "s8"),
  ):
    raise faults.NotModelled(instruction.name)
  out, left, right, keeps, *rest = instruction.operands
  flags = [x.value for x in rest if isinstance(x, parsing.Immediate)]
  in_registers = isinstance(left, parsing.OperandGroup)
  # Flags: the signs of both operands, then whether each is MN-major. Integers
  # have none.
  signs = [] if is_integer else [1, 1]
  if flags[:2] != signs or any(flags[2:]):
    raise faults.NotModelled(f"{instruction.name} with {flags}")
  block.counts["matrix products"] += block.threads // blocks.WARP
  accumulators = products.registers(out)
  _check_fence(block, accumulators)
  used = [f">{x.name}" for x in accumulators]
  reads = []
  if in_registers:
    _check_fence(block, products.registers(left))
    used += [f"<{x.name}" for x in products.registers(left)]
    a = products.fragment(products.words(block, left), type)
    a = a.reshape(-1, _M, k)
  else:
    a, read = _in_shared(block, left, _M, type)
    reads += read
  b, read = _in_shared(block, right, n, type)
  reads += read
  is_fp8 = type == "e4m3"
  with np.errstate(invalid="ignore", over="ignore"):
    if is_fp8:
      found = a[:, :, None, :] * b[:, None, :, :]
    else:
      found = a @ b.swapaxes(1, 2)
  keeps_sums = block.read_defined(keeps, 1).reshape(-1, _THREADS)
  thread = np.arange(_THREADS)
  row_of_warp = thread // blocks.WARP * products.GROUP.size // 2
  lane = thread % blocks.WARP
  busy, block.busy = block.busy, {}
  dtype = np.int32 if is_integer else np.float32
  to_register = products.int32_sum if is_integer else rounding.truncated_single
  for place, register in enumerate(accumulators):
    row = row_of_warp + products.GROUP[lane] + _ROWS * (place // 2 % 2)
    column = _ROWS * (place // 4) + 2 * products.PLACE[lane] + place % 2
    total = found[:, row, column]
    kept = np.zeros(keeps_sums.shape)
    if keeps_sums.any():
      old = block.read_defined(register, 32).view(dtype)
      sums = old.astype(np.float64).reshape(-1, _THREADS)
      kept = np.where(keeps_sums, sums, 0.0)
    with np.errstate(invalid="ignore", over="ignore"):
      total = products.fp8_sum(total, kept) if is_fp8 else total + kept
    with np.errstate(invalid="ignore", over="ignore"):
      bits = to_register(total).view(np.uint32).reshape(-1)
    block.write(register, bits)
    block.since_fence.discard(register.name)
  block.busy = busy
  for name in used:
    block.busy[name[1:]] = "read" if name[0] == "<" else "written"
  block.products[-1].append((tuple(used), reads))


def _check_fence(
  block: blocks.Block, operands: tuple[parsing.Register, ...]
) -> None:
  """Checks for a wgmma.fence since other instructions wrote the registers."""
  for register in operands:
    if register.name in block.since_fence:
      raise faults.MissingFence(
        f"{register.name} is written, then used by wgmma without wgmma.fence"
      )


def _in_shared(
  block: blocks.Block, operand: parsing.Operand, rows: int, type: str
) -> tuple[np.ndarray, list[np.ndarray]]:
  """Returns an operand, f64[warpgroups, rows, k], and its byte addresses."""
  values, taken = [], []
  groups = block.read_defined(operand, 64).reshape(-1, _THREADS)
  for group in groups:
    if (group != group[0]).any():
      raise faults.Divergence("wgmma's descriptor differs among its threads")
    places = descriptors.wgmma_places(int(group[0]), rows, _ROW_BYTES)
    data = block.shared.begin_async_read(places, "wgmma")
    found = products.unpacked(data.view(np.uint32), type)
    values.append(found.reshape(rows, -1))
    taken.append(places.reshape(-1))
  return np.stack(values), taken


HANDLERS: Final[dict[str, integers.Handler]] = {"wgmma": _wgmma}
