# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes mbarrier instructions.

An mbarrier counts arrivals. A phase completes at the expected number of
arrivals, and the next phase begins (PTX ISA 9.0, 9.7.13.15). Only arrivals of
`tcgen05.commit` are modelled. On hardware, such an arrival may happen at any
time. The emulator lets it happen when threads wait for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import parsing


@dataclasses.dataclass(kw_only=True)
class Mbarrier:
  """The state of an mbarrier object.

  Attributes:
    expected: number of arrivals that complete a phase.
    pending: number of arrivals that the current phase still needs.
    phase: number of complete phases.
    under_way: a function for each future arrival, which the arrival calls.
  """

  expected: int
  pending: int
  phase: int = 0
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
  "mbarrier.init.shared::cta.b64": _init,
  "mbarrier.inval.shared::cta.b64": _invalidate,
  "mbarrier.try_wait.parity.shared::cta.b64": _wait,
}
