# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How ptxas scheduled SASS: the control words of its instructions.

From Volta on an instruction has 128 bits, of which 21 tell the hardware when
the next one may follow: bits 105 to 108 are cycles until then, 110 to 112 the
scoreboard that its result releases, 113 to 115 the one that reading its
operands releases, and 116 to 121 the scoreboards that it waits for (Jia et al.,
"Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018,
section 2.1). Hardware does not look at registers: this is all that it knows.
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
# Of the 64-bit word that has them.
_CONTROL_SHIFT: Final = 105 - 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled(machine_code.Instruction):
  """A machine instruction, and when the next one may follow.

  Attributes:
    stall: cycles until the next instruction of its warp may issue.
    result_scoreboard: released when its result is there; None where its latency
      is fixed.
    operand_scoreboard: released when its operands are read.
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
  """What `nvdisasm -c -hex` prints, as it is without -hex."""
  lines = text.splitlines()
  kept = [_WORD.sub("", line).rstrip() for line in lines]
  return "".join(
    line + "\n"
    for line, original in zip(kept, lines, strict=True)
    if line or not original
  )


def read(text: str) -> Iterator[Scheduled | str]:
  """Instructions of what `nvdisasm -c -hex` prints; labels as plain strings.

  Raises:
    ValueError: an instruction is not followed by its second word.
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


def _scheduled(item: machine_code.Instruction, control: int) -> Scheduled:
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
  """The main loop of what `nvdisasm -c -hex` prints, in program order.

  As `machine_code.main_loop_of_sass` finds it; None where no loop has matrix
  instructions.
  """
  body = machine_code.main_loop_body([*read(text)])
  return None if body is None else [x for x in body if isinstance(x, Scheduled)]


def load_distances(loop: Sequence[Scheduled]) -> list[int]:
  """For each load of global memory into registers, instructions to its use.

  The use is the first instruction that waits for the load's scoreboard, of this
  turn of the loop or the next; where none does, the loop's length. Copies to
  shared memory are none: what waits for these is asked for separately.
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
