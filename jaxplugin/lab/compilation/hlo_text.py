# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses HLO text into computations and their instructions."""

from __future__ import annotations

import dataclasses
import re
from typing import Final

# "  ROOT name = shape opcode(..."; a shape may be a tuple of tuples.
_INSTRUCTION: Final = re.compile(
  r"^ +(?:ROOT )?\S+ = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\("
)
_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
# The attributes that name the computations of an instruction.
_RUNS: Final = re.compile(
  r"\b(?:body|condition|to_apply|true_computation|false_computation"
  r"|branch_computations|called_computations|calls)="
  r"(\{.*?\}|[^\s,{}]+)"
)
# Instructions that run other computations. A fusion is one kernel instead.
RUNNING: Final = ("async-start", "call", "conditional", "while")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HloInstruction:
  """One instruction.

  Attributes:
    opcode: the opcode, such as "all-gather-start".
    shape: the text of the result's shape.
    line: the whole line.
  """

  opcode: str
  shape: str
  line: str

  @property
  def runs(self) -> tuple[str, ...]:
    """The names of the computations that the instruction runs, in order."""
    return tuple(
      name.strip().lstrip("%")
      for found in _RUNS.findall(self.line)
      for name in found.strip("{}").split(",")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HloProgram:
  """Computations by name, and the names of the entry computations."""

  entries: tuple[str, ...]
  computations: dict[str, list[HloInstruction]]


def parse(text: str) -> HloProgram:
  """Parses the text of one or several modules."""
  computations: dict[str, list[HloInstruction]] = {}
  entries = []
  instructions: list[HloInstruction] = []
  for line in text.splitlines():
    start = _COMPUTATION.match(line)
    if start is not None:
      instructions = computations[start[2]] = []
      if start[1]:
        entries.append(start[2])
      continue
    found = _INSTRUCTION.match(line)
    if found is not None:
      instructions.append(
        HloInstruction(opcode=found[2], shape=found[1], line=line)
      )
  return HloProgram(entries=tuple(entries), computations=computations)
