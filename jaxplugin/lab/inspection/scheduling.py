# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads ptxas's schedule of SASS from the control words of instructions.

Since Volta an instruction has 128 bits. Some of them control when the next one
may follow: bits 105 to 108 are the cycles until then, 110 to 112 the scoreboard
that its result releases, 113 to 115 the one that reading its operands releases,
and 116 to 121 the scoreboards that it waits for (Jia et al., "Dissecting the
NVIDIA Volta GPU architecture via microbenchmarking", 2018, section 2.1).
Hardware uses only these bits, and does not compare registers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Final

from jaxplugin.lab.inspection import machine_code

SCOREBOARDS: Final = 6
_NO_SCOREBOARD: Final = 7
_WORD: Final = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
# Shift within the second 64-bit word.
_CONTROL_SHIFT: Final = 105 - 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled(machine_code.MachineInstruction):
  """A machine instruction, and when the next one may follow.

  Attributes:
    stall: cycles until the next instruction of its warp may issue.
    result_scoreboard: the scoreboard that is released when its result is ready;
      None if its latency is fixed.
    operand_scoreboard: the scoreboard that is released after its operands are
      read.
    waits: scoreboards that must be released before it may issue.
  """

  stall: int
  result_scoreboard: int | None
  operand_scoreboard: int | None
  waits: tuple[int, ...]

  @property
  def base(self) -> str:
    """The opcode without qualifiers."""
    return self.opcode.partition(".")[0]


def without_words(text: str) -> str:
  """Converts the output of `nvdisasm -c -hex` to that without -hex."""
  lines = text.splitlines()
  kept = [_WORD.sub("", line).rstrip() for line in lines]
  return "".join(
    line + "\n"
    for line, original in zip(kept, lines, strict=True)
    if line or not original
  )


def read(text: str) -> Iterator[Scheduled | str]:
  """Yields instructions in the output of `nvdisasm -c -hex`, and labels.

  Raises:
    ValueError: If the second word of an instruction is missing.
  """
  lines = text.splitlines()
  for number, line in enumerate(lines):
    item = next(machine_code.read_sass(_WORD.sub("", line)), None)
    if isinstance(item, str):
      yield item
    elif item is not None:
      second = _WORD.match(lines[number + 1]) if lines[number + 1 :] else None
      if second is None:
        raise ValueError(f"no second word of the instruction {line.strip()!r}")
      yield _scheduled(item, int(second[1], 16) >> _CONTROL_SHIFT)


def _scheduled(
  item: machine_code.MachineInstruction, control: int
) -> Scheduled:
  def scoreboard(shift: int) -> int | None:
    number = control >> shift & 7
    return None if number == _NO_SCOREBOARD else number

  return Scheduled(
    **{
      field.name: getattr(item, field.name)
      for field in dataclasses.fields(item)
    },
    stall=control & 15,
    result_scoreboard=scoreboard(5),
    operand_scoreboard=scoreboard(8),
    waits=tuple(x for x in range(SCOREBOARDS) if control >> 11 >> x & 1),
  )


def main_loop(text: str) -> list[Scheduled] | None:
  """Returns the main loop in the output of `nvdisasm -c -hex`.

  It is the loop of `machine_code.main_loop_of_sass`, in program order. None if
  no loop has matrix instructions.
  """
  body = machine_code.main_loop_body([*read(text)])
  return None if body is None else [x for x in body if isinstance(x, Scheduled)]


def load_distances(loop: Sequence[Scheduled]) -> list[int]:
  """Returns the number of instructions from each global load to its use.

  The use is the first instruction that waits for the load's scoreboard, in this
  iteration or the next. It is the loop's length if no instruction waits. Copies
  to shared memory are not counted.
  """
  distances = []
  for place, load in enumerate(loop):
    if load.base != "LDG" or load.result_scoreboard is None:
      continue
    following = [*loop[place + 1 :], *loop[: place + 1]]
    waiting = (
      distance
      for distance, item in enumerate(following)
      if load.result_scoreboard in item.waits
    )
    distances.append(next(waiting, len(loop)))
  return distances
