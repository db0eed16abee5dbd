# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses HLO text into computations and their instructions."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, TypeVar

from jaxplugin.jaxext import jax_private

# A dataclass with the fields `times` and `is_bound`.
Counted = TypeVar("Counted", bound=Any)

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
  """One instruction."""

  name: str  # of the result
  opcode: str
  shape: str  # the text of the result's shape
  line: str  # the whole line

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


def of_compiled(compiled: Any) -> str:
  """Returns the HLO of `jax.stages.Compiled`, or of jaxlib's executable."""
  if hasattr(compiled, "runtime_executable"):
    compiled = compiled.runtime_executable()
  return jax_private.executable_hlo(
    compiled, include_layout_in_shapes=False, print_metadata=True
  )


def counted(
  program: HloProgram,
  of_instruction: Callable[[str, HloInstruction], Iterable[Counted]],
  size: Callable[[Iterable[Counted]], float],
  running: Collection[str] = RUNNING,
) -> tuple[Counted, ...]:
  """Returns the records of all instructions that one run executes, in order.

  The records of a loop's body are multiplied by its trips. They are marked
  `is_bound` if the number of trips is unknown, and then count once.

  Args:
    program: the program.
    of_instruction: (computation, instruction) -> records of the instruction.
    size: the size of records. A conditional counts as its largest branch.
    running: opcodes that count as the computations that they run.
  """

  @functools.cache
  def of_computation(name: str) -> tuple[Counted, ...]:
    return tuple(
      record
      for instruction in program.computations.get(name, ())
      for record in records(name, instruction)
    )

  def records(name: str, instruction: HloInstruction) -> Iterable[Counted]:
    if instruction.opcode not in running:
      return of_instruction(name, instruction)
    run = [of_computation(each) for each in instruction.runs]
    if instruction.opcode == "conditional":
      return max(run, key=size, default=())
    every = [record for records in run for record in records]
    if instruction.opcode != "while":
      return every
    trips = instruction.trips
    return [
      dataclasses.replace(
        record,
        times=record.times * (1 if trips is None else trips),
        is_bound=record.is_bound or trips is None,
      )
      for record in every
    ]

  return tuple(
    record for entry in program.entries for record in of_computation(entry)
  )


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
