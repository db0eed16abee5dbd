# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes barriers, fences, mbarriers, and exchanges between lanes of a warp.

PTX ISA 9.0: "Parallel Synchronization and Communication Instructions" and "Data
Movement: shfl.sync". An mbarrier counts arrivals. A phase completes at the
expected number of arrivals, and the next phase begins (9.7.13.15). Only
arrivals of `tcgen05.commit` are modelled. On hardware, such an arrival may
happen at any time. The emulator lets it happen when threads wait for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks, faults, integers, parsing

_REDUCTIONS: Final = {**integers.ARITHMETIC, **integers.LOGIC}


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
  result, *predicates = parsing.items_of(out)
  block.rearrange(result, lambda x: x[place], [source], 32)
  for predicate in predicates:
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
  found = _REDUCTIONS[instruction.parts[2]].reduce(
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


@dataclasses.dataclass(kw_only=True)
class Mbarrier:
  """The state of an mbarrier object."""

  expected: int  # number of arrivals that complete a phase
  pending: int  # number of arrivals that the current phase still needs
  phase: int = 0  # number of complete phases
  # A function for each future arrival, which the arrival calls.
  under_way: list[Callable[[], None]] = dataclasses.field(default_factory=list)

  def wait(self, parity: int) -> bool:
    """Lets arrivals happen until the phase with a parity completes.

    Returns False if the arrivals do not complete the phase.
    """
    while self.phase % 2 == parity and self.under_way:
      self.under_way.pop(0)()
      self.pending -= 1
      if not self.pending:
        self.phase += 1
        self.pending = self.expected
    return self.phase % 2 != parity


def arrive_later(
  block: blocks.Block, address: int, thread: int, end: Callable[[], None]
) -> None:
  """Adds a future arrival for `thread`. The arrival calls `end`."""
  _find(block, address, np.array([thread])).under_way.append(end)


def _find(block: blocks.Block, address: int, threads: np.ndarray) -> Mbarrier:
  found = block.mbarriers.get(address)
  if found is None:
    raise faults.Barrier(f"no mbarrier is at byte {address} of shared memory")
  block.shared.use_barrier(address, threads)
  return found


def _one_thread(block: blocks.Block, instruction: parsing.Instruction) -> int:
  lanes = block.lanes()
  if len(lanes) > 1:
    raise faults.Barrier(f"{instruction.name} by {len(lanes)} threads")
  return int(lanes[0])


def _init(block: blocks.Block, instruction: parsing.Instruction) -> None:
  thread = _one_thread(block, instruction)
  place, count = instruction.operands
  address = int(block.addresses(place)[thread])
  expected = int(block.read_defined(count, 32)[thread])
  if address % blocks.MBARRIER_BYTES:
    raise faults.Misaligned(f"an mbarrier at byte {address}")
  if expected < 1:
    raise faults.Barrier("an mbarrier that expects no arrival")
  block.shared.place_barrier(address, np.array([thread]))
  block.mbarriers[address] = Mbarrier(expected=expected, pending=expected)


def _invalidate(block: blocks.Block, instruction: parsing.Instruction) -> None:
  thread = _one_thread(block, instruction)
  address = int(block.addresses(instruction.operands[0])[thread])
  found = block.mbarriers.pop(address, None)
  if found is None:
    raise faults.Barrier(f"no mbarrier is at byte {address} of shared memory")
  if found.under_way:
    raise faults.InFlight("mbarrier.inval before all arrivals have come")
  block.shared.remove_barrier(address, np.array([thread]))


def _wait(block: blocks.Block, instruction: parsing.Instruction) -> None:
  """Executes try_wait, by all threads at once and for the same phase."""
  if (block.active != block.live).any():
    raise faults.NotModelled(f"{instruction.name} by some threads alone")
  out, place, parity = instruction.operands
  lanes = block.lanes()
  where = {
    (int(address), int(value))
    for address, value in zip(
      block.addresses(place)[lanes],
      block.read_defined(parity, 32)[lanes],
      strict=True,
    )
  }
  if len(where) > 1:
    raise faults.NotModelled(f"{instruction.name} of several phases at once")
  ((address, wanted),) = where
  if wanted > 1:
    raise faults.Barrier(f"{instruction.name} of parity {wanted}")
  if not _find(block, address, lanes).wait(wanted):
    raise faults.Endless(
      f"{instruction.name} of a phase of parity {wanted} that nothing under"
      " way completes"
    )
  block.write(out, np.ones(block.threads, bool))


HANDLERS: Final[dict[str, blocks.Handler]] = {
  "bar": _barrier,
  "barrier": _barrier,
  "fence": _fence,
  "elect": _elect,
  "shfl": _shuffle,
  "redux": _reduce,
  "mbarrier.init.shared::cta.b64": _init,
  "mbarrier.inval.shared::cta.b64": _invalidate,
  "mbarrier.try_wait.parity.shared::cta.b64": _wait,
}
