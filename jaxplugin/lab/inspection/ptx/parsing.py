# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses the PTX of one kernel (PTX ISA, chapters 4 and 5, "Syntax").

The parser supports the PTX that Triton emits: one entry with registers, labels,
and scopes in braces. Registers of a scope get unique names.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from jaxplugin.lab.inspection.ptx import faults

# Bits of a register of each type. A predicate has one bit.
REGISTER_BITS: Final = {
  "pred": 1,
  **{f"{kind}8": 8 for kind in "bus"},
  **{f"{kind}16": 16 for kind in ("b", "u", "s", "f")},
  **{f"{kind}32": 32 for kind in ("b", "u", "s", "f")},
  **{f"{kind}64": 64 for kind in ("b", "u", "s", "f")},
}

_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY: Final = re.compile(
  r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.DOTALL
)
_PARAMETER: Final = re.compile(r"\.param\s+\.\w+\b[^,]*?([\w$]+)\s*(?:,|$)")
_SHARED: Final = re.compile(
  r"\.extern\s+\.shared\b[^;]*?([\w$]+)\s*\[\s*\]\s*;"
)
_STATEMENT: Final = re.compile(
  r"\s*([{}]|\.loc\b[^\n]*|(?P<label>[\w$%]+):(?!:)|(?P<text>[^;]*);)"
)
_COMMA: Final = re.compile(r",(?![^{\[]*[}\]])")  # outside of braces
_GUARD: Final = re.compile(r"@(!?)\s*([\w$%]+)\s+")
_REG: Final = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_FAMILY: Final = re.compile(r"([\w$%]+)<\d+>")
_ADDRESS: Final = re.compile(r"([\w$%]+)\s*(?:\+\s*(-?\w+))?")
_INTEGER: Final = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?")
_FLOAT_BITS: Final = re.compile(r"0[fFdD]([0-9a-fA-F]{8}(?:[0-9a-fA-F]{8})?)")
_NUMBERED: Final = re.compile(r"\d+$")


def bits_of(type: str) -> int:
  """Returns the number of bits of a register with a PTX type."""
  if type not in REGISTER_BITS:
    raise faults.NotModelled(f"an instruction of type {type}")
  return REGISTER_BITS[type]


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
  """A register; `name` is unique in the kernel."""

  name: str
  bits: int


@dataclasses.dataclass(frozen=True, slots=True)
class Immediate:
  """A constant: an integer, or the bits of a float."""

  value: int


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
  """A special register ("%tid.x"), label, parameter, or shared memory."""

  name: str


DISCARD: Final = Symbol("_")  # a result that is not stored


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
  """`[base + offset]`."""

  base: Register | Symbol | Immediate
  offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class OperandGroup:
  """A vector `{a, b}`, or two results `p|q`."""

  items: tuple[Operand, ...]


Operand = Register | Immediate | Symbol | Address | OperandGroup


def items_of(operand: Operand) -> tuple[Operand, ...]:
  """Returns the items of a vector or of two results; else the operand."""
  return operand.items if isinstance(operand, OperandGroup) else (operand,)


def constant(operand: Operand) -> int:
  """Returns the value of a constant."""
  if not isinstance(operand, Immediate):
    raise faults.NotModelled(f"{operand}, which is not a constant")
  return operand.value


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
  """One instruction."""

  parts: tuple[str, ...]  # the name, split at the dots: ("add", "s32")
  operands: tuple[Operand, ...]
  guard: Register | None  # the predicate that enables the instruction
  negated: bool  # whether the instruction executes if the guard is false
  line: int  # from 1
  text: str  # in one line

  @property
  def name(self) -> str:
    return ".".join(self.parts)

  @property
  def type(self) -> str:
    """The last part of the name, usually a type: "s32", "bf16x2"."""
    return self.parts[-1]

  @property
  def bits(self) -> int:
    """The bits of a register of the instruction's type."""
    return bits_of(self.type)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PtxKernel:
  """A parsed kernel."""

  name: str
  parameters: tuple[str, ...]  # their names
  threads: int  # of a block
  instructions: tuple[Instruction, ...]
  labels: dict[str, int]  # the index of the instruction after each label
  shared: str | None  # the name of the block's shared memory


def parse(ptx: str) -> PtxKernel:
  """Parses the kernel of a PTX text.

  Raises:
    faults.NotModelled: If the text does not have exactly one entry, with a
      `.reqntid` of one dimension, or has an unknown statement.
  """
  # Newlines in comments are kept, so that line numbers do not change.
  text = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), ptx)
  entries = list(_ENTRY.finditer(text))
  if len(entries) != 1:
    raise faults.NotModelled(f"PTX with {len(entries)} entries; one is read")
  (entry,) = entries
  threads = re.search(r"\.reqntid\s+(\d+)\s*(,[^.]*)?", entry[3])
  if threads is None or (threads[2] and set(threads[2]) - set(", 1\n")):
    raise faults.NotModelled(
      f"{entry[1]}: needs .reqntid of one dimension, has {entry[3].strip()!r}"
    )
  shared = _SHARED.search(text)
  reader = _Reader()
  reader.read(text, entry.end())
  return PtxKernel(
    name=entry[1],
    parameters=tuple(_PARAMETER.findall(entry[2])),
    threads=int(threads[1]),
    instructions=tuple(reader.instructions),
    labels=reader.labels,
    shared=None if shared is None else shared[1],
  )


