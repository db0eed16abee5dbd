# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads SASS, AMDGCN and PTX texts: main loops, schedules, loads.

A loop is a natural loop of the control-flow graph. Its back edge is a branch to
a header that dominates the branch. The loop has all blocks that reach the
branch without passing the header. Not every backward branch is a loop: ptxas
moves waits for barriers behind the end of the kernel, and they jump back.

Since Volta an instruction of SASS has 128 bits. Some of them are ptxas's
schedule, and hardware does not compare registers (Jia et al., "Dissecting the
NVIDIA Volta GPU architecture via microbenchmarking", 2018, section 2.1):

  105 to 108  cycles until the warp's next instruction may issue
  110 to 112  scoreboard that is released when the result is ready
  113 to 115  scoreboard that is released when the operands have been read
  116 to 121  scoreboards that the instruction waits for
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

# HMMA, IMMA, QMMA (FP8 .. FP4), OMMA (FP4): mma.sync; HGMMA, QGMMA: wgmma;
# UTCHMMA, UTCQMMA, UTCOMMA: tcgen05.mma.
_SASS_MATRIX: Final = re.compile(r"(UTC)?[A-Z]G?MMA(\.|$)")
_AMDGCN_MATRIX: Final = re.compile(r"v_(s?mfma|s?wmma)")
_PTX_MATRIX: Final = re.compile(
  r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)(?:\.[\w:]+)+"
)
_SASS_LINE: Final = re.compile(
  r"\s*/\*[0-9a-f]{4,}\*/\s+(?:(@\S+)\s+)?([A-Z][\w.]*)\s*(.*)"
)
# `nvdisasm -hex` prints the first word of an instruction behind the text, and
# the second word in the next line.
_SASS_WORD: Final = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_SCHEDULE_SHIFT: Final = 105 - 64  # in the second word
SCOREBOARDS: Final = 6
_NO_SCOREBOARD: Final = 7
# Operands that are descriptors or addresses in tensor memory.
_SASS_OPERAND: Final = re.compile(r"\b([a-z]+desc|tmem)\[")
_LABEL: Final = re.compile(r"\s*(\.?[A-Za-z_][\w.$]*):")
_SASS_TARGET: Final = re.compile(r"`\(([^)]+)\)")
_AMDGCN_LINE: Final = re.compile(r"\s+([a-z]\w+)\b\s*([^;]*)")

