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

from jaxplugin.lab.inspection.ptx import (
  blocks,
  descriptors,
  faults,
  parsing,
  products,
)

_WARPS: Final = 4
_THREADS: Final = _WARPS * blocks.WARP
_M: Final = 64
_ROW_BYTES: Final = 32  # bytes along k of one instruction
_SHAPE: Final = re.compile(r"m64n(\d+)k(16|32)")


def _check_group(block: blocks.Block, instruction: parsing.Instruction) -> None:
  if not block.all_active:
    raise faults.Divergence(f"{instruction.name}: taken by some threads alone")
  if block.threads % _THREADS:
    raise faults.Divergence("wgmma by warps that are not a group of four")


def _fence(block: blocks.Block, instruction: parsing.Instruction) -> None:
  _check_group(block, instruction)
  block.since_fence.clear()


def _commit(block: blocks.Block, instruction: parsing.Instruction) -> None:
  _check_group(block, instruction)
  block.products.append([])


def _wait(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes wait_group n: waits until at most n groups are in flight."""
  _check_group(block, instruction)
  while len(block.products) - 1 > parsing.constant(instruction.operands[0]):
    for _, reads in block.products.pop(0):
      for places in reads:
        block.shared.end_async_read(places)
  block.busy = {}
  for group in block.products:
    for used, _ in group:
      block.busy |= used


def _multiply(block: blocks.Block, instruction: parsing.Instruction) -> None:
  _check_group(block, instruction)
  parts = instruction.parts
  shape = _SHAPE.fullmatch(parts[4])
  if shape is None or parts[6] != parts[7]:
    raise faults.NotModelled(instruction.name)
  n, k, type = int(shape[1]), int(shape[2]), parts[6]
  if parts[5] != products.SUM_TYPES.get(type):
    raise faults.NotModelled(instruction.name)
  # Flags: the signs of both operands, then whether each is MN-major. Integers
  # have none.
  signs = [] if type == "s8" else [1, 1]
  out, left, right, keeps, *rest = instruction.operands
  flags = [x.value for x in rest if isinstance(x, parsing.Immediate)]
  if flags[:2] != signs or any(flags[2:]):
    raise faults.NotModelled(f"{instruction.name} with {flags}")
  keeps_sums = block.read_defined(keeps, 1).reshape(-1, blocks.WARP, 1)
  if (keeps_sums != keeps_sums[:, :1]).any():
    raise faults.Divergence("wgmma's scale-d differs among lanes of a warp")
  block.counts["matrix products"] += block.threads // blocks.WARP
  used = {x.name: "written" for x in products.registers(out)}
  if isinstance(left, parsing.OperandGroup):
    used = {x.name: "read" for x in products.registers(left)} | used
  for name in used:
    if name in block.since_fence:
      raise faults.MissingFence(
        f"{name} is written, then used by wgmma without wgmma.fence"
      )
  reads: list[np.ndarray] = []
  if isinstance(left, parsing.OperandGroup):
    a = products.fragment(products.words(block, left), type)
    a = a.reshape(-1, _M, k)
  else:
    a = _in_shared(block, left, _M, type, reads)
  b = _in_shared(block, right, n, type, reads)
  busy, block.busy = block.busy, {}
  sums = np.zeros((len(keeps_sums), _M // _WARPS, n))
  if keeps_sums.any():
    kept = products.accumulators(block, out, type)
    sums = np.where(keeps_sums[:, :1], kept, sums)
  total = products.multiply(a, b, sums.reshape(-1, _M, n), type)
  products.write_accumulators(block, out, total.reshape(sums.shape))
  block.since_fence.difference_update(used)
  block.busy = busy | used
  block.products[-1].append((used, reads))


def _in_shared(
  block: blocks.Block,
  operand: parsing.Operand,
  rows: int,
  type: str,
  reads: list[np.ndarray],
) -> np.ndarray:
  """Returns an operand, f64[warpgroups, rows, k]; adds its bytes to `reads`."""
  values = []
  groups = block.read_defined(operand, 64).reshape(-1, _THREADS)
  for group in groups:
    if (group != group[0]).any():
      raise faults.Divergence("wgmma's descriptor differs among its threads")
    places = descriptors.wgmma_places(int(group[0]), rows, _ROW_BYTES)
    data = block.shared.begin_async_read(places, "wgmma")
    found = products.unpacked(data.view(np.uint32), type)
    values.append(found.reshape(rows, -1))
    reads.append(places.reshape(-1))
  return np.stack(values)


HANDLERS: Final[dict[str, blocks.Handler]] = {
  "wgmma.fence": _fence,
  "wgmma.commit_group": _commit,
  "wgmma.wait_group": _wait,
  "wgmma.mma_async": _multiply,
}
