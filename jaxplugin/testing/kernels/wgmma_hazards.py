# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds writes to registers that a wgmma in flight reads.

A wgmma is asynchronous: it reads operands in registers until a wait for its
group (PTX ISA, "wgmma.wait_group"). ptxas before CUDA 13.3 may assign these
registers to other values earlier (triton-lang/triton#11781). Then results are
silently wrong in some runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from jaxplugin.lab.inspection import machine_code

Registers = frozenset[int]
# Registers of each group in flight, the oldest first. The last group is open.
_InFlight = tuple[Registers, ...]

# "R24, R88, gdesc[UR16], R24, gsb0" has the accumulator, and the left operand
# if it is in registers. A lane has 4 registers of it: two rows, and two halves
# of k = 32 bytes.
_LEFT: Final = re.compile(r"R\d+, R(\d+), gdesc")
_LEFT_REGISTERS: Final = 4
_REGISTER: Final = re.compile(r"R(\d+)\b")
_PREDICATE: Final = re.compile(r"!?U?P(\d|T)\b")
_WAIT: Final = re.compile(r"gsb0, 0x([0-9a-f]+)")
# Instructions whose first operand is not a register that they write.
_WRITING_NONE: Final = frozenset(
  ("BAR", "BRA", "BSSY", "BSYNC", "CALL", "DEPBAR", "EXIT", "LDGSTS")
  + ("NANOSLEEP", "RED", "RET", "ST", "STG", "STL", "STS", "STSM")
  + ("WARPGROUP", "WARPSYNC")
)
_MOST_GROUPS: Final = 16  # in flight; older ones are merged


def overwritten_operands(sass: str) -> list[str]:
  """Returns instructions that write a register that a wgmma in flight reads.

  It follows all paths through the kernel, with the groups in flight on each.

  Args:
    sass: the output of `nvdisasm -c`.

  Returns:
    The instructions with the registers, each once, in their order.
  """
  blocks, successors = machine_code.basic_blocks(
    list(machine_code.read_sass(sass))
  )
  nothing: _InFlight = (frozenset(),)
  seen = {(0, nothing)}
  pending = [(0, nothing)]
  found: dict[tuple[int, int], str] = {}
  while pending:
    number, in_flight = pending.pop()
    for place, instruction in enumerate(blocks[number]):
      read = frozenset().union(*in_flight)
      for register in sorted(read.intersection(_written(instruction))):
        found.setdefault(
          (number, place),
          f"{instruction.opcode} {instruction.operands} writes R{register},"
          " which a wgmma in flight reads",
        )
      in_flight = _after(instruction, in_flight)
    for other in successors[number]:
      if (other, in_flight) not in seen:
        seen.add((other, in_flight))
        pending.append((other, in_flight))
  return [found[place] for place in sorted(found)]


def _after(
  instruction: machine_code.MachineInstruction, in_flight: _InFlight
) -> _InFlight:
  if instruction.opcode.startswith(("HGMMA", "IGMMA", "QGMMA")):
    left = _LEFT.match(instruction.operands)
    if left:
      first = int(left[1])
      registers = frozenset(range(first, first + _LEFT_REGISTERS))
      in_flight = (*in_flight[:-1], in_flight[-1] | registers)
    if "gsb0" in instruction.operands:
      in_flight = (*in_flight, frozenset())
  elif instruction.opcode.startswith("WARPGROUP.DEPBAR"):
    wait = _WAIT.search(instruction.operands)
    assert wait is not None, instruction
    in_flight = in_flight[-1 - int(wait[1], 16) :]
  if len(in_flight) > _MOST_GROUPS:
    in_flight = (in_flight[0] | in_flight[1], *in_flight[2:])
  return in_flight


def _written(instruction: machine_code.MachineInstruction) -> Iterator[int]:
  """Yields the registers that an instruction writes, except accumulators."""
  name = instruction.opcode.partition(".")[0]
  if name in _WRITING_NONE or name in ("HGMMA", "IGMMA", "QGMMA"):
    return
  for operand in instruction.operands.split(", ")[:2]:
    if register := _REGISTER.match(operand):
      first = int(register[1])
      yield from range(first, first + _width(instruction.opcode))
      return
    if not _PREDICATE.match(operand):
      return


def _width(opcode: str) -> int:
  """Returns the number of registers that an instruction writes."""
  name, *qualifiers = opcode.split(".")
  if name == "LDSM":
    return int(qualifiers[-1]) if qualifiers[-1].isdigit() else 1
  if "128" in qualifiers:
    return 4
  if "64" in qualifiers or "WIDE" in qualifiers:
    return 2
  return 2 if name == "CS2R" and "32" not in qualifiers else 1
