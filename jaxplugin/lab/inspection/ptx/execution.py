# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the instructions of a block.

If threads diverge at a branch, the threads at the earliest instruction continue
first, so that paths converge again. Before a barrier, or another instruction
that all threads must execute together, threads wait for the other threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import numpy as np

from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import conversions
from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.lab.inspection.ptx import floats
from jaxplugin.lab.inspection.ptx import integers
from jaxplugin.lab.inspection.ptx import mbarriers
from jaxplugin.lab.inspection.ptx import movement
from jaxplugin.lab.inspection.ptx import parsing
from jaxplugin.lab.inspection.ptx import products
from jaxplugin.lab.inspection.ptx import tcgen05
from jaxplugin.lab.inspection.ptx import warps
from jaxplugin.lab.inspection.ptx import wgmma

MOST_INSTRUCTIONS: Final = 1_000_000  # per block

# By the first parts of a name. The longest match is used.
_HANDLERS: Final[dict[str, blocks.Handler]] = {
  **conversions.HANDLERS,
  **integers.HANDLERS,
  **mbarriers.HANDLERS,
  **movement.HANDLERS,
  **products.HANDLERS,
  **tcgen05.HANDLERS,
  **warps.HANDLERS,
  **wgmma.HANDLERS,
}
_BRANCHES: Final = ("bra", "ret", "exit")
_ALL_TAKE: Final = re.compile(
  r"(bar|barrier)\.sync|mbarrier\.try_wait|cp\.async\.wait_|wgmma|ret|exit"
)


def handler_of(instruction: parsing.Instruction) -> blocks.Handler | None:
  """Returns the function that executes an instruction; None for a branch.

  Raises:
    faults.NotModelled: If the instruction is not modelled.
  """
  parts = instruction.parts
  if parts[0] in _BRANCHES:
    return None
  if instruction.type in floats.TYPES and parts[0] in floats.HANDLERS:
    return floats.HANDLERS[parts[0]]
  for count in range(len(parts), 0, -1):
    if found := _HANDLERS.get(".".join(parts[:count])):
      return found
  raise faults.NotModelled(
    f"line {instruction.line}: {instruction.text}: this instruction is not"
    " modelled"
  )


class Program:
  """A kernel with a handler for each instruction."""

  def __init__(self, kernel: parsing.Kernel):
    self.kernel = kernel
    self.handlers: list[Callable[..., None] | None] = [
      handler_of(instruction) for instruction in kernel.instructions
    ]
    self._all_take = [
      _ALL_TAKE.match(instruction.name) is not None
      for instruction in kernel.instructions
    ]

  def run(
    self, block: blocks.Block, most_instructions: int = MOST_INSTRUCTIONS
  ) -> None:
    """Runs a block to its end.

    Raises:
      faults.Fault: If the kernel has undefined behavior. The message ends with
        the instruction's line and text.
      faults.NotModelled: If an operand or qualifier is not modelled.
    """
    waiting = {0: np.ones(block.threads, bool)}
    end = len(self.handlers)
    taken = 0
    while waiting:
      place = min(waiting)
      if len(waiting) > 1:
        place = self._next(block, waiting)
      threads = waiting.pop(place)
      if place >= end:
        continue
      taken += 1
      instruction = self.kernel.instructions[place]
      try:
        if taken > most_instructions:
          raise faults.Endless(f"more than {most_instructions} instructions")
        after = self._step(block, place, threads)
      except (faults.Fault, faults.NotModelled) as fault:
        fault.args = (
          f"{fault.args[0]}; block {block.number}, line {instruction.line}:"
          f" {instruction.text[:120]}",
        )
        raise
      for next_place, some in after:
        if next_place in waiting:
          waiting[next_place] = waiting[next_place] | some
        else:
          waiting[next_place] = some
    block.tensor.finish()

  def _next(self, block: blocks.Block, waiting: dict[int, np.ndarray]) -> int:
    """Returns the instruction that diverged threads execute next."""
    places = sorted(waiting)
    for place in places:
      if place >= len(self.handlers) or not self._all_take[place]:
        return place
      if (waiting[place] == block.live).all():
        return place
    return places[0]

  def _step(
    self, block: blocks.Block, place: int, threads: np.ndarray
  ) -> list[tuple[int, np.ndarray]]:
    """Executes an instruction; returns (next instruction, threads) pairs."""
    instruction = self.kernel.instructions[place]
    active = threads
    block.begin(threads, bool(threads.all()))
    if instruction.guard is not None:
      chosen = block.read_defined(instruction.guard, 1) != instruction.negated
      active = threads & chosen
    handler = self.handlers[place]
    in_warps = int(active.reshape(-1, blocks.WARP).any(axis=1).sum())
    block.counts["warp instructions"] += in_warps
    if handler is not None:
      if in_warps:
        block.begin(active, bool(active.all()))
        block.counts[f"of {instruction.parts[0]}"] += in_warps
        handler(block, instruction)
      return [(place + 1, threads)]
    stay = threads & ~active
    ways = [(place + 1, stay)] if stay.any() else []
    if not in_warps:
      return ways
    if instruction.parts[0] == "bra":
      label = instruction.operands[0]
      assert isinstance(label, parsing.Symbol)
      ways.append((self.kernel.labels[label.name], active))
    else:
      block.live = block.live & ~active
    return ways
