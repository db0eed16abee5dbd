# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes PTX on NumPy arrays, block by block."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.kernels import launching
from jaxplugin.lab.inspection.ptx import blocks
from jaxplugin.lab.inspection.ptx import execution
from jaxplugin.lab.inspection.ptx import global_memory
from jaxplugin.lab.inspection.ptx import parsing

# The value of each output byte before a launch.
UNWRITTEN: Final = 0xA5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launched:
  """The results of a launch.

  Attributes:
    arrays: the arguments after the launch, in order.
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
  some_blocks: Iterable[int] | None = None,
  most_instructions: int = execution.MOST_INSTRUCTIONS,
) -> Launched:
  """Executes a kernel on copies of arrays.

  Args:
    ptx: the PTX of one kernel, whose parameters are pointers.
    arguments: arrays in the order of the parameters. Triton adds parameters for
      scratch memory, which are null. An array that is passed twice has one
      address.
    grid: number of blocks.
    shared_memory_bytes: shared memory of a block.
    some_blocks: the blocks to run; None for all.
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
  program = execution.Program(kernel)
  counts: collections.Counter[str] = collections.Counter()
  for number in range(grid) if some_blocks is None else some_blocks:
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
  some_blocks: Iterable[int] | None = None,
  most_instructions: int = execution.MOST_INSTRUCTIONS,
) -> tuple[dict[str, np.ndarray], Mapping[str, int]]:
  """Executes a planned launch; returns outputs by name, and `Launched.counts`.

  Args:
    kernel: the launch's `inspection.compile.CompiledKernel`.
    planned: the launch.
    arrays: the launch's inputs by name.
    ptx: PTX to run instead of the kernel's.
    some_blocks, most_instructions: see `launch`.

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
    some_blocks=some_blocks,
    most_instructions=most_instructions,
  )
  names = (output.name for output in planned.outputs)
  return dict(zip(names, done.arrays[len(inputs) :], strict=True)), done.counts
