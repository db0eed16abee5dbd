# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes PTX on NumPy arrays, block by block.

If threads diverge at a branch, the threads at the earliest instruction continue
first, so that paths converge again. Before a barrier, or another instruction
that all threads must execute together, threads wait for the other threads.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from jaxplugin.kernels import launching
from jaxplugin.lab.inspection.ptx import (
  blocks,
  faults,
  floats,
  global_memory,
  integers,
  movement,
  parsing,
  products,
  synchronization,
  tcgen05,
  wgmma,
)

# The value of each output byte before a launch.
UNWRITTEN: Final = 0xA5
MOST_INSTRUCTIONS: Final = 1_000_000  # per block

# By the first parts of a name. The longest match is used.
_HANDLERS: Final[dict[str, blocks.Handler]] = {
  **integers.HANDLERS,
  **movement.HANDLERS,
  **products.HANDLERS,
  **synchronization.HANDLERS,
  **tcgen05.HANDLERS,
  **wgmma.HANDLERS,
}
_BRANCHES: Final = ("bra", "ret", "exit")
_ALL_TAKE: Final = re.compile(
  r"(bar|barrier)\.sync|mbarrier\.try_wait|cp\.async\.wait_|wgmma|ret|exit"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launched:
  """The results of a launch.

  Attributes:
    arrays: the arguments after the launch.
    counts: "warp instructions" is the number of instructions summed over warps,
      and "of <name>" the number with this name. "matrix products" is the number
      of matrix instructions. "<kind> wavefronts" is the number of passes
      through shared memory, and "<kind> least wavefronts" the number without
      bank conflicts. "global bytes loaded" and "global bytes stored" are bytes.
  """

  arrays: tuple[np.ndarray, ...]
  counts: Mapping[str, int]


def launch(
  ptx: str,
  arguments: Sequence[np.ndarray],
  *,
  grid: int,
  shared_memory_bytes: int,
  most_instructions: int = MOST_INSTRUCTIONS,
) -> Launched:
  """Executes a kernel on copies of arrays.

  Args:
    ptx: the PTX of one kernel, whose parameters are pointers.
    arguments: arrays in the order of the parameters. Triton adds parameters for
      scratch memory, which are null. An array that is passed twice has one
      address.
    grid: number of blocks.
    shared_memory_bytes: shared memory of a block.
    most_instructions: upper limit on the instructions of a block.

  Raises:
    ValueError: If there are more arguments than parameters, or an array has a
      negative stride.
    faults.Fault: If the kernel has undefined behavior.
    faults.NotModelled: If the PTX has instructions that are not modelled.
  """
  kernel = parsing.parse(ptx)
  if len(arguments) > len(kernel.parameters):
    raise ValueError(
      f"launch: {kernel.name} has {len(kernel.parameters)} parameters, got"
      f" {len(arguments)} arrays"
    )
  memory = global_memory.GlobalMemory()
  addresses: dict[int, int] = {}
  for number, array in enumerate(arguments):
    if id(array) not in addresses:
      addresses[id(array)] = memory.add(f"argument {number}", array)
  given = [addresses[id(array)] for array in arguments]
  parameters = dict.fromkeys(kernel.parameters, 0)
  parameters.update(zip(kernel.parameters, given, strict=False))
  program = _Program(kernel)
  counts: collections.Counter[str] = collections.Counter()
  for number in range(grid):
    block = blocks.Block(
      kernel,
      number=number,
      blocks=grid,
      parameters=parameters,
      global_memory=memory,
      shared_bytes=shared_memory_bytes,
      counts=counts,
    )
    program.run(block, most_instructions)
  return Launched(
    arrays=tuple(memory.array(address) for address in given), counts=counts
  )


def run(
  kernel: Any,
  planned: launching.Launch,
  arrays: Mapping[str, np.ndarray | None],
  *,
  ptx: str | None = None,
  most_instructions: int = MOST_INSTRUCTIONS,
) -> tuple[dict[str, np.ndarray], Mapping[str, int]]:
  """Executes a planned launch; returns outputs by name, and `Launched.counts`.

  Args:
    kernel: the launch's `inspection.compile.CompiledKernel`.
    planned: the launch.
    arrays: the launch's inputs by name.
    ptx: PTX to run instead of the kernel's.
    most_instructions: see `launch`.

  Raises:
    NotImplementedError: If the launch has TMA descriptors, or the PTX has
      instructions that are not modelled.
    ValueError: If an input is None.
    faults.Fault: If the kernel has undefined behavior.
  """
  if any(planned.descriptors):
    raise NotImplementedError(f"{planned.name}: descriptors are not modelled")
  inputs = [arrays[name] for name in planned.inputs]
  outputs = []
  for output in planned.outputs:
    array = np.empty(output.shape, np.dtype(output.dtype))
    array.view(np.uint8)[...] = UNWRITTEN
    outputs.append(array)
  given = [array for array in (*inputs, *outputs) if array is not None]
  if len(given) != len(inputs) + len(outputs):
    raise ValueError(f"{planned.name}: inputs {planned.inputs}, one is absent")
  done = launch(
    kernel.assembly if ptx is None else ptx,
    given,
    grid=planned.grid,
    shared_memory_bytes=kernel.shared_memory_bytes,
    most_instructions=most_instructions,
  )
  names = (output.name for output in planned.outputs)
  return dict(zip(names, done.arrays[len(inputs) :], strict=True)), done.counts


def _handler_of(instruction: parsing.Instruction) -> blocks.Handler | None:
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


class _Program:
  """A kernel with a handler for each instruction."""

  def __init__(self, kernel: parsing.PtxKernel):
    self.kernel = kernel
    self.handlers = [
      _handler_of(instruction) for instruction in kernel.instructions
    ]
    self._all_take = {
      place
      for place, instruction in enumerate(kernel.instructions)
      if _ALL_TAKE.match(instruction.name)
    }

  def run(self, block: blocks.Block, most_instructions: int) -> None:
    """Runs a block to its end; faults end with the instruction's line."""
    waiting = {0: np.ones(block.threads, bool)}
    end = len(self.handlers)
    taken = 0
    while waiting:
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
        waiting[next_place] = some | waiting.get(next_place, False)
    block.tensor.finish()

  def _next(self, block: blocks.Block, waiting: dict[int, np.ndarray]) -> int:
    """Returns the instruction that diverged threads execute next."""
    places = sorted(waiting)
    for place in places:
      if place not in self._all_take or (waiting[place] == block.live).all():
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