# PTX: "ld.global.L1::evict_last.v4.b32", "cp.async.cg.shared.global [a], [b],
# 0x10", "cp.async.bulk.tensor.2d...".
_PTX_LOAD: Final = re.compile(r"\bld\.global((?:\.[\w:]+)*)")
_PTX_COPY: Final = re.compile(
  r"\bcp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.[\w:]+)*"
  r"\s*\[[^]]*\],\s*\[[^]]*\],\s*(0x[0-9a-f]+|\d+)"
)
_PTX_TENSOR_COPY: Final = re.compile(
  r"\bcp\.async\.bulk\.tensor\.\dd\.shared::(?:cluster|cta)\.global"
)
_AMDGCN_LOAD: Final = re.compile(
  r"\b(?:global|buffer)_load_(?:async_to_lds_|lds_)?"
  r"(dwordx(\d)|dword|ushort|ubyte|sbyte|short|b(\d+)|u8|u16|i8|i16|d16\w*)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineInstruction:
  """A machine instruction.

  Attributes:
    opcode, operands: their texts. The opcode has its qualifiers.
    target: the label that a branch jumps to; None for other instructions.
    falls_through: whether execution may continue at the next instruction.
    is_matrix: whether the instruction multiplies matrices.
    stall: cycles until the warp's next instruction may issue. It and the fields
      below describe ptxas's schedule, if the text has the instructions' words.
    result_scoreboard: the scoreboard that is released when the result is ready;
      None if the latency is fixed.
    operand_scoreboard: the scoreboard that is released after the operands are
      read; None without one.
    waits: scoreboards that must be released before the instruction may issue.
  """

  opcode: str
  target: str | None
  falls_through: bool
  is_matrix: bool
  operands: str = ""
  stall: int = 0
  result_scoreboard: int | None = None
  operand_scoreboard: int | None = None
  waits: tuple[int, ...] = ()

  @property
  def base(self) -> str:
    """The opcode without qualifiers."""
    return self.opcode.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Loop:
  """The instructions of a loop, in program order."""

  body: tuple[MachineInstruction, ...]

  @property
  def instructions(self) -> int:
    return len(self.body)

  @property
  def matrix_instructions(self) -> dict[str, int]:
    """The number by name, such as {"HGMMA.64x128x16.F32.BF16": 8}."""
    return dict(collections.Counter(x.opcode for x in self.body if x.is_matrix))

  @property
  def matrix_count(self) -> int:
    return sum(item.is_matrix for item in self.body)

  def load_distances(self) -> list[int]:
    """Returns the number of instructions between each global load and its use.

    The use is the first instruction that waits for the load's scoreboard, in
    this iteration or the next. If no instruction waits, the number is the
    loop's length. Copies to shared memory are left out.
    """
    loop, distances = self.body, []
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


def matrix_instructions(
  items: Iterable[MachineInstruction | str],
) -> dict[str, int]:
  """Returns the number of matrix instructions by name and kinds of operands.

  An example of a key is "UTCHMMA gdesc gdesc tmem tmem idesc". The kinds of
  operands show whether an instruction has scales.
  """
  names = (
    " ".join((item.opcode, *_SASS_OPERAND.findall(item.operands)))
    for item in items
    if not isinstance(item, str) and item.is_matrix
  )
  return dict(collections.Counter(names))


def matrix_instructions_of_ptx(text: str) -> dict[str, int]:
  """Returns the number of matrix instructions by name with qualifiers."""
  return dict(collections.Counter(_PTX_MATRIX.findall(text)))


def global_load_bits_of_ptx(text: str) -> dict[int, int]:
  """Returns the number of global loads by bits that a thread loads.

  Copies to shared memory count as loads, but TMA copies do not.
  """
  bits: collections.Counter[int] = collections.Counter()
  for match in _PTX_LOAD.finditer(text):
    width, vector = 0, 1
    for part in match[1].split("."):
      if re.fullmatch(r"v\d", part):
        vector = int(part[1:])
      elif re.fullmatch(r"[bsuf]\d+", part):
        width = int(part[1:])
    bits[width * vector] += 1
  for match in _PTX_COPY.finditer(text):
    bits[8 * int(match[1], 0)] += 1
  return dict(sorted(bits.items()))


def tensor_copies_of_ptx(text: str) -> int:
  """Returns the number of TMA copies from global memory."""
  return len(_PTX_TENSOR_COPY.findall(text))


def global_load_bits_of_amdgcn(text: str) -> dict[int, int]:
  """Returns the number of global loads by bits that a thread loads."""
  bits: collections.Counter[int] = collections.Counter()
  for match in _AMDGCN_LOAD.finditer(text):
    name, dwords, width = match[1], match[2], match[3]
    if dwords or width:
      bits[32 * int(dwords) if dwords else int(width)] += 1
    elif name == "dword":
      bits[32] += 1
    else:
      narrow = "byte" in name or name.endswith("8")
      bits[8 if narrow else 16] += 1
  return dict(sorted(bits.items()))


def read_sass(text: str) -> Iterator[MachineInstruction | str]:
  """Yields instructions and labels in the output of `nvdisasm -c`.

  Labels are strings. With the option `-hex`, instructions have a schedule.

  Raises:
    ValueError: If the second word of an instruction is missing.
  """
  lines = text.splitlines()
  for line, following in zip(lines, [*lines[1:], ""], strict=True):
    if label := _LABEL.match(line):
      yield label[1]
    elif match := _SASS_LINE.match(_SASS_WORD.sub("", line)):
      predicate, opcode, operands = match.groups()
      base = opcode.partition(".")[0]
      target = None
      if base in ("BRA", "JMP", "BREAK"):
        found = _SASS_TARGET.search(operands)
        target = found[1] if found else None
      # "BRA.U UP0, `(.L_x_2)" has its condition as an operand.
      conditional = predicate is not None or operands.count(",") > 0
      leaves = base in ("BRA", "JMP", "EXIT", "RET", "BRX", "KILL")
      yield MachineInstruction(
        opcode=opcode,
        target=target,
        falls_through=not leaves or conditional,
        is_matrix=_SASS_MATRIX.match(opcode) is not None,
        operands=operands,
        **(_schedule(line, following) if _SASS_WORD.search(line) else {}),
      )


def _schedule(line: str, following: str) -> dict[str, Any]:
  """Returns the schedule in an instruction's second word, a line below."""
  second = _SASS_WORD.match(following)
  if second is None:
    raise ValueError(f"no second word of the instruction {line.strip()!r}")
  bits = int(second[1], 16) >> _SCHEDULE_SHIFT
  result, operand = bits >> 5 & 7, bits >> 8 & 7
  return {
    "stall": bits & 15,
    "result_scoreboard": None if result == _NO_SCOREBOARD else result,
    "operand_scoreboard": None if operand == _NO_SCOREBOARD else operand,
    "waits": tuple(x for x in range(SCOREBOARDS) if bits >> 11 >> x & 1),
  }


def without_words(text: str) -> str:
  """Converts the output of `nvdisasm -c -hex` to that of `nvdisasm -c`."""
  lines = (
    (line, _SASS_WORD.sub("", line).rstrip()) for line in text.splitlines()
  )
  return "".join(f"{kept}\n" for line, kept in lines if kept or not line)


def read_amdgcn(text: str) -> Iterator[MachineInstruction | str]:
  for line in text.splitlines():
    if label := _LABEL.match(line):
      yield label[1]
    elif match := _AMDGCN_LINE.match(line):
      opcode, operands = match.groups()
      is_branch = opcode.startswith(("s_branch", "s_cbranch"))
      leaves = opcode in ("s_branch", "s_endpgm", "s_setpc_b64")
      yield MachineInstruction(
        opcode=opcode,
        target=operands.strip() if is_branch else None,
        falls_through=not leaves,
        is_matrix=_AMDGCN_MATRIX.match(opcode) is not None,
      )


def main_loop(items: Sequence[MachineInstruction | str]) -> Loop | None:
  """Returns the loop with the most matrix instructions.

  If several loops have as many, the shortest is returned. Returns None if no
  loop has matrix instructions.
  """
  blocks, successors = basic_blocks(items)
  loops = [
    Loop(tuple(item for block in sorted(members) for item in blocks[block]))
    for members in _natural_loops(successors)
  ]
  best = max(
    loops,
    key=lambda loop: (loop.matrix_count, -loop.instructions),
    default=None,
  )
  return best if best and best.matrix_count else None


def basic_blocks(
  items: Sequence[MachineInstruction | str],
) -> tuple[list[list[MachineInstruction]], list[set[int]]]:
  """Returns the basic blocks, and the successors of each block."""
  blocks: list[list[MachineInstruction]] = [[]]
  places: dict[str, int] = {}
  for item in items:
    ended = blocks[-1] and (
      blocks[-1][-1].target is not None or not blocks[-1][-1].falls_through
    )
    if ended or (isinstance(item, str) and blocks[-1]):
      blocks.append([])
    if isinstance(item, str):
      places[item] = len(blocks) - 1
    else:
      blocks[-1].append(item)
  successors: list[set[int]] = []
  for number, block in enumerate(blocks):
    following = set()
    if (not block or block[-1].falls_through) and number + 1 < len(blocks):
      following.add(number + 1)
    if block and block[-1].target in places:
      following.add(places[block[-1].target])
    successors.append(following)
  return blocks, successors


def _natural_loops(successors: Sequence[set[int]]) -> list[set[int]]:
  """Returns the blocks of each loop; loops with the same header are merged."""
  predecessors: list[set[int]] = [set() for _ in successors]
  for block, following in enumerate(successors):
    for other in following:
      predecessors[other].add(block)
  reached = _reached(successors, 0)
  loops: dict[int, set[int]] = {}
  for header in sorted(reached):
    # A header dominates the blocks that cannot be reached without it.
    for block in reached - _reached(successors, 0, without=header):
      if header in successors[block]:
        members = _reached(predecessors, block, without=header) & reached
        loops.setdefault(header, {header}).update(members)
  return list(loops.values())


def _reached(
  edges: Sequence[set[int]], start: int, without: int | None = None
) -> set[int]:
  """Returns the blocks on paths from `start` that do not pass a block."""
  found: set[int] = set()
  pending = {start} - {without}
  while pending:
    block = pending.pop()
    found.add(block)
    pending |= edges[block] - found - {without}
  return found
