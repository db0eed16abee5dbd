# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses HLO text into computations and their instructions."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Final

# "  ROOT name = shape opcode(..."; a shape may be a tuple of tuples.
_INSTRUCTION: Final = re.compile(
  r"^ +(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\("
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
# Instructions that launch no kernel themselves. The computations that they run
# are counted separately.
FREE: Final = frozenset(
  {
    *RUNNING,
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "parameter",
    "tuple",
  }
)
COLLECTIVE: Final = re.compile(
  r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
  r"|collective-broadcast|ragged-all-to-all)(-start)?$"
)
_ARRAY: Final = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_BITS: Final = re.compile(r"[a-z]+(\d+)")
_TRIPS: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME: Final = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_COMMENT: Final = re.compile(r"/\*.*?\*/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HloInstruction:
  """One instruction.

  Attributes:
    name: the name of the result.
    opcode: the opcode, such as "all-gather-start".
    shape: the text of the result's shape.
    line: the whole line.
  """

  name: str
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

  @property
  def is_root(self) -> bool:
    return self.line.lstrip().startswith("ROOT ")

  @functools.cached_property
  def operands(self) -> tuple[str, ...]:
    """The names of the operands, in order; () for a parameter or constant."""
    if self.opcode in ("parameter", "constant"):
      return ()
    start = self.line.index(f" {self.opcode}(") + len(self.opcode) + 1
    depth = 0
    for end in range(start, len(self.line)):
      depth += (self.line[end] in "([{") - (self.line[end] in ")]}")
      if depth == 0:
        given = parts(_COMMENT.sub("", self.line[start : end + 1]))
        return tuple(x.split()[-1].lstrip("%") for x in given if x.strip())
    raise ValueError(f"hlo_text: cannot read operands in: {self.line}")

  @property
  def op_name(self) -> str:
    """The op_name of the metadata; "" if there is none."""
    found = _OP_NAME.search(self.line)
    return "" if found is None else found[1]

  @property
  def trips(self) -> int | None:
    """How often a loop's body runs; None if not known."""
    found = _TRIPS.search(self.line)
    return None if found is None else int(found[1])


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
        HloInstruction(
          name=found[1], opcode=found[3], shape=found[2], line=line
        )
      )
  return HloProgram(entries=tuple(entries), computations=computations)


def parts(shape: str) -> list[str]:
  """Returns the elements of a tuple's text: "(f32[2], u8[4])"."""
  found, depth = [""], 0
  for letter in shape[1:-1]:
    if letter == "," and depth == 0:
      found.append("")
      continue
    depth += letter in "([{"
    depth -= letter in ")]}"
    found[-1] += letter
  return found


def arrays(shape: str) -> list[tuple[str, int]]:
  """Returns (element type, number of elements) of each array in a shape."""
  return [
    (dtype, math.prod(int(size) for size in sizes.split(",") if size))
    for dtype, sizes in _ARRAY.findall(shape)
    if dtype != "token"
  ]


def num_bytes(shape: str) -> float:
  """Returns the bytes of a shape's arrays; an FP4 value is half a byte."""
  return sum(count * bits(dtype) / 8 for dtype, count in arrays(shape))


@functools.cache
def bits(dtype: str) -> int:
  """Returns the bits of an HLO element type: 16 for "bf16", 8 for "pred"."""
  if dtype == "pred":
    return 8
  match = _BITS.match(dtype)
  if match is None:
    raise ValueError(
      f"collectives: dtype must be an element type of HLO, got {dtype}"
    )
  return int(match[1])