class _Reader:
  """Reads statements up to the brace that ends the entry's body."""

  def __init__(self) -> None:
    self.instructions: list[Instruction] = []
    self.labels: dict[str, int] = {}
    self._families: dict[str, int] = {}
    # Registers of the enclosing scopes, and suffixes of their labels.
    self._scopes: list[dict[str, Register]] = [{}]
    self._suffixes = [""]
    self._scope_count = 0
    self._branches: list[tuple[int, tuple[str, ...]]] = []

  def read(self, text: str, place: int) -> None:
    line = text.count("\n", 0, place) + 1
    while self._scopes:
      found = _STATEMENT.match(text, place)
      if found is None:
        raise faults.NotModelled("PTX ends within the kernel's body")
      line += text.count("\n", place, found.start(1))
      if found[1] == "{":
        self._scope_count += 1
        self._scopes.append({})
        self._suffixes.append(f"@{self._scope_count}")
      elif found[1] == "}":
        self._scopes.pop()
        self._suffixes.pop()
      elif found["label"]:
        name = f"{found['label']}{self._suffixes[-1]}"
        self.labels[name] = len(self.instructions)
      elif found["text"]:
        self._statement(" ".join(found["text"].split()), line)
      line += found[1].count("\n")
      place = found.end()
    self._resolve()

  def _resolve(self) -> None:
    """Resolves the labels of branches, from the innermost scope outwards."""
    for place, suffixes in self._branches:
      branch = self.instructions[place]
      (target,) = branch.operands
      assert isinstance(target, Symbol), branch.text
      names = [f"{target.name}{suffix}" for suffix in reversed(suffixes)]
      found = next((name for name in names if name in self.labels), None)
      if found is None:
        raise faults.NotModelled(f"line {branch.line}: {branch.text}: no label")
      self.instructions[place] = dataclasses.replace(
        branch, operands=(Symbol(found),)
      )

  def _statement(self, text: str, line: int) -> None:
    if text.startswith(".reg"):
      self._declare(text)
    elif text.startswith(".") and not text.startswith(".pragma"):
      raise faults.NotModelled(f"line {line}: {text}")
    elif text and text[0] != ".":
      self._instruction(text, line)

  def _declare(self, text: str) -> None:
    found = _REG.match(text)
    if found is None or found[1] not in REGISTER_BITS:
      raise faults.NotModelled(f"registers: {text}")
    bits = REGISTER_BITS[found[1]]
    for name in (name.strip() for name in found[2].split(",")):
      family = _FAMILY.fullmatch(name)
      if family is not None:
        self._families[family[1]] = bits
      else:
        unique = f"{name}@{self._scope_count}"
        self._scopes[-1][name] = Register(unique, bits)

  def _instruction(self, text: str, line: int) -> None:
    rest, guard, negated = text, None, False
    if found := _GUARD.match(rest):
      register = self._operand(found[2])
      assert isinstance(register, Register), text
      guard, negated = register, found[1] == "!"
      rest = rest[found.end() :]
    name, _, operands = rest.partition(" ")
    if name.partition(".")[0] == "bra":
      suffixes = tuple(self._suffixes)
      self._branches.append((len(self.instructions), suffixes))
    self.instructions.append(
      Instruction(
        # "kind::mxf4" is one part.
        parts=tuple(name.split(".")),
        operands=tuple(self._operand(item) for item in _split(operands)),
        guard=guard,
        negated=negated,
        line=line,
        text=text,
      )
    )

  def _operand(self, text: str) -> Operand:
    if text[0] == "{":
      items = _split(text[1:-1])
      return OperandGroup(tuple(self._operand(item) for item in items))
    if "|" in text:
      return OperandGroup(
        tuple(self._operand(item) for item in text.split("|"))
      )
    if text[0] == "[":
      return self._address(text)
    if found := _FLOAT_BITS.fullmatch(text):
      return Immediate(int(found[1], 16))
    if _INTEGER.fullmatch(text):
      return Immediate(int(text.rstrip("U"), 0))
    for scope in reversed(self._scopes):
      if text in scope:
        return scope[text]
    family = _NUMBERED.sub("", text)
    if family in self._families and family != text:
      return Register(text, self._families[family])
    if re.fullmatch(r"%?[\w$.]+", text):
      return Symbol(text)
    raise faults.NotModelled(f"operand {text!r}")

  def _address(self, text: str) -> Address:
    found = _ADDRESS.fullmatch(text[1:-1].strip())
    if found is None:
      raise faults.NotModelled(f"address {text}")
    base = self._operand(found[1])
    assert isinstance(base, (Register, Symbol, Immediate)), text
    return Address(base, int(found[2] or "0", 0))


def _split(text: str) -> list[str]:
  """Splits operands at commas outside of braces and brackets."""
  items = (item.strip() for item in _COMMA.split(text))
  return [item for item in items if item]
