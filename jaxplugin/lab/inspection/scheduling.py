# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads ptxas's schedule of SASS from the control words of instructions.

Since Volta an instruction has 128 bits. Some of them control when instructions
issue (Jia et al., "Dissecting the NVIDIA Volta GPU architecture via
microbenchmarking", 2018, section 2.1):

  105 to 108  cycles until the warp's next instruction may issue
  110 to 112  scoreboard that is released when the result is ready
  113 to 115  scoreboard that is released when the operands have been read
  116 to 121  scoreboards that the instruction waits for

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
# Position of the control bits in the second 64-bit word.
_CONTROL_SHIFT: Final = 105 - 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled(machine_code.MachineInstruction):
  """A machine instruction with its stall count and scoreboards.

  Attributes:
    stall: cycles until the warp's next instruction may issue.
    result_scoreboard: the scoreboard that is released when the result is ready;
      None if the latency is fixed.
    operand_scoreboard: the scoreboard that is released after the operands are
      read; None without one.
    waits: scoreboards that must be released before the instruction may issue.
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
  """Converts the output of `nvdisasm -c -hex` to that of `nvdisasm -c`."""
  lines = ((line, _WORD.sub("", line).rstrip()) for line in text.splitlines())
  return "".join(f"{kept}\n" for line, kept in lines if kept or not line)


def read(text: str) -> Iterator[Scheduled | str]:
  """Yields instructions and labels in the output of `nvdisasm -c -hex`.

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
      control = int(second[1], 16) >> _CONTROL_SHIFT
      yield Scheduled(
        **vars(item),
        stall=control & 15,
        result_scoreboard=_scoreboard(control >> 5 & 7),
        operand_scoreboard=_scoreboard(control >> 8 & 7),
        waits=tuple(x for x in range(SCOREBOARDS) if control >> 11 >> x & 1),
      )


def _scoreboard(number: int) -> int | None:
  return None if number == _NO_SCOREBOARD else number


def main_loop(text: str) -> list[Scheduled] | None:
  """Returns the main loop in the output of `nvdisasm -c -hex`, or None.

  See `machine_code.main_loop_body`.
  """
  body = machine_code.main_loop_body([*read(text)])
  return None if body is None else [x for x in body if isinstance(x, Scheduled)]


def load_distances(loop: Sequence[Scheduled]) -> list[int]:
  """Returns the number of instructions between each global load and its use.

  The use is the first instruction that waits for the load's scoreboard, in this
  iteration or the next. If no instruction waits, the number is the loop's
  length. Copies to shared memory are left out.
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
