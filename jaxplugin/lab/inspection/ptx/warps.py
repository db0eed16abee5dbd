# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes barriers, fences, and exchanges between the lanes of a warp.

PTX ISA: "Parallel Synchronization and Communication Instructions" and "Data
Movement: shfl.sync".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import integers
from jaxplugin.lab.inspection.ptx import parsing

_REDUCTIONS: Final[dict[str, Callable[..., np.ndarray]]] = {
  "add": np.add.reduce,
  "min": np.minimum.reduce,
  "max": np.maximum.reduce,
  "and": np.bitwise_and.reduce,
  "or": np.bitwise_or.reduce,
  "xor": np.bitwise_xor.reduce,
}


def _barrier(block: blocks.Block, instruction: parsing.Instruction) -> None:
  if instruction.name == "bar.warp.sync":
    block.shared.warp_barrier(block.warps(instruction))
    return
  if not (
    instruction.name in ("bar.sync", "barrier.sync", "barrier.sync.aligned")
    and instruction.operands == (parsing.Immediate(0),)
  ):
    raise faults.NotModelled(instruction.text)
  if (block.active != block.live).any():
    raise faults.Divergence("bar.sync that not all threads of the block reach")
  block.shared.block_barrier()


def _fence(block: blocks.Block, instruction: parsing.Instruction) -> None:
  if instruction.parts[:3] != ("fence", "proxy", "async"):
    raise faults.NotModelled(instruction.name)
  lanes = block.lanes()
  warps = np.flatnonzero(block.active.reshape(-1, blocks.WARP).all(axis=1))
  block.shared.fence_proxy(
    np.concatenate([lanes, block.shared.whole_warps(warps)])
  )


def _check_members(
  block: blocks.Block,
  instruction: parsing.Instruction,
  members: parsing.Operand,
) -> None:
  """Checks that all lanes execute the instruction, and are in its mask."""
  block.warps(instruction)
  named = block.read_defined(members, 32)[block.active]
  if (named != blocks.all_bits(blocks.WARP)).any():
    raise faults.NotModelled(f"{instruction.text}: a part of a warp")


def _shuffle(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes shfl: lanes read a register of other lanes in the warp."""
  out, source, other, clamp, members = instruction.operands
  mode = instruction.parts[2]
  bound = 0 if mode == "up" else 0x1F
  if clamp != parsing.Immediate(bound):
    raise faults.NotModelled(f"{instruction.text}: a part of a warp")
  _check_members(block, instruction, members)
  lane = block.thread % blocks.WARP
  by = block.read_defined(other, 32).astype(np.int64)
  wanted = {
    "idx": by & 31,
    "bfly": lane ^ by,
    "up": lane - by,
    "down": lane + by,
  }[mode]
  valid = (wanted >= 0) & (wanted < blocks.WARP)
  place = block.thread - lane + np.where(valid, wanted, lane)
  results = out.items if isinstance(out, parsing.OperandGroup) else (out,)
  block.rearrange(results[0], lambda x: x[place], [source], 32)
  for predicate in results[1:]:
    block.write(predicate, valid)


def _reduce(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes redux.sync over all lanes of each warp."""
  out, source, members = instruction.operands
  if instruction.type not in ("s32", "u32", "b32"):
    raise faults.NotModelled(instruction.text)
  _check_members(block, instruction, members)
  value = block.read_defined(source, 32)
  if instruction.type == "s32":
    value = integers.signed(value)
  found = _REDUCTIONS[instruction.parts[2]](
    value.reshape(-1, blocks.WARP), axis=1, dtype=value.dtype
  )
  block.write(out, integers.unsigned(np.repeat(found, blocks.WARP)))


def _elect(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes elect.sync, which elects the first lane of each warp."""
  out, members = instruction.operands
  if (
    not isinstance(out, parsing.OperandGroup)
    or instruction.name != "elect.sync"
  ):
    raise faults.NotModelled(instruction.text)
  _check_members(block, instruction, members)
  leader, is_leader = out.items
  block.write(leader, np.zeros(block.threads, np.uint32))
  block.write(is_leader, block.thread % blocks.WARP == 0)


HANDLERS: Final[dict[str, blocks.Handler]] = {
  "bar": _barrier,
  "barrier": _barrier,
  "fence": _fence,
  "elect": _elect,
  "shfl": _shuffle,
  "redux": _reduce,
}
